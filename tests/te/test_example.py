"""examples/08_te_autocast.py, as its first lines say."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.programs import Program, environment_of_programs
from triton_ep.runtime.launch import INTERPRETING

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2 if INTERPRETING else max(n for n in (1, 2, 4) if n <= torch.cuda.device_count())


@pytest.mark.plain
def test_te_example_says_what_mxfp8_rounds() -> None:
    """Every rank has the noise of both recipes; the example itself asserts that it is small.

    Its ranks are started as by torchrun, which would have each of them import torch.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        **environment_of_programs(),
        "TORCHELASTIC_RUN_ID": "te-example",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
    }
    ranks = [
        Program([ROOT / "examples/08_te_autocast.py"], {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(RANKS)
    ]
    done = [rank.wait() for rank in ranks]
    assert all(each.returncode == 0 for each in done), done
    number = r"(\d+\.\d)"
    rows = re.findall(
        rf"^ +(\d) MXFP8: {number}, {number}  MXFP8 hybrid: {number}, {number}$", done[0].stdout, re.MULTILINE
    )
    assert [int(rank) for rank, *_ in rows] == list(range(RANKS))
    for _, y, dx, hybrid_y, hybrid_dx in rows:
        assert y == hybrid_y and float(dx) > float(hybrid_dx)  # E5M2 is for gradients alone
