"""Compact rows, one per (token, rank), against the plain-torch reference: rows, sums, ids, weights, rows sent again."""

import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from tests.combinations import combinations
from tests.layer.cases import layer_limit_s
from triton_ep import CapacityError, ConfigError, EPAll2AllLayer, InputError, PeerFailed, StaleHandleError
from triton_ep.context.layout import Sizes
from triton_ep.distributed import current_heap
from triton_ep.ops import slabs as slab_ops
from triton_ep.ops import token_layout as token_layout_ops
from triton_ep.reference import compact as reference
from triton_ep.runtime.launch import INTERPRETING
from triton_ep.testing import Workload, make_workload

DEVICE = "cpu" if INTERPRETING else "cuda"
CASES = {
    "plain": {"tokens": (7, 12), "hidden": 64, "topk": 2, "experts": 2},
    "many_experts_int64": {"tokens": (7, 3, 5, 18), "hidden": 40, "topk": 4, "experts": 34, "idx_dtype": torch.int64},
    "empty_rank_fp32": {"tokens": (6, 0, 9, 0), "hidden": 24, "topk": 3, "experts": 4, "dtype": torch.float32},
    "duplicates_odd": {"tokens": (5, 8), "hidden": 37, "topk": 3, "experts": 4, "routing": "duplicates"},
    "one_expert": {"tokens": (3, 5), "hidden": 16, "topk": 1, "experts": 2},
    "all_dropped": {"tokens": (4, 6), "hidden": 16, "topk": 2, "experts": 2, "routing": "all_dropped"},
}


def _works(world_size: int, case: dict, seed: int) -> list[Workload]:
    tokens = case["tokens"]
    return [
        make_workload(
            rank,
            world_size,
            tokens[rank % len(tokens)],
            hidden=case["hidden"],
            topk=case["topk"],
            num_experts=case["experts"] * world_size,
            dtype=case.get("dtype", torch.bfloat16),
            routing=case.get("routing", "uniform"),
            seed=seed,
        ).with_ids(case.get("idx_dtype", torch.int32))
        for rank in range(world_size)
    ]


def _layer(rank: int, nodes: int, ranks_per_node: int, case: dict, **options) -> EPAll2AllLayer:
    world_size = nodes * ranks_per_node
    return EPAll2AllLayer(
        dist.group.WORLD,
        options.pop("max_tokens", max(case["tokens"])),
        case["hidden"],
        case["topk"],
        rank,
        case["experts"] * world_size,
        ranks_per_node,
        world_size,
        case.get("dtype", torch.bfloat16),
        timeout_s=layer_limit_s(),
        **options,
    )


def _outputs(rank: int, result: reference.CompactResult) -> torch.Tensor:
    """Expert outputs of a rank's rows, different on each rank."""
    return (result.recv_x.float() * (1.0 + 0.25 * rank)).to(result.recv_x.dtype)


def _equal(got: torch.Tensor | None, expected: torch.Tensor) -> None:
    assert got is not None
    torch.testing.assert_close(got.cpu(), expected.cpu().to(got.dtype), rtol=0, atol=0)


