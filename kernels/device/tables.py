"""Tables of one dispatch, as kernels see them. triton_ep/context/layout.py has the same arithmetic for the host, and
triton_ep/context/records.py the rows of the report. codes.py has the numbers of all fields.

Letters: W ranks, LW per node, N nodes, E experts, e per rank, T tokens of this rank, K top-k, C columns, Q chunks.

`entries` [F, T, K] int32, F = 6, or 7 with several nodes. Fields of every (token, k):
    KEPT        expert id, -1 = dropped
    OWNER       rank that owns the expert, -1 = dropped
    DST_ROW     row of the assignment in its owner's output, -1 = dropped
    STAGE_ROW   staging row of the token at that rank, -1 = not the first k that goes there
    NODE_SLOT   slot among this rank's tokens for that node, -1 = not the first k that goes there
A field that lists, without gaps and in the order of k, where combine finds the sums of a token, one from each rank of
this node that it goes to:
    PULL_ROW    row of the sum in the combine buffer of this rank; then -1
and, with several nodes, one that lists the other nodes that it goes to:
    PULL_PARTIAL  slot among my tokens for that node, times N, plus the node; then -1

`chunks` int32: counts [Q, C] per chunk of tokens, after the scan an exclusive prefix over the chunks;
[Q, BAD_WORDS] first illegal entry of each chunk and its id; node_token [N, T], this rank's tokens for
each node.

`placement` int32, derived for this rank from the splits of all ranks; parts start at multiples of 4:
    report            [W, 8] the fields REPORT_* of every rank
    expert_offsets    [e + 1]
    num_recv          [e]
    overflow          [1] rows beyond the capacity on this rank; next [1] low bits of the dispatch's number, counted by
                      the device, so that they belong to the latest replay (device/calls.py); next [1] whether rows
                      wait until the host has read the counts (device/host_read.py)
    tokens_from_node  [N] tokens that my counterpart of each node sends to this node
    row               [S] my splits row: counts of experts, ranks, nodes; at the end TAIL_WORDS words, which are
                      REPORT_TOKENS to REPORT_HOST_WORD of my report
    step_rows         [64, LW] for each 64th of my tokens, the staging rows that all earlier tokens take at each rank
                      of my node
    step_tokens       [64, N] likewise the earlier tokens that go to each node; written with several nodes
    bases             [2 * E + W] per expert, the first row of my entries in its owner's output; per expert, its first
                      position in a sort of my entries; per rank, the first staging row of my tokens
    sums              [N, LW] for the tokens of my counterpart of each node (of my node: my tokens) that go to each rank
                      of my node: the row of a sum in my combine buffer, less the token's staging row at that rank; then
                      [W] for the tokens of each rank that go here: the row of a sum at the rank of my node that adds it
                      up (`adder_of`), less the staging row here; then [N, LW] the end of the first part's rows in my
                      combine buffer, where the next ones begin
    first_arrivals    [W] the first staging row here of each rank's tokens
    tiles             [1 + n, 4] tile table of the output rows of this rank (tiles.py)

Example       2 ranks of one node with 2 experts each, K = 1. The tokens of rank 0 go to experts 0, 2, 3, the tokens of
              rank 1 to experts 2, 1. Rank 1 gets rows for expert 2 from rank 0 and from itself, and for expert 3 from
              rank 0. In its first dispatch, with weights and a host that reads (HOST_WEIGHTS | HOST_READS = 130),
              rank 1 has
                  entries         KEPT 2 1, OWNER 1 0, DST_ROW 1 1, STAGE_ROW 2 1, NODE_SLOT 0 1, PULL_ROW 1 0
                  report          (2, 2, 3, 0, 0, 130, 3, 2), (3, 3, 2, 0, 0, 130, 2, 1)
                  expert_offsets  0 2 3, num_recv 2 1, overflow 0 and number 1, tokens_from_node 2
                  row             0 1 1 0 of experts, 1 1 of ranks, 2 of the node, 0 to a multiple of 4, tail 2 0 0 130
                  bases           1 1 1 3, then 0 0 1 2, then 1 2
                  sums            -1 -1, then 1 -1, then 1 2
                  first_arrivals  0 2
                  tiles           (2, 3, 0, 0), (0, 0, 2, 131328), (1, 2, 1, 65792): 65536 * filled + 256 * height
Sums          A combine buffer holds the sums of the tokens of one rank of each node: of my tokens, and of those that my
              counterparts send here. Node after node come the sums of the first rank of my node, then those of the next
              one, in the order of tokens, without gaps (with copy engines, one node and max_tokens rows for each rank:
              ENGINES in internode/splits.py). A sum belongs to a token and a rank that it goes to, so all
              combine buffers together have as many rows as there are staging rows.
Parts         Steps begin and end at 64ths of a rank's tokens (DISPATCH_BOUNDS to COMBINE_BOUNDS in codes.py). Of 128
              chunks a dispatch of 8 steps by DISPATCH_BOUNDS sends 12, 20, 24, 24, 20, 16, 8, 4; one of 4 steps, with
              the bounds 0, 16, 40, 58, 64, sends 32, 48, 36, 12. After each of its 8 steps, a combine has staged 8, 20,
              32, 42, 51, 58, 62, 64 of a source's 64 rows (`staged_part`, staging.py).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import codes
from .job import first_local, local_of, num_experts, num_nodes

KEPT = tl.constexpr(codes.ENTRY_KEPT)
OWNER = tl.constexpr(codes.ENTRY_OWNER)
DST_ROW = tl.constexpr(codes.ENTRY_DST_ROW)
STAGE_ROW = tl.constexpr(codes.ENTRY_STAGE_ROW)
NODE_SLOT = tl.constexpr(codes.ENTRY_NODE_SLOT)
PULL_ROW = tl.constexpr(codes.ENTRY_PULL_ROW)
PULL_PARTIAL = tl.constexpr(codes.ENTRY_PULL_PARTIAL)

REPORT_ROWS = tl.constexpr(codes.REPORT_ROWS)
REPORT_ARRIVALS = tl.constexpr(codes.REPORT_ARRIVALS)
REPORT_TOKENS = tl.constexpr(codes.REPORT_TOKENS)
REPORT_BAD_ENTRY = tl.constexpr(codes.REPORT_BAD_ENTRY)
REPORT_BAD_ID = tl.constexpr(codes.REPORT_BAD_ID)
REPORT_HOST_WORD = tl.constexpr(codes.REPORT_HOST_WORD)
REPORT_SUMS = tl.constexpr(codes.REPORT_SUMS)
REPORT_ARRIVALS_HERE = tl.constexpr(codes.REPORT_ARRIVALS_HERE)
REPORT_WORDS = tl.constexpr(codes.REPORT_WORDS)
TAIL_WORDS = tl.constexpr(codes.TAIL_WORDS)

STEPS = tl.constexpr(codes.STEPS)
PARTS = tl.constexpr(codes.PARTS)
_BOUND_BITS = tl.constexpr(codes.BOUND_BITS)
_BOUND_MASK = tl.constexpr(2**codes.BOUND_BITS - 1)
SENT_EVENLY = tl.constexpr(codes.SENT_EVENLY)
_SENT_COMPACT = tl.constexpr(codes.SENT_COMPACT)
_STEPS_OF_COMPACT = tl.constexpr(codes.STEPS_OF_COMPACT)
_DISPATCH_BOUNDS = tl.constexpr(codes.packed_bounds(codes.DISPATCH_BOUNDS))
_EXPERTS_BOUNDS = tl.constexpr(codes.packed_bounds(codes.EXPERTS_BOUNDS))
_COMPACT_BOUNDS = tl.constexpr(codes.packed_bounds(codes.COMPACT_BOUNDS))
_COMBINE_BOUNDS = tl.constexpr(codes.packed_bounds(codes.COMBINE_BOUNDS))

BAD_ENTRY = tl.constexpr(0)
"""Index of a chunk's first illegal entry among this rank's T * K entries; 2**31 - 1 = none."""
BAD_ID = tl.constexpr(1)
"""Expert id of that entry."""
BAD_WORDS = tl.constexpr(2)

partial_stride = triton.jit(codes.partial_stride)


@triton.jit
def part_begin(part, num_chunks):
    """First chunk of a part, one of STEPS * STEPS parts of this rank's chunks."""
    return num_chunks * part // PARTS


