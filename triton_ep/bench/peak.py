"""How much memory a call takes at most, from what torch's allocator has noted of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch


def most_allocated(events: Iterable[Mapping[str, Any]], results: Collection[int] = ()) -> int:
    """Most bytes that are allocated at a time, from none on.

    events: as a snapshot of torch's allocator lists them, in order. results: addresses of memory that is still
    allocated at the end and does not count, at no time.
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
            now -= alive.pop(event["addr"], 0)  # nothing for memory from before
    return peak


def peak_of(call: Callable[[], object], device: torch.device, num_results: int = 0) -> int:
    """Bytes that `call` takes at most; the last `num_results` of the tensors that it returns do not count."""
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
