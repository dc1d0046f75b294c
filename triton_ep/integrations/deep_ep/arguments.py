"""Check and convert arguments of Buffer's calls for the layer: ids, a rank mask in place of ids, biases, configs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from triton_ep.errors import InputError
from triton_ep.integrations import arguments as check
from triton_ep.integrations.deep_ep.config import Config

OF_LAYERS = {
    "input": "x",
    "exp_indices": "topk_idx",
    "weight": "topk_weights",
    "weights": "topk_weights",
    "values": "topk_weights",
}
"""DeepEP's names of arguments of layers."""
with_own_names = check.renamed(**OF_LAYERS)
"""Decorator of DeepEP's calls: errors of layers have these names."""


def refuse(call: str, given: dict[str, Any]) -> None:
    """Raise InputError if one of these unsupported arguments is given: neither None nor False."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise InputError(f"{call} does not support {name}, got {check.shown(value)}. Leave it out.")


def check_ids(topk_idx: Any) -> None:
    """Raise InputError unless these are expert ids [T, K]."""
    if (
        not isinstance(topk_idx, torch.Tensor)
        or topk_idx.dim() != 2
        or topk_idx.dtype not in (torch.int32, torch.int64)
    ):
        raise InputError("topk_idx must be [T, K], int64 or int32.")
    if not topk_idx.is_contiguous():
        raise InputError(f"topk_idx must be contiguous, got strides {topk_idx.stride()}; call .contiguous().")


def check_counts(num_tokens_per_expert: Any, expert_alignment: Any) -> int:
    """Number of experts over all ranks: the length of `num_tokens_per_expert`.

    Raises:
        InputError: `num_tokens_per_expert` is no table [E], or `expert_alignment` is no integer of at least 1.
    """
    if not isinstance(num_tokens_per_expert, torch.Tensor) or num_tokens_per_expert.dim() != 1:
        raise InputError(
            "dispatch without a handle needs num_tokens_per_expert [E] of get_dispatch_layout, whose length is the "
            "number of experts, and topk_idx or is_token_in_rank."
        )
    if type(expert_alignment) is not int or expert_alignment < 1:
        check.integer("expert_alignment", expert_alignment, 1)
    if num_tokens_per_expert.dtype not in (torch.int32, torch.int64):
        raise InputError(f"num_tokens_per_expert must be int32 or int64, got {num_tokens_per_expert.dtype}.")
    return num_tokens_per_expert.shape[0]


def aligned(counts: list[int], expert_alignment: Any) -> list[int]:
    """The counts, each rounded up to a multiple of `expert_alignment`."""
    align = int(expert_alignment)
    return counts if align == 1 else [-(-count // align) * align for count in counts]


def sum_of_counts(num_tokens_per_expert: torch.Tensor, group: Any) -> list[int]:
    """Number of assignments to each expert of this rank, summed over all ranks. Collective."""
    counts = num_tokens_per_expert.clone()
    dist.all_reduce(counts, group=group)
    return [int(count) for count in counts.view(dist.get_world_size(group), -1)[dist.get_rank(group)].tolist()]


def ids_of_ranks(is_token_in_rank: Any, num_tokens: int, num_ranks: int, num_experts: int) -> torch.Tensor:
    """[T, W] int64: id of the rank's first expert where the token goes to the rank, else -1.

    Raises:
        InputError: `is_token_in_rank` is not [T, W] bool, or W does not divide `num_experts`.
    """
    if (
        not isinstance(is_token_in_rank, torch.Tensor)
        or is_token_in_rank.dtype != torch.bool
        or tuple(is_token_in_rank.shape) != (num_tokens, num_ranks)
    ):
        got = is_token_in_rank
        got = f"{list(got.shape)} {got.dtype}" if isinstance(got, torch.Tensor) else type(got).__name__
        raise InputError(
            f"dispatch without topk_idx needs is_token_in_rank, which must be [{num_tokens}, {num_ranks}] bool, got "
            f"{got}. Pass topk_idx, or the result of get_dispatch_layout."
        )
    if num_experts < 1 or num_experts % num_ranks:
        raise InputError(f"num_tokens_per_expert has {num_experts}; it must be a multiple of the {num_ranks} ranks.")
    first = torch.arange(0, num_experts, num_experts // num_ranks, device=is_token_in_rank.device)
    return torch.where(is_token_in_rank, first, -1)


def biases_of(bias: Any, shape: tuple[int, int], like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The 0, 1 or 2 tensors in `bias`, contiguous.

    Raises:
        InputError: more than 2 tensors, or a tensor without this shape or without the dtype and device of `like`.
    """
    given = () if bias is None else (bias,) if isinstance(bias, torch.Tensor) else bias
    if not isinstance(given, tuple | list) or len(given) > 2:
        raise InputError("bias must be None, a tensor, or a tuple of up to two.")
    biases = tuple(each for each in given if each is not None)
    for each in biases:
        if (
            not isinstance(each, torch.Tensor)
            or tuple(each.shape) != shape
            or each.dtype != like.dtype
            or each.device != like.device
        ):
            got = f"{list(each.shape)} {each.dtype} on {each.device}" if isinstance(each, torch.Tensor) else str(each)
            raise InputError(f"bias must be {list(shape)} {like.dtype} on {like.device}, one row per token, got {got}.")
    return tuple(each.contiguous() for each in biases)


def same_elements(one: Any, other: Any) -> bool:
    """Whether both are the same tensor, or views of the same elements."""
    return one is other or (
        isinstance(one, torch.Tensor)
        and (one.data_ptr(), one.shape, one.stride()) == (other.data_ptr(), other.shape, other.stride())
    )


def config_of(given: Any) -> Config:
    """The `config` of a call.

    Raises:
        InputError: it is none.
    """
    if not isinstance(given, Config):
        raise InputError(f"config must be a deep_ep.Config or None, got {check.shown(given)}.")
    return given
