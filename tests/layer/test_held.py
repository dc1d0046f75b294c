"""Exact dispatches: rows are sent before the host has read the counts, or held on all ranks until it has."""

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

from tests.layer.cases import Case, combine_and_check, dispatch_and_check, make_layer, workloads
from tests.layer.test_autograd import _check_gradients
from triton_ep import ConfigError
from triton_ep.context.context import DispatchCombineContext
from triton_ep.context.layout import Sizes, rows_of_sums, sizes_of
from triton_ep.context.memory import SymmetricBuffers
from triton_ep.context.records import Report, Reports
from triton_ep.distributed import current_heap
from triton_ep.errors import EPError
from triton_ep.exchange import checks
from triton_ep.exchange.landings import Deduplicated, ExpertMajor
from triton_ep.exchange.repeated_dispatch import RepeatedDispatch
from triton_ep.kernels.device import codes
from triton_ep.ops import dispatch as dispatch_ops
from triton_ep.runtime import launch
from triton_ep.runtime.launch import INTERPRETING

# isort: split
from triton_ep.kernels.device.host_read import HostRead, must_hold
from triton_ep.kernels.device.job import Job

DEVICE = "cpu" if INTERPRETING else "cuda"
PLAIN, ON_GPUS = pytest.mark.plain, pytest.mark.on_gpus
FEW = Case("few", tokens=(2, 1), hidden=32, topk=1, drop=0.0, dtype=torch.float32)
MANY = replace(FEW, tokens=(24, 17), routing="one_expert")


@contextmanager
def _order(received: bool = False) -> Iterator[list[str]]:
    """Events of dispatches in this process, in order: pushes launched, counts read, buffers grown; with `received` also
    receiving halves launched."""
    happened: list[str] = []

    def noting(owner: object, name: str, what: str) -> mock._patch:
        before = getattr(owner, name)

        def noted(*given: object) -> object:
            happened.append(what)
            return before(*given)

        return mock.patch.object(owner, name, noted)

    with (
        noting(dispatch_ops, "push", "push"),
        noting(RepeatedDispatch, "begin", "push"),  # the kernels that send follow at once
        noting(DispatchCombineContext, "read_back", "read"),
        noting(SymmetricBuffers, "grow", "grow"),
        noting(ExpertMajor, "receive", "receive") if received else nullcontext(),
        noting(Deduplicated, "receive", "receive") if received else nullcontext(),
        noting(RepeatedDispatch, "finish", "receive") if received else nullcontext(),
    ):
        yield happened


# --- in which order -----------------------------------------------------------------------------------------


def _check_launches(rank: int, nodes: int, ranks_per_node: int, case: Case, between: list[str]) -> None:
    launched: list[str] = []
    interpret = launch._interpret

    def noting(kernel_spec: object, *given: object) -> None:
        launched.append(kernel_spec.name)
        interpret(kernel_spec, *given)

    with make_layer(case, rank, nodes, ranks_per_node) as layer, mock.patch.object(launch, "_interpret", noting):
        dispatch_and_check(layer, case, 0)
        layer.check()
    assert launched == ["splits_kernel", "routing_slots_kernel", *between, "dispatch_expand_kernel"]


