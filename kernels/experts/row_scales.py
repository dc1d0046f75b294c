"""MXFP8 with one scale per row, so that a product needs no scale inside its sum; and back to values.

Protocol      A row's scale is the largest scale of its blocks of 32 columns, as RCEIL chooses them. Elements move to
              the row's scale: e4m3 values times 2^(own scale - row's scale), rounded to nearest even. An element keeps
              its value unless it becomes subnormal. A program takes ROWS rows in steps, first to find the largest
              scale, then to write; the second reads hit L2. WHOLE: a tile holds whole rows, which are read once.
              rebase_rows starts from MXFP8, quantize_to_rows from values; it equals quantising to MXFP8, then
              rebase_rows.
Layout        x [R, K] bf16 or fp32, elements [R, K] e4m3, all row-major; MX scales [R, K/32] uint8; row scales [R]
              float32, powers of two, NaN where a block's scale byte is 255. HAS_OFFSETS: the rows in use end at the
              last of num_segments + 1 offsets; other rows are neither read nor written.
Memory order  Plain loads and stores; the kernels follow each other on one stream.
Progress      No program waits.
Replay        Nothing is kept between calls.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.mxfp8 import BLOCK, FORMAT_E4M3, MODE_RCEIL, block_amax, block_scale, quantize_tile, scale_value
from ..spec import Variant, ep_kernel


@triton.jit
def rebased(elements, scale, largest):
    """e4m3 `elements` of blocks with int32 `scale` bytes, moved to the `largest` scale byte of their row.

    All three shapes broadcast to the shape of the elements.
    """
    # An element whose scale is more than 2^126 below the largest rounds to zero anyway.
    exponent = tl.maximum(127 + scale - largest, 0)
    moved = elements.to(tl.float32) * (exponent << 23).to(tl.float32, bitcast=True)
    return moved.to(tl.float8e4nv)


class RowsInUse(NamedTuple):
    """Rows that are read.

    Attributes:
        offs_ptr: [num_segments + 1] int32, offsets of segments of rows; read if HAS_OFFSETS.
        num_rows: R, including rows not in use.
        num_segments: segments of `offs_ptr`.
        HAS_OFFSETS: else all rows are in use.
    """

    offs_ptr: Any
    num_rows: Any
    num_segments: Any
    HAS_OFFSETS: tl.constexpr


@triton.jit
def _rows_in_use(given):
    if given.HAS_OFFSETS:
        return tl.minimum(tl.load(given.offs_ptr + given.num_segments), given.num_rows)
    else:
        return given.num_rows


@ep_kernel(
    elements_ptr="*fp8e4nv",
    scale_ptr="*u8",
    offs_ptr="*{OFFS}",
    out_ptr="*fp8e4nv",
    row_scale_ptr="*fp32",
    specialised=("k",),
)
def rebase_rows_kernel(
    elements_ptr,  # [R, K] e4m3
    scale_ptr,  # [R, K/32] uint8
    given: RowsInUse,
    out_ptr,  # out [R, K] e4m3
    row_scale_ptr,  # out [R] float32
    k,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    in_use = _rows_in_use(given)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_rows = row < in_use
    blocks = k // BLOCK
    scale_row = scale_ptr + row.to(tl.int64)[:, None] * blocks
    offs_b = tl.arange(0, BLOCKS)[None, :]
    at = row.to(tl.int64)[:, None, None] * k + (offs_b * BLOCK)[:, :, None] + tl.arange(0, BLOCK)[None, None, :]
    if tl.program_id(0) * ROWS < in_use:
        largest = tl.zeros((ROWS,), dtype=tl.int32)
        scale = tl.zeros((ROWS, BLOCKS), dtype=tl.int32)
        elements = tl.zeros((ROWS, BLOCKS, BLOCK), elements_ptr.dtype.element_ty)
        for first in range(0, BLOCKS if WHOLE else blocks, BLOCKS):
            alive = in_rows[:, None] & (first + offs_b < blocks)
            if WHOLE:
                # Load before anything waits for the scales. Evict first, to keep `out` in L2 for the product.
                elements = tl.load(elements_ptr + at, mask=alive[:, :, None], other=0.0, eviction_policy="evict_first")
            scale = tl.load(scale_row + first + offs_b, mask=alive, other=0).to(tl.int32)
            largest = tl.maximum(largest, tl.max(scale, axis=1))
        tl.store(row_scale_ptr + row, scale_value(largest), mask=in_rows)
        for first in range(0, BLOCKS if WHOLE else blocks, BLOCKS):
            alive = in_rows[:, None] & (first + offs_b < blocks)
            if not WHOLE:
                scale = tl.load(scale_row + first + offs_b, mask=alive, other=0).to(tl.int32)
                elements = tl.load(elements_ptr + at + first * BLOCK, mask=alive[:, :, None], other=0.0)
            moved = rebased(elements, scale[:, :, None], largest[:, None, None])
            tl.store(out_ptr + at + first * BLOCK, moved, mask=alive[:, :, None])


@ep_kernel(
    x_ptr="*{X}",
    offs_ptr="*{OFFS}",
    out_ptr="*fp8e4nv",
    row_scale_ptr="*fp32",
    specialised=("k",),
    variants=(
        Variant({"HAS_OFFSETS": False, "WHOLE": False, "ROWS": 4, "BLOCKS": 32}, {"X": "fp32", "OFFS": "fp32"}, ("k",)),
    ),
)
def quantize_to_rows_kernel(
    x_ptr,  # [R, K] bf16 or fp32
    given: RowsInUse,
    out_ptr,  # out [R, K] e4m3
    row_scale_ptr,  # out [R] float32
    k,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    in_use = _rows_in_use(given)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_rows = row < in_use
    blocks = k // BLOCK
    offs_b = tl.arange(0, BLOCKS)[None, :]
    offs_k = (offs_b * BLOCK)[:, :, None] + tl.arange(0, BLOCK)[None, None, :]
    at = row.to(tl.int64)[:, None, None] * k + offs_k
    if tl.program_id(0) * ROWS < in_use:
        x = tl.zeros((ROWS, BLOCKS, BLOCK), tl.float32)
        amax = tl.zeros((ROWS, BLOCKS), dtype=tl.int32)
        for first in range(0, BLOCKS if WHOLE else blocks, BLOCKS):
            alive = in_rows[:, None] & (first + offs_b < blocks)
            x = tl.load(x_ptr + at + first * BLOCK, mask=alive[:, :, None], other=0.0).to(tl.float32)
            # Compare as integers: a NaN is above infinity.
            amax = tl.maximum(amax, block_amax(x, 2).to(tl.int32, bitcast=True))
        # RCEIL never gives a larger magnitude a smaller scale: the largest magnitude has the largest scale.
        largest = block_scale(tl.max(amax, axis=1).to(tl.float32, bitcast=True), MODE_RCEIL, FORMAT_E4M3)
        tl.store(row_scale_ptr + row, scale_value(largest), mask=in_rows)
        for first in range(0, BLOCKS if WHOLE else blocks, BLOCKS):
            alive = in_rows[:, None] & (first + offs_b < blocks)
            if not WHOLE:
                x = tl.load(x_ptr + at + first * BLOCK, mask=alive[:, :, None], other=0.0).to(tl.float32)
            elements, scale = quantize_tile(x, MODE_RCEIL, False)
            moved = rebased(elements, scale.to(tl.int32)[:, :, None], largest[:, None, None])
            tl.store(out_ptr + at + first * BLOCK, moved, mask=alive[:, :, None])


@ep_kernel(
    elements_ptr="*fp8e4nv",
    row_scale_ptr="*fp32",
    offs_ptr="*{OFFS}",
    out_ptr="*{OUT}",
    specialised=("k", "stride_em"),
)
def dequantize_rows_in_use_kernel(
    elements_ptr,  # [R, K] e4m3, or K columns of wider rows
    row_scale_ptr,  # [R] float32
    given: RowsInUse,
    out_ptr,  # out [R, K] bf16 or fp32
    k,
    stride_em,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DIRECT: tl.constexpr,
):
    in_use = _rows_in_use(given)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_rows = row < in_use
    offs_k = tl.arange(0, BLOCK_K)
    if DIRECT:  # a thread loads as many elements at a time as it stores, not as it could: none needs shared memory
        offs_k = tl.max_contiguous(offs_k, 8)
    offs_k = offs_k[None, :]
    if tl.program_id(0) * ROWS < in_use:
        scale = tl.load(row_scale_ptr + row, mask=in_rows, other=0.0)[:, None]
        for first in range(0, k, BLOCK_K):
            alive = in_rows[:, None] & (first + offs_k < k)
            read = row.to(tl.int64)[:, None] * stride_em + first + offs_k
            values = tl.load(elements_ptr + read, mask=alive, other=0.0).to(tl.float32) * scale
            at = row.to(tl.int64)[:, None] * k + first + offs_k
            tl.store(out_ptr + at, values.to(out_ptr.dtype.element_ty), mask=alive)
