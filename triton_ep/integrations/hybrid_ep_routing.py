"""What a HybridEPBuffer makes of the routing that it is given: expert ids, weights, and layers that are large enough.

A layer fixes top-k and max_tokens on all ranks; a routing map may exceed either. The ranks agree on top-k once, by a
collective of their own, and then assume that it suffices. Where it does not on some rank, or where a rank has too many
tokens, the layers of all ranks raise `CapacityError` before any row is sent, and all try again with a larger layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from triton_ep.errors import CapacityError, InputError, PeerFailed, WaitTimeout
from triton_ep.integrations.hybrid_ep_layers import Layers
from triton_ep.integrations.hybrid_ep_maps import weights_of_slots
from triton_ep.layer import EPAll2AllLayer
from triton_ep.ops.routing import RoutingMap

_MOST_EXPERTS = 32  # per token, of a layer

Sent = TypeVar("Sent")
Send = Callable[[torch.Tensor | RoutingMap, torch.Tensor | None, int], tuple[EPAll2AllLayer, Sent]]
"""Dispatches by expert ids [T, K] and weights [T, K] or None, or by a routing map, which has its own, or refuses ids
[1, K]; K is the last argument. Returns the layer that it took, too."""


class RoutingInputs:
    """Slots and memory of the layers of a buffer.

    Attributes:
        layers: of the buffer.
        topk: most experts per token; None: calls agree on it.
    """

    def __init__(self, layers: Layers, topk: int | None) -> None:
        self.layers = layers
        self.topk = topk
        self.rank = layers.rank
        self._agreed_topk = 0
        self._last: EPAll2AllLayer | None = None  # that dispatched, whose ranks hear of arguments that one refuses

    def _send(
        self,
        routing_map: torch.Tensor | None,
        topk_idx: torch.Tensor | None,
        probs: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        slots_per_rank: int | None,
        known: tuple[bool, bool],
        send: Send[Sent],
    ) -> tuple[Sent, torch.Tensor | None]:
        """What `send` returned for the routing, and the number of dropped assignments; None if drops are impossible.

        slots_per_rank: `num_of_tokens_per_rank`. known: as in `_by_map`.
        """
        if routing_map is not None:
            return self._by_map(routing_map, probs, slots_per_rank, known, send)
        assert topk_idx is not None, "checked before"
        return self._by_ids(topk_idx, probs, topk_weights, slots_per_rank, send), None

    def _by_ids(
        self,
        topk_idx: torch.Tensor,
        probs: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        slots_per_rank: int | None,
        send: Send[Sent],
    ) -> Sent:
        """Send by expert ids; slots_per_rank: `num_of_tokens_per_rank`."""
        self._make_room(topk_idx.shape[0], slots_per_rank)
        if probs is not None and topk_weights is None:
            topk_weights = weights_of_slots(probs, topk_idx)
        weights = None if topk_weights is None else topk_weights.contiguous()
        self._last, sent = send(topk_idx.contiguous(), weights, topk_idx.shape[1])
        return sent

    def _by_map(
        self,
        routing_map: torch.Tensor,
        probs: torch.Tensor | None,
        slots_per_rank: int | None,
        known: tuple[bool, bool],
        send: Send[Sent],
    ) -> tuple[Sent, torch.Tensor | None]:
        """Send by a routing map; also [1] int32, the number of dropped assignments, if non_blocking, else None.

        known: whether the number of rows is given, so that the host does not read what the ranks report; non_blocking.

        Raises:
            InputError: a token has more experts than a layer takes; on all ranks, unless the number of rows is given.
        """
        budget, non_blocking = known
        excess = torch.zeros(1, dtype=torch.int32, device=routing_map.device) if non_blocking else None
        if self._is_agreed_by_collective(*known):
            self._agree(routing_map, slots_per_rank)
            slots_per_rank = self.layers.max_tokens
        elif budget and self.topk and not non_blocking:
            self._check_slots(routing_map, self.topk)
        while True:
            topk = self._slots_of_map(routing_map.shape[1], non_blocking)
            if slots_per_rank is not None or budget:
                self._make_room(routing_map.shape[0], slots_per_rank)
            given = RoutingMap(routing_map.contiguous(), None if probs is None else probs.contiguous(), excess)
            try:
                self._last, sent = send(given, None, topk)
                return sent, excess
            except CapacityError as error:
                self._grow_for(error, routing_map.shape[1])

    def _is_agreed_by_collective(self, budget: bool, non_blocking: bool) -> bool:
        """Whether the ranks meet before a dispatch by map; the same on all of them."""
        return self.topk is None and not non_blocking and (budget or self._agreed_topk == 0)

    def _agree(self, routing_map: torch.Tensor, slots_per_rank: int | None) -> None:
        """Agree on slots per token and on tokens, and make room for them. Collective."""
        tokens, experts = routing_map.shape
        needed = int(routing_map.sum(1).amax()) if tokens else 0
        told = torch.tensor([needed, slots_per_rank or tokens, -1], device=routing_map.device)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self.layers.group)
        worst, most_tokens, rejected = told.tolist()
        if rejected >= 0:
            raise PeerFailed(f"rank {rejected} rejected its arguments to dispatch; see the InputError it raised.")
        self._make_room(tokens, most_tokens)
        if worst > min(experts, _MOST_EXPERTS):
            raise InputError(self._too_many(worst, min(experts, _MOST_EXPERTS)))
        self._agreed_topk = max(self._agreed_topk, worst, 1)

    def _check_slots(self, routing_map: torch.Tensor, topk: int) -> None:
        worst = int(routing_map.sum(1).amax()) if len(routing_map) else 0
        if worst > topk:
            raise InputError(self._too_many(worst, topk))

    def _grow_for(self, error: CapacityError, experts: int) -> None:
        """Make larger layers, as all ranks do, which have read the same numbers.

        Raises:
            InputError: a token has more experts than a layer takes.
        """
        # Ranks may have been made for different numbers: the layer that refused is for the largest of these.
        tokens = error.needed_tokens
        if tokens > self.layers.max_tokens:
            self.layers.grow(tokens + tokens // 4)
        limit = self.topk or min(experts, _MOST_EXPERTS)
        if error.needed_topk > limit:
            raise InputError(self._too_many(error.needed_topk, limit)) from error
        self._agreed_topk = max(self._agreed_topk, error.needed_topk)

    def _too_many(self, worst: int, limit: int) -> str:
        return (
            f"a token is routed to {worst} experts, but this buffer takes {limit} per token"
            f"{' (topk)' if self.topk else ''}. Make one with a larger topk; {_MOST_EXPERTS} is the most."
        )

    def _reject(
        self,
        routing_map: torch.Tensor | None,
        topk_idx: torch.Tensor | None,
        known: tuple[bool, bool],
        kind: tuple[Any, ...],
    ) -> None:
        """This rank's arguments were refused: tell the others, who are about to agree or to dispatch.

        kind: of the layer that they take, as far as this rank knows, unchecked: dtype of rows, alignment, capacity,
            experts per rank and over all ranks.
        """
        if isinstance(routing_map, torch.Tensor) and self._is_agreed_by_collective(*known):
            told = torch.tensor([0, 0, self.rank], device=routing_map.device)
            dist.all_reduce(told, dist.ReduceOp.MAX, group=self.layers.group)
            return
        # What is no number here is the mistake: the others have what they had before.
        alignment, capacity, per_rank, _ = (each if isinstance(each, int) else None for each in kind[1:])
        dtype, alignment = kind[0], alignment or 1
        experts = self.layers.num_experts if per_rank is None else per_rank * self.layers.world_size
        topk = self._slots_of_map(experts, known[1])
        if isinstance(topk_idx, torch.Tensor) and topk_idx.dim() == 2:
            topk = topk_idx.shape[1]
        layer = self.layers.made.get((dtype, topk, alignment, capacity, experts), self._last)
        if layer is not None:
            nothing = torch.empty(0, device=layer.context.device)
            with contextlib.suppress(InputError, PeerFailed, WaitTimeout):  # the caller raises what caused it
                layer.dispatch(nothing, nothing)

    def _slots_of_map(self, experts: int, non_blocking: bool) -> int:
        most = min(experts, _MOST_EXPERTS)
        return self.topk or (most if non_blocking else min(self._agreed_topk, most))

    def _make_room(self, tokens: int, slots_per_rank: int | None) -> None:
        needed = tokens if slots_per_rank is None else slots_per_rank
        if needed < tokens:
            raise InputError(f"num_of_tokens_per_rank is {needed}, but rank {self.rank} has {tokens} tokens.")
        if needed > self.layers.max_tokens:
            self.layers.grow(needed + needed // 4)
