"""Inter-node dispatch: a token crosses the network once per destination node, to the rank there with the
same local rank (the forwarder), which pushes it to the ranks of its node.

Protocol      1 send: pack the rows for one node, CHUNK tokens at a time, into net_send: payload, owners,
              output rows, staging rows, weights
              2 send: put the chunk into net_recv of the forwarder, with its flag = epoch
              3 forward: wait for the flag of a chunk, push its rows to the ranks of this node exactly as
              the owner of the token would (device/arrivals.py), keep its tables for combine
              4 forward: after each step of several chunks (steps as in intranode/dispatch.py), raise arrive_flag[node,
              my local rank, program] on every rank of this node. The flag's count of staging rows comes from the last
              chunk of the step; if no token of that chunk goes to a rank, its count is 0, and it waits for the next
              step
              If the dispatch is held (device/host_read.py), both kernels do nothing, and are launched again
Layout        net_send, net_recv [N, max_tokens, row_bytes], by the other node, then by the source's slot;
              a message row is payload (padded to 16 bytes), then 4 x KP int32; net_flag [N, MAX_CHUNKS] int64.
Memory order  2: put-with-signal orders data before flag. 3 acquires. 4 is one release per program and step.
Progress      Send waits for nobody. Forward waits for other ranks' sends, which precede their waits. Send may run
              concurrently with this rank's own push and forward, if it is launched first and all fit on the GPU.
Replay        net_send is free when the put returns; net_recv is free again when this rank posts its next
              splits row, after its forward kernel (internode/splits.py).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.arrivals import ALL_ROWS, Senders, meta_addresses, push_meta, release_arrivals
from ..device.buffers import (
    EPOCH_DISPATCH,
    NET_FLAG,
    NET_RECV,
    NET_SEND,
    STAGE_X,
    STATUS,
    address_of,
    own_buffer,
)
from ..device.groups import my_first
from ..device.host_read import is_held
from ..device.job import Job, first_local, my_node, num_nodes, on_my_node, other_node, state_at
from ..device.payload import (
    WORDS,
    Choices,
    Source,
    Tile,
    Weights,
    load_payload,
    load_row_tile,
    store_scales,
    wire_of,
)
from ..device.post import Chunk, Network, put_chunk
from ..device.pull import compact_position
from ..device.tables import (
    DST_ROW,
    OWNER,
    SENT_EVENLY,
    STAGE_ROW,
    STEPS,
    Entries,
    entry_field,
    node_token_of,
    part_begin,
    part_of_step,
    sums_from_of,
    tokens_from_node_of,
    tokens_per_node_of,
)
from ..device.waits import WAIT_NETWORK_ROWS, wait_flags
from ..spec import ep_kernel


class Messages(NamedTuple):
    """Message rows in a buffer [N, max_tokens, row_bytes].

    Attributes:
        base: int64 address of the buffer.
        row_bytes: int64, bytes of a message row.
        meta_offset: int64, offset in a message row of its tables [4, KP]: owners, output rows, staging rows, weights.
    """

    base: Any
    row_bytes: Any
    meta_offset: Any


class ForwardedRows(NamedTuple):
    """Rows received from other nodes.

    Attributes:
        word_ptr: any pointer to words of the payload; only its type is used.
        row_words: words of a row.
        stage_capacity: staging rows of a rank.
        HAS_WEIGHTS: messages carry routing weights.
    """

    word_ptr: Any
    row_words: Any
    stage_capacity: Any
    HAS_WEIGHTS: tl.constexpr


class Chunks(NamedTuple):
    """Chunks of the tokens of a node.

    Attributes:
        MAX_CHUNKS: most chunks of a node, a power of two.
        CHUNK: tokens of a chunk.
        STEP_CHUNKS: chunks for which a step is worth its release.
    """

    MAX_CHUNKS: tl.constexpr
    CHUNK: tl.constexpr
    STEP_CHUNKS: tl.constexpr


class Pulls(NamedTuple):
    """Tables from which combine sums the rows of forwarded tokens.

    Attributes:
        forward_ptr: [2, N, max_tokens, K] int32: ranks, and rows there; of reduced rows the ranks that sum, and rows of
            their sums in this rank's combine buffer.
        num_entries: int64, entries of each of the two tables.
        sums_from_ptr: [LW] for one node, from staging rows at each rank of this node to these rows (device/tables.py).
    """

    forward_ptr: Any
    num_entries: Any
    sums_from_ptr: Any


@triton.jit
def messages_at(base, wire_bytes, KP: tl.constexpr):
    """Messages with rows of `wire_bytes` in the buffer at address `base`; context/layout.py has the same sizes."""
    meta_offset = (wire_bytes + 15) // 16 * 16
    return Messages(base, meta_offset + 4 * KP * 4, meta_offset)


@triton.jit
def _row_ptrs(messages, rows, offset, DTYPE: tl.constexpr):
    """Pointers into message rows [block], `offset` bytes after their start."""
    return tl.multiple_of((messages.base + rows * messages.row_bytes + offset).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _meta_ptrs(messages, rows, TABLE: tl.constexpr, DTYPE: tl.constexpr, KP: tl.constexpr):
    """Pointers [KP, block] to one of the tables of message rows: OWNERS, DST_ROWS, ARRIVALS or WEIGHTS."""
    first = _row_ptrs(messages, rows, messages.meta_offset, DTYPE)
    return first[None, :] + tl.arange(0, KP)[:, None] + TABLE * KP


OWNERS = tl.constexpr(0)
DST_ROWS = tl.constexpr(1)
ARRIVALS = tl.constexpr(2)
WEIGHTS = tl.constexpr(3)


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
    source: Source,
    entries: Entries,
    routed: Weights,  # [T, K]
    chunks_ptr,  # device/tables.py
    placement_ptr,  # device/tables.py
    job: Job,
    KP: tl.constexpr,
    BLOCK_T: tl.constexpr,  # tokens per chunk of `chunks`
    network: Network,
    tile: Tile,
):
    if (tl.load(state_at(job, STATUS)) != 0) | is_held(job, placement_ptr):
        return
    epoch = tl.load(state_at(job, EPOCH_DISPATCH))
    wire = wire_of(source.row_words, source.x_ptr.dtype.element_ty, source.PAYLOAD)
    messages = messages_at(address_of(job, NET_SEND, job.rank), wire.row_bytes, KP)
    owner_ptr = entry_field(entries, OWNER)
    dst_row_ptr = entry_field(entries, DST_ROW)
    stage_row_ptr = entry_field(entries, STAGE_ROW)
    node_token_ptr = node_token_of(job, chunks_ptr, tl.cdiv(entries.num_tokens, BLOCK_T))
    tokens_per_node_ptr = tokens_per_node_of(job, placement_ptr)
    offs = tl.arange(0, tile.BLOCK_H)
    ks = tl.arange(0, KP)[:, None]
    num_items = (num_nodes(job) - 1) * tl.cdiv(entries.num_tokens, network.CHUNK)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        node, chunk = other_node(job, item)
        tokens = tl.load(tokens_per_node_ptr + node)
        first = chunk * network.CHUNK
        if first < tokens:
            for start in range(0, network.CHUNK, tile.ROWS):
                slot = first + start + tl.arange(0, tile.ROWS)
                alive = slot < tokens
                token = tl.load(node_token_ptr + node.to(tl.int64) * entries.num_tokens + slot, mask=alive, other=0)
                row = (node * job.max_tokens + slot).to(tl.int64)
                x_ptrs = source.x_ptr + token.to(tl.int64) * source.row_words
                scale_ptrs = source.scale_ptr + token.to(tl.int64) * (wire.data_bytes // 32)
                for h in range(0, source.row_words, tile.BLOCK_H):
                    data, scales = load_payload(
                        x_ptrs, scale_ptrs, alive, h, source.row_words, source.PAYLOAD, tile.BLOCK_H
                    )
                    out_ptrs = _row_ptrs(messages, row, 0, data.dtype)
                    mask = alive[:, None] & (h + offs < source.row_words)[None, :]
                    tl.store(out_ptrs[:, None] + h + offs[None, :], data, mask=mask)
                    if source.PAYLOAD != WORDS:
                        out_ptrs = _row_ptrs(messages, row, wire.data_bytes, tl.uint8)
                        store_scales(out_ptrs, alive, scales, h, source.row_words, data.dtype.primitive_bitwidth // 8)
                at = token[None, :] * entries.TOPK + ks
                mask = alive[None, :] & (ks < entries.TOPK)
                owner = tl.load(owner_ptr + at, mask=mask, other=-1)
                tl.store(_meta_ptrs(messages, row, OWNERS, tl.int32, KP), owner, mask=mask)
                dst_row = tl.load(dst_row_ptr + at, mask=mask, other=-1)
                tl.store(_meta_ptrs(messages, row, DST_ROWS, tl.int32, KP), dst_row, mask=mask)
                arrival = tl.load(stage_row_ptr + at, mask=mask, other=-1)
                tl.store(_meta_ptrs(messages, row, ARRIVALS, tl.int32, KP), arrival, mask=mask)
                if routed.HAS_WEIGHTS:
                    weights = tl.load(routed.weights_ptr + at, mask=mask, other=0.0)
                    tl.store(_meta_ptrs(messages, row, WEIGHTS, tl.float32, KP), weights, mask=mask)
            put_chunk(
                job,
                Chunk(
                    node, chunk, first, tl.minimum(tokens - first, network.CHUNK), job.max_tokens, messages.row_bytes
                ),
                epoch,
                NET_SEND,
                NET_RECV,
                NET_FLAG,
                network,
                tile.BLOCK_H,
            )


@triton.jit
def _rows_before(
    job,
    messages,
    end,  # slot past the chunk
    tokens,
    first_row,  # message row of slot 0
    choices,
    LWP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """[LWP] the staging row past those of a chunk's tokens at each rank of this node; 0 if no token goes there.

    Staging rows of a source are in the order of its tokens: the rows of all earlier tokens lie before.
    """
    slot = end - CHUNK + tl.arange(0, CHUNK)
    mask = ((slot >= 0) & (slot < tokens))[None, :] & (tl.arange(0, choices.KP) < choices.TOPK)[:, None]
    row = (first_row + slot).to(tl.int64)
    owner = tl.load(_meta_ptrs(messages, row, OWNERS, tl.int32, choices.KP), mask=mask, other=-1)
    arrival = tl.load(_meta_ptrs(messages, row, ARRIVALS, tl.int32, choices.KP), mask=mask, other=-1)
    owner = tl.reshape(owner, [CHUNK * choices.KP])
    arrival = tl.reshape(arrival, [CHUNK * choices.KP])
    peer = first_local(job) + tl.arange(0, LWP)
    there = (owner[:, None] == peer[None, :]) & (arrival >= 0)[:, None]
    return tl.max(tl.where(there, arrival[:, None] + 1, 0), axis=0)


@triton.jit
def _note_pulls(
    job,
    pulls,
    row,
    owner,
    arrival,
    dst_row,
    here,
    mask,
    REDUCED: tl.constexpr,
    TOPK: tl.constexpr,
):
    """Store for combine where the rows of forwarded tokens will be: [KP, n] ranks, and rows."""
    if REDUCED:
        at = row[None, :] * TOPK + compact_position(here)
        tl.store(pulls.forward_ptr + at, tl.where(here, owner, -1), mask=mask)
        sum_row = arrival + tl.load(pulls.sums_from_ptr + owner - first_local(job), mask=here, other=0)
        tl.store(pulls.forward_ptr + pulls.num_entries + at, tl.where(here, sum_row, -1), mask=mask)
    else:
        at = row[None, :] * TOPK + tl.arange(0, here.shape[0])[:, None]
        tl.store(pulls.forward_ptr + at, owner, mask=mask)
        tl.store(pulls.forward_ptr + pulls.num_entries + at, dst_row, mask=mask)


@triton.jit
def _push_rows(
    job,
    messages,
    row,  # [ROWS] message rows, int64
    alive,  # [ROWS]
    owner,  # [KP, ROWS]
    arrival,
    here,  # true at one entry of each rank that the token goes to
    rows,  # ForwardedRows
    MOST: tl.constexpr,  # most ranks that a token goes to
    BLOCK_H: tl.constexpr,
):
    """Store the data of message rows to staging rows of the ranks of this node."""
    WORD: tl.constexpr = rows.word_ptr.dtype.element_ty
    row_words = rows.row_words
    addrs = address_of(job, STAGE_X, tl.where(here, owner, 0))
    addrs += arrival.to(tl.int64) * row_words * (WORD.primitive_bitwidth // 8)
    position = compact_position(here)
    # Compute all addresses first: after the stores of one row, loads for the next would wait for memory each time.
    dests = ()
    for j in tl.static_range(MOST):
        dests += (tl.sum(tl.where(here & (position == j), addrs, 0), axis=0),)
    row_ptrs = _row_ptrs(messages, row, 0, WORD)
    offs = tl.arange(0, BLOCK_H)
    for h in range(0, row_words, BLOCK_H):
        in_row = (h + offs < row_words)[None, :]
        data = load_row_tile(row_ptrs, alive, h, row_words, BLOCK_H)
        for j in tl.static_range(len(dests)):
            used = dests[j] != 0
            if tl.sum(used.to(tl.int32)) > 0:
                dest = tl.multiple_of(dests[j].to(tl.pointer_type(WORD)), 16)
                tl.store(dest[:, None] + h + offs[None, :], data, mask=used[:, None] & in_row)


@triton.jit
def _forward_rows(
    job,
    messages,
    rows,  # ForwardedRows
    pulls,
    row,  # [ROWS] message rows, int64
    alive,  # [ROWS]
    REDUCED: tl.constexpr,
    choices,
    LWP: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Push some rows and their stage_meta to the ranks of this node that their tokens go to; store where they went."""
    mask = alive[None, :] & (tl.arange(0, choices.KP) < choices.TOPK)[:, None]
    owner = tl.load(_meta_ptrs(messages, row, OWNERS, tl.int32, choices.KP), mask=mask, other=-1)
    dst_row = tl.load(_meta_ptrs(messages, row, DST_ROWS, tl.int32, choices.KP), mask=mask, other=-1)
    arrival = tl.load(_meta_ptrs(messages, row, ARRIVALS, tl.int32, choices.KP), mask=mask, other=-1)
    weights = dst_row
    if rows.HAS_WEIGHTS:
        weights = tl.load(_meta_ptrs(messages, row, WEIGHTS, tl.float32, choices.KP), mask=mask, other=0.0)
    here = (arrival >= 0) & on_my_node(job, owner)
    addrs = meta_addresses(job, owner, here)
    push_meta(addrs, weights, owner, dst_row, arrival, here, rows.HAS_WEIGHTS, choices.KP)
    here &= arrival < rows.stage_capacity
    MOST: tl.constexpr = choices.TOPK if choices.TOPK < LWP else LWP
    _push_rows(job, messages, row, alive, owner, arrival, here, rows, MOST, BLOCK_H)
    _note_pulls(job, pulls, row, owner, arrival, dst_row, here, mask, REDUCED, choices.TOPK)


