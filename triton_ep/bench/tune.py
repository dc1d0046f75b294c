"""The search of `triton-ep tune`: one choice after the other, each kept if it is faster.

First the programs of the exchange, then rows and warps of push, expand, reduce and pull, in the order in which rows
pass them. A candidate is timed together with all earlier choices, after a check that it gives the right rows.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch.distributed as dist

from triton_ep import distributed as ep_distributed
from triton_ep.bench import report, timing
from triton_ep.bench.exchange import checked_calls
from triton_ep.bench.job import Job, Place, join
from triton_ep.bench.providers import LayerProvider
from triton_ep.bench.settings import Case, Settings, Shape
from triton_ep.bench.tables import time_text
from triton_ep.context.choice import key_of
from triton_ep.runtime.tuned.table import KernelChoice, Key, TunedEntry, format_table, merged, read_table

NUM_SM = (8, 16, 20, 24, 32, 48, 64)
_QUICK_NUM_SM = (16, 24, 32)
_INTERPRETED_NUM_SM = (1, 2)
_SLACK = 1.02  # fewer programs win if they are slower by no more than this factor
_GAIN = 0.99  # another choice of a kernel wins if its time is below this part of the best
_OP = {"push": "dispatch", "expand": "dispatch", "reduce": "combine", "pull": "combine"}
_KERNELS: dict[str, tuple[tuple[int, int], ...]] = {  # rows and warps; a search begins with the built-in ones
    "push": ((1, 8), (2, 8), (4, 8), (1, 16), (2, 16), (2, 32)),
    "expand": ((1, 2), (1, 8), (2, 4)),
    "reduce": ((1, 8), (1, 16), (2, 16), (1, 32), (2, 32)),
    "pull": ((1, 8), (1, 16), (1, 32), (2, 32)),
}
_QUICK_KERNELS = {
    "push": ((2, 8), (1, 16)),
    "expand": ((1, 8), (2, 4)),
    "reduce": ((1, 16), (2, 32)),
    "pull": ((1, 16), (2, 32)),
}


@dataclass(frozen=True)
class Request:
    """A request: shapes, payloads and candidates of num_sm in `settings`; `out`: file to write, None: none."""

    settings: Settings
    quick: bool
    out: str | None

    def kernels(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Candidates of each kernel, rows and warps. The interpreter has one shape of each."""
        if self.settings.interpreting:
            return {}
        found = _QUICK_KERNELS if self.quick else _KERNELS
        # Without local combine nothing is reduced before the pull.
        return {name: pairs for name, pairs in found.items() if name != "reduce" or self.settings.local_combine}

    def measurements(self) -> int:
        """Measurements of one case: programs, kernels, and the final choice once more."""
        return len(self.settings.num_sm) + sum(len(pairs) for pairs in self.kernels().values()) + 1


@dataclass(frozen=True)
class Trial:
    """One measurement in microseconds: slowest rank, median. None: not timed."""

    entry: TunedEntry
    dispatch_us: float | None
    combine_us: float | None


def num_sm_candidates(*, interpreting: bool, quick: bool) -> tuple[int, ...]:
    """Default candidates for the programs of the exchange."""
    if interpreting:
        return _INTERPRETED_NUM_SM
    return _QUICK_NUM_SM if quick else NUM_SM


def run(request: Request) -> None:
    """Entry point of a rank: join the job, tune every case, print and write the table, leave.

    Raises:
        WrongResult: a candidate computes a wrong result.
    """
    rank = join(request.settings)
    trials = tune_all(request)
    if rank == 0:
        finish(request, trials)
    ep_distributed.finalize_distributed()


def tune_all(request: Request) -> list[list[Trial]]:
    """The trials of every case, each ending with the chosen one; the same on all ranks. Collective."""
    settings = request.settings
    device = ep_distributed.current_heap().device
    place = Place(dist.get_rank(), dist.get_world_size(), ep_distributed.local_world_size(), device, {})
    cases = [(shape, payload) for shape in settings.shapes for payload in settings.payloads]
    found = []
    with report.progress(len(cases) * request.measurements(), here=place.rank == 0) as step:
        for shape, payload in cases:
            found.append(_Search(request, Job(settings, shape, place), payload, step).run())
    return found


