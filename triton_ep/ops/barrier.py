"""Barriers (kernels/internode/barrier.py)."""

from __future__ import annotations

from triton_ep.context import DispatchCombineContext, device_epoch, device_index
from triton_ep.ops.tuning import common_constexprs
from triton_ep.runtime import Launcher


def barrier_all(ctx: DispatchCombineContext, intra_node_only: bool = False) -> None:
    """Wait on the device until all ranks (of this node) have reached this point of their streams."""
    cfg = ctx.config
    ctx.launcher(("barrier", intra_node_only), _barrier, intra_node_only)(
        1, ctx.state, ctx.tables, cfg.rank, cfg.world_size, cfg.local_world_size
    )


def _barrier(ctx: DispatchCombineContext, intra_node_only: bool) -> Launcher:
    constexprs = {
        "EPOCH": device_epoch("BARRIER_NODE" if intra_node_only else "BARRIER_ALL"),
        "FLAG_BUFFER": device_index("node_barrier_flag" if intra_node_only else "barrier_flag"),
        "SAME_NODE_ONLY": intra_node_only,
        "NETWORK": ctx.network,
        **common_constexprs(ctx.sizes, "WP", "LWP"),
    }
    return Launcher("barrier_kernel", constexprs, ctx.extern_libs())