@ep_kernel(word_ptr="*{WORD}", forward_ptr="*i32", specialised=("row_words",), num_warps=16)
def internode_forward_kernel(
    rows: ForwardedRows,
    placement_ptr,  # device/tables.py
    forward_ptr,  # out [2, N, max_tokens, K] int32, rows that combine sums for forwarded tokens (`Pulls`)
    job: Job,
    REDUCED: tl.constexpr,  # combine adds sums: without gaps, then -1; else output rows, in k order
    choices: Choices,
    senders: Senders,
    chunks: Chunks,
    tile: Tile,
):
    if is_held(job, placement_ptr):
        return
    epoch = tl.load(state_at(job, EPOCH_DISPATCH))
    WORD: tl.constexpr = rows.word_ptr.dtype.element_ty
    wire = wire_of(rows.row_words, WORD, WORDS)
    messages = messages_at(address_of(job, NET_RECV, job.rank), wire.row_bytes, choices.KP)
    nodes = num_nodes(job)
    num_entries = tl.cast(nodes, tl.int64) * job.max_tokens * choices.TOPK
    one = tl.arange(0, 1)
    # After an expired wait the rows are incomplete: raise no flags, so that the receivers report it as well.
    arrived = tl.load(state_at(job, STATUS)) == 0
    for index in range(1, nodes):
        # The previous node sends to this one first (`other_node`), then the node before it, and so on.
        node = (my_node(job) - index + nodes) % nodes
        tokens = tl.load(tokens_from_node_of(job, placement_ptr) + node)
        sums_from_ptr = sums_from_of(job, placement_ptr) + node * job.ranks_per_node
        pulls = Pulls(forward_ptr, num_entries, sums_from_ptr)
        flags_ptr = own_buffer(job, NET_FLAG, tl.int64) + node * chunks.MAX_CHUNKS
        num_chunks = tl.cdiv(tokens, chunks.CHUNK)
        num_steps = tl.minimum(tl.maximum(num_chunks // chunks.STEP_CHUNKS, 1), STEPS)
        for step in range(num_steps):
            begin = part_begin(part_of_step(step, num_steps, SENT_EVENLY), num_chunks)
            end = part_begin(part_of_step(step + 1, num_steps, SENT_EVENLY), num_chunks)
            for chunk in range(my_first(begin, 0), end, tl.num_programs(0)):
                if arrived:
                    flag = node * chunks.MAX_CHUNKS + chunk
                    arrived = wait_flags(job, flags_ptr + chunk + one, one == 0, epoch, WAIT_NETWORK_ROWS, flag)
                if arrived:
                    for start in range(0, chunks.CHUNK, tile.ROWS):
                        slot = chunk * chunks.CHUNK + start + tl.arange(0, tile.ROWS)
                        _forward_rows(
                            job,
                            messages,
                            rows,
                            pulls,
                            (node * job.max_tokens + slot).to(tl.int64),
                            slot < tokens,
                            REDUCED,
                            choices,
                            senders.LWP,
                            tile.BLOCK_H,
                        )
            reach = tl.full([senders.LWP], ALL_ROWS, tl.int32)
            reached = tl.cast(STEPS, tl.int32)
            if (step + 1 < num_steps) & arrived:
                last = tl.maximum(end - 1, 0)  # a step may have no chunk
                flag = node * chunks.MAX_CHUNKS + last
                arrived = wait_flags(job, flags_ptr + last + one, one == 0, epoch, WAIT_NETWORK_ROWS, flag)
                if arrived:
                    first_row = node * job.max_tokens
                    reach = _rows_before(
                        job, messages, end * chunks.CHUNK, tokens, first_row, choices, senders.LWP, chunks.CHUNK
                    )
                    reached = tl.cast(step + 1, tl.int32)
            if arrived:
                release_arrivals(job, reached, reach, node, senders)
