"""Outputs of expert parallelism in tensors of the caller's: copied there, with gradients as without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from triton_ep.errors import InputError
from triton_ep.integrations import arguments as check


def room(name: str, target: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The first rows of a caller's tensor, as many as `shape` has.

    Raises:
        InputError: it has fewer, others, or another dtype.
    """
    check.tensor(name, target)
    if (
        target.dtype != dtype
        or tuple(target.shape[1:]) != tuple(shape[1:])
        or target.dim() < 1
        or target.shape[0] < shape[0]
    ):
        raise InputError(f"{name} is {list(target.shape)} {target.dtype}; it must have room for {list(shape)} {dtype}.")
    return target[: shape[0]]


class Into(torch.autograd.Function):
    """Values in a tensor of the caller's; the gradient is that of the values."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """`target`, filled with the values."""
        return target.copy_(values).detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """That of the values."""
        return grads[0], None


class GradientInto(torch.autograd.Function):
    """The same values, whose gradient is put into a tensor of the caller's."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The values."""
        ctx.target = target
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """`target`, filled with the gradient."""
        return ctx.target.copy_(grads[0]), None
