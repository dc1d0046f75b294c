"""The small MoE layer of `triton-ep demo`: one rank's part over EPAll2AllLayer and as `triton_ep.nn.MoE`, and the
whole layer computed densely."""

import pickle
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist

from triton_ep import (
    EPAll2AllLayer,
    EPAllToAllLayoutDesc,
    MXTensor,
    finalize_distributed,
    initialize_distributed,
)
from triton_ep.cli.demo_report import MODULE_PARTS, Comparison, Noise, PayloadResult, RankResult, Traffic
from triton_ep.nn import MoE, finalize_exchanges

# One rounding to bfloat16 (8 significant bits) errs by up to 2**-8 of the value. Two values are rounded, the expert
# outputs and the result; partial sums between nodes are float32. The remaining 0.1 covers float32 arithmetic.
BF16_LIMIT = 2.1 * 2.0**-8
# Errors of smaller elements are relative to this: float32 sums in another order differ by about 1e-6.
SMALL = 1e-3


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes of the demo. Rank r has `tokens - r` tokens, to show that ranks may have different numbers."""

    num_ranks: int
    ranks_per_node: int
    tokens: int
    hidden: int
    ffn: int
    experts: int
    topk: int
    seed: int


@dataclass(frozen=True)
class Moe:
    """Weights of the layer: router [H, E] float32, up [E, H, F] and down [E, F, H] bfloat16."""

    router: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


def make_moe(s: Settings) -> Moe:
    """Weights of the layer on the CPU, the same on every rank."""
    generator = torch.Generator().manual_seed(s.seed)
    router = torch.randn(s.hidden, s.experts, generator=generator) / s.hidden**0.5
    up = torch.randn(s.experts, s.hidden, s.ffn, generator=generator) / s.hidden**0.5
    down = torch.randn(s.experts, s.ffn, s.hidden, generator=generator) / s.ffn**0.5
    return Moe(router, up.bfloat16(), down.bfloat16())


def tokens_of(s: Settings, rank: int) -> torch.Tensor:
    """[T, H] bfloat16 tokens of a rank, on the CPU."""
    generator = torch.Generator().manual_seed(s.seed + 1 + rank)
    return torch.randn(max(s.tokens - rank, 0), s.hidden, generator=generator).bfloat16()


def route(x: torch.Tensor, moe: Moe, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k experts [T, K] int32 and their normalised weights [T, K] float32.

    A fixed bias makes some experts popular, so that the picture and the table show a skewed load.
    """
    bias = torch.linspace(2.0, 0.0, moe.router.shape[1], device=x.device)
    weights, idx = torch.softmax(x.float() @ moe.router + bias, dim=-1).topk(topk, dim=-1)
    return idx.int(), weights / weights.sum(-1, keepdim=True)


