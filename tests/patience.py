"""How long tests wait. No test depends on how fast the machine is, or on what else it does.

What must happen is awaited for LIMIT_S, which only a hang reaches. A wait that must expire gets a limit that follows
what the machine does just now: `limit_after` a call like the one that is awaited.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

LIMIT_S = 900.0
"""Seconds after which something hangs. Below the time limit of a test (pyproject.toml)."""

_TIMES = 10
"""How many times longer than the last one a call may take before it counts as late."""


@contextmanager
def stopwatch() -> Iterator[Callable[[], float]]:
    """Seconds since the block began."""
    start = time.monotonic()
    yield lambda: time.monotonic() - start


def limit_after(took_s: float, group: Any = None) -> float:
    """Seconds within which every rank comes that is not late, the same on all ranks; collective.

    took_s: what a call like the awaited one took this rank just now.
    """
    told: list[float] = [0.0] * dist.get_world_size(group)
    dist.all_gather_object(told, took_s, group=group)
    return round(max(1.0, _TIMES * max(told)), 1)
