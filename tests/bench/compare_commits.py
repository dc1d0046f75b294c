"""Measure two checkouts in one run, in turn: is the new one slower?

    git worktree add build/old COMMIT
    python tests/bench/compare_commits.py --old build/old --new . --repeats 5 \\
        "roundtrip --capacity static --provider triton_ep --payload bf16,mxfp8" "low-latency --tokens 8,128"

Each argument is a command line of `triton-ep bench`, or "doors" with options of bench_doors.py, where both sides make
the calls of the new checkout's bench_doors.py. Both checkouts start their ranks once, on the same GPUs, and then
measure in turn; the other one sleeps. A row of the table has the median of the repeats of each checkout, the change in
percent, the spread of the old one, (largest - smallest) / median, and both host times of a call, the smallest of the
repeats, because other work on the host only adds to them. The exit code is 1 if a row is slower by more than `--limit`
percent plus that spread. SIGTERM, which `timeout` sends, ends the run after the last repeat of both, with exit code 3.
"""

import argparse
import contextlib
import csv
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIDES = ("old", "new")
KEY = ("op", "provider", "mode", "payload", "nodes", "ranks", "tokens", "hidden", "topk", "experts")
MACHINE = ("gpu", "driver", "torch", "triton", "nvshmem", "date")


def _measure(side: str, commands: list[str], repeats: int, folder: str) -> None:
    """Run on each rank: measure when it is this checkout's turn."""
    import torch
    import torch.distributed as dist

    from triton_ep.bench.job import join
    from triton_ep.distributed import finalize_distributed, initialize_distributed

    settings = [_settings(command) for command in commands if not _of_doors(command)]
    rank = join(settings[0]) if settings else initialize_distributed(timeout_s=300)[0]
    with contextlib.ExitStack() as opened:
        measures = [_opened(command, opened) for command in commands]
        for repeat in range(repeats):
            while _turn(folder) != f"{repeat} {side}":
                time.sleep(0.05)
            rows = [row for measure in measures for row in measure() if row["op"] != "floor"]
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            dist.all_gather_object([None] * dist.get_world_size(), rank)
            if rank == 0:
                (Path(folder) / f"{side}-{repeat}.json").write_text(json.dumps(rows))
                last = side == SIDES[-1]
                _give_turn(folder, f"{repeat + last} {SIDES[0] if last else SIDES[1]}")
    finalize_distributed()


def _of_doors(command: str) -> bool:
    return command.split()[0] == "doors"


def _doors_arguments(command: str) -> argparse.Namespace:
    import bench_doors  # of the new checkout: in the folder of this program

    return bench_doors.doors_parser().parse_args(command.split()[1:])


def _opened(command: str, opened: contextlib.ExitStack) -> Callable[[], list[dict[str, Any]]]:
    """A function that measures a command's rows once."""
    if _of_doors(command):
        import bench_doors

        return opened.enter_context(bench_doors.measure_in_turns(_doors_arguments(command)))

    from triton_ep.bench.run import measure_all

    settings = _settings(command)
    return lambda: measure_all(settings).rows


def _ranks(command: str) -> int | None:
    return _doors_arguments(command).ranks if _of_doors(command) else _settings(command).ranks


def _settings(command: str) -> Any:
    from triton_ep.cli import bench

    # Set by the import of triton_ep; read here because module names differ between checkouts.
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    arguments = parser.parse_args(command.split())
    ranks = 4
    if not interpreting:
        import torch

        ranks = torch.cuda.device_count()
    return bench.settings_of(arguments, ranks, interpreting=interpreting)


def _turn(folder: str) -> str:
    return (Path(folder) / "turn").read_text()


def _give_turn(folder: str, turn: str) -> None:
    path = Path(folder) / "turn"
    path.with_suffix(".part").write_text(turn)
    path.with_suffix(".part").rename(path)


def _work(side: str, folder: str, repeats: int, commands: list[str]) -> None:
    """The process of a checkout: start its ranks."""
    from triton_ep.distributed import run_ranks  # before torch's Triton: decides whether kernels are interpreted

    run_ranks(_measure, _ranks(commands[0]), side, commands, repeats, folder)


