"""Low-latency dispatch of few tokens inside a node, in one launch: nothing is counted before rows are sent, and rows
are laid out while others are still on their way.

Protocol      Program 0 tells, the next programs push, one per token. The last program records. The others are workers;
              each lays out a share of the staging rows.
              1 tell: publish the number of this dispatch, the host word and the number of tokens to every rank, in
              ll_flag. Then count the entries of each expert, and store the totals at the experts' owners, each next to
              the number of this dispatch
              2 push: store the token's keys, -1 where the expert is elsewhere, and its weights at every rank. Store its
              row, quantised on the way if its PAYLOAD says so, once at each rank that owns one of its experts, in a
              staging row reserved for this token. Then raise the flag of that staging row at every rank. A key is
              (local expert << 16 | slot). The slot is the number of earlier entries of this rank for that expert; each
              program counts it for its own token
              3 expand: wait until every rank has told, and compare the host words: if ranks are in different calls,
              copy nothing (device/calls.py). Wait until the totals of all sources are of this dispatch, and derive
              where each source's rows of each expert begin (device/low_latency_segments.py); that plus the slot is
              the output row. Zero the padding. For each staging row, wait for its flag, copy the row, store its output
              rows (for combine). With slabs, expert i's rows begin at i * slab_rows, nothing is zeroed; with COLUMNS,
              scales go to [e, scale_words, slab_rows], rows as the fast dimension
              4 record: wait for the same, and write `placement`
Layout        ll_stage_x [2, W * M, row on the wire (device/payload.py)], staging row = source rank * M + token;
              ll_meta [2, W * M, 2 * KP] int32: keys, then weights as float32 bits; ll_counts [2, W, EP] int64: number
              of the dispatch and total; ll_flag [2, W] int64: number of the dispatch, host word and tokens
              (device/codes.py, LL_WORD_SHIFT);
              ll_row_flag [2, W * M] int64: number of the dispatch. The first dimension of all of them is the parity of
              that number. W ranks, M max_tokens, e experts per rank, KP top-k and EP e rounded up to powers of two.
              EPOCH_LL_DISPATCH is a turn (device/low_latency.py), which the programs of both launches end.
Memory order  The stores of a token's program precede the release of its row flags, which 3 acquires. Each total shows
              by itself that it has arrived, and a thread uses the very word that it has checked. 1 releases, and 3 and
              4 acquire, what Replay needs.
Progress      1 and 2 wait for nobody. 3 and 4 wait for 1 and 2 of all ranks; those of their own launch have lower
              numbers and so have started before. The programs that wait are at most as many as fit on half of the GPU
              (triton_ep/ops/tuning.py), so 1 and 2 of another layer fit next to them. Launched early
              (device/early.py), all programs first wait for the end of the kernel ahead. Each lets the next kernel
              start when it has no more rows to wait for, so those that wait for their turn keep no place from others.
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
    own_buffer,
    pointers_at,
    table_ptrs,
)
from ..device.calls import CALLS_LL_DISPATCH, report_calls, words_unlike
from ..device.early import await_previous, let_next_start
from ..device.job import Job, in_one_node, is_rank, num_experts, state_at
from ..device.low_latency import (
    end_turn,
    first_of_half,
    on_owner,
    owners,
    quotient,
    rank_after,
    rank_bits,
    turn_of,
)
from ..device.low_latency_segments import SLOT_BITS, SLOT_MASK, Segments, output_rows, segments_of, store_placement
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
from ..device.waits import WAIT_LL_ROWS, release_flags, wait_flags, wait_values
from ..spec import ep_kernel

_REST = tl.constexpr(32)
_NOTED = tl.constexpr(256)
_BYTES_PER_SCALE_WORD = tl.constexpr(128)  # a byte of scales per 32 bytes of data
_WORD_SHIFT = tl.constexpr(codes.LL_WORD_SHIFT)
_CALL_SHIFT = tl.constexpr(codes.LL_CALL_SHIFT)


class Tokens(NamedTuple):
    """Tokens of this rank.

    Attributes:
        x_ptr: [T, x_words] words, or elements to quantise.
        scale_ptr: [T, row bytes / 32] uint8; read if PAYLOAD is MX.
        topk_idx_ptr: [T, K] expert ids.
        weights_ptr: [T, K] float32; read if HAS_WEIGHTS.
        kept_idx_ptr: out [T, K] int32, -1 = dropped.
        num_tokens: T.
        host_word: HOST_* of the call (device/codes.py).
        x_words: words of a row.
        PAYLOAD: WORDS, QUANTISE, QUANTISE_CHANNELS or MX (device/payload.py).
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


