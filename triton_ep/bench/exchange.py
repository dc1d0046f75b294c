"""Check, then time: dispatch, combine, their round trip, and the low-latency pair of a decoder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from triton_ep.bench import origins
from triton_ep.bench import routing as routings
from triton_ep.bench.by_source import BLOCK, BySource, Checked, CompactLayer, Scaled
from triton_ep.bench.deep_ep import DeepEPLowLatency, DeepEPProvider
from triton_ep.bench.job import Job, Measured, WrongResult, capture
from triton_ep.bench.providers import (
    CollectiveProvider,
    DedupProvider,
    LayerProvider,
    Provider,
    Unavailable,
    VdevProvider,
)
from triton_ep.bench.settings import COMPACT, OF_LAYER, PAIRS_PER_GRAPH, Case
from triton_ep.bench.timing import Call, rotated
from triton_ep.mx.tensor import MXTensor
from triton_ep.reference import mxfp8


@contextlib.contextmanager
def make_provider(job: Job, case: Case) -> Iterator[Any]:
    """Create the provider of a case; collective.

    Raises:
        Unavailable: it cannot run here.
    """
    if case.provider == "triton_ep":
        if job.settings.low_latency and job.place.ranks_per_node != job.num_ranks:
            raise Unavailable("low_latency works inside one node.")
        with job.layer(case) as layer:
            yield LayerProvider(layer)
    elif case.provider == COMPACT:
        if case.payload == "mxfp8" and job.shape.hidden % BLOCK:
            raise Unavailable(f"FP8 rows are multiples of {BLOCK} values, not {job.shape.hidden}.")
        with job.layer(case) as layer:
            yield CompactLayer(job, case, layer)
    elif case.provider == "nccl":
        yield CollectiveProvider(case, job.device)
    elif case.provider == "nccl_dedup":
        yield DedupProvider(case, job.device)
    elif case.provider == "vdev":
        yield VdevProvider(case, job.device, job.most_rows())
    else:
        yield (DeepEPLowLatency if job.settings.low_latency else DeepEPProvider)(job, case)


def rows_for_combine(recv_x: Any) -> Any:
    """Received rows in the dtype that combine accepts."""
    return recv_x.dequantize() if isinstance(recv_x, MXTensor | Scaled) else recv_x


def check_dispatch(job: Job, provider: Provider, number: int, recv_x: torch.Tensor) -> None:
    """Check that every row of input `number` is in its place, bit for bit.

    Raises:
        WrongResult: a row differs; the message names the first one.
    """
    want = provider.arrivals(job.idxs[number], job.rank)
    everyone = torch.cat([job.rows_of(rank, number) for rank in range(job.num_ranks)])
    parts = [(recv_x, everyone)]
    if isinstance(recv_x, MXTensor):
        data, scale = mxfp8.quantize(everyone)
        parts = [(recv_x.qdata.view(torch.uint8), data.view(torch.uint8)), (recv_x.scale.view(torch.uint8), scale)]
    if want.place.numel() and int(want.place.max()) >= recv_x.shape[0]:
        raise WrongResult(f"dispatch on rank {job.rank}: {recv_x.shape[0]} rows, {want.place.numel()} were sent")
    for received, sent in parts:
        difference = origins.first_difference(received, sent, want.entry // job.shape.topk, want.place)
        if difference is not None:
            raise WrongResult(f"dispatch on rank {job.rank}: {difference}")


def check_combine(job: Job, provider: Provider, number: int, out: torch.Tensor, payload: str) -> None:
    """Check that combine sums the unchanged rows of input `number` per token.

    Raises:
        WrongResult: a sum differs by more than rounding; the message has the largest difference, and where it is.
    """
    x, idx = job.inputs[number]
    if payload == "mxfp8":
        x = mxfp8.dequantize(*mxfp8.quantize(x), x.dtype)
    # All rows of a token are equal, so a sum in float32 is the exact multiple.
    exact = (x.float() * provider.copies(idx).unsqueeze(1)).double()
    difference = origins.wrong_sums(out, exact, exact.abs() * torch.finfo(x.dtype).eps / 2 * provider.roundings)
    if difference is not None:
        raise WrongResult(f"combine on rank {job.rank}: {difference}")


def _check(job: Job, case: Case, provider: Any, op: str, number: int, result: Any, state: Any = None) -> None:
    """Check the result of an op for input `number` in its provider's row layout; state: of the dispatch, if known."""
    if isinstance(provider, Checked) and op == "combine":
        provider.check_combine(number, result)
    elif isinstance(provider, BySource):
        provider.check_dispatch(number, result)
    elif isinstance(provider, DeepEPLowLatency):
        if state is not None:
            provider.check_slabs(number, result, state[0])
    elif op == "dispatch":
        check_dispatch(job, provider, number, result)
    else:
        check_combine(job, provider, number, result, case.payload)


