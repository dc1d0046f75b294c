"""A MoE layer from router output to combined tokens: dispatch, SwiGLU experts as grouped GEMMs, combine.

Expert weights are drawn by expert number, so that any rank can compute any token densely for the check.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import silu

from triton_ep import autograd
from triton_ep.bench.job import Job, Measured, WrongResult, capture
from triton_ep.bench.providers import Unavailable
from triton_ep.bench.settings import Case
from triton_ep.bench.timing import Call
from triton_ep.layer import EPAll2AllLayer
from triton_ep.mx.grouped_mm import _to_mxfp8_then_scaled_grouped_mm as grouped_mm_mx
from triton_ep.ops.grouped_gemm import grouped_gemm

_CHECKED_TOKENS = 2
# Rounding a tensor to e4m3 leaves 31.5 dB of it, and six of them make up the noise of a SwiGLU expert; bf16 leaves 50.
_LEAST_DB = {"mxfp8": 20.0, "bf16": 36.0}


class _Experts:
    """Weights of this rank's experts: w1, w3 [e, F, H] and w2 [e, H, F] bf16."""

    def __init__(self, job: Job) -> None:
        self.job = job
        per_rank = job.shape.experts // job.num_ranks
        mine = [self.draw(job.rank * per_rank + local) for local in range(per_rank)]
        self.w1, self.w3, self.w2 = (torch.stack(list(same)) for same in zip(*mine, strict=True))

    def draw(self, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """w1, w3 [F, H] and w2 [H, F] of one expert, the same wherever they are drawn."""
        shape, device = self.job.shape, self.job.device
        generator = torch.Generator(device).manual_seed(expert + 1)

        def normal(rows: int, columns: int) -> torch.Tensor:
            values = torch.randn(rows, columns, generator=generator, device=device) / math.sqrt(columns)
            return values.bfloat16()

        return normal(shape.ffn, shape.hidden), normal(shape.ffn, shape.hidden), normal(shape.hidden, shape.ffn)

    def run(self, rows: torch.Tensor, ends: torch.Tensor, payload: str) -> torch.Tensor:
        """[R, H] bf16: every row through the expert whose segment it is in."""
        transposed = [w.transpose(-2, -1) for w in (self.w1, self.w3, self.w2)]
        if payload == "mxfp8":
            gate, up = (grouped_mm_mx(rows, w, ends) for w in transposed[:2])
            return grouped_mm_mx(silu(gate) * up, transposed[2], ends)
        gate, up = (grouped_gemm(rows, w, ends) for w in transposed[:2])
        return grouped_gemm(silu(gate) * up, transposed[2], ends)


def _forward(
    layer: EPAll2AllLayer, experts: _Experts, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, payload: str
) -> torch.Tensor:
    rows, row_weights, desc = autograd.dispatch(layer, x, idx, weights)
    out = experts.run(rows, desc.expert_offsets[1:], payload)
    return autograd.combine(layer, out, desc, row_weights)


def _check(job: Job, experts: _Experts, x: torch.Tensor, idx: torch.Tensor, y: torch.Tensor, payload: str) -> None:
    """A few tokens of this rank against their experts in float32."""
    num = min(_CHECKED_TOKENS, x.shape[0])
    exact = torch.zeros(num, x.shape[1], device=job.device)
    for token in range(num):
        for expert in idx[token].tolist():
            w1, w3, w2 = (w.float() for w in experts.draw(expert))
            row = x[token].float()
            exact[token] += w2 @ (silu(w1 @ row) * (w3 @ row)) / idx.shape[1]
    noise = (exact - y[:num].float()).square().sum().item()
    seen_db = 10 * math.log10(exact.square().sum().item() / max(noise, 1e-30))
    if not seen_db >= _LEAST_DB[payload]:
        raise WrongResult(
            f"moe-layer on rank {job.rank}: {seen_db:.1f} dB against dense experts, {_LEAST_DB[payload]} are expected"
        )


def measure_moe(job: Job, case: Case) -> dict[str, Measured]:
    """Forward, and with `--backward` forward and backward; collective.

    Raises:
        WrongResult: tokens differ from those of dense experts by more than rounding.
        Unavailable: another provider than triton_ep, or a backward pass of bf16 experts.
    """
    s = job.settings
    if case.provider != "triton_ep":
        raise Unavailable("moe-layer measures triton_ep.")
    if s.backward and case.payload != "mxfp8":
        raise Unavailable("--backward needs --payload mxfp8: the grouped GEMM of bf16 rows has no gradient.")
    experts = _Experts(job)
    weights = torch.full((job.shape.tokens, job.shape.topk), 1 / job.shape.topk, device=job.device)
    inputs = len(job.idxs)
    found = {}
    with job.layer(case) as layer:

        def forward(number: int) -> torch.Tensor:
            x, idx = job.inputs[number % inputs]
            return _forward(layer, experts, x, idx, weights, case.payload)

        with torch.no_grad():
            for number, (x, idx) in enumerate(job.inputs):
                _check(job, experts, x, idx, forward(number), case.payload)
            call: Call = forward
            per_call = 1
            if s.graph:
                graph = capture(lambda: [forward(number) for number in range(inputs)])
                call, per_call = lambda _: graph.replay(), inputs
            found["moe_layer_fwd"] = job.measure(call, layer.ep_barrier_all, per_call)
        if s.backward:
            leaves = [experts.w1, experts.w3, experts.w2]
            for leaf in leaves:
                leaf.requires_grad_()

            def step(number: int) -> None:
                x, idx = job.inputs[number % inputs]
                leaf_x = x.detach().requires_grad_()
                y = _forward(layer, experts, leaf_x, idx, weights, case.payload)
                torch.autograd.grad(y, [leaf_x, *leaves], torch.ones_like(y))

            found["moe_layer_step"] = job.measure(step, layer.ep_barrier_all)
        autograd.leave(layer)
    return found
