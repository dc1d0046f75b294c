"""First product of the experts with the activation in its epilogue: rows in segments, one matrix per segment.

Protocol      pre[r] = x[r] @ w[expert of r]^T (+ bias), act[r] = activation(pre[r]) * row_weights[r]. Gated, the
              weights of an expert are F rows of gate and then F of up; a tile has BLOCK_N columns of each, as one
              product of 2 * BLOCK_N columns. Programs are persistent; each takes every num_programs-th tile of
              the table, or of the segments. Sums are float32. OUT: the activation as bf16, or as MXFP8 of its float32
              values, RCEIL along the row, or as bf16 of that. Rows behind the last segment have no tiles.
Layout        x [R, K] and w [E, F or 2F, K], contiguous, bf16, or (SCALED) e4m3 with float32 scales [R] and
              [E, F or 2F]. bias [E, F or 2F]; act [R, F], its scales [R, F/32] uint8; pre [R, F or 2F] bf16: gate
              columns, then up. TMA: boxes of w are of [E * halves, F, K], where the copy engine fills in zeros behind F
              and K; those of x may reach into the next segment: what is computed there is not stored. FLATTEN: one
              loop over tiles and steps, whose loads go on under the epilogue; BLOCK_M is then 128.
Memory order  Plain loads and stores; the kernels follow each other on one stream.
Progress      No program waits.
Replay        Nothing is kept between calls.
"""

import triton
import triton.language as tl

from ..device.codes import ACT_OUT_BF16, ACT_OUT_MX
from ..device.mxfp8 import BLOCK, MODE_RCEIL, dequantize_tile, quantize_tile
from ..spec import ep_kernel
from .activation import apply_activation
from .products import add_step, segment_tile, segment_tiles, table_tile, table_tiles

_BF16 = tl.constexpr(ACT_OUT_BF16)
_MX = tl.constexpr(ACT_OUT_MX)


@triton.jit
def _of_matrix(x, scale_ptr, bias_ptr, matrix, col, f, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr):
    """A tile [M, N] from column `col` on of a product with one of the matrices [matrices, f, K]: scaled, with bias."""
    cols = col + tl.arange(0, x.shape[1])
    at = matrix.to(tl.int64) * f + cols
    if SCALED:
        x = x * tl.load(scale_ptr + at, mask=cols < f, other=0.0)[None, :]
    if HAS_BIAS:
        x += tl.load(bias_ptr + at, mask=cols < f, other=0.0).to(tl.float32)[None, :]
    return x


@triton.jit
def _store_pre(pre_ptr, x, rows, in_m, col, f, width):
    """A tile [M, N] of bf16 from column `col` on, of f, into rows of `width`."""
    cols = col + tl.arange(0, x.shape[1])
    at = rows.to(tl.int64)[:, None] * width + cols[None, :]
    tl.store(pre_ptr + at, x, mask=in_m[:, None] & (cols < f)[None, :])


