"""Splits exchange: every rank learns how many tokens every rank sends to every expert, rank and node, and derives
where every segment of rows starts.

Protocol      1 scan: an exclusive prefix of the counts over this rank's chunks (compute/routing.py); the totals
              are its splits row. The program that ends last goes on alone:
              2 advance this rank's dispatch epoch
              3 post my splits row, then my flag = epoch, to every rank (device/post.py)
              4 wait until the flag of every rank is at least the epoch
              5 derive the first rows of all segments, here and at every other rank
              6 compare the host words: where ranks are in different calls, nothing more is sent (device/calls.py)
Layout        splits [2, W, S] int32, half chosen by the parity of the epoch; flags [W] int64, one per source.
              A splits row, int32 [S], S a multiple of 4, has C counts; at the end tokens, 1 + index of the first
              illegal id (0 = none), that id, host error code. What comes out is `placement` (device/tables.py).
Memory order  A program counts itself done by an acquire-release add, behind a block barrier; the last one so
              sees the totals of all. The flag is released after the row; step 4 acquires it.
Progress      One program; it posts before it waits.
Replay        The epoch lives on the device and only grows; the last program sets the count of programs back. A
              rank that is through step 4 knows that every rank has finished its previous call (its kernels precede
              the post on its stream): this is what allows the pushes of this call to overwrite the arrival buffers
              without a barrier. A fast peer may post the next epoch while I still read this one: hence the two
              halves.
"""

import triton
import triton.language as tl

from ..device.buffers import EPOCH_DISPATCH, SPLITS, SPLITS_FLAG, buffer_ptr, count_overflow
from ..device.calls import CALLS_DISPATCH, dispatch_word, report_calls, store_epoch, words_differ
from ..device.post import post_to_all
from ..device.tables import (
    bases_of,
    chunk_bad_of,
    expert_offsets_of,
    num_columns_of,
    num_recv_of,
    overflow_of,
    row_of,
    tiles_of,
    tokens_from_node_of,
)
from ..device.waits import WAIT_SPLITS, last_to_arrive, wait_flags
from ..spec import ep_kernel

_NO_INDEX = tl.constexpr(2**31 - 1)


@triton.jit
def _scan(chunks_ptr, row_ptr, num_chunks, num_columns, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    """Prefix of this program's columns over the chunks, in place; their totals into the splits row."""
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    chunks = tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_C], tl.int32)
    for start in range(0, num_chunks, BLOCK_N):
        mask = (start + chunks < num_chunks)[:, None] & (columns < num_columns)[None, :]
        ptrs = chunks_ptr + (start + chunks).to(tl.int64)[:, None] * num_columns + columns[None, :]
        counts = tl.load(ptrs, mask=mask, other=0)
        tl.store(ptrs, total[None, :] + tl.cumsum(counts, axis=0) - counts, mask=mask)
        total += tl.sum(counts, axis=0)
    tl.store(row_ptr + columns, total, mask=columns < num_columns)


