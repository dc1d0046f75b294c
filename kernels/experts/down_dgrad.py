"""Gradient of the rows of an expert's second product, fused with the gradient of the activation before it.

Protocol      down_dgrad: dact = dy @ w2 over segments is the gradient of the weighted activation; it never leaves
              registers. From a tile of dact, g and u in `pre`, and the rows' weights, a program computes
              dpre = dact * weight * derivatives (of g, then of u); act, the weighted activation again, for the gradient
              of w2; and per row the sum of dact * activation over the tile's columns, which is the tile's share of the
              gradient of the row's weight. row_weight_gradient adds the shares in the order of tiles, and the
              contribution of the second product's bias.
              Programs are persistent; each takes every num_programs-th tile: records of the table times columns; with
              SPLIT they share tiles (turns.py).
              FP8: both operands have one scale per row, so no scale is inside the sum; PROMOTE adds the products of
              every step in float32, outside of the tensor core, which accumulates with fewer bits.
Layout        dy [R, H]; w [E, H, F], with K_MAJOR [E, F, H]; through descriptors, which clip boxes at H and F, so
              that no box holds values of the next expert. Boxes of dy may reach into the next segment: results for
              those rows are not stored. pre, dpre [R, 2F] (not GATED: [R, F]), which may share memory, and act [R, F]
              bf16 row-major; shares [tiles of F, R] float32. Tiles: device/tiles.py. Rows past the last segment are
              not written.
Memory order  Plain loads and stores; the kernels follow each other on one stream. With SPLIT relaxed atomics decide
              which program computes a tile, nothing else.
Progress      No program waits.
Replay        Nothing is kept between calls; taken_ptr is zeroed before each launch.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.payload import Tile
from ..device.tiles import TILE_ROWS, rows_of_tile, tiles_in_table
from ..spec import ep_kernel
from .activation import Activation, activation_gradients
from .products import add_step, begin_sum, halves, table_tile, table_tiles
from .turns import answer, ask, unit_tile, units_of


@triton.jit
def _load_box(w, expert, col, k, K_MAJOR: tl.constexpr):
    """Load a box of an expert's weights, [1, BLOCK_N, BLOCK_K] with K_MAJOR, else [1, BLOCK_K, BLOCK_N]."""
    if K_MAJOR:
        return w.load([expert, col, k])
    else:
        return w.load([expert, k, col])


@triton.jit
def _as_tile(box, K_MAJOR: tl.constexpr):
    """[BLOCK_K, BLOCK_N] of such a box."""
    matrix = box.reshape(box.shape[1], box.shape[2])
    if K_MAJOR:
        return matrix.T
    else:
        return matrix


class Factors(NamedTuple):
    """Scales of the product and weights of its rows.

    Attributes:
        dy_scale_ptr: with FP8 [R] float32, else unused.
        w_scale_ptr: with FP8 [E, F] float32, else unused.
        weights_ptr: with HAS_WEIGHTS [R] float32, else unused.
        FP8: operands are e4m3 with scales.
        HAS_WEIGHTS: rows have routing weights.
    """

    dy_scale_ptr: Any
    w_scale_ptr: Any
    weights_ptr: Any
    FP8: tl.constexpr
    HAS_WEIGHTS: tl.constexpr


class OfRows(NamedTuple):
    """Tensors that the kernel reads and stores per row.

    Attributes:
        pre_ptr: [R, 2F] bf16, the input of the activation.
        dpre_ptr: out [R, 2F] bf16, the gradient of `pre`; may equal pre_ptr: every element is loaded before it is
            stored.
        act_ptr: out [R, F] bf16, the weighted activation.
        shares_ptr: with HAS_WEIGHTS out [tiles of F, R] float32, else unused.
    """

    pre_ptr: Any
    dpre_ptr: Any
    act_ptr: Any
    shares_ptr: Any


class Sizes(NamedTuple):
    """R, H and F."""

    num_rows: Any
    hidden: Any
    ffn: Any


