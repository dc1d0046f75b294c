"""Routing of one rank: from expert ids to counts, stable slots and destination rows.

Protocol      1 count: for each chunk of tokens, a program gives the entries slots within the chunk and counts them per
              column, after it has read their ids from a routing map, if there is one (map_slots.py); it belongs to the
              kernel that goes on with step 2 (internode/splits.py)
              (2 all ranks exchange their totals and derive where every segment starts)
              3 slots: every entry gets its row at its owner, every token its staging row per rank. Store stage_meta at
              the ranks of this node: the output rows that each staging row fills. Store push_addrs for the push kernel
              (intranode/dispatch.py): where it stores each row. Meanwhile the last program, which has no chunk, writes
              the tile table of this rank's output rows (device/tiles.py). If the dispatch is held, the table is empty,
              for products that have been launched already, and nothing else is written (device/host_read.py). This
              kernel is launched early, behind the one that does 1 and 2, and waits until that has placed the segments
Layout        device/tables.py. A *column* is an expert, a rank or a node, in this order: C = E + W + N columns. An
              *entry* is one (token, k). A token counts once per destination rank and once per destination node,
              at the first k that goes there; this decides de-duplication.
              Tiles of entries are [KP, n], k first: wherever the compiler knows nothing of the addresses, it gives
              neighbours in the first dimension to neighbouring threads, and in tables [T, K] these are neighbours in
              memory, too. So values need not pass from thread to thread between one access and the next. What entries
              are compared with is the last dimension, which a thread has for itself.
              push_addrs [T, K] int64: addresses of the token's staging rows on this node; 0 = none.
              stage_meta [W * max_tokens, 2 * KP] int32 of each rank: output rows of a staging row's assignments
              (-1 = none), then their weights as float32 bits; stage_source [W * max_tokens] int32 likewise, if copy
              engines send the rows: where they lie.
              If copy engines send the rows, the last program raises the flags that they send after them
              (device/arrivals.py); if a wait has expired, it says so to all ranks instead (device/overruns.py).
Memory order  The kernel ahead may still run, but has released all that this one reads: its last program raises
              EPOCH_PLACED, which each program of this kernel acquires. The releases of the push, which starts after
              this kernel, cover its stores to stage_meta.
Progress      Programs wait for one program of the kernel ahead, which lets this one start when it no longer waits for
              other ranks.
Replay        Nothing is kept between calls. Slots follow (token, k) and no atomic decides one, so the same input
              gives the same rows. stage_meta is free since the splits exchange.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.arrivals import meta_addresses, push_meta, push_sources, raise_for_copies
from ..device.buffers import EPOCH_DISPATCH, EPOCH_PLACED, STAGE_X, STATUS, address_of
from ..device.early import await_previous
from ..device.host_read import is_held
from ..device.job import (
    Job,
    first_local,
    has_other_nodes,
    is_local,
    my_node,
    node_of,
    num_experts,
    num_nodes,
    on_my_node,
    owner_of,
    state_at,
)
from ..device.overruns import post_overrun
from ..device.payload import Weights
from ..device.pull import compact_position
from ..device.tables import (
    BAD_ENTRY,
    BAD_ID,
    DST_ROW,
    KEPT,
    NODE_SLOT,
    OWNER,
    PARTS,
    PULL_PARTIAL,
    PULL_ROW,
    STAGE_ROW,
    Entries,
    bases_of,
    chunk_bad_ptrs,
    entry_field,
    expert_offsets_of,
    node_columns_of,
    node_token_of,
    num_columns_of,
    num_recv_of,
    num_rows_of,
    part_begin,
    rank_columns_of,
    sort_bases_of,
    stage_bases_of,
    step_rows_of,
    step_tokens_of,
    sums_from_of,
    tiles_of,
)
from ..device.tiles import TILE_ROWS, write_tile_table
from ..device.waits import WAIT_SPLITS, wait_flags
from ..spec import ep_kernel
from .map_slots import fill_slots

_NO_INDEX = tl.constexpr(2**31 - 1)
_FIELD_BITS = tl.constexpr(4)
"""Bits of a slot in a chunk, by which the slots of up to 8 ranks and their nodes fit a word of 64."""
_LOW_HALF = tl.constexpr(2**32 - 1)


@triton.jit
def _entries(num_tokens, TOPK: tl.constexpr, KP: tl.constexpr, BLOCK_T: tl.constexpr):
    """Entries [KP, BLOCK_T] of this program's chunk: token, k, offset into a [T, K] table, in-range mask."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
    k = tl.arange(0, KP)[:, None]
    mask = (token < num_tokens) & (k < TOPK)
    return token, k, token * TOPK + k, mask


