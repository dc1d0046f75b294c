"""Calls that repeat noted launches: they launch what the ordinary steps would, and give what the reference gives."""

import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.layer.cases import Case, combine_and_check, dispatch_and_check, make_layer, workloads
from tests.layer.repeated_calls import Launches, calls_of, check_all, compact_calls_of
from tests.programs import run_ranks_of
from triton_ep import EPAll2AllLayer, InputError, MXTensor, PeerFailed
from triton_ep.context.given import RoutingMap, Rows
from triton_ep.distributed import current_heap
from triton_ep.exchange import repeats
from triton_ep.exchange.repeated_combine import RepeatedCombine
from triton_ep.runtime import launch

PLAIN = pytest.mark.plain
# Of two calls of the reference's workloads, each has another number of tokens.
EVEN = Case("even", tokens=(6,), hidden=64, topk=2, experts=4)
CASES = {
    "exact": EVEN,
    "static": replace(EVEN, static=True, local_combine=True, weights=False),
    "mxfp8": replace(EVEN, payload="mxfp8", alignment=8),
    "mxfp8_static": replace(EVEN, payload="mxfp8", static=True, local_combine=True),
    "quantised": replace(EVEN, payload="mxfp8", quantised_input=True),
    "int64": replace(EVEN, idx_dtype=torch.int64, dtype=torch.float32, local_combine=True, shared_staging=True),
}


def _known(layer: EPAll2AllLayer, combines: bool = False) -> list[object]:
    """What the layer knows of each kind of dispatch, or of combine."""
    assert layer.context.repeats is not None
    return [known for kind, known in layer.context.repeats.items() if (kind[0] == "combine") == combines]


def _kinds(layer: EPAll2AllLayer, combines: bool = False) -> list[str]:
    return [type(known).__name__ for known in _known(layer, combines)]


def _check_results(rank: int, nodes: int, ranks_per_node: int, case: Case) -> None:
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        for call in range(5):
            combine_and_check(layer, dispatch_and_check(layer, case, call))
            assert _kinds(layer) == ["RepeatedDispatch" if call else "object"]
            assert _kinds(layer, combines=True) == ["RepeatedCombine" if call else "object"]
        layer.check()


@PLAIN
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), pytest.param(1, 4, marks=pytest.mark.on_gpus)])
@pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))
def test_repeated_dispatches_equal_the_reference(run_ranks, nodes, ranks_per_node, case):
    """Every row, weight, count and sum of calls of one kind with other data."""
    run_ranks(_check_results, nodes, ranks_per_node, case)


def _check_launches(rank: int, nodes: int, ranks_per_node: int, case: Case) -> None:
    held: list[object] = []
    interpret = launch._interpret

    def launches_of(call: Callable[[], object]) -> Launches:
        found: Launches = []

        def noting(kernel_spec: Any, grid: int, args: list[Any], constexprs: dict[str, Any]) -> None:
            held.append(args)
            told = {"grid": grid, **constexprs}
            for name, arg in zip(kernel_spec.arguments, args, strict=True):
                told[name] = arg.data_ptr() if isinstance(arg, torch.Tensor) else arg
                told[f"{name}, dtype"] = str(getattr(arg, "dtype", None))
            found.append((kernel_spec.name, told))
            interpret(kernel_spec, grid, args, constexprs)

        with mock.patch.object(launch, "_interpret", noting):
            held.append(call())
        return found

    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        work = workloads(case, layer.config.world_size, 0)[rank]

        def inputs() -> tuple[torch.Tensor, ...]:
            return work.x.clone(), work.topk_idx.clone(), work.topk_weights.clone()

        found = check_all(layer, calls_of(layer, *inputs()), calls_of(layer, *inputs()), launches_of)
        if layer.config.recv_capacity is None and case.payload is None:
            noted, calls = (compact_calls_of(layer, *inputs(), None) for _ in range(2))
            found |= check_all(layer, noted, calls, launches_of)
    assert all(each["launches"] >= 2 for each in found.values()), found
    assert {name: each["wrong"] for name, each in found.items() if each["wrong"]} == {}


@PLAIN
@pytest.mark.parametrize("name", ["exact", "static", "mxfp8"])
def test_repeated_launches_are_those_of_the_steps(run_ranks, backend, name):
    """Kernels, grids, numbers, dtypes, and which memory is whose, for every kind of dispatch and combine."""
    if backend != "host":
        pytest.skip("compares the arguments of interpreted launches")
    run_ranks(_check_launches, 1, 1, CASES[name])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the program stands in for a GPU")
