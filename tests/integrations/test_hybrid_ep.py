"""HybridEPBuffer against an all-gather in plain torch, bit for bit."""

import inspect
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from tests.combinations import combinations
from tests.integrations import hybrid_reference as reference
from triton_ep.context.context import DispatchCombineContext
from triton_ep.context.given import RoutingMap
from triton_ep.distributed import current_heap
from triton_ep.errors import ConfigError, FinalizedError, InputError, PeerFailed, StaleHandleError
from triton_ep.exchange.slots import slots_of_map
from triton_ep.integrations.hybrid_ep import HybridEPBuffer, indices_to_map
from triton_ep.integrations.hybrid_ep.maps import weights_of_slots
from triton_ep.layer import EPAll2AllLayer
from triton_ep.ops import routing as routing_ops
from triton_ep.testing import apply_expert

HIDDEN, EXPERTS, TOPK = 64, 2, 3  # experts per rank
TOKENS = (7, 0, 12, 5)


def make_inputs(world_size: int, seed: int = 0, **changes) -> list[reference.Inputs]:
    """Inputs of all ranks: unequal numbers of tokens, rank 1 has none; expert 1 gets no token."""
    sizes = {"hidden": HIDDEN, "topk": TOPK, "experts": EXPERTS * world_size, "idle": (1,), **changes}
    tokens = sizes.pop("tokens", TOKENS)
    return [
        reference.inputs_of(rank, world_size, tokens[(rank + seed) % len(tokens)], seed=seed, **sizes)
        for rank in range(world_size)
    ]


def make_buffer(nodes: int, ranks_per_node: int, **options) -> HybridEPBuffer:
    sizes = {"hidden_dim": HIDDEN, "max_num_of_tokens_per_rank": max(TOKENS), "num_local_experts": EXPERTS, **options}
    return HybridEPBuffer(dist.group.WORLD, num_of_hybrid_ep_ranks_per_nvlink_domain=ranks_per_node, **sizes)


def outputs_of(inputs: list[reference.Inputs], pad: int) -> list[torch.Tensor]:
    """Expert outputs of the rows of every rank; every expert has distinct outputs."""
    outs = []
    for owner in range(len(inputs)):
        rows, _, counts = reference.dispatch(inputs, owner, EXPERTS, pad)
        experts = torch.arange(owner * EXPERTS, (owner + 1) * EXPERTS).repeat_interleave(counts)
        outs.append(apply_expert(rows, experts))
    return outs


def same(seen: torch.Tensor, want: torch.Tensor) -> None:
    assert seen.dtype == want.dtype
    torch.testing.assert_close(seen.cpu(), want, rtol=0, atol=0)


@dataclass(frozen=True)
class Way:
    """Arguments of a dispatch."""

    name: str
    pad: int | None = None
    budget: int | None = None
    probs: bool = True
    ids: bool = False  # topk_idx instead of the routing map
    options: tuple[tuple[str, object], ...] = ()


WAYS = (
    Way("blocking"),
    Way("blocking_fused_16", pad=16, options=(("fuse_permute_dispatch", True),)),
    Way("budget_32", pad=32, budget=160),
    Way("budget_fused_128_no_probs", pad=128, budget=384, probs=False, options=(("fuse_permute_dispatch", True),)),
    Way("ids_256", pad=256, ids=True),
    Way("known_topk_rounded_once", options=(("topk", TOPK), ("enable_local_combine", False))),
)


