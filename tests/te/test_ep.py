"""TransformerEngine's functions for expert parallelism, over the layer."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.distributed as dist

import triton_ep.integrations.te as te
from triton_ep import MXTensor
from triton_ep.distributed import current_heap
from triton_ep.errors import CapacityError, ConfigError, InputError, PeerFailed
from triton_ep.integrations.te import ep, symmetric
from triton_ep.reference import dispatch as dispatch_reference
from triton_ep.reference import mxfp8 as mxfp8_reference
from triton_ep.testing import Workload, make_workload

pytestmark = [pytest.mark.plain, pytest.mark.filterwarnings("ignore:MXFP8 is emulated")]

HIDDEN, TOPK, EXPERTS, MOST = 64, 2, 2, 12
TOKENS = (12, 5, 0, 9)


def _works(world_size: int, seed: int) -> list[Workload]:
    return [
        make_workload(r, world_size, TOKENS[(r + seed) % 4], hidden=HIDDEN, topk=TOPK, num_experts=EXPERTS * world_size,
                      seed=seed, drop=0.0)
        for r in range(world_size)
    ]  # fmt: skip


def _buffer(**options) -> te.EpBuffer:
    return te.EpBuffer(TOPK, MOST, HIDDEN, EXPERTS, **options)


def _round(buffer: te.EpBuffer, work: Workload, factor: float):
    """Dispatch, multiply every row, combine; returns x, the rows, and the result."""
    device = current_heap().device
    x = work.x.clone().to(device).requires_grad_()
    weights = work.topk_weights.clone().to(device).requires_grad_()
    rows, row_weights, per_expert = te.ep_dispatch(buffer, x, work.topk_idx.to(device), weights)
    values = rows.dequantize() if isinstance(rows, MXTensor) else rows
    out = te.ep_combine(buffer, values * factor, num_local_tokens=x.shape[0])
    return x, weights, rows, row_weights, per_expert, out


def _check_round_trip(rank: int, nodes: int, ranks_per_node: int, quantised: tuple[bool, bool]) -> None:
    world_size, recipe = nodes * ranks_per_node, te.MXFP8BlockScaling()
    te.ep_bootstrap(dist.group.WORLD, EXPERTS * world_size, MOST, HIDDEN, TOPK)
    try:
        there, back = (recipe if each else None for each in quantised)
        options = {"dispatch_fwd_quant_recipe": there, "combine_bwd_quant_recipe": back, "alignment": 4}
        buffers = [_buffer(**options) for _ in range(2)]
        # Two micro-batches in flight: F0 F1 B0 B1.
        works = [_works(world_size, seed) for seed in (0, 1)]
        prepared = [te.ep_prepare(b, w[rank].topk_idx.to(b.device)) for b, w in zip(buffers, works, strict=True)]
        done = [_round(b, w[rank], 2.0**i) for i, (b, w) in enumerate(zip(buffers, works, strict=True))]
        for index, (work, (_, _, rows, row_weights, per_expert, out)) in enumerate(zip(works, done, strict=True)):
            idxs = [w.topk_idx for w in work]
            sent = [w.x for w in work]
            if there is not None:
                sent = [mxfp8_reference.dequantize(*mxfp8_reference.quantize(x), torch.bfloat16) for x in sent]
            want = dispatch_reference.dispatch(
                sent, idxs, [w.topk_weights for w in work], rank, EXPERTS * world_size, 4
            )
            assert isinstance(rows, MXTensor) == (there is not None)
            plain = rows.dequantize() if there is not None else rows
            assert torch.equal(plain.cpu(), want.recv_x) and torch.equal(row_weights.cpu(), want.recv_weights)
            assert per_expert.dtype == torch.int64
            assert torch.equal(per_expert.cpu(), want.expert_offsets.long().diff())
            assert torch.equal(prepared[index], per_expert)
            assert buffers[index].total_recv_tokens.tolist() == [int(want.expert_offsets[-1])]
            # Every assignment comes back times 2^index: TOPK terms, summed.
            assert torch.equal(out.cpu(), (sent[rank].double() * TOPK * 2.0**index).bfloat16())
        for index, (x, weights, _, row_weights, _, out) in enumerate(done):
            grad = works[index][rank].x.to(x.device) * 2
            torch.autograd.backward((out, row_weights), (grad, 3 * row_weights.detach()))
            arrived = grad.cpu()
            if back is not None:
                arrived = mxfp8_reference.dequantize(*mxfp8_reference.quantize(arrived), torch.bfloat16)
            assert torch.equal(x.grad.cpu(), (arrived.double() * TOPK * 2.0**index).bfloat16())
            assert torch.equal(weights.grad, 3 * weights.detach())
    finally:
        te.ep_finalize()
    assert not te.is_ep_bootstrapped()


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), pytest.param(1, 4, marks=pytest.mark.on_gpus)])
@pytest.mark.parametrize("quantised", [(False, False), (True, True), (True, False), (False, True)], ids=str)
def test_two_buffers_in_flight(run_ranks, nodes, ranks_per_node, quantised):
    """Rows, weights, counts, sums, gradients; each direction in MXFP8 or bf16; a rank without tokens."""
    run_ranks(_check_round_trip, nodes, ranks_per_node, quantised)


def _check_static(rank: int, nodes: int, ranks_per_node: int) -> None:
    world_size, device = nodes * ranks_per_node, current_heap().device
    work = make_workload(
        rank, world_size, 8, hidden=HIDDEN, topk=1, num_experts=EXPERTS * world_size, routing="one_expert", drop=0.0
    )
    arguments = [t.to(device) for t in (work.x, work.topk_idx, work.topk_weights)]
    for drop in (True, False):
        te.ep_bootstrap(
            dist.group.WORLD, EXPERTS * world_size, MOST, HIDDEN, 1, recv_capacity_per_rank=10, drop_on_overflow=drop
        )
        buffer = te.EpBuffer(1, MOST, HIDDEN, EXPERTS, recv_capacity_per_rank=10)
        if drop or rank:
            rows, _, _ = te.ep_dispatch(buffer, *arguments)
            assert rows.shape == (10, HIDDEN)
            assert buffer.total_recv_tokens.tolist() == [0 if rank else 8 * world_size]  # counts dropped rows too
        else:
            with pytest.raises(CapacityError, match="6 rows exceed the 10"):
                te.ep_dispatch(buffer, *arguments)
        if drop:
            out = te.ep_combine(buffer, rows)
            assert out.shape == (MOST, HIDDEN) and not out[8:].any()
            kept = 10 if rank == 0 else 2
            assert torch.equal(out[: min(kept, 8)], arguments[0][: min(kept, 8)])
        te.ep_finalize()


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_static_capacity(run_ranks, nodes, ranks_per_node):
    """Rows beyond the capacity are counted, and dropped or an error; the result has max_tokens_per_rank rows."""
    run_ranks(_check_static, nodes, ranks_per_node)


def _check_callers_tensors(rank: int, nodes: int, ranks_per_node: int) -> None:
    world_size, device = nodes * ranks_per_node, current_heap().device
    capacity = 2 * MOST * TOPK
    te.ep_bootstrap(dist.group.WORLD, EXPERTS * world_size, MOST, HIDDEN, TOPK, recv_capacity_per_rank=capacity)
    try:
        buffer = _buffer(recv_capacity_per_rank=capacity)
        work = make_workload(rank, world_size, 8, hidden=HIDDEN, topk=TOPK, num_experts=EXPERTS * world_size, drop=0.0)
        rows_of_caller = torch.empty(capacity + 3, HIDDEN, dtype=torch.bfloat16, device=device)
        weights_of_caller, gradient = torch.empty(capacity, device=device), torch.empty_like(rows_of_caller)
        given = {"recv_tokens": rows_of_caller, "recv_topk_weights": weights_of_caller}
        found = []
        for shape, outputs, grad_out in (((8,), {}, None), ((2, 4), given, gradient)):
            x, weights = (t.clone().to(device).requires_grad_() for t in (work.x, work.topk_weights))
            idx = work.topk_idx.to(device).view(*shape, TOPK)
            arguments = (x.view(*shape, HIDDEN), idx, weights.view(*shape, TOPK))
            rows, row_weights, _ = te.ep_dispatch(buffer, *arguments, **outputs)
            y = (rows * row_weights.unsqueeze(1)).bfloat16()
            y.retain_grad()
            out = te.ep_combine(buffer, y, num_local_tokens=8, grad_out=grad_out)
            out.backward(work.x.to(device))
            used = int(buffer.total_recv_tokens)  # later rows are unchanged
            of_rows = [each.detach()[:used].clone() for each in (rows, row_weights, y.grad)]
            found.append([*of_rows, out.detach(), x.grad, weights.grad])
        assert all(map(torch.equal, *found))
        assert rows.data_ptr() == rows_of_caller.data_ptr() and row_weights.data_ptr() == weights_of_caller.data_ptr()
        assert torch.equal(gradient[:used], y.grad[:used]) and gradient[:used].any()
    finally:
        te.ep_finalize()


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_tensors_of_the_caller_and_leading_dimensions(run_ranks, nodes, ranks_per_node):
    """Outputs and combine's gradient land in the caller's tensors, bit-identical; inputs may be [A, B, H]."""
    run_ranks(_check_callers_tensors, nodes, ranks_per_node)


def _check_callers_mxfp8(rank: int, nodes: int, ranks_per_node: int) -> None:
    world_size, device, recipe = nodes * ranks_per_node, current_heap().device, te.MXFP8BlockScaling()
    capacity = 2 * MOST * TOPK
    te.ep_bootstrap(dist.group.WORLD, EXPERTS * world_size, MOST, HIDDEN, TOPK, recv_capacity_per_rank=capacity)
    try:
        options = {"dispatch_fwd_quant_recipe": recipe, "combine_bwd_quant_recipe": recipe}
        buffer = _buffer(recv_capacity_per_rank=capacity, **options)
        work = make_workload(rank, world_size, 8, hidden=HIDDEN, topk=TOPK, num_experts=EXPERTS * world_size, drop=0.0)
        sizes = capacity * (HIDDEN + HIDDEN // 32)
        given = torch.zeros(sizes, dtype=torch.uint8, device=device)
        target = torch.zeros(sizes // 2, dtype=torch.bfloat16, device=device)
        found = []
        for recv_tokens, grad_out in ((None, None), (given, target)):
            x = work.x.clone().to(device).requires_grad_()
            idx, weights = work.topk_idx.to(device), work.topk_weights.to(device)
            rows, _, _ = te.ep_dispatch(buffer, x, idx, weights, recv_tokens=recv_tokens)
            out = te.ep_combine(buffer, rows.dequantize(), num_local_tokens=8, grad_out=grad_out)
            out.backward(work.x.to(device))
            used = int(buffer.total_recv_tokens)
            parts = [each.detach()[:used].clone() for each in (rows.qdata.view(torch.uint8), rows.scale)]
            found.append([*parts, out.detach(), x.grad])
        assert all(map(torch.equal, *found))
        assert used and rows.qdata.data_ptr() == given.data_ptr()
        elements, scales = given[: capacity * HIDDEN].view(capacity, HIDDEN), given[capacity * HIDDEN :]
        assert torch.equal(elements[:used], parts[0])
        assert torch.equal(scales.view(capacity, HIDDEN // 32)[:used], parts[1].view(torch.uint8))
        # The gradient of the rows: those of this rank's own tokens, quantised, in the bytes of `target`.
        data, scale = target.view(torch.uint8).split([capacity * HIDDEN, capacity * HIDDEN // 32])
        gradient = mxfp8_reference.dequantize(
            data.view(torch.float8_e4m3fn).view(capacity, HIDDEN).cpu(), scale.view(capacity, -1).cpu(), torch.bfloat16
        )
        assert torch.equal(gradient[:used], rows.dequantize()[:used].detach().cpu())  # x was the gradient, too
    finally:
        te.ep_finalize()


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_mxfp8_in_tensors_of_the_caller(run_ranks, nodes, ranks_per_node):
    """Rows and combine's gradient in MXFP8 land in the caller's bytes, elements before scales."""
    run_ranks(_check_callers_mxfp8, nodes, ranks_per_node)


def _check_primitives(rank: int, nodes: int, ranks_per_node: int) -> None:
    world_size, device = nodes * ranks_per_node, current_heap().device
    for capacity in (world_size * MOST * TOPK, MOST):
        te.ep_bootstrap(
            dist.group.WORLD,
            EXPERTS * world_size,
            MOST,
            HIDDEN,
            TOPK,
            recv_capacity_per_rank=capacity,
            drop_on_overflow=True,
        )
        try:
            buffer = _buffer(recv_capacity_per_rank=capacity)
            works = [make_workload(r, world_size, MOST - r, hidden=HIDDEN, topk=TOPK, num_experts=EXPERTS * world_size,
                                   drop=0.0) for r in range(world_size)]  # fmt: skip
            x, idx, weights = (
                each.to(device) for each in (works[rank].x, works[rank].topk_idx, works[rank].topk_weights)
            )
            per_expert = ep.ep_prepare(buffer, idx)
            assert per_expert is buffer.tokens_per_expert
            prepared = [per_expert.tolist(), buffer.total_recv_tokens.tolist()]
            rows, row_weights = torch.full((capacity, HIDDEN), 7.0).to(x), torch.full((capacity,), 7.0, device=device)
            ep._ep_dispatch_raw(buffer, idx, x, weights, rows, row_weights)
            assert prepared == [buffer.tokens_per_expert.tolist(), buffer.total_recv_tokens.tolist()]
            want = dispatch_reference.dispatch(
                [w.x for w in works], [w.topk_idx for w in works], [w.topk_weights for w in works], rank,
                EXPERTS * world_size, 1,
            )  # fmt: skip
            all_rows, kept = len(want.recv_x), min(len(want.recv_x), capacity)
            assert prepared[1] == [all_rows] and sum(prepared[0]) == kept
            assert (kept < all_rows) == (capacity == MOST)
            assert torch.equal(rows[:kept].cpu(), want.recv_x[:kept])
            assert torch.equal(row_weights[:kept].cpu(), want.recv_weights[:kept])
            result = torch.full((len(x) + 2, HIDDEN), 7.0).to(x)
            ep._ep_combine_raw(buffer, rows, result)
            assert not result[len(x) :].any()
            if kept == all_rows:  # else rows beyond a capacity of other ranks are missing, too
                assert torch.equal(result[: len(x)].cpu(), (works[rank].x.double() * TOPK).bfloat16())
            with pytest.raises(InputError, match="result is"):
                ep._ep_combine_raw(buffer, rows, result.float())
        finally:
            te.ep_finalize()


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_primitives_without_gradients(run_ranks, nodes, ranks_per_node):
    """The calls of run_ep.py: prepare counts what dispatch then receives, dropped rows in the total only."""
    run_ranks(_check_primitives, nodes, ranks_per_node)


def _check_as_before_2_19(rank: int, nodes: int, ranks_per_node: int) -> None:
    world_size, capacity = nodes * ranks_per_node, 2 * MOST * TOPK
    assert ep._BOOTSTRAPPED is False
    sizes = {"num_experts": EXPERTS * world_size, "max_tokens_per_rank": MOST, "hidden_dim": HIDDEN}
    te.ep_bootstrap(dist.group.WORLD, recv_capacity_per_rank=capacity, max_num_sms=0, zero_copy=False, **sizes)
    try:
        assert ep._BOOTSTRAPPED is True
        for topk in (1, TOPK):
            buffer = te.EpBuffer(
                top_k=topk, max_tokens_per_rank=MOST, recv_capacity_per_rank=capacity, hidden_dim=HIDDEN,
                num_local_experts=EXPERTS, alignment=0,
            )  # fmt: skip
            work = make_workload(rank, world_size, 6 + rank, hidden=HIDDEN, topk=topk, num_experts=EXPERTS * world_size,
                                 drop=0.0)  # fmt: skip
            *_, out = _round(buffer, work, 1.0)
            assert torch.equal(out.detach().cpu(), (work.x.double() * topk).bfloat16())
        with pytest.raises(ConfigError, match="topk"):
            te.EpBuffer(EXPERTS * world_size + 1, MOST, HIDDEN, EXPERTS, capacity)
    finally:
        te.ep_finalize()
    with pytest.raises(AttributeError, match="has no attribute 'anything'"):
        ep.anything  # noqa: B018


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_callers_of_earlier_versions(run_ranks, nodes, ranks_per_node):
    """Megatron's calls before TransformerEngine 2.19: only buffers have a top-k; a variable tells of the bootstrap."""
    run_ranks(_check_as_before_2_19, nodes, ranks_per_node)


