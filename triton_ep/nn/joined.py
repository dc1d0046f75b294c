"""Join two parameters as the halves of one tensor: w1 and w3 [e, F, ...] as w13 [e, 2F, ...]."""

from __future__ import annotations

from typing import Any

import torch

from triton_ep.nn.prepared import invalidate_after_steps


class Joined:
    """Cached tensor [e, 2F, ...] of two tensors [e, F, ...], joined again when one of them has changed.

    A half has changed if its address or version counter moved and, as in `PreparedWeights`, after a step of any torch
    optimizer: FSDP gathers new weights into memory whose counter stays. The joined tensor keeps its memory. During the
    capture of a CUDA graph every call joins anew, because a replay checks nothing.
    """

    def __init__(self) -> None:
        self._made_of: tuple[int, ...] | None = None
        self._both: torch.Tensor | None = None
        invalidate_after_steps(self)

    def __deepcopy__(self, memo: Any) -> Joined:
        return Joined()

    def __reduce__(self) -> Any:
        """Pickle without the cached tensor, which can be built again."""
        return Joined, ()

    def __call__(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """The joined tensor; differentiable: the halves of its gradient are the gradients."""
        joined: torch.Tensor = _Join.apply(first, second, self)
        return joined

    def invalidate(self) -> None:
        """Join again at the next call: call this when values changed without moving torch's version counters."""
        self._made_of = None

    @torch.inference_mode(False)  # the cached tensor outlives inference mode and must stay writable outside it
    @torch.no_grad()
    def values(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """The joined tensor. Do not write to it."""
        if first.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return torch.cat([first, second], 1)
        both = self._both
        if both is None or (both.dtype, both.device) != (first.dtype, first.device):
            e, rows, *rest = first.shape
            both = self._both = first.new_empty(e, 2 * rows, *rest)
            self._made_of = None
        made_of = (first.data_ptr(), first._version, second.data_ptr(), second._version)
        if made_of != self._made_of:
            torch.cat([first, second], 1, out=both)
            self._made_of = made_of
        return both.detach()


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, second: torch.Tensor, kept: Joined) -> torch.Tensor:
        ctx.rows = first.shape[1]
        return kept.values(first, second)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        return grad[:, : ctx.rows], grad[:, ctx.rows :], None