def _check(rank: int, nodes: int, ranks_per_node: int, name: str, live: int = 3) -> None:
    case, world_size = CASES[name], nodes * ranks_per_node
    device, num_experts = current_heap().device, CASES[name]["experts"] * world_size
    sent, works, results = [], [], []
    with _layer(rank, nodes, ranks_per_node, case) as layer:
        for seed in range(live):  # descriptors that are live at the same time
            works.append(_works(world_size, case, seed))
            everything = zip(*((w.x, w.topk_idx, w.topk_weights) for w in works[-1]), strict=True)
            xs, idxs, weights = map(list, everything)
            results.append([reference.dispatch(xs, idxs, weights, r, num_experts) for r in range(world_size)])
            mine, expected = works[-1][rank], results[-1][rank]
            got = layer.dispatch_compact(
                mine.x.to(device), mine.topk_idx.to(device), mine.topk_weights.to(device) if seed != 1 else None
            )
            _equal(got.x, expected.recv_x)
            _equal(got.topk_idx, expected.recv_topk_idx)
            assert got.topk_idx.dtype == mine.topk_idx.dtype
            assert got.num_recv_tokens_per_expert == expected.num_recv_tokens_per_expert.tolist()
            if seed != 1:
                _equal(got.topk_weights, expected.recv_topk_weights)
            else:
                assert got.topk_weights is None
            sent.append(got)
        for seed in (1, 2, 0)[-live:]:
            mine, desc = works[seed][rank], sent[seed].layout_desc
            ys = [_outputs(r, result) for r, result in enumerate(results[seed])]
            first_k = reference.first_choice(mine.topk_idx, num_experts, world_size)
            out = layer.combine(ys[rank].to(device), desc)
            expected = reference.combine(ys, results[seed], rank, first_k, mine.x.dtype)
            if nodes == 1:
                _equal(out, expected)
            else:  # with several nodes the same float32 additions run in another order
                step = torch.finfo(mine.x.dtype).eps
                torch.testing.assert_close(out.cpu(), expected, rtol=step, atol=64 * torch.finfo(torch.float32).eps)
            values = [result.recv_topk_weights for result in results[seed]]
            back, _ = layer.combine_topk(values[rank].to(device), desc)
            kept = (mine.topk_idx >= 0) & (mine.topk_idx < num_experts)
            _equal(back, torch.where(kept, mine.topk_weights, 0.0))
            again, _ = layer.dispatch_compact_again((mine.x * 2).to(device), desc)
            _equal(again, results[seed][rank].recv_x * 2)
        mine, expected = works[0][rank], results[0][rank]
        arrived = expected.recv_x.shape[0]
        total = world_size * max(case["tokens"])
        got = layer.dispatch_compact(
            mine.x.to(device), mine.topk_idx.to(device), mine.topk_weights.to(device), num_rows=total
        )
        assert got.x.shape[0] == total and got.num_recv_tokens_per_expert is None
        _equal(got.x[:arrived], expected.recv_x)
        _equal(got.topk_idx[:arrived], expected.recv_topk_idx)
        assert (got.topk_idx[arrived:] == -1).all() and (got.topk_weights[arrived:] == 0).all()
        layer.check()


@pytest.mark.parametrize(
    "nodes, ranks_per_node, name",
    [(1, 2, "duplicates_odd"), pytest.param(2, 2, "duplicates_odd", marks=pytest.mark.plain)],
)
def test_compact_rows_equal_the_reference(run_ranks, nodes, ranks_per_node, name):
    """Rows, ids, weights, counts, sums and rows sent again; on one node with three live descriptors, bit for bit."""
    run_ranks(_check, nodes, ranks_per_node, name, live=3 if nodes == 1 else 1)


@pytest.mark.plain
@pytest.mark.parametrize(
    "nodes, ranks_per_node, name",
    [(1, 2, "many_experts_int64"), (1, 2, "all_dropped"), (1, 4, "empty_rank_fp32")],
)
def test_other_topologies(run_ranks, nodes, ranks_per_node, name):
    """The same check with other numbers of ranks, ranks without tokens, and no rows at all."""
    run_ranks(_check, nodes, ranks_per_node, name, live=1)


def _check_errors(rank: int, nodes: int, ranks_per_node: int) -> None:
    case, world_size = CASES["plain"], nodes * ranks_per_node
    work = _works(world_size, case, 0)[rank]
    device = current_heap().device
    x, idx = work.x.to(device), work.topk_idx.to(device)
    with _layer(rank, nodes, ranks_per_node, case) as layer, _layer(rank, nodes, ranks_per_node, case) as other:
        many = torch.zeros(13 + rank, 64, dtype=x.dtype, device=device)
        ids = torch.zeros(13 + rank, 2, dtype=idx.dtype, device=device)
        with pytest.raises(CapacityError, match="max_tokens=12") as caught:
            layer.dispatch_compact(many if rank == 1 else x, ids if rank == 1 else idx)
        assert caught.value.needed_tokens == caught.value.needed == 14
        got = layer.dispatch_compact(x, idx)
        with pytest.raises(StaleHandleError):
            other.dispatch_compact_again(x, got.layout_desc)
        with pytest.raises(InputError, match="must have shape"):
            layer.dispatch_compact_again(torch.zeros(x.shape[0], 32, dtype=x.dtype, device=device), got.layout_desc)
        with pytest.raises(InputError, match=f"had {x.shape[0]} tokens"):
            layer.dispatch_compact_again(x[:3], got.layout_desc)
        _, _, desc = layer.dispatch(x, idx)
        with pytest.raises(InputError, match="expert-major"):
            layer.dispatch_compact_again(x, desc)
        with pytest.raises(InputError, match="values must have shape"):
            layer.combine_topk(torch.zeros(1, 2, device=device), got.layout_desc)
        again, _ = layer.dispatch_compact_again(x, got.layout_desc)
        _equal(again, got.x.cpu())
    with _layer(rank, nodes, ranks_per_node, case, capacity=64) as static, pytest.raises(ConfigError, match="num_rows"):
        static.dispatch_compact(x, idx)


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_mistakes_are_named(run_ranks, nodes, ranks_per_node):
    """Too many tokens on one rank, descriptors of other layers and other dispatches, rows of a wrong shape."""
    run_ranks(_check_errors, nodes, ranks_per_node)


