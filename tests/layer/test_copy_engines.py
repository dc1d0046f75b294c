"""Layers whose rows are sent by copy engines: the same rows, sums and errors as with kernels, and which rows they send.

The checks of other tests run with `copy_engines=True` for every layer that may have it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import triton_ep.layer
from tests.combinations import combinations
from tests.layer import test_compact, test_errors, test_held, test_life, test_scaled
from tests.layer.cases import CASES, Case, check_case, make_layer, workloads
from triton_ep import EPAll2AllLayer, InputError
from triton_ep.config import EPConfig
from triton_ep.distributed import current_heap
from triton_ep.ops import copy_engines

EXACT = tuple(case for case in CASES if not (case.static or case.shared_staging or case.low_latency))
ON_CPU = {
    *("plain", "topk3_fp32", "hidden_odd", "zero_tokens_on_a_rank", "all_to_one_rank", "all_dropped", "scatter_given"),
    *("local_combine_weighted", "budget", "mxfp8_odd_blocks", "mxfp8_quantised_fp32", "topk8_aligned16"),
}
SIZES = Case("sizes", tokens=(9, 4, 0, 6), hidden=40, topk=3, experts=4)


class _Sent:
    """How often copy engines have sent rows of dispatches, and of combines."""

    def __init__(self) -> None:
        self.dispatches = self.combines = 0


@contextmanager
def _counted() -> Iterator[_Sent]:
    sent, send, send_compact = _Sent(), copy_engines.send, copy_engines.send_compact

    def dispatched(*args: Any) -> None:
        sent.dispatches += 1
        send(*args)

    def combined(*args: Any) -> None:
        sent.combines += 1
        send_compact(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_engines, "send", dispatched)
        patch.setattr(copy_engines, "send_compact", combined)
        yield sent


def _by_engines(rank: int, nodes: int, ranks_per_node: int, check: Callable[..., None], *args: Any) -> None:
    """Run the check of another test with copy engines."""

    def config(*sizes: Any, **given: Any) -> EPConfig:
        others = given["low_latency"] or given["shared_staging"] or given["recv_capacity"] is not None
        return EPConfig(*sizes, **{**given, "copy_engines": not others})

    with _counted() as sent, pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_ep.layer, "EPConfig", config)
        check(rank, nodes, ranks_per_node, *args)
    assert sent.dispatches > 0


@pytest.mark.parametrize(
    "nodes, ranks_per_node, case",
    combinations(
        [(1, 1), (1, 2), (1, 4)],
        EXACT,
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
        (test_scaled._check, (test_scaled.KINDS[0],)),
        (test_scaled._check, (test_scaled.KINDS[1],)),
        (test_held._check_refused, ("id",)),
        (test_held._check_refused, ("rows",)),
        (test_life._growth, (False,)),
        (test_errors._bad_ids, ([9],)),
    ],
    ids=["compact", "empty", "odd", "mistakes", "lent", "scaled", "by_32", "id", "rows", "growth", "bad_id"],
)
def test_other_calls_give_the_same(run_ranks, nodes, ranks_per_node, check, args):
    """Compact rows, with scales, too; rows in the combine buffer; growth of buffers; errors."""
    run_ranks(_by_engines, nodes, ranks_per_node, check, *args)


def _inputs(layer: EPAll2AllLayer, call: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    work = workloads(SIZES, layer.config.world_size, call)[layer.config.rank]
    return tuple(part.to(layer.context.device) for part in (work.x, work.topk_idx, work.topk_weights))


def _check_which_rows(rank: int, nodes: int, ranks_per_node: int) -> None:
    with make_layer(SIZES, rank, nodes, ranks_per_node, copy_engines=True) as layer, _counted() as sent:
        x, ids, weights = _inputs(layer)
        rows = layer.dispatch_compact(x, ids, weights)
        assert rows.layout_desc.host_arrivals == tuple(rows.layout_desc.arrivals_from_rank.tolist())
        assert (sent.dispatches, sent.combines) == (1, 0)
        y = rows.x * (1 + rank)
        out = layer.combine(y, rows.layout_desc)
        assert sent.combines == 1
        # Another rank may still add the sums of that combine, so rows of the next ones are sent by kernels.
        assert torch.equal(layer.combine(y, rows.layout_desc), out)
        layer.combine_topk(rows.topk_weights, rows.layout_desc)
        assert sent.combines == 1
        # The host reads nothing of this one: it knows how many rows arrive.
        layer.dispatch_compact_again(x, rows.layout_desc)
        assert torch.equal(layer.combine(y, rows.layout_desc), out)
        assert (sent.dispatches, sent.combines) == (1, 1)
        layer.dispatch(x, ids)
        assert torch.equal(layer.combine(y, rows.layout_desc), out)
        assert (sent.dispatches, sent.combines) == (2, 2)
        # Nor of this one, so it knows the counts of the other descriptor, but not that all ranks are ready.
        most = layer.config.world_size * layer.config.max_tokens
        unread = layer.dispatch_compact(x, ids, num_rows=most).layout_desc
        assert unread.host_arrivals is None
        padded = torch.zeros(most, x.shape[1], dtype=x.dtype, device=x.device)
        padded[: len(y)] = y
        assert torch.equal(layer.combine(padded, unread), out)
        assert torch.equal(layer.combine(y, rows.layout_desc), out)
        assert (sent.dispatches, sent.combines) == (2, 2)
        # Expert-major rows are summed before they are sent, and weights multiplied, by kernels.
        recv_x, _, desc = layer.dispatch(x, ids)
        layer.combine(recv_x, desc)
        layer.combine(layer.dispatch_compact(x, ids, weights).x, rows.layout_desc)
        assert (sent.dispatches, sent.combines) == (4, 3)
        layer.check()


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), pytest.param(1, 4, marks=pytest.mark.on_gpus)])
def test_which_rows_copy_engines_send(run_ranks, nodes, ranks_per_node):
    """Rows of dispatches whose counts the host reads, and of one combine after each, if they are compact."""
    run_ranks(_check_which_rows, nodes, ranks_per_node)


def _check_late(rank: int, nodes: int, ranks_per_node: int, calls: int) -> None:
    """One rank after the other is late; all descriptors are used after later dispatches, too."""
    device = current_heap().device
    with make_layer(SIZES, rank, nodes, ranks_per_node, copy_engines=True) as layer:
        plain = make_layer(SIZES, rank, nodes, ranks_per_node)
        kept = []
        for call in range(calls):
            if call % layer.config.world_size == rank:
                if device.type == "cuda":
                    torch.cuda._sleep(20_000_000)
                else:
                    torch.full((200, 200), 1.0).matmul(torch.ones(200, 200))
            x, ids, _ = _inputs(layer, call)
            kept.append((layer.dispatch_compact(x, ids), plain.dispatch_compact(x, ids)))
            for got, want in kept[-2:]:
                assert torch.equal(got.x, want.x) and torch.equal(got.topk_idx, want.topk_idx)
                y = got.x * (1 + rank)
                assert torch.equal(layer.combine(y, got.layout_desc), plain.combine(y, want.layout_desc))
        plain.finalize()


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), pytest.param(1, 4, marks=pytest.mark.on_gpus)])
def test_late_ranks_lose_no_rows(run_ranks, backend, nodes, ranks_per_node):
    """Rows and sums equal those of a layer without copy engines, whichever rank is late."""
    run_ranks(_check_late, nodes, ranks_per_node, 4 if backend == "host" else 40)


def _check_hooks(rank: int, nodes: int, ranks_per_node: int) -> None:
    with make_layer(SIZES, rank, nodes, ranks_per_node, copy_engines=True) as layer:
        x, ids, _ = _inputs(layer)
        with pytest.raises(InputError, match="without copy_engines"):
            layer.dispatch(x, ids, return_recv_hook=True)
        recv_x, _, desc = layer.dispatch(x, ids)
        with pytest.raises(InputError, match="without copy_engines"):
            layer.combine(recv_x, desc, return_recv_hook=True)
        layer.combine(recv_x, desc)
        dist.barrier()


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_hooks_are_refused(run_ranks, nodes, ranks_per_node):
    """A half that another rank has not launched could lose its rows; the next call works."""
    run_ranks(_check_hooks, nodes, ranks_per_node)
