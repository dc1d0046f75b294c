"""Numbers of kernels that must fit each other (triton_ep/plans)."""

import pytest

from triton_ep.runtime.plans import exchange
from triton_ep.runtime.plans.shape import Shape


@pytest.mark.parametrize("num_warps", [1, 4, 8])
@pytest.mark.parametrize("num_sm", [1, 3, 8, 20, 64])
@pytest.mark.parametrize("ranks_per_node", [1, 2, 4, 8])
def test_no_flag_of_arrivals_is_read_by_two_threads(ranks_per_node, num_sm, num_warps):
    """Of a tensor with fewer elements than threads some threads load the same one, at different times."""
    tuned = (("expand", 1, num_warps),)
    shape = Shape(64, 64, 2, 16, world_size=8, local_world_size=ranks_per_node, num_sm=num_sm, tuned=tuned)
    plan = exchange.expand(shape, landing=0, has_weights=True, keep_copies=False, row_words=16)
    sources = plan.constexprs["SOURCES"]
    assert plan.num_warps == num_warps
    assert sources * plan.constexprs["SENDERS"] >= 32 * num_warps
    assert sources >= max(ranks_per_node, 2) and sources & (sources - 1) == 0
