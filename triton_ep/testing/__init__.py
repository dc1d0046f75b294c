"""What tests, benchmarks and examples share: a pool of rank processes, and data that know their origin.

    with RankPool(4) as pool:
        results = pool.run(my_case, 2, 2)  # my_case(rank, 2, 2) in each of 4 processes

`make_workload` gives tokens whose every four columns name their rank, token and column, so a row or a piece
of a row in the wrong place cannot compare equal; no expert of `apply_expert` can be taken for another.
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