class Counting(NamedTuple):
    """Ids to count, the destination of the counts, and sizes, which are powers of two.

    Attributes:
        topk_idx_ptr: [T, K] int32 or int64; -1 or E = dropped. With a routing map, int32, out.
        chunks_ptr: out; device/tables.py.
        first_waiting: the first program that does not count; programs before it count one chunk each.
        KP: top-k rounded up.
        BLOCK_T: tokens of a chunk.
        CLEARED: columns set to zero at a time.
        OTHERS: entries that each entry is compared with at a time.
        RANKS: ranks, rounded up, if they are few (`_FIELD_BITS`); else 0.
    """

    topk_idx_ptr: Any
    chunks_ptr: Any
    first_waiting: Any
    KP: tl.constexpr
    BLOCK_T: tl.constexpr
    CLEARED: tl.constexpr
    OTHERS: tl.constexpr
    RANKS: tl.constexpr


@triton.jit
def count_chunk(job, counting, given, entries, num_chunks):
    """Compute slots and counts of the chunk with this program's number; before, its ids, if there is a routing map."""
    chunks_ptr = counting.chunks_ptr
    chunk = tl.program_id(0)
    num_columns = num_columns_of(job)
    experts = num_experts(job)
    _, _, offs, mask = _entries(entries.num_tokens, entries.TOPK, counting.KP, counting.BLOCK_T)
    if given.WORDS > 0:
        ids_ptr = counting.topk_idx_ptr
        fill_slots(given, ids_ptr, entries.num_tokens, experts, entries.TOPK, counting.KP, counting.BLOCK_T)
        tl.debug_barrier()  # other threads read the ids
    raw = tl.load(counting.topk_idx_ptr + offs, mask=mask, other=-1).to(tl.int64)
    first_of_rank, first_of_node = _firsts(job, counting, entries)
    counts_ptr = chunks_ptr + tl.cast(chunk, tl.int64) * num_columns
    columns = tl.arange(0, counting.CLEARED)
    for start in range(0, num_columns, counting.CLEARED):
        tl.store(counts_ptr + start + columns, 0, mask=start + columns < num_columns)
    # Different threads store the zeros and, below, the counts to the same words.
    tl.debug_barrier()
    valid = (raw >= 0) & (raw < experts)
    bad = mask & (raw != -1) & (raw != experts) & (valid == 0)
    # One number for both, and one search: high half entries, low half their ids.
    bad_id = tl.minimum(tl.maximum(raw, -_NO_INDEX), _NO_INDEX)
    first_bad = tl.min(tl.where(bad, (offs.to(tl.int64) << 32) | (bad_id & _LOW_HALF), _NO_INDEX << 32))
    tl.store(chunk_bad_ptrs(job, chunks_ptr, num_chunks, chunk, BAD_ENTRY), (first_bad >> 32).to(tl.int32))
    tl.store(chunk_bad_ptrs(job, chunks_ptr, num_chunks, chunk, BAD_ID), first_bad.to(tl.int32))

    expert = tl.where(valid, raw, -1).to(tl.int32)
    owner = owner_of(job, tl.maximum(expert, 0))
    tl.store(entry_field(entries, KEPT) + offs, expert, mask=mask)
    tl.store(entry_field(entries, OWNER) + offs, tl.where(valid, owner, -1), mask=mask)
    node = node_of(job, owner)
    if counting.RANKS > 0:
        of_rank, of_node = _slots_of_few(job, counting, counts_ptr, owner, node, first_of_rank, first_of_node)
    else:
        # Groups, or -1, in place of slots that are not known yet, so that each entry can be compared with all others.
        of_rank = tl.where(first_of_rank, owner, -1)
        of_node = tl.where(first_of_node, node, -1)
    tl.store(entry_field(entries, STAGE_ROW) + offs, of_rank, mask=mask)
    tl.store(entry_field(entries, NODE_SLOT) + offs, of_node, mask=mask)
    if counting.RANKS == 0:
        tl.debug_barrier()
    _rank_entries(job, counting, entries, counts_ptr)


