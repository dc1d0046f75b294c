"""Providers of dispatch and combine: the layer, and the same work by other implementations.

All give the same rows in the same order, except DeepEP, whose rows are not permuted. `arrivals` and `copies` of a
provider give the expected results, so one check serves all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from triton_ep.bench import origins
from triton_ep.bench.settings import Case
from triton_ep.errors import EPError
from triton_ep.layer import EPAll2AllLayer
from triton_ep.mx.tensor import MXTensor


class Unavailable(EPError):
    """A provider cannot run here; its rows carry the message as their skip reason."""


class Provider(Protocol):
    """Dispatch and combine of one case on this rank. All calls are collective.

    Attributes:
        roundings: most times that combine rounds a sum.
    """

    roundings: int

    def dispatch(self, x: torch.Tensor, idx: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Rows, and the state for combine. x: [T, H] bf16; idx: [T, K] int32."""

    def combine(self, y: torch.Tensor, state: Any) -> torch.Tensor:
        """[T, H]: the sum over the rows of each token. y: the rows of dispatch, in bf16."""

    def meet(self) -> None:
        """Barrier of all ranks on the current stream."""

    def arrivals(self, idxs: list[torch.Tensor], rank: int) -> origins.Arrivals:
        """The rows that this rank must receive, and their places. idxs: [T, K] of every rank."""

    def copies(self, idx: torch.Tensor) -> torch.Tensor:
        """[T]: number of rows of each token that combine sums."""


class _Permuted:
    """One row per (token, expert), expert-major, segments aligned."""

    experts_per_rank: int
    alignment: int
    device: torch.device
    roundings = 1

    def arrivals(self, idxs: list[torch.Tensor], rank: int) -> origins.Arrivals:
        """Rows of `rank`."""
        return origins.arrivals(idxs, rank, self.experts_per_rank, self.device, self.alignment)

    def copies(self, idx: torch.Tensor) -> torch.Tensor:
        """Number of assignments of each token."""
        return (idx >= 0).sum(1)