def _check_first_refusals(rank: int, nodes: int, ranks_per_node: int) -> None:
    case, world_size = CASES["one_expert"], nodes * ranks_per_node
    work, room = _works(world_size, case, 0)[rank], world_size * max(case["tokens"])
    device = current_heap().device
    x, idx = work.x.to(device), work.topk_idx.to(device)
    mistakes = [  # on rank 1
        ({"exp_indices": idx.float()}, "exp_indices must be"),
        ({"num_rows": -1}, "num_rows is -1"),
        ({"num_rows": True}, "num_rows is True"),
        ({"num_rows": 2**31}, "num_rows is 2147483648"),
        ({"previous_event": "an event"}, "previous_event is for"),
    ]
    for wrong, message in mistakes:
        given = {"input": x, "exp_indices": idx, "num_rows": room}
        with _layer(rank, nodes, ranks_per_node, case) as layer:
            few = Sizes(layer.config, room - 1, room - 1)  # as if the layer had been created for fewer rows
            layer.context.sizes = layer.context.memory.sizes = few
            if rank == 1:
                with pytest.raises(InputError, match=message):
                    layer.dispatch_compact(**given | wrong)
            else:
                layer.dispatch_compact(**given)
                with pytest.raises(PeerFailed, match="rank 1 rejected its arguments"):
                    layer.check()
            assert layer.context.sizes.arrival_rows == room
            got = layer.dispatch_compact(**given | {"num_rows": torch.tensor(room)})
            layer.check()
            with pytest.raises(InputError if rank == 1 else PeerFailed):
                layer.dispatch_compact(x, idx.float() if rank == 1 else idx)
            with pytest.raises(InputError) if rank == 1 else nullcontext():
                layer.dispatch_compact_again(x[:1] if rank == 1 else x, got.layout_desc)


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), pytest.param(1, 4, marks=pytest.mark.on_gpus)])
def test_the_first_call_with_num_rows_is_refused_on_one_rank(run_ranks, nodes, ranks_per_node):
    """The buffers grow on all ranks, `check` reports the refusal on the other ranks, and the next calls work."""
    run_ranks(_check_first_refusals, nodes, ranks_per_node)


def _check_left_out(rank: int, nodes: int, ranks_per_node: int, num_rows: int) -> None:
    case, world_size = CASES["plain"], nodes * ranks_per_node
    device, num_experts = current_heap().device, case["experts"] * world_size
    works = _works(world_size, case, 0)
    everything = zip(*((w.x, w.topk_idx, w.topk_weights) for w in works), strict=True)
    xs, idxs, weights = map(list, everything)
    results = [reference.dispatch(xs, idxs, weights, r, num_experts) for r in range(world_size)]
    assert all(result.recv_x.shape[0] > num_rows for result in results)
    counts = torch.zeros(xs[rank].shape[0], 1)  # each row that fits adds one to its token
    values = torch.zeros_like(weights[rank])
    for result in results:
        fits = result.src[:num_rows]
        token = fits[fits[:, 0] == rank, 1]
        counts[token] += 1
        values[token] += result.recv_topk_weights[:num_rows][fits[:, 0] == rank]
    with _layer(rank, nodes, ranks_per_node, case) as layer:
        for _ in range(2):  # with memory that the layer has kept
            got = layer.dispatch_compact(
                xs[rank].to(device), idxs[rank].to(device), weights[rank].to(device), num_rows=num_rows
            )
            _equal(got.x, results[rank].recv_x[:num_rows])
            _equal(got.topk_idx, results[rank].recv_topk_idx[:num_rows])
            _equal(layer.combine(torch.ones_like(got.x), got.layout_desc), counts.expand(-1, case["hidden"]))
            back, _ = layer.combine_topk(got.topk_weights, got.layout_desc)
            _equal(back, values)
        layer.check()