@triton.jit
def _kept(job, ids_ptr, mask, other):
    """Expert ids, int32; `other` where they are not legal or masked off."""
    raw = tl.load(ids_ptr, mask=mask, other=-1).to(tl.int64)
    return tl.where((raw >= 0) & (raw < num_experts(job)), raw, other).to(tl.int32)


@triton.jit
def _firsts(job, counting, entries):
    """Masks [KP, BLOCK_T]: true at a token's first valid entry of each rank, and of each node."""
    KP: tl.constexpr = counting.KP
    token = (tl.program_id(0) * counting.BLOCK_T + tl.arange(0, counting.BLOCK_T))[None, :, None]
    k, other = tl.arange(0, KP)[:, None, None], tl.arange(0, KP)[None, None, :]
    ids_ptr = counting.topk_idx_ptr + token * entries.TOPK
    # Loaded as they are compared: to exchange ids between threads takes longer than to load them twice.
    mine = _kept(job, ids_ptr + k, (token < entries.num_tokens) & (k < entries.TOPK), -1)
    theirs = _kept(job, ids_ptr + other, (token < entries.num_tokens) & (other < entries.TOPK), -1)
    owner, others = owner_of(job, tl.maximum(mine, 0)), owner_of(job, tl.maximum(theirs, 0))
    earlier = (theirs >= 0) & (other < k)
    same_node = earlier & (node_of(job, owner) == node_of(job, others))
    # Low half: earlier entries of the rank; high half: of the node.
    found = tl.where(earlier & (owner == others), 65537, tl.where(same_node, 65536, 0))
    found = tl.sum(tl.where(mine < 0, 65537, found), axis=2)
    return (found & 65535) == 0, (found >> 16) == 0


@triton.jit
def _slots_of_few(job, counting, counts_ptr, owner, node, first_of_rank, first_of_node):
    """Slots [KP, BLOCK_T] of the first entries of tokens, among the tokens of their ranks and of their nodes, -1 = not
    the first. Stores the number of tokens of each rank and each node.

    The ranks and nodes of a token are bits of a word, _FIELD_BITS apart; sums of such words over the earlier tokens are
    the slots. For example, with 2 ranks of one node a token for rank 1 has the word 0x110, and after two tokens for
    rank 0 and one for both ranks the slots are 3, 1 and 3: 0x313.
    """
    RANKS: tl.constexpr = counting.RANKS
    GROUPS: tl.constexpr = 2 * RANKS  # of the second half some are nodes
    tl.static_assert(GROUPS * _FIELD_BITS <= 64, "the groups of a token must fit a word")
    tl.static_assert(owner.shape[1] <= 2**_FIELD_BITS, "the slots of a chunk must fit a field")
    one = tl.full(owner.shape, 1, tl.int64)
    of_rank, of_node = owner.to(tl.int64) * _FIELD_BITS, (RANKS + node).to(tl.int64) * _FIELD_BITS
    bits = tl.where(first_of_rank, one << of_rank, 0) + tl.where(first_of_node, one << of_node, 0)
    goes = tl.sum(bits, axis=0)
    earlier = tl.cumsum(goes, axis=0) - goes
    group = tl.arange(0, GROUPS)
    tokens = tl.sum((goes[None, :] >> (group.to(tl.int64) * _FIELD_BITS)[:, None]) & 1, axis=1).to(tl.int32)
    is_node = group >= RANKS
    column = tl.where(is_node, job.num_ranks + group - RANKS, group)
    known = tl.where(is_node, group - RANKS < num_nodes(job), group < job.num_ranks)
    tl.store(rank_columns_of(job, counts_ptr) + column, tokens, mask=known)
    slot_of_rank = ((earlier[None, :] >> of_rank) & (2**_FIELD_BITS - 1)).to(tl.int32)
    slot_of_node = ((earlier[None, :] >> of_node) & (2**_FIELD_BITS - 1)).to(tl.int32)
    return tl.where(first_of_rank, slot_of_rank, -1), tl.where(first_of_node, slot_of_node, -1)