@pytest.mark.plain
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_dispatch_is_four_launches(run_ranks, backend, nodes, static):
    """With several nodes two more, for rows that cross the network."""
    if backend != "host":
        pytest.skip("only launches of CPU ranks all pass through one function")
    between = ["internode_send_kernel", "dispatch_push_kernel", "internode_forward_kernel"]
    of_rows = between if nodes > 1 else ["dispatch_push_kernel"]
    run_ranks(_check_launches, nodes, 2 // nodes, replace(FEW, static=static), of_rows)


def _check_growth(rank: int, nodes: int, ranks_per_node: int, options: dict) -> None:
    few, many = replace(FEW, **options), replace(MANY, **options)
    with make_layer(few, rank, nodes, ranks_per_node, max_tokens=24) as layer:
        layer.context.sizes = layer.context.memory.sizes = _shrunk(layer.context.sizes, 32)
        with _order() as happened:
            combine_and_check(layer, dispatch_and_check(layer, few, 0))
            assert happened == ["push", "read"]
            happened.clear()
            combine_and_check(layer, dispatch_and_check(layer, many, 1))
            assert happened == ["push", "read", "grow", "push"]
            happened.clear()
            combine_and_check(layer, dispatch_and_check(layer, many, 2))
            assert happened == ["push", "read"]
        layer.check()


def _shrunk(sizes: Sizes, rows: int) -> Sizes:
    """Sizes with less room than there is memory, as if the layer had been created for fewer rows."""
    return sizes_of(sizes.config, rows, rows)


GROWING = {"plain": {}, "local": {"local_combine": True}, "mxfp8": {"payload": "mxfp8", "alignment": 16}}


@pytest.mark.parametrize(
    "name, nodes, ranks_per_node",
    [
        ("plain", 1, 2),
        pytest.param("plain", 2, 2, marks=PLAIN),
        *(pytest.param(name, *ranks, marks=PLAIN) for name in ("local", "mxfp8") for ranks in ((1, 2), (2, 1))),
        *(pytest.param(name, 1, 4, marks=ON_GPUS) for name in GROWING),
        *(pytest.param(name, 2, 2, marks=ON_GPUS) for name in ("local", "mxfp8")),
    ],
)
def test_rows_are_sent_before_the_counts_are_read_and_again_where_buffers_grow(
    run_ranks, chaos_seed, name, nodes, ranks_per_node
):
    """All ranks hold the dispatch that does not fit; after the growth its rows arrive as usual."""
    run_ranks(_check_growth, nodes, ranks_per_node, GROWING[name])


AHEAD_MX = {"local_combine": True, "payload": "mxfp8", "alignment": 16}


def _check_ahead(rank: int, nodes: int, ranks_per_node: int, options: dict) -> None:
    # All tokens go to all experts, so the numbers of rows follow from those of tokens.
    case = replace(Case("ahead", tokens=(24, 17), topk=4, experts=2, drop=0.0), **options)
    tokens = {"first": (24, 17), "alike": (24, 16), "more": (31, 31), "alike again": (30, 31), "dropped": (24, 17),
              "some": (24, 17), "refused": (24, 17), "last": (24, 17), "fewer tokens": (7, 0)}  # fmt: skip
    again = ["push", "receive", "read", "receive"]
    wanted = {name: ["push", "read", "receive"] for name in ("first", "some", "fewer tokens")}
    wanted |= {"more": again, "dropped": again}
    with make_layer(case, rank, nodes, ranks_per_node, max_tokens=40) as layer, _order(received=True) as happened:
        for call, (name, of_ranks) in enumerate(tokens.items()):
            if name == "refused":
                x, ids = (each.to(layer.context.device) for each in _given(case, layer, rank, call))
                ids[-1, 0] = 1000 if rank == 0 else ids[-1, 0]
                with pytest.raises(EPError, match="1000"):
                    layer.dispatch(x, ids)
            else:
                routing = "all_dropped" if name == "dropped" else case.routing
                made = dispatch_and_check(layer, replace(case, tokens=of_ranks, routing=routing), call)
                assert made.recv_x.shape[0] == made.desc.num_recv_rows
                combine_and_check(layer, made)
            assert happened == wanted.get(name, ["push", "receive", "read"])
            happened.clear()
        layer.check()


def _given(case: Case, layer: object, rank: int, call: int) -> tuple[torch.Tensor, torch.Tensor]:
    mine = workloads(case, layer.config.world_size, call)[rank]
    return mine.x, mine.topk_idx


@pytest.mark.parametrize(
    "nodes, ranks_per_node, options",
    [
        pytest.param(1, 2, {}, id="1-2-plain"),
        pytest.param(2, 1, AHEAD_MX, id="2-1-mxfp8", marks=PLAIN),
        pytest.param(2, 1, {}, id="2-1-plain", marks=ON_GPUS),
        pytest.param(1, 2, AHEAD_MX, id="1-2-mxfp8", marks=ON_GPUS),
    ],
)
def test_rows_are_received_before_the_counts_are_read(run_ranks, chaos_seed, nodes, ranks_per_node, options):
    """With room for as many rows as lately; again, if the room is too small or much too large. Nothing is received
    of a refused dispatch, and the next one is right."""
    run_ranks(_check_ahead, nodes, ranks_per_node, options)


def _check_compact_ahead(rank: int, nodes: int, ranks_per_node: int) -> None:
    case = Case("ahead", tokens=(24, 17), topk=4, experts=2, drop=0.0)
    with make_layer(case, rank, nodes, ranks_per_node, max_tokens=40) as layer, _order(received=True) as happened:
        for call, (of_ranks, want) in enumerate(
            [((24, 17), 0), ((24, 17), 1), ((24, 16), 1), ((31, 31), 2), ((30, 31), 1), ((3, 2), 0), ((3, 2), 1)]
        ):
            works, device = workloads(replace(case, tokens=of_ranks), 2, call), current_heap().device
            x, ids, weights = works[rank].x.to(device), works[rank].topk_idx.to(device), works[rank].topk_weights
            got = layer.dispatch_compact(x, ids, weights.to(device))
            order = [["push", "read", "receive"], ["push", "receive", "read"], ["push", "receive", "read", "receive"]]
            assert happened == order[want]
            happened.clear()
            e = layer.config.num_experts_per_rank
            local = torch.cat([work.topk_idx for work in works]) - rank * e
            mine = (local >= 0) & (local < e)
            comes = mine.any(1)
            assert torch.equal(got.x.cpu(), torch.cat([work.x for work in works])[comes])
            assert torch.equal(got.topk_idx.cpu(), torch.where(mine, local, -1)[comes])
            of_rows = torch.where(mine, torch.cat([work.topk_weights for work in works]), 0)[comes]
            assert torch.equal(got.topk_weights.cpu(), of_rows)
            layer.combine(got.x, got.layout_desc)
        layer.check()


@pytest.mark.plain  # the test above repeats the order of stores
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), (2, 1)])
def test_compact_rows_are_received_before_the_counts_are_read(run_ranks, nodes, ranks_per_node):
    """The same for compact rows, their ids and weights."""
    run_ranks(_check_compact_ahead, nodes, ranks_per_node)


