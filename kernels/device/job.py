"""The device context: what a kernel of the exchange knows of its rank and of the others.

A kernel makes it in its first line, and what it calls takes it as the first argument:

    job = Job(state_ptr, tables_ptr, rank, num_ranks, ranks_per_node, experts_per_rank)
    flags_ptr = own_buffer(job, ARRIVE_FLAG, tl.int64)

Triton takes it apart when it compiles: a kernel that does so has the same PTX as one that passes the values on one by
one. Ranks are numbered node by node: of 8 ranks, 4 per node, rank 6 is local rank 2 of node 1, and the first rank of
its node is 4.
"""

from typing import Any, NamedTuple

import triton


class Job(NamedTuple):
    """Fields that a kernel has no use for stay 0.

    Attributes:
        state_ptr: [STATE_WORDS + W] int64 of this rank: epochs, time limit, status record (codes.py, buffers.py).
        tables_ptr: [2 * NUM_BUFFERS + 1, W] int64: addresses of the buffers of all ranks (buffers.py).
        rank: this rank, 0 to W - 1.
        num_ranks: W.
        ranks_per_node: LW; divides W.
        experts_per_rank: e, local experts; rank r owns those from r * e on.
    """

    state_ptr: Any = 0
    tables_ptr: Any = 0
    rank: Any = 0
    num_ranks: Any = 0
    ranks_per_node: Any = 0
    experts_per_rank: Any = 0


@triton.jit
def first_local(job):
    """First rank of this node."""
    return job.rank - job.rank % job.ranks_per_node


@triton.jit
def local_rank(job):
    """This rank's number within its node."""
    return job.rank % job.ranks_per_node


@triton.jit
def my_node(job):
    """This rank's node."""
    return job.rank // job.ranks_per_node


@triton.jit
def num_nodes(job):
    """N, all nodes."""
    return job.num_ranks // job.ranks_per_node


@triton.jit
def num_experts(job):
    """E, experts of all ranks."""
    return job.num_ranks * job.experts_per_rank


@triton.jit
def on_my_node(job, peer):
    """True for the ranks that share this one's node."""
    first = first_local(job)
    return (peer >= first) & (peer < first + job.ranks_per_node)


@triton.jit
def other_node(job, item):
    """Node and chunk of a work item; neighbours first, so that nodes do not all send to the same one."""
    nodes = num_nodes(job)
    node = (my_node(job) + 1 + item % (nodes - 1)) % nodes
    return node, item // (nodes - 1)
