"""Overruns: rows that copy engines may have overwritten while this rank still read them.

A host starts copies to the memory of other ranks without knowing whether the kernel before them on the stream waited in
vain for these ranks. If it did, that kernel sets overrun_flag[my rank] at every rank of the node, before the copies
begin. A rank that has read its rows looks at its flags; if one is set, the rows that it read may have been others, and
it writes a status record (waits.py). So an overrun is reported at the latest by the call that follows it.

Flags are set once: a layer whose wait has expired sends nothing valid any more. If a wait of rank 2 has expired, its
entry 2 is 1 at all ranks.
"""

import triton
import triton.language as tl

from . import codes
from .buffers import OVERRUN_FLAG, STATUS, STATUS_INDEX, buffer_ptrs, own_buffer
from .job import first_local, is_local, is_rank, state_at
from .waits import raise_alarm, read_flags, release_flags, take_record

OVERRUN = tl.constexpr(codes.OVERRUN)


@triton.jit
def post_overrun(job, LWP: tl.constexpr):
    """Tell all ranks of this node that copies of this rank may overwrite rows that they still read."""
    local = tl.arange(0, LWP)
    mask = is_local(job, local)
    flag_ptrs = buffer_ptrs(job, OVERRUN_FLAG, first_local(job) + local, mask, tl.int64) + job.rank
    release_flags(flag_ptrs, mask, tl.full([LWP], 1, tl.int64))


@triton.jit
def report_overruns(job, WP: tl.constexpr):
    """Write the status record if another rank may have overwritten rows that this rank has read; called after all
    programs that read rows have ended."""
    peers = tl.arange(0, WP)
    others = is_rank(job, peers) & (peers != job.rank)
    seen = read_flags(job, own_buffer(job, OVERRUN_FLAG, tl.int64) + peers, others, tl.zeros([], tl.int64))
    first = tl.min(tl.where(seen != 0, peers, WP))
    if first < WP:
        if take_record(job, OVERRUN):
            tl.store(state_at(job, STATUS) + STATUS_INDEX, tl.cast(first, tl.int64))
            raise_alarm(job, OVERRUN)
