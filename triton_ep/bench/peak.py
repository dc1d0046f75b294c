"""Peak memory of a call, from the history that torch's allocator records."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch


def most_allocated(events: Iterable[Mapping[str, Any]], results: Collection[int] = ()) -> int:
    """Most bytes allocated at one time, counted from zero.

    events: in the order and form of a snapshot of torch's allocator. results: addresses of memory that is still
    allocated at the end; it never counts.
    """
    history = [event for event in events if event["action"] in ("alloc", "free_requested")]
    latest = {event["addr"]: number for number, event in enumerate(history) if event["action"] == "alloc"}
    uncounted = {latest[address] for address in results if address in latest}
    alive: dict[int, int] = {}
    now = peak = 0
    for number, event in enumerate(history):
        if event["action"] == "alloc":
            alive[event["addr"]] = 0 if number in uncounted else event["size"]
            now += alive[event["addr"]]
            peak = max(peak, now)
        else:
            now -= alive.pop(event["addr"], 0)  # 0 for memory allocated before the history
    return peak


def peak_of(call: Callable[[], object], device: torch.device, num_results: int = 0) -> int:
    """Peak bytes of `call`; the last `num_results` of the tensors that it returns do not count."""
    torch.cuda.synchronize(device)
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=1_000_000)
    try:
        found = call()
        torch.cuda.synchronize(device)
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    results = found[len(found) - num_results :] if isinstance(found, tuple) else ()
    return most_allocated(events, [result.untyped_storage().data_ptr() for result in results])
