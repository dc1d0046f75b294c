"""The layers that buffers use, shared by all buffers of a group.

Frameworks drop a buffer and make another before they have combined the handles of the first. A layer is freed when all
buffers that used it are destroyed, or by `release`. A handle refers to its layer.
"""

from __future__ import annotations

from typing import Any

from triton_ep.integrations.layer_pool import LayerPool, free_shared, shared_pool

_STEP = 64


def layers_of(group: Any) -> LayerPool:
    """The pool of layers of a group, empty at first.

    Raises:
        ConfigError: no process group, or one that this process is not in.
        EPError: `triton_ep.initialize_distributed` has not been called.
    """
    return shared_pool("deep_ep", group)


def room_for(num_tokens: int) -> int:
    """`max_tokens` of a layer for `num_tokens`: rounded up to a step, so that small changes of a batch need no new
    layer."""
    return -(-max(num_tokens, 1) // _STEP) * _STEP


def release(group: Any = None) -> None:
    """Free the memory of all buffers over a group, dropped ones too; None: over all groups. Collective.

    Handles of these buffers become invalid.
    """
    free_shared("deep_ep", group)