def test_compiled_launches_are_those_of_the_steps_too():
    """The same where kernels, grids and what overlaps are a GPU's, and kernels take addresses; two ranks, and compact
    rows whose number the caller knows."""
    for line in run_ranks_of([Path(__file__).parent / "repeats_of_gpus_program.py", "2"], 2).splitlines()[-2:]:
        found = json.loads(line)
        assert {name: each["wrong"] for name, each in found.items() if each["launches"] and each["wrong"]} == {}
        # In backward passes sums are computed on a stream of their own.
        assert {name for name, each in found.items() if not each["launches"]} == {
            "backward of summed",
            "backward of mxfp8",
        }
        assert len(found) > 40


def _check_growth(rank: int, nodes: int, ranks_per_node: int) -> None:
    grows = replace(EVEN, tokens=(24,), topk=1, routing="one_expert", drop=0.0)
    spread = replace(grows, routing="uniform")
    with make_layer(grows, rank, nodes, ranks_per_node) as layer:
        for call in range(3):
            combine_and_check(layer, dispatch_and_check(layer, spread, call))
        before = layer.context.sizes
        assert _kinds(layer) == ["RepeatedDispatch"]
        # One of four ranks gets all rows, for which there was no room, by a repeated dispatch.
        combine_and_check(layer, dispatch_and_check(layer, grows, 3))
        assert layer.context.sizes is not before
        for call in range(4, 7):
            combine_and_check(layer, dispatch_and_check(layer, (spread, grows)[call % 2], call))
        (known,) = _known(layer)
        assert known.facts.sizes is layer.context.sizes


@PLAIN
def test_a_repeated_dispatch_makes_buffers_grow(run_ranks):
    """Its rows are sent again by the ordinary steps; later calls are noted and repeated anew."""
    run_ranks(_check_growth, 1, 4)


def _check_refusal(rank: int, nodes: int, ranks_per_node: int) -> None:
    with make_layer(EVEN, rank, nodes, ranks_per_node) as layer:
        for call in range(3):
            dispatch_and_check(layer, EVEN, call)
        work = workloads(EVEN, layer.config.world_size, 0)[rank]
        x, idx = work.x.to(current_heap().device), work.topk_idx.to(current_heap().device)
        with pytest.raises(InputError if rank == 0 else PeerFailed):
            layer.dispatch(x, idx.float() if rank == 0 else idx, work.topk_weights.to(x.device))
        outside = idx.clone()
        outside[0, 0] = layer.config.num_experts + 5 if rank == 1 else idx[0, 0]
        with pytest.raises(InputError, match="rank 1"):
            layer.dispatch(x, outside, work.topk_weights.to(x.device))
        combine_and_check(layer, dispatch_and_check(layer, EVEN, 3))
        assert "RepeatedDispatch" in _kinds(layer)


@PLAIN
def test_refused_calls_between_repeated_ones(run_ranks):
    """A refused call, ids out of range in a repeated one, and a repeated call after both."""
    run_ranks(_check_refusal, 1, 2)


def _check_exceptions(rank: int, nodes: int, ranks_per_node: int) -> None:
    device = current_heap().device
    with make_layer(replace(EVEN, tokens=(8,)), rank, nodes, ranks_per_node) as layer:
        work = workloads(replace(EVEN, tokens=(8,)), layer.config.world_size, 0)[rank]
        x, idx = work.x.to(device), work.topk_idx.to(device)
        for tokens in (1, 0):
            for _ in range(3):
                layer.dispatch(x[:tokens], idx[:tokens])
        assert layer.context.repeats == {}, "one row may have any strides, none has memory"
        flat = torch.empty(x.numel() + 1, dtype=x.dtype, device=device)[1:].view_as(x).copy_(x)
        for _ in range(3):
            layer.dispatch(flat, idx)
        assert layer.context.repeats == {}, "kernels for other addresses"
        for tokens in range(2, 9):
            layer.dispatch(x[:tokens], idx[:tokens])
        assert len(layer.context.repeats) == 7 and "RepeatedDispatch" not in _kinds(layer)
        for _ in range(2):
            *_, hook = layer.dispatch(x, idx, return_recv_hook=True)
            hook()
        assert len(layer.context.repeats) == 7 and "RepeatedDispatch" not in _kinds(layer)


@PLAIN
def test_which_dispatches_are_not_repeated(run_ranks):
    """Those without a second call of their kind, of one token or none, of addresses between multiples of 16, with a
    hook."""
    run_ranks(_check_exceptions, 1, 2)


