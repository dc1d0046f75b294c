"""A small transformer block with experts, trained in MXFP8 on several ranks and, to compare, densely in bf16 on one.

Both runs start with the same weights and see the tokens of all ranks: sequences in which every token determines
the next one. Attention and router are on every rank, their gradients are summed over ranks; experts are sharded,
and their gradients are whole where they are. The losses are printed, drawn, and must be close, and fall.

    python examples/04_train_step.py                         starts its own ranks
    torchrun --nproc-per-node 4 examples/04_train_step.py
    mpirun -np 4 python examples/04_train_step.py
    ... --hidden 1024 --ffn 1024 --sequences 8 --length 256 --experts 32 --topk 4    on GPUs
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, rms_norm, scaled_dot_product_attention, silu

from triton_ep import EPAll2AllLayer, autograd, finalize_distributed, initialize_distributed
from triton_ep.distributed import current_heap, launched_by, local_world_size, run_ranks
from triton_ep.pipeline import to_mxfp8_then_scaled_grouped_mm as grouped_mm

VOCABULARY, HEADS = 64, 4


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"steps": 50, "sequences": 1, "length": 16, "hidden": 64, "ffn": 64, "experts": 8, "topk": 2}
    for name, default in (sizes | {"lr": 0.002, "out": "train_step.png"}).items():  # sequences: per rank and step
        parser.add_argument(f"--{name}", type=type(default), default=default, help="(default %(default)s)")
    return parser.parse_args()


def bf16_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A bf16 product with sums in float32, spelled out because CPUs differ in what they make of bf16."""
    return (a.bfloat16().float() @ b.bfloat16().float()).bfloat16()


class Block(nn.Module):
    """Embedding, attention, experts, head; float32 weights, products in bf16 or, of experts in parallel, MXFP8."""

    def __init__(self, args: argparse.Namespace, mine: slice, a2a: EPAll2AllLayer | None):
        super().__init__()
        self.a2a, self.topk = a2a, args.topk
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

        h, f, e = args.hidden, args.ffn, args.experts
        self.replicated = nn.ParameterDict(
            {"embed": weight(VOCABULARY, h) * h**0.5, "qkv": weight(3 * h, h), "proj": weight(h, h)}
            | {"router": weight(e, h), "head": weight(VOCABULARY, h)}
        )
        self.w13 = nn.Parameter(weight(e, 2 * f, h)[mine].clone())  # gate and up in one: one product for both
        self.w2 = nn.Parameter(weight(e, h, f)[mine].clone())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, S, V] float32 of ids [B, S]."""
        p = self.replicated
        x = p["embed"][ids]
        x = x + bf16_mm(self.attention(rms_norm(x, x.shape[-1:])), p["proj"].t())
        x = x + self.experts(rms_norm(x, x.shape[-1:]).flatten(0, 1)).view(x.shape)
        return bf16_mm(rms_norm(x, x.shape[-1:]), p["head"].t()).float()

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = bf16_mm(x, self.replicated["qkv"].t()).float().unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def experts(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] float32 to [T, H] bf16, summed over the experts of each token."""
        logits, topk_idx = (x @ self.replicated["router"].t()).topk(self.topk, -1)
        weights = logits.softmax(-1)
        if self.a2a is None:
            gate, up = bf16_mm(x, self.w13.transpose(-2, -1)).chunk(2, -1)
            out = bf16_mm(silu(gate) * up, self.w2.transpose(-2, -1))  # [E, T, H], every expert on every token
            share = torch.zeros(x.shape[0], len(self.w2), device=x.device).scatter(1, topk_idx, weights)
            return torch.einsum("te,eth->th", share, out.float()).bfloat16()
        rows, row_weights, desc = autograd.dispatch(self.a2a, x.bfloat16(), topk_idx.int(), weights)
        ends = desc.expert_offsets[1:]
        gate, up = grouped_mm(rows, self.w13.bfloat16().transpose(-2, -1), ends).chunk(2, -1)
        out = grouped_mm(silu(gate) * up, self.w2.bfloat16().transpose(-2, -1), ends)
        return autograd.combine(self.a2a, out, desc, row_weights)


def sequences(args: argparse.Namespace, step: int, ranks: range) -> torch.Tensor:
    """[B, S + 1] ids of some ranks: a random first token, then each the successor of the one before."""
    successor = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(1))
    generators = [torch.Generator().manual_seed(1000 * step + rank) for rank in ranks]
    ids = [torch.cat([torch.randint(VOCABULARY, (args.sequences,), generator=g) for g in generators])]
    for _ in range(args.length):
        ids.append(successor[ids[-1]])
    return torch.stack(ids, 1)


def train(args: argparse.Namespace, model: Block, ranks: range, world_size: int) -> torch.Tensor:
    """Loss of every step, the mean over the tokens of all ranks; `ranks` are those whose tokens come here."""
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    num_tokens = world_size * args.sequences * args.length  # of all ranks, so that gradients are summed, not averaged
    losses = torch.zeros(args.steps, device=model.w2.device)
    for step in range(args.steps):
        ids = sequences(args, step, ranks).to(losses.device)
        loss = cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / num_tokens
        losses[step] = loss.detach()
        optimizer.zero_grad()
        loss.backward()
        if model.a2a is not None:
            for shared in (losses[step], *(weight.grad for weight in model.replicated.values())):
                dist.all_reduce(shared)
        optimizer.step()
    return losses.cpu()


def draw(path: str, losses: dict[str, torch.Tensor]) -> str:
    """Write the picture, and say where it is or why it is not."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture: matplotlib is not installed (pip install matplotlib)"
    axes = Figure(figsize=(6, 4), layout="constrained").add_subplot(xlabel="step", ylabel="loss")
    for (name, values), style in zip(losses.items(), ("-", "--"), strict=True):
        axes.plot(range(1, len(values) + 1), values, style, label=name)
    axes.legend()
    axes.figure.savefig(path, dpi=120)
    return f"picture: {path}"


def main() -> None:
    args = arguments()
    rank, world_size = initialize_distributed()
    device = current_heap().device
    max_tokens, per_rank = args.sequences * args.length, args.experts // world_size
    sizes = (dist.group.WORLD, max_tokens, args.hidden, args.topk, rank, args.experts, local_world_size(), world_size)
    with EPAll2AllLayer(*sizes, payload="mxfp8") as a2a:
        model = Block(args, slice(rank * per_rank, (rank + 1) * per_rank), a2a).to(device)
        parallel = train(args, model, range(rank, rank + 1), world_size)
    if rank == 0:
        dense = train(args, Block(args, slice(None), None).to(device), range(world_size), world_size)
        print(f"rank 0 of {world_size}: loss of {args.steps} steps\n step     MXFP8  dense bf16")
        for step in sorted({0, *range(9, args.steps, 10), args.steps - 1}):
            print(f"{step + 1:5}{parallel[step]:10.4f}{dense[step]:12.4f}")
        print(draw(args.out, {f"MXFP8, {world_size} ranks": parallel, "bf16, dense": dense}), flush=True)
        assert parallel[-1] < 0.9 * parallel[0], "the loss does not fall"
        assert ((parallel - dense).abs() <= 0.01 + 0.1 * dense).all(), "the losses are not close"
    finalize_distributed()


if __name__ == "__main__":
    run_ranks(main) if launched_by() == "none" else main()
