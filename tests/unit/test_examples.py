"""Every example runs as its first lines say: bare, under torchrun, under mpirun."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from triton_ep.runtime import INTERPRETING

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SYMMETRIC_HEAP = ROOT / "examples/00_symmetric_heap.py"
DISPATCH_COMBINE = ROOT / "examples/01_dispatch_combine.py"
BARE = [sys.executable]
RANKS = 4 if INTERPRETING else max(n for n in (1, 2, 4) if n <= torch.cuda.device_count())
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]


def _run(command: list[str | Path]) -> str:
    """Output of a command that must succeed, run from the checkout, which need not be installed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def _mpirun(ranks: int = RANKS) -> list[str]:
    """mpirun with some ranks here, as whoever runs the tests."""
    program = shutil.which("mpirun")
    if program is None:
        pytest.skip("mpirun is not installed (Debian: apt-get install openmpi-bin)")
    return [program, "--allow-run-as-root", "--oversubscribe", "-np", str(ranks), sys.executable]


@pytest.mark.parametrize("launcher", ["bare", "torchrun", "mpirun"])
@pytest.mark.parametrize(
    ("path", "line"),
    [(SYMMETRIC_HEAP, r"got the words of rank \d"), (DISPATCH_COMBINE, r"\d+ rows for experts .+")],
    ids=lambda value: value.stem if isinstance(value, Path) else "",
)
def test_example_prints_one_line_per_rank(path: Path, line: str, launcher: str) -> None:
    """All three ways to start give 4 ranks that check what they got."""
    command = {"bare": lambda: BARE, "torchrun": lambda: TORCHRUN, "mpirun": _mpirun}[launcher]()
    ranks = re.findall(rf"^rank (\d) of {RANKS}: {line}$", _run([*command, path]), re.MULTILINE)
    assert sorted(map(int, ranks)) == list(range(RANKS))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_as_one_rank(path: Path) -> None:
    """As on a machine with one GPU; a launcher that starts a single rank is one, too."""
    assert _run([*_mpirun(1), path]).startswith("rank 0 of 1: ")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_says_how_to_run_it(path: Path) -> None:
    """The first lines name the command."""
    assert f"python examples/{path.name}" in path.read_text()
