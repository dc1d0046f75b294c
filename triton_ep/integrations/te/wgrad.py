"""Gradients of weights outside autograd: added to `main_grad`, computed later, or both."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from triton_ep.errors import EPError, InputError

Compute = Callable[[torch.dtype], torch.Tensor]
"""Function that computes the gradients [E, N, K] of all weights of a module in a given dtype."""


class NothingDelayedError(EPError, RuntimeError):
    """`backward_dw` was called while no backward pass waits for its weights' gradients."""


class WeightGradients:
    """Handles the gradients of a module's weights in place of autograd.

    Arguments:
        fuse: add gradients to `weight.main_grad`, or overwrite it if `weight.overwrite_main_grad` is true.
            `weight.grad` stays None, unless the weight has the attribute `grad_added_to_main_grad`: then the attribute
            becomes True and the gradient is zeros, so that hooks of data parallelism run.
        delay: defer the computation of each backward pass to `run_oldest`.
    """

    def __init__(self, fuse: bool, delay: bool) -> None:
        self.fuse, self.delay = fuse, delay
        self._waiting: deque[Callable[[], object]] = deque()

    def take(
        self, weights: Sequence[torch.Tensor], wanted: Sequence[bool], compute: Compute, overwrite: bool
    ) -> list[torch.Tensor | None]:
        """Handle the gradients of one backward pass; returns the gradient of each weight for autograd.

        overwrite: overwrite `main_grad` instead of adding to it.

        Raises:
            InputError: with `fuse`, a weight has no `main_grad`, or one of another shape.
        """
        if self.fuse:
            for weight in (weight for weight, want in zip(weights, wanted, strict=True) if want):
                _main_grad(weight)
        if not self.delay:
            return self._deliver(weights, wanted, compute, overwrite)
        self._waiting.append(partial(self._deliver, weights, wanted, compute, overwrite))
        return [None] * len(weights)

    def run_oldest(self) -> None:
        """Compute the gradients of the oldest pending backward pass.

        Raises:
            NothingDelayedError: no backward pass is pending.
        """
        if not self._waiting:
            raise NothingDelayedError("backward_dw: no backward pass of this module waits for its weights' gradients.")
        self._waiting.popleft()()

    @torch.no_grad()
    def _deliver(
        self, weights: Sequence[torch.Tensor], wanted: Sequence[bool], compute: Compute, overwrite: bool
    ) -> list[torch.Tensor | None]:
        chosen = [index for index, want in enumerate(wanted) if want]
        first = weights[chosen[0]]
        of_weights = compute(_main_grad(first).dtype if self.fuse else first.dtype).unbind()
        left: list[torch.Tensor | None] = [None] * len(weights)
        for index in chosen:
            weight, gradient = weights[index], of_weights[index]
            if self.fuse:
                left[index] = _accumulate(weight, gradient, overwrite)
            else:
                weight.grad = gradient.clone() if weight.grad is None else weight.grad + gradient
        return left


def _main_grad(weight: torch.Tensor) -> torch.Tensor:
    main: torch.Tensor | None = getattr(weight, "main_grad", None)
    if main is None or main.shape != weight.shape:
        raise InputError(
            f"fuse_wgrad_accumulation=True needs weight.main_grad, a tensor {list(weight.shape)} as the weight; it is "
            f"{None if main is None else list(main.shape)}. Set it before the backward pass."
        )
    return main


def _accumulate(weight: torch.Tensor, gradient: torch.Tensor, overwrite: bool) -> torch.Tensor | None:
    main = _main_grad(weight)
    if overwrite or getattr(weight, "overwrite_main_grad", False):
        main.copy_(gradient)
    else:
        main.add_(gradient)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
