"""Sum the rows of a token: sums in the memory of this rank, or rows that the ranks of this node have staged."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .buffers import COMBINE_WEIGHT, COMBINE_X, pointers_at, table_ptrs
from .job import first_local, is_local, on_my_node


@triton.jit
def _popcount(x):
    """Bits set in each element of a uint32 tensor, as int32."""
    x -= (x >> 1) & 0x55555555
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def compact_position(here):
    """[KP, n]: position of each entry when the entries `here` come first, in k order, and then the others.

    Uses the bits of a word (KP <= 32): Triton 3.6 does not compile every scan of two elements with 16 warps.
    """
    k = tl.arange(0, here.shape[0])[:, None]
    bit = tl.full(here.shape, 1, tl.uint32) << k.to(tl.uint32)
    among = tl.sum(tl.where(here, bit, 0), axis=0)[None, :]
    before = _popcount(among & (bit - 1))
    return tl.where(here, before, _popcount(among) + k - before)


class Held(NamedTuple):
    """Where the rows of tokens are.

    Attributes:
        rank_ptrs: [ROWS] pointers to K int32 ranks; read unless rows are REDUCED.
        row_ptrs: [ROWS] pointers to K int32 rows in the combine buffers of these ranks, or of this rank, -1 = none.
        TOPK: K.
    """

    rank_ptrs: Any
    row_ptrs: Any
    TOPK: tl.constexpr


class PulledRows(NamedTuple):
    """Rows that are pulled and summed.

    Attributes:
        hidden: elements of a row.
        row_capacity: rows of a combine buffer.
        HAS_WEIGHTS: multiply rows by their weights.
        REDUCED: rows were reduced, in steps, into the combine buffer of this rank; a token's rows are listed without
            gaps. Otherwise each rank staged its rows, indexed by output row.
        PARTIAL_DTYPE: dtype of partial sums that cross nodes.
    """

    hidden: Any
    row_capacity: Any
    HAS_WEIGHTS: tl.constexpr
    REDUCED: tl.constexpr
    PARTIAL_DTYPE: tl.constexpr


class Bases(NamedTuple):
    """Addresses int64 of rows and of their weights.

    Attributes:
        rows: [LWP] combine buffers of this node's ranks. For REDUCED rows [1], that of this rank; or [2], and after it
            where it would lie if it had the sums of this rank's own rows in their place (`with_own`).
        weights: [LWP] or [1], likewise.
    """

    rows: Any
    weights: Any


@triton.jit
def bases_of(job, REDUCED: tl.constexpr, LWP: tl.constexpr):
    """The `Bases` of this node, or for REDUCED rows of this rank."""
    local = tl.arange(0, 1 if REDUCED else LWP)
    ranks = (job.rank if REDUCED else first_local(job)) + local
    rows = tl.load(table_ptrs(job, COMBINE_X, ranks), mask=is_local(job, local), other=0)
    return Bases(rows, tl.load(table_ptrs(job, COMBINE_WEIGHT, ranks), mask=is_local(job, local), other=0))


@triton.jit
def with_own(job, bases, own_ptr, own_row, row_bytes):
    """The `Bases` of REDUCED rows, and one more for the sums of this rank's own rows, which take max_tokens rows of the
    combine buffer: they are at `own_ptr` from row `own_row` on, or, if that is negative, in the buffer."""
    buffer = tl.sum(bases.rows)
    own = own_ptr.to(tl.int64) + (own_row - job.rank * job.max_tokens).to(tl.int64) * row_bytes
    own = tl.where(own_row < 0, buffer, own)
    return Bases(tl.where(tl.arange(0, 2) == 0, buffer, own), bases.weights)


@triton.constexpr_function
def power_of_2(n):
    """The smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


@triton.constexpr_function
def fewer(a, b):
    """The smaller of two numbers."""
    return min(a, b)