class LayerProvider(_Permuted):
    """EPAll2AllLayer without weights."""

    def __init__(self, layer: EPAll2AllLayer) -> None:
        self.layer = layer
        self.experts_per_rank = layer.config.num_experts_per_rank
        self.alignment = layer.config.alignment
        self.device = layer.context.device
        # Sums per rank and per node are rounded before the last sum.
        self.roundings = 3 if layer.config.enable_local_combine or layer.config.low_latency else 1

    def dispatch(self, x: torch.Tensor, idx: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """(rows, state for combine)."""
        recv_x, _, desc = self.layer.dispatch(x, idx)
        return recv_x, desc

    def combine(self, y: torch.Tensor, state: Any) -> torch.Tensor:
        """[T, H], the sum over the assignments of each token."""
        return self.layer.combine(y, state)

    def meet(self) -> None:
        """Barrier of all ranks on the current stream."""
        self.layer.ep_barrier_all()


def exchange_counts(
    idx: torch.Tensor, num_ranks: int, experts_per_rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort (token, k) entries by expert, and count those that each rank sends to each expert. Collective.

    Returns places in the flattened ids [T * K], dropped entries (id -1) first; the number of dropped ones [1]; and
    assignments by (other rank, expert of the receiving rank), sent and received, [num_ranks, experts_per_rank] each.
    """
    expert = idx.flatten().long()
    counts = torch.bincount(expert + 1, minlength=num_ranks * experts_per_rank + 1)
    sent_counts = counts[1:].view(num_ranks, experts_per_rank)
    recv_counts = torch.empty_like(sent_counts)
    dist.all_to_all_single(recv_counts, sent_counts.contiguous())
    return torch.argsort(expert, stable=True), counts[:1], sent_counts, recv_counts


def meet_by_collective(device: torch.device) -> None:
    """Barrier of all ranks; on a GPU the current stream waits, not the host."""
    if device.type == "cuda":
        dist.all_reduce(torch.zeros(1, device=device))
    else:
        dist.barrier()


@dataclass(frozen=True)
class _Exchanged:
    row_of: torch.Tensor  # [T, K] sent row of each assignment; past the last one: a row of zeros, for dropped ones
    slot: torch.Tensor  # output row of each received row
    sent: list[int]
    received: list[int]


class CollectiveProvider(_Permuted):
    """One row per (token, k) by all_to_all_single, and a permute into expert-major order: the baseline.

    Counts travel first, by the same collective; the host must read them, because it passes split sizes. With payload
    mxfp8 rows are quantised first, and elements and scales travel as one row of bytes.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        self.num_ranks = dist.get_world_size()
        self.experts_per_rank = case.shape.experts // self.num_ranks
        self.alignment = case.settings.alignment
        self.quantises = case.payload == "mxfp8"
        self.device = device

    def dispatch(self, x: torch.Tensor, idx: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """(rows, state for combine)."""
        num_tokens, topk = idx.shape
        order, num_dropped, sent_counts, recv_counts = exchange_counts(idx, self.num_ranks, self.experts_per_rank)
        per_expert = recv_counts.sum(0)
        aligned = (per_expert + self.alignment - 1) // self.alignment * self.alignment
        told = torch.cat([num_dropped, aligned.sum()[None], sent_counts.sum(1), recv_counts.sum(1)]).tolist()
        dropped, num_rows, *sizes = told
        sent, received = sizes[: self.num_ranks], sizes[self.num_ranks :]
        rows = self.exchange(self.wire(x)[order[dropped:] // topk], sent, received)
        # Output row of each received row: expert-major, past the padding of the preceding experts.
        local = torch.arange(self.experts_per_rank, device=self.device).repeat(self.num_ranks)
        local = torch.repeat_interleave(local, recv_counts.flatten(), output_size=sum(received))
        by_expert = torch.argsort(local, stable=True)
        slot = torch.empty_like(by_expert)
        slot[by_expert] = self.places(local[by_expert], per_expert, aligned)
        # A padding row reads the row of zeros past the last received one.
        source = torch.full((num_rows,), sum(received), device=self.device)
        source[slot] = torch.arange(sum(received), device=self.device)
        row_of = torch.empty_like(order)
        row_of[order] = torch.arange(order.numel(), device=self.device) - dropped
        row_of = torch.where(row_of < 0, sum(sent), row_of).view(num_tokens, topk)
        state = _Exchanged(row_of, slot, sent, received)
        return self.unpacked(rows, source, x), state

    def combine(self, y: torch.Tensor, state: Any) -> torch.Tensor:
        """[T, H], the float32 sum over the assignments of each token, rounded once."""
        rows = self.exchange(y[state.slot], state.received, state.sent)
        return rows[state.row_of].sum(1, dtype=torch.float32).to(y.dtype)

    def meet(self) -> None:
        """Barrier of all ranks on the current stream."""
        meet_by_collective(self.device)

    def wire(self, x: torch.Tensor) -> torch.Tensor:
        """Rows in their form on the wire."""
        if not self.quantises:
            return x
        mx = MXTensor.to_mx(x)
        return torch.cat([mx.qdata.view(torch.uint8), mx.scale.view(torch.uint8)], dim=1)

    def unpacked(self, rows: torch.Tensor, source: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """rows[source] of rows in wire form, as a tensor like `like`."""
        if not self.quantises:
            return rows[source]
        hidden = like.shape[1]
        data, scale = rows[:, :hidden][source], rows[:, hidden:][source]
        return MXTensor.from_qdata_and_scales(data.view(torch.float8_e4m3fn), scale, like.dtype)

    def places(self, local: torch.Tensor, per_expert: torch.Tensor, aligned: torch.Tensor) -> torch.Tensor:
        """Output row of each assignment, in the order of experts; local: its expert."""
        padding_before = (aligned - per_expert).cumsum(0) - (aligned - per_expert)
        return torch.arange(local.numel(), device=self.device) + padding_before[local]

    def exchange(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Received rows by source rank, and a row of zeros. Sent as bytes: not every backend supports every dtype."""
        total = sum(received)
        out = torch.empty(total + 1, rows.shape[1], dtype=rows.dtype, device=self.device)
        out[total:] = 0
        dist.all_to_all_single(out[:total].view(torch.uint8), rows.view(torch.uint8), received, sent)
        return out


@dataclass(frozen=True)
class _Deduplicated:
    row_of: torch.Tensor  # [T, W] row sent to each rank; past the last one: a row of zeros, if none was sent
    arrival: torch.Tensor  # received row of each assignment here
    place: torch.Tensor  # its output row
    sent: list[int]
    received: list[int]


class DedupProvider(CollectiveProvider):
    """One row per (token, rank) by all_to_all_single, and its expert ids by another: fewer bytes, more work.

    The receiver expands rows into expert-major order; on the way back it sums a token's rows first, in float32.
    """

    roundings = 3

    def dispatch(self, x: torch.Tensor, idx: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """(rows, state for combine)."""
        (num_tokens, topk), expert = idx.shape, idx.long()
        owner = torch.where(expert >= 0, expert // self.experts_per_rank, self.num_ranks)
        wanted = torch.zeros(num_tokens, self.num_ranks + 1, dtype=torch.bool, device=self.device)
        wanted = wanted.scatter_(1, owner, True)[:, :-1]
        counts = torch.bincount(expert.flatten() + 1, minlength=self.num_ranks * self.experts_per_rank + 1)[1:]
        sent_counts = torch.cat([counts.view(self.num_ranks, -1), wanted.sum(0).unsqueeze(1)], dim=1)
        recv_counts = torch.empty_like(sent_counts)
        dist.all_to_all_single(recv_counts, sent_counts)
        per_expert = recv_counts[:, :-1].sum(0)
        aligned = (per_expert + self.alignment - 1) // self.alignment * self.alignment
        told = [per_expert.sum()[None], aligned.sum()[None], sent_counts[:, -1], recv_counts[:, -1]]
        copies, num_rows, *sizes = torch.cat(told).tolist()
        sent, received = sizes[: self.num_ranks], sizes[self.num_ranks :]
        order = torch.argsort((~wanted).t().flatten().int(), stable=True)[: sum(sent)]
        token, rank = order % num_tokens, (order // num_tokens).unsqueeze(1)
        ids = torch.where(owner[token] == rank, expert[token] - rank * self.experts_per_rank, -1).int()
        rows = self.exchange(self.wire(x)[token], sent, received)
        local = self.exchange(ids, sent, received)[:-1].flatten().long()
        by_expert = torch.argsort(local, stable=True)[local.numel() - copies :]  # ids of other ranks, -1, sort first
        arrival = by_expert // topk
        place = self.places(local[by_expert], per_expert, aligned)
        source = torch.full((num_rows,), sum(received), device=self.device)
        source[place] = arrival
        row_of = torch.full((self.num_ranks * num_tokens,), sum(sent), device=self.device)
        row_of[order] = torch.arange(sum(sent), device=self.device)
        row_of = row_of.view(self.num_ranks, num_tokens).t()
        return self.unpacked(rows, source, x), _Deduplicated(row_of, arrival, place, sent, received)

    def combine(self, y: torch.Tensor, state: Any) -> torch.Tensor:
        """[T, H], the float32 sum over the ranks of each token, of rounded sums."""
        sums = torch.zeros(sum(state.received), y.shape[1], dtype=torch.float32, device=self.device)
        sums.index_add_(0, state.arrival, y[state.place].float())
        rows = self.exchange(sums.to(y.dtype), state.received, state.sent)
        return rows[state.row_of].sum(1, dtype=torch.float32).to(y.dtype)


class VdevProvider(CollectiveProvider):
    """Like CollectiveProvider, but rows travel through torch's symmetric memory, which takes split sizes on the device.

    Peers read the packed rows and write the splits, so calls alternate between two buffers of each: a call begins with
    a barrier of its own, after which no peer works on the call before the last any longer.

    Raises:
        Unavailable: this torch has no such op, or no NVSHMEM to run it with.
    """

    def __init__(self, case: Case, device: torch.device, most_rows: int) -> None:
        super().__init__(case, device)
        from torch.distributed import _symmetric_memory as symm_mem

        if device.type != "cuda":
            raise Unavailable("torch's symmetric memory needs GPUs.")
        if not hasattr(torch.ops.symm_mem, "all_to_all_vdev"):
            raise Unavailable("this torch has no torch.ops.symm_mem.all_to_all_vdev.")
        if not symm_mem.is_nvshmem_available():
            raise Unavailable("this torch finds no NVSHMEM for its symmetric memory.")
        symm_mem.set_backend("NVSHMEM")
        self.group = dist.distributed_c10d._get_default_group().group_name
        shape = case.shape
        rows = max(most_rows, shape.tokens * shape.topk)

        def symmetric(*sizes: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            tensor = symm_mem.empty(*sizes, dtype=dtype, device=device)
            symm_mem.rendezvous(tensor, group=self.group)
            return tensor

        self.turn = 0
        self.inputs = [symmetric(rows, shape.hidden, dtype=torch.bfloat16) for _ in range(2)]
        self.output = symmetric(rows, shape.hidden, dtype=torch.bfloat16)
        self.in_splits = symmetric(self.num_ranks)
        self.out_splits = [symmetric(2, self.num_ranks) for _ in range(2)]

    def exchange(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Received rows by source rank, and a row of zeros."""
        total = sum(received)
        self.turn = 1 - self.turn
        packed, splits = self.inputs[self.turn], self.out_splits[self.turn]
        packed[: rows.shape[0]] = rows
        self.in_splits.copy_(torch.tensor(sent))
        torch.ops.symm_mem.all_to_all_vdev(packed, self.output, self.in_splits, splits, self.group)
        out = torch.empty(total + 1, rows.shape[1], dtype=rows.dtype, device=self.device)
        out[total:] = 0
        out[:total] = self.output[:total]
        return out
