"""TopKRouter: chooses the experts of every token and their weights."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from numbers import Real
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear

from triton_ep.errors import ConfigError, InputError

SCORES = ("softmax", "sigmoid")


class TopKRouter(nn.Module):
    """A linear layer, scores, and the best K experts of each token, in the best groups only.

    Covers Mixtral and Qwen3 (softmax, weights normalised), DeepSeek-V2 (softmax, groups) and DeepSeek-V3 (sigmoid,
    groups, correction bias, scale 2.5). The weights must be the same on all ranks of the expert-parallel group: seed
    all ranks alike, or let the data-parallel wrapper broadcast the weights. That wrapper also sums their gradients over
    the ranks.

    Arguments:
        hidden, num_experts, topk: H, E over all ranks, and K.
        score: "softmax" over all experts, or "sigmoid" of each.
        num_groups, topk_groups: experts 0 to E / num_groups - 1 are the first group, and so on; the K experts come from
            the best topk_groups groups. A group's score is its best expert's, with a correction bias the sum of its two
            best.
        correction_bias: a buffer `expert_bias` is added to the scores for the choice, not for the weights.
            `update_expert_bias` adjusts it, so that no loss is needed to balance experts.
        normalize: the weights of a token sum to `scale`; False: they are its scores times `scale`.
        bias: the linear layer has a bias.
        aux_loss: a call also returns the balancing loss, E / (K T) sum_e n_e p_e: n_e assignments to expert e, and p_e
            its mean share of a token's scores. 1 if all are equal; differentiable through p_e.
        dtype: of the weights and of the product; scores are float32.

    Attributes:
        weight: [E, H]. bias: [E] or None.
        expert_bias: [E] float32, saved with the module, and float32 still after `module.bfloat16()`, whose steps are
            larger than those of an update; None without correction_bias.
        expert_load: [E] int64, assignments to each expert in training since the last update; not saved.

    Raises:
        ConfigError: sizes that do not fit each other.
    """

    expert_bias: torch.Tensor | None
    expert_load: torch.Tensor | None

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        topk: int,
        *,
        score: str = "softmax",
        num_groups: int = 1,
        topk_groups: int = 1,
        correction_bias: bool = False,
        normalize: bool = True,
        scale: float = 1.0,
        bias: bool = False,
        aux_loss: bool = False,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ) -> None:
        super().__init__()
        _check(hidden, num_experts, topk, score, num_groups, topk_groups)
        _check_scale(scale)
        self.hidden, self.num_experts, self.topk = hidden, num_experts, topk
        self.score, self.num_groups, self.topk_groups = score, num_groups, topk_groups
        self.normalize, self.scale, self.aux_loss = normalize, scale, aux_loss
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(num_experts, dtype=dtype, device=device)) if bias else None
        zeros = torch.zeros(num_experts, device=device) if correction_bias else None
        self.register_buffer("expert_bias", zeros)
        self.register_buffer("expert_load", None if zeros is None else zeros.long(), persistent=False)
        self.reset_parameters()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """As of every module, except that `expert_bias` keeps its dtype."""
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None and self.expert_bias is not None and self.expert_bias.dtype != bias.dtype:
            self.expert_bias = bias.to(self.expert_bias.device)
        return self

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal weights that give tokens of unit variance logits of unit variance; zero biases."""
        self.weight.normal_(std=self.hidden**-0.5)
        for zero in (self.bias, self.expert_bias, self.expert_load):
            if zero is not None:
                zero.zero_()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Experts and weights of x [..., H].

        Returns:
            topk_idx [..., K] int32 and topk_weights [..., K] float32, differentiable; with `aux_loss` the loss, [].

        Raises:
            InputError: x is no tensor, or has another H.
        """
        _check_tokens(x, self.hidden)
        with torch.autocast(x.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(self.weight.dtype)
            logits = linear(x.to(self.weight.dtype), self.weight, bias).float()
            scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
            ids = self._choose(scores.detach())
            weights = scores.gather(-1, ids)
            if self.normalize:
                # Sigmoids of a token that no expert wants may all be zero.
                weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
            weights = weights * self.scale
            if self.expert_load is not None and self.training:
                self.expert_load += _copies(ids, self.num_experts)
            found = (ids.int(), weights)
            return (*found, self._balance(scores, ids)) if self.aux_loss else found

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        """[..., K] int64: the experts with the best scores, by group and bias."""
        best_of_group = 1
        if self.expert_bias is not None:
            scores = scores + self.expert_bias
            best_of_group = 2
        if self.num_groups > 1:
            of_experts = scores.unflatten(-1, (self.num_groups, -1))
            best = of_experts.topk(min(best_of_group, of_experts.shape[-1]), -1).values.sum(-1)
            chosen = best.topk(self.topk_groups, -1).indices
            # Scores plus bias may be negative, so zero would not exclude the experts of other groups.
            left_out = torch.ones_like(best, dtype=torch.bool).scatter(-1, chosen, False)
            scores = of_experts.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(-2)
        return scores.topk(self.topk, -1).indices

    def _balance(self, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        num_tokens = max(ids.numel() // self.topk, 1)
        share = scores / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        copies = _copies(ids, self.num_experts).float() / (self.topk * num_tokens)
        return self.num_experts * (copies * share.reshape(-1, self.num_experts).sum(0) / num_tokens).sum()

    @torch.no_grad()
    def update_expert_bias(self, rate: float = 1e-3, group: Any = None) -> None:
        """Raise the bias of experts with few assignments by `rate`, lower the others'; once per optimizer step.

        Collective over `group`, which sums the load of its ranks; None = the world. Resets `expert_load` to zero.

        Raises:
            ConfigError: a router without correction_bias.
        """
        if self.expert_bias is None or self.expert_load is None:
            raise ConfigError("this router has no expert_bias to update; make it with correction_bias=True.")
        load = self.expert_load.clone()
        if dist.is_initialized():
            dist.all_reduce(load, group=group)
        self.expert_bias += rate * torch.sign(load.float().mean() - load.float())
        self.expert_load.zero_()

    def extra_repr(self) -> str:
        """Sizes and options other than the defaults."""
        groups = f", the best {self.topk_groups} of {self.num_groups} groups" if self.num_groups > 1 else ""
        return f"{self.hidden}, top-{self.topk} of {self.num_experts}, {self.score}{groups}"


def _copies(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[E] int64: how often each expert is chosen. (bincount would make the host wait.)"""
    flat = ids.flatten()
    return torch.zeros(num_experts, dtype=torch.int64, device=ids.device).scatter_add_(0, flat, torch.ones_like(flat))