def finish(request: Request, trials: list[list[Trial]]) -> None:
    """Print the choices as TOML or JSON, and merge them into the file, which keeps its other entries."""
    entries = [of_case[-1].entry for of_case in trials]
    if request.out is not None:
        path = Path(request.out)
        old = read_table(path) if path.exists() else []
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(format_table(merged(old, entries)), encoding="utf-8")
        print(f"wrote {path}; TRITON_EP_TUNED={path} makes layers with num_sm=None use it", file=sys.stderr, flush=True)
    if request.settings.json:
        plain = {
            "entries": [asdict(entry) for entry in entries],
            "trials": [[asdict(trial) for trial in of_case] for of_case in trials],
        }
        print(json.dumps(plain, indent=1), flush=True)
    else:
        print(format_table(entries), end="", flush=True)


class _Search:
    """The search for one shape and payload."""

    def __init__(self, request: Request, job: Job, payload: str, step: Callable[[str], None]) -> None:
        self.request, self.job, self.payload, self.step = request, job, payload, step
        self.trials: list[Trial] = []

    def run(self) -> list[Trial]:
        """All trials; the last is the chosen one, measured again."""
        s = self.request.settings
        start = self._start(self.job.shape)
        trials = [self._try(replace(start, num_sm=num_sm), "dispatch", "combine") for num_sm in s.num_sm]
        chosen = pick_programs(trials)
        best = {"dispatch": chosen.dispatch_us, "combine": chosen.combine_us}
        entry = chosen.entry
        for kernel, pairs in self.request.kernels().items():
            op, base = _OP[kernel], entry
            for rows, warps in pairs:
                candidate = base.with_kernel(kernel, KernelChoice(rows, warps))
                trial = self._try(candidate, op)
                time, least = (trial.dispatch_us if op == "dispatch" else trial.combine_us), best[op]
                assert time is not None and least is not None, "both ops of the first trials were timed"
                if time < least * _GAIN:
                    best[op], entry = time, candidate
        last = self._try(entry, "dispatch", "combine")
        assert last.dispatch_us is not None and last.combine_us is not None, "both were asked for"
        entry = replace(last.entry, dispatch_us=round(last.dispatch_us, 1), combine_us=round(last.combine_us, 1))
        self.trials[-1] = replace(last, entry=entry)
        return self.trials

    def _start(self, shape: Shape) -> TunedEntry:
        s = self.request.settings
        return TunedEntry(
            key=Key("", 1, 1, self.payload, shape.hidden, 1),  # placeholder: `_try` takes the key of the measured layer
            num_sm=1,
            topk=shape.topk,
            experts=shape.experts,
            local_combine=s.local_combine,
            dispatch_us=0.0,
            combine_us=0.0,
            commit=s.commit,
            date=datetime.date.today().isoformat(),
        )

    def _try(self, entry: TunedEntry, *ops: str) -> Trial:
        """Create a layer from the entry, check it, time the ops; collective."""
        job, settings = self.job, self.request.settings
        case = Case(settings, job.shape, "triton_ep", self.payload, entry.num_sm, settings.capacity)
        choices = {name: entry.kernel(name) for name in _OP}
        text = ", ".join(f"{name} {c.rows} rows {c.warps} warps" for name, c in choices.items() if c is not None)
        self.step(f"{self.payload}, {job.shape}: num_sm {entry.num_sm}{', ' if text else ''}{text}")
        times: dict[str, float] = {}
        with job.layer(case, entry) as layer:
            provider = LayerProvider(layer)
            calls = checked_calls(job, case, provider)
            for op in ops:
                times[op] = timing.over_ranks(
                    job.timer.times(timing.rotated(calls[op], len(job.idxs)), provider.meet)
                ).median_us
            key = key_of(layer.config, job.device)
        job.say("    " + ", ".join(f"{op}: {time_text(us)}" for op, us in times.items()))
        trial = Trial(replace(entry, key=key), times.get("dispatch"), times.get("combine"))
        self.trials.append(trial)
        return trial


def pick_programs(trials: list[Trial]) -> Trial:
    """The trial with the fewest programs among those about as fast as the fastest, dispatch and combine together."""
    both = [(trial.dispatch_us or 0.0) + (trial.combine_us or 0.0) for trial in trials]
    least = min(both)
    close = [trial for trial, us in zip(trials, both, strict=True) if us <= least * _SLACK]
    return min(close, key=lambda trial: trial.entry.num_sm)
