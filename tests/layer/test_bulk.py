"""Rows that are copied in bulk, in small layers, too: same bits, sums and errors as rows copied through registers.

Layers of few tokens copy rows through registers, so the other tests of the layer do not show bulk copies.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.combinations import combinations
from tests.layer import test_compact, test_life, test_own_rows, test_scaled
from tests.layer.cases import Case, check_case
from triton_ep.runtime.plans import exchange
from triton_ep.runtime.plans.shape import Plan, Shape

PLAIN = Case("plain", tokens=(11, 0, 20, 5), hidden=160, topk=3, experts=3, alignment=16, local_combine=True)
CASES = (
    PLAIN,
    replace(PLAIN, name="weights_fp32", dtype=torch.float32, alignment=1, topk=8, experts=8, combine_weights=True),
    replace(PLAIN, name="static_mxfp8", payload="mxfp8", hidden=512, static=True),
    replace(PLAIN, name="quantised", payload="mxfp8", hidden=1024, quantised_input=True, local_combine=False),
    replace(PLAIN, name="budget", sm_budget=4, hidden=520, tokens=(150, 33, 0, 90), weights=False),
    replace(PLAIN, name="topk32", topk=32, experts=32, tokens=(3, 4), hidden=32, calls=1),
    replace(PLAIN, name="wide", hidden=7168, tokens=(40, 70), calls=1, static=True),
    replace(PLAIN, name="dropped", routing="all_dropped"),
    # Enough tokens for the steps and the overlap of a GPU.
    replace(PLAIN, name="steps", hidden=512, tokens=(1300, 700, 0, 1100), static=True, calls=1),
    replace(PLAIN, name="steps_mxfp8", hidden=1024, payload="mxfp8", tokens=(1300, 700, 0, 1100), alignment=128),
)
STEPS = CASES[-2:]
"""On GPUs only."""


def _in_bulk(rank: int, nodes: int, ranks_per_node: int, check: Callable[..., None], *args: Any) -> None:
    """Run the check of another test with bulk copies for layers of any size."""
    plans: list[Plan] = []
    push, bulk_plan = exchange.push, exchange.bulk_plan

    def spread(s: Shape, payload: int, row_words: int, _: bool, aligned: bool) -> Plan:
        return push(s, payload, row_words, True, aligned)

    def noted(*args: Any) -> Plan:
        plans.append(bulk_plan(*args))
        return plans[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shape, "copies_in_bulk", True)
        patch.setattr(exchange, "push", spread)
        patch.setattr(exchange, "bulk_plan", noted)
        check(rank, nodes, ranks_per_node, *args)
    kernels = {plan.kernel for plan in plans}
    assert "dispatch_push_kernel" in kernels and len(kernels) > 1, kernels
    assert all(plan.constexprs["SLOTS"] >= 2 for plan in plans)


@pytest.mark.parametrize(
    "nodes, ranks_per_node, case",
    combinations(
        [(1, 1), (1, 2), (1, 4)],
        CASES,
        on_cpu=lambda _, ranks, case: case not in STEPS and (ranks == 2 or (ranks == 4 and case is PLAIN)),
        in_chaos=lambda _, ranks, case: case is PLAIN and ranks == 2,
    ),
)
def test_a_layer_gives_the_same(run_ranks, nodes, ranks_per_node, case):
    """Dispatch and combine equal the reference."""
    run_ranks(_in_bulk, nodes, ranks_per_node, check_case, case)


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), pytest.param(1, 4, marks=pytest.mark.on_gpus)])
@pytest.mark.parametrize(
    ("check", "args"),
    [
        (test_compact._check, ("plain", 1)),
        (test_compact._check_left_out, (3,)),
        (test_scaled._check, (replace(test_scaled.KINDS[0], hidden=512),)),
        (test_own_rows._check, (test_own_rows.PLAIN,)),
        (test_life._static_overflow, (True,)),
    ],
    ids=["compact", "left_out", "scaled", "own_rows", "overflow"],
)
def test_other_calls_give_the_same(run_ranks, nodes, ranks_per_node, check, args):
    """Compact rows, with scales, too; rows that are left out; own rows that are not aligned; rows without room."""
    run_ranks(_in_bulk, nodes, ranks_per_node, check, *args)
