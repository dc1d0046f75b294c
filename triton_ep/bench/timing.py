"""Timing of collective calls: per iteration the slowest rank, over iterations the median.

A call receives the number of its iteration, so it can use a different input each time. On a GPU events bracket the
call, so time in which the GPU waits for the host counts; on the CPU the wall clock measures it. Before each iteration
the L2 cache is flushed and the ranks meet, so that no rank starts late.

`record_calls` records the kernels and copies that run on the device during a call, with their times, from torch's
profiler. On the CPU it takes the wall clock around each launch of an interpreted kernel, and misses copies by torch.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from triton_ep.runtime import launch as runtime

_FLUSH_BYTES = 2**28  # twice the largest L2 cache of any GPU
_HOST_CALLS = 20
_MARK = "spin_kernel"  # the kernel of torch.cuda._sleep
_HOLD_CYCLES = 2_000_000  # about a millisecond, in which the host queues the whole call

Call = Callable[[int], object]


def rotated(call: Call, inputs: int) -> Call:
    """A call that gets the numbers of `inputs` inputs in turn."""
    return lambda number: call(number % inputs)


@dataclass(frozen=True)
class Timing:
    """Times of one op in microseconds: of the slowest rank in each iteration.

    Attributes:
        skew_pct: gap between the medians of the fastest and slowest rank, in percent of the slowest.
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
        """Write more than the L2 cache holds; does nothing on the CPU."""
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
        """Median host microseconds of a call on this rank; None on the CPU. Collective.

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
    """The largest value of any rank, None if a rank has none; collective over the world."""
    everyone: list[float | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    found = [value for value in everyone if value is not None]
    return max(found) if len(found) == len(everyone) else None


def summarize(times: list[list[float]]) -> Timing:
    """Summary over ranks and iterations; times: microseconds of each rank and iteration."""
    table = torch.tensor(times, dtype=torch.float64)
    quantiles = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    p20, median, p80 = torch.quantile(table.amax(0), quantiles).tolist()
    medians = torch.quantile(table, 0.5, dim=1)
    fastest, slowest_median = medians.min().item(), medians.max().item()
    return Timing(median, p20, p80, (slowest_median - fastest) / slowest_median * 100)


@dataclass(frozen=True)
class Span:
    """One kernel or copy: its begin and end, in microseconds from any zero, and its stream."""

    name: str
    start_us: float
    end_us: float
    stream: int = 0


@dataclass(frozen=True)
class Stage:
    """All kernels, or copies, of one name in a call.

    Attributes:
        per_call: launches in one call.
        median_us: time of one launch, including any wait for other ranks.
    """

    name: str
    per_call: float
    median_us: float

    @property
    def us(self) -> float:
        """Microseconds of all launches in one call."""
        return self.per_call * self.median_us


def record_calls(
    call: Call, meet: Callable[[], None], flush: Callable[[], None], repeats: int, device: torch.device
) -> list[list[Span]]:
    """Spans of each of `repeats` calls on this rank; collective. Empty if the profiler sees nothing.

    The device is held back while the host queues a call, so the device does not wait for the host between kernels.
    """
    if device.type != "cuda":
        calls: list[list[Span]] = []
        for number in range(repeats):
            meet()
            found: list[Span] = []
            with interpreted_launches(found):
                call(number)
            calls.append(found)
        return calls
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for number in range(repeats):
            torch.cuda._sleep(_HOLD_CYCLES)
            flush()
            meet()
            torch.cuda._sleep(1)
            call(number)
            torch.cuda._sleep(1)
        torch.cuda.synchronize(device)
    return split_calls(spans_of(record.events(), DeviceType.CUDA), repeats)


def spans_of(events: Iterable[Any], kind: DeviceType) -> list[Span]:
    """The profiler's events on one kind of device, ordered by start."""
    mine = (event for event in events if event.device_type == kind)
    spans = [
        Span(e.name, e.time_range.start, e.time_range.end, int(getattr(e, "device_resource_id", 0) or 0)) for e in mine
    ]
    return sorted(spans, key=lambda span: span.start_us)


def split_calls(spans: Sequence[Span], repeats: int) -> list[list[Span]]:
    """Split the spans of a record into calls: spans between the second and third mark of each three."""
    marks = [place for place, span in enumerate(spans) if _MARK in span.name]
    if len(marks) != 3 * repeats:
        return []
    return [list(spans[begin + 1 : end]) for begin, end in zip(marks[1::3], marks[2::3], strict=True)]


def busy_us(spans: Sequence[Span]) -> float:
    """Microseconds during which at least one span ran."""
    total, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start_us):
        total += max(0.0, span.end_us - max(span.start_us, until))
        until = max(until, span.end_us)
    return total


def kernel_time(calls: Sequence[Sequence[Span]], repeats: int, per_call: int = 1) -> float | None:
    """Microseconds in which at least one kernel of a call runs, slowest rank, median; None if a rank recorded none.

    calls: result of `record_calls` on this rank, each of them `per_call` calls. Collective over the world.
    """
    everyone: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, [busy_us(spans) / per_call for spans in calls])
    seen = all(len(found) == repeats and any(found) for found in everyone)
    return summarize(everyone).median_us if seen else None


def stages_of(calls: Sequence[Sequence[Span]]) -> list[Stage]:
    """Stages by name, ordered by first appearance."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for span in (span for call in calls for span in call):
        by_name[span.name].append(span.end_us - span.start_us)
    return [Stage(name, len(times) / len(calls), statistics.median(times)) for name, times in by_name.items()]


@contextlib.contextmanager
def interpreted_launches(found: list[Span]) -> Iterator[None]:
    """Record every launch of an interpreted kernel; all of them go through one function of `runtime`."""
    interpret = runtime._interpret

    def timed(kernel_spec: Any, grid: int, args: Sequence[Any], constexprs: Mapping[str, Any]) -> None:
        begin = time.perf_counter()
        interpret(kernel_spec, grid, args, constexprs)
        found.append(Span(kernel_spec.name, begin * 1e6, time.perf_counter() * 1e6))

    runtime._interpret = timed
    try:
        yield
    finally:
        runtime._interpret = interpret
