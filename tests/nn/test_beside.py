"""Gradients of tokens and of routing weights come back next to products that compute gradients of the experts' weights:
the same bits as one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.combinations import combinations
from triton_ep.context.rows import RowFormat
from triton_ep.distributed import current_heap
from triton_ep.exchange import steps
from triton_ep.nn import MoE, finalize_exchanges
from triton_ep.nn.expert_block import _FirstGradient
from triton_ep.ops import tuning
from triton_ep.runtime.launch import INTERPRETING
from triton_ep.runtime.plans.shape import OVERLAPPED_TOKENS, Shape

HIDDEN, FFN, TOKENS, TOPK = 256, 128, 9, 3
SIZES: dict[str, Any] = {"topk": TOPK, "num_sm": 2, "router": False, "timeout_s": 60.0}


def _step(moe: MoE, rank: int, main_grad: bool) -> list[torch.Tensor]:
    """Result and gradients of a step, and what it adds to the weights' main_grad."""
    device, generator = current_heap().device, torch.Generator().manual_seed(rank)
    num = TOKENS - 2 * rank if INTERPRETING else OVERLAPPED_TOKENS - 100 * rank
    x = torch.randn(num, HIDDEN, generator=generator).bfloat16().to(device).requires_grad_()
    ids = torch.rand(num, moe.exchange.config.num_experts, generator=generator).topk(TOPK, 1).indices
    ids = torch.where(torch.rand(num, TOPK, generator=generator) < 0.2, -1, ids).to(device)
    weights = (torch.rand(num, TOPK, generator=generator) + 0.5).to(device).requires_grad_()
    grad = torch.randn(num, HIDDEN, generator=generator).bfloat16().to(device)
    params = [moe.experts.w13, moe.experts.w2]
    for param in params if main_grad else ():
        param.main_grad = torch.ones(param.shape, device=device)
    y = moe(x, topk_idx=ids, topk_weights=weights)
    found = list(torch.autograd.grad(y, [x, weights, *params], grad, allow_unused=main_grad))
    found[2:] = [param.main_grad for param in params] if main_grad else found[2:]
    for param in params if main_grad else ():
        del param.main_grad
    return [y.detach(), *found]


def _ran_beside(fmt: RowFormat) -> bool:
    """Whether a combine of such rows had programs that fit next to products."""
    return any(getattr(kind, "beside", False) for kind in fmt.grids)


def _check(rank: int, nodes: int, ranks_per_node: int, options: dict[str, Any], main_grad: bool) -> None:
    world = nodes * ranks_per_node
    torch.manual_seed(3)
    sizes = {**SIZES, "num_experts": 4 if INTERPRETING else 4 * world}
    sizes["max_tokens"] = TOKENS if INTERPRETING else OVERLAPPED_TOKENS
    moe = MoE(HIDDEN, FFN, **sizes, **options, local_world_size=ranks_per_node)
    ctx = moe.exchange.context
    with mock.patch.object(_FirstGradient, "has_early_part", False):
        apart = _step(moe, rank, main_grad)
    formats = ctx.rows.own, ctx.rows.narrow(TOPK)
    assert not any(_ran_beside(fmt) for fmt in formats)
    with mock.patch.object(_FirstGradient, "add_beside", autospec=True, side_effect=_FirstGradient.add_beside) as added:
        together = _step(moe, rank, main_grad)
    assert added.call_count == (nodes == 1 or INTERPRETING)
    assert all(_ran_beside(fmt) == steps.makes_room(ctx) for fmt in formats)
    assert steps.makes_room(ctx) == (nodes == 1 and not INTERPRETING)
    for seen, want in zip(together, apart, strict=True):
        assert torch.isfinite(want).all() and torch.equal(seen, want)
    moe.check()
    finalize_exchanges()


def _check_graph(rank: int, nodes: int, ranks_per_node: int, options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    sizes = {**SIZES, "num_experts": 4 * ranks_per_node, "max_tokens": OVERLAPPED_TOKENS}
    moe = MoE(HIDDEN, FFN, **sizes, **options)
    device, found = current_heap().device, []
    x = torch.randn(OVERLAPPED_TOKENS - rank, HIDDEN, device=device).bfloat16().requires_grad_()
    ids = torch.rand(len(x), sizes["num_experts"], device=device).topk(TOPK, 1).indices
    weights = torch.rand(len(x), TOPK, device=device).requires_grad_()

    def step() -> None:
        y = moe(x, topk_idx=ids, topk_weights=weights)
        found[:] = torch.autograd.grad(y, [x, weights, *moe.parameters()], torch.ones_like(y))

    step()
    wanted = [each.clone() for each in found]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    for _ in range(3):
        for each in found:
            each.zero_()
        graph.replay()
        for seen, want in zip(found, wanted, strict=True):
            assert torch.equal(seen, want)
    moe.check()
    finalize_exchanges()


KINDS = [{"payload": "mxfp8", "capacity": 3.0}, {"capacity": 3.0}, {"payload": "mxfp8", "precision": "exact"}, {}]


@pytest.mark.plain
@pytest.mark.parametrize(
    "options, nodes, ranks_per_node",
    combinations(
        KINDS,
        [(1, 1), (1, 2), (2, 1)],
        on_cpu=lambda options, nodes, ranks_per_node: nodes * ranks_per_node == 1 or options == KINDS[0],
    ),
)
def test_the_same_bits_next_to_products(run_ranks, options: dict[str, Any], nodes: int, ranks_per_node: int) -> None:
    """Rows in 8 bits, rows kept as they arrived, and rows in bf16."""
    run_ranks(_check, nodes, ranks_per_node, options, False)


@pytest.mark.plain
def test_next_to_products_that_add_to_main_grad(run_ranks) -> None:
    """The gradient is added once."""
    run_ranks(_check, 1, 2, KINDS[0], True)


@pytest.mark.plain
@pytest.mark.on_gpus
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("options", KINDS[:2], ids=str)
def test_in_a_graph(run_ranks, ranks: int, options: dict[str, Any]) -> None:
    """A replay starts the kernels of both streams, in whatever order, and computes the same bits."""
    run_ranks(_check_graph, 1, ranks, options)


@pytest.mark.parametrize("multiprocessors", [132, 114, 78, 33, 32, 16])
def test_programs_leave_room(monkeypatch: pytest.MonkeyPatch, multiprocessors: int) -> None:
    """At most one program fits on a multiprocessor next to products."""
    monkeypatch.setattr(tuning, "multiprocessors", lambda device: multiprocessors)
    sending, pulling, overlapped = tuning.combining_beside(torch.device("cpu"))
    assert 0 < pulling < sending and sending + pulling <= multiprocessors and overlapped


@pytest.mark.parametrize(
    ("changed", "makes_room"),
    [({}, True), ({"ranks": 16}, True), ({"ranks": 32}, False), ({"tokens": OVERLAPPED_TOKENS - 1}, False)],
    ids=str,
)
def test_which_layers_make_room(changed: dict[str, int], makes_room: bool) -> None:
    """Those with many tokens, on a node whose flags programs with little shared memory can watch."""
    ranks, tokens = changed.get("ranks", 4), changed.get("tokens", OVERLAPPED_TOKENS)
    shape = Shape(tokens, HIDDEN, TOPK, 4 * ranks, ranks, ranks, enable_local_combine=True)
    assert shape.makes_room == makes_room
    assert not replace(shape, budgeted=True).makes_room
    assert not replace(shape, world_size=2 * ranks, num_experts=8 * ranks).makes_room  # two nodes
