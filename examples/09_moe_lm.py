"""A small MoE language model: train with EP x FSDP2, save, load with another EP size, and decode.

The text is Python's own documentation, as Python ships it for help(); a token is a byte. Ranks form a mesh of replicas
by experts: a row of ranks divides the experts (EP), a column shards them (FSDP2), and all other parameters are sharded
over all ranks. The checkpoint has every expert once. A model without FSDP, with low-latency exchanges and with experts
divided among all ranks, loads it and continues a prompt; on GPUs each step replays a CUDA graph.

    python examples/09_moe_lm.py                          starts its own ranks
    torchrun --nproc-per-node 4 examples/09_moe_lm.py
    ... --ep 2 --load-ep 4 --steps 400 --blocks 2 --hidden 512 --ffn 1024 --experts 16     the defaults on 4 GPUs
"""

import argparse
import math
import pydoc_data.topics
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, rms_norm, scaled_dot_product_attention

from triton_ep import finalize_distributed, initialize_distributed
from triton_ep.distributed import current_heap, launched_by, run_ranks
from triton_ep.nn import MoE, clip_grad_norm_, finalize_exchanges, sharded_state_dict

VOCABULARY, BALANCE, PROMPT = 128, 0.01, "The following "
ON_CPU = {"steps": 24, "hidden": 64, "ffn": 64, "experts": 8, "heads": 2, "sequences": 2, "length": 32, "write": 8}
ON_GPU = {
    "steps": 400,
    "hidden": 512,
    "ffn": 1024,
    "experts": 16,
    "heads": 8,
    "sequences": 16,
    "length": 512,
    "write": 200,
}


