"""Layers of the integrations: one per group and sizes, created when a call first needs it.

A buffer of another package serves calls of any size, and may be dropped at any time. A layer has fixed sizes, and only
all ranks together can free its symmetric memory. Layers therefore belong to a pool. A layer stays until every user
frees it, or until `close`, so that its descriptors stay valid.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from triton_ep import distributed
from triton_ep.distributed import check_group, current_heap
from triton_ep.errors import FinalizedError, InputError
from triton_ep.layer import EPAll2AllLayer


class LayerSizes(NamedTuple):
    """Sizes and options of a layer: arguments of `EPAll2AllLayer`.

    Attributes:
        max_tokens: most tokens per rank; 0: the largest number that any rank needs when the layer is created.
        variant: distinguishes layers of equal sizes, such as one per micro-batch.
    """

    hidden: int
    topk: int
    num_experts: int
    dtype: torch.dtype
    num_sm: int | None = None
    timeout_s: float = 30.0
    alignment: int = 1
    capacity: int | None = None
    max_tokens: int = 0
    payload: str | None = None
    low_latency: bool = False
    enable_local_combine: bool = False
    variant: Hashable = None
    sm_budget: int | None = None


class _Joining:
    """Whether integrations call `initialize_distributed` if the program has not."""

    wanted = False


def join_when_needed() -> None:
    """Let the first object of an integration call `initialize_distributed` if the program has not: for worker processes
    that a framework starts. All ranks of the default process group must then create that object at the same time."""
    _Joining.wanted = True


def _join() -> None:
    if _Joining.wanted and not distributed.is_initialized():
        distributed.initialize_distributed()


class LayerPool:
    """Layers over one group.

    Args:
        group: process group; this process is a member.
        ranks_per_node: None: as `initialize_distributed` found them.

    Attributes:
        group, rank, world_size, ranks_per_node: common to all layers.
        heap: symmetric heap of the job that the group belongs to.
        layers: sizes -> layer.
        found: the same layers under a user's own keys, added by the user: looking up a short key takes a fraction of
            the time of `LayerSizes`. Emptied whenever a layer is outgrown or freed.
        outgrown: layers that became too small, kept because descriptors may refer to them.

    Raises:
        ConfigError: an unknown group, a group without this process, or nodes with different numbers of its ranks.
        EPError: `initialize_distributed` has not been called.
    """

    def __init__(self, group: Any, ranks_per_node: int | None = None) -> None:
        _join()
        self.group, self.world_size = group, check_group(group)
        self.rank = dist.get_rank(group)
        self.heap = current_heap()
        self.ranks_per_node = distributed.ranks_per_node(group) if ranks_per_node is None else ranks_per_node
        self.layers: dict[LayerSizes, EPAll2AllLayer] = {}
        self.found: dict[Hashable, EPAll2AllLayer] = {}
        self.outgrown: list[EPAll2AllLayer] = []
        self._users: dict[int, set[Hashable]] = {}
        self._closed = False

    def get(self, sizes: LayerSizes, num_tokens: int = 0, user: Hashable = None) -> EPAll2AllLayer:
        """The layer of these sizes. Collective if it does not exist yet: all ranks request the same layers in the same
        order.

        Args:
            num_tokens: tokens that this rank needs room for. Only used to create a layer whose `sizes.max_tokens` is 0:
                it gets the largest `num_tokens` of any rank.
            user: key of a user that will call `free`; None: the layer stays until `free_all` or `close`.

        Raises:
            FinalizedError: after `close`.
            InputError: a layer is missing while a CUDA graph is captured.
            ConfigError, HeapError: as `EPAll2AllLayer`.
        """
        layer = self.layers.get(sizes)
        if layer is None:
            layer = self.layers[sizes] = self._make(sizes, num_tokens)
        if user is not None:
            self._users.setdefault(layer.context.layer_id, set()).add(user)
        return layer

    def outgrow(self, sizes: LayerSizes | None = None) -> None:
        """Make the next `get` of these sizes (None: of any sizes) create a new, larger layer. Replaced layers stay
        until they are freed. All ranks call it in the same order."""
        self.found.clear()
        if sizes is None:
            self.outgrown += self.layers.values()
            self.layers.clear()
        else:
            self.outgrown.append(self.layers.pop(sizes))

    def free(self, user: Hashable) -> None:
        """Free the symmetric memory of layers without another user. Collective, idempotent."""
        mine = [layer for layer in self._all() if user in self._users.get(layer.context.layer_id, ())]
        for layer in mine:
            self._users[layer.context.layer_id].discard(user)
        self._free([layer for layer in mine if not self._users[layer.context.layer_id]])

    def free_all(self) -> None:
        """Free the symmetric memory of all layers. Collective, idempotent; `get` creates them again."""
        self._free(self._all())

    def close(self) -> None:
        """`free_all`; `get` then raises."""
        self._closed = True
        self.free_all()

    def _all(self) -> list[EPAll2AllLayer]:
        return [*self.outgrown, *self.layers.values()]

    def _free(self, unused: list[EPAll2AllLayer]) -> None:
        self.found.clear()
        freed = {layer.context.layer_id for layer in unused}
        self.outgrown = [layer for layer in self.outgrown if layer.context.layer_id not in freed]
        self.layers = {sizes: layer for sizes, layer in self.layers.items() if layer.context.layer_id not in freed}
        for layer in unused:
            self._users.pop(layer.context.layer_id, None)
            layer.finalize()

    def check_open(self) -> None:
        """Raise if `close` was called.

        Raises:
            FinalizedError: it was.
        """
        if self._closed:
            raise FinalizedError(
                "this buffer was closed, its memory is freed. Create a new one on all ranks of its group."
            )

    def _make(self, sizes: LayerSizes, num_tokens: int) -> EPAll2AllLayer:
        self.check_open()
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise InputError(
                f"a CUDA graph is being captured, but no layer of these sizes exists yet: {_shown(sizes)}. Run the "
                "same calls once before the capture."
            )
        max_tokens = sizes.max_tokens or max(distributed.gather(num_tokens, self.group, "the sizes of a layer"))
        return EPAll2AllLayer(
            self.group,
            max_tokens,
            sizes.hidden,
            sizes.topk,
            self.rank,
            sizes.num_experts,
            self.ranks_per_node,
            self.world_size,
            sizes.dtype,
            num_sm=sizes.num_sm,
            sm_budget=sizes.sm_budget,
            enable_local_combine=sizes.enable_local_combine,
            payload=sizes.payload,
            alignment=sizes.alignment,
            capacity=sizes.capacity,
            low_latency=sizes.low_latency,
            timeout_s=sizes.timeout_s,
        )


def _shown(sizes: LayerSizes) -> str:
    """The sizes that differ from the defaults, as text."""
    plain = LayerSizes._field_defaults
    return ", ".join(f"{name}={value}" for name, value in sizes._asdict().items() if value != plain.get(name, ...))


_SHARED: dict[tuple[str, Any, int | None], LayerPool] = {}
"""Pools of integrations whose objects share layers: (integration, group, ranks per node) -> pool."""


def shared_pool(integration: str, group: Any, ranks_per_node: int | None = None) -> LayerPool:
    """The pool that all objects of an integration share over a group, empty at first; arguments as for `LayerPool`.

    Raises:
        As `LayerPool`.
    """
    _join()
    check_group(group)
    key = (integration, group, ranks_per_node)
    pool = _SHARED.get(key)
    if pool is None or pool.heap is not current_heap():
        pool = _SHARED[key] = LayerPool(group, ranks_per_node)
    return pool


def free_shared(integration: str, group: Any = None) -> None:
    """Free the layers of an integration's pools over a group; None: over all groups. Collective, idempotent."""
    for (owner, of_group, _), pool in _SHARED.items():
        if owner == integration and group in (None, of_group) and pool.heap is current_heap():
            pool.free_all()
