"""Rows that copy engines send within a node (`copy_engines`), instead of the kernels that push or publish them.

The host starts the copies without knowing what the kernels before them find, so these cannot hold the copies back. A
kernel that waited in vain says so to the ranks whose rows may be overwritten (kernels/device/overruns.py).
"""

from __future__ import annotations

from itertools import accumulate

import torch

from triton_ep.context.context import DispatchCombineContext
from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.context.given import Rows
from triton_ep.context.overlap import current_stream
from triton_ep.context.rows import RowFormat
from triton_ep.ops.routing import OwnRows
from triton_ep.runtime.copies import copy_bytes
from triton_ep.runtime.plans import exchange

_FLAG_BYTES = 8


def packed(fmt: RowFormat, x: Rows) -> Rows:
    """Rows [T, wire bytes] uint8 as they travel, in one piece, of rows with or without scales."""
    if x.scale is None:
        return Rows(x.data.contiguous())
    data, scale = x.data.view(torch.uint8), x.scale
    rows = torch.empty(data.shape[0], fmt.wire_bytes, dtype=torch.uint8, device=data.device)
    rows[:, : fmt.hidden] = data
    rows[:, fmt.hidden : fmt.hidden + scale.shape[1]] = scale
    return Rows(rows)


def send(ctx: DispatchCombineContext, fmt: RowFormat, rows: Rows, own: OwnRows) -> None:
    """Copy all rows of this rank to the staging buffers of the others, then the flags that say so; the rows to its own
    one, too, unless they are laid out from where they are.

    rows: from `packed`.
    """
    cfg = ctx.config
    nbytes, source, stream = rows.data.shape[0] * fmt.wire_bytes, rows.data.data_ptr(), _stream(ctx)
    for rank in _targets(cfg.rank, cfg.world_size, own.in_place):
        dest = ctx.memory.address_at("stage_x", rank) + cfg.rank * cfg.max_tokens * fmt.wire_bytes
        copy_bytes(dest, source, nbytes, stream)
    _send_flags(ctx, "arrive_flag", cfg.rank * fmt.shape.senders, 2)


def sends_compact(ctx: DispatchCombineContext, fmt: RowFormat, desc: EPAllToAllLayoutDesc, changed: bool) -> bool:
    """Whether copy engines can send the rows of a combine: compact rows of the layer, as they are, of which the host
    knows how many there are for each rank.

    changed: the rows are multiplied by weights, or spread over slots.
    """
    return desc.compact and desc.host_arrivals is not None and fmt is ctx.rows.own and not changed


def send_compact(
    ctx: DispatchCombineContext,
    fmt: RowFormat,
    y: torch.Tensor,
    desc: EPAllToAllLayoutDesc,
    num_flags: int,
    call: int,
    copy_own: bool,
) -> int:
    """Copy the compact rows y [R, H] to the combine buffers of the ranks whose tokens they are, then the flags that say
    so; before, wait until all ranks have ended the previous combine.

    num_flags: of this rank. call: COMBINE_* (kernels/device/codes.py). copy_own: the rows of this rank's own tokens,
    too.

    Returns the first of this rank's own rows in y, if they were not copied, else -1: kernels read them in pieces of 16
    bytes.
    """
    assert desc.host_arrivals is not None, "`sends_compact` has checked it"
    cfg, counts, row_bytes, stream = ctx.config, desc.host_arrivals, fmt.payload_bytes, _stream(ctx)
    ends = list(accumulate(counts))
    ctx.launcher(("begin",), exchange.begin).launch(1, placement_ptr=desc.placement, call=call)
    in_place = not copy_own and (y.data_ptr() | row_bytes) % 16 == 0
    for rank in _targets(cfg.rank, cfg.world_size, in_place):
        dest = ctx.memory.address_at("dispatch_output_buf", rank) + cfg.rank * cfg.max_tokens * row_bytes
        source = y.data_ptr() + (ends[rank] - counts[rank]) * row_bytes
        copy_bytes(dest, source, counts[rank] * row_bytes, stream)
    _send_flags(ctx, "staged_flag", cfg.rank * fmt.shape.max_programs, num_flags)
    return ends[cfg.rank] - counts[cfg.rank] if in_place else -1


def _send_flags(ctx: DispatchCombineContext, name: str, first: int, number: int) -> None:
    """Copy flags of this rank, raised by a kernel in its own memory, to the other ranks. A kernel that raised them
    there would wait for room next to other kernels."""
    cfg, stream = ctx.config, _stream(ctx)
    source = ctx.memory.address_at(name, cfg.rank) + first * _FLAG_BYTES
    for rank in _targets(cfg.rank, cfg.world_size, True):
        copy_bytes(ctx.memory.address_at(name, rank) + first * _FLAG_BYTES, source, number * _FLAG_BYTES, stream)


def _targets(rank: int, num_ranks: int, without_own: int | bool) -> list[int]:
    """The ranks after this one, so that all send to different ones at a time; last this one."""
    others = [(rank + distance) % num_ranks for distance in range(1, num_ranks)]
    return others if without_own else [*others, rank]


def _stream(ctx: DispatchCombineContext) -> int | None:
    return int(current_stream().cuda_stream) if ctx.device.type == "cuda" else None
