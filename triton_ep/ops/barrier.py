"""Barriers (kernels/internode/barrier.py)."""

from __future__ import annotations

from triton_ep.context.context import DispatchCombineContext
from triton_ep.runtime.plans import exchange


def barrier_all(ctx: DispatchCombineContext, intra_node_only: bool = False) -> None:
    """Wait on the device until all ranks (of this node) have reached this point of their streams."""
    ctx.launcher(("barrier", intra_node_only), exchange.barrier, intra_node_only).launch(1)
