"""Bring the weights of a low-latency dispatch to the rows of its assignments, in one launch.

For callers that know the weights only when they combine: a dispatch with weights needs no launch of its own.

Protocol      The first half of the programs push, the others copy. Program i of either half takes the tokens from
              i * SHARE to (i + 1) * SHARE - 1 of a rank.
              1 push: store each weight of its tokens of this rank at the rank that owns the expert. A token's weights
              for one rank lie there one after the other, in k order
              2 push: set its flag at every rank
              3 copy: wait for the flags of program i of all ranks
              4 copy: for each of its tokens of every rank, store the weights that came to the output rows that the
              dispatch gave to these assignments, which have the same order
Layout        ll_weights [2, W * M, K] float32, by parity of the epoch, source rank, token. ll_weights_flag [G, W]
              int64: the epoch, by program and rank. EPOCH_LL_WEIGHTS is a turn (device/low_latency.py). W ranks, M
              max_tokens, G programs.
Memory order  The stores of 1 precede the release of 2; 4 follows the acquire of 3.
Progress      1 and 2 wait for nobody; 3 waits for 2 of all ranks. Few programs wait, one per SHARE tokens.
Replay        A rank pushes for epoch n after its launch n - 1 has ended, in which every rank had set all flags n - 1,
              each after its own launch n - 2, the last reader of the half that is now written.
"""

import triton
import triton.language as tl

from ..device.buffers import EPOCH_LL_WEIGHTS, LL_WEIGHTS, LL_WEIGHTS_FLAG, STATUS, buffer_ptrs, own_buffer, table_ptrs
from ..device.job import Job, in_one_node, is_rank, state_at
from ..device.low_latency import end_turn, first_of_half, owners, turn_of
from ..device.payload import Choices
from ..device.waits import WAIT_LL_WEIGHTS, release_flags, wait_flags
from ..spec import ep_kernel


@triton.jit
def _push(job, epoch, share, weights_ptr, kept_idx_ptr, num_tokens, choices, WP: tl.constexpr, SHARE: tl.constexpr):
    """Store the weights of a share of this rank's tokens at the ranks that own the experts, and tell all ranks."""
    healthy = tl.load(state_at(job, STATUS)) == 0
    ks = tl.arange(0, choices.KP)
    token = share * SHARE + tl.arange(0, SHARE)
    mine = (token < num_tokens)[:, None] & (ks < choices.TOPK)[None, :]
    entry = token[:, None] * choices.TOPK + ks[None, :]
    weights = tl.load(weights_ptr + entry, mask=mine, other=0.0)
    owner = owners(tl.load(kept_idx_ptr + entry, mask=mine, other=-1), job.experts_per_rank)
    same = (owner[:, :, None] == owner[:, None, :]) & (ks[None, :] < ks[:, None])[None, :, :]
    position = tl.sum(same.to(tl.int32), axis=2)  # how many weights of the token precede it at that rank
    sent = (owner >= 0) & healthy
    dest = tl.load(table_ptrs(job, LL_WEIGHTS, owner), mask=sent, other=0).to(tl.pointer_type(tl.float32))
    dest += ((first_of_half(job, epoch) + job.rank) * job.max_tokens + token)[:, None] * choices.TOPK + position
    tl.store(dest, weights, mask=sent)
    peers = tl.arange(0, WP)
    told = is_rank(job, peers) & healthy
    flag_ptrs = buffer_ptrs(job, LL_WEIGHTS_FLAG, peers, told, tl.int64) + share * job.num_ranks + job.rank
    release_flags(flag_ptrs, told, tl.zeros([WP], tl.int64) + epoch)


@triton.jit
def _copy(job, epoch, share, copy_rows_ptr, out_ptr, choices, WP: tl.constexpr, SHARE: tl.constexpr):
    """Wait for the weights of a share of every rank's tokens, and store them to the tokens' output rows."""
    number = tl.arange(0, WP * SHARE)
    source, token = number // SHARE, share * SHARE + number % SHARE
    ks = tl.arange(0, choices.KP)
    there = (is_rank(job, source) & (token < job.max_tokens))[:, None] & (ks < choices.TOPK)[None, :]
    arrival = (source * job.max_tokens + token)[:, None] * choices.TOPK + ks[None, :]
    # Before the wait: row numbers are this rank's own.
    rows = tl.load(copy_rows_ptr + arrival, mask=there, other=-1)
    peers = tl.arange(0, WP)
    first = share * job.num_ranks
    flag_ptrs = own_buffer(job, LL_WEIGHTS_FLAG, tl.int64) + first + peers
    if wait_flags(job, flag_ptrs, is_rank(job, peers), epoch, WAIT_LL_WEIGHTS, first):
        staged_ptr = own_buffer(job, LL_WEIGHTS, tl.float32)
        staged_ptr += first_of_half(job, epoch) * job.max_tokens * choices.TOPK
        tl.store(out_ptr + rows, tl.load(staged_ptr + arrival, mask=rows >= 0, other=0.0), mask=rows >= 0)


@ep_kernel(weights_ptr="*fp32", kept_idx_ptr="*i32", copy_rows_ptr="*i32", out_ptr="*fp32")
def low_latency_weights_kernel(
    weights_ptr,  # [T, K]
    kept_idx_ptr,  # [T, K] int32, from the push kernel, -1 = dropped
    copy_rows_ptr,  # [W * M, K] int32, from the expand kernel: rows of the assignments first, negative = none
    out_ptr,  # out [R] float32; only rows of assignments are written
    job: Job,
    num_tokens,
    first_waiting,  # number of programs that push; as many copy
    choices: Choices,
    WP: tl.constexpr,
    SHARE: tl.constexpr,
):
    job = in_one_node(job)
    turn_ptr = state_at(job, EPOCH_LL_WEIGHTS)
    epoch = turn_of(turn_ptr)
    share = tl.program_id(0)
    if share < first_waiting:
        _push(job, epoch, share, weights_ptr, kept_idx_ptr, num_tokens, choices, WP, SHARE)
    else:
        _copy(job, epoch, share - first_waiting, copy_rows_ptr, out_ptr, choices, WP, SHARE)
    end_turn(turn_ptr, share == 0, tl.num_programs(0) - 1)
