"""Post one row and one flag to every rank, the building block of the splits exchange and of barriers; put a chunk of
rows with its flag to a rank of another node.

Inside a node, row and flag are stores through mapped addresses; to other nodes they are one put-with-signal per
rank. All posts come before any wait (the caller waits afterwards), so ranks cannot wait for each other in
a ring, whatever the order in which they run.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .buffers import BARRIER_SCRATCH, address_of, buffer_ptrs, net_address_of, own_buffer, pe_of
from .job import first_local, is_local, local_rank, my_node, rank_of
from .transport import put_signal
from .waits import release_flags


class Network(NamedTuple):
    """How chunks of rows cross nodes.

    Attributes:
        NETWORK: P2P or NVSHMEM (codes.py).
        MAX_CHUNKS: most chunks for a node, a power of two.
        CHUNK: rows of a chunk.
    """

    NETWORK: tl.constexpr
    MAX_CHUNKS: tl.constexpr
    CHUNK: tl.constexpr


class Row(NamedTuple):
    """This rank's row in a symmetric buffer.

    Attributes:
        offset: int64, in bytes.
        nbytes: int64, multiple of 16.
    """

    offset: Any
    nbytes: Any


class Chunk(NamedTuple):
    """Consecutive rows for another node, in a buffer [N, max_tokens, row_bytes].

    Attributes:
        node: destination node.
        number: index of the chunk among the chunks for that node.
        first: slot of its first row.
        count: number of rows.
        max_tokens, row_bytes: sizes of the buffer; row_bytes is int64.
    """

    node: Any
    number: Any
    first: Any
    count: Any
    max_tokens: Any
    row_bytes: Any


@triton.jit
def post_to_all(
    job,
    row,  # Row, in the buffer ROW_BUFFER
    epoch,  # int64, value of this rank's flag: entry `rank` of the buffer FLAG_BUFFER [W] int64
    ROW_BUFFER: tl.constexpr,
    FLAG_BUFFER: tl.constexpr,
    COPY_ROW: tl.constexpr,  # False: send only the flag to the ranks of this node
    SAME_NODE_ONLY: tl.constexpr,
    NETWORK: tl.constexpr,
    LWP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Send this rank's row, read from its own instance of the buffer, then its flag, to all ranks including itself."""
    first_rank = first_local(job)
    if not SAME_NODE_ONLY:
        source = address_of(job, ROW_BUFFER, job.rank) + row.offset
        flag_offset = tl.cast(job.rank, tl.int64) * 8
        # Start after this node, so that the nodes do not all send to the same node first.
        for step in range(job.ranks_per_node, job.num_ranks):
            peer = (first_rank + step) % job.num_ranks
            dest = net_address_of(job, ROW_BUFFER, peer) + row.offset
            flag = net_address_of(job, FLAG_BUFFER, peer) + flag_offset
            put_signal(dest, source, row.nbytes, flag, epoch, pe_of(job, peer), NETWORK, BLOCK)

    peers = first_rank + tl.arange(0, LWP)
    local = is_local(job, tl.arange(0, LWP))
    # Loaded before the stores, behind which a load would wait.
    flag_ptrs = buffer_ptrs(job, FLAG_BUFFER, peers, local, tl.int64) + job.rank
    if COPY_ROW:
        others = local & (peers != job.rank)
        own_ptr = own_buffer(job, ROW_BUFFER, tl.int32) + row.offset // 4
        dest = buffer_ptrs(job, ROW_BUFFER, peers, others, tl.int32) + row.offset // 4
        for start in range(0, (row.nbytes // 4).to(tl.int32), BLOCK):
            offs = start + tl.arange(0, BLOCK)
            mask = offs < row.nbytes // 4
            words = tl.load(own_ptr + offs, mask=mask, other=0)
            words = tl.broadcast_to(words[None, :], [LWP, BLOCK])
            tl.store(dest[:, None] + offs[None, :], words, mask=others[:, None] & mask[None, :])
    release_flags(flag_ptrs, local, tl.zeros([LWP], tl.int64) + epoch)


@triton.jit
def post_flag(
    job,
    epoch,
    FLAG_BUFFER: tl.constexpr,
    SAME_NODE_ONLY: tl.constexpr,
    NETWORK: tl.constexpr,
    LWP: tl.constexpr,
):
    """Send this rank's flag alone to all ranks; to other nodes with 16 unused bytes, because a put must carry data."""
    offset = tl.cast(job.rank, tl.int64) * 16
    nbytes = tl.full([], 16, tl.int64)
    post_to_all(job, Row(offset, nbytes), epoch, BARRIER_SCRATCH, FLAG_BUFFER, False, SAME_NODE_ONLY, NETWORK, LWP, 16)


@triton.jit
def put_chunk(
    job,
    chunk,  # Chunk
    value,  # int64, value for the chunk's flag
    SEND: tl.constexpr,  # buffer [N, max_tokens, row], indexed by destination node
    RECV: tl.constexpr,  # buffer [N, max_tokens, row], indexed by source node
    FLAGS: tl.constexpr,  # buffer [N, MAX_CHUNKS] int64, indexed by source node
    network,
    BLOCK: tl.constexpr,
):
    """Put a chunk, with its flag, into the buffer of its node's rank that has this rank's local rank."""
    peer = rank_of(job, chunk.node, local_rank(job))
    dest_row = tl.cast(my_node(job) * chunk.max_tokens + chunk.first, tl.int64)
    source_row = (chunk.node * chunk.max_tokens + chunk.first).to(tl.int64)
    flag = net_address_of(job, FLAGS, peer)
    put_signal(
        net_address_of(job, RECV, peer) + dest_row * chunk.row_bytes,
        address_of(job, SEND, job.rank) + source_row * chunk.row_bytes,
        chunk.count.to(tl.int64) * chunk.row_bytes,
        flag + (my_node(job) * network.MAX_CHUNKS + chunk.number).to(tl.int64) * 8,
        value,
        pe_of(job, peer),
        network.NETWORK,
        BLOCK,
    )
