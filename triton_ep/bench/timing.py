"""Timing of collective calls: per iteration the slowest rank, over iterations the median.

A call gets the number of its iteration, so that it can take another input each time. On a GPU events bracket it,
so time in which the GPU waits for the host counts; on the CPU it is the wall clock. Before each iteration the L2
cache is flushed and the ranks meet, so that no rank starts late.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

_FLUSH_BYTES = 2**28  # twice the largest L2 cache there is
_HOST_CALLS = 20

Call = Callable[[int], object]


@dataclass(frozen=True)
class Timing:
    """Times of one op in microseconds: of the slowest rank in each iteration.

    Attributes:
        skew_pct: how much less the median of the fastest rank is than that of the slowest.
    """

    median_us: float
    p20_us: float
    p80_us: float
    skew_pct: float


class Timer:
    """Measures on one device; `meet` makes the ranks start together."""

    def __init__(self, device: torch.device, iters: int, warmup: int) -> None:
        self.device, self.iters, self.warmup = device, iters, warmup
        on_gpu = device.type == "cuda"
        self._flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device=device) if on_gpu else None

    def flush(self) -> None:
        """Write more than the L2 cache holds; nothing on the CPU."""
        if self._flush is not None:
            self._flush.zero_()

    def times(self, call: Call, meet: Callable[[], None]) -> list[float]:
        """Microseconds of each iteration on this rank; collective."""
        for number in range(self.warmup):
            meet()
            call(number)
        if self.device.type != "cuda":
            return [self._once_on_cpu(call, number, meet) for number in range(self.iters)]
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.iters)]
        for number, (begin, end) in enumerate(events):
            self.flush()
            meet()
            begin.record()
            call(number)
            end.record()
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) * 1e3 for begin, end in events]

    def host_time(self, call: Call, meet: Callable[[], None]) -> float | None:
        """Microseconds that the host of this rank spends in a call, median; None on the CPU. Collective.

        The device is idle before each call, so the host never waits for room in its queue.
        """
        if self.device.type != "cuda":
            return None
        found = []
        for number in range(min(self.iters, _HOST_CALLS)):
            meet()
            torch.cuda.synchronize(self.device)
            begin = time.perf_counter()
            call(number)
            found.append((time.perf_counter() - begin) * 1e6)
        torch.cuda.synchronize(self.device)
        return statistics.median(found)

    def _once_on_cpu(self, call: Call, number: int, meet: Callable[[], None]) -> float:
        meet()
        begin = time.perf_counter()
        call(number)
        return (time.perf_counter() - begin) * 1e6


def over_ranks(times: list[float]) -> Timing:
    """Join the times of all ranks; collective over the world."""
    everyone: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, times)
    return summarize(everyone)


def slowest(value: float | None) -> float | None:
    """The largest of what the ranks give, None if one gives none; collective over the world."""
    everyone: list[float | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    found = [value for value in everyone if value is not None]
    return max(found) if len(found) == len(everyone) else None


def summarize(times: list[list[float]]) -> Timing:
    """times: microseconds of each rank and iteration."""
    table = torch.tensor(times, dtype=torch.float64)
    quantiles = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    p20, median, p80 = torch.quantile(table.amax(0), quantiles).tolist()
    medians = torch.quantile(table, 0.5, dim=1)
    fastest, slowest_median = medians.min().item(), medians.max().item()
    return Timing(median, p20, p80, (slowest_median - fastest) / slowest_median * 100)
