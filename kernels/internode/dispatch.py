"""Inter-node dispatch: a token crosses the network once per destination node, to the rank there that has
the same local rank; that rank pushes it on to the ranks of its node.

Protocol      1 send: pack the rows for one node, CHUNK tokens at a time, into net_send: payload, expert
              ids, output rows, arrival rows, weights
              2 send: put the chunk into net_recv of the forwarder, with its flag = epoch
              3 forward: wait for the flag of a chunk, push its rows to the ranks of this node exactly as
              the owner of the token would (device/rows.py), keep its tables for combine
              4 forward: after some chunks, the steps of intranode/dispatch.py, raise arrive_flag[node, my local
              rank, program] on every rank of this node. How many arrival rows that are, the last chunk of the step
              says; if nothing in it goes to a rank, that rank is told of none and waits for the next step
Layout        net_send, net_recv [N, max_tokens, row_bytes], by the other node, then by the source's slot;
              a message row is payload (padded to 16 bytes), then 4 x KP int32; net_flag [N, MAX_CHUNKS] int64.
Memory order  2: put-with-signal orders data before flag. 3 acquires. 4 is one release per program.
Progress      Send waits for nobody. Forward waits for other ranks' sends, which precede their waits.
Replay        net_send is free when the put returns; net_recv is free again when this rank posts its next
              splits row, after its forward kernel (internode/splits.py).
"""

import triton
import triton.language as tl

from ..device.buffers import (
    EPOCH_DISPATCH,
    NET_FLAG,
    NET_RECV,
    NET_SEND,
    STAGE_X,
    STATUS,
    address_of,
    buffer_ptr,
    net_address_of,
    pe_of,
)
from ..device.groups import my_first
from ..device.rows import (
    ALL_ROWS,
    WORDS,
    compact_position,
    load_payload,
    on_my_node,
    other_node,
    push_meta,
    release_arrivals,
    store_scales,
    wire_sizes,
)
from ..device.tables import (
    DST_ROW,
    OWNER,
    STAGE_ROW,
    STEPS,
    entry_field,
    node_token_of,
    num_columns_of,
    part_begin,
    part_of_step,
    tokens_from_node_of,
    tokens_per_node_of,
)
from ..device.transport import put_signal
from ..device.waits import WAIT_NETWORK_ROWS, wait_flags
from ..spec import ep_kernel


@triton.jit
def _message_sizes(wire_bytes, KP: tl.constexpr):
    """Bytes of a message row up to its tables, and in all; layout.py has the same."""
    meta_offset = (wire_bytes + 15) // 16 * 16
    return meta_offset, meta_offset + 4 * KP * 4


@triton.jit
def _row_ptrs(base, rows, row_bytes, offset, DTYPE: tl.constexpr):
    """Pointers into message rows [block]: `offset` bytes into row `rows` of the buffer at address `base`."""
    return tl.multiple_of((base + rows * row_bytes + offset).to(tl.pointer_type(DTYPE)), 16)


