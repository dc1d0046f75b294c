"""Compact output of a dispatch: one row per (token, rank), and which experts of this rank the row is for.

Protocol      As the expand kernel (intranode/dispatch.py, steps 3 and 4): wait until all programs of all local ranks
              are a step further; with several nodes, when there is no further step, for the steps of the
              forwarding kernels (internode/dispatch.py). Then copy the arrival rows of the step, each to the output
              row of the same number, with its expert ids and weights
Layout        stage_x, stage_meta, arrive_flag: as there. recv_x [R, row], recv_scale [R, row / 32], recv_idx [R, K]
              local expert ids, -1 = an expert of another rank, or none; recv_weights [R, K] float32, zero where
              recv_idx is -1. Rows by source rank, then by token: that of the arrival rows. stage_meta says which
              expert-major rows the copies of an arrival would be; the expert is the last one whose segment starts
              at or before that row.
Memory order  Acquires the releases of push and forward, which cover stage_x and stage_meta.
Progress      Waits for other ranks' pushes and forwards only; its grid is independent of theirs. It may run beside
              this rank's own push and forward, if those are launched first.
Replay        stage_x is free again when this rank posts its next splits row (internode/splits.py).
"""

import triton
import triton.language as tl

from ..device.buffers import ARRIVE_FLAG, STAGE_META, STAGE_X, STATUS, buffer_ptr
from ..device.groups import my_first, pick
from ..device.rows import MX, WORDS, load_payload, store_scales, wait_arrivals, wire_sizes
from ..device.tables import STEPS, expert_offsets_of
from ..spec import ep_kernel

_NO_ROW = tl.constexpr(2**31 - 1)
_EXPERTS = tl.constexpr(32)
"""Experts that a row number is compared with at a time."""


@triton.jit
def _local_experts(dst, expert_offsets_ptr, experts_per_rank):
    """Local expert of each expert-major row [ROWS, KP]; -1 where there is none."""
    found = tl.zeros(dst.shape, tl.int32)
    for first in range(1, experts_per_rank, _EXPERTS):
        expert = first + tl.arange(0, _EXPERTS)
        starts = tl.load(expert_offsets_ptr + expert, mask=expert < experts_per_rank, other=_NO_ROW)
        found += tl.sum((dst[:, :, None] >= starts[None, None, :]).to(tl.int32), axis=2)
    return tl.where(dst >= 0, found, -1)


