"""Benchmarks without an exchange: the barrier, quantising rows, and the rates of this machine's memory and links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from triton_ep.bench.job import Job, Measured, WrongResult
from triton_ep.bench.providers import Unavailable, meet_by_collective
from triton_ep.bench.settings import BARRIERS_PER_CALL, Case, Shape
from triton_ep.bench.timing import Call, Timer, Timing, over_ranks
from triton_ep.distributed import current_heap
from triton_ep.errors import HeapError
from triton_ep.mx.tensor import MXTensor
from triton_ep.ops import floor
from triton_ep.reference import mxfp8

_BYTES = 2**27
_BYTES_INTERPRETED = 2**17
_ITERS = 20
_FEW_PROGRAMS = 32


def measure_barrier(job: Job, case: Case) -> dict[str, Measured]:
    """Time per barrier of several in a row: the layer's barrier, or an all_reduce of one number; collective.

    Raises:
        Unavailable: the provider has no barrier here.
    """

    def repeat(barrier: Call) -> Call:
        return lambda number: [barrier(number) for _ in range(BARRIERS_PER_CALL)]

    def meet() -> None:
        meet_by_collective(job.device)

    if case.provider == "nccl":
        return {"barrier": job.measure(repeat(lambda _: meet()), meet, BARRIERS_PER_CALL)}
    if case.provider != "triton_ep":
        raise Unavailable("barrier compares triton_ep with nccl.")
    small = Shape(tokens=1, hidden=32, topk=1, experts=job.num_ranks, ffn=1)
    with Job(job.settings, small, job.place).layer(replace(case, payload="bf16")) as layer:
        call = repeat(lambda _: layer.ep_barrier_all())
        return {"barrier": job.measure(call, layer.ep_barrier_all, BARRIERS_PER_CALL)}


def measure_quantise(job: Job, case: Case) -> dict[str, Measured]:
    """Quantise rows [T, H] bf16 to MXFP8, each rank by itself and all at once; counts bytes read and written.

    Raises:
        WrongResult: an element or scale differs from the reference.
        Unavailable: the provider is not triton_ep.
    """
    if case.provider != "triton_ep":
        raise Unavailable("quantise measures triton_ep.")
    xs = [job.rows_of(job.rank, number) for number in range(job.settings.inputs)]
    for x in xs:
        seen, (data, scale) = MXTensor.to_mx(x), mxfp8.quantize(x)
        same = torch.equal(seen.qdata.view(torch.uint8), data.view(torch.uint8))
        if not (same and torch.equal(seen.scale.view(torch.uint8), scale)):
            raise WrongResult(f"quantise on rank {job.rank}: elements or scales differ from the reference")
    result = job.measure(lambda number: MXTensor.to_mx(xs[number % len(xs)]), lambda: meet_by_collective(job.device))
    elements = job.shape.tokens * job.shape.hidden
    return {"quantise": replace(result, moved_bytes=elements * 2 + elements + elements // 32)}


def copy_rate(job: Job) -> float:
    """10^9 bytes per second, read and written, of a torch copy of the same rows on the slowest rank; collective."""
    xs = [job.rows_of(job.rank, number) for number in range(job.settings.inputs)]
    out = torch.empty_like(xs[0])
    times = job.timer.times(lambda number: out.copy_(xs[number % len(xs)]), lambda: meet_by_collective(job.device))
    return 2 * out.numel() * out.itemsize / over_ranks(times).median_us / 1e3


@dataclass(frozen=True)
class Floor:
    """One way to move bytes between ranks; a run compares its times with the fastest one.

    Attributes:
        provider: "copy_engine", or "push" by `num_sm` programs.
        num_bytes: bytes out of every rank.
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
    """Time the copy engine and a plain push by a kernel, all ranks at once; collective over the world.

    Returns the reason, the same on all ranks, if they cannot be measured.
    """
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
    heap.barrier()  # no rank stores to a peer's buffer any longer
    heap.free(target)
    return found


def _push(source: torch.Tensor, addrs: torch.Tensor, rank: int, programs: int) -> Callable[[int], None]:
    return lambda _: floor.push(source, addrs, rank, programs)
