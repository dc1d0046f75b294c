"""Convert between routing maps [T, E] with probabilities and the expert ids and weights [T, K] that a layer takes."""

from __future__ import annotations

import torch

from triton_ep.errors import InputError
from triton_ep.integrations import arguments as check


def indices_to_map(
    topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, num_of_tokens: int, num_of_experts: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Convert expert ids [T, K] to a routing map [T, E] bool and, with weights, probabilities [T, E] float32.

    Ids outside 0 to E - 1 are dropped; the ids of a token must be distinct.

    Raises:
        InputError: `topk_idx` is not [T, K], or weights have another shape.

    Source: deep_ep.hybrid_ep_buffer.indices_to_map.
    """
    check.tensor("topk_idx", topk_idx, 2, (torch.int32, torch.int64))
    num_of_tokens = check.integer("num_of_tokens", num_of_tokens, 0)
    num_of_experts = check.integer("num_of_experts", num_of_experts, 1, most=1 << 20)
    if topk_idx.shape[0] != num_of_tokens:
        raise InputError(f"num_of_tokens is {num_of_tokens}, topk_idx {list(topk_idx.shape)}.")
    if topk_weights is not None:
        check.tensor("topk_weights", topk_weights, 2, (), topk_idx.device)
        if topk_weights.shape != topk_idx.shape or not topk_weights.is_floating_point():
            raise InputError(
                f"topk_weights are {list(topk_weights.shape)} {topk_weights.dtype}, topk_idx {list(topk_idx.shape)}."
            )
    shape = (num_of_tokens, num_of_experts + 1)
    column = torch.where((topk_idx >= 0) & (topk_idx < num_of_experts), topk_idx, num_of_experts).long()
    routed = torch.zeros(shape, dtype=torch.bool, device=topk_idx.device).scatter_(1, column, True)
    probs = None
    if topk_weights is not None:
        probs = torch.zeros(shape, dtype=torch.float32, device=topk_idx.device)
        probs = probs.scatter_(1, column, topk_weights.float())[:, :num_of_experts].contiguous()
    return routed[:, :num_of_experts].contiguous(), probs


def weights_of_slots(probs: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
    """[T, K] float32: probabilities [T, E] of the experts with these ids, zero for ids outside 0 to E - 1."""
    last = probs.shape[1] - 1
    known = (topk_idx >= 0) & (topk_idx <= last)
    return torch.where(known, probs.gather(1, topk_idx.clamp(0, last).long()), 0.0)


def weights_by_ids(
    topk_idx: torch.Tensor,
    probs: torch.Tensor | None,
    given_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    num_experts: int,
) -> torch.Tensor | None:
    """Weights [T, K] float32 in the order of `topk_idx`, the ids of an earlier dispatch; None if none are given.

    Weights are given as `probs` [T, E]; or as `given_idx` and `topk_weights` [T, any K], ids in any order; or as
    `topk_weights` alone, in the order of `topk_idx`.

    Raises:
        InputError: weights of another shape.
    """
    if probs is not None:
        return weights_of_slots(probs, topk_idx)
    if topk_weights is None:
        return None
    wanted = topk_idx if given_idx is None else given_idx
    if topk_weights.shape != wanted.shape or wanted.shape[0] != topk_idx.shape[0]:
        raise InputError(
            f"topk_weights are {list(topk_weights.shape)}, their ids {list(wanted.shape)}, for {topk_idx.shape[0]} "
            "tokens. Pass one weight per id."
        )
    if given_idx is None:
        return torch.where(topk_idx >= 0, topk_weights, 0.0)
    _, by_expert = indices_to_map(given_idx, topk_weights, topk_idx.shape[0], num_experts)
    assert by_expert is not None
    return weights_of_slots(by_expert, topk_idx)


def map_of_rows(copies: torch.Tensor, expert_offsets: torch.Tensor) -> torch.Tensor:
    """[C, e] bool: the local experts of each staging row; False past the received rows.

    copies: [C, K] permuted row of each assignment, the number of rows or more = none; expert_offsets: [e + 1].
    """
    experts = expert_offsets.shape[0] - 1
    expert = torch.bucketize(copies, expert_offsets[1:].to(copies.dtype).contiguous(), right=True)
    out = torch.zeros(copies.shape[0], experts + 1, dtype=torch.bool, device=copies.device)
    return out.scatter_(1, expert, True)[:, :experts].contiguous()


def map_of_slots(values: torch.Tensor, topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[T, E] float32: the values [T, K] in the columns of their expert ids, zero elsewhere."""
    column = torch.where(topk_idx >= 0, topk_idx, num_experts).long()
    out = torch.zeros(values.shape[0], num_experts + 1, dtype=torch.float32, device=values.device)
    return out.scatter_(1, column, values)[:, :num_experts].contiguous()