def _check_way(rank: int, nodes: int, ranks_per_node: int, way: Way) -> None:
    world_size, device, options = nodes * ranks_per_node, current_heap().device, dict(way.options)
    of_buffer = {name: options.pop(name) for name in ("topk", "enable_local_combine") if name in options}
    buffer = make_buffer(nodes, ranks_per_node, **of_buffer)
    pad, handles = way.pad or 1, []
    for seed in range(2):
        inputs = make_inputs(world_size, seed)
        mine = inputs[rank].to(device)
        routing = {"routing_map": mine.routing_map, "probs": mine.probs if way.probs else None}
        if way.ids:
            weights, ids = mine.probs.topk(TOPK)
            ids = torch.where(mine.routing_map.gather(1, ids), ids, -1)
            routing = {"topk_idx": ids, "topk_weights": weights, "num_of_experts": EXPERTS * world_size}
        hidden, probs, scale, counts, handle = buffer.dispatch_with_permute(
            hidden=mine.hidden,
            pad_multiple=way.pad,
            num_permuted_tokens=way.budget,
            non_blocking=way.budget is not None,
            **routing,
            **options,
        )
        rows, row_probs, row_counts = reference.dispatch(inputs, rank, EXPERTS, pad)
        used = rows.shape[0]
        assert scale is None and hidden.shape[0] == (way.budget or used)
        same(hidden[:used], rows)
        same(counts, row_counts)
        assert counts.device.type == ("cpu" if way.budget is None else device.type)
        assert handle[-1].dtype == torch.int32 and not (handle[-1] != 0).any()
        if way.probs:
            same(probs[:used], row_probs)
            assert not probs[used:].any()
        handles.append((inputs, mine, hidden, probs, handle))
        # Rows before permutation, and the local experts of each.
        own = slice(rank * EXPERTS, (rank + 1) * EXPERTS)
        routed = torch.cat([i.routing_map[i.routing_map[:, own].any(1), own] for i in inputs])
        _, _, _, arrived, experts, _, _, real, tokens, _, overflow = handle
        assert (len(handle), int(arrived), tokens) == (11, routed.shape[0], mine.hidden.shape[0])
        same(experts[: routed.shape[0]], routed)
        assert not experts[routed.shape[0] :].any()
        assert real.tolist() == routed.sum(0).tolist() and overflow.data_ptr() == handle[10].data_ptr()

    # Both handles are live: for each, rows again, experts, combine.
    for seed, (inputs, mine, hidden, probs, handle) in enumerate(handles):
        used = reference.dispatch(inputs, rank, EXPERTS, pad)[0].shape[0]
        again, again_probs, _, again_counts, again_handle = buffer.dispatch_with_permute(
            hidden=mine.hidden, probs=mine.probs if way.probs else None, handle=handle, pad_multiple=way.pad
        )
        assert (
            torch.equal(again[:used], hidden[:used])
            and again_handle is handle
            and again_counts is handle.routing.counts
        )
        outs = outputs_of(inputs, pad)
        out = torch.full_like(hidden, float("nan"))  # places past the rows must not count
        out[:used] = outs[rank].to(device)
        combined, combined_probs = buffer.combine_with_unpermute(
            hidden=out, probs=probs, handle=handle, pad_multiple=way.pad, fuse_unpermute_combine=bool(seed)
        )
        # Same order of summation as in the kernels: expert by expert, in float32.
        per_rank = of_buffer.get("enable_local_combine", True)
        same(combined, reference.combine(outs, inputs, rank, pad, per_rank, ranks_per_node))
        if way.probs:
            assert torch.equal(again_probs, probs)
            same(combined_probs, inputs[rank].probs)
            # Weights with ids in another order than in the dispatch, and of another number.
            weights, ids = mine.probs.sort(dim=1)
            *_, by_ids, _, _, _ = buffer.dispatch_with_permute(
                hidden=mine.hidden, topk_idx=ids, topk_weights=weights, handle=handle
            )
            assert torch.equal(by_ids, probs)
        else:
            assert probs is None and combined_probs is None
    buffer.close()


ON_GPUS = pytest.mark.on_gpus  # four ranks show no more than two do


