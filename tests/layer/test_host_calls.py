"""Upper bounds on what a call runs on the host: Python functions of this package, and operations of torch.

Each takes a tenth of a microsecond, on a slow host three times that. These tests find additions (a property read again
and again, a wrapper, a check of an argument that was not given) on a machine without a GPU. Launches do not count,
because interpreted launches run other functions.
"""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import triton_ep
from tests.layer.cases import Case, make_layer
from triton_ep.nn import MoE
from triton_ep.runtime import launch
from triton_ep.testing import make_workload

PACKAGE = str(Path(triton_ep.__file__).parent)
PLAIN = Case("plain", static=True, weights=False)
MOST = {
    "plain": (PLAIN, 45, 25),
    "local_combine": (Case("local_combine", static=True, weights=False, local_combine=True), 45, 24),
    "low_latency": (Case("low_latency", low_latency=True, weights=False), 34, 23),
}
"""By name: the case, and the most functions that its dispatch and its combine may run."""
_INTERPRET = launch._interpret


def functions_of(call: Callable[[], object]) -> Counter[str]:
    """Functions that the fourth call runs: the first three create launchers, and memory that is kept."""
    for _ in range(3):
        call()
    counts: Counter[str] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_filename != launch.__file__:
            counts[f"{code.co_filename[len(PACKAGE) + 1 :]} {code.co_name}"] += 1

    def interpret(*arguments: Any) -> None:
        sys.setprofile(None)
        try:
            _INTERPRET(*arguments)
        finally:
            sys.setprofile(note)

    with mock.patch.object(launch, "_interpret", interpret):
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
    return counts


def _check_functions(rank: int, nodes: int, ranks_per_node: int, name: str) -> None:
    case, in_dispatch, in_combine = MOST[name]
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        work = make_workload(
            rank, 2, case.tokens[rank], hidden=case.hidden, topk=case.topk, num_experts=2 * case.experts
        )
        x, idx = work.x, work.topk_idx
        recv_x, _, desc = layer.dispatch(x, idx)
        found = functions_of(lambda: layer.dispatch(x, idx)), functions_of(lambda: layer.combine(recv_x, desc))
        for counts, most in zip(found, (in_dispatch, in_combine), strict=True):
            told = f"{[each.total() for each in found]} functions of dispatch and combine: {dict(counts)}"
            assert counts.total() <= most, told


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
@pytest.mark.parametrize("name", list(MOST))
def test_calls_run_no_more_functions(run_ranks, backend, nodes, ranks_per_node, name):
    """The bounds hold for plain calls: no hooks, events, weights or biases."""
    if backend != "host":
        pytest.skip("GPUs also have streams and events; CPU ranks find any addition")
    run_ranks(_check_functions, nodes, ranks_per_node, name)


def _check_functions_of_moe(rank: int, nodes: int, ranks_per_node: int, payload: str | None, most: int) -> None:
    work = make_workload(rank, 2, 8, hidden=128, topk=2, num_experts=4)
    moe = MoE(128, 128, num_experts=4, topk=2, max_tokens=8, payload=payload, capacity=2.0, router=False)

    def forward() -> None:
        with torch.no_grad():
            moe(work.x, work.topk_idx, work.topk_weights)

    counts = functions_of(forward)
    moe.finalize()
    assert counts.total() <= most, f"{counts.total()} functions of a forward pass: {dict(counts)}"


@pytest.mark.plain
@pytest.mark.parametrize("payload, most", [("mxfp8", 163), (None, 144)])
def test_a_moe_layer_runs_no_more_functions(run_ranks, backend, payload, most):
    """A forward pass without gradients, with weights of the routing."""
    if backend != "host":
        pytest.skip("GPUs also have streams and events; CPU ranks find any addition")
    run_ranks(_check_functions_of_moe, 1, 2, payload, most)


class _Writes(TorchDispatchMode):
    """Notes operations of torch that compute or write something: on a GPU each is a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in ("empty", "new_empty", "view", "slice", "detach", "alias", "as_strided", "select"):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def _check_writes(rank: int, nodes: int, ranks_per_node: int, compact: bool) -> None:
    case = Case("weights", static=not compact)
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        work = make_workload(
            rank, 2, case.tokens[rank], hidden=case.hidden, topk=case.topk, num_experts=2 * case.experts
        ).to(layer.context.device)

        def dispatch() -> None:
            if compact:
                layer.dispatch_compact(work.x, work.topk_idx, work.topk_weights, num_rows=64)
            else:
                layer.dispatch(work.x, work.topk_idx, work.topk_weights)

        def interpret(*arguments: Any) -> None:
            with _disable_current_modes():  # interpreted kernels use torch
                _INTERPRET(*arguments)

        dispatch()  # creates memory that is kept
        with mock.patch.object(launch, "_interpret", interpret), _Writes() as writes:
            dispatch()
        assert writes.found == [], f"a dispatch launches kernels of torch: {writes.found}"


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
@pytest.mark.parametrize("compact", [False, True])
def test_a_static_dispatch_launches_nothing_of_torch(run_ranks, nodes, ranks_per_node, compact):
    """Weights of rows that do not arrive, and ids of compact rows, are filled by the kernel that lays rows out."""
    run_ranks(_check_writes, nodes, ranks_per_node, compact)
