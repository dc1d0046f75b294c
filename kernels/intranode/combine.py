"""Intra-node combine: publish expert outputs, then pull and sum the rows of each token.

Protocol      1 stage or reduce: wait until every rank is done with the previous combine (done_flag)
              2 stage: copy the expert rows to combine_x; or reduce: write per arrival row the sum of the
              token's rows on this rank, so that one row per (token, rank) crosses the link
              3 set staged_flag[my local rank, program] = epoch on every rank of the node
              4 pull: wait for the staged flags of all local ranks (with several nodes also for the
              partial sums of the others: internode/combine.py), then sum the rows of each token in
              float32 in k order, and round once
              5 the barrier kernel posts done_flag = epoch to every rank (internode/barrier.py)
Layout        combine_x [capacity, H]: by output row (stage) or by arrival row (reduce); combine_weight
              [capacity] float32, read by the pull if HAS_WEIGHTS; staged_flag [LW, MAX_PROGRAMS] int64.
Memory order  3 is a system-scope release per program, acquired in 4. 5 starts after all pulls of its rank.
Progress      1 waits for step 5 of the previous call, which every rank posts without waiting for this call.
              4 waits for other ranks' step 3; its grid is independent of theirs.
Replay        Epochs: the device counter holds the last finished combine; this one is that + 1.
"""

import triton
import triton.language as tl

from ..device.buffers import (
    COMBINE_WEIGHT,
    COMBINE_X,
    DONE_FLAG,
    EPOCH_COMBINE,
    PARTIAL_FLAG,
    PARTIAL_RECV,
    STAGED_FLAG,
    buffer_ptr,
    buffer_ptrs,
)
from ..device.rows import pull_sum, wait_staged
from ..device.waits import (
    WAIT_COMBINE_FREE,
    WAIT_NETWORK_PARTIALS,
    release_flags,
    wait_flags,
)


@triton.jit
def _wait_free(tables_ptr, state_ptr, rank, num_ranks, WP: tl.constexpr):
    """Wait until no rank reads combine_x any more."""
    epoch = tl.load(state_ptr + EPOCH_COMBINE)
    peers = tl.arange(0, WP)
    flag_ptrs = buffer_ptr(tables_ptr, DONE_FLAG, num_ranks, rank, tl.int64) + peers
    return wait_flags(flag_ptrs, peers < num_ranks, epoch, state_ptr, WAIT_COMBINE_FREE)


@triton.jit
def _release_staged(
    tables_ptr, state_ptr, rank, num_ranks, ranks_per_node, LWP: tl.constexpr, MAX_PROGRAMS: tl.constexpr
):
    epoch = tl.load(state_ptr + EPOCH_COMBINE) + 1
    local = tl.arange(0, LWP)
    mask = local < ranks_per_node
    peers = rank - rank % ranks_per_node + local
    flag_ptrs = buffer_ptrs(tables_ptr, STAGED_FLAG, num_ranks, peers, mask, tl.int64)
    flag_ptrs += rank % ranks_per_node * MAX_PROGRAMS + tl.program_id(0)
    release_flags(flag_ptrs, mask, tl.zeros([LWP], tl.int64) + epoch)


