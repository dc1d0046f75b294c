"""Dispatch and combine of a static layer with other tiles and grids, in turns, each in a CUDA graph.

    python tests/bench/bench_exchange_tiles.py --ranks 2 --op dispatch
    python tests/bench/bench_exchange_tiles.py --ranks 2 --op dispatch --payload mxfp8
    python tests/bench/bench_exchange_tiles.py --ranks 2 --op compact
    python tests/bench/bench_exchange_tiles.py --ranks 2 --op combine
    python tests/bench/bench_exchange_tiles.py --ranks 4 --op combine --nodes 2
    python tests/bench/bench_exchange_tiles.py --ranks 2 --op combine --like-ranks 4
    python tests/bench/bench_exchange_tiles.py --ranks 2 --op combine --tokens 8 --hidden 64 --experts 8   # on a CPU

With `--like-ranks 4` each of two ranks sends, receives and lays out as many rows as one of 4 ranks would: three tokens
take the place of one, each with the experts of one other rank, and one of the three with this rank's, too.

The built-in variant comes first; every other way must give the same bits. A row has microseconds per call: slowest rank
of each replay, median over replays and turns.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
from triton_ep.ops import combine as combine_ops
from triton_ep.ops import tuning
from triton_ep.runtime.launch import INTERPRETING
from triton_ep.runtime.plans import compact, exchange
from triton_ep.runtime.plans.shape import Plan, Shape
from triton_ep.runtime.tuned.table import KernelChoice, Key, TunedEntry

TURNS = 3


@dataclass(frozen=True)
class Way:
    """Differences from the built-in variant.

    Attributes:
        num_sm: programs of the exchange.
        push, expand, reduce, pull: (rows, warps) of these kernels.
        push_tile: (warps, words, rows, registers) of the push.
        bulk: whether rows are pushed, and laid out, by bulk copies.
        sending: programs that push rows from all multiprocessors.
        beside: programs that lay rows out per multiprocessor, next to these.
        slots: rows on their way per program that copies in bulk.
        registers: registers per thread of the expand kernel.
        block: words of its tile.
        expanding: its programs per free multiprocessor.
        layers: layers that may dispatch at the same time; 1 leaves room for more waiting programs.
        reducing: programs that sum rows concurrently with the pull.
        budget: multiprocessors for the whole exchange.
        pulling: share of a budget that pulls rows.
        reduce_tile, pull_tile: (warps, elements, rows copied ahead per sum, stages, registers) of these kernels.
    """

    num_sm: int = 20
    push: tuple[int, int] | None = None
    push_tile: tuple[int, int, int, int] | None = None
    bulk: tuple[bool, bool] | None = None
    sending: int | None = None
    beside: int | None = None
    slots: int | None = None
    expand: tuple[int, int] | None = None
    reduce: tuple[int, int] | None = None
    pull: tuple[int, int] | None = None
    registers: int | None = None
    block: int | None = None
    expanding: tuple[int, int] | None = None
    layers: int | None = None
    reducing: int | None = None
    budget: int | None = None
    pulling: tuple[int, int] | None = None
    reduce_tile: tuple[int, int, int, int, int] | None = None
    pull_tile: tuple[int, int, int, int, int] | None = None

    def __str__(self) -> str:
        changed = [f"{name} {value}" for name, value in vars(self).items() if value is not None and name != "num_sm"]
        return ", ".join([f"num_sm {self.num_sm}", *changed])


DISPATCH = (
    Way(),
    Way(bulk=(False, False)),
    Way(bulk=(True, False)),
    Way(bulk=(False, True)),
    Way(sending=64),
    Way(beside=2),
    Way(beside=4),
    Way(layers=1),
    Way(slots=3),
    Way(budget=24),
    Way(num_sm=12, budget=24),
)
COMPACT = (Way(), Way(bulk=(False, False)), Way(beside=2), Way(beside=4), Way(slots=3), Way(budget=24))
COMBINE = (
    Way(),
    Way(num_sm=24),
    Way(num_sm=32),
    Way(num_sm=24, reduce_tile=(8, 4096, 4, 3, 96)),
    Way(num_sm=24, reduce_tile=(8, 8192, 8, 1, 128)),
    Way(num_sm=24, reduce_tile=(16, 8192, 8, 1, 96)),
    Way(num_sm=24, reducing=72),
    Way(budget=24),
    Way(budget=24, pulling=(1, 3)),
    Way(budget=24, reduce_tile=(8, 4096, 4, 3, 80)),
    Way(budget=24, reduce_tile=(4, 4096, 4, 3, 104)),
)


def routing(rank: int, args: argparse.Namespace) -> torch.Tensor:
    """Expert ids [T, K] of this rank, -1 = none; with `--like-ranks` T is that many tokens, less one, for each."""
    if not args.like_ranks:
        return uniform_idx(rank, args.tokens, args.topk, args.experts, 0)
    per_rank = args.experts // 2
    ids = uniform_idx(rank, args.tokens, args.topk, args.like_ranks * per_rank, 0)
    owner, expert = ids // per_rank, ids % per_rank
    others = [torch.where(owner == other, expert + (1 - rank) * per_rank, -1) for other in range(1, args.like_ranks)]
    others[0] = torch.where(owner == 0, expert + rank * per_rank, others[0])
    return torch.stack(others, dim=1).flatten(0, 1)


class WrongResult(Exception):
    """A way gives another result than the built-in variant."""


@contextlib.contextmanager
def _changed(way: Way) -> Iterator[None]:
    """Use plans and grids of this way for layers that launch inside the block."""
    expand_plan, combining = exchange.expand, combine_ops.combining_programs
    push_plan, reduce_plan, pull_plan = exchange.push, exchange.reduce, exchange.pull
    share, layers, pulling = tuning._EXPANDING_SHARE, tuning._LAYERS, tuning._PULL_SHARE
    sending, beside = tuning.SENDING_PROGRAMS, tuning._EXPANDING_BESIDE
    slots = exchange._LEAST_SLOTS, exchange._MOST_SLOTS
    landed_ring, landed_compact = exchange.landed_ring, compact.landed_ring

    def expand(*args: Any) -> Plan:
        plan = expand_plan(*args)
        values = dict(plan.constexprs)
        if way.block is not None and way.block < values["BLOCK_H"]:
            values |= {"BLOCK_H": way.block, "TILES": -(-args[-1] // way.block)}
        return replace(plan, constexprs=values, maxnreg=way.registers or plan.maxnreg)

    def push(*args: Any) -> Plan:
        if way.bulk is not None and not way.bulk[0]:
            args = *args[:-1], False
        plan = push_plan(*args)
        if way.push_tile is None:
            return plan
        warps, words, rows, registers = way.push_tile
        values = {**plan.constexprs, "BLOCK_H": words, "ROWS": rows}
        return replace(plan, constexprs=values, num_warps=warps, maxnreg=registers)

    def combining_programs(*args: Any) -> tuning.Combining:
        programs = combining(*args)
        return programs if way.reducing is None else programs._replace(publishing=way.reducing)

    def reduce(s: Any, *args: Any) -> Plan:
        return _tiled(reduce_plan(s, *args), s, way.reduce_tile)

    def pull(s: Any, *args: Any) -> Plan:
        return _tiled(pull_plan(s, *args), s, way.pull_tile)

    exchange.push, exchange.expand, exchange.reduce, exchange.pull = push, expand, reduce, pull
    combine_ops.combining_programs = combining_programs
    tuning._EXPANDING_SHARE, tuning._LAYERS = way.expanding or share, way.layers or layers
    tuning._PULL_SHARE = way.pulling or pulling
    tuning.SENDING_PROGRAMS, tuning._EXPANDING_BESIDE = way.sending or sending, way.beside or beside
    exchange._LEAST_SLOTS, exchange._MOST_SLOTS = (way.slots, way.slots) if way.slots else slots
    if way.bulk is not None and not way.bulk[1]:
        exchange.landed_ring = compact.landed_ring = lambda *_: exchange.NO_RING
    try:
        yield
    finally:
        exchange.push, exchange.expand, combine_ops.combining_programs = push_plan, expand_plan, combining
        exchange.reduce, exchange.pull = reduce_plan, pull_plan
        tuning._EXPANDING_SHARE, tuning._LAYERS, tuning._PULL_SHARE = share, layers, pulling
        tuning.SENDING_PROGRAMS, tuning._EXPANDING_BESIDE = sending, beside
        exchange._LEAST_SLOTS, exchange._MOST_SLOTS = slots
        exchange.landed_ring, compact.landed_ring = landed_ring, landed_compact


def _tiled(plan: Plan, s: Shape, tile: tuple[int, int, int, int, int] | None) -> Plan:
    """The plan with another tile of bfloat16 rows that are handled one at a time."""
    if tile is None:
        return plan
    warps, block, at_once, stages, registers = tile
    tiled = {"ROWS": 1, "BLOCK_H": block, "TILES": -(-s.hidden // block), "AT_ONCE": at_once, "STAGES": stages}
    values = {**plan.constexprs, **tiled}
    return Plan(plan.kernel, values, warps, registers, exchange.bytes_ahead(values, s.token))


class _Made:
    """A layer of a way, and its calls."""

    def __init__(self, args: argparse.Namespace, way: Way) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        key = Key("", 1, 1, args.payload, args.hidden, 1)
        entry = TunedEntry(key, way.num_sm, args.topk, args.experts, True, 0.0, 0.0, "", "")
        for name in ("push", "expand", "reduce", "pull"):
            if getattr(way, name) is not None:
                entry = entry.with_kernel(name, KernelChoice(*getattr(way, name)))
        idx = routing(rank, args)
        tokens = len(idx)
        self.layer = EPAll2AllLayer(
            dist.group.WORLD, tokens, args.hidden, args.topk, rank, args.experts, ranks // args.nodes, ranks,
            num_sm=None, tuned=entry, enable_local_combine=True, alignment=args.alignment, timeout_s=20.0,
            payload=None if args.payload == "bf16" else args.payload, sm_budget=way.budget,
            capacity=None if args.op == "compact" else max(ranks, args.like_ranks) * args.tokens * args.topk // 2
            + args.experts * args.alignment,
        )  # fmt: skip
        self.device = self.layer.context.device
        self.x = coded_rows(rank, tokens, args.hidden, 0, self.device)
        self.idx = idx.to(self.device)
        self.num_rows = ranks * tokens if args.op == "compact" else None
        self.dispatch()
        generator = torch.Generator(self.device).manual_seed(rank)
        shape = (self.desc.num_recv_rows, args.hidden)
        self.y = torch.randn(shape, generator=generator, device=self.device, dtype=torch.bfloat16)
        self.combine()
        self.layer.check()

    def dispatch(self) -> None:
        """Send rows to their experts."""
        if self.num_rows is None:
            self.recv_x, _, self.desc = self.layer.dispatch(self.x, self.idx)
        else:
            got = self.layer.dispatch_compact(self.x, self.idx, num_rows=self.num_rows)
            self.recv_x, self.desc = got.x, got.layout_desc

    def combine(self) -> None:
        """Bring sums back."""
        self.out = self.layer.combine(self.y, self.desc)

    def bits(self) -> list[torch.Tensor]:
        """The results of both calls."""
        compact = self.num_rows is not None
        used = int(self.desc.arrivals_of_rank[dist.get_rank()] if compact else self.desc.expert_offsets[-1])
        rows = self.recv_x[:used]
        parts = [rows] if isinstance(rows, torch.Tensor) and not hasattr(rows, "qdata") else [rows.qdata, rows.scale]
        return [self.out.clone(), *[part.view(torch.uint8).clone() for part in parts]]


def _graph(call: Callable[[], None], device: torch.device) -> Callable[[int], object]:
    if device.type == "cpu":
        return lambda _: call()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        call()
    return lambda _: graph.replay()


def _times(timer: Timer, call: Callable[[int], object]) -> list[float]:
    everyone: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, timer.times(call, lambda: meet_by_collective(timer.device)))
    return [max(times) for times in zip(*everyone, strict=True)]


def run(args: argparse.Namespace) -> None:
    """Run on each rank."""
    rank, ranks = ep_distributed.initialize_distributed(timeout_s=300)
    ways = {"dispatch": DISPATCH, "compact": COMPACT, "combine": COMBINE}[args.op]
    ways = ways[:3] if INTERPRETING else ways
    if rank == 0:
        print(f"# {args.op}, {args.payload}, {args.tokens} tokens, {ranks} ranks", flush=True)
    made, calls, first = [], {}, None
    for way in ways:
        with _changed(way):
            one = _Made(args, way)
            calls[way] = _graph(one.combine if args.op == "combine" else one.dispatch, one.device)
        made.append(one)
        bits = one.bits()
        first = first or bits
        if not all(map(torch.equal, first, bits)):
            raise WrongResult(f"{way}: other bits than what is built in")
    timer = Timer(made[0].device, args.iters, 2)
    found: dict[Way, list[float]] = {way: [] for way in ways}
    for _ in range(TURNS):
        for way, call in calls.items():
            with _changed(way):
                found[way] += _times(timer, call)
    for way, one in zip(ways, made, strict=True):
        one.layer.check()
        if rank == 0:
            print(f"{statistics.median(found[way]):9.1f}  {way}", flush=True)
    for one in made:
        one.layer.finalize()
    ep_distributed.finalize_distributed()


def main() -> None:
    """Start the ranks, unless torchrun or another launcher has started them."""
    parser = sizes_parser(__doc__)
    parser.add_argument("--op", choices=("dispatch", "compact", "combine"), default="dispatch")
    parser.add_argument("--like-ranks", type=int, default=0, help="see above; needs 2 ranks")
    parser.add_argument("--nodes", type=int, default=1, help="virtual nodes; divides the ranks")
    parser.add_argument("--alignment", type=int, default=128)
    parser.add_argument("--payload", choices=("bf16", "mxfp8"), default="bf16")
    parser.add_argument("--iters", type=int, default=15)
    args = parser.parse_args()
    if ep_distributed.launched_by() == "none":
        ep_distributed.run_ranks(run, args.ranks, args)
    else:
        run(args)


if __name__ == "__main__":
    main()