def _check_loans(rank: int, nodes: int, ranks_per_node: int) -> None:
    with make_layer(EVEN, rank, nodes, ranks_per_node) as layer:
        done = dispatch_and_check(layer, EVEN, 0)
        rows = done.recv_x.clone()
        sums = [layer.combine(rows, done.desc) for _ in range(3)]
        assert _kinds(layer, combines=True) == ["RepeatedCombine"]
        for _ in range(2):  # neither from the buffer, nor by a copy that moves lent rows first
            lent = layer.combine_buffer(done.desc.num_recv_rows)
            lent.copy_(rows)
            sums.append(layer.combine(lent, done.desc))
            layer.combine_buffer(done.desc.num_recv_rows)
            with mock.patch.object(RepeatedCombine, "run", side_effect=AssertionError("repeated")):
                sums.append(layer.combine(rows, done.desc))
        sums.append(layer.combine(rows, done.desc))
        assert all(torch.equal(each, sums[0]) for each in sums)


@PLAIN
def test_combines_of_lent_memory_between_repeated_ones(run_ranks):
    """The buffer that the layer lends is no tensor of the caller."""
    run_ranks(_check_loans, 1, 2)


def _check_memory(rank: int, nodes: int, ranks_per_node: int) -> None:
    device = current_heap().device
    with make_layer(EVEN, rank, nodes, ranks_per_node) as layer:
        work = workloads(EVEN, layer.config.world_size, 0)[rank]
        kept: list[weakref.ref[torch.UntypedStorage]] = []

        def call(by_map: bool) -> None:
            x, idx, weights = (each.to(device).clone() for each in (work.x, work.topk_idx, work.topk_weights))
            given, used = [x, idx, weights], idx
            if by_map:
                routed = torch.zeros(len(x), layer.config.num_experts, dtype=torch.bool, device=device)
                used, weights = RoutingMap(routed.scatter_(1, idx.long().clamp(0, 7), True), routed.float(), None), None
                given += [used.routed, used.probs]
            rows, recv_weights, desc, *_ = layer.dispatch_with_row_map(Rows(x), used, weights)
            out = layer.combine(rows.data, desc)
            given += [rows.data, recv_weights, desc.entries, desc.placement, out]
            kept.extend(weakref.ref(each.untyped_storage()) for each in given if each is not None)

        for number in range(8):
            call(by_map=number % 2 == 1)
        assert _kinds(layer) == ["RepeatedDispatch"] * 2
        gc.collect()
        assert [each() for each in kept if each() is not None] == []


@PLAIN
def test_repeats_keep_no_memory_of_a_call(run_ranks):
    """Neither arguments nor results, by ids and by a routing map."""
    run_ranks(_check_memory, 1, 2)


def _check_bound(rank: int, nodes: int, ranks_per_node: int) -> None:
    case = replace(EVEN, tokens=(20,), hidden=32, topk=1)
    with make_layer(case, rank, nodes, ranks_per_node) as layer, mock.patch.object(repeats, "MOST", 4):
        work, device = workloads(case, layer.config.world_size, 0)[rank], current_heap().device
        x, idx = work.x.to(device), work.topk_idx.to(device)
        results = [layer.dispatch(x, idx)[0] for _ in range(3)]
        for tokens in range(2, 12):
            layer.dispatch(x[:tokens], idx[:tokens])
            assert len(layer.context.repeats) <= 4
            assert _kinds(layer).count("RepeatedDispatch") == 1
        for tokens in range(2, 7):
            for _ in range(2):
                layer.dispatch(x[:tokens], idx[:tokens])
            assert len(layer.context.repeats) <= 4
        results += [layer.dispatch(x, idx)[0] for _ in range(3)]
        assert "RepeatedDispatch" in _kinds(layer) and all(torch.equal(each, results[0]) for each in results)


@PLAIN
def test_a_layer_remembers_a_bounded_number_of_kinds(run_ranks):
    """Calls with ever other numbers of tokens replace each other, and no kind that has come again."""
    run_ranks(_check_bound, 1, 2)


def _check_mx_rows(rank: int, nodes: int, ranks_per_node: int) -> None:
    case = replace(EVEN, payload="mxfp8")
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        work = workloads(case, layer.config.world_size, 0)[rank]
        device = current_heap().device
        x, idx = work.x.to(device), work.topk_idx.to(device)
        for rows in (x, MXTensor.to_mx(x)) * 3:
            recv_x, _, desc = layer.dispatch(rows, idx)
            used = int(desc.expert_offsets[-1])
            row, _, _ = layer.dispatch(rows, idx, landing="row")
            wide, _, _ = layer.dispatch(rows, idx, landing="bf16")
            assert torch.equal(recv_x.dequantize()[:used], wide[:used])
            assert torch.allclose(row.dequantize()[:used].float(), wide[:used].float(), rtol=0.2, atol=0.1)
        assert _kinds(layer) == ["RepeatedDispatch"] * 6


@PLAIN
def test_rows_of_both_kinds_and_all_landings(run_ranks):
    """A layer that quantises repeats six kinds of calls in turn."""
    run_ranks(_check_mx_rows, 1, 2)
