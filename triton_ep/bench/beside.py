"""An exchange concurrent with matrix products on another stream: how much time it adds to the products.

The products are queued first, as a model queues the experts of one micro-batch before the exchange of another; the
exchange runs on a stream of higher priority. The number of products is chosen so that they take twice as long as the
exchange, which therefore does not outlast them. A row has the time of both together and, as its bound, the time of the
products alone: the exchange adds the difference. The two are taken in turn, call by call: products run at the power
limit, so a GPU that has done nothing else before takes less time for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from triton_ep.bench.exchange import checked_calls, make_provider
from triton_ep.bench.job import Job, Measured
from triton_ep.bench.settings import PRODUCTS_BESIDE, Case
from triton_ep.bench.timing import Call, Timing, over_ranks


def measure_beside(job: Job, case: Case) -> dict[str, Measured]:
    """Check the provider of a case, then time its calls concurrently with products; collective.

    Raises:
        WrongResult: a check failed.
        Unavailable: the provider cannot run here.
    """
    found, on_gpu = {}, job.device.type == "cuda"
    with make_provider(job, case) as provider:
        calls = checked_calls(job, case, provider)

        def time(call: Call) -> float:
            return over_ranks(job.timer.times(call, provider.meet)).median_us

        def one(call: Call) -> Call:
            return lambda number: call(number % len(job.idxs))

        each = time(_only(_products(job, PRODUCTS_BESIDE))) / PRODUCTS_BESIDE
        for op in job.settings.ops:
            name = op.removesuffix("_beside")
            number = max(math.ceil(2 * time(one(calls[name])) / each), PRODUCTS_BESIDE) if on_gpu else PRODUCTS_BESIDE
            products = _products(job, number)
            both = _beside(products, one(calls[name]), job.device)
            measured = job.measure(both, provider.meet)
            timing, alone = _in_turns(job, both, _only(products), provider.meet)
            found[op] = replace(measured, timing=timing, floor_us=alone.median_us)
    return found


def _in_turns(job: Job, both: Call, alone: Call, meet: Callable[[], None]) -> tuple[Timing, Timing]:
    """Times of two calls that take turns, as many of each as the job has iterations."""
    found: tuple[list[float], list[float]] = ([], [])
    for first in range(2):

        def turn(number: int, first: int = first) -> object:
            return (both, alone)[(number + first) % 2](number)

        for number, us in enumerate(job.timer.times(turn, meet)):
            found[(number + first) % 2].append(us)
    return over_ranks(found[0]), over_ranks(found[1])


def _only(products: Callable[[], None]) -> Call:
    return lambda _: products()


def _products(job: Job, number: int) -> Callable[[], None]:
    """`number` products of rows [T, H] and weights [H, ffn], one after the other."""
    shape, device = job.shape, job.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = torch.randn(shape.tokens, shape.hidden, dtype=dtype, device=device)
    weights = torch.randn(shape.hidden, shape.ffn, dtype=dtype, device=device)
    out = torch.empty(shape.tokens, shape.ffn, dtype=dtype, device=device)

    def run() -> None:
        for _ in range(number):
            torch.mm(rows, weights, out=out)

    return run


def _beside(products: Callable[[], None], call: Call, device: torch.device) -> Call:
    """The products on the current stream and the call on a side stream, joined at the end; in turn on the CPU."""
    if device.type != "cuda":

        def one_after_the_other(number: int) -> None:
            products()
            call(number)

        return one_after_the_other
    side = torch.cuda.Stream(device, priority=-1)
    kept: list[object] = []

    def together(number: int) -> None:
        current = torch.cuda.current_stream(device)
        side.wait_stream(current)
        products()
        with torch.cuda.stream(side):
            kept[:] = [call(number)]
        current.wait_stream(side)

    return together
