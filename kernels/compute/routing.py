"""Routing of one rank: from expert ids to counts, stable slots and destination rows.

Protocol      1 count: each chunk of tokens ranks its own entries and counts them per column
              2 scan: an exclusive prefix over the chunks; the totals are this rank's splits row
              (the splits rows of all ranks are exchanged: internode/splits.py)
              3 offsets: one program per owner rank derives where every segment starts there
              4 slots: every entry gets its row at its owner, every token its arrival row per rank
Layout        A *column* is an expert, then a rank, then a node: C = E + W + N columns. An *entry* is one
              (token, k). A token counts once per destination rank and once per destination node, at the
              first k that goes there; this is where de-duplication is decided.
              Splits row, int32 [S], S a multiple of 4: C counts; at the end tokens, 1 + index of the first
              illegal id (0 = none), that id, host error code.
              Bases, int32 [2 * E + W]: of each expert the first row of my entries in its owner's output; of
              each expert its first position in a sort of my entries; of each rank the first arrival row of
              my tokens there.
Memory order  Plain loads and stores; the kernels follow each other on one stream.
Progress      No program waits.
Replay        Nothing is kept between calls. Slots follow (token, k), no atomic decides one: the same input
              gives the same rows.
"""

import triton
import triton.language as tl

from ..device.buffers import EPOCH_DISPATCH, SPLITS, buffer_ptr

_NO_INDEX = tl.constexpr(2**31 - 1)


@triton.jit
def _owner_of(expert, experts_per_rank):
    """Rank that owns a global expert id. Dropped entries (-1) give rank 0 here: mask them."""
    return tl.maximum(expert, 0) // experts_per_rank


@triton.jit
def _load_entries(num_tokens, TOPK: tl.constexpr, KP: tl.constexpr, BLOCK_T: tl.constexpr):
    """Flat entries of this program's chunk: token, offset into a [T, K] table, in-range mask."""
    entry = tl.arange(0, BLOCK_T * KP)
    token = tl.program_id(0) * BLOCK_T + entry // KP
    k = entry % KP
    mask = (token < num_tokens) & (k < TOPK)
    return entry, token, token * TOPK + k, mask


@triton.jit
def _first_in_token(group, valid, token, entry):
    """True at the first entry of each (token, group); `same` [N, N] says who shares token and group."""
    both = valid[:, None] & valid[None, :]
    same = both & (group[:, None] == group[None, :]) & (token[:, None] == token[None, :])
    earlier = same & (entry[None, :] < entry[:, None])
    return valid & (tl.sum(earlier.to(tl.int32), axis=1) == 0), same


@triton.jit
def _rank_among(group, chosen, entry):
    """Of each entry: how many chosen earlier entries share its group, and how many share it in all."""
    alike = chosen[None, :] & (group[:, None] == group[None, :])
    before = tl.sum((alike & (entry[None, :] < entry[:, None])).to(tl.int32), axis=1)
    return before, tl.sum(alike.to(tl.int32), axis=1)


