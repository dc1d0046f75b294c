"""Tiles of grouped matrix products, derived on the device from the groups' ends.

Rows lie group after group; `ends` [E] int32 holds the row past the last one of each group. The rows past
the last group count as group E, which has no weights. EP, a power of two, is at least E + 1.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Groups(NamedTuple):
    """The groups of a product's rows.

    Attributes:
        ends_ptr: [E] int32.
        num_rows: R, including the rows past the last group.
        num_experts: E.
        EP: a power of two, at least E + 1.
    """

    ends_ptr: Any
    num_rows: Any
    num_experts: Any
    EP: tl.constexpr


class GemmTile(NamedTuple):
    """Tile of a product [M, N], and the loop over K that computes it.

    Attributes:
        BLOCK_M, BLOCK_N: rows and columns.
        BLOCK_K: elements of K per step of the loop.
        BAND: rows of tiles that are computed together (`in_bands`).
        STAGES: loads in flight.
    """

    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_K: tl.constexpr
    BAND: tl.constexpr
    STAGES: tl.constexpr


class WgradTile(NamedTuple):
    """Tile of the result [I, J], and the loop over rows that computes it.

    Attributes:
        BLOCK_I, BLOCK_J: rows and columns of the result.
        BLOCK_R: rows of x and y per step of the loop.
        BAND: rows of tiles that are computed together (`in_bands`).
        STAGES: loads in flight.
    """

    BLOCK_I: tl.constexpr
    BLOCK_J: tl.constexpr
    BLOCK_R: tl.constexpr
    BAND: tl.constexpr
    STAGES: tl.constexpr


@triton.jit
def group_rows(groups):
    """First row and number of rows of every group, [EP] each; invalid ends are clamped to the rows."""
    group = tl.arange(0, groups.EP)
    start = tl.load(groups.ends_ptr + group - 1, mask=(group > 0) & (group <= groups.num_experts), other=0)
    end = tl.load(groups.ends_ptr + group, mask=group < groups.num_experts, other=0)
    end = tl.minimum(tl.where(group == groups.num_experts, groups.num_rows, end), groups.num_rows)
    start = tl.maximum(start, 0)
    return start, tl.maximum(end - start, 0)


@triton.jit
def pick(values, group):
    """Element `group` of a vector of non-negative integers."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == group, values, 0))


@triton.jit
def in_bands(tile, tiles_m, tiles_n, BAND: tl.constexpr):
    """Map a tile number to (m, n) in bands of BAND rows of tiles, so tiles computed together share operands in L2."""
    per_band = BAND * tiles_n
    first = tile // per_band * BAND
    height = tl.minimum(tiles_m - first, BAND)
    inside = tile % per_band
    return first + inside % height, inside // height


@triton.jit
def my_first(first, shift):
    """This program's first tile from `first` on. Tile t belongs to program (t + shift) modulo the programs."""
    num_programs = tl.num_programs(0)
    turn = (first + shift) % num_programs
    return first + (tl.program_id(0) + num_programs - turn) % num_programs
