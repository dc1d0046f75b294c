"""Weights in the two forms that FP8 products take: MXFP8 with one scale per row, as they are and transposed.

Protocol      The product with w [N, K] sums over K, the product with its transpose over N, so each form has its own
              scales. A row's scale is the largest that MXFP8 (RCEIL) would give to one of its blocks of 32; it follows
              from the row's largest magnitude. Elements are rounded once, under that scale: they equal MXFP8 elements
              moved to rows (row_scales.py), but are nearer to the weight where they are subnormal.
              New copies: weight_maxima finds the largest magnitudes (a program takes BLOCK_N rows of one expert: it
              alone finds the maxima of these rows, while the maximum of a column is taken over programs). Then
              prepare_weights reads every tile again and writes both forms: a program takes BLOCK_K columns of one
              expert and goes down STEPS tiles, so it reads the scales of its columns, and reduces their maxima over
              threads, only once.
              Existing copies (CHECK): a step of training changes few scales, so prepare_weights uses the scales of the
              copies, and finds the largest magnitudes on the way. mend_weights then prepares again the rows and columns
              whose scales have changed. The result equals new copies bit for bit, and weights are read once.
Layout        w [E, N, K] bf16 or fp32; row_max [E, N], column_max [E, K] int32: bits of float32 magnitudes, in which
              order a NaN is the largest; maxima over programs start at 0. FPROP: out [E, N, K] e4m3, its
              scales [E, N] float32. DGRAD: transposed [E, K, N] e4m3, its scales [E, K].
Memory order  Maxima of integers, by relaxed atomics, are the same in any order. The kernels follow each other on one
              stream.
Progress      No program waits.
Replay        Only the copies are kept between calls.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.mxfp8 import FORMAT_E4M3, MODE_RCEIL, block_amax, block_scale, scale_value, scaled_elements
from ..spec import Variant, ep_kernel
from .magnitudes import column_maxima, e4m3_pair, fold, larger, magnitudes, product, row_maxima, upper_and_lower


@triton.jit
def _note_maxima(max_ptr, at, x, mask, AXIS: tl.constexpr):
    """Raise the maxima in memory of lines along AXIS to the maxima of this tile."""
    bits = block_amax(x.to(tl.float32), AXIS).to(tl.int32, bitcast=True)
    tl.atomic_max(max_ptr + at, bits, mask=mask, sem="relaxed")


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
            _note_maxima(column_max_ptr, expert * k + col, x, col < k, 0)
        if ROWS:
            largest = tl.maximum(largest, block_amax(x, 1).to(tl.int32, bitcast=True))
    if ROWS:
        tl.store(row_max_ptr + expert * n + row, largest, mask=row < n)


class Maxima(NamedTuple):
    """Bits of the largest magnitudes of rows, [E, N] int32, and of columns, [E, K] int32. With CHECK inout."""

    row_max_ptr: Any
    column_max_ptr: Any


class Copies(NamedTuple):
    """Weights in e4m3 with scales, for products with rows and for gradients of rows.

    Attributes:
        out_ptr: out [E, N, K] e4m3, with FPROP.
        scale_ptr: out [E, N] float32; inout if scales are compared.
        transposed_ptr: out [E, K, N] e4m3, with DGRAD.
        transposed_scale_ptr: out [E, K] float32; inout if scales are compared.
        FPROP, DGRAD: which of the two forms to write.
    """

    out_ptr: Any
    scale_ptr: Any
    transposed_ptr: Any
    transposed_scale_ptr: Any
    FPROP: tl.constexpr
    DGRAD: tl.constexpr


class WeightTile(NamedTuple):
    """STEPS tiles of a matrix [N, K], one below the other."""

    BLOCK_N: tl.constexpr
    BLOCK_K: tl.constexpr
    STEPS: tl.constexpr


@triton.jit
def _scale_of_max(max_ptr, at, mask):
    """Scale bytes, int32, for largest magnitudes in memory."""
    bits = tl.load(max_ptr + at, mask=mask, other=0)
    return block_scale(bits.to(tl.float32, bitcast=True), MODE_RCEIL, FORMAT_E4M3)


@triton.jit
def _inverse(scale):
    """Float32 factors of weights for scale bytes: the inverse of each scale; NaN for 255."""
    return scale_value(tl.where(scale == 255, 255, 254 - scale))


@triton.jit
def _scale_of_copy(scale_ptr, at, mask):
    """Current scale bytes, int32, of a copy; arbitrary where it holds a value that is not a scale."""
    bits = tl.load(scale_ptr + at, mask=mask, other=0.0).to(tl.int32, bitcast=True)
    return (bits >> 23) & 0xFF


@ep_kernel(
    w_ptr="*{W}",
    row_max_ptr="*i32",
    column_max_ptr="*i32",
    out_ptr="*fp8e4nv",
    scale_ptr="*fp32",
    transposed_ptr="*fp8e4nv",
    transposed_scale_ptr="*fp32",
    specialised=("n", "k"),
    variants=(
        Variant(
            {"FPROP": False, "DGRAD": True, "CHECK": False, "BLOCK_N": 128, "BLOCK_K": 64, "STEPS": 8},
            {"W": "fp32"},
            ("n", "k"),
        ),
        Variant(
            {"FPROP": False, "DGRAD": True, "CHECK": True, "BLOCK_N": 128, "BLOCK_K": 64, "STEPS": 8},
            {"W": "fp32"},
            ("n", "k"),
        ),
    ),
)
def prepare_weights_kernel(
    w_ptr,  # [E, N, K] bf16 or fp32
    maxima: Maxima,
    copies: Copies,
    n,
    k,
    CHECK: tl.constexpr,
    tile: WeightTile,
):
    strips = tl.cdiv(k, tile.BLOCK_K)
    spans = tl.cdiv(n, tile.BLOCK_N * tile.STEPS)
    expert = (tl.program_id(0) // (strips * spans)).to(tl.int64)
    inside = tl.program_id(0) % (strips * spans)
    begin = inside // strips * tile.BLOCK_N * tile.STEPS
    end = tl.minimum(begin + tile.BLOCK_N * tile.STEPS, n)
    left = inside % strips * tile.BLOCK_K
    col = left + tl.arange(0, tile.BLOCK_K)
    in_k = col < k
    at_col = expert * k + col
    of_col = tl.zeros((tile.BLOCK_K,), tl.float32)
    if copies.DGRAD:
        if CHECK:
            of_col = _inverse(_scale_of_copy(copies.transposed_scale_ptr, at_col, in_k))
        else:
            column_scale = _scale_of_max(maxima.column_max_ptr, at_col, in_k)
            if begin == 0:
                tl.store(copies.transposed_scale_ptr + at_col, scale_value(column_scale), mask=in_k)
            of_col = _inverse(column_scale)
    HALF: tl.constexpr = tile.BLOCK_N // 2
    pair = tl.arange(0, HALF)
    # Even rows, then odd ones (magnitudes.py).
    offs_n = tl.arange(0, tile.BLOCK_N) % HALF * 2 + tl.arange(0, tile.BLOCK_N) // HALF
    offs = offs_n[:, None] * k + col[None, :]
    pairs = copies.transposed_ptr.to(tl.pointer_type(tl.uint16), bitcast=True)
    transposed_offs = col[:, None].to(tl.int64) * tl.multiple_of(n // 2, 8) + pair[None, :]
    largest = fold(magnitudes(tl.zeros((tile.BLOCK_N, tile.BLOCK_K), w_ptr.dtype.element_ty)))
    for first in range(begin, end, tile.BLOCK_N):
        at = expert * n + first
        in_n = first + offs_n < end
        mask = in_n[:, None] & in_k[None, :]
        of_row = tl.zeros((tile.BLOCK_N,), tl.float32)
        if copies.FPROP:
            # Load scales before weights, so that nothing waits for scales once the weights arrive.
            if CHECK:
                of_row = _inverse(_scale_of_copy(copies.scale_ptr, at + offs_n, in_n))
            else:
                row_scale = _scale_of_max(maxima.row_max_ptr, at + offs_n, in_n)
                if left == 0:
                    tl.store(copies.scale_ptr + at + offs_n, scale_value(row_scale), mask=in_n)
                of_row = _inverse(row_scale)
        x = tl.load(w_ptr + at * k + offs, mask=mask, other=0.0)
        if CHECK:
            found = magnitudes(x)
            if copies.FPROP:
                even, odd = row_maxima(found)
                row = first + 2 * pair
                tl.atomic_max(maxima.row_max_ptr + at + 2 * pair, even, mask=row < end, sem="relaxed")
                tl.atomic_max(maxima.row_max_ptr + at + 2 * pair + 1, odd, mask=row + 1 < end, sem="relaxed")
            if copies.DGRAD:
                # Fold the rows that one thread holds; the reduction over threads comes at the end.
                largest = larger(largest, fold(found))
        if copies.FPROP:
            tl.store(copies.out_ptr + at * k + offs, product(x, of_row[:, None]).to(tl.float8e4nv), mask=mask)
        if copies.DGRAD:
            even, odd = upper_and_lower(product(x, of_col[None, :]))
            to = pairs + tl.multiple_of((expert * n * k + first) // 2, 8) + transposed_offs
            in_pairs = pair < tl.multiple_of((end - first) // 2, 8)
            tl.store(to, e4m3_pair(even, odd).T, mask=in_k[:, None] & in_pairs[None, :])
    if copies.DGRAD and CHECK:
        even, odd = column_maxima(largest)
        at = expert * k + left + 2 * tl.arange(0, tile.BLOCK_K // 2)
        in_k = left + 2 * tl.arange(0, tile.BLOCK_K // 2) < k
        tl.atomic_max(maxima.column_max_ptr + at, even, mask=in_k, sem="relaxed")
        tl.atomic_max(maxima.column_max_ptr + at + 1, odd, mask=in_k, sem="relaxed")


class Lines(NamedTuple):
    """Lines (rows or columns) of a matrix: `num_lines` of `length` elements each, of which a program takes some from
    `first` on.
    """

    first: Any
    num_lines: Any
    length: Any


@triton.jit
def _mend(
    w_ptr,  # of one matrix
    max_ptr,
    out_ptr,
    scale_ptr,
    matrix,
    lines,
    TRANSPOSED: tl.constexpr,
    LINES: tl.constexpr,
    STEP: tl.constexpr,
):
    """Prepare again those lines of a matrix, from `first` on, whose scales changed. TRANSPOSED: lines are columns."""
    line = lines.first + tl.arange(0, LINES)
    at = matrix * lines.num_lines + line
    inside = line < lines.num_lines
    scale = _scale_of_max(max_ptr, at, inside)
    # Compare bits: a copy may hold a value that is not a scale, such as a NaN.
    there = tl.load(scale_ptr + at, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    wrong = inside & (there != scale_value(scale).to(tl.int32, bitcast=True))
    if tl.max(wrong.to(tl.int32), 0) > 0:
        for start in range(0, lines.length, STEP):
            step = start + tl.arange(0, STEP)
            mask = wrong[:, None] & (step < lines.length)[None, :]
            if TRANSPOSED:
                # Load all columns, 16 bytes at a time.
                mask_w = inside[:, None] & (step < lines.length)[None, :]
                ptrs = w_ptr + step.to(tl.int64)[None, :] * lines.num_lines + line[:, None]
                x = tl.load(ptrs, mask=mask_w, other=0.0)
            else:
                x = tl.load(w_ptr + line.to(tl.int64)[:, None] * lines.length + step[None, :], mask=mask, other=0.0)
            elements = scaled_elements(x.to(tl.float32), scale[:, None], MODE_RCEIL, False)
            tl.store(out_ptr + at[:, None] * lines.length + step[None, :], elements, mask=mask)
        # Last: `wrong` comes from the scales stored here.
        tl.store(scale_ptr + at, scale_value(scale), mask=wrong)


@ep_kernel(
    w_ptr="*{W}",
    row_max_ptr="*i32",
    column_max_ptr="*i32",
    out_ptr="*fp8e4nv",
    scale_ptr="*fp32",
    transposed_ptr="*fp8e4nv",
    transposed_scale_ptr="*fp32",
    specialised=("n", "k"),
    variants=(Variant({"FPROP": False, "DGRAD": True, "LINES": 32, "STEP": 64}, {"W": "fp32"}, ("n", "k")),),
)
def mend_weights_kernel(
    w_ptr,  # [E, N, K] bf16 or fp32
    maxima: Maxima,
    copies: Copies,
    n,
    k,
    LINES: tl.constexpr,
    STEP: tl.constexpr,
):
    """A program takes LINES rows or LINES columns of one expert; programs of columns follow programs of rows."""
    strips_n = tl.cdiv(n, LINES) if copies.FPROP else 0
    strips_k = tl.cdiv(k, LINES) if copies.DGRAD else 0
    expert = (tl.program_id(0) // (strips_n + strips_k)).to(tl.int64)
    strip = tl.program_id(0) % (strips_n + strips_k)
    w_ptr += expert * n * k
    if strip < strips_n:
        if copies.FPROP:
            rows = Lines(strip * LINES, n, k)
            _mend(w_ptr, maxima.row_max_ptr, copies.out_ptr, copies.scale_ptr, expert, rows, False, LINES, STEP)
    else:
        if copies.DGRAD:
            columns = Lines((strip - strips_n) * LINES, k, n)
            out_ptr, scale_ptr = copies.transposed_ptr, copies.transposed_scale_ptr
            _mend(w_ptr, maxima.column_max_ptr, out_ptr, scale_ptr, expert, columns, True, LINES, STEP)
