"""The layer's promise on every topology: rows, weights, counts and sums equal the plain-torch reference."""

from dataclasses import replace

import pytest

from tests.layer.cases import CASES, check_case

CHAOS = ((1, 2), (2, 2))
PLAIN = ((1, 1), (1, 4), (4, 1))  # chaos would find there what it finds in the others


@pytest.mark.parametrize("nodes, ranks_per_node", CHAOS, ids=lambda n: str(n))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_dispatch_and_combine_equal_the_reference(run_ranks, chaos_seed, nodes, ranks_per_node, case):
    """Every kept copy arrives in its row bit for bit; combine is within one rounding of the exact sum."""
    if chaos_seed is not None:
        case = replace(case, calls=1)  # calls in a row meet chaos in test_life.py
    run_ranks(check_case, nodes, ranks_per_node, case)


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", PLAIN, ids=lambda n: str(n))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_other_numbers_of_ranks(run_ranks, backend, nodes, ranks_per_node, case):
    """The same on one rank, four ranks of one node, and four nodes of one rank."""
    if backend == "host" and nodes * ranks_per_node == 4 and CASES.index(case) % 2 == nodes % 2:
        pytest.skip("half of the cases on one node, half on four; all of them with --backend nvshmem")
    run_ranks(check_case, nodes, ranks_per_node, case)


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node, name", [(1, 8, "skewed"), (2, 4, "local_combine"), (4, 2, "skewed")])
def test_eight_ranks(run_ranks, nodes, ranks_per_node, name):
    """The same with eight ranks on one, two and four nodes."""
    (case,) = (case for case in CASES if case.name == name)
    run_ranks(check_case, nodes, ranks_per_node, case)
