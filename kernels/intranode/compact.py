"""Compact output of a dispatch: one row per (token, rank), with the local experts that the row is for.

Protocol      Like the expand kernel (intranode/dispatch.py, steps 3 and 4): copy the own rows from where the caller has
              them, unless they are pushed, too; then wait until all programs of all local ranks have finished the next
              step; after their last step, with several nodes, wait likewise for the steps of
              the forward kernels (internode/dispatch.py). Then copy the staging rows of the step, each to the output
              row of the same number. Store the expert ids and weights of all rows of this node with the first step,
              when stage_meta is there, and those of forwarded rows with the rows. Ids and weights of rows that do not
              arrive are filled with -1 and 0 before. If the dispatch is held, nothing is copied, and the kernel is
              launched again (device/host_read.py)
Layout        stage_x, stage_meta, arrive_flag: as in intranode/dispatch.py. recv_x [R, row], recv_scale [R, row / 32],
              recv_idx [R, K] local expert ids, -1 = an expert of another rank, or none; recv_weights [R, K] float32,
              zero where recv_idx is -1. Rows are ordered by source rank, then by token, like the staging rows.
              stage_meta gives the expert-major row of each assignment of a staging row; its expert is the last one
              whose segment starts at or before that row.
Memory order  Acquires the releases of push and forward, which cover stage_x and stage_meta. Rows may be copied in bulk,
              as in intranode/dispatch.py.
Progress      Waits only for other ranks' pushes and forwards; its grid is independent of theirs. It may run
              concurrently with this rank's own push and forward, if those are launched first, or be launched early, as
              in intranode/dispatch.py.
Replay        stage_x is free again when this rank posts its next splits row (internode/splits.py). Flags and staging
              rows outlive this kernel, so it may run again for the same dispatch, as long as the caller's rows are the
              same.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.arrivals import (
    Arrivals,
    OwnRows,
    arrived_rows,
    bytes_of_rows,
    described_rows,
    is_described,
    own_flags,
    own_rows,
    place_of,
    rows_from_there,
    sources_of,
    stage_sources,
    wait_arrivals,
)
from ..device.buffers import STAGE_META, STATUS, own_buffer
from ..device.bulk import close_ring, filled_bytes, open_ring
from ..device.bulk_arrivals import copy_arrived
from ..device.early import await_previous
from ..device.groups import my_first
from ..device.host_read import is_held
from ..device.job import Job, num_nodes, state_at
from ..device.payload import (
    MX,
    WORDS,
    Choices,
    CopyTile,
    Output,
    fill_rest,
    load_staged_tile,
    staged_rows,
    store_staged_tile,
    wire_of,
)
from ..device.tables import REPORT_ARRIVALS, STEPS, expert_offsets_of, report_ptrs
from ..spec import ep_kernel

_ITEMS = tl.constexpr(8)
"""Tiles of rows whose experts are stored at a time."""


@triton.jit
def _local_experts(job, dst, placement_ptr):
    """Local expert of each expert-major row [ROWS, KP]; -1 where the row is -1."""
    expert_offsets_ptr = expert_offsets_of(job, placement_ptr)
    step = tl.full([], 1, tl.int32)
    while 2 * step < job.experts_per_rank:
        step *= 2
    # A binary search for the last expert whose first row is not past this one.
    found = tl.zeros(dst.shape, tl.int32)
    while step > 0:
        expert = found + step
        known = expert < job.experts_per_rank
        start = tl.load(expert_offsets_ptr + expert, mask=known, other=0)
        found = tl.where(known & (start <= dst), expert, found)
        step //= 2
    return tl.where(dst >= 0, found, -1)


@triton.jit
def _copy_rows(
    out,
    row,  # [ROWS] output rows
    alive,  # [ROWS]
    source_ptr,  # bytes of row 0
    at,  # [ROWS] rows there
    HAS_SCALES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    TILES: tl.constexpr,  # tiles of a row
):
    """Copy rows on the wire to output rows."""
    WORD: tl.constexpr = out.recv_x_ptr.dtype.element_ty
    wire = wire_of(out.row_words, WORD, MX if HAS_SCALES else WORDS)
    row_ptrs, _ = staged_rows(source_ptr, at, wire, WORD)
    dst = tl.where(alive, row, -1)
    for number in tl.static_range(TILES):
        h = number * BLOCK_H
        words = load_staged_tile(row_ptrs, alive, h, out.row_words, HAS_SCALES, BLOCK_H)
        store_staged_tile(out, dst, words, h, HAS_SCALES)


@triton.jit
def _store_experts(
    job,
    idx_ptr,
    weights_ptr,
    placement_ptr,
    row,  # [ROWS]
    alive,  # [ROWS]
    HAS_WEIGHTS: tl.constexpr,
    choices,
):
    """Store the local experts of staging rows, and their weights."""
    stage_rows_ptr = own_buffer(job, STAGE_META, tl.int32)
    stage_weights_ptr = own_buffer(job, STAGE_META, tl.float32) + choices.KP
    ks = tl.arange(0, choices.KP)[None, :]
    mask = alive[:, None] & (ks < choices.TOPK)
    meta = row.to(tl.int64)[:, None] * (2 * choices.KP) + ks
    at = row.to(tl.int64)[:, None] * choices.TOPK + ks
    dst = tl.load(stage_rows_ptr + meta, mask=mask, other=-1)
    local = _local_experts(job, dst, placement_ptr)
    tl.store(idx_ptr + at, local.to(idx_ptr.dtype.element_ty), mask=mask)
    if HAS_WEIGHTS:
        weights = tl.load(stage_weights_ptr + meta, mask=mask, other=0.0)
        tl.store(weights_ptr + at, tl.where(dst >= 0, weights, 0.0), mask=mask)


class Parts(NamedTuple):
    """Outputs that accompany the rows.

    Attributes:
        HAS_SCALES: scales of MXFP8.
        HAS_IDX: local experts of each row, [R, K].
        HAS_WEIGHTS: weights of these experts; only with HAS_IDX.
    """

    HAS_SCALES: tl.constexpr
    HAS_IDX: tl.constexpr
    HAS_WEIGHTS: tl.constexpr


@triton.jit
def _receive_rows(
    job,
    out,
    arrived,  # ArrivedRows
    arrivals,
    own,  # OwnRows: `arrived` are these rows; None: they are staged
    row_limit,
    HAS_SCALES: tl.constexpr,
    tile,
    base,  # ring
):
    """Copy this program's share of some rows. Shares depend on position, as in the expand kernel."""
    if tile.SLOTS > 0:
        copy_arrived(job, out, arrived, arrivals, own, row_limit, None, None, tile, base)
    else:
        source_ptr = bytes_of_rows(job, own)
        stage_source_ptr = stage_sources(job)
        first = my_first(arrived.first, 0)
        for number in tl.range(first, arrived.end, tl.num_programs(0), num_stages=tile.STAGES):
            first_row, end = place_of(job, arrived, number, tile.ROWS, arrivals.LWP)
            row = first_row + tl.arange(0, tile.ROWS)
            alive = row < tl.minimum(end, row_limit)
            at = rows_from_there(arrivals, own, stage_source_ptr, row, number, alive)
            _copy_rows(out, row, alive, source_ptr, at, HAS_SCALES, tile.BLOCK_H, tile.TILES)


