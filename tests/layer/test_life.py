"""Many calls of a layer: live descriptors, growth, other groups, random sizes, chaos mode."""

import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.combinations import combinations
from tests.layer.cases import Case, combine_and_check, dispatch_and_check, make_layer, workloads
from triton_ep.distributed import current_heap
from triton_ep.reference import dispatch as dispatch_reference

SMALL = Case("small", hidden=32, topk=2, experts=2)
TOPOLOGIES = [(1, 2), (1, 4), (2, 2), (4, 1)]
ORDERS = ((0, 1, 2), (2, 0, 1), (1, 2, 0))


def _three_live(rank, nodes, ranks_per_node, order):
    with make_layer(SMALL, rank, nodes, ranks_per_node) as layer:
        live = [dispatch_and_check(layer, SMALL, call) for call in range(3)]
        for index in order:
            combine_and_check(layer, live[index])
        # A descriptor may be combined again, as recomputation does.
        combine_and_check(layer, live[order[0]])


def _live_on_cpu(nodes, ranks_per_node, order):
    """All orders on one node, one on two nodes; of four ranks, test_large.py combines live descriptors."""
    return nodes * ranks_per_node == 2 and (nodes == 1 or order == ORDERS[1])


@pytest.mark.plain  # test_many_calls_of_random_sizes combines live descriptors in chaos mode
@pytest.mark.parametrize(
    "nodes, ranks_per_node, order",
    combinations([*TOPOLOGIES, (2, 1)], [(order,) for order in ORDERS], on_cpu=_live_on_cpu),
)
def test_three_live_descriptors_combine_in_any_order(run_ranks, nodes, ranks_per_node, order):
    """Rows and routing of one dispatch survive two later ones."""
    run_ranks(_three_live, nodes, ranks_per_node, order)


def _evaluate_then_train(rank, nodes, ranks_per_node):
    with torch.inference_mode():
        layer = make_layer(SMALL, rank, nodes, ranks_per_node)
        combine_and_check(layer, dispatch_and_check(layer, SMALL, 0))
    with layer:
        combine_and_check(layer, dispatch_and_check(layer, SMALL, 1))
        rows, _ = layer.context.reallocate_dispatch_output_buf(layer.context.sizes.output_rows + 1)
        assert not rows.is_inference()
        with torch.inference_mode():
            layer.context.reallocate_dispatch_output_buf(rows.shape[0] + 1)
        assert not layer.context.local("dispatch_output_buf").is_inference()
        combine_and_check(layer, dispatch_and_check(layer, SMALL, 2))


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_a_layer_made_in_inference_mode_trains(run_ranks, nodes, ranks_per_node):
    """Its memory is writable and grows outside inference mode too; a buffer grown inside is no inference tensor."""
    run_ranks(_evaluate_then_train, nodes, ranks_per_node)