@triton.jit
def _alike(theirs, group, earlier):
    """Of some entries, how many are in the group of each entry: low half earlier ones, high half all."""
    return tl.where(theirs[:, None] == group[None, :], tl.where(earlier, 65537, 65536), 0)


@triton.jit
def _rank_entries(
    job,
    counting,
    entries,  # DST_ROW out: slots in the chunk, -1 = none; if ranks are many, STAGE_ROW, NODE_SLOT, too, in: groups
    counts_ptr,  # out: entries of each expert, rank and node that has any
):
    """For each entry of the chunk and each of its groups, count the earlier entries of the group; for each group, count
    its entries. The groups share a loop, because each waits for what it loads. Only the experts, if ranks are few."""
    KP: tl.constexpr = counting.KP
    N: tl.constexpr = counting.BLOCK_T * KP
    rank_ptr = entry_field(entries, STAGE_ROW)
    node_ptr = entry_field(entries, NODE_SLOT)
    entry = tl.arange(0, N)
    first_token = tl.program_id(0) * counting.BLOCK_T
    token, k = first_token + entry // KP, entry % KP
    mask = (token < entries.num_tokens) & (k < entries.TOPK)
    at = token * entries.TOPK + k
    ids_ptr = counting.topk_idx_ptr
    expert = _kept(job, ids_ptr + at, mask, -1)
    of_expert = tl.zeros([counting.OTHERS, N], tl.int32)
    if counting.RANKS == 0:
        rank = tl.load(rank_ptr + at, mask=mask, other=-1)
        node = tl.load(node_ptr + at, mask=mask, other=-1)
        of_rank = tl.zeros([counting.OTHERS, N], tl.int32)
        of_node = tl.zeros([counting.OTHERS, N], tl.int32)
    for start in range(0, N, counting.OTHERS):
        other = start + tl.arange(0, counting.OTHERS)
        other_token, other_k = first_token + other // KP, other % KP
        is_other = (other_token < entries.num_tokens) & (other_k < entries.TOPK)
        there = other_token * entries.TOPK + other_k
        earlier = other[:, None] < entry[None, :]
        of_expert += _alike(_kept(job, ids_ptr + there, is_other, -2), expert, earlier)
        if counting.RANKS == 0:
            of_rank += _alike(tl.load(rank_ptr + there, mask=is_other, other=-2), rank, earlier)
            of_node += _alike(tl.load(node_ptr + there, mask=is_other, other=-2), node, earlier)
    _store_ranked(entry_field(entries, DST_ROW) + at, counts_ptr, expert, of_expert, mask)
    if counting.RANKS == 0:
        tl.debug_barrier()  # all threads have read the groups
        _store_ranked(rank_ptr + at, rank_columns_of(job, counts_ptr), rank, of_rank, mask)
        _store_ranked(node_ptr + at, node_columns_of(job, counts_ptr), node, of_node, mask)


@triton.jit
def _store_ranked(slot_ptrs, counts_ptr, group, alike, mask):
    """Store the slot of each entry, and the number of entries of its group: all of a group store the same."""
    both = tl.sum(alike, axis=0)  # along this axis, sums stay within a thread
    chosen = mask & (group >= 0)
    tl.store(slot_ptrs, tl.where(chosen, both & 65535, -1), mask=mask)
    tl.store(counts_ptr + group, both >> 16, mask=chosen)


@triton.jit
def _store_packed(
    arrivals,  # ArrivalRows
    entries,
    entry,  # [T, K] offsets into a [T, K] table
    addrs,  # push addresses, 0 = not pushed; not stored if copy engines send the rows
    sum_row,  # rows of sums in this rank's combine buffer
    here,
    mask,
):
    """Store, without gaps and in k order, the entries of each token where `here`: push addresses, and where combine
    finds sums."""
    at = entry - tl.arange(0, here.shape[0])[:, None] + compact_position(here)
    if not arrivals.ENGINES:
        tl.store(arrivals.push_addrs_ptr + at, tl.where(here, addrs, 0), mask=mask)
    tl.store(entry_field(entries, PULL_ROW) + at, tl.where(here, sum_row, -1), mask=mask)