def _check_compact_growth(rank: int, nodes: int, ranks_per_node: int) -> None:
    with make_layer(MANY, rank, nodes, ranks_per_node) as layer, _order() as happened:
        layer.context.sizes = layer.context.memory.sizes = _shrunk(layer.context.sizes, 32)
        works, device = workloads(MANY, layer.config.world_size, 0), current_heap().device
        mine = works[rank]
        got = layer.dispatch_compact(mine.x.to(device), mine.topk_idx.to(device))
        assert happened == ["push", "read", "grow", "push"]
        everything = torch.cat([work.x for work in works])
        owner = torch.cat([work.topk_idx for work in works])[:, 0] // layer.config.num_experts_per_rank
        assert torch.equal(got.x.cpu(), everything[owner == rank])
        out = layer.combine(got.x * 2, got.layout_desc)
        assert torch.equal(out.cpu(), mine.x * 2)
        layer.check()


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), pytest.param(1, 4, marks=ON_GPUS), (2, 2)])
def test_compact_rows_arrive_where_buffers_grow_on_the_way(run_ranks, chaos_seed, nodes, ranks_per_node):
    """The same for compact rows, one per (token, rank)."""
    run_ranks(_check_compact_growth, nodes, ranks_per_node)


def _check_growth_of_sums(rank: int, nodes: int, ranks_per_node: int, compact: bool) -> None:
    case = replace(FEW, local_combine=not compact)
    # Tokens go to both ranks of a node in turn: with two nodes all of local rank 0 to the first node, all of local
    # rank 1 to the second. So 20 rows arrive at each rank, but one rank of each node adds up 40.
    tokens = 20 if nodes == 2 else 40 * (rank == 0)
    with make_layer(case, rank, nodes, ranks_per_node, max_tokens=40) as layer, _order() as happened:
        ctx, node = layer.context, rank % ranks_per_node if nodes == 2 else 0
        ctx.sizes = ctx.memory.sizes = Sizes(ctx.config, 32, 32)
        ids = (node * ranks_per_node + torch.arange(tokens) % ranks_per_node) * layer.config.num_experts_per_rank
        x = rank + torch.arange(tokens * case.hidden, device=ctx.device).view(tokens, case.hidden) / 2**14
        for order in (["push", "read", "grow", "push"], ["push", "read"]):
            arguments = x, ids[:, None].int().to(ctx.device)
            got = layer.dispatch_compact(*arguments) if compact else layer.dispatch(*arguments)
            rows, desc = (got.x, got.layout_desc) if compact else (got[0], got[2])
            assert happened == order
            happened.clear()
            assert rows.shape[0] == 20 and torch.equal(layer.combine(rows * 2, desc), x * 2)
        assert ctx.sizes == Sizes(ctx.config, 32, min(50, rows_of_sums(ctx.config)))
        layer.check()