@pytest.mark.plain  # a test above already covers dispatch and combine
@pytest.mark.parametrize(
    "num_rows, nodes, ranks_per_node",
    [(0, 1, 2), (3, 1, 2), (3, 2, 2), pytest.param(0, 2, 2, marks=pytest.mark.on_gpus)],
)
def test_rows_left_out_add_nothing(run_ranks, num_rows, nodes, ranks_per_node):
    """With fewer rows than arrive, sums and weights lack the rows that were left out, and nothing else is read."""
    run_ranks(_check_left_out, nodes, ranks_per_node, num_rows)


def _check_more_rows(rank, nodes, ranks_per_node):
    world = nodes * ranks_per_node
    case = {"tokens": (3,), "hidden": 16, "topk": 2, "experts": 2, "dtype": torch.float32}
    device, most = current_heap().device, world * 3
    ids = torch.arange(6, dtype=torch.int32, device=device).view(3, 2) % (2 * world)
    x = torch.ones(3, 16, device=device)
    with _layer(rank, nodes, ranks_per_node, case) as layer:
        got = layer.dispatch_compact(x, ids, num_rows=4 * most)
        with pytest.raises(InputError, match=rf"num_rows={most}, or give combine a tensor of your own"):
            layer.combine_buffer(got.layout_desc.num_recv_rows)
        want = layer.combine(torch.ones_like(got.x), got.layout_desc)
        got = layer.dispatch_compact(x, ids, num_rows=most)
        rows = layer.combine_buffer(got.layout_desc.num_recv_rows)
        rows.fill_(1)
        _equal(layer.combine(rows, got.layout_desc), want)
        layer.check()


@pytest.mark.plain
def test_the_remedy_for_more_rows_than_can_arrive_works(run_ranks):
    """`combine_buffer` refuses such a number of rows; both remedies that it names give the same sums."""
    run_ranks(_check_more_rows, 1, 2)


def _check_late_rows(rank, nodes, ranks_per_node, tokens):
    world, topk = nodes * ranks_per_node, 2
    case = {"tokens": (tokens,), "hidden": 16, "topk": topk, "experts": 2, "dtype": torch.float32}
    device = current_heap().device
    ids = (torch.arange(tokens * topk, dtype=torch.int32, device=device).view(tokens, topk) + rank) % (2 * world)
    x = torch.arange(tokens * 16, device=device).view(tokens, 16).float() + 100 * rank
    with _layer(rank, nodes, ranks_per_node, case) as layer:
        got = layer.dispatch_compact(x, ids)
        y = got.x * (1 + rank)  # tells the rank that sums
        want = layer.combine(y, got.layout_desc)
        rows = layer.combine_buffer(got.layout_desc.num_recv_rows)
        rows.copy_(y)
        if rank == world - 1:
            if device.type == "cuda":
                torch.cuda.synchronize()
            time.sleep(0.3)
        _equal(layer.combine(rows, got.layout_desc), want)
        layer.check()


@pytest.mark.parametrize(
    "nodes, ranks_per_node, tokens",
    combinations(
        [(1, 2), (2, 1), (2, 2)],
        [3, 1500],
        on_cpu=lambda nodes, per_node, tokens: nodes * per_node == 2 and tokens == 3,
    ),
)
def test_rows_in_the_combine_buffer_are_read_before_sums_come(run_ranks, nodes, ranks_per_node, tokens):
    """Compact rows of a late rank, in memory where the other ranks store their sums. Many of them are reduced on a
    stream of their own, on a GPU."""
    run_ranks(_check_late_rows, nodes, ranks_per_node, tokens)


