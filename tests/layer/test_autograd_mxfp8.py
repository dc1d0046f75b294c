"""Gradients with payload="mxfp8": rows and gradients travel quantised, with the bits of the reference."""

import pytest
import torch

from tests.combinations import combinations
from tests.layer.cases import Case, make_layer, workloads
from triton_ep import MXTensor, autograd
from triton_ep.distributed import current_heap
from triton_ep.errors import InputError, PeerFailed
from triton_ep.mx.grouped_mm import _to_mxfp8_then_scaled_grouped_mm as grouped_mm
from triton_ep.reference import dispatch as dispatch_reference
from triton_ep.reference import mxfp8 as mxfp8_reference

TOPOLOGIES = ((1, 2), (2, 1), (1, 4), (2, 2))

ROUTES = (
    Case("plain", topk=3, experts=4),
    Case("wide", hidden=160, topk=2, experts=3, tokens=(6, 0, 9, 3), alignment=16),
    Case("fp32", dtype=torch.float32),
    Case("static", static=True, topk=4, experts=4, alignment=4),
    Case("duplicates", routing="duplicates", topk=4, experts=4),
    Case("all_dropped", routing="all_dropped"),
    Case("quantised_input", quantised_input=True),
)


def _gradient(rank: int, tokens: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(50 + rank)
    return torch.randn(tokens, hidden, generator=generator).to(dtype)


def _powers(experts: torch.Tensor) -> torch.Tensor:
    """Power-of-two factor of an expert, so that sums of a few products with e4m3 values are exact in float32."""
    return 2.0 ** (experts % 5 - 2)


def _check_routes(rank: int, nodes: int, ranks_per_node: int, case: Case) -> None:
    with make_layer(case, rank, nodes, ranks_per_node, payload="mxfp8") as layer:
        cfg, device = layer.config, current_heap().device
        works = workloads(case, cfg.world_size, 0)
        idx = works[rank].topk_idx
        x = works[rank].x.clone().to(device)
        x = (MXTensor.to_mx(x) if case.quantised_input else x).requires_grad_()
        recv_x, recv_weights, desc = autograd.dispatch(layer, x, idx.to(device))
        assert isinstance(recv_x, MXTensor) and recv_x.dtype == case.dtype
        assert recv_x.requires_grad and recv_weights is None
        first = rank * cfg.num_experts_per_rank
        row = torch.arange(recv_x.shape[0], device=device)
        expert = first + torch.searchsorted(desc.expert_offsets[1:].long(), row, right=True)
        y = recv_x.dequantize() * _powers(expert.float()).unsqueeze(1).to(case.dtype)
        seen = []
        y.register_hook(seen.append)
        grads = [_gradient(r, w.x.shape[0], case.hidden, case.dtype) for r, w in enumerate(works)]
        autograd.combine(layer, y, desc).backward(grads[rank].to(device))

        # The gradient of y is quantised on the sending rank and routed like rows.
        (grad_y,) = seen
        assert isinstance(grad_y, MXTensor) and grad_y.dtype == case.dtype
        parts = [mxfp8_reference.quantize(grad) for grad in grads]
        used = int(desc.expert_offsets[-1])
        for given, sent in (
            (grad_y.qdata, [data.view(torch.uint8) for data, _ in parts]),
            (grad_y.scale, [scale for _, scale in parts]),
        ):
            rows = dispatch_reference.dispatch(
                sent, [w.topk_idx for w in works], None, rank, cfg.num_experts, cfg.alignment
            ).recv_x
            assert torch.equal(given[:used].view(torch.uint8).cpu(), rows)
            assert not given[used:].view(torch.uint8).any()

        # The gradient of x: its quantised gradient times the expert's factor, summed over assignments, rounded once.
        kept = (idx >= 0) & (idx < cfg.num_experts)
        factor = torch.where(kept, _powers(idx.double()), 0.0).sum(1, keepdim=True)
        values = mxfp8_reference.dequantize(*parts[rank], torch.float32)
        assert x.grad is not None and type(x.grad) is torch.Tensor
        assert torch.equal(x.grad.cpu(), (values.double() * factor).to(case.dtype))
        assert not x.grad.cpu()[~kept.any(1)].any()


ON_CPU = {(2, 1): ("wide", "static"), (1, 4): (), (2, 2): ("plain",)}
"""Cases of CPU ranks; on one node two ranks take all."""


def _routes_on_cpu(case: Case, nodes: int, ranks_per_node: int) -> bool:
    return case.name in ON_CPU.get((nodes, ranks_per_node), (case.name,))


@pytest.mark.plain
@pytest.mark.parametrize("case, nodes, ranks_per_node", combinations(ROUTES, TOPOLOGIES, on_cpu=_routes_on_cpu))
def test_gradients_travel_quantised(run_ranks, case, nodes, ranks_per_node):
    """Combine's backward returns the reference's MXTensor; dispatch's backward sums it; dropped tokens get zero."""
    run_ranks(_check_routes, nodes, ranks_per_node, case)


# --- a whole MoE ----------------------------------------------------------------------------------------


def _sqnr(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Signal to noise in decibels."""
    exact = exact.double()
    noise = (value.detach().cpu().double() - exact).square().sum()
    return float(10 * torch.log10(exact.square().sum() / noise))


def _check_noise(rank: int, nodes: int, ranks_per_node: int, combine_weights: bool) -> list[float]:
    case = Case("noise", tokens=(48, 31, 40, 25), hidden=128, topk=2, experts=2, drop=0.1)
    with make_layer(case, rank, nodes, ranks_per_node, payload="mxfp8") as layer:
        cfg, device = layer.config, current_heap().device
        generator = torch.Generator().manual_seed(1)
        works = workloads(case, cfg.world_size, 0)
        all_w = (torch.randn(cfg.num_experts, case.hidden, case.hidden, generator=generator) / 11).bfloat16()
        xs = [torch.randn(w.x.shape, generator=generator).bfloat16() for w in works]
        grads = [_gradient(r, w.x.shape[0], case.hidden, case.dtype) for r, w in enumerate(works)]

        mine = slice(rank * cfg.num_experts_per_rank, (rank + 1) * cfg.num_experts_per_rank)
        w = all_w[mine].clone().to(device).requires_grad_()
        x = xs[rank].clone().to(device).requires_grad_()
        weights = works[rank].topk_weights.clone().to(device).requires_grad_()
        recv_x, recv_weights, desc = autograd.dispatch(layer, x, works[rank].topk_idx.to(device), weights)
        y = grouped_mm(recv_x, w.transpose(1, 2), desc.expert_offsets)
        if not combine_weights:
            y = (y * recv_weights.unsqueeze(1)).bfloat16()
        out = autograd.combine(layer, y, desc, recv_weights if combine_weights else None)
        out.backward(grads[rank].to(device))

        dense = _dense_product(works, xs, all_w, grads)
        exact_out, exact_x, exact_weights, exact_w = dense[0][rank], dense[1][rank], dense[2][rank], dense[3][mine]
        idx = works[rank].topk_idx
        dropped = (idx < 0) | (idx >= cfg.num_experts)
        assert not weights.grad.cpu()[dropped].any()
        assert not x.grad.cpu()[dropped.all(1)].any()
        assert not out.detach().cpu()[dropped.all(1)].any()
        return [
            _sqnr(value, exact)
            for value, exact in ((out, exact_out), (x.grad, exact_x), (w.grad, exact_w), (weights.grad, exact_weights))
        ]


def _dense_product(works, xs, all_w, grads):
    """Outputs and gradients of x and routing weights of every rank, and of all experts, in float64."""
    xs = [x.double().requires_grad_() for x in xs]
    weights = [w.topk_weights.double().requires_grad_() for w in works]
    all_w = all_w.double().requires_grad_()
    outs = []
    for x, weight, work in zip(xs, weights, works, strict=True):
        out = torch.zeros_like(x)
        for e in range(all_w.shape[0]):
            share = torch.where(work.topk_idx == e, weight, 0.0).sum(1, keepdim=True)
            out = out + share * (x @ all_w[e].T)
        outs.append(out)
    sum((o * g.double()).sum() for o, g in zip(outs, grads, strict=True)).backward()
    return [o.detach() for o in outs], [x.grad for x in xs], [w.grad for w in weights], all_w.grad


def _noise_on_cpu(combine_weights: bool, nodes: int, ranks_per_node: int) -> bool:
    """Noise is that of products: two CPU ranks stand for four, and one case for those of two nodes."""
    return (nodes, ranks_per_node) == (1, 2) or ((nodes, ranks_per_node) == (2, 1) and combine_weights)


@pytest.mark.plain
@pytest.mark.parametrize(
    "combine_weights, nodes, ranks_per_node", combinations([False, True], TOPOLOGIES, on_cpu=_noise_on_cpu)
)
def test_noise_of_a_moe_layer(run_ranks, combine_weights, nodes, ranks_per_node):
    """SQNR against float64 with MXFP8 operands in every product, forward and backward: at least 28, 26 and 25 dB."""
    for out, grad_x, grad_w, grad_weights in run_ranks(_check_noise, nodes, ranks_per_node, combine_weights):
        assert out >= 28
        assert grad_x >= 26
        assert grad_w >= 25
        assert grad_weights >= 23  # lower, because there is only one number per slot to average over


# --- arguments ------------------------------------------------------------------------------------------


def _check_refused(rank: int, nodes: int, ranks_per_node: int) -> None:
    case = Case("refused", drop=0.0)
    work, device = workloads(case, nodes * ranks_per_node, 0)[rank], current_heap().device
    x, topk_idx = work.x.to(device), work.topk_idx.to(device)
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        expected = InputError if rank == 0 else PeerFailed
        with pytest.raises(expected, match="input is an MXTensor" if rank == 0 else "rank 0 rejected"):
            autograd.dispatch(layer, MXTensor.to_mx(x) if rank == 0 else x, topk_idx)
        recv_x, _, desc = autograd.dispatch(layer, x, topk_idx)
        with pytest.raises(InputError, match="dequantize"):
            autograd.combine(layer, MXTensor.to_mx(recv_x), desc)
        assert autograd.combine(layer, recv_x, desc).shape == x.shape


@pytest.mark.plain
def test_quantised_rows_need_the_payload(run_ranks):
    """All ranks refuse an MXTensor on a layer without payload."""
    run_ranks(_check_refused, 1, 2)
