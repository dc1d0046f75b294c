"""Quantise one GPU's tensors to any MX element format and block size, along rows or columns, and back.

Protocol      Each program reads its tile once, quantises it in registers, and writes elements and scale bytes.
Layout        x [R, H], row-major. Rowwise: blocks of BLOCK columns; a row is a whole number of blocks, so the kernels
              see one list of R * H / BLOCK blocks, with one scale byte each. Columnwise: blocks of BLOCK rows, R a
              multiple of BLOCK, scale [R / BLOCK, H]. One byte per element, in the shape of x. Packed, two neighbours
              along the block share a byte, the even one in the low half: [R, H / 2] rowwise, [R / 2, H] columnwise.
              mxfp8.py has MXFP8 in blocks of 32 with groups of rows.
Memory order  Plain loads and stores.
Progress      No program waits.
Replay        Nothing is kept between calls; every byte of the outputs is written once.
"""

import triton.language as tl

from ..device import codes, mx_codes
from ..device.mx_formats import dequantize_codes, quantize_codes
from ..spec import Variant, ep_kernel

_NIBBLES = ("bf16", codes.MODE_RCEIL, mx_codes.FORMAT_E2M1, True, 32)
_WIDE = ("fp32", codes.MODE_FLOOR, mx_codes.FORMAT_E2M3, False, 32)
_LONG = ("fp16", codes.MODE_EVEN, mx_codes.FORMAT_E3M2, False, 128)
_SHORT = ("bf16", codes.MODE_CEIL, mx_codes.FORMAT_E5M2, False, 16)


def _variant(choice, rows, back):
    """Variant for a dtype, mode, format, packing and block size; `back` dequantises, which needs no mode."""
    token, mode, fmt, packed, block = choice
    tile = {"BLOCKS": mx_codes.row_blocks(block)} if rows else mx_codes.column_tile(block)
    how = {} if back else {"MODE": mode}
    constexprs = {**how, "FORMAT": fmt, "PACKED": packed, "BLOCK": block, **tile}
    return Variant(constexprs, {"TOKEN": token}, aligned=() if rows else ("hidden",))


