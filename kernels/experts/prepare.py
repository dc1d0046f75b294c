"""Weights in the two forms that FP8 products take: MXFP8 with one scale per row, as they are and transposed.

Protocol      The product with w [N, K] sums over K, the one with its transpose over N, so each has scales along another
              dimension: of every row the largest that MXFP8 (RCEIL) would give to one of its blocks of 32, which
              follows from the row's largest magnitude. Elements are rounded once, under that scale: those of MXFP8
              moved to rows (row_scales.py), but nearer to the weight where they are subnormal. weight_maxima: a program
              takes BLOCK_N rows of one expert; the largest magnitude of a row is its own affair, that of a column is a
              maximum over programs. prepare_weights: every tile is read once and written in both forms.
Layout        w [E, N, K] bf16 or fp32; row_max [E, N], column_max [E, K] int32: bits of float32 magnitudes, among which
              a NaN is the largest; column_max is 0 at first. FPROP: out [E, N, K] e4m3, its scales [E, N] float32.
              DGRAD: transposed [E, K, N] e4m3, its scales [E, K].
Memory order  Maxima of integers, in any order the same; the kernels follow each other on one stream.
Progress      No program waits.
Replay        Nothing is kept between calls.
"""

import triton
import triton.language as tl

from ..device.mxfp8 import FORMAT_E4M3, MODE_RCEIL, block_amax, block_scale, scale_value, scaled_elements
from ..spec import Variant, ep_kernel


@ep_kernel(
    w_ptr="*{W}",
    row_max_ptr="*i32",
    column_max_ptr="*i32",
    specialised=("n", "k"),
    variants=(
        Variant(
            {"ROWS": False, "COLUMNS": True, "BLOCK_N": 128, "BLOCK_K": 64, "STAGES": 3}, {"W": "fp32"}, ("n", "k")
        ),
    ),
)
def weight_maxima_kernel(
    w_ptr,  # [E, N, K] bf16 or fp32
    row_max_ptr,  # out [E, N] int32
    column_max_ptr,  # inout [E, K] int32
    n,
    k,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    strips = tl.cdiv(n, BLOCK_N)
    expert = (tl.program_id(0) // strips).to(tl.int64)
    row = tl.program_id(0) % strips * BLOCK_N + tl.arange(0, BLOCK_N)
    w_rows = w_ptr + (expert * n + row)[:, None] * k
    largest = tl.zeros((BLOCK_N,), dtype=tl.int32)
    for first in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        col = first + tl.arange(0, BLOCK_K)
        x = tl.load(w_rows + col[None, :], mask=(row < n)[:, None] & (col < k)[None, :], other=0.0).to(tl.float32)
        if COLUMNS:
            of_columns = block_amax(x, 0).to(tl.int32, bitcast=True)
            tl.atomic_max(column_max_ptr + expert * k + col, of_columns, mask=col < k, sem="relaxed")
        if ROWS:
            largest = tl.maximum(largest, block_amax(x, 1).to(tl.int32, bitcast=True))
    if ROWS:
        tl.store(row_max_ptr + expert * n + row, largest, mask=row < n)


@triton.jit
def _largest_scale(max_ptr, at, mask):
    bits = tl.load(max_ptr + at, mask=mask, other=0)
    return block_scale(bits.to(tl.float32, bitcast=True), MODE_RCEIL, FORMAT_E4M3)


@triton.jit
def _store_rows(out_ptr, scale_ptr, x, rows, cols, in_rows, matrix, num_rows, num_cols, largest):
    """Elements of a tile [M, N] of a matrix [num_rows, num_cols] under scales `largest` [M], and these."""
    elements = scaled_elements(x.to(tl.float32), largest[:, None], MODE_RCEIL, False)
    row = matrix * num_rows + rows
    inside = in_rows[:, None] & (cols < num_cols)[None, :]
    tl.store(out_ptr + row[:, None] * num_cols + cols[None, :], elements, mask=inside)
    # Those at the left edge write the scales of their rows.
    tl.store(scale_ptr + row, scale_value(largest), mask=in_rows & (tl.min(cols, 0) == 0))


@ep_kernel(
    w_ptr="*{W}",
    row_max_ptr="*i32",
    column_max_ptr="*i32",
    out_ptr="*fp8e4nv",
    scale_ptr="*fp32",
    transposed_ptr="*fp8e4nv",
    transposed_scale_ptr="*fp32",
    specialised=("n", "k"),
    variants=(Variant({"FPROP": False, "DGRAD": True, "BLOCK_N": 128, "BLOCK_K": 64}, {"W": "fp32"}, ("n", "k")),),
)
def prepare_weights_kernel(
    w_ptr,  # [E, N, K] bf16 or fp32
    row_max_ptr,  # [E, N] int32
    column_max_ptr,  # [E, K] int32
    out_ptr,  # out [E, N, K] e4m3
    scale_ptr,  # out [E, N] float32
    transposed_ptr,  # out [E, K, N] e4m3
    transposed_scale_ptr,  # out [E, K] float32
    n,
    k,
    FPROP: tl.constexpr,
    DGRAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles_n = tl.cdiv(n, BLOCK_N)
    tiles_k = tl.cdiv(k, BLOCK_K)
    expert = (tl.program_id(0) // (tiles_n * tiles_k)).to(tl.int64)
    inside = tl.program_id(0) % (tiles_n * tiles_k)
    row = inside // tiles_k * BLOCK_N + tl.arange(0, BLOCK_N)
    col = inside % tiles_k * BLOCK_K + tl.arange(0, BLOCK_K)
    in_n = row < n
    in_k = col < k
    x = tl.load(w_ptr + (expert * n + row)[:, None] * k + col[None, :], mask=in_n[:, None] & in_k[None, :], other=0.0)
    if FPROP:
        largest = _largest_scale(row_max_ptr, expert * n + row, in_n)
        _store_rows(out_ptr, scale_ptr, x, row, col, in_n, expert, n, k, largest)
    if DGRAD:
        largest = _largest_scale(column_max_ptr, expert * k + col, in_k)
        _store_rows(transposed_ptr, transposed_scale_ptr, x.T, col, row, in_k, expert, k, n, largest)
