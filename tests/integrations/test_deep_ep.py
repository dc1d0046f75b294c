"""deep_ep.Buffer: rows, ids, weights, sums and gradients against the plain-torch reference; its errors."""

import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from triton_ep.distributed import current_heap
from triton_ep.errors import ConfigError, FinalizedError, InputError, PeerFailed, StaleHandleError
from triton_ep.integrations import deep_ep as door
from triton_ep.integrations.deep_ep.layers import layers_of
from triton_ep.reference import compact as reference
from triton_ep.reference import dispatch as dispatch_reference
from triton_ep.testing import Workload, apply_expert, make_workload

HIDDEN, TOPK, EXPERTS = 40, 3, 3  # experts per rank
TOKENS = ((7, 0, 5, 9), (4, 11, 0, 6), (70, 3, 8, 1))  # three batches, per rank; the last one makes layers grow


def works_of(world_size: int, batch: int, **options: Any) -> list[Workload]:
    """Inputs of every rank."""
    return [
        make_workload(
            rank,
            world_size,
            TOKENS[batch][rank % 4],
            hidden=HIDDEN,
            topk=TOPK,
            num_experts=EXPERTS * world_size,
            seed=batch,
            **options,
        ).with_ids(torch.int64)
        for rank in range(world_size)
    ]


def equal(got: torch.Tensor | None, expected: torch.Tensor) -> None:
    """Assert the same bits and the same dtype."""
    assert got is not None
    assert got.dtype == expected.dtype
    assert torch.equal(got.cpu(), expected)


def make_buffer(**options: Any) -> door.Buffer:
    """A buffer over the world for rows of HIDDEN bf16 elements."""
    ranks = dist.get_world_size()
    size = door.Buffer.get_dispatch_config(ranks).get_nvl_buffer_size_hint(HIDDEN * 2, ranks)
    return door.Buffer(dist.group.WORLD, size, 0, **options)


def check_items(handle: Any, rank: int, goes: torch.Tensor, expected: reference.CompactResult) -> None:
    """Check the items of DeepEP's tuple inside a node; goes: [T, W] bool, whether a token goes to a rank."""
    matrix, channels, recv_channels, source, in_rank, heads = handle
    assert (len(handle), channels, recv_channels, source, heads) == (6, None, None, None, None)
    equal(in_rank, goes)
    rows_to = torch.bincount(expected.src[:, 0], minlength=goes.shape[1]).cumsum(0).int()
    equal(matrix[:, rank], rows_to)
    assert matrix.shape == (goes.shape[1],) * 2
    equal(handle[-2], goes)
    assert handle[1:4] == (None,) * 3
    with pytest.raises(IndexError):
        handle[6]


@dataclass
class _Sent:
    """A dispatch and its expected result."""

    work: Workload
    results: list[reference.CompactResult]
    handle: Any