class Scatter(NamedTuple):
    """Scatter indices from the caller.

    Attributes:
        scatter_idx_ptr: [T, K] int32 or int64, full_scatter_indices; read if HAS_SCATTER.
        HAS_SCATTER: whether the caller provides them.
    """

    scatter_idx_ptr: Any
    HAS_SCATTER: tl.constexpr


class ArrivalRows(NamedTuple):
    """Staging rows of the tokens.

    Attributes:
        push_addrs_ptr: out [T, K] int64, addresses of staging rows, then zeros; with `in_place` also zero for rows
            that the rank sends to itself.
        tokens_ptr: out int64, with `in_place` the token of each of these rows, in the order of their staging rows.
        in_place: as in OwnRows (device/arrivals.py).
        row_bytes: bytes of a row on the wire.
        stage_capacity: staging rows of a rank.
        ENGINES: copy engines send the rows: owners are told where they put them (device/arrivals.py), and there are no
            push addresses.
    """

    push_addrs_ptr: Any
    tokens_ptr: Any
    in_place: Any
    row_bytes: Any
    stage_capacity: Any
    ENGINES: tl.constexpr


class Sizes(NamedTuple):
    """Sizes rounded up to powers of two.

    Attributes:
        KP: top-k. LWP: ranks of a node. NNP: nodes. EP: local experts.
        SENDERS: arrival flags of a rank.
        BLOCK_T: tokens of a chunk.
    """

    KP: tl.constexpr
    LWP: tl.constexpr
    NNP: tl.constexpr
    EP: tl.constexpr
    SENDERS: tl.constexpr
    BLOCK_T: tl.constexpr


@triton.jit
def _await_placed(job):
    """Wait until the kernel ahead, if it still runs, has written `placement`. It no longer waits for other ranks."""
    one = tl.arange(0, 1)
    epoch = tl.load(state_at(job, EPOCH_DISPATCH), volatile=True)
    wait_flags(job, state_at(job, EPOCH_PLACED) + one, one == 0, epoch, WAIT_SPLITS, job.rank)


class _Found(NamedTuple):
    """What `count_chunk` has found for entries [KP, BLOCK_T].

    Attributes:
        expert: -1 = dropped.
        slot: slot in the chunk among the entries of the expert.
        in_rank, in_node: likewise among the tokens of the rank and of the node; -1 = not the first entry there.
        weights: routing weights, or of another type if there are none.
    """

    expert: Any
    slot: Any
    in_rank: Any
    in_node: Any
    weights: Any


@triton.jit
def _found(entries, routed, offs, mask):
    """Load `_Found`."""
    expert = tl.load(entry_field(entries, KEPT) + offs, mask=mask, other=-1)
    slot = tl.load(entry_field(entries, DST_ROW) + offs, mask=mask, other=0)
    in_rank = tl.load(entry_field(entries, STAGE_ROW) + offs, mask=mask, other=-1)
    in_node = tl.load(entry_field(entries, NODE_SLOT) + offs, mask=mask, other=-1)
    weights = slot
    if routed.HAS_WEIGHTS:
        weights = tl.load(routed.weights_ptr + offs, mask=mask, other=0.0)
    return _Found(expert, slot, in_rank, in_node, weights)


class _Begins(NamedTuple):
    """For entries [KP, BLOCK_T], output rows, and where the other numbers begin to which slots are added. All are
    loaded before anything is stored: behind a store, each load would wait for memory again.

    Attributes:
        owner, node: of the expert; of expert 0, if the entry is dropped.
        dst_row: output row, the slot included.
        of_rank, of_node: tokens of earlier chunks for the rank and the node.
        stage: first staging row of this rank's tokens at the owner.
        sums_from: from a staging row to the row of its sum.
        meta_addrs, stage_addrs: addresses of the owner's buffers; the second not with copy engines.
    """

    owner: Any
    node: Any
    dst_row: Any
    of_rank: Any
    of_node: Any
    stage: Any
    sums_from: Any
    meta_addrs: Any
    stage_addrs: Any


