"""Posting one row and one flag to every rank: the building block of the splits exchange and of barriers.

Inside a node both are stores through mapped addresses; to other nodes they are one put-with-signal per
rank. All posts come before any wait (the caller waits afterwards), so ranks cannot wait for each other in
a ring, whatever the order in which they run.
"""

import triton
import triton.language as tl

from .buffers import address_of, buffer_ptr, buffer_ptrs, net_address_of, pe_of
from .transport import put_signal
from .waits import release_flags


@triton.jit
def post_to_all(
    tables_ptr,
    row_offset,  # int64, offset of my row in the buffer ROW_BUFFER, in bytes
    row_bytes,  # int64, multiple of 16
    epoch,  # int64, value of my flag: entry `rank` of the buffer FLAG_BUFFER [W] int64
    rank,
    num_ranks,
    ranks_per_node,
    ROW_BUFFER: tl.constexpr,
    FLAG_BUFFER: tl.constexpr,
    COPY_ROW: tl.constexpr,  # False: the ranks of this node get the flag only
    SAME_NODE_ONLY: tl.constexpr,
    NETWORK: tl.constexpr,
    LWP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Send my row (read from my own copy of the buffer) and then my flag to all ranks, own rank included."""
    first_rank = rank - rank % ranks_per_node
    if not SAME_NODE_ONLY:
        source = address_of(tables_ptr, ROW_BUFFER, num_ranks, rank) + row_offset
        flag_offset = tl.cast(rank, tl.int64) * 8
        # Start behind this node, so that the nodes do not all send to the same one first.
        for step in range(ranks_per_node, num_ranks):
            peer = (first_rank + step) % num_ranks
            dest = net_address_of(tables_ptr, ROW_BUFFER, num_ranks, peer) + row_offset
            flag = net_address_of(tables_ptr, FLAG_BUFFER, num_ranks, peer) + flag_offset
            put_signal(dest, source, row_bytes, flag, epoch, pe_of(tables_ptr, num_ranks, peer), NETWORK, BLOCK)

    peers = first_rank + tl.arange(0, LWP)
    local = tl.arange(0, LWP) < ranks_per_node
    if COPY_ROW:
        others = local & (peers != rank)
        own_ptr = buffer_ptr(tables_ptr, ROW_BUFFER, num_ranks, rank, tl.int32) + row_offset // 4
        dest = buffer_ptrs(tables_ptr, ROW_BUFFER, num_ranks, peers, others, tl.int32) + row_offset // 4
        for start in range(0, (row_bytes // 4).to(tl.int32), BLOCK):
            offs = start + tl.arange(0, BLOCK)
            mask = offs < row_bytes // 4
            words = tl.load(own_ptr + offs, mask=mask, other=0)
            words = tl.broadcast_to(words[None, :], [LWP, BLOCK])
            tl.store(dest[:, None] + offs[None, :], words, mask=others[:, None] & mask[None, :])
    flag_ptrs = buffer_ptrs(tables_ptr, FLAG_BUFFER, num_ranks, peers, local, tl.int64) + rank
    release_flags(flag_ptrs, local, tl.zeros([LWP], tl.int64) + epoch)