class Method(NamedTuple):
    """How the product is computed.

    Attributes:
        PROMOTE: as in `add_step`.
        K_MAJOR: weights are [E, F, H], else [E, H, F].
        SPLIT: compute a tile as two halves of its rows; programs share tiles.
        FLATTEN: the loads of the next tile begin before this one is stored.
    """

    PROMOTE: tl.constexpr
    K_MAJOR: tl.constexpr
    SPLIT: tl.constexpr
    FLATTEN: tl.constexpr


class DgradTile(NamedTuple):
    """Tile of the product [R, F], and the loop over H that computes it.

    Attributes:
        BLOCK_M, BLOCK_N: rows and columns.
        BLOCK_K: elements of H per step of the loop.
        LEVELS: how many times the columns are halved before they are stored.
        STAGES: loads in flight.
    """

    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_K: tl.constexpr
    LEVELS: tl.constexpr
    STAGES: tl.constexpr


class Place(NamedTuple):
    """Place of a tile, as `table_tile` returns it (products.py)."""

    expert: Any
    row: Any
    end: Any
    filled: Any
    tile_n: Any


class OfBias(NamedTuple):
    """Operands of the bias's contribution to gradients of routing weights; read if HAS_BIAS.

    Attributes:
        dy_ptr: [R, H] bf16 or e4m3.
        dy_scale_ptr: with FP8 [R] float32.
        bias_ptr: [E, H] bf16 or float32.
        hidden: H.
        HAS_BIAS: the second product has a bias.
        FP8: dy is e4m3 with scales.
    """

    dy_ptr: Any
    dy_scale_ptr: Any
    bias_ptr: Any
    hidden: Any
    HAS_BIAS: tl.constexpr
    FP8: tl.constexpr


@triton.jit
def _finish(dact, weight, of_rows, rows, in_m, filled, col, ffn, activation):
    """Store dpre and act for a tile [M, N] of dact; return the sums of dact * activation over its columns, [M].

    filled: [M], rows that are not padding. For padding dact is zero, and `pre` is not read.
    """
    cols = (col + tl.arange(0, dact.shape[1]))[None, :]
    mask = in_m[:, None] & (cols < ffn)
    known = filled[:, None] & (cols < ffn)
    width = ffn
    if activation.GATED:
        width = 2 * ffn
    at = rows.to(tl.int64)[:, None] * width + cols
    g = tl.load(of_rows.pre_ptr + at, mask=known, other=0.0).to(tl.float32)
    u = g
    if activation.GATED:
        u = tl.load(of_rows.pre_ptr + at + ffn, mask=known, other=0.0).to(tl.float32)
    value, slope_g, slope_u = activation_gradients(g, u, activation)
    share = tl.sum(tl.where(mask, dact * value, 0.0), axis=1)
    scaled = dact * weight[:, None]
    tl.store(of_rows.dpre_ptr + at, (scaled * slope_g).to(tl.bfloat16), mask=mask)
    if activation.GATED:
        tl.store(of_rows.dpre_ptr + at + ffn, (scaled * slope_u).to(tl.bfloat16), mask=mask)
    at_act = rows.to(tl.int64)[:, None] * ffn + cols
    tl.store(of_rows.act_ptr + at_act, (value * weight[:, None]).to(tl.bfloat16), mask=mask)
    return share


