"""Rows, weights, counts and sums of the layer equal the plain-torch reference on every topology."""

from dataclasses import replace

import pytest

from tests.combinations import combinations
from tests.layer.cases import CASES, Case, check_case
from triton_ep.runtime.plans import exchange
from triton_ep.runtime.plans.shape import Shape

TOPOLOGIES = ((1, 2), (2, 1), (2, 2))
OTHERS = ((1, 1), (1, 4), (4, 1))  # chaos mode would find nothing that it does not find in the three above
# Cases on CPU ranks by topology. On one node of two ranks all run; other topologies take the kernels between nodes, the
# shapes of their sums, and what differs between ranks. Dtypes and routings are other values on the same paths.
ON_CPU = {
    (1, 2): {case.name for case in CASES},
    (2, 1): {
        *("no_weights", "topk1", "topk7_weighted", "topk32"),
        *("hidden_odd", "hidden_wide", "zero_tokens_everywhere", "all_to_one_rank", "same_expert_twice", "one_program"),
        *("scatter_given_int64", "local_combine", "local_combine_duplicates", "weighted_combine", "aligned128"),
        *("budget", "shared_staging", "shared_staging_static", "mxfp8", "mxfp8_odd_blocks", "mxfp8_quantised_input"),
        *("topk8_64_experts", "all_dropped", "zero_tokens_on_a_rank", "scatter_given"),
    },
    (2, 2): {
        *("plain", "local_combine_weighted", "static_aligned_local", "shared_staging_static", "mxfp8_wide_local"),
        "many_tokens",
    },
    (1, 1): {
        *("plain", "hidden_wide", "zero_tokens_everywhere", "all_dropped", "scatter_given", "local_combine_weighted"),
        *("static_aligned_local", "mxfp8", "mxfp8_quantised_fp32"),
    },
    (1, 4): {"skewed", "static_aligned_local"},
    (4, 1): {"skewed", "local_combine_weighted"},
}
# Chaos mode: one case for each code path of rows, flags and sums.
IN_CHAOS = {
    (1, 2): {
        *("plain", "no_weights", "hidden_wide", "zero_tokens_on_a_rank", "scatter_given", "local_combine_weighted"),
        *("weighted_combine", "static_aligned_local", "one_program", "mxfp8", "mxfp8_quantised_input", "many_tokens"),
    },
    (2, 1): {"no_weights", "hidden_wide", "weighted_combine", "mxfp8", "one_program"},
    (2, 2): {"local_combine_weighted", "many_tokens"},
}
# Cases with two calls on two CPU ranks: between calls a layer keeps epochs, parities and sizes; these cases cover them
# all. "plain" has two calls on four ranks as well.
TWICE = {
    *("plain", "zero_tokens_on_a_rank", "local_combine_weighted", "static_aligned_local", "shared_staging"),
    *("shared_staging_static", "mxfp8_wide_local"),
}


def _on_cpu(nodes: int, ranks_per_node: int, case: Case) -> bool:
    return case.name in ON_CPU[nodes, ranks_per_node]


def _in_chaos(nodes: int, ranks_per_node: int, case: Case) -> bool:
    return case.name in IN_CHAOS[nodes, ranks_per_node]


@pytest.mark.parametrize(
    "nodes, ranks_per_node, case", combinations(TOPOLOGIES, CASES, on_cpu=_on_cpu, in_chaos=_in_chaos)
)
def test_dispatch_and_combine_equal_the_reference(run_ranks, backend, chaos_seed, nodes, ranks_per_node, case):
    """Every assignment arrives in its row bit for bit; combine is within one rounding of the exact sum."""
    twice = case.name in TWICE and (nodes * ranks_per_node == 2 or case.name == "plain")
    if chaos_seed is not None or (backend == "host" and not twice):
        case = replace(case, calls=1)  # test_life.py has several calls in chaos mode
    run_ranks(check_case, nodes, ranks_per_node, case)


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node, case", combinations(OTHERS, CASES, on_cpu=_on_cpu))
def test_other_numbers_of_ranks(run_ranks, backend, nodes, ranks_per_node, case):
    """The same on one rank, four ranks of one node, and four nodes of one rank."""
    run_ranks(check_case, nodes, ranks_per_node, replace(case, calls=1) if backend == "host" else case)


@pytest.mark.plain
@pytest.mark.parametrize(
    "nodes, ranks_per_node, name",
    [
        *(pytest.param(*given, marks=pytest.mark.on_gpus) for given in ((1, 8, "skewed"), (2, 4, "local_combine"))),
        (4, 2, "plain"),  # not as many nodes as ranks of a node
    ],
)
def test_eight_ranks(run_ranks, backend, nodes, ranks_per_node, name):
    """The same with eight ranks on one, two and four nodes."""
    (case,) = (case for case in CASES if case.name == name)
    run_ranks(check_case, nodes, ranks_per_node, replace(case, calls=1) if backend == "host" else case)


def _without_tables(rank: int, nodes: int, ranks_per_node: int, case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_FEW_RANKS", 0)
        assert exchange.splits(Shape(16, 32, case.topk, 8, 2, 2), False).constexprs["RANKS"] == 0
        check_case(rank, nodes, ranks_per_node, case)


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), (2, 2)])
@pytest.mark.parametrize("name", ["many_tokens", "same_expert_twice", "all_dropped"])
def test_many_ranks(run_ranks, nodes, ranks_per_node, name):
    """Tokens of ranks and nodes are ranked like those of experts if there are many."""
    run_ranks(_without_tables, nodes, ranks_per_node, next(case for case in CASES if case.name == name))
