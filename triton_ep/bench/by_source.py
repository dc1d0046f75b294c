"""Rows by source rank, one per (token, rank): what the layer's compact rows and DeepEP's normal kernels send, and the
checks of both.

FP8 rows are quantised beforehand, with one scale per 128 values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch

from triton_ep.bench import origins
from triton_ep.bench.job import Job, WrongResult
from triton_ep.bench.providers import meet_by_collective
from triton_ep.bench.settings import Case
from triton_ep.layer import EPAll2AllLayer

BLOCK = 128
"""Values of a row that share a scale."""
_MOST = 448.0  # largest e4m3 value
_HALF_STEP = 16.0 / _MOST
"""Most by which rounding moves a value, as a part of the largest value of its block."""


class Scaled(NamedTuple):
    """FP8 rows [..., H] with a float32 scale per 128 values."""

    data: torch.Tensor
    scale: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """As bfloat16."""
        blocks = self.data.float().unflatten(-1, (-1, BLOCK)) * self.scale.unsqueeze(-1)
        return blocks.flatten(-2).bfloat16()


def quantize(x: torch.Tensor) -> Scaled:
    """Quantise rows as DeepEP's kernels expect them."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1).clamp(1e-4)
    data = (blocks * (_MOST / largest).unsqueeze(-1)).clamp(-_MOST, _MOST).to(torch.float8_e4m3fn).flatten(-2)
    return Scaled(data, (largest / _MOST).contiguous())


class Checked(ABC):
    """Common part of providers whose rows are not in the layer's expert-major order."""

    roundings = 1

    def __init__(self, job: Job, case: Case) -> None:
        self.job, self.case, self.device = job, case, job.device
        self.experts, self.num_ranks = job.shape.experts, job.num_ranks
        self.fp8 = case.payload == "mxfp8"

    def meet(self) -> None:
        """Barrier of all ranks on the current stream."""
        meet_by_collective(self.device)

    def check_combine(self, number: int, out: torch.Tensor) -> None:
        """Check that combine sums the unchanged rows of input `number` per token.

        Raises:
            WrongResult: a sum differs by more than rounding; the message as of `origins.wrong_sums`.
        """
        x, idx = self.job.inputs[number]
        exact = x.double() * self.copies(idx).unsqueeze(1)
        limit = exact.abs() * torch.finfo(torch.bfloat16).eps * self.roundings
        if self.fp8:
            limit = limit + near(exact)
        difference = origins.wrong_sums(out, exact, limit)
        if difference is not None:
            raise WrongResult(f"combine on rank {self.job.rank}: {difference}")

    @abstractmethod
    def copies(self, idx: torch.Tensor) -> torch.Tensor:
        """[T]: number of rows of each token that combine sums."""


def near(exact: torch.Tensor) -> torch.Tensor:
    """[..., H]: largest error of FP8 rows that return in bf16."""
    largest = exact.abs().unflatten(-1, (-1, BLOCK)).amax(-1, keepdim=True).clamp(1e-4)
    return (largest * (_HALF_STEP * 1.1)).expand(*largest.shape[:-1], BLOCK).flatten(-2)


class BySource(Checked):
    """One row per token and rank, sorted by source rank and token."""

    def __init__(self, job: Job, case: Case) -> None:
        super().__init__(job, case)
        self._quantized: dict[int, Scaled] = {}

    def given(self, x: torch.Tensor) -> Any:
        """The rows to send: x, or its quantised rows."""
        if not self.fp8:
            return x
        if x.data_ptr() not in self._quantized:  # during the check of this input, before anything is timed
            self._quantized[x.data_ptr()] = quantize(x)
        return self._quantized[x.data_ptr()]

    def _owners(self, idx: torch.Tensor) -> torch.Tensor:
        """[T, W] bool: whether a token has an expert on a rank."""
        owner = torch.where(idx >= 0, idx.long() // (self.experts // self.num_ranks), -1)
        return torch.stack([(owner == rank).any(1) for rank in range(self.num_ranks)], dim=1)

    def check_dispatch(self, number: int, rows: Any) -> None:
        """Check for one row per token that has an expert here, by source rank and token.

        Raises:
            WrongResult: a row differs, or rows are missing.
        """
        job = self.job
        here = torch.cat([self._owners(idx)[:, job.rank] for idx in job.idxs[number]])
        token = torch.nonzero(here).flatten().to(self.device)
        everyone = torch.cat([job.rows_of(rank, number) for rank in range(job.num_ranks)])
        received = rows.dequantize() if isinstance(rows, Scaled) else rows
        if received.shape[0] < token.numel():
            raise WrongResult(f"dispatch on rank {job.rank}: {received.shape[0]} rows, {token.numel()} were sent")
        if not self.fp8:
            difference = origins.first_difference(received[: token.numel()], everyone, token)
            if difference is not None:
                raise WrongResult(f"dispatch on rank {job.rank}: {difference}")
            return
        exact = everyone[token].double()
        if not bool(((received[: token.numel()].double() - exact).abs() <= near(exact)).all()):
            raise WrongResult(f"dispatch on rank {job.rank}: FP8 rows are not those that were sent")

    def copies(self, idx: torch.Tensor) -> torch.Tensor:
        """Number of ranks that own an expert of the token."""
        return self._owners(idx).sum(1)


class CompactLayer(BySource):
    """EPAll2AllLayer.dispatch_compact without weights, and combine of its rows.

    Case "static": with room for all rows, so that the host waits for nothing.
    """

    def __init__(self, job: Job, case: Case, layer: EPAll2AllLayer) -> None:
        super().__init__(job, case)
        self.layer = layer
        self._num_rows = job.num_ranks * job.shape.tokens if case.capacity == "static" else None

    def dispatch(self, x: torch.Tensor, idx: torch.Tensor) -> tuple[Any, Any]:
        """(rows, state for combine)."""
        if self.fp8:
            data, scale = self.given(x)
            rows = self.layer.dispatch_compact(data, idx, scale=scale, num_rows=self._num_rows)
            assert rows.scale is not None, "scales were sent"
            return Scaled(rows.x, rows.scale), rows.layout_desc
        rows = self.layer.dispatch_compact(x, idx, num_rows=self._num_rows)
        return rows.x, rows.layout_desc

    def combine(self, y: torch.Tensor, state: Any) -> torch.Tensor:
        """[T, H]: per token, the sum over its ranks."""
        return self.layer.combine(y, state)

    def meet(self) -> None:
        """Barrier of all ranks on the current stream."""
        self.layer.ep_barrier_all()
