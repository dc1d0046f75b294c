"""One build of the whole manifest for the tests of a session, whichever of them asks first.

Kernels of a test process are interpreted, so `python -m triton_ep.aot build` compiles them. The processes of
pytest-xdist share what it makes: one builds, the others wait.
"""

import fcntl
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from triton_ep.aot.store import Library, architectures
from triton_ep.errors import HeapError
from triton_ep.heap.bitcode import find_bitcode

ROOT = Path(__file__).resolve().parents[2]
ARCHS = ("sm_90", "sm_100")


@dataclass(frozen=True)
class Built:
    """A library, what its build printed, and whether variants that call NVSHMEM are in it."""

    folder: Path
    output: str
    has_bitcode: bool


def run_aot(*words: str | Path, root: Path = ROOT, timeout: int = 540) -> subprocess.CompletedProcess:
    """`python -m triton_ep.aot` of the tree at `root`, in a process without this one's settings."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    return subprocess.run(
        [sys.executable, "-m", "triton_ep.aot", *map(str, words)],
        cwd=root,
        env={**environment, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def has_bitcode() -> bool:
    """Whether variants that call NVSHMEM can be compiled here."""
    try:
        find_bitcode()
    except HeapError:
        return False
    return True


def build_once(factory: pytest.TempPathFactory) -> Built:
    """The library of the package's manifest for all of ARCHS."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # of this session; each process has a folder of its own in it
    folder = base / "aot-library"
    log = base / "aot-library.log"
    with (base / "aot-library.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not log.exists():
            words = [] if has_bitcode() else ["--no-nvshmem"]
            done = run_aot("build", "--arch", ",".join(ARCHS), "--out", folder, "--jobs", "2", *words)
            log.write_text(done.stdout + done.stderr)
    return Built(folder, log.read_text(), has_bitcode())


def facts_of(folder: Path) -> list[dict[str, Any]]:
    """What a build has noted of every variant, and "kernel", "variant" as text, "arch" as a number, "whole": the
    compiler may know that rows are multiples of 16 in length."""
    found = []
    for arch in architectures(folder):
        facts = json.loads((folder / arch / "facts.json").read_text())
        library = Library(folder, arch)
        for entry in library.entries:
            asked = entry.asked
            named = {**asked.types, **asked.constexprs}
            text = " ".join(f"{name}={value}" for name, value in named.items())
            whole = bool(asked.aligned) or not library.kernels[asked.kernel]["specialised"]
            about = {"kernel": asked.kernel, "variant": text, "arch": int(arch[3:]), "whole": whole}
            found.append({**facts[asked.signature()], **about})
    return found