@triton.jit
def _bound(BOUNDS: tl.constexpr, steps):
    """The bound at `steps`, a number or a block of them, of packed bounds."""
    return _picked(tl.full([], BOUNDS, tl.int64), steps)


@triton.jit
def _picked(bounds, steps):
    """`_bound`, of bounds known at run time."""
    return ((bounds >> (steps * _BOUND_BITS)) & _BOUND_MASK).to(tl.int32)


@triton.jit
def parts_staged(steps):
    """Of PARTS parts of the rows, how many a combine stages in the first `steps` of STEPS steps."""
    return _bound(_COMBINE_BOUNDS, steps)


@triton.jit
def most_steps(sent):
    """Most steps of a push that ends them as SENT_* (codes.py) says."""
    return tl.where(sent == _SENT_COMPACT, _STEPS_OF_COMPACT, STEPS)


@triton.jit
def part_of_step(step, num_steps, sent):
    """Part of the rows at which a step of a dispatch in `num_steps` steps begins. sent: as in `most_steps`."""
    bounds = tl.where(sent == SENT_EVENLY, tl.full([], _DISPATCH_BOUNDS, tl.int64), _EXPERTS_BOUNDS)
    bounds = tl.where(sent == _SENT_COMPACT, _COMPACT_BOUNDS, bounds)
    return _picked(bounds, step * STEPS // num_steps)


class Entries(NamedTuple):
    """Routing table with the fields of each (token, k).

    Attributes:
        entries_ptr: [F, T, K] int32, the fields below.
        num_tokens: T.
        TOPK: K.
    """

    entries_ptr: Any
    num_tokens: Any
    TOPK: tl.constexpr


@triton.jit
def entry_field(entries, FIELD: tl.constexpr):
    """Pointer to one field [T, K] of `Entries`."""
    return entries.entries_ptr + FIELD * tl.cast(entries.num_tokens, tl.int64) * entries.TOPK


@triton.jit
def report_ptrs(placement_ptr, source, FIELD: tl.constexpr):
    """Pointers to one field, REPORT_*, of the reports of ranks [block]."""
    return placement_ptr + source * REPORT_WORDS + FIELD


@triton.jit
def num_columns_of(job):
    """Number of counts in a splits row: one per expert, rank and node."""
    return num_experts(job) + job.num_ranks + num_nodes(job)


@triton.jit
def rank_columns_of(job, row_ptr):
    """Pointer to the counts per rank [W], which follow the counts per expert."""
    return row_ptr + num_experts(job)


@triton.jit
def node_columns_of(job, row_ptr):
    """Pointer to the counts per node [N], which follow the counts per expert and per rank."""
    return row_ptr + num_experts(job) + job.num_ranks


@triton.jit
def row_length_of(job):
    """S, words of a splits row: counts, padded to a multiple of 4, and the tail."""
    return _fours(num_columns_of(job)) + TAIL_WORDS


@triton.jit
def tail_ptr(job, row_ptr, FIELD: tl.constexpr):
    """Pointer to one word of the tail of a splits row; FIELD is the field REPORT_* that it becomes."""
    return row_ptr + row_length_of(job) - TAIL_WORDS + (FIELD - REPORT_TOKENS)


@triton.jit
def chunk_bad_ptrs(job, chunks_ptr, num_chunks, chunk, FIELD: tl.constexpr):
    """Pointers to BAD_ENTRY or BAD_ID of chunks [block]."""
    return chunks_ptr + tl.cast(num_chunks, tl.int64) * num_columns_of(job) + chunk * BAD_WORDS + FIELD


@triton.jit
def node_token_of(job, chunks_ptr, num_chunks):
    """Pointer to node_token [N, T]."""
    return chunks_ptr + tl.cast(num_chunks, tl.int64) * (num_columns_of(job) + BAD_WORDS)


@triton.jit
def _fours(count):
    return (count + 3) // 4 * 4


@triton.jit
def expert_offsets_of(job, placement_ptr):
    """Pointer to expert_offsets [e + 1]."""
    return placement_ptr + REPORT_WORDS * job.num_ranks


@triton.jit
def num_rows_of(job, placement_ptr):
    """Pointer to the last element of expert_offsets: output rows of this rank."""
    return expert_offsets_of(job, placement_ptr) + job.experts_per_rank


@triton.jit
def num_recv_of(job, placement_ptr):
    """Pointer to num_recv [e]."""
    return expert_offsets_of(job, placement_ptr) + _fours(job.experts_per_rank + 1)


@triton.jit
def overflow_of(job, placement_ptr):
    """Pointer to overflow [1]."""
    return num_recv_of(job, placement_ptr) + _fours(job.experts_per_rank)


@triton.jit
def number_of(job, placement_ptr):
    """Pointer to the low bits of the dispatch's number [1]."""
    return overflow_of(job, placement_ptr) + 1


@triton.jit
def held_of(job, placement_ptr):
    """Pointer to the word that says whether the dispatch is held [1]."""
    return overflow_of(job, placement_ptr) + 2


@triton.jit
def tokens_from_node_of(job, placement_ptr):
    """Pointer to tokens_from_node [N]."""
    return overflow_of(job, placement_ptr) + 4


@triton.jit
def row_of(job, placement_ptr):
    """Pointer to my splits row [S]."""
    return tokens_from_node_of(job, placement_ptr) + _fours(num_nodes(job))


@triton.jit
def tokens_per_node_of(job, placement_ptr):
    """Pointer to my tokens for each node [N], a part of my splits row."""
    return node_columns_of(job, row_of(job, placement_ptr))


@triton.jit
def step_rows_of(job, placement_ptr):
    """Pointer to step_rows [PARTS, LW]."""
    return row_of(job, placement_ptr) + row_length_of(job)


@triton.jit
def step_tokens_of(job, placement_ptr):
    """Pointer to step_tokens [PARTS, N]."""
    return step_rows_of(job, placement_ptr) + PARTS * job.ranks_per_node


@triton.jit
def bases_of(job, placement_ptr):
    """Pointer to bases [2 * E + W], and so to its first part [E]: per expert, the first row of my entries."""
    return step_tokens_of(job, placement_ptr) + PARTS * num_nodes(job)


@triton.jit
def sort_bases_of(job, placement_ptr):
    """Pointer to the second part of bases [E]: per expert, its first position in a sort of my entries."""
    return bases_of(job, placement_ptr) + num_experts(job)


@triton.jit
def stage_bases_of(job, placement_ptr):
    """Pointer to the third part of bases [W]: per rank, the first staging row of my tokens."""
    return sort_bases_of(job, placement_ptr) + num_experts(job)


@triton.jit
def adder_of(job, source):
    """The rank of my node that adds up the sums of the tokens of ranks `source`: the one with the same local rank."""
    return first_local(job) + local_of(job, source)


@triton.jit
def sums_from_of(job, placement_ptr):
    """Pointer to sums [3 * W], and so to its first part [N, LW]: from staging rows to rows of sums here."""
    return bases_of(job, placement_ptr) + _fours(2 * num_experts(job) + job.num_ranks)


@triton.jit
def sums_to_of(job, placement_ptr):
    """Pointer to the second part of sums [W]: from staging rows here to rows of sums at the ranks that add them."""
    return sums_from_of(job, placement_ptr) + job.num_ranks


@triton.jit
def sum_ends_of(job, placement_ptr):
    """Pointer to the third part of sums [N, LW]: for each node, ends of the rows of sums from each rank of mine."""
    return sums_to_of(job, placement_ptr) + job.num_ranks


@triton.jit
def first_arrivals_of(job, placement_ptr):
    """Pointer to first_arrivals [W]."""
    return sums_from_of(job, placement_ptr) + _fours(3 * job.num_ranks)


@triton.jit
def tiles_of(job, placement_ptr):
    """Pointer to the tile table [1 + n, 4]."""
    return first_arrivals_of(job, placement_ptr) + _fours(job.num_ranks)
