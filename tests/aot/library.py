"""One build for the compile gate and the tests of ahead-of-time kernels: for sm_90 the whole manifest, but of variants
that differ only in the type of ids one; for sm_100 every kernel, with every value of every option for kernels that
sm_100 compiles differently.

`make test` builds it before the tests, with a progress bar: python -m tests.aot.library. Otherwise the first test that
needs it builds it, and the processes of pytest-xdist wait. Kernels of a test process are interpreted, so
`python -m triton_ep.aot build` compiles them. Kernels unchanged since the last build are kept.
"""

import dataclasses
import fcntl
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import pytest

from tests.patience import LIMIT_S
from triton_ep.aot.manifest import default_manifest, read_manifest
from triton_ep.errors import HeapError
from triton_ep.heap.bitcode import find_bitcode
from triton_ep.runtime.library import Library, architectures
from triton_ep.runtime.plans.request import KernelRequest

ROOT = Path(__file__).resolve().parents[2]
ARCHS = ("sm_90", "sm_100")
FOLDER = ROOT / "build" / "aot-of-tests"
MULTIPLYING = ("grouped_", "gate_up_", "rows_product", "down_dgrad_", "weight_gradient_")
"""Prefixes of the names of kernels with matrix products. Only for these does an architecture have its own instructions.
"""
IDS = ("topk_idx_ptr", "scatter_idx_ptr")
"""Ids, which a kernel loads in one place, as int32 or int64. Their type decides nothing that the gate checks."""
STUCK_S = 900.0
"""Seconds without another compiled kernel after which the compiler counts as stuck. The whole build has no limit."""


@dataclass(frozen=True)
class Built:
    """A library, the output of its build, and whether it has variants that call NVSHMEM."""

    folder: Path
    output: str
    has_bitcode: bool


def run_aot(*words: str | Path, root: Path = ROOT, timeout: float = LIMIT_S) -> subprocess.CompletedProcess:
    """Run `python -m triton_ep.aot` of the tree at `root`, in a process without this process's TRITON_ variables."""
    return subprocess.run(**_aot(words, root), capture_output=True, text=True, timeout=timeout)


def _aot(words: Sequence[object], root: Path) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    return {
        "args": [sys.executable, "-m", "triton_ep.aot", *map(str, words)],
        "cwd": root,
        "env": {**environment, "PYTHONPATH": str(root)},
    }


def has_bitcode() -> bool:
    """Whether variants that call NVSHMEM can be compiled here."""
    try:
        find_bitcode()
    except HeapError:
        return False
    return True


def build_once(factory: pytest.TempPathFactory) -> Built:
    """Build the library of the package's manifest in build/, once per session."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # the folder of this session, in which each process has its own
    log = base / "aot-library.log"
    with (base / "aot-library.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not log.exists():
            unfinished = log.with_suffix(".part")
            with unfinished.open("w") as file:
                _build(file)
            unfinished.rename(log)
    return Built(FOLDER, log.read_text(), has_bitcode())


def wanted_for(arch: str) -> list[KernelRequest]:
    """The variants of the library for an architecture."""
    every = read_manifest(default_manifest())
    return _one_of_twins(every) if arch == "sm_90" else _chosen(every)


def _one_of_twins(wanted: Sequence[KernelRequest]) -> list[KernelRequest]:
    """Of variants that differ only in the type of ids one: of the next such variants of its kernel another type."""
    twins: dict[str, list[KernelRequest]] = {}
    for request in wanted:
        types = {name: kind for name, kind in request.types.items() if name not in IDS}
        twins.setdefault(dataclasses.replace(request, types=types).signature(), []).append(request)
    turns: Counter[str] = Counter()
    chosen = []
    for same in twins.values():
        chosen.append(same[turns[same[0].kernel] % len(same)])
        turns[same[0].kernel] += len(same) > 1
    return chosen


def _chosen(wanted: Sequence[KernelRequest]) -> list[KernelRequest]:
    """For kernels that multiply, variants that cover all values of all options; for others one variant, and one that
    calls NVSHMEM."""
    by_kernel: dict[tuple[str, bool], list[KernelRequest]] = {}
    for request in wanted:
        by_kernel.setdefault((request.kernel, request.calls_nvshmem), []).append(request)
    return [
        request
        for (kernel, _), variants in by_kernel.items()
        for request in (_covering(variants) if kernel.startswith(MULTIPLYING) else variants[:1])
    ]


def _covering(variants: Sequence[KernelRequest]) -> list[KernelRequest]:
    """A small subset that covers all constants and types that occur; deterministic."""
    chosen: list[KernelRequest] = []
    left = {option for request in variants for option in _options(request)}
    while left:
        chosen.append(max(variants, key=lambda request: len(_options(request) & left)))
        left -= _options(chosen[-1])
    return chosen


def _options(request: KernelRequest) -> set[tuple[str, object]]:
    return {*request.constexprs.items(), *request.types.items(), ("aligned", request.aligned), ("ones", request.ones)}


def _build(log: TextIO) -> int:
    """Build, with output to `log`; return the worst exit code. Raises TimeoutError when a build is stuck."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    return max(_build_for(arch, log) for arch in ARCHS)


def list_variants(arch: str, path: Path) -> Path:
    """Write the variants of an architecture to a file for `--variant`."""
    path.write_text("\n".join(request.text() for request in wanted_for(arch)))
    return path


def _build_for(arch: str, log: TextIO) -> int:
    listed = list_variants(arch, FOLDER / f"{arch}.variants")
    words = ["build", "--arch", arch, "--out", FOLDER, "--only", "--jobs", os.cpu_count() or 1, "--variant", listed]
    words += [] if has_bitcode() else ["--no-nvshmem"]
    process = subprocess.Popen(**_aot(words, ROOT), stdout=log, stderr=log)
    size, since = -1, time.monotonic()
    while process.poll() is None:
        time.sleep(0.2)
        if (now := os.fstat(log.fileno()).st_size) != size:
            size, since = now, time.monotonic()
        elif time.monotonic() - since > STUCK_S:
            process.kill()
            raise TimeoutError(f"no kernel was compiled for {STUCK_S:g} s; the last words are in {log.name}")
    return process.returncode


def facts_of(folder: Path) -> list[dict[str, Any]]:
    """The facts that a build recorded for every variant, plus "signature", "kernel", "variant" as text, "arch" as a
    number, "whole": the compiler may know that row lengths are multiples of 16."""
    found = []
    for arch in architectures(folder):
        facts = json.loads((folder / arch / "facts.json").read_text())
        library = Library(folder, arch)
        for entry in library.entries:
            request = entry.request
            named = {**request.types, **request.constexprs}
            text = " ".join(f"{name}={value}" for name, value in named.items())
            whole = bool(request.aligned) or not library.kernels[request.kernel]["specialised"]
            about = {"kernel": request.kernel, "variant": text, "arch": int(arch[3:]), "whole": whole}
            found.append({**facts[request.signature()], **about, "signature": request.signature()})
    return found


if __name__ == "__main__":  # before the tests, to show progress
    sys.exit(_build(sys.stderr))
