"""The layers of one HybridEPBuffer. They differ only in dtype, top-k, alignment, capacity and experts."""

from __future__ import annotations

from typing import Any

import torch

from triton_ep.integrations.layer_pool import LayerPool, LayerSizes
from triton_ep.layer import EPAll2AllLayer


class Layers:
    """Layers of a buffer, created when a call first needs one. Buffers share no layers, so each may use its own stream.

    Args:
        group: process group; this process is a member.
        hidden: elements per row of all layers.
        num_experts: experts over all ranks, for layers whose sizes give no other number.
        max_tokens: most tokens per rank of layers created from now on. Ranks may pass different numbers; the first
            layer has room for the largest. `grow` raises it.
        ranks_per_node: None: as `initialize_distributed` found them.
        num_sm, enable_local_combine, timeout_s: as for `EPAll2AllLayer`.

    Attributes:
        pool: the layers.
        check_open: raises FinalizedError if `close` was called.
        found: the layers that later calls use, by the arguments of `get`: looking up five values takes a fifth of the
            time of `LayerSizes`.
    """

    def __init__(
        self,
        group: Any,
        hidden: int,
        num_experts: int,
        max_tokens: int,
        ranks_per_node: int | None,
        *,
        num_sm: int | None,
        enable_local_combine: bool,
        timeout_s: float,
    ) -> None:
        self.pool = LayerPool(group, ranks_per_node)
        self.check_open = self.pool.check_open
        self.group, self.rank, self.world_size = group, self.pool.rank, self.pool.world_size
        self.hidden, self.num_experts, self.max_tokens = hidden, num_experts, max_tokens
        self._num_sm, self._enable_local_combine, self._timeout_s = num_sm, enable_local_combine, timeout_s
        self.found: dict[tuple[object, ...], EPAll2AllLayer] = {}

    def sizes(
        self, dtype: torch.dtype, topk: int, alignment: int = 1, capacity: int | None = None, experts: int | None = None
    ) -> LayerSizes:
        """Sizes of the layer for such calls; experts: number over all ranks, None = `num_experts`."""
        return LayerSizes(
            self.hidden,
            topk,
            self.num_experts if experts is None else experts,
            dtype,
            self._num_sm,
            self._timeout_s,
            alignment,
            capacity,
            enable_local_combine=self._enable_local_combine,
        )

    def get(
        self, dtype: torch.dtype, topk: int, alignment: int = 1, capacity: int | None = None, experts: int | None = None
    ) -> EPAll2AllLayer:
        """The layer of these `sizes`; collective if it does not exist yet. Raises as `LayerPool.get`."""
        key = (dtype, topk, alignment, capacity, experts)
        layer = self.found.get(key)
        if layer is None:
            layer = self.found[key] = self.pool.get(self.sizes(*key), self.max_tokens)
            self.max_tokens = layer.config.max_tokens
        return layer

    def grow(self, num_tokens: int) -> None:
        """Create later layers for a quarter more than `num_tokens`. Present layers stay, for their descriptors."""
        self.pool.outgrow()
        self.found.clear()
        self.max_tokens = num_tokens + num_tokens // 4

    def close(self) -> None:
        """Free the symmetric memory of all layers. Collective, idempotent."""
        self.found.clear()
        self.pool.close()
