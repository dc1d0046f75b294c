"""What matrix products lose beside a dispatch of small programs, which fit next to those of the products.

    torchrun --nproc-per-node 4 tests/bench/beside_small.py --trace bench beside-gemm --sm-budget 24 \\
        --provider triton_ep_compact --capacity static --iters 10
    torchrun --nproc-per-node 4 tests/bench/beside_small.py --small 64,66,32 bench beside-gemm ...   # the same

Products of cuBLAS for bfloat16 on Hopper leave 1024 registers and about 30 KB of shared memory of each multiprocessor:
room for a program of one warp with 32 registers per thread. With `--small PUSH,LAND,REGISTERS` a layer with a budget
copies rows in bulk, by so many programs that push and that lay rows out, of so many registers per thread; without it
the layer is as built in. `--trace` prints when the kernels of rank 0 run, in microseconds: how long each product takes
shows whether it had all multiprocessors. The rest is a command line of `triton-ep`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from triton_ep import cli
from triton_ep.bench import beside
from triton_ep.ops import tuning
from triton_ep.runtime.plans import compact, exchange
from triton_ep.runtime.plans.shape import Plan, Shape, next_power_of_2

_TRACED = (4, 6, 8)
"""Calls whose kernels are printed: after the warm-up."""


def use_small_programs(push: int, land: int, registers: int) -> None:
    """Make layers with a budget copy rows in bulk, in programs of one warp."""
    bulk_plan, expanding, pushing = exchange.bulk_plan, tuning.Expanding.programs, tuning._pushing

    def small_plan(*args: Any) -> Plan:
        return replace(bulk_plan(*args), maxnreg=registers)

    def programs(self: tuning.Expanding, *args: Any) -> int:
        found = expanding(self, *args)
        return min(found, land) if self.sm_budget else found

    def small_push(ctx: Any, fmt: Any, overlapped: bool) -> tuning.Pushing:
        return tuning.Pushing(push, push, True) if ctx.config.sm_budget else pushing(ctx, fmt, overlapped)

    for owner, name, changed in (
        (exchange, "bulk_plan", small_plan),
        (tuning.Expanding, "programs", programs),
        (tuning, "_pushing", small_push),
        (Shape, "copies_in_bulk", property(lambda s: s.num_nodes == 1 and not s.interpreted)),
        (Shape, "senders", property(lambda _: next_power_of_2(push))),
    ):
        setattr(owner, name, changed)
    assert compact.bulk_landing is exchange.bulk_landing, "it calls the plan that was replaced"


def trace_calls() -> None:
    """Print the kernels of some calls beside products."""
    built_in = beside._beside

    def traced(products: Callable[[], None], call: Any, device: torch.device) -> Any:
        together, calls = built_in(products, call, device), [0]

        def run(number: int) -> None:
            calls[0] += 1
            if calls[0] not in _TRACED or device.type != "cuda":
                together(number)
                return
            torch.cuda.synchronize()
            dist.barrier()
            with profile(activities=[ProfilerActivity.CUDA]) as found:
                together(number)
                torch.cuda.synchronize()
            if dist.get_rank() == 0:
                _print_kernels(found)

        return run

    beside._beside = traced


def _print_kernels(found: profile) -> None:
    on_gpu = [event for event in found.events() or () if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = sorted((event.time_range.start, event.time_range.end, event.name) for event in on_gpu)
    print("   start     time  kernel")
    for start, end, name in kernels:
        print(f"{start - kernels[0][0]:8.1f} {end - start:8.1f}  {name[:60]}", flush=True)


def main() -> int:
    """Change the plans as asked, then run the rest of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", help="PUSH,LAND,REGISTERS")
    parser.add_argument("--trace", action="store_true")
    args, rest = parser.parse_known_args()
    if args.small:
        use_small_programs(*map(int, args.small.split(",")))
    if args.trace:
        trace_calls()
    return cli.main(rest)


if __name__ == "__main__":
    sys.exit(main())
