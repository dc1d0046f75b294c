"""Routing maps [T, E] of bools and probabilities, and the expert ids and weights [T, K] that a layer takes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from triton_ep.errors import InputError, PeerFailed
from triton_ep.integrations.hybrid_ep_layers import Layers

_MOST_EXPERTS = 32  # per token, of a layer


def indices_to_map(
    topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, num_of_tokens: int, num_of_experts: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Routing map [T, E] bool and, with weights, probabilities [T, E] float32, of expert ids [T, K].

    Ids outside of 0 to E - 1 are dropped; those of a token are distinct.

    Source: deep_ep.hybrid_ep_buffer.indices_to_map.
    """
    shape = (num_of_tokens, num_of_experts + 1)
    column = torch.where((topk_idx >= 0) & (topk_idx < num_of_experts), topk_idx, num_of_experts).long()
    routed = torch.zeros(shape, dtype=torch.bool, device=topk_idx.device).scatter_(1, column, True)
    probs = None
    if topk_weights is not None:
        probs = torch.zeros(shape, dtype=torch.float32, device=topk_idx.device)
        probs = probs.scatter_(1, column, topk_weights.float())[:, :num_of_experts].contiguous()
    return routed[:, :num_of_experts].contiguous(), probs


def most_experts(routing_map: torch.Tensor) -> torch.Tensor:
    """[] int64 on the device: the largest number of experts that a token is routed to; 0 without tokens."""
    if routing_map.shape[0] == 0:
        return torch.zeros((), dtype=torch.int64, device=routing_map.device)
    return routing_map.sum(1).amax()


