"""Second product of the experts, and gradients of rows: rows in segments, one matrix per segment.

Protocol      out[r] = a[r] @ w[expert of r]^T (+ bias, times row_weights[r]). Programs are persistent; each takes
              every num_programs-th tile of the tile table, or of the segments; with SPLIT they share tiles
              (turns.py). Sums are float32; results have the dtype of `out`. Rows past the last segment have no tiles;
              they are not written, or (ZERO_REST) zeroed.
Layout        a [R, K], contiguous; w [E, N, K] (K_MAJOR) or [E, K, N], contiguous; bf16, or (SCALED, which needs
              K_MAJOR) e4m3 with scales [R] and [E, N] float32. out [R, N] bf16, fp16 or fp32, rows stride_om apart.
              TMA: boxes of a and w may reach into the next segment or expert: results there are not stored. Without
              K_MAJOR, K must be a multiple of BLOCK_K: a box that crosses K would load rows of the next expert.
              BOX_STORES: results are stored through a descriptor, in two halves of a tile. This needs segments of
              multiples of 128 rows: a box would overwrite the first rows of the next segment. FLATTEN: one loop over
              tiles and steps, whose loads continue during the epilogue; BLOCK_M is then 128, and nothing after the
              steps is conditional.
Memory order  Plain loads and stores; the kernels follow each other on one stream. With SPLIT relaxed atomics decide
              which program computes a tile, nothing else.
Progress      No program waits.
Replay        Nothing is kept between calls; taken_ptr is zeroed before each launch.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.groups import GemmTile
from ..spec import ep_kernel
from .products import (
    Factors,
    Segments,
    add_step,
    add_step_by_halves,
    begin_sum,
    halves,
    joined,
    segment_tile,
    segment_tiles,
    table_tile,
    table_tiles,
)
from .turns import ask_in_turn, following, turns_of


@triton.jit
def _load_box(w, expert, col, k0, n, k, K_MAJOR: tl.constexpr):
    """Load a box of an expert's weights, [BLOCK_N, BLOCK_K] with K_MAJOR, else [BLOCK_K, BLOCK_N]."""
    if K_MAJOR:
        return w.load([expert * n + col, k0])
    else:
        return w.load([expert * k + k0, col])


@triton.jit
def _as_tile(box, K_MAJOR: tl.constexpr):
    """[BLOCK_K, BLOCK_N] of such a box."""
    if K_MAJOR:
        return box.T
    else:
        return box


@triton.jit
def _finish(acc, factors, rows, in_m, cols, in_n, expert, n):
    """Apply scales and bias to a tile of the product, in float32."""
    if factors.SCALED:
        # Multiply by one scale at a time: the product of both may leave the range of float32 where the result does not.
        acc = acc * tl.load(factors.x_scale_ptr + rows, mask=in_m, other=0.0)[:, None]
        acc = acc * tl.load(factors.w_scale_ptr + expert.to(tl.int64) * n + cols, mask=in_n, other=0.0)[None, :]
    if factors.HAS_BIAS:
        bias = tl.load(factors.bias_ptr + expert.to(tl.int64) * n + cols, mask=in_n, other=0.0).to(tl.float32)[None, :]
        if factors.HAS_WEIGHTS:
            bias = bias * tl.load(factors.row_weights_ptr + rows, mask=in_m, other=0.0)[:, None]
        acc += bias
    return acc


class ByRows(NamedTuple):
    """Destination of the result.

    Attributes:
        out_ptr: out [R, N].
        stride_om: elements from one row to the next.
        BOX_STORES: store it in boxes, in bf16.
        ZERO_REST: zero the rows past the last segment.
    """

    out_ptr: Any
    stride_om: Any
    BOX_STORES: tl.constexpr
    ZERO_REST: tl.constexpr


@triton.jit
def _zero_rest(by_rows, segments, n, BLOCK_N: tl.constexpr):
    """Zero the rows past the last segment, one program per row."""
    # Index of the rows in use in the table, or in the offsets.
    where = 1 if segments.TABLE else segments.num_experts
    in_use = tl.load(segments.tiles_ptr + where)
    offs_n = tl.arange(0, BLOCK_N)
    for row in range(in_use + tl.program_id(0), segments.num_rows, tl.num_programs(0)):
        for col in range(0, n, BLOCK_N):
            cols = col + offs_n
            zeros = tl.zeros((BLOCK_N,), by_rows.out_ptr.dtype.element_ty)
            at = tl.full((BLOCK_N,), row, tl.int64) * by_rows.stride_om + cols
            tl.store(by_rows.out_ptr + at, zeros, mask=cols < n)