@triton.jit
def _finish_tile(acc, factors, of_rows, sizes, place, activation, LEVELS: tl.constexpr):
    """Store the results for a tile of dy @ w2 (rows from place.row up to place.end, exclusive), part by part."""
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    PART: tl.constexpr = BLOCK_N // 2**LEVELS
    col = place.tile_n * BLOCK_N
    rows = place.row + tl.arange(0, BLOCK_M)
    in_m = rows < place.end
    weight = tl.full((BLOCK_M,), 1.0, tl.float32)
    if factors.HAS_WEIGHTS:
        weight = tl.load(factors.weights_ptr + rows, mask=in_m, other=0.0)
    if factors.FP8:
        # Multiply by one scale at a time: the product of both may leave the range of float32 where the result does not.
        acc = acc * tl.load(factors.dy_scale_ptr + rows, mask=in_m, other=0.0)[:, None]
        cols = col + tl.arange(0, BLOCK_N)
        acc = (
            acc
            * tl.load(
                factors.w_scale_ptr + place.expert.to(tl.int64) * sizes.ffn + cols, mask=cols < sizes.ffn, other=0.0
            )[None, :]
        )
    parts = (acc,)
    for level in tl.static_range(LEVELS):
        narrower = ()
        for part in tl.static_range(2**level):
            narrower = narrower + halves(parts[part], BLOCK_M, BLOCK_N // 2**level)
        parts = narrower
    share = tl.zeros((BLOCK_M,), tl.float32)
    for part in tl.static_range(2**LEVELS):
        share += _finish(
            parts[part], weight, of_rows, rows, in_m, rows < place.filled, col + part * PART, sizes.ffn, activation
        )
    if factors.HAS_WEIGHTS:
        tl.store(of_rows.shares_ptr + place.tile_n.to(tl.int64) * sizes.num_rows + rows, share, mask=in_m)


@triton.jit
def _sums_by_halves(dy, w, place, hidden, method, tile):
    """Sums of the upper and of the lower rows of a tile, [BLOCK_M / 2, BLOCK_N] each, one after the other: by
    `add_step_by_halves` this kernel takes longer."""
    HALF_M: tl.constexpr = tile.BLOCK_M // 2
    row = place.row
    col = place.tile_n * tile.BLOCK_N
    upper = tl.zeros((HALF_M, tile.BLOCK_N), tl.float32)
    lower = tl.zeros((HALF_M, tile.BLOCK_N), tl.float32)
    # Skip a lower half of padding, which is zero, or without rows.
    both = tl.where(row + HALF_M < place.filled, hidden, 0)
    for k in tl.range(0, both, tile.BLOCK_K, num_stages=tile.STAGES):
        dy_upper = dy.load([row, k])
        dy_lower = dy.load([row + HALF_M, k])
        box = _load_box(w, place.expert, col, k, method.K_MAJOR)
        w_tile = _as_tile(box, method.K_MAJOR)
        upper = add_step(upper, dy_upper, w_tile, False, method.PROMOTE)
        lower = add_step(lower, dy_lower, w_tile, False, method.PROMOTE)
    for k in tl.range(both, hidden, tile.BLOCK_K, num_stages=tile.STAGES):
        box = _load_box(w, place.expert, col, k, method.K_MAJOR)
        dy_tile = dy.load([row, k])
        upper = add_step(upper, dy_tile, _as_tile(box, method.K_MAJOR), False, method.PROMOTE)
    return upper, lower


@triton.jit
def _sum(dy, w, place, hidden, method, tile):
    """Sum of a tile, [BLOCK_M, BLOCK_N]."""
    terms, acc = begin_sum(place, hidden, True, False, tile.BLOCK_M, tile.BLOCK_N)
    for k in tl.range(0, terms, tile.BLOCK_K, num_stages=tile.STAGES):
        box = _load_box(w, place.expert, place.tile_n * tile.BLOCK_N, k, method.K_MAJOR)
        dy_tile = dy.load([place.row, k])
        acc = add_step(acc, dy_tile, _as_tile(box, method.K_MAJOR), False, method.PROMOTE)
    return acc


@ep_kernel(
    dy="{DY}",
    w="{W}",
    dy_scale_ptr="*{SCALE}",
    w_scale_ptr="*{SCALE}",
    pre_ptr="*bf16",
    weights_ptr="*fp32",
    tiles_ptr="*i32",
    taken_ptr="*i32",
    dpre_ptr="*bf16",
    act_ptr="*bf16",
    shares_ptr="*fp32",
    specialised=("hidden", "ffn"),
    num_warps=None,
)
def down_dgrad_kernel(
    dy,  # [R, H] bf16 or e4m3: a descriptor of boxes [BLOCK_M, BLOCK_K], with SPLIT half as many rows
    w,  # [E, H, F]: boxes [1, BLOCK_K, BLOCK_N], or with K_MAJOR [E, F, H]: boxes [1, BLOCK_N, BLOCK_K]
    factors: Factors,
    of_rows: OfRows,
    tiles_ptr,  # tile table
    taken_ptr,  # [1] int32, zero; read with SPLIT (turns.py)
    sizes: Sizes,
    method: Method,
    activation: Activation,
    tile: DgradTile,
):
    tiles_n = tl.cdiv(sizes.ffn, tile.BLOCK_N)
    num_tiles = table_tiles(tiles_ptr, sizes.num_rows, tile.BLOCK_M) * tiles_n
    if method.SPLIT:
        units, whole = units_of(num_tiles)
        unit = tl.program_id(0)
        while unit < units:
            expert, row, end, filled, tile_n = unit_tile(tiles_ptr, unit, whole, tiles_n, tile.BLOCK_M)
            place = Place(expert, row, end, filled, tile_n)
            sums = _sums_by_halves(dy, w, place, sizes.hidden, method, tile)
            ticket = ask(taken_ptr, True)
            for part in tl.static_range(2):
                place = Place(expert, row + part * (tile.BLOCK_M // 2), end, filled, tile_n)
                _finish_tile(sums[part], factors, of_rows, sizes, place, activation, tile.LEVELS)
            unit = tl.num_programs(0) + answer(ticket)
    else:
        for number in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=method.FLATTEN):
            expert, row, end, filled, tile_n = table_tile(tiles_ptr, number, tiles_n, tile.BLOCK_M)
            place = Place(expert, row, end, filled, tile_n)
            acc = _sum(dy, w, place, sizes.hidden, method, tile)
            _finish_tile(acc, factors, of_rows, sizes, place, activation, tile.LEVELS)


@ep_kernel(
    shares_ptr="*fp32",
    dy_ptr="*{DY}",
    dy_scale_ptr="*{SCALE}",
    bias_ptr="*{BIAS}",
    tiles_ptr="*i32",
    out_ptr="*fp32",
    specialised=("hidden",),
)
def row_weight_gradient_kernel(
    shares_ptr,  # [shares, R] float32
    given: OfBias,
    tiles_ptr,  # tile table
    out_ptr,  # out [R] float32
    num_rows,
    shares,
    block: Tile,
):
    """A program takes ROWS rows of a tile."""
    SUB: tl.constexpr = TILE_ROWS // block.ROWS
    tile = tl.program_id(0) // SUB
    if tile < tiles_in_table(tiles_ptr, num_rows):
        expert, first_row, num_rows_of_tile, _ = rows_of_tile(tiles_ptr, tile)
        within = tl.program_id(0) % SUB * block.ROWS + tl.arange(0, block.ROWS)
        rows = first_row + within
        in_tile = within < num_rows_of_tile
        total = tl.zeros((block.ROWS,), tl.float32)
        share_ptrs = shares_ptr + rows
        for _ in range(shares):
            total += tl.load(share_ptrs, mask=in_tile, other=0.0)
            share_ptrs += num_rows
        if given.HAS_BIAS:
            bias_row = given.bias_ptr + expert.to(tl.int64) * given.hidden
            products = tl.zeros((block.ROWS, block.BLOCK_H), tl.float32)
            for h in range(0, given.hidden, block.BLOCK_H):
                cols = h + tl.arange(0, block.BLOCK_H)
                bias = tl.load(bias_row + cols, mask=cols < given.hidden, other=0.0).to(tl.float32)
                at = rows.to(tl.int64)[:, None] * given.hidden + cols[None, :]
                dy = tl.load(given.dy_ptr + at, mask=in_tile[:, None] & (cols < given.hidden)[None, :], other=0.0).to(
                    tl.float32
                )
                products += dy * bias[None, :]
            of_bias = tl.sum(products, axis=1)
            if given.FP8:
                of_bias *= tl.load(given.dy_scale_ptr + rows, mask=in_tile, other=0.0)
            total += of_bias
        tl.store(out_ptr + rows, total, mask=in_tile)