@triton.jit
def _receive_experts(
    job,
    out,
    recv_idx_ptr,
    placement_ptr,
    arrived,  # ArrivedRows
    LWP: tl.constexpr,
    row_limit,
    parts,
    choices,
    ROWS: tl.constexpr,
):
    """Store the experts and weights of the same share: in a loop of its own, because the compiler loads rows ahead only
    in loops without others inside."""
    if parts.HAS_IDX:
        first = my_first(arrived.first, 0)
        for number in tl.range(first, arrived.end, tl.num_programs(0) * _ITEMS):
            items = number + tl.arange(0, _ITEMS) * tl.num_programs(0)
            first_row, end = place_of(job, arrived, items, ROWS, LWP)
            row = first_row[:, None] + tl.arange(0, ROWS)[None, :]
            alive = row < tl.minimum(end, row_limit)[:, None]
            _store_experts(
                job,
                recv_idx_ptr,
                out.recv_weights_ptr,
                placement_ptr,
                tl.reshape(row, [_ITEMS * ROWS]),
                tl.reshape(alive, [_ITEMS * ROWS]),
                parts.HAS_WEIGHTS,
                choices,
            )


@ep_kernel(
    recv_x_ptr="*{WORD}",
    recv_scale_ptr="*u8",
    recv_idx_ptr="*{IDX}",
    recv_weights_ptr="*fp32",
    x_ptr="*u8",
    tokens_ptr="*i64",
    specialised=("row_words",),
    num_warps=None,
)
def compact_rows_kernel(
    out: Output,
    recv_idx_ptr,  # out [R, K] int32 or int64, written if HAS_IDX
    placement_ptr,  # device/tables.py
    job: Job,
    row_limit,  # R: staging rows from this one on are left out
    arrivals: Arrivals,
    own: OwnRows,
    parts: Parts,
    choices: Choices,
    tile: CopyTile,
):
    base = open_ring(tile)
    flags = own_flags(job)
    arrived = (tl.load(state_at(job, STATUS)) == 0) & (is_held(job, placement_ptr) == 0)
    if parts.HAS_IDX:
        # A static buffer has more rows than arrive; a failed dispatch has none.
        num_rows = tl.minimum(tl.load(report_ptrs(placement_ptr, job.rank, REPORT_ARRIVALS)), row_limit)
        first = tl.where(arrived, num_rows, 0) * choices.TOPK
        fill_rest(recv_idx_ptr, first, row_limit * choices.TOPK, -1, filled_bytes(tile.SLOTS))
        if parts.HAS_WEIGHTS:
            fill_rest(out.recv_weights_ptr, first, row_limit * choices.TOPK, 0.0, filled_bytes(tile.SLOTS))
    LWP: tl.constexpr = arrivals.LWP
    if arrived & (own.in_place != 0):
        news = own_rows(job, placement_ptr, tile.ROWS, LWP)
        _receive_rows(job, out, news, arrivals, own, row_limit, parts.HAS_SCALES, tile, base)
        _receive_experts(job, out, recv_idx_ptr, placement_ptr, news, LWP, row_limit, parts, choices, tile.ROWS)
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
                _receive_rows(job, out, news, arrivals, None, row_limit, parts.HAS_SCALES, tile, base)
                if described:
                    # Here, and not with each step: nothing is left to look up when the last rows have come.
                    news = described_rows(job, sources, index, done, ready, own_done, tile.ROWS, LWP)
                    _receive_experts(
                        job, out, recv_idx_ptr, placement_ptr, news, LWP, row_limit, parts, choices, tile.ROWS
                    )
                done = ready
    close_ring(tile)
    await_previous()
