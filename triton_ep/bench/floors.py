"""How fast bytes can cross the links of this machine: the copy engine, and a plain push by a kernel.

All ranks at once. The best of them is the floor to which a run compares itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from triton_ep.bench.providers import meet_by_collective
from triton_ep.bench.timing import Timer, Timing, over_ranks
from triton_ep.distributed import current_heap
from triton_ep.errors import HeapError
from triton_ep.ops import floor

_BYTES = 2**27
_BYTES_INTERPRETED = 2**17
_ITERS = 20
_FEW_PROGRAMS = 32


@dataclass(frozen=True)
class Floor:
    """One way to move bytes.

    Attributes:
        provider: "copy_engine", or "push" by `num_sm` programs.
        num_bytes: that left every rank.
    """

    provider: str
    num_sm: int
    num_bytes: int
    timing: Timing

    @property
    def gbps(self) -> float:
        """10^9 bytes per second out of a rank."""
        return self.num_bytes / self.timing.median_us / 1e3


def measure_floors(device: torch.device, rank: int, num_ranks: int) -> list[Floor] | str:
    """Both ways, or why they cannot be measured, the same on all ranks; collective over the world."""
    if num_ranks == 1:
        return "one rank has no links"
    on_gpu = device.type == "cuda"
    wanted = (_BYTES if on_gpu else _BYTES_INTERPRETED) // floor.ROW_BYTES
    rows = max(wanted // (num_ranks - 1), 1) * (num_ranks - 1)
    shape = (rows, floor.ROW_BYTES // 8)
    heap = current_heap()
    try:
        target = heap.alloc(shape, torch.int64)
    except HeapError as error:
        return " ".join(str(error).split())
    addrs = target.addrs.tolist()
    reachable: list[bool] = [True] * num_ranks
    dist.all_gather_object(reachable, all(addrs))
    found: list[Floor] | str = "not all ranks reach each other by peer access"
    if all(reachable):
        source = torch.empty(shape, dtype=torch.int64, device=device).fill_(rank)
        timer = Timer(device, _ITERS if on_gpu else 2, 3 if on_gpu else 0)
        neighbour = addrs[(rank + 1) % num_ranks]
        programs = [2]
        if on_gpu:
            programs = [_FEW_PROGRAMS, torch.cuda.get_device_properties(device).multi_processor_count]
        ways: list[tuple[str, int, Callable[[int], object]]] = [
            ("copy_engine", 0, lambda _: floor.copy(neighbour, source))
        ]
        ways += [("push", n, _push(source, target.addrs, rank, n)) for n in programs]
        found = []
        for provider, num_sm, call in ways:
            times = timer.times(call, lambda: meet_by_collective(device))
            found.append(Floor(provider, num_sm, source.numel() * 8, over_ranks(times)))
    if on_gpu:
        torch.cuda.synchronize(device)
    heap.barrier()  # nobody stores to a peer's copy any more
    heap.free(target)
    return found


def _push(source: torch.Tensor, addrs: torch.Tensor, rank: int, programs: int) -> Callable[[int], None]:
    return lambda _: floor.push(source, addrs, rank, programs)