@triton.jit(do_not_specialize=["num_tokens", "num_experts", "num_ranks", "experts_per_rank", "ranks_per_node"])
def routing_count_kernel(
    topk_idx_ptr,  # [T, K] int32 or int64; -1 or E = dropped
    kept_idx_ptr,  # out [T, K] int32, -1 = dropped
    owner_ptr,  # out [T, K] int32, rank that owns the expert, -1 = dropped
    entry_slot_ptr,  # out [T, K] int32, index among the chunk's entries of that expert
    rank_slot_ptr,  # out [T, K] int32, index among the chunk's tokens for that rank; -1 = not the first k
    node_slot_ptr,  # out [T, K] int32, the same per node
    chunk_counts_ptr,  # out [chunks, C] int32
    chunk_bad_ptr,  # out [chunks, 2] int32, first illegal entry (2**31 - 1 = none) and its id
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
    entry, token, offs, mask = _load_entries(num_tokens, TOPK, KP, BLOCK_T)
    raw = tl.load(topk_idx_ptr + offs, mask=mask, other=-1).to(tl.int64)
    valid = (raw >= 0) & (raw < num_experts)
    bad = mask & (raw != -1) & (raw != num_experts) & (valid == 0)
    first_bad = tl.min(tl.where(bad, offs, _NO_INDEX))
    bad_id = tl.sum(tl.where(bad & (offs == first_bad), raw, 0))
    tl.store(chunk_bad_ptr + chunk * 2, first_bad)
    tl.store(chunk_bad_ptr + chunk * 2 + 1, tl.minimum(tl.maximum(bad_id, -_NO_INDEX), _NO_INDEX).to(tl.int32))

    expert = tl.where(valid, raw, -1).to(tl.int32)
    tl.store(kept_idx_ptr + offs, expert, mask=mask)

    num_nodes = num_ranks // ranks_per_node
    num_columns = num_experts + num_ranks + num_nodes
    counts_ptr = chunk_counts_ptr + chunk * num_columns
    columns = tl.arange(0, BLOCK_C)
    for start in range(0, num_columns, BLOCK_C):
        tl.store(counts_ptr + start + columns, 0, mask=start + columns < num_columns)
    # The zeros and the counts below go to the same words from different threads.
    tl.debug_barrier()

    slot, count = _rank_among(expert, valid, entry)
    tl.store(entry_slot_ptr + offs, tl.where(valid, slot, -1), mask=mask)
    # All entries of one expert store the same count.
    tl.store(counts_ptr + expert, count, mask=valid)

    rank = _owner_of(expert, experts_per_rank)
    tl.store(owner_ptr + offs, tl.where(valid, rank, -1), mask=mask)
    first, _ = _first_in_token(rank, valid, token, entry)
    slot, count = _rank_among(rank, first, entry)
    tl.store(rank_slot_ptr + offs, tl.where(first, slot, -1), mask=mask)
    tl.store(counts_ptr + num_experts + rank, count, mask=first)

    node = rank // ranks_per_node
    first, _ = _first_in_token(node, valid, token, entry)
    slot, count = _rank_among(node, first, entry)
    tl.store(node_slot_ptr + offs, tl.where(first, slot, -1), mask=mask)
    tl.store(counts_ptr + num_experts + num_ranks + node, count, mask=first)


@triton.jit(do_not_specialize=["num_chunks", "num_columns", "row_length", "num_tokens", "host_error"])
def routing_scan_kernel(
    chunk_counts_ptr,  # in: counts, out: exclusive prefix over chunks; [chunks, C] int32
    chunk_bad_ptr,  # [chunks, 2] int32
    row_ptr,  # out [S] int32, this rank's splits row
    num_chunks,
    num_columns,
    row_length,
    num_tokens,
    host_error,  # 0, or why the host rejected this rank's input (layout.HOST_*)
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    chunks = tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_C], tl.int32)
    for start in range(0, num_chunks, BLOCK_N):
        mask = (start + chunks < num_chunks)[:, None] & (columns < num_columns)[None, :]
        ptrs = chunk_counts_ptr + (start + chunks)[:, None] * num_columns + columns[None, :]
        counts = tl.load(ptrs, mask=mask, other=0)
        tl.store(ptrs, total[None, :] + tl.cumsum(counts, axis=0) - counts, mask=mask)
        total += tl.sum(counts, axis=0)
    tl.store(row_ptr + columns, total, mask=columns < num_columns)

    if tl.program_id(0) == 0:
        first_bad = tl.full([], _NO_INDEX, tl.int32)
        bad_id = tl.full([], 0, tl.int32)
        for start in range(0, num_chunks, BLOCK_N):
            mask = start + chunks < num_chunks
            bad = tl.load(chunk_bad_ptr + (start + chunks) * 2, mask=mask, other=_NO_INDEX)
            ids = tl.load(chunk_bad_ptr + (start + chunks) * 2 + 1, mask=mask, other=0)
            first_here = tl.min(bad)
            id_here = tl.sum(tl.where((bad == first_here) & (bad != _NO_INDEX), ids, 0))
            bad_id = tl.where(first_here < first_bad, id_here, bad_id)
            first_bad = tl.minimum(first_here, first_bad)
        tail_ptr = row_ptr + row_length - 4
        tl.store(tail_ptr, num_tokens)
        tl.store(tail_ptr + 1, tl.where(first_bad == _NO_INDEX, 0, first_bad + 1))
        tl.store(tail_ptr + 2, bad_id)
        tl.store(tail_ptr + 3, host_error)