@triton.jit
def _begins(job, found, scatter, offs, prefix_ptr, placement_ptr, ENGINES: tl.constexpr):
    """Load `_Begins`."""
    valid, first = found.expert >= 0, found.in_rank >= 0
    owner = owner_of(job, tl.maximum(found.expert, 0))
    node = node_of(job, owner)
    here = first & on_my_node(job, owner)
    if scatter.HAS_SCATTER:
        position = tl.load(scatter.scatter_idx_ptr + offs, mask=valid, other=0).to(tl.int32)
        slot = position - tl.load(sort_bases_of(job, placement_ptr) + found.expert, mask=valid, other=0)
    else:
        slot = found.slot + tl.load(prefix_ptr + found.expert, mask=valid, other=0)
    meta_addrs = meta_addresses(job, owner, here)
    stage_addrs = meta_addrs
    if not ENGINES:
        stage_addrs = address_of(job, STAGE_X, tl.where(here, owner, 0))
    return _Begins(
        owner,
        node,
        slot + tl.load(bases_of(job, placement_ptr) + found.expert, mask=valid, other=0),
        tl.load(rank_columns_of(job, prefix_ptr) + owner, mask=first, other=0),
        tl.load(node_columns_of(job, prefix_ptr) + node, mask=found.in_node >= 0, other=0),
        tl.load(stage_bases_of(job, placement_ptr) + owner, mask=first, other=0),
        # Of [N, LW] numbers, those of my node have the place of the owner's rank.
        tl.load(sums_from_of(job, placement_ptr) + owner, mask=here, other=0),
        meta_addrs,
        stage_addrs,
    )


@triton.jit
def _rows_before(job, prefix_ptr, LWP: tl.constexpr):
    """[1, LWP] staging rows that the tokens of earlier chunks take at each rank of this node."""
    local = tl.arange(0, LWP)[None, :]
    return tl.load(rank_columns_of(job, prefix_ptr) + first_local(job) + local, mask=is_local(job, local), other=0)