class Method(NamedTuple):
    """How the product is computed.

    Attributes:
        TMA: operands are read through descriptors.
        K_MAJOR: weights are [E, N, K], else [E, K, N].
        PROMOTE, SWAP: as in `add_step`.
        FLATTEN: the loads of the next tile begin before this one is stored.
        SPLIT: compute a tile as two halves of its rows, with PROMOTE only; programs share tiles.
    """

    TMA: tl.constexpr
    K_MAJOR: tl.constexpr
    PROMOTE: tl.constexpr
    SWAP: tl.constexpr
    FLATTEN: tl.constexpr
    SPLIT: tl.constexpr


@triton.jit
def _sums_by_halves(a, w, place, n, k, method, tile):
    """Sums of the upper and of the lower rows of a tile, [BLOCK_M / 2, BLOCK_N] each. place: as `table_tile` returns
    it."""
    HALF_M: tl.constexpr = tile.BLOCK_M // 2
    tl.static_assert(method.PROMOTE)
    expert, row, _, filled, tile_n = place
    col = tile_n * tile.BLOCK_N
    left = tl.zeros((HALF_M, tile.BLOCK_N // 2), dtype=tl.float32)
    right = tl.zeros((HALF_M, tile.BLOCK_N // 2), dtype=tl.float32)
    lower = tl.zeros((HALF_M, tile.BLOCK_N), dtype=tl.float32)
    # Skip a lower half of padding, which is zero, or without rows.
    both = tl.where(row + HALF_M < filled, k, 0)
    for k0 in tl.range(0, both, tile.BLOCK_K, num_stages=tile.STAGES):
        w_tile = _as_tile(_load_box(w, expert, col, k0, n, k, method.K_MAJOR), method.K_MAJOR)
        a_upper = a.load([row, k0])
        a_lower = a.load([row + HALF_M, k0])
        left, right, lower = add_step_by_halves(left, right, lower, a_upper, a_lower, w_tile)
    upper = joined(left, right)
    for k0 in tl.range(both, k, tile.BLOCK_K, num_stages=tile.STAGES):
        box = _load_box(w, expert, col, k0, n, k, method.K_MAJOR)
        a_tile = a.load([row, k0])
        upper = add_step(upper, a_tile, _as_tile(box, method.K_MAJOR), False, method.PROMOTE)
    return upper, lower


@triton.jit
def _sum(a, w, place, n, k, TABLE: tl.constexpr, method, tile):
    """Sum of a tile, [BLOCK_M, BLOCK_N]. place: as `table_tile` returns it. TABLE: it comes from a table."""
    expert, row, end, _, tile_n = place
    col = tile_n * tile.BLOCK_N
    terms, acc = begin_sum(place, k, TABLE, method.SWAP, tile.BLOCK_M, tile.BLOCK_N)
    if method.TMA:
        for k0 in tl.range(0, terms, tile.BLOCK_K, num_stages=tile.STAGES):
            box = _load_box(w, expert, col, k0, n, k, method.K_MAJOR)
            a_tile = a.load([row, k0])
            acc = add_step(acc, a_tile, _as_tile(box, method.K_MAJOR), method.SWAP, method.PROMOTE)
    else:
        rows = row + tl.arange(0, tile.BLOCK_M)
        cols = col + tl.arange(0, tile.BLOCK_N)
        offs_k = tl.arange(0, tile.BLOCK_K)
        in_n = cols < n
        a_ptrs = a + rows.to(tl.int64)[:, None] * k + offs_k[None, :]
        w_ptr = w + expert.to(tl.int64) * n * k
        for k0 in tl.range(0, terms, tile.BLOCK_K, num_stages=tile.STAGES):
            in_k = k0 + offs_k < k
            a_tile = tl.load(a_ptrs + k0, mask=(rows < end)[:, None] & in_k[None, :], other=0.0)
            if method.K_MAJOR:
                w_ptrs = w_ptr + cols.to(tl.int64)[:, None] * k + (k0 + offs_k)[None, :]
                w_tile = tl.load(w_ptrs, mask=in_n[:, None] & in_k[None, :], other=0.0).T
            else:
                w_ptrs = w_ptr + (k0 + offs_k).to(tl.int64)[:, None] * n + cols[None, :]
                w_tile = tl.load(w_ptrs, mask=in_k[:, None] & in_n[None, :], other=0.0)
            acc = add_step(acc, a_tile, w_tile, method.SWAP, method.PROMOTE)
    if method.SWAP:
        acc = acc.T
    return acc


@triton.jit
def _store(out, acc, factors, by_rows, expert, row, end, col, n):
    """Finish and store a tile [M, N] of the product, rows from `row` up to `end`, exclusive."""
    WIDTH: tl.constexpr = acc.shape[1]
    rows = row + tl.arange(0, acc.shape[0])
    cols = col + tl.arange(0, WIDTH)
    in_m = rows < end
    in_n = cols < n
    result = _finish(acc, factors, rows, in_m, cols, in_n, expert, n)
    if by_rows.BOX_STORES:
        left, right = halves(result.to(tl.bfloat16), result.shape[0], WIDTH)
        out.store([row, col], left)
        out.store([row, col + WIDTH // 2], right)
    else:
        out_ptrs = by_rows.out_ptr + rows.to(tl.int64)[:, None] * by_rows.stride_om + cols[None, :]
        tl.store(out_ptrs, result.to(by_rows.out_ptr.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


@ep_kernel(
    a="{A}",
    w="{W}",
    out="{OUT}",
    x_scale_ptr="*{SCALE}",
    w_scale_ptr="*{SCALE}",
    bias_ptr="*{BIAS}",
    row_weights_ptr="*{WEIGHTS}",
    out_ptr="*{RESULT}",
    tiles_ptr="*i32",
    taken_ptr="*i32",
    specialised=("n", "k", "stride_om"),
    num_warps=None,
)
def rows_product_kernel(
    a,  # [R, K]: pointer, or with TMA a descriptor of boxes [BLOCK_M, BLOCK_K], with SPLIT half as many rows
    w,  # pointer, or a descriptor: [E*N, K], boxes [BLOCK_N, BLOCK_K], or [E*K, N], boxes [BLOCK_K, BLOCK_N]
    out,  # with BOX_STORES a descriptor of [R, N], boxes of as many rows as boxes of a, BLOCK_N / 2 columns
    factors: Factors,
    by_rows: ByRows,
    segments: Segments,
    n,
    k,
    method: Method,
    tile: GemmTile,
):
    tiles_n = tl.cdiv(n, tile.BLOCK_N)
    if segments.TABLE:
        num_tiles = table_tiles(segments.tiles_ptr, segments.num_rows, tile.BLOCK_M) * tiles_n
    else:
        starts, sizes, tiles, after = segment_tiles(segments, tiles_n, tile.BLOCK_M)
        num_tiles = tl.sum(tiles)
    if method.SPLIT:
        tl.static_assert(segments.TABLE)
        fixed, most = turns_of(num_tiles)
        number = tl.program_id(0)
        for turn in tl.range(0, most, num_stages=tile.STAGES):
            if number < num_tiles:
                ticket = ask_in_turn(segments.taken_ptr, turn, fixed, most)
                place = table_tile(segments.tiles_ptr, number, tiles_n, tile.BLOCK_M)
                sums = _sums_by_halves(a, w, place, n, k, method, tile)
                expert, row, end, _, tile_n = place
                for part in tl.static_range(2):
                    first = row + part * (tile.BLOCK_M // 2)
                    _store(out, sums[part], factors, by_rows, expert, first, end, tile_n * tile.BLOCK_N, n)
                number = following(number, ticket, turn, fixed)
    else:
        for number in tl.range(
            tl.program_id(0), num_tiles, tl.num_programs(0), flatten=method.FLATTEN, num_stages=tile.STAGES
        ):
            if segments.TABLE:
                place = table_tile(segments.tiles_ptr, number, tiles_n, tile.BLOCK_M)
            else:
                place = segment_tile(starts, sizes, tiles, after, number, tiles_n, tile.BLOCK_M, tile.BAND)
            acc = _sum(a, w, place, n, k, segments.TABLE, method, tile)
            expert, row, end, _, tile_n = place
            _store(out, acc, factors, by_rows, expert, row, end, tile_n * tile.BLOCK_N, n)
    if by_rows.ZERO_REST:
        _zero_rest(by_rows, segments, n, tile.BLOCK_N)