def expert_ffn(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """One expert: [R, H] to [R, H] float32."""
    return torch.nn.functional.silu(x.float() @ up.float()) @ down.float()


STEPS = (
    "dispatch, experts and combine in bf16",
    "the same in MXFP8",
    "the torch module, forward and backward, in bf16",
    "the same in MXFP8",
)
"""The steps of `run_rank`, in order."""


def _begin(rank: int, step: int) -> None:
    """Print the progress of the demo."""
    if rank == 0:
        print(f"[{step + 1}/{len(STEPS)}] {STEPS[step]}", flush=True)


def run_rank(s: Settings) -> RankResult:
    """Run one rank of the layer, with both payloads. The group and the heap must have been started."""
    rank = dist.get_rank()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    moe = make_moe(s)
    x = tokens_of(s, rank)
    topk_idx, weights = route(x, moe, s.topk)  # on the CPU, so that the comparison gets the same routing
    mine = range(rank * s.experts // s.num_ranks, (rank + 1) * s.experts // s.num_ranks)
    up, down = moe.up[mine.start : mine.stop].to(device), moe.down[mine.start : mine.stop].to(device)
    received = 0
    arrived: list[torch.Tensor] = []  # rows, the bf16 ones first
    results = []
    for step, payload in enumerate((None, "mxfp8")):
        _begin(rank, step)
        layer = EPAll2AllLayer(
            dist.group.WORLD,
            max_tokens=s.tokens,
            hidden=s.hidden,
            topk=s.topk,
            rank=rank,
            num_tot_experts=s.experts,
            local_world_size=s.ranks_per_node,
            world_size=s.num_ranks,
            payload=payload,
        )
        with layer:
            recv_x, recv_weights, layout_desc = layer.dispatch(x.to(device), topk_idx.to(device), weights.to(device))
            rows = recv_x.dequantize() if isinstance(recv_x, MXTensor) else recv_x
            expert_out = torch.zeros_like(rows)
            starts = layout_desc.expert_offsets.tolist()
            for local, (start, stop) in enumerate(pairwise(starts)):
                expert_out[start:stop] = expert_ffn(rows[start:stop], up[local], down[local]).to(rows.dtype)
            combined = layer.combine(expert_out, layout_desc, weights=recv_weights)
            received = int(layout_desc.num_recv_tokens_per_expert.sum())
            arrived.append(rows.double())
            results.append(
                PayloadResult(
                    row_bytes=layer.context.rows.own.wire_bytes,
                    traffic=measure_traffic(s, rank, layout_desc),
                    signal=arrived[0].square().sum().item(),
                    noise=(arrived[-1] - arrived[0]).square().sum().item(),
                    combined=combined.cpu(),
                )
            )
    module = run_module(s, rank, device)
    return RankResult(topk_idx=topk_idx, received=received, bf16=results[0], mxfp8=results[1], module=module)


def run_module(s: Settings, rank: int, device: torch.device) -> dict[str, dict[str, Noise]]:
    """Run the layer as a torch module; returns the error of result and gradient, by payload and part. Collective."""
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
    for step, (name, payload) in enumerate((("bf16", None), ("mxfp8", "mxfp8")), 2):
        _begin(rank, step)
        module = MoE(
            s.hidden,
            s.ffn,
            num_experts=s.experts,
            topk=s.topk,
            max_tokens=s.tokens,
            payload=payload,
            router=False,
            gated=False,  # act(x w1) w2, like the layer above
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


def measure_traffic(s: Settings, rank: int, desc: EPAllToAllLayoutDesc) -> Traffic:
    """Rows that a dispatch sent for and through this rank, from the tables that its kernels wrote."""
    node = rank // s.ranks_per_node
    peers = [r for r in range(node * s.ranks_per_node, (node + 1) * s.ranks_per_node) if r != rank]

    def rows_to_peers(owner: torch.Tensor, stage_row: torch.Tensor) -> int:
        return int((torch.isin(owner.cpu(), torch.tensor(peers)) & (stage_row.cpu() >= 0)).sum())

    assert desc.owner_ranks is not None and desc.stage_row is not None, "only low latency leaves them out"
    assert desc.tokens_per_node is not None and desc.tokens_from_node is not None
    forwarded = 0
    if desc.forward is not None:
        for other, count in enumerate(desc.tokens_from_node.tolist()):
            ranks = desc.forward[0, other, :count].cpu()
            if other != node:
                forwarded += sum(int((ranks == peer).any(1).sum()) for peer in peers)
    return Traffic(
        local=rows_to_peers(desc.owner_ranks, desc.stage_row),
        network=sum(count for other, count in enumerate(desc.tokens_per_node.tolist()) if other != node),
        forwarded=forwarded,
        arrived=int(desc.arrivals_of_rank[rank]),
    )


def compare(s: Settings, rank: int, result: PayloadResult, payload: str | None = None) -> Comparison:
    """Distance of a rank's result from the same layer computed densely, in one process, in float32.

    With payload="mxfp8" all ranks receive the same quantised row of a token: the result must equal the dense result of
    the quantised tokens, up to the same rounding. The comparison with unquantised tokens shows the quantisation error.
    """
    moe = make_moe(s)
    x = tokens_of(s, rank)
    topk_idx, weights = route(x, moe, s.topk)
    travelled = x if payload is None else MXTensor.to_mx(x).dequantize()
    plain, dense, scale = (torch.zeros(x.shape, dtype=torch.float32) for _ in range(3))
    for expert in range(s.experts):
        weight = torch.where(topk_idx == expert, weights, 0.0).sum(-1, keepdim=True)
        y = weight * expert_ffn(travelled, moe.up[expert], moe.down[expert])
        dense += y
        scale += y.abs()
        plain += weight * expert_ffn(x, moe.up[expert], moe.down[expert])
    combined = result.combined.float()
    signal, noise = plain.square().sum().item(), (combined - plain).square().sum().item()
    error = (combined - dense).abs()
    if error.numel() == 0:
        return Comparison(0.0, 0.0, BF16_LIMIT, signal, noise)
    return Comparison(error.max().item(), (error / scale.clamp_min(SMALL)).max().item(), BF16_LIMIT, signal, noise)


def run_and_save(s: Settings, folder: str) -> None:
    """Main function of each demo process: start, run the layer, write the result to `folder`, stop."""
    rank, _ = initialize_distributed(local_world_size=s.ranks_per_node)
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(run_rank(s)))
    finalize_distributed()


def load(folder: str, rank: int) -> RankResult:
    """Load the result that a rank's `run_and_save` wrote."""
    result: RankResult = pickle.loads(Path(folder, f"{rank}.pickle").read_bytes())
    return result
