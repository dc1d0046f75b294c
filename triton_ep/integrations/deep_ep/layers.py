"""The layers behind buffers, shared by all buffers of a group.

Frameworks drop a buffer and make another while handles of the first are still to be combined. Layers go when all
buffers that used them are destroyed, or by `release`. Handles name their layer.
"""

from __future__ import annotations

from typing import Any

from triton_ep.integrations.layer_pool import LayerPool, free_shared, shared_pool

_STEP = 64


def layers_of(group: Any) -> LayerPool:
    """The layers of a group, none at first.

    Raises:
        ConfigError: no process group, or one that this process is not in.
        EPError: `triton_ep.initialize_distributed` has not been called.
    """
    return shared_pool("deep_ep", group)


def room_for(num_tokens: int) -> int:
    """`max_tokens` of a layer for that many tokens: in steps, so that small changes of a batch make no new layer."""
    return -(-max(num_tokens, 1) // _STEP) * _STEP


def release(group: Any = None) -> None:
    """Free the memory of all buffers over a group, those that were dropped too; None: over all groups. Collective.

    Handles of these buffers can then not be combined any more.
    """
    free_shared("deep_ep", group)