def _table(
    folder: Path, repeats: int, limit_pct: float, commits: dict[str, str | None]
) -> tuple[list[dict[str, Any]], bool]:
    """A line per row, and whether a row is slower than allowed.

    commits: commits of the sides; None: taken from their rows.
    """
    found: dict[tuple[str, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    host: dict[tuple[str, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    of_side: dict[str, dict[str, Any]] = {}
    for side in SIDES:
        for repeat in range(repeats):
            for row in json.loads((folder / f"{side}-{repeat}.json").read_text()):
                of_side[side] = row
                key = tuple(str(row[name]) for name in KEY)
                for kept, name in ((found, "median_us"), (host, "host_us")):
                    if row[name]:
                        kept[key][side].append(float(row[name]))
    about = {f"{side}_commit": commits[side] or of_side[side]["commit"] for side in SIDES}
    about |= {name: of_side["new"][name] for name in MACHINE} | {"repeats": str(repeats)}
    lines, slower = [], False
    for key, times in found.items():
        old, new = (statistics.median(times[side]) if times[side] else float("nan") for side in SIDES)
        spread = 100 * (max(times["old"]) - min(times["old"])) / old
        change = 100 * (new / old - 1)
        bad = not change <= limit_pct + spread
        slower |= bad
        line = {"old_us": f"{old:.1f}", "new_us": f"{new:.1f}", "change_pct": f"{change:+.2f}"}
        line |= {"old_spread_pct": f"{spread:.2f}", "slower": "SLOWER" if bad else ""}
        for side in SIDES:
            times_of_host = host[key][side]
            line[f"{side}_host_us"] = f"{min(times_of_host):.1f}" if times_of_host else ""
        lines.append({**dict(zip(KEY, key, strict=True)), **line, **about})
    return lines, slower


def _run_both(a: argparse.Namespace, folder: str) -> bool:
    """Run both checkouts until they have ended, or until SIGTERM. Returns whether one failed."""
    _give_turn(folder, f"0 {SIDES[0]}")
    processes = []
    for side, checkout in zip(SIDES, (a.old, a.new), strict=True):
        path = str(Path(checkout).resolve())
        words = ["--old", a.old, "--repeats", str(a.repeats), "--side", side, "--folder", folder, *a.commands]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([path, os.environ.get("PYTHONPATH", "")])}
        processes.append(subprocess.Popen([sys.executable, __file__, *words], cwd=path, env=environment))
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    while any(process.poll() is None for process in processes):
        if stopped or any(process.poll() for process in processes):  # the other one would wait forever for its turn
            for process in processes:
                process.kill()
        time.sleep(0.2)
    return not stopped and any(process.returncode for process in processes)


def main() -> int:
    """Run both checkouts and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="+", metavar="COMMAND", help="command line, in quotes")
    parser.add_argument("--old", required=True, metavar="DIR")
    parser.add_argument("--new", default=".", metavar="DIR")
    for side in SIDES:
        parser.add_argument(f"--{side}-commit", help="commit in the table, if that checkout has no .git")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=float, default=1.0, metavar="PERCENT")
    parser.add_argument("--csv", metavar="PATH", help="write the table there")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.side:
        _work(a.side, a.folder, a.repeats, a.commands)
        return 0
    with tempfile.TemporaryDirectory() as name:
        failed = _run_both(a, name)
        repeats = int(_turn(name).split()[0])
        if failed or not repeats:
            return 2
        lines, slower = _table(Path(name), repeats, a.limit, {"old": a.old_commit, "new": a.new_commit})
    shown = [name for name in lines[0] if name not in MACHINE and not name.endswith("_commit")]
    widths = {name: max(len(name), *(len(line[name]) for line in lines)) for name in shown}
    for line in [dict(zip(widths, widths, strict=True)), *lines]:
        print("  ".join(f"{line[name]:>{width}}" for name, width in widths.items()))
    if a.csv:
        with open(a.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)
    return int(slower) if repeats == a.repeats else 3


if __name__ == "__main__":
    sys.exit(main())
