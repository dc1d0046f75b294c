"""A small transformer with MoE layers, trained in MXFP8 and, from several seeds, in bf16: are the losses the same?

The task is a Markov chain: every token has four possible successors with fixed probabilities. No model gets below the
chain's entropy, and a good one comes close to it. All runs see the same tokens. Attention and routers are replicated,
and their gradients summed over ranks; experts are sharded, and each rank has the whole gradients of its experts. All
MoE layers share one exchange. Writes losses to a CSV file and a picture. Prints the mean loss of the last sixth of the
steps, and whether the mean in MXFP8 is within 1 % of the mean in bf16 or inside the spread of the bf16 seeds.

    python examples/04_train_step.py                         starts its own ranks
    torchrun --nproc-per-node 4 examples/04_train_step.py
    mpirun -np 4 python examples/04_train_step.py
    ... --steps 300 --seeds 3 --hidden 512 --ffn 512 --sequences 8 --length 256 --experts 16     the defaults on GPUs
"""

import argparse
import csv
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, rms_norm, scaled_dot_product_attention

from triton_ep import finalize_distributed, initialize_distributed
from triton_ep.distributed import current_heap, launched_by, run_ranks
from triton_ep.nn import MoE, clip_grad_norm_, finalize_exchanges

VOCABULARY, HEADS, BALANCE = 64, 4, 0.01
SUCCESSORS = torch.tensor([0.5, 0.25, 0.15, 0.1])
ENTROPY = float(-(SUCCESSORS * SUCCESSORS.log()).sum())
ON_CPU = {"steps": 30, "seeds": 1, "blocks": 1, "sequences": 2, "length": 16, "hidden": 64, "ffn": 64, "experts": 8}
ON_GPU = {
    "steps": 300,
    "seeds": 3,
    "blocks": 2,
    "sequences": 8,
    "length": 256,
    "hidden": 512,
    "ffn": 512,
    "experts": 16,
}


