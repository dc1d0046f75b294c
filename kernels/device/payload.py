"""Rows on the wire: opaque words, or quantised elements with their scales.

A *tile* is [ROWS, BLOCK_H]. It holds several rows so that a program has several independent accesses in flight, and
because the interpreter pays per operation, not per element.

The *payload* of a row is opaque words, or the row quantised to MXFP8: `hidden` e4m3 bytes, then one e8m0 scale byte
per 32 elements, padded to 128 bytes (`ROW_UNIT`). A low-latency dispatch quantises rows itself (QUANTISE). Any other
has them quantised and packed in this form before (`pack_rows`), and sends opaque words; rows that the caller has
quantised come with their scales apart (MX). A row of 96 elements is 192 bytes in bfloat16; quantised it is 96 bytes of
data and 3 of scales, padded to 128: in words of 4 bytes, 24 words of data and 32 from one row to the next.

A row of e4m3 with one float32 scale per 128 elements takes as many bytes as one of MXFP8 and travels in the same way. A
low-latency dispatch quantises to that form, too (QUANTISE_CHANNELS).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import codes
from .channel_scales import quantize_channel_tile
from .mxfp8 import MODE_RCEIL, quantize_tile

WORDS = tl.constexpr(codes.WORDS)
QUANTISE = tl.constexpr(codes.QUANTISE)
MX = tl.constexpr(codes.MX)
QUANTISE_CHANNELS = tl.constexpr(codes.QUANTISE_CHANNELS)
ROW_UNIT = tl.constexpr(codes.ROW_UNIT)
_BLOCK = tl.constexpr(32)


class Tile(NamedTuple):
    """Block of rows that a program moves or sums at once.

    Attributes:
        ROWS: rows.
        BLOCK_H: words, or elements, of each row.
    """

    ROWS: tl.constexpr
    BLOCK_H: tl.constexpr


class RowTile(NamedTuple):
    """Like `Tile`, with the number of tiles per row known at compile time.

    Attributes:
        ROWS, BLOCK_H: as in `Tile`.
        TILES: tiles of a row.
    """

    ROWS: tl.constexpr
    BLOCK_H: tl.constexpr
    TILES: tl.constexpr


class CopyTile(NamedTuple):
    """Like `RowTile`, for a loop that loads rows STAGES - 1 iterations ahead (`SumTile`), or copies them in bulk.

    Attributes:
        ROWS, BLOCK_H, TILES: as in `RowTile`.
        STAGES: 1 loads nothing ahead.
        SLOTS, ROW_BYTES, SCALE_BYTES: as in Ring (bulk.py).
    """

    ROWS: tl.constexpr
    BLOCK_H: tl.constexpr
    TILES: tl.constexpr
    STAGES: tl.constexpr
    SLOTS: tl.constexpr
    ROW_BYTES: tl.constexpr
    SCALE_BYTES: tl.constexpr


class SumTile(NamedTuple):
    """Tile of sums, and how its loop loads the rows that it sums.

    The compiler turns these loads into asynchronous copies to shared memory, STAGES - 1 tiles ahead of the sums, so
    that more rows are on their way than registers could hold.

    Attributes:
        ROWS, BLOCK_H, TILES: as in `RowTile`.
        AT_ONCE: rows of one sum that are copied ahead; rows past them are loaded when the sum gets to them.
        STAGES: see above; 1 copies nothing ahead.
    """

    ROWS: tl.constexpr
    BLOCK_H: tl.constexpr
    TILES: tl.constexpr
    AT_ONCE: tl.constexpr
    STAGES: tl.constexpr


class Choices(NamedTuple):
    """Number of experts per token.

    Attributes:
        TOPK: K.
        KP: K rounded up to a power of two.
    """

    TOPK: tl.constexpr
    KP: tl.constexpr


class Weights(NamedTuple):
    """Routing weights of entries [T, K] or of rows [R].

    Attributes:
        weights_ptr: float32; read if HAS_WEIGHTS.
        HAS_WEIGHTS: whether the call has weights.
    """

    weights_ptr: Any
    HAS_WEIGHTS: tl.constexpr


class Source(NamedTuple):
    """Rows of this rank that a kernel sends.

    Attributes:
        x_ptr: [T, row_words] words; with QUANTISE elements.
        scale_ptr: [T, row bytes / 32] uint8; read if PAYLOAD is MX.
        row_words: words of a row.
        PAYLOAD: WORDS, QUANTISE or MX.
    """

    x_ptr: Any
    scale_ptr: Any
    row_words: Any
    PAYLOAD: tl.constexpr


class Packing(NamedTuple):
    """Rows of this rank that are quantised before they are sent.

    Attributes:
        unpacked_ptr: [num_blocks, 32] bf16, fp16 or fp32, row after row.
        packed_ptr: out: rows as they travel, e4m3 elements, then scales; padding is not written.
        num_blocks: blocks of all rows.
        row_blocks: blocks of a row.
        first_packing: the first program that quantises; those before it have other work.
        PACKED_BLOCKS: blocks that a program quantises at a time; 0: rows are sent as they are.
    """

    unpacked_ptr: Any
    packed_ptr: Any
    num_blocks: Any
    row_blocks: Any
    first_packing: Any
    PACKED_BLOCKS: tl.constexpr


class Wire(NamedTuple):
    """Sizes of a row on the wire, int64.

    Attributes:
        stride: words from one row to the next.
        data_bytes: bytes of its data; scales, if any, begin right after them.
        row_bytes: bytes of data, scales and padding.
    """

    stride: Any
    data_bytes: Any
    row_bytes: Any


class Output(NamedTuple):
    """Rows of this rank that a kernel writes.

    Attributes:
        recv_x_ptr: [R, row_words] words.
        recv_scale_ptr: [R, row bytes / 32] uint8, or one float32 per row; written if rows have scales.
        recv_weights_ptr: [R] float32, or [R, K]; written if the call has weights.
        row_words: words of a row.
    """

    recv_x_ptr: Any
    recv_scale_ptr: Any
    recv_weights_ptr: Any
    row_words: Any


@triton.jit
def fill_rest(ptr, first, end, value, BYTES: tl.constexpr):
    """Store `value` to the elements from `first` to `end`; each program of the grid stores a share, BYTES at a time.

    Steps are short: neither end need be a multiple of 16 bytes, so a thread stores one element at a time.
    """
    STEP: tl.constexpr = BYTES * 8 // ptr.dtype.element_ty.primitive_bitwidth
    offs = tl.arange(0, STEP)
    for start in range(first + tl.program_id(0) * STEP, end, tl.num_programs(0) * STEP):
        values = tl.full([STEP], value, ptr.dtype.element_ty)
        tl.store(ptr + start + offs, values, mask=start + offs < end)


@triton.jit
def wire_of(row_words, WORD: tl.constexpr, PAYLOAD: tl.constexpr):
    """Sizes of a row on the wire.

    row_words: words of the data; of rows to quantise elements, each of which becomes one byte.
    """
    QUANTISED: tl.constexpr = PAYLOAD == QUANTISE or PAYLOAD == QUANTISE_CHANNELS
    WORD_BYTES: tl.constexpr = 1 if QUANTISED else WORD.primitive_bitwidth // 8
    data_bytes = tl.cast(row_words, tl.int64) * WORD_BYTES
    if PAYLOAD == WORDS:
        return Wire(tl.cast(row_words, tl.int64), data_bytes, data_bytes)
    else:
        units = (data_bytes + data_bytes // _BLOCK + ROW_UNIT - 1) // ROW_UNIT
        return Wire(units * (ROW_UNIT // WORD_BYTES), data_bytes, units * ROW_UNIT)


@triton.jit
def staged_rows(bytes_ptr, row, wire, WORD: tl.constexpr):
    """Pointers to the data and to the scales of rows [block] on the wire; bytes_ptr points to row 0."""
    row = row.to(tl.int64)
    words_ptr = tl.multiple_of(bytes_ptr.to(tl.pointer_type(WORD)), 16)
    return words_ptr + row * wire.stride, bytes_ptr + row * wire.row_bytes + wire.data_bytes


@triton.jit
def load_payload(
    row_ptrs,  # [ROWS] pointers to rows of words, or of elements to quantise
    scale_ptrs,  # [ROWS] pointers to rows of uint8 scales; read with MX
    alive,  # [ROWS]
    h,  # first word of the tile
    row_words,
    PAYLOAD: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Tile [ROWS, BLOCK_H] of wire data and its scales [ROWS, BLOCK_H * word bytes / 32]; for WORDS the data twice."""
    data = load_row_tile(row_ptrs, alive, h, row_words, BLOCK_H)
    return wire_tile(data, scale_ptrs, alive, h, row_words, PAYLOAD)


