"""Low-latency dispatch of few tokens inside a node: two launches, and nothing is counted before rows are sent.

Protocol      1 push, one program per token: store the token's keys, -1 where the expert is elsewhere, and its weights
              at every rank. Store its row once at each rank that owns one of its experts, in a staging row reserved
              for this token. A key is (local expert << 16 | slot). The slot is the number of earlier entries of this
              rank for that expert; each program counts it for its own token. The program with the expert's last entry
              stores the total at the expert's owner
              2 push: every program adds to ll_flag of every rank; together they add max_tokens
              3 expand: wait until the flags of all ranks have their counts, and compare the host words: if ranks
              are in different calls, copy nothing (device/calls.py). Derive from the totals of all sources where each
              source's rows of each expert begin; that plus the slot is the output row. Copy rows, store their output
              rows (for combine), zero the padding. With slabs, expert i's rows begin at i * slab_rows, nothing is
              zeroed, and scales go to [e, scale_words, slab_rows], rows as the fast dimension
Layout        ll_stage_x [2, W * M, row on the wire (device/payload.py)], staging row = source rank * M + token;
              ll_meta [2, W * M, 2 * KP] int32: keys, then weights as float32 bits; ll_counts [2, W, EP] int64:
              (epoch << 16 | total), so a word of an older epoch counts as 0 and nothing needs clearing;
              ll_flag [2, W] int64: programs, host word and tokens (device/codes.py, LL_WORD_SHIFT). Each half gets
              max_tokens programs every second call, and the program of token 0 replaces the lower bits: it adds what
              it publishes now minus what it published last (LL_TOLD). The first dimension of all of them is the parity
              of the epoch. W ranks, M max_tokens, e experts per rank, KP top-k rounded up to a power of two.
Memory order  All stores of a program precede a block barrier and its release adds, at system scope. The adds to a
              flag form one release sequence, so 3, which acquires their total, sees the stores of all programs.
Progress      1 and 2 wait for nobody. 3 waits for the pushes of all ranks; its own rank's push is launched before it.
Replay        The epoch lives on the device, in two words: push reads the first and writes the second, expand the
              other way round, so no program reads a word that another program of its launch writes.
              Two halves suffice. A rank that pushes epoch n has ended its expand of n - 1. For that, every rank had
              set its flag n - 1, each after its own expand of n - 2, the last reader of the half that is now written.
              This holds for ll_flag, too: its low bits are those of one epoch.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device import codes
from ..device.buffers import (
    EPOCH_LL_DISPATCH,
    LL_COUNTS,
    LL_DISPATCH_SENT,
    LL_FLAG,
    LL_META,
    LL_STAGE_X,
    LL_TOLD,
    STATUS,
    buffer_ptrs,
    count_overflow,
    own_buffer,
)
from ..device.calls import CALLS_LL_DISPATCH, report_calls, store_epoch, words_unlike
from ..device.job import Job, in_one_node, is_local_expert, is_rank, num_experts, state_at
from ..device.low_latency import first_of_half, owners, quotient, rank_bits, release_counts
from ..device.payload import (
    MX,
    WORDS,
    Choices,
    Output,
    RowTile,
    Source,
    Weights,
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
from ..device.waits import WAIT_LL_ROWS, wait_values
from ..spec import ep_kernel

_SLOT_BITS = tl.constexpr(16)
_SLOT_MASK = tl.constexpr(0xFFFF)
_ONE_ABOVE = tl.constexpr(1 << 16)
_REST = tl.constexpr(64)
_BYTES_PER_SCALE_WORD = tl.constexpr(128)  # a byte of scales per 32 bytes of data
_WORD_SHIFT = tl.constexpr(codes.LL_WORD_SHIFT)
_COUNT_SHIFT = tl.constexpr(codes.LL_COUNT_SHIFT)


@triton.jit
def _kept(ids, num_experts):
    """Expert ids as int32; -1 for ids that name no expert."""
    return tl.where((ids >= 0) & (ids < num_experts), ids, -1).to(tl.int32)


@triton.jit
def _slots(topk_idx_ptr, mine, first, num_entries, num_experts, BLOCK_N: tl.constexpr):
    """Entries for the experts `mine` [KP] of one token: how many precede the token's own entry, and how many in all.

    first: index of the token's first entry.
    """
    position = first + tl.arange(0, mine.shape[0])
    packed = tl.zeros([mine.shape[0]], tl.int32)
    for start in range(0, num_entries, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        other = _kept(tl.load(topk_idx_ptr + n, mask=n < num_entries, other=-1), num_experts)
        earlier = (n[None, :] < position[:, None]).to(tl.int32)
        packed += tl.sum(tl.where(other[None, :] == mine[:, None], earlier + _ONE_ABOVE, 0), axis=1)
    return packed & _SLOT_MASK, packed >> _SLOT_BITS


class Sizes(NamedTuple):
    """Sizes rounded up to powers of two.

    Attributes:
        WP: all ranks. EP: local experts.
        BLOCK_N: entries compared at a time.
    """

    WP: tl.constexpr
    EP: tl.constexpr
    BLOCK_N: tl.constexpr


class PushTile(NamedTuple):
    """Tiles in which a program pushes its one token.

    Attributes:
        TILES: tiles of a row.
        BLOCK_H: words of a tile.
    """

    TILES: tl.constexpr
    BLOCK_H: tl.constexpr


class Segments(NamedTuple):
    """Output rows of the local experts.

    Attributes:
        capacity: most output rows.
        alignment: segments are padded to multiples of this number of rows.
        slab_rows: rows of the slab of an expert; read with SLABS.
        scale_words: words of 32 bits of scales that a row has in its slab; read with SLABS.
        SLABS: each expert has a slab of rows, and its rows begin there.
    """

    capacity: Any
    alignment: Any
    slab_rows: Any
    scale_words: Any
    SLABS: tl.constexpr


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
def _load_tile(source, token, num_tokens, t, BLOCK_H: tl.constexpr):
    """Tile `t` of the row of a token, [1, BLOCK_H]."""
    row = tl.arange(0, 1) + token
    row_ptrs = source.x_ptr + row.to(tl.int64) * source.row_words
    return load_row_tile(row_ptrs, row < num_tokens, t * BLOCK_H, source.row_words, BLOCK_H)


@triton.jit
def _push_tile(job, epoch, healthy, token, mine, source, data_tile, num_tokens, t, WP: tl.constexpr):
    """Store tile `t` of a token's row, `data_tile`, at every rank that owns one of its experts `mine`."""
    BLOCK_H: tl.constexpr = data_tile.shape[1]
    h = t * BLOCK_H
    wire = wire_of(source.row_words, source.x_ptr.dtype.element_ty, source.PAYLOAD)
    row = tl.arange(0, 1) + token
    scale_ptrs = source.scale_ptr + row.to(tl.int64) * (wire.data_bytes // 32)
    # Ranks and tokens begin with different destinations, so that they do not all start on the same link.
    first_rank = job.rank + token - quotient(job.rank + token, job.num_ranks) * job.num_ranks
    dest_rank = first_rank + tl.arange(0, WP)
    dest_rank = tl.where(dest_rank < job.num_ranks, dest_rank, dest_rank - job.num_ranks)
    bits = rank_bits(owners(mine, job.experts_per_rank), 0)
    goes_there = healthy & is_rank(job, tl.arange(0, WP)) & (((bits >> dest_rank) & 1) > 0)
    arrival = (first_of_half(job, epoch) + job.rank) * job.max_tokens + token
    offs = tl.arange(0, BLOCK_H)[None, :]
    data, scales = wire_tile(data_tile, scale_ptrs, row < num_tokens, h, source.row_words, source.PAYLOAD)
    dest = buffer_ptrs(job, LL_STAGE_X, dest_rank, goes_there, data.dtype)
    dest += arrival.to(tl.int64) * wire.stride
    data = tl.broadcast_to(data, [WP, BLOCK_H])
    tl.store(dest[:, None] + h + offs, data, mask=goes_there[:, None] & (h + offs < source.row_words))
    if source.PAYLOAD != WORDS:
        dest = buffer_ptrs(job, LL_STAGE_X, dest_rank, goes_there, tl.uint8)
        dest += arrival.to(tl.int64) * wire.row_bytes + wire.data_bytes
        scales = tl.broadcast_to(scales, [WP, scales.shape[1]])
        store_scales(dest, goes_there, scales, h, source.row_words, data.dtype.primitive_bitwidth // 8)


@triton.jit
def _push_keys(job, epoch, healthy, token, mine, topk_idx_ptr, routed, num_tokens, choices, sizes):
    """Store the keys and weights of a token at all ranks, and the totals of experts whose last entry is the token's at
    their owners."""
    ks = tl.arange(0, choices.KP)
    alive = token < num_tokens
    entry = alive & (ks < choices.TOPK)
    owner = owners(mine, job.experts_per_rank)
    sender = first_of_half(job, epoch) + job.rank
    arrival = sender * job.max_tokens + token
    slot, total = _slots(
        topk_idx_ptr, mine, token * choices.TOPK, num_tokens * choices.TOPK, num_experts(job), sizes.BLOCK_N
    )
    local = mine - owner * job.experts_per_rank
    peers = tl.arange(0, sizes.WP)
    to_all = alive & is_rank(job, peers) & healthy
    meta = (arrival * (2 * choices.KP) + ks)[None, :]
    dest = buffer_ptrs(job, LL_META, peers, to_all, tl.int32)[:, None] + meta
    keys = tl.where(owner[None, :] == peers[:, None], (local << _SLOT_BITS | slot)[None, :], -1)
    tl.store(dest, keys, mask=to_all[:, None])
    if routed.HAS_WEIGHTS:
        weights = tl.load(routed.weights_ptr + token * choices.TOPK + ks, mask=entry, other=0.0)
        dest = buffer_ptrs(job, LL_META, peers, to_all, tl.float32)[:, None] + meta + choices.KP
        tl.store(dest, tl.broadcast_to(weights[None, :], [sizes.WP, choices.KP]), mask=to_all[:, None])
    is_last = (mine >= 0) & (slot + 1 == total) & healthy
    counts_ptrs = buffer_ptrs(job, LL_COUNTS, owner, is_last, tl.int64)
    tl.store(counts_ptrs + sender * sizes.EP + local, (epoch << _SLOT_BITS) + total, mask=is_last)


@ep_kernel(
    x_ptr="*{WORD}",
    scale_ptr="*u8",
    topk_idx_ptr="*{IDX}",
    weights_ptr="*fp32",
    kept_idx_ptr="*i32",
    specialised=("row_words",),
    num_warps=8,
)
def low_latency_push_kernel(
    source: Source,
    topk_idx_ptr,  # [T, K] expert ids
    routed: Weights,  # [T, K]
    kept_idx_ptr,  # out [T, K] int32, -1 = dropped
    job: Job,
    num_tokens,
    host_word,
    choices: Choices,
    sizes: Sizes,
    tile: PushTile,
):
    job = in_one_node(job)
    # After a failure store nothing; an early return instead would make every load wait for this one.
    healthy = tl.load(state_at(job, STATUS)) == 0
    epoch = tl.load(state_at(job, EPOCH_LL_DISPATCH)) + 1
    token = tl.program_id(0)
    alive = token < num_tokens
    entry = alive & (tl.arange(0, choices.KP) < choices.TOPK)
    ids = tl.load(topk_idx_ptr + token * choices.TOPK + tl.arange(0, choices.KP), mask=entry, other=-1)
    mine = _kept(ids, num_experts(job))
    data_tile = _load_tile(source, token, num_tokens, 0, tile.BLOCK_H)
    _push_tile(job, epoch, healthy, token, mine, source, data_tile, num_tokens, 0, sizes.WP)
    # Compute and store the keys while the stores of the first tile are in flight.
    _push_keys(job, epoch, healthy, token, mine, topk_idx_ptr, routed, num_tokens, choices, sizes)
    for t in tl.static_range(1, tile.TILES):
        data_tile = _load_tile(source, token, num_tokens, t, tile.BLOCK_H)
        _push_tile(job, epoch, healthy, token, mine, source, data_tile, num_tokens, t, sizes.WP)

    kept_ptrs = kept_idx_ptr + token * choices.TOPK + tl.arange(0, choices.KP)
    tl.store(kept_ptrs, mine, mask=entry)
    # Program 0 also adds the counts of absent tokens (T < max_tokens) and publishes the per-call word.
    is_first = tl.program_id(0) == 0
    told_ptr = state_at(job, LL_TOLD) + (epoch & 1)
    telling = ((host_word << _WORD_SHIFT) + num_tokens).to(tl.int64)
    told = tl.load(told_ptr, mask=is_first, other=telling)
    absent = job.max_tokens - tl.maximum(num_tokens, 1)
    count = tl.where(is_first, absent + 1, 1).to(tl.int64)
    peers = tl.arange(0, sizes.WP)
    in_group = is_rank(job, peers) & healthy
    flag_ptrs = buffer_ptrs(job, LL_FLAG, peers, in_group, tl.int64) + first_of_half(job, epoch) + job.rank
    tl.store(told_ptr, telling, mask=is_first & healthy)
    tl.store(state_at(job, LL_DISPATCH_SENT), epoch, mask=is_first & healthy)
    added = tl.where(is_first, telling - told, 0) + (count << _COUNT_SHIFT)
    release_counts(flag_ptrs, in_group, tl.zeros([sizes.WP], tl.int64) + added)


@triton.jit
def _load_staged(out, row_ptrs, scale_ptrs, here, h, segments, HAS_SCALES: tl.constexpr, BLOCK_H: tl.constexpr):
    """Tile [ROWS, BLOCK_H] of staging rows and their scales: bytes, or with SLABS words of four; without scales the
    data twice."""
    PAYLOAD: tl.constexpr = MX if HAS_SCALES and not segments.SLABS else WORDS
    words, scales = load_payload(row_ptrs, scale_ptrs, here, h, out.row_words, PAYLOAD, BLOCK_H)
    if HAS_SCALES and segments.SLABS:
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
def _store_slab_scales(out, copy, words, scales, h, segments):
    """Store the words of scales of a tile to the slabs.

    Example: rows of 896 words of 8 bytes have 224 bytes of scales, 56 words; word c of row i of expert x goes to word
    (x * 56 + c) * slab_rows + i.
    """
    column = _scale_columns(h, words)
    expert = copy // segments.slab_rows
    first = copy.to(tl.int64) + expert.to(tl.int64) * (segments.scale_words - 1) * segments.slab_rows
    dest = out.recv_scale_ptr.to(tl.pointer_type(tl.int32)) + first[:, None]
    kept = (copy >= 0)[:, None] & (column < segments.scale_words)[None, :]
    tl.store(dest + column[None, :].to(tl.int64) * segments.slab_rows, scales, mask=kept)


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
            if HAS_SCALES and segments.SLABS:
                _store_slab_scales(out, copy, words, scales, h, segments)
            elif HAS_SCALES:
                dest = out.recv_scale_ptr + copy.to(tl.int64) * (out.row_words * WORD_BYTES // 32)
                store_scales(dest, copy >= 0, scales, h, out.row_words, WORD_BYTES)


@triton.jit
def _zero_rest(
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
    step = tl.num_programs(0)
    if parts.HAS_PADDING:
        WORD_BYTES: tl.constexpr = out.recv_x_ptr.dtype.element_ty.primitive_bitwidth // 8
        no_scales = tl.zeros([tile.ROWS, tile.BLOCK_H * WORD_BYTES // 32 if parts.HAS_SCALES else 1], tl.uint8)
        zeros = tl.zeros([tile.ROWS, tile.BLOCK_H], out.recv_x_ptr.dtype.element_ty)
        offs = tl.arange(0, tile.BLOCK_H)[None, :]
        for first in range(tl.program_id(0) * tile.ROWS, num_padding, step * tile.ROWS):
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
        for first in range(tl.program_id(0) * _REST, num_rest, step * _REST):
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
def _segments_of(job, counts_ptr, epoch, first_source, in_group, segments, WP: tl.constexpr, EP: tl.constexpr):
    """Rows of each local expert and of its segment, [EP] each, and the first output row of each source's rows of each
    expert, [WP * EP]."""
    source, local = tl.arange(0, WP), tl.arange(0, EP)
    # Words past the last expert, never written, carry no epoch and count as 0.
    counts_ptrs = counts_ptr + (first_source + source)[:, None] * EP + local[None, :]
    counts = tl.load(counts_ptrs, mask=in_group[:, None], other=0)
    counts = tl.where((counts >> _SLOT_BITS) == epoch, counts & _SLOT_MASK, 0).to(tl.int32)
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
def _note_copies(copy_rows_ptr, arrival, num_arrivals, is_copy, copy, choices):
    """Store the output rows [ROWS, KP] of staging rows for combine: assignments first, in k order, so that it may stop
    at the first -1."""
    ks = tl.arange(0, choices.KP)[None, :]
    copies_so_far = tl.cumsum(is_copy.to(tl.int32), axis=1)
    num_copies = tl.sum(is_copy.to(tl.int32), axis=1)[:, None]
    position = tl.where(is_copy, copies_so_far - 1, num_copies + ks - copies_so_far)
    noted = (arrival < num_arrivals)[:, None] & (position < choices.TOPK)
    tl.store(copy_rows_ptr + arrival[:, None] * choices.TOPK + position, copy, mask=noted)


@ep_kernel(
    recv_x_ptr="*{WORD}",
    recv_scale_ptr="*u8",
    recv_weights_ptr="*fp32",
    copy_rows_ptr="*i32",
    placement_ptr="*i32",
    specialised=("row_words",),
)
def low_latency_expand_kernel(
    out: Output,
    copy_rows_ptr,  # out [W * M, K] int32, output rows of each staging row, -2 = beyond the capacity; then -1
    placement_ptr,  # out int32 (device/tables.py), up to the number of the dispatch
    job: Job,
    segments: Segments,
    parts: Parts,
    choices: Choices,
    WP: tl.constexpr,
    EP: tl.constexpr,
    tile: RowTile,
):
    job = in_one_node(job)
    # Load addresses before the wait: its acquire empties L1.
    stage_ptr = own_buffer(job, LL_STAGE_X, tl.uint8)
    meta_ptr = own_buffer(job, LL_META, tl.int32)
    meta_weights_ptr = own_buffer(job, LL_META, tl.float32)
    counts_ptr = own_buffer(job, LL_COUNTS, tl.int64)
    epoch = tl.load(state_at(job, LL_DISPATCH_SENT))
    own_word = (tl.load(state_at(job, LL_TOLD) + (epoch & 1)) >> _WORD_SHIFT).to(tl.int32)
    if tl.program_id(0) == 0:
        tl.store(state_at(job, EPOCH_LL_DISPATCH), epoch)
    # Each use of this half so far has added max_tokens programs.
    expected = (((epoch + 1) >> 1) * job.max_tokens) << _COUNT_SHIFT
    first_source = first_of_half(job, epoch)
    source = tl.arange(0, WP)
    in_group = is_rank(job, source)
    flag_ptrs = own_buffer(job, LL_FLAG, tl.int64) + first_source + source
    arrived, seen = wait_values(job, flag_ptrs, in_group, expected, WAIT_LL_ROWS, first_source)
    word_of = tl.where(in_group, seen, 0).to(tl.int32)
    # `report_calls` is at the end of the kernel: calls that agree do not wait for it.
    alike = tl.max((in_group & words_unlike(own_word, word_of >> _WORD_SHIFT)).to(tl.int32)) == 0
    if arrived & alike:
        WORD: tl.constexpr = out.recv_x_ptr.dtype.element_ty
        wire = wire_of(out.row_words, WORD, MX if parts.HAS_SCALES else WORDS)
        # Take rows far apart, so that programs share the work if there are few tokens.
        num_arrivals = job.num_ranks * job.max_tokens
        arrival = tl.program_id(0) + tl.arange(0, tile.ROWS) * tl.num_programs(0)
        of_source = quotient(arrival, job.max_tokens)
        token = arrival - of_source * job.max_tokens
        word = tl.sum(tl.where(of_source[:, None] == source[None, :], word_of[None, :], 0), axis=1)
        here = (arrival < num_arrivals) & (token < (word & _SLOT_MASK))
        staged = first_source * job.max_tokens + arrival
        row_ptrs, scale_ptrs = staged_rows(stage_ptr, staged, wire, WORD)
        # In flight while the output rows are computed.
        words, scales = _load_staged(out, row_ptrs, scale_ptrs, here, 0, segments, parts.HAS_SCALES, tile.BLOCK_H)
        ks = tl.arange(0, choices.KP)[None, :]
        meta = staged[:, None] * (2 * choices.KP) + ks
        key = tl.load(meta_ptr + meta, mask=here[:, None], other=-1)
        if parts.HAS_WEIGHTS:
            weights = tl.load(meta_weights_ptr + meta + choices.KP, mask=here[:, None], other=0.0)

        total, padded, begin = _segments_of(job, counts_ptr, epoch, first_source, in_group, segments, WP, EP)
        copy = _output_rows(key, of_source, begin, segments, EP, tile.ROWS, choices.KP)
        if parts.HAS_WEIGHTS:
            tl.store(out.recv_weights_ptr + copy, weights, mask=copy >= 0)
        _note_copies(copy_rows_ptr, arrival, num_arrivals, key >= 0, copy, choices)
        # Every thread needs all output rows: keep them in registers, because memory would be a chain of loads.
        copies = ()
        for k in tl.static_range(choices.TOPK):
            copies += (tl.sum(tl.where(ks == k, copy, 0), axis=1),)
        for t in tl.static_range(tile.TILES):
            if t > 0:
                words, scales = _load_staged(
                    out, row_ptrs, scale_ptrs, here, t * tile.BLOCK_H, segments, parts.HAS_SCALES, tile.BLOCK_H
                )
            _store_copies(out, words, scales, t * tile.BLOCK_H, copies, segments, parts.HAS_SCALES, choices.TOPK)
        if (parts.HAS_PADDING or parts.HAS_WEIGHTS) and not segments.SLABS:
            _zero_rest(out, total, padded, segments.capacity, parts, tile)
        if tl.program_id(0) == 0:
            _store_placement(job, placement_ptr, word_of, total, padded, segments, epoch)
    if arrived & (alike == 0):
        report_calls(job, source, word_of >> _WORD_SHIFT, in_group, CALLS_LL_DISPATCH)
