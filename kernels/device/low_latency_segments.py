"""Segments of output rows of a low-latency dispatch: where the rows of each source begin for each local expert.

Every rank stores the totals of its entries at the experts' owners, in `ll_counts`, each next to the number of the
dispatch (`await_words`). An output row follows from the totals of all sources and from the row's slot, its number among
the rows of its source for its expert: the key of an assignment is (local expert << SLOT_BITS | slot).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import codes
from .buffers import count_overflow
from .calls import store_epoch
from .job import is_local_expert, is_rank
from .low_latency import await_words, lacking, load_words
from .tables import (
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
from .waits import WAIT_LL_ROWS, report_expiry

SLOT_BITS = tl.constexpr(16)
SLOT_MASK = tl.constexpr(0xFFFF)
_WORD_SHIFT = tl.constexpr(codes.LL_WORD_SHIFT)
_CALL_SHIFT = tl.constexpr(codes.LL_CALL_SHIFT)


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


@triton.jit
def await_counts(job, staging, WP: tl.constexpr, EP: tl.constexpr):
    """Entries of each source for each local expert [WP, EP], and whether all came in time."""
    source, local = tl.arange(0, WP), tl.arange(0, EP)
    counted = is_rank(job, source)[:, None] & is_local_expert(job, local)[None, :]
    offs = source[:, None] * EP + local
    words = load_words(staging.counts_ptr, offs, counted)
    words, in_time = await_words(job, staging.counts_ptr, offs, counted, words, staging.epoch)
    if in_time == 0:
        # A rank that has told, but whose counts are missing, counts as one call behind.
        missing = tl.max(lacking(words, counted, staging.epoch).to(tl.int32), axis=1)
        expected = staging.epoch << _CALL_SHIFT
        report_expiry(job, expected - missing, expected, staging.first_source, WAIT_LL_ROWS)
    return tl.where(counted, words.to(tl.int32), 0), in_time


@triton.jit
def segments_of(job, staging, segments, WP: tl.constexpr, EP: tl.constexpr):
    """Rows of each local expert and of its segment, [EP] each, the first output row of each source's rows of each
    expert, [WP * EP], and whether all counts came in time."""
    local = tl.arange(0, EP)
    counts, in_time = await_counts(job, staging, WP, EP)
    total = tl.sum(counts, axis=0)
    if segments.SLABS:
        padded = tl.where(is_local_expert(job, local), segments.slab_rows, 0)
    else:
        padded = (total + segments.alignment - 1) // segments.alignment * segments.alignment
    start = tl.cumsum(padded, axis=0) - padded
    begin = start[None, :] + tl.cumsum(counts, axis=0) - counts
    return total, padded, tl.reshape(begin, [WP * EP]), in_time


@triton.jit
def output_rows(
    key,  # [ROWS, KP] of the assignments, negative = none
    of_source,  # [ROWS]
    begin,  # of `segments_of`
    segments,
    EP: tl.constexpr,
    ROWS: tl.constexpr,
    KP: tl.constexpr,
):
    """[ROWS, KP] output row of each assignment: -1 = none, -2 = beyond the capacity."""
    is_copy = key >= 0
    segment = tl.where(is_copy, of_source[:, None] * EP + (key >> SLOT_BITS), 0)
    first = tl.reshape(tl.gather(begin, tl.reshape(segment, [ROWS * KP]), 0), [ROWS, KP])
    copy = first + (key & SLOT_MASK)
    end = segments.capacity
    if segments.SLABS:
        end = ((key >> SLOT_BITS) + 1) * segments.slab_rows
    return tl.where(is_copy, tl.where(copy < end, copy, -2), -1)


@triton.jit
def store_placement(
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
    tokens, host_word = (word_of & SLOT_MASK)[:, None], (word_of >> _WORD_SHIFT)[:, None]
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
