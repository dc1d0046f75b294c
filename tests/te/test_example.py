"""examples/08_te_autocast.py, as its first lines say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.patience import LIMIT_S
from tests.programs import environment_of_programs
from triton_ep.runtime import INTERPRETING

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2 if INTERPRETING else max(n for n in (1, 2, 4) if n <= torch.cuda.device_count())


@pytest.mark.plain
def test_te_example_says_what_mxfp8_rounds() -> None:
    """Every rank has the noise of both recipes; the example itself asserts that it is small."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    environment = environment_of_programs()
    done = subprocess.run(
        [*command, ROOT / "examples/08_te_autocast.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    number = r"(\d+\.\d)"
    rows = re.findall(
        rf"^ +(\d) MXFP8: {number}, {number}  MXFP8 hybrid: {number}, {number}$", done.stdout, re.MULTILINE
    )
    assert [int(rank) for rank, *_ in rows] == list(range(RANKS))
    for _, y, dx, hybrid_y, hybrid_dx in rows:
        assert y == hybrid_y and float(dx) > float(hybrid_dx)  # E5M2 is for gradients alone
