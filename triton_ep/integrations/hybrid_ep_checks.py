"""Arguments of HybridEPBuffer: what fits, and what a handle is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.errors import InputError, StaleHandleError
from triton_ep.integrations import arguments as check
from triton_ep.integrations.hybrid_ep_layers import Layers
from triton_ep.integrations.hybrid_ep_maps import map_of_rows
from triton_ep.integrations.lazy_items import LazyItems
from triton_ep.layer import EPAll2AllLayer
from triton_ep.ops.slots import known_copies

_PLACE = {11: 9, 7: 6}  # of `Routing` in a handle, by the number of its items: permuted rows, rows by rank


@dataclass(eq=False)  # not frozen: setting attributes around that takes longer, and one is made per call
class Routing:
    """What a handle knows: one dispatch with its layer.

    Attributes:
        owner: `Layers` of the buffer.
        layer, desc: where the dispatch ran, and its descriptor.
        copies: [C, K] int32, permuted row of each copy of an arrival row; None for rows by rank.
        counts: [e] int64, permuted rows of each local expert, padding included; None for rows by rank.
        has_probs: the dispatch had probabilities.
        local_ids: [R, K] expert ids of rows by rank, -1 = elsewhere; None for permuted rows.
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
class Handle(LazyItems):
    """What a dispatch leaves to later calls, with as many items as HybridEP's tuple: 11 for permuted rows, 7 by rank.

    Attributes:
        routing: what these calls need.
        tokens: of this rank.
        overflow: [1] int32, rows and experts that found no place, where they are two counts: made with the dispatch, so
            that a CUDA graph makes it; None: that of the descriptor.
        experts_of_rows: [N, e] bool, for which local experts rows by rank are.
    """

    routing: Routing
    tokens: int
    overflow: torch.Tensor | None = None
    experts_of_rows: torch.Tensor | None = None

    def _makers(self) -> tuple[Callable[[], Any], ...]:
        arrived, routing, tokens = self._arrived, lambda: self.routing, lambda: self.tokens
        if self.routing.counts is None:
            return _nothing, _nothing, _nothing, arrived, lambda: self.experts_of_rows, tokens, routing
        permuted = (_nothing, _nothing, self._per_expert, tokens, routing, self._overflow)
        return _nothing, _nothing, _nothing, arrived, self._experts_of_rows, *permuted

    def _arrived(self) -> torch.Tensor:
        """[] int32, rows that arrived at this rank before permutation, on the device."""
        return self.routing.desc.arrivals_of_rank[self.routing.owner.rank]

    def _experts_of_rows(self) -> torch.Tensor:
        """[rows or more, e] bool: which local experts each row before permutation is for."""
        routing = self.routing
        copies = known_copies(routing.layer.context, routing.desc, routing.copies)
        return map_of_rows(copies, routing.desc.expert_offsets)

    def _per_expert(self) -> torch.Tensor:
        return self.routing.desc.num_recv_tokens_per_expert

    def _overflow(self) -> torch.Tensor:
        return self.routing.desc.overflow if self.overflow is None else self.overflow


def _nothing() -> None:
    """Of an item that HybridEP's kernels need and these do not."""


def backward_pass(handle: Any) -> AbstractContextManager[None]:
    """Calls made inside, with this handle of permuted rows, send gradients (`DispatchCombineContext.backward_pass`)."""
    routing = handle.routing if isinstance(handle, Handle) else handle[_PLACE[11]]
    return routing.layer.context.backward_pass()


def open_handle(owner: Layers, handle: Any, pad_multiple: int | None, items: int = 11) -> Routing:
    """What is in a handle of the buffer with these layers; items: how many a handle of this kind has.

    Raises:
        FinalizedError: the buffer was closed.
        InputError: no handle, one of the other kind of dispatch, another padding.
        StaleHandleError: a handle of another buffer.
    """
    owner.check_open()
    call = "dispatch_with_permute" if items == 11 else "dispatch"
    routing = None
    if isinstance(handle, Handle | tuple) and len(handle) == items:
        routing = handle.routing if isinstance(handle, Handle) else handle[_PLACE[items]]
    if not isinstance(routing, Routing):
        raise InputError(
            f"the handle must be what {call} of this buffer returned, got {type(handle).__name__}"
            f"{f' of {len(handle)} items' if isinstance(handle, Handle | tuple) else ''}."
        )
    if routing.owner is not owner:
        raise StaleHandleError(
            "the handle is of another HybridEPBuffer, or of one that was replaced. Pass one that this buffer returned."
        )
    if pad_multiple is not None:
        check.integer("pad_multiple", pad_multiple, 0)
    if pad_multiple is not None and (pad_multiple or 1) != routing.layer.config.alignment:
        raise InputError(
            f"pad_multiple is {pad_multiple}, but the dispatch of this handle padded to "
            f"{routing.layer.config.alignment}. Pass that, or None."
        )
    return routing


