"""Routing of one rank: from expert ids to counts, stable slots and destination rows.

Protocol      1 count: each chunk of tokens ranks its own entries and counts them per column
              (2 all ranks exchange their totals and derive where every segment starts: internode/splits.py)
              3 slots: every entry gets its row at its owner, every token its arrival row per rank. The ranks of
              this node are told which output rows each arrival row fills, and the push kernel
              (intranode/dispatch.py) where to store each row
Layout        device/tables.py. A *column* is an expert, then a rank, then a node: C = E + W + N columns. An
              *entry* is one (token, k). A token counts once per destination rank and once per destination node,
              at the first k that goes there; this is where de-duplication is decided.
              push_addrs [T, K] int64: addresses of the token's arrival rows on this node, then zeros.
              stage_meta [W * max_tokens, 2 * KP] int32 of each rank: output rows of an arrival row's copies
              (-1 = none), then their weights as float32 bits.
Memory order  Plain loads and stores; the kernels follow each other on one stream. The stores to stage_meta are
              covered by the releases of the push, which starts after them.
Progress      No program waits.
Replay        Nothing is kept between calls. Slots follow (token, k), no atomic decides one: the same input
              gives the same rows. stage_meta is free since the splits exchange.
"""

import triton
import triton.language as tl

from ..device.buffers import STAGE_META, STAGE_X, STATUS, address_of, buffer_ptrs
from ..device.rows import on_my_node
from ..device.tables import (
    DST_ROW,
    KEPT,
    NODE_SLOT,
    OWNER,
    STAGE_ROW,
    STEPS,
    bases_of,
    chunk_bad_of,
    entry_field,
    node_token_of,
    num_columns_of,
    part_begin,
    step_rows_of,
)

_NO_INDEX = tl.constexpr(2**31 - 1)


@triton.jit
def _load_entries(num_tokens, TOPK: tl.constexpr, KP: tl.constexpr, BLOCK_T: tl.constexpr):
    """Flat entries of this program's chunk: token, offset into a [T, K] table, in-range mask."""
    entry = tl.arange(0, BLOCK_T * KP)
    token = tl.program_id(0) * BLOCK_T + entry // KP
    k = entry % KP
    mask = (token < num_tokens) & (k < TOPK)
    return entry, token, token * TOPK + k, mask


# Tables [N, N] compare the entries along axis 0 with each entry along axis 1: sums over axis 0 stay in a thread.


@triton.jit
def _rank_among(group, chosen, entry):
    """Of each entry: how many chosen earlier entries share its group, and how many share it in all."""
    alike = chosen[:, None] & (group[:, None] == group[None, :])
    both = tl.where(entry[:, None] < entry[None, :], 65537, 65536)  # one sum for the two
    both = tl.sum(tl.where(alike, both, 0), axis=0)
    return both & 65535, both >> 16


@triton.jit
def _first_in_token(group, valid, token, entry):
    """True at the first entry of each (token, group)."""
    alike = valid[:, None] & (group[:, None] == group[None, :]) & (token[:, None] == token[None, :])
    earlier = alike & (entry[:, None] < entry[None, :])
    return valid & (tl.sum(earlier.to(tl.int32), axis=0) == 0)