@ep_kernel(
    x_ptr="*{TOKEN}",
    elements_ptr="*u8",
    scale_ptr="*u8",
    variants=tuple(_variant(choice, rows=True, back=False) for choice in (_NIBBLES, _WIDE, _LONG, _SHORT)),
)
def mx_quantize_rows_kernel(
    x_ptr,  # [num_blocks, BLOCK] bf16, fp16 or fp32
    elements_ptr,  # out [num_blocks, BLOCK / (1 + PACKED)] uint8
    scale_ptr,  # out [num_blocks] uint8
    num_blocks,
    MODE: tl.constexpr,
    FORMAT: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    alive = block < num_blocks
    # int64: 2**31 elements are 300k rows of H = 7168.
    first = block.to(tl.int64)[:, None]
    x = tl.load(x_ptr + first * BLOCK + tl.arange(0, BLOCK)[None, :], mask=alive[:, None], other=0.0).to(tl.float32)
    codes, scale = quantize_codes(x, MODE, FORMAT, AXIS=1)
    if PACKED:
        WIDTH: tl.constexpr = BLOCK // 2
        pairs = tl.reshape(codes.to(tl.int32), (BLOCKS, WIDTH, 2))
        # The halves share no bits, so their sum packs both.
        codes = tl.sum(pairs << (4 * tl.arange(0, 2))[None, None, :], axis=2).to(tl.uint8)
        tl.store(elements_ptr + first * WIDTH + tl.arange(0, WIDTH)[None, :], codes, mask=alive[:, None])
    else:
        tl.store(elements_ptr + first * BLOCK + tl.arange(0, BLOCK)[None, :], codes, mask=alive[:, None])
    tl.store(scale_ptr + block, scale, mask=alive)


@ep_kernel(
    elements_ptr="*u8",
    scale_ptr="*u8",
    out_ptr="*{TOKEN}",
    variants=tuple(_variant(choice, rows=True, back=True) for choice in (_NIBBLES, _WIDE)),
)
def mx_dequantize_rows_kernel(
    elements_ptr,  # [num_blocks, BLOCK / (1 + PACKED)] uint8
    scale_ptr,  # [num_blocks] uint8
    out_ptr,  # out [num_blocks, BLOCK] bf16, fp16 or fp32
    num_blocks,
    FORMAT: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    alive = block < num_blocks
    first = block.to(tl.int64)[:, None]
    scale = tl.load(scale_ptr + block, mask=alive, other=0)
    if PACKED:
        WIDTH: tl.constexpr = BLOCK // 2
        pairs = tl.load(elements_ptr + first * WIDTH + tl.arange(0, WIDTH)[None, :], mask=alive[:, None], other=0)
        halves = (pairs.to(tl.int32)[:, :, None] >> (4 * tl.arange(0, 2))[None, None, :]) & 0xF
        codes = tl.reshape(halves, (BLOCKS, BLOCK))
    else:
        codes = tl.load(elements_ptr + first * BLOCK + tl.arange(0, BLOCK)[None, :], mask=alive[:, None], other=0)
    values = dequantize_codes(codes, scale, FORMAT, AXIS=1).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + first * BLOCK + tl.arange(0, BLOCK)[None, :], values, mask=alive[:, None])


@ep_kernel(
    x_ptr="*{TOKEN}",
    elements_ptr="*u8",
    scale_ptr="*u8",
    specialised=("hidden",),
    variants=tuple(_variant(choice, rows=False, back=False) for choice in (_NIBBLES, _LONG)),
)
def mx_quantize_columns_kernel(
    x_ptr,  # [S * BLOCK, H] bf16, fp16 or fp32
    elements_ptr,  # out [S * BLOCK / (1 + PACKED), H] uint8
    scale_ptr,  # out [S, H] uint8; S * ceil(H / (BLOCK_H * STEPS)) programs
    hidden,
    MODE: tl.constexpr,
    FORMAT: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STEPS: tl.constexpr,
):
    strips = tl.cdiv(hidden, BLOCK_H * STEPS)
    block = (tl.program_id(0) // strips).to(tl.int64)
    columns = tl.program_id(0) % strips * (BLOCK_H * STEPS) + tl.arange(0, BLOCK_H)
    row = tl.arange(0, BLOCK)[:, None]
    for _ in range(STEPS):
        in_row = columns < hidden
        offs = (block * BLOCK + row) * hidden + columns[None, :]
        x = tl.load(x_ptr + offs, mask=in_row[None, :], other=0.0).to(tl.float32)
        codes, scale = quantize_codes(x, MODE, FORMAT, AXIS=0)
        if PACKED:
            HEIGHT: tl.constexpr = BLOCK // 2
            pairs = tl.reshape(codes.to(tl.int32), (HEIGHT, 2, BLOCK_H))
            packed = tl.sum(pairs << (4 * tl.arange(0, 2))[None, :, None], axis=1).to(tl.uint8)
            offs_packed = (block * HEIGHT + tl.arange(0, HEIGHT)[:, None]) * hidden + columns[None, :]
            tl.store(elements_ptr + offs_packed, packed, mask=in_row[None, :])
        else:
            tl.store(elements_ptr + offs, codes, mask=in_row[None, :])
        tl.store(scale_ptr + block * hidden + columns, scale, mask=in_row)
        columns += BLOCK_H


@ep_kernel(
    elements_ptr="*u8",
    scale_ptr="*u8",
    out_ptr="*{TOKEN}",
    specialised=("hidden",),
    variants=tuple(_variant(choice, rows=False, back=True) for choice in (_NIBBLES, _WIDE)),
)
def mx_dequantize_columns_kernel(
    elements_ptr,  # [S * BLOCK / (1 + PACKED), H] uint8
    scale_ptr,  # [S, H] uint8; S * ceil(H / (BLOCK_H * STEPS)) programs
    out_ptr,  # out [S * BLOCK, H] bf16, fp16 or fp32
    hidden,
    FORMAT: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STEPS: tl.constexpr,
):
    strips = tl.cdiv(hidden, BLOCK_H * STEPS)
    block = (tl.program_id(0) // strips).to(tl.int64)
    columns = tl.program_id(0) % strips * (BLOCK_H * STEPS) + tl.arange(0, BLOCK_H)
    row = tl.arange(0, BLOCK)[:, None]
    for _ in range(STEPS):
        in_row = columns < hidden
        offs = (block * BLOCK + row) * hidden + columns[None, :]
        scale = tl.load(scale_ptr + block * hidden + columns, mask=in_row, other=0)
        if PACKED:
            HEIGHT: tl.constexpr = BLOCK // 2
            offs_packed = (block * HEIGHT + tl.arange(0, HEIGHT)[:, None]) * hidden + columns[None, :]
            pairs = tl.load(elements_ptr + offs_packed, mask=in_row[None, :], other=0).to(tl.int32)
            codes = tl.reshape((pairs[:, None, :] >> (4 * tl.arange(0, 2))[None, :, None]) & 0xF, (BLOCK, BLOCK_H))
        else:
            codes = tl.load(elements_ptr + offs, mask=in_row[None, :], other=0)
        values = dequantize_codes(codes, scale, FORMAT, AXIS=0)
        tl.store(out_ptr + offs, values.to(out_ptr.dtype.element_ty), mask=in_row[None, :])
        columns += BLOCK_H