def checked_calls(job: Job, case: Case, provider: Any) -> dict[str, Any]:
    """Check all inputs; return, per op, a function of the input's number. Collective."""
    kept = []
    for number, (x, idx) in enumerate(job.inputs):
        recv_x, state = provider.dispatch(x, idx)
        _check(job, case, provider, "dispatch", number, recv_x, state)
        y = rows_for_combine(recv_x)
        _check(job, case, provider, "combine", number, provider.combine(y, state))
        kept.append((y, state))

    def roundtrip(number: int) -> torch.Tensor:
        # Combine takes the kept bf16 rows of the same input: experts are not part of the time.
        _, state = provider.dispatch(*job.inputs[number])
        return provider.combine(kept[number][0], state)

    return {
        "dispatch": lambda number: provider.dispatch(*job.inputs[number])[0],
        "combine": lambda number: provider.combine(*kept[number]),
        "roundtrip": roundtrip,
        "low_latency": roundtrip,
    }


def measure_exchange(job: Job, case: Case) -> dict[str, Measured]:
    """Create the provider of a case, check it, time its ops; collective.

    Raises:
        WrongResult: a check failed.
        Unavailable: the provider cannot run here.
    """
    found = {}
    sent = bytes_of(job, case)
    inputs = len(job.idxs)
    with make_provider(job, case) as provider:
        calls = checked_calls(job, case, provider)
        for op in job.settings.ops:
            one = calls[op]
            in_graph = job.settings.graph and (case.provider in OF_LAYER or job.settings.low_latency)
            if in_graph:
                call, per_call = _in_graph(job, case, provider, op, one)
            else:
                call, per_call = rotated(one, inputs), 1
            moved, limit = sent[op]
            result = job.measure(call, provider.meet, per_call)
            found[op] = replace(result, moved_bytes=moved, limit_bytes=limit)
    return found


def _in_graph(job: Job, case: Case, provider: Any, op: str, one: Any) -> tuple[Call, int]:
    """Capture one call per input (`low_latency`: 10) as a CUDA graph, check its results; also the number of calls."""
    numbers = list(range(len(job.idxs)))
    if op == "low_latency":
        numbers = [number % len(job.idxs) for number in range(PAIRS_PER_GRAPH)]
    kept: list[torch.Tensor] = []

    def run() -> None:
        kept[:] = [one(number) for number in numbers]

    graph = capture(run)
    graph.replay()
    for number, result in zip(numbers, kept, strict=True):
        _check(job, case, provider, "dispatch" if op == "dispatch" else "combine", number, result)
    return lambda _: graph.replay(), len(numbers)


def bytes_of(job: Job, case: Case) -> dict[str, tuple[int, int]]:
    """By op: payload bytes out of the busiest rank, and its bytes in the busier direction; means over the inputs."""
    s, shape = job.settings, job.shape
    row_bytes = shape.hidden * torch.bfloat16.itemsize
    wire = shape.hidden + shape.hidden // 32 if case.payload == "mxfp8" else row_bytes
    found: dict[str, list[tuple[int, int]]] = {"dispatch": [], "combine": [], "roundtrip": []}
    for routing in job.routings:
        if case.provider == "triton_ep":
            per_rank = s.local_combine or s.low_latency
            partial = row_bytes if per_rank else shape.hidden * torch.float32.itemsize
            there = routings.dispatch_bytes(routing, wire)
            back = routings.combine_bytes(routing, row_bytes, partial, local_combine=per_rank)
        elif case.provider in ("deep_ep", "nccl_dedup", COMPACT) and not s.low_latency:
            flat = routings.Routing(routing.copies, routing.num_ranks)  # these providers ignore nodes
            if case.provider != "nccl_dedup" and case.payload == "mxfp8":
                wire = shape.hidden + shape.hidden // 128 * 4
            there = routings.dispatch_bytes(flat, wire)
            back = routings.combine_bytes(flat, row_bytes, 0, local_combine=True)
        else:
            there, back = routings.plain_bytes(routing, wire), routings.plain_bytes(routing, row_bytes).T
        both = [(max(routings.out_of(between)), routings.busiest(between)) for between in (there, back)]
        found["dispatch"].append(both[0])
        found["combine"].append(both[1])
        found["roundtrip"].append((both[0][0] + both[1][0], both[0][1] + both[1][1]))
    mean = {
        op: (sum(a for a, _ in pairs) // len(pairs), sum(b for _, b in pairs) // len(pairs))
        for op, pairs in found.items()
    }
    return mean | {"low_latency": mean["roundtrip"]}