@triton.jit(do_not_specialize=["row_capacity", "rank", "num_ranks", "ranks_per_node"])
def combine_stage_kernel(
    y_ptr,  # [R, row_words] words
    weights_ptr,  # [R] float32, read if HAS_WEIGHTS
    num_rows_ptr,  # [1] int32, rows in use
    state_ptr,
    tables_ptr,
    row_words,
    row_capacity,
    rank,
    num_ranks,
    ranks_per_node,
    HAS_WEIGHTS: tl.constexpr,
    WP: tl.constexpr,
    LWP: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    if _wait_free(tables_ptr, state_ptr, rank, num_ranks, WP):
        combine_ptr = buffer_ptr(tables_ptr, COMBINE_X, num_ranks, rank, y_ptr.dtype.element_ty)
        combine_weight_ptr = buffer_ptr(tables_ptr, COMBINE_WEIGHT, num_ranks, rank, tl.float32)
        num_rows = tl.minimum(tl.load(num_rows_ptr), row_capacity)
        offs = tl.arange(0, BLOCK_H)
        for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
            row = tile * ROWS + tl.arange(0, ROWS)
            for h in range(0, row_words, BLOCK_H):
                mask = (row < num_rows)[:, None] & (h + offs < row_words)[None, :]
                at = row.to(tl.int64)[:, None] * row_words + h + offs[None, :]
                tl.store(combine_ptr + at, tl.load(y_ptr + at, mask=mask, other=0), mask=mask)
            if HAS_WEIGHTS:
                weights = tl.load(weights_ptr + row, mask=row < num_rows, other=0.0)
                tl.store(combine_weight_ptr + row, weights, mask=row < num_rows)
        _release_staged(tables_ptr, state_ptr, rank, num_ranks, ranks_per_node, LWP, MAX_PROGRAMS)


@triton.jit(do_not_specialize=["row_capacity", "rank", "num_ranks", "ranks_per_node"])
def combine_reduce_kernel(
    y_ptr,  # [R, H]
    weights_ptr,  # [R] float32, read if HAS_WEIGHTS
    copy_rows_ptr,  # [C, K] int32, output rows of each arrival row, -1 = none
    report_ptr,  # [W, 8] int32 of the dispatch; [rank, 1] = arrival rows
    state_ptr,
    tables_ptr,
    hidden,
    row_capacity,
    rank,
    num_ranks,
    ranks_per_node,
    HAS_WEIGHTS: tl.constexpr,
    TOPK: tl.constexpr,
    WP: tl.constexpr,
    LWP: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    if _wait_free(tables_ptr, state_ptr, rank, num_ranks, WP):
        combine_ptr = buffer_ptr(tables_ptr, COMBINE_X, num_ranks, rank, y_ptr.dtype.element_ty)
        num_rows = tl.minimum(tl.load(report_ptr + rank * 8 + 1), row_capacity)
        offs = tl.arange(0, BLOCK_H)
        for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
            row = tile * ROWS + tl.arange(0, ROWS)
            alive = row < num_rows
            for h in range(0, hidden, BLOCK_H):
                in_row = (h + offs < hidden)[None, :]
                acc = tl.zeros([ROWS, BLOCK_H], tl.float32)
                for k in tl.static_range(TOPK):
                    copy = tl.load(copy_rows_ptr + row.to(tl.int64) * TOPK + k, mask=alive, other=-1)
                    source = y_ptr + copy.to(tl.int64)[:, None] * hidden + h + offs[None, :]
                    part = tl.load(source, mask=(copy >= 0)[:, None] & in_row, other=0.0).to(tl.float32)
                    if HAS_WEIGHTS:
                        part *= tl.load(weights_ptr + copy, mask=copy >= 0, other=0.0)[:, None]
                    acc += part
                dest = combine_ptr + row.to(tl.int64)[:, None] * hidden + h + offs[None, :]
                tl.store(dest, acc.to(y_ptr.dtype.element_ty), mask=alive[:, None] & in_row)
        _release_staged(tables_ptr, state_ptr, rank, num_ranks, ranks_per_node, LWP, MAX_PROGRAMS)


@triton.jit
def _wait_partials(
    tokens_per_node_ptr,
    tables_ptr,
    state_ptr,
    rank,
    num_ranks,
    ranks_per_node,
    NNP: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Wait for the partial sums that the other nodes owe for my tokens: flags [N, MAX_CHUNKS]."""
    flag = tl.arange(0, NNP * MAX_CHUNKS)
    node = flag // MAX_CHUNKS
    remote = (node < num_ranks // ranks_per_node) & (node != rank // ranks_per_node)
    tokens = tl.load(tokens_per_node_ptr + node, mask=remote, other=0)
    used = remote & (flag % MAX_CHUNKS * CHUNK < tokens)
    flag_ptrs = buffer_ptr(tables_ptr, PARTIAL_FLAG, num_ranks, rank, tl.int64) + flag
    epoch = tl.load(state_ptr + EPOCH_COMBINE) + 1
    return wait_flags(flag_ptrs, used, epoch, state_ptr, WAIT_NETWORK_PARTIALS)


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "max_tokens",
        "row_capacity",
        "rank",
        "num_ranks",
        "ranks_per_node",
        "num_stage_programs",
    ]
)
def combine_pull_kernel(
    out_ptr,  # out [T, H]
    owner_ptr,  # [T, K] int32 ranks, -1 = dropped
    row_ptr,  # [T, K] int32: output row (staged) or arrival row (reduced) at the owner, -1 = none
    node_slot_ptr,  # [T, K] int32, slot among my tokens for that node; read with several nodes
    tokens_per_node_ptr,  # [N] int32, my tokens for each node; read with several nodes
    state_ptr,
    tables_ptr,
    num_tokens,
    max_tokens,
    hidden,
    row_capacity,
    rank,
    num_ranks,
    ranks_per_node,
    num_stage_programs,
    PARTIAL_DTYPE: tl.constexpr,  # dtype of the other nodes' partial sums
    HAS_WEIGHTS: tl.constexpr,
    TOPK: tl.constexpr,
    LWP: tl.constexpr,
    NNP: tl.constexpr,  # nodes rounded up to a power of two; 1 = one node, no partial sums
    MAX_PROGRAMS: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    ready = wait_staged(
        tables_ptr,
        state_ptr,
        rank,
        num_ranks,
        ranks_per_node,
        num_stage_programs,
        LWP,
        MAX_PROGRAMS,
    )
    if NNP > 1:
        ready &= _wait_partials(
            tokens_per_node_ptr,
            tables_ptr,
            state_ptr,
            rank,
            num_ranks,
            ranks_per_node,
            NNP,
            MAX_CHUNKS,
            CHUNK,
        )
    if ready:
        offs = tl.arange(0, BLOCK_H)
        partial_stride = (hidden + 7) // 8 * 8
        partial_ptr = buffer_ptr(tables_ptr, PARTIAL_RECV, num_ranks, rank, PARTIAL_DTYPE)
        for tile in range(tl.program_id(0), tl.cdiv(num_tokens, ROWS), tl.num_programs(0)):
            token = tile * ROWS + tl.arange(0, ROWS)
            alive = token < num_tokens
            owner_ptrs = owner_ptr + token * TOPK
            for h in range(0, hidden, BLOCK_H):
                acc = pull_sum(
                    tl.zeros([ROWS, BLOCK_H], tl.float32),
                    alive,
                    h,
                    owner_ptrs,
                    row_ptr + token * TOPK,
                    tables_ptr,
                    hidden,
                    row_capacity,
                    rank,
                    num_ranks,
                    ranks_per_node,
                    out_ptr.dtype.element_ty,
                    HAS_WEIGHTS,
                    TOPK,
                    BLOCK_H,
                )
                in_row = (h + offs < hidden)[None, :]
                if NNP > 1:
                    for k in range(TOPK):  # unrolled, it would not fit the registers
                        node = tl.load(owner_ptrs + k, mask=alive, other=0) // ranks_per_node
                        slot = tl.load(node_slot_ptr + token * TOPK + k, mask=alive, other=-1)
                        remote = (slot >= 0) & (node != rank // ranks_per_node)
                        source = (node * max_tokens + slot).to(tl.int64) * partial_stride
                        source_ptrs = partial_ptr + source[:, None] + h + offs[None, :]
                        part = tl.load(source_ptrs, mask=remote[:, None] & in_row, other=0.0)
                        acc += part.to(tl.float32)
                dest = out_ptr + token.to(tl.int64)[:, None] * hidden + h + offs[None, :]
                tl.store(dest, acc.to(out_ptr.dtype.element_ty), mask=alive[:, None] & in_row)
