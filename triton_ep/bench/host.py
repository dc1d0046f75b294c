"""Host time of a call of the layer, by function: Python, launches, torch's allocator, streams and events.

The device is idle before each call, so the host waits only for the counts of exact mode. On the CPU interpreted
launches are excluded, so a row has the host time of the layer itself.
"""

from __future__ import annotations

import contextlib
import cProfile
import gc
import pstats
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from triton_ep.bench import timing
from triton_ep.bench.exchange import make_provider, rows_for_combine
from triton_ep.bench.job import Job, Measured
from triton_ep.bench.settings import Case
from triton_ep.runtime import launch

_CALLS = 200
_SHOWN = 14  # functions of a profile


def measure_host(job: Job, case: Case) -> dict[str, Measured]:
    """Host microseconds of a dispatch and a combine, slowest rank; collective. With `stages` rank 0 prints a profile.

    Raises:
        Unavailable: the provider cannot run here.
    """
    found = {}
    with make_provider(job, case) as provider:
        x, idx = job.inputs[0]
        recv_x, state = provider.dispatch(x, idx)
        y = rows_for_combine(recv_x)
        calls: dict[str, Callable[[], object]] = {
            "dispatch_host": lambda: provider.dispatch(x, idx),
            "combine_host": lambda: provider.combine(y, state),
        }
        for op, call in calls.items():
            times = _times(job, call, provider.meet)
            found[op] = Measured(timing.over_ranks(times), timing.slowest(statistics.median(times)), None)
            if job.settings.stages:
                job.say(f"{op}, {case.provider_here} {case.mode}: {_profile(job, call, provider.meet)}")
    return found


def _repeats(job: Job) -> int:
    return job.settings.iters if job.settings.interpreting else max(_CALLS, job.settings.iters)


def _times(job: Job, call: Callable[[], object], meet: Callable[[], None]) -> list[float]:
    """Microseconds of each call, without the time of interpreted launches."""
    found = []
    gc.disable()
    try:
        for _ in range(_repeats(job)):
            _settle(job, meet)
            spans: list[timing.Span] = []
            with timing.interpreted_launches(spans):
                begin = time.perf_counter()
                kept = call()
                took = (time.perf_counter() - begin) * 1e6
            found.append(took - sum(span.end_us - span.start_us for span in spans))
            del kept  # after the call, so that the allocator can reuse its memory
    finally:
        gc.enable()
    return found


def _settle(job: Job, meet: Callable[[], None]) -> None:
    """Barrier of all ranks, then wait until the device is idle."""
    meet()
    if job.device.type == "cuda":
        torch.cuda.synchronize(job.device)


@contextlib.contextmanager
def _without_interpreter(profiler: cProfile.Profile) -> Iterator[None]:
    """Exclude interpreted kernels from the profile; all of them go through one function."""
    interpret = launch._interpret

    def unseen(kernel_spec: Any, grid: int, args: Sequence[Any], constexprs: Mapping[str, Any]) -> None:
        profiler.disable()
        try:
            interpret(kernel_spec, grid, args, constexprs)
        finally:
            profiler.enable()

    launch._interpret = unseen
    try:
        yield
    finally:
        launch._interpret = interpret


def _profile(job: Job, call: Callable[[], object], meet: Callable[[], None]) -> str:
    """The functions with the most own time in a call; the profiler slows all of them down."""
    repeats = _repeats(job)
    profiler = cProfile.Profile()
    with _without_interpreter(profiler):
        for _ in range(repeats):
            _settle(job, meet)
            profiler.enable()
            kept = call()
            profiler.disable()
            del kept
    entries = []
    for (file, line, name), (_, calls, own, _, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        where = name if file == "~" else f"{Path(file).name}:{line} {name}"
        entries.append((own / repeats * 1e6, calls / repeats, where))
    lines = [f"  {own:8.1f} us {calls:6.1f} x  {where[:90]}" for own, calls, where in sorted(entries, reverse=True)]
    return "\n".join(["functions by their own time, profiled", *lines[:_SHOWN]])