@triton.constexpr_function
def looked_at(compact, topk, node_ranks, at_once, stages):
    """Entries of a token that are examined. A list without gaps has at most one row per rank of the node.

    If nothing is copied ahead, the kernel still checks for more rows than the first: without that branch after the
    first loads, the compiler spreads the loads between their uses, and half as many rows are in flight (4 x H200: a
    combine of 4096 tokens took 700 us instead of 570).
    """
    most = min(topk, node_ranks) if compact else topk
    return most if stages > 1 else min(topk, max(most, 2 * at_once))


@triton.jit
def _pointers(bases, local, DTYPE: tl.constexpr):
    """Pointers [ROWS] to the buffers of local ranks [ROWS], given the addresses [LWP] of all; multiples of 16 bytes."""
    every = tl.arange(0, bases.shape[0])[None, :]
    address = tl.sum(tl.where(every == local[:, None], bases[None, :], 0), axis=1)
    return pointers_at(address, DTYPE)


@triton.jit
def _entry(job, rows, bases, alive, held, k):
    """Entry k of each token: where its rows are [ROWS] among `bases.rows`, and its row there, -1 = none.

    Each column is loaded by itself: columns of one block [ROWS, K] would have to be exchanged between threads.
    """
    number = tl.load(held.row_ptrs + k, mask=alive, other=-1)
    number = tl.where(number < rows.row_capacity, number, -1)
    if rows.REDUCED:
        place = tl.zeros(number.shape, tl.int32)
        if bases.rows.shape[0] > 1:
            first = job.rank * job.max_tokens
            place += ((number >= first) & (number < first + job.max_tokens)).to(tl.int32)
        return place, number
    peer = tl.load(held.rank_ptrs + k, mask=alive, other=-1)
    return peer - first_local(job), tl.where(on_my_node(job, peer), number, -1)


@triton.jit
def _add_entries(
    rows,  # PulledRows
    bases,  # Bases
    acc,  # [ROWS, BLOCK_H] float32
    entries,  # of `_entry`, one after the other
    h,  # first column of the tile
    FIRST: tl.constexpr,
    END: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Add to `acc` the rows of entries FIRST to END - 1, all of which are loaded first."""
    offs = h + tl.arange(0, acc.shape[1])[None, :]
    tiles = ()
    weights = ()
    for k in tl.static_range(FIRST, END):
        rank, number = entries[k]
        here = number >= 0
        source = _pointers(bases.rows, rank, DTYPE) + number.to(tl.int64) * rows.hidden
        tiles += (tl.load(source[:, None] + offs, mask=here[:, None] & (offs < rows.hidden), other=0.0),)
        if rows.HAS_WEIGHTS:
            weights += (tl.load(_pointers(bases.weights, rank, tl.float32) + number, mask=here, other=0.0),)
    for k in tl.static_range(len(tiles)):
        part = tiles[k].to(tl.float32)
        if rows.HAS_WEIGHTS:
            part *= weights[k][:, None]
        acc += part
    return acc


@triton.jit
def pull_sum(
    job,
    rows,  # PulledRows
    bases,  # Bases
    acc,  # [ROWS, BLOCK_H] float32
    alive,  # [ROWS]
    h,  # first column of the tile
    held,  # Held
    DTYPE: tl.constexpr,
    LWP: tl.constexpr,
    tile,  # SumTile
):
    """Add to `acc`, in k order, the rows of each token from the ranks of this node."""
    TOPK: tl.constexpr = held.TOPK
    AT_ONCE: tl.constexpr = tile.AT_ONCE
    MOST: tl.constexpr = looked_at(rows.REDUCED, TOPK, LWP, AT_ONCE, tile.STAGES)
    entries = ()
    for k in tl.static_range(MOST):
        entries += (_entry(job, rows, bases, alive, held, k),)
    acc = _add_entries(rows, bases, acc, entries, h, 0, fewer(AT_ONCE, MOST), DTYPE)
    for first in tl.static_range(AT_ONCE, MOST, AT_ONCE):
        most = entries[first][1]
        for k in tl.static_range(first + 1, MOST):
            most = tl.maximum(most, entries[k][1])
        if tl.max(most) >= 0:
            acc = _add_entries(rows, bases, acc, entries, h, first, fewer(first + AT_ONCE, MOST), DTYPE)
    return acc