@pytest.mark.parametrize(
    "nodes, ranks_per_node, way",
    [
        # On CPUs every value of every argument once: each combination interprets the same kernels.
        *(pytest.param(1, 2, way, marks=ON_GPUS) for way in WAYS[:3:2]),
        *((1, 2, way) for way in (WAYS[1], *WAYS[3:])),
        (2, 1, WAYS[2]),
        *(pytest.param(1, 4, way, marks=ON_GPUS) for way in WAYS),
        (2, 2, WAYS[1]),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
@pytest.mark.plain  # the kernels of the layer
def test_rows_are_those_of_an_all_gather(run_ranks, nodes, ranks_per_node, way):
    """Order, padding, probabilities, counts; combine, exact per (token, expert); with a handle; two live handles."""
    run_ranks(_check_way, nodes, ranks_per_node, way)


def _check_by_rank(rank: int, nodes: int, ranks_per_node: int) -> None:
    world_size, device = nodes * ranks_per_node, current_heap().device
    buffer = make_buffer(nodes, ranks_per_node)
    first = rank % ranks_per_node * EXPERTS
    for seed, ids in ((0, False), (1, True)):
        inputs = make_inputs(world_size, seed)
        mine = inputs[rank].to(device)
        routing = {"routing_map": mine.routing_map, "probs": mine.probs}
        if ids:
            weights, idx = mine.probs.topk(TOPK)
            idx = torch.where(mine.routing_map.gather(1, idx), idx, -1)
            routing = {"topk_idx": idx, "topk_weights": weights, "num_of_experts": EXPERTS * world_size}
        hidden, probs, scale, handle = buffer.dispatch(mine.hidden, **routing)
        own = slice(rank * EXPERTS, (rank + 1) * EXPERTS)
        wanted = [i.routing_map[:, own].any(1) for i in inputs]
        same(hidden, torch.cat([i.hidden[w] for i, w in zip(inputs, wanted, strict=True)]))
        _, _, _, arrived, experts, tokens, _ = handle
        same(experts, torch.cat([i.routing_map[w][:, own] for i, w in zip(inputs, wanted, strict=True)]))
        assert scale is None and int(arrived) == hidden.shape[0] and tokens == mine.hidden.shape[0]
        want = torch.zeros(hidden.shape[0], EXPERTS * ranks_per_node)
        want[:, first : first + EXPERTS] = torch.cat([i.probs[w][:, own] for i, w in zip(inputs, wanted, strict=True)])
        same(probs, want)
        again, no_probs, _, _ = buffer.dispatch(mine.hidden, handle=handle)
        both, both_probs, _, _ = buffer.dispatch(mine.hidden, probs=mine.probs, handle=handle)
        assert torch.equal(again, hidden) and no_probs is None
        assert torch.equal(both, hidden) and torch.equal(both_probs, probs)

        # Each row times the number of its local experts: every token comes back once per expert.
        combined, combined_probs = buffer.combine(hidden * handle[4].sum(1, keepdim=True), probs, handle)
        count = inputs[rank].routing_map.sum(1, keepdim=True)
        torch.testing.assert_close(combined.cpu(), inputs[rank].hidden * count, rtol=2**-7, atol=0)
        same(combined_probs, inputs[rank].probs)
        assert buffer.combine(hidden, handle=handle)[1] is None
        with pytest.raises(InputError, match="as dispatch returns them"):
            buffer.combine(hidden, probs[:, :1], handle)
        with pytest.raises(InputError, match="got Handle of 7 items"):
            buffer.combine_with_unpermute(hidden=hidden, handle=handle)
    buffer.close()


@pytest.mark.plain
@pytest.mark.parametrize(
    "nodes, ranks_per_node", [(1, 2), (2, 1), *(pytest.param(*ranks, marks=ON_GPUS) for ranks in ((1, 4), (2, 2)))]
)
def test_rows_by_rank_are_those_of_an_all_gather(run_ranks, nodes, ranks_per_node):
    """One row per (token, rank), by source rank and token, with its experts; combine; the same with a handle."""
    run_ranks(_check_by_rank, nodes, ranks_per_node)


def _check_overflow(rank: int, nodes: int, ranks_per_node: int) -> None:
    """One expert per token: a token comes back unchanged, or as zeros."""
    world_size, device = nodes * ranks_per_node, current_heap().device
    buffer = make_buffer(nodes, ranks_per_node)
    inputs = make_inputs(world_size, topk=1, tokens=(40,), idle=())
    mine = inputs[rank].to(device)
    rows, _, _ = reference.dispatch(inputs, rank, EXPERTS, 16)
    budget = 32
    hidden, probs, _, counts, handle = buffer.dispatch_with_permute(
        hidden=mine.hidden,
        routing_map=mine.routing_map,
        probs=mine.probs,
        pad_multiple=16,
        num_permuted_tokens=budget,
        non_blocking=True,
    )
    assert rows.shape[0] > budget and int(handle[-1]) == rows.shape[0] - budget
    same(hidden, rows[:budget])
    assert int(counts.sum()) == budget and not (counts % 16).any()
    combined, combined_probs = buffer.combine_with_unpermute(hidden=hidden, probs=probs, handle=handle)
    kept = (combined != 0).any(1)
    assert kept.any() and not kept.all()
    assert torch.equal(combined[kept], mine.hidden[kept]) and torch.equal(combined_probs[kept], mine.probs[kept])
    assert not combined[~kept].any() and not combined_probs[~kept].any()

    # More experts per token than promised: counted as well, not a silent loss.
    few = make_buffer(nodes, ranks_per_node, topk=1)
    two = mine.routing_map.clone()
    two[0] = torch.arange(two.shape[1], device=device) < 2
    call = {"hidden": mine.hidden, "routing_map": two, "num_permuted_tokens": 160}
    assert int(few.dispatch_with_permute(**call, non_blocking=True)[-1][-1]) == 1
    # If the host reads the counts, all ranks raise, also for a token of one rank.
    one_of_us = two if rank == 1 else mine.routing_map
    for way in (few.dispatch_with_permute, few.dispatch):
        with pytest.raises(InputError, match=r"routed to 2 experts, but this buffer takes 1 per token \(topk\)"):
            way(hidden=mine.hidden, routing_map=one_of_us)
    if rank == 1:  # with a budget only this rank raises
        with pytest.raises(InputError, match="routed to 2 experts"):
            few.dispatch_with_permute(**call)
    few.close()
    buffer.close()


@pytest.mark.plain
def test_what_does_not_fit_is_flagged(run_ranks):
    """Rows beyond the budget come back as zeros, others unchanged; counts stay within the budget."""
    run_ranks(_check_overflow, 1, 2)


def _check_left_out(rank: int, nodes: int, ranks_per_node: int, local_combine: bool) -> None:
    device = current_heap().device
    buffer = make_buffer(nodes, ranks_per_node, enable_local_combine=local_combine)
    inputs = make_inputs(2, idle=(2, 3), tokens=(7, 12))
    mine, outs = inputs[rank].to(device), outputs_of(inputs, 1)
    for _ in range(2):
        rows, probs, _, _, handle = buffer.dispatch_with_permute(
            hidden=mine.hidden, routing_map=mine.routing_map, probs=mine.probs
        )
        assert (rows.shape[0] > 0) == (rank == 0)
        y = outs[rank].to(device)
        for given in (None, probs if rank == 0 else None):
            combined, back = buffer.combine_with_unpermute(hidden=y, probs=given, handle=handle)
            same(combined, reference.combine(outs, inputs, rank, 1, local_combine))
            assert (back is None) == (given is None)
            if given is not None:
                same(back, inputs[rank].probs)
    buffer.close()


@pytest.mark.plain
@pytest.mark.parametrize(
    "local_combine, nodes, ranks_per_node",
    combinations([False, True], [(1, 2), (2, 1)], on_cpu=lambda local_combine, nodes, _: local_combine == (nodes == 2)),
)
def test_a_rank_without_rows_may_leave_probabilities_out(run_ranks, nodes, ranks_per_node, local_combine):
    """The others get theirs, and the next calls are right: that rank cannot know whether the others send any."""
    run_ranks(_check_left_out, nodes, ranks_per_node, local_combine)


def _check_growth_and_mistakes(rank: int, nodes: int, ranks_per_node: int) -> None:
    world_size, device = nodes * ranks_per_node, current_heap().device
    mine = make_inputs(world_size)[rank].to(device)
    call = {"hidden": mine.hidden, "routing_map": mine.routing_map, "probs": mine.probs}
    buffer = make_buffer(nodes, ranks_per_node, max_num_of_tokens_per_rank=4)
    *_, handle = buffer.dispatch_with_permute(**call)  # 7 tokens on rank 0, none on rank 1
    assert buffer.configurer.buffer_config.max_num_of_tokens_per_rank >= 7
    assert buffer.update_template_config(hidden_dim=1) == buffer.configurer.buffer_config
    more = make_inputs(world_size, tokens=(9, 30), topk=EXPERTS * world_size, idle=())
    more_mine = more[rank].to(device)
    hidden, *_ = buffer.dispatch_with_permute(hidden=more_mine.hidden, routing_map=more_mine.routing_map)
    same(hidden, reference.dispatch(more, rank, EXPERTS, 1)[0])
    again, *_ = buffer.dispatch_with_permute(hidden=mine.hidden, handle=handle)  # a handle from before the growth

    # One rank has more experts per token than ever before, one has more tokens; by rank as well as by expert.
    grown = make_buffer(nodes, ranks_per_node, max_num_of_tokens_per_rank=4)
    for tokens, topk in (((4, 2), 1), ((4, 3), 3), ((2, 20), 2), ((40, 2), 4), ((3, 4), 1)):
        inputs = make_inputs(world_size, tokens=tokens, topk=topk, idle=())
        inputs[0].routing_map[:, 1:] &= topk != 3  # only the second rank
        ours = inputs[rank].to(device)
        hidden, *_ = grown.dispatch_with_permute(hidden=ours.hidden, routing_map=ours.routing_map, pad_multiple=16)
        same(hidden, reference.dispatch(inputs, rank, EXPERTS, 16)[0])
        arrived, *_ = grown.dispatch(ours.hidden, routing_map=ours.routing_map)
        goes = [i.routing_map.view(-1, world_size, EXPERTS)[:, rank].any(1) for i in inputs]
        assert arrived.shape[0] == sum(int(tokens.sum()) for tokens in goes)
    assert grown._sizes.agreed_topk == 4 and grown.layers.max_tokens >= 40
    grown.close()
    # Ranks pass different numbers, and one rank has more tokens than its own number.
    uneven = make_buffer(nodes, ranks_per_node, max_num_of_tokens_per_rank=(40, 4)[rank], topk=2)
    inputs = make_inputs(world_size, tokens=(30, 9), topk=2, idle=())
    ours = inputs[rank].to(device)
    hidden, *_ = uneven.dispatch_with_permute(hidden=ours.hidden, routing_map=ours.routing_map)
    same(hidden, reference.dispatch(inputs, rank, EXPERTS, 1)[0])
    assert uneven.layers.max_tokens == 40 and not uneven.layers.pool.outgrown
    uneven.close()

    # A number of experts other than the buffer's: a separate layer.
    fewer = make_inputs(world_size, experts=world_size, topk=1, idle=())
    one = {"hidden": fewer[rank].hidden.to(device), "routing_map": fewer[rank].routing_map.to(device)}
    hidden, *_, of_one = buffer.dispatch_with_permute(**one, num_of_experts_per_rank=1)
    same(hidden, reference.dispatch(fewer, rank, 1, 1)[0])
    combined, _ = buffer.combine_with_unpermute(hidden=hidden, handle=tuple(of_one))
    same(combined, fewer[rank].hidden * fewer[rank].routing_map.any(1, keepdim=True))

    for change, text in (
        ({"hidden": mine.hidden[:, :32]}, r"hidden_dim=64.*reset_hybrid_ep_buffer"),
        ({"routing_map": mine.routing_map[:, :3]}, f"routing_map: 3, but this call has {EXPERTS * world_size} "),
        ({"routing_map": mine.routing_map.int()}, "torch.bool"),
        ({"probs": mine.probs.bfloat16()}, "probs must be"),
        ({"num_of_experts_per_rank": 5}, "has 10 experts on 2 ranks"),
        ({"num_of_experts": 5}, "num_of_experts: 5"),
        ({"routing_map": None}, "got none of them"),
        ({"topk_idx": torch.zeros(len(mine.hidden), 1, dtype=torch.int64, device=device)}, "routing_map and topk_idx"),
        ({"topk_weights": mine.probs[:, :1]}, "topk_weights belong to topk_idx"),
        ({"non_blocking": True}, "needs num_permuted_tokens"),
        ({"non_blocking": True, "num_permuted_tokens": 40, "pad_multiple": 16}, "pad_multiple=16, 48 for example"),
        ({"num_of_tokens_per_rank": -1}, "num_of_tokens_per_rank is -1"),
        ({"handle": (1, 2)}, "tuple of 2 items"),
        ({"handle": handle, "pad_multiple": 16}, "padded to 1"),
        ({"handle": handle, "num_permuted_tokens": 999}, "is 999"),
    ):
        with pytest.raises(InputError, match=text):
            buffer.dispatch_with_permute(**{**call, **change})
    # A mistake of one rank is reported to the others before they wait for rows.
    for wrong in (buffer.dispatch_with_permute, buffer.dispatch):
        probs = mine.probs.half() if rank == 1 else mine.probs
        with pytest.raises(InputError if rank == 1 else PeerFailed, match=r"probs must be|rank 1 rejected"):
            wrong(hidden=mine.hidden, routing_map=mine.routing_map, probs=probs)
        where = "meta" if rank == 1 else device
        with pytest.raises(InputError if rank == 1 else PeerFailed, match=r"must be on .*, got meta|rank 1 rejected"):
            wrong(hidden=mine.hidden.to(where), routing_map=mine.routing_map.to(where))
        rows = mine.hidden.double() if rank == 1 else mine.hidden
        with pytest.raises(InputError if rank == 1 else PeerFailed, match=r"hidden must be .*float64|rank 1 rejected"):
            wrong(hidden=rows, routing_map=mine.routing_map)
    fresh = make_buffer(nodes, ranks_per_node)  # whose first call agrees on sizes
    with pytest.raises(
        InputError if rank == 1 else PeerFailed, match=r"routing_map must be .* on meta|rank 1 rejected"
    ):
        fresh.dispatch_with_permute(hidden=mine.hidden, routing_map=mine.routing_map.to("meta" if rank else device))
    fresh.close()
    by_ids = {"topk_idx": torch.zeros(len(mine.hidden), 1, dtype=torch.int32, device=device), "num_of_experts": 4}
    buffer.dispatch_with_permute(hidden=mine.hidden, **by_ids)
    with pytest.raises(InputError if rank == 1 else PeerFailed, match=r"num_of_experts: 3|rank 1 rejected"):
        buffer.dispatch_with_permute(hidden=mine.hidden, **{**by_ids, "num_of_experts": 4 - rank})
    # Ids out of range, with probabilities: the layer refuses them on every rank, no lookup reads past the table.
    for wrong in (buffer.dispatch_with_permute, buffer.dispatch):
        unknown = torch.full((len(mine.hidden), 1), EXPERTS * world_size + 1, dtype=torch.int64, device=device)
        with pytest.raises(InputError, match=f"{EXPERTS * world_size + 1}"):
            wrong(hidden=mine.hidden, topk_idx=unknown, probs=mine.probs)
    other = make_buffer(nodes, ranks_per_node)
    with pytest.raises(StaleHandleError, match="another HybridEPBuffer"):
        other.combine_with_unpermute(hidden=again, handle=handle)
    other.close()
    *_, no_probs = buffer.dispatch_with_permute(hidden=mine.hidden, routing_map=mine.routing_map)
    with pytest.raises(InputError, match="the dispatch of this handle had none"):
        buffer.combine_with_unpermute(hidden=again, probs=again[:, 0].float(), handle=no_probs)
    with pytest.raises(InputError, match="NoneType"):
        buffer.combine_with_unpermute(hidden=again)
    alone = [dist.new_group([member]) for member in range(world_size)]
    with pytest.raises(ConfigError, match=rf"topk is 99, but {world_size} ranks have {EXPERTS * world_size} experts"):
        HybridEPBuffer(dist.group.WORLD, HIDDEN, 4, EXPERTS, topk=99)
    with pytest.raises(ConfigError, match="no process group of this process"):
        HybridEPBuffer(alone[(rank + 1) % world_size], HIDDEN, 4, EXPERTS)
    buffer.close()
    buffer.close()
    with pytest.raises(FinalizedError, match="closed"):
        buffer.combine_with_unpermute(hidden=again, handle=handle)
    with pytest.raises(FinalizedError, match="closed"):
        buffer.dispatch_with_permute(**call)


@pytest.mark.plain
def test_buffer_grows_and_mistakes_are_told(run_ranks):
    """More tokens and more experts per token than before; errors name every wrong argument and a freed buffer."""
    run_ranks(_check_growth_and_mistakes, 1, 2)


def _check_growth_by_ids(rank: int, nodes: int, ranks_per_node: int) -> None:
    """One rank has more tokens than the others and than before; nobody passes num_of_tokens_per_rank."""
    world_size, device = nodes * ranks_per_node, current_heap().device
    buffer = make_buffer(nodes, ranks_per_node, max_num_of_tokens_per_rank=4)
    for tokens in ((3, 2), (9, 1), (0, 40)):
        inputs = make_inputs(world_size, tokens=tokens, topk=TOPK, idle=())
        ours = inputs[rank].to(device)
        weights, ids = ours.probs.topk(TOPK)
        routing = {"topk_idx": torch.where(ours.routing_map.gather(1, ids), ids, -1), "topk_weights": weights}
        hidden, probs, *_ = buffer.dispatch_with_permute(hidden=ours.hidden, **routing)
        rows, row_probs, _ = reference.dispatch(inputs, rank, EXPERTS, 1)
        same(hidden, rows)
        same(probs, row_probs)
        arrived, *_ = buffer.dispatch(ours.hidden, **routing)
        goes = [i.routing_map.view(-1, world_size, EXPERTS)[:, rank].any(1) for i in inputs]
        same(arrived, torch.cat([i.hidden[there] for i, there in zip(inputs, goes, strict=True)]))
    buffer.close()


@pytest.mark.plain
def test_one_rank_with_more_tokens_makes_a_buffer_grow_by_ids(run_ranks):
    """Blocking calls by ids grow on all ranks together, as calls by maps do."""
    run_ranks(_check_growth_by_ids, 1, 2)


def _counted(ctx: DispatchCombineContext, given: RoutingMap) -> routing_ops.Routing:
    """Tables of a dispatch by map, before its exchange of counts."""
    routing = routing_ops.prepare(ctx, given)
    routing_ops.exchange_splits(ctx, routing, 0)
    return routing


def _check_counts_by_map(rank: int, nodes: int, ranks_per_node: int) -> None:
    world_size, device = nodes * ranks_per_node, current_heap().device
    generator = torch.Generator().manual_seed(rank)
    # Words of 8 experts: parts of one, whole ones, more than are read at a time, with and without a part at the end.
    sizes_of_maps = ((0, 8, 2), (5, 4, 3), (300, 8, 2), (37, 256, 8), (9, 602, 32), (17, 1040, 8))
    for tokens, experts, topk in sizes_of_maps:
        sizes = (max(tokens, 1), HIDDEN, topk, rank, experts, ranks_per_node, world_size)
        with EPAll2AllLayer(dist.group.WORLD, *sizes) as layer:
            for share in (0.0, 0.02, 0.3, 1.0) if tokens else (1.0,):
                routing_map = torch.rand(tokens, experts, generator=generator) < share
                probs = torch.rand(tokens, experts, generator=generator)
                ids, excess = reference.slots_of_map(routing_map, topk)
                # Some start at an odd address, and some bytes of a view are neither 0 nor 1.
                several = torch.where(routing_map, torch.randint(1, 256, routing_map.shape, generator=generator), 0)
                odd = several.to(torch.uint8).flatten().to(device).view(torch.bool)
                routed = torch.cat([odd.new_zeros(tokens % 8), odd])[tokens % 8 :].view(tokens, experts)
                given = probs.to(device)
                found = torch.zeros(1, dtype=torch.int32, device=device)
                counted = _counted(layer.context, RoutingMap(routed, given, found))
                assert counted.weights is not None
                same(counted.entries[0], ids)
                same(counted.weights[: tokens * topk].view(tokens, topk), weights_of_slots(probs, ids))
                same(found, excess)
                alone_ids, alone_weights = slots_of_map(layer.context, RoutingMap(routed, given, found))
                assert alone_weights is not None
                same(alone_ids, ids)
                same(alone_weights, weights_of_slots(probs, ids))
                same(found, 2 * excess)
                if share in (0.0, 0.02):
                    continue  # hardly any token has an expert too many
                # Without a counter, an expert too many marks the last slot, which is then reported and not kept.
                counted = _counted(layer.context, RoutingMap(routed, None, None))
                ids[routing_map.sum(1) > topk, -1] = -1
                same(counted.entries[0], ids)
                assert counted.weights is None


@pytest.mark.plain
def test_counts_by_maps(run_ranks):
    """Ids and weights in the counts of a dispatch by map, or by themselves, and experts without a slot, against plain
    torch."""
    run_ranks(_check_counts_by_map, 1, 1)


def test_ids_and_maps() -> None:
    """Ids out of range are dropped; the signature has a name that Megatron looks for."""
    routed, probs = indices_to_map(torch.tensor([[2, -1], [0, 9]]), torch.tensor([[0.5, 0.25], [0.75, 0.125]]), 2, 3)
    assert routed.tolist() == [[False, False, True], [True, False, False]]
    assert probs.tolist() == [[0, 0, 0.5], [0.75, 0, 0]]
    assert "fuse_permute_dispatch" in inspect.signature(HybridEPBuffer.dispatch_with_permute).parameters


def _check_replay(rank: int, nodes: int, ranks_per_node: int) -> None:
    world_size, device = nodes * ranks_per_node, current_heap().device
    budget = 64 * world_size
    buffer = make_buffer(nodes, ranks_per_node, topk=TOPK)
    # A graph has a fixed number of tokens; routing, rows and probabilities change between replays.
    batches = [make_inputs(world_size, seed, tokens=(9,)) for seed in range(4)]
    mine = batches[0][rank].to(device)

    def step() -> tuple:
        hidden, probs, _, counts, handle = buffer.dispatch_with_permute(
            hidden=mine.hidden,
            routing_map=mine.routing_map,
            probs=mine.probs,
            pad_multiple=16,
            num_permuted_tokens=budget,
            non_blocking=True,
        )
        again, *_ = buffer.dispatch_with_permute(hidden=mine.hidden, handle=handle)
        combined, combined_probs = buffer.combine_with_unpermute(hidden=hidden, probs=probs, handle=handle)
        return hidden, probs, counts, again, combined, combined_probs, handle[-1]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        hidden, probs, counts, again, combined, combined_probs, overflow = step()
    for batch in [*batches[1:], batches[0]]:
        for seen, new in zip(
            (mine.hidden, mine.routing_map, mine.probs),
            (batch[rank].hidden, batch[rank].routing_map, batch[rank].probs),
            strict=True,
        ):
            seen.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        rows, row_probs, row_counts = reference.dispatch(batch, rank, EXPERTS, 16)
        used = rows.shape[0]
        same(counts, row_counts)
        same(hidden[:used], rows)
        same(again[:used], rows)
        same(probs[:used], row_probs)
        owned = [reference.dispatch(batch, owner, EXPERTS, 16)[0] for owner in range(world_size)]
        same(combined, reference.combine(owned, batch, rank, 16))
        same(combined_probs, batch[rank].probs)
        assert int(overflow) == 0
    other = torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local")
    with pytest.raises(InputError, match="Run the same calls once before"), other:
        buffer.dispatch_with_permute(
            hidden=mine.hidden, routing_map=mine.routing_map, num_permuted_tokens=budget - 16, non_blocking=True
        )
    del graph
    buffer.close()


@pytest.mark.on_gpus  # CUDA graphs
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), (1, 4), (2, 2)])
def test_graph_replays_with_other_routing(run_ranks, nodes, ranks_per_node):
    """Non-blocking dispatch, dispatch with its handle and combine in one CUDA graph: always the all-gather's bits."""
    run_ranks(_check_replay, nodes, ranks_per_node)
