"""The layer of `triton-ep demo` as a torch module, `triton_ep.nn.MoE`: result and gradient beside the dense one's."""

import torch

from triton_ep.cli.demo_moe import Settings, expert_ffn, make_moe, route, tokens_of
from triton_ep.cli.demo_report import MODULE_PARTS, Noise
from triton_ep.nn import MoE, finalize_exchanges


def run_module(s: Settings, rank: int, device: torch.device) -> dict[str, dict[str, Noise]]:
    """By payload and part, what this rank's tokens and their gradients differ by. Collective."""
    moe = make_moe(s)
    x = tokens_of(s, rank)
    topk_idx, weights = route(x, moe, s.topk)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(s.seed + 1000 + rank)).bfloat16()

    leaf = x.float().requires_grad_()
    dense = torch.zeros_like(leaf)
    for expert in range(s.experts):
        weight = torch.where(topk_idx == expert, weights, 0.0).sum(-1, keepdim=True)
        dense = dense + weight * expert_ffn(leaf, moe.up[expert], moe.down[expert])
    dense.backward(grad.float())
    assert leaf.grad is not None
    exact = dict(zip(MODULE_PARTS, (dense.detach(), leaf.grad), strict=True))

    found = {}
    first, count = rank * s.experts // s.num_ranks, s.experts // s.num_ranks
    for name, payload in (("bf16", None), ("mxfp8", "mxfp8")):
        module = MoE(
            s.hidden,
            s.ffn,
            num_experts=s.experts,
            topk=s.topk,
            max_tokens=s.tokens,
            payload=payload,
            router=False,
            gated=False,  # act(x w1) w2, as the layer above
            local_world_size=s.ranks_per_node,
        )
        with torch.no_grad():
            module.experts.w13.copy_(moe.up[first : first + count].transpose(1, 2))
            module.experts.w2.copy_(moe.down[first : first + count].transpose(1, 2))
        tokens = x.to(device, copy=True).requires_grad_()
        y: torch.Tensor = module(tokens, topk_idx=topk_idx.to(device), topk_weights=weights.to(device))
        y.backward(grad.to(device))
        assert tokens.grad is not None
        seen = dict(zip(MODULE_PARTS, (y.detach(), tokens.grad), strict=True))
        found[name] = {
            part: Noise(
                signal=exact[part].square().sum().item(),
                noise=(exact[part] - seen[part].cpu().float()).square().sum().item(),
            )
            for part in MODULE_PARTS
        }
    finalize_exchanges()
    return found
