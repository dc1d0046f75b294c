"""The device context: what a kernel of the exchange knows about its rank and the others.

It is one parameter of a kernel (kernels/spec.py) and the first argument of the functions that the kernel calls:

    def combine_free_kernel(job: Job, WP: tl.constexpr):
        flags_ptr = own_buffer(job, DONE_FLAG, tl.int64)

Triton takes it apart when it compiles: the PTX has one parameter per field, and is the same as if the kernel took the
fields one by one. A layer binds all fields when it creates a launcher (triton_ep/context/context.py).

Ranks are numbered node by node: of 8 ranks, 4 per node, rank 6 is local rank 2 of node 1, and the first rank of its
node is 4.
"""

from typing import Any, NamedTuple

import triton


class Job(NamedTuple):
    """Fields that are the same in all launches of a layer.

    Attributes:
        state_ptr: [STATE_WORDS + W] int64 of this rank: epochs, time limit, status record (codes.py, buffers.py).
        tables_ptr: [2 * NUM_BUFFERS + 1, W] int64: addresses of the buffers of all ranks (buffers.py).
        rank: this rank, 0 to W - 1.
        num_ranks: W.
        ranks_per_node: LW; divides W.
        experts_per_rank: e, local experts; rank r owns the e experts from r * e on.
        max_tokens: M, most tokens of a rank per call.
    """

    state_ptr: Any
    tables_ptr: Any
    rank: Any
    num_ranks: Any
    ranks_per_node: Any
    experts_per_rank: Any
    max_tokens: Any


@triton.jit
def in_one_node(job):
    """The same job with all ranks on one node, which the compiler then knows."""
    return Job(
        job.state_ptr, job.tables_ptr, job.rank, job.num_ranks, job.num_ranks, job.experts_per_rank, job.max_tokens
    )


@triton.jit
def state_at(job, word):
    """Pointer to a word of this rank's state (buffers.py)."""
    return job.state_ptr + word


@triton.jit
def is_rank(job, ranks):
    """Mask of the numbers that are ranks of the group."""
    return ranks < job.num_ranks


@triton.jit
def is_local(job, locals_):
    """Mask of the numbers that are local ranks of a node."""
    return locals_ < job.ranks_per_node


@triton.jit
def is_local_expert(job, experts):
    """Mask of the numbers that are local experts of a rank."""
    return experts < job.experts_per_rank


@triton.jit
def owner_of(job, experts):
    """Ranks that own experts."""
    return experts // job.experts_per_rank


@triton.jit
def node_of(job, ranks):
    """Nodes of ranks."""
    return ranks // job.ranks_per_node


@triton.jit
def local_of(job, ranks):
    """Numbers of ranks within their nodes."""
    return ranks % job.ranks_per_node


@triton.jit
def rank_of(job, node, local):
    """Rank number `local` of a node."""
    return node * job.ranks_per_node + local


@triton.jit
def has_other_nodes(job):
    """True with several nodes."""
    return job.num_ranks > job.ranks_per_node


@triton.jit
def first_local(job):
    """First rank of this node."""
    return job.rank - local_of(job, job.rank)


@triton.jit
def local_rank(job):
    """This rank's number within its node."""
    return local_of(job, job.rank)


@triton.jit
def my_node(job):
    """This rank's node."""
    return job.rank // job.ranks_per_node


@triton.jit
def num_nodes(job):
    """N, number of nodes."""
    return job.num_ranks // job.ranks_per_node


@triton.jit
def num_experts(job):
    """E, number of experts of all ranks."""
    return job.num_ranks * job.experts_per_rank


@triton.jit
def on_my_node(job, peer):
    """True for the ranks on this rank's node."""
    first = first_local(job)
    return (peer >= first) & (peer < first + job.ranks_per_node)


@triton.jit
def other_node(job, item):
    """Node and chunk of a work item. Each node starts with its next neighbour, so nodes do not all send to one node."""
    nodes = num_nodes(job)
    node = (my_node(job) + 1 + item % (nodes - 1)) % nodes
    return node, item // (nodes - 1)
