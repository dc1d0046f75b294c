"""Low-latency combine of few tokens inside a node: two launches.

Protocol      1 reduce: for each arrival row of the dispatch, the sum of its copies in float32, in k order, rounded once
              and stored at the token's rank
              2 reduce: every program adds its rows to ll_combine_flag of their ranks, which get max_tokens each in all,
              and the first program one more
              3 sum: wait for the flags of all ranks; add the sums of each token in float32, in the order of the ranks
              that it went to, and round. Where tags differ, ranks are in different combines (device/calls.py): the
              first program reports it
Layout        ll_combine [2, W, M, H]: by parity of the epoch, experts' rank, token; ll_combine_flag [2, W] int64:
              (rows << LL_COUNT_SHIFT | tag), where max_tokens + 1 are added in every second call, and the first program
              exchanges the lower half, as in low_latency_dispatch.py.
Memory order  As in low_latency_dispatch.py: the adds are one release sequence; 3 acquires their total.
Progress      1 and 2 wait for nobody. 3 waits for the reduces of all ranks, its own launched before.
Replay        As in low_latency_dispatch.py, with the combine's own epoch: a rank that reduces for epoch n has ended
              its sum of n - 1, for which every rank had set its flag, each after its own sum of n - 2, the last
              reader of the half that is written now, of sums and of flags. A rank without tokens waits as well. What
              reduce reads is the caller's and the descriptor's, so descriptors may be combined in any order.
"""

import triton
import triton.language as tl

from ..device import codes
from ..device.buffers import (
    EPOCH_LL_COMBINE,
    LL_COMBINE,
    LL_COMBINE_FLAG,
    LL_COMBINE_SENT,
    LL_COMBINE_TOLD,
    STATUS,
    buffer_ptrs,
    own_buffer,
)
from ..device.calls import CALLS_LL_COMBINE, Combine, combine_tag, report_calls
from ..device.job import Job, in_one_node, is_rank, state_at
from ..device.low_latency import first_of_half, owners, quotient, rank_bits, release_counts
from ..device.payload import Choices, RowTile, Tile, Weights
from ..device.waits import WAIT_LL_PARTIALS, wait_values
from ..spec import ep_kernel

_COUNT_SHIFT = tl.constexpr(codes.LL_COUNT_SHIFT)


@triton.jit
def _add_copy(acc, y_ptr, routed, copy, h, hidden, in_row):
    """Add columns `h` and on of the rows `copy` [ROWS] of y to `acc`, times their weights; negative = none."""
    rows = y_ptr + copy.to(tl.int64)[:, None] * hidden + h + tl.arange(0, acc.shape[1])[None, :]
    value = tl.load(rows, mask=(copy >= 0)[:, None] & in_row, other=0.0).to(tl.float32)
    if routed.HAS_WEIGHTS:
        value *= tl.load(routed.weights_ptr + copy, mask=copy >= 0, other=0.0)[:, None]
    return acc + value


@ep_kernel(y_ptr="*{TOKEN}", weights_ptr="*fp32", copy_rows_ptr="*i32", specialised=("hidden",), num_warps=8)
def low_latency_reduce_kernel(
    y_ptr,  # [R, H]
    routed: Weights,  # [R]
    copy_rows_ptr,  # [W * M, K] int32, of the expand kernel: copies first, then -1
    combine: Combine,
    job: Job,
    hidden,
    TOPK: tl.constexpr,
    WP: tl.constexpr,
    tile: RowTile,
):
    job = in_one_node(job)
    # After a failure nothing is stored; an early return would make every load wait for this one.
    healthy = tl.load(state_at(job, STATUS)) == 0
    epoch = tl.load(state_at(job, EPOCH_LL_COMBINE)) + 1
    parity = (epoch & 1).to(tl.int32)
    part = first_of_half(job, epoch) + job.rank
    tag = combine_tag(job, combine)
    is_first = tl.program_id(0) == 0
    told_ptr = state_at(job, LL_COMBINE_TOLD) + parity
    told = tl.load(told_ptr, mask=is_first, other=tag)
    item = tl.program_id(0) + tl.arange(0, tile.ROWS) * tl.num_programs(0)
    # Neighbours go to different ranks, and ranks begin with different ones.
    token = quotient(item, job.num_ranks)
    source = job.rank + item - token * job.num_ranks
    source = tl.where(is_rank(job, source), source, source - job.num_ranks)
    alive = item < job.num_ranks * job.max_tokens
    copy_ptrs = copy_rows_ptr + (source * job.max_tokens + token) * TOPK
    came = tl.load(copy_ptrs, mask=alive, other=-1) != -1
    offs = tl.arange(0, tile.BLOCK_H)[None, :]
    peers = tl.arange(0, WP)
    mine = (source[:, None] == peers[None, :]) & (alive & healthy)[:, None]
    # The first program adds one more, so that no count is complete before its tag is there.
    count = tl.sum(mine.to(tl.int64), axis=0) + tl.where(is_rank(job, peers) & healthy & is_first, 1, 0)
    flag_ptrs = buffer_ptrs(job, LL_COMBINE_FLAG, peers, count > 0, tl.int64) + part
    dest = buffer_ptrs(job, LL_COMBINE, source, came, y_ptr.dtype.element_ty)
    dest += (part * job.max_tokens + token).to(tl.int64) * hidden
    for t in tl.static_range(tile.TILES):
        h = t * tile.BLOCK_H
        in_row = h + offs < hidden
        acc = tl.zeros([tile.ROWS, tile.BLOCK_H], tl.float32)
        for first in tl.static_range(0, TOPK, 2):  # two at a time are in flight, and few rows have more
            copy = tl.load(copy_ptrs + first, mask=alive, other=-1)
            if (first == 0) or (tl.max((copy != -1).to(tl.int32)) > 0):
                acc = _add_copy(acc, y_ptr, routed, copy, h, hidden, in_row)
                if first + 1 < TOPK:
                    copy = tl.load(copy_ptrs + first + 1, mask=alive, other=-1)
                    acc = _add_copy(acc, y_ptr, routed, copy, h, hidden, in_row)
        tl.store(dest[:, None] + h + offs, acc.to(y_ptr.dtype.element_ty), mask=(came & healthy)[:, None] & in_row)
    if is_first:
        tl.store(state_at(job, LL_COMBINE_SENT), epoch)
    release_counts(flag_ptrs, count > 0, (count << _COUNT_SHIFT) + tl.where(is_first, tag - told, 0))
    # Behind the barrier of the release: all threads have read what was told before.
    tl.store(told_ptr, tag, mask=is_first & healthy)