class Token(NamedTuple):
    """A token that a program sends.

    Attributes:
        number: 0 to T - 1.
        mine: [KP] its kept expert ids.
        arrival: its staging row.
        healthy: false after a failure; nothing is stored then.
    """

    number: Any
    mine: Any
    arrival: Any
    healthy: Any


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


class Staging(NamedTuple):
    """What other ranks store at this one, of the half of this call.

    Attributes:
        epoch: number of the call.
        flag_ptr: [W] int64, ll_flag.
        counts_ptr: [W, EP] int64, ll_counts.
        row_flag_ptr: [W * M] int64, ll_row_flag.
        rows_ptr: ll_stage_x, as bytes, both halves.
        meta_ptr: [W * M, 2 * KP] int32, ll_meta.
        first_source: ranks in the buffers before this half.
    """

    epoch: Any
    flag_ptr: Any
    counts_ptr: Any
    row_flag_ptr: Any
    rows_ptr: Any
    meta_ptr: Any
    first_source: Any


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
    """Publish this dispatch to every rank, and store the totals of this rank's entries at the experts' owners."""
    healthy = tl.load(state_at(job, STATUS)) == 0
    peers, local = tl.arange(0, sizes.WP), tl.arange(0, sizes.EP)
    sender = first_of_half(job, epoch) + job.rank
    told = is_rank(job, peers) & healthy
    flag_ptrs = buffer_ptrs(job, LL_FLAG, peers, is_rank(job, peers), tl.int64) + sender
    counts_ptrs = buffer_ptrs(job, LL_COUNTS, peers, is_rank(job, peers), tl.int64) + sender * sizes.EP
    call = epoch << _CALL_SHIFT
    word = (tokens.host_word << _WORD_SHIFT) + tokens.num_tokens
    release_flags(flag_ptrs, told, tl.zeros([sizes.WP], tl.int64) + (call + word))
    num_entries = tokens.num_tokens * choices.TOPK
    totals = tl.zeros([sizes.WP * sizes.EP], tl.int32)  # by owner and local expert
    for first in range(0, num_entries, sizes.BLOCK_N):
        kept = _kept_of(job, tokens, first, num_entries, sizes.BLOCK_N)
        owner = tl.maximum(owners(job, kept), 0)
        place = owner * sizes.EP + on_owner(job, kept, owner)
        totals += tl.histogram(tl.maximum(place, 0), sizes.WP * sizes.EP, mask=kept >= 0)
    words = tl.reshape(totals, [sizes.WP, sizes.EP]).to(tl.int64) | call
    tl.store(counts_ptrs[:, None] + local[None, :], words, mask=told[:, None])


@triton.jit
def _slots(job, tokens, token, first_ids, choices, BLOCK_N: tl.constexpr):
    """How many entries for the experts of a token precede the token's own: [KP]. first_ids: kept ids of the first
    BLOCK_N entries."""
    first = token.number * choices.TOPK
    position = first + tl.arange(0, choices.KP)
    earlier = _count_earlier(first_ids, 0, position, token.mine)
    end = first + choices.TOPK
    for start in range(BLOCK_N, end, BLOCK_N):
        ids = _kept_of(job, tokens, start, end, BLOCK_N)
        earlier += _count_earlier(ids, start, position, token.mine)
    return earlier


@triton.jit
def _count_earlier(ids, start, position, mine):
    """How many of the entries from `start` on, whose experts are `ids` [BLOCK_N], are for an expert of `mine` [KP], and
    come before its `position`."""
    n = start + tl.arange(0, ids.shape[0])
    precedes = (n[None, :] < position[:, None]) & (ids[None, :] == mine[:, None])
    return tl.sum(precedes.to(tl.int32), axis=1)