def _check_refused(rank: int, nodes: int, ranks_per_node: int) -> None:
    group, device = dist.group.WORLD, current_heap().device
    with pytest.raises(RuntimeError, match=r"EpBuffer requires ep_bootstrap\(\) to be called first\."):
        _buffer()
    for sizes, options, text in (
        ((4, MOST, HIDDEN, 0), {}, r"num_topk >= 1 \(got 0\)"),
        ((4.0, MOST, HIDDEN, TOPK), {}, r"integer num_experts >= 1 \(got 4.0\)"),
        ((4, -8, HIDDEN, TOPK), {}, "max_tokens_per_rank >= 1"),
        ((4, MOST, HIDDEN, 6), {}, "num_topk=6, more than num_experts=4"),
        ((4, MOST, HIDDEN, TOPK), {"recv_capacity_per_rank": 0}, "recv_capacity_per_rank >= 1"),
        ((4, MOST, HIDDEN, TOPK), {"max_num_sms": -3}, "max_num_sms >= 0"),
    ):
        with pytest.raises(ConfigError, match=text):
            te.ep_bootstrap(group, *sizes, **options)
    with pytest.raises(ConfigError, match="drop_on_overflow requires recv_capacity_per_rank"):
        te.ep_bootstrap(group, 4, MOST, HIDDEN, TOPK, drop_on_overflow=True)
    with pytest.raises(ConfigError, match="multiple"):
        te.ep_bootstrap(group, 5, MOST, HIDDEN, TOPK)
    te.ep_bootstrap(None, 4, MOST, HIDDEN, TOPK)
    try:
        with pytest.raises(RuntimeError, match="ep_bootstrap was already called in this process"):
            te.ep_bootstrap(group, 4, MOST, HIDDEN, TOPK)
        with pytest.raises(ValueError, match=r"alignment must be 0, 1, or a power of two \(got 12\)\."):
            _buffer(alignment=12)
        with pytest.raises(InputError, match="top_k=3"):
            te.EpBuffer(3, MOST, HIDDEN, EXPERTS)
        with pytest.raises(InputError, match="supports MXFP8BlockScaling only"):
            _buffer(dispatch_fwd_quant_recipe=te.Recipe())
        buffer = _buffer()
        x = torch.zeros(3, HIDDEN, dtype=torch.bfloat16, device=device)
        idx, weights = torch.zeros(3, TOPK, dtype=torch.int32, device=device), torch.ones(3, TOPK, device=device)
        with pytest.raises(RuntimeError, match="without a dispatch"):
            te.ep_combine(buffer, x)
        with pytest.raises(InputError, match="topk_weights must be float32"):
            te.ep_dispatch(buffer, x, idx, weights.double())
        with pytest.raises(InputError, match=r"tokens\.dtype=torch.float32"):
            te.ep_dispatch(buffer, x.float(), idx, weights)
        with pytest.raises(InputError, match=r"recv_tokens is \[3, 64\] torch.float32; it must have room for"):
            te.ep_dispatch(buffer, x, idx, weights, recv_tokens=x.float())
        with pytest.raises(InputError, match=r"recv_topk_weights is \[3, 2\]"):
            te.ep_dispatch(buffer, x, idx, weights, recv_topk_weights=weights)
        # A mistake of one rank is reported to the others.
        with pytest.raises(InputError if rank else PeerFailed, match=r"must be float32|rank 1 rejected its arguments"):
            te.ep_dispatch(buffer, x, idx, weights.double() if rank else weights)
        quantising = _buffer(dispatch_fwd_quant_recipe=te.MXFP8BlockScaling())
        with pytest.raises(InputError, match=r"recv_tokens is \[64, 3\] .* it must be contiguous, with room for"):
            te.ep_dispatch(quantising, x, idx, weights, recv_tokens=x.t())
        rows, _, _ = te.ep_dispatch(buffer, x, idx, weights)
        with pytest.raises(InputError, match="num_local_tokens is 2"):
            te.ep_combine(buffer, rows, num_local_tokens=2)
        assert te.ep_combine(buffer, rows).shape == (MOST, HIDDEN)
    finally:
        te.ep_finalize()
        te.ep_finalize()


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_what_is_refused(run_ranks, nodes, ranks_per_node):
    """Refused before anything is sent, with TransformerEngine's message where it has one."""
    run_ranks(_check_refused, nodes, ranks_per_node)


