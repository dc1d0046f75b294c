"""Ways to do a low-latency dispatch and combine, in turns and with the same rows, each in a CUDA graph.

    python tests/bench/bench_low_latency.py --ranks 2 --tokens 1,8,32,128
    python tests/bench/bench_low_latency.py --ranks 2 --tokens 4 --hidden 64 --experts 8 --iters 2     # CPU, to try it

Every way must give the same bits, before and after it is timed. A row has microseconds per call in a graph of ten:
slowest rank of each replay, median over replays and turns. The wire time of bf16 rows assumes 340 GB/s.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ in ("__main__", "__mp_main__"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from tests.bench.sizes import sizes_parser
from triton_ep import distributed as ep_distributed
from triton_ep.bench.origins import coded_rows
from triton_ep.bench.providers import meet_by_collective
from triton_ep.bench.routing import uniform_idx
from triton_ep.bench.timing import Timer
from triton_ep.layer import EPAll2AllLayer
from triton_ep.runtime.launch import INTERPRETING
from triton_ep.runtime.plans import low_latency as plans
from triton_ep.runtime.plans.shape import Plan, Shape

PER_GRAPH = 10
TURNS = 3
COMBINE_TILES = {
    "sums of 2048": {"BLOCK_S": 2048},
    "tiles of 2048": {"BLOCK_H": 2048},
    "tiles of 512": {"BLOCK_H": 512},
}
"""Ways to combine: constexprs that differ from the plan's."""


class WrongResult(Exception):
    """A way gives another result than the first one."""


def _varied(changes: dict[str, int]) -> Callable[[Shape, int], Plan]:
    plan_of = plans.combine

    def combine(s: Shape, weights: int) -> Plan:
        plan = plan_of(s, weights)
        values = {**plan.constexprs, **changes}
        values |= {"PARTS": -(-s.hidden // values["BLOCK_S"]), "TILES": -(-s.hidden // values["BLOCK_H"])}
        return replace(plan, constexprs=values)

    return combine


class _Way:
    """A layer that exchanges in one way."""

    def __init__(self, args: argparse.Namespace, tokens: int, changes: dict[str, int]) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.layer = EPAll2AllLayer(
            dist.group.WORLD, tokens, args.hidden, args.topk, rank, args.experts, ranks, ranks,
            payload=None if args.payload == "bf16" else args.payload, low_latency=True,
            capacity=ranks * tokens * args.topk + args.experts // ranks * args.alignment, alignment=args.alignment,
        )  # fmt: skip
        self.device = self.layer.context.device
        self.x = coded_rows(rank, tokens, args.hidden, 0, self.device)
        self.idx = uniform_idx(rank, tokens, args.topk, args.experts, 0).to(self.device)
        generator = torch.Generator().manual_seed(rank)
        self.weights = torch.rand(self.idx.shape, generator=generator).to(self.device) if args.weights else None
        before, plans.combine = plans.combine, _varied(changes)
        try:
            self.recv_x, _, self.desc = self.dispatch()
            self.y = torch.randn(self.recv_x.shape, generator=torch.Generator().manual_seed(rank)).to(self.device)
            self.y = self.y.to(torch.bfloat16)
            self.combine()
            self.layer.check()
        finally:
            plans.combine = before
        self.first = self.out.clone()

    def dispatch(self) -> tuple[Any, ...]:
        return self.layer.dispatch(self.x, self.idx)

    def combine(self) -> None:
        # Of the eager dispatch: a captured one has not run yet when this call is captured.
        self.out = self.layer.combine(self.y, self.desc, self.weights)

    def pair(self) -> None:
        desc = self.dispatch()[2]
        self.out = self.layer.combine(self.y, desc, self.weights)


def _graph(call: Callable[[], None], device: torch.device) -> Callable[[int], object]:
    """Ten calls as one CUDA graph."""

    def ten(number: int = 0) -> None:
        for _ in range(PER_GRAPH):
            call()

    if device.type == "cpu":
        return ten
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ten()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        ten()
    return lambda number: graph.replay()


def _times(timer: Timer, call: Callable[[int], object]) -> list[float]:
    """Microseconds per call in each replay, slowest rank."""
    everyone: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, timer.times(call, lambda: meet_by_collective(timer.device)))
    return [max(times) / PER_GRAPH for times in zip(*everyone, strict=True)]


def run(args: argparse.Namespace) -> None:
    """Run on each rank."""
    rank, ranks = ep_distributed.initialize_distributed(timeout_s=300)
    ways: dict[str, dict[str, int]] = {"built in": {}}
    if not INTERPRETING:
        ways |= COMBINE_TILES
    for tokens in (int(text) for text in args.tokens.split(",")):
        made = {name: _Way(args, tokens, changes) for name, changes in ways.items()}
        first = next(iter(made.values()))
        for name, way in made.items():
            if not torch.equal(way.first, first.first):
                raise WrongResult(f"{name}: other bits than those of {next(iter(made))}")
        timer = Timer(first.device, args.iters, 3)
        calls = {
            (name, what): _graph(getattr(way, what), way.device)
            for name, way in made.items()
            for what in ("dispatch", "combine", "pair")
        }
        found: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
        for _ in range(TURNS):
            for key, call in calls.items():
                found[key] += _times(timer, call)
        for way in made.values():
            way.layer.check()
            if not torch.equal(way.out, first.first):
                raise WrongResult("a replay has other bits")
        owner = first.idx // (args.experts // ranks)
        remote = sum(int((owner == peer).any(1).sum()) for peer in range(ranks) if peer != rank)
        if rank == 0:
            print(f"# {tokens} tokens, {args.payload}, {ranks} ranks; bf16 rows on the wire "
                  f"{remote * args.hidden * 2 / 340e3:.1f} us")  # fmt: skip
            for name in made:
                columns = [f"{what} {statistics.median(found[name, what]):7.2f}"
                           for what in ("dispatch", "combine", "pair")]  # fmt: skip
                print(f"{name:<24s}{'   '.join(columns)}", flush=True)
        for way in made.values():
            way.layer.finalize()
    ep_distributed.finalize_distributed()


def main() -> None:
    """Start the ranks, unless torchrun or another launcher has started them."""
    parser = sizes_parser(__doc__, tokens="1,8,128")
    parser.add_argument("--alignment", type=int, default=1)
    parser.add_argument("--payload", choices=("bf16", "mxfp8"), default="bf16")
    parser.add_argument("--weights", action="store_true", help="combine with weights per token")
    parser.add_argument("--iters", type=int, default=30)
    args = parser.parse_args()
    if ep_distributed.launched_by() == "none":
        ep_distributed.run_ranks(run, args.ranks, args)
    else:
        run(args)


if __name__ == "__main__":
    main()
