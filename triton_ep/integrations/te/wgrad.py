"""Gradients of weights that autograd does not get: added to `main_grad`, computed later, or both."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from triton_ep.errors import EPError, InputError

Compute = Callable[[torch.dtype], torch.Tensor]
"""From a dtype to the gradients [E, N, K] of all weights of a module."""


class NothingDelayedError(EPError, RuntimeError):
    """`backward_dw` without a backward pass before it whose weights' gradients still wait."""


class WeightGradients:
    """Takes the gradients of a module's weights in place of autograd.

    Arguments:
        fuse: add them to `weight.main_grad`, or put them there if `weight.overwrite_main_grad` is true. `weight.grad`
            stays None, except where a weight has the attribute `grad_added_to_main_grad`: that becomes True, and the
            gradient is zeros, so that hooks of data parallelism run.
        delay: keep what each backward pass would compute until `run_oldest`.
    """

    def __init__(self, fuse: bool, delay: bool) -> None:
        self.fuse, self.delay = fuse, delay
        self._waiting: deque[Callable[[], object]] = deque()

    def take(
        self, weights: Sequence[torch.Tensor], wanted: Sequence[bool], compute: Compute, overwrite: bool
    ) -> list[torch.Tensor | None]:
        """What autograd gets as the gradient of each weight.

        overwrite: put gradients into `main_grad` in place of adding them.

        Raises:
            InputError: a weight without `main_grad`, or with one of another shape.
        """
        if self.fuse:
            for weight in (weight for weight, want in zip(weights, wanted, strict=True) if want):
                _main_grad(weight)
        if not self.delay:
            return self._deliver(weights, wanted, compute, overwrite)
        self._waiting.append(partial(self._deliver, weights, wanted, compute, overwrite))
        return [None] * len(weights)

    def run_oldest(self) -> None:
        """Compute the gradients of the oldest backward pass that waits.

        Raises:
            NothingDelayedError: none waits.
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
