"""Layers whose rows are sent by copy engines: the same rows, sums and errors as with kernels, which rows they send, and
what is reported of rows that copies have overwritten.

The checks of other tests run with `copy_engines=True` for every layer that may have it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import triton_ep.layer
from tests.combinations import combinations
from tests.layer import (
    test_compact,
    test_dispatch_again,
    test_errors,
    test_life,
    test_overlap,
    test_replays,
    test_scaled,
)
from tests.layer.cases import CASES, Case, check_case, make_layer, workloads
from tests.patience import limit_after, stopwatch
from triton_ep import EPAll2AllLayer, PeerFailed, WaitTimeout
from triton_ep.config import EPConfig
from triton_ep.distributed import current_heap
from triton_ep.ops import combine as combine_ops
from triton_ep.ops import copy_engines
from triton_ep.runtime import launch

OTHERS = tuple(case for case in CASES if not (case.shared_staging or case.low_latency))
ON_CPU = {
    *("plain", "topk3_fp32", "hidden_odd", "zero_tokens_on_a_rank", "all_to_one_rank", "all_dropped", "scatter_given"),
    *("local_combine_weighted", "budget", "mxfp8_odd_blocks", "mxfp8_quantised_fp32", "static_aligned_local"),
}
SIZES = Case("sizes", tokens=(9, 4, 0, 6), hidden=40, topk=3, experts=4)


class _Sent:
    """How often copy engines have sent rows of dispatches, and of combines; combines that left own rows in place."""

    def __init__(self) -> None:
        self.dispatches = self.combines = self.in_place = 0


@contextmanager
def _counted() -> Iterator[_Sent]:
    sent, send, send_compact = _Sent(), copy_engines.send, copy_engines.send_compact

    def dispatched(*args: Any) -> None:
        sent.dispatches += 1
        send(*args)

    def combined(*args: Any) -> int:
        sent.combines += 1
        own_row = send_compact(*args)
        sent.in_place += own_row >= 0
        return own_row

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_engines, "send", dispatched)
        patch.setattr(copy_engines, "send_compact", combined)
        yield sent


def _by_engines(rank: int, nodes: int, ranks_per_node: int, check: Callable[..., Any], *args: Any) -> Any:
    """The result of another test's check, with copy engines."""

    def config(*sizes: Any, **given: Any) -> EPConfig:
        return EPConfig(*sizes, **{**given, "copy_engines": not (given["low_latency"] or given["shared_staging"])})

    with _counted() as sent, pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_ep.layer, "EPConfig", config)
        found = check(rank, nodes, ranks_per_node, *args)
    assert sent.dispatches > 0
    return found


@pytest.mark.parametrize(
    "nodes, ranks_per_node, case",
    combinations(
        [(1, 1), (1, 2), (1, 4)],
        OTHERS,
        on_cpu=lambda _, ranks, case: case.name in (ON_CPU if ranks == 2 else {"skewed"}),
        in_chaos=lambda _, ranks, case: ranks == 2 and case.name in ("plain", "mxfp8_odd_blocks"),
    ),
)
def test_a_layer_gives_the_same(run_ranks, backend, nodes, ranks_per_node, case):
    """Dispatch and combine equal the reference: dtypes, payloads, row lengths, ranks without tokens, a budget."""
    one_call = backend == "host" and case.name != "plain"
    run_ranks(_by_engines, nodes, ranks_per_node, check_case, replace(case, calls=1) if one_call else case)


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), pytest.param(1, 4, marks=pytest.mark.on_gpus)])
@pytest.mark.parametrize(
    ("check", "args"),
    [
        (test_compact._check, ("plain", 3)),
        (test_compact._check, ("empty_rank_fp32", 1)),
        (test_compact._check, ("duplicates_odd", 1)),
        (test_compact._check_errors, ()),
        (test_compact._check_late_rows, (3,)),
        (test_compact._check_left_out, (3,)),
        (test_scaled._check, (test_scaled.KINDS[0],)),
        (test_scaled._check, (test_scaled.KINDS[1],)),
        (test_dispatch_again._check_again, (SIZES,)),
        (test_overlap._any_order, (test_overlap.SMALL, 20)),
        (test_life._growth, (False,)),
        (test_errors._bad_ids, ([9],)),
    ],
    ids=[
        *("compact", "empty", "odd", "mistakes", "lent", "left_out", "scaled", "by_32", "again", "halves", "growth"),
        "bad_id",
    ],
)
def test_other_calls_give_the_same(run_ranks, nodes, ranks_per_node, check, args):
    """Compact rows, with scales, too; rows in the combine buffer; halves of calls; growth of buffers; errors."""
    run_ranks(_by_engines, nodes, ranks_per_node, check, *args)


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), pytest.param(1, 4, marks=pytest.mark.on_gpus)])
@pytest.mark.parametrize("payload", [None, "mxfp8"])
def test_replays_have_the_same_bits(run_ranks, backend, nodes, ranks_per_node, payload):
    """A CUDA graph captures the copies: rows and sums of its replays equal those of calls that are checked."""
    case = test_replays.SHORT if backend == "host" else test_replays.PREFILL
    sizes = (replace(case, payload=payload), False, 4 if backend == "host" else 200, 0.005)
    assert sum(run_ranks(_by_engines, nodes, ranks_per_node, test_replays._replay, *sizes)) == 0


