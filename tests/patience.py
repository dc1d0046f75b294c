"""Time limits of tests. No test depends on the speed or load of the machine.

Tests wait up to LIMIT_S, which only a hang reaches, for events that must happen. A wait that must expire gets a limit
measured on the machine at that moment: `limit_after` a call like the awaited one.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

LIMIT_S = 900.0
"""Seconds after which a wait counts as a hang. Below the time limit of a test (pyproject.toml)."""

_TIMES = 10
"""A call counts as late if it takes this many times longer than the last one."""


@contextmanager
def stopwatch() -> Iterator[Callable[[], float]]:
    """Yield a function that returns the seconds since the block began."""
    start = time.monotonic()
    yield lambda: time.monotonic() - start


def limit_after(took_s: float, group: Any = None) -> float:
    """Seconds within which every rank arrives unless it is late, the same on all ranks; collective.

    took_s: time that a call like the awaited one just took on this rank.
    """
    told: list[float] = [0.0] * dist.get_world_size(group)
    dist.all_gather_object(told, took_s, group=group)
    return round(max(1.0, _TIMES * max(told)), 1)
