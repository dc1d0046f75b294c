"""examples/08_te_autocast.py runs as its first lines describe."""

import re
from pathlib import Path

import pytest
import torch

from tests.programs import run_ranks_of
from triton_ep.runtime.launch import INTERPRETING

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2 if INTERPRETING else max(n for n in (1, 2, 4) if n <= torch.cuda.device_count())


@pytest.mark.plain
def test_te_example_says_what_mxfp8_rounds() -> None:
    """Every rank prints the noise of both recipes; the example itself asserts that it is small."""
    output = run_ranks_of([ROOT / "examples/08_te_autocast.py"], RANKS)
    number = r"(\d+\.\d)"
    rows = re.findall(rf"^ +(\d) MXFP8: {number}, {number}  MXFP8 hybrid: {number}, {number}$", output, re.MULTILINE)
    assert [int(rank) for rank, *_ in rows] == list(range(RANKS))
    for _, y, dx, hybrid_y, hybrid_dx in rows:
        # E5M2 is only for gradients. Other kernels run, so values near a midpoint may round to the other neighbour.
        assert abs(float(y) - float(hybrid_y)) < 0.25 and float(dx) > float(hybrid_dx) + 1