@triton.jit
def _copy_rows(
    recv_x_ptr,
    recv_scale_ptr,
    recv_idx_ptr,
    recv_weights_ptr,
    expert_offsets_ptr,
    tables_ptr,
    start,  # first arrival row of a source
    first,  # tiles of the source's rows from here
    end,  # to before here
    num_rows,  # of the source
    row_words,
    row_limit,
    rank,
    num_ranks,
    experts_per_rank,
    HAS_SCALES: tl.constexpr,
    HAS_IDX: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    TOPK: tl.constexpr,
    KP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Copy this program's share of some arrival rows. Shares are by position, as in the expand kernel."""
    WORD_BYTES: tl.constexpr = recv_x_ptr.dtype.element_ty.primitive_bitwidth // 8
    PAYLOAD: tl.constexpr = MX if HAS_SCALES else WORDS
    stride, data_bytes, row_bytes = wire_sizes(row_words, recv_x_ptr.dtype.element_ty, PAYLOAD)
    stage_bytes_ptr = buffer_ptr(tables_ptr, STAGE_X, num_ranks, rank, tl.uint8)
    stage_x_ptr = buffer_ptr(tables_ptr, STAGE_X, num_ranks, rank, recv_x_ptr.dtype.element_ty)
    stage_rows_ptr = buffer_ptr(tables_ptr, STAGE_META, num_ranks, rank, tl.int32)
    stage_weights_ptr = buffer_ptr(tables_ptr, STAGE_META, num_ranks, rank, tl.float32) + KP
    ks = tl.arange(0, KP)[None, :]
    offs = tl.arange(0, BLOCK_H)
    for tile in range(my_first(first, start // ROWS), end, tl.num_programs(0)):
        row = start + tile * ROWS + tl.arange(0, ROWS)
        alive = (row < start + num_rows) & (row < row_limit)
        for h in range(0, row_words, BLOCK_H):
            words, scales = load_payload(
                stage_x_ptr + row.to(tl.int64) * stride,
                stage_bytes_ptr + row.to(tl.int64) * row_bytes + data_bytes,
                alive,
                h,
                row_words,
                PAYLOAD,
                BLOCK_H,
            )
            dest = recv_x_ptr + row.to(tl.int64)[:, None] * row_words + h + offs[None, :]
            tl.store(dest, words, mask=alive[:, None] & (h + offs < row_words)[None, :])
            if HAS_SCALES:
                dest = recv_scale_ptr + row.to(tl.int64) * (data_bytes // 32)
                store_scales(dest, alive, scales, h, row_words, WORD_BYTES)
        if HAS_IDX:
            mask = alive[:, None] & (ks < TOPK)
            meta = row.to(tl.int64)[:, None] * (2 * KP) + ks
            out = row.to(tl.int64)[:, None] * TOPK + ks
            dst = tl.load(stage_rows_ptr + meta, mask=mask, other=-1)
            local = _local_experts(dst, expert_offsets_ptr, experts_per_rank)
            tl.store(recv_idx_ptr + out, local.to(recv_idx_ptr.dtype.element_ty), mask=mask)
            if HAS_WEIGHTS:
                weights = tl.load(stage_weights_ptr + meta, mask=mask, other=0.0)
                tl.store(recv_weights_ptr + out, tl.where(dst >= 0, weights, 0.0), mask=mask)


@ep_kernel(
    recv_x_ptr="*{WORD}",
    recv_scale_ptr="*u8",
    recv_idx_ptr="*{IDX}",
    recv_weights_ptr="*fp32",
    specialised=("row_words",),
    num_warps=None,
)
def compact_rows_kernel(
    recv_x_ptr,  # out [R, row_words] words
    recv_scale_ptr,  # out [R, row bytes / 32] uint8, written if HAS_SCALES
    recv_idx_ptr,  # out [R, K] int32 or int64, written if HAS_IDX
    recv_weights_ptr,  # out [R, K] float32, written if HAS_IDX and HAS_WEIGHTS
    placement_ptr,  # device/tables.py
    state_ptr,
    tables_ptr,
    row_words,
    row_limit,  # R: arrivals from this row on are left out
    rank,
    num_ranks,
    ranks_per_node,
    experts_per_rank,
    num_senders,  # programs of the push, and of the forward, kernel
    HAS_SCALES: tl.constexpr,
    HAS_IDX: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    TOPK: tl.constexpr,
    KP: tl.constexpr,
    SOURCES: tl.constexpr,  # device/rows.py
    SENDERS: tl.constexpr,  # likewise
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    source = tl.arange(0, SOURCES)
    my_node = rank // ranks_per_node
    num_nodes = num_ranks // ranks_per_node
    flags_ptr = buffer_ptr(tables_ptr, ARRIVE_FLAG, num_ranks, rank, tl.int64)
    arrived = tl.load(state_ptr + STATUS) == 0
    for index in range(num_nodes):
        node = (my_node - index + num_nodes) % num_nodes
        report_ptrs = placement_ptr + (node * ranks_per_node + source) * 8
        starts = tl.load(report_ptrs + 6, mask=source < ranks_per_node, other=0)
        counts = tl.load(report_ptrs + 7, mask=source < ranks_per_node, other=0)
        steps = tl.zeros([], tl.int64)
        done = tl.zeros([SOURCES], tl.int32)
        while (steps < STEPS) & arrived:
            arrived, ready, steps = wait_arrivals(
                flags_ptr,
                node,
                steps,
                done,
                starts,
                counts,
                state_ptr,
                rank,
                ranks_per_node,
                num_senders,
                SOURCES,
                SENDERS,
                ROWS,
            )
            if arrived:
                for local in range(ranks_per_node):
                    _copy_rows(
                        recv_x_ptr,
                        recv_scale_ptr,
                        recv_idx_ptr,
                        recv_weights_ptr,
                        expert_offsets_of(placement_ptr, num_ranks),
                        tables_ptr,
                        pick(starts, local),
                        pick(done, local),
                        pick(ready, local),
                        pick(counts, local),
                        row_words,
                        row_limit,
                        rank,
                        num_ranks,
                        experts_per_rank,
                        HAS_SCALES,
                        HAS_IDX,
                        HAS_WEIGHTS,
                        TOPK,
                        KP,
                        ROWS,
                        BLOCK_H,
                    )
                done = ready
