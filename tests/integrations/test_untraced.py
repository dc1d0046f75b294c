"""Interfaces and layers in functions that torch.compile compiles: it breaks the graph around their calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from triton_ep import EPAll2AllLayer
from triton_ep.distributed import current_heap
from triton_ep.integrations import megatron
from triton_ep.integrations.deep_ep import Buffer, ElasticBuffer, HybridEPBuffer, release

TOKENS, HIDDEN, TOPK, EXPERTS = 12, 128, 2, 8
Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _calls(topk_idx: torch.Tensor, layer: EPAll2AllLayer, hybrid: HybridEPBuffer) -> dict[str, Call]:
    """A dispatch and a combine of each interface, with torch's operations before, between and behind them."""
    group, sizes = dist.group.WORLD, {"num_max_tokens_per_rank": TOKENS, "hidden": HIDDEN, "num_topk": TOPK}
    deep_ep, elastic = Buffer(group, 1 << 20), ElasticBuffer(group, **sizes)

    def of_layer(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows, _, desc = layer.dispatch(x * 2, topk_idx, weights)
        return layer.combine(rows * 3, desc) + 1

    def of_deep_ep(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        per_rank, _, per_expert, in_rank, _ = deep_ep.get_dispatch_layout(topk_idx, EXPERTS)
        rows, _, _, _, handle, _ = deep_ep.dispatch(
            x * 2,
            topk_idx=topk_idx,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        return deep_ep.combine(rows * 3, handle)[0] + 1

    def of_elastic(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        routing = {"topk_idx": topk_idx, "topk_weights": weights, "num_experts": EXPERTS}
        rows, _, _, handle, _ = elastic.dispatch(x * 2, **routing)
        return elastic.combine(rows * 3, handle)[0] + 1

    def of_hybrid_ep(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        routing = {"topk_idx": topk_idx, "topk_weights": weights, "num_of_experts": EXPERTS}
        rows, _, _, _, handle = hybrid.dispatch_with_permute(hidden=x * 2, **routing)
        return hybrid.combine_with_unpermute(hidden=rows * 3, handle=handle)[0] + 1

    def of_megatron(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows, _, _, _, handle = megatron.fused_dispatch(x * 2, topk_idx, weights, EXPERTS, group, True, True)
        return megatron.fused_combine(rows * 3, group, handle, True, True)[0] + 1

    return {
        "layer": of_layer,
        "deep_ep": of_deep_ep,
        "elastic": of_elastic,
        "hybrid_ep": of_hybrid_ep,
        "megatron": of_megatron,
    }


def _check(rank: int, nodes: int, ranks_per_node: int) -> None:
    device, generator = current_heap().device, torch.Generator().manual_seed(rank)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator)
    topk_idx, weights = scores.topk(TOPK).indices.to(device), scores.topk(TOPK).values.to(device)
    group = dist.group.WORLD
    layer = EPAll2AllLayer(group, TOKENS, HIDDEN, TOPK, num_tot_experts=EXPERTS, timeout_s=60.0)
    hybrid = HybridEPBuffer(group, HIDDEN, TOKENS, EXPERTS // dist.get_world_size(), topk=TOPK)
    for name, call in _calls(topk_idx, layer, hybrid).items():
        torch._dynamo.reset()
        counters.clear()
        compiled, results = torch.compile(call, backend="eager"), []
        for step in range(4):
            x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16().to(device)
            for function in (call, compiled):
                leaf = x.clone().requires_grad_(name == "megatron")
                out = function(leaf, weights)
                if name == "megatron":
                    out.float().square().sum().backward()
                results.append((out.detach(), leaf.grad))
            (plain, plain_grad), (found, grad) = results[-2:]
            assert torch.equal(found, plain), (name, step)
            assert (grad is None) == (name != "megatron")
            assert grad is None or torch.equal(grad, plain_grad)
        # The function itself, and its rest behind each call: nothing of the calls.
        assert counters["frames"]["total"] == 3 + (name == "deep_ep"), (name, counters["frames"])
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"use triton_ep\.autograd|an exchange between ranks"):
            torch.compile(call, backend="eager", fullgraph=True)(x, weights)
    layer.finalize()
    hybrid.close()
    release()


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 1), pytest.param(1, 2, marks=pytest.mark.on_gpus)])
def test_graphs_break_around_calls(run_ranks, nodes, ranks_per_node):
    """Results and gradients of eager calls; torch.compile sees nothing of what a call does, and says so if it must."""
    run_ranks(_check, nodes, ranks_per_node)
