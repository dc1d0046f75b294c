"""Splits exchange: every rank counts its entries, learns how many tokens every rank sends to every expert, rank and
node, and derives where every segment of rows starts.

Protocol      0 count: the first programs, one for each chunk of tokens (compute/routing.py)
              1 scan: the next programs wait until all chunks are counted, then compute an exclusive prefix of the
              counts over this rank's chunks; the totals are its row in `splits`. The last of these programs to finish
              goes on alone, while the programs of the highest numbers quantise the rows to send, if that is needed
              (device/payload.py):
              2 with copy engines, report overruns of the previous calls (device/overruns.py); advance this rank's
              dispatch epoch
              3 post my splits row, then my flag = epoch, to every rank (device/post.py); `placement` has it, too
              4 wait until the flag of every rank is at least the epoch
              5 let the next kernel start, if it is launched early (compute/routing.py), and derive the first rows of
              all segments, here and at every other rank
              6 compare the host words: if ranks are in different calls, nothing more is sent (device/calls.py)
              7 if hosts read: decide whether rows wait for that; raise EPOCH_PLACED; publish to the host
              (device/host_read.py)
Layout        splits [2, W, S] int32, half chosen by the parity of the epoch; flags [W] int64, one per source.
              A splits row, int32 [S], S a multiple of 4, has C counts; at the end TAIL_WORDS words: REPORT_TOKENS to
              REPORT_HOST_WORD of this rank (device/codes.py). The result is `placement` (device/tables.py).
Memory order  A program of step 0 adds itself to a counter by a release, after a block barrier; programs of step 1
              acquire it. These programs count themselves done by acquire-release adds, so the last one sees the
              totals of all. The flag is released after the row; step 4 acquires it. EPOCH_PLACED is released within
              this GPU, and covers the stores of all programs that count or scan.
Progress      Programs of step 0 wait for nobody, and have lower numbers than programs of step 1, which wait for them.
              Programs that quantise wait for nobody, and come last: many and short, they would keep those of step 1
              from starting.
              One program waits for other ranks; it posts before.
Replay        The epoch lives on the device and only grows; the last program resets both counts of programs. A
              rank that has passed step 4 knows that every rank has finished its previous call (its kernels precede
              the post on its stream), so the pushes of this call may overwrite the staging buffers without a barrier.
              A fast peer may post the next epoch while this rank still reads this one: hence the two halves. This
              rank fills its row before step 3: the one of two calls ago, which all ranks have read.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..compute.map_slots import Given
from ..compute.routing import Counting, count_chunk
from ..device.buffers import (
    EPOCH_DISPATCH,
    EPOCH_PLACED,
    PROGRAMS_COUNTED,
    SPLITS,
    SPLITS_FLAG,
    count_overflow,
    own_buffer,
)
from ..device.calls import CALLS_DISPATCH, dispatch_word, report_calls, store_epoch, words_differ
from ..device.early import let_next_start
from ..device.host_read import HostRead, must_hold, tell_host
from ..device.job import (
    Job,
    first_local,
    is_local_expert,
    is_rank,
    local_of,
    local_rank,
    my_node,
    node_of,
    on_my_node,
    rank_of,
    state_at,
)
from ..device.overruns import report_overruns
from ..device.payload import Packing, pack_rows
from ..device.post import Row, post_to_all
from ..device.pull import fewer
from ..device.tables import (
    BAD_ENTRY,
    BAD_ID,
    REPORT_ARRIVALS,
    REPORT_ARRIVALS_HERE,
    REPORT_BAD_ENTRY,
    REPORT_BAD_ID,
    REPORT_HOST_WORD,
    REPORT_ROWS,
    REPORT_SUMS,
    REPORT_TOKENS,
    TAIL_WORDS,
    Entries,
    adder_of,
    bases_of,
    chunk_bad_ptrs,
    expert_offsets_of,
    first_arrivals_of,
    held_of,
    node_columns_of,
    num_columns_of,
    num_recv_of,
    num_rows_of,
    overflow_of,
    rank_columns_of,
    report_ptrs,
    row_length_of,
    row_of,
    sort_bases_of,
    stage_bases_of,
    sum_ends_of,
    sums_from_of,
    sums_to_of,
    tail_ptr,
    tiles_of,
    tokens_from_node_of,
)
from ..device.waits import WAIT_SPLITS, last_to_arrive, wait_flags, wait_programs
from ..spec import ep_kernel

_NO_INDEX = tl.constexpr(2**31 - 1)
_RUN = tl.constexpr(8)
"""Consecutive chunks that a thread adds up."""


@triton.jit
def _scan(job, chunks_ptr, rows, num_chunks, number, counted, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    """Exclusive prefix of some columns over the chunks, in place; store totals in this rank's row, at both places. All
    0 if not `counted`."""
    num_columns = num_columns_of(job)
    columns = number * BLOCK_C + tl.arange(0, BLOCK_C)
    # A thread has the chunks of a run, and adds them up by itself; only the sums of runs pass between threads.
    run = tl.arange(0, BLOCK_N // _RUN)[:, None, None]
    place_in_run = tl.arange(0, _RUN)[None, :, None]
    total = tl.zeros([BLOCK_C], tl.int32)
    for start in range(0, num_chunks, BLOCK_N):
        chunk = start + run * _RUN + place_in_run
        mask = (chunk < num_chunks) & (columns < num_columns)[None, None, :]
        ptrs = chunks_ptr + chunk.to(tl.int64) * num_columns + columns[None, None, :]
        counts = tl.load(ptrs, mask=mask & counted, other=0)
        of_run = tl.sum(counts, axis=1)
        before = total[None, :] + tl.cumsum(of_run, axis=0) - of_run
        tl.store(ptrs, before[:, None, :] + tl.cumsum(counts, axis=1) - counts, mask=mask)
        total += tl.sum(of_run, axis=0)
    for place in tl.static_range(2):
        tl.store(rows[place] + columns, total, mask=columns < num_columns)


@triton.jit
def _clear(job, placement_ptr, BLOCK: tl.constexpr):
    """Zero `placement` up to the tile table, but for this rank's row. Nothing else writes the gaps between parts."""
    nothing = tl.zeros([], tl.int32)
    row, end = row_of(job, nothing), tiles_of(job, nothing)
    for start in range(0, end, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        in_row = (offs >= row) & (offs < row + row_length_of(job))
        tl.store(placement_ptr + offs, 0, mask=(offs < end) & (in_row == 0))


@triton.jit
def _fill_tail(job, chunks_ptr, rows, num_chunks, num_tokens, host_word, BLOCK_N: tl.constexpr):
    """Write the tail of this rank's row, and zeros between the counts and the tail, at both places."""
    chunks = tl.arange(0, BLOCK_N)
    first_bad = tl.full([], _NO_INDEX, tl.int32)
    bad_id = tl.full([], 0, tl.int32)
    for start in range(0, num_chunks, BLOCK_N):
        mask = start + chunks < num_chunks
        bad_ptrs = chunk_bad_ptrs(job, chunks_ptr, num_chunks, start + chunks, BAD_ENTRY)
        bad = tl.load(bad_ptrs, mask=mask, other=_NO_INDEX)
        id_ptrs = chunk_bad_ptrs(job, chunks_ptr, num_chunks, start + chunks, BAD_ID)
        ids = tl.load(id_ptrs, mask=mask, other=0)
        first_here = tl.min(bad)
        id_here = tl.sum(tl.where((bad == first_here) & (bad != _NO_INDEX), ids, 0))
        bad_id = tl.where(first_here < first_bad, id_here, bad_id)
        first_bad = tl.minimum(first_here, first_bad)
    tail = row_length_of(job) - TAIL_WORDS
    between = num_columns_of(job) + tl.arange(0, 4)
    for place in tl.static_range(2):
        row_ptr = rows[place]
        tl.store(row_ptr + between, 0, mask=between < tail)
        tl.store(tail_ptr(job, row_ptr, REPORT_TOKENS), num_tokens)
        tl.store(tail_ptr(job, row_ptr, REPORT_BAD_ENTRY), tl.where(first_bad == _NO_INDEX, 0, first_bad + 1))
        tl.store(tail_ptr(job, row_ptr, REPORT_BAD_ID), bad_id)
        tl.store(tail_ptr(job, row_ptr, REPORT_HOST_WORD), host_word)


@triton.jit
def _exchange(job, epoch, sizes):
    """Post this rank's row to all ranks and wait for their rows."""
    row_length = row_length_of(job)
    my_row = ((epoch & 1) * job.num_ranks + job.rank) * row_length
    tl.store(state_at(job, EPOCH_DISPATCH), epoch)
    post_to_all(
        job,
        Row(my_row * 4, tl.cast(row_length, tl.int64) * 4),
        epoch,
        SPLITS,
        SPLITS_FLAG,
        True,
        False,
        sizes.NETWORK,
        sizes.LWP,
        sizes.BLOCK,
    )
    sources = tl.arange(0, sizes.WP)
    flag_ptrs = own_buffer(job, SPLITS_FLAG, tl.int64) + sources
    wait_flags(job, flag_ptrs, is_rank(job, sources), epoch, WAIT_SPLITS)


@triton.jit
def _report_sums(job, splits_ptr, placement_ptr, WP: tl.constexpr, PAIRS: tl.constexpr):
    """With several nodes, report how many rows of sums each rank needs. Returns [WP] for the tokens of each rank, the
    rows of earlier nodes' tokens at the rank of this node that adds up its sums."""
    rank = tl.arange(0, WP)[:, None]
    local = local_of(job, rank)
    in_all = tl.zeros([WP], tl.int32)
    of_earlier = tl.zeros([WP], tl.int32)
    for start in range(0, job.num_ranks, PAIRS):
        # All pairs of a source, which is the rank's counterpart on some node, and an owner, which is some rank of the
        # rank's node, or of this node: as many as there are ranks.
        pair = start + tl.arange(0, PAIRS)[None, :]
        mask = is_rank(job, rank) & is_rank(job, pair)
        source = rank_of(job, node_of(job, pair), local)
        tokens_ptrs = rank_columns_of(job, splits_ptr + source * row_length_of(job)) + local_of(job, pair)
        in_all += tl.sum(tl.load(tokens_ptrs + rank - local, mask=mask, other=0), axis=1)
        mask &= node_of(job, pair) < node_of(job, rank)
        of_earlier += tl.sum(tl.load(tokens_ptrs + first_local(job), mask=mask, other=0), axis=1)
    every = tl.arange(0, WP)
    tl.store(report_ptrs(placement_ptr, every, REPORT_SUMS), in_all, mask=is_rank(job, every))
    return of_earlier


class _Told(NamedTuple):
    """What all ranks have told of some of them, besides the counts per expert. All of it is loaded before anything is
    stored: behind a store, each load would wait for memory again.

    Attributes:
        tokens: [source, owner] tokens of each rank for these ranks.
        tail: [owner, TAIL_WORDS] tails of their rows.
        from_there: [owner] tokens of these ranks for this node.
    """

    tokens: Any
    tail: Any
    from_there: Any


@triton.jit
def _told(job, splits_ptr, owner, WP: tl.constexpr):
    """Load `_Told` of ranks [OWNERS]."""
    row_length = row_length_of(job)
    source = tl.arange(0, WP)
    is_owner = is_rank(job, owner)
    mask = is_rank(job, source)[:, None] & is_owner[None, :]
    tokens_ptrs = rank_columns_of(job, splits_ptr + source[:, None] * row_length) + owner[None, :]
    field = tl.arange(0, TAIL_WORDS)[None, :]
    tail_ptrs = tail_ptr(job, splits_ptr + owner[:, None] * row_length, REPORT_TOKENS) + field
    from_ptrs = node_columns_of(job, splits_ptr + owner * row_length) + my_node(job)
    return _Told(
        tl.load(tokens_ptrs, mask=mask, other=0),
        tl.load(tail_ptrs, mask=is_owner[:, None], other=0),
        tl.load(from_ptrs, mask=is_owner, other=0),
    )


@triton.jit
def _report(
    job,
    placement_ptr,
    owner,  # [OWNERS] ranks
    told,  # of these ranks
    rows,  # [OWNERS] their output rows
    earlier_sums,  # [WP] for the tokens of each rank, the first row of these ranks' sums at the rank that adds them
    sizes,
):
    """Store the results per rank: reports, staging rows, rows of sums, tokens from other nodes. Returns [WP] how many
    sums of each rank's tokens these ranks compute for ranks of this node."""
    source = tl.arange(0, sizes.WP)
    is_owner = is_rank(job, owner)
    tokens = told.tokens
    before_me = tl.sum(tl.where((source < job.rank)[:, None], tokens, 0), axis=0)
    tl.store(stage_bases_of(job, placement_ptr) + owner, before_me, mask=is_owner)
    here = tl.sum(tl.where((owner == job.rank)[None, :], tokens, 0), axis=1)  # [source]
    first = tl.cumsum(here, axis=0) - here
    is_mine = tl.sum((owner == job.rank).to(tl.int32)) > 0
    from_source = is_rank(job, source) & is_mine
    # Where the sums of a source's tokens lie at the rank that adds them, less where the tokens are staged.
    of_node = tl.where(on_my_node(job, owner)[None, :], tokens, 0)
    ends = earlier_sums[:, None] + tl.cumsum(of_node, axis=1)
    if sizes.ENGINES:
        ends = (owner * job.max_tokens)[None, :] + of_node
    shift = ends - of_node - (tl.cumsum(tokens, axis=0) - tokens)
    sums_to = tl.sum(tl.where((owner == job.rank)[None, :], shift, 0), axis=1)
    tl.store(sums_to_of(job, placement_ptr) + source, sums_to, mask=from_source)
    at = rank_of(job, node_of(job, source)[:, None], (owner - first_local(job))[None, :])
    added_here = (is_rank(job, source) & (adder_of(job, source) == job.rank))[:, None] & on_my_node(job, owner)[None, :]
    tl.store(sums_from_of(job, placement_ptr) + at, shift, mask=added_here)
    tl.store(sum_ends_of(job, placement_ptr) + at, ends, mask=added_here)
    tl.store(first_arrivals_of(job, placement_ptr) + source, first, mask=from_source)
    tl.store(report_ptrs(placement_ptr, source, REPORT_ARRIVALS_HERE), here, mask=from_source)

    tl.store(report_ptrs(placement_ptr, owner, REPORT_ROWS), rows, mask=is_owner)
    tl.store(report_ptrs(placement_ptr, owner, REPORT_ARRIVALS), tl.sum(tokens, axis=0), mask=is_owner)
    field = tl.arange(0, TAIL_WORDS)[None, :]
    tl.store(report_ptrs(placement_ptr, owner[:, None], REPORT_TOKENS) + field, told.tail, mask=is_owner[:, None])

    is_counterpart = is_owner & (local_of(job, owner) == local_rank(job))
    tokens_from_node_ptr = tokens_from_node_of(job, placement_ptr)
    tl.store(tokens_from_node_ptr + node_of(job, owner), told.from_there, mask=is_counterpart)
    return tl.sum(of_node, axis=1)


@triton.jit
def _place_segments(
    job,
    splits_ptr,
    placement_ptr,
    first_owner,
    earlier,  # my entries for the experts of the ranks before `first_owner`
    earlier_sums,  # as in `_report`
    segments,
    sizes,
):
    """Derive first rows of my entries at some ranks, and of the experts' segments here. Returns my entries for these
    ranks, and the result of `_report`."""
    source = tl.arange(0, sizes.WP)
    owner = first_owner + tl.arange(0, sizes.OWNERS)
    local = tl.arange(0, sizes.EP)
    expert = owner[:, None] * job.experts_per_rank + local[None, :]
    is_expert = is_rank(job, owner)[:, None] & is_local_expert(job, local)[None, :]
    ptrs = splits_ptr + (source * row_length_of(job))[:, None, None] + expert[None, :, :]
    mask = is_rank(job, source)[:, None, None] & is_expert[None, :, :]
    counts = tl.load(ptrs, mask=mask, other=0)  # [source, owner, expert]
    told = _told(job, splits_ptr, owner, sizes.WP)
    total = tl.sum(counts, axis=0)
    before_me = tl.sum(tl.where((source < job.rank)[:, None, None], counts, 0), axis=0)
    padded = (total + segments.alignment - 1) // segments.alignment * segments.alignment
    start = tl.cumsum(padded, axis=1) - padded
    rows = tl.sum(padded, axis=1)
    tl.store(bases_of(job, placement_ptr) + expert, start + before_me, mask=is_expert)

    mine = tl.sum(tl.where((source == job.rank)[:, None, None], counts, 0), axis=0)
    of_owner = tl.sum(mine, axis=1)
    sorted_start = earlier + (tl.cumsum(of_owner, axis=0) - of_owner)[:, None] + tl.cumsum(mine, axis=1) - mine
    tl.store(sort_bases_of(job, placement_ptr) + expert, sorted_start, mask=is_expert)

    # Clamp, so that a GEMM driven by the offsets stays inside a static buffer that overflowed.
    here = is_expert & (owner == job.rank)[:, None]
    clamped = tl.minimum(start, segments.recv_capacity)
    locals_ = tl.broadcast_to(local[None, :], [sizes.OWNERS, sizes.EP])
    expert_offsets_ptr = expert_offsets_of(job, placement_ptr)
    tl.store(expert_offsets_ptr + locals_, clamped, mask=here)
    real = tl.minimum(start + total, segments.recv_capacity) - clamped
    tl.store(num_recv_of(job, placement_ptr) + locals_, real, mask=here)
    my_rows = tl.sum(tl.where(owner == job.rank, rows, 0))
    if (first_owner <= job.rank) & (job.rank < first_owner + sizes.OWNERS):
        tl.store(num_rows_of(job, placement_ptr), tl.minimum(my_rows, segments.recv_capacity))
        overflow = tl.maximum(my_rows - segments.recv_capacity, 0)
        tl.store(overflow_of(job, placement_ptr), overflow)
        count_overflow(job, overflow)
    return tl.sum(of_owner), _report(job, placement_ptr, owner, told, rows, earlier_sums, sizes)


class Call(NamedTuple):
    """What this rank reports of a dispatch, for all ranks to compare.

    Attributes:
        reported_tokens: number of tokens that this rank reports.
        host_word: HOST_* (device/codes.py).
        bad_scatter_ptr: [1] int32, added to the host word; read if HAS_SCATTER.
        routed_ptr: `placement` of the dispatch whose routing is reused; read with HOST_AGAIN in the host word.
        HAS_SCATTER: the caller provides scatter indices.
    """

    reported_tokens: Any
    host_word: Any
    bad_scatter_ptr: Any
    routed_ptr: Any
    HAS_SCATTER: tl.constexpr


class Segments(NamedTuple):
    """Output rows of the local experts.

    Attributes:
        alignment: segments are padded to multiples of this number of rows.
        recv_capacity: most output rows.
    """

    alignment: Any
    recv_capacity: Any


class Sizes(NamedTuple):
    """Block sizes, powers of two, and the transport.

    Attributes:
        NETWORK: transport to other nodes (device/transport.py).
        WP, LWP: all ranks, ranks of a node.
        EP: local experts.
        OWNERS: ranks whose experts are placed at a time.
        BLOCK_N, BLOCK_C, BLOCK: chunks, columns of the counts, and words read at a time.
        ENGINES: copy engines may send rows: the sums of each rank have max_tokens rows in a combine buffer, used or
            not, so that hosts know where they begin, and overruns are reported (device/overruns.py). One node.
    """

    NETWORK: tl.constexpr
    WP: tl.constexpr
    LWP: tl.constexpr
    EP: tl.constexpr
    OWNERS: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_C: tl.constexpr
    BLOCK: tl.constexpr
    ENGINES: tl.constexpr


@triton.jit
def _place(job, splits_ptr, placement_ptr, epoch, segments, read, sizes):
    """Derive `placement` from the rows of all ranks; tell the next kernel, then the host, that it is there."""
    source = tl.arange(0, sizes.WP)
    word_ptrs = tail_ptr(job, splits_ptr + source * row_length_of(job), REPORT_HOST_WORD)
    words = tl.load(word_ptrs, mask=is_rank(job, source), other=0)
    earlier = tl.zeros([], tl.int32)
    earlier_sums = tl.zeros([sizes.WP], tl.int32)
    MANY_NODES: tl.constexpr = sizes.LWP < sizes.WP
    if MANY_NODES:
        # Two loads for each pair, so half as many pairs at a time as segments.
        PAIRS: tl.constexpr = fewer(sizes.WP, (sizes.OWNERS * sizes.EP + 1) // 2)
        earlier_sums = _report_sums(job, splits_ptr, placement_ptr, sizes.WP, PAIRS)
    for first_owner in range(0, job.num_ranks, sizes.OWNERS):
        entries_there, sums_there = _place_segments(
            job, splits_ptr, placement_ptr, first_owner, earlier, earlier_sums, segments, sizes
        )
        earlier += entries_there
        earlier_sums += sums_there
    store_epoch(job, placement_ptr, epoch)
    if not MANY_NODES:  # each rank adds up the sums of its own tokens
        tl.store(report_ptrs(placement_ptr, source, REPORT_SUMS), earlier_sums, mask=is_rank(job, source))
    if words_differ(words, is_rank(job, source)):
        report_calls(job, source, words, is_rank(job, source), CALLS_DISPATCH)
    if read.read_number != 0:
        # Other threads read the reports just stored.
        tl.debug_barrier()
        tl.store(held_of(job, placement_ptr), must_hold(job, placement_ptr, read, sizes.WP).to(tl.int32))
    tl.debug_barrier()
    tl.atomic_xchg(state_at(job, EPOCH_PLACED), epoch, sem="release", scope="gpu")
    tell_host(job, placement_ptr, read, sizes.BLOCK)


@ep_kernel(
    topk_idx_ptr="*{IDX}",
    map_ptr="*u8",
    probs_ptr="*fp32",
    weights_ptr="*fp32",
    excess_ptr="*i32",
    entries_ptr="*i32",
    chunks_ptr="*i32",
    bad_scatter_ptr="*i32",
    routed_ptr="*i32",
    told_ptr="*i64",
    unpacked_ptr="*{UNPACKED}",
    packed_ptr="*u8",
    num_warps=8,
    maxnreg=128,  # two programs that count fit on a multiprocessor
)
def splits_kernel(
    counting: Counting,
    given: Given,
    entries: Entries,  # out
    placement_ptr,  # out, device/tables.py
    call: Call,
    job: Job,
    segments: Segments,
    read: HostRead,
    packing: Packing,
    sizes: Sizes,
):
    if packing.PACKED_BLOCKS > 0:
        if tl.program_id(0) >= packing.first_packing:
            let_next_start()
            pack_rows(packing)
            return
    num_chunks = counting.first_waiting
    if tl.program_id(0) < num_chunks:
        count_chunk(job, counting, given, entries, num_chunks)
        # One thread releases for the whole block; pairs with the acquire in `wait_programs`.
        tl.debug_barrier()
        tl.atomic_add(state_at(job, PROGRAMS_COUNTED), 1, sem="release", scope="gpu")
        return
    number = tl.program_id(0) - num_chunks
    chunks_ptr = counting.chunks_ptr
    epoch = tl.load(state_at(job, EPOCH_DISPATCH)) + 1
    splits_ptr = own_buffer(job, SPLITS, tl.int32) + (epoch & 1) * job.num_ranks * row_length_of(job)
    # Where it is posted from, and where later kernels of this rank read it.
    rows = splits_ptr + job.rank * row_length_of(job), row_of(job, placement_ptr)
    if number == 0:
        # Clear while others count.
        _clear(job, placement_ptr, sizes.BLOCK)
    counted = wait_programs(job, state_at(job, PROGRAMS_COUNTED), num_chunks, WAIT_SPLITS)
    _scan(job, chunks_ptr, rows, num_chunks, number, counted, sizes.BLOCK_N, sizes.BLOCK_C)
    if number == 0:
        host_word = dispatch_word(job, call.host_word, call.routed_ptr)
        if call.HAS_SCATTER:
            host_word += tl.load(call.bad_scatter_ptr)
        tokens = call.reported_tokens
        _fill_tail(job, chunks_ptr, rows, num_chunks, tokens, host_word, sizes.BLOCK_N)
    if last_to_arrive(job, packing.first_packing - num_chunks):
        tl.store(state_at(job, PROGRAMS_COUNTED), 0)
        if sizes.ENGINES:
            report_overruns(job, sizes.WP)
        # Go on even after an expired wait: values computed from old counts are bounded, uninitialised ones are not.
        _exchange(job, epoch, sizes)
        let_next_start()
        _place(job, splits_ptr, placement_ptr, epoch, segments, read, sizes)
