"""The placement of experts on ranks that vLLM's expert maps describe.

vLLM gives every rank a map [E]: the place of each expert among the experts of this rank, or -1. All maps together are
the placement: blocks, round robin, blocks of unequal size, or any other. A layer has the same number of places on every
rank, in all E' = ranks times the most experts of any rank. Ids become places before a dispatch, and ids again after it.

Source: determine_expert_map of vllm/model_executor/layers/fused_moe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from triton_ep.distributed import current_heap, gather
from triton_ep.errors import InputError


@dataclass(frozen=True, eq=False)
class Placement:
    """A placement of experts, as seen from one rank.

    Attributes:
        num_experts: E.
        ranks: ranks of the group. most: places per rank.
        experts: e, experts of this rank.
        elsewhere: id of an expert of another rank; -1 = no such expert.
        own_map: [E] list, values of this rank's map.
        first: id of this rank's first expert, if ids equal places on all ranks; else None.
        places: [E + 1] int32 on the layers' device, the place of each id, -1 for id E; None if ids equal places.
        own: [e, at least 1] int32 on the same device, ids of this rank's experts; None if ids equal places.
    """

    num_experts: int
    ranks: int
    most: int
    experts: int
    elsewhere: int
    own_map: list[int]
    first: int | None
    places: torch.Tensor | None = None
    own: torch.Tensor | None = None

    def slots_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Places of ids [T, K]. The layer drops -1 and E, and refuses ids out of range, so they stay out of range."""
        if self.places is None:
            return ids
        places = self.places.to(ids.dtype)[ids.clamp(0, self.num_experts).long()]
        # An id above E becomes a place above E'.
        beyond = torch.where(ids > self.num_experts, ids + self.ranks * self.most, ids)
        return torch.where((ids < 0) | (ids > self.num_experts), beyond, places)

    def ids_of(self, local: torch.Tensor, nobody: int) -> torch.Tensor:
        """Ids of places [R] int32 on this rank; `nobody` for places without an expert."""
        if self.own is None:
            assert self.first is not None, "ids are places"
            ids = local + self.first
        else:
            ids = self.own[local.clamp(max=self.own.shape[0] - 1).long()]
        return torch.where(local < self.experts, ids, nobody)


