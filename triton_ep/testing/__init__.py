"""Helpers of tests, benchmarks and examples: a pool of rank processes, and data that encode their origin.

    with RankPool(4) as pool:
        results = pool.run(my_case, 2, 2)  # my_case(rank, 2, 2) in each of 4 processes

Every four columns of a token of `make_workload` encode its rank, token and column, so a row or a piece of a row in the
wrong place cannot compare equal. The experts of `apply_expert` give distinct results.
"""

from triton_ep.testing.pool import RankPool
from triton_ep.testing.process import RankError, RankHang
from triton_ep.testing.workloads import (
    Workload,
    apply_expert,
    apply_experts,
    expert_scale,
    make_workload,
)

__all__ = [
    "RankError",
    "RankHang",
    "RankPool",
    "Workload",
    "apply_expert",
    "apply_experts",
    "expert_scale",
    "make_workload",
]
