"""A step that keeps staging rows is bit-identical to a step that keeps the expanded rows."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from tests.combinations import combinations
from triton_ep.config import EPConfig
from triton_ep.distributed import current_heap
from triton_ep.nn import MoE, finalize_exchanges
from triton_ep.nn.arrivals import keeps_arrivals

HIDDEN, FFN, TOKENS, TOPK = 64, 96, 7, 4
SHORT = 32
"""A hidden size whose rows are shorter than those for which staging buffers have room."""


def _steps(moe: MoE, rank: int, observed: bool) -> tuple[list[torch.Tensor], list[tuple[int, ...]]]:
    """Results and gradients of two micro-batches, the second sent before the first one's backward; saved shapes."""
    device, generator = current_heap().device, torch.Generator().manual_seed(rank)
    shapes: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.bfloat16 and not isinstance(tensor, torch.nn.Parameter):
            shapes.append(tuple(tensor.shape))
        return tensor

    found, leaves, grads = [], [], []
    with (
        mock.patch("triton_ep.nn.operations.is_observed", return_value=observed),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        for num in (TOKENS - rank, 3 * rank):
            x = torch.randn(num, moe.hidden, generator=generator).bfloat16().to(device).requires_grad_()
            ids = torch.rand(num, moe.exchange.config.num_experts, generator=generator).topk(TOPK, 1).indices
            ids = torch.where(torch.rand(num, TOPK, generator=generator) < 0.2, -1, ids).to(device)
            weights = (torch.rand(num, TOPK, generator=generator) + 0.5).to(device).requires_grad_()
            found.append(moe(x, topk_idx=ids, topk_weights=weights))
            leaves.append([x, weights, *moe.experts.parameters()])
            grads.append(torch.randn(num, moe.hidden, generator=generator).bfloat16().to(device))
    for y, given, grad in zip(list(found), leaves, grads, strict=True):
        found += torch.autograd.grad(y, given, grad)
    return found, shapes


def _check(rank: int, nodes: int, ranks_per_node: int, capacity: Any, observed: bool, hidden: int = HIDDEN) -> None:
    world = nodes * ranks_per_node
    torch.manual_seed(3)
    moe = MoE(
        hidden,
        FFN,
        num_experts=4 * world,
        topk=TOPK,
        max_tokens=TOKENS,
        capacity=capacity,
        local_world_size=ranks_per_node,
        num_sm=2,
        router=False,
    )
    rows = moe.exchange.config.recv_capacity
    assert keeps_arrivals(moe.exchange.config)
    kept, shapes = _steps(moe, rank, observed)
    never = mock.Mock(return_value=False)
    with (
        mock.patch("triton_ep.nn.arrivals.keeps_arrivals", never),
        mock.patch("triton_ep.nn.operations.keeps_arrivals", never),
    ):
        expanded, wide = _steps(moe, rank, observed)
    for seen, want in zip(kept, expanded, strict=True):
        assert torch.isfinite(want).all() and torch.equal(seen, want)
    of_rows = [shape for shape in wide if shape[1:] == (hidden,)]
    of_arrivals = [shape for shape in shapes if shape[1:] == (hidden,)]
    assert sum(map(len, of_rows)) and max(of_arrivals) < max(of_rows)
    if rows is not None:
        assert (rows, hidden) in of_rows and (rows, hidden) not in of_arrivals
        assert (world * TOKENS, hidden) in of_arrivals
    if capacity != 128:  # overflow is an error there
        moe.check()
    finalize_exchanges()


# What is kept depends on the capacity; the op saves it whatever the topology is.
CASES = [(1, 1, None), (1, 2, None), (1, 1, 3.0), (1, 2, 3.0), (1, 2, 128), (2, 1, 3.0)]
ON_CPU = {False: [CASES[0], *CASES[4:]], True: [CASES[0], CASES[2]]}


@pytest.mark.plain
@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "capacity", "observed"),
    combinations(CASES, [False, True], on_cpu=lambda *case: case[:3] in ON_CPU[case[3]]),
)
def test_the_same_bits_from_what_arrived(run_ranks, nodes, ranks_per_node, capacity, observed):
    """Gradients of tokens, weights and parameters, with two micro-batches in flight, by autograd and as an op."""
    run_ranks(_check, nodes, ranks_per_node, capacity, observed)


@pytest.mark.plain
def test_rows_shorter_than_their_places(run_ranks):
    """Buffers have room for longer rows."""
    run_ranks(_check, 1, 2, 3.0, False, SHORT)


@pytest.mark.plain
@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({}, True),
        ({"world_size": 4, "local_world_size": 4}, True),
        ({"world_size": 8, "local_world_size": 8}, False),
        ({"world_size": 8, "local_world_size": 8, "recv_capacity": 1024}, True),
        ({"recv_capacity": 255}, False),
        ({"payload": "mxfp8"}, False),
        ({"token_dtype": torch.float32}, False),
        ({"enable_local_combine": False}, False),
    ],
    ids=str,
)
def test_where_arrivals_are_few(change: dict[str, Any], kept: bool) -> None:
    """The choice compares ranks times tokens with rows, and needs the table of the expansion."""
    sizes: dict[str, Any] = {"max_tokens": 64, "hidden": 256, "topk": 8, "num_experts": 64, "rank": 0, "num_sm": 8}
    sizes |= {"world_size": 2, "local_world_size": 2, "enable_local_combine": True, **change}
    assert keeps_arrivals(EPConfig(**sizes)) == kept
