"""Megatron's fused_a2a: the bits of the core, forward and backward; and the flex dispatcher's calls over `deep_ep`."""

import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.integrations import flex_stand_in
from triton_ep import CallMismatch, EPAll2AllLayer, autograd
from triton_ep.context.context import DispatchCombineContext
from triton_ep.distributed import current_heap
from triton_ep.errors import ConfigError, StaleHandleError
from triton_ep.integrations import deep_ep
from triton_ep.integrations import megatron as door
from triton_ep.testing import make_workload

HIDDEN, TOPK, EXPERTS = 24, 4, 4  # experts per rank
TOKENS = ((7, 0, 5, 9, 3, 0, 4, 6), (0, 11, 3, 6, 0, 8, 2, 5), (8, 3, 10, 1, 4, 4, 0, 2))


def _scale(experts: torch.Tensor) -> torch.Tensor:
    """A power of two per expert: products are exact."""
    return 2.0 ** (experts % 5 - 2)


class _Batch:
    """Inputs whose products and sums are all exact, so that no order of sums can hide a wrong row."""

    def __init__(self, rank: int, world_size: int, seed: int) -> None:
        device = current_heap().device
        work = make_workload(
            rank,
            world_size,
            TOKENS[seed][rank],
            hidden=HIDDEN,
            topk=TOPK,
            num_experts=EXPERTS * world_size,
            seed=seed,
        ).with_ids(torch.int64)
        generator = torch.Generator().manual_seed(100 * seed + rank)
        self.idx = torch.where(work.topk_idx == EXPERTS * world_size, -1, work.topk_idx).to(device)
        shape = (TOKENS[seed][rank], HIDDEN)
        x, self.grad = (torch.randint(-3, 4, shape, generator=generator).bfloat16().to(device) for _ in range(2))
        probs = torch.randint(1, 5, (shape[0], TOPK), generator=generator) / 4
        self.x, self.probs = x.requires_grad_(), probs.to(device).requires_grad_()
        self.rank = rank

    def forward(self, asynchronous: bool) -> None:
        """Run through the integration, with experts that sum a row's outputs on their rank."""
        num_experts = EXPERTS * dist.get_world_size()
        rows, idx, probs, self.counts, handle = door.fused_dispatch(
            self.x, self.idx, self.probs, num_experts, dist.group.WORLD, asynchronous, asynchronous
        )
        assert not idx.requires_grad
        assert self.counts.dtype == torch.int64
        assert self.counts.device.type == "cpu"
        assert torch.equal(torch.bincount(idx[idx >= 0].cpu(), minlength=EXPERTS), self.counts)
        factor = torch.where(idx >= 0, _scale(idx + self.rank * EXPERTS), 0.0) * probs
        outputs = (rows.float().unsqueeze(1) * factor.unsqueeze(2)).sum(1).bfloat16()
        self.out, nothing = door.fused_combine(outputs, dist.group.WORLD, handle, asynchronous, asynchronous)
        assert nothing is None
        self.rows = rows.detach()

    def backward(self) -> None:
        """Compute the gradients of x and of the probabilities."""
        self.out.backward(self.grad)

    def through_core(self, layer: EPAll2AllLayer) -> tuple[torch.Tensor, ...]:
        """Result and gradients of the same batch through the layer."""
        x, probs = self.x.detach().requires_grad_(), self.probs.detach().requires_grad_()
        rows, weights, desc = autograd.dispatch(layer, x, self.idx, probs)
        assert weights is not None
        counts = desc.num_recv_tokens_per_expert.long().cpu()
        assert torch.equal(counts, self.counts)
        experts = torch.arange(self.rank * EXPERTS, (self.rank + 1) * EXPERTS).repeat_interleave(counts)
        factor = _scale(experts).to(x.device) * weights
        out = autograd.combine(layer, (rows.float() * factor.unsqueeze(1)).bfloat16(), desc)
        out.backward(self.grad)
        assert x.grad is not None
        assert probs.grad is not None
        return out.detach(), x.grad, probs.grad


