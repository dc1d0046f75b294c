"""Symmetric buffers as device code sees them: one table of addresses, one index per buffer.

The table `tables` is int64 [2 * NUM_BUFFERS + 1, W] and has three parts:

- the address at which this rank loads and stores each rank's instance of a buffer (0 = not mapped: another node), one
  row per buffer;
- the address by which put functions name it, one row per buffer;
- one row with NVSHMEM's number of each rank (its PE).

The indices below, from codes.py, are rows of the first two parts. The table in triton_ep/context/layout.py says what
each buffer holds, who writes it and who reads it; a test compares its order with this one. With 4 ranks, stage_x (2) of
rank 3 is at tables[2 * 4 + 3] for stores and at tables[(30 + 2) * 4 + 3] for puts.

The array `state` is int64 [STATE_WORDS] in this rank's own memory: epochs, time limit, status record, number of
programs that have finished, address of the alarm word in host memory (nonzero if there is a status record), number of
rows that did not fit a static capacity, number of programs that have counted their entries, number of the dispatch
whose segments have been placed last. [W] words follow it, for the tags of the ranks if their calls differ
(device/calls.py).
"""

import triton
import triton.language as tl

from . import codes
from .job import state_at

SPLITS = tl.constexpr(codes.SPLITS)
SPLITS_FLAG = tl.constexpr(codes.SPLITS_FLAG)
STAGE_X = tl.constexpr(codes.STAGE_X)
STAGE_META = tl.constexpr(codes.STAGE_META)
ARRIVE_FLAG = tl.constexpr(codes.ARRIVE_FLAG)
COMBINE_X = tl.constexpr(codes.COMBINE_X)
COMBINE_WEIGHT = tl.constexpr(codes.COMBINE_WEIGHT)
STAGED_FLAG = tl.constexpr(codes.STAGED_FLAG)
DONE_FLAG = tl.constexpr(codes.DONE_FLAG)
BARRIER_FLAG = tl.constexpr(codes.BARRIER_FLAG)
NODE_BARRIER_FLAG = tl.constexpr(codes.NODE_BARRIER_FLAG)
BARRIER_SCRATCH = tl.constexpr(codes.BARRIER_SCRATCH)
NET_SEND = tl.constexpr(codes.NET_SEND)
NET_RECV = tl.constexpr(codes.NET_RECV)
NET_FLAG = tl.constexpr(codes.NET_FLAG)
PARTIAL_SEND = tl.constexpr(codes.PARTIAL_SEND)
PARTIAL_RECV = tl.constexpr(codes.PARTIAL_RECV)
PARTIAL_FLAG = tl.constexpr(codes.PARTIAL_FLAG)
LL_STAGE_X = tl.constexpr(codes.LL_STAGE_X)
LL_META = tl.constexpr(codes.LL_META)
LL_COUNTS = tl.constexpr(codes.LL_COUNTS)
LL_FLAG = tl.constexpr(codes.LL_FLAG)
LL_COMBINE = tl.constexpr(codes.LL_COMBINE)
LL_COMBINE_FLAG = tl.constexpr(codes.LL_COMBINE_FLAG)
LL_WEIGHTS = tl.constexpr(codes.LL_WEIGHTS)
LL_ROW_FLAG = tl.constexpr(codes.LL_ROW_FLAG)
ENTERED_FLAG = tl.constexpr(codes.ENTERED_FLAG)
STAGE_SOURCE = tl.constexpr(codes.STAGE_SOURCE)
OVERRUN_FLAG = tl.constexpr(codes.OVERRUN_FLAG)
ARRIVED = tl.constexpr(codes.ARRIVED)
NUM_BUFFERS = tl.constexpr(codes.NUM_BUFFERS)

# Words of `state`. The status record (device/waits.py) has four.
EPOCH_DISPATCH = tl.constexpr(codes.EPOCH_DISPATCH)
EPOCH_COMBINE = tl.constexpr(codes.EPOCH_COMBINE)
EPOCH_BARRIER_ALL = tl.constexpr(codes.EPOCH_BARRIER_ALL)
EPOCH_BARRIER_NODE = tl.constexpr(codes.EPOCH_BARRIER_NODE)
TIMEOUT_US = tl.constexpr(codes.TIMEOUT_US)
EPOCH_LL_DISPATCH = tl.constexpr(codes.EPOCH_LL_DISPATCH)
EPOCH_LL_COMBINE = tl.constexpr(codes.EPOCH_LL_COMBINE)
STATUS = tl.constexpr(codes.STATUS)
STATUS_INDEX = tl.constexpr(codes.STATUS_INDEX)
STATUS_EXPECTED = tl.constexpr(codes.STATUS_EXPECTED)
STATUS_SEEN = tl.constexpr(codes.STATUS_SEEN)
PROGRAMS_DONE = tl.constexpr(codes.PROGRAMS_DONE)
ALARM = tl.constexpr(codes.ALARM)
OVERFLOW_TOTAL = tl.constexpr(codes.OVERFLOW_TOTAL)
PROGRAMS_COUNTED = tl.constexpr(codes.PROGRAMS_COUNTED)
EPOCH_PLACED = tl.constexpr(codes.EPOCH_PLACED)
STATE_WORDS = tl.constexpr(codes.STATE_WORDS)


@triton.jit
def table_ptrs(job, row, peers):
    """Pointers to the entries of `peers` in one row of the tables."""
    return job.tables_ptr + row * job.num_ranks + peers


@triton.jit
def address_of(job, BUFFER: tl.constexpr, peer):
    """int64 address of one rank's instance of a buffer, for loads and stores."""
    return tl.load(table_ptrs(job, BUFFER, peer))


@triton.jit
def net_address_of(job, BUFFER: tl.constexpr, peer):
    """int64 address of one rank's instance of a buffer, for put functions."""
    return tl.load(table_ptrs(job, NUM_BUFFERS + BUFFER, peer))


@triton.jit
def pe_of(job, peer):
    """NVSHMEM's number of a rank, int32."""
    return tl.load(table_ptrs(job, 2 * NUM_BUFFERS, peer)).to(tl.int32)


@triton.jit
def count_overflow(job, num_rows):
    """Add a call's overflow rows to the total of all calls. One program per call does this; nothing else writes it."""
    total_ptr = state_at(job, OVERFLOW_TOTAL)
    there_are = num_rows > 0  # otherwise touch no memory
    tl.store(total_ptr, tl.load(total_ptr, mask=there_are, other=0) + num_rows, mask=there_are)


@triton.jit
def own_buffer(job, BUFFER: tl.constexpr, DTYPE: tl.constexpr):
    """Pointer to this rank's instance of a buffer."""
    return pointers_at(address_of(job, BUFFER, job.rank), DTYPE)


@triton.jit
def buffer_ptrs(job, BUFFER: tl.constexpr, peers, mask, DTYPE: tl.constexpr):
    """Pointers to the instances of a buffer at several ranks [block of ranks]."""
    return pointers_at(tl.load(table_ptrs(job, BUFFER, peers), mask=mask, other=0), DTYPE)


@triton.jit
def pointers_at(addr, DTYPE: tl.constexpr):
    """Pointers to addresses from the tables, int64, one or a block.

    The compiler knows no alignment of an address read from a table: without this hint, accesses compile to 2 bytes
    each instead of 16. Every symmetric buffer starts at a multiple of 256 bytes.
    """
    return tl.multiple_of(addr.to(tl.pointer_type(DTYPE)), 16)
