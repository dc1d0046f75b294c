"""Early launches: within a node the kernels that lay rows out, and that add sums, follow on the same stream. So do the
kernels of low-latency layers.

CPU ranks run kernels one after the other, so these tests make the layer overlap them as on a GPU, and look at how it
launches them. That they overlap, and that what follows waits for both, other tests of large batches show on GPUs.
"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.layer import test_compact
from tests.layer.cases import Case, check_case
from triton_ep.context.launches import Launches
from triton_ep.context.streams import SideStream
from triton_ep.ops import combine as combine_ops
from triton_ep.ops import dispatch as dispatch_ops
from triton_ep.runtime.launch import Launcher

LOCAL = Case("local", tokens=(11, 0, 20), hidden=48, topk=3, experts=3, local_combine=True)
SHORT = Case("short", tokens=(5, 2), hidden=32, topk=2, experts=2, low_latency=True)
STATIC = Case("static", tokens=(5, 9), hidden=32, topk=2, experts=2, static=True, payload="mxfp8")


def _overlapped(
    rank: int, nodes: int, ranks_per_node: int, check: Callable[..., None], *args: Any
) -> set[tuple[str, bool]]:
    """The kernels that a check launches, and whether early; no stream but the current one may be used."""
    seen, launcher, grids = set(), Launches.launcher, combine_ops._grids

    def noted(self: Launches, key: tuple[object, ...], *given: Any, early: bool = False, **named: Any) -> Launcher:
        found = launcher(self, key, *given, early=early, **named)
        seen.add((found.plan.kernel, early))
        return found

    def overlapping(*given: Any) -> tuple[int, int, int, int, bool]:
        publishing, pulling, num_steps, turns, _ = grids(*given)
        return publishing, pulling, num_steps, turns, given[2].copies > 0  # rows are summed before they are published

    def no_stream(self: SideStream) -> None:
        raise AssertionError("a second stream")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch_ops, "overlaps", lambda *_: True)
        patch.setattr(combine_ops, "_grids", overlapping)
        patch.setattr(SideStream, "fork", no_stream)
        patch.setattr(Launches, "launcher", noted)
        check(rank, nodes, ranks_per_node, *args)
    return seen


@pytest.mark.plain
@pytest.mark.parametrize(
    ("check", "args", "early", "plain"),
    [
        (check_case, (LOCAL,), {"dispatch_expand_kernel", "combine_pull_kernel"}, {"dispatch_push_kernel"}),
        (check_case, (STATIC,), {"dispatch_expand_kernel"}, {"dispatch_push_kernel", "combine_stage_kernel"}),
        (test_compact._check, ("plain", 1), {"compact_rows_kernel", "combine_pull_kernel"}, {"combine_reduce_kernel"}),
        (check_case, (SHORT,), {"low_latency_dispatch_kernel", "low_latency_combine_kernel"}, set()),
    ],
    ids=["local", "static", "compact", "low_latency"],
)
def test_one_node_needs_no_second_stream(run_ranks, backend, check, args, early, plain):
    """Results are the same; kernels ahead of early ones are launched as ever."""
    if backend != "host":
        pytest.skip("GPUs launch kernels so by themselves")
    for seen in run_ranks(_overlapped, 1, 2, check, *args):
        assert early <= {kernel for kernel, is_early in seen if is_early}
        assert not plain & {kernel for kernel, is_early in seen if is_early} and plain <= {kernel for kernel, _ in seen}
