"""Copy outputs of expert parallelism into the caller's tensors; gradients are unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from triton_ep.errors import InputError
from triton_ep.integrations import arguments as check
from triton_ep.mx.tensor import MXTensor


def room(name: str, target: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The first shape[0] rows of the caller's tensor `target`.

    Raises:
        InputError: the tensor has fewer rows, rows of another shape, or another dtype.
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


def room_of_mxfp8(name: str, target: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> MXTensor:
    """MXFP8 rows of this shape in the first bytes of the caller's tensor `target`: all elements, then all scales.

    dtype: of the values that the rows stand for.

    Raises:
        InputError: the tensor is not contiguous, or has fewer bytes.
    """
    check.tensor(name, target)
    rows, hidden = shape
    elements, scales = rows * hidden, rows * (hidden // 32)
    if not target.is_contiguous() or target.nbytes < elements + scales:
        raise InputError(
            f"{name} is {list(target.shape)} {target.dtype}, {target.nbytes} bytes; it must be contiguous, with room "
            f"for {elements} bytes of elements and {scales} of scales: {list(shape)} in MXFP8."
        )
    found = target.view(-1).view(torch.uint8)
    qdata = found[:elements].view(torch.float8_e4m3fn).view(rows, hidden)
    return MXTensor.from_qdata_and_scales(qdata, found[elements:][:scales].view(rows, hidden // 32), dtype)


class Into(torch.autograd.Function):
    """Copy values into a tensor of the caller; the gradient passes through unchanged."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """`target`, which now holds the values."""
        return target.copy_(values).detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradient of the values, unchanged."""
        return grads[0], None


class GradientInto(torch.autograd.Function):
    """Pass values through; copy their gradient into a tensor of the caller."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The values."""
        ctx.target = target
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """`target`, which now holds the gradient."""
        return ctx.target.copy_(grads[0]), None
