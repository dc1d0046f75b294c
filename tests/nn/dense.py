"""A MoE layer without ranks: every expert on its tokens, in float64, gradients by autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triton_ep.reference.experts import Activation, activate


def moe(
    xs: Sequence[torch.Tensor],
    ids: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    w13: torch.Tensor,
    w2: torch.Tensor,
    activation: Activation = Activation(),  # noqa: B008  a tuple
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """[T, H] of every rank. xs: [T, H]; ids, weights: [T, K]; parameters of all experts. Differentiable."""
    found = []
    for x, idx, weight in zip(xs, ids, weights, strict=True):
        out = torch.zeros_like(x)
        for expert in range(w13.shape[0]):
            share = torch.where(idx == expert, weight, 0.0).sum(1, keepdim=True)
            pre = x @ w13[expert].T + (0 if b13 is None else b13[expert])
            y = activate(pre, activation) @ w2[expert].T + (0 if b2 is None else b2[expert])
            out = out + share * y
        found.append(out)
    return found


def decibel(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Signal to noise in dB."""
    exact = exact.detach().double().cpu()
    noise = (value.detach().double().cpu() - exact).square().sum().clamp_min(1e-300)
    return float(10 * torch.log10(exact.square().sum() / noise))


def worst_row(value: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error of a row, relative to the mean row of `exact`; 0 without rows."""
    exact = exact.detach().double().cpu().flatten(0, -2)
    if not exact.shape[0]:
        return 0.0
    error = (value.detach().double().cpu().flatten(0, -2) - exact).norm(dim=1)
    return float(error.max() / exact.norm(dim=1).mean().clamp_min(1e-300))
