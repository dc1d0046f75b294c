"""Tiles of grouped matrix products, found on the device from the groups' ends.

Rows lie group after group; `ends` [E] int32 holds the row after the last one of each group. The rows after
the last group count as group E, which has no weights. EP, a power of two, is at least E + 1.
"""

import triton
import triton.language as tl


@triton.jit
def group_rows(ends_ptr, num_rows, num_groups, EP: tl.constexpr):
    """First row and number of rows of every group, [EP] each; ends that make no sense are cut to the rows."""
    group = tl.arange(0, EP)
    start = tl.load(ends_ptr + group - 1, mask=(group > 0) & (group <= num_groups), other=0)
    end = tl.load(ends_ptr + group, mask=group < num_groups, other=0)
    end = tl.minimum(tl.where(group == num_groups, num_rows, end), num_rows)
    start = tl.maximum(start, 0)
    return start, tl.maximum(end - start, 0)


@triton.jit
def pick(values, group):
    """Element `group` of a vector of non-negative integers."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == group, values, 0))


@triton.jit
def in_bands(tile, tiles_m, tiles_n, BAND: tl.constexpr):
    """Tile number -> (m, n), in bands of BAND rows of tiles, so that tiles computed together share operands in L2."""
    per_band = BAND * tiles_n
    first = tile // per_band * BAND
    height = tl.minimum(tiles_m - first, BAND)
    inside = tile % per_band
    return first + inside % height, inside // height


@triton.jit
def my_first(first, shift):
    """First tile from `first` on that is this program's: programs take turns from tile -`shift` on."""
    num_programs = tl.num_programs(0)
    turn = (first + shift) % num_programs
    return first + (tl.program_id(0) + num_programs - turn) % num_programs
