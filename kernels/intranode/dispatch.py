"""Intra-node dispatch: push every token once to each rank of this node that owns one of its experts, and
expand the received rows into expert-major rows.

Protocol      1 push, in steps of consecutive tokens: store x[token] at its addresses in stage_x of the destinations.
              stage_meta of these ranks already describes the token's assignments (compute/routing.py). Rows that the
              rank sends to itself may have no address
              2 push, after each step: raise arrive_flag[my node, my local rank, program] on every rank of the node;
              with fewer programs than flags, further ones, too
              (copy engines may do step 1, with all rows of a rank, whoever gets them, and step 2, once; stage_source of
              the destinations then says where the rows lie: device/arrivals.py)
              3 expand: lay out the own rows from where the caller has them, unless they are pushed, too (OwnRows in
              device/arrivals.py); then wait until all programs of all local ranks have finished the next step; after
              their last step, with several nodes, wait likewise for the steps of the forward kernels
              (internode/dispatch.py)
              4 expand: copy the staging rows of the step to the output rows of their assignments, then repeat from 3.
              Where rows are copied in bulk, weights and copy_rows of all rows of this node are stored with the first
              step, when stage_meta is there.
              MXFP8 rows may be converted on the way, once for all assignments (device/landing.py). Rows that are not
              may be kept, too, as they arrived, for a backward pass that lays them out again. The padding rows,
              and weights past the last segment, are zeroed before. If the dispatch is held, or the rows do not fit
              recv_x, expand copies nothing, and is launched again (device/host_read.py)
Layout        stage_x [capacity, row on the wire (device/payload.py)], by source rank, then by token; stage_meta
              [W * max_tokens, 2 * KP]; kept [C, row], by staging row;
              recv_x [R, row], recv_scale [R, row / 32] or [R], expert-major, segments aligned; arrive_flag
              [N, LW, SENDERS] int64, by the node of the tokens, then by the rank that pushed them here.
Memory order  2 is one system-scope release per program and step, after a block barrier, and covers all stores of the
              program so far; its further flags follow without one. 3 acquires all flags. A release per row cuts the
              bandwidth to less than a third (78 against 284 GB/s at 16 programs, a prototype on 8 H200). Rows may be
              copied in bulk (device/bulk.py): each thread that started such stores waits for their end before 2, and a
              fence lets the loads of 4 see what 3 acquired.
              Copy engines copy the flags after the rows, on the same stream.
Progress      Push waits for nobody. Expand waits only for other ranks' pushes and forwards; its grid is independent
              of theirs. It may run concurrently with this rank's own push and forward, if those are launched first;
              launched early, it starts when all programs of the push have, and ends after them (device/early.py).
Replay        stage_x is free again when this rank posts its next splits row (internode/splits.py). Flags and staging
              rows outlive expand, so it may run again for the same dispatch, as long as the caller's rows are the same.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device import codes
from ..device.arrivals import (
    ALL_ROWS,
    Arrivals,
    OwnRows,
    Senders,
    arrived_rows,
    bytes_of_rows,
    described_rows,
    is_described,
    own_flags,
    own_rows,
    place_of,
    release_arrivals,
    rows_from_there,
    sources_of,
    stage_sources,
    wait_arrivals,
)
from ..device.buffers import STAGE_META, STATUS, own_buffer
from ..device.bulk import (
    LANES,
    Ring,
    await_row,
    begin_rows,
    close_ring,
    end_row,
    filled_bytes,
    load_row,
    open_ring,
    store_row,
    wait_left,
    wait_stored,
)
from ..device.bulk_arrivals import copy_arrived
from ..device.early import await_previous, let_next_start
from ..device.groups import my_first
from ..device.host_read import is_held
from ..device.job import Job, is_local, my_node, num_nodes, state_at
from ..device.landing import BLOCK_WORDS, block_words, land_words, load_block_scales
from ..device.mxfp8 import scale_value
from ..device.payload import (
    MX,
    WORDS,
    Choices,
    CopyTile,
    Output,
    Source,
    Tile,
    fill_rest,
    load_payload,
    load_staged_tile,
    staged_rows,
    store_landed,
    store_scales,
    store_staged_tile,
    wire_of,
)
from ..device.pull import fewer
from ..device.tables import (
    STEPS,
    expert_offsets_of,
    most_steps,
    num_recv_of,
    part_begin,
    part_of_step,
    step_rows_of,
)
from ..spec import ep_kernel

LANDING_MX = tl.constexpr(codes.LANDING_MX)
LANDING_ROW = tl.constexpr(codes.LANDING_ROW)
LANDING_BF16 = tl.constexpr(codes.LANDING_BF16)
_ITEMS = tl.constexpr(4)
"""Rows whose weights and copies are stored at a time, where the rows are copied in bulk."""


class Landing(NamedTuple):
    """Form of the output rows.

    Attributes:
        copy_rows_ptr: out [C, K] int32, output rows of each staging row; written if KEEP_COPY_ROWS.
        kept_ptr: out [C, row bytes], staging rows as they arrived; written if KEEP_ROWS, which goes with LANDING_WORDS.
        LANDING: LANDING_* (device/codes.py).
        HAS_WEIGHTS: rows have routing weights.
        HAS_PADDING: experts' segments are padded with rows of zeros.
        KEEP_COPY_ROWS: write copy_rows.
        KEEP_ROWS: write kept.
    """

    copy_rows_ptr: Any
    kept_ptr: Any
    LANDING: tl.constexpr
    HAS_WEIGHTS: tl.constexpr
    HAS_PADDING: tl.constexpr
    KEEP_COPY_ROWS: tl.constexpr
    KEEP_ROWS: tl.constexpr


class Chunks(NamedTuple):
    """Chunks of tokens, in which the steps of a push are counted.

    Attributes:
        sent: where the steps of this push end, SENT_* (device/codes.py).
        BLOCK_T: tokens of a chunk.
        STEP_CHUNKS: chunks for which a step is worth its release.
    """

    sent: Any
    BLOCK_T: tl.constexpr
    STEP_CHUNKS: tl.constexpr


class Room(NamedTuple):
    """Rows for which there is memory.

    Attributes:
        num_rows: output rows allocated; static buffers have rows past the last segment.
        stage_capacity: rows of stage_x.
    """

    num_rows: Any
    stage_capacity: Any


@triton.jit
def _push_tiles(source, push_addrs_ptr, begin, end, TOPK: tl.constexpr, MOST: tl.constexpr, tile):
    """Store this program's share of some rows at their addresses. MOST: ranks of this node that a token goes to."""
    data_bytes = wire_of(source.row_words, source.x_ptr.dtype.element_ty, source.PAYLOAD).data_bytes
    offs = tl.arange(0, tile.BLOCK_H)
    for number in range(my_first(begin // tile.ROWS, 0), tl.cdiv(end, tile.ROWS), tl.num_programs(0)):
        token = number * tile.ROWS + tl.arange(0, tile.ROWS)
        alive = token < end
        # Load all addresses first: after the stores of one row, the next load would wait for memory each time.
        addrs = ()
        for k in tl.static_range(MOST):
            addrs += (tl.load(push_addrs_ptr + token.to(tl.int64) * TOPK + k, mask=alive, other=0),)
        for h in range(0, source.row_words, tile.BLOCK_H):
            in_row = (h + offs < source.row_words)[None, :]
            data, scales = load_payload(
                source.x_ptr + token.to(tl.int64) * source.row_words,
                source.scale_ptr + token.to(tl.int64) * (data_bytes // 32),
                alive,
                h,
                source.row_words,
                source.PAYLOAD,
                tile.BLOCK_H,
            )
            for k in tl.static_range(MOST):
                addr = addrs[k]
                here = addr != 0
                if tl.sum(here.to(tl.int32)) > 0:
                    dest = tl.multiple_of(addr.to(tl.pointer_type(data.dtype)), 16)
                    tl.store(dest[:, None] + h + offs[None, :], data, mask=here[:, None] & in_row)
                    if source.PAYLOAD != WORDS:
                        dest = tl.multiple_of((addr + data_bytes).to(tl.pointer_type(tl.uint8)), 16)
                        store_scales(dest, here, scales, h, source.row_words, data.dtype.primitive_bitwidth // 8)


@triton.jit
def _before(token):
    """Number of this program's rows before a token, if token t belongs to program t modulo the programs."""
    return tl.cdiv(tl.maximum(token - tl.program_id(0), 0), tl.num_programs(0))


@triton.jit
def _own_row(source, token, ring):
    """Addresses of the row of a token of this rank, and of its scales, if they are apart."""
    token = token.to(tl.int64)
    DATA: tl.constexpr = 32 * ring.SCALE_BYTES if ring.SCALE_BYTES > 0 else ring.ROW_BYTES
    return source.x_ptr.to(tl.int64) + token * DATA, source.scale_ptr.to(tl.int64) + token * ring.SCALE_BYTES


@triton.jit
def _load_own(source, ring, base, n, num_tokens):
    """Start to load row n of this program, if there is one."""
    token = tl.program_id(0) + n * tl.num_programs(0)
    if token < num_tokens:
        row, scales = _own_row(source, token, ring)
        load_row(ring, base, n, row, scales, ring.SCALE_BYTES > 0, True)


@triton.jit
def _push_rows(source, push_addrs_ptr, begin, end, num_tokens, TOPK: tl.constexpr, MOST: tl.constexpr, ring, base):
    """`_push_tiles` by bulk copies. Loads rows of the next step, too."""
    lanes = tl.arange(0, LANES)
    for n in range(_before(begin), _before(end)):
        token = tl.program_id(0) + n * tl.num_programs(0)
        addrs = tl.load(push_addrs_ptr + token.to(tl.int64) * TOPK + lanes, mask=lanes < MOST, other=0)
        row, scales = _own_row(source, token, ring)
        await_row(ring, base, n)
        store_row(ring, base, n, row, scales, ring.SCALE_BYTES > 0, addrs, 0, ring.ROW_BYTES, True)
        end_row()
        wait_left(1)
        _load_own(source, ring, base, n + ring.SLOTS - 1, num_tokens)
    wait_stored()


@ep_kernel(x_ptr="*{WORD}", scale_ptr="*u8", push_addrs_ptr="*i64", specialised=("row_words",), num_warps=None)
def dispatch_push_kernel(
    source: Source,
    push_addrs_ptr,  # [T, K] int64, addresses of staging rows, 0 = none (compute/routing.py)
    placement_ptr,  # device/tables.py
    job: Job,
    num_tokens,
    TOPK: tl.constexpr,
    senders: Senders,
    chunks: Chunks,
    tile: Tile,
    ring: Ring,
):
    base = open_ring(ring)
    let_next_start()
    if ring.SLOTS > 0:
        # The first rows come while this program looks where they go.
        begin_rows(ring, base)
        for n in tl.static_range(ring.SLOTS - 1):
            _load_own(source, ring, base, n, num_tokens)
    if (tl.load(state_at(job, STATUS)) != 0) | is_held(job, placement_ptr):
        if ring.SLOTS > 0:
            for n in tl.static_range(ring.SLOTS - 1):
                if tl.program_id(0) + n * tl.num_programs(0) < num_tokens:
                    await_row(ring, base, n)
        return
    step_rows_ptr = step_rows_of(job, placement_ptr)
    local = tl.arange(0, senders.LWP)
    MOST: tl.constexpr = fewer(TOPK, senders.LWP)  # ranks of this node that a token goes to
    num_chunks = tl.cdiv(num_tokens, chunks.BLOCK_T)
    num_steps = tl.minimum(tl.maximum(num_chunks // chunks.STEP_CHUNKS, 1), most_steps(chunks.sent))
    for step in range(num_steps):
        # Not carried from step to step: Triton 3.6 and 3.7 lose what they only need as a bound of an inner loop.
        begin = part_begin(part_of_step(step, num_steps, chunks.sent), num_chunks) * chunks.BLOCK_T
        next_part = part_of_step(step + 1, num_steps, chunks.sent)
        end = tl.minimum(part_begin(next_part, num_chunks) * chunks.BLOCK_T, num_tokens)
        if ring.SLOTS > 0:
            _push_rows(source, push_addrs_ptr, begin, end, num_tokens, TOPK, MOST, ring, base)
        else:
            _push_tiles(source, push_addrs_ptr, begin, end, TOPK, MOST, tile)
        # With fewer than STEPS steps, the flag jumps to STEPS at the last one.
        more = tl.cast(step + 1, tl.int32) < num_steps
        mask = is_local(job, local) & more
        counts = tl.load(step_rows_ptr + next_part * job.ranks_per_node + local, mask=mask, other=ALL_ROWS)
        reached = tl.where(more, step + 1, STEPS)
        release_arrivals(job, reached, counts, my_node(job), senders)


@triton.jit
def _copy_tiles(
    out,
    source_ptr,  # bytes of row 0 of the source
    copies,  # per k [ROWS] output rows, -1 = none
    row,  # [ROWS] staging rows
    at,  # [ROWS] rows of the source
    here,  # [ROWS] rows that arrived
    landing,
    tile,
):
    """Copy rows, unconverted, to the output rows of their assignments, and to the rows to keep."""
    WORD: tl.constexpr = out.recv_x_ptr.dtype.element_ty
    HAS_SCALES: tl.constexpr = landing.LANDING == LANDING_MX
    wire = wire_of(out.row_words, WORD, MX if HAS_SCALES else WORDS)
    row_ptrs, _ = staged_rows(source_ptr, at, wire, WORD)
    for number in tl.static_range(tile.TILES):
        h = number * tile.BLOCK_H
        words = load_staged_tile(row_ptrs, here, h, out.row_words, HAS_SCALES, tile.BLOCK_H)
        for k in tl.static_range(len(copies)):
            # Most k have no assignment here: skip computing their addresses.
            if tl.max(copies[k]) >= 0:
                store_staged_tile(out, copies[k], words, h, HAS_SCALES)
        if landing.KEEP_ROWS:
            kept_ptr = landing.kept_ptr.to(tl.pointer_type(WORD))
            kept = Output(kept_ptr, out.recv_scale_ptr, out.recv_weights_ptr, out.row_words)
            store_staged_tile(kept, tl.where(here, row, -1), words, h, False)


@triton.jit
def _land_tiles(
    out,  # words are int32 or int64, one per four elements
    source_ptr,  # this, `copies` and `here` as in `_copy_tiles`
    copies,
    row,  # [ROWS] rows of the source
    here,
    LANDING: tl.constexpr,
    tile,
):
    """Convert MXFP8 rows, and store them to the output rows of their assignments. Returns each row's largest scale
    byte."""
    BLOCKS: tl.constexpr = tile.BLOCK_H // BLOCK_WORDS
    row_words = out.row_words
    row_ptrs, scale_ptrs = staged_rows(source_ptr, row, wire_of(row_words, tl.int32, MX), tl.int32)
    source = row_ptrs[:, None, None]
    # Start loading the first tile before anything waits for the scales of the whole row.
    at, in_row = block_words(0, row_words, BLOCKS)
    words = tl.load(source + at, mask=here[:, None, None] & in_row, other=0, eviction_policy="evict_first")
    scales = ()
    for number in tl.static_range(tile.TILES):
        scales += (load_block_scales(scale_ptrs, here, number * tile.BLOCK_H, row_words, BLOCKS),)
    largest = tl.zeros(row.shape, tl.int32)
    for number in tl.static_range(tile.TILES):
        largest = tl.maximum(largest, tl.max(scales[number], axis=1))
    # Rows are whole blocks; this tells the compiler that they begin at multiples of 16 bytes.
    row_words = row_words // BLOCK_WORDS * BLOCK_WORDS
    for number in tl.static_range(tile.TILES):
        if number > 0:
            at, in_row = block_words(number * tile.BLOCK_H, row_words, BLOCKS)
            words = tl.load(source + at, mask=here[:, None, None] & in_row, other=0, eviction_policy="evict_first")
        # Convert once for all assignments.
        landed = land_words(words, scales[number], largest, LANDING)
        for k in tl.static_range(len(copies)):
            dst = copies[k]
            # bfloat16 changes its layout before the stores; without branches it does so once for all k.
            if LANDING == LANDING_BF16 or tl.max(dst) >= 0:
                dest = out.recv_x_ptr + dst.to(tl.int64)[:, None, None] * row_words + at
                store_landed(dest, landed, (dst >= 0)[:, None, None] & in_row)
    return largest


@triton.jit
def _expand_rows(
    job,
    out,
    arrived,  # ArrivedRows
    arrivals,
    own,  # OwnRows: `arrived` are these rows; None: they are staged
    stage_capacity,
    landing,
    choices,
    tile,
):
    """Copy this program's share of some rows to the output rows of their assignments.

    Shares depend on position, not on progress: programs may see a source at different steps.
    """
    source_ptr = bytes_of_rows(job, own)
    stage_source_ptr = stage_sources(job)
    stage_rows_ptr = own_buffer(job, STAGE_META, tl.int32)
    stage_weights_ptr = own_buffer(job, STAGE_META, tl.float32) + choices.KP
    ks = tl.arange(0, choices.KP)[None, :]
    CONVERTED: tl.constexpr = landing.LANDING == LANDING_ROW or landing.LANDING == LANDING_BF16
    first = my_first(arrived.first, 0)
    for number in tl.range(first, arrived.end, tl.num_programs(0), num_stages=tile.STAGES):
        first_row, end = place_of(job, arrived, number, tile.ROWS, arrivals.LWP)
        row = first_row + tl.arange(0, tile.ROWS)
        alive = row < end
        meta = row.to(tl.int64) * (2 * choices.KP)
        # A staging row beyond the buffer never arrived (static overflow): its output rows become zero.
        here = alive & (row < stage_capacity)
        at = rows_from_there(arrivals, own, stage_source_ptr, row, number, here)
        mask = alive[:, None] & (ks < choices.TOPK)
        copies = tl.load(stage_rows_ptr + meta[:, None] + ks, mask=mask, other=-1)
        # Load all numbers first: after the stores of one row, the next load would wait for memory each time. Columns of
        # `copies` have to be exchanged between threads, but need no copies ahead of their own.
        each = ()
        for k in tl.static_range(choices.TOPK):
            if tile.STAGES > 1:
                each += (tl.sum(tl.where(ks == k, copies, 0), axis=1),)
            else:
                each += (tl.load(stage_rows_ptr + meta + k, mask=alive, other=-1),)
        if CONVERTED:
            largest = _land_tiles(out, source_ptr, each, at, here, landing.LANDING, tile)
        else:
            _copy_tiles(out, source_ptr, each, row, at, here, landing, tile)
        _store_copies(out, stage_weights_ptr, row, here, copies, mask, landing, choices)
        if landing.LANDING == LANDING_ROW:
            # A row that never arrived is a row of zeros with scale 1, like padding.
            scale = tl.where(here, scale_value(largest), 1.0)
            tl.store(out.recv_scale_ptr + copies, tl.broadcast_to(scale[:, None], copies.shape), mask=copies >= 0)


@triton.jit
def _store_copies(
    out,
    stage_weights_ptr,  # weights of staging row 0
    row,  # [ROWS] staging rows
    here,  # [ROWS] rows that arrived
    copies,  # [ROWS, KP] their output rows, -1 = none
    mask,  # [ROWS, KP] choices of rows
    landing,
    choices,
):
    """Store the weights of output rows, and which output rows the staging rows have, if these are wanted."""
    ks = tl.arange(0, choices.KP)[None, :]
    if landing.HAS_WEIGHTS:
        meta = row.to(tl.int64)[:, None] * (2 * choices.KP) + ks
        weights = tl.load(stage_weights_ptr + meta, mask=mask, other=0.0)
        weights = tl.where(here[:, None], weights, 0.0)
        tl.store(out.recv_weights_ptr + copies, weights, mask=copies >= 0)
    if landing.KEEP_COPY_ROWS:
        copy = row.to(tl.int64)[:, None] * choices.TOPK + ks
        tl.store(landing.copy_rows_ptr + copy, copies, mask=mask & here[:, None])


@triton.jit
def _zero_rows(out, rows, SCALE_BYTES: tl.constexpr):
    """Zero output rows [n], -1 = none. SCALE_BYTES: bytes of their scales, a multiple of 16, or 0."""
    PIECE: tl.constexpr = 16
    zeros = tl.zeros([rows.shape[0], PIECE], out.recv_x_ptr.dtype.element_ty)
    offs = tl.arange(0, PIECE)[None, :]
    here, at = (rows >= 0)[:, None], rows.to(tl.int64)[:, None]
    for h in range(0, out.row_words, PIECE):
        tl.store(out.recv_x_ptr + at * out.row_words + h + offs, zeros, mask=here & (h + offs < out.row_words))
    for h in range(0, SCALE_BYTES, PIECE):
        tl.store(out.recv_scale_ptr + at * SCALE_BYTES + h + offs, zeros.to(tl.uint8), mask=here)


@triton.jit
def _complete_rows(
    job,
    out,
    arrived,  # ArrivedRows, in tiles of one row
    LWP: tl.constexpr,
    stage_capacity,
    landing,
    choices,
    SCALE_BYTES: tl.constexpr,
):
    """What `_expand_rows` does besides copying rows, for rows that `copy_arrived` copies."""
    stage_rows_ptr = own_buffer(job, STAGE_META, tl.int32)
    stage_weights_ptr = own_buffer(job, STAGE_META, tl.float32) + choices.KP
    ks = tl.arange(0, choices.KP)[None, :]
    step = tl.num_programs(0)
    for item in range(my_first(arrived.first, 0), arrived.end, step * _ITEMS):
        row, end = place_of(job, arrived, item + tl.arange(0, _ITEMS) * step, 1, LWP)
        alive = row < end
        here = alive & (row < stage_capacity)
        mask = alive[:, None] & (ks < choices.TOPK)
        meta = row.to(tl.int64)[:, None] * (2 * choices.KP) + ks
        copies = tl.load(stage_rows_ptr + meta, mask=mask, other=-1)
        _store_copies(out, stage_weights_ptr, row, here, copies, mask, landing, choices)
        if tl.max((alive & (row >= stage_capacity)).to(tl.int32)) > 0:
            lost = tl.where(here[:, None], -1, copies)
            _zero_rows(out, tl.reshape(lost, [_ITEMS * choices.KP]), SCALE_BYTES)


@triton.jit
def _lay_out(job, out, arrived, arrivals, own, stage_capacity, landing, choices, tile, base):
    """Lay out this program's share of some rows, through registers, or in bulk; then `_complete_rows` must follow.
    base: ring."""
    if tile.SLOTS > 0:
        kept_ptr = landing.kept_ptr if landing.KEEP_ROWS else None
        copy_arrived(job, out, arrived, arrivals, own, stage_capacity, choices, kept_ptr, tile, base)
    else:
        _expand_rows(job, out, arrived, arrivals, own, stage_capacity, landing, choices, tile)


@triton.jit
def _zero_padding(
    job,
    out,
    placement_ptr,
    landing,
    tile,
):
    """Zero data, scales and weights of the rows between an expert's last row and the next expert's first row; with one
    scale per row, the scale becomes 1."""
    WORD_BYTES: tl.constexpr = out.recv_x_ptr.dtype.element_ty.primitive_bitwidth // 8
    no_scales = tl.zeros([tile.ROWS, tile.BLOCK_H * WORD_BYTES // 32 if landing.LANDING == LANDING_MX else 1], tl.uint8)
    offs = tl.arange(0, tile.BLOCK_H)
    zeros = tl.zeros([tile.ROWS, tile.BLOCK_H], out.recv_x_ptr.dtype.element_ty)
    expert_offsets_ptr = expert_offsets_of(job, placement_ptr)
    num_recv_ptr = num_recv_of(job, placement_ptr)
    experts = job.experts_per_rank
    shares = tl.maximum(tl.num_programs(0) // experts, 1)
    for item in range(tl.program_id(0), experts * shares, tl.num_programs(0)):
        expert, share = item % experts, item // experts
        begin = tl.load(expert_offsets_ptr + expert) + tl.load(num_recv_ptr + expert)
        end = tl.load(expert_offsets_ptr + expert + 1)
        for first in range(begin + share * tile.ROWS, end, shares * tile.ROWS):
            row = first + tl.arange(0, tile.ROWS)
            for h in range(0, out.row_words, tile.BLOCK_H):
                mask = (row < end)[:, None] & (h + offs < out.row_words)[None, :]
                dest = out.recv_x_ptr + row.to(tl.int64)[:, None] * out.row_words + h + offs[None, :]
                tl.store(dest, zeros, mask=mask)
                if landing.LANDING == LANDING_MX:
                    dest = out.recv_scale_ptr + row.to(tl.int64) * (out.row_words * WORD_BYTES // 32)
                    store_scales(dest, row < end, no_scales, h, out.row_words, WORD_BYTES)
            if landing.LANDING == LANDING_ROW:
                tl.store(out.recv_scale_ptr + row, tl.full([tile.ROWS], 1.0, tl.float32), mask=row < end)
            if landing.HAS_WEIGHTS:
                tl.store(out.recv_weights_ptr + row, tl.zeros([tile.ROWS], tl.float32), mask=row < end)


@ep_kernel(
    recv_x_ptr="*{WORD}",
    recv_scale_ptr="*{SCALE}",
    recv_weights_ptr="*fp32",
    copy_rows_ptr="*i32",
    kept_ptr="*u8",
    x_ptr="*u8",
    tokens_ptr="*i64",
    specialised=("row_words",),
    num_warps=None,
)
def dispatch_expand_kernel(
    out: Output,
    placement_ptr,  # device/tables.py
    job: Job,
    room: Room,
    arrivals: Arrivals,
    own: OwnRows,
    landing: Landing,
    choices: Choices,
    tile: CopyTile,
):
    base = open_ring(tile)
    flags = own_flags(job)
    in_use = tl.load(expert_offsets_of(job, placement_ptr) + job.experts_per_rank)
    arrived = (tl.load(state_at(job, STATUS)) == 0) & (in_use <= room.num_rows) & (is_held(job, placement_ptr) == 0)
    # Zero padding and unused weights while the first rows are in flight. A failed dispatch has no rows.
    if landing.HAS_WEIGHTS:
        fill_rest(out.recv_weights_ptr, tl.where(arrived, in_use, 0), room.num_rows, 0.0, filled_bytes(tile.SLOTS))
    if landing.HAS_PADDING:
        if arrived:
            _zero_padding(job, out, placement_ptr, landing, tile)
    LWP: tl.constexpr = arrivals.LWP
    if arrived & (own.in_place != 0):
        news = own_rows(job, placement_ptr, tile.ROWS, LWP)
        _lay_out(job, out, news, arrivals, own, room.stage_capacity, landing, choices, tile, base)
        if tile.SLOTS > 0:
            _complete_rows(job, out, news, LWP, room.stage_capacity, landing, choices, tile.SCALE_BYTES)
    for index in range(num_nodes(job)):
        sources = sources_of(job, placement_ptr, index, arrivals.SOURCES)
        own_done = tl.where(index == 0, own.in_place, 0)
        steps = tl.zeros([], tl.int64)
        done = tl.zeros([arrivals.SOURCES], tl.int32)
        while (steps < STEPS) & arrived:
            described = is_described(index, steps)
            arrived, ready, steps = wait_arrivals(job, flags, sources, steps, done, arrivals, tile.ROWS)
            if arrived:
                news = arrived_rows(job, sources, done, ready, own_done, tile.ROWS, LWP)
                _lay_out(job, out, news, arrivals, None, room.stage_capacity, landing, choices, tile, base)
                if tile.SLOTS > 0:
                    if described:
                        # Here, and not with each step: nothing is left to look up when the last rows have come.
                        news = described_rows(job, sources, index, done, ready, own_done, tile.ROWS, LWP)
                        _complete_rows(job, out, news, LWP, room.stage_capacity, landing, choices, tile.SCALE_BYTES)
                done = ready
    close_ring(tile)
    await_previous()
