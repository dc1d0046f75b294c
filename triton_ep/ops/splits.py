"""Splits exchange between all ranks (kernels/internode/splits.py)."""

from __future__ import annotations

import torch

from triton_ep.context.context import NO_LIMIT, DispatchCombineContext
from triton_ep.ops.routing import Routing, num_chunks
from triton_ep.runtime.plans import exchange as plans


def exchange(
    ctx: DispatchCombineContext,
    routing: Routing,
    host_word: int,
    bad_scatter: torch.Tensor | None,
    routed: torch.Tensor | None,
    room: tuple[int, int] | None,
    needed_tokens: int = 0,
) -> torch.Tensor:
    """Post this rank's counts to all ranks, wait for theirs, and derive where all segments start.

    host_word goes out as it is, plus `bad_scatter` [1] int32 from the device, and with HOST_AGAIN the number of the
    dispatch that wrote `routed`. needed_tokens: what a rank that sends nothing reports as its tokens, because they are
    more than the layer has room for. room: arrival rows and output rows for which there is room, where the host will
    read what arrives; None: it will not. Advances the dispatch epoch.

    Returns `placement`, int32 (kernels/device/tables.py).
    """
    cfg, sizes = ctx.config, ctx.sizes
    arrival_room, output_room = (0, 0) if room is None else room
    placement = torch.empty(sizes.placement_length, dtype=torch.int32, device=ctx.device)
    ctx.launcher(("splits", bad_scatter is not None), plans.splits, bad_scatter is not None).launch(
        -(-sizes.shape.num_columns // plans.SPLITS_COLUMNS),
        chunks_ptr=routing.chunks,
        placement_ptr=placement,
        # Pointers of the right type; not read without.
        bad_scatter_ptr=placement if bad_scatter is None else bad_scatter,
        routed_ptr=placement if routed is None else routed,
        told_ptr=ctx.host_read.memory,
        num_chunks=num_chunks(routing.num_tokens),
        num_tokens=needed_tokens or routing.num_tokens,
        host_word=host_word,
        alignment=cfg.alignment,
        recv_capacity=NO_LIMIT if cfg.recv_capacity is None else cfg.recv_capacity,
        read_number=0 if room is None else ctx.host_read.begin(),
        arrival_room=arrival_room,
        output_room=output_room,
    )
    return placement