class Placements:
    """The placement shared by all calls of one object; it must not change.

    Attributes:
        known: the placement; None before the first call.
    """

    def __init__(self, group: Any, rank: int, ranks: int, num_experts: int) -> None:
        self.group, self.rank, self.ranks, self.num_experts = group, rank, ranks, num_experts
        self.known: Placement | None = None
        self._seen = WeakTensorKeyDictionary()  # map -> its version when it was last compared with `known`

    def learn(self, expert_map: Any) -> Placement:
        """Read the maps of all ranks and keep their placement. Collective.

        Raises:
            InputError: on every rank: some ranks have a map and some none, an expert is on no rank or on two, or no
                rank has a map and E is not a multiple of the number of ranks.
        """
        self._check_not_capturing()
        maps: list[Any] = gather(self._own_map(expert_map), self.group, "the placement of experts")
        for rank, given in enumerate(maps):
            if isinstance(given, str):
                raise InputError(f"rank {rank}: {given}")
        lacking = [rank for rank, given in enumerate(maps) if given is None]
        if lacking and len(lacking) < self.ranks:
            raise InputError(f"expert_map is None only on ranks {lacking} of {self.ranks}. Pass it on all or none.")
        if lacking:
            maps = [self._block(rank) for rank in range(self.ranks)]
        self.known = self._placement(maps)
        if expert_map is not None:
            self._seen[expert_map] = _version(expert_map)
        return self.known

    def check(self, expert_map: Any) -> Placement:
        """Return the known placement if this map agrees with it.

        Raises:
            InputError: the map differs, or a CUDA graph is being captured and this map has not been read yet.
        """
        known = self.known
        assert known is not None, "the first call has read it"
        if expert_map is None:
            if known.first is None:
                raise InputError(
                    "expert_map is None, but the first call's map did not place experts in equal blocks. Pass it in "
                    "every call."
                )
            return known
        if isinstance(expert_map, torch.Tensor) and self._seen.get(expert_map) == _version(expert_map):
            return known
        self._check_not_capturing()
        given = self._own_map(expert_map)
        if isinstance(given, str):
            raise InputError(given)
        if given != known.own_map:
            assert given is not None, "None was handled above"
            at = next(i for i, pair in enumerate(zip(given, known.own_map, strict=True)) if pair[0] != pair[1])
            raise InputError(
                f"expert_map places expert {at} at {given[at]}, that of the first call at {known.own_map[at]}: an "
                "object serves one placement. Create another object, on all ranks."
            )
        self._seen[expert_map] = _version(expert_map)
        return known

    def _own_map(self, expert_map: Any) -> list[int] | str | None:
        """Places [E] of a map, or an error text if the map is wrong; None for None."""
        if expert_map is None:
            return None
        if not isinstance(expert_map, torch.Tensor):
            return f"expert_map must be a tensor or None, got {type(expert_map).__name__}."
        shape = tuple(expert_map.shape)
        if shape != (self.num_experts,) or expert_map.dtype not in (torch.int32, torch.int64):
            return f"expert_map must be [{self.num_experts}] int32, got {list(shape)} {expert_map.dtype}."
        places: list[int] = expert_map.tolist()
        held = sorted(place for place in places if place != -1)
        if held != list(range(len(held))):
            return f"expert_map has the places {held[:9]}; a rank's experts must have places 0 to e - 1, others -1."
        return places

    def _block(self, rank: int) -> list[int]:
        """The map of a rank in a placement of equal blocks."""
        size, rest = divmod(self.num_experts, self.ranks)
        if rest:
            raise InputError(
                f"num_experts is {self.num_experts}, not a multiple of the {self.ranks} ranks, and expert_map is None: "
                "the numbers of experts per rank are unknown. Pass vLLM's expert_map."
            )
        return [at - rank * size if at // size == rank else -1 for at in range(self.num_experts)]

    def _placement(self, maps: list[list[int]]) -> Placement:
        for expert, here in enumerate(zip(*maps, strict=True)):
            owners = [rank for rank, place in enumerate(here) if place >= 0]
            if len(owners) != 1:
                on = f"ranks {owners}" if owners else "no rank"
                raise InputError(f"expert {expert} is on {on} by the ranks' expert_map: it must be on one rank.")
        counts = [sum(place >= 0 for place in each) for each in maps]
        most, mine = max(counts), maps[self.rank]
        slots = [next(r * most + each[at] for r, each in enumerate(maps) if each[at] >= 0) for at in range(len(mine))]
        elsewhere = next((at for at in reversed(range(len(mine))) if mine[at] < 0), -1)
        sizes = (self.num_experts, self.ranks, most, counts[self.rank], elsewhere, mine)
        if slots == list(range(len(slots))) and len(set(counts)) == 1:
            return Placement(*sizes, first=self.rank * most)
        own = sorted((place, at) for at, place in enumerate(mine) if place >= 0)
        device = current_heap().device
        return Placement(
            *sizes,
            first=None,
            places=torch.tensor([*slots, -1], dtype=torch.int32, device=device),
            own=torch.tensor([at for _, at in own] or [-1], dtype=torch.int32, device=device),
        )

    def _check_not_capturing(self) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise InputError(
                "a CUDA graph is being captured, but this expert_map has not been read yet. Run the same call, with "
                "the same tensor, once before."
            )


def _version(tensor: torch.Tensor) -> int:
    """Number of in-place writes to a tensor; -1 for inference tensors, which do not count them."""
    return -1 if tensor.is_inference() else tensor._version
