"""A mixture-of-experts layer, `triton_ep.nn.MoE`, forward and backward in MXFP8, compared with a dense computation.

The kernel that sends a row quantises it, once, and tensor cores multiply it in FP8. In the backward pass gradients
travel in MXFP8 as well. Prints the signal-to-noise ratio, in dB, of the result and of every gradient, against the same
layer computed densely by torch, without expert parallelism and without MXFP8.

    python examples/03_moe_layer.py                         starts its own ranks
    torchrun --nproc-per-node 4 examples/03_moe_layer.py
    mpirun -np 4 python examples/03_moe_layer.py
"""

import torch
import torch.distributed as dist
from torch.nn.functional import silu

from triton_ep import finalize_distributed, initialize_distributed
from triton_ep.distributed import current_heap, launched_by, run_ranks
from triton_ep.nn import MoE, finalize_exchanges

TOKENS, HIDDEN, FFN, TOPK, EXPERTS = 32, 128, 96, 2, 8
# Rounding a tensor to e4m3 leaves 31.5 dB. Six roundings make up the noise of y (x and w1 in one factor, x and w3 in
# the other, their product, w2): 31.5 - 10 log10(6) = 23.7 dB. Gradients pass one or two more.
LEAST_DB = {"y": 22, "dx": 21, "dw13": 21, "dw2": 21, "drouter": 21}


def dense(x: torch.Tensor, router: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """The layer in plain torch, in float32: every expert on every token, with weight 0 unless chosen."""
    x = x.float()
    scores, topk_idx = (x @ router.t()).softmax(-1).topk(TOPK, -1)
    weights = scores / scores.sum(-1, keepdim=True)
    share = torch.zeros(x.shape[0], EXPERTS, device=x.device).scatter(1, topk_idx, weights)
    gate, up = (x @ w13.transpose(-2, -1)).chunk(2, -1)
    return torch.einsum("te,eth->th", share, (silu(gate) * up) @ w2.transpose(-2, -1))


def sqnr(exact: torch.Tensor, seen: torch.Tensor) -> float:
    """Signal-to-noise ratio in dB."""
    noise = (exact.double() - seen.double()).square().sum()
    return 10 * torch.log10(exact.double().square().sum() / noise).item()


def of_all_experts(weight: torch.Tensor) -> torch.Tensor:
    """All-gather of the [e, ...] of every rank, as [E, ...] float32."""
    parts = [torch.empty_like(weight, dtype=torch.float32) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, weight.detach().float())
    return torch.cat(parts)


def main() -> None:
    rank, world_size = initialize_distributed()
    device = current_heap().device

    def normal(seed: int) -> torch.Tensor:
        """Random rows [T, H], the same on every rank."""
        return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)

    torch.manual_seed(0)  # with one seed, ranks draw the same router, and each its own experts
    moe = MoE(HIDDEN, FFN, num_experts=EXPERTS, topk=TOPK, max_tokens=TOKENS, payload="mxfp8")
    xs = [normal(10 + r) for r in range(world_size)]  # the inputs of all ranks, for the comparison
    grads = [normal(100 + r) for r in range(world_size)]

    x = xs[rank].clone().requires_grad_()
    y = moe(x)
    y.backward(grads[rank])
    # Experts saw the tokens of all ranks. The router is replicated and saw only this rank's tokens.
    dist.all_reduce(moe.router.weight.grad)

    experts = moe.experts
    weights = [moe.router.weight.detach().clone(), of_all_experts(experts.w13), of_all_experts(experts.w2)]
    leaves = [weight.requires_grad_() for weight in weights]
    dense_xs = [t.float().requires_grad_() for t in xs]
    dense_ys = [dense(t, *leaves) for t in dense_xs]
    torch.autograd.backward(dense_ys, [g.float() for g in grads])
    mine = slice(rank * EXPERTS // world_size, (rank + 1) * EXPERTS // world_size)
    seen_db = {
        "y": sqnr(dense_ys[rank], y),
        "dx": sqnr(dense_xs[rank].grad, x.grad),
        "drouter": sqnr(leaves[0].grad, moe.router.weight.grad),
        "dw13": sqnr(leaves[1].grad[mine], experts.w13.grad),
        "dw2": sqnr(leaves[2].grad[mine], experts.w2.grad),
    }

    table = [None] * world_size
    dist.all_gather_object(table, seen_db)
    if rank == 0:
        print(f"rank 0 of {world_size}: dB against the dense layer\n" + "  rank" + "".join(f"{n:>9}" for n in LEAST_DB))
        for peer, row in enumerate(table):
            print(f"{peer:>6}" + "".join(f"{row[name]:9.1f}" for name in LEAST_DB))
        print(" least" + "".join(f"{least:9}" for least in LEAST_DB.values()), flush=True)
    for name, least in LEAST_DB.items():
        assert seen_db[name] >= least, f"{name} has {seen_db[name]:.1f} dB, at least {least} are expected"
    finalize_exchanges()
    finalize_distributed()


if __name__ == "__main__":
    run_ranks(main) if launched_by() == "none" else main()
