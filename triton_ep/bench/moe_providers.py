"""A MoE layer after its router, by this package and by others: weights, a forward pass, and gradients by autograd.

Weights are drawn by expert number, so that any rank can compute any token densely for the check. All providers take
weights in the form of `triton_ep.nn.SwiGLUExperts`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.nn.functional import silu

from triton_ep.bench.job import Job
from triton_ep.bench.providers import Unavailable, exchange_counts, meet_by_collective
from triton_ep.bench.settings import Case
from triton_ep.context.layout import estimate_bytes
from triton_ep.nn import MoE, new_exchange


class MoeProvider(Protocol):
    """A layer of one case on this rank. All calls are collective.

    Attributes:
        parameters: w13 [e, 2F, H] and w2 [e, H, F] bf16, which require gradients.
        exact: y equals the dense layer's, up to rounding; False: no exchange, so nothing to compare.
    """

    parameters: list[torch.Tensor]
    exact: bool

    @property
    def other_bytes(self) -> int:
        """Device memory that torch's allocator does not manage."""

    def forward(self, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """y [T, H] bf16 for x [T, H] bf16, idx [T, K] int32 and weights [T, K] float32; differentiable."""

    def refresh(self) -> None:
        """Invalidate prepared copies of the weights: the next use builds them again."""

    def meet(self) -> None:
        """Barrier of all ranks on the current stream."""


def draw(job: Job, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """w13 [2F, H] and w2 [H, F] bf16 of one expert; every rank draws the same."""
    shape, device = job.shape, job.device
    generator = torch.Generator(device).manual_seed(expert + 1)

    def normal(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator, device=device) / math.sqrt(columns)
        return values.bfloat16()

    return normal(2 * shape.ffn, shape.hidden), normal(shape.hidden, shape.ffn)


def _draw_mine(job: Job) -> list[torch.Tensor]:
    """The parameters of this rank."""
    shape, experts = job.shape, job.shape.experts // job.num_ranks
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": job.device}
    w13 = torch.empty(experts, 2 * shape.ffn, shape.hidden, **options)
    w2 = torch.empty(experts, shape.hidden, shape.ffn, **options)
    for local in range(experts):  # one at a time: together they may fill half of the memory
        w13[local], w2[local] = draw(job, job.rank * experts + local)
    return [w13.requires_grad_(), w2.requires_grad_()]


@contextlib.contextmanager
def make_moe_provider(job: Job, case: Case) -> Iterator[MoeProvider]:
    """Create the provider of a case; collective.

    Raises:
        Unavailable: it cannot run here.
    """
    if case.provider == "triton_ep":
        with _module(job, case) as provider:
            yield provider
    elif case.provider == "nccl":
        yield CollectiveMoe(job)
    elif case.provider == "gemm-only":
        yield GemmOnly(job)
    else:
        yield DeepEPMoe(job, case)


# --- this package ---------------------------------------------------------------------------------------


class ModuleMoe:
    """`triton_ep.nn.MoE` with an exchange of its own."""

    exact = True

    def __init__(self, moe: MoE, job: Job) -> None:
        self.moe = moe
        self.parameters = [moe.experts.w13, moe.experts.w2]
        with torch.no_grad():
            for parameter, drawn in zip(self.parameters, _draw_mine(job), strict=True):
                parameter.copy_(drawn)

    @property
    def other_bytes(self) -> int:
        """Symmetric memory; an exact exchange may have grown it."""
        return estimate_bytes(self.moe.exchange.context.sizes)

    def forward(self, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The module with this routing."""
        y: torch.Tensor = self.moe(x, topk_idx=idx, topk_weights=weights)
        return y

    def refresh(self) -> None:
        """Invalidate as an optimizer step invisible to torch would require."""
        self.moe.invalidate()

    def meet(self) -> None:
        """Barrier on the device, through symmetric memory."""
        self.moe.exchange.ep_barrier_all()


@contextlib.contextmanager
def _module(job: Job, case: Case) -> Iterator[ModuleMoe]:
    shape = job.shape
    payload = "mxfp8" if case.payload == "mxfp8" else None
    sizes: dict[str, Any] = {"num_experts": shape.experts, "topk": shape.topk, "max_tokens": shape.tokens}
    sizes |= {
        "payload": payload,
        "capacity": job.capacity(case),
        "low_latency": job.settings.decode,
        "timeout_s": 120.0,
    }  # compilation may take longer on some ranks
    num_sm = case.num_sm if case.num_sm > 0 else None  # None: tuned, or not applicable
    with new_exchange(shape.hidden, **sizes, num_sm=num_sm) as layer:
        options: dict[str, Any] = {"precision": case.precision} if payload else {}
        moe = MoE(shape.hidden, shape.ffn, **sizes, **options, router=False, exchange=layer)
        yield ModuleMoe(moe, job)
        layer.check()


# --- torch ----------------------------------------------------------------------------------------------


def _grouped_experts(rows: torch.Tensor, ends: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """SwiGLU experts [R, H] by torch._grouped_mm; ends: [e] int32, the row after the last of each expert."""
    gate, up = torch._grouped_mm(rows, w13.transpose(-2, -1), offs=ends).chunk(2, -1)
    y: torch.Tensor = torch._grouped_mm(silu(gate) * up, w2.transpose(-2, -1), offs=ends)
    return y


class _Gather(torch.autograd.Function):
    """rows[source]; backward: grad[back] summed over copies. Gathers both ways, because a scatter is slower.

    source: [n]. back: [m, c], places of the c copies of each row in the result; n: no copy.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, source: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(back)
        return rows[source]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,), (back,) = grads, ctx.saved_tensors
        if back.shape[1] == 1:
            return grad[back[:, 0]], None, None
        grad = torch.cat([grad, grad.new_zeros(1, grad.shape[1])])
        return grad[back].sum(1, dtype=torch.float32).to(grad.dtype), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        ctx.sizes = sent, received
        return _all_to_all(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sent, received = ctx.sizes
        return _all_to_all(grads[0].contiguous(), received, sent), None, None


def _all_to_all(rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    """Exchange rows as bytes, because not every backend supports every dtype."""
    out = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(out.view(torch.uint8), rows.view(torch.uint8), received, sent)
    return out


class _Packing(NamedTuple):
    order: torch.Tensor  # [n] assignments by expert, without dropped ones
    places: torch.Tensor  # [T, K] place of each assignment in that order; n: dropped
    sent: list[int]
    received: list[int]
    by_expert: torch.Tensor  # received rows in the order of their experts
    ends: torch.Tensor  # [e] int32


class CollectiveMoe:
    """A row per assignment, packed by expert; all_to_all_single, torch._grouped_mm, and back; autograd by torch."""

    exact, other_bytes = True, 0

    def __init__(self, job: Job) -> None:
        self.parameters = _draw_mine(job)
        self.num_ranks, self.device = job.num_ranks, job.device
        self.experts_per_rank = job.shape.experts // job.num_ranks

    def forward(self, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[T, H]: the sum over k applies router weights to the returned rows."""
        packing = self._pack(idx)
        rows = _Gather.apply(x, packing.order // idx.shape[1], packing.places)
        rows = _AllToAll.apply(rows, packing.sent, packing.received)
        back = torch.empty_like(packing.by_expert)
        back[packing.by_expert] = torch.arange(back.numel(), device=self.device)
        rows = _Gather.apply(rows, packing.by_expert, back.unsqueeze(1))
        y = _grouped_experts(rows, packing.ends, *self.parameters)
        y = _Gather.apply(y, back, packing.by_expert.unsqueeze(1))
        y = _AllToAll.apply(y, packing.received, packing.sent)
        order = packing.order
        if order.numel() < idx.numel():  # dropped assignments read a row of zeros, which needs no gradient
            y, order = torch.cat([y, y.new_zeros(1, y.shape[1])]), torch.cat([order, order.new_zeros(1)])
        of_tokens = _Gather.apply(y, packing.places.flatten(), order.unsqueeze(1))
        return torch.bmm(weights.to(y.dtype).unsqueeze(1), of_tokens.view(*idx.shape, -1)).squeeze(1)

    def _pack(self, idx: torch.Tensor) -> _Packing:
        """Compute the packing; the host waits for the row counts."""
        order, num_dropped, sent_counts, recv_counts = exchange_counts(idx, self.num_ranks, self.experts_per_rank)
        told = torch.cat([num_dropped, sent_counts.sum(1), recv_counts.sum(1)]).tolist()
        dropped, sent, received = told[0], told[1 : 1 + self.num_ranks], told[1 + self.num_ranks :]
        local = torch.arange(self.experts_per_rank, device=self.device).repeat(self.num_ranks)
        local = torch.repeat_interleave(local, recv_counts.flatten(), output_size=sum(received))
        places = torch.empty_like(order)
        places[order] = torch.arange(order.numel(), device=self.device) - dropped
        places = torch.where(places < 0, sum(sent), places).view(idx.shape)
        by_expert = torch.argsort(local, stable=True)
        return _Packing(order[dropped:], places, sent, received, by_expert, recv_counts.sum(0).cumsum(0).int())

    def refresh(self) -> None:
        """bf16 weights have no prepared copies."""

    def meet(self) -> None:
        """Barrier by a collective."""
        meet_by_collective(self.device)


class GemmOnly:
    """The products alone, torch._grouped_mm on existing rows: no exchange, no activation; 3 products, or 9.

    Gate and up are one product of twice the width. The inputs of the backward products exist beforehand as well.
    """

    exact, other_bytes = False, 0

    def __init__(self, job: Job) -> None:
        self.parameters = _draw_mine(job)
        self.device = job.device
        experts = job.shape.experts // job.num_ranks
        ids = torch.cat([idx.flatten() for idx in job.idxs[0]]).long() - job.rank * experts
        counts = torch.bincount(ids[(ids >= 0) & (ids < experts)], minlength=experts)
        self.ends = counts.cumsum(0).int().to(self.device)
        rows, generator = int(counts.sum()), torch.Generator(self.device).manual_seed(job.rank)

        def normal(columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator, device=self.device).bfloat16()

        hidden, ffn = job.shape.hidden, job.shape.ffn
        self.x, self.act, self.dy, self.dpre = normal(hidden), normal(ffn), normal(hidden), normal(2 * ffn)

    def forward(self, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The products of a forward pass; ignores the arguments."""
        w13, w2 = (w.detach() for w in self.parameters)
        torch._grouped_mm(self.x, w13.transpose(-2, -1), offs=self.ends)
        y: torch.Tensor = torch._grouped_mm(self.act, w2.transpose(-2, -1), offs=self.ends)
        return y

    def backward(self) -> None:
        """The products of a backward pass."""
        w13, w2 = (w.detach() for w in self.parameters)
        torch._grouped_mm(self.dy, w2, offs=self.ends)
        torch._grouped_mm(self.dpre, w13, offs=self.ends)
        torch._grouped_mm(self.dy.t(), self.act, offs=self.ends)
        torch._grouped_mm(self.dpre.t(), self.x, offs=self.ends)

    def refresh(self) -> None:
        """bf16 weights have no prepared copies."""

    def meet(self) -> None:
        """Barrier by a collective."""
        meet_by_collective(self.device)


# --- DeepEP ---------------------------------------------------------------------------------------------


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weights: torch.Tensor, idx: torch.Tensor, owner: DeepEPMoe, told: list[Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layout = owner.buffer.get_dispatch_layout(idx, owner.experts)
        rows, ids, row_weights, _, handle, _ = owner.buffer.dispatch(
            x,
            num_tokens_per_rank=layout[0],
            is_token_in_rank=layout[3],
            num_tokens_per_expert=layout[2],
            topk_idx=idx,
            topk_weights=weights,
        )
        told += [ids, handle]
        ctx.owner, ctx.handle = owner, handle
        return rows, row_weights

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_rows, grad_weights = grads
        x, weights, _ = ctx.owner.buffer.combine(
            grad_rows.contiguous(), ctx.handle, topk_weights=grad_weights.float().contiguous()
        )
        return x, weights, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, owner: DeepEPMoe, handle: Any) -> torch.Tensor:
        ctx.owner, ctx.handle = owner, handle
        out: torch.Tensor = owner.buffer.combine(y, handle)[0]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.owner.buffer.dispatch(grads[0].contiguous(), handle=ctx.handle)[0], None, None


class DeepEPMoe:
    """deep_ep.Buffer in its normal mode, bf16, one node; rows permuted by torch, torch._grouped_mm.

    Raises:
        Unavailable: deep_ep is not installed, or the job spans several nodes.
    """

    exact = True

    def __init__(self, job: Job, case: Case) -> None:
        if importlib.util.find_spec("deep_ep") is None:
            raise Unavailable("deep_ep is not installed.")
        if job.place.ranks_per_node != job.num_ranks:
            raise Unavailable("deep_ep is measured inside one node only.")
        from deep_ep import Buffer

        self.parameters = _draw_mine(job)
        self.experts, self.device = job.shape.experts, job.device
        self.experts_per_rank = job.shape.experts // job.num_ranks
        Buffer.set_num_sms(case.num_sm)
        configs = [choose(job.num_ranks) for choose in (Buffer.get_dispatch_config, Buffer.get_combine_config)]
        row_bytes = job.shape.hidden * torch.bfloat16.itemsize
        self.other_bytes = max(config.get_nvl_buffer_size_hint(row_bytes, job.num_ranks) for config in configs)
        self.buffer = Buffer(dist.group.WORLD, self.other_bytes, 0)

    def forward(self, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[T, H]: the rank of the experts weights and sums the rows of a token."""
        told: list[Any] = []
        rows, row_weights = _Dispatch.apply(x, weights, idx.long(), self, told)
        ids, handle = told
        expert = ids.flatten().long()
        order = torch.argsort(expert, stable=True)
        counts = torch.bincount(expert + 1, minlength=self.experts_per_rank + 1)
        order = order[int(counts[0]) :]
        token = order // ids.shape[1]
        y = _grouped_experts(rows.index_select(0, token), counts[1:].cumsum(0).int(), *self.parameters)
        y = y * row_weights.flatten()[order].unsqueeze(1).to(y.dtype)
        summed = torch.zeros_like(rows).index_add(0, token, y)
        out: torch.Tensor = _Combine.apply(summed, self, handle)
        return out

    def refresh(self) -> None:
        """bf16 weights have no prepared copies."""

    def meet(self) -> None:
        """Barrier by a collective."""
        meet_by_collective(self.device)


def dense(
    job: Job, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """y and dx [n, H] float32 of a few tokens [n, H], computed by dense experts."""
    leaf = x.float().requires_grad_()
    rows: list[torch.Tensor] = []
    for token, experts in enumerate(idx.tolist()):
        y = torch.zeros_like(leaf[token])
        for k, expert in enumerate(experts):
            if expert >= 0:
                w13, w2 = (w.float() for w in draw(job, expert))
                gate, up = (w13 @ leaf[token]).chunk(2)
                y = y + weights[token, k] * (w2 @ (silu(gate) * up))
        rows.append(y)
    out = torch.stack(rows) if rows else leaf * 1
    (dx,) = torch.autograd.grad(out, leaf, grad.float())
    return out.detach(), dx


@torch.no_grad()
def decibel(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Signal-to-noise ratio of values against exact ones, in dB."""
    noise = sum(float((value.float() - exact).square().sum()) for value, exact in pairs)
    signal = sum(float(exact.square().sum()) for _, exact in pairs)
    return 10 * math.log10(max(signal, 1e-30) / max(noise, 1e-30))
