"""Time from process start to the first finished dispatch, and host time of a dispatch and combine: AOT against the JIT.

    python -m triton_ep.aot build --arch sm_90 --manifest tests/aot/gpu.toml
    python tests/bench/bench_aot.py --gpus 4 [--csv docs/benchmarks/results/aot.csv]

One fresh process per GPU and mode: "aot" (Triton cannot be imported), "jit-cold" (empty cache of compiled kernels),
"jit-warm" (the same cache again), "beside" (a layer of each kind in one process, called in turn, which removes other
differences between processes). The layer has static capacity, 4096 tokens of 7168 bf16, top 8 of 256 experts. Times are
those of the slowest rank, from the start of its process. Host time is per dispatch and combine, in batches of 20 that
wait for nothing; median of the batches. A mode that exceeds --timeout, or has a failing rank, ends the run with the
output of its ranks.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODES = ("aot", "jit-cold", "jit-warm", "beside")
TOKENS, HIDDEN, TOPK, EXPERTS, NUM_SM = 4096, 7168, 8, 256, 24
BATCH = 20
WARM_UP = 300  # pairs before the first timed one: a new process runs slower at first
COLUMNS = [
    *("mode", "gpus", "tokens", "hidden", "topk", "experts", "payload"),
    *("imported_s", "joined_s", "layer_s", "first_dispatch_s", "host_us", "host_p20_us", "host_p80_us"),
    *("built_with", "gpu", "driver", "torch", "triton", "nvshmem", "commit", "date"),
]
_SHOWN = COLUMNS[:2] + COLUMNS[7:15]
_MEASURED = COLUMNS[7:14]


def worker(started: float, mode: str, batches: int) -> None:
    """One rank: measure, and print the results as JSON."""
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

    def layer_of(use_aot: bool) -> EPAll2AllLayer:
        return EPAll2AllLayer(
            None, TOKENS, HIDDEN, TOPK, rank, EXPERTS, world, world, num_sm=NUM_SM, enable_local_combine=True,
            capacity=2 * TOKENS * TOPK, use_aot=use_aot,
        )  # fmt: skip

    layers = {kind: layer_of(kind == "aot") for kind in (("aot", "jit") if mode == "beside" else (mode,))}
    told["layer_s"] = time.time() - started

    def pair(layer: EPAll2AllLayer) -> None:
        recv_x, _, desc = layer.dispatch(x, idx)
        if "first_dispatch_s" not in told:
            torch.cuda.synchronize()
            told["first_dispatch_s"] = time.time() - started
        layer.combine(recv_x, desc)

    for _ in range(WARM_UP):
        for layer in layers.values():
            pair(layer)
    host: dict[str, list[float]] = {kind: [] for kind in layers}
    for batch in range(batches):
        # Alternate the order: the kind that runs second finds warmer caches.
        for kind, layer in list(layers.items())[:: 1 if batch % 2 else -1]:
            torch.cuda.synchronize()  # so that a batch fits into the GPU's queue
            before = time.perf_counter()
            for _ in range(BATCH):
                pair(layer)
            host[kind].append((time.perf_counter() - before) * 1e6 / BATCH)
    torch.cuda.synchronize()
    for kind, times in host.items():
        layers[kind].check()
        cuts = statistics.quantiles(times, n=5)
        found = {"host_us": statistics.median(times), "host_p20_us": cuts[0], "host_p80_us": cuts[3]}
        told |= {f"{kind} {name}": value for name, value in found.items()} if mode == "beside" else found
    if mode == "aot":
        assert sys.modules["triton"] is None
    for layer in layers.values():
        layer.finalize()
    finalize_distributed()
    print("MEASURED " + json.dumps(told), flush=True)


def command_of_worker(mode: str, batches: int) -> list[str]:
    """The command that starts a rank."""
    return [sys.executable, __file__, "--worker", mode, "--started", repr(time.time()), "--batches", str(batches)]


def measure(
    mode: str,
    gpus: int,
    folder: str,
    cache: str,
    batches: int,
    timeout_s: float,
    command: Callable[[str, int], list[str]] = command_of_worker,
) -> dict[str, float]:
    """Start one process per GPU; return the slowest rank's figures.

    Raises:
        RuntimeError: a rank failed or was late; the message has the end of each rank's output.
    """
    import torch.distributed as dist  # not at the top: a worker times its own imports

    # The ranks meet at a store of this process. If a rank opened it, another rank that connects too early could receive
    # the same port for its own end of the connection.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    common = {name: value for name, value in os.environ.items() if name not in ("TRITON_EP_AOT", "TRITON_INTERPRET")}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    common |= {"TRITON_CACHE_DIR": cache, "PYTHONPATH": path, "TRITON_EP_AOT_DIR": folder, "OMP_NUM_THREADS": "1"}
    common |= {"WORLD_SIZE": str(gpus), "LOCAL_WORLD_SIZE": str(gpus)}
    if mode == "aot":
        common["TRITON_EP_AOT"] = "1"
    ranks: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as outputs:  # files: a pipe would block ranks that write much
        logs = [Path(outputs) / f"rank{rank}" for rank in range(gpus)]
        deadline = time.monotonic() + timeout_s
        try:
            for rank, log in enumerate(logs):
                environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                with log.open("w") as file:
                    ranks.append(subprocess.Popen(command(mode, batches), env=environment, stdout=file, stderr=file))
            while any(process.poll() is None for process in ranks):
                failed = [rank for rank, process in enumerate(ranks) if process.poll() not in (None, 0)]
                if failed or time.monotonic() > deadline:
                    what = f"rank {failed[0]} failed" if failed else f"not done after {timeout_s:g} s"
                    raise RuntimeError(f"{mode}: {what}{_ends(ranks, logs)}")
                time.sleep(0.05)
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()
        told = [_told(log) for log in logs]
        if None in told or any(process.returncode for process in ranks):
            raise RuntimeError(f"{mode}: a rank measured nothing{_ends(ranks, logs)}")
        figures = [values for values in told if values is not None]
    return {name: max(values[name] for values in figures) for name in figures[0]}


def _told(log: Path) -> dict[str, float] | None:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("MEASURED ")]
    if not lines:
        return None
    found: dict[str, float] = json.loads(lines[-1].removeprefix("MEASURED "))
    return found


def _ends(ranks: Sequence[subprocess.Popen[str]], logs: Sequence[Path]) -> str:
    """Exit code and end of the output of each rank."""
    parts = []
    for rank, (process, log) in enumerate(zip(ranks, logs, strict=True)):
        how = "still runs" if process.poll() is None else f"ended with {process.returncode}"
        parts.append(f"\n--- rank {rank} {how}:\n{log.read_text(errors='replace')[-3000:]}")
    return "".join(parts)


def table(rows: Sequence[dict[str, str]]) -> str:
    """The figures as text in columns."""
    lines = [list(_SHOWN), *([row[name] for name in _SHOWN] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_SHOWN))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines)


def store(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """Append rows to a file; create it if it does not exist.

    Raises:
        RuntimeError: the file has other columns.
    """
    new = not path.exists() or path.stat().st_size == 0
    if not new:
        with path.open(newline="") as file:
            header = next(csv.reader(file))
        if header != COLUMNS:
            raise RuntimeError(f"{path} has the columns {header}, these rows have {COLUMNS}. Name another file.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def rows_of(
    modes: Sequence[str], gpus: int, about: dict[str, str], run: Callable[[str], dict[str, float]]
) -> list[dict[str, str]]:
    """Rows of these modes, measured in this order; `run` measures one mode."""
    sizes = {"tokens": str(TOKENS), "hidden": str(HIDDEN), "topk": str(TOPK), "experts": str(EXPERTS)}
    rows, filled = [], False
    for mode in modes:
        # Without an earlier compilation the cache is not warm.
        if mode == "jit-warm" and not filled:
            run("jit-cold")
        filled = filled or mode != "aot"
        figures = run(mode)
        for kind in ("aot", "jit") if mode == "beside" else (mode,):
            row = {
                "mode": f"{kind}-beside" if mode == "beside" else mode,
                "gpus": str(gpus),
                **sizes,
                "payload": "bf16",
            }
            for name in _MEASURED:
                # With two layers in one process, start-up times have no meaning.
                value = figures.get(f"{kind} {name}") if mode == "beside" else figures[name]
                row[name] = "" if value is None else f"{value:.2f}" if name.endswith("_s") else f"{value:.1f}"
            rows.append({**row, **about, "built_with": about["built_with"] if kind == "aot" else about["triton"]})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Measure every mode, print rows and a table, and append the rows to a file if one is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=4, choices=(2, 4, 8), help="as in tests/aot/gpu.toml; default: 4")
    parser.add_argument("--aot", help="folder of the library; default: TRITON_EP_AOT_DIR, or the package")
    parser.add_argument("--csv", type=Path, help="append rows here")
    parser.add_argument("--commit", help="commit of this checkout, if git is missing")
    parser.add_argument("--batches", type=int, default=100, help="batches of timed calls; default: 100")
    parser.add_argument("--timeout", type=float, default=150, help="seconds for a mode; default: 150")
    parser.add_argument("--mode", choices=MODES, action="append", help="in this order; default: all")
    parser.add_argument("--worker", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.started, options.worker, options.batches)
        return
    sys.path.insert(0, str(ROOT))
    from triton_ep.bench.rows import commit_of_checkout, environment
    from triton_ep.runtime.launch import INTERPRETING, architecture
    from triton_ep.runtime.library import Library, default_folder

    if INTERPRETING:
        parser.exit(2, f"{parser.prog}: cubins need GPUs, there are none here\n")
    commit = options.commit or commit_of_checkout()
    if options.csv and commit is None:
        parser.exit(2, f"{parser.prog}: no git checkout: pass --commit, for no row is stored without it\n")
    folder = Path(options.aot).resolve() if options.aot else default_folder()
    about = environment(commit or "unknown", gpus=True)
    about["built_with"] = f"triton {Library(folder, architecture()).versions['triton']}"
    with tempfile.TemporaryDirectory() as cache:

        def run(mode: str) -> dict[str, float]:
            if mode == "jit-cold":
                shutil.rmtree(cache)
                os.mkdir(cache)
            return measure(mode, options.gpus, str(folder), cache, options.batches, options.timeout)

        rows = rows_of(options.mode or MODES, options.gpus, about, run)
    print(table(rows))
    if options.csv:
        store(options.csv, rows)


if __name__ == "__main__":
    main()
