"""Exact MoE modules launch their experts before the host knows how many rows arrive."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from tests.combinations import combinations
from triton_ep.distributed import current_heap
from triton_ep.errors import EPError
from triton_ep.layer import EPAll2AllLayer
from triton_ep.nn import MoE, finalize_exchanges
from triton_ep.nn.expert_block import ExpertBlock
from triton_ep.runtime.launch import INTERPRETING

HIDDEN, FFN, EXPERTS, TOPK, MOST = 64, 32, 2, 2, 96
# Tokens of both ranks, and what happens: all experts get all tokens, so that the numbers of rows follow. The rows of an
# expert are padded to 128, so only more tokens than that need more room. A layer remembers numbers of rows by the bit
# length of a rank's tokens, which the calls before "none" share.
CALLS = {
    "first": ((64, 33), ["read", "experts", "combine"]),
    "alike": ((64, 33), ["experts", "read", "combine"]),
    "fewer": ((64, 32), ["experts", "read", "combine"]),
    "more": ((96, 33), ["experts", "read", "experts", "combine"]),
    "refused": ((90, 40), []),
    "after it": ((90, 40), ["experts", "read", "combine"]),
    "none": ((0, 0), ["read", "experts", "combine"]),
    "some": ((3, 1), ["read", "experts", "combine"]),
}
# On CPUs rows of MXFP8 take all calls, rows of bf16 those that differ most.
IN_BF16 = ("first", "more", "after it") if INTERPRETING else tuple(CALLS)
IN_TRAINING = ("first", "more", "refused", "after it")
IN_TRAINING_WITH_MXFP8 = ("first", "more") if INTERPRETING else IN_TRAINING
# Tokens, and the share of entries that are kept: fewer rows than in the pass before, then more, then far fewer.
PASSES = ((70, 0.9), (96, 1.0), (64, 0.1)) if INTERPRETING else ((70, 0.9), (66, 0.8), (96, 1.0), (64, 0.1))


@contextmanager
def _order() -> Iterator[list[str]]:
    """What passes of a module do, in order: the host reads counts, experts run, combine."""
    happened: list[str] = []

    def noting(owner: Any, name: str, what: str) -> Any:
        before = getattr(owner, name)

        def noted(*given: Any, **named: Any) -> Any:
            happened.append(what)
            return before(*given, **named)

        return mock.patch.object(owner, name, noted)

    from triton_ep.context.context import DispatchCombineContext

    with (
        noting(DispatchCombineContext, "read_back", "read"),
        noting(ExpertBlock, "forward", "experts"),
        noting(EPAll2AllLayer, "combine", "combine"),
    ):
        yield happened


def _module(payload: str | None, capacity: int | None, ranks_per_node: int) -> MoE:
    torch.manual_seed(1)
    sizes = {"num_experts": EXPERTS, "topk": TOPK, "max_tokens": MOST, "capacity": capacity}
    return MoE(HIDDEN, FFN, **sizes, payload=payload, router=False, local_world_size=ranks_per_node)


def _pass(moe: MoE, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, training: bool) -> list[torch.Tensor]:
    """The result and, in training, the gradients of tokens, weights and parameters."""
    if not training:
        with torch.no_grad():
            return [moe(x, topk_idx=ids, topk_weights=weights)]
    leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
    y = moe(leaves[0], topk_idx=ids, topk_weights=leaves[1])
    y.backward(torch.ones_like(y) if not y.numel() else y.detach() / 2)
    found = [y.detach(), *(leaf.grad for leaf in leaves), *(p.grad for p in moe.parameters())]
    moe.zero_grad()
    return found


def _check(
    rank: int, nodes: int, ranks_per_node: int, payload: str | None, training: bool, calls: tuple[str, ...]
) -> None:
    device = current_heap().device
    exact, static = (_module(payload, capacity, ranks_per_node) for capacity in (None, 2 * MOST * TOPK))
    for call, name in enumerate(calls):
        tokens, wanted = CALLS[name]
        draw = torch.Generator().manual_seed(100 * call + rank)
        x = torch.randn(tokens[rank], HIDDEN, generator=draw).bfloat16().to(device)
        ids = torch.stack([torch.randperm(EXPERTS, generator=draw) for _ in range(MOST)])[: tokens[rank]].to(device)
        weights = torch.rand(tokens[rank], TOPK, generator=draw).to(device)
        if name == "refused":
            if rank == 1:
                ids[:, 1] = 999
            with pytest.raises(EPError, match="999"):
                _pass(exact, x, ids, weights, training)
            continue
        with _order() as happened:
            found = _pass(exact, x, ids, weights, training)
        assert happened[: len(wanted)] == wanted, (name, happened)
        for got, want in zip(found, _pass(static, x, ids, weights, training), strict=True):
            assert torch.equal(got, want), name
    finalize_exchanges()


@pytest.mark.plain
@pytest.mark.parametrize(
    "nodes, payload, training, calls",
    [
        pytest.param(1, None, False, IN_BF16, id="bf16"),
        # its rows come from other nodes, too
        pytest.param(1, "mxfp8", False, tuple(CALLS), id="mxfp8", marks=pytest.mark.on_gpus),
        pytest.param(2, "mxfp8", False, tuple(CALLS), id="2-nodes"),
        pytest.param(1, None, True, IN_TRAINING, id="bf16-training"),
        pytest.param(1, "mxfp8", True, IN_TRAINING_WITH_MXFP8, id="mxfp8-training"),
    ],
)
def test_experts_run_before_the_counts_are_read(
    run_ranks: Callable[..., Any], nodes: int, payload: str | None, training: bool, calls: tuple[str, ...]
) -> None:
    """Every bit is that of a module with a capacity; more rows than there is room for make the experts run again; a
    refused call raises on every rank, and the next one is right."""
    run_ranks(_check, nodes, 2 // nodes, payload, training, calls)


def _kept_shapes(moe: MoE, rank: int, observed: bool) -> tuple[list[torch.Tensor], list[tuple[int, ...]]]:
    """Results and gradients of `PASSES`, and the shapes of what they keep."""
    device, generator = current_heap().device, torch.Generator().manual_seed(rank)
    shapes: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    found: list[torch.Tensor] = []
    for num, share in PASSES:
        draw = [torch.rand(num, each, generator=generator) for each in (HIDDEN, TOPK, TOPK)]
        ids = torch.stack([torch.randperm(EXPERTS, generator=generator) for _ in range(num)])
        ids = torch.where(draw[1] < share, ids, -1).to(device)
        with (
            mock.patch("triton_ep.nn.operations.is_observed", return_value=observed),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            found += _pass(moe, draw[0].bfloat16().to(device), ids, draw[2].to(device), True)
    return found, shapes


def _check_kept(rank: int, nodes: int, ranks_per_node: int, payload: str | None, observed: bool) -> None:
    from triton_ep.context.context import DispatchCombineContext

    moe = _module(payload, None, ranks_per_node)
    with _order() as happened:
        late, shapes = _kept_shapes(moe, rank, observed)
    assert happened.count("experts") == len(PASSES) + 1, happened  # more rows than there is room for
    with mock.patch.object(DispatchCombineContext, "rows_before", return_value=0), _order() as happened:
        first, wanted = _kept_shapes(moe, rank, observed)
    assert happened.count("experts") == len(PASSES), happened
    assert shapes == wanted
    assert all(map(torch.equal, late, first))
    finalize_exchanges()


@pytest.mark.plain
@pytest.mark.parametrize(
    ("payload", "observed"),
    combinations([None, "mxfp8"], [False, True], on_cpu=lambda payload, observed: observed == (payload is None)),
)
def test_what_is_kept_is_as_large_as_if_the_counts_came_first(run_ranks, payload, observed):
    """Checkpoints compare the shapes of passes, of which each finds other room. By autograd and as an op."""
    run_ranks(_check_kept, 1, 2, payload, observed)