def _check(hidden: int, num_experts: int, topk: int, score: str, num_groups: int, topk_groups: int) -> None:
    for name, value in (("hidden", hidden), ("num_experts", num_experts), ("topk", topk), ("num_groups", num_groups)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} of a router must be an integer of at least 1, got {value!r}.")
    if score not in SCORES:
        raise ConfigError(f"score is {score!r}; a router has {' or '.join(map(repr, SCORES))}.")
    if num_experts % num_groups:
        raise ConfigError(f"{num_experts} experts cannot be shared evenly by {num_groups} groups.")
    if isinstance(topk_groups, bool) or not isinstance(topk_groups, int) or not 1 <= topk_groups <= num_groups:
        raise ConfigError(f"topk_groups is {topk_groups!r}; of {num_groups} groups 1 to {num_groups} can be chosen.")
    if topk > num_experts:
        raise ConfigError(f"topk {topk} exceeds num_experts {num_experts}.")
    most = num_experts // num_groups * topk_groups
    if topk > most:
        raise ConfigError(
            f"topk {topk} exceeds the {most} experts in the best {topk_groups} of {num_groups} groups. Raise "
            "topk_groups."
        )


def _check_scale(scale: Any) -> None:
    if isinstance(scale, bool) or not isinstance(scale, Real) or not isfinite(scale):
        raise ConfigError(f"scale of a router must be a finite number, got {scale!r}.")


def _check_tokens(x: Any, hidden: int) -> None:
    if not isinstance(x, torch.Tensor):
        raise InputError(f"the router takes x [..., {hidden}], a tensor, got {type(x).__name__}.")
    if x.shape[-1:] != (hidden,):
        raise InputError(f"the router takes x [..., {hidden}], got {list(x.shape)}.")
