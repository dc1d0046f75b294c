"""Pull and sum the rows that the ranks of this node hold for a token."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .buffers import COMBINE_WEIGHT, COMBINE_X, buffer_ptrs
from .job import on_my_node

PULLED = tl.constexpr(4)
"""Rows of one token in flight at once; with fewer rows per token, a tile has more tokens (plans/exchange.py)."""


@triton.jit
def _popcount(x):
    """Bits set in each element of a uint32 tensor, as int32."""
    x -= (x >> 1) & 0x55555555
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def compact_position(here):
    """[n, KP]: position of each entry when the entries `here` come first, in k order, and then the others.

    Uses the bits of a word (KP <= 32): Triton 3.6 does not compile every scan of two elements with 16 warps.
    """
    k = tl.arange(0, here.shape[1])[None, :]
    bit = tl.full(here.shape, 1, tl.uint32) << k.to(tl.uint32)
    among = tl.sum(tl.where(here, bit, 0), axis=1)[:, None]
    before = _popcount(among & (bit - 1))
    return tl.where(here, before, _popcount(among) + k - before)


class Held(NamedTuple):
    """Where the ranks of this node hold the rows of tokens.

    Attributes:
        rank_ptrs: [ROWS] pointers to K int32 ranks.
        row_ptrs: [ROWS] pointers to K int32 rows in the combine buffers of these ranks, -1 = none.
    """

    rank_ptrs: Any
    row_ptrs: Any


class PulledRows(NamedTuple):
    """Rows that are pulled and summed.

    Attributes:
        hidden: elements of a row.
        row_capacity: rows of a combine buffer.
        HAS_WEIGHTS: multiply rows by their weights.
        REDUCED: rows were reduced, in steps: indexed by staging row, a token's rows listed without gaps. Otherwise
            rows were staged: indexed by output row.
        PARTIAL_DTYPE: dtype of partial sums that cross nodes.
    """

    hidden: Any
    row_capacity: Any
    HAS_WEIGHTS: tl.constexpr
    REDUCED: tl.constexpr
    PARTIAL_DTYPE: tl.constexpr


@triton.constexpr_function
def pull_batches(compact, topk, node_ranks):
    """Rows of one token that are loaded at once, and the number of its entries that are examined.

    A list without gaps has at most one row per rank of the node, so the first batch may hold all rows. The kernel still
    checks for a second batch: without that branch after the first loads, the compiler spreads the loads between their
    uses, and half as many rows are in flight (4 x H200: a combine of 4096 tokens takes 700 us instead of 570).
    """
    most = min(topk, node_ranks) if compact else topk
    batch = min(PULLED.value, most)
    return batch, min(topk, max(most, 2 * batch))


@triton.jit
def pull_sum(
    job,
    rows,  # PulledRows
    acc,  # [ROWS, BLOCK_H] float32
    alive,  # [ROWS]
    h,  # first column of the tile
    held,  # Held
    DTYPE: tl.constexpr,
    TOPK: tl.constexpr,
    LWP: tl.constexpr,
):
    """Add to `acc`, in k order, the rows that the ranks of this node hold for each token."""
    BLOCK_H: tl.constexpr = acc.shape[1]
    BATCHES: tl.constexpr = pull_batches(rows.REDUCED, TOPK, LWP)
    BATCH: tl.constexpr = BATCHES[0]
    LOOKED_AT: tl.constexpr = BATCHES[1]
    for first in tl.static_range(0, LOOKED_AT, BATCH):
        row = tl.load(held.row_ptrs + first, mask=alive, other=-1)
        # Without gaps, a later batch is empty if all its first entries are, as they mostly are.
        if first == 0 or (not rows.REDUCED or tl.sum((row >= 0).to(tl.int32)) > 0):
            tiles = ()
            weights = ()
            # The last batch is as long as the others: a branch cannot change the length of a tuple.
            for k in tl.static_range(first, first + BATCH):
                is_entry = alive & (k < TOPK)
                peer = tl.load(held.rank_ptrs + k, mask=is_entry, other=-1)
                row = tl.load(held.row_ptrs + k, mask=is_entry, other=-1)
                here = (row >= 0) & (row < rows.row_capacity) & on_my_node(job, peer)
                source = buffer_ptrs(job, COMBINE_X, peer, here, DTYPE)
                source += row.to(tl.int64) * rows.hidden
                offs = h + tl.arange(0, BLOCK_H)
                mask = here[:, None] & (offs < rows.hidden)[None, :]
                tiles += (tl.load(source[:, None] + offs[None, :], mask=mask, other=0.0),)
                if rows.HAS_WEIGHTS:
                    weight_ptrs = buffer_ptrs(job, COMBINE_WEIGHT, peer, here, tl.float32)
                    weights += (tl.load(weight_ptrs + row, mask=here, other=0.0),)
            for k in tl.static_range(len(tiles)):
                tile = tiles[k].to(tl.float32)
                if rows.HAS_WEIGHTS:
                    tile *= weights[k][:, None]
                acc += tile
    return acc
