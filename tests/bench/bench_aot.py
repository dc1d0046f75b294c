"""Time from process start to the first finished dispatch, and host time of a dispatch and combine: AOT against the JIT.

    python -m triton_ep.aot build --arch sm_90 --manifest tests/aot/gpu.toml
    python tests/bench/bench_aot.py --gpus 4 [--csv docs/benchmarks/results/aot.csv]

One fresh process per GPU and mode: "aot" (no Triton can be imported), "jit-cold" (empty cache of compiled kernels),
"jit-warm" (the same cache again). A layer with static capacity, 4096 tokens of 7168 bf16, top 8 of 256 experts. Times
are those of the slowest rank; host time is the median of single dispatch+combine calls on an idle GPU.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODES = ("aot", "jit-cold", "jit-warm")
TOKENS, HIDDEN, TOPK, EXPERTS, NUM_SM = 4096, 7168, 8, 256, 24
COLUMNS = [
    *("mode", "gpus", "tokens", "hidden", "topk", "experts", "payload"),
    *("imported_s", "joined_s", "layer_s", "first_dispatch_s", "host_us", "host_p20_us", "host_p80_us"),
    *("built_with", "gpu", "driver", "torch", "triton", "nvshmem", "commit", "date"),
]


def worker(started: float, mode: str, calls: int) -> None:
    """One rank: print what it measured as JSON."""
    if mode == "aot":
        sys.modules["triton"] = None  # type: ignore[assignment]
    import torch
    import torch.distributed as dist

    from triton_ep import EPAll2AllLayer, finalize_distributed, initialize_distributed
    from triton_ep.bench.routing import uniform_idx

    told = {"imported_s": time.time() - started}
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    initialize_distributed()
    told["joined_s"] = time.time() - started
    rank, world = dist.get_rank(), dist.get_world_size()
    idx = uniform_idx(rank, TOKENS, TOPK, EXPERTS, 0).int().cuda()
    x = torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16()
    layer = EPAll2AllLayer(
        None, TOKENS, HIDDEN, TOPK, rank, EXPERTS, world, world, num_sm=NUM_SM, enable_local_combine=True,
        capacity=2 * TOKENS * TOPK, use_aot=mode == "aot",
    )  # fmt: skip
    told["layer_s"] = time.time() - started
    recv_x, _, desc = layer.dispatch(x, idx)
    torch.cuda.synchronize()
    told["first_dispatch_s"] = time.time() - started
    layer.combine(recv_x, desc)
    for _ in range(20):
        recv_x, _, desc = layer.dispatch(x, idx)
        layer.combine(recv_x, desc)
    host = []
    for _ in range(calls):
        torch.cuda.synchronize()
        dist.barrier()
        before = time.perf_counter()
        recv_x, _, desc = layer.dispatch(x, idx)
        layer.combine(recv_x, desc)
        host.append((time.perf_counter() - before) * 1e6)
    torch.cuda.synchronize()
    layer.check()
    cuts = statistics.quantiles(host, n=5)
    told |= {"host_us": statistics.median(host), "host_p20_us": cuts[0], "host_p80_us": cuts[3]}
    if "triton" in sys.modules and mode == "aot":
        assert sys.modules["triton"] is None
    layer.finalize()
    finalize_distributed()
    print("MEASURED " + json.dumps(told), flush=True)


def measure(mode: str, gpus: int, folder: str, cache: str, calls: int) -> dict[str, float]:
    """Start one process per GPU; the slowest rank's figures."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(gpus):
        job = {"RANK": rank, "WORLD_SIZE": gpus, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": gpus}
        environment = {**os.environ, **{name: str(value) for name, value in job.items()}}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TRITON_CACHE_DIR": cache}
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment |= {"TRITON_EP_AOT_DIR": folder, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        if mode == "aot":
            environment["TRITON_EP_AOT"] = "1"
        words = [sys.executable, __file__, "--worker", mode, "--started", repr(time.time()), "--calls", str(calls)]
        ranks.append(
            subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    told = []
    try:
        for rank, process in enumerate(ranks):
            out, err = process.communicate(timeout=110)
            line = next((line for line in out.splitlines() if line.startswith("MEASURED ")), None)
            if process.returncode or line is None:
                raise RuntimeError(
                    f"{mode}: rank {rank} ended with {process.returncode}:\n{out[-2000:]}\n{err[-4000:]}"
                )
            told.append(json.loads(line.removeprefix("MEASURED ")))
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
    return {name: max(values[name] for values in told) for name in told[0]}


def main() -> None:
    """Measure every mode, print rows, and append them to a file if one is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=4, choices=(4, 8))
    parser.add_argument("--aot", help="folder of the library; default: TRITON_EP_AOT_DIR, or the package")
    parser.add_argument("--csv", type=Path, help="append rows here")
    parser.add_argument("--commit", help="where there is no git: commit of this checkout")
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--mode", choices=MODES, action="append", help="default: all")
    parser.add_argument("--worker", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.started, options.worker, options.calls)
        return
    sys.path.insert(0, str(ROOT))
    from triton_ep.aot.store import Library, default_folder
    from triton_ep.bench.rows import commit_of_checkout, environment
    from triton_ep.runtime import architecture

    folder = Path(options.aot).resolve() if options.aot else default_folder()
    built_with = f"triton {Library(folder, architecture()).versions['triton']}"
    about = environment(options.commit or commit_of_checkout() or "unknown", gpus=True)
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for mode in MODES if not options.mode else options.mode:
            figures = measure(mode, options.gpus, str(folder), cache, options.calls)
            sizes = {"tokens": TOKENS, "hidden": HIDDEN, "topk": TOPK, "experts": EXPERTS, "payload": "bf16"}
            shown = {name: f"{value:.2f}" if name.endswith("_s") else f"{value:.1f}" for name, value in figures.items()}
            built = built_with if mode == "aot" else about["triton"]
            rows.append({"mode": mode, "gpus": options.gpus, **sizes, **shown, "built_with": built, **about})
            print(json.dumps(rows[-1]), flush=True)
    if options.csv:
        new = not options.csv.exists()
        with options.csv.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
