"""A build compiles what layers and modules request on GPUs, where tiles, grids and types are other than interpreted."""

import json
from pathlib import Path

import pytest
import torch

from tests.programs import run_ranks_of

PROGRAM = Path(__file__).parent / "launches_of_gpus_program.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the program stands in for a GPU")
@pytest.mark.parametrize(("ranks", "ranks_per_node", "groups"), [(1, 1, 11), (2, 2, 11), (2, 1, 4)])
def test_libraries_have_what_is_requested_on_gpus(ranks: int, ranks_per_node: int, groups: int) -> None:
    """Dispatches, combines, backward passes, integrations' rows, steps of modules, as far as the host reads nothing."""
    for line in run_ranks_of([PROGRAM, str(ranks_per_node)], ranks).splitlines()[-ranks:]:
        found = json.loads(line)
        assert len(found) == groups and all(each["requested"] > 2 for each in found.values())
        assert {name: each["missing"] for name, each in found.items() if each["missing"]} == {}