def _dispatch(buffer: door.Buffer, rank: int, batch: int, asynchronous: bool) -> _Sent:
    world_size, num_experts = buffer.group_size, EXPERTS * buffer.group_size
    works = works_of(world_size, batch)
    xs, idxs, weights = map(list, zip(*((w.x, w.topk_idx, w.topk_weights) for w in works), strict=True))
    # DeepEP knows -1 alone as the mark of a dropped entry.
    idxs = [torch.where(idx == num_experts, -1, idx) for idx in idxs]
    results = [reference.dispatch(xs, idxs, weights, r, num_experts) for r in range(world_size)]
    device, mine, expected = current_heap().device, works[rank], results[rank]
    idx = idxs[rank].to(device)
    previous = door.Buffer.capture() if asynchronous else None
    order = {"previous_event": previous, "async_finish": asynchronous, "allocate_on_comm_stream": asynchronous}
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(idx, num_experts, **order)
    owner = torch.where(idxs[rank] >= 0, idxs[rank] // EXPERTS, -1)
    goes = torch.stack([(owner == r).any(1) for r in range(world_size)], 1)
    equal(in_rank, goes)
    equal(per_rank, goes.sum(0).int())
    equal(per_expert, torch.bincount(idxs[rank][idxs[rank] >= 0], minlength=num_experts).int())
    order["previous_event"] = event
    recv_x, recv_idx, recv_weights, counts, handle, event = buffer.dispatch(
        mine.x.to(device),
        topk_idx=idx,
        topk_weights=mine.topk_weights.to(device),
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        expert_alignment=4 if batch == 1 else 1,
        **order,
    )
    event.current_stream_wait()
    equal(recv_x, expected.recv_x)
    equal(recv_idx, expected.recv_topk_idx)
    equal(recv_weights, expected.recv_topk_weights)
    real = expected.num_recv_tokens_per_expert
    assert counts == (((real + 3) // 4 * 4) if batch == 1 else real).tolist()
    check_items(handle, rank, goes, expected)
    return _Sent(Workload(mine.x, idxs[rank], mine.topk_weights), results, handle)


def _combine(buffer: door.Buffer, rank: int, sent: _Sent, asynchronous: bool) -> None:
    device, num_experts = current_heap().device, EXPERTS * buffer.group_size
    order = {"previous_event": door.Buffer.capture() if asynchronous else None, "async_finish": asynchronous}
    ys = [(result.recv_x.float() * (1 + r / 4)).bfloat16() for r, result in enumerate(sent.results)]
    first_k = reference.first_choice(sent.work.topk_idx, num_experts, buffer.group_size)
    out, weights, event = buffer.combine(
        ys[rank].to(device), sent.handle, topk_weights=sent.results[rank].recv_topk_weights.to(device), **order
    )
    event.current_stream_wait()
    equal(out, reference.combine(ys, sent.results, rank, first_k, torch.bfloat16))
    equal(weights, torch.where(sent.work.topk_idx >= 0, sent.work.topk_weights, 0.0))
    # Biases: the float32 sums start from them, and are rounded once.
    biases = tuple((sent.work.x * factor).to(device) for factor in (0.53, 3.1))
    for bias in (biases, biases[0], list(biases[:1])):
        biased, no_weights, event = buffer.combine(ys[rank].to(device), sent.handle, bias=bias, **order)
        event.current_stream_wait()
        assert no_weights is None
        added = [each.cpu() for each in (biases if bias is biases else biases[:1])]
        equal(biased, reference.combine(ys, sent.results, rank, first_k, torch.bfloat16, added))
    again, *nothing, event = buffer.dispatch((sent.work.x * 2).to(device), handle=sent.handle, **order)
    event.current_stream_wait()
    assert nothing == [None] * 4
    equal(again, sent.results[rank].recv_x * 2)


def _check_three_live(rank: int, nodes: int, ranks_per_node: int, asynchronous: bool) -> None:
    buffer = make_buffer()
    first, second = (_dispatch(buffer, rank, batch, asynchronous) for batch in (0, 1))
    _combine(buffer, rank, first, asynchronous)
    third = _dispatch(buffer, rank, 2, asynchronous)  # more tokens than before
    buffer = make_buffer()  # as frameworks do; handles of the earlier buffer stay valid
    _combine(buffer, rank, second, asynchronous)
    _combine(buffer, rank, third, asynchronous)
    door.release()


@pytest.mark.plain
@pytest.mark.parametrize(
    "nodes, ranks_per_node, asynchronous", [(1, 2, True), pytest.param(1, 4, True, marks=pytest.mark.on_gpus)]
)
def test_three_live_handles_equal_the_reference(run_ranks, nodes, ranks_per_node, asynchronous):
    """F0 F1 B0 F2 B1 B2: rows, ids, weights, counts, sums, rows with a handle; bit for bit; ranks without tokens."""
    run_ranks(_check_three_live, nodes, ranks_per_node, asynchronous)


def _check_worst(rank: int, nodes: int, ranks_per_node: int) -> None:
    buffer = make_buffer()
    sent = _dispatch(buffer, rank, 0, False)
    device, expected = current_heap().device, sent.results[rank]
    arrived = expected.recv_x.shape[0]
    recv_x, recv_idx, _, counts, handle, _ = buffer.dispatch(
        sent.work.x.to(device),
        topk_idx=sent.work.topk_idx.to(device),
        topk_weights=sent.work.topk_weights.to(device),
        num_tokens_per_expert=torch.zeros(EXPERTS * buffer.group_size, dtype=torch.int32, device=device),
        num_worst_tokens=30,
        config=door.Config(20),
    )
    assert recv_x.shape[0] == 30
    assert counts == []
    equal(recv_x[:arrived], expected.recv_x)
    equal(recv_idx[:arrived], expected.recv_topk_idx)
    assert (recv_idx[arrived:] == -1).all()
    out, _, _ = buffer.combine(recv_x, handle)
    again, _, _ = buffer.combine(expected.recv_x.to(device), sent.handle)
    equal(out, again.cpu())
    _check_by_ranks(buffer, rank, sent, again)
    door.release()


def _check_worst_grows(rank: int, nodes: int, ranks_per_node: int) -> None:
    buffer, device = make_buffer(), current_heap().device
    _dispatch(buffer, rank, 0, False)  # a layer for up to 64 tokens
    sent = _dispatch(buffer, rank, 2, False)  # 70 tokens on rank 0
    work, expected = sent.work, sent.results[rank]
    counts = torch.zeros(EXPERTS * buffer.group_size, dtype=torch.int32, device=device)

    def dispatch(tokens: int, most: int) -> Any:
        repeated = [torch.cat([each] * (1 + tokens // max(len(each), 1)))[:tokens] for each in (work.x, work.topk_idx)]
        x, idx = (each.contiguous().to(device) for each in repeated)
        return buffer.dispatch(x, topk_idx=idx, num_tokens_per_expert=counts, num_worst_tokens=most)

    most = 200 * buffer.group_size
    received, *_ = dispatch(len(work.x), most)
    assert len(received) == most
    equal(received[: len(expected.recv_x)], expected.recv_x)
    if rank == 0:
        with pytest.raises(
            InputError, match=rf"300 tokens on rank 0; num_worst_tokens={most} on .* lets each have 200"
        ):
            dispatch(300, most)
    else:  # its host waits for nothing, and learns of the refusal when it looks
        dispatch(len(work.x), most)
        (layer,) = layers_of(buffer.group).layers.values()
        with pytest.raises(PeerFailed, match="rank 0 rejected its arguments"):
            layer.check()
    door.release()


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_worst_case_rows_have_room_for_their_share(run_ranks, nodes, ranks_per_node):
    """After small batches num_worst_tokens makes the layer grow to its share per rank; more is refused by that name."""
    run_ranks(_check_worst_grows, nodes, ranks_per_node)


def _check_by_ranks(buffer: door.Buffer, rank: int, sent: _Sent, combined: torch.Tensor) -> None:
    """Routing by is_token_in_rank alone: the same rows, without ids and weights."""
    device, expected = current_heap().device, sent.results[rank]
    idx = sent.work.topk_idx.to(device)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS * buffer.group_size)
    given = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    x = sent.work.x.to(device)
    recv_x, recv_idx, recv_weights, counts, handle, _ = buffer.dispatch(x, expert_alignment=4, **given)
    assert recv_idx is recv_weights is None
    equal(recv_x, expected.recv_x)
    assert counts == ((expected.num_recv_tokens_per_expert + 3) // 4 * 4).tolist()
    check_items(handle, rank, in_rank.cpu(), expected)
    equal(buffer.dispatch(x * 2, handle=handle)[0], expected.recv_x * 2)
    out, _, _ = buffer.combine(recv_x, handle)
    equal(out, combined.cpu())  # two terms, so their order does not matter
    for wrong, message in (
        ({"is_token_in_rank": in_rank.int()}, r"must be \[\d+, \d+\] bool, got .*int32"),
        ({"is_token_in_rank": None}, "got NoneType"),
        ({"topk_weights": sent.work.topk_weights.to(device)}, "no topk_idx"),
        ({"num_tokens_per_expert": per_expert[:-1]}, "multiple of the 2 ranks"),
        ({"num_tokens_per_expert": None}, "num_tokens_per_expert"),
        ({"expert_alignment": 0}, "expert_alignment must be an integer of at least 1, got 0"),
        ({"expert_alignment": 1.5}, "expert_alignment must be an integer of at least 1, got 1.5"),
    ):
        with pytest.raises(InputError, match=message):
            buffer.dispatch(x, **{**given, **wrong})


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_worst_case_rows_need_no_host(run_ranks, nodes, ranks_per_node):
    """num_worst_tokens rows on every rank: the received rows are the same; and rows without ids."""
    run_ranks(_check_worst, nodes, ranks_per_node)


def _check_low_latency(rank: int, nodes: int, ranks_per_node: int) -> None:
    ranks, most = nodes * ranks_per_node, 12
    num_experts, device = EXPERTS * ranks, current_heap().device
    size = door.Buffer.get_low_latency_rdma_size_hint(most, HIDDEN, ranks, num_experts)
    buffer = door.Buffer(dist.group.WORLD, 0, size, low_latency_mode=True)
    buffer.clean_low_latency_buffer(most, HIDDEN, num_experts)
    for batch, mode in enumerate(("plain", "hook", "async")):
        works = works_of(ranks, min(batch, 1))
        xs, idxs, weights = map(list, zip(*((w.x, w.topk_idx, w.topk_weights) for w in works), strict=True))
        expected = [dispatch_reference.dispatch(xs, idxs, weights, r, num_experts) for r in range(ranks)]
        idx, topk_weights = idxs[rank].to(device), weights[rank].to(device)
        how: dict[str, Any] = {"return_recv_hook": mode == "hook", "async_finish": mode == "async"}
        stats = torch.ones(EXPERTS, dtype=torch.int32, device=device)
        slabs, count, handle, event, hook = buffer.low_latency_dispatch(
            xs[rank].to(device), idx, most, num_experts, stats, use_fp8=False, use_ue8m0_for_sf=mode == "hook", **how
        )
        hook()
        event.current_stream_wait()
        real = expected[rank].num_recv_tokens_per_expert
        equal(count, real)
        equal(stats, real + 1)
        assert slabs.shape == (EXPERTS, ranks * most, HIDDEN)
        starts = expected[rank].expert_offsets.tolist()
        for local, (start, n) in enumerate(zip(starts, real.tolist(), strict=False)):
            equal(slabs[local, :n], expected[rank].recv_x[start : start + n])
            source, token, _ = expected[rank].src[start : start + n].T
            equal(handle[0][local], torch.cat([token, token.new_full((ranks * most - n,), -1)]).int())
            rows_from = torch.bincount(source, minlength=ranks)
            equal(handle[1][local], (rows_from.cumsum(0) - rows_from) << 32 | rows_from)
        assert (*handle[2:], len(handle)) == (most, HIDDEN, num_experts, 5)
        lent = buffer.get_next_low_latency_combine_buffer(handle)
        for local in range(EXPERTS):
            lent[local] = apply_expert(slabs[local], rank * EXPERTS + local)
        into = torch.empty_like(xs[rank], device=device) if mode == "hook" else None
        out, event, hook = buffer.low_latency_combine(lent, idx, topk_weights, handle, zero_copy=True, out=into, **how)
        hook()
        event.current_stream_wait()
        assert into is None or out is into
        kept = (idxs[rank] >= 0) & (idxs[rank] < num_experts)
        terms = torch.stack(
            [apply_expert(xs[rank], idxs[rank][:, k].clamp(0, num_experts - 1)).float() for k in range(TOPK)], 1
        )
        terms *= torch.where(kept, weights[rank], 0.0).unsqueeze(2)
        # Sums of a rank are rounded before they are sent, and the sum of the ranks once more.
        bound = torch.finfo(torch.bfloat16).eps * terms.abs().sum(1)
        assert ((out.cpu().float() - terms.sum(1)).abs() <= bound).all()
        _check_travelling_weights(buffer, xs[rank].to(device), idx, topk_weights, lent, out, how)
    with pytest.raises(InputError, match=f"{HIDDEN} values.*multiple of 128.*use_fp8=False"):
        buffer.low_latency_dispatch(xs[rank].to(device), idx, most, num_experts)
    with pytest.raises(ConfigError, match="num_rdma_bytes"):
        buffer.low_latency_dispatch(xs[rank].to(device), idx, 10 * most, num_experts, use_fp8=False)
    with pytest.raises(ConfigError, match=r"num_max_dispatch_tokens_per_rank is 1025; .* up to 1024"):
        buffer.low_latency_dispatch(xs[rank].to(device), idx, 1025, num_experts, use_fp8=False)
    with pytest.raises(InputError, match=f"must be an integer of at least 1, got {most}.5"):
        buffer.low_latency_dispatch(xs[rank].to(device), idx, most + 0.5, num_experts, use_fp8=False)
    with pytest.raises(ConfigError, match="num_nvl_bytes=0"):
        buffer.dispatch(xs[rank].to(device), handle)
    with pytest.raises(StaleHandleError):
        buffer.low_latency_combine(lent, idx, topk_weights, object())
    with pytest.raises(InputError, match=rf"stats must be \[{EXPERTS}\] int32, got \[{EXPERTS + 1}\]"):
        buffer.low_latency_dispatch(
            xs[rank].to(device), idx, most, num_experts, torch.cat([stats, stats[:1]]), None, False
        )
    with pytest.raises(StaleHandleError):
        buffer.get_next_low_latency_combine_buffer(object())
    for name, value in (("use_nvfp4", True), ("x_global_scale", topk_weights)):
        with pytest.raises(InputError, match=f"low_latency_dispatch does not support {name}"):
            buffer.low_latency_dispatch(xs[rank].to(device), idx, most, num_experts, **{name: value})
    masked = torch.ones(ranks, dtype=torch.int32, device=device)
    buffer.low_latency_update_mask_buffer(0)
    buffer.low_latency_query_mask_buffer(masked)
    equal(masked, torch.zeros(ranks, dtype=torch.int32))
    with pytest.raises(ConfigError, match="rank 1 cannot be masked"):
        buffer.low_latency_update_mask_buffer(1, True)
    with pytest.raises(ConfigError, match="get_local_buffer_tensor is not supported"):
        buffer.get_local_buffer_tensor(torch.uint8)
    assert door.Buffer.internode_dispatch is door.Buffer.dispatch
    with pytest.raises(InputError, match=r"out must have shape \["):
        buffer.low_latency_combine(lent, idx, topk_weights, handle, out=xs[rank].to(device)[:, 1:])
    buffer.destroy()


def _check_travelling_weights(
    buffer: door.Buffer,
    x: torch.Tensor,
    idx: torch.Tensor,
    weights: torch.Tensor,
    y: torch.Tensor,
    want: torch.Tensor,
    how: dict[str, Any],
) -> None:
    """Weights given to a low-latency dispatch arrive with the rows, and combine gives the same bits with them."""
    most, num_experts = y.shape[1] // buffer.group_size, EXPERTS * buffer.group_size
    given = {"use_fp8": False, "topk_weights": weights, **how}
    _, _, handle, event, hook = buffer.low_latency_dispatch(x, idx, most, num_experts, **given)
    hook()
    event.current_stream_wait()
    with pytest.raises(InputError, match="other topk_weights than low_latency_dispatch"):
        buffer.low_latency_combine(y, idx, weights.clone() if len(weights) else None, handle)
    # No extra dispatch carries weights: the dispatch counts of all layers must not change.
    before = [layer.context.num_dispatches for layer in layers_of(buffer.group).layers.values()]
    out, event, hook = buffer.low_latency_combine(y, idx, weights.view_as(weights), handle, **how)
    hook()
    event.current_stream_wait()
    equal(out, want.cpu())
    assert [layer.context.num_dispatches for layer in layers_of(buffer.group).layers.values()] == before


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_low_latency_calls(run_ranks, nodes, ranks_per_node):
    """Slabs hold each expert's rows in order; combine weights and sums them; at once, with a hook, on a stream."""
    run_ranks(_check_low_latency, nodes, ranks_per_node)


def _check_budget(rank: int, nodes: int, ranks_per_node: int) -> None:
    buffer = make_buffer()
    before, sent = door.Buffer.num_sms, _dispatch(buffer, rank, 0, False)
    assert sent.handle.layer.config.sm_budget is None
    try:
        door.Buffer.set_num_sms(2)
        sent = _dispatch(buffer, rank, 0, False)
        _combine(buffer, rank, sent, False)
        config = sent.handle.layer.config
        assert (config.num_sm, config.sm_budget) == (2 if nodes == 1 else 1, 2)
    finally:
        door.Buffer.num_sms, door.Buffer.budgeted = before, False
    door.release()


def test_a_number_of_sms_is_a_budget(run_ranks):
    """After `set_num_sms`, layers are created with a budget, and compute the same."""
    run_ranks(_check_budget, 1, 2)


def _check_refusals(rank: int, nodes: int, ranks_per_node: int) -> None:
    buffer, device = make_buffer(), current_heap().device
    last = rank == nodes * ranks_per_node - 1
    for batch in (1, 2):  # the other rank needs a larger layer for the last one
        work = works_of(nodes * ranks_per_node, batch)[rank]
        x, idx = work.x.to(device), work.topk_idx.to(device)
        counts = torch.zeros(EXPERTS * buffer.group_size, dtype=torch.int32, device=device)
        for wrong in (idx.float(), idx.t().contiguous().t()):
            with pytest.raises(InputError if last else PeerFailed, match=r"topk_idx must be|rejected its arguments"):
                buffer.dispatch(x, topk_idx=wrong if last else idx, num_tokens_per_expert=counts)
        rows = x.double() if last else x
        with pytest.raises(InputError if last else PeerFailed, match=r"x must be .*float64|rejected its arguments"):
            buffer.dispatch(rows, topk_idx=idx, num_tokens_per_expert=counts)
        _combine(buffer, rank, _dispatch(buffer, rank, batch, False), False)
    door.release()


def _check_layer_of_quantised_rows(rank: int, nodes: int, ranks_per_node: int) -> None:
    device, ranks = current_heap().device, nodes * ranks_per_node
    idx = torch.arange(2, device=device).view(2, 1)
    pair = torch.ones(2, 128, device=device).to(torch.float8_e4m3fn), torch.full((2, 1), 2.0, device=device)
    buffer = door.Buffer(dist.group.WORLD, 1 << 20)
    elastic = door.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=4)
    counts = torch.zeros(ranks, dtype=torch.int32, device=device)
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.ones(2, 128, dtype=dtype, device=device)
        buffer.dispatch(x, topk_idx=idx, num_tokens_per_expert=counts)
        elastic.dispatch(x, topk_idx=idx, num_experts=ranks)
        for _ in range(2):
            got, *_, handle, _ = buffer.dispatch(pair, topk_idx=idx, num_tokens_per_expert=counts)
            rows = (got[0].float() * got[1]).bfloat16()
            assert torch.equal(buffer.combine(rows, handle)[0], 2 * torch.ones_like(x, dtype=torch.bfloat16))
            got, *_, handle, _ = elastic.dispatch(pair, topk_idx=idx, num_experts=ranks)
            assert torch.equal(elastic.combine(rows, handle)[0], 2 * torch.ones_like(x, dtype=torch.bfloat16))
    elastic.destroy()
    buffer.destroy()
    door.release()


@pytest.mark.plain
def test_quantised_rows_come_back_in_bfloat16_after_any_others(run_ranks):
    """Their layer is that of bfloat16 rows, whatever the rows of the call before."""
    run_ranks(_check_layer_of_quantised_rows, 1, 2)


def _check_growth_on_two_paths(rank: int, nodes: int, ranks_per_node: int) -> None:
    """A `config` makes a call check all its arguments itself; without one the layer of an earlier call checks them."""
    buffer, device, ranks = make_buffer(), current_heap().device, nodes * ranks_per_node
    config = door.Config(door.Buffer.num_sms) if rank == 0 else None
    for grows in range(ranks):
        for tokens in (3, 70 << grows if rank == grows else 5):
            work = make_workload(rank, ranks, tokens, hidden=HIDDEN, topk=TOPK, num_experts=EXPERTS * ranks)
            x, idx = work.x.to(device), work.topk_idx.to(device)
            counts = buffer.get_dispatch_layout(idx, EXPERTS * ranks)[2]
            recv, _, _, _, handle, _ = buffer.dispatch(x, topk_idx=idx, num_tokens_per_expert=counts, config=config)
            goes = handle[4].sum(1, keepdim=True)
            assert torch.equal(buffer.combine(recv, handle)[0], (x.float() * goes).to(x.dtype))
    door.release()


@pytest.mark.plain
def test_a_layer_grows_for_plain_calls_and_others(run_ranks):
    """Whichever rank has more tokens than the layer has room for, all ranks go on with the same larger layer."""
    run_ranks(_check_growth_on_two_paths, 1, 2)


@pytest.mark.plain
def test_other_ranks_learn_of_a_refusal(run_ranks):
    """Ids that the buffer refuses on one rank raise PeerFailed on the others; the buffer serves the next call."""
    run_ranks(_check_refusals, 1, 2)


def _check_errors(rank: int, nodes: int, ranks_per_node: int) -> None:
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine, other = pair[rank // 2], pair[1 - rank // 2]
    for group in (None, "ep", other):
        with pytest.raises(ConfigError, match="no process group"):
            door.Buffer(group, 1 << 20)
    buffer = make_buffer()
    sent = _dispatch(buffer, rank, 0, False)
    device = current_heap().device
    x, idx = sent.work.x.to(device), sent.work.topk_idx.to(device)
    counts = torch.zeros(EXPERTS * buffer.group_size, dtype=torch.int32, device=device)
    wide = torch.zeros(x.shape[0], HIDDEN + 8, dtype=x.dtype, device=device)
    with pytest.raises(ConfigError, match=f"{HIDDEN * 2 + 16} bytes.*up to {HIDDEN * 2}"):
        buffer.dispatch(wide, topk_idx=idx, num_tokens_per_expert=counts)
    with pytest.raises(InputError, match="must have shape"):
        buffer.dispatch(x[:, :32].contiguous(), handle=sent.handle)  # a size other than the handle's
    with pytest.raises(InputError, match="must have shape"):
        buffer.combine(torch.zeros(1 + 10**4, HIDDEN, dtype=x.dtype, device=device), sent.handle)
    with pytest.raises(InputError, match=r"float8_e4m3fn and contiguous, got torch.bfloat16"):
        buffer.dispatch((x, x), handle=sent.handle)
    with pytest.raises(InputError, match=r"num_tokens_per_expert .*topk_idx"):
        buffer.dispatch(x)
    with pytest.raises(InputError, match="Pass one"):
        buffer.dispatch(x, handle=sent.handle, topk_idx=idx)
    recv = sent.results[rank].recv_x.to(device)
    for bias in ((x, x, x), (x, wide), x.float()):
        with pytest.raises(InputError, match="bias must be"):
            buffer.combine(recv, sent.handle, bias=bias)
    with pytest.raises(ConfigError, match="mpi4py"):
        make_buffer(comm=object())
    with pytest.raises(InputError, match="multiple of the 4 ranks"):
        buffer.get_dispatch_layout(idx, 10)
    small = door.Buffer(mine, buffer.num_nvl_bytes)
    for handle in (sent.handle, (1, 2), None):
        with pytest.raises(StaleHandleError, match="another group" if handle is sent.handle else "handle"):
            small.combine(x, handle)
    with pytest.raises(ConfigError, match="even"):
        door.Buffer.set_num_sms(3)
    buffer.destroy()
    buffer.destroy()
    for call in (lambda: buffer.dispatch(x, handle=sent.handle), lambda: buffer.combine(x, sent.handle)):
        with pytest.raises(FinalizedError, match="destroyed"):
            call()
    fresh = make_buffer()
    with pytest.raises(FinalizedError):
        fresh.dispatch(x, handle=sent.handle)
    _dispatch(fresh, rank, 0, False)
    door.release()


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 4)])
def test_mistakes_are_named(run_ranks, nodes, ranks_per_node):
    """Unknown groups, rows of another size, handles of other groups or none, a freed buffer: always an error."""
    run_ranks(_check_errors, nodes, ranks_per_node)


def test_install_makes_the_names_importable():
    """`from deep_ep import ...` works as in frameworks; `install` refuses to replace an imported package."""
    saved = {name: sys.modules.pop(name) for name in [*sys.modules] if name.split(".")[0] == "deep_ep"}
    try:
        door.install()
        door.install()
        from deep_ep import Buffer, Config, HybridEPBuffer, topk_idx_t
        from deep_ep.buffer import Buffer as SameBuffer
        from deep_ep.hybrid_ep_buffer import HybridEPBuffer as SameHybrid
        from deep_ep.hybrid_ep_buffer import indices_to_map
        from deep_ep.utils import EventHandle, EventOverlap

        assert callable(indices_to_map)
        assert (SameBuffer, SameHybrid) == (Buffer, HybridEPBuffer)
        assert Buffer is door.Buffer
        assert HybridEPBuffer is door.HybridEPBuffer
        assert topk_idx_t == torch.int64
        with EventOverlap(EventHandle()) as event:
            event.current_stream_wait()
        held = EventOverlap(EventHandle(), (torch.ones(1),))
        held.current_stream_wait()
        assert held.event is not None and held.extra_tensors is not None
        held.current_stream_wait(release_handle=True)
        assert held.event is None and held.extra_tensors is None
        held.current_stream_wait()
        assert Config(24).get_nvl_buffer_size_hint(14336, 8) >= Config().get_nvl_buffer_size_hint(7168, 8) > 0
        door.uninstall()
        assert not any(name.split(".")[0] == "deep_ep" for name in sys.modules)
        sys.modules["deep_ep"] = types.ModuleType("deep_ep")
        with pytest.raises(ConfigError, match="imported already"):
            door.install()
        del sys.modules["deep_ep"]
    finally:
        door.uninstall()
        sys.modules.update(saved)
