"""Shared parts of products over segments of rows: the place of a tile, and one step of the sum.

Boxes that a step loads one after the other, before it uses, transposes or reshapes any of them, arrive at one barrier,
for which the step waits once. Which boxes share a barrier, and which is loaded first, was measured for each kernel: it
changes times by up to 5 %, and no bit.

Tiles come from the tile table (TABLE: BLOCK_M divides its 128 rows). Tiles of few rows come from the segments' offsets
instead, so that no program gets a part of a record that has no rows.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.groups import in_bands, pick
from ..device.tiles import TILE_ROWS, band_of_tile, rows_of_tile, segment_rows, tiles_in_table


class Segments(NamedTuple):
    """Segments of rows, one per expert.

    Attributes:
        tiles_ptr: the tile table (device/tiles.py); without TABLE [E + 1] int32 offsets.
        taken_ptr: [1] int32, zero at the launch; read if programs share tiles (turns.py).
        num_rows: R.
        num_experts: E.
        TABLE: tiles come from a table.
        SP: a power of two, at least E.
    """

    tiles_ptr: Any
    taken_ptr: Any
    num_rows: Any
    num_experts: Any
    TABLE: tl.constexpr
    SP: tl.constexpr


class Factors(NamedTuple):
    """Scales, biases and weights of a product.

    Attributes:
        x_scale_ptr: scales of rows [R] float32, read if SCALED.
        w_scale_ptr: scales of columns [E, N] float32, read if SCALED.
        bias_ptr: [E, N] float32 or bf16, read if HAS_BIAS.
        row_weights_ptr: [R] float32, read if HAS_WEIGHTS.
        SCALED, HAS_BIAS, HAS_WEIGHTS: which of them the product has.
    """

    x_scale_ptr: Any
    w_scale_ptr: Any
    bias_ptr: Any
    row_weights_ptr: Any
    SCALED: tl.constexpr
    HAS_BIAS: tl.constexpr
    HAS_WEIGHTS: tl.constexpr


@triton.jit
def table_tiles(tiles_ptr, num_rows, BLOCK_M: tl.constexpr):
    """Number of tile rows, BLOCK_M rows each, for which the records of a table have room; 0 if the rows of the table do
    not fit into `num_rows`."""
    return tiles_in_table(tiles_ptr, num_rows) * (TILE_ROWS // BLOCK_M)


@triton.jit
def table_tile(tiles_ptr, tile, tiles_n, BLOCK_M: tl.constexpr):
    """(expert, first row, row past the last, row past the last that is not padding, column of tiles) of a tile.

    A part of a record of 128 rows may have no rows, or only padding.
    """
    PARTS: tl.constexpr = TILE_ROWS // BLOCK_M
    # A band spans the same tile numbers that its records would span one by one.
    first, height = band_of_tile(tiles_ptr, tile // (PARTS * tiles_n))
    inside = tile - first * (PARTS * tiles_n)
    tile_m = inside % (height * PARTS)
    expert, row, rows, filled = rows_of_tile(tiles_ptr, first + tile_m // PARTS)
    return expert, row + tile_m % PARTS * BLOCK_M, row + rows, row + filled, inside // (height * PARTS)


@triton.jit
def segment_tiles(segments, tiles_n, BLOCK_M: tl.constexpr):
    """(first row, rows, tiles, running total of tiles with this segment) of every segment, [SP] each."""
    starts, rows = segment_rows(segments.tiles_ptr, segments.num_rows, segments.num_experts, segments.SP)
    tiles = tl.cdiv(rows, BLOCK_M) * tiles_n
    return starts, rows, tiles, tl.cumsum(tiles, 0)


@triton.jit
def segment_tile(starts, rows, tiles, after, tile, tiles_n, BLOCK_M: tl.constexpr, BAND: tl.constexpr):
    """The same as `table_tile`, from segments in registers. All rows count as not padding."""
    expert = tl.sum((after <= tile).to(tl.int32))
    num_rows = pick(rows, expert)
    tile_m, tile_n = in_bands(tile - pick(after - tiles, expert), tl.cdiv(num_rows, BLOCK_M), tiles_n, BAND)
    first = pick(starts, expert)
    end = first + num_rows
    return expert, first + tile_m * BLOCK_M, end, end, tile_n


@triton.jit
def halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Left and right half of a tile [ROWS, COLUMNS]; no value moves to another thread."""
    return tile.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1).split()


@triton.jit
def joined(left, right):
    """The tile of which these are the left and the right half; no value moves to another thread."""
    return tl.join(left, right).permute(0, 2, 1).reshape(left.shape[0], 2 * left.shape[1])


@triton.jit
def begin_sum(place, k, TABLE: tl.constexpr, SWAP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(terms, acc): the terms of a tile's sum, and zeros [ROWS, COLUMNS], with SWAP transposed.

    place: as `table_tile` returns it. TABLE: it comes from a table, of whose record a part may hold only padding.
    """
    _, row, _, filled, _ = place
    terms = k
    if TABLE and ROWS < TILE_ROWS:
        terms = tl.where(row < filled, k, 0)
    if SWAP:
        acc = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    else:
        acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    return terms, acc


@triton.jit
def add_step(acc, x_tile, w_tile, SWAP: tl.constexpr, PROMOTE: tl.constexpr):
    """acc + x_tile [M, K] @ w_tile [K, N]. SWAP: transposed, for few rows: weight rows fill the tile.

    PROMOTE: add the step in float32. Otherwise tensor cores accumulate into `acc`, on Hopper with fewer bits if
    operands are e4m3.
    """
    if SWAP:
        left = w_tile.T
        right = x_tile.T
    else:
        left = x_tile
        right = w_tile
    if PROMOTE:
        acc += tl.dot(left, right)
    else:
        acc = tl.dot(left, right, acc)
    return acc


@triton.jit
def add_step_by_halves(left, right, lower, x_upper, x_lower, w_tile):
    """Add a step to a tile of two halves of rows, in float32. Returns (left, right, lower).

    left, right: sums of the upper rows, [M, N / 2] each. lower: sums of the lower rows, [M, N].
    x_upper, x_lower: [M, K]. w_tile: [K, N].

    The upper rows' right part is added after the product of the lower rows has begun, so that tensor cores multiply
    while other units add. There are not enough registers to add all of it then.
    """
    M: tl.constexpr = lower.shape[0]
    of_left, of_right = halves(tl.dot(x_upper, w_tile), M, lower.shape[1])
    left += of_left
    of_lower = tl.dot(x_lower, w_tile)
    right += of_right
    lower += of_lower
    return left, right, lower
