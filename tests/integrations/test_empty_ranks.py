"""Ranks without tokens, or without received rows, through every integration: `.sum()` losses, forward and backward."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.integrations import vllm_stand_in
from tests.odd_strides import odd
from triton_ep import pipeline
from triton_ep.distributed import current_heap
from triton_ep.integrations import deep_ep, megatron, te, torchtitan, vllm
from triton_ep.integrations.hybrid_ep import HybridEPBuffer
from triton_ep.testing import apply_expert

HIDDEN, TOPK, EXPERTS, MOST = 128, 2, 2, 8  # experts per rank
# Tokens by rank, and whether all go to rank 0: no tokens at all, one token and a rank without, no rows received.
BATCHES = (((0, 0), False), ((0, 1), False), ((1, 3), True))


class _Batch:
    """A batch of ones, so that no sum rounds. Tensors of no or one row have unusual strides."""

    def __init__(self, rank: int, tokens: tuple[int, ...], to_first: bool) -> None:
        device, count = current_heap().device, tokens[rank]
        token = torch.arange(count, device=device)
        idx = torch.stack([token % 2, 1 - token % 2] if to_first else [token % 4, (token + 2) % 4], 1)
        self.idx = odd(idx)
        self.x = odd(torch.ones(count, HIDDEN, dtype=torch.bfloat16, device=device)).requires_grad_()
        self.weights = odd(torch.tensor([0.5, 0.25], device=device).repeat(count, 1)).requires_grad_()
        self.map = torch.zeros(count, 2 * EXPERTS, dtype=torch.bool, device=device).scatter_(1, idx, True)
        probs = torch.zeros(self.map.shape, device=device).scatter_(1, idx, self.weights.detach())
        self.map, self.probs = odd(self.map), odd(probs).requires_grad_()

    def check(self, out: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Sum the result and run backward; the gradients are those of 0.75 * x."""
        assert torch.equal(out, 0.75 * self.x)
        out.sum().backward()
        assert torch.equal(self.x.grad, torch.full_like(self.x, 0.75))
        if weights is self.probs:
            assert torch.equal(weights.grad, HIDDEN * self.map.float())
        elif weights is not None:
            assert torch.equal(weights.grad, torch.full_like(weights, HIDDEN))


def _weighted(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (rows.float() * weights.unsqueeze(1)).to(rows.dtype)


def _megatron() -> tuple[Callable[[_Batch], None], Callable[[], None]]:
    def run(batch: _Batch) -> None:
        rows, idx, probs, _, handle = megatron.fused_dispatch(
            batch.x, batch.idx, batch.weights, 2 * EXPERTS, dist.group.WORLD
        )
        here = torch.where(idx >= 0, probs, 0.0).sum(1)
        out, _ = megatron.fused_combine(_weighted(rows, here), dist.group.WORLD, handle)
        batch.check(out, batch.weights)

    return run, deep_ep.release


def _megatron_hybrid() -> tuple[Callable[[_Batch], None], Callable[[], None]]:
    def run(batch: _Batch) -> None:
        rows, probs, _, _, handle = megatron.hybrid_ep_dispatch(
            batch.x, batch.map, batch.probs, dist.group.WORLD, EXPERTS, 24, 24
        )
        batch.check(megatron.hybrid_ep_combine(_weighted(rows, probs), handle), batch.probs)

    return run, megatron.reset_hybrid_ep_buffer


def _deep_ep() -> tuple[Callable[[_Batch], None], Callable[[], None]]:
    """Calls of a training loop, forward and backward, with rows and with a pair of bytes and scales."""
    size = deep_ep.Buffer.get_dispatch_config(2).get_nvl_buffer_size_hint(HIDDEN * 2, 2)
    buffer = deep_ep.Buffer(dist.group.WORLD, size, 0)

    def run(batch: _Batch) -> None:
        x, weights = batch.x.detach(), batch.weights.detach()
        counts = buffer.get_dispatch_layout(batch.idx, 2 * EXPERTS)[2]
        given = {"topk_idx": batch.idx, "topk_weights": weights, "num_tokens_per_expert": counts}
        rows, _, row_weights, _, handle, _ = buffer.dispatch(x, **given)
        out, back, _ = buffer.combine(odd(_weighted(rows, row_weights.sum(1))), handle, topk_weights=odd(row_weights))
        assert torch.equal(out, 0.75 * x) and torch.equal(back, weights)
        again = buffer.dispatch(torch.ones((), dtype=x.dtype, device=x.device).expand(x.shape).contiguous(), handle)[0]
        assert torch.equal(again, rows)
        pair = odd(x.to(torch.float8_e4m3fn).view(torch.uint8)).view(torch.float8_e4m3fn), odd(x[:, :1].float())
        for each in (given, {"handle": handle}):
            data, scales = buffer.dispatch(pair, **each)[0]
            assert torch.equal(data.float() * scales, rows.float())
        transposed = pair[0], odd(pair[1].t().contiguous()).t()
        data, scales = buffer.dispatch(transposed, handle)[0]
        assert torch.equal(data.float() * scales, rows.float())

    return run, deep_ep.release


def _deep_ep_elastic() -> tuple[Callable[[_Batch], None], Callable[[], None]]:
    """Calls of a training loop, forward and backward, with rows once per rank and with rows per expert."""
    buffer = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=MOST, hidden=HIDDEN)

    def run(batch: _Batch) -> None:
        given = {"topk_idx": batch.idx, "topk_weights": batch.weights.detach(), "num_experts": 2 * EXPERTS}
        for do_expand in (False, True):
            rows, _, weights, handle, _ = buffer.dispatch(batch.x.detach(), **given, do_expand=do_expand)
            here = weights if do_expand else weights.sum(1)
            y = _weighted(rows, here)
            out, back, _ = buffer.combine(y, handle, topk_weights=weights)
            assert torch.equal(out, 0.75 * batch.x)
            assert torch.equal(back, batch.weights)
            grad = torch.ones((), dtype=out.dtype, device=out.device).expand_as(out)  # gradient of a sum
            grad_y, *_ = buffer.dispatch(grad, handle=handle, do_expand=do_expand)
            assert torch.equal(grad_y[: len(y)], torch.ones_like(y))
            grad_x, _, _ = buffer.combine(_weighted(grad_y, here), handle)
            assert torch.equal(grad_x, torch.full_like(batch.x, 0.75))

    return run, deep_ep.release


