"""The layers behind buffers: one per group, row size, top-k, experts and programs, shared by all buffers of a group.

Frameworks drop a buffer and make another while handles of the first are still to be combined, and no rank may free
symmetric memory by itself. So layers belong to the group here, and go when the buffers that used them are destroyed, or
by `release`. Handles name their layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from triton_ep.distributed import check_group, current_heap, ranks_per_node
from triton_ep.errors import InputError
from triton_ep.layer import EPAll2AllLayer
from triton_ep.ops.compact import ZeroCounts

_STEP = 64  # max_tokens are multiples of this: small changes of a batch make no new layer


class Kind(NamedTuple):
    """What a layer is made for.

    Attributes:
        max_tokens: 0 = what calls need; low-latency layers are made for a number.
        scaled: a low-latency layer, whose dispatches are all alike, sends one-byte rows with scales.
    """

    dtype: torch.dtype
    hidden: int
    topk: int
    num_experts: int
    num_sm: int
    max_tokens: int = 0
    scaled: bool = False


@dataclass
class GroupLayers:
    """Layers over one group.

    Attributes:
        group: process group; this process is a member.
        ranks_per_node: of the group.
        heap: of the job that the group belongs to.
        timeout_s: bound of every wait in layers made from now on, in seconds.
        made: the layer of each kind.
        retired: layers that became too small, kept for their handles.
        users: numbers of the buffers that used a layer.
        zeros: for counts of `get_dispatch_layout`.
    """

    group: Any
    ranks_per_node: int
    heap: Any
    timeout_s: float = 30.0
    made: dict[Kind, EPAll2AllLayer] = field(default_factory=dict)
    retired: list[EPAll2AllLayer] = field(default_factory=list)
    users: dict[int, set[int]] = field(default_factory=dict)
    zeros: ZeroCounts = field(default_factory=ZeroCounts)

    def get(self, kind: Kind, num_tokens: int, user: int) -> EPAll2AllLayer:
        """The layer of this kind; collective if there is none yet, and then made for the most tokens of any rank.

        Raises:
            InputError: a layer is missing while a CUDA graph is captured.
            ConfigError, HeapError: as `EPAll2AllLayer`.
        """
        layer = self.made.get(kind)
        if layer is None:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise InputError(
                    f"a CUDA graph is being captured, but there is no layer yet for {kind.dtype} rows of "
                    f"{kind.hidden}, top-{kind.topk} of {kind.num_experts} experts. Run the same calls once before."
                )
            most = kind.max_tokens or self._most(num_tokens)
            layer = self.made[kind] = self._make(kind, most)
        self.users.setdefault(layer.context.layer_id, set()).add(user)
        return layer

    def grow(self, kind: Kind, num_tokens: int) -> None:
        """Make the next layer of this kind for that many tokens and a quarter more; the one there is stays for handles.

        Collective, as all ranks learn of it in the same call; the new layer is made by the next `get`.
        """
        self.retired.append(self.made.pop(kind))
        self.made[kind] = self._make(kind, num_tokens + num_tokens // 4)

    def free(self, user: int | None) -> None:
        """Free the layers that only this buffer used; None: all. Collective."""
        for layer in [*self.retired, *self.made.values()]:
            users = self.users.get(layer.context.layer_id, set())
            users.discard(user) if user is not None else users.clear()
            if not users:
                layer.finalize()
                self.users.pop(layer.context.layer_id, None)
        self.retired = [layer for layer in self.retired if layer.context.layer_id in self.users]
        self.made = {kind: layer for kind, layer in self.made.items() if layer.context.layer_id in self.users}

    def _most(self, num_tokens: int) -> int:
        told: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(told, num_tokens, group=self.group)
        return max(told)

    def _make(self, kind: Kind, max_tokens: int) -> EPAll2AllLayer:
        ranks = dist.get_world_size(self.group)
        most = -(-max(max_tokens, 1) // _STEP) * _STEP
        options: dict[str, Any] = {}
        if kind.max_tokens:
            most = kind.max_tokens
            rows = ranks * most * min(kind.topk, kind.num_experts // ranks)
            options = {"low_latency": True, "capacity": rows}
        return EPAll2AllLayer(
            self.group,
            most,
            kind.hidden,
            kind.topk,
            dist.get_rank(self.group),
            kind.num_experts,
            self.ranks_per_node,
            ranks,
            kind.dtype,
            num_sm=kind.num_sm,
            # In one node it changes nothing but room for compact rows, which are fewer than those of experts.
            enable_local_combine=self.ranks_per_node == ranks,
            timeout_s=self.timeout_s,
            **options,
        )


_GROUPS: dict[Any, GroupLayers] = {}
"""Of every group that has buffers."""


def layers_of(group: Any) -> GroupLayers:
    """The layers of a group, none at first.

    Raises:
        ConfigError: no process group, or one that this process is not in.
    """
    check_group(group)
    found = _GROUPS.get(group)
    if found is None or found.heap is not current_heap():
        found = _GROUPS[group] = GroupLayers(group, ranks_per_node(group), current_heap())
    return found


def release(group: Any = None) -> None:
    """Free the memory of all buffers over a group, those that were dropped too; None: over all groups. Collective.

    Handles of these buffers can then not be combined any more.
    """
    for each in [group] if group is not None else list(_GROUPS):
        found = _GROUPS.pop(each, None)
        if found is not None and found.heap is current_heap():
            found.free(None)