@pytest.mark.plain  # the tests above repeat the order of stores
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), (2, 2)])
def test_sums_make_combine_buffers_grow(run_ranks, nodes, ranks_per_node, compact):
    """Where fewer rows arrive than there is room for, but a rank has more sums to add up."""
    run_ranks(_check_growth_of_sums, nodes, ranks_per_node, compact)


def _check_backward(rank: int, nodes: int, ranks_per_node: int) -> None:
    case = Case("grown", topk=4, experts=4, dtype=torch.float32)
    made = make_layer

    def small(*given: object, **options: object) -> object:
        layer = made(*given, **options)
        layer.context.sizes = layer.context.memory.sizes = _shrunk(layer.context.sizes, 3)
        return layer

    with mock.patch(f"{_check_gradients.__module__}.make_layer", small), _order() as happened:
        _check_gradients(rank, nodes, ranks_per_node, case)
    # The forward pass; then the gradient of combine, with known routing and counts.
    assert happened == ["push", "read", "grow", "push", "push"]


@pytest.mark.plain  # the test above already covers the growth
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), (2, 1), pytest.param(2, 2, marks=ON_GPUS)])
def test_gradients_are_right_where_the_forward_pass_grew_buffers(run_ranks, nodes, ranks_per_node):
    """Forward and backward against plain torch, on a layer without room for the forward pass."""
    run_ranks(_check_backward, nodes, ranks_per_node)


# --- what is held back --------------------------------------------------------------------------------------


def _check_refused(rank: int, nodes: int, ranks_per_node: int, kind: str) -> None:
    with make_layer(FEW, rank, nodes, ranks_per_node) as layer:
        call = dispatch_and_check(layer, FEW, 0)
        combine_and_check(layer, call)
        work, device = workloads(FEW, layer.config.world_size, 1)[rank], current_heap().device
        x, ids = work.x.to(device), work.topk_idx.to(device)
        weights = work.topk_weights.to(device)
        if rank == 1 and kind == "id":
            ids = torch.full_like(ids, layer.config.num_experts + 7)
        if rank == 1 and kind == "rows":
            x = x[:, :-1].contiguous()
        if rank == 1 and kind == "weights":
            weights = None
        names = ("stage_x", "stage_meta", "arrive_flag", "token_flag")
        arrived = [layer.context.local(name).clone() for name in names]
        with pytest.raises(EPError):
            layer.dispatch(x, ids, weights)
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        for before, name in zip(arrived, names, strict=True):
            assert torch.equal(layer.context.local(name).view(torch.uint8), before.view(torch.uint8)), name
        dist.barrier()
        combine_and_check(layer, dispatch_and_check(layer, FEW, 2))
        layer.check()


@pytest.mark.parametrize(
    "kind, nodes, ranks_per_node",
    [
        ("id", 1, 2),
        ("id", 2, 2),
        pytest.param("rows", 1, 2, marks=PLAIN),
        pytest.param("weights", 2, 1, marks=PLAIN),
        *(pytest.param(kind, 1, 4, marks=ON_GPUS) for kind in ("id", "rows", "weights")),
        *(pytest.param(kind, 2, 2, marks=ON_GPUS) for kind in ("rows", "weights")),
        pytest.param("weights", 1, 2, marks=ON_GPUS),
    ],
)
def test_no_rank_sends_anything_where_one_is_refused(run_ranks, kind, nodes, ranks_per_node):
    """Every rank raises; receive buffers and flags are unchanged; the next call is correct."""
    run_ranks(_check_refused, nodes, ranks_per_node, kind)


def _check_capture(rank: int, nodes: int, ranks_per_node: int) -> None:
    with make_layer(FEW, rank, nodes, ranks_per_node) as layer:
        work, device = workloads(FEW, layer.config.world_size, 0)[rank], current_heap().device
        x, ids = work.x.to(device), work.topk_idx.to(device)
        dispatches = layer.context.num_dispatches
        with mock.patch.object(DispatchCombineContext, "is_capturing", True):
            with pytest.raises(ConfigError, match="CUDA graph"):
                layer.dispatch(x, ids)
            with pytest.raises(ConfigError, match="num_rows"):
                layer.dispatch_compact(x, ids)
        assert layer.context.num_dispatches == dispatches
        combine_and_check(layer, dispatch_and_check(layer, FEW, 1))


@pytest.mark.plain
def test_an_exact_dispatch_is_not_captured(run_ranks):
    """It raises before anything is launched, and the layer stays usable."""
    run_ranks(_check_capture, 1, 2)