def _hybrid_ep() -> tuple[Callable[[_Batch], None], Callable[[], None]]:
    buffer = HybridEPBuffer(
        dist.group.WORLD, hidden_dim=HIDDEN, max_num_of_tokens_per_rank=MOST, num_local_experts=EXPERTS
    )

    def run(batch: _Batch) -> None:
        x, probs = batch.x.detach(), batch.probs.detach()
        rows, row_probs, _, _, handle = buffer.dispatch_with_permute(
            hidden=x, routing_map=batch.map, probs=probs, pad_multiple=1
        )
        out, back = buffer.combine_with_unpermute(
            hidden=odd(_weighted(rows, row_probs)), probs=odd(row_probs), handle=handle
        )
        assert torch.equal(out, 0.75 * x) and torch.equal(back, probs)
        again = buffer.dispatch_with_permute(hidden=x, handle=handle, pad_multiple=1)[0]
        assert torch.equal(again, rows)

    return run, buffer.close


def _te() -> tuple[Callable[[_Batch], None], Callable[[], None]]:
    te.ep_bootstrap(dist.group.WORLD, 2 * EXPERTS, MOST, HIDDEN, TOPK)
    recipe = te.MXFP8BlockScaling()
    buffers = [
        te.EpBuffer(TOPK, MOST, HIDDEN, EXPERTS, dispatch_fwd_quant_recipe=there, combine_bwd_quant_recipe=back)
        for there, back in ((None, None), (recipe, recipe))
    ]

    def run(batch: _Batch) -> None:
        for buffer in buffers:
            batch.x.grad = batch.weights.grad = None
            rows, weights, _ = te.ep_dispatch(buffer, batch.x, batch.idx, batch.weights)
            rows = rows if buffer is buffers[0] else rows.dequantize()
            out = te.ep_combine(buffer, _weighted(rows, weights), num_local_tokens=batch.x.shape[0])
            batch.check(out, batch.weights)

    return run, te.ep_finalize


