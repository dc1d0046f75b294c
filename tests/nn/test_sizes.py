"""Shapes of known models, scaled down to sizes that are not multiples of a tile: training and decoding."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.nn import dense
from triton_ep.distributed import current_heap
from triton_ep.nn import MoE, finalize_exchanges

pytestmark = pytest.mark.plain
LEAST_DB = {None: 38.0, "mxfp8": 19.0}


class Sizes(NamedTuple):
    """Sizes of a model, and options of its experts."""

    hidden: int
    ffn: int
    topk: int
    experts: int
    payload: str | None
    options: dict[str, Any]


GPT_OSS = {"bias": True, "limit": 7.0, "alpha": 1.702, "up_offset": 1.0}
MODELS = {
    "qwen3-235b": Sizes(160, 96, 8, 12, "mxfp8", {}),
    "mixtral": Sizes(64, 224, 2, 4, "mxfp8", {}),
    "gpt-oss": Sizes(90, 90, 4, 6, None, GPT_OSS),
    "gpt-oss-mxfp8": Sizes(96, 96, 4, 6, "mxfp8", GPT_OSS),
}


def _inputs(rank: int, sizes: Sizes) -> tuple[torch.Tensor, ...]:
    """x, ids, weights, and the gradient of y."""
    g, tokens = torch.Generator().manual_seed(rank), 5 + rank
    x = torch.randn(tokens, sizes.hidden, generator=g).bfloat16()
    ids = torch.rand(tokens, sizes.experts, generator=g).topk(sizes.topk).indices
    weights = torch.rand(tokens, sizes.topk, generator=g) + 0.5
    return x, ids, weights, torch.randn(tokens, sizes.hidden, generator=g).bfloat16()


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    own = parameter.detach().float().cpu()
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return torch.cat(parts).double().requires_grad_()


def _check(rank: int, nodes: int, ranks_per_node: int) -> None:
    world, device = nodes * ranks_per_node, current_heap().device
    for model, sizes in MODELS.items():
        options = {"num_experts": sizes.experts, "topk": sizes.topk, "max_tokens": 8, "timeout_s": 60.0}
        options |= {"payload": sizes.payload, "router": False, **sizes.options}
        torch.manual_seed(5)
        moe = MoE(sizes.hidden, sizes.ffn, **options)
        if "bias" in sizes.options:
            for bias in (moe.experts.b13, moe.experts.b2):
                bias.data.uniform_(-1, 1)
        everyone = [_inputs(each, sizes) for each in range(world)]
        x, ids, weights, grad = (each.to(device) for each in everyone[rank])
        x.requires_grad_()
        y = moe(x, topk_idx=ids, topk_weights=weights)
        y.backward(grad)

        names = [name for name, _ in moe.experts.named_parameters()]
        leaves = {name: _whole(getattr(moe.experts, name)) for name in names}
        xs = [each[0].detach().double().requires_grad_() for each in everyone]
        ys = dense.moe(
            xs, [each[1] for each in everyone], [each[2].double() for each in everyone],
            leaves["w13"], leaves["w2"], moe.experts.activation, leaves.get("b13"), leaves.get("b2"),
        )  # fmt: skip
        torch.autograd.backward(ys, [each[3].double() for each in everyone])
        seen = {"y": (y, ys[rank]), "x": (x.grad, xs[rank].grad)}
        first, count = moe.experts.first_expert, moe.experts.num_local_experts
        for name in names:
            seen[name] = getattr(moe.experts, name).grad, leaves[name].grad[first : first + count]
        decoder = MoE(sizes.hidden, sizes.ffn, **options, low_latency=True)
        decoder.load_state_dict(moe.state_dict())
        with torch.no_grad():
            seen["decoded"] = decoder(x, topk_idx=ids, topk_weights=weights), ys[rank]
        for name, (value, exact) in seen.items():
            assert dense.decibel(value, exact) > LEAST_DB[sizes.payload], (model, name)
    finalize_exchanges()


def test_sizes_off_the_tiles(run_ranks):
    """Results and all gradients of Qwen3, Mixtral and gpt-oss, and results of decoding."""
    run_ranks(_check, 1, 2)