@ep_kernel(
    entries_ptr="*i32",
    scatter_idx_ptr="*{IDX}",
    weights_ptr="*fp32",
    chunks_ptr="*i32",
    push_addrs_ptr="*i64",
    tokens_ptr="*i64",
    specialised=("row_bytes",),
)
def routing_slots_kernel(
    entries: Entries,
    scatter: Scatter,
    routed: Weights,  # [T, K]
    chunks_ptr,  # see device/tables.py; counts are an exclusive prefix
    placement_ptr,  # see device/tables.py
    arrivals: ArrivalRows,
    job: Job,
    recv_capacity,
    sizes: Sizes,
):
    num_chunks = tl.num_programs(0) - 1
    chunk = tl.program_id(0)
    token, k, offs, mask = _entries(entries.num_tokens, entries.TOPK, sizes.KP, sizes.BLOCK_T)
    _await_placed(job)
    # Loaded before it is known whether they are needed, so that one wait serves all.
    found = _found(entries, routed, offs, mask)
    failed = tl.load(state_at(job, STATUS)) != 0
    nothing = failed | is_held(job, placement_ptr)
    if chunk == num_chunks:
        _write_tiles(job, placement_ptr, nothing, sizes.EP)
        if arrivals.ENGINES:
            if failed:  # the copies that follow cannot be held back
                post_overrun(job, sizes.LWP)
            if nothing == 0:
                raise_for_copies(job, sizes.SENDERS)
    if nothing | (chunk == num_chunks):
        await_previous()
        return
    prefix_ptr = chunks_ptr + tl.cast(chunk, tl.int64) * num_columns_of(job)
    begins = _begins(job, found, scatter, offs, prefix_ptr, placement_ptr, arrivals.ENGINES)
    rows_before = _rows_before(job, prefix_ptr, sizes.LWP)
    valid, owner, node = found.expert >= 0, begins.owner, begins.node
    first = found.in_rank >= 0
    own_slot = found.in_rank + begins.of_rank
    stage_row = tl.where(first, own_slot + begins.stage, -1)
    first_of_node = found.in_node >= 0
    node_slot = found.in_node + begins.of_node

    # Keep an assignment if its row fits the output and its token's row fits the staging buffer.
    of_first = stage_row.T[None, :, :]
    same = (of_first >= 0) & (owner[:, :, None] == owner.T[None, :, :])
    arrival = tl.sum(tl.where(same, of_first, 0), axis=2)
    alive = valid & (begins.dst_row < recv_capacity) & (arrival < arrivals.stage_capacity)
    dst_row = tl.where(alive, begins.dst_row, -1)
    here = first & on_my_node(job, owner)
    push_meta(
        begins.meta_addrs,
        found.weights,
        tl.where(valid, owner, -1),
        dst_row,
        stage_row,
        here,
        routed.HAS_WEIGHTS,
        sizes.KP,
    )
    if arrivals.ENGINES:
        push_sources(job, owner, stage_row, token, here)
    fits = here & (stage_row < arrivals.stage_capacity)
    pushed = fits & ((owner != job.rank) | (arrivals.in_place == 0))
    addrs = begins.stage_addrs + stage_row.to(tl.int64) * arrivals.row_bytes
    _store_packed(arrivals, entries, offs, tl.where(pushed, addrs, 0), stage_row + begins.sums_from, fits, mask)
    tokens = tl.broadcast_to(token, dst_row.shape)
    if arrivals.in_place != 0:
        tl.store(arrivals.tokens_ptr + own_slot, tokens, mask=first & (owner == job.rank))
    tl.store(entry_field(entries, DST_ROW) + offs, dst_row, mask=mask)
    tl.store(entry_field(entries, STAGE_ROW) + offs, stage_row, mask=mask)
    tl.store(entry_field(entries, NODE_SLOT) + offs, tl.where(first_of_node, node_slot, -1), mask=mask)
    if has_other_nodes(job):
        node_token_ptr = node_token_of(job, chunks_ptr, num_chunks)
        tl.store(node_token_ptr + node.to(tl.int64) * entries.num_tokens + node_slot, tokens, mask=first_of_node)
        elsewhere = first_of_node & (node != my_node(job))
        partial = tl.where(elsewhere, node_slot * num_nodes(job) + node, -1)
        partial_ptr = entry_field(entries, PULL_PARTIAL)
        tl.store(partial_ptr + offs - k + compact_position(elsewhere), partial, mask=mask)
    _store_counts_of_parts(job, rows_before, prefix_ptr, placement_ptr, num_chunks, sizes)
    await_previous()


@triton.jit
def _write_tiles(job, placement_ptr, nothing, EP: tl.constexpr):
    """Write the tile table of this rank's output rows; without rows, if nothing comes."""
    expert_offsets_ptr = expert_offsets_of(job, placement_ptr)
    num_rows = tl.where(nothing, 0, tl.load(num_rows_of(job, placement_ptr)))
    experts = job.experts_per_rank
    max_tiles = tl.cdiv(num_rows, TILE_ROWS) + experts
    tiles_ptr = tiles_of(job, placement_ptr)
    filled_ptr = num_recv_of(job, placement_ptr)
    write_tile_table(tiles_ptr, expert_offsets_ptr, filled_ptr, num_rows, experts, max_tiles, EP, True)


@triton.jit
def _store_counts_of_parts(job, rows_before, prefix_ptr, placement_ptr, num_chunks, sizes):
    """For the parts that begin at this chunk, store how many staging rows all earlier tokens take at each rank of this
    node, and how many of these tokens go to each node."""
    part = tl.arange(0, PARTS)[:, None]
    begins = part_begin(part, num_chunks) == tl.program_id(0)
    local = tl.arange(0, sizes.LWP)[None, :]
    here = is_local(job, local)
    rows = tl.broadcast_to(rows_before, [PARTS, sizes.LWP])
    tl.store(step_rows_of(job, placement_ptr) + part * job.ranks_per_node + local, rows, mask=begins & here)
    if has_other_nodes(job):
        nodes = num_nodes(job)
        node = tl.arange(0, sizes.NNP)[None, :]
        tokens = tl.load(node_columns_of(job, prefix_ptr) + node, mask=node < nodes, other=0)
        tokens = tl.broadcast_to(tokens, [PARTS, sizes.NNP])
        tl.store(step_tokens_of(job, placement_ptr) + part * nodes + node, tokens, mask=begins & (node < nodes))