@triton.jit
def _store_act(act_ptr, act_scale_ptr, value, rows, in_m, col, f, OUT: tl.constexpr):
    """A tile [M, N] of the activation, float32, from column `col` on, as bf16 or MXFP8. N is a multiple of 32."""
    cols = col + tl.arange(0, value.shape[1])
    at = rows.to(tl.int64)[:, None] * f + cols[None, :]
    inside = in_m[:, None] & (cols < f)[None, :]
    if OUT == _BF16:
        tl.store(act_ptr + at, value.to(tl.bfloat16), mask=inside)
    else:
        M: tl.constexpr = value.shape[0]
        BLOCKS: tl.constexpr = value.shape[1] // BLOCK
        elements, scale = quantize_tile(value.reshape(M, BLOCKS, BLOCK), MODE_RCEIL, False)
        if OUT == _MX:
            tl.store(act_ptr + at, elements.reshape(M, BLOCKS * BLOCK), mask=inside)
            block = col // BLOCK + tl.arange(0, BLOCKS)
            at_s = rows.to(tl.int64)[:, None] * (f // BLOCK) + block[None, :]
            tl.store(act_scale_ptr + at_s, scale, mask=in_m[:, None] & (block * BLOCK < f)[None, :])
        else:
            rounded = dequantize_tile(elements, scale).reshape(M, BLOCKS * BLOCK)
            tl.store(act_ptr + at, rounded.to(tl.bfloat16), mask=inside)


@triton.jit
def _finish(
    acc,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    row_weights_ptr,
    act_ptr,
    act_scale_ptr,
    pre_ptr,
    expert,
    row,
    end,
    col,
    f,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_PRE: tl.constexpr,
    OUT: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    CLAMP: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    UP_OFFSET: tl.constexpr,
):
    """Store what follows from a tile [M, WIDTH] of the product, whose rows from `row` on end before `end`."""
    HALVES: tl.constexpr = 2 if GATED else 1
    BLOCK_M: tl.constexpr = acc.shape[0]
    WIDTH: tl.constexpr = acc.shape[1]
    rows = row + tl.arange(0, BLOCK_M)
    in_m = rows < end
    # Registers of a thread hold both halves of the columns: gate and up, or left and right.
    first, second = acc.reshape(BLOCK_M, 2, WIDTH // 2).permute(0, 2, 1).split()
    matrix = expert * HALVES
    if SCALED:
        # One factor after the other: the product of two scales may leave float32 where the result does not.
        x_scale = tl.load(x_scale_ptr + rows, mask=in_m, other=0.0)[:, None]
        first = first * x_scale
        second = second * x_scale
    factor = 1.0
    if HAS_WEIGHTS:
        factor = tl.load(row_weights_ptr + rows, mask=in_m, other=0.0)[:, None]
    if GATED:
        gs = (first,)
        us = (second,)
        WHOLE: tl.constexpr = BLOCK_M >= 128 and OUT != _BF16  # sm_100 would spill what it quantises in parts
        PARTS: tl.constexpr = 2 if WIDTH >= 128 and not WHOLE else 1
        if PARTS == 2:  # at once they would take the registers that the other half of the rows needs
            gs = first.reshape(BLOCK_M, 2, WIDTH // 4).permute(0, 2, 1).split()
            us = second.reshape(BLOCK_M, 2, WIDTH // 4).permute(0, 2, 1).split()
        for part in tl.static_range(PARTS):
            at = col + part * (WIDTH // 4)
            g = _of_matrix(gs[part], w_scale_ptr, bias_ptr, matrix, at, f, SCALED, HAS_BIAS)
            u = _of_matrix(us[part], w_scale_ptr, bias_ptr, matrix + 1, at, f, SCALED, HAS_BIAS)
            value = apply_activation(g, u, KIND, True, CLAMP, LIMIT, ALPHA, UP_OFFSET)
            # Few registers are left to those that wait for the activation to be stored.
            g = g.to(tl.bfloat16)
            u = u.to(tl.bfloat16)
            _store_act(act_ptr, act_scale_ptr, value * factor, rows, in_m, at, f, OUT)
            if HAS_PRE:
                _store_pre(pre_ptr, g, rows, in_m, at, f, 2 * f)
                _store_pre(pre_ptr + f, u, rows, in_m, at, f, 2 * f)
    else:
        for part in tl.static_range(2):
            at = col + part * (WIDTH // 2)
            if part == 0:
                g = first
            else:
                g = second
            g = _of_matrix(g, w_scale_ptr, bias_ptr, matrix, at, f, SCALED, HAS_BIAS)
            value = apply_activation(g, g, KIND, False, CLAMP, LIMIT, ALPHA, UP_OFFSET)
            g = g.to(tl.bfloat16)
            _store_act(act_ptr, act_scale_ptr, value * factor, rows, in_m, at, f, OUT)
            if HAS_PRE:
                _store_pre(pre_ptr, g, rows, in_m, at, f, f)


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
    specialised=("f", "k"),
    num_warps=None,
)
def gate_up_kernel(
    x,  # [R, K]: pointer, or with TMA a descriptor of boxes [BLOCK_M, BLOCK_K], with SPLIT half as many rows
    w,  # [E, HALVES * F, K]: pointer, or a descriptor of [E * HALVES, F, K], boxes [HALVES, BLOCK_N, BLOCK_K]
    x_scale_ptr,  # [R] float32
    w_scale_ptr,  # [E, HALVES * F] float32
    bias_ptr,  # [E, HALVES * F] float32 or bf16
    row_weights_ptr,  # [R] float32
    act_ptr,  # out [R, F] bf16 or e4m3
    act_scale_ptr,  # out [R, F/32] uint8
    pre_ptr,  # out [R, HALVES * F] bf16
    tiles_ptr,  # the tile table; without TABLE [E + 1] int32 offsets
    num_rows,
    f,
    k,
    num_experts,
    TMA: tl.constexpr,
    TABLE: tl.constexpr,
    SP: tl.constexpr,
    SCALED: tl.constexpr,
    PROMOTE: tl.constexpr,
    SWAP: tl.constexpr,
    FLATTEN: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_PRE: tl.constexpr,
    OUT: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    CLAMP: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    STAGES: tl.constexpr,
):
    HALVES: tl.constexpr = 2 if GATED else 1
    WIDTH: tl.constexpr = HALVES * BLOCK_N
    HALF_M: tl.constexpr = BLOCK_M // 2
    tiles_n = tl.cdiv(f, BLOCK_N)
    if TABLE:
        num_tiles = table_tiles(tiles_ptr, BLOCK_M) * tiles_n
    else:
        starts, sizes, tiles, after = segment_tiles(tiles_ptr, num_rows, num_experts, tiles_n, SP, BLOCK_M)
        num_tiles = tl.sum(tiles)
    offs_m = tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    half = tl.arange(0, WIDTH) // BLOCK_N
    offs_w = tl.arange(0, WIDTH) % BLOCK_N
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=FLATTEN, num_stages=STAGES):
        if TABLE:
            expert, row, end, filled, tile_n = table_tile(tiles_ptr, tile, tiles_n, BLOCK_M)
        else:
            expert, row, end, filled, tile_n = segment_tile(starts, sizes, tiles, after, tile, tiles_n, BLOCK_M, BAND)
        col = tile_n * BLOCK_N
        if SPLIT:
            upper = tl.zeros((HALF_M, WIDTH), dtype=tl.float32)
            lower = tl.zeros((HALF_M, WIDTH), dtype=tl.float32)
            # A half of padding is zero, and one without rows nothing.
            both = tl.where(row + HALF_M < filled, k, 0)
            for k0 in tl.range(0, both, BLOCK_K, num_stages=STAGES):
                w_tile = w.load([expert * HALVES, col, k0]).reshape(WIDTH, BLOCK_K).T
                upper = add_step(upper, x.load([row, k0]), w_tile, False, PROMOTE)
                lower = add_step(lower, x.load([row + HALF_M, k0]), w_tile, False, PROMOTE)
            for k0 in tl.range(both, k, BLOCK_K, num_stages=STAGES):
                w_tile = w.load([expert * HALVES, col, k0]).reshape(WIDTH, BLOCK_K).T
                upper = add_step(upper, x.load([row, k0]), w_tile, False, PROMOTE)
            parts = (upper, lower)
        else:
            rows = row + offs_m
            terms = k
            if TABLE and BLOCK_M < 128:
                terms = tl.where(row < filled, k, 0)
            if SWAP:
                acc = tl.zeros((WIDTH, BLOCK_M), dtype=tl.float32)
            else:
                acc = tl.zeros((BLOCK_M, WIDTH), dtype=tl.float32)
            if TMA:
                for k0 in tl.range(0, terms, BLOCK_K, num_stages=STAGES):
                    w_tile = w.load([expert * HALVES, col, k0]).reshape(WIDTH, BLOCK_K)
                    acc = add_step(acc, x.load([row, k0]), w_tile.T, SWAP, PROMOTE)
            else:
                at_w = (expert * HALVES + half).to(tl.int64) * f + col + offs_w
                x_ptrs = x + rows.to(tl.int64)[:, None] * k + offs_k[None, :]
                w_ptrs = w + at_w[:, None] * k + offs_k[None, :]
                for k0 in tl.range(0, terms, BLOCK_K, num_stages=STAGES):
                    in_k = (k0 + offs_k < k)[None, :]
                    x_tile = tl.load(x_ptrs + k0, mask=(rows < end)[:, None] & in_k, other=0.0)
                    w_tile = tl.load(w_ptrs + k0, mask=(col + offs_w < f)[:, None] & in_k, other=0.0)
                    acc = add_step(acc, x_tile, w_tile.T, SWAP, PROMOTE)
            if SWAP:
                acc = acc.T
            parts = (acc,)
        for part in tl.static_range(2 if SPLIT else 1):
            _finish(
                parts[part],
                x_scale_ptr,
                w_scale_ptr,
                bias_ptr,
                row_weights_ptr,
                act_ptr,
                act_scale_ptr,
                pre_ptr,
                expert,
                row + part * HALF_M,
                end,
                col,
                f,
                SCALED,
                HAS_BIAS,
                HAS_WEIGHTS,
                HAS_PRE,
                OUT,
                KIND,
                GATED,
                CLAMP,
                LIMIT,
                ALPHA,
                UP_OFFSET,
            )
