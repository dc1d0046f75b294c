"""Every example runs as its first lines say: bare, under torchrun, under mpirun."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DISPATCH_COMBINE = ROOT / "examples/01_dispatch_combine.py"
BARE = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]


def _run(command: list[str | Path]) -> str:
    """Output of a command that must succeed, run from the checkout, which need not be installed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def _mpirun() -> list[str]:
    """mpirun with 4 ranks here, as whoever runs the tests."""
    program = shutil.which("mpirun")
    if program is None:
        pytest.skip("mpirun is not installed (Debian: apt-get install openmpi-bin)")
    return [program, "--allow-run-as-root", "--oversubscribe", "-np", "4", sys.executable]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_bare(path: Path) -> None:
    """Nothing but `python examples/...`: the example starts its own ranks."""
    assert _run([*BARE, path]).strip() != ""


@pytest.mark.parametrize("launcher", ["bare", "torchrun", "mpirun"])
def test_dispatch_combine_prints_one_line_per_rank(launcher: str) -> None:
    """All three ways to start give 4 ranks that check their rows."""
    command = {"bare": lambda: BARE, "torchrun": lambda: TORCHRUN, "mpirun": _mpirun}[launcher]()
    output = _run([*command, DISPATCH_COMBINE])
    assert sorted(re.findall(r"^rank (\d) of 4: \d+ rows", output, re.MULTILINE)) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_says_how_to_run_it(path: Path) -> None:
    """The first lines name the command."""
    assert f"python examples/{path.name}" in path.read_text()