def arguments(on_gpu: bool, world_size: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    defaults = {**(ON_GPU if on_gpu else ON_CPU), "blocks": 2, "topk": 2, "lr": 0.003}
    defaults |= {"ep": max(world_size // 2, 1), "load-ep": world_size, "payload": "mxfp8", "folder": ""}
    for name, default in defaults.items():  # sequences: per rank and step; payload: mxfp8 or bf16
        parser.add_argument(f"--{name}", type=type(default), default=default, help="(default %(default)s)")
    return parser.parse_args()


# --- the model ------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention, then experts, each with its residual."""

    def __init__(self, args: argparse.Namespace, **options):
        super().__init__()
        h, self.heads = args.hidden, args.heads
        self.qkv, self.proj = nn.Linear(h, 3 * h, bias=False), nn.Linear(h, h, bias=False)
        sizes = {"num_experts": args.experts, "topk": args.topk, "params_dtype": torch.float32}
        self.moe = MoE(h, args.ffn, **sizes, payload="mxfp8" if args.payload == "mxfp8" else None, **options)
        self.moe.router.aux_loss = True

    def forward(self, x: torch.Tensor, cache: torch.Tensor | None = None, place: torch.Tensor | None = None):
        """[B, S, H] float32; or, with a cache [2, B, heads, L, H / heads], one token [B, 1, H] at `place` [1]."""
        q, k, v = self.qkv(rms_norm(x, x.shape[-1:])).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if cache is None:
            y = scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            k, v = cache.index_copy_(3, place, torch.stack([k, v]))
            seen = torch.arange(k.shape[2], device=x.device) <= place
            y = scaled_dot_product_attention(q, k, v, attn_mask=seen[None])
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.moe(rms_norm(x, x.shape[-1:]).bfloat16()).float()


class Model(nn.Module):
    """Embeddings of bytes and positions, blocks, head."""

    def __init__(self, args: argparse.Namespace, **options):
        super().__init__()
        longest = max(args.length, len(PROMPT) + args.write)
        self.embed, self.places = nn.Embedding(VOCABULARY, args.hidden), nn.Embedding(longest, args.hidden)
        self.blocks = nn.ModuleList(Block(args, **options) for _ in range(args.blocks))
        self.head = nn.Linear(args.hidden, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor, caches: torch.Tensor | None = None, place: torch.Tensor | None = None):
        """Logits [B, S, V] of ids [B, S]; with caches, one per block, of one token [B, 1] at position `place` [1]."""
        places = torch.arange(ids.shape[1], device=ids.device) if place is None else place
        x = self.embed(ids) + self.places(places)
        for number, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[number], place)
        return self.head(rms_norm(x, x.shape[-1:]))

    def balance(self) -> torch.Tensor:
        """Mean auxiliary loss of the routers in the latest forward pass; 1 if all experts get equally many tokens."""
        return torch.stack([block.moe.last_aux for block in self.blocks]).mean()


def shard(model: Model, mesh) -> None:
    """Apply EP x FSDP2. All gradients are divided by the number of ranks: losses are means over a rank's tokens."""
    everyone = mesh["replicas", "experts"]._flatten("all")
    for block in model.blocks:
        experts = fully_shard(block.moe.experts, mesh=mesh["replicas"])
        experts.set_gradient_divide_factor(mesh.size())
        experts.set_force_sum_reduction_for_comms(True)  # divide outside the collective, for Gloo and meshes of 1
        fully_shard(block, mesh=everyone)
    fully_shard(model, mesh=everyone)


# --- training -------------------------------------------------------------------------------------------


def text() -> torch.Tensor:
    """Ids [n] of Python's documentation."""
    whole = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    return torch.tensor(list(whole.encode("ascii", "replace")))


def batch(ids: torch.Tensor, args: argparse.Namespace, seed: int) -> torch.Tensor:
    """[B, S + 1] ids: random pieces of the text."""
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(ids) - args.length - 1, (args.sequences, 1), generator=draw)
    return ids[starts + torch.arange(args.length + 1)].to(current_heap().device)


def loss_of(model: Model, ids: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def mean(loss: torch.Tensor) -> float:
    """Mean over all ranks."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def progress(step: int, steps: int, loss: float) -> None:
    """Print a bar on a terminal, a line per tenth of the steps elsewhere."""
    if sys.stderr.isatty():
        bar = "#" * (30 * step // steps)
        print(f"\r[{bar:30}] step {step} of {steps}, loss {loss:.3f} ", end="", file=sys.stderr, flush=True)
    elif step % max(steps // 10, 1) == 0 or step == steps:
        print(f"step {step} of {steps}, loss {loss:.3f}", flush=True)


def train(model: Model, ids: torch.Tensor, args: argparse.Namespace) -> list[float]:
    """Loss of every step, the mean over the tokens of all ranks. Collective."""
    rank, world_size, losses = dist.get_rank(), dist.get_world_size(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 5, 0.55 + 0.45 * math.cos(math.pi * step / args.steps))
    )
    for step in range(1, args.steps + 1):
        loss = loss_of(model, batch(ids, args, world_size * step + rank))
        (loss + BALANCE * model.balance()).backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        losses.append(mean(loss))
        if rank == 0:
            progress(step, args.steps, losses[-1])
    return losses


def draw(path: Path, losses: list[float]) -> str:
    """Write the picture; return its place, or the reason why none was written."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture: matplotlib is not installed (pip install matplotlib)"
    axes = Figure(figsize=(6, 4), layout="constrained").add_subplot(xlabel="step", ylabel="loss (nats per byte)")
    axes.plot(range(1, len(losses) + 1), losses)
    axes.figure.savefig(path, dpi=120)
    return f"picture: {path}"


# --- decoding -------------------------------------------------------------------------------------------


class Decoder:
    """Decodes one token of every sequence per step. On a GPU the step is a CUDA graph, captured at the second call."""

    def __init__(self, model: Model, args: argparse.Namespace, longest: int):
        device = current_heap().device
        self.model, self.graph = model, None
        shape = (args.blocks, 2, 1, args.heads, longest, args.hidden // args.heads)
        self.caches = torch.zeros(shape, device=device)
        self.ids, self.place = (torch.zeros(*size, dtype=torch.int64, device=device) for size in ((1, 1), (1,)))
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None

    @torch.no_grad()
    def __call__(self, token: int, place: int) -> torch.Tensor:
        """Logits [V] that follow a token at position `place`; collective."""
        self.ids.fill_(token)
        self.place.fill_(place)
        if self.graph is not None:
            self.graph.replay()
        elif self.stream is not None and place == 1:
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
                self.logits = self.model(self.ids, self.caches, self.place)
            self.graph.replay()
        else:
            self.logits = self.model(self.ids, self.caches, self.place)  # compiles, quantises the weights
        return self.logits[0, 0]


def write(model: Model, args: argparse.Namespace) -> tuple[str, torch.Tensor]:
    """Continue the prompt; return the text and the logits [n, V] after each prompt byte. Each rank decodes its own."""
    ids = list(PROMPT.encode())
    decode = Decoder(model, args, len(ids) + args.write)
    logits = []
    for place in range(len(ids) + args.write - 1):
        logits.append(decode(ids[place], place).clone())
        if place + 1 == len(ids):
            ids.append(int(logits[-1].argmax()))
    return bytes(ids).decode("ascii", "replace"), torch.stack(logits[: len(PROMPT)])


def main() -> None:
    rank, world_size = initialize_distributed()
    device = current_heap().device
    args, ids = arguments(device.type == "cuda", world_size), text()
    mesh = init_device_mesh(device.type, (world_size // args.ep, args.ep), mesh_dim_names=("replicas", "experts"))
    torch.manual_seed(0)  # on all ranks: same routers and attention, different experts
    training = {"max_tokens": args.sequences * args.length}
    model = Model(args, **training, group=mesh["experts"].get_group()).to(device)
    shard(model, mesh)
    unseen = batch(ids, args, rank)
    with torch.no_grad():
        untrained = mean(loss_of(model, unseen))
    losses = train(model, ids, args)

    folders = [args.folder or (tempfile.mkdtemp(prefix="moe_lm_") if rank == 0 else "")]
    dist.broadcast_object_list(folders)
    folder = Path(folders[0])
    checkpoint.save(sharded_state_dict(model), checkpoint_id=folder / "checkpoint")
    with torch.no_grad():
        before = mean(loss_of(model, unseen))

    loading = init_device_mesh(
        device.type, (world_size // args.load_ep, args.load_ep), mesh_dim_names=("same", "experts")
    )
    group = loading["experts"].get_group()
    loaded = Model(args, **training, group=group).to(device)
    checkpoint.load(sharded_state_dict(loaded), checkpoint_id=folder / "checkpoint")
    decoding = Model(args, max_tokens=1, low_latency=True, group=group).to(device)
    decoding.load_state_dict(loaded.state_dict())
    prompt = torch.tensor([list(PROMPT.encode())], device=device)
    with torch.no_grad():
        after = mean(loss_of(loaded, unseen))
        whole = loaded(prompt)[0]
    written, logits = write(decoding.eval(), args)
    error = float((logits - whole).norm() / whole.norm())
    finalize_exchanges()

    if rank == 0:
        print(f"\ntrained by {world_size} ranks with EP {args.ep}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        print(f"loss of other text {untrained:.3f} -> {before:.3f}; loaded with EP {args.load_ep}: {after:.3f}")
        print(f"decoded, {error:.1%} from the whole pass: {written!r}")
        print(draw(folder / "loss.png", losses), flush=True)
    assert before < untrained, "the loss does not fall"
    assert abs(after - before) < 0.01 * before, "the loaded model is another one"
    assert error < 0.1, "decoding gives other logits than the whole pass"
    finalize_distributed()


if __name__ == "__main__":
    run_ranks(main) if launched_by() == "none" else main()
