"""Benchmarks of one kernel: the barrier, and quantising rows."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import torch

from triton_ep.bench.job import Job, Measured, WrongResult
from triton_ep.bench.providers import Unavailable, meet_by_collective
from triton_ep.bench.settings import BARRIERS_PER_CALL, Case, Shape
from triton_ep.bench.timing import Call, over_ranks
from triton_ep.mx.tensor import MXTensor
from triton_ep.reference import mxfp8


def measure_barrier(job: Job, case: Case) -> dict[str, Measured]:
    """Several barriers in a row, per barrier: the layer's, or an all_reduce of one number; collective.

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
    """Rows [T, H] bf16 to MXFP8, each rank by itself and all at once; bytes are those read and written.

    Raises:
        WrongResult: an element or scale differs from the reference.
        Unavailable: another provider than triton_ep.
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
    return {"quantise": dataclasses.replace(result, moved_bytes=elements * 2 + elements + elements // 32)}


def copy_rate(job: Job) -> float:
    """10^9 bytes per second, read and written, of a torch copy of the same rows on the slowest rank; collective."""
    xs = [job.rows_of(job.rank, number) for number in range(job.settings.inputs)]
    out = torch.empty_like(xs[0])
    times = job.timer.times(lambda number: out.copy_(xs[number % len(xs)]), lambda: meet_by_collective(job.device))
    return 2 * out.numel() * out.itemsize / over_ranks(times).median_us / 1e3
