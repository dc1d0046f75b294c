"""Time of EPAll2AllLayer.dispatch and .combine, and of the same work by collectives.

    python tests/bench/bench_dispatch_combine.py --csv docs/benchmarks/results/dispatch_combine.csv
    torchrun --nproc-per-node 4 tests/bench/bench_dispatch_combine.py --num-sm 8,16,24,32 --stages
    mpirun -np 4 python tests/bench/bench_dispatch_combine.py --nodes 2

A bare start makes its own ranks, one per GPU, or 4 on the CPU. Method and columns: docs/benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ in ("__main__", "__mp_main__"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from tests.bench import rows as bench_rows
from tests.bench import stages as bench_stages
from tests.bench import traffic
from tests.bench.providers import CollectiveProvider, LayerProvider
from tests.bench.timing import Timer, Timing, over_ranks
from tests.layer.origins import arrivals, coded_rows, first_difference, uniform_idx
from triton_ep import EPAll2AllLayer, MXTensor, finalize_distributed, initialize_distributed
from triton_ep import distributed as ep_distributed
from triton_ep.environment import read_environment, set_defaults
from triton_ep.errors import HeapError, PeerFailed, WaitTimeout
from triton_ep.reference import mxfp8
from triton_ep.runtime import INTERPRETING

PROVIDERS = ("triton_ep", "nccl")
OPS = ("dispatch", "combine")
STAGE_REPEATS = 10  # at most, and no more than the timed calls


class WrongResult(Exception):
    """What is to be timed does not compute what it should."""


@dataclass(frozen=True)
class Settings:
    """One run: the shape that all its cases share, and what to do with the results."""

    ranks: int
    nodes: int | None
    local_world_size: int | None
    tokens: int
    hidden: int
    topk: int
    experts: int
    capacity: str
    payload: str
    num_sm: tuple[int, ...]
    local_combine: bool
    iters: int
    warmup: int
    providers: tuple[str, ...]
    seed: int
    commit: str
    csv: str | None
    json: bool
    stages: bool

    @property
    def ranks_per_node(self) -> int | None:
        """Ranks of a node as told; None: those of a host."""
        return self.ranks // self.nodes if self.nodes is not None else self.local_world_size

    def cases(self) -> list[Case]:
        """What is measured, in order; only the layer has programs to choose."""
        named = [(p, n) for p in self.providers for n in (self.num_sm if p == "triton_ep" else (0,))]
        return [Case(self, provider, num_sm) for provider, num_sm in named]


@dataclass(frozen=True)
class Case:
    """One provider with one choice of options."""

    settings: Settings
    provider: str
    num_sm: int

    @property
    def payload(self) -> str:
        """What rows are made of on the wire; the collectives know bf16 only."""
        return self.settings.payload if self.provider == "triton_ep" else "bf16"

    @property
    def mode(self) -> str:
        """The column: how kernels run, exact or static capacity, programs, local combine."""
        if self.provider != "triton_ep":
            return "torch-exact"
        parts = ["interpreted" if INTERPRETING else "jit", self.settings.capacity, f"sm{self.num_sm}"]
        return "-".join([*parts, "local"] if self.settings.local_combine else parts)

    def row(self, op: str, ranks: int, ranks_per_node: int, values: dict[str, object]) -> bench_rows.Row:
        """The row of one op."""
        s = self.settings
        # On the CPU the collectives are gloo's.
        provider = "gloo" if self.provider == "nccl" and INTERPRETING else self.provider
        columns = {"op": op, "provider": provider, "mode": self.mode, "payload": self.payload}
        columns |= {"nodes": ranks // ranks_per_node, "ranks": ranks, "tokens": s.tokens, "hidden": s.hidden}
        columns |= {"topk": s.topk, "experts": s.experts, "routing": f"uniform:{s.seed}"}
        return bench_rows.make_row({**columns, **values})


@dataclass
class Job:
    """This rank's side of a run."""

    settings: Settings
    rank: int
    num_ranks: int
    ranks_per_node: int
    device: torch.device
    environment: bench_rows.Row
    timer: Timer = field(init=False)

    def __post_init__(self) -> None:
        s = self.settings
        self.timer = Timer(self.device, s.iters, s.warmup)
        # The same wherever they are made, so every rank knows what it must receive.
        self.idxs = [uniform_idx(r, s.tokens, s.topk, s.experts, s.seed) for r in range(self.num_ranks)]
        self.routing = traffic.Routing.of(self.idxs, s.experts, self.ranks_per_node)

    def say(self, text: str) -> None:
        """Progress, from rank 0."""
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)

    def capacity(self) -> int | None:
        """Output rows in static mode: a quarter above the average, and room for this routing in any case."""
        if self.settings.capacity == "exact":
            return None
        return max(self.settings.tokens * self.settings.topk * 5 // 4, self.routing.most_rows())

    def bytes_out(self, case: Case) -> dict[str, int]:
        """Payload bytes that leave the busiest rank, by op."""
        s, element = self.settings, torch.bfloat16.itemsize
        row_bytes = s.hidden * element
        if case.provider != "triton_ep":
            there, back = traffic.plain_bytes(self.routing, row_bytes)
        else:
            wire = s.hidden + s.hidden // 32 if case.payload == "mxfp8" else row_bytes
            partial = row_bytes if s.local_combine else s.hidden * torch.float32.itemsize
            there = traffic.dispatch_bytes(self.routing, wire)
            back = traffic.combine_bytes(self.routing, row_bytes, partial, local_combine=s.local_combine)
        return {"dispatch": max(there), "combine": max(back)}


@dataclass(frozen=True)
class Measured:
    """Results of a case on all ranks: times by op, and stages by op on rank 0."""

    timings: dict[str, Timing]
    stages: dict[str, list[bench_stages.Stage]]


def rows_for_combine(recv_x: torch.Tensor) -> torch.Tensor:
    """Received rows in the dtype in which combine takes them."""
    return recv_x.dequantize() if isinstance(recv_x, MXTensor) else recv_x


def check(job: Job, provider: Any, x: torch.Tensor, idx: torch.Tensor) -> None:
    """Every row is where it belongs, bit for bit, and a token's copies come back summed.

    Raises:
        WrongResult: naming the first row that differs.
    """
    s = job.settings
    recv_x, state = provider.dispatch(x, idx)
    want = arrivals(job.idxs, job.rank, s.experts // job.num_ranks, job.device)
    everyone = torch.cat([coded_rows(r, s.tokens, s.hidden, s.seed, job.device) for r in range(job.num_ranks)])
    parts = [(recv_x, everyone)]
    if isinstance(recv_x, MXTensor):
        data, scale = mxfp8.quantize(everyone)
        parts = [(recv_x.qdata.view(torch.uint8), data.view(torch.uint8)), (recv_x.scale.view(torch.uint8), scale)]
        x = mxfp8.dequantize(*mxfp8.quantize(x), x.dtype)
    for received, sent in parts:
        difference = first_difference(received, sent, want.entry // s.topk)
        if difference is not None:
            raise WrongResult(f"dispatch on rank {job.rank}: {difference}")
    out = provider.combine(rows_for_combine(recv_x), state)
    # All copies are equal, so a sum in float32 is the exact multiple.
    exact = (x.float() * (idx >= 0).sum(1, keepdim=True)).double()
    bound = exact.abs() * torch.finfo(x.dtype).eps / 2 * (3 if s.local_combine else 1)
    error = (out.double() - exact).abs()
    if not bool((error <= bound).all()):
        raise WrongResult(f"combine on rank {job.rank}: off by {error.max().item()} where only rounding may differ")


def measure_provider(job: Job, case: Case, provider: Any) -> Measured:
    """Check, then time both ops; collective."""
    s = job.settings
    x = coded_rows(job.rank, s.tokens, s.hidden, s.seed, job.device)
    idx = job.idxs[job.rank].to(job.device)
    check(job, provider, x, idx)
    timings, stages = {}, {}
    recv_x, state = provider.dispatch(x, idx)
    y = rows_for_combine(recv_x)
    calls = {"dispatch": lambda: provider.dispatch(x, idx), "combine": lambda: provider.combine(y, state)}
    for op in OPS:
        timings[op] = over_ranks(job.timer.times(calls[op], provider.meet))
        job.say(f"    {op}: {timings[op].median_us:.1f} us")
    if s.stages and case.provider == "triton_ep":
        repeats = min(STAGE_REPEATS, s.iters)
        for op in OPS:
            provider.meet()
            stages[op] = bench_stages.stages_of(calls[op], repeats, job.device, here=job.rank == 0)
    return Measured(timings, stages)


def measure(job: Job, case: Case) -> Measured:
    """Make the provider of a case and measure it; collective."""
    s = job.settings
    if case.provider == "nccl":
        return measure_provider(job, case, CollectiveProvider(s.experts, job.device))
    with EPAll2AllLayer(
        dist.group.WORLD,
        s.tokens,
        s.hidden,
        s.topk,
        job.rank,
        s.experts,
        job.ranks_per_node,
        job.num_ranks,
        num_sm=case.num_sm,
        enable_local_combine=s.local_combine,
        capacity=job.capacity(),
        payload="mxfp8" if case.payload == "mxfp8" else None,
        timeout_s=120.0,  # ranks may compile for different times
    ) as layer:
        measured = measure_provider(job, case, LayerProvider(layer))
        layer.check()
    return measured


def attempt(job: Job, case: Case) -> Measured | str:
    """Measure a case, or say why it does not fit this machine, the same on all ranks; collective.

    Raises:
        Exception: of any other kind of failure, which is no reason to skip a case.
    """
    measured: Measured | None = None
    failure: Exception | None = None
    try:
        measured = measure(job, case)
    except (torch.OutOfMemoryError, HeapError, WaitTimeout, PeerFailed) as error:
        failure = error
    told: list[tuple[str, str] | None] = [None] * job.num_ranks
    dist.all_gather_object(told, failure and (type(failure).__name__, str(failure)))
    # Where one rank has no memory, the others wait for it in vain.
    short = [(r, t) for r, t in enumerate(told) if t and t[0] in (torch.OutOfMemoryError.__name__, "HeapError")]
    if short:
        rank, (kind, text) = short[0]
        if job.device.type == "cuda":
            torch.cuda.empty_cache()
        return f"rank {rank}: {kind}: {' '.join(text.split())[:200]}"
    if failure is not None:
        raise failure
    if measured is None or any(told):
        raise PeerFailed(f"{case.provider} {case.mode} failed on other ranks: {told}")
    return measured


def rows_of(job: Job, case: Case, result: Measured | str) -> list[bench_rows.Row]:
    """One row per op."""
    if isinstance(result, str):
        values: dict[str, dict[str, object]] = {op: {"skip_reason": result} for op in OPS}
    else:
        sent = job.bytes_out(case)
        values = {}
        for op, timing in result.timings.items():
            numbers = {name: f"{value:.1f}" for name, value in dataclasses.asdict(timing).items()}
            rate = f"{sent[op] / timing.median_us / 1e3:.1f}"
            values[op] = {**numbers, "bytes_out": sent[op], "gbps": rate}
    return [
        case.row(op, job.num_ranks, job.ranks_per_node, {**job.environment, **columns})
        for op, columns in values.items()
    ]


def report(
    settings: Settings, rows: list[bench_rows.Row], stages: dict[str, dict[str, list[bench_stages.Stage]]]
) -> None:
    """The results on stdout: as tables, or as one JSON object."""
    if settings.json:
        plain = {
            mode: {op: [dataclasses.asdict(s) for s in found] for op, found in ops.items()}
            for mode, ops in stages.items()
        }
        print(json.dumps({"rows": rows, "stages": plain}, indent=1), flush=True)
        return
    for mode, ops in stages.items():
        for op, found in ops.items():
            print(f"{op}, {mode}, kernels on rank 0:\n{bench_stages.table(found)}\n")
    print(bench_rows.table(rows), flush=True)


def run(settings: Settings) -> None:
    """Measure all cases in this rank; collective. Rank 0 writes."""
    if not INTERPRETING:
        # NCCL's multicast takes memory and is no part of the comparison.
        set_defaults({"NCCL_NVLS_ENABLE": "0"})
    rank, num_ranks = initialize_distributed(local_world_size=settings.ranks_per_node, timeout_s=300)
    device = ep_distributed.current_heap().device
    environment = bench_rows.environment(settings.commit, gpus=not INTERPRETING)
    job = Job(settings, rank, num_ranks, ep_distributed.local_world_size(), device, environment)
    rows: list[bench_rows.Row] = []
    stages: dict[str, dict[str, list[bench_stages.Stage]]] = {}
    cases = settings.cases()
    for number, case in enumerate(cases, 1):
        job.say(f"[{number}/{len(cases)}] {case.provider} {case.mode}, {num_ranks} ranks")
        result = attempt(job, case)
        new = rows_of(job, case, result)
        rows += new
        if isinstance(result, Measured) and result.stages:
            stages[case.mode] = result.stages
        if isinstance(result, str):
            job.say(f"    skipped: {result}")
        if rank == 0 and settings.csv:
            bench_rows.append_rows(Path(settings.csv), new)
    if rank == 0:
        report(settings, rows, stages)
    finalize_distributed()


def too_few(settings: Settings, gpus: int) -> str | None:
    """Why a bare start cannot make its ranks; None if it can. gpus: how many there are, 0 = CPU ranks."""
    if gpus and settings.ranks > gpus:
        return f"needs {settings.ranks} GPUs, there are {gpus}"
    return None


def skip_all(settings: Settings, reason: str) -> None:
    """Write a row with the reason for every op and case."""
    environment = bench_rows.environment(settings.commit, gpus=not INTERPRETING)
    ranks_per_node = settings.ranks_per_node or settings.ranks
    rows = [
        case.row(op, settings.ranks, ranks_per_node, {**environment, "skip_reason": reason})
        for case, op in itertools.product(settings.cases(), OPS)
    ]
    if settings.csv:
        bench_rows.append_rows(Path(settings.csv), rows)
    report(settings, rows, {})


def _list(kind: type, allowed: Sequence[str] = ()) -> Any:
    def parse(text: str) -> tuple[Any, ...]:
        values = tuple(kind(part) for part in text.split(","))
        if allowed and (unknown := set(values) - set(allowed)):
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(allowed)}")
        return values

    return parse


def parse(argv: Sequence[str] | None, ranks: int) -> Settings:
    """Settings from the command line; `ranks`: how many there are unless it says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    number = {"type": int, "metavar": "N"}
    parser.add_argument(
        "--ranks", default=ranks, help="ranks of a bare start (default: one per GPU; 4 on CPU)", **number
    )
    parser.add_argument("--nodes", help="split the ranks into this many virtual nodes", **number)
    parser.add_argument("--local-world-size", help="the same, by ranks per node", **number)
    parser.add_argument("--tokens", default=4096, help="per rank (default %(default)s)", **number)
    parser.add_argument("--hidden", default=7168, help="default %(default)s", **number)
    parser.add_argument("--topk", default=8, help="default %(default)s", **number)
    parser.add_argument("--experts", default=256, help="over all ranks (default %(default)s)", **number)
    parser.add_argument("--capacity", choices=("exact", "static"), default="exact", help="default %(default)s")
    parser.add_argument("--payload", choices=("bf16", "mxfp8"), default="bf16", help="of the layer (default bf16)")
    parser.add_argument("--num-sm", default=(20,), type=_list(int), metavar="N,N,..", help="a row each (default 20)")
    parser.add_argument("--enable-local-combine", action="store_true", help="sum a token's rows on the expert's rank")
    parser.add_argument("--iters", default=50, help="timed calls (default %(default)s)", **number)
    parser.add_argument("--warmup", default=5, help="calls before that (default %(default)s)", **number)
    parser.add_argument(
        "--provider", default=PROVIDERS, type=_list(str, PROVIDERS), help="default triton_ep,nccl (gloo on the CPU)"
    )
    parser.add_argument("--seed", default=0, help="of the routing (default %(default)s)", **number)
    parser.add_argument("--csv", metavar="PATH", help="append the rows to this file")
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    parser.add_argument("--stages", action="store_true", help="print the time of each kernel on rank 0")
    parser.add_argument("--commit", default=bench_rows.commit_of_checkout(), help="for machines without .git")
    found = vars(parser.parse_args(argv))
    if found["commit"] is None:
        parser.error("this is no git checkout: pass --commit, for no row is stored without it")
    if found["nodes"] is not None and found["local_world_size"] is not None:
        parser.error("--nodes and --local-world-size say the same; pass one of them")
    for name in ("ranks", "tokens", "hidden", "topk", "experts", "iters"):
        if found[name] < 1:
            parser.error(f"--{name} is {found[name]}; at least 1 is needed")
    for name, whole in (("nodes", "ranks"), ("local_world_size", "ranks"), ("ranks", "experts")):
        if found[name] is not None and (found[name] < 1 or found[whole] % found[name]):
            parser.error(f"{found[whole]} {whole} cannot be shared evenly: {name} is {found[name]}")
    if found["topk"] > found["experts"]:
        parser.error(f"--topk {found['topk']} exceeds the {found['experts']} experts")
    found["local_combine"], found["providers"] = found.pop("enable_local_combine"), found.pop("provider")
    return Settings(**found)


def main(argv: Sequence[str] | None = None) -> None:
    """Front door: a rank that a launcher started, or a bare start that makes its own."""
    gpus = 0 if INTERPRETING else torch.cuda.device_count()
    launched = read_environment()
    settings = parse(argv, launched.world_size or gpus or 4)
    if launched.world_size is not None:
        run(settings)
    elif (reason := too_few(settings, gpus)) is not None:
        skip_all(settings, reason)
    else:
        ep_distributed.run_ranks(run, settings.ranks, settings)


if __name__ == "__main__":
    main()