def _no_host(*_: Any) -> Any:
    raise AssertionError("the host waited for the device")


def _backward(batch: _Batch) -> None:
    with mock.patch.object(DispatchCombineContext, "read_back", _no_host):
        batch.backward()


def _check_three_live(rank: int, nodes: int, ranks_per_node: int, asynchronous: bool) -> None:
    batches = [_Batch(rank, nodes * ranks_per_node, seed) for seed in range(3)]
    batches[0].forward(asynchronous)
    batches[1].forward(asynchronous)
    _backward(batches[0])
    batches[2].forward(asynchronous)
    _backward(batches[1])
    _backward(batches[2])
    deep_ep.release()
    _compare(batches, rank, nodes, ranks_per_node)


def _compare(batches: list[_Batch], rank: int, nodes: int, ranks_per_node: int) -> None:
    ranks = nodes * ranks_per_node
    with EPAll2AllLayer(
        dist.group.WORLD, 16, HIDDEN, TOPK, rank, EXPERTS * ranks, ranks_per_node, ranks, enable_local_combine=True
    ) as layer:
        for batch in batches:
            out, grad_x, grad_probs = batch.through_core(layer)
            assert torch.equal(batch.out, out)
            assert torch.equal(batch.x.grad, grad_x)
            assert torch.equal(batch.probs.grad, grad_probs)


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node, asynchronous", [(1, 2, False)])
def test_fused_functions_have_the_bits_of_the_core(run_ranks, nodes, ranks_per_node, asynchronous):
    """Outputs, gradients of x and of each probability, F0 F1 B0 F2 B1 B2; backward passes have no host wait."""
    run_ranks(_check_three_live, nodes, ranks_per_node, asynchronous)


def _check_one(rank: int, nodes: int, ranks_per_node: int) -> None:
    batch = _Batch(rank, nodes * ranks_per_node, 0)
    batch.forward(True)
    _backward(batch)
    deep_ep.release()
    _compare([batch], rank, nodes, ranks_per_node)


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(2, 1), pytest.param(2, 2, marks=pytest.mark.on_gpus)])
def test_two_nodes_have_the_bits_of_the_core(run_ranks, nodes, ranks_per_node):
    """The same on two nodes, with async_finish, as Megatron calls it."""
    run_ranks(_check_one, nodes, ranks_per_node)


def _check_helpers(rank: int, nodes: int, ranks_per_node: int) -> None:
    device = current_heap().device
    x = torch.zeros(3, HIDDEN, dtype=torch.bfloat16, device=device)
    assert door.get_hidden_bytes(x) == 2 * HIDDEN
    assert door.get_hidden_bytes(x.to(torch.float8_e4m3fn)) == 2 * HIDDEN
    assert door.get_hidden_bytes(x.float()) == 4 * HIDDEN
    door.get_buffer(dist.group.WORLD, 1).destroy()  # a buffer of another test may be for any row length
    first = door.get_buffer(dist.group.WORLD, 2 * HIDDEN)
    assert door.get_buffer(dist.group.WORLD, HIDDEN) is first
    longer = door.get_buffer(dist.group.WORLD, 4 * HIDDEN)
    assert longer is not first
    assert door.get_buffer(dist.group.WORLD, 2 * HIDDEN) is longer
    door.set_deepep_num_sms(24)
    assert longer.get_dispatch_config(2).num_sms == 24
    door.set_deepep_num_sms(20)
    deep_ep.Buffer.budgeted = False
    with pytest.raises(ConfigError, match="no process group"):
        door.fused_dispatch(x, x[:, :TOPK].long(), x[:, :TOPK].float(), 8, "ep")
    with pytest.raises(StaleHandleError, match="NoneType"):
        door.fused_combine(x, dist.group.WORLD, None)
    deep_ep.release()


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_buffers_are_made_when_they_must(run_ranks, nodes, ranks_per_node):
    """A new buffer for another group or longer rows only; errors name an unknown group and a missing handle."""
    run_ranks(_check_helpers, nodes, ranks_per_node)


