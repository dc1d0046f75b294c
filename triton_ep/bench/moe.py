"""A MoE layer after its router, and a training step of it: checked against dense experts, then timed.

A step is a forward pass and the gradients of the tokens and of this rank's experts. With --refresh-weights both are
timed once more with weights that change before each call, so that prepared copies of weights are built again. With
--main-grad a step is timed that adds the experts' gradients to float32 `main_grad`: `triton_ep` in its kernels, others
after the backward pass.

Decoding (--low-latency) is a forward pass of few tokens. Its bound is the time of dispatch and combine without experts,
also measured here, plus the time to read the weights of the experts with rows at 4 TB/s.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from triton_ep.bench.job import Job, Measured, WrongResult, capture
from triton_ep.bench.moe_providers import GemmOnly, ModuleMoe, MoeProvider, decibel, dense, make_moe_provider
from triton_ep.bench.peak import peak_of
from triton_ep.bench.settings import Case
from triton_ep.bench.timing import Call, slowest

_CHECKED_TOKENS = 2
# For _LEAST_DB: rounding a tensor to e4m3 leaves 31.5 dB, and six roundings make up the noise of a SwiGLU expert, eight
# the noise of a gradient; bf16 leaves 50.
_MEMORY_RATE = 4e6  # bytes per microsecond
_WARM_S = 2.0
"""Seconds of calls before timed ones. A GPU at its power limit lowers its clocks: without these calls, the case timed
first, on a cool GPU, takes 5 % less time than the same case timed later (2 x H100)."""
_LEAST_DB = {"mxfp8": (20.0, 18.0), "bf16": (36.0, 36.0)}


class _Run:
    """The calls of one provider over the inputs of a job."""

    def __init__(self, job: Job, case: Case, provider: MoeProvider) -> None:
        self.job, self.case, self.provider = job, case, provider
        shape, device = job.shape, job.device
        generator = torch.Generator(device).manual_seed(job.rank)
        self.weights = torch.rand(shape.tokens, shape.topk, generator=generator, device=device) + 0.5
        self.grad = torch.randn(shape.tokens, shape.hidden, generator=generator, device=device).bfloat16()
        self._results: torch.Tensor | None = None  # in place of expert outputs, for `pair`

    def forward(self, number: int) -> torch.Tensor:
        """A forward pass of an input, without an autograd graph."""
        x, idx = self.job.inputs[number % len(self.job.inputs)]
        with torch.no_grad():
            return self.provider.forward(x, idx, self.weights)

    def step(self, number: int) -> tuple[torch.Tensor, ...]:
        """y, then the gradients of x, of the router's weights and of the parameters."""
        x, idx = self.job.inputs[number % len(self.job.inputs)]
        if isinstance(self.provider, GemmOnly):
            y = self.provider.forward(x, idx, self.weights)
            self.provider.backward()
            return (y,)
        leaves = [x.detach().requires_grad_(), self.weights.detach().requires_grad_()]
        y = self.provider.forward(leaves[0], idx, leaves[1])
        return y, *torch.autograd.grad(y, [*leaves, *self.provider.parameters], self.grad)

    @contextlib.contextmanager
    def main_grads(self) -> Iterator[None]:
        """Give the parameters a float32 `main_grad` inside."""
        for parameter in self.provider.parameters:
            vars(parameter)["main_grad"] = torch.zeros_like(parameter, dtype=torch.float32)
        try:
            yield
        finally:
            for parameter in self.provider.parameters:
                del vars(parameter)["main_grad"]

    def step_main_grad(self, number: int) -> tuple[torch.Tensor, ...]:
        """y, then the gradients of x and of the router's weights; those of the parameters are added to `main_grad`."""
        if isinstance(self.provider, GemmOnly):
            return self.step(number)
        x, idx = self.job.inputs[number % len(self.job.inputs)]
        leaves = [x.detach().requires_grad_(), self.weights.detach().requires_grad_()]
        y, parameters = self.provider.forward(leaves[0], idx, leaves[1]), self.provider.parameters
        # `triton_ep` has added those of the parameters, and returns None for them.
        found = torch.autograd.grad(y, [*leaves, *parameters], self.grad, allow_unused=True)
        for parameter, grad in zip(parameters, found[2:], strict=True):
            if grad is not None:
                vars(parameter)["main_grad"].add_(grad)
        return y, *found[:2]

    def check(self, backward: bool) -> tuple[float | None, float | None]:
        """Signal-to-noise ratio of y and of dx, over a few tokens of every input; worst rank. Collective.

        Raises:
            WrongResult: tokens differ from those of dense experts by more than rounding.
        """
        if not self.provider.exact:
            return None, None
        ys, dxs = [], []
        num = min(_CHECKED_TOKENS, self.job.shape.tokens)
        for number, (x, idx) in enumerate(self.job.inputs):
            y, dx, *_ = self.step(number) if backward else (self.forward(number), None)
            exact = dense(self.job, x[:num], idx[:num], self.weights[:num], self.grad[:num])
            ys.append((y[:num], exact[0]))
            dxs += [] if dx is None else [(dx[:num], exact[1])]
        found = [decibel(ys), decibel(dxs) if dxs else None]
        everyone: list[list[float | None]] = [[] for _ in range(self.job.num_ranks)]
        dist.all_gather_object(everyone, found)
        worst = [min(values) if None not in values else None for values in zip(*everyone, strict=True)]
        for name, seen, least in zip(("y", "dx"), worst, _LEAST_DB[self.case.payload], strict=True):
            if seen is not None and not seen >= least:
                raise WrongResult(
                    f"moe-layer, {self.case.provider} {self.case.mode}: {name} has {seen:.1f} dB against dense "
                    f"experts, {least} are expected."
                )
        return worst[0], worst[1]

    def pair(self, number: int) -> torch.Tensor:
        """Dispatch and combine of an input without experts: the low-latency exchange by itself."""
        assert isinstance(self.provider, ModuleMoe), "the only one with such an exchange"
        x, idx = self.job.inputs[number % len(self.job.inputs)]
        layer = self.provider.moe.exchange
        with torch.no_grad():
            rows, _, desc = layer.dispatch(x, idx, self.weights)
            if self._results is None:
                self._results = torch.zeros(rows.shape, dtype=torch.bfloat16, device=self.job.device)
            return layer.combine(self._results, desc)

    def least_us(self) -> float | None:
        """Bound of decoding, see the module; None for other providers. Collective."""
        if not isinstance(self.provider, ModuleMoe):
            return None
        pair = self.measure(self.pair, 0, refresh=False).timing.median_us
        return pair + self._active_bytes() / _MEMORY_RATE

    def _active_bytes(self) -> float:
        """Weight bytes of the experts with rows, on the rank with most such experts; mean over the inputs."""
        job, shape = self.job, self.job.shape
        per_rank = shape.experts // job.num_ranks
        most = []
        for idxs in job.idxs:
            active = torch.cat(idxs).unique()
            most.append(int(torch.bincount(active[active >= 0] // per_rank).max()))
        width = 3 * shape.ffn * shape.hidden
        scales = 4 * (2 * shape.ffn + shape.hidden)
        return sum(most) / len(most) * (width + scales if self.case.payload == "mxfp8" else 2 * width)

    def measure(self, call: Callable[[int], object], num_gradients: int, refresh: bool) -> Measured:
        """Time and memory of a call; collective. The memory excludes its last num_gradients results, of parameters."""
        job, provider = self.job, self.provider

        def eager(number: int) -> object:
            if refresh:
                provider.refresh()
            return call(number)

        timed: Call = eager
        per_call, peak = 1, self._peak_bytes(eager, num_gradients)
        if job.settings.graph and self.case.provider == "triton_ep":
            per_call = len(job.inputs)
            if isinstance(provider, ModuleMoe):
                provider.moe.forget_captures()  # the graph of the previous op no longer exists
            graph = capture(lambda: [call(number) for number in range(per_call)])
            timed = lambda _: graph.replay()  # noqa: E731
        self._warm_up(timed)
        return dataclasses.replace(job.measure(timed, provider.meet, per_call), peak_bytes=peak)

    def _warm_up(self, call: Call) -> None:
        """Call until a GPU has the temperature and the clocks of a long run. Collective."""
        device = self.job.device
        if device.type != "cuda":
            return

        def seconds(calls: int) -> float:
            begin = time.perf_counter()
            for number in range(calls):
                self.provider.meet()
                call(number)
            torch.cuda.synchronize(device)
            return time.perf_counter() - begin

        longest = slowest(seconds(3))  # all ranks must make as many calls
        assert longest is not None, "every rank has measured it"
        seconds(math.ceil(3 * _WARM_S / longest))

    def _peak_bytes(self, call: Callable[[int], object], num_gradients: int) -> int | None:
        """Peak memory of a call on the rank with the highest peak; None on the CPU and for GemmOnly. Collective.

        Includes symmetric memory, but not what stays between calls: parameters, prepared weights, inputs.
        """
        device = self.job.device
        # The products alone keep none of their results.
        if device.type != "cuda" or isinstance(self.provider, GemmOnly):
            return None
        call(0)
        mine = peak_of(lambda: call(0), device, num_gradients) + self.provider.other_bytes
        everyone = [0] * self.job.num_ranks
        dist.all_gather_object(everyone, mine)
        return max(everyone)


def measure_moe(job: Job, case: Case) -> dict[str, Measured]:
    """Measure a forward pass and, with `--backward`, a step; collective.

    Raises:
        WrongResult: tokens differ from those of dense experts by more than rounding.
        Unavailable: the provider cannot run here.
    """
    s = job.settings
    found: dict[str, Measured] = {}
    with make_moe_provider(job, case) as provider:
        run = _Run(job, case, provider)
        errors = run.check(s.backward or s.main_grad)
        calls: dict[str, tuple[Callable[[int], object], int, float | None]] = {
            "moe_layer_fwd": (run.forward, 0, errors[0]),
            "moe_layer_step": (run.step, len(provider.parameters), errors[1]),
            "moe_layer_step_main_grad": (run.step_main_grad, 0, errors[1]),
            "moe_layer_decode": (run.forward, 0, errors[0]),
        }
        for op in s.ops:
            call, num_gradients, error = calls[op.removesuffix("_refresh")]
            with run.main_grads() if op.endswith("_main_grad") else contextlib.nullcontext():
                measured = run.measure(call, num_gradients, op.endswith("_refresh"))
            least = run.least_us() if s.decode else None
            found[op] = dataclasses.replace(measured, error_db=error, floor_us=least)
    return found
