"""Which program of a product computes which tile, where tiles take unequal times.

A tile whose lower half is padding takes about half as long as others. If every program took every num_programs-th tile,
the busiest would have 2 to 9 % more to do than the mean: bands of 8 records (device/tiles.py) give the last record of
each band to the same programs. So a program that has computed its first tile asks for one of the rest after the other,
in order, until none is left. Asking is an atomic, whose answer the program reads after it has stored a tile.

If up to half of the programs would have one tile more than the others, each of the last tiles is two units, its upper
and its lower half of rows, for two programs. Which program computes a tile changes no bit of it.

`rows_product` asks for the last quarter of its tiles only: products of 2048 terms took 1 to 5 % longer if all were
asked for. And it stores in boxes, which Triton lets run during the next tile in counted loops only. A program leaves
this loop after `most` turns, which are more than a fair share; whichever programs run first, all of them together have
turns for twice the rest, so every tile is computed. A program never asks for a tile that it has no turn for.
"""

import triton
import triton.language as tl

from .products import table_tile

_THREADS = tl.constexpr(128)
"""Threads of a program that shares tiles. With one element each, the answer of an atomic stays in a register."""


@triton.jit
def turns_of(tiles):
    """(fixed, most): turns after each of which a program's next tile is fixed, too; the most turns that it takes."""
    programs = tl.num_programs(0)
    fixed = tiles // programs * 3 // 4
    return fixed, fixed + 2 * (tl.cdiv(tiles, programs) - fixed)


@triton.jit
def ask(taken_ptr, asks):
    """Ask for a tile if `asks`: a ticket for `answer`. taken_ptr: [1] int32, zero at the launch."""
    thread = tl.arange(0, _THREADS)
    return tl.atomic_add(taken_ptr + thread * 0, 1, mask=(thread == 0) & asks, sem="relaxed")


@triton.jit
def answer(ticket):
    """Number of tiles for which programs had asked before."""
    return tl.sum(tl.where(tl.arange(0, _THREADS) == 0, ticket, 0))


@triton.jit
def ask_in_turn(taken_ptr, turn, fixed, most):
    """Ask for the tile after that of `turn`, unless it is fixed or has no turn: a ticket for `following`."""
    return ask(taken_ptr, (turn >= fixed) & (turn + 1 < most))


@triton.jit
def following(tile, ticket, turn, fixed):
    """The tile of this program after `tile`, which it has computed in `turn`; past the last if there is none."""
    if turn < fixed:
        tile += tl.num_programs(0)
    else:
        tile = (fixed + 1) * tl.num_programs(0) + answer(ticket)
    return tile


@triton.jit
def units_of(num_tiles):
    """(units, tiles that are one unit each; the others are two)."""
    programs = tl.num_programs(0)
    rest = num_tiles % programs
    whole = tl.where(2 * rest <= programs, num_tiles - rest, num_tiles)
    return 2 * num_tiles - whole, whole


@triton.jit
def unit_tile(tiles_ptr, unit, whole, tiles_n, BLOCK_M: tl.constexpr):
    """The same as `table_tile` for a unit, where the first `whole` tiles are one unit each.

    For an upper half no row from the lower half on is in use; a lower half begins at its first row.
    """
    HALF_M: tl.constexpr = BLOCK_M // 2
    past = tl.maximum(unit - whole, 0)
    expert, row, end, filled, tile_n = table_tile(tiles_ptr, unit - past + past // 2, tiles_n, BLOCK_M)
    upper = (unit >= whole) & (past % 2 == 0)
    row += past % 2 * HALF_M
    end = tl.where(upper, tl.minimum(end, row + HALF_M), end)
    return expert, row, end, tl.minimum(filled, end), tile_n