def _two_groups(rank, nodes, ranks_per_node):
    world = nodes * ranks_per_node
    halves = [list(range(0, world, 2)), list(range(1, world, 2))]
    groups = [dist.new_group(half) for half in halves]
    mine = rank % 2
    sub = Case("sub", hidden=48, topk=2, experts=3)
    sub_rank = halves[mine].index(rank)
    with (
        make_layer(sub, sub_rank, 1, world // 2, group=groups[mine]) as inner,
        make_layer(SMALL, rank, nodes, ranks_per_node) as outer,
    ):
        for call in range(2):
            a = dispatch_and_check(inner, sub, call + mine)
            b = dispatch_and_check(outer, SMALL, call)
            combine_and_check(inner, a)
            combine_and_check(outer, b)


@pytest.mark.plain  # layers share no memory, so no order of stores is new
@pytest.mark.parametrize("nodes, ranks_per_node", [pytest.param(1, 4, marks=pytest.mark.on_gpus), (2, 2)])
def test_layers_over_sub_groups_live_side_by_side(run_ranks, nodes, ranks_per_node):
    """Two disjoint sub-groups (interleaved ranks) and the world, used in turn."""
    run_ranks(_two_groups, nodes, ranks_per_node)


def _growth(rank, nodes, ranks_per_node, local_combine):
    world = nodes * ranks_per_node
    few = Case("few", tokens=(2,), topk=2, experts=2, drop=0.0, local_combine=local_combine)
    all_here = replace(few, name="all", tokens=(12,), routing="one_expert")
    with make_layer(few, rank, nodes, ranks_per_node, max_tokens=12) as layer:
        # Room for the average only; sending everything to one rank needs `world` times as much.
        ctx = layer.context
        ctx.heap.barrier(ctx.group)
        before = ctx.sizes
        for call, case in enumerate((few, all_here, few)):
            combine_and_check(layer, dispatch_and_check(layer, case, call))
        if world > 2:
            assert ctx.sizes.output_rows > before.output_rows or local_combine
        rows, weights = ctx.reallocate_dispatch_output_buf(ctx.sizes.output_rows + 100)
        assert rows.shape[0] >= before.output_rows + 100 and weights.shape == rows.shape[:1]
        combine_and_check(layer, dispatch_and_check(layer, all_here, 3))  # to another rank


@pytest.mark.parametrize(
    "nodes, ranks_per_node, local_combine",
    [
        (2, 2, False),
        *(pytest.param(*given, marks=pytest.mark.plain) for given in ((2, 2, True), (1, 4, True))),
        # Two ranks have room for everything from the start, so their buffers grow only when asked to.
        *(pytest.param(*given, marks=pytest.mark.on_gpus) for given in ((1, 2, False), (1, 2, True), (4, 1, False))),
    ],
)
def test_buffers_grow(run_ranks, nodes, ranks_per_node, local_combine):
    """An exact layer grows for any load, and stays correct after growth."""
    run_ranks(_growth, nodes, ranks_per_node, local_combine)


def _many_calls(rank, nodes, ranks_per_node, calls, seed, case):
    draw = random.Random(seed)
    with make_layer(case, rank, nodes, ranks_per_node, max_tokens=24) as layer:
        live = []
        for call in range(calls):
            tokens = tuple(draw.choice((0, 1, 2, 5, 16, 17, 24)) for _ in range(4))
            routing = draw.choice(("uniform", "skewed", "one_expert", "all_dropped"))
            now = replace(case, tokens=tokens, routing=routing, weights=draw.random() < 0.5)
            live.append(dispatch_and_check(layer, now, call))
            if len(live) > 1 and draw.random() < 0.7:
                combine_and_check(layer, live.pop(draw.randrange(len(live))))
        for call in live[:4]:
            combine_and_check(layer, call)


@pytest.mark.parametrize(
    "nodes, ranks_per_node, calls, local_combine",
    [
        (1, 2, 12, False),
        (2, 1, 8, True),
        # On CPU ranks test_large.py has few calls of these.
        *(pytest.param(*given, marks=pytest.mark.on_gpus) for given in ((1, 4, 8, True), (2, 2, 8, False))),
    ],
)
def test_many_calls_of_random_sizes(run_ranks, chaos_seed, backend, nodes, ranks_per_node, calls, local_combine):
    """Stale state of any call would show in a later one."""
    if chaos_seed is not None:
        calls = 5
    if backend != "host":
        calls *= 4
    case = Case("random", hidden=16, topk=2, experts=2, local_combine=local_combine)
    run_ranks(_many_calls, nodes, ranks_per_node, calls, calls, case)


def _static_overflow(rank, nodes, ranks_per_node, local_combine):
    """Rows beyond the capacity are counted and dropped; the others are correct, and so is the next call."""
    case = Case("over", tokens=(8,), topk=2, experts=2, drop=0.0, routing="one_expert", local_combine=local_combine)
    world, room = nodes * ranks_per_node, 12
    with make_layer(case, rank, nodes, ranks_per_node, capacity=room) as layer:
        works, device = workloads(case, world, 0), current_heap().device
        mine = works[rank]
        unlimited = [
            dispatch_reference.dispatch(
                [w.x for w in works],
                [w.topk_idx for w in works],
                [w.topk_weights for w in works],
                r,
                case.experts * world,
            )
            for r in range(world)
        ]
        want, arriving = unlimited[rank], unlimited[rank].recv_x.shape[0]
        recv_x, recv_weights, desc = layer.dispatch(
            mine.x.to(device), mine.topk_idx.to(device), mine.topk_weights.to(device)
        )
        assert int(desc.overflow) == max(arriving - room, 0)
        assert desc.expert_offsets.tolist() == want.expert_offsets.clamp(max=room).tolist()
        assert recv_x.shape == (room, case.hidden) and recv_weights.shape == (room,)
        used = min(arriving, room)
        assert torch.equal(recv_x[:used].cpu(), want.recv_x[:used])
        assert torch.equal(recv_weights[:used].cpu(), want.recv_weights[:used])
        kept = want.dst_row[rank]
        kept = torch.where(kept < room, kept, -1)
        assert torch.equal(desc.token_dst_scatter_idx.cpu().long(), kept.long())
        out = layer.combine(torch.ones_like(recv_x), desc)
        # Every row that fits adds 1, a dropped one nothing.
        copies = (kept >= 0).sum(1, keepdim=True).expand(-1, case.hidden)
        assert torch.equal(out.cpu().float(), copies.float())
        quiet = replace(case, tokens=(1,), routing="uniform", static=True)
        small = dispatch_and_check(layer, quiet, 1)
        combine_and_check(layer, small)
    return int(desc.overflow)


@pytest.mark.plain  # test_layer.py has static layers in chaos mode
@pytest.mark.parametrize(
    "nodes, ranks_per_node, local_combine",
    [
        *((1, 2, False), (1, 2, True), (2, 1, False), (2, 2, True)),
        *(pytest.param(*given, marks=pytest.mark.on_gpus) for given in ((1, 4, False), (1, 4, True), (2, 2, False))),
    ],
)
def test_static_overflow_is_flagged_and_harmless(run_ranks, nodes, ranks_per_node, local_combine):
    """Overflow never corrupts a row that fits."""
    assert max(run_ranks(_static_overflow, nodes, ranks_per_node, local_combine)) > 0


def _same_bits(rank, nodes, ranks_per_node):
    outputs = []
    with make_layer(SMALL, rank, nodes, ranks_per_node) as layer:
        for _ in range(3):
            done = dispatch_and_check(layer, SMALL, 0)
            outputs.append(combine_and_check(layer, done).cpu())
    assert all(torch.equal(out, outputs[0]) for out in outputs)


@pytest.mark.parametrize("nodes, ranks_per_node", [pytest.param(1, 4, marks=pytest.mark.on_gpus), (2, 2)])
def test_same_input_gives_same_bits(run_ranks, nodes, ranks_per_node):
    """The order of arrival affects neither rows nor sums."""
    run_ranks(_same_bits, nodes, ranks_per_node)


def _barriers(rank, nodes, ranks_per_node):
    with make_layer(SMALL, rank, nodes, ranks_per_node) as layer:
        for step in range(5):
            layer.ep_barrier_all(None, intra_node_only=step % 2 == 1)
            layer.check()


@pytest.mark.parametrize("nodes, ranks_per_node", TOPOLOGIES)
def test_barriers_of_both_scopes(run_ranks, nodes, ranks_per_node):
    """Barriers over all ranks and over one node have separate counts."""
    run_ranks(_barriers, nodes, ranks_per_node)