def _torchtitan() -> tuple[Callable[[_Batch], None], Callable[[], None]]:
    dispatcher = torchtitan.TokenDispatch(
        num_experts=2 * EXPERTS, top_k=TOPK, hidden_dim=HIDDEN, num_max_tokens_per_rank=MOST
    )
    dispatcher.wire_meshes(ep_mesh=init_device_mesh(current_heap().device.type, (2,), mesh_dim_names=("ep",)))
    weight = torch.eye(HIDDEN, dtype=torch.bfloat16, device=current_heap().device).repeat(EXPERTS, 1, 1)

    def run(batch: _Batch) -> None:
        w = weight.clone().requires_grad_()
        rows, counts, metadata = dispatcher.dispatch(batch.x, batch.weights, batch.idx)
        rows = torchtitan.grouped_mm(rows, w.transpose(-2, -1), counts.cumsum(0).int())
        batch.check(dispatcher.combine(rows, metadata, batch.x), batch.weights)
        assert torch.equal(w.grad.sum() > 0, counts.sum() > 0)

    return run, torchtitan.close_layers


def _vllm(batched: bool) -> tuple[Callable[[_Batch], None], Callable[[], None]]:
    rank, quant = dist.get_rank(), SimpleNamespace(quant_dtype=None)
    entered = vllm_stand_in.installed()
    entered.__enter__()
    made = vllm.TritonEPPrepareAndFinalize(
        dist.group.WORLD, max_tokens=MOST, hidden=HIDDEN, topk=TOPK, num_experts=2 * EXPERTS, batched=batched
    )
    expert_map = vllm_stand_in.expert_map_of(rank, 2, 2 * EXPERTS)
    experts = vllm_stand_in.Experts(quant, vllm_stand_in.TopKWeightAndReduceDelegate(), expert_map)

    def run(batch: _Batch) -> None:
        x, weights, ids = batch.x.detach(), batch.weights.detach(), odd(batch.idx.int())
        out = vllm_stand_in.kernel(made, experts, x, weights, ids, 2 * EXPERTS)
        each = [weights[:, k, None] * apply_expert(x, ids[:, k].cpu()).float() for k in range(TOPK)]
        torch.testing.assert_close(out.float(), sum(each), rtol=2**-7, atol=2**-7)

    def close() -> None:
        made.close()
        entered.__exit__(None, None, None)

    return run, close


def _pipeline() -> tuple[Callable[[_Batch], None], Callable[[], None]]:
    """Stage by stage over collectives; the experts are the identity."""
    weight = torch.eye(HIDDEN, dtype=torch.bfloat16, device=current_heap().device).repeat(EXPERTS, 1, 1)

    def run(batch: _Batch) -> None:
        counts = torch.bincount(batch.idx.flatten(), minlength=2 * EXPERTS)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        inputs, outputs = (each.view(2, EXPERTS).sum(1).tolist() for each in (counts, arriving))
        sent = batch.x.repeat_interleave(TOPK, 0)[batch.idx.flatten().argsort(stable=True)]
        rows = pipeline.a2a_dispatch(sent, outputs, inputs)
        placed = pipeline.permute_and_pad(rows, arriving, 2, EXPERTS, 32)
        y = pipeline.to_mxfp8_then_scaled_grouped_mm(placed.rows, weight.transpose(-2, -1), placed.group_offsets)
        y = pipeline.unpermute(y, placed.permuted_indices, placed.padded_shape)
        out = pipeline.a2a_combine(y, inputs, outputs)
        assert torch.equal(out, torch.ones_like(out)) and len(out) == TOPK * len(batch.x)
        out.sum().backward()
        assert torch.equal(batch.x.grad, torch.full_like(batch.x, TOPK))

    return run, lambda: None


INTEGRATIONS = {
    "pipeline": _pipeline,
    "megatron": _megatron,
    "megatron_hybrid": _megatron_hybrid,
    "deep_ep": _deep_ep,
    "deep_ep_elastic": _deep_ep_elastic,
    "hybrid_ep": _hybrid_ep,
    "te": _te,
    "torchtitan": _torchtitan,
    "vllm": lambda: _vllm(False),
    "vllm_batched": lambda: _vllm(True),
}


def _check(rank: int, nodes: int, ranks_per_node: int, integration: str) -> None:
    run, close = INTEGRATIONS[integration]()
    for tokens, to_first in BATCHES:
        run(_Batch(rank, tokens, to_first))
    close()


@pytest.mark.plain
@pytest.mark.filterwarnings("ignore:MXFP8 is emulated")
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
@pytest.mark.parametrize("integration", INTEGRATIONS)
def test_ranks_with_nothing_to_do_hold_nobody_up(run_ranks, nodes, ranks_per_node, integration):
    """No tokens on a rank or on all, a single token, no rows received: all results and gradients are right."""
    run_ranks(_check, nodes, ranks_per_node, integration)
