"""Count where the tokens of one rank go, per rank, node and expert, and store which ranks each token goes to.

Protocol      1 each program takes a block of tokens, stores which ranks each token goes to, and adds its counts
Layout        counts [W + N + E] int32, initially zero: tokens per rank, tokens per node, entries per expert. A token
              counts once per rank and once per node. in_rank [T, W] bytes, 1 = the token goes there.
Memory order  Relaxed integer additions, whose order does not matter. Kernels follow each other on one stream.
Progress      No program waits.
Replay        The caller zeroes the counts.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..spec import ep_kernel


@triton.jit
def _count_groups(
    counts_ptr, owner, num_groups, in_group_ptr, token, num_tokens, GP: tl.constexpr, STORE: tl.constexpr
):
    """Count tokens per group, each token once, from `owner` [KP, BLOCK_T]; with STORE also store which tokens."""
    for first in range(0, num_groups, GP):
        group = first + tl.arange(0, GP)
        hits = tl.sum((owner[:, :, None] == group[None, None, :]).to(tl.int32), axis=0)
        goes = (hits > 0).to(tl.int32)  # [BLOCK_T, GP]
        if STORE:
            at = token.to(tl.int64)[:, None] * num_groups + group[None, :]
            mask = (token < num_tokens)[:, None] & (group < num_groups)[None, :]
            tl.store(in_group_ptr + at, goes.to(tl.uint8), mask=mask)
        tl.atomic_add(counts_ptr + group, tl.sum(goes, axis=0), mask=group < num_groups, sem="relaxed")


class Places(NamedTuple):
    """Sizes that map experts to ranks and ranks to nodes, as in `Job` (device/job.py)."""

    num_experts: Any
    num_ranks: Any
    experts_per_rank: Any
    ranks_per_node: Any


@ep_kernel(topk_idx_ptr="*{IDX}", counts_ptr="*i32", in_rank_ptr="*u8")
def token_layout_kernel(
    topk_idx_ptr,  # [T, K] int32 or int64; ids outside [0, E) are dropped and not counted
    counts_ptr,  # in and out [W + N + E] int32, initially zero
    in_rank_ptr,  # out [T, W] uint8
    num_tokens,
    places: Places,
    TOPK: tl.constexpr,
    KP: tl.constexpr,
    GP: tl.constexpr,  # ranks or nodes at a time
    BLOCK_T: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.arange(0, KP)[:, None]  # first, as in routing.py
    mask = (token < num_tokens)[None, :] & (k < TOPK)
    expert = tl.load(topk_idx_ptr + token.to(tl.int64)[None, :] * TOPK + k, mask=mask, other=-1).to(tl.int64)
    valid = (expert >= 0) & (expert < places.num_experts)
    expert = tl.where(valid, expert, 0).to(tl.int32)
    owner = tl.where(valid, expert // places.experts_per_rank, -1)
    ranks, per_node = places.num_ranks, places.ranks_per_node
    _count_groups(counts_ptr, owner, ranks, in_rank_ptr, token, num_tokens, GP, True)
    counts_ptr += ranks
    num_nodes = ranks // per_node
    node = tl.where(valid, owner // per_node, -1)
    _count_groups(counts_ptr, node, num_nodes, in_rank_ptr, token, num_tokens, GP, False)
    tl.atomic_add(counts_ptr + num_nodes + expert, valid.to(tl.int32), mask=valid, sem="relaxed")
