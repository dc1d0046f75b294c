"""Output of a run on rank 0: rows, tables of kernels, pictures, progress."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from triton_ep.bench import rows as bench_rows
from triton_ep.bench import tables, timing
from triton_ep.bench.job import Measured
from triton_ep.bench.settings import Case, Settings


class Results:
    """Rows and recorded calls of a run, on rank 0."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rows: list[bench_rows.Row] = []
        self.calls: dict[str, list[list[timing.Span]]] = {}

    def add_floors(self, new: list[bench_rows.Row]) -> None:
        """Add the rows of the floors."""
        self._store(new)

    def add(self, case: Case, new: list[bench_rows.Row], found: dict[str, Measured]) -> None:
        """Add the rows and measurements of a case; the rows go to the file at once."""
        self._store(new)
        for row in new:
            if row["skip_reason"]:
                print(f"    {row['op']} skipped: {row['skip_reason']}", file=sys.stderr, flush=True)
            else:
                print(f"    {row['op']}: {tables.time_text(float(row['median_us']))}", file=sys.stderr, flush=True)
        for op, result in found.items():
            if any(result.calls):  # on the CPU only launches of this package's kernels are recorded
                self.calls[f"{op}, {case.provider_here} {case.mode} {case.payload}, {case.shape}"] = result.calls

    def finish(self) -> None:
        """Print everything, as tables or as one JSON object, and draw the requested pictures."""
        s = self.settings
        stages = {name: timing.stages_of(calls) for name, calls in self.calls.items()} if s.stages else {}
        if s.json:
            plain = {name: [asdict(stage) for stage in found] for name, found in stages.items()}
            print(json.dumps({"rows": self.rows, "stages": plain}, indent=1), flush=True)
        else:
            if s.stages and not stages and s.command != "host":
                print("No kernel was recorded: torch's profiler cannot see this GPU (CUPTI).\n")
            for name, found in stages.items():
                print(f"{name}, kernels on rank 0:\n{tables.stage_table(found)}\n")
            if s.interpreting:
                print(f"{tables.CPU_NOTE}\n")
            last = {"moe-layer": tables.moe_table, "beside-gemm": tables.added}.get(s.command, tables.compared)
            print("\n".join([tables.table(self.rows, tables.terminal_width()), *last(self.rows)]), flush=True)
        if s.plot or s.timeline:
            from triton_ep.bench import plot

            if s.plot:
                plot.draw_times(self.rows, Path(s.plot))
            if s.timeline:
                first = list(self.calls.items())[: len(s.ops)]  # the ops of the first measured case
                plot.draw_timelines({name: calls[-1] for name, calls in first}, Path(s.timeline))

    def _store(self, new: list[bench_rows.Row]) -> None:
        self.rows += new
        if self.settings.csv:
            bench_rows.append_rows(Path(self.settings.csv), new)


@contextlib.contextmanager
def progress(total: int, *, here: bool) -> Iterator[Callable[[str], None]]:
    """A function that reports the next step: a bar of rich on a terminal, else lines; nothing if not `here`."""
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