@ep_kernel(
    x_ptr="*{WORD}",
    scale_ptr="*u8",
    entries_ptr="*i32",
    weights_ptr="*fp32",
    chunks_ptr="*i32",
    specialised=("row_words",),
    num_warps=16,
)
def internode_send_kernel(
    x_ptr,  # [T, row_words] words
    scale_ptr,  # [T, row bytes / 32] uint8, read with the payload MX
    entries_ptr,  # [F, T, K] int32 (device/tables.py)
    weights_ptr,  # [T, K] float32, read if HAS_WEIGHTS
    chunks_ptr,  # device/tables.py
    placement_ptr,  # device/tables.py
    state_ptr,
    tables_ptr,
    num_tokens,
    max_tokens,
    row_words,
    experts_per_rank,
    rank,
    num_ranks,
    ranks_per_node,
    PAYLOAD: tl.constexpr,  # device/rows.py
    HAS_WEIGHTS: tl.constexpr,
    TOPK: tl.constexpr,
    KP: tl.constexpr,
    BLOCK_T: tl.constexpr,  # tokens per chunk of `chunks`
    MAX_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    NETWORK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    if tl.load(state_ptr + STATUS) != 0:
        return
    epoch = tl.load(state_ptr + EPOCH_DISPATCH)
    my_node = rank // ranks_per_node
    send_base = address_of(tables_ptr, NET_SEND, num_ranks, rank)
    _, data_bytes, wire_bytes = wire_sizes(row_words, x_ptr.dtype.element_ty, PAYLOAD)
    meta_offset, row_bytes = _message_sizes(wire_bytes, KP)
    owner_ptr = entry_field(entries_ptr, OWNER, num_tokens, TOPK)
    dst_row_ptr = entry_field(entries_ptr, DST_ROW, num_tokens, TOPK)
    stage_row_ptr = entry_field(entries_ptr, STAGE_ROW, num_tokens, TOPK)
    num_columns = num_columns_of(num_ranks, experts_per_rank, ranks_per_node)
    node_token_ptr = node_token_of(chunks_ptr, tl.cdiv(num_tokens, BLOCK_T), num_columns)
    tokens_per_node_ptr = tokens_per_node_of(placement_ptr, num_ranks, experts_per_rank, ranks_per_node)
    offs = tl.arange(0, BLOCK_H)
    ks = tl.arange(0, KP)[None, :]
    num_items = (num_ranks // ranks_per_node - 1) * tl.cdiv(num_tokens, CHUNK)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        node, chunk = other_node(item, rank, num_ranks, ranks_per_node)
        tokens = tl.load(tokens_per_node_ptr + node)
        first = chunk * CHUNK
        if first < tokens:
            for start in range(0, CHUNK, ROWS):
                slot = first + start + tl.arange(0, ROWS)
                alive = slot < tokens
                token = tl.load(node_token_ptr + node.to(tl.int64) * num_tokens + slot, mask=alive, other=0)
                row = (node * max_tokens + slot).to(tl.int64)
                x_ptrs = x_ptr + token.to(tl.int64) * row_words
                scale_ptrs = scale_ptr + token.to(tl.int64) * (data_bytes // 32)
                for h in range(0, row_words, BLOCK_H):
                    data, scales = load_payload(x_ptrs, scale_ptrs, alive, h, row_words, PAYLOAD, BLOCK_H)
                    out_ptrs = _row_ptrs(send_base, row, row_bytes, 0, data.dtype)
                    mask = alive[:, None] & (h + offs < row_words)[None, :]
                    tl.store(out_ptrs[:, None] + h + offs[None, :], data, mask=mask)
                    if PAYLOAD != WORDS:
                        out_ptrs = _row_ptrs(send_base, row, row_bytes, data_bytes, tl.uint8)
                        store_scales(out_ptrs, alive, scales, h, row_words, data.dtype.primitive_bitwidth // 8)
                at = token[:, None] * TOPK + ks
                mask = alive[:, None] & (ks < TOPK)
                meta_ptrs = _row_ptrs(send_base, row, row_bytes, meta_offset, tl.int32)[:, None] + ks
                tl.store(meta_ptrs, tl.load(owner_ptr + at, mask=mask, other=-1), mask=mask)
                tl.store(meta_ptrs + KP, tl.load(dst_row_ptr + at, mask=mask, other=-1), mask=mask)
                tl.store(meta_ptrs + 2 * KP, tl.load(stage_row_ptr + at, mask=mask, other=-1), mask=mask)
                if HAS_WEIGHTS:
                    weight_ptrs = _row_ptrs(send_base, row, row_bytes, meta_offset, tl.float32)[:, None] + ks
                    tl.store(weight_ptrs + 3 * KP, tl.load(weights_ptr + at, mask=mask, other=0.0), mask=mask)
            peer = node * ranks_per_node + rank % ranks_per_node
            dest_row = tl.cast(my_node * max_tokens + first, tl.int64)
            source_row = (node * max_tokens + first).to(tl.int64)
            flag = net_address_of(tables_ptr, NET_FLAG, num_ranks, peer)
            put_signal(
                net_address_of(tables_ptr, NET_RECV, num_ranks, peer) + dest_row * row_bytes,
                send_base + source_row * row_bytes,
                tl.minimum(tokens - first, CHUNK).to(tl.int64) * row_bytes,
                flag + (my_node * MAX_CHUNKS + chunk).to(tl.int64) * 8,
                epoch,
                pe_of(tables_ptr, num_ranks, peer),
                NETWORK,
                BLOCK_H,
            )


@triton.jit
def _rows_before(
    base,
    end,  # slot behind a chunk
    tokens,
    first_row,  # message row of slot 0
    row_bytes,
    meta_offset,
    rank,
    ranks_per_node,
    LWP: tl.constexpr,
    TOPK: tl.constexpr,
    KP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """[LWP] the arrival row behind those of a chunk's tokens at each rank of this node, 0 where none goes there.

    Arrival rows of a source are in the order of its tokens: those of all earlier tokens lie before.
    """
    slot = end - CHUNK + tl.arange(0, CHUNK)
    ks = tl.arange(0, KP)[None, :]
    mask = ((slot >= 0) & (slot < tokens))[:, None] & (ks < TOPK)
    meta_ptrs = _row_ptrs(base, (first_row + slot).to(tl.int64), row_bytes, meta_offset, tl.int32)[:, None] + ks
    owner = tl.reshape(tl.load(meta_ptrs, mask=mask, other=-1), [CHUNK * KP])
    arrival = tl.reshape(tl.load(meta_ptrs + 2 * KP, mask=mask, other=-1), [CHUNK * KP])
    peer = rank - rank % ranks_per_node + tl.arange(0, LWP)
    there = (owner[:, None] == peer[None, :]) & (arrival >= 0)[:, None]
    return tl.max(tl.where(there, arrival[:, None] + 1, 0), axis=0)


@triton.jit
def _forward_rows(
    word_ptr,
    forward_ptr,
    tables_ptr,
    recv_base,
    row,  # [ROWS] message rows, int64
    alive,  # [ROWS]
    row_bytes,
    meta_offset,
    row_words,
    num_entries,
    stage_capacity,
    rank,
    num_ranks,
    ranks_per_node,
    HAS_WEIGHTS: tl.constexpr,
    REDUCED: tl.constexpr,
    TOPK: tl.constexpr,
    KP: tl.constexpr,
    LWP: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Push some rows to the ranks of this node that their tokens go to, say what they are, and note where they went."""
    ks = tl.arange(0, KP)[None, :]
    mask = alive[:, None] & (ks < TOPK)
    meta_ptrs = _row_ptrs(recv_base, row, row_bytes, meta_offset, tl.int32)[:, None] + ks
    owner = tl.load(meta_ptrs, mask=mask, other=-1)
    dst_row = tl.load(meta_ptrs + KP, mask=mask, other=-1)
    arrival = tl.load(meta_ptrs + 2 * KP, mask=mask, other=-1)
    weights = dst_row
    if HAS_WEIGHTS:
        weight_ptrs = _row_ptrs(recv_base, row, row_bytes, meta_offset, tl.float32)[:, None] + ks
        weights = tl.load(weight_ptrs + 3 * KP, mask=mask, other=0.0)
    here = (arrival >= 0) & on_my_node(owner, rank, ranks_per_node)
    push_meta(weights, tables_ptr, owner, dst_row, arrival, here, num_ranks, HAS_WEIGHTS, KP)
    here &= arrival < stage_capacity
    position = compact_position(here)
    if REDUCED:
        at = row[:, None] * TOPK + position
        tl.store(forward_ptr + at, tl.where(here, owner, -1), mask=mask)
        tl.store(forward_ptr + num_entries + at, tl.where(here, arrival, -1), mask=mask)
    else:
        at = row[:, None] * TOPK + ks
        tl.store(forward_ptr + at, owner, mask=mask)
        tl.store(forward_ptr + num_entries + at, dst_row, mask=mask)
    WORD: tl.constexpr = word_ptr.dtype.element_ty
    addrs = address_of(tables_ptr, STAGE_X, num_ranks, tl.where(here, owner, 0))
    addrs += arrival.to(tl.int64) * row_words * (WORD.primitive_bitwidth // 8)
    # All at once: behind the stores of one row, what is loaded for the next one would wait for memory each time.
    dests = ()
    for j in tl.static_range(TOPK if TOPK < LWP else LWP):
        dests += (tl.sum(tl.where(here & (position == j), addrs, 0), axis=1),)
    row_ptrs = _row_ptrs(recv_base, row, row_bytes, 0, WORD)
    offs = tl.arange(0, BLOCK_H)
    for h in range(0, row_words, BLOCK_H):
        in_row = (h + offs < row_words)[None, :]
        data = tl.load(row_ptrs[:, None] + h + offs[None, :], mask=alive[:, None] & in_row, other=0)
        for j in tl.static_range(len(dests)):
            used = dests[j] != 0
            if tl.sum(used.to(tl.int32)) > 0:
                dest = tl.multiple_of(dests[j].to(tl.pointer_type(WORD)), 16)
                tl.store(dest[:, None] + h + offs[None, :], data, mask=used[:, None] & in_row)


@ep_kernel(word_ptr="*{WORD}", forward_ptr="*i32", specialised=("row_words",), num_warps=16)
def internode_forward_kernel(
    word_ptr,  # any pointer to words of the payload: gives their type
    placement_ptr,  # device/tables.py
    forward_ptr,  # out [2, N, max_tokens, K] int32, what combine pulls for the tokens forwarded: ranks, and rows there
    state_ptr,
    tables_ptr,
    max_tokens,
    row_words,
    stage_capacity,
    experts_per_rank,
    rank,
    num_ranks,
    ranks_per_node,
    HAS_WEIGHTS: tl.constexpr,
    REDUCED: tl.constexpr,  # combine pulls arrival rows: without gaps, then -1; else output rows, in k order
    TOPK: tl.constexpr,
    KP: tl.constexpr,
    LWP: tl.constexpr,
    SENDERS: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP_CHUNKS: tl.constexpr,  # chunks for which a step is worth its release
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    epoch = tl.load(state_ptr + EPOCH_DISPATCH)
    recv_base = address_of(tables_ptr, NET_RECV, num_ranks, rank)
    _, _, wire_bytes = wire_sizes(row_words, word_ptr.dtype.element_ty, WORDS)
    meta_offset, row_bytes = _message_sizes(wire_bytes, KP)
    num_nodes = num_ranks // ranks_per_node
    num_entries = tl.cast(num_nodes, tl.int64) * max_tokens * TOPK
    one = tl.arange(0, 1)
    # After an expired wait the rows are not complete: without the flags the receivers report it as well.
    arrived = tl.load(state_ptr + STATUS) == 0
    for index in range(1, num_nodes):
        # The node whose neighbour I am sends to mine first, and so on.
        node = (rank // ranks_per_node - index + num_nodes) % num_nodes
        tokens = tl.load(tokens_from_node_of(placement_ptr, num_ranks, experts_per_rank) + node)
        flags_ptr = buffer_ptr(tables_ptr, NET_FLAG, num_ranks, rank, tl.int64) + node * MAX_CHUNKS
        num_chunks = tl.cdiv(tokens, CHUNK)
        num_steps = tl.minimum(tl.maximum(num_chunks // STEP_CHUNKS, 1), STEPS)
        for step in range(num_steps):
            begin = part_begin(part_of_step(step, num_steps), num_chunks)
            end = part_begin(part_of_step(step + 1, num_steps), num_chunks)
            for chunk in range(my_first(begin, 0), end, tl.num_programs(0)):
                if arrived:
                    flag = node * MAX_CHUNKS + chunk
                    arrived = wait_flags(flags_ptr + chunk + one, one == 0, epoch, state_ptr, WAIT_NETWORK_ROWS, flag)
                if arrived:
                    for start in range(0, CHUNK, ROWS):
                        slot = chunk * CHUNK + start + tl.arange(0, ROWS)
                        _forward_rows(
                            word_ptr,
                            forward_ptr,
                            tables_ptr,
                            recv_base,
                            (node * max_tokens + slot).to(tl.int64),
                            slot < tokens,
                            row_bytes,
                            meta_offset,
                            row_words,
                            num_entries,
                            stage_capacity,
                            rank,
                            num_ranks,
                            ranks_per_node,
                            HAS_WEIGHTS,
                            REDUCED,
                            TOPK,
                            KP,
                            LWP,
                            BLOCK_H,
                        )
            rows = tl.full([LWP], ALL_ROWS, tl.int32)
            reached = tl.cast(STEPS, tl.int32)
            if (step + 1 < num_steps) & arrived:
                last = end - 1
                flag = node * MAX_CHUNKS + last
                arrived = wait_flags(flags_ptr + last + one, one == 0, epoch, state_ptr, WAIT_NETWORK_ROWS, flag)
                if arrived:
                    rows = _rows_before(
                        recv_base,
                        end * CHUNK,
                        tokens,
                        node * max_tokens,
                        row_bytes,
                        meta_offset,
                        rank,
                        ranks_per_node,
                        LWP,
                        TOPK,
                        KP,
                        CHUNK,
                    )
                    reached = tl.cast(step + 1, tl.int32)
            if arrived:
                release_arrivals(
                    tables_ptr, state_ptr, rank, num_ranks, ranks_per_node, reached, rows, node, LWP, SENDERS
                )