def _backward_meets_forward(rank: int, nodes: int, ranks_per_node: int) -> str:
    """The backward pass of a dispatch (a combine) on one rank, the combine of its rows on the other."""
    batch = _Batch(rank, nodes * ranks_per_node, 0)
    rows, _, _, _, handle = door.fused_dispatch(
        batch.x, batch.idx, batch.probs.detach(), EXPERTS * dist.get_world_size(), dist.group.WORLD
    )

    def call() -> None:
        if rank == 0:
            rows.float().sum().backward()
        else:
            door.fused_combine(rows.detach(), dist.group.WORLD, handle)
        handle.layer.check()

    with pytest.raises(CallMismatch) as caught:
        call()
    dist.barrier()
    deep_ep.release()
    return str(caught.value)


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_a_backward_pass_meets_a_forward_pass(run_ranks, nodes, ranks_per_node):
    """Gradients are not mistaken for rows: the error on every rank names the rank in its backward pass."""
    for text in run_ranks(_backward_meets_forward, nodes, ranks_per_node):
        assert re.search(r"rank 0 in combine[^;]*in a backward pass", text), text
        assert not re.search(r"rank 1 in combine[^;.]*in a backward pass", text), text


def dense_layer(hidden: torch.Tensor, probs: torch.Tensor, experts: int) -> torch.Tensor:
    """Output of a dropless layer with the experts below, token by token."""
    return (hidden.float() * (probs * _scale(torch.arange(experts).to(probs.device))).sum(1, keepdim=True)).bfloat16()


def _check_flex(rank: int, nodes: int, ranks_per_node: int, mode: str) -> None:
    ranks, device = nodes * ranks_per_node, current_heap().device
    num_experts = EXPERTS * ranks
    deep_ep.install()
    try:
        for seed in (2,):
            batch = _Batch(rank, ranks, seed)
            dense = torch.zeros(batch.x.shape[0], num_experts, device=device)
            kept = (batch.idx >= 0) & ((mode != "drop") | (torch.arange(TOPK, device=device) != 1))
            token, k = torch.nonzero(kept, as_tuple=True)
            dense[token, batch.idx[token, k]] = batch.probs.detach()[token, k]
            hidden, probs = batch.x, dense.requires_grad_()
            flex = flex_stand_in.Flex(dist.group.WORLD, num_experts, TOPK, drops=mode != "all", pad=2 * (mode == "pad"))
            rows, row_probs, counts = flex.dispatch(hidden, probs)
            assert rows.shape[0] == counts.sum()
            assert mode != "pad" or (counts % 2 == 0).all()
            local = torch.arange(rank * EXPERTS, (rank + 1) * EXPERTS).repeat_interleave(counts).to(device)
            out = flex.combine((rows.float() * (_scale(local) * row_probs).unsqueeze(1)).bfloat16())
            out.backward(batch.grad)
            expected_hidden, expected_probs = batch.x.detach().requires_grad_(), dense.detach().requires_grad_()
            expected = dense_layer(expected_hidden, expected_probs, num_experts)
            expected.backward(batch.grad)
            assert torch.equal(out, expected)
            assert torch.equal(hidden.grad, expected_hidden.grad)
            routed = dense.detach() > 0
            assert torch.equal(probs.grad[routed], expected_probs.grad[routed])
    finally:
        flex_stand_in.forget_buffer()
        deep_ep.uninstall()
        deep_ep.release()


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node, mode", [(1, 2, "drop"), (1, 2, "pad")])
def test_the_flex_dispatchers_calls(run_ranks, nodes, ranks_per_node, mode):
    """The calls of an unmodified flex dispatcher, with dropped entries and padded experts: outputs and gradients of a
    dense layer, bit for bit."""
    run_ranks(_check_flex, nodes, ranks_per_node, mode)
