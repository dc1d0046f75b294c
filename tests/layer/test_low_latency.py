"""Layers with low_latency=True: what they mean is what other static layers mean."""

from dataclasses import replace

import pytest
import torch

from tests.layer.cases import Case, check_case, combine_and_check, dispatch_and_check, make_layer, workloads
from triton_ep.distributed import current_heap

TOPOLOGIES = [(1, 1), (1, 2), (1, 4)]
CASES = [
    replace(case, low_latency=True)
    for case in (
        Case("plain", tokens=(5, 8, 1, 3)),
        Case("aligned_fp16", tokens=(9, 4, 0, 6), dtype=torch.float16, alignment=16, topk=5, experts=8, hidden=37),
        Case("mxfp8", tokens=(6, 0, 3, 7), payload="mxfp8", topk=4, experts=4, combine_weights=True, alignment=4),
        Case("mxfp8_quantised", tokens=(4, 5, 6), payload="mxfp8", quantised_input=True, topk=3, experts=3, hidden=96, weights=False),
        Case("one_expert_int64", tokens=(3, 7), routing="one_expert", topk=4, experts=8, idx_dtype=torch.int64, drop=0.0),
        Case("duplicates_fp32", tokens=(4, 2), routing="duplicates", topk=4, experts=4, dtype=torch.float32),
        Case("nothing", tokens=(0,)),
    )
]


@pytest.mark.parametrize("nodes, ranks_per_node", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_dispatch_and_combine_equal_the_reference(run_ranks, chaos_seed, nodes, ranks_per_node, case):
    """Every row, weight, count and offset, and sums within the roundings of partial sums."""
    run_ranks(check_case, nodes, ranks_per_node, replace(case, calls=1) if chaos_seed is not None else case)
