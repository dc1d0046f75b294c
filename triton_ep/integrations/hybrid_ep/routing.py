"""AgreedSizes: keep the layers of a HybridEPBuffer large enough for the routing of its calls.

A layer has a fixed number of slots per token (top-k) and memory for a fixed number of tokens, the same on all ranks; a
routing map may exceed either. The ranks agree on top-k once, in a separate collective; later calls rely on it. If a
rank then has more experts per token or more tokens, the layers of all ranks raise `CapacityError` with both numbers
before any row is sent, and all ranks try again with larger layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from triton_ep.context.given import RoutingMap, Rows
from triton_ep.errors import CapacityError, InputError, PeerFailed, WaitTimeout
from triton_ep.exchange.landings import WITH_COPIES, SentExpertMajor
from triton_ep.integrations import at_once
from triton_ep.integrations.hybrid_ep.layers import Layers
from triton_ep.integrations.hybrid_ep.maps import weights_of_slots
from triton_ep.layer import EPAll2AllLayer

_MOST_EXPERTS = 32  # per token; a layer takes no more

Sent = TypeVar("Sent")
Send = Callable[[torch.Tensor | RoutingMap, torch.Tensor | None, int], tuple[EPAll2AllLayer, Sent]]
"""Runs one dispatch, by expert ids [T, K] and weights [T, K] or None, or by a routing map, which has its own weights;
the last argument is K. Returns the layer and the result."""


class GivenRouting(NamedTuple):
    """Routing as the caller gives it: a map with probabilities, or ids with weights.

    Attributes:
        routing_map: [T, E] bool.
        topk_idx: [T, K] int32 or int64, -1 = dropped.
        probs: [T, E] float32.
        topk_weights: [T, K] float32, for `topk_idx`.
    """

    routing_map: torch.Tensor | None
    topk_idx: torch.Tensor | None
    probs: torch.Tensor | None
    topk_weights: torch.Tensor | None


class CallMode(NamedTuple):
    """How far the host waits in a call.

    Attributes:
        budget: the caller gives the number of rows, so the host does not read the ranks' reports.
        non_blocking: the host does not wait at all.
    """

    budget: bool
    non_blocking: bool


class AgreedSizes:
    """Top-k and tokens per rank that the layers of a buffer have room for.

    Args:
        layers: layers of the buffer.
        topk: most experts per token; None: calls agree on it.
    """

    def __init__(self, layers: Layers, topk: int | None) -> None:
        self.layers = layers
        self.topk = topk
        self.agreed_topk = 0
        self._last: EPAll2AllLayer | None = None  # of the last dispatch; reports refused arguments to other ranks

    def dispatch(
        self, given: GivenRouting, num_tokens_per_rank: int | None, mode: CallMode, send: Send[Sent]
    ) -> tuple[Sent, torch.Tensor | None]:
        """Run `send` with the given routing, on a layer that is large enough. Collective.

        num_tokens_per_rank: at least the T of every rank, or None.

        Returns:
            the result of `send`; [1] int32, number of dropped assignments, or None if none can be dropped.

        Raises:
            InputError: a token has more experts than a layer takes; on all ranks, unless there is a budget.
        """
        if given.routing_map is not None:
            return self._by_map(given.routing_map, given.probs, num_tokens_per_rank, mode, send)
        assert given.topk_idx is not None, "checked before"
        return self._by_ids(given.topk_idx, given, num_tokens_per_rank, mode, send), None

    def dispatch_at_once(
        self, rows: Rows, dtype: torch.dtype, given: tuple[Any, Any, Any, Any], alignment: int, experts: int
    ) -> tuple[EPAll2AllLayer, SentExpertMajor] | None:
        """A dispatch for which the host waits, on the layer of an earlier call, with no other check than the layer's.

        dtype: dtype of the layer's rows. given: fields of a `GivenRouting`, unchecked.

        Returns the layer and the dispatch. None: no row was sent, because there is no such layer, or an argument does
        not fit it. Make the full call then.
        """
        routing_map, ids, probs, weights = given
        slots: torch.Tensor | RoutingMap
        if routing_map is not None and ids is None and weights is None:
            slots, topk = RoutingMap(routing_map, probs, None), self.topk or self._slots_of_map(experts, False)
        elif routing_map is None and probs is None and isinstance(ids, torch.Tensor) and ids.dim() == 2:
            slots, topk = ids, ids.shape[1]
        else:
            return None
        layer = self.layers.found.get((dtype, topk, alignment, None, experts))
        if layer is None:
            return None
        try:
            sent = at_once.dispatch(layer, rows, slots, weights, WITH_COPIES)
        except CapacityError as error:
            if routing_map is None:
                self._grow_tokens(error)
            else:
                self._grow_for(error, experts)
            return None
        self._last = layer
        return None if sent is None else (layer, sent)

    def _by_ids(
        self,
        topk_idx: torch.Tensor,
        given: GivenRouting,
        num_tokens_per_rank: int | None,
        mode: CallMode,
        send: Send[Sent],
    ) -> Sent:
        weights = given.topk_weights
        if given.probs is not None and weights is None:
            weights = weights_of_slots(given.probs, topk_idx)
        weights = None if weights is None else weights.contiguous()
        ids = topk_idx.contiguous()
        return self._until_it_fits(
            len(ids), num_tokens_per_rank, mode, lambda: send(ids, weights, ids.shape[1]), self._grow_tokens
        )

    def _by_map(
        self,
        routing_map: torch.Tensor,
        probs: torch.Tensor | None,
        num_tokens_per_rank: int | None,
        mode: CallMode,
        send: Send[Sent],
    ) -> tuple[Sent, torch.Tensor | None]:
        (tokens, experts), (budget, non_blocking) = routing_map.shape, mode
        dropped = torch.zeros(1, dtype=torch.int32, device=routing_map.device) if non_blocking else None
        if self._needs_agreement(mode):
            self._agree(routing_map, num_tokens_per_rank)
            num_tokens_per_rank = self.layers.max_tokens
        elif budget and self.topk and not non_blocking:
            self._check_slots(routing_map, self.topk)
        sent_map = RoutingMap(routing_map.contiguous(), None if probs is None else probs.contiguous(), dropped)

        def attempt() -> tuple[EPAll2AllLayer, Sent]:
            return send(sent_map, None, self._slots_of_map(experts, non_blocking))

        def grow(error: CapacityError) -> None:
            self._grow_for(error, experts)

        return self._until_it_fits(tokens, num_tokens_per_rank, mode, attempt, grow), dropped

    def _until_it_fits(
        self,
        tokens: int,
        num_tokens_per_rank: int | None,
        mode: CallMode,
        attempt: Callable[[], tuple[EPAll2AllLayer, Sent]],
        grow: Callable[[CapacityError], None],
    ) -> Sent:
        """Repeat the dispatch on larger layers until it fits; `grow` raises if it cannot."""
        while True:
            if num_tokens_per_rank is not None or mode.budget:
                self._make_room(tokens, num_tokens_per_rank)
            try:
                self._last, sent = attempt()
                return sent
            except CapacityError as error:
                grow(error)

    def _needs_agreement(self, mode: CallMode) -> bool:
        """Whether a dispatch by map starts with a collective of the group; the same on all ranks."""
        return self.topk is None and not mode.non_blocking and (mode.budget or self.agreed_topk == 0)

    def _agree(self, routing_map: torch.Tensor, num_tokens_per_rank: int | None) -> None:
        """Agree on top-k and on tokens per rank, and make room for them. Collective."""
        tokens, experts = routing_map.shape
        needed = int(routing_map.sum(1).amax()) if tokens else 0
        numbers = torch.tensor([needed, num_tokens_per_rank or tokens, -1], device=routing_map.device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.layers.group)
        worst, most_tokens, rejected = numbers.tolist()
        if rejected >= 0:
            raise PeerFailed(f"rank {rejected} rejected its arguments to dispatch; see the InputError it raised.")
        self._make_room(tokens, most_tokens)
        if worst > min(experts, _MOST_EXPERTS):
            raise InputError(self._too_many(worst, min(experts, _MOST_EXPERTS)))
        self.agreed_topk = max(self.agreed_topk, worst, 1)

    def _check_slots(self, routing_map: torch.Tensor, topk: int) -> None:
        worst = int(routing_map.sum(1).amax()) if len(routing_map) else 0
        if worst > topk:
            raise InputError(self._too_many(worst, topk))

    def _grow_for(self, error: CapacityError, experts: int) -> None:
        """Raise the sizes of the next layers. All ranks do the same, since all have read the same numbers.

        Raises:
            InputError: a token has more experts than a layer takes.
        """
        self._grow_tokens(error)
        limit = self.topk or min(experts, _MOST_EXPERTS)
        if error.needed_topk > limit:
            raise InputError(self._too_many(error.needed_topk, limit)) from error
        self.agreed_topk = max(self.agreed_topk, error.needed_topk)

    def _grow_tokens(self, error: CapacityError) -> None:
        # `max_tokens` may differ between ranks: the layer that refused has the largest of these numbers.
        if error.needed_tokens > self.layers.max_tokens:
            self.layers.grow(error.needed_tokens)

    def _too_many(self, worst: int, limit: int) -> str:
        return (
            f"a token is routed to {worst} experts, but this buffer takes {limit} per token"
            f"{' (topk)' if self.topk else ''}. Create one with a larger topk, at most {_MOST_EXPERTS}."
        )

    def refuse(self, given: GivenRouting, mode: CallMode, dtype: torch.dtype, numbers: tuple[Any, Any, Any]) -> None:
        """Report to the other ranks that this rank refused its arguments. They are about to agree or to dispatch.

        Args:
            dtype: dtype of the layer's rows.
            numbers: alignment, capacity and experts per rank of the layer that the other ranks use; unchecked arguments
                of this rank.
        """
        if isinstance(given.routing_map, torch.Tensor) and self._needs_agreement(mode):
            refusal = torch.tensor([0, 0, self.layers.rank], device=self.layers.pool.heap.device)
            dist.all_reduce(refusal, dist.ReduceOp.MAX, group=self.layers.group)
            return
        # A non-integer is itself the refused argument; the other ranks then presumably use the buffer's value.
        alignment, capacity, per_rank = (each if isinstance(each, int) else None for each in numbers)
        experts = self.layers.num_experts if per_rank is None else per_rank * self.layers.world_size
        topk = self._slots_of_map(experts, mode.non_blocking)
        if isinstance(given.topk_idx, torch.Tensor) and given.topk_idx.dim() == 2:
            topk = given.topk_idx.shape[1]
        sizes = self.layers.sizes(dtype, topk, alignment or 1, capacity, experts)
        layer = self.layers.pool.layers.get(sizes, self._last)
        if layer is not None:
            with contextlib.suppress(InputError, PeerFailed, WaitTimeout):  # the caller raises the cause
                layer.refuse(combines=False)

    def _slots_of_map(self, experts: int, non_blocking: bool) -> int:
        most = min(experts, _MOST_EXPERTS)
        return self.topk or (most if non_blocking else min(self.agreed_topk, most))

    def _make_room(self, tokens: int, num_tokens_per_rank: int | None) -> None:
        needed = tokens if num_tokens_per_rank is None else num_tokens_per_rank
        if needed < tokens:
            raise InputError(f"num_of_tokens_per_rank is {needed}, but rank {self.layers.rank} has {tokens} tokens.")
        if needed > self.layers.max_tokens:
            self.layers.grow(needed)