def check_budget(num_permuted_tokens: int | None, align: int, non_blocking: bool) -> None:
    """Raise InputError unless rows can be limited to that number."""
    if num_permuted_tokens is None:
        if non_blocking:
            raise InputError("non_blocking=True needs num_permuted_tokens: the size of the output is not asked for.")
        return
    if num_permuted_tokens < 1 or num_permuted_tokens % align:
        raise InputError(
            f"num_permuted_tokens is {num_permuted_tokens}; it must be a positive multiple of pad_multiple={align}, "
            f"{max(-(-num_permuted_tokens // align), 1) * align} for example."
        )


def num_experts(layers: Layers, sizes: tuple[int | None, int | None]) -> int:
    """Experts over all ranks, of a dispatch; sizes: as in `check_routing`."""
    return layers.num_experts if sizes[0] is None else sizes[0] * layers.world_size


def check_routing(
    layers: Layers,
    hidden: torch.Tensor,
    routing_map: torch.Tensor | None,
    topk_idx: torch.Tensor | None,
    probs: torch.Tensor | None,
    sizes: tuple[int | None, int | None],
    *,
    topk_weights: torch.Tensor | None = None,
) -> int:
    """Experts over all ranks of a dispatch; the layer checks what it gets.

    sizes: experts per rank and over all ranks, as the caller says; experts per rank may be others than the buffer's.

    Raises:
        InputError: shapes that do not go together.
    """
    layers.check_open()
    experts = num_experts(layers, sizes)
    shape = check.tensor("hidden", hidden).shape
    if len(shape) != 2 or shape[1] != layers.hidden:
        raise InputError(
            f"hidden is {list(shape)}, but this buffer was made for hidden_dim={layers.hidden}. Make a buffer for the "
            "other size (Megatron: reset_hybrid_ep_buffer(), then init_hybrid_ep_buffer), on all ranks."
        )
    if routing_map is None and topk_idx is None:
        raise InputError("dispatch needs routing_map, topk_idx or a handle; it got none of them.")
    if routing_map is not None and topk_idx is not None:
        raise InputError("dispatch got routing_map and topk_idx, which may say different things. Pass one of them.")
    _check_experts(layers, "num_of_experts", sizes[1], experts)
    wanted = (shape[0], experts)
    if routing_map is not None:
        check.tensor("routing_map", routing_map, 2)
        _check_experts(layers, "columns of routing_map", routing_map.shape[-1], experts)
        _check_table("routing_map", routing_map, wanted, torch.bool, hidden.device)
        if topk_weights is not None:
            raise InputError("topk_weights belong to topk_idx, but the routing is a map: pass probs [T, E] with it.")
    else:
        check.tensor("topk_idx", topk_idx, 2, (torch.int32, torch.int64), hidden.device)
        if topk_weights is not None:
            given = check.tensor("topk_weights", topk_weights, 2, (torch.float32,), hidden.device)
            if topk_idx is not None and given.shape != topk_idx.shape:
                raise InputError(f"topk_weights are {list(given.shape)}, topk_idx {list(topk_idx.shape)}.")
    if probs is not None:
        _check_table("probs", probs, wanted, torch.float32, hidden.device)
    return experts


def check_numbers(given: dict[str, int | None]) -> None:
    """Raise InputError unless each is an integer or None; what they may be is checked where it is known."""
    for name, value in given.items():
        if value is not None:
            check.integer(name, value, -(1 << 31))


def check_probs(probs: Any, shape: tuple[int, ...], device: torch.device, what: str) -> None:
    """Raise InputError unless these are float32 probabilities of that shape, for a combine; what: in words."""
    if (
        not isinstance(probs, torch.Tensor)
        or probs.shape != shape
        or probs.dtype != torch.float32
        or probs.device != device
    ):
        raise InputError(f"probs must be {list(shape)} float32 on {device}, {what}, got {check.shown(probs)}.")


def check_weights(layer: EPAll2AllLayer, topk_idx: torch.Tensor, probs: Any, given_idx: Any, topk_weights: Any) -> None:
    """Raise InputError unless weights fit a dispatch whose ids these are; arguments as of `weights_by_ids`."""
    if probs is not None:
        wanted = (topk_idx.shape[0], layer.config.num_experts)
        _check_table("probs", check.tensor("probs", probs), wanted, torch.float32, topk_idx.device)
    if topk_weights is not None:
        check.tensor("topk_weights", topk_weights, 2, (torch.float32,), topk_idx.device)
    if given_idx is not None:
        check.tensor("topk_idx", given_idx, 2, (torch.int32, torch.int64), topk_idx.device)


def _check_experts(layers: Layers, name: str, given: int | None, held: int) -> None:
    if given is not None and given != held:
        raise InputError(
            f"{name}: {given}, but this is for {held} experts on {layers.world_size} ranks. Say how many a rank "
            "has with num_of_experts_per_rank, or make a buffer for them."
        )


def _check_table(
    name: str, table: torch.Tensor, wanted: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    check.tensor(name, table)
    if table.dtype != dtype or table.shape != wanted or table.device != device:
        raise InputError(
            f"{name} must be {list(wanted)} {dtype} on {device}, got {list(table.shape)} {table.dtype} on "
            f"{table.device}."
        )
