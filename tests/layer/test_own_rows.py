"""Rows that a rank sends to itself are laid out from the caller's memory, not staged, unless they could change."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.combinations import combinations
from tests.layer.cases import Case, check_dispatched, make_layer, start_dispatch, workloads
from triton_ep import EPAll2AllLayer
from triton_ep.config import EPConfig
from triton_ep.testing.workloads import Workload

_UNTOUCHED = 0x55
PLAIN = Case("own", tokens=(11, 0, 20, 5), hidden=160, topk=3, experts=3, alignment=16)
CASES = (
    PLAIN,
    replace(PLAIN, name="own_static_local", static=True, local_combine=True),
    replace(PLAIN, name="own_mxfp8", payload="mxfp8"),
    replace(PLAIN, name="own_quantised", payload="mxfp8", quantised_input=True),
    replace(PLAIN, name="own_budget", sm_budget=4, local_combine=True),
)
ON_NODES = {(2, 1): "own_static_local", (2, 2): "own_mxfp8"}
"""Cases of several nodes of CPU ranks."""
WAYS = ("plain", "hook", "unaligned", "kept")


def _moved(x: torch.Tensor) -> torch.Tensor:
    """`x` at an address that is no multiple of 16 bytes."""
    room = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return room[1:].view(x.shape).copy_(x)


def _staged_rows(layer: EPAll2AllLayer) -> torch.Tensor:
    return layer.context.local("stage_x").view(torch.uint8)


def _check_kept(kept: torch.Tensor, works: list[Workload], config: EPConfig) -> None:
    """A row per token with an expert here, by source rank, then by token."""
    first = config.rank * config.num_experts_per_rank
    here = [(work.topk_idx >= first) & (work.topk_idx < first + config.num_experts_per_rank) for work in works]
    want = torch.cat([work.x[each.any(1)].cpu() for work, each in zip(works, here, strict=True)])
    assert torch.equal(kept[: len(want)].cpu(), want)


def _all_ranks_meet(layer: EPAll2AllLayer) -> None:
    if layer.context.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def _check(rank: int, nodes: int, ranks_per_node: int, case: Case) -> None:
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        for call, way in enumerate(WAYS):
            works = workloads(case, nodes * ranks_per_node, call)
            start_dispatch(layer, case, works)  # buffers grow
            if way == "unaligned":
                works[rank] = replace(works[rank], x=_moved(works[rank].x.to(layer.context.device)))
            _all_ranks_meet(layer)
            _staged_rows(layer).fill_(_UNTOUCHED)
            _all_ranks_meet(layer)
            kept = None
            if way == "kept" and case.payload is None:
                device, mine = layer.context.device, works[rank]
                given = [each.to(device) for each in (mine.x, mine.topk_idx, mine.topk_weights)]
                *found, kept, _ = layer.dispatch_ahead(*given, None, later=False, keep_rows=True)
                assert kept is not None
            else:
                found = start_dispatch(layer, case, works, **({"return_recv_hook": True} if way == "hook" else {}))
            if way == "hook":
                *found, receive = found
                receive()
            desc = check_dispatched(layer, case, call, *found).desc
            if kept is not None:
                _check_kept(kept, works, layer.config)
            first, count = (int(each[rank]) for each in (desc._part("first_arrivals"), desc.arrivals_from_rank))
            untouched = bool((_staged_rows(layer)[first : first + count] == _UNTOUCHED).all())
            # Rows that are quantised here are packed in aligned memory; those that come with scales are not packed.
            in_place = way in ("plain", "kept") or (way == "unaligned" and case.payload is not None)
            assert count == 0 or untouched == (in_place and not case.quantised_input), (way, first, count)
        layer.check()


def _on_cpu(nodes: int, ranks_per_node: int, case: Case) -> bool:
    return (nodes, ranks_per_node) == (1, 2) or ON_NODES.get((nodes, ranks_per_node)) == case.name


@pytest.mark.parametrize(
    "nodes, ranks_per_node, case",
    combinations(
        [(1, 2), (2, 1), (1, 4), (2, 2)],
        CASES,
        on_cpu=_on_cpu,
        in_chaos=lambda nodes, _, case: nodes == 1 and case is PLAIN,
    ),
)
def test_own_rows_are_staged_only_if_they_must_be(run_ranks, nodes, ranks_per_node, case):
    """Same bits in any case; whole calls leave the staging rows of this rank as they were, calls by hook do not."""
    run_ranks(_check, nodes, ranks_per_node, case)
