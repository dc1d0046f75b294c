"""Where the time of a call goes: microseconds per kernel on this rank."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from triton_ep import runtime
from triton_ep.ops import barrier, combine, dispatch, routing, splits


@dataclass(frozen=True)
class Stage:
    """One kernel, or kind of copy, of a call.

    Attributes:
        per_call: launches in one call.
        median_us: of one launch; a kernel that waits for other ranks includes that.
    """

    name: str
    per_call: float
    median_us: float

    @property
    def us(self) -> float:
        """Microseconds of all its launches in one call."""
        return self.per_call * self.median_us


def stages_of(call: Callable[[], object], repeats: int, device: torch.device, *, here: bool) -> list[Stage]:
    """Run the call `repeats` times on every rank and measure its kernels where `here`; collective.

    On a GPU from the profiler's record of the device; on the CPU from the wall clock around each launch of
    an interpreted kernel, so that copies by torch are missing there.
    """
    if not here:
        for _ in range(repeats):
            call()
        return []
    if device.type == "cuda":
        with profile(activities=[ProfilerActivity.CUDA]) as record:
            for _ in range(repeats):
                call()
            torch.cuda.synchronize(device)
        return group(durations(record.events(), DeviceType.CUDA), repeats)
    found: list[tuple[str, float]] = []
    with _timed_launches(found):
        for _ in range(repeats):
            call()
    return group(found, repeats)


def durations(events: Iterable[Any], kind: DeviceType) -> list[tuple[str, float]]:
    """(name, microseconds) of the profiler's events on one kind of device, in the order of their start."""
    mine = sorted((event for event in events if event.device_type == kind), key=lambda event: event.time_range.start)
    return [(event.name, event.time_range.elapsed_us()) for event in mine]


def group(found: Iterable[tuple[str, float]], repeats: int) -> list[Stage]:
    """Stages by name, in the order in which they first came."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, us in found:
        by_name[name].append(us)
    return [Stage(name, len(times) / repeats, statistics.median(times)) for name, times in by_name.items()]


@contextlib.contextmanager
def _timed_launches(found: list[tuple[str, float]]) -> Iterator[None]:
    def timed(name: str, *args: Any, **kwargs: Any) -> None:
        begin = time.perf_counter()
        runtime.launch(name, *args, **kwargs)
        found.append((name, (time.perf_counter() - begin) * 1e6))

    with contextlib.ExitStack() as patches:
        for module in (barrier, combine, dispatch, routing, splits):
            patches.enter_context(mock.patch.object(module, "launch", timed))
        yield


def table(stages: list[Stage]) -> str:
    """The stages as text, with their sum."""
    if not stages:
        return "  nothing was recorded: torch's profiler cannot see this GPU (CUPTI)"
    width = max(len(stage.name[:60]) for stage in stages)
    lines = [f"  {s.name[:60]:{width}}  {s.per_call:6.2f} x {s.median_us:10.1f} us = {s.us:10.1f} us" for s in stages]
    return "\n".join([*lines, f"  {'sum':{width}}  {'':6}   {'':10}      {sum(s.us for s in stages):10.1f} us"])
