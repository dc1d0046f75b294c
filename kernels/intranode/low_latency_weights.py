"""Bring the weights of a low-latency dispatch to the rows of its assignments, in one launch.

For callers that know the weights only when they combine: a dispatch with weights needs no launch of its own.

Protocol      Program i takes tokens i * SHARE to (i + 1) * SHARE - 1 of every rank.
              1 push: store each weight of its tokens of this rank at the rank that owns the expert. A token's weights
              for one rank lie there one after the other, in k order
              2 push: set its flag at every rank
              3 wait for the flags of program i of all ranks
              4 copy: for each of its tokens of every rank, store the weights that came to the output rows that the
              dispatch gave to these assignments, which have the same order
Layout        ll_weights [2, W * M, K] float32, by parity of the epoch, source rank, token. ll_weights_flag [G, W]
              int64: the epoch, by program and rank. EPOCH_LL_WEIGHTS is a turn (device/low_latency.py). W ranks, M
              max_tokens, G programs.
Memory order  The stores of 1 precede the release of 2; 4 follows the acquire of 3.
Progress      1 and 2 wait for nobody, and a program does both before it waits. At most G programs wait.
Replay        A rank pushes for epoch n after its launch n - 1 has ended, in which every rank had set all flags n - 1,
              each after its own launch n - 2, the last reader of the half that is now written.
"""

import triton.language as tl

from ..device.buffers import EPOCH_LL_WEIGHTS, LL_WEIGHTS, LL_WEIGHTS_FLAG, STATUS, buffer_ptrs, own_buffer, table_ptrs
from ..device.job import Job, in_one_node, is_rank, state_at
from ..device.low_latency import end_turn, first_of_half, owners, turn_of
from ..device.payload import Choices
from ..device.waits import WAIT_LL_WEIGHTS, release_flags, wait_flags
from ..spec import ep_kernel


@ep_kernel(weights_ptr="*fp32", kept_idx_ptr="*i32", copy_rows_ptr="*i32", out_ptr="*fp32")
def low_latency_weights_kernel(
    weights_ptr,  # [T, K]
    kept_idx_ptr,  # [T, K] int32, from the push kernel, -1 = dropped
    copy_rows_ptr,  # [W * M, K] int32, from the expand kernel: rows of the assignments first, negative = none
    out_ptr,  # out [R] float32; only rows of assignments are written
    job: Job,
    num_tokens,
    choices: Choices,
    WP: tl.constexpr,
    SHARE: tl.constexpr,
):
    job = in_one_node(job)
    healthy = tl.load(state_at(job, STATUS)) == 0
    turn_ptr = state_at(job, EPOCH_LL_WEIGHTS)
    epoch = turn_of(turn_ptr)
    share = tl.program_id(0)
    ks = tl.arange(0, choices.KP)
    is_choice = ks < choices.TOPK
    half = first_of_half(job, epoch)

    token = share * SHARE + tl.arange(0, SHARE)
    mine = (token < num_tokens)[:, None] & is_choice[None, :]
    entry = token[:, None] * choices.TOPK + ks[None, :]
    weights = tl.load(weights_ptr + entry, mask=mine, other=0.0)
    owner = owners(tl.load(kept_idx_ptr + entry, mask=mine, other=-1), job.experts_per_rank)
    same = (owner[:, :, None] == owner[:, None, :]) & (ks[None, :] < ks[:, None])[None, :, :]
    position = tl.sum(same.to(tl.int32), axis=2)  # how many weights of the token precede it at that rank
    sent = (owner >= 0) & healthy
    dest = tl.load(table_ptrs(job, LL_WEIGHTS, owner), mask=sent, other=0).to(tl.pointer_type(tl.float32))
    dest += ((half + job.rank) * job.max_tokens + token)[:, None] * choices.TOPK + position
    tl.store(dest, weights, mask=sent)

    peers = tl.arange(0, WP)
    in_group = is_rank(job, peers)
    flags = share * job.num_ranks + peers
    told = in_group & healthy
    flag_ptrs = buffer_ptrs(job, LL_WEIGHTS_FLAG, peers, told, tl.int64) + share * job.num_ranks + job.rank
    release_flags(flag_ptrs, told, tl.zeros([WP], tl.int64) + epoch)
    # Row numbers are this rank's own: load them while the weights are under way.
    source = tl.arange(0, WP * SHARE) // SHARE
    of_source = share * SHARE + tl.arange(0, WP * SHARE) % SHARE
    came = (is_rank(job, source) & (of_source < job.max_tokens))[:, None] & is_choice[None, :]
    arrival = (source * job.max_tokens + of_source)[:, None] * choices.TOPK + ks[None, :]
    rows = tl.load(copy_rows_ptr + arrival, mask=came, other=-1)
    own_flags = own_buffer(job, LL_WEIGHTS_FLAG, tl.int64) + flags
    if wait_flags(job, own_flags, in_group, epoch, WAIT_LL_WEIGHTS, share * job.num_ranks):
        staged_ptr = own_buffer(job, LL_WEIGHTS, tl.float32) + half * job.max_tokens * choices.TOPK
        tl.store(out_ptr + rows, tl.load(staged_ptr + arrival, mask=rows >= 0, other=0.0), mask=rows >= 0)
    end_turn(turn_ptr, share == 0, tl.num_programs(0) - 1)