@triton.jit
def _load_tile(tokens, number, t):
    """Tile `t` of the row of token `number`, [1, PUSH_BLOCK]."""
    row = tl.arange(0, 1) + number
    row_ptrs = tokens.x_ptr + row.to(tl.int64) * tokens.x_words
    return load_row_tile(row_ptrs, row < tokens.num_tokens, t * tokens.PUSH_BLOCK, tokens.x_words, tokens.PUSH_BLOCK)


@triton.jit
def _push_tile(job, token, stages, tokens, data_tile, t, WP: tl.constexpr):
    """Store tile `t` of a token's row, `data_tile`, at every rank that owns one of its experts; stages: addresses of
    LL_STAGE_X at `_destinations`."""
    BLOCK_H: tl.constexpr = tokens.PUSH_BLOCK
    h = t * BLOCK_H
    wire = wire_of(tokens.x_words, tokens.x_ptr.dtype.element_ty, tokens.PAYLOAD)
    row = tl.arange(0, 1) + token.number
    scale_ptrs = tokens.scale_ptr + row.to(tl.int64) * (wire.data_bytes // 32)
    dest_rank = _destinations(job, token.number, WP)
    bits = rank_bits(owners(job, token.mine), 0)
    goes_there = token.healthy & is_rank(job, tl.arange(0, WP)) & (((bits >> dest_rank) & 1) > 0)
    offs = tl.arange(0, BLOCK_H)[None, :]
    alive = row < tokens.num_tokens
    data, scales = wire_tile(data_tile, scale_ptrs, alive, h, tokens.x_words, tokens.PAYLOAD)
    dest = pointers_at(stages, data.dtype) + token.arrival.to(tl.int64) * wire.stride
    data = tl.broadcast_to(data, [WP, BLOCK_H])
    tl.store(dest[:, None] + h + offs, data, mask=goes_there[:, None] & (h + offs < tokens.x_words))
    if tokens.PAYLOAD != WORDS:
        dest = pointers_at(stages, tl.uint8) + token.arrival.to(tl.int64) * wire.row_bytes + wire.data_bytes
        scales = tl.broadcast_to(scales, [WP, scales.shape[1]])
        store_scales(dest, goes_there, scales, h, tokens.x_words, data.dtype.primitive_bitwidth // 8)


@triton.jit
def _destinations(job, number, WP: tl.constexpr):
    """All ranks [WP], in the order in which a token goes to them. Ranks and tokens begin with different ones, so that
    they do not all start on the same link."""
    first_rank = job.rank + number - quotient(job.rank + number, job.num_ranks) * job.num_ranks
    return rank_after(job, first_rank + tl.arange(0, WP))


@triton.jit
def _push_keys(job, token, metas, first_ids, weights, tokens, HAS_WEIGHTS: tl.constexpr, choices, sizes):
    """Store the keys and weights [KP] of a token at all ranks; metas: addresses of LL_META [WP]."""
    ks = tl.arange(0, choices.KP)
    owner = owners(job, token.mine)
    slot = _slots(job, tokens, token, first_ids, choices, sizes.BLOCK_N)
    local = on_owner(job, token.mine, owner)
    peers = tl.arange(0, sizes.WP)
    to_all = is_rank(job, peers) & token.healthy
    place = (token.arrival * (2 * choices.KP) + ks)[None, :]
    keys = tl.where(owner[None, :] == peers[:, None], (local << SLOT_BITS | slot)[None, :], -1)
    tl.store(pointers_at(metas, tl.int32)[:, None] + place, keys, mask=to_all[:, None])
    if HAS_WEIGHTS:
        dest = pointers_at(metas, tl.float32)[:, None] + place + choices.KP
        tl.store(dest, tl.broadcast_to(weights[None, :], [sizes.WP, choices.KP]), mask=to_all[:, None])


@triton.jit
def _push(job, epoch, number, tokens, HAS_WEIGHTS: tl.constexpr, choices, sizes):
    """Send one token, and raise the flags of its staging rows."""
    # Whatever needs no other load is loaded first, all at once.
    peers, ks = tl.arange(0, sizes.WP), tl.arange(0, choices.KP)
    in_group, entry = is_rank(job, peers), ks < choices.TOPK
    # After a failure store nothing; an early return instead would make every load wait for this one.
    healthy = tl.load(state_at(job, STATUS)) == 0
    mine = _kept(tl.load(tokens.topk_idx_ptr + number * choices.TOPK + ks, mask=entry, other=-1), num_experts(job))
    data_tile = _load_tile(tokens, number, 0)
    destinations = _destinations(job, number, sizes.WP)
    stages = tl.load(table_ptrs(job, LL_STAGE_X, destinations), mask=in_group, other=0)
    metas = tl.load(table_ptrs(job, LL_META, peers), mask=in_group, other=0)
    flag_ptrs = buffer_ptrs(job, LL_ROW_FLAG, peers, in_group, tl.int64)
    first_ids = _kept_of(job, tokens, 0, (number + 1) * choices.TOPK, sizes.BLOCK_N)
    weights = ks.to(tl.float32)  # not used
    if HAS_WEIGHTS:
        weights = tl.load(tokens.weights_ptr + number * choices.TOPK + ks, mask=entry, other=0.0)
    arrival = (first_of_half(job, epoch) + job.rank) * job.max_tokens + number
    token = Token(number, mine, arrival, healthy)
    for t in tl.static_range(tokens.PUSH_TILES):
        next_tile = data_tile
        if t + 1 < tokens.PUSH_TILES:
            next_tile = _load_tile(tokens, number, t + 1)
        _push_tile(job, token, stages, tokens, data_tile, t, sizes.WP)
        if t == 0:
            # Compute and store the keys while the stores of the first tile are in flight.
            _push_keys(job, token, metas, first_ids, weights, tokens, HAS_WEIGHTS, choices, sizes)
        data_tile = next_tile
    tl.store(tokens.kept_idx_ptr + number * choices.TOPK + ks, mine, mask=entry)
    raised = in_group & healthy
    release_flags(flag_ptrs + arrival, raised, tl.zeros([sizes.WP], tl.int64) + (epoch << _CALL_SHIFT))


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
def _slab_scales(copy, segments):
    """Where the words of scales of output rows begin in the slabs, int64; copy: [ROWS].

    Example: rows of 896 words of 8 bytes have 224 bytes of scales, 56 words; word c of row i of expert x is word
    (x * 56 + c) * slab_rows + i.
    """
    expert = (copy // segments.slab_rows).to(tl.int64)
    return copy + expert * (segments.scale_words - 1) * segments.slab_rows


@triton.jit
def _store_copies(
    out,
    words,  # [ROWS, BLOCK_H]
    scales,
    h,
    copies,  # tuple of [ROWS] output rows of each staging row, negative = none
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
                dest = out.recv_scale_ptr.to(tl.pointer_type(tl.int32)) + _slab_scales(copy, segments)[:, None]
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
def _staging(job, epoch, choices, EP: tl.constexpr):
    """The buffers that a worker reads. It needs their addresses before it waits: afterwards each would be a load that
    the next one waits for."""
    first_source = first_of_half(job, epoch)
    first_row = first_source * job.max_tokens
    return Staging(
        epoch,
        own_buffer(job, LL_FLAG, tl.int64) + first_source,
        own_buffer(job, LL_COUNTS, tl.int64) + first_source * EP,
        own_buffer(job, LL_ROW_FLAG, tl.int64) + first_row,
        own_buffer(job, LL_STAGE_X, tl.uint8),
        own_buffer(job, LL_META, tl.int32) + first_row * (2 * choices.KP),
        first_source,
    )


@triton.jit
def _await_told(job, staging, WP: tl.constexpr):
    """Wait until every rank has told. Returns the host word and tokens of each rank [WP], whether all came in time, and
    whether all are in the same call."""
    source = tl.arange(0, WP)
    in_group = is_rank(job, source)
    flag_ptrs, first = staging.flag_ptr + source, staging.first_source
    arrived, seen = wait_values(job, flag_ptrs, in_group, staging.epoch << _CALL_SHIFT, WAIT_LL_ROWS, first)
    word_of = tl.where(in_group, seen, 0).to(tl.int32)
    own = tl.max(tl.where(source == job.rank, word_of, 0)) >> _WORD_SHIFT
    unlike = in_group & words_unlike(own, word_of >> _WORD_SHIFT)
    return word_of, arrived, tl.max(unlike.to(tl.int32)) == 0


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
    return tl.max(word_of & SLOT_MASK)


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
    staging,
    group,
    word_of,  # [WP] of `_await_told`
    begin,  # of `segments_of`
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
    here = alive & (token < (word & SLOT_MASK))
    first_source = staging.first_source
    flag_ptrs = staging.row_flag_ptr + arrival
    # The record of an expiry names the source.
    places = first_source + of_source - tl.arange(0, tile.ROWS)
    arrived = tl.max(here.to(tl.int32)) == 0
    if arrived == 0:
        arrived = wait_flags(job, flag_ptrs, here, staging.epoch << _CALL_SHIFT, WAIT_LL_ROWS, places)
    if group.is_last:  # this program waits for no rank any more
        let_next_start()
    if arrived:
        staged = first_source * job.max_tokens + arrival
        row_ptrs, scale_ptrs = staged_rows(staging.rows_ptr, staged, wire, WORD)
        # In flight while the output rows are computed.
        words, scales = _load_staged(out, row_ptrs, scale_ptrs, here, 0, segments, parts.HAS_SCALES, tile.BLOCK_H)
        ks = tl.arange(0, choices.KP)[None, :]
        meta_ptrs = staging.meta_ptr + arrival[:, None] * (2 * choices.KP) + ks
        key = tl.load(meta_ptrs, mask=here[:, None], other=-1)
        EP: tl.constexpr = begin.shape[0] // word_of.shape[0]
        copy = output_rows(key, of_source, begin, segments, EP, tile.ROWS, choices.KP)
        if parts.HAS_WEIGHTS:
            bits = tl.load(meta_ptrs + choices.KP, mask=here[:, None], other=0)
            weights = bits.to(tl.float32, bitcast=True)
            tl.store(out.recv_weights_ptr + copy, weights, mask=copy >= 0)
        _note_copies(out.copy_rows_ptr, arrival, alive, key >= 0, copy, choices)
        copies = _by_k(copy, choices.TOPK)
        for t in tl.static_range(tile.TILES):
            h = t * tile.BLOCK_H
            if t > 0:
                words, scales = _load_staged(
                    out, row_ptrs, scale_ptrs, here, h, segments, parts.HAS_SCALES, tile.BLOCK_H
                )
            _store_copies(out, words, scales, h, copies, segments, parts.HAS_SCALES, choices.TOPK)


@triton.jit
def _expand(job, epoch, worker, workers, out, segments, parts, choices, sizes, tile):
    """Lay out the staging rows of groups `worker`, `worker + workers`, ...; a group is ROWS rows."""
    staging = _staging(job, epoch, choices, sizes.EP)
    word_of, arrived, alike = _await_told(job, staging, sizes.WP)
    if arrived & alike:
        most = _most_tokens(word_of)
        total, padded, begin, in_time = segments_of(job, staging, segments, sizes.WP, sizes.EP)
        if in_time:
            # While rows are on their way.
            _note_absent(job, worker, workers, most, out.copy_rows_ptr, choices)
            if (parts.HAS_PADDING or parts.HAS_WEIGHTS) and not segments.SLABS:
                _zero_rest(worker, workers, out, total, padded, segments.capacity, parts, tile)
            groups = tl.cdiv(job.num_ranks * most, tile.ROWS)
            for first in range(worker, groups, workers):
                # The rows of a group lie far apart, so that groups are alike if there are few tokens.
                group = Group(first + tl.arange(0, tile.ROWS) * groups, first + workers >= groups)
                _expand_item(job, staging, group, word_of, begin, out, segments, parts, choices, tile)


@triton.jit
def _record(job, epoch, placement_ptr, segments, choices, sizes):
    """Write `placement`, or report ranks that are in other calls."""
    staging = _staging(job, epoch, choices, sizes.EP)
    word_of, arrived, alike = _await_told(job, staging, sizes.WP)
    if arrived & alike:
        total, padded, _, in_time = segments_of(job, staging, segments, sizes.WP, sizes.EP)
        if in_time:
            store_placement(job, placement_ptr, word_of, total, padded, segments, epoch)
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
        _record(job, epoch, out.placement_ptr, segments, choices, sizes)
    end_turn(turn_ptr, (number == last) & (number >= senders), launch.others)