@triton.jit
def load_row_tile(row_ptrs, alive, h, row_words, BLOCK_H: tl.constexpr):
    """Words from `h` on of some rows, [ROWS, BLOCK_H]; zero outside the rows.

    A row is read once, so it leaves L2 first: rows that have arrived and not been read stay there longer.
    """
    offs = h + tl.arange(0, BLOCK_H)
    mask = alive[:, None] & (offs < row_words)[None, :]
    return tl.load(row_ptrs[:, None] + offs[None, :], mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def wire_tile(data, scale_ptrs, alive, h, row_words, PAYLOAD: tl.constexpr):
    """The result of `load_payload`, from words already loaded by `load_row_tile`."""
    BLOCK_H: tl.constexpr = data.shape[1]
    if PAYLOAD == WORDS:
        return data, data
    elif PAYLOAD == QUANTISE:
        blocks = tl.reshape(data.to(tl.float32), [data.shape[0], BLOCK_H // _BLOCK, _BLOCK])
        codes, scales = quantize_tile(blocks, MODE_RCEIL, False)
        return tl.reshape(codes, [data.shape[0], BLOCK_H]).to(tl.uint8, bitcast=True), scales
    elif PAYLOAD == QUANTISE_CHANNELS:
        elements, scales = quantize_channel_tile(data.to(tl.float32))
        return elements.to(tl.uint8, bitcast=True), scales
    else:
        WORD_BYTES: tl.constexpr = data.dtype.primitive_bitwidth // 8
        at = h * WORD_BYTES // _BLOCK + tl.arange(0, BLOCK_H * WORD_BYTES // _BLOCK)
        mask = alive[:, None] & (at < row_words * WORD_BYTES // _BLOCK)[None, :]
        return data, tl.load(scale_ptrs[:, None] + at[None, :], mask=mask, other=0)


@triton.jit
def pack_rows(
    packing,  # Packing
):
    """Quantise this program's share of the rows to MXFP8, and pack them as they travel."""
    BLOCKS: tl.constexpr = packing.PACKED_BLOCKS
    row_blocks = packing.row_blocks
    row_bytes = wire_of(row_blocks * _BLOCK, tl.uint8, MX).row_bytes
    column = tl.arange(0, _BLOCK)[None, :]
    first = tl.program_id(0) - packing.first_packing
    # One iteration, unless a budget of multiprocessors limits the grid.
    for number in range(first, tl.cdiv(packing.num_blocks, BLOCKS), tl.num_programs(0) - packing.first_packing):
        block = number * BLOCKS + tl.arange(0, BLOCKS)
        alive = block < packing.num_blocks
        # int64: 2**31 elements are 300k rows of H = 7168.
        source = packing.unpacked_ptr + block.to(tl.int64)[:, None] * _BLOCK + column
        x = tl.load(source, mask=alive[:, None], other=0.0).to(tl.float32)
        elements, scale = quantize_tile(x, MODE_RCEIL, False)
        row = block // row_blocks
        place = block - row * row_blocks
        start = row.to(tl.int64) * row_bytes
        dest = packing.packed_ptr + (start + place * _BLOCK)[:, None] + column
        tl.store(dest, elements.to(tl.uint8, bitcast=True), mask=alive[:, None])
        tl.store(packing.packed_ptr + start + row_blocks * _BLOCK + place, scale, mask=alive)


@triton.jit
def store_landed(ptrs, words, mask):
    """Store words of output rows, which are more than L2 holds: they leave it before rows that have yet to be read."""
    tl.store(ptrs, words, mask=mask, cache_modifier=".cs")


@triton.jit
def load_staged_tile(
    row_ptrs,  # [ROWS] pointers to rows on the wire
    here,  # [ROWS]
    h,  # first word of the tile
    row_words,  # words of the data
    HAS_SCALES: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Words [ROWS, BLOCK_H] from `h` on, and words of their scales [ROWS, BLOCK_H / 32]; without scales the data twice.

    Words divide the rows of scales.
    """
    data = load_row_tile(row_ptrs, here, h, row_words, BLOCK_H)
    if not HAS_SCALES:
        return data, data
    else:
        at = h // _BLOCK + tl.arange(0, BLOCK_H // _BLOCK)[None, :]
        mask = here[:, None] & (at < row_words // _BLOCK)
        return data, tl.load(row_ptrs[:, None] + row_words + at, mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def store_staged_tile(
    out,  # Output
    row,  # [ROWS] output rows, -1 = none
    tile,  # from `load_staged_tile`
    h,
    HAS_SCALES: tl.constexpr,
):
    """Store a tile of rows to recv_x, and its scales, if it has any, to recv_scale."""
    words, scales = tile
    here = (row >= 0)[:, None]
    row = row.to(tl.int64)[:, None]
    offs = h + tl.arange(0, words.shape[1])[None, :]
    store_landed(out.recv_x_ptr + row * out.row_words + offs, words, here & (offs < out.row_words))
    if HAS_SCALES:
        num_words = out.row_words // _BLOCK
        at = h // _BLOCK + tl.arange(0, scales.shape[1])[None, :]
        scale_ptr = out.recv_scale_ptr.to(tl.pointer_type(words.dtype))
        tl.store(scale_ptr + row * num_words + at, scales, mask=here & (at < num_words), cache_modifier=".cs")


@triton.jit
def store_scales(scale_ptrs, mask, scales, h, row_words, WORD_BYTES: tl.constexpr):
    """Store the scales [ROWS, n] of the tile that starts at word `h`; `scale_ptrs` [ROWS] point to rows of scales."""
    at = h * WORD_BYTES // _BLOCK + tl.arange(0, scales.shape[1])
    mask = mask[:, None] & (at < row_words * WORD_BYTES // _BLOCK)[None, :]
    tl.store(scale_ptrs[:, None] + at[None, :], scales, mask=mask)