def _inputs(layer: EPAll2AllLayer, call: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    work = workloads(SIZES, layer.config.world_size, call)[layer.config.rank]
    return tuple(part.to(layer.context.device) for part in (work.x, work.topk_idx, work.topk_weights))


def _check_which_rows(rank: int, nodes: int, ranks_per_node: int) -> None:
    with make_layer(SIZES, rank, nodes, ranks_per_node, copy_engines=True) as layer, _counted() as sent:
        x, ids, weights = _inputs(layer)
        rows = layer.dispatch_compact(x, ids, weights)
        assert rows.layout_desc.host_arrivals == tuple(rows.layout_desc.arrivals_from_rank.tolist())
        y = rows.x * (1 + rank)
        out = layer.combine(y, rows.layout_desc)
        assert torch.equal(layer.combine(y, rows.layout_desc), out)
        assert (sent.dispatches, sent.combines, sent.in_place) == (1, 2, 2)
        hooked = layer.combine(y, rows.layout_desc, return_recv_hook=True)
        y_before = y.clone()
        y.zero_()  # rows have been sent
        hooked[1]()
        assert torch.equal(hooked[0], out)
        y = y_before
        assert (sent.dispatches, sent.combines, sent.in_place) == (1, 3, 2)
        layer.dispatch_compact_again(x, rows.layout_desc)
        layer.dispatch(x, ids)
        layer.combine_topk(rows.topk_weights, rows.layout_desc)  # rows of another length
        assert (sent.dispatches, sent.combines) == (3, 3)
        # The host does not know how many rows of this one go to each rank.
        most = layer.config.world_size * layer.config.max_tokens
        unread = layer.dispatch_compact(x, ids, num_rows=most).layout_desc
        assert unread.host_arrivals is None
        padded = torch.zeros(most, x.shape[1], dtype=x.dtype, device=x.device)
        padded[: len(y)] = y
        assert torch.equal(layer.combine(padded, unread), out)
        assert (sent.dispatches, sent.combines) == (4, 3)
        assert torch.equal(layer.combine(y, rows.layout_desc), out)
        # Expert-major rows are summed before they are sent, and weights multiplied, by kernels.
        recv_x, _, desc = layer.dispatch(x, ids)
        layer.combine(recv_x, desc)
        layer.combine(y, rows.layout_desc, torch.ones(len(y), device=y.device))
        assert (sent.dispatches, sent.combines) == (5, 4)
        layer.check()


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), pytest.param(1, 4, marks=pytest.mark.on_gpus)])
def test_which_rows_copy_engines_send(run_ranks, nodes, ranks_per_node):
    """Rows of all dispatches, and compact rows of combines whose counts the host has read."""
    run_ranks(_check_which_rows, nodes, ranks_per_node)


def _check_launches(rank: int, nodes: int, ranks_per_node: int) -> None:
    launched: list[str] = []
    interpret = launch._interpret

    def noting(kernel_spec: Any, *given: Any) -> None:
        launched.append(kernel_spec.name)
        interpret(kernel_spec, *given)

    with make_layer(SIZES, rank, nodes, ranks_per_node, copy_engines=True) as layer:
        x, ids, _ = _inputs(layer)
        rows = layer.dispatch_compact(x, ids)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "_interpret", noting)
            layer.combine(rows.x, rows.layout_desc)
            assert launched == ["combine_begin_kernel", "combine_await_kernel", "combine_pull_kernel"]
            del launched[:]
            finish = layer.combine(rows.x, rows.layout_desc, return_recv_hook=True)[1]
            assert launched == ["combine_begin_kernel"], "the first half of a split combine waits for rows"
            finish()
        layer.check()


@pytest.mark.plain
def test_a_combine_waits_for_rows_before_it_takes_multiprocessors(run_ranks, backend):
    """One program waits; the kernel that sums is launched after it. Both belong to the receiving half."""
    if backend != "host":
        pytest.skip("only launches of CPU ranks all pass through one function")
    run_ranks(_check_launches, 1, 2)


