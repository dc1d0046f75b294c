"""Barriers, and the post that ends a combine (kernels/internode/barrier.py)."""

from __future__ import annotations

from triton_ep.context import DispatchCombineContext, device_epoch, device_index
from triton_ep.ops.tuning import common_constexprs
from triton_ep.runtime import launch


def barrier_all(ctx: DispatchCombineContext, intra_node_only: bool = False) -> None:
    """Wait on the device until all ranks (of this node) have reached this point of their streams."""
    if intra_node_only:
        _launch(ctx, "BARRIER_NODE", "node_barrier_flag", same_node_only=True, wait=True)
    else:
        _launch(ctx, "BARRIER_ALL", "barrier_flag", same_node_only=False, wait=True)


def post_combine_done(ctx: DispatchCombineContext) -> None:
    """Tell every rank that this one no longer reads combine buffers; advances the combine epoch."""
    _launch(ctx, "COMBINE", "done_flag", same_node_only=False, wait=False)


def _launch(ctx: DispatchCombineContext, epoch: str, flag: str, *, same_node_only: bool, wait: bool) -> None:
    cfg = ctx.config
    launch(
        "barrier_kernel",
        1,
        (
            ctx.state,
            ctx.tables,
            cfg.rank,
            cfg.world_size,
            cfg.local_world_size,
        ),
        {
            "EPOCH": device_epoch(epoch),
            "FLAG_BUFFER": device_index(flag),
            "SAME_NODE_ONLY": same_node_only,
            "WAIT": wait,
            "NETWORK": ctx.network,
            **common_constexprs(ctx.sizes, "WP", "LWP"),
        },
        ctx.extern_libs(),
    )
