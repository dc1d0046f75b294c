"""Handles of HybridEPBuffer: state of a dispatch for later calls, with HybridEP's items."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.errors import InputError, StaleHandleError
from triton_ep.exchange.slots import known_copies
from triton_ep.integrations import arguments as check
from triton_ep.integrations.hybrid_ep.layers import Layers
from triton_ep.integrations.hybrid_ep.maps import map_of_rows
from triton_ep.integrations.lazy_items import LazyItems
from triton_ep.layer import EPAll2AllLayer

PERMUTED_ITEMS, RANK_ITEMS = 11, 7
"""Number of items of a handle, as in HybridEP's tuples: for permuted rows, and for rows by rank."""


@dataclass(eq=False)  # not frozen: a frozen class sets attributes more slowly, and every call creates one
class Routing:
    """One dispatch and its layer.

    Attributes:
        owner: `Layers` of the buffer that dispatched.
        layer, desc: layer and descriptor of the dispatch.
        copies: [C, K] int32, permuted row of each assignment of a staging row; None for rows by rank.
        counts: [e] int64, permuted rows of each local expert, padding included; None for rows by rank.
        has_probs: the dispatch had probabilities.
        local_ids: [R, K] local expert ids of rows by rank, -1 = another rank's; None for permuted rows.
    """

    owner: Layers
    layer: EPAll2AllLayer
    desc: EPAllToAllLayoutDesc
    copies: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    has_probs: bool = False
    local_ids: torch.Tensor | None = None

    @property
    def num_experts(self) -> int:
        """E over all ranks."""
        return self.layer.config.num_experts


@dataclass(eq=False)
class Handle(Routing, LazyItems):
    """State of a dispatch for later calls. Has as many items as HybridEP's tuple: 11 for permuted rows, 7 by rank. The
    handle is its own routing: one object takes less host time than two.

    Attributes:
        tokens: T.
        overflow: [1] int32, dropped rows plus dropped assignments, summed during the dispatch so that a CUDA graph
            captures the sum; None: `layout_desc.overflow`.
        experts_of_rows: [N, e] bool, the local experts of each row by rank.
    """

    tokens: int = 0
    overflow: torch.Tensor | None = None
    experts_of_rows: torch.Tensor | None = None

    @property
    def routing(self) -> Routing:
        """The routing of the dispatch."""
        return self

    def _makers(self) -> tuple[Callable[[], Any], ...]:
        arrived, routing, tokens = self._arrived, lambda: self, lambda: self.tokens
        if self.counts is None:
            return _nothing, _nothing, _nothing, arrived, lambda: self.experts_of_rows, tokens, routing
        permuted = (_nothing, _nothing, self._per_expert, tokens, routing, self._overflow)
        return _nothing, _nothing, _nothing, arrived, self._experts_of_rows, *permuted

    def _arrived(self) -> torch.Tensor:
        """[] int32, number of rows received by this rank before permutation, on the device."""
        return self.desc.arrivals_of_rank[self.owner.rank]

    def _experts_of_rows(self) -> torch.Tensor:
        """[at least the number of rows, e] bool: the local experts of each row before permutation."""
        copies = known_copies(self.layer.context, self.desc, self.copies)
        return map_of_rows(copies, self.desc.expert_offsets)

    def _per_expert(self) -> torch.Tensor:
        return self.desc.num_recv_tokens_per_expert

    def _overflow(self) -> torch.Tensor:
        return self.desc.overflow if self.overflow is None else self.overflow


def _nothing() -> None:
    """None: value of an item that only HybridEP's kernels need."""


def backward_pass(handle: Any) -> AbstractContextManager[None]:
    """Context in which calls with this handle of permuted rows send gradients
    (`DispatchCombineContext.backward_pass`)."""
    routing = _routing_of(handle)
    assert routing is not None, "the forward pass took it"
    return routing.layer.context.backward_pass()


def _routing_of(handle: Any) -> Routing | None:
    """The routing in a handle, or in a tuple of its items; None: there is none."""
    if isinstance(handle, Routing):
        return handle
    items = handle if isinstance(handle, tuple) else ()
    return next((item for item in items if isinstance(item, Routing)), None)


def open_handle(owner: Layers, handle: Any, pad_multiple: int | None, items: int = PERMUTED_ITEMS) -> Routing:
    """The routing in a handle of the buffer that owns these layers.

    items: number of items of such a handle.

    Raises:
        FinalizedError: the buffer was closed.
        InputError: no handle, a handle of the other kind of dispatch, or another padding.
        StaleHandleError: a handle of another buffer.
    """
    owner.check_open()
    routing = handle if isinstance(handle, Handle) else _routing_of(handle)
    permuted = items == PERMUTED_ITEMS
    if routing is None or (routing.counts is None) == permuted or (routing is not handle and len(handle) != items):
        call = "dispatch_with_permute" if permuted else "dispatch"
        raise InputError(
            f"the handle must come from {call} of this buffer, got {type(handle).__name__}"
            f"{f' of {len(handle)} items' if isinstance(handle, Handle | tuple) else ''}."
        )
    if routing.owner is not owner:
        raise StaleHandleError(
            "the handle belongs to another HybridEPBuffer, or to a replaced one. Pass one that this buffer returned."
        )
    if pad_multiple is not None:
        check.integer("pad_multiple", pad_multiple, 0)
    if pad_multiple is not None and (pad_multiple or 1) != routing.layer.config.alignment:
        raise InputError(
            f"pad_multiple is {pad_multiple}, but the dispatch of this handle padded to "
            f"{routing.layer.config.alignment}. Pass that number, or None."
        )
    return routing
