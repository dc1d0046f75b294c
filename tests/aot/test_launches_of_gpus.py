"""A build compiles what layers and modules request on GPUs, where tiles, grids and types are other than interpreted."""

import json
from pathlib import Path

import pytest
import torch

from tests.programs import environment_of_programs, run_program

PROGRAM = Path(__file__).parent / "launches_of_gpus_program.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the program stands in for a GPU")
def test_libraries_have_what_is_requested_on_gpus() -> None:
    """Dispatches, combines, backward passes, integrations' rows, steps of modules, as far as the host reads nothing."""
    done = run_program([PROGRAM], env={**environment_of_programs(), "TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 11 and all(each["requested"] > 2 for each in found.values())
    assert {name: each["missing"] for name, each in found.items() if each["missing"]} == {}
