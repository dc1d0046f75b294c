"""Join two parameters as the halves of one tensor: w1 and w3 [e, F, ...] as w13 [e, 2F, ...]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.nn.expert_block import ExpertBlock, Rows, Saved
from triton_ep.nn.moe_block import ExpertGradients, Needs, Params
from triton_ep.nn.prepared import invalidate_after_steps, origin_of, storage_of
from triton_ep.runtime.graphs import owns_memory


class Joined:
    """Cached tensor [e, 2F, ...] of two tensors [e, F, ...], joined again when one of them has changed.

    A half has changed if its storage, address or version counter is another and, as in `PreparedWeights`, after a step
    of any torch optimizer: FSDP gathers new weights into memory whose counter stays. The joined tensor keeps its
    memory; its version counter moves only if a storage, an address or a counter of the halves did, so a step of an
    optimizer of other parameters does not spoil graphs that wait for their backward pass. During the capture of a CUDA
    graph every call joins anew, because a replay checks nothing.
    """

    def __init__(self) -> None:
        self._made_of: tuple[tuple[int, int, int], tuple[int, int, int]] | None = None
        self._current = False
        self._storages: list[StorageWeakRef] = []
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
        self._current = False

    def values(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """The joined tensor. Do not write to it."""
        # It outlives inference mode and must stay writable outside it, unless a half is not.
        with torch.inference_mode(first.is_inference() or second.is_inference()):
            return self._values(first, second)

    @torch.no_grad()  # leaving inference mode turns gradients on
    def _values(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        if owns_memory(first.device):
            return torch.cat([first, second], 1)
        both = self._both
        if both is None or (both.dtype, both.device) != (first.dtype, first.device):
            e, rows, *rest = first.shape
            both = self._both = first.new_empty(e, 2 * rows, *rest)
            self._made_of = None
        made_of = origin_of(first), origin_of(second)
        if made_of != self._made_of or not self._current:
            torch.cat([first, second], 1, out=both if made_of != self._made_of else both.data)
            self._made_of, self._current = made_of, True
            self._storages = [storage_of(first), storage_of(second)]  # later storages are then others
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


class Halves(Protocol):
    """A module of experts whose parameters are halves of what their products take (`SwiGLUExperts`)."""

    def joined(self, parameters: Sequence[torch.Tensor]) -> Params:
        """What the products take, of the module's parameters. No gradient."""

    def joined_needs(self, needs: Sequence[bool]) -> tuple[bool, ...]:
        """Which of these need gradients, given the needs of the module's parameters."""

    def parted(
        self, grads: Sequence[torch.Tensor | None], parameters: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Gradients of the module's parameters, from those of what the products take."""


@dataclass(frozen=True)
class JoinedExperts:
    """The `Experts` of a `MoEBlock` whose parameters are the halves: w1, w3, w2, and biases in the same order.

    The joined tensors are made in each direction and not saved between them, so the block sees the parameters
    themselves, and whether they were changed in place in between.
    """

    owner: Halves
    experts: ExpertBlock

    def before(self, params: Params) -> Callable[[], None] | None:
        """As the experts have it, of the joined parameters."""
        if self.experts.prepared is None:
            return None
        return self.experts.before(self.owner.joined(_all(params)))

    def keeps_arrivals(self, params: Params) -> bool:
        """As the experts have it, of the joined parameters."""
        takes = self.experts.arrived is not None
        return takes and self.owner.joined_needs([each.requires_grad for each in _all(params)])[0]

    def forward(
        self, rows: Rows, row_weights: torch.Tensor | None, params: Params, desc: EPAllToAllLayoutDesc, keep: bool
    ) -> tuple[torch.Tensor, Saved]:
        """As the experts do, of the joined parameters."""
        given = _all(params)
        needs = self.owner.joined_needs([each.requires_grad for each in given])
        joined = [
            each if each is None else each.detach().requires_grad_(need)
            for each, need in zip(self.owner.joined(given), needs, strict=True)
        ]
        return self.experts.forward(rows, row_weights, joined, desc, keep)

    def backward(
        self, grad: Rows, saved: Saved, params: Params, desc: EPAllToAllLayoutDesc, needs: Needs
    ) -> ExpertGradients:
        """As the experts do; gradients of the joined parameters are parted."""
        given = _all(params)
        wanted = replace(needs, params=self.owner.joined_needs(needs.params))
        found = self.experts.backward(grad, saved, self.owner.joined(given), desc, wanted)
        return replace(found, params=lambda: self.owner.parted(found.params(), given))


def _all(params: Params) -> list[torch.Tensor]:
    """Parameters of a module, none of which is left out."""
    return [each for each in params if each is not None]