@triton.jit(
    do_not_specialize=[
        "rank",
        "num_ranks",
        "experts_per_rank",
        "ranks_per_node",
        "row_length",
        "alignment",
        "recv_capacity",
    ]
)
def routing_offsets_kernel(
    state_ptr,
    tables_ptr,
    bases_ptr,  # out [2 * E + W] int32, see Layout
    expert_offsets_ptr,  # out [e + 1] int32
    num_recv_ptr,  # out [e] int32
    overflow_ptr,  # out [1] int32, rows beyond recv_capacity on this rank
    tokens_from_node_ptr,  # out [N] int32, tokens that my counterpart of each node sends to this node
    report_ptr,  # out [W, 8] int32: output rows, arrival rows, tokens, bad index + 1, bad id, host error; then of the
    # rows that arrive here from that rank the first one and their number
    rank,
    num_ranks,
    experts_per_rank,
    ranks_per_node,
    row_length,
    alignment,
    recv_capacity,
    WP: tl.constexpr,
    EP: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    owner = tl.program_id(0)
    num_experts = num_ranks * experts_per_rank
    sort_base_ptr = bases_ptr + num_experts
    stage_base_ptr = sort_base_ptr + num_experts
    parity = tl.load(state_ptr + EPOCH_DISPATCH) & 1
    splits_ptr = buffer_ptr(tables_ptr, SPLITS, num_ranks, rank, tl.int32) + parity * num_ranks * row_length
    source = tl.arange(0, WP)
    local = tl.arange(0, EP)
    mask = (source < num_ranks)[:, None] & (local < experts_per_rank)[None, :]
    first_expert = owner * experts_per_rank
    ptrs = splits_ptr + source[:, None] * row_length + first_expert + local[None, :]
    counts = tl.load(ptrs, mask=mask, other=0)
    total = tl.sum(counts, axis=0)
    before_me = tl.sum(tl.where((source < rank)[:, None], counts, 0), axis=0)
    padded = (total + alignment - 1) // alignment * alignment
    start = tl.cumsum(padded, axis=0) - padded
    rows = tl.sum(padded)
    tl.store(bases_ptr + first_expert + local, start + before_me, mask=local < experts_per_rank)

    mine = tl.sum(tl.where((source == rank)[:, None], counts, 0), axis=0)
    earlier = tl.zeros([BLOCK_E], tl.int32)
    for begin in range(0, first_expert, BLOCK_E):
        offs = begin + tl.arange(0, BLOCK_E)
        earlier += tl.load(splits_ptr + rank * row_length + offs, mask=offs < first_expert, other=0)
    sorted_start = tl.sum(earlier) + tl.cumsum(mine, axis=0) - mine
    tl.store(sort_base_ptr + first_expert + local, sorted_start, mask=local < experts_per_rank)

    source_row = splits_ptr + source * row_length + num_experts
    tokens = tl.load(source_row + owner, mask=source < num_ranks, other=0)
    tl.store(stage_base_ptr + owner, tl.sum(tl.where(source < rank, tokens, 0)))

    tail_ptr = splits_ptr + (owner + 1) * row_length - 4
    if owner == rank:
        tl.store(report_ptr + source * 8 + 6, tl.cumsum(tokens, axis=0) - tokens, mask=source < num_ranks)
        tl.store(report_ptr + source * 8 + 7, tokens, mask=source < num_ranks)
    report_ptr += owner * 8
    tl.store(report_ptr, rows)
    tl.store(report_ptr + 1, tl.sum(tokens))
    field = tl.arange(0, 4)
    tl.store(report_ptr + 2 + field, tl.load(tail_ptr + field))

    if owner % ranks_per_node == rank % ranks_per_node:
        node_column = num_experts + num_ranks + rank // ranks_per_node
        from_there = tl.load(splits_ptr + owner * row_length + node_column)
        tl.store(tokens_from_node_ptr + owner // ranks_per_node, from_there)

    if owner == rank:
        # Clamped, so that a GEMM driven by the offsets stays inside a static buffer that overflowed.
        clamped = tl.minimum(start, recv_capacity)
        tl.store(expert_offsets_ptr + local, clamped, mask=local < experts_per_rank)
        tl.store(expert_offsets_ptr + experts_per_rank, tl.minimum(rows, recv_capacity))
        real = tl.minimum(start + total, recv_capacity) - clamped
        tl.store(num_recv_ptr + local, real, mask=local < experts_per_rank)
        tl.store(overflow_ptr, tl.maximum(rows - recv_capacity, 0))


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "max_tokens",
        "num_ranks",
        "experts_per_rank",
        "ranks_per_node",
        "recv_capacity",
        "stage_capacity",
    ]
)
def routing_slots_kernel(
    kept_idx_ptr,  # [T, K] int32
    scatter_idx_ptr,  # [T, K] int32, the caller's full_scatter_indices; read if HAS_SCATTER
    chunk_counts_ptr,  # [chunks, C] int32, exclusive prefix
    bases_ptr,  # [2 * E + W] int32, see Layout
    dst_row_ptr,  # in: slot in the chunk, out: row in the owner's output, -1 = dropped; [T, K] int32
    stage_row_ptr,  # in: slot in the chunk, out: arrival row, -1 = not the first k; [T, K] int32
    node_slot_ptr,  # in: slot in the chunk, out: slot among my tokens for that node; [T, K] int32
    node_token_ptr,  # out [N, max_tokens] int32, inverse of node_slot
    num_tokens,
    max_tokens,
    num_ranks,
    experts_per_rank,
    ranks_per_node,
    recv_capacity,
    stage_capacity,
    HAS_SCATTER: tl.constexpr,
    TOPK: tl.constexpr,
    KP: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    num_experts = num_ranks * experts_per_rank
    sort_base_ptr = bases_ptr + num_experts
    stage_base_ptr = sort_base_ptr + num_experts
    entry, token, offs, mask = _load_entries(num_tokens, TOPK, KP, BLOCK_T)
    expert = tl.load(kept_idx_ptr + offs, mask=mask, other=-1)
    valid = expert >= 0
    rank = _owner_of(expert, experts_per_rank)
    node = rank // ranks_per_node
    num_columns = num_experts + num_ranks + num_ranks // ranks_per_node
    prefix_ptr = chunk_counts_ptr + tl.program_id(0) * num_columns

    if HAS_SCATTER:
        position = tl.load(scatter_idx_ptr + offs, mask=valid, other=0)
        slot = position - tl.load(sort_base_ptr + expert, mask=valid, other=0)
    else:
        slot = tl.load(dst_row_ptr + offs, mask=valid, other=0)
        slot += tl.load(prefix_ptr + expert, mask=valid, other=0)
    dst_row = slot + tl.load(bases_ptr + expert, mask=valid, other=0)

    slot = tl.load(stage_row_ptr + offs, mask=mask, other=-1)
    first = slot >= 0
    stage_row = slot + tl.load(stage_base_ptr + rank, mask=first, other=0)
    stage_row += tl.load(prefix_ptr + num_experts + rank, mask=first, other=0)
    tl.store(stage_row_ptr + offs, tl.where(first, stage_row, -1), mask=mask)

    # A copy exists if its row fits the output and the row of its token fits the arrival buffer.
    _, same = _first_in_token(rank, valid, token, entry)
    arrival = tl.sum(tl.where(same & first[None, :], stage_row[None, :], 0), axis=1)
    alive = valid & (dst_row < recv_capacity) & (arrival < stage_capacity)
    tl.store(dst_row_ptr + offs, tl.where(alive, dst_row, -1), mask=mask)

    slot = tl.load(node_slot_ptr + offs, mask=mask, other=-1)
    first = slot >= 0
    slot += tl.load(prefix_ptr + num_experts + num_ranks + node, mask=first, other=0)
    tl.store(node_slot_ptr + offs, tl.where(first, slot, -1), mask=mask)
    tl.store(node_token_ptr + node * max_tokens + slot, token, mask=first)
