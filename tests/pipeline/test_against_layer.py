"""The layer does in one step what the pipeline does in four: the same rows and gradients, bit for bit."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.layer.cases import Case as LayerCase
from tests.layer.cases import make_layer
from tests.pipeline.plain import Case, World, assert_equal, device, expert_weights, make_world
from triton_ep import MXTensor, autograd, pipeline

pytestmark = pytest.mark.plain

CASES = (
    Case("uniform", n=64, topk=4, experts=4),
    Case("skewed", n=64, routing="skewed", topk=3, experts=3, tokens=(14, 2, 5, 9)),
    Case("empty_rank", n=64, tokens=(30, 0, 9, 3), drop=0.0),
    Case("empty_experts", n=64, routing="one_expert", drop=0.0, topk=1, experts=3),
)
ON_GPUS = pytest.mark.on_gpus
RUNS = [
    *((1, 2, case) for case in (CASES[0], CASES[2], CASES[3])),
    (2, 2, CASES[1]),
    pytest.param(1, 4, CASES[1], marks=ON_GPUS),
    *(pytest.param(2, 2, case, marks=ON_GPUS) for case in (CASES[0], CASES[2], CASES[3])),
]


def _token_gradient(world: World, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(40 + rank)
    return torch.randn(world.x[rank].shape, generator=generator).bfloat16()


def _sum_of_slots(world: World, rank: int, rows: torch.Tensor) -> torch.Tensor:
    """[T, H] bf16: the rows of each token added in float32 in the order of k, rounded once."""
    tokens, topk = world.topk_idx[rank].shape
    terms = torch.zeros(tokens * topk, rows.shape[1])
    terms[world.slot[rank]] = rows.detach().cpu().float()
    total = torch.zeros(tokens, rows.shape[1])
    for k in range(topk):
        total += terms.view(tokens, topk, rows.shape[1])[:, k]
    return total.bfloat16()


def _check_against_layer(rank: int, nodes: int, ranks_per_node: int, case: Case, static: bool) -> None:
    world = make_world(case, nodes * ranks_per_node)
    first = rank * case.experts
    w = expert_weights(case, world.size)[first : first + case.experts]
    outputs, inputs = world.output_splits(rank), world.input_splits(rank)
    grad = _token_gradient(world, rank)
    y_grads = []

    # Four steps, with one row per (token, expert).
    weights = w.to(device()).requires_grad_()
    rows = world.rows(rank).to(device()).requires_grad_()
    counts = torch.tensor(world.expert_counts(rank), device=device())
    shape, expert_rows, indices, _, ends = pipeline.permute_mxfp8_fwd_hp_bwd(
        pipeline.a2a_dispatch(rows, outputs, inputs), counts, world.size, case.experts
    )
    y = pipeline.to_mxfp8_then_scaled_grouped_mm(expert_rows, weights.transpose(-2, -1), ends)
    y.register_hook(y_grads.append)
    out = pipeline.a2a_combine(pipeline.unpermute(y, indices, shape), inputs, outputs)
    out.backward(grad[world.token[rank]].to(device()))

    # One step.
    layer_case = LayerCase(
        case.name,
        tokens=case.tokens,
        hidden=case.hidden,
        topk=case.topk,
        experts=case.experts,
        payload="mxfp8",
        alignment=32,
        static=static,
    )
    with make_layer(layer_case, rank, nodes, ranks_per_node) as layer:
        layer_weights = w.to(device()).requires_grad_()
        x = world.x[rank].to(device()).requires_grad_()
        recv_x, _, desc = autograd.dispatch(layer, x, world.topk_idx[rank].to(device()))
        layer_y = pipeline.to_mxfp8_then_scaled_grouped_mm(recv_x, layer_weights.transpose(-2, -1), desc.expert_offsets)
        layer_y.register_hook(y_grads.append)
        layer_out = autograd.combine(layer, layer_y, desc)
        layer_out.backward(grad.to(device()))

    # Each expert has the same rows in the same order, with padding; only the layer gives an empty expert no padding.
    starts = [0, *ends.tolist()]
    layer_starts = desc.expert_offsets.tolist()
    real = desc.num_recv_tokens_per_expert.tolist()
    by_source = torch.tensor(world.expert_counts(rank)).view(world.size, case.experts)
    assert real == by_source.sum(0).tolist()
    for expert, ((a, b), (c, d)) in enumerate(zip(pairwise(layer_starts), pairwise(starts), strict=True)):
        assert (b - a, d - c) == (-(-real[expert] // 32) * 32, max(b - a, 32))
        in_layer, in_pipeline = slice(a, b), slice(c, c + b - a)
        for name, one, four in (
            ("rows", recv_x.detach(), expert_rows.detach()),
            ("gradient of combine", y_grads[1], y_grads[0]),
        ):
            assert isinstance(one, MXTensor) and isinstance(four, MXTensor)
            for part in ("qdata", "scale"):
                got, want = (getattr(each, part).view(torch.uint8) for each in (one, four))
                assert torch.equal(got[in_layer], want[in_pipeline]), f"{part} of {name} of expert {expert}"
        assert torch.equal(layer_y.detach()[in_layer], y.detach()[in_pipeline]), f"results of expert {expert}"
    if all(real):
        assert layer_starts == starts
    if not static:
        assert recv_x.shape[0] == layer_starts[-1] <= expert_rows.shape[0]

    assert_equal(layer_out.detach(), _sum_of_slots(world, rank, out), "output")
    assert_equal(x.grad, _sum_of_slots(world, rank, rows.grad), "gradient of tokens")
    assert torch.equal(layer_weights.grad, weights.grad), "gradient of weights"


@pytest.mark.parametrize("nodes, ranks_per_node, case", RUNS, ids=lambda value: getattr(value, "name", value))
def test_layer_gives_the_rows_of_the_pipeline(run_ranks, nodes, ranks_per_node, case):
    """Rows in order, results, output and all gradients are equal."""
    run_ranks(_check_against_layer, nodes, ranks_per_node, case, False)


@pytest.mark.parametrize("nodes, ranks_per_node", [(2, 1), pytest.param(2, 2, marks=ON_GPUS)])
def test_static_layer_gives_them_too(run_ranks, nodes, ranks_per_node):
    """In static mode, rows past those in use have no effect."""
    run_ranks(_check_against_layer, nodes, ranks_per_node, CASES[0], True)
