"""Barrier of all ranks, or of the ranks of one node.

Protocol      1 advance the epoch of this scope
              2 post my flag = epoch to every rank of the scope (device/post.py)
              3 wait until the flag of every rank of the scope is at least the epoch
Layout        flags [W] int64, one per source rank: one array for the barrier of all ranks, one for the
              barrier of a node; scratch [W, 4] int32, the data that a put-with-signal must carry.
Memory order  A rank that has passed sees everything that this stream did before: the kernel starts after it, and
              step 2 is a system-scope release.
Progress      One program; it posts before it waits.
Replay        The epoch lives on the device and only grows, so a captured graph may replay.
"""

import triton.language as tl

from ..device.buffers import own_buffer
from ..device.job import Job, first_local, is_local, is_rank, state_at
from ..device.post import post_flag
from ..device.waits import WAIT_BARRIER, WAIT_NODE_BARRIER, wait_flags
from ..spec import ep_kernel


@ep_kernel(num_warps=1)
def barrier_kernel(
    job: Job,
    EPOCH: tl.constexpr,  # word of the state array (device/codes.py)
    FLAG_BUFFER: tl.constexpr,
    SAME_NODE_ONLY: tl.constexpr,
    NETWORK: tl.constexpr,
    WP: tl.constexpr,
    LWP: tl.constexpr,
):
    epoch = tl.load(state_at(job, EPOCH)) + 1
    tl.debug_barrier()
    tl.store(state_at(job, EPOCH), epoch)
    post_flag(job, epoch, FLAG_BUFFER, SAME_NODE_ONLY, NETWORK, LWP)
    if SAME_NODE_ONLY:
        peers = first_local(job) + tl.arange(0, LWP)
        mask = is_local(job, tl.arange(0, LWP))
        flag_ptrs = own_buffer(job, FLAG_BUFFER, tl.int64) + peers
        wait_flags(job, flag_ptrs, mask, epoch, WAIT_NODE_BARRIER, first_local(job))
    else:
        peers = tl.arange(0, WP)
        flag_ptrs = own_buffer(job, FLAG_BUFFER, tl.int64) + peers
        wait_flags(job, flag_ptrs, is_rank(job, peers), epoch, WAIT_BARRIER)
