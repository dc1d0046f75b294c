"""What is measured: the layer, and the same work done by torch.distributed collectives.

Both give the same rows in the same order, so one check serves both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from triton_ep import EPAll2AllLayer


class LayerProvider:
    """EPAll2AllLayer without weights."""

    def __init__(self, layer: EPAll2AllLayer) -> None:
        self.layer = layer

    def dispatch(self, x: torch.Tensor, idx: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """(rows, what combine needs)."""
        recv_x, _, desc = self.layer.dispatch(x, idx)
        return recv_x, desc

    def combine(self, y: torch.Tensor, state: Any) -> torch.Tensor:
        """[T, H], the sum over the copies of each token."""
        return self.layer.combine(y, state)

    def meet(self) -> None:
        """All ranks have come here, on the current stream."""
        self.layer.ep_barrier_all()


@dataclass(frozen=True)
class _Exchanged:
    order: torch.Tensor  # entry of each row sent
    by_expert: torch.Tensor  # received row of each output row
    sent: list[int]
    received: list[int]
    num_tokens: int
    topk: int


class CollectiveProvider:
    """One row per (token, k) by all_to_all_single, and a permute into expert-major order: the plain way.

    Counts go first, by the same collective; the host must read them, because it passes split sizes.
    """

    def __init__(self, num_experts: int, device: torch.device) -> None:
        self.num_ranks = dist.get_world_size()
        self.experts_per_rank = num_experts // self.num_ranks
        self.device = device

    def dispatch(self, x: torch.Tensor, idx: torch.Tensor) -> tuple[torch.Tensor, _Exchanged]:
        """(rows, what combine needs)."""
        expert = idx.flatten().long()
        # Dropped entries sort first and have no counterpart.
        counts = torch.bincount(expert + 1, minlength=self.num_ranks * self.experts_per_rank + 1)
        order = torch.argsort(expert, stable=True)
        sent_counts = counts[1:].view(self.num_ranks, self.experts_per_rank)
        recv_counts = torch.empty_like(sent_counts)
        dist.all_to_all_single(recv_counts, sent_counts.contiguous())
        dropped, *sizes = torch.cat([counts[:1], sent_counts.sum(1), recv_counts.sum(1)]).tolist()
        sent, received = sizes[: self.num_ranks], sizes[self.num_ranks :]
        order = order[dropped:]
        rows = self._exchange(x[order // idx.shape[1]], sent, received)
        local = torch.arange(self.experts_per_rank, device=self.device).repeat(self.num_ranks)
        local = torch.repeat_interleave(local, recv_counts.flatten(), output_size=sum(received))
        by_expert = torch.argsort(local, stable=True)
        return rows[by_expert], _Exchanged(order, by_expert, sent, received, *idx.shape)

    def combine(self, y: torch.Tensor, state: _Exchanged) -> torch.Tensor:
        """[T, H], the float32 sum over the copies of each token, rounded once."""
        by_source = torch.empty_like(y)
        by_source[state.by_expert] = y
        rows = self._exchange(by_source, state.received, state.sent)
        total = torch.zeros(state.num_tokens, y.shape[1], dtype=torch.float32, device=self.device)
        return total.index_add_(0, state.order // state.topk, rows.float()).to(y.dtype)

    def meet(self) -> None:
        """All ranks have come here; on a GPU the current stream waits for it, not the host."""
        if self.device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=self.device))
        else:
            dist.barrier()

    def _exchange(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Rows of every rank, by source; bytes, because not every backend knows every dtype."""
        out = torch.empty(sum(received), rows.shape[1], dtype=rows.dtype, device=self.device)
        dist.all_to_all_single(out.view(torch.uint8), rows.view(torch.uint8), received, sent)
        return out
