"""A benchmark run on one rank: check and time every case; rank 0 writes the rows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict

import torch
import torch.distributed as dist

from triton_ep import distributed as ep_distributed
from triton_ep.bench import beside, exchange, host, moe, report, single
from triton_ep.bench import rows as bench_rows
from triton_ep.bench.job import Job, Measured, Place, join
from triton_ep.bench.providers import Unavailable
from triton_ep.bench.settings import Case, Settings, Shape, origin_of_kernels
from triton_ep.errors import HeapError, PeerFailed, WaitTimeout

_SHORT = (torch.OutOfMemoryError.__name__, HeapError.__name__)
_MEASURE: dict[str, Callable[[Job, Case], dict[str, Measured]]] = {
    "barrier": single.measure_barrier,
    "beside-gemm": beside.measure_beside,
    "host": host.measure_host,
    "quantise": single.measure_quantise,
    "moe-layer": moe.measure_moe,
}


def run(settings: Settings) -> None:
    """Entry point of a rank: join the job, measure all cases, show and store the results, leave.

    Raises:
        WrongResult: a case computes a wrong result; it gets no row.
    """
    rank = join(settings)
    results = measure_all(settings)
    if rank == 0:
        results.finish()
    ep_distributed.finalize_distributed()


def measure_all(settings: Settings) -> report.Results:
    """Measure all cases in a job that this process has joined; collective. Rank 0 has the results.

    Raises:
        WrongResult: a case computes a wrong result; it gets no row.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    environment = bench_rows.environment(settings.commit, gpus=not settings.interpreting)
    device = ep_distributed.current_heap().device
    place = Place(rank, num_ranks, ep_distributed.local_world_size(), device, environment)
    results = report.Results(settings)
    links = _floors(settings, place, results)
    cases = settings.cases()
    jobs: dict[Shape, Job] = {}
    with report.progress(len(cases), here=rank == 0) as step:
        for case in cases:
            if case.shape not in jobs:
                jobs = {case.shape: Job(settings, case.shape, place)}  # keep the inputs of one shape at a time
            job = jobs[case.shape]
            step(f"{settings.command} {case.provider_here} {case.mode} {case.payload}, {case.shape}, {num_ranks} ranks")
            found = attempt(job, case)
            rate = links
            if settings.command == "quantise" and isinstance(found, dict):
                rate = single.copy_rate(job)
            new = rows_of(case, place, found, rate)
            if rank == 0:
                results.add(case, new, found if isinstance(found, dict) else {})
    return results


def _floors(settings: Settings, place: Place, results: report.Results) -> float | None:
    """The best rate of a link in 10^9 bytes per second, or None; adds its rows to the results."""
    if settings.command in ("beside-gemm", "host", "barrier", "quantise"):
        return None
    found = single.measure_floors(place.device, place.rank, place.num_ranks)
    if isinstance(found, str):
        if place.rank == 0:
            print(f"no floor: {found}", file=sys.stderr, flush=True)
        return None
    if place.rank == 0:
        results.add_floors([_floor_row(settings, place, floor) for floor in found])
    return max(floor.gbps for floor in found)


def _floor_row(settings: Settings, place: Place, floor: single.Floor) -> bench_rows.Row:
    how = origin_of_kernels(settings.interpreting)
    return bench_rows.make_row(
        {
            "op": "floor",
            "provider": floor.provider,
            "mode": f"{how}-sm{floor.num_sm}" if floor.num_sm else "torch",
            "nodes": place.num_ranks // place.ranks_per_node,
            "ranks": place.num_ranks,
            "bytes_out": floor.num_bytes,
            "gbps": f"{floor.gbps:.1f}",
            **{name: f"{value:.1f}" for name, value in asdict(floor.timing).items()},
            **place.environment,
        }
    )


def attempt(job: Job, case: Case) -> dict[str, Measured] | str:
    """Measure a case, or return the reason to skip it, the same on all ranks; collective.

    Raises:
        Exception: any failure that is no reason to skip a case.
    """
    measured: dict[str, Measured] = {}
    failure: Exception | None = None
    try:
        measured = _MEASURE.get(job.settings.command, exchange.measure_exchange)(job, case)
    except (torch.OutOfMemoryError, HeapError, WaitTimeout, PeerFailed, Unavailable) as error:
        failure = error
    told: list[tuple[str, str] | None] = [None] * job.num_ranks
    dist.all_gather_object(told, failure and (type(failure).__name__, str(failure)))
    if all(answer and answer[0] == Unavailable.__name__ for answer in told):
        return str(failure)
    # If one rank runs out of memory, the others time out while waiting for it.
    short = [(rank, answer) for rank, answer in enumerate(told) if answer and answer[0] in _SHORT]
    if short:
        rank, (kind, text) = short[0]
        failure = None  # it refers to the frames of the case, which hold tensors
        if job.device.type == "cuda":
            torch.cuda.empty_cache()
        return f"rank {rank}: {kind}: {' '.join(text.split())[:200]}"
    if failure is not None:
        raise failure
    if any(told):
        raise PeerFailed(f"{case.provider} {case.mode} failed on other ranks: {told}")
    return measured


def rows_of(case: Case, place: Place, found: dict[str, Measured] | str, rate: float | None) -> list[bench_rows.Row]:
    """One row per op; rate: the best link rate, in 10^9 bytes per second, or None."""
    new = []
    for op in case.settings.ops:
        columns = {**case.columns(op, place.num_ranks, place.ranks_per_node), **place.environment}
        if isinstance(found, str):
            new.append(bench_rows.make_row({**columns, "skip_reason": found}))
            continue
        result = found[op]
        columns |= {name: f"{value:.1f}" for name, value in asdict(result.timing).items()}
        for name, value in (("host_us", result.host_us), ("kernel_us", result.kernel_us)):
            columns[name] = "" if value is None else f"{value:.1f}"
        if result.peak_bytes is not None:
            columns["peak_mib"] = f"{result.peak_bytes / 2**20:.1f}"
        if result.error_db is not None:
            columns["error_db"] = f"{result.error_db:.1f}"
        if result.moved_bytes:
            columns["bytes_out"] = result.moved_bytes
            columns["gbps"] = f"{result.moved_bytes / result.timing.median_us / 1e3:.1f}"
        limit = result.moved_bytes if case.settings.command == "quantise" else result.limit_bytes
        floor_us = limit / rate / 1e3 if rate and limit else result.floor_us
        if floor_us is not None:
            columns["floor_us"] = f"{floor_us:.1f}"
            columns["floor_ratio"] = f"{result.timing.median_us / floor_us:.3f}"
        new.append(bench_rows.make_row(columns))
    return new


def skip_all(settings: Settings, reason: str) -> None:
    """Write a row with the reason for every op and case."""
    environment = bench_rows.environment(settings.commit, gpus=not settings.interpreting)
    per_node = settings.local_world_size or settings.ranks
    place = Place(0, settings.ranks, per_node, torch.device("cpu"), environment)
    results = report.Results(settings)
    for case in settings.cases():
        results.add(case, rows_of(case, place, reason, None), {})
    results.finish()