def _check_symmetric(rank: int, nodes: int, ranks_per_node: int) -> None:
    group, heap, size = dist.group.WORLD, current_heap(), nodes * ranks_per_node
    before = heap.available()
    first, other = (te.symm_mem_alloc((3, HIDDEN), torch.bfloat16, group, where) for where in (None, heap.device))
    assert (first.shape, first.dtype, first.device) == ((3, HIDDEN), torch.bfloat16, heap.device)
    assert not first.any() and te.is_symm_backed(first[1:]) and te.is_symm_backed(other)
    assert not te.is_symm_backed(first.clone())
    first.fill_(1.0 + rank)
    other.fill_(-1.0)
    dist.barrier(group)
    if heap.device.type == "cpu":  # reads what the others wrote, through this rank's addresses of their memory
        made = symmetric._Pool.tensors[0].tensor
        for peer, address in enumerate(made.addrs.tolist()):
            words = torch.frombuffer((ctypes.c_int16 * (3 * HIDDEN)).from_address(address), dtype=torch.bfloat16)
            assert (words == 1.0 + peer).all()
    with pytest.raises(InputError, match="symmetric memory of this rank is on"):
        te.symm_mem_alloc((1,), torch.float32, group, "meta")
    with pytest.raises(InputError, match="use_pool=True is not supported"):
        te.symm_mem_alloc((1,), torch.float32, group, use_pool=True, backend="NCCL")
    te.ep_bootstrap(group, EXPERTS * size, MOST, HIDDEN, TOPK)
    try:
        work = _works(size, 0)[rank]
        buffer, capacity = _buffer(), 2 * size * MOST * TOPK
        room = te.symm_mem_alloc((capacity, HIDDEN), torch.bfloat16, group)
        x, idx, weights = (each.to(buffer.device) for each in (work.x, work.topk_idx, work.topk_weights))
        want, _, _ = te.ep_dispatch(buffer, x, idx, weights)
        rows, _, _ = te.ep_dispatch(buffer, x, idx, weights, recv_tokens=room)
        assert te.is_symm_backed(rows) and torch.equal(rows, want)
        outs = [te.ep_combine(buffer, each, num_local_tokens=x.shape[0]) for each in (rows, want)]
        assert torch.equal(*outs)
    finally:
        te.ep_finalize()
    te.release_symm_mem_pool()
    assert not any(te.is_symm_backed(each) for each in (first, other, room))
    te.release_symm_mem_pool()
    assert heap.available() == before


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_tensors_in_the_symmetric_heap(run_ranks, nodes, ranks_per_node):
    """Other ranks can address them; they serve as outputs and inputs, and can be released."""
    run_ranks(_check_symmetric, nodes, ranks_per_node)
