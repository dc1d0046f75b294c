"""Weights that change between a forward pass and its backward pass, or seem to."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.combinations import combinations
from tests.ops.grouped import DEVICE
from triton_ep.distributed import current_heap
from triton_ep.errors import InputError, PeerFailed
from triton_ep.nn import MoE, SwiGLUExperts, finalize_exchanges

pytestmark = pytest.mark.plain
HIDDEN, FFN, TOKENS = 64, 96, 5
OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "mxfp8": {"payload": "mxfp8"},
    "separate": {"separate": True, "bias": True},
    "separate-mxfp8-static": {"separate": True, "bias": True, "payload": "mxfp8", "capacity": 2.0},
}
ON_CPU = ("mxfp8", "separate-mxfp8-static")
"""Joined weights and others. Payloads alone change nothing here: of bf16, see the selective checkpoint below."""


def _step_elsewhere() -> None:
    """A step of an optimizer that the experts have nothing to do with."""
    other = torch.nn.Parameter(torch.zeros(1))
    other.grad = torch.ones(1)
    torch.optim.SGD([other]).step()


def _gradients(y: torch.Tensor, moe: MoE, x: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(y.float().square().sum(), [x, *moe.experts.parameters()]))


def _changed(rank: int, nodes: int, ranks_per_node: int, options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    moe = MoE(HIDDEN, FFN, num_experts=4, topk=2, max_tokens=TOKENS, timeout_s=60.0, **options)
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16()
    x = x.to(current_heap().device).requires_grad_()
    wanted = _gradients(moe(x), moe, x)

    first = moe(x)
    _step_elsewhere()
    second = moe(x)
    for y in (second, first):
        assert all(torch.equal(one, other) for one, other in zip(_gradients(y, moe, x), wanted, strict=True))

    for number, (name, weight) in enumerate(moe.experts.named_parameters()):
        first = moe(x)
        if rank == 1:
            with torch.no_grad():
                weight.add_(0.5)
        second = moe(x) if number == 0 else None
        if rank == 1:
            with pytest.raises(InputError, match="changed in place between a forward pass and its backward pass"):
                _gradients(first, moe, x)
        else:
            _gradients(first, moe, x)
            with pytest.raises(PeerFailed, match="rank 1 rejected its arguments"):
                moe.check()
        if second is not None:
            assert all(grad.isfinite().all() for grad in _gradients(second, moe, x)), name
            moe.check()
    finalize_exchanges()


@pytest.mark.parametrize("name", combinations(list(OPTIONS), on_cpu=lambda name: name in ON_CPU))
def test_changes_under_a_graph_are_named_on_their_rank_and_told_the_others(run_ranks, name):
    """Every parameter, joined or not; the newer graph stands, and an optimizer of other parameters spoils none."""
    run_ranks(_changed, 1, 2, OPTIONS[name])


def _changed_under_selective(rank: int, nodes: int, ranks_per_node: int) -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op == torch.ops.triton_ep.moe.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    torch.manual_seed(3)
    moe = MoE(HIDDEN, FFN, num_experts=4, topk=2, max_tokens=TOKENS, timeout_s=60.0)
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16()
    x = x.to(current_heap().device).requires_grad_()
    contexts = partial(create_selective_checkpoint_contexts, policy)
    y = checkpoint(lambda x: 2 * moe(x), x, use_reentrant=False, context_fn=contexts)
    if rank == 1:
        with torch.no_grad():
            moe.experts.w2.mul_(2)
        with pytest.raises(InputError, match="changed in place between a forward pass and its backward pass"):
            y.sum().backward()
    else:
        y.sum().backward()
        with pytest.raises(PeerFailed, match="rank 1 rejected its arguments"):
            moe.check()
    moe(x).sum().backward()
    finalize_exchanges()


def test_changes_under_a_selective_checkpoint(run_ranks):
    """The op's result is kept, while the checkpoint would hand out the weights as they are now."""
    run_ranks(_changed_under_selective, 1, 2)


def test_experts_alone_with_an_optimizer_of_other_parameters() -> None:
    """Without an exchange a graph of joined weights waits for its backward pass in the same way."""
    torch.manual_seed(3)
    experts = SwiGLUExperts(HIDDEN, FFN, 2, separate=True, bias=True, device=DEVICE)
    x = torch.randn(8, HIDDEN).bfloat16().to(DEVICE)
    offsets = torch.tensor([0, 3, 8], dtype=torch.int32, device=DEVICE)
    parameters = list(experts.parameters())
    wanted = torch.autograd.grad(experts(x, offsets).float().square().sum(), parameters)
    first = experts(x, offsets)
    _step_elsewhere()
    experts(x, offsets)
    seen = torch.autograd.grad(first.float().square().sum(), parameters)
    assert all(torch.equal(one, other) for one, other in zip(seen, wanted, strict=True))
