"""CUDA graphs that torch makes around the calls of this package."""

from __future__ import annotations

import sys

import torch


def owns_memory(device: torch.device) -> bool:
    """Whether memory that is allocated now belongs to a CUDA graph, so that nothing may keep it after the call.

    So it does while the current stream is captured, and in the calls by which torch.compile's mode "reduce-overhead"
    warms a graph up. Takes microseconds: ask where something is about to be kept.
    """
    if device.type != "cuda":
        return False
    return torch.cuda.is_current_stream_capturing() or _warms_up(device)


def _warms_up(device: torch.device) -> bool:
    """Whether torch.compile warms a graph up: it then calls on the stream that its graphs of this device have."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")  # torch has no public way to ask
    get_manager = getattr(trees, "get_manager", None)
    if get_manager is None:
        return False
    try:
        manager = get_manager(device.index, create_if_none_exists=False)
    except AssertionError:  # a thread that runs no compiled code
        return False
    return manager is not None and bool(manager.stream == torch.cuda.current_stream(device))
