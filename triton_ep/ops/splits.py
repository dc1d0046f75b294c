"""Splits exchange between all ranks (kernels/internode/splits.py)."""

from __future__ import annotations

import torch

from triton_ep.context import NO_LIMIT, DispatchCombineContext
from triton_ep.layout import next_power_of_2
from triton_ep.ops.routing import Routing, num_chunks
from triton_ep.ops.tuning import common_constexprs
from triton_ep.runtime import Launcher

_COLUMNS = 16  # of a program
_SEGMENTS = 4096  # of a program's tile, at most, unless one owner has more


def exchange(
    ctx: DispatchCombineContext, routing: Routing, host_word: int, bad_scatter: torch.Tensor | None
) -> torch.Tensor:
    """Post this rank's counts to all ranks, wait for theirs, and derive where all segments start.

    host_word goes out as it is, plus `bad_scatter` [1] int32 from the device. Advances the dispatch epoch. Returns
    `placement`, int32 (kernels/device/tables.py).
    """
    cfg, sizes = ctx.config, ctx.sizes
    placement = torch.empty(sizes.placement_length, dtype=torch.int32, device=ctx.device)
    ctx.launcher(("splits", bad_scatter is not None), _exchange, bad_scatter is not None)(
        -(-sizes.num_columns // _COLUMNS),
        routing.chunks,
        placement,
        placement if bad_scatter is None else bad_scatter,
        ctx.state,
        ctx.tables,
        num_chunks(routing.num_tokens),
        routing.num_tokens,
        host_word,
        cfg.rank,
        cfg.world_size,
        cfg.num_experts_per_rank,
        cfg.local_world_size,
        cfg.alignment,
        NO_LIMIT if cfg.recv_capacity is None else cfg.recv_capacity,
    )
    return placement


def _exchange(ctx: DispatchCombineContext, has_scatter: bool) -> Launcher:
    cfg, sizes = ctx.config, ctx.sizes
    ranks, experts = next_power_of_2(cfg.world_size), next_power_of_2(cfg.num_experts_per_rank)
    constexprs = {
        "HAS_SCATTER": has_scatter,
        "NETWORK": ctx.network,
        "EP": experts,
        "OWNERS": max(min(ranks, _SEGMENTS // (ranks * experts)), 1),
        "BLOCK_N": min(max(next_power_of_2(num_chunks(cfg.max_tokens)), 16), 256),
        "BLOCK_C": _COLUMNS,
        "BLOCK": min(next_power_of_2(sizes.row_length), 512),
        **common_constexprs(sizes, "WP", "LWP"),
    }
    return Launcher("splits_kernel", constexprs, ctx.extern_libs())