def arguments(on_gpu: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    defaults = {**(ON_GPU if on_gpu else ON_CPU), "topk": 2, "lr": 0.003, "csv": "", "out": "train_step.png"}
    for name, default in defaults.items():  # sequences: per rank and step
        parser.add_argument(f"--{name}", type=type(default), default=default, help="(default %(default)s)")
    return parser.parse_args()


class Block(nn.Module):
    """Attention, then experts, each with its residual."""

    def __init__(self, args: argparse.Namespace, payload: str | None):
        super().__init__()
        h = args.hidden
        self.qkv, self.proj = nn.Linear(h, 3 * h, bias=False), nn.Linear(h, h, bias=False)
        sizes = {"num_experts": args.experts, "topk": args.topk, "max_tokens": args.sequences * args.length}
        self.moe = MoE(h, args.ffn, **sizes, payload=payload)
        self.moe.router.aux_loss = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, H] float32."""
        q, k, v = self.qkv(rms_norm(x, x.shape[-1:])).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.moe(rms_norm(x, x.shape[-1:]).bfloat16()).float()


class Model(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, args: argparse.Namespace, payload: str | None):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, args.hidden), nn.Linear(args.hidden, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(Block(args, payload) for _ in range(args.blocks))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, S, V] of ids [B, S]."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(rms_norm(x, x.shape[-1:]))

    def balance(self) -> torch.Tensor:
        """Mean auxiliary loss of the routers in the latest forward pass; 1 if all experts get equally many tokens."""
        return torch.stack([block.moe.last_aux for block in self.blocks]).mean()


class MasterAdam:
    """Adam over float32 copies of the parameters: bf16 parameters are too coarse for small updates.

    The learning rate rises over the first steps and falls to zero by the last, so the last losses separate the runs.
    """

    def __init__(self, model: Model, lr: float, steps: int):
        self.parameters = list(model.parameters())
        self.masters = [p.detach().float().clone() for p in self.parameters]
        self.adam = torch.optim.Adam(self.masters, lr=lr)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.adam, lambda step: min((step + 1) / 10, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        )

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters from their gradients, and clear the gradients."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        self.adam.step()
        self.schedule.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)


def sequences(args: argparse.Namespace, step: int, rank: int) -> torch.Tensor:
    """[B, S + 1] ids: a random first token, then walks along the chain."""
    chain = torch.Generator().manual_seed(1)
    successor = torch.stack([torch.randperm(VOCABULARY, generator=chain)[:4] for _ in range(VOCABULARY)])
    draw = torch.Generator().manual_seed(1000 * step + rank)
    ids = [torch.randint(VOCABULARY, (args.sequences,), generator=draw)]
    for _ in range(args.length):
        which = torch.multinomial(SUCCESSORS, args.sequences, replacement=True, generator=draw)
        ids.append(successor[ids[-1], which])
    return torch.stack(ids, 1)


def train(args: argparse.Namespace, payload: str | None, seed: int) -> list[float]:
    """Loss of every step, the mean over the tokens of all ranks. Collective."""
    rank, world_size, device = dist.get_rank(), dist.get_world_size(), current_heap().device
    torch.manual_seed(seed)  # on all ranks: same routers and attention, different experts
    model = Model(args, payload).to(device)
    optimizer = MasterAdam(model, args.lr, args.steps)
    sharded = {id(p) for block in model.blocks for p in block.moe.experts.parameters()}
    num_tokens = world_size * args.sequences * args.length  # over all ranks, so gradients are summed, not averaged
    losses = torch.zeros(args.steps, device=device)
    for step in range(args.steps):
        ids = sequences(args, step, rank).to(device)
        loss = cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / num_tokens
        losses[step] = loss.detach()
        (loss + BALANCE / world_size * model.balance()).backward()
        for parameter in model.parameters():
            if id(parameter) not in sharded:
                dist.all_reduce(parameter.grad)
        clip_grad_norm_(model, 1.0)
        optimizer.step()
    dist.all_reduce(losses)
    return losses.tolist()


def store(path: str, runs: dict[str, list[float]]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *runs])
        writer.writerows((step, *losses) for step, losses in enumerate(zip(*runs.values(), strict=True), 1))


def draw(path: str, runs: dict[str, list[float]]) -> str:
    """Write the picture; return its place, or the reason why none was written."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture: matplotlib is not installed (pip install matplotlib)"
    axes = Figure(figsize=(6, 4), layout="constrained").add_subplot(xlabel="step", ylabel="loss")
    for name, losses in runs.items():
        axes.plot(range(1, len(losses) + 1), losses, label=name, lw=1.5 if name == "MXFP8" else 0.8)
    axes.axhline(ENTROPY, ls=":", color="gray", label="entropy of the chain")
    axes.legend()
    axes.figure.savefig(path, dpi=120)
    return f"picture: {path}"


def main() -> None:
    rank, world_size = initialize_distributed()
    args = arguments(on_gpu=current_heap().device.type == "cuda")
    runs = {f"bf16 seed {seed}": train(args, None, seed) for seed in range(args.seeds)}
    runs["MXFP8"] = train(args, "mxfp8", 0)
    finalize_exchanges()
    if rank == 0:
        print(f"rank 0 of {world_size}: loss of {args.steps} steps, entropy {ENTROPY:.4f}")
        print(" step" + "".join(f"{name:>15}" for name in runs))
        for step in sorted({0, *range(9, args.steps, max(args.steps // 10, 1)), args.steps - 1}):
            print(f"{step + 1:5}" + "".join(f"{losses[step]:15.4f}" for losses in runs.values()))
        last = max(args.steps // 6, 1)
        ends = {name: sum(losses[-last:]) / last for name, losses in runs.items()}
        print(f"last {last}" + "".join(f"{end:15.4f}" for end in ends.values()))
        mx = ends.pop("MXFP8")
        mean = sum(ends.values()) / len(ends)
        good = abs(mx / mean - 1) <= 0.01 or min(ends.values()) <= mx <= max(ends.values())
        print(f"MXFP8 is {mx / mean - 1:+.2%} from the mean of bf16, whose seeds span {min(ends.values()):.4f} to")
        print(f"{max(ends.values()):.4f}: {'as good' if good else 'NOT as good'}")
        if args.csv:
            store(args.csv, runs)
        print(draw(args.out, runs), flush=True)
        assert all(losses[-1] < losses[0] for losses in runs.values()), "a loss does not fall"
        assert good, "MXFP8 trains worse, or better, than bf16"
    finalize_distributed()


if __name__ == "__main__":
    run_ranks(main) if launched_by() == "none" else main()
