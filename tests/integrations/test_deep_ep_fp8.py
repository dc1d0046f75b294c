"""FP8 rows through deep_ep.Buffer: values and scales against the formulas, rows in the order of bf16 rows."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.ops.grouped import DEVICE
from triton_ep.distributed import current_heap
from triton_ep.errors import ConfigError, InputError
from triton_ep.integrations import deep_ep as door
from triton_ep.integrations.deep_ep.fp8 import scale_bytes, scales_of_bytes
from triton_ep.integrations.deep_ep.layers import layers_of
from triton_ep.ops.channel_scales import quantize_channels
from triton_ep.reference import channel_scales as channels_reference
from triton_ep.reference import compact as compact_reference
from triton_ep.reference import dispatch as dispatch_reference
from triton_ep.testing import Workload, make_workload

HIDDEN, TOPK, EXPERTS = 512, 2, 2  # experts per rank
TOKENS = (7, 0, 5, 9)  # per rank
MODES = ((False, False), (True, False), (True, True))  # round_scale, use_ue8m0


def works_of(world_size: int, more: int = 0) -> list[Workload]:
    """Inputs of every rank: rows that encode their origin, in blocks of different magnitude."""
    works = []
    for rank in range(world_size):
        work = make_workload(
            rank,
            world_size,
            TOKENS[rank] + more * (rank == 1),
            hidden=HIDDEN,
            topk=TOPK,
            num_experts=EXPERTS * world_size,
            seed=3,
        ).with_ids(torch.int64)
        sizes = torch.tensor([1.0, 1e-7, 3e3, 0.0]).repeat_interleave(HIDDEN // 4)
        works.append(Workload((work.x * sizes).bfloat16(), work.topk_idx, work.topk_weights))
    return works


def model(x: torch.Tensor, round_scale: bool, use_ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The formulas in numpy, block by block."""
    blocks = x.float().numpy().reshape(x.shape[0], x.shape[1] // 128, 128)
    data, scales = np.zeros(blocks.shape, np.float32), np.zeros(blocks.shape[:2], np.float32)
    for t, b in np.ndindex(*scales.shape):
        amax = np.maximum(np.abs(blocks[t, b]).max(), np.float32(1e-4))
        scales[t, b], factor = amax * np.float32(1 / 448), np.float32(448) / amax
        if round_scale:
            scales[t, b] = 2.0 ** np.ceil(np.log2(np.float64(scales[t, b])))
            factor = 1 / scales[t, b]
        data[t, b] = np.clip(blocks[t, b] * factor, -448, 448)
    out = torch.from_numpy(scales)
    if use_ue8m0:
        exponents = (
            (np.log2(scales.astype(np.float64)) + 127).astype(np.int64).reshape(x.shape[0], x.shape[1] // 512, 4)
        )
        out = torch.from_numpy((exponents << np.array([0, 8, 16, 24])).sum(2)).int()
    return torch.from_numpy(data).reshape(x.shape).to(torch.float8_e4m3fn), out


def equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert the same bits, dtype and shape."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    plain = torch.uint8 if got.dtype == torch.float8_e4m3fn else got.dtype
    assert torch.equal(got.cpu().view(plain), expected.view(plain))


@pytest.mark.parametrize("round_scale, use_ue8m0", MODES)
def test_quantised_rows_equal_the_formulas(round_scale, use_ue8m0):
    """Random rows, zeros, the largest and the smallest numbers; and the round trip of scales through bytes."""
    x = torch.randn(33, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[1], x[2], x[3, :200], x[4] = 0.0, torch.finfo(torch.bfloat16).max, 448.0, 2.0**-130
    data, sent = quantize_channels(x.to(DEVICE), round_scale, use_ue8m0)
    for oracle in (model, channels_reference.quantize_channels):
        expected_data, scales = oracle(x, round_scale, use_ue8m0)
        equal(data, expected_data)
        equal(scales_of_bytes(sent, scales.shape[1], scales.dtype), scales)
        equal(sent, scale_bytes(scales, HIDDEN))
    nothing, no_scales = quantize_channels(x[:0].to(DEVICE), round_scale, use_ue8m0)
    assert (nothing.shape, no_scales.shape) == ((0, HIDDEN), (0, HIDDEN // 32))
    for each in (scales, scales.T.contiguous().T):
        sent = scale_bytes(each, HIDDEN)
        assert sent.shape == (len(x), HIDDEN // 32)
        equal(scales_of_bytes(sent, scales.shape[1], scales.dtype), scales)


def _check_low_latency(rank: int, nodes: int, ranks_per_node: int) -> None:
    ranks, most = nodes * ranks_per_node, 12
    num_experts, device = EXPERTS * ranks, current_heap().device
    size = door.Buffer.get_low_latency_rdma_size_hint(most, HIDDEN, ranks, num_experts)
    buffer = door.Buffer(dist.group.WORLD, 0, size, low_latency_mode=True)
    xs, idxs, weights = map(list, zip(*((w.x, w.topk_idx, w.topk_weights) for w in works_of(ranks)), strict=True))
    result = dispatch_reference.dispatch(xs, idxs, weights, rank, num_experts)
    idx, x = idxs[rank].to(device), xs[rank].to(device)
    starts, counts = result.expert_offsets.tolist(), result.num_recv_tokens_per_expert.tolist()
    for (round_scale, use_ue8m0), how in zip(MODES, ("plain", "return_recv_hook", "async_finish"), strict=True):
        options: dict[str, Any] = {} if how == "plain" else {how: True}
        (data, scales), count, handle, event, hook = buffer.low_latency_dispatch(
            x, idx, most, num_experts, round_scale=round_scale, use_ue8m0=use_ue8m0, **options
        )
        hook()
        event.current_stream_wait()
        equal(count, result.num_recv_tokens_per_expert)
        expected_data, expected_scales = model(result.recv_x, round_scale, use_ue8m0)
        assert data.shape == (EXPERTS, ranks * most, HIDDEN)
        assert data.is_contiguous()
        assert scales.shape == (EXPERTS, ranks * most, expected_scales.shape[1])
        assert scales.stride(1) == 1
        for local, (start, n) in enumerate(zip(starts, counts, strict=False)):
            equal(data[local, :n], expected_data[start : start + n])
            equal(scales[local, :n], expected_scales[start : start + n])
        # The handle combines bf16 slabs, like the handle of a bf16 dispatch.
        slabs, _, plain_handle, _, _ = buffer.low_latency_dispatch(x, idx, most, num_experts, use_fp8=False)
        topk_weights = weights[rank].to(device)
        plain, _, _ = buffer.low_latency_combine(slabs, idx, topk_weights, plain_handle)
        out, _, _ = buffer.low_latency_combine(slabs, idx, topk_weights, handle)
        equal(out, plain.cpu())
    for wrong, message in (
        ({"use_ue8m0": True}, "round_scale=True"),
        ({"round_scale": True, "use_fp8": False}, "use_fp8=False"),
    ):
        with pytest.raises(InputError, match=message):
            buffer.low_latency_dispatch(x, idx, most, num_experts, **wrong)
    with pytest.raises(InputError, match=r"bfloat16, got .* torch.float32"):
        buffer.low_latency_dispatch(x.float(), idx, most, num_experts)
    with pytest.raises(InputError, match=r"384 values.*multiple of 512"):
        buffer.low_latency_dispatch(x[:, :384], idx, most, num_experts, round_scale=True, use_ue8m0=True)
    buffer.destroy()


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), pytest.param(2, 2, marks=pytest.mark.on_gpus)])
def test_low_latency_rows_are_quantised(run_ranks, nodes, ranks_per_node):
    """Slabs hold e4m3 rows and column-major scales of all kinds; the handle combines bf16 slabs."""
    run_ranks(_check_low_latency, nodes, ranks_per_node)


def _check_dispatch(rank: int, nodes: int, ranks_per_node: int) -> None:
    ranks = nodes * ranks_per_node
    num_experts, device = EXPERTS * ranks, current_heap().device
    size = door.Buffer.get_dispatch_config(ranks).get_nvl_buffer_size_hint(HIDDEN * 2, ranks)
    pool = layers_of(dist.group.WORLD)
    pool.ranks_per_node, before = ranks_per_node, pool.ranks_per_node  # virtual nodes
    buffer = door.Buffer(dist.group.WORLD, size)
    entries = torch.zeros(num_experts, dtype=torch.int32, device=device)
    # On one node the last case needs a larger layer; its int32 words are exponents.
    last = 70 if nodes == 1 else 10
    cases = list(zip((0, 0, last), MODES, (False, True, True), strict=True))
    for more, (round_scale, use_ue8m0), asynchronous in cases if nodes == 1 else cases[::2]:
        xs, idxs, weights = map(
            list, zip(*((w.x, w.topk_idx, w.topk_weights) for w in works_of(ranks, more)), strict=True)
        )
        idxs = [torch.where(idx == num_experts, -1, idx) for idx in idxs]
        results = [compact_reference.dispatch(xs, idxs, weights, r, num_experts) for r in range(ranks)]
        result, idx = results[rank], idxs[rank].to(device)
        data, scales = model(xs[rank], round_scale, use_ue8m0)
        expected_data, expected_scales = model(result.recv_x, round_scale, use_ue8m0)
        pair = data.to(device), scales.to(device).T.contiguous().T
        order = {"previous_event": door.Buffer.capture() if asynchronous else None, "async_finish": asynchronous}
        routing = {"topk_idx": idx, "topk_weights": weights[rank].to(device), "num_tokens_per_expert": entries}
        (recv, recv_scales), recv_idx, recv_weights, counts, handle, event = buffer.dispatch(pair, **routing, **order)
        event.current_stream_wait()
        equal(recv, expected_data)
        equal(recv_scales, expected_scales)
        equal(recv_idx, result.recv_topk_idx)
        equal(recv_weights, result.recv_topk_weights)
        assert counts == result.num_recv_tokens_per_expert.tolist()
        if nodes > 1:
            _check_items(handle, rank, ranks_per_node, idxs, result)
        # With the same handle: these rows again, other rows in bf16, and sums of bf16 rows.
        (recv, recv_scales), *_, event = buffer.dispatch(pair, handle=handle, **order)
        event.current_stream_wait()
        equal(recv, expected_data)
        equal(recv_scales, expected_scales)
        plain, *_, event = buffer.dispatch(xs[rank].to(device), handle=handle, **order)
        event.current_stream_wait()
        equal(plain, result.recv_x)
        ys = [(each.recv_x.float() * (1 + r / 4)).bfloat16() for r, each in enumerate(results)]
        first_k = compact_reference.first_choice(idxs[rank], num_experts, ranks)
        out, _, event = buffer.combine(ys[rank].to(device), handle, **order)
        event.current_stream_wait()
        equal(out, compact_reference.combine(ys, results, rank, first_k, torch.bfloat16))
    # A bf16 handle takes quantised rows as well.
    *_, bf16_handle, _ = buffer.dispatch(xs[rank].to(device), **routing, num_worst_tokens=40 * more)
    (recv, recv_scales), *_ = buffer.dispatch(pair, handle=bf16_handle)
    arrived = expected_data.shape[0]
    assert recv.shape == (40 * more, HIDDEN)
    equal(recv[:arrived], expected_data)
    equal(recv_scales[:arrived], expected_scales)
    if nodes == 1:
        _check_mistakes(buffer, rank, pair, routing, handle)
    door.release()
    pool.ranks_per_node = before


def _check_items(
    handle: Any, rank: int, per_node: int, idxs: list[torch.Tensor], result: compact_reference.CompactResult
) -> None:
    """Check the items of DeepEP's tuple between nodes."""
    owners = [torch.where(idx >= 0, idx // EXPERTS, -per_node) for idx in idxs]
    in_rank, *_ = handle
    equal(in_rank, torch.stack([(owners[rank] == r).any(1) for r in range(len(idxs))], 1))
    equal(handle[-4], torch.bincount(result.src[:, 0], minlength=len(idxs)).cumsum(0).int())
    node, local = divmod(rank, per_node)
    tokens = [int((owner // per_node == node).any(1).sum()) for owner in owners[local::per_node]]
    equal(handle[4], torch.tensor(tokens).cumsum(0).int())
    assert [item is None for item in handle] == [False, True, True, True, False, True, False, True, True, True]


def _check_mistakes(buffer: door.Buffer, rank: int, pair: Any, routing: dict[str, Any], handle: Any) -> None:
    data, scales = pair
    tokens = data.shape[0]
    for wrong, message in (
        ((data, scales.float()), rf"\[{tokens}, 1\] torch.float32.*\[{tokens}, 4\] float32"),
        ((data, scales[:, :0]), rf"\[{tokens}, 0\] torch.int32"),
        ((data, torch.cat([scales, scales[:0], scales.new_zeros(1, 1)])), rf"\[{tokens + 1}, 1\]"),
        ((data.float(), scales), r"got torch.float32"),
        ((data[:, :200].contiguous(), scales), r"200 values.*multiple of 128"),
        ((data,), "tuple"),
    ):
        with pytest.raises(InputError, match=message):
            buffer.dispatch(wrong, **routing)
    long = torch.cat([data.view(torch.uint8)] * 2, 1).view(torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match=f"rows of {HIDDEN * 4} bytes"):
        buffer.dispatch((long, torch.cat([scales, scales], 1)), **routing)
    half = data.view(torch.uint8)[:, :256].contiguous().view(torch.float8_e4m3fn)
    with pytest.raises(InputError, match=f"256 values.*rows of {HIDDEN}"):
        buffer.dispatch((half, torch.ones(tokens, 2, device=data.device)), handle=handle)
    mixed = pair if rank == 0 else torch.zeros(data.shape, dtype=torch.bfloat16, device=data.device)
    with pytest.raises(InputError, match=r"ranks \[0\].*one-byte rows with scales, the others"):
        buffer.dispatch(mixed, **routing)


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), (2, 2)])
def test_dispatch_sends_quantised_rows(run_ranks, nodes, ranks_per_node):
    """e4m3 rows with column-major scales of both kinds arrive in the order of bf16 rows; their handle serves both."""
    run_ranks(_check_dispatch, nodes, ranks_per_node)


def test_what_is_not_finite_spoils_its_block_alone():
    """A block with an infinity or a NaN gets NaN where the formula does; neighbouring blocks keep their values."""
    x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16()
    x[1, 3], x[2, HIDDEN - 1] = torch.inf, torch.nan
    for round_scale, use_ue8m0 in MODES:
        data, sent = quantize_channels(x.to(DEVICE), round_scale, use_ue8m0)
        expected, scales = channels_reference.quantize_channels(x, round_scale, use_ue8m0)
        assert torch.equal(data.cpu().float().isnan(), expected.float().isnan())
        assert torch.equal(data.cpu().float().nan_to_num(), expected.float().nan_to_num())
        back = scales_of_bytes(sent.cpu(), scales.shape[1], scales.dtype)
        assert torch.equal(back.nan_to_num(), scales.nan_to_num())
