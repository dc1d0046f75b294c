"""First product of the experts with the activation in its epilogue: rows in segments, one matrix per segment.

Protocol      pre[r] = x[r] @ w[expert of r]^T (+ bias), act[r] = activation(pre[r]) * row_weights[r]. Gated, the
              weights of an expert are F rows of gate, then F rows of up; a tile has BLOCK_N columns of each, computed
              as one product of 2 * BLOCK_N columns. Programs are persistent; each takes every num_programs-th tile of
              the table, or of the segments; with SPLIT they share tiles (turns.py). Sums are float32. OUT: the
              activation as bf16, or quantised from float32 to MXFP8 (RCEIL along the row), or that MXFP8 as bf16. Rows
              past the last segment have no tiles.
Layout        x [R, K] and w [E, F or 2F, K], contiguous, bf16, or (SCALED) e4m3 with float32 scales [R] and
              [E, F or 2F]. bias [E, F or 2F]; act [R, F], its scales [R, F/32] uint8; pre [R, F or 2F] bf16: gate
              columns, then up. TMA: boxes of w are boxes of [E * halves, F, K]; the copy engine fills in zeros past F
              and K. Boxes of x may reach into the next segment: results for those rows are not stored. FLATTEN: one
              loop over tiles and steps, whose loads continue during the epilogue; BLOCK_M is then 128.
Memory order  Plain loads and stores; the kernels follow each other on one stream. With SPLIT relaxed atomics decide
              which program computes a tile, nothing else.
Progress      No program waits.
Replay        Nothing is kept between calls; taken_ptr is zeroed before each launch.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.codes import ACT_OUT_BF16, ACT_OUT_MX
from ..device.groups import GemmTile
from ..device.mxfp8 import BLOCK, MODE_RCEIL, dequantize_tile, quantize_tile
from ..spec import ep_kernel
from .activation import Activation, apply_activation
from .products import (
    Factors,
    Segments,
    add_step,
    add_step_by_halves,
    begin_sum,
    joined,
    segment_tile,
    segment_tiles,
    table_tile,
    table_tiles,
)
from .turns import answer, ask, unit_tile, units_of

_BF16 = tl.constexpr(ACT_OUT_BF16)
_MX = tl.constexpr(ACT_OUT_MX)


@triton.jit
def _of_matrix(x, factors, matrix, col, f):
    """Apply scale and bias to a tile [M, N], from column `col` on, of a product with one of [matrices, f, K]."""
    cols = col + tl.arange(0, x.shape[1])
    at = matrix.to(tl.int64) * f + cols
    if factors.SCALED:
        x = x * tl.load(factors.w_scale_ptr + at, mask=cols < f, other=0.0)[None, :]
    if factors.HAS_BIAS:
        x += tl.load(factors.bias_ptr + at, mask=cols < f, other=0.0).to(tl.float32)[None, :]
    return x


@triton.jit
def _store_pre(pre_ptr, x, rows, in_m, col, f, width):
    """Store a bf16 tile [M, N], from column `col` of f on, into rows of `width`."""
    cols = col + tl.arange(0, x.shape[1])
    at = rows.to(tl.int64)[:, None] * width + cols[None, :]
    tl.store(pre_ptr + at, x, mask=in_m[:, None] & (cols < f)[None, :])


@triton.jit
def _store_act(into, value, rows, in_m, col, f):
    """Store a float32 tile [M, N] of the activation, from column `col` on, as bf16 or MXFP8. N is a multiple of 32."""
    cols = col + tl.arange(0, value.shape[1])
    at = rows.to(tl.int64)[:, None] * f + cols[None, :]
    inside = in_m[:, None] & (cols < f)[None, :]
    if into.OUT == _BF16:
        tl.store(into.act_ptr + at, value.to(tl.bfloat16), mask=inside)
    else:
        M: tl.constexpr = value.shape[0]
        BLOCKS: tl.constexpr = value.shape[1] // BLOCK
        elements, scale = quantize_tile(value.reshape(M, BLOCKS, BLOCK), MODE_RCEIL, False)
        if into.OUT == _MX:
            tl.store(into.act_ptr + at, elements.reshape(M, BLOCKS * BLOCK), mask=inside)
            block = col // BLOCK + tl.arange(0, BLOCKS)
            at_s = rows.to(tl.int64)[:, None] * (f // BLOCK) + block[None, :]
            tl.store(into.act_scale_ptr + at_s, scale, mask=in_m[:, None] & (block * BLOCK < f)[None, :])
        else:
            rounded = dequantize_tile(elements, scale).reshape(M, BLOCKS * BLOCK)
            tl.store(into.act_ptr + at, rounded.to(tl.bfloat16), mask=inside)


@triton.jit
def _finish(acc, factors, into, expert, row, end, col, f, activation):
    """Finish and store a tile [M, WIDTH] of the product, rows from `row` up to `end`, exclusive."""
    HALVES: tl.constexpr = 2 if activation.GATED else 1
    BLOCK_M: tl.constexpr = acc.shape[0]
    WIDTH: tl.constexpr = acc.shape[1]
    rows = row + tl.arange(0, BLOCK_M)
    in_m = rows < end
    # A thread holds both halves of the columns in registers: gate and up, or left and right.
    first, second = acc.reshape(BLOCK_M, 2, WIDTH // 2).permute(0, 2, 1).split()
    matrix = expert * HALVES
    if factors.SCALED:
        # Multiply by one scale at a time: the product of both may leave the range of float32 where the result does not.
        x_scale = tl.load(factors.x_scale_ptr + rows, mask=in_m, other=0.0)[:, None]
        first = first * x_scale
        second = second * x_scale
    factor = 1.0
    if factors.HAS_WEIGHTS:
        factor = tl.load(factors.row_weights_ptr + rows, mask=in_m, other=0.0)[:, None]
    if activation.GATED:
        gs = (first,)
        us = (second,)
        WHOLE: tl.constexpr = BLOCK_M >= 128 and into.OUT != _BF16  # quantising in parts, sm_100 would spill
        PARTS: tl.constexpr = 2 if WIDTH >= 128 and not WHOLE else 1
        if PARTS == 2:  # in one part it would take the registers that the other half of the rows needs
            gs = first.reshape(BLOCK_M, 2, WIDTH // 4).permute(0, 2, 1).split()
            us = second.reshape(BLOCK_M, 2, WIDTH // 4).permute(0, 2, 1).split()
        for part in tl.static_range(PARTS):
            at = col + part * (WIDTH // 4)
            g = _of_matrix(gs[part], factors, matrix, at, f)
            u = _of_matrix(us[part], factors, matrix + 1, at, f)
            value = apply_activation(g, u, activation)
            # Round g and u first: in float32 they would occupy too many registers while the activation is stored.
            g = g.to(tl.bfloat16)
            u = u.to(tl.bfloat16)
            _store_act(into, value * factor, rows, in_m, at, f)
            if into.HAS_PRE:
                _store_pre(into.pre_ptr, g, rows, in_m, at, f, 2 * f)
                _store_pre(into.pre_ptr + f, u, rows, in_m, at, f, 2 * f)
    else:
        for part in tl.static_range(2):
            at = col + part * (WIDTH // 2)
            if part == 0:
                g = first
            else:
                g = second
            g = _of_matrix(g, factors, matrix, at, f)
            value = apply_activation(g, g, activation)
            g = g.to(tl.bfloat16)
            _store_act(into, value * factor, rows, in_m, at, f)
            if into.HAS_PRE:
                _store_pre(into.pre_ptr, g, rows, in_m, at, f, f)


class Into(NamedTuple):
    """Outputs of the kernel.

    Attributes:
        act_ptr: out [R, F], the activation in bf16 or e4m3.
        act_scale_ptr: out [R, F/32] uint8, with MXFP8.
        pre_ptr: out [R, HALVES * F] bf16, the input of the activation, if HAS_PRE.
        HAS_PRE: the input of the activation is stored.
        OUT: ACT_OUT_* (device/codes.py).
    """

    act_ptr: Any
    act_scale_ptr: Any
    pre_ptr: Any
    HAS_PRE: tl.constexpr
    OUT: tl.constexpr


class Method(NamedTuple):
    """How the product is computed.

    Attributes:
        TMA: operands are read through descriptors.
        PROMOTE, SWAP: as in `add_step`.
        FLATTEN: the loads of the next tile begin before this one is stored.
        SPLIT: compute a tile as two halves of its rows, with PROMOTE only; programs share tiles.
    """

    TMA: tl.constexpr
    PROMOTE: tl.constexpr
    SWAP: tl.constexpr
    FLATTEN: tl.constexpr
    SPLIT: tl.constexpr


@triton.jit
def _sums_by_halves(x, w, place, k, method, activation, tile):
    """Sums of the upper and the lower rows of a unit, [BLOCK_M / 2, WIDTH] each. place: as `unit_tile` returns it."""
    HALVES: tl.constexpr = 2 if activation.GATED else 1
    WIDTH: tl.constexpr = HALVES * tile.BLOCK_N
    HALF_M: tl.constexpr = tile.BLOCK_M // 2
    tl.static_assert(method.PROMOTE)
    expert, row, _, filled, tile_n = place
    col = tile_n * tile.BLOCK_N
    left = tl.zeros((HALF_M, WIDTH // 2), dtype=tl.float32)
    right = tl.zeros((HALF_M, WIDTH // 2), dtype=tl.float32)
    lower = tl.zeros((HALF_M, WIDTH), dtype=tl.float32)
    # Skip a lower half of padding, which is zero, or without rows.
    both = tl.where(row + HALF_M < filled, k, 0)
    for k0 in tl.range(0, both, tile.BLOCK_K, num_stages=tile.STAGES):
        x_upper = x.load([row, k0])
        x_lower = x.load([row + HALF_M, k0])
        box = w.load([expert * HALVES, col, k0])
        w_tile = box.reshape(WIDTH, tile.BLOCK_K).T
        left, right, lower = add_step_by_halves(left, right, lower, x_upper, x_lower, w_tile)
    upper = joined(left, right)
    for k0 in tl.range(both, k, tile.BLOCK_K, num_stages=tile.STAGES):
        box = w.load([expert * HALVES, col, k0])
        x_tile = x.load([row, k0])
        upper = add_step(upper, x_tile, box.reshape(WIDTH, tile.BLOCK_K).T, False, method.PROMOTE)
    return upper, lower


@triton.jit
def _sum(x, w, place, f, k, TABLE: tl.constexpr, method, activation, tile):
    """Sum of a tile, [BLOCK_M, WIDTH]. place: as `table_tile` returns it. TABLE: it comes from a table."""
    HALVES: tl.constexpr = 2 if activation.GATED else 1
    WIDTH: tl.constexpr = HALVES * tile.BLOCK_N
    expert, row, end, _, tile_n = place
    col = tile_n * tile.BLOCK_N
    terms, acc = begin_sum(place, k, TABLE, method.SWAP, tile.BLOCK_M, WIDTH)
    if method.TMA:
        for k0 in tl.range(0, terms, tile.BLOCK_K, num_stages=tile.STAGES):
            box = w.load([expert * HALVES, col, k0])
            x_tile = x.load([row, k0])
            acc = add_step(acc, x_tile, box.reshape(WIDTH, tile.BLOCK_K).T, method.SWAP, method.PROMOTE)
    else:
        half = tl.arange(0, WIDTH) // tile.BLOCK_N
        offs_w = tl.arange(0, WIDTH) % tile.BLOCK_N
        offs_k = tl.arange(0, tile.BLOCK_K)
        rows = row + tl.arange(0, tile.BLOCK_M)
        at_w = (expert * HALVES + half).to(tl.int64) * f + col + offs_w
        x_ptrs = x + rows.to(tl.int64)[:, None] * k + offs_k[None, :]
        w_ptrs = w + at_w[:, None] * k + offs_k[None, :]
        for k0 in tl.range(0, terms, tile.BLOCK_K, num_stages=tile.STAGES):
            in_k = (k0 + offs_k < k)[None, :]
            x_tile = tl.load(x_ptrs + k0, mask=(rows < end)[:, None] & in_k, other=0.0)
            w_tile = tl.load(w_ptrs + k0, mask=(col + offs_w < f)[:, None] & in_k, other=0.0)
            acc = add_step(acc, x_tile, w_tile.T, method.SWAP, method.PROMOTE)
    if method.SWAP:
        acc = acc.T
    return acc


@ep_kernel(
    x="{X}",
    w="{W}",
    x_scale_ptr="*{SCALE}",
    w_scale_ptr="*{SCALE}",
    bias_ptr="*{BIAS}",
    row_weights_ptr="*{WEIGHTS}",
    act_ptr="*{ACT}",
    act_scale_ptr="*{ACT_SCALE}",
    pre_ptr="*{PRE}",
    tiles_ptr="*i32",
    taken_ptr="*i32",
    specialised=("f", "k"),
    num_warps=None,
)
def gate_up_kernel(
    x,  # [R, K]: pointer, or with TMA a descriptor of boxes [BLOCK_M, BLOCK_K], with SPLIT half as many rows
    w,  # [E, HALVES * F, K]: pointer, or a descriptor of [E * HALVES, F, K], boxes [HALVES, BLOCK_N, BLOCK_K]
    factors: Factors,
    into: Into,
    segments: Segments,
    f,
    k,
    method: Method,
    activation: Activation,
    tile: GemmTile,
):
    tiles_n = tl.cdiv(f, tile.BLOCK_N)
    if segments.TABLE:
        num_tiles = table_tiles(segments.tiles_ptr, segments.num_rows, tile.BLOCK_M) * tiles_n
    else:
        starts, sizes, tiles, after = segment_tiles(segments, tiles_n, tile.BLOCK_M)
        num_tiles = tl.sum(tiles)
    if method.SPLIT:
        tl.static_assert(segments.TABLE)
        units, whole = units_of(num_tiles)
        unit = tl.program_id(0)
        while unit < units:
            place = unit_tile(segments.tiles_ptr, unit, whole, tiles_n, tile.BLOCK_M)
            sums = _sums_by_halves(x, w, place, k, method, activation, tile)
            ticket = ask(segments.taken_ptr, True)
            expert, row, end, _, tile_n = place
            for part in tl.static_range(2):
                first = row + part * (tile.BLOCK_M // 2)
                _finish(sums[part], factors, into, expert, first, end, tile_n * tile.BLOCK_N, f, activation)
            unit = tl.num_programs(0) + answer(ticket)
    else:
        for number in tl.range(
            tl.program_id(0), num_tiles, tl.num_programs(0), flatten=method.FLATTEN, num_stages=tile.STAGES
        ):
            if segments.TABLE:
                place = table_tile(segments.tiles_ptr, number, tiles_n, tile.BLOCK_M)
            else:
                place = segment_tile(starts, sizes, tiles, after, number, tiles_n, tile.BLOCK_M, tile.BAND)
            acc = _sum(x, w, place, f, k, segments.TABLE, method, activation, tile)
            expert, row, end, _, tile_n = place
            _finish(acc, factors, into, expert, row, end, tile_n * tile.BLOCK_N, f, activation)
