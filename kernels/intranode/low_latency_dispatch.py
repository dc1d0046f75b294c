"""Low-latency dispatch of few tokens inside a node, in one launch: nothing is counted before rows are sent, and rows
are laid out while others are still on their way.

Protocol      Program 0 tells, the next programs push, one per token. The last program records. The others are workers;
              each lays out a share of the staging rows.
              1 tell: count the entries of each expert, store the totals at the experts' owners, then publish the number
              of this dispatch, the host word and the number of tokens to every rank, in ll_flag
              2 push: store the token's keys, -1 where the expert is elsewhere, and its weights at every rank. Store its
              row once at each rank that owns one of its experts, in a staging row reserved for this token. Then raise
              the flag of that staging row at every rank. A key is (local expert << 16 | slot). The slot is the number
              of earlier entries of this rank for that expert; each program counts it for its own token
              3 expand: wait until every rank has told, and compare the host words: if ranks are in different calls,
              copy nothing (device/calls.py). Derive from the totals of all sources where each source's rows of each
              expert begin; that plus the slot is the output row. For each staging row, wait for its flag, copy the row,
              store its output rows (for combine). Zero the padding. With slabs, expert i's rows begin at i * slab_rows,
              nothing is zeroed; with COLUMNS, scales go to [e, scale_words, slab_rows], rows as the fast dimension
              4 record: wait until every rank has told, as in 3, and write `placement`
Layout        ll_stage_x [2, W * M, row on the wire (device/payload.py)], staging row = source rank * M + token;
              ll_meta [2, W * M, 2 * KP] int32: keys, then weights as float32 bits; ll_counts [2, W, EP] int32;
              ll_flag [2, W] int64: number of the dispatch, host word and tokens (device/codes.py, LL_WORD_SHIFT);
              ll_row_flag [2, W * M] int64: number of the dispatch. The first dimension of all of them is the parity of
              that number. W ranks, M max_tokens, e experts per rank, KP top-k and EP e rounded up to powers of two.
              EPOCH_LL_DISPATCH is a turn (device/low_latency.py), which the programs of both launches end.
Memory order  The totals precede the release of ll_flag; the stores of a token's program precede the release of its row
              flags. 3 and 4 acquire both.
Progress      1 and 2 wait for nobody. 3 and 4 wait for 1 and 2 of all ranks; those of their own launch have lower
              numbers and so have started before. The programs that wait are at most as many as fit on half of the GPU
              (triton_ep/ops/tuning.py), so 1 and 2 of another layer fit next to them.
Replay        A rank stores for epoch n after its dispatch n - 1 has ended. For that, every rank had told n - 1, each
              after its own dispatch n - 2, the last reader of the halves that are now written.
Two launches  If sending and receiving are separate, the same kernel is launched twice: first with 1 and 2, then with 3
              and 4.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device import codes
from ..device.buffers import (
    EPOCH_LL_DISPATCH,
    LL_COUNTS,
    LL_FLAG,
    LL_META,
    LL_ROW_FLAG,
    LL_STAGE_X,
    STATUS,
    buffer_ptrs,
    count_overflow,
    own_buffer,
    pointers_at,
    table_ptrs,
)
from ..device.calls import CALLS_LL_DISPATCH, report_calls, store_epoch, words_unlike
from ..device.early import await_previous, let_next_start
from ..device.job import Job, in_one_node, is_local_expert, is_rank, num_experts, state_at
from ..device.low_latency import end_turn, first_of_half, on_owner, owners, quotient, rank_after, rank_bits, turn_of
from ..device.payload import (
    MX,
    WORDS,
    Choices,
    RowTile,
    load_payload,
    load_row_tile,
    staged_rows,
    store_scales,
    wire_of,
    wire_tile,
)
from ..device.tables import (
    REPORT_HOST_WORD,
    REPORT_ROWS,
    REPORT_TOKENS,
    REPORT_WORDS,
    expert_offsets_of,
    num_recv_of,
    num_rows_of,
    overflow_of,
    report_ptrs,
)
from ..device.waits import WAIT_LL_ROWS, release_flags, wait_flags, wait_values
from ..spec import ep_kernel

_SLOT_BITS = tl.constexpr(16)
_SLOT_MASK = tl.constexpr(0xFFFF)
_REST = tl.constexpr(32)
_NOTED = tl.constexpr(256)
_BYTES_PER_SCALE_WORD = tl.constexpr(128)  # a byte of scales per 32 bytes of data
_WORD_SHIFT = tl.constexpr(codes.LL_WORD_SHIFT)
_CALL_SHIFT = tl.constexpr(codes.LL_CALL_SHIFT)


class Tokens(NamedTuple):
    """Tokens of this rank.

    Attributes:
        x_ptr: [T, x_words] words; with QUANTISE elements.
        scale_ptr: [T, row bytes / 32] uint8; read if PAYLOAD is MX.
        topk_idx_ptr: [T, K] expert ids.
        weights_ptr: [T, K] float32; read if HAS_WEIGHTS.
        kept_idx_ptr: out [T, K] int32, -1 = dropped.
        num_tokens: T.
        host_word: HOST_* of the call (device/codes.py).
        x_words: words of a row.
        PAYLOAD: WORDS, QUANTISE or MX.
        PUSH_TILES: tiles in which a program pushes its row.
        PUSH_BLOCK: words of a tile.
    """

    x_ptr: Any
    scale_ptr: Any
    topk_idx_ptr: Any
    weights_ptr: Any
    kept_idx_ptr: Any
    num_tokens: Any
    host_word: Any
    x_words: Any
    PAYLOAD: tl.constexpr
    PUSH_TILES: tl.constexpr
    PUSH_BLOCK: tl.constexpr


class Sizes(NamedTuple):
    """Sizes rounded up to powers of two.

    Attributes:
        WP: all ranks. EP: local experts.
        BLOCK_N: entries compared at a time.
    """

    WP: tl.constexpr
    EP: tl.constexpr
    BLOCK_N: tl.constexpr


class Received(NamedTuple):
    """Rows of this rank's experts, all out.

    Attributes:
        recv_x_ptr: [R, row_words] words.
        recv_scale_ptr: [R, row bytes / 32] uint8, or columns; written if rows have scales.
        recv_weights_ptr: [R] float32; written if the call has weights.
        copy_rows_ptr: [W * M, K] int32, output rows of each staging row, -2 = beyond the capacity; then -1.
        placement_ptr: int32 (device/tables.py), up to the number of the dispatch.
        row_words: words of a row.
    """

    recv_x_ptr: Any
    recv_scale_ptr: Any
    recv_weights_ptr: Any
    copy_rows_ptr: Any
    placement_ptr: Any
    row_words: Any


class Launch(NamedTuple):
    """Programs of a launch: those that send come first.

    Attributes:
        first_waiting: number of programs that tell and push; if there are more, the others receive.
        others: programs of the call, in both launches, but one.
    """

    first_waiting: Any
    others: Any


class Segments(NamedTuple):
    """Output rows of the local experts.

    Attributes:
        capacity: most output rows.
        alignment: segments are padded to multiples of this number of rows.
        slab_rows: rows of the slab of an expert; read with SLABS.
        scale_words: words of 32 bits of scales that a row has in its slab; read with COLUMNS.
        SLABS: each expert has a slab of rows, and its rows begin there.
        COLUMNS: scales of slabs are columns, words of 32 bits; else every row has its bytes.
    """

    capacity: Any
    alignment: Any
    slab_rows: Any
    scale_words: Any
    SLABS: tl.constexpr
    COLUMNS: tl.constexpr


class Group(NamedTuple):
    """Staging rows that a worker lays out together.

    Attributes:
        number: [ROWS]. Counts the rows that each source may have filled, first those of this rank, because they come
            earlier.
        is_last: true for the last group of this worker.
    """

    number: Any
    is_last: Any


class Parts(NamedTuple):
    """Outputs that accompany the rows.

    Attributes:
        HAS_SCALES: scales of MXFP8.
        HAS_WEIGHTS: routing weights.
        HAS_PADDING: rows of zeros between the experts' segments.
    """

    HAS_SCALES: tl.constexpr
    HAS_WEIGHTS: tl.constexpr
    HAS_PADDING: tl.constexpr


@triton.jit
def _kept(ids, num_experts):
    """Expert ids as int32; -1 for ids that name no expert."""
    return tl.where((ids >= 0) & (ids < num_experts), ids, -1).to(tl.int32)


@triton.jit
def _kept_of(job, tokens, first, end, BLOCK: tl.constexpr):
    """Kept ids of the entries from `first` on, before `end`: [BLOCK]."""
    n = first + tl.arange(0, BLOCK)
    return _kept(tl.load(tokens.topk_idx_ptr + n, mask=n < end, other=-1), num_experts(job))


@triton.jit
def _tell(job, epoch, tokens, choices, sizes):
    """Store the totals of this rank's entries at the experts' owners, and publish this dispatch to every rank."""
    healthy = tl.load(state_at(job, STATUS)) == 0
    num_entries = tokens.num_tokens * choices.TOPK
    totals = tl.zeros([sizes.WP * sizes.EP], tl.int32)  # by owner and local expert
    for first in range(0, num_entries, sizes.BLOCK_N):
        kept = _kept_of(job, tokens, first, num_entries, sizes.BLOCK_N)
        owner = tl.maximum(owners(job, kept), 0)
        place = owner * sizes.EP + on_owner(job, kept, owner)
        totals += tl.histogram(tl.maximum(place, 0), sizes.WP * sizes.EP, mask=kept >= 0)
    peers, local = tl.arange(0, sizes.WP), tl.arange(0, sizes.EP)
    sender = first_of_half(job, epoch) + job.rank
    told = is_rank(job, peers) & healthy
    counts_ptrs = buffer_ptrs(job, LL_COUNTS, peers, told, tl.int32) + sender * sizes.EP
    mask = told[:, None] & is_local_expert(job, local)[None, :]
    tl.store(counts_ptrs[:, None] + local[None, :], tl.reshape(totals, [sizes.WP, sizes.EP]), mask=mask)
    flag_ptrs = buffer_ptrs(job, LL_FLAG, peers, told, tl.int64) + sender
    word = (tokens.host_word << _WORD_SHIFT) + tokens.num_tokens
    release_flags(flag_ptrs, told, tl.zeros([sizes.WP], tl.int64) + ((epoch << _CALL_SHIFT) + word))


@triton.jit
def _slots(job, tokens, mine, first, choices, BLOCK_N: tl.constexpr):
    """How many entries for the experts `mine` [KP] of one token precede the token's own; first: its first entry."""
    position = first + tl.arange(0, choices.KP)
    earlier = tl.zeros([choices.KP], tl.int32)
    end = first + choices.TOPK
    for start in range(0, end, BLOCK_N):
        other = _kept_of(job, tokens, start, end, BLOCK_N)
        n = start + tl.arange(0, BLOCK_N)
        precedes = (n[None, :] < position[:, None]) & (other[None, :] == mine[:, None])
        earlier += tl.sum(precedes.to(tl.int32), axis=1)
    return earlier


