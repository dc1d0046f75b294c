"""Rows of tokens: who owns an expert, pushing a row to the ranks of this node, pulling rows from them.

Shared by the intra-node and the inter-node kernels. A *tile* is [ROWS, BLOCK_H]: several rows at once,
because one program then has several independent accesses in flight, and because the interpreter pays per
operation, not per element.

Arrival buffers of a rank: `stage_x` [capacity, row] holds one row per (token, rank); `stage_meta`
[W * max_tokens, 2 * KP] int32 holds, for each of them, the output rows of its copies (-1 = none), then
their weights as float32 bits. KP is top-k rounded up to a power of two.
"""

import triton
import triton.language as tl

from .buffers import (
    ARRIVE_FLAG,
    COMBINE_WEIGHT,
    COMBINE_X,
    EPOCH_COMBINE,
    EPOCH_DISPATCH,
    STAGE_META,
    STAGE_X,
    STAGED_FLAG,
    buffer_ptr,
    buffer_ptrs,
)
from .waits import WAIT_COMBINE_STAGED, release_flags, wait_flags


@triton.jit
def owner_of(expert, experts_per_rank):
    """Rank that owns a global expert id. Dropped entries (-1) give rank 0 here: mask them."""
    return tl.maximum(expert, 0) // experts_per_rank


@triton.jit
def on_my_node(peer, rank, ranks_per_node):
    """True for the ranks that share the node of `rank`."""
    return peer // ranks_per_node == rank // ranks_per_node


