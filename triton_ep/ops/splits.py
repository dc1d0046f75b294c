"""Splits exchange between all ranks (kernels/internode/splits.py)."""

from __future__ import annotations

import torch

from triton_ep.context import DispatchCombineContext
from triton_ep.layout import next_power_of_2
from triton_ep.ops.tuning import common_constexprs
from triton_ep.runtime import launch


def exchange(ctx: DispatchCombineContext, row: torch.Tensor) -> None:
    """Post this rank's splits row [S] int32 to all ranks and wait for theirs; advances the dispatch epoch."""
    cfg, sizes = ctx.config, ctx.sizes
    launch(
        "splits_exchange_kernel",
        1,
        (
            row,
            ctx.state,
            ctx.tables,
            cfg.rank,
            cfg.world_size,
            cfg.local_world_size,
            sizes.row_length,
        ),
        {
            "NETWORK": ctx.network,
            "BLOCK": min(next_power_of_2(sizes.row_length), 512),
            **common_constexprs(sizes, "WP", "LWP"),
        },
        ctx.extern_libs(),
    )
