"""Rows, weights, counts and sums of the layer equal the plain-torch reference on every topology."""

from dataclasses import replace

import pytest

from tests.layer.cases import CASES, check_case

TOPOLOGIES = ((1, 2), (2, 2))
OTHERS = ((1, 1), (1, 4), (4, 1))  # chaos mode would find nothing that it does not find in the two above
# One case for each code path of rows, flags and sums; dtypes, sizes and routings are other values on the same paths.
IN_CHAOS = {
    *("plain", "no_weights", "hidden_odd", "hidden_wide", "zero_tokens_on_a_rank", "all_to_one_rank", "skewed"),
    *("scatter_given", "local_combine", "local_combine_weighted", "weighted_combine", "static", "static_aligned_local"),
    *("one_program", "mxfp8", "mxfp8_wide_local", "mxfp8_quantised_input", "many_tokens"),
}
# Cases with two calls on CPU ranks: between calls a layer keeps epochs, parities and sizes; these cases cover them all.
TWICE_ON_NODES = {"plain", "local_combine_weighted", "static_aligned_local", "mxfp8_wide_local"}
# Cases for four CPU ranks.
ON_FOUR = {
    *("plain", "topk8_64_experts", "aligned128", "hidden_wide", "zero_tokens_on_a_rank", "skewed", "scatter_given"),
    *("local_combine_weighted", "static_aligned_local", "mxfp8_wide_local", "mxfp8_quantised_fp32", "many_tokens"),
}
_EACH = [pytest.param(case, marks=() if case.name in IN_CHAOS else pytest.mark.plain, id=case.name) for case in CASES]


@pytest.mark.parametrize("nodes, ranks_per_node", TOPOLOGIES, ids=lambda n: str(n))
@pytest.mark.parametrize("case", _EACH)
def test_dispatch_and_combine_equal_the_reference(run_ranks, backend, chaos_seed, nodes, ranks_per_node, case):
    """Every assignment arrives in its row bit for bit; combine is within one rounding of the exact sum."""
    once = nodes > 1 and backend == "host" and case.name not in TWICE_ON_NODES  # on one node all cases have two calls
    if chaos_seed is not None or once:
        case = replace(case, calls=1)  # test_life.py has several calls in chaos mode
    run_ranks(check_case, nodes, ranks_per_node, case)


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", OTHERS, ids=lambda n: str(n))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_other_numbers_of_ranks(run_ranks, backend, nodes, ranks_per_node, case):
    """The same on one rank, four ranks of one node, and four nodes of one rank."""
    if backend == "host":
        case = replace(case, calls=1)
        if nodes * ranks_per_node == 4 and case.name not in ON_FOUR:
            pytest.skip("some cases on one node and on four; all of them with --backend nvshmem")
    run_ranks(check_case, nodes, ranks_per_node, case)


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node, name", [(1, 8, "skewed"), (2, 4, "local_combine"), (4, 2, "skewed")])
def test_eight_ranks(run_ranks, nodes, ranks_per_node, name):
    """The same with eight ranks on one, two and four nodes."""
    (case,) = (case for case in CASES if case.name == name)
    run_ranks(check_case, nodes, ranks_per_node, case)