@triton.jit
def push_payload(
    row_ptrs,  # [ROWS] pointers to rows of words
    alive,  # [ROWS]
    topk_ptrs,  # [ROWS] pointers to K int32 expert ids
    stage_ptrs,  # [ROWS] pointers to K int32 arrival rows, -1 = not the first k of that rank
    tables_ptr,
    row_words,
    stage_capacity,
    experts_per_rank,
    rank,
    num_ranks,
    ranks_per_node,
    WORD: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Store each row to every rank of this node that its token goes to: read once, written once per rank."""
    offs = tl.arange(0, BLOCK_H)
    for h in range(0, row_words, BLOCK_H):
        in_row = (h + offs < row_words)[None, :]
        tile = tl.load(row_ptrs[:, None] + h + offs[None, :], mask=alive[:, None] & in_row, other=0)
        for k in tl.static_range(TOPK):
            peer = owner_of(tl.load(topk_ptrs + k, mask=alive, other=-1), experts_per_rank)
            slot = tl.load(stage_ptrs + k, mask=alive, other=-1)
            here = (slot >= 0) & (slot < stage_capacity) & on_my_node(peer, rank, ranks_per_node)
            dest = buffer_ptrs(tables_ptr, STAGE_X, num_ranks, peer, here, WORD)
            # int64: slot * row_words passes 2**31 words in large buffers.
            dest += slot.to(tl.int64) * row_words
            tl.store(dest[:, None] + h + offs[None, :], tile, mask=here[:, None] & in_row)


@triton.jit
def push_meta(
    alive,  # [ROWS]
    topk_ptrs,  # [ROWS] pointers to K int32
    dst_ptrs,  # [ROWS] pointers to K int32 output rows, -1 = dropped
    stage_ptrs,  # [ROWS] pointers to K int32
    weight_ptrs,  # [ROWS] pointers to K float32, read if HAS_WEIGHTS
    tables_ptr,
    experts_per_rank,
    rank,
    num_ranks,
    ranks_per_node,
    HAS_WEIGHTS: tl.constexpr,
    TOPK: tl.constexpr,
    KP: tl.constexpr,
):
    """Tell every rank of this node that a token goes to which output rows it fills, and with what weights."""
    ks = tl.arange(0, KP)[None, :]
    mask = alive[:, None] & (ks < TOPK)
    experts = tl.load(topk_ptrs[:, None] + ks, mask=mask, other=-1)
    rows = tl.load(dst_ptrs[:, None] + ks, mask=mask, other=-1)
    owners = owner_of(experts, experts_per_rank)
    if HAS_WEIGHTS:
        weights = tl.load(weight_ptrs[:, None] + ks, mask=mask, other=0.0)
    for k in tl.static_range(TOPK):
        peer = owner_of(tl.load(topk_ptrs + k, mask=alive, other=-1), experts_per_rank)
        slot = tl.load(stage_ptrs + k, mask=alive, other=-1)
        here = (slot >= 0) & on_my_node(peer, rank, ranks_per_node)
        offset = slot.to(tl.int64)[:, None] * (2 * KP) + ks
        mine = (experts >= 0) & (owners == peer[:, None])
        dest = buffer_ptrs(tables_ptr, STAGE_META, num_ranks, peer, here, tl.int32)
        tl.store(dest[:, None] + offset, tl.where(mine, rows, -1), mask=here[:, None])
        if HAS_WEIGHTS:
            dest = buffer_ptrs(tables_ptr, STAGE_META, num_ranks, peer, here, tl.float32)
            tl.store(dest[:, None] + offset + KP, tl.where(mine, weights, 0.0), mask=here[:, None])


@triton.jit
def pull_sum(
    acc,  # [ROWS, BLOCK_H] float32
    alive,  # [ROWS]
    h,  # first column of the tile
    topk_ptrs,  # [ROWS] pointers to K int32
    row_ptrs,  # [ROWS] pointers to K int32: row in the owner's combine buffer, -1 = none
    tables_ptr,
    hidden,
    row_capacity,
    experts_per_rank,
    rank,
    num_ranks,
    ranks_per_node,
    DTYPE: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Add to `acc`, in k order, the rows that the ranks of this node hold for each token."""
    offs = tl.arange(0, BLOCK_H)
    in_row = (h + offs < hidden)[None, :]
    for k in tl.static_range(TOPK):
        peer = owner_of(tl.load(topk_ptrs + k, mask=alive, other=-1), experts_per_rank)
        row = tl.load(row_ptrs + k, mask=alive, other=-1)
        here = (row >= 0) & (row < row_capacity) & on_my_node(peer, rank, ranks_per_node)
        source = buffer_ptrs(tables_ptr, COMBINE_X, num_ranks, peer, here, DTYPE)
        source += row.to(tl.int64) * hidden
        tile = tl.load(source[:, None] + h + offs[None, :], mask=here[:, None] & in_row, other=0.0)
        tile = tile.to(tl.float32)
        if HAS_WEIGHTS:
            weight_ptrs = buffer_ptrs(tables_ptr, COMBINE_WEIGHT, num_ranks, peer, here, tl.float32)
            tile *= tl.load(weight_ptrs + row, mask=here, other=0.0)[:, None]
        acc += tile
    return acc


@triton.jit
def release_arrivals(
    tables_ptr,
    state_ptr,
    rank,
    num_ranks,
    ranks_per_node,
    KIND: tl.constexpr,  # 0 = push of this rank's own tokens, 1 = forward of another node's
    LWP: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
):
    """Set arrive_flag[KIND, my local rank, this program] = dispatch epoch on every rank of the node."""
    epoch = tl.load(state_ptr + EPOCH_DISPATCH)
    local = tl.arange(0, LWP)
    peers = rank - rank % ranks_per_node + local
    mask = local < ranks_per_node
    flag_ptrs = buffer_ptrs(tables_ptr, ARRIVE_FLAG, num_ranks, peers, mask, tl.int64)
    flag_ptrs += (KIND * ranks_per_node + rank % ranks_per_node) * MAX_PROGRAMS + tl.program_id(0)
    release_flags(flag_ptrs, mask, tl.zeros([LWP], tl.int64) + epoch)


@triton.jit
def other_node(item, rank, num_ranks, ranks_per_node):
    """Node and chunk of a work item; neighbours first, so that nodes do not all send to the same one."""
    num_nodes = num_ranks // ranks_per_node
    node = (rank // ranks_per_node + 1 + item % (num_nodes - 1)) % num_nodes
    return node, item // (num_nodes - 1)


@triton.jit
def wait_staged(
    tables_ptr,
    state_ptr,
    rank,
    num_ranks,
    ranks_per_node,
    num_stage_programs,
    LWP: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
):
    """Wait until every rank of this node has staged its rows of this combine."""
    flag = tl.arange(0, LWP * MAX_PROGRAMS)
    used = (flag // MAX_PROGRAMS < ranks_per_node) & (flag % MAX_PROGRAMS < num_stage_programs)
    flag_ptrs = buffer_ptr(tables_ptr, STAGED_FLAG, num_ranks, rank, tl.int64) + flag
    epoch = tl.load(state_ptr + EPOCH_COMBINE) + 1
    return wait_flags(flag_ptrs, used, epoch, state_ptr, WAIT_COMBINE_STAGED)