@triton.jit
def _clear(placement_ptr, num_ranks, experts_per_rank, ranks_per_node, row_length, BLOCK: tl.constexpr):
    """Zeros in `placement` before the tile table, but not in the splits row: between parts nothing else is written."""
    zero = tl.zeros([], tl.int32)
    row = row_of(zero, num_ranks, experts_per_rank, ranks_per_node)
    end = tiles_of(zero, num_ranks, experts_per_rank, ranks_per_node)
    for start in range(0, end, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        tl.store(placement_ptr + offs, 0, mask=(offs < end) & ((offs < row) | (offs >= row + row_length)))


@triton.jit
def _fill_tail(chunks_ptr, row_ptr, num_chunks, num_columns, row_length, num_tokens, host_word, BLOCK_N: tl.constexpr):
    """The last four words of the splits row, and zeros between the counts and them."""
    bad_ptr = chunk_bad_of(chunks_ptr, num_chunks, num_columns)
    chunks = tl.arange(0, BLOCK_N)
    first_bad = tl.full([], _NO_INDEX, tl.int32)
    bad_id = tl.full([], 0, tl.int32)
    for start in range(0, num_chunks, BLOCK_N):
        mask = start + chunks < num_chunks
        bad = tl.load(bad_ptr + (start + chunks) * 2, mask=mask, other=_NO_INDEX)
        ids = tl.load(bad_ptr + (start + chunks) * 2 + 1, mask=mask, other=0)
        first_here = tl.min(bad)
        id_here = tl.sum(tl.where((bad == first_here) & (bad != _NO_INDEX), ids, 0))
        bad_id = tl.where(first_here < first_bad, id_here, bad_id)
        first_bad = tl.minimum(first_here, first_bad)
    tail_ptr = row_ptr + row_length - 4
    between = num_columns + tl.arange(0, 4)
    tl.store(row_ptr + between, 0, mask=between < row_length - 4)
    tl.store(tail_ptr, num_tokens)
    tl.store(tail_ptr + 1, tl.where(first_bad == _NO_INDEX, 0, first_bad + 1))
    tl.store(tail_ptr + 2, bad_id)
    tl.store(tail_ptr + 3, host_word)


@triton.jit
def _exchange(
    row_ptr,
    state_ptr,
    tables_ptr,
    rank,
    num_ranks,
    ranks_per_node,
    row_length,
    NETWORK: tl.constexpr,
    WP: tl.constexpr,
    LWP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Post my row to all ranks and wait for theirs."""
    epoch = tl.load(state_ptr + EPOCH_DISPATCH) + 1
    my_row = ((epoch & 1) * num_ranks + rank) * row_length
    splits_ptr = buffer_ptr(tables_ptr, SPLITS, num_ranks, rank, tl.int32)
    for start in range(0, row_length, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        words = tl.load(row_ptr + offs, mask=offs < row_length, other=0)
        tl.store(splits_ptr + my_row + offs, words, mask=offs < row_length)
    # The row just stored is the source of the posts, which other threads read; and all threads have read the epoch.
    tl.debug_barrier()
    tl.store(state_ptr + EPOCH_DISPATCH, epoch)
    post_to_all(
        tables_ptr,
        my_row * 4,
        tl.cast(row_length, tl.int64) * 4,
        epoch,
        rank,
        num_ranks,
        ranks_per_node,
        SPLITS,
        SPLITS_FLAG,
        True,
        False,
        NETWORK,
        LWP,
        BLOCK,
    )
    sources = tl.arange(0, WP)
    flag_ptrs = buffer_ptr(tables_ptr, SPLITS_FLAG, num_ranks, rank, tl.int64) + sources
    wait_flags(flag_ptrs, sources < num_ranks, epoch, state_ptr, WAIT_SPLITS)


@triton.jit
def _report(
    splits_ptr,
    placement_ptr,
    owner,  # [OWNERS] ranks
    rows,  # [OWNERS] their output rows
    rank,
    num_ranks,
    experts_per_rank,
    ranks_per_node,
    row_length,
    WP: tl.constexpr,
):
    """What concerns whole ranks: reports, arrival rows, tokens from other nodes."""
    num_experts = num_ranks * experts_per_rank
    source = tl.arange(0, WP)
    is_owner = owner < num_ranks
    mask = (source < num_ranks)[:, None] & is_owner[None, :]
    tokens = tl.load(
        splits_ptr + source[:, None] * row_length + num_experts + owner[None, :], mask=mask, other=0
    )  # [source, owner]
    before_me = tl.sum(tl.where((source < rank)[:, None], tokens, 0), axis=0)
    stage_base_ptr = bases_of(placement_ptr, num_ranks, experts_per_rank, ranks_per_node) + 2 * num_experts
    tl.store(stage_base_ptr + owner, before_me, mask=is_owner)
    here = tl.sum(tl.where((owner == rank)[None, :], tokens, 0), axis=1)  # [source]
    first = tl.cumsum(here, axis=0) - here
    is_mine = tl.sum((owner == rank).to(tl.int32)) > 0
    tl.store(placement_ptr + source * 8 + 6, first, mask=(source < num_ranks) & is_mine)
    tl.store(placement_ptr + source * 8 + 7, here, mask=(source < num_ranks) & is_mine)

    tl.store(placement_ptr + owner * 8, rows, mask=is_owner)
    tl.store(placement_ptr + owner * 8 + 1, tl.sum(tokens, axis=0), mask=is_owner)
    field = tl.arange(0, 4)[None, :]
    tail_ptrs = splits_ptr + (owner + 1)[:, None] * row_length - 4 + field
    tail = tl.load(tail_ptrs, mask=is_owner[:, None], other=0)
    tl.store(placement_ptr + owner[:, None] * 8 + 2 + field, tail, mask=is_owner[:, None])

    is_counterpart = is_owner & (owner % ranks_per_node == rank % ranks_per_node)
    node_column = num_experts + num_ranks + rank // ranks_per_node
    from_there = tl.load(splits_ptr + owner * row_length + node_column, mask=is_counterpart, other=0)
    tokens_from_node_ptr = tokens_from_node_of(placement_ptr, num_ranks, experts_per_rank)
    tl.store(tokens_from_node_ptr + owner // ranks_per_node, from_there, mask=is_counterpart)


@triton.jit
def _place_segments(
    splits_ptr,
    placement_ptr,
    state_ptr,
    first_owner,
    earlier,  # my entries for the experts of the ranks before `first_owner`
    rank,
    num_ranks,
    experts_per_rank,
    ranks_per_node,
    row_length,
    alignment,
    recv_capacity,
    WP: tl.constexpr,
    EP: tl.constexpr,
    OWNERS: tl.constexpr,
):
    """First rows of my entries at some ranks, and of the experts' segments here; returns `earlier` for the next."""
    num_experts = num_ranks * experts_per_rank
    source = tl.arange(0, WP)
    owner = first_owner + tl.arange(0, OWNERS)
    local = tl.arange(0, EP)
    expert = owner[:, None] * experts_per_rank + local[None, :]
    is_expert = (owner < num_ranks)[:, None] & (local < experts_per_rank)[None, :]
    ptrs = splits_ptr + (source * row_length)[:, None, None] + expert[None, :, :]
    mask = (source < num_ranks)[:, None, None] & is_expert[None, :, :]
    counts = tl.load(ptrs, mask=mask, other=0)  # [source, owner, expert]
    total = tl.sum(counts, axis=0)
    before_me = tl.sum(tl.where((source < rank)[:, None, None], counts, 0), axis=0)
    padded = (total + alignment - 1) // alignment * alignment
    start = tl.cumsum(padded, axis=1) - padded
    rows = tl.sum(padded, axis=1)
    bases_ptr = bases_of(placement_ptr, num_ranks, experts_per_rank, ranks_per_node)
    tl.store(bases_ptr + expert, start + before_me, mask=is_expert)

    mine = tl.sum(tl.where((source == rank)[:, None, None], counts, 0), axis=0)
    of_owner = tl.sum(mine, axis=1)
    sorted_start = earlier + (tl.cumsum(of_owner, axis=0) - of_owner)[:, None] + tl.cumsum(mine, axis=1) - mine
    tl.store(bases_ptr + num_experts + expert, sorted_start, mask=is_expert)

    # Clamped, so that a GEMM driven by the offsets stays inside a static buffer that overflowed.
    here = is_expert & (owner == rank)[:, None]
    clamped = tl.minimum(start, recv_capacity)
    locals_ = tl.broadcast_to(local[None, :], [OWNERS, EP])
    expert_offsets_ptr = expert_offsets_of(placement_ptr, num_ranks)
    tl.store(expert_offsets_ptr + locals_, clamped, mask=here)
    real = tl.minimum(start + total, recv_capacity) - clamped
    tl.store(num_recv_of(placement_ptr, num_ranks, experts_per_rank) + locals_, real, mask=here)
    my_rows = tl.sum(tl.where(owner == rank, rows, 0))
    if (first_owner <= rank) & (rank < first_owner + OWNERS):
        tl.store(expert_offsets_ptr + experts_per_rank, tl.minimum(my_rows, recv_capacity))
        overflow = tl.maximum(my_rows - recv_capacity, 0)
        tl.store(overflow_of(placement_ptr, num_ranks, experts_per_rank), overflow)
        count_overflow(state_ptr, overflow)
    _report(splits_ptr, placement_ptr, owner, rows, rank, num_ranks, experts_per_rank, ranks_per_node, row_length, WP)
    return earlier + tl.sum(of_owner)


@ep_kernel(chunks_ptr="*i32", bad_scatter_ptr="*i32", routed_ptr="*i32", num_warps=8)
def splits_kernel(
    chunks_ptr,  # in: counts, out: exclusive prefix over chunks; device/tables.py
    placement_ptr,  # out, device/tables.py
    bad_scatter_ptr,  # [1] int32, read if HAS_SCATTER: added to the host word
    routed_ptr,  # `placement` of the dispatch whose routing is taken; not read without HOST_AGAIN in the host word
    state_ptr,
    tables_ptr,
    num_chunks,
    num_tokens,
    host_word,  # HOST_* (device/codes.py)
    rank,
    num_ranks,
    experts_per_rank,
    ranks_per_node,
    alignment,
    recv_capacity,
    HAS_SCATTER: tl.constexpr,
    NETWORK: tl.constexpr,
    WP: tl.constexpr,
    LWP: tl.constexpr,
    EP: tl.constexpr,
    OWNERS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    num_columns = num_columns_of(num_ranks, experts_per_rank, ranks_per_node)
    row_length = (num_columns + 3) // 4 * 4 + 4
    row_ptr = row_of(placement_ptr, num_ranks, experts_per_rank, ranks_per_node)
    _scan(chunks_ptr, row_ptr, num_chunks, num_columns, BLOCK_N, BLOCK_C)
    if tl.program_id(0) == 0:
        _clear(placement_ptr, num_ranks, experts_per_rank, ranks_per_node, row_length, BLOCK)
        host_word = dispatch_word(host_word, routed_ptr, num_ranks, experts_per_rank)
        if HAS_SCATTER:
            host_word += tl.load(bad_scatter_ptr)
        _fill_tail(chunks_ptr, row_ptr, num_chunks, num_columns, row_length, num_tokens, host_word, BLOCK_N)
    if last_to_arrive(state_ptr):
        # Also after an expired wait: what is computed from old counts is bounded, what nobody computed is not.
        _exchange(row_ptr, state_ptr, tables_ptr, rank, num_ranks, ranks_per_node, row_length, NETWORK, WP, LWP, BLOCK)
        epoch = tl.load(state_ptr + EPOCH_DISPATCH)
        splits_ptr = buffer_ptr(tables_ptr, SPLITS, num_ranks, rank, tl.int32) + (epoch & 1) * num_ranks * row_length
        store_epoch(placement_ptr, epoch, num_ranks, experts_per_rank)
        source = tl.arange(0, WP)
        words = tl.load(splits_ptr + (source + 1) * row_length - 1, mask=source < num_ranks, other=0)
        earlier = tl.zeros([], tl.int32)
        for first_owner in range(0, num_ranks, OWNERS):
            earlier = _place_segments(
                splits_ptr,
                placement_ptr,
                state_ptr,
                first_owner,
                earlier,
                rank,
                num_ranks,
                experts_per_rank,
                ranks_per_node,
                row_length,
                alignment,
                recv_capacity,
                WP,
                EP,
                OWNERS,
            )
        if words_differ(words, source < num_ranks):
            report_calls(state_ptr, source, words, source < num_ranks, CALLS_DISPATCH)
