"""Symmetric buffers as device code sees them: one table of addresses, one index per buffer.

The table `tables` is int64 [2 * NUM_BUFFERS + 1, W]: first the address through which this rank loads and
stores the copy of each rank (0 = not mapped: another node), one row per buffer; then the same for put
functions; last NVSHMEM's number of each rank. The indices below are rows of the first two parts; what each
buffer holds, who writes and who reads it, is the table in triton_ep/context/layout.py, whose order a test compares
with this one.

The array `state` is int64 [STATE_WORDS] in this rank's own memory: epochs, time limit, status record, a count of
programs that came to their end, the address of a word in host memory that says if there is a record, and how many
rows have not fitted a static capacity. Behind them are [W] words for the tags of the ranks, where their calls differ
(device/calls.py).
"""

import triton
import triton.language as tl

from . import codes

SPLITS = tl.constexpr(0)
SPLITS_FLAG = tl.constexpr(1)
STAGE_X = tl.constexpr(2)
STAGE_META = tl.constexpr(3)
ARRIVE_FLAG = tl.constexpr(4)
COMBINE_X = tl.constexpr(5)
COMBINE_WEIGHT = tl.constexpr(6)
STAGED_FLAG = tl.constexpr(7)
DONE_FLAG = tl.constexpr(8)
BARRIER_FLAG = tl.constexpr(codes.BARRIER_FLAG)
NODE_BARRIER_FLAG = tl.constexpr(codes.NODE_BARRIER_FLAG)
BARRIER_SCRATCH = tl.constexpr(11)
NET_SEND = tl.constexpr(12)
NET_RECV = tl.constexpr(13)
NET_FLAG = tl.constexpr(14)
PARTIAL_SEND = tl.constexpr(15)
PARTIAL_RECV = tl.constexpr(16)
PARTIAL_FLAG = tl.constexpr(17)
LL_STAGE_X = tl.constexpr(18)
LL_META = tl.constexpr(19)
LL_COUNTS = tl.constexpr(20)
LL_FLAG = tl.constexpr(21)
LL_COMBINE = tl.constexpr(22)
LL_COMBINE_FLAG = tl.constexpr(23)
NUM_BUFFERS = tl.constexpr(24)

# Words of `state`. The status record (device/waits.py) has four, LL_TOLD and LL_COMBINE_TOLD two each.
EPOCH_DISPATCH = tl.constexpr(codes.EPOCH_DISPATCH)
EPOCH_COMBINE = tl.constexpr(codes.EPOCH_COMBINE)
EPOCH_BARRIER_ALL = tl.constexpr(codes.EPOCH_BARRIER_ALL)
EPOCH_BARRIER_NODE = tl.constexpr(codes.EPOCH_BARRIER_NODE)
TIMEOUT_US = tl.constexpr(codes.TIMEOUT_US)
EPOCH_LL_DISPATCH = tl.constexpr(codes.EPOCH_LL_DISPATCH)
EPOCH_LL_COMBINE = tl.constexpr(codes.EPOCH_LL_COMBINE)
LL_DISPATCH_SENT = tl.constexpr(codes.LL_DISPATCH_SENT)
LL_COMBINE_SENT = tl.constexpr(codes.LL_COMBINE_SENT)
LL_TOLD = tl.constexpr(codes.LL_TOLD)
STATUS = tl.constexpr(codes.STATUS)
PROGRAMS_DONE = tl.constexpr(codes.PROGRAMS_DONE)
ALARM = tl.constexpr(codes.ALARM)
OVERFLOW_TOTAL = tl.constexpr(codes.OVERFLOW_TOTAL)
LL_COMBINE_TOLD = tl.constexpr(codes.LL_COMBINE_TOLD)
STATE_WORDS = tl.constexpr(codes.STATE_WORDS)


@triton.jit
def address_of(tables_ptr, BUFFER: tl.constexpr, num_ranks, peer):
    """int64 address of one rank's copy of a buffer, for loads and stores."""
    return tl.load(tables_ptr + BUFFER * num_ranks + peer)


@triton.jit
def net_address_of(tables_ptr, BUFFER: tl.constexpr, num_ranks, peer):
    """int64 address that names one rank's copy of a buffer to a put function."""
    return tl.load(tables_ptr + (NUM_BUFFERS + BUFFER) * num_ranks + peer)


@triton.jit
def pe_of(tables_ptr, num_ranks, peer):
    """int32 number that NVSHMEM gives a rank."""
    return tl.load(tables_ptr + 2 * NUM_BUFFERS * num_ranks + peer).to(tl.int32)


@triton.jit
def count_overflow(state_ptr, num_rows):
    """Add rows that did not fit to those of all calls; one program of a call does so, and nothing else writes there."""
    total_ptr = state_ptr + OVERFLOW_TOTAL
    there_are = num_rows > 0  # else memory is not touched
    tl.store(total_ptr, tl.load(total_ptr, mask=there_are, other=0) + num_rows, mask=there_are)


@triton.jit
def buffer_ptr(tables_ptr, BUFFER: tl.constexpr, num_ranks, peer, DTYPE: tl.constexpr):
    """Pointer to one rank's copy of a buffer."""
    addr = address_of(tables_ptr, BUFFER, num_ranks, peer)
    return tl.multiple_of(addr.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def buffer_ptrs(tables_ptr, BUFFER: tl.constexpr, num_ranks, peers, mask, DTYPE: tl.constexpr):
    """Pointers to the copies of several ranks [block of ranks].

    An address read from a table carries no alignment: without this hint the accesses through it compile to
    2 bytes each instead of 16. Every symmetric buffer starts at a multiple of 256 bytes.
    """
    addr = tl.load(tables_ptr + BUFFER * num_ranks + peers, mask=mask, other=0)
    return tl.multiple_of(addr.to(tl.pointer_type(DTYPE)), 16)