def _check_short_rows(rank, nodes, ranks_per_node, hidden):
    sizes = {"num_tot_experts": 8, "dtype": torch.float16, "enable_local_combine": True}
    x, ids = torch.ones(3, hidden).half(), torch.arange(6, dtype=torch.int32).view(3, 2)
    device = current_heap().device
    with EPAll2AllLayer(None, 3, hidden, 2, local_world_size=ranks_per_node, **sizes) as layer:
        got = layer.dispatch_compact(x.to(device), ids.to(device), torch.rand(3, 2, device=device))
        if hidden == 9:
            return layer.combine_topk(got.topk_weights, got.layout_desc)[0].shape == (3, 2)
        with pytest.raises(ConfigError, match=rf"rows of {hidden} torch.float16 are too short .* hidden=9 or more"):
            layer.combine_topk(got.topk_weights, got.layout_desc)
    return True


@pytest.mark.plain
@pytest.mark.parametrize("hidden", [2, 8, 9])
def test_rows_too_short_for_a_float32_name_a_size_that_is_not(run_ranks, hidden):
    """With partial sums in the dtype of rows, between nodes; the size that the error names works."""
    assert all(run_ranks(_check_short_rows, 2, 1, hidden))


def test_token_layout_counts_each_rank_once():
    """Counts per rank, node and expert, and the ranks of each token, against a loop over entries."""
    work = make_workload(0, 8, 70, hidden=8, topk=5, num_experts=24, routing="duplicates", drop=0.3)
    memory = token_layout_ops.LayoutMemory()
    ranks, nodes, entries, in_rank = token_layout_ops.token_layout(work.topk_idx.to(DEVICE), 24, 8, 4, memory)
    goes = torch.zeros(70, 8, dtype=torch.bool)
    experts = torch.zeros(24, dtype=torch.int32)
    for token, row in enumerate(work.topk_idx.tolist()):
        for expert in row:
            if 0 <= expert < 24:
                goes[token, expert // 3] = True
                experts[expert] += 1
    assert torch.equal(in_rank.cpu(), goes)
    assert torch.equal(ranks.cpu(), goes.sum(0).int())
    assert torch.equal(nodes.cpu(), goes.view(70, 2, 4).any(2).sum(0).int())
    assert torch.equal(entries.cpu(), experts)


def test_memory_of_layouts_is_handed_out_once():
    """Every piece has counts that start from zero and overlaps no other piece, even after many, with more tokens."""
    memory, device = token_layout_ops.LayoutMemory(), torch.device(DEVICE)
    taken = [memory.take((2, 0, 7), 3 + number // 100, device) for number in range(150)]
    for number, (_, ranks, nodes, experts, in_rank) in enumerate(taken, 1):
        assert nodes.shape == (0,) and in_rank.shape == (3 + (number - 1) // 100, 2)
        ranks.add_(number)
        experts.sub_(number)
        in_rank.view(torch.uint8).fill_(number)
    for number, (counts, ranks, _, experts, in_rank) in enumerate(taken, 1):
        assert counts.tolist() == [number] * 2 + [-number] * 7 == [*ranks.tolist(), *experts.tolist()]
        assert bool((in_rank.view(torch.uint8) == number).all()) and in_rank.is_contiguous()
        assert counts.data_ptr() % 16 == in_rank.data_ptr() % 16 == 0
        assert ranks.is_contiguous() and experts.is_contiguous()


def test_slabs_and_back():
    """Rows of each expert are copied to the start of its slab, and back to their places."""
    counts = torch.tensor([3, 0, 5, 1], dtype=torch.int32, device=DEVICE)
    offsets = torch.tensor([0, 4, 4, 12, 16], dtype=torch.int32, device=DEVICE)  # with gaps
    rows = torch.arange(16 * 6, dtype=torch.bfloat16, device=DEVICE).view(16, 6)
    slabs = torch.empty(4, 7, 6, dtype=rows.dtype, device=DEVICE)
    slab_ops.to_slabs(rows, offsets, counts, slabs)
    back = slab_ops.from_slabs(slabs, offsets, counts, 16)
    for expert, (start, count) in enumerate(zip(offsets.tolist(), counts.tolist(), strict=False)):
        assert torch.equal(slabs[expert, :count], rows[start : start + count])
        assert torch.equal(back[start : start + count], rows[start : start + count])
