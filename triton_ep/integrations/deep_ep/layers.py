"""The layers that buffers use, shared by all buffers of a group.

Frameworks may drop a buffer and create another before they have combined the handles of the first, so a handle refers
to its layer. A layer is freed when all buffers that used it are destroyed, or by `release`.
"""

from __future__ import annotations

import contextlib
from typing import Any, cast

import torch

from triton_ep.errors import InputError, PeerFailed, WaitTimeout
from triton_ep.integrations.layer_pool import LayerPool, LayerSizes, free_shared, shared_pool
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


def low_latency_sizes(sizes: LayerSizes, num_ranks: int) -> LayerSizes:
    """The same sizes for a low-latency layer with room for the most rows that can arrive."""
    most = num_ranks * sizes.max_tokens * min(sizes.topk, sizes.num_experts // num_ranks)
    return sizes._replace(capacity=most, low_latency=True, enable_local_combine=True)


def more_than_share(layer: EPAll2AllLayer, num_tokens: int, num_rows: int) -> InputError | None:
    """The error of a rank that has more tokens than the layer has room for, in a call that returns `num_rows` rows and
    waits for no count, so that the layer cannot grow; None: it has room."""
    cfg = layer.config
    if num_tokens <= cfg.max_tokens:
        return None
    return InputError(
        f"dispatch got {num_tokens} tokens on rank {cfg.rank}; num_worst_tokens={num_rows} on {cfg.world_size} ranks "
        f"lets each have {-(-num_rows // cfg.world_size)}. Pass, on all ranks, at least {cfg.world_size} times the "
        "largest number of tokens."
    )


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
