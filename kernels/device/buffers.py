"""Symmetric buffers as device code sees them: one table of addresses, one index per buffer.

`addrs` is int64 [NUM_BUFFERS, W]: the address through which this rank loads and stores the copy of each
rank (0 = not mapped: another node); `net_addrs` is the same for put functions. The indices below are the
rows of both tables; what each buffer holds, who writes and who reads it, is the table in
triton_ep/layout.py, whose order a test compares with this one.
"""

import triton
import triton.language as tl

SPLITS = tl.constexpr(0)
SPLITS_FLAG = tl.constexpr(1)
STAGE_X = tl.constexpr(2)
STAGE_META = tl.constexpr(3)
ARRIVE_FLAG = tl.constexpr(4)
COMBINE_X = tl.constexpr(5)
COMBINE_WEIGHT = tl.constexpr(6)
STAGED_FLAG = tl.constexpr(7)
DONE_FLAG = tl.constexpr(8)
BARRIER_FLAG = tl.constexpr(9)
NODE_BARRIER_FLAG = tl.constexpr(10)
BARRIER_SCRATCH = tl.constexpr(11)
NET_SEND = tl.constexpr(12)
NET_RECV = tl.constexpr(13)
NET_FLAG = tl.constexpr(14)
PARTIAL_SEND = tl.constexpr(15)
PARTIAL_RECV = tl.constexpr(16)
PARTIAL_FLAG = tl.constexpr(17)

# Rows of the epoch array, int64, on the device.
EPOCH_DISPATCH = tl.constexpr(0)
EPOCH_COMBINE = tl.constexpr(1)
EPOCH_BARRIER_ALL = tl.constexpr(2)
EPOCH_BARRIER_NODE = tl.constexpr(3)


@triton.jit
def address_of(addrs_ptr, BUFFER: tl.constexpr, num_ranks, peer):
    """int64 address of one rank's copy of a buffer."""
    return tl.load(addrs_ptr + BUFFER * num_ranks + peer)


@triton.jit
def buffer_ptr(addrs_ptr, BUFFER: tl.constexpr, num_ranks, peer, DTYPE: tl.constexpr):
    """Pointer to one rank's copy of a buffer."""
    addr = address_of(addrs_ptr, BUFFER, num_ranks, peer)
    return tl.multiple_of(addr.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def buffer_ptrs(addrs_ptr, BUFFER: tl.constexpr, num_ranks, peers, mask, DTYPE: tl.constexpr):
    """Pointers to the copies of several ranks [block of ranks].

    An address read from a table carries no alignment: without this hint the accesses through it compile to
    2 bytes each instead of 16. Every symmetric buffer starts at a multiple of 256 bytes.
    """
    addr = tl.load(addrs_ptr + BUFFER * num_ranks + peers, mask=mask, other=0)
    return tl.multiple_of(addr.to(tl.pointer_type(DTYPE)), 16)
