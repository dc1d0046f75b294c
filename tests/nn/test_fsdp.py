"""Experts that FSDP shards over replicas of the expert-parallel group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tests.combinations import combinations
from triton_ep.distributed import current_heap
from triton_ep.nn import MoE, expert_placement, finalize_exchanges
from triton_ep.runtime.launch import INTERPRETING

pytestmark = pytest.mark.plain
HAS_MESHES = hasattr(_fsdp_common, "ShardPlacementResult")  # torch 2.12
SIZES: dict[str, Any] = {"num_experts": 2, "topk": 2, "max_tokens": 6, "timeout_s": 60.0, "router": False}


def _steps(moe: MoE, rank: int, again: bool) -> list[torch.Tensor]:
    """Outputs and gradients of two steps, with an update of the weights in between."""
    device, found = current_heap().device, []
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.5)
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(6, 64, generator=generator).bfloat16().to(device).requires_grad_()
        ids = torch.rand(6, 2, generator=generator).topk(2).indices.to(device)
        weights = torch.rand(6, 2, generator=generator).to(device)
        call = lambda x, ids=ids, weights=weights: moe(x, topk_idx=ids, topk_weights=weights)  # noqa: E731
        y = checkpoint(call, x, use_reentrant=False) if again else call(x)
        y.square().sum().backward()
        found += [y.detach(), x.grad]
        optimizer.step()
        optimizer.zero_grad()
    return found


def _mesh(ranks_per_node: int) -> DeviceMesh:
    """Two replicas of the experts of half of the ranks."""
    shape = (2, ranks_per_node // 2)
    return init_device_mesh(current_heap().device.type, shape, mesh_dim_names=("replicas", "experts"))


def _check(rank: int, nodes: int, ranks_per_node: int, options: dict[str, Any], checkpoints: tuple[bool, ...]) -> None:
    mesh = _mesh(ranks_per_node)
    group = mesh["experts"].get_group()

    def make() -> MoE:
        torch.manual_seed(3)
        return MoE(64, 96, group=group, **options, **SIZES)

    def average(parameter: torch.Tensor) -> None:
        dist.all_reduce(parameter.grad, group=mesh["replicas"].get_group())
        parameter.grad.div_(2)

    plain = make()
    for parameter in plain.parameters():  # replicas have the same experts
        parameter.register_post_accumulate_grad_hook(average)
    want = _steps(plain, rank, False)
    for again in checkpoints:
        sharded = make()
        fully_shard(sharded.experts, mesh=mesh["replicas"])
        assert isinstance(sharded.experts.w2, DTensor)
        for seen, exact in zip(_steps(sharded, rank, again), want, strict=True):
            torch.testing.assert_close(seen, exact, rtol=0.02, atol=0.02 * float(exact.abs().max()))
    finalize_exchanges()


OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "mxfp8": {"payload": "mxfp8"},
    "separate": {"separate": True},
    "mxfp8_separate": {"payload": "mxfp8", "separate": True},
}
ON_CPU = ("bf16", "mxfp8_separate")


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "name"),
    # FSDP sees only the replicas: groups of two ranks change nothing about the weights. (Gradients of such groups:
    # tests/nn/test_parallel.py.)
    combinations([(1, 2), (1, 4)], list(OPTIONS), on_cpu=lambda _, ranks, name: ranks == 2 and name in ON_CPU),
)
def test_sharded_experts_train_as_whole_ones(run_ranks, nodes, ranks_per_node, name):
    """FSDP gathers weights for each pass and shards their gradients; after a step the products use the new weights."""
    # On CPUs the form with most to keep runs under a checkpoint, the other one without.
    checkpoints = (name != "bf16",) if INTERPRETING else (False, True)
    run_ranks(_check, nodes, ranks_per_node, OPTIONS[name], checkpoints)


def _other_weights(rank: int, nodes: int, ranks_per_node: int) -> None:
    mesh = _mesh(ranks_per_node)
    group, device = mesh["experts"].get_group(), current_heap().device
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(6, 64, generator=generator).bfloat16().to(device)
    ids = torch.rand(6, 2, generator=generator).topk(2).indices.to(device)
    weights = torch.rand(6, 2, generator=generator).to(device)
    found = []
    torch._dynamo.reset()
    for prepared, compiled in (("both", False), ("none", False), ("both", True)):
        torch.manual_seed(4)
        moe = MoE(64, 96, group=group, payload="mxfp8", prepared=prepared, **SIZES)
        fully_shard(moe.experts, mesh=mesh["replicas"], reshard_after_forward=True)
        run = torch.compile(moe, backend="aot_eager") if compiled else moe
        call = lambda run=run: run(x, topk_idx=ids, topk_weights=weights)  # noqa: E731
        with torch.no_grad():
            ys = [call()]
            moe.load_state_dict({name: value * 2 for name, value in moe.state_dict().items()})
            ys.append(call())
            if not (compiled and INTERPRETING):  # the op, in a graph or not, sees changes in place in the same way
                for parameter in moe.parameters():
                    parameter.mul_(2)
                ys.append(call())
                moe.experts.w2.to_local().mul_(2)
                ys.append(call())
        found.append(torch.stack(ys))
    if HAS_MESHES:  # hooks around the whole module, which never sees its shards
        torch.manual_seed(4)
        moe = MoE(64, 96, group=group, payload="mxfp8", **SIZES)
        place = expert_placement(moe, mesh["replicas"])
        fully_shard(
            moe, mesh=mesh["replicas", "experts"]._flatten("all"), reshard_after_forward=True, shard_placement_fn=place
        )
        with torch.no_grad():
            assert torch.equal(moe(x, topk_idx=ids, topk_weights=weights), found[1][0])
            moe.load_state_dict({name: value * 2 for name, value in moe.state_dict().items()})
            assert torch.equal(moe(x, topk_idx=ids, topk_weights=weights), found[1][1])
    assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[1][: len(found[2])])
    assert all(not torch.equal(found[0][i], found[0][i + 1]) for i in range(3))
    finalize_exchanges()


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 2), pytest.param(1, 4, marks=pytest.mark.on_gpus)])
def test_copies_follow_weights_that_change_while_they_are_sharded(run_ranks, nodes, ranks_per_node):
    """Weights loaded or changed in place, without an optimizer: the next products use the new values."""
    run_ranks(_other_weights, nodes, ranks_per_node)
