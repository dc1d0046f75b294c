"""Layers over one group, made when a call first needs one: what is behind a buffer that serves any shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from triton_ep.distributed import check_group, ranks_per_node
from triton_ep.errors import FinalizedError, InputError
from triton_ep.layer import EPAll2AllLayer

Key = tuple[torch.dtype, int, int, int | None, int]


@dataclass
class Layers:
    """Layers that differ in dtype, topk, alignment, capacity and experts only, over one group.

    `get` is collective where it makes a layer: all ranks ask for the same ones in the same order. A layer stays until
    `close`, so that descriptors which somebody holds stay good.

    Attributes:
        group: process group; this process is a member.
        hidden: elements per row of all layers.
        num_experts: over all ranks, of layers for which nothing else is said.
        max_tokens: most tokens per rank of a layer that is made from now on, the largest number that a rank was told;
            `grow` raises it.
        nodes_of: ranks per node; None = those of the job.
        options: further arguments of `EPAll2AllLayer`.
    """

    group: Any
    hidden: int
    num_experts: int
    max_tokens: int
    nodes_of: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    made: dict[Key, EPAll2AllLayer] = field(default_factory=dict)
    retired: list[EPAll2AllLayer] = field(default_factory=list)
    closed: bool = False

    def __post_init__(self) -> None:
        self.world_size = check_group(self.group)
        self.rank = dist.get_rank(self.group)
        if self.nodes_of is None:
            self.nodes_of = ranks_per_node(self.group)

    def get(
        self,
        dtype: torch.dtype,
        topk: int,
        alignment: int = 1,
        capacity: int | None = None,
        num_experts: int | None = None,
    ) -> EPAll2AllLayer:
        """The layer of this kind; collective if there is none yet.

        Raises:
            FinalizedError: after `close`.
            InputError: a layer is missing while a CUDA graph is captured.
            ConfigError, HeapError: as `EPAll2AllLayer`.
        """
        self.check_open()
        experts = self.num_experts if num_experts is None else num_experts
        key = (dtype, topk, alignment, capacity, experts)
        layer = self.made.get(key)
        if layer is None:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise InputError(
                    f"a CUDA graph is being captured, but there is no layer yet for {dtype} rows, {experts} experts, "
                    f"topk={topk}, rows padded to {alignment} and a budget of {capacity} rows. Run the same calls once "
                    "before."
                )
            # Megatron makes a buffer for the tokens of its own rank, and ranks may have different ones.
            told: list[Any] = [None] * self.world_size
            dist.all_gather_object(told, self.max_tokens, group=self.group)
            self.max_tokens = max(told)
            layer = self.made[key] = EPAll2AllLayer(
                self.group,
                self.max_tokens,
                self.hidden,
                topk,
                self.rank,
                experts,
                self.nodes_of or 1,
                self.world_size,
                dtype,
                alignment=alignment,
                capacity=capacity,
                **self.options,
            )
        return layer

    def grow(self, max_tokens: int) -> None:
        """Make the next layers for more tokens; those of before stay for the descriptors that they made."""
        self.check_open()
        self.retired += self.made.values()
        self.made.clear()
        self.max_tokens = max_tokens

    def check_open(self) -> None:
        """Raise if `close` was called.

        Raises:
            FinalizedError: it was.
        """
        if self.closed:
            raise FinalizedError(
                "this buffer was closed, its memory is freed. Make a new one on all ranks of its group."
            )

    def close(self) -> None:
        """Free the symmetric memory of all layers. Collective, idempotent."""
        layers, self.closed = [*self.retired, *self.made.values()], True
        self.retired, self.made = [], {}
        for layer in layers:
            layer.finalize()
