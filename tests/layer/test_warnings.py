"""Warnings for pitfalls: calls without a gradient, and rows beyond a static capacity."""

import warnings
from dataclasses import replace

import pytest
import torch

from tests.layer.cases import Case, make_layer, start_dispatch, workloads
from triton_ep import autograd
from triton_ep.distributed import current_heap

CASE = Case("warnings", tokens=(6,), hidden=32, drop=0.0, dtype=torch.float32)


def _check_gradients(rank: int, nodes: int, ranks_per_node: int) -> None:
    device = current_heap().device
    work = workloads(CASE, nodes * ranks_per_node, 0)[rank]
    x, idx, weights = (t.to(device) for t in (work.x, work.topk_idx, work.topk_weights))
    leaf = x.clone().requires_grad_()
    with make_layer(CASE, rank, nodes, ranks_per_node) as layer, warnings.catch_warnings():
        warnings.simplefilter("error")
        recv_x, _, desc = layer.dispatch(x, idx, weights)
        layer.combine(recv_x, desc)
        with torch.no_grad():
            layer.combine(layer.dispatch(leaf, idx, weights)[0], desc)
        rows, row_weights, desc = autograd.dispatch(layer, leaf, idx, weights.clone().requires_grad_())
        autograd.combine(layer, rows, desc, row_weights).sum().backward()
        warnings.simplefilter("always")
        with pytest.warns(UserWarning, match=r"layer\.combine got .* triton_ep\.autograd\.combine") as seen:
            layer.combine(rows, desc)
        assert len(seen) == 1 and seen[0].filename == __file__
        warnings.simplefilter("error")
        layer.combine(rows, desc, row_weights)
        layer.dispatch(leaf, idx, weights)
    with (
        make_layer(CASE, rank, nodes, ranks_per_node) as layer,
        pytest.warns(UserWarning, match=r"layer\.dispatch got .* triton_ep\.autograd\.dispatch"),
    ):
        layer.dispatch(x, idx, weights.clone().requires_grad_())


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_calls_that_cut_a_graph_of_autograd_say_so_once(run_ranks, nodes, ranks_per_node):
    """The layer warns in grad mode, on inputs that require a gradient; the functions of triton_ep.autograd do not."""
    run_ranks(_check_gradients, nodes, ranks_per_node)


def _check_overflow(rank: int, nodes: int, ranks_per_node: int, low_latency: bool) -> None:
    case = Case("overflow", tokens=(6,), hidden=32, static=True, low_latency=low_latency)
    works = workloads(case, nodes * ranks_per_node, 0)
    device, mine = current_heap().device, works[rank]
    inputs = {name: getattr(mine, name).to(device) for name in ("x", "topk_idx", "topk_weights")}
    works[rank] = replace(mine, **inputs)  # a graph cannot capture copies from the CPU
    with make_layer(case, rank, nodes, ranks_per_node, capacity=5) as layer, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert layer.overflow_total == 0
        layer.check()
        _, _, desc = start_dispatch(layer, case, works)
        each = int(desc.overflow)
        assert layer.overflow_total == each > 0
        warnings.simplefilter("always")
        with pytest.warns(UserWarning, match=rf"{each} rows did not fit capacity=5 of rank {rank} since .* {each} in"):
            layer.check()
        calls = 2
        start_dispatch(layer, case, works)
        if layer.context.device.type == "cuda":
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                start_dispatch(layer, case, works)
            for _ in range(3):
                graph.replay()
            calls += 3
        assert layer.overflow_total == calls * each
        with pytest.warns(UserWarning, match=rf"{(calls - 1) * each} rows .* {calls * each} in all"):
            layer.check()
        warnings.simplefilter("error")
        layer.check()  # reported only once


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node, low_latency", [(1, 2, False), (1, 2, True), (2, 1, False)])
def test_rows_beyond_the_capacity_are_counted_over_all_calls(run_ranks, nodes, ranks_per_node, low_latency):
    """Replays of graphs count too; `check` warns of rows since the last check."""
    run_ranks(_check_overflow, nodes, ranks_per_node, low_latency)


def _check_padding(rank: int, nodes: int, ranks_per_node: int, low_latency: bool) -> None:
    case = Case("padded", tokens=(3,), hidden=32, experts=2, static=True, low_latency=low_latency, alignment=8)
    works = workloads(case, nodes * ranks_per_node, 0)
    counts = sum(torch.bincount(w.topk_idx[w.topk_idx >= 0], minlength=4) for w in works)
    counts = counts[2 * rank : 2 * rank + 2]
    padded = int(((counts + 7) // 8 * 8).sum())
    with make_layer(case, rank, nodes, ranks_per_node, capacity=padded - 1) as layer:
        _, _, desc = start_dispatch(layer, case, works)
        assert int(desc.overflow) == layer.overflow_total == 1
        assert int(desc.expert_offsets[-1]) + int(desc.overflow) == padded
        with pytest.warns(UserWarning, match=r"1 rows, padding to alignment=8 included, did not fit capacity="):
            layer.check()


@pytest.mark.plain
@pytest.mark.parametrize("low_latency", [False, True])
def test_padding_beyond_the_capacity_counts_and_is_said(run_ranks, low_latency):
    """Offsets plus overflow are the capacity that a dispatch would fill, and the warning names the padding."""
    run_ranks(_check_padding, 1, 2, low_latency)