@triton.jit
def _load_tile(tokens, token, t):
    """Tile `t` of the row of a token, [1, PUSH_BLOCK]."""
    row = tl.arange(0, 1) + token
    row_ptrs = tokens.x_ptr + row.to(tl.int64) * tokens.x_words
    return load_row_tile(row_ptrs, row < tokens.num_tokens, t * tokens.PUSH_BLOCK, tokens.x_words, tokens.PUSH_BLOCK)


@triton.jit
def _push_tile(job, epoch, healthy, token, mine, tokens, data_tile, t, WP: tl.constexpr):
    """Store tile `t` of a token's row, `data_tile`, at every rank that owns one of its experts `mine`."""
    BLOCK_H: tl.constexpr = tokens.PUSH_BLOCK
    h = t * BLOCK_H
    wire = wire_of(tokens.x_words, tokens.x_ptr.dtype.element_ty, tokens.PAYLOAD)
    row = tl.arange(0, 1) + token
    scale_ptrs = tokens.scale_ptr + row.to(tl.int64) * (wire.data_bytes // 32)
    # Ranks and tokens begin with different destinations, so that they do not all start on the same link.
    first_rank = job.rank + token - quotient(job.rank + token, job.num_ranks) * job.num_ranks
    dest_rank = rank_after(job, first_rank + tl.arange(0, WP))
    in_group = is_rank(job, tl.arange(0, WP))
    # Of all ranks: the addresses then do not wait for the ids.
    stage = tl.load(table_ptrs(job, LL_STAGE_X, dest_rank), mask=in_group, other=0)
    bits = rank_bits(owners(job, mine), 0)
    goes_there = healthy & in_group & (((bits >> dest_rank) & 1) > 0)
    arrival = (first_of_half(job, epoch) + job.rank) * job.max_tokens + token
    offs = tl.arange(0, BLOCK_H)[None, :]
    alive = row < tokens.num_tokens
    data, scales = wire_tile(data_tile, scale_ptrs, alive, h, tokens.x_words, tokens.PAYLOAD)
    dest = pointers_at(stage, data.dtype) + arrival.to(tl.int64) * wire.stride
    data = tl.broadcast_to(data, [WP, BLOCK_H])
    tl.store(dest[:, None] + h + offs, data, mask=goes_there[:, None] & (h + offs < tokens.x_words))
    if tokens.PAYLOAD != WORDS:
        dest = pointers_at(stage, tl.uint8) + arrival.to(tl.int64) * wire.row_bytes + wire.data_bytes
        scales = tl.broadcast_to(scales, [WP, scales.shape[1]])
        store_scales(dest, goes_there, scales, h, tokens.x_words, data.dtype.primitive_bitwidth // 8)


@triton.jit
def _push_keys(job, epoch, healthy, token, mine, tokens, HAS_WEIGHTS: tl.constexpr, choices, sizes):
    """Store the keys and weights of a token at all ranks."""
    ks = tl.arange(0, choices.KP)
    owner = owners(job, mine)
    arrival = (first_of_half(job, epoch) + job.rank) * job.max_tokens + token
    slot = _slots(job, tokens, mine, token * choices.TOPK, choices, sizes.BLOCK_N)
    local = on_owner(job, mine, owner)
    peers = tl.arange(0, sizes.WP)
    to_all = is_rank(job, peers) & healthy
    meta = (arrival * (2 * choices.KP) + ks)[None, :]
    dest = buffer_ptrs(job, LL_META, peers, to_all, tl.int32)[:, None] + meta
    keys = tl.where(owner[None, :] == peers[:, None], (local << _SLOT_BITS | slot)[None, :], -1)
    tl.store(dest, keys, mask=to_all[:, None])
    if HAS_WEIGHTS:
        entry = ks < choices.TOPK
        weights = tl.load(tokens.weights_ptr + token * choices.TOPK + ks, mask=entry, other=0.0)
        dest = buffer_ptrs(job, LL_META, peers, to_all, tl.float32)[:, None] + meta + choices.KP
        tl.store(dest, tl.broadcast_to(weights[None, :], [sizes.WP, choices.KP]), mask=to_all[:, None])


@triton.jit
def _push(job, epoch, token, tokens, HAS_WEIGHTS: tl.constexpr, choices, sizes):
    """Send one token, and raise the flags of its staging rows."""
    # After a failure store nothing; an early return instead would make every load wait for this one.
    healthy = tl.load(state_at(job, STATUS)) == 0
    entry = tl.arange(0, choices.KP) < choices.TOPK
    ids_ptrs = tokens.topk_idx_ptr + token * choices.TOPK + tl.arange(0, choices.KP)
    mine = _kept(tl.load(ids_ptrs, mask=entry, other=-1), num_experts(job))
    data_tile = _load_tile(tokens, token, 0)
    _push_tile(job, epoch, healthy, token, mine, tokens, data_tile, 0, sizes.WP)
    # Compute and store the keys while the stores of the first tile are in flight.
    _push_keys(job, epoch, healthy, token, mine, tokens, HAS_WEIGHTS, choices, sizes)
    for t in tl.static_range(1, tokens.PUSH_TILES):
        _push_tile(job, epoch, healthy, token, mine, tokens, _load_tile(tokens, token, t), t, sizes.WP)
    kept_ptrs = tokens.kept_idx_ptr + token * choices.TOPK + tl.arange(0, choices.KP)
    tl.store(kept_ptrs, mine, mask=entry)
    peers = tl.arange(0, sizes.WP)
    raised = is_rank(job, peers) & healthy
    arrival = (first_of_half(job, epoch) + job.rank) * job.max_tokens + token
    flag_ptrs = buffer_ptrs(job, LL_ROW_FLAG, peers, raised, tl.int64) + arrival
    release_flags(flag_ptrs, raised, tl.zeros([sizes.WP], tl.int64) + (epoch << _CALL_SHIFT))


@triton.jit
def _load_staged(out, row_ptrs, scale_ptrs, here, h, segments, HAS_SCALES: tl.constexpr, BLOCK_H: tl.constexpr):
    """Tile [ROWS, BLOCK_H] of staging rows and their scales: bytes, or with COLUMNS words of four; without scales the
    data twice."""
    PAYLOAD: tl.constexpr = MX if HAS_SCALES and not segments.COLUMNS else WORDS
    words, scales = load_payload(row_ptrs, scale_ptrs, here, h, out.row_words, PAYLOAD, BLOCK_H)
    if segments.COLUMNS:
        column = _scale_columns(h, words)
        source = scale_ptrs.to(tl.pointer_type(tl.int32))[:, None] + column[None, :]
        scales = tl.load(source, mask=here[:, None] & (column < segments.scale_words)[None, :], other=0)
    return words, scales


@triton.jit
def _scale_columns(h, words):
    """Words of scales that belong to a tile of data `words` from word `h` of its rows on."""
    BYTES: tl.constexpr = words.dtype.primitive_bitwidth // 8
    PER_TILE: tl.constexpr = words.shape[1] * BYTES // _BYTES_PER_SCALE_WORD
    return h * BYTES // _BYTES_PER_SCALE_WORD + tl.arange(0, PER_TILE)


@triton.jit
def _slab_scales(key, copy, segments):
    """Where the words of scales of the assignments [ROWS, KP] begin in the slabs, int64; key, copy: their keys and
    output rows.

    Example: rows of 896 words of 8 bytes have 224 bytes of scales, 56 words; word c of row i of expert x is word
    (x * 56 + c) * slab_rows + i.
    """
    expert = (key >> _SLOT_BITS).to(tl.int64)
    return copy + expert * (segments.scale_words - 1) * segments.slab_rows


@triton.jit
def _store_copies(
    out,
    words,  # [ROWS, BLOCK_H]
    scales,
    h,
    copies,  # tuple of [ROWS] output rows of each staging row, negative = none
    firsts,  # tuple of [ROWS] of `_slab_scales`; read with COLUMNS
    segments,
    HAS_SCALES: tl.constexpr,
    TOPK: tl.constexpr,
):
    """Store a tile of staging rows to the output rows of their assignments."""
    WORD_BYTES: tl.constexpr = out.recv_x_ptr.dtype.element_ty.primitive_bitwidth // 8
    offs = (h + tl.arange(0, words.shape[1]))[None, :]
    for k in tl.static_range(TOPK):
        copy = copies[k]
        if tl.max(copy) >= 0:  # most rows have few assignments
            dest = out.recv_x_ptr + copy.to(tl.int64)[:, None] * out.row_words + offs
            tl.store(dest, words, mask=(copy >= 0)[:, None] & (offs < out.row_words))
            if segments.COLUMNS:
                column = _scale_columns(h, words)
                dest = out.recv_scale_ptr.to(tl.pointer_type(tl.int32)) + firsts[k][:, None]
                dest += (column.to(tl.int64) * segments.slab_rows)[None, :]
                tl.store(dest, scales, mask=(copy >= 0)[:, None] & (column < segments.scale_words)[None, :])
            elif HAS_SCALES:
                dest = out.recv_scale_ptr + copy.to(tl.int64) * (out.row_words * WORD_BYTES // 32)
                store_scales(dest, copy >= 0, scales, h, out.row_words, WORD_BYTES)


@triton.jit
def _zero_rest(
    worker,
    workers,
    out,
    total,  # [EP] rows of each local expert
    padded,  # [EP] the same, rounded up
    capacity,
    parts,
    tile,
):
    """Zero the padding rows, and the weights of all rows without an assignment."""
    # Padding rows are numbered from 0 over all experts: padding of each expert, of the experts before it, of all.
    padding = padded - total
    before = (tl.cumsum(padding, axis=0) - padding)[None, :]
    num_padding = tl.sum(padding)
    if parts.HAS_PADDING:
        WORD_BYTES: tl.constexpr = out.recv_x_ptr.dtype.element_ty.primitive_bitwidth // 8
        no_scales = tl.zeros([tile.ROWS, tile.BLOCK_H * WORD_BYTES // 32 if parts.HAS_SCALES else 1], tl.uint8)
        zeros = tl.zeros([tile.ROWS, tile.BLOCK_H], out.recv_x_ptr.dtype.element_ty)
        offs = tl.arange(0, tile.BLOCK_H)[None, :]
        for first in range(worker * tile.ROWS, num_padding, workers * tile.ROWS):
            number = first + tl.arange(0, tile.ROWS)
            # Before a padding row lie the padding rows of lower number and the real rows up to its expert.
            row = number + tl.sum(tl.where(before <= number[:, None], total[None, :], 0), axis=1)
            inside = (number < num_padding) & (row < capacity)
            for h in range(0, out.row_words, tile.BLOCK_H):
                dest = out.recv_x_ptr + row.to(tl.int64)[:, None] * out.row_words + h + offs
                tl.store(dest, zeros, mask=inside[:, None] & (h + offs < out.row_words))
                if parts.HAS_SCALES:
                    dest = out.recv_scale_ptr + row.to(tl.int64) * (out.row_words * WORD_BYTES // 32)
                    store_scales(dest, inside, no_scales, h, out.row_words, WORD_BYTES)
    if parts.HAS_WEIGHTS:
        # Real rows past the capacity take no row below it.
        start = tl.cumsum(padded, axis=0) - padded
        num_rest = capacity - tl.sum(tl.minimum(start + total, capacity) - tl.minimum(start, capacity))
        for first in range(worker * _REST, num_rest, workers * _REST):
            number = first + tl.arange(0, _REST)
            row = number + tl.sum(tl.where(before <= number[:, None], total[None, :], 0), axis=1)
            tl.store(out.recv_weights_ptr + row, tl.zeros([_REST], tl.float32), mask=row < capacity)


@triton.jit
def _store_placement(
    job,
    placement_ptr,
    word_of,  # [WP] host word and tokens of each rank
    total,  # [EP] rows of each local expert
    padded,  # [EP] rows of its segment
    segments,
    epoch,
):
    """Write the parts of `placement` (device/tables.py) that a low-latency dispatch has: tokens, host words and own
    output rows of the report, then all parts up to the number of the dispatch."""
    source = tl.arange(0, word_of.shape[0])
    local = tl.arange(0, total.shape[0])
    capacity = segments.capacity
    start = tl.cumsum(padded, axis=0) - padded
    rows = tl.sum(padded)
    too_many = tl.maximum(rows - capacity, 0)
    if segments.SLABS:
        too_many = tl.sum(tl.maximum(total - padded, 0))
        total = tl.minimum(total, padded)
    clamped = tl.minimum(start, capacity)
    field = tl.arange(0, REPORT_WORDS)[None, :]
    tokens, host_word = (word_of & _SLOT_MASK)[:, None], (word_of >> _WORD_SHIFT)[:, None]
    report = tl.where(field == REPORT_TOKENS, tokens, tl.where(field == REPORT_HOST_WORD, host_word, 0))
    report = tl.where((field == REPORT_ROWS) & (source == job.rank)[:, None], rows, report)
    ptrs = report_ptrs(placement_ptr, source[:, None], REPORT_ROWS) + field
    tl.store(ptrs, report, mask=is_rank(job, source)[:, None])
    is_local = is_local_expert(job, local)
    tl.store(expert_offsets_of(job, placement_ptr) + local, clamped, mask=is_local)
    tl.store(num_rows_of(job, placement_ptr), tl.minimum(rows, capacity))
    real = tl.minimum(start + total, capacity) - clamped
    tl.store(num_recv_of(job, placement_ptr) + local, real, mask=is_local)
    tl.store(overflow_of(job, placement_ptr), too_many)
    count_overflow(job, too_many)
    store_epoch(job, placement_ptr, epoch)


@triton.jit
def _await_told(job, epoch, WP: tl.constexpr):
    """Wait until every rank has told. Returns the host word and tokens of each rank [WP], whether all came in time, and
    whether all are in the same call."""
    source = tl.arange(0, WP)
    in_group = is_rank(job, source)
    first_source = first_of_half(job, epoch)
    flag_ptrs = own_buffer(job, LL_FLAG, tl.int64) + first_source + source
    arrived, seen = wait_values(job, flag_ptrs, in_group, epoch << _CALL_SHIFT, WAIT_LL_ROWS, first_source)
    word_of = tl.where(in_group, seen, 0).to(tl.int32)
    own = tl.max(tl.where(source == job.rank, word_of, 0)) >> _WORD_SHIFT
    unlike = in_group & words_unlike(own, word_of >> _WORD_SHIFT)
    return word_of, arrived, tl.max(unlike.to(tl.int32)) == 0


@triton.jit
def _segments_of(job, epoch, segments, WP: tl.constexpr, EP: tl.constexpr):
    """Rows of each local expert and of its segment, [EP] each, and the first output row of each source's rows of each
    expert, [WP * EP]."""
    source, local = tl.arange(0, WP), tl.arange(0, EP)
    counts_ptrs = own_buffer(job, LL_COUNTS, tl.int32) + (first_of_half(job, epoch) + source)[:, None] * EP + local
    counted = is_rank(job, source)[:, None] & is_local_expert(job, local)[None, :]
    counts = tl.load(counts_ptrs, mask=counted, other=0)
    total = tl.sum(counts, axis=0)
    if segments.SLABS:
        padded = tl.where(is_local_expert(job, local), segments.slab_rows, 0)
    else:
        padded = (total + segments.alignment - 1) // segments.alignment * segments.alignment
    start = tl.cumsum(padded, axis=0) - padded
    begin = start[None, :] + tl.cumsum(counts, axis=0) - counts
    return total, padded, tl.reshape(begin, [WP * EP])


@triton.jit
def _output_rows(
    key,  # [ROWS, KP] of the assignments, negative = none
    of_source,  # [ROWS]
    begin,  # of `_segments_of`
    segments,
    EP: tl.constexpr,
    ROWS: tl.constexpr,
    KP: tl.constexpr,
):
    """[ROWS, KP] output row of each assignment: -1 = none, -2 = beyond the capacity."""
    is_copy = key >= 0
    segment = tl.where(is_copy, of_source[:, None] * EP + (key >> _SLOT_BITS), 0)
    first = tl.reshape(tl.gather(begin, tl.reshape(segment, [ROWS * KP]), 0), [ROWS, KP])
    copy = first + (key & _SLOT_MASK)
    end = segments.capacity
    if segments.SLABS:
        end = ((key >> _SLOT_BITS) + 1) * segments.slab_rows
    return tl.where(is_copy, tl.where(copy < end, copy, -2), -1)


@triton.jit
def _note_copies(copy_rows_ptr, arrival, alive, is_copy, copy, choices):
    """Store the output rows [ROWS, KP] of staging rows for combine: assignments first, in k order, so that it may stop
    at the first -1."""
    ks = tl.arange(0, choices.KP)[None, :]
    copies_so_far = tl.cumsum(is_copy.to(tl.int32), axis=1)
    num_copies = tl.sum(is_copy.to(tl.int32), axis=1)[:, None]
    position = tl.where(is_copy, copies_so_far - 1, num_copies + ks - copies_so_far)
    noted = alive[:, None] & (position < choices.TOPK)
    tl.store(copy_rows_ptr + arrival[:, None] * choices.TOPK + position, copy, mask=noted)


@triton.jit
def _by_k(values, TOPK: tl.constexpr):
    """The first TOPK columns of `values` [ROWS, KP], a tuple of [ROWS]."""
    # Every thread needs all of them: keep them in registers, because memory would be a chain of loads.
    ks = tl.arange(0, values.shape[1])[None, :]
    columns = ()
    for k in tl.static_range(TOPK):
        columns += (tl.sum(tl.where(ks == k, values, 0), axis=1),)
    return columns


@triton.jit
def _most_tokens(word_of):
    """Most tokens of a rank in this call; word_of: of `_await_told`."""
    return tl.max(word_of & _SLOT_MASK)


@triton.jit
def _note_absent(job, worker, workers, most, copy_rows_ptr, choices):
    """Note that staging rows from `most` on of each source have no assignments; workers share them."""
    end = job.num_ranks * job.max_tokens * choices.KP
    for first in range(worker * _NOTED, end, workers * _NOTED):
        n = first + tl.arange(0, _NOTED)
        arrival, k = n // choices.KP, n % choices.KP
        token = arrival - quotient(arrival, job.max_tokens) * job.max_tokens
        absent = (n < end) & (token >= most) & (k < choices.TOPK)
        tl.store(copy_rows_ptr + arrival * choices.TOPK + k, tl.full([_NOTED], -1, tl.int32), mask=absent)


@triton.jit
def _expand_item(
    job,
    epoch,
    group,
    word_of,  # [WP] of `_await_told`
    begin,  # of `_segments_of`
    out,
    segments,
    parts,
    choices,
    tile,
):
    """Wait for staging rows and copy them to the output rows of their assignments."""
    WORD: tl.constexpr = out.recv_x_ptr.dtype.element_ty
    wire = wire_of(out.row_words, WORD, MX if parts.HAS_SCALES else WORDS)
    most, number = _most_tokens(word_of), group.number
    turn = quotient(number, most)
    token = number - turn * most
    of_source = rank_after(job, job.rank + turn)
    arrival = of_source * job.max_tokens + token
    ranks = tl.arange(0, word_of.shape[0])
    word = tl.sum(tl.where(of_source[:, None] == ranks[None, :], word_of[None, :], 0), axis=1)
    alive = number < job.num_ranks * most
    here = alive & (token < (word & _SLOT_MASK))
    first_source = first_of_half(job, epoch)
    staged = first_source * job.max_tokens + arrival
    flag_ptrs = own_buffer(job, LL_ROW_FLAG, tl.int64) + staged
    # The record of an expiry names the source.
    places = first_source + of_source - tl.arange(0, tile.ROWS)
    arrived = tl.max(here.to(tl.int32)) == 0
    if arrived == 0:
        arrived = wait_flags(job, flag_ptrs, here, epoch << _CALL_SHIFT, WAIT_LL_ROWS, places)
    if group.is_last:  # this program waits for no rank any more
        let_next_start()
    if arrived:
        row_ptrs, scale_ptrs = staged_rows(own_buffer(job, LL_STAGE_X, tl.uint8), staged, wire, WORD)
        # In flight while the output rows are computed.
        words, scales = _load_staged(out, row_ptrs, scale_ptrs, here, 0, segments, parts.HAS_SCALES, tile.BLOCK_H)
        ks = tl.arange(0, choices.KP)[None, :]
        meta = staged[:, None] * (2 * choices.KP) + ks
        key = tl.load(own_buffer(job, LL_META, tl.int32) + meta, mask=here[:, None], other=-1)
        EP: tl.constexpr = begin.shape[0] // word_of.shape[0]
        copy = _output_rows(key, of_source, begin, segments, EP, tile.ROWS, choices.KP)
        if parts.HAS_WEIGHTS:
            meta_weights_ptr = own_buffer(job, LL_META, tl.float32) + choices.KP
            weights = tl.load(meta_weights_ptr + meta, mask=here[:, None], other=0.0)
            tl.store(out.recv_weights_ptr + copy, weights, mask=copy >= 0)
        _note_copies(out.copy_rows_ptr, arrival, alive, key >= 0, copy, choices)
        copies = _by_k(copy, choices.TOPK)
        firsts = copies
        if segments.COLUMNS:
            firsts = _by_k(_slab_scales(key, copy, segments), choices.TOPK)
        for t in tl.static_range(tile.TILES):
            h = t * tile.BLOCK_H
            if t > 0:
                words, scales = _load_staged(
                    out, row_ptrs, scale_ptrs, here, h, segments, parts.HAS_SCALES, tile.BLOCK_H
                )
            _store_copies(out, words, scales, h, copies, firsts, segments, parts.HAS_SCALES, choices.TOPK)


@triton.jit
def _expand(job, epoch, worker, workers, out, segments, parts, choices, sizes, tile):
    """Lay out the staging rows of groups `worker`, `worker + workers`, ...; a group is ROWS rows."""
    word_of, arrived, alike = _await_told(job, epoch, sizes.WP)
    if arrived & alike:
        total, padded, begin = _segments_of(job, epoch, segments, sizes.WP, sizes.EP)
        most = _most_tokens(word_of)
        groups = tl.cdiv(job.num_ranks * most, tile.ROWS)
        for first in range(worker, groups, workers):
            # The rows of a group lie far apart, so that groups are alike if there are few tokens.
            group = Group(first + tl.arange(0, tile.ROWS) * groups, first + workers >= groups)
            _expand_item(job, epoch, group, word_of, begin, out, segments, parts, choices, tile)
        _note_absent(job, worker, workers, most, out.copy_rows_ptr, choices)
        if (parts.HAS_PADDING or parts.HAS_WEIGHTS) and not segments.SLABS:
            _zero_rest(worker, workers, out, total, padded, segments.capacity, parts, tile)


@triton.jit
def _record(job, epoch, placement_ptr, segments, sizes):
    """Write `placement`, or report ranks that are in other calls."""
    word_of, arrived, alike = _await_told(job, epoch, sizes.WP)
    if arrived & alike:
        total, padded, _ = _segments_of(job, epoch, segments, sizes.WP, sizes.EP)
        _store_placement(job, placement_ptr, word_of, total, padded, segments, epoch)
    if arrived & (alike == 0):
        ranks = tl.arange(0, sizes.WP)
        report_calls(job, ranks, word_of >> _WORD_SHIFT, is_rank(job, ranks), CALLS_LL_DISPATCH)


@ep_kernel(
    x_ptr="*{X}",
    scale_ptr="*u8",
    topk_idx_ptr="*{IDX}",
    weights_ptr="*fp32",
    kept_idx_ptr="*i32",
    recv_x_ptr="*{WORD}",
    recv_scale_ptr="*u8",
    recv_weights_ptr="*fp32",
    copy_rows_ptr="*i32",
    placement_ptr="*i32",
    specialised=("x_words", "row_words"),
    maxnreg=128,
)
def low_latency_dispatch_kernel(
    tokens: Tokens,
    out: Received,
    job: Job,
    launch: Launch,
    segments: Segments,
    parts: Parts,
    choices: Choices,
    sizes: Sizes,
    tile: RowTile,
):
    await_previous()
    job = in_one_node(job)
    turn_ptr = state_at(job, EPOCH_LL_DISPATCH)
    epoch = turn_of(turn_ptr)
    number, last = tl.program_id(0), tl.num_programs(0) - 1
    senders = launch.first_waiting
    if number < senders:
        if number == 0:
            _tell(job, epoch, tokens, choices, sizes)
        else:
            _push(job, epoch, number - 1, tokens, parts.HAS_WEIGHTS, choices, sizes)
    elif number < last:
        worker, workers = number - senders, last - senders
        _expand(job, epoch, worker, workers, out, segments, parts, choices, sizes, tile)
    else:
        _record(job, epoch, out.placement_ptr, segments, sizes)
    end_turn(turn_ptr, (number == last) & (number >= senders), launch.others)
