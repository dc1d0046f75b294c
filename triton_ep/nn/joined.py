"""Two parameters as the halves of one tensor: w1 and w3 [e, F, ...] as w13 [e, 2F, ...]."""

from __future__ import annotations

from typing import Any

import torch

from triton_ep.nn.prepared import invalidate_after_steps


class Joined:
    """[e, 2F, ...] made of two tensors [e, F, ...], kept, and made again when one of them has changed.

    A half counts as changed by its address and version counter and, as `PreparedWeights` has it, after a step of any
    torch optimizer: FSDP gathers new weights into memory whose counter stays. What is joined keeps its memory. In the
    capture of a CUDA graph it is made each time, because a replay does not ask.
    """

    def __init__(self) -> None:
        self._made_of: tuple[int, ...] | None = None
        self._both: torch.Tensor | None = None
        invalidate_after_steps(self)

    def __deepcopy__(self, memo: Any) -> Joined:
        return Joined()

    def __reduce__(self) -> Any:
        """What is kept can be made again."""
        return Joined, ()

    def __call__(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """The tensor; differentiable, and the gradients are its halves."""
        joined: torch.Tensor = _Join.apply(first, second, self)
        return joined

    def invalidate(self) -> None:
        """Make it again at the next call: the values changed in a way that torch's version counters do not see."""
        self._made_of = None

    @torch.inference_mode(False)  # what is kept is written outside of that mode, too
    @torch.no_grad()
    def values(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """The tensor, which is not to be written to."""
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