@triton.jit(do_not_specialize=["num_tokens", "num_experts", "num_ranks", "experts_per_rank", "ranks_per_node"])
def routing_count_kernel(
    topk_idx_ptr,  # [T, K] int32 or int64; -1 or E = dropped
    entries_ptr,  # out [5, T, K] int32; of slots the index within the chunk
    chunks_ptr,  # out, see device/tables.py
    num_tokens,
    num_experts,
    num_ranks,
    experts_per_rank,
    ranks_per_node,
    TOPK: tl.constexpr,
    KP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    chunk = tl.program_id(0)
    num_columns = num_columns_of(num_ranks, experts_per_rank, ranks_per_node)
    entry, token, offs, mask = _load_entries(num_tokens, TOPK, KP, BLOCK_T)
    raw = tl.load(topk_idx_ptr + offs, mask=mask, other=-1).to(tl.int64)
    valid = (raw >= 0) & (raw < num_experts)
    bad = mask & (raw != -1) & (raw != num_experts) & (valid == 0)
    first_bad = tl.min(tl.where(bad, offs, _NO_INDEX))
    bad_id = tl.sum(tl.where(bad & (offs == first_bad), raw, 0))
    bad_ptr = chunk_bad_of(chunks_ptr, tl.num_programs(0), num_columns) + chunk * 2
    tl.store(bad_ptr, first_bad)
    tl.store(bad_ptr + 1, tl.minimum(tl.maximum(bad_id, -_NO_INDEX), _NO_INDEX).to(tl.int32))

    expert = tl.where(valid, raw, -1).to(tl.int32)
    rank = tl.maximum(expert, 0) // experts_per_rank
    node = rank // ranks_per_node
    tl.store(entry_field(entries_ptr, KEPT, num_tokens, TOPK) + offs, expert, mask=mask)
    tl.store(entry_field(entries_ptr, OWNER, num_tokens, TOPK) + offs, tl.where(valid, rank, -1), mask=mask)

    counts_ptr = chunks_ptr + tl.cast(chunk, tl.int64) * num_columns
    columns = tl.arange(0, BLOCK_C)
    for start in range(0, num_columns, BLOCK_C):
        tl.store(counts_ptr + start + columns, 0, mask=start + columns < num_columns)
    # The zeros and the counts below go to the same words from different threads.
    tl.debug_barrier()

    slot, count = _rank_among(expert, valid, entry)
    tl.store(entry_field(entries_ptr, DST_ROW, num_tokens, TOPK) + offs, tl.where(valid, slot, -1), mask=mask)
    # All entries of one expert store the same count.
    tl.store(counts_ptr + expert, count, mask=valid)

    first = _first_in_token(rank, valid, token, entry)
    slot, count = _rank_among(rank, first, entry)
    tl.store(entry_field(entries_ptr, STAGE_ROW, num_tokens, TOPK) + offs, tl.where(first, slot, -1), mask=mask)
    tl.store(counts_ptr + num_experts + rank, count, mask=first)

    first = _first_in_token(node, valid, token, entry)
    slot, count = _rank_among(node, first, entry)
    tl.store(entry_field(entries_ptr, NODE_SLOT, num_tokens, TOPK) + offs, tl.where(first, slot, -1), mask=mask)
    tl.store(counts_ptr + num_experts + num_ranks + node, count, mask=first)


@triton.jit
def _push_addresses(
    push_addrs_ptr,
    tables_ptr,
    token,
    entry,
    rank_of_entry,
    arrival,
    here,
    mask,
    num_ranks,
    row_bytes,
    TOPK: tl.constexpr,
    KP: tl.constexpr,
):
    """Addresses of a token's arrival rows where `here`, without gaps and in k order; then zeros."""
    before, count = _rank_among(token, here, entry)
    position = tl.where(here, before, count + entry % KP - before)
    addrs = address_of(tables_ptr, STAGE_X, num_ranks, tl.where(here, rank_of_entry, 0))
    addrs += arrival.to(tl.int64) * row_bytes
    tl.store(push_addrs_ptr + token.to(tl.int64) * TOPK + position, tl.where(here, addrs, 0), mask=mask)


@triton.jit
def _push_meta(
    entries_ptr,
    weights_ptr,
    tables_ptr,
    token,
    rank_of_entry,
    arrival,
    here,
    num_tokens,
    num_ranks,
    HAS_WEIGHTS: tl.constexpr,
    TOPK: tl.constexpr,
    KP: tl.constexpr,
):
    """Tell the rank of each entry, where `here`, which output rows its token fills there, and with what weights."""
    ks = tl.arange(0, KP)[None, :]
    offs = token[:, None] * TOPK + ks
    mask = here[:, None] & (ks < TOPK)
    owners = tl.load(entry_field(entries_ptr, OWNER, num_tokens, TOPK) + offs, mask=mask, other=-1)
    rows = tl.load(entry_field(entries_ptr, DST_ROW, num_tokens, TOPK) + offs, mask=mask, other=-1)
    mine = owners == rank_of_entry[:, None]
    at = arrival.to(tl.int64)[:, None] * (2 * KP) + ks
    dest = buffer_ptrs(tables_ptr, STAGE_META, num_ranks, rank_of_entry, here, tl.int32)
    tl.store(dest[:, None] + at, tl.where(mine, rows, -1), mask=here[:, None])
    if HAS_WEIGHTS:
        weights = tl.load(weights_ptr + offs, mask=mask, other=0.0)
        dest = buffer_ptrs(tables_ptr, STAGE_META, num_ranks, rank_of_entry, here, tl.float32)
        tl.store(dest[:, None] + at + KP, tl.where(mine, weights, 0.0), mask=here[:, None])


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "rank",
        "num_ranks",
        "experts_per_rank",
        "ranks_per_node",
        "recv_capacity",
        "stage_capacity",
    ]
)
def routing_slots_kernel(
    entries_ptr,  # in: of slots the index within the chunk, out: rows; [5, T, K] int32
    scatter_idx_ptr,  # [T, K] int32 or int64, the caller's full_scatter_indices; read if HAS_SCATTER
    weights_ptr,  # [T, K] float32, read if HAS_WEIGHTS
    chunks_ptr,  # see device/tables.py; counts are an exclusive prefix
    placement_ptr,  # see device/tables.py
    push_addrs_ptr,  # out [T, K] int64
    state_ptr,
    tables_ptr,
    num_tokens,
    rank,
    num_ranks,
    experts_per_rank,
    ranks_per_node,
    row_bytes,  # of a row on the wire
    recv_capacity,
    stage_capacity,
    HAS_SCATTER: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    TOPK: tl.constexpr,
    KP: tl.constexpr,
    LWP: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    if tl.load(state_ptr + STATUS) != 0:
        return
    num_experts = num_ranks * experts_per_rank
    num_columns = num_columns_of(num_ranks, experts_per_rank, ranks_per_node)
    bases_ptr = bases_of(placement_ptr, num_ranks, experts_per_rank, ranks_per_node)
    sort_base_ptr = bases_ptr + num_experts
    stage_base_ptr = sort_base_ptr + num_experts
    dst_row_ptr = entry_field(entries_ptr, DST_ROW, num_tokens, TOPK)
    stage_row_ptr = entry_field(entries_ptr, STAGE_ROW, num_tokens, TOPK)
    node_slot_ptr = entry_field(entries_ptr, NODE_SLOT, num_tokens, TOPK)
    entry, token, offs, mask = _load_entries(num_tokens, TOPK, KP, BLOCK_T)
    expert = tl.load(entries_ptr + offs, mask=mask, other=-1)
    valid = expert >= 0
    owner = tl.maximum(expert, 0) // experts_per_rank
    node = owner // ranks_per_node
    prefix_ptr = chunks_ptr + tl.cast(tl.program_id(0), tl.int64) * num_columns

    if HAS_SCATTER:
        position = tl.load(scatter_idx_ptr + offs, mask=valid, other=0).to(tl.int32)
        slot = position - tl.load(sort_base_ptr + expert, mask=valid, other=0)
    else:
        slot = tl.load(dst_row_ptr + offs, mask=valid, other=0)
        slot += tl.load(prefix_ptr + expert, mask=valid, other=0)
    dst_row = slot + tl.load(bases_ptr + expert, mask=valid, other=0)

    slot = tl.load(stage_row_ptr + offs, mask=mask, other=-1)
    first = slot >= 0
    stage_row = slot + tl.load(stage_base_ptr + owner, mask=first, other=0)
    stage_row += tl.load(prefix_ptr + num_experts + owner, mask=first, other=0)
    stage_row = tl.where(first, stage_row, -1)

    slot = tl.load(node_slot_ptr + offs, mask=mask, other=-1)
    first_of_node = slot >= 0
    slot += tl.load(prefix_ptr + num_experts + num_ranks + node, mask=first_of_node, other=0)

    # A copy exists if its row fits the output and the row of its token fits the arrival buffer.
    same = first[:, None] & (owner[:, None] == owner[None, :]) & (token[:, None] == token[None, :])
    arrival = tl.sum(tl.where(same, stage_row[:, None], 0), axis=0)
    alive = valid & (dst_row < recv_capacity) & (arrival < stage_capacity)
    tl.store(dst_row_ptr + offs, tl.where(alive, dst_row, -1), mask=mask)
    tl.store(stage_row_ptr + offs, stage_row, mask=mask)
    tl.store(node_slot_ptr + offs, tl.where(first_of_node, slot, -1), mask=mask)
    if num_ranks > ranks_per_node:
        node_token_ptr = node_token_of(chunks_ptr, tl.num_programs(0), num_columns)
        tl.store(node_token_ptr + node.to(tl.int64) * num_tokens + slot, token, mask=first_of_node)

    part = tl.arange(0, STEPS * STEPS)[:, None]
    local = tl.arange(0, LWP)[None, :]
    begins = part_begin(part, tl.num_programs(0)) == tl.program_id(0)
    is_local = local < ranks_per_node
    peer = rank - rank % ranks_per_node + local
    to_peer = tl.load(prefix_ptr + num_experts + peer, mask=is_local, other=0)
    step_rows_ptr = step_rows_of(placement_ptr, num_ranks, experts_per_rank, ranks_per_node)
    to_peer = tl.broadcast_to(to_peer, [STEPS * STEPS, LWP])
    tl.store(step_rows_ptr + part * ranks_per_node + local, to_peer, mask=begins & is_local)

    here = first & on_my_node(owner, rank, ranks_per_node)
    fits = here & (stage_row < stage_capacity)
    _push_addresses(
        push_addrs_ptr, tables_ptr, token, entry, owner, stage_row, fits, mask, num_ranks, row_bytes, TOPK, KP
    )
    tl.debug_barrier()  # other threads read the rows stored above
    _push_meta(
        entries_ptr,
        weights_ptr,
        tables_ptr,
        token,
        owner,
        stage_row,
        here,
        num_tokens,
        num_ranks,
        HAS_WEIGHTS,
        TOPK,
        KP,
    )
