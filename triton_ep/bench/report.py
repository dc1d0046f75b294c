"""What rank 0 shows and stores of a run: rows, tables of kernels, pictures, progress."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from triton_ep.bench import rows as bench_rows
from triton_ep.bench import timing
from triton_ep.bench.job import Measured
from triton_ep.bench.settings import Case, Settings

_SHAPE = ("op", "payload", "nodes", "ranks", "tokens", "hidden", "topk", "experts", "routing")


class Results:
    """Rows and recorded calls of a run, on rank 0."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rows: list[bench_rows.Row] = []
        self.calls: dict[str, list[list[timing.Span]]] = {}

    def add_floors(self, new: list[bench_rows.Row]) -> None:
        """Rows of the floors."""
        self._store(new)

    def add(self, case: Case, new: list[bench_rows.Row], found: dict[str, Measured]) -> None:
        """Rows of a case and what was measured for them; the rows go to the file at once."""
        self._store(new)
        for row in new:
            if row["skip_reason"]:
                print(f"    {row['op']} skipped: {row['skip_reason']}", file=sys.stderr, flush=True)
            else:
                print(f"    {row['op']}: {row['median_us']} us", file=sys.stderr, flush=True)
        for op, result in found.items():
            if result.calls:
                self.calls[f"{op}, {case.provider} {case.mode} {case.payload}, {case.shape}"] = result.calls

    def finish(self) -> None:
        """Print everything, as tables or as one JSON object, and draw what was asked for."""
        s = self.settings
        stages = {name: timing.stages_of(calls) for name, calls in self.calls.items()} if s.stages else {}
        if s.json:
            plain = {name: [asdict(stage) for stage in found] for name, found in stages.items()}
            print(json.dumps({"rows": self.rows, "stages": plain}, indent=1), flush=True)
        else:
            for name, found in stages.items():
                print(f"{name}, kernels on rank 0:\n{timing.stage_table(found)}\n")
            last = moe_table if s.command == "moe-layer" else compared
            print("\n".join([bench_rows.table(self.rows), *last(self.rows)]), flush=True)
        if s.plot or s.timeline:
            from triton_ep.bench import plot

            if s.plot:
                plot.draw_times(self.rows, Path(s.plot))
            if s.timeline:
                first = list(self.calls.items())[: len(s.ops)]  # the ops of the first case that was measured
                plot.draw_timelines({name: calls[-1] for name, calls in first}, Path(s.timeline))

    def _store(self, new: list[bench_rows.Row]) -> None:
        self.rows += new
        if self.settings.csv:
            bench_rows.append_rows(Path(self.settings.csv), new)


def compared(rows: Sequence[bench_rows.Row]) -> list[str]:
    """Per op, payload and shape a line: the layer's best time beside the best of each other provider."""
    best: dict[tuple[str, ...], dict[str, bench_rows.Row]] = defaultdict(dict)
    for row in rows:
        if row["median_us"] and row["op"] != "floor":
            of_shape = best[tuple(row[name] for name in _SHAPE)]
            known = of_shape.get(row["provider"], row)
            of_shape[row["provider"]] = min(known, row, key=lambda row: float(row["median_us"]))
    lines = []
    for found in best.values():
        ours = found.pop("triton_ep", None)
        if ours is None or not found:
            continue
        time = float(ours["median_us"])
        others = ", ".join(f"{float(r['median_us']) / time:.2f} x that of {p}" for p, r in sorted(found.items()))
        shape = f"{ours['tokens']} tokens, hidden {ours['hidden']}, top-{ours['topk']} of {ours['experts']}"
        what = ours["op"] if ours["op"] == "barrier" else f"{ours['op']} {ours['payload']}, {shape}"
        lines.append(f"{what}: {time:.1f} us ({ours['mode']}); speed is {others}")
    return lines


def moe_table(rows: Sequence[bench_rows.Row]) -> list[str]:
    """Rows of MoE layers as text: time, its ratios to the collectives' and the products' of this run, memory, error."""
    measured = [row for row in rows if row["op"].startswith("moe_layer") and row["median_us"]]
    names = ("nccl", "gloo"), ("gemm-only",)
    base = {
        (*(row[name] for name in _SHAPE if name != "payload"), ffn_of(row), column): float(row["median_us"])
        for row in measured
        for column, providers in enumerate(names)
        if row["provider"] in providers
    }
    lines = [["op", "provider", "mode", "payload", "ms", "x nccl", "x gemm-only", "peak MiB", "error dB"]]
    for row in measured:
        key = (row["op"].removesuffix("_refresh"), *(row[name] for name in _SHAPE[2:]), ffn_of(row))
        us = float(row["median_us"])
        ratios = [f"{us / base[*key, column]:.3f}" if (*key, column) in base else "" for column in range(2)]
        cells = [row[name] for name in ("op", "provider", "mode", "payload")]
        lines.append([*cells, f"{us / 1e3:.3f}", *ratios, row["peak_mib"], row["error_db"]])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    shapes = dict.fromkeys(
        tuple(row[name] for name in ("tokens", "hidden", "topk", "experts", "ranks")) for row in measured
    )
    title = "; ".join(f"{t} tokens per rank, hidden {h}, top-{k} of {e}, {w} ranks" for t, h, k, e, w in shapes)
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return ["", f"MoE layer, {title}:", *text]


def ffn_of(row: bench_rows.Row) -> str:
    """The part of a MoE layer's mode that names the width of its experts."""
    return next((part for part in row["mode"].split("-") if part.startswith("ffn")), "")


@contextlib.contextmanager
def progress(total: int, *, here: bool) -> Iterator[Callable[[str], None]]:
    """A function that says what comes next: a bar of rich on a terminal, else lines; nothing if not `here`."""
    if not here:
        yield lambda _: None
        return
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        done = 0

        def line(text: str) -> None:
            nonlocal done
            done += 1
            print(f"[{done}/{total}] {text}", file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    with Progress(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        begun = False

        def step(text: str) -> None:
            nonlocal begun
            print(text, file=sys.stderr, flush=True)
            bar.update(task, advance=int(begun))
            begun = True

        yield step
        bar.update(task, advance=1)
