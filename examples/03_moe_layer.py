"""A mixture-of-experts layer as a torch module, forward and backward in MXFP8, compared with a dense computation.

Rows are quantised once, by the sending kernel. They arrive as one MXTensor, which both first products of the
SwiGLU experts take as it is. In the backward pass gradients travel in MXFP8 as well: combine's backward
dispatches them, dispatch's backward combines. Printed: the signal-to-noise ratio, in dB, of the result and of
every gradient against the same layer computed densely by torch, without experts in parallel and without MXFP8.

    python examples/03_moe_layer.py                         starts its own ranks
    torchrun --nproc-per-node 4 examples/03_moe_layer.py
    mpirun -np 4 python examples/03_moe_layer.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import silu

from triton_ep import EPAll2AllLayer, autograd, finalize_distributed, initialize_distributed
from triton_ep.distributed import current_heap, launched_by, local_world_size, run_ranks
from triton_ep.pipeline import to_mxfp8_then_scaled_grouped_mm as grouped_mm

TOKENS, HIDDEN, FFN, TOPK, EXPERTS = 32, 128, 96, 2, 8
# Rounding a tensor to e4m3 leaves 31.5 dB of it. Six of them make up the noise of y (x and w1 in one factor, x and w3
# in the other, their product, w2): 31.5 - 10 log10(6) = 23.7 dB. Gradients pass one or two more.
LEAST_DB = {"y": 22, "dx": 21, "dw1": 21, "dw3": 21, "dw2": 21, "drouter": 21}


def route(router: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids [T, K] of the experts that `router` [E, H] likes best; weights of a token sum to 1."""
    weights, topk_idx = (x.float() @ router.t()).softmax(-1).topk(TOPK, -1)
    return weights / weights.sum(-1, keepdim=True), topk_idx


class MoELayer(nn.Module):
    """Top-k router and SwiGLU experts, of which this rank has `EXPERTS // world_size`.

    Arguments:
        router: [E, H] float32, the same on all ranks.
        w1, w3: [e, F, H] bf16. w2: [e, H, F] bf16. Experts of this rank.
    """

    def __init__(self, a2a: EPAll2AllLayer, router: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor, w2: torch.Tensor):
        super().__init__()
        self.a2a = a2a
        self.router = nn.Parameter(router)
        self.w1, self.w3, self.w2 = nn.Parameter(w1), nn.Parameter(w3), nn.Parameter(w2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] bf16 to [T, H] bf16. Collective, and so is its backward pass."""
        weights, topk_idx = route(self.router, x)
        rows, row_weights, desc = autograd.dispatch(self.a2a, x, topk_idx.int(), weights)
        ends = desc.expert_offsets[1:]  # on the device: the host does not wait for the sizes of the groups
        gate = grouped_mm(rows, self.w1.transpose(-2, -1), ends)  # rows: an MXTensor, quantised once for both
        up = grouped_mm(rows, self.w3.transpose(-2, -1), ends)
        out = grouped_mm(silu(gate) * up, self.w2.transpose(-2, -1), ends)
        return autograd.combine(self.a2a, out, desc, row_weights)


def dense(x: torch.Tensor, router: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """The same by torch alone, in float32: every expert on every token, with weight 0 where it was not chosen."""
    weights, topk_idx = route(router, x)
    share = torch.zeros(x.shape[0], EXPERTS, device=x.device).scatter(1, topk_idx, weights)
    x = x.float()
    out = torch.einsum("eth,enh->etn", silu(x @ w1.transpose(-2, -1)) * (x @ w3.transpose(-2, -1)), w2)
    return torch.einsum("te,eth->th", share, out)


def sqnr(exact: torch.Tensor, seen: torch.Tensor) -> float:
    """Signal-to-noise ratio in dB."""
    noise = (exact.double() - seen.double()).square().sum()
    return 10 * torch.log10(exact.double().square().sum() / noise).item()


def main() -> None:
    rank, world_size = initialize_distributed()
    device = current_heap().device

    def normal(seed: int, *shape: int, fan_in: int = 1) -> torch.Tensor:
        """The same numbers on every rank that asks."""
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / fan_in**0.5
        return values.to(device)

    router = normal(0, EXPERTS, HIDDEN, fan_in=HIDDEN)
    w1, w3 = (normal(seed, EXPERTS, FFN, HIDDEN, fan_in=HIDDEN).bfloat16() for seed in (1, 2))
    w2 = normal(3, EXPERTS, HIDDEN, FFN, fan_in=FFN).bfloat16()
    xs = [normal(10 + r, TOKENS, HIDDEN).bfloat16() for r in range(world_size)]  # of every rank, for the comparison
    grads = [normal(100 + r, TOKENS, HIDDEN).bfloat16() for r in range(world_size)]
    mine = slice(rank * EXPERTS // world_size, (rank + 1) * EXPERTS // world_size)

    sizes = (dist.group.WORLD, TOKENS, HIDDEN, TOPK, rank, EXPERTS, local_world_size(), world_size)
    with EPAll2AllLayer(*sizes, payload="mxfp8") as a2a:
        moe = MoELayer(a2a, router.clone(), w1[mine].clone(), w3[mine].clone(), w2[mine].clone())
        x = xs[rank].clone().requires_grad_()
        y = moe(x)
        y.backward(grads[rank])
        # Experts got the tokens of all ranks; the router is on every rank, and saw those of its own.
        dist.all_reduce(moe.router.grad)

    leaves = [t.float().requires_grad_() for t in (router, w1, w3, w2)]
    dense_xs = [t.float().requires_grad_() for t in xs]
    dense_ys = [dense(t, *leaves) for t in dense_xs]
    torch.autograd.backward(dense_ys, [g.float() for g in grads])
    seen_db = {
        "y": sqnr(dense_ys[rank], y),
        "dx": sqnr(dense_xs[rank].grad, x.grad),
        "drouter": sqnr(leaves[0].grad, moe.router.grad),
        "dw1": sqnr(leaves[1].grad[mine], moe.w1.grad),
        "dw3": sqnr(leaves[2].grad[mine], moe.w3.grad),
        "dw2": sqnr(leaves[3].grad[mine], moe.w2.grad),
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
    finalize_distributed()


if __name__ == "__main__":
    run_ranks(main) if launched_by() == "none" else main()
