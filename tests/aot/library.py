"""One build for the compile gate and the tests of ahead-of-time kernels: the whole manifest for sm_90, and for sm_100
every kernel, with every value of every option where its compiler may make something else of one.

`make test` makes it before the tests, with a progress bar: python -m tests.aot.library. Without that, whichever test
asks first makes it, and the processes of pytest-xdist wait for it. Kernels of a test process are interpreted, so
`python -m triton_ep.aot build` compiles them. What has not changed since the last build is kept.
"""

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
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
"""How names of kernels with matrix products begin. An architecture has instructions of its own for these alone."""
STUCK_S = 900.0
"""Seconds without a kernel more after which the compiler counts as stuck. How long all take has no limit."""


@dataclass(frozen=True)
class Built:
    """A library, what its build printed, and whether variants that call NVSHMEM are in it."""

    folder: Path
    output: str
    has_bitcode: bool


def run_aot(*words: str | Path, root: Path = ROOT, timeout: float = LIMIT_S) -> subprocess.CompletedProcess:
    """`python -m triton_ep.aot` of the tree at `root`, in a process without this one's settings."""
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
    """The library of the package's manifest, in build/."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # of this session; each process has a folder of its own in it
    log = base / "aot-library.log"
    with (base / "aot-library.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not log.exists():
            unfinished = log.with_suffix(".part")
            with unfinished.open("w") as file:
                _build(file)
            unfinished.rename(log)
    return Built(FOLDER, log.read_text(), has_bitcode())


def _chosen(wanted: Sequence[KernelRequest]) -> list[KernelRequest]:
    """Of kernels that multiply, variants in which each option has each of its values; of others one variant, and one
    that calls NVSHMEM."""
    by_kernel: dict[tuple[str, bool], list[KernelRequest]] = {}
    for request in wanted:
        by_kernel.setdefault((request.kernel, request.calls_nvshmem), []).append(request)
    return [
        request
        for (kernel, _), variants in by_kernel.items()
        for request in (_covering(variants) if kernel.startswith(MULTIPLYING) else variants[:1])
    ]


def _covering(variants: Sequence[KernelRequest]) -> list[KernelRequest]:
    """Few of them that have every constant and every type that occurs; the same ones every time."""
    chosen: list[KernelRequest] = []
    left = {option for request in variants for option in _options(request)}
    while left:
        chosen.append(max(variants, key=lambda request: len(_options(request) & left)))
        left -= _options(chosen[-1])
    return chosen


def _options(request: KernelRequest) -> set[tuple[str, object]]:
    return {*request.constexprs.items(), *request.types.items(), ("aligned", request.aligned), ("ones", request.ones)}


def _build(log: TextIO) -> int:
    """Build, and write into `log` what the builds say; the worst exit code. Raises TimeoutError when one is stuck."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".variants") as listed:
        listed.write("\n".join(request.text() for request in _chosen(read_manifest(default_manifest()))))
        listed.flush()
        return max(_build_for("sm_90", log), _build_for("sm_100", log, "--variant", listed.name))


def _build_for(arch: str, log: TextIO, *more: str) -> int:
    words = ["build", "--arch", arch, "--out", FOLDER, "--only", "--jobs", os.cpu_count() or 1, *more]
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
    """What a build has noted of every variant, and "kernel", "variant" as text, "arch" as a number, "whole": the
    compiler may know that rows are multiples of 16 in length."""
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
            found.append({**facts[request.signature()], **about})
    return found


if __name__ == "__main__":  # before the tests, where its progress can be seen
    sys.exit(_build(sys.stderr))
