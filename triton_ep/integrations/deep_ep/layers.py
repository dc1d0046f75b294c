"""The layers that buffers use, shared by all buffers of a group.

Frameworks may drop a buffer and create another before they have combined the handles of the first, so a handle refers
to its layer. A layer is freed when all buffers that used it are destroyed, or by `release`.
"""

from __future__ import annotations

import contextlib
from typing import Any, cast

import torch

from triton_ep.errors import InputError, PeerFailed, WaitTimeout
from triton_ep.integrations.layer_pool import LayerPool, free_shared, shared_pool
from triton_ep.layer import EPAll2AllLayer

_STEP = 64


def layers_of(group: Any) -> LayerPool:
    """The pool of layers of a group, empty at first.

    Raises:
        ConfigError: `group` is no process group, or does not include this process.
        EPError: `triton_ep.initialize_distributed` has not been called.
    """
    return shared_pool("deep_ep", group)


def room_for(num_tokens: int) -> int:
    """`max_tokens` of a layer for `num_tokens`: rounded up to a step, so that slightly larger batches reuse the
    layer."""
    return -(-max(num_tokens, 1) // _STEP) * _STEP


def release(group: Any = None) -> None:
    """Free the memory of all buffers over a group, including dropped buffers; None: over all groups. Collective.

    Handles of these buffers are no longer valid.
    """
    free_shared("deep_ep", group)


def report_refusal(layer: EPAll2AllLayer, scale: torch.Tensor | None, num_rows: int | None) -> None:
    """Report to the other ranks that this rank refused a dispatch of compact rows.

    scale: scales of its rows, if they have some. num_rows: as in `EPAll2AllLayer.dispatch_compact`.

    Raises:
        CapacityError: another rank needs a larger layer; on all ranks, which then repeat the dispatch with it.
    """
    nothing = cast(Any, None)  # the layer refuses nothing, and reports that
    with contextlib.suppress(InputError, PeerFailed, WaitTimeout):  # the caller raises the cause
        layer.dispatch_compact(nothing, nothing, scale=scale, num_rows=num_rows)
