"""An exchange beside matrix products on another stream: how much longer the products and the exchange take together.

The products are queued first, as a model queues the experts of one micro-batch before the exchange of another; the
exchange runs on a stream of higher priority. Both are waited for. A row has the time of both together, and as its bound
that of the products alone, so the exchange has added the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from triton_ep.bench.exchange import checked_calls, make_provider
from triton_ep.bench.job import Job, Measured
from triton_ep.bench.settings import PRODUCTS_BESIDE, Case
from triton_ep.bench.timing import Call, over_ranks


def measure_beside(job: Job, case: Case) -> dict[str, Measured]:
    """Check the provider of a case, then time its dispatch and its combine beside products; collective.

    Raises:
        WrongResult: a check failed.
        Unavailable: the provider cannot run here.
    """
    products = _products(job)
    found = {}
    with make_provider(job, case) as provider:
        calls = checked_calls(job, case, provider)
        alone = over_ranks(job.timer.times(lambda _: products(), provider.meet)).median_us
        for op, name in (("dispatch_beside", "dispatch"), ("combine_beside", "combine")):
            both = _beside(products, calls[name], len(job.idxs), job.device)
            found[op] = replace(job.measure(both, provider.meet), floor_us=alone)
    return found


def _products(job: Job) -> Callable[[], None]:
    """Products of rows [T, H] with weights [H, ffn], one after the other."""
    shape, device = job.shape, job.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = torch.randn(shape.tokens, shape.hidden, dtype=dtype, device=device)
    weights = torch.randn(shape.hidden, shape.ffn, dtype=dtype, device=device)
    out = torch.empty(shape.tokens, shape.ffn, dtype=dtype, device=device)

    def run() -> None:
        for _ in range(PRODUCTS_BESIDE):
            torch.mm(rows, weights, out=out)

    return run


def _beside(products: Callable[[], None], call: Call, inputs: int, device: torch.device) -> Call:
    """Both, from the current stream on, and waited for by it."""
    if device.type != "cuda":

        def one_after_the_other(number: int) -> None:
            products()
            call(number % inputs)

        return one_after_the_other
    side = torch.cuda.Stream(device, priority=-1)
    kept: list[object] = []

    def together(number: int) -> None:
        current = torch.cuda.current_stream(device)
        side.wait_stream(current)
        products()
        with torch.cuda.stream(side):
            kept[:] = [call(number % inputs)]
        current.wait_stream(side)

    return together
