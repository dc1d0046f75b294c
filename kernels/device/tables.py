"""Tables of one dispatch, as kernels see them. triton_ep/context/layout.py has the same arithmetic for the host.

`entries` [F, T, K] int32, F = 7, or 8 with several nodes, fields of every (token, k):
    KEPT        expert id, -1 = dropped
    OWNER       rank that owns the expert, -1 = dropped
    DST_ROW     row of the copy in its owner's output, -1 = dropped
    STAGE_ROW   arrival row of the token at that rank, -1 = not the first k that goes there
    NODE_SLOT   slot among this rank's tokens for that node, -1 = not the first k that goes there
and without gaps, in the order of k, for the ranks of this node that a token goes to:
    PULL_RANK   rank, then -1
    PULL_ROW    arrival row of the token there, then -1
and, with several nodes, for the other nodes that it goes to:
    PULL_PARTIAL  slot among my tokens for that node, times N, plus the node; then -1

`chunks` int32: counts [Q, C] per chunk of tokens, an exclusive prefix over the chunks once they are scanned;
[Q, 2] first illegal entry of each chunk (2**31 - 1 = none) and its id; node_token [N, T], this rank's tokens for
each node.

`placement` int32, what the splits of all ranks say about this one; parts start at multiples of 4:
    report            [W, 8] of every rank: output rows, arrival rows, tokens, 1 + index of the first illegal id,
                      that id, host error code; then of the rows that arrive here from it the first, and their number
    expert_offsets    [e + 1]
    num_recv          [e]
    overflow          [1] rows beyond the capacity on this rank; behind it [1] low bits of the dispatch's number, which
                      the device counts, so that they are those of the latest replay (device/calls.py)
    tokens_from_node  [N] tokens that my counterpart of each node sends to this node
    row               [S] my splits row, see internode/splits.py
    step_rows         [64, LW] my arrival rows at each rank of my node, of the tokens before a 64th of them
    bases             [2 * E + W] of each expert the first row of my entries in its owner's output; of each expert
                      its first position in a sort of my entries; of each rank the first arrival row of my tokens
    tiles             [1 + n, 4] tile table of the output rows of this rank (tiles.py)
"""

import triton
import triton.language as tl

KEPT = tl.constexpr(0)
OWNER = tl.constexpr(1)
DST_ROW = tl.constexpr(2)
STAGE_ROW = tl.constexpr(3)
NODE_SLOT = tl.constexpr(4)
PULL_RANK = tl.constexpr(5)
PULL_ROW = tl.constexpr(6)
PULL_PARTIAL = tl.constexpr(7)

STEPS = tl.constexpr(8)
"""Most steps of a call, squared the parts of `step_rows`."""


@triton.jit
def part_begin(part, num_chunks):
    """First chunk of a part of this rank's chunks, one of STEPS * STEPS."""
    return num_chunks * part // (STEPS * STEPS)


@triton.jit
def part_of_step(step, num_steps):
    """Where a step of a dispatch begins, in 64ths of the rows. Steps get shorter, so that little is left at last."""
    left = (num_steps - step) * STEPS // num_steps
    return STEPS * STEPS - left * left


@triton.jit
def entry_field(entries_ptr, FIELD: tl.constexpr, num_tokens, TOPK: tl.constexpr):
    """Pointer to one field [T, K] of the entries."""
    return entries_ptr + FIELD * tl.cast(num_tokens, tl.int64) * TOPK


@triton.jit
def num_columns_of(num_ranks, experts_per_rank, ranks_per_node):
    """Counts in a splits row: experts, ranks, nodes."""
    return num_ranks * experts_per_rank + num_ranks + num_ranks // ranks_per_node


@triton.jit
def chunk_bad_of(chunks_ptr, num_chunks, num_columns):
    """Pointer to the first illegal entry of each chunk [Q, 2]."""
    return chunks_ptr + tl.cast(num_chunks, tl.int64) * num_columns


@triton.jit
def node_token_of(chunks_ptr, num_chunks, num_columns):
    """Pointer to node_token [N, T]."""
    return chunks_ptr + tl.cast(num_chunks, tl.int64) * (num_columns + 2)


@triton.jit
def _fours(count):
    return (count + 3) // 4 * 4


@triton.jit
def expert_offsets_of(placement_ptr, num_ranks):
    """Pointer to expert_offsets [e + 1]."""
    return placement_ptr + 8 * num_ranks


@triton.jit
def num_recv_of(placement_ptr, num_ranks, experts_per_rank):
    """Pointer to num_recv [e]."""
    return expert_offsets_of(placement_ptr, num_ranks) + _fours(experts_per_rank + 1)


@triton.jit
def overflow_of(placement_ptr, num_ranks, experts_per_rank):
    """Pointer to overflow [1]."""
    return num_recv_of(placement_ptr, num_ranks, experts_per_rank) + _fours(experts_per_rank)


@triton.jit
def tokens_from_node_of(placement_ptr, num_ranks, experts_per_rank):
    """Pointer to tokens_from_node [N]."""
    return overflow_of(placement_ptr, num_ranks, experts_per_rank) + 4


@triton.jit
def row_of(placement_ptr, num_ranks, experts_per_rank, ranks_per_node):
    """Pointer to my splits row [S]."""
    return tokens_from_node_of(placement_ptr, num_ranks, experts_per_rank) + _fours(num_ranks // ranks_per_node)


@triton.jit
def tokens_per_node_of(placement_ptr, num_ranks, experts_per_rank, ranks_per_node):
    """Pointer to my tokens for each node [N], a part of my splits row."""
    row_ptr = row_of(placement_ptr, num_ranks, experts_per_rank, ranks_per_node)
    return row_ptr + num_ranks * experts_per_rank + num_ranks


@triton.jit
def step_rows_of(placement_ptr, num_ranks, experts_per_rank, ranks_per_node):
    """Pointer to step_rows [64, LW]."""
    length = _fours(num_columns_of(num_ranks, experts_per_rank, ranks_per_node)) + 4
    return row_of(placement_ptr, num_ranks, experts_per_rank, ranks_per_node) + length


@triton.jit
def bases_of(placement_ptr, num_ranks, experts_per_rank, ranks_per_node):
    """Pointer to bases [2 * E + W]."""
    step_rows_ptr = step_rows_of(placement_ptr, num_ranks, experts_per_rank, ranks_per_node)
    return step_rows_ptr + STEPS * STEPS * ranks_per_node


@triton.jit
def tiles_of(placement_ptr, num_ranks, experts_per_rank, ranks_per_node):
    """Pointer to the tile table [1 + n, 4]."""
    bases_ptr = bases_of(placement_ptr, num_ranks, experts_per_rank, ranks_per_node)
    return bases_ptr + _fours(2 * num_ranks * experts_per_rank + num_ranks)