def _check_late(rank: int, nodes: int, ranks_per_node: int, calls: int) -> None:
    device = current_heap().device
    with (
        make_layer(SIZES, rank, nodes, ranks_per_node, copy_engines=True) as layer,
        make_layer(SIZES, rank, nodes, ranks_per_node) as plain,
    ):
        kept = []
        for call in range(calls):
            if call % layer.config.world_size == rank:
                if device.type == "cuda":
                    torch.cuda._sleep(20_000_000)
                else:
                    time.sleep(0.05)
            x, ids, _ = _inputs(layer, call)
            kept.append((layer.dispatch_compact(x, ids), plain.dispatch_compact(x, ids)))
            for got, want in kept[-2:]:
                assert torch.equal(got.x, want.x) and torch.equal(got.topk_idx, want.topk_idx)
                y = got.x * (1 + rank)
                assert torch.equal(layer.combine(y, got.layout_desc), plain.combine(y, want.layout_desc))


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), pytest.param(1, 4, marks=pytest.mark.on_gpus)])
def test_late_ranks_lose_no_rows(run_ranks, backend, nodes, ranks_per_node):
    """Rows and sums equal those of a layer without copy engines, whichever rank is late; several combines follow each
    dispatch."""
    run_ranks(_check_late, nodes, ranks_per_node, 4 if backend == "host" else 40)


# --- overruns ---------------------------------------------------------------------------------------------------


def _caught(layer: EPAll2AllLayer, call: Callable[[], object]) -> Exception:
    def call_and_check() -> None:
        call()
        layer.check()  # on a GPU, calls of which the host reads nothing raise later

    with pytest.raises((WaitTimeout, PeerFailed)) as caught:
        call_and_check()
    return caught.value


@contextmanager
def _layer_of_two(rank: int, nodes: int, ranks_per_node: int) -> Iterator[EPAll2AllLayer]:
    """A layer on which a call must expire. As on GPUs, a rank that fails cannot end the waits of others."""
    with make_layer(SIZES, rank, nodes, ranks_per_node, copy_engines=True) as layer:
        x, ids, _ = _inputs(layer)
        for _ in range(2):  # the first one may compile
            dist.barrier()
            with stopwatch() as took:
                rows = layer.dispatch_compact(x, ids)
                layer.combine(rows.x, rows.layout_desc)
                layer.check()
                seconds = took()
    limit_s = limit_after(seconds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(current_heap(), "abort", lambda reason: None)
        layer = make_layer(SIZES, rank, nodes, ranks_per_node, copy_engines=True, timeout_s=limit_s)
        yield layer
        dist.barrier()
        layer.finalize()


def _overrun_of_dispatch(rank: int, nodes: int, ranks_per_node: int) -> Exception:
    with _layer_of_two(rank, nodes, ranks_per_node) as layer:
        x, ids, _ = _inputs(layer)
        layer.dispatch_compact(x, ids)
        if rank == 1:
            error = _caught(layer, lambda: layer.dispatch_compact(x, ids))
        dist.barrier()
        if rank == 0:
            error = _caught(layer, lambda: layer.dispatch_compact(x, ids))
        return error


def _overrun_of_combine(rank: int, nodes: int, ranks_per_node: int) -> Exception:
    pull = combine_ops._pull

    def late(*args: Any) -> None:
        dist.barrier()  # the other rank has waited in vain, and has copied the rows of its next combine
        pull(*args)

    with _layer_of_two(rank, nodes, ranks_per_node) as layer, pytest.MonkeyPatch.context() as patch:
        x, ids, _ = _inputs(layer)
        rows = layer.dispatch_compact(x, ids)
        if rank == 0:
            patch.setattr(combine_ops, "_pull", late)
            return _caught(layer, lambda: layer.combine(rows.x, rows.layout_desc))
        layer.combine(rows.x, rows.layout_desc)
        error = _caught(layer, lambda: layer.combine(-rows.x, rows.layout_desc))
        dist.barrier()
        return error


@pytest.mark.plain
@pytest.mark.parametrize("check", [_overrun_of_dispatch, _overrun_of_combine], ids=["dispatch", "combine"])
def test_rows_that_copies_may_have_overwritten_are_reported(run_ranks, check):
    """A rank whose wait has expired still copies its rows; the late rank learns that it may have read wrong ones."""
    late, waiting = run_ranks(check, 1, 2)
    assert isinstance(waiting, WaitTimeout)
    assert isinstance(late, PeerFailed)
    assert "rank 0 of 2 may have read wrong rows" in str(late) and "a wait of rank 1 expired" in str(late)