@ep_kernel(out_ptr="*{TOKEN}", kept_idx_ptr="*i32", specialised=("hidden",), num_warps=8)
def low_latency_sum_kernel(
    out_ptr,  # out [T, H]
    kept_idx_ptr,  # [T, K] int32, of the push kernel
    job: Job,
    num_tokens,
    hidden,
    choices: Choices,
    WP: tl.constexpr,
    PARTS: tl.constexpr,  # programs per tile of tokens, each with BLOCK_H columns
    tile: Tile,
):
    job = in_one_node(job)
    # Without tokens there is one program: it must wait all the same (Replay).
    token = tl.program_id(0) // PARTS * tile.ROWS + tl.arange(0, tile.ROWS)
    alive = token < num_tokens
    ks = tl.arange(0, choices.KP)[None, :]
    ids = tl.load(
        kept_idx_ptr + token[:, None] * choices.TOPK + ks, mask=alive[:, None] & (ks < choices.TOPK), other=-1
    )
    goes_to = rank_bits(owners(ids, job.experts_per_rank), 1)
    offs = (tl.program_id(0) % PARTS * tile.BLOCK_H + tl.arange(0, tile.BLOCK_H))[None, :]
    in_row = offs < hidden
    epoch = tl.load(state_at(job, LL_COMBINE_SENT))
    own_tag = tl.load(state_at(job, LL_COMBINE_TOLD) + (epoch & 1)).to(tl.int32)
    if tl.program_id(0) == 0:
        tl.store(state_at(job, EPOCH_LL_COMBINE), epoch)
    peers = tl.arange(0, WP)
    in_group = is_rank(job, peers)
    first = first_of_half(job, epoch)
    flag_ptrs = own_buffer(job, LL_COMBINE_FLAG, tl.int64) + first + peers
    sums_ptr = own_buffer(job, LL_COMBINE, out_ptr.dtype.element_ty)
    # Times that this half has been used.
    expected = (((epoch + 1) >> 1) * (job.max_tokens + 1)) << _COUNT_SHIFT
    arrived, seen = wait_values(job, flag_ptrs, in_group, expected, WAIT_LL_PARTIALS, first)
    if arrived:
        acc = tl.zeros([tile.ROWS, tile.BLOCK_H], tl.float32)
        for peer in tl.static_range(WP):
            here = ((goes_to >> peer) & 1) > 0
            rows = sums_ptr + ((first + peer) * job.max_tokens + token).to(tl.int64)[:, None] * hidden
            acc += tl.load(rows + offs, mask=here[:, None] & in_row, other=0.0).to(tl.float32)
        dest = out_ptr + token.to(tl.int64)[:, None] * hidden + offs
        tl.store(dest, acc.to(out_ptr.dtype.element_ty), mask=alive[:, None] & in_row)
    # All programs have seen the same tags. Sums of rows of different calls are not used: the host raises.
    if arrived & (tl.program_id(0) == 0):
        tags = seen.to(tl.int32)
        if tl.max((in_group & (tags != own_tag)).to(tl.int32)) > 0:
            report_calls(job, peers, tags, in_group, CALLS_LL_COMBINE)
