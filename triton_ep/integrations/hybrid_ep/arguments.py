"""Checks of HybridEPBuffer's arguments that no layer checks, or that a layer knows under another name."""

from __future__ import annotations

from typing import Any

import torch

from triton_ep.config import TOKEN_DTYPES
from triton_ep.errors import InputError
from triton_ep.exchange.checks import ONE_BYTE
from triton_ep.integrations import arguments as check
from triton_ep.integrations.hybrid_ep.layers import Layers
from triton_ep.layer import EPAll2AllLayer

with_own_names = check.renamed(input="hidden", exp_indices="topk_idx", weight="topk_weights", values="probs")
"""Decorator of HybridEP's calls: errors of layers get HybridEP's names of arguments."""


def check_budget(num_permuted_tokens: int | None, align: int, non_blocking: bool) -> None:
    """Raise InputError unless `num_permuted_tokens` can be the number of output rows."""
    if num_permuted_tokens is None:
        if non_blocking:
            raise InputError(
                "non_blocking=True needs num_permuted_tokens: the host does not wait for the size of the output."
            )
        return
    if num_permuted_tokens < 1 or num_permuted_tokens % align:
        raise InputError(
            f"num_permuted_tokens is {num_permuted_tokens}; it must be a positive multiple of pad_multiple={align}, "
            f"{max(-(-num_permuted_tokens // align), 1) * align} for example."
        )


def num_experts(layers: Layers, sizes: tuple[int | None, int | None]) -> int:
    """Number of experts over all ranks in a dispatch; sizes: as in `check_routing`."""
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
    """Check the shapes of a dispatch; return its number of experts over all ranks. The layer checks the values of ids.

    sizes: experts per rank and over all ranks, as the caller gave them, or None. Experts per rank may differ from the
        buffer's.

    Raises:
        InputError: shapes that do not fit each other or the buffer.
    """
    layers.check_open()
    experts = num_experts(layers, sizes)
    shape = check.tensor("hidden", hidden).shape
    if len(shape) != 2 or shape[1] != layers.hidden:
        raise InputError(
            f"hidden is {list(shape)}, but this buffer has hidden_dim={layers.hidden}. Create a buffer for the other "
            "size (Megatron: reset_hybrid_ep_buffer(), then init_hybrid_ep_buffer), on all ranks."
        )
    if hidden.dtype not in TOKEN_DTYPES and hidden.dtype not in ONE_BYTE:
        raise InputError(
            f"hidden must be {', '.join(map(str, TOKEN_DTYPES))} or of one byte, got {hidden.dtype}. Cast it."
        )
    if routing_map is None and topk_idx is None:
        raise InputError("dispatch needs routing_map, topk_idx or a handle; it got none of them.")
    if routing_map is not None and topk_idx is not None:
        raise InputError("dispatch got both routing_map and topk_idx. Pass one of them.")
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
    """Raise InputError unless each value is an integer or None; later checks test the limits."""
    for name, value in given.items():
        if value is not None:
            check.integer(name, value, -(1 << 31))


def check_probs(probs: Any, shape: tuple[int, ...], device: torch.device, what: str) -> None:
    """Raise InputError unless `probs` is float32 of that shape; what: description for the message."""
    if (
        not isinstance(probs, torch.Tensor)
        or probs.shape != shape
        or probs.dtype != torch.float32
        or probs.device != device
    ):
        raise InputError(f"probs must be {list(shape)} float32 on {device}, {what}, got {check.shown(probs)}.")


def check_weights(layer: EPAll2AllLayer, topk_idx: torch.Tensor, probs: Any, given_idx: Any, topk_weights: Any) -> None:
    """Raise InputError unless the weights fit a dispatch with the ids `topk_idx`; arguments as in `weights_by_ids`."""
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
            f"{name}: {given}, but this call has {held} experts on {layers.world_size} ranks. Pass the number per "
            "rank as num_of_experts_per_rank, or create a buffer for them."
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
