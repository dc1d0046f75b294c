"""Time from the start of a job until its first rows return, by heap.

    python tests/bench/bench_start.py --heap nvshmem,torch --csv docs/benchmarks/results/start.csv
    python tests/bench/bench_start.py --heap host --ranks 2 --tokens 16 --hidden 128 --experts 8     # CPU, to try it

Every heap gets processes of its own, --repeats times in turn; a first job of each, not counted, compiles the kernels.
Ops: start_job, the process group and the heap; start_layer, the layer with its buffers; start_call, the first dispatch
and combine, checked, with kernels that an earlier job compiled; start, all three. Imports are not included.
Columns: docs/benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

if __name__ in ("__main__", "__mp_main__"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from tests.bench.sizes import sizes_parser
from triton_ep import distributed as ep_distributed
from triton_ep.bench import rows as bench_rows
from triton_ep.bench.origins import coded_rows
from triton_ep.bench.routing import uniform_idx
from triton_ep.bench.settings import origin_of_kernels
from triton_ep.layer import EPAll2AllLayer
from triton_ep.runtime.launch import INTERPRETING

STEPS = ("start_job", "start_layer", "start_call", "start")


class WrongResult(Exception):
    """The first call returns wrong rows."""


def start(args: argparse.Namespace, heap: str, found: str) -> None:
    """Run on each rank: start once, and write the microseconds of each step to the file `found`."""
    began = [time.perf_counter()]
    rank, ranks = ep_distributed.initialize_distributed(timeout_s=300, heap=heap)
    began.append(time.perf_counter())
    sizes = (dist.group.WORLD, args.tokens, args.hidden, args.topk, rank, args.experts, ranks, ranks)
    with EPAll2AllLayer(*sizes, timeout_s=120.0) as layer:
        device = layer.context.device
        began.append(time.perf_counter())
        x = coded_rows(rank, args.tokens, args.hidden, 0, device)
        idx = uniform_idx(rank, args.tokens, args.topk, args.experts, 0).to(device)
        received, _, descriptor = layer.dispatch(x, idx, None)
        y = layer.combine(received, descriptor)
        if not torch.equal(y.float(), x.float() * args.topk):
            raise WrongResult(f"rank {rank}: the sum of {args.topk} rows is not {args.topk} times the token")
        began.append(time.perf_counter())
    times = [1e6 * (later - earlier) for earlier, later in pairwise(began)]
    everyone: list[list[float]] = [[] for _ in range(ranks)]
    dist.all_gather_object(everyone, [*times, sum(times)])
    if rank == 0:
        slowest = [max(times) for times in zip(*everyone, strict=True)]
        Path(found).write_text(json.dumps({"ranks": ranks, **dict(zip(STEPS, slowest, strict=True))}))
    ep_distributed.finalize_distributed()


def _row(args: argparse.Namespace, heap: str, op: str, found: list[dict[str, float]]) -> bench_rows.Row:
    times = [of[op] for of in found]
    quantiles = statistics.quantiles(times, n=5, method="inclusive") if len(times) > 1 else [times[0]] * 4
    return bench_rows.make_row(
        {
            "op": op,
            "provider": "triton_ep",
            "mode": f"{origin_of_kernels(INTERPRETING)}-exact-{heap}",
            "payload": "bf16",
            "nodes": 1,
            "ranks": int(found[0]["ranks"]),
            "tokens": args.tokens,
            "hidden": args.hidden,
            "topk": args.topk,
            "experts": args.experts,
            "routing": "uniform:0",
            "iters": len(times),
            "median_us": f"{statistics.median(times):.1f}",
            "p20_us": f"{quantiles[0]:.1f}",
            "p80_us": f"{quantiles[-1]:.1f}",
            **bench_rows.environment(args.commit, gpus=not INTERPRETING),
        }
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and run."""
    parser = sizes_parser(__doc__)
    parser.add_argument("--heap", default="host" if INTERPRETING else "nvshmem,torch", help="of host, nvshmem, torch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--commit", default=bench_rows.commit_of_checkout() or "unknown", help="commit of the rows")
    args = parser.parse_args(argv)
    found = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.json"
        for repeat in range(1 + args.repeats):
            for heap in args.heap.split(","):
                ep_distributed.run_ranks(start, args.ranks, args, heap, str(path))
                if repeat > 0:
                    found[heap].append(json.loads(path.read_text()))
    made = [_row(args, heap, op, times) for heap, times in found.items() for op in STEPS]
    print(f"{'heap':10}" + "".join(f"{op.removeprefix('start_') + ', ms':>12}" for op in STEPS))
    for heap in found:
        cells = [float(row["median_us"]) / 1e3 for row in made if row["mode"].endswith(f"-{heap}")]
        print(f"{heap:10}" + "".join(f"{cell:12.1f}" for cell in cells))
    if args.csv is not None:
        bench_rows.append_rows(args.csv, made)


if __name__ == "__main__":
    main()