# --- the device decides as hosts do -------------------------------------------------------------------------


@triton.jit
def _decide(
    reports_ptr,
    held_ptr,
    state_ptr,
    arrival_room,
    output_room,
    sum_room,
    rank,
    num_ranks,
    WORDS: tl.constexpr,
    WP: tl.constexpr,
):
    job = Job(state_ptr, state_ptr, rank, num_ranks, num_ranks, 1, 1)
    read = HostRead(state_ptr, 1, arrival_room, output_room, sum_room)
    at = tl.program_id(0)
    tl.store(held_ptr + at, must_hold(job, reports_ptr + at * WORDS, read, WP).to(tl.int32))


def _made_up(draw: random.Random, num_ranks: int) -> list[Report]:
    """Random reports of a call: mostly equal and correct, otherwise with an error on one rank or on all."""
    word = codes.HOST_READS | draw.choice([0, codes.HOST_WEIGHTS, codes.HOST_SCALED, codes.HOST_COMPACT])
    reports = [
        Report(draw.randint(0, 130), draw.randint(0, 130), draw.randint(0, 99), 0, 0, word, draw.randint(0, 130), 0)
        for _ in range(num_ranks)
    ]
    if draw.random() < 0.5:  # else most have too many rows
        reports = [report._replace(rows=report.rows // 2, arrivals=report.arrivals // 2, sums=report.sums // 2)
                   for report in reports]  # fmt: skip
    flags = (codes.HOST_REJECTED, codes.HOST_SCATTER, codes.HOST_WEIGHTS, codes.HOST_SCALED, codes.HOST_BACKWARD,
             codes.HOST_AGAIN | 3 << codes.HOST_SHIFT)  # fmt: skip
    if draw.random() < 0.4:
        flag, everywhere, one = draw.choice(flags), draw.random() < 0.3, draw.randrange(num_ranks)
        for rank, report in enumerate(reports):
            if everywhere or rank == one:
                reports[rank] = report._replace(host_word=report.host_word ^ flag)
    if draw.random() < 0.15:
        rank = draw.randrange(num_ranks)
        bad_id = draw.choice([-5, 1000, codes.NEEDED_TOPK + 3])
        reports[rank] = reports[rank]._replace(bad_entry=draw.randint(1, 9), bad_id=bad_id)
    return reports


def _hosts_go_on(ctx: DispatchCombineContext, landing: object, made: list[Report]) -> bool:
    reports = Reports([word for report in made for word in report], len(made))
    try:
        checks.raise_for_ranks(ctx.config, reports)
    except EPError:
        return False
    return ctx.memory.wanted_sizes(*landing.room(ctx.config, reports)) is ctx.sizes


def _check_decisions(rank: int, nodes: int, ranks_per_node: int, local_combine: bool) -> None:
    case = replace(FEW, local_combine=local_combine)
    num_cases, num_ranks = 400, 3  # ranks in the random reports; not a power of two
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        ctx, draw = layer.context, random.Random(rank)
        ctx.sizes = ctx.memory.sizes = Sizes(ctx.config, 70, 100)
        for landing in (ExpertMajor(), Deduplicated()):
            made = [_made_up(draw, num_ranks) for _ in range(num_cases)]
            words = torch.tensor(made, dtype=torch.int32)
            assert list(Reports(words[0].flatten().tolist(), num_ranks)) == made[0]
            held = torch.full((num_cases,), -1, dtype=torch.int32, device=DEVICE)
            state = torch.zeros(64, dtype=torch.int64, device=DEVICE)
            of_case = num_ranks * codes.REPORT_WORDS
            given = words.to(DEVICE), held, state, *landing.limits(ctx.sizes), draw.randrange(num_ranks), num_ranks
            _decide[(num_cases,)](*given, WORDS=of_case, WP=4)
            want = [not _hosts_go_on(ctx, landing, reports) for reports in made]
            assert 0.2 < sum(want) / num_cases < 0.9
            assert held.bool().tolist() == want
        ctx.sizes = ctx.memory.sizes = Sizes(ctx.config, 1, 1)  # smaller than the allocated memory


@pytest.mark.plain
@pytest.mark.parametrize("local_combine", [False, True])
def test_the_device_holds_what_hosts_would_raise_or_make_room_for(run_ranks, local_combine):
    """1600 random reports: `must_hold` against `raise_for_ranks` and the sizes that `grow` would choose."""
    run_ranks(_check_decisions, 1, 1, local_combine)