def slots_of_map(routing_map: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert ids [T, topk] int32, ascending, then -1; and [1] int32, how many experts did not fit into `topk`."""
    tokens, experts = routing_map.shape
    position = routing_map.cumsum(1, dtype=torch.int32)
    fits = routing_map & (position <= topk)
    # What does not fit goes to a last column, which is cut off.
    slot = torch.where(fits, position - 1, topk).long()
    ids = torch.full((tokens, topk + 1), -1, dtype=torch.int32, device=routing_map.device)
    expert = torch.arange(experts, dtype=torch.int32, device=routing_map.device).expand(tokens, experts)
    ids.scatter_(1, slot, expert)
    excess = (position[:, -1] - topk).clamp(min=0).sum(dtype=torch.int32).view(1)
    return ids[:, :topk].contiguous(), excess


def weights_of_slots(probs: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
    """[T, K] float32: probabilities [T, E] of the experts with these ids, zero for -1."""
    return torch.where(topk_idx >= 0, probs.gather(1, topk_idx.clamp(min=0).long()), 0.0)


def weights_by_ids(
    topk_idx: torch.Tensor,
    probs: torch.Tensor | None,
    given_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    num_experts: int,
) -> torch.Tensor | None:
    """[T, K] float32 for the experts in `topk_idx`, which an earlier dispatch had; None where nothing is given.

    probs: [T, E]; or given_idx, topk_weights: [T, any K], ids in any order; or the weights alone, in the order of
    `topk_idx`.

    Raises:
        InputError: weights of another shape.
    """
    if probs is not None:
        return weights_of_slots(probs, topk_idx)
    if topk_weights is None:
        return None
    wanted = topk_idx if given_idx is None else given_idx
    if topk_weights.shape != wanted.shape or wanted.shape[0] != topk_idx.shape[0]:
        raise InputError(
            f"topk_weights are {list(topk_weights.shape)}, their ids {list(wanted.shape)}, for {topk_idx.shape[0]} "
            "tokens. Pass a weight per id."
        )
    if given_idx is None:
        return torch.where(topk_idx >= 0, topk_weights, 0.0)
    _, by_expert = indices_to_map(given_idx, topk_weights, topk_idx.shape[0], num_experts)
    assert by_expert is not None
    return weights_of_slots(by_expert, topk_idx)


def map_of_rows(copies: torch.Tensor, expert_offsets: torch.Tensor) -> torch.Tensor:
    """[C, e] bool: which local experts each arrived row is for; False behind the arrivals.

    copies: [C, K] permuted row of each copy, the number of rows or more = none; expert_offsets: [e + 1].
    """
    experts = expert_offsets.shape[0] - 1
    expert = torch.bucketize(copies, expert_offsets[1:].to(copies.dtype).contiguous(), right=True)
    out = torch.zeros(copies.shape[0], experts + 1, dtype=torch.bool, device=copies.device)
    return out.scatter_(1, expert, True)[:, :experts].contiguous()


def map_of_slots(values: torch.Tensor, topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[T, E] float32: values [T, K] at the experts with these ids, elsewhere zero."""
    column = torch.where(topk_idx >= 0, topk_idx, num_experts).long()
    out = torch.zeros(values.shape[0], num_experts + 1, dtype=torch.float32, device=values.device)
    return out.scatter_(1, column, values)[:, :num_experts].contiguous()


class RoutingInputs:
    """What a buffer makes of the routing that it is given: expert ids, weights, and layers that are large enough.

    Attributes:
        layers: of the buffer.
        topk: most experts per token; None: calls agree on it.
    """

    def __init__(self, layers: Layers, topk: int | None) -> None:
        self.layers = layers
        self.topk = topk
        self.rank = layers.rank
        self._agreed_topk = 1

    def _slots(
        self,
        hidden: torch.Tensor,
        routing_map: torch.Tensor | None,
        topk_idx: torch.Tensor | None,
        probs: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        how: tuple[int | None, bool],
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Expert ids [T, K], their weights, and how many experts of tokens were more than K (None: surely none).

        how: num_of_tokens_per_rank, non_blocking.
        """
        if routing_map is not None:
            idx, excess = slots_of_map(routing_map, self._agree(routing_map, *how))
            return idx, None if probs is None else weights_of_slots(probs, idx), excess if how[1] else None
        assert topk_idx is not None, "checked before"
        self._make_room(hidden.shape[0], how[0])
        if probs is not None and topk_weights is None:
            topk_weights = weights_of_slots(probs, topk_idx)
        return topk_idx.contiguous(), None if topk_weights is None else topk_weights.contiguous(), None

    def _agree(self, routing_map: torch.Tensor, slots_per_rank: int | None, non_blocking: bool) -> int:
        """Experts per token of the layer to take, the same on all ranks; makes room for the tokens, too."""
        tokens, experts = routing_map.shape
        most = min(experts, _MOST_EXPERTS)
        if non_blocking:
            self._make_room(tokens, slots_per_rank)
            return most if self.topk is None else self.topk
        needed = most_experts(routing_map)
        if self.topk is None:
            told = torch.stack([needed, needed.new_tensor(slots_per_rank or tokens), needed.new_tensor(-1)])
            dist.all_reduce(told, dist.ReduceOp.MAX, group=self.layers.group)
            worst, slots_per_rank, rejected = told.tolist()
            if rejected >= 0:
                raise PeerFailed(f"rank {rejected} rejected its arguments to dispatch; see the InputError it raised.")
            self._agreed_topk = max(self._agreed_topk, worst)
        else:
            worst = int(needed.item())
        self._make_room(tokens, slots_per_rank)
        limit = most if self.topk is None else self.topk
        if worst > limit:
            raise InputError(
                f"a token is routed to {worst} experts, but this buffer takes {limit} per token"
                f"{'' if self.topk is None else ' (topk)'}. Make one with a larger topk; {_MOST_EXPERTS} is the most."
            )
        return min(self._agreed_topk, most) if self.topk is None else self.topk

    def _reject(self, routing_map: torch.Tensor | None, non_blocking: bool) -> None:
        """This rank's arguments were refused: tell the others, if they are about to agree on experts per token."""
        if isinstance(routing_map, torch.Tensor) and not non_blocking and self.topk is None:
            told = torch.tensor([0, 0, self.rank], device=routing_map.device)
            dist.all_reduce(told, dist.ReduceOp.MAX, group=self.layers.group)

    def _make_room(self, tokens: int, slots_per_rank: int | None) -> None:
        needed = tokens if slots_per_rank is None else slots_per_rank
        if needed < tokens:
            raise InputError(f"num_of_tokens_per_rank is {needed}, but rank {self.rank} has {tokens} tokens.")
        if needed > self.layers.max_tokens:
            self.layers.grow(needed + needed // 4)
