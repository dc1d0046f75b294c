"""Low-latency calls of deep_ep.Buffer, of vLLM's batched format and of the layer (bench_doors.py).

Each is captured ten times in a CUDA graph. Both sides send the weights of tokens, [T, K], within combine; with "-early"
both send them with the rows, as vLLM's format does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from triton_ep.bench.job import capture
from triton_ep.bench.origins import coded_rows
from triton_ep.bench.routing import uniform_idx
from triton_ep.integrations.deep_ep import Buffer
from triton_ep.integrations.vllm import PrepareFinalize
from triton_ep.layer import EPAll2AllLayer
from triton_ep.ops.channel_scales import quantize_channels
from triton_ep.runtime.launch import INTERPRETING

TOKENS = 128
"""Most tokens per rank of these calls."""
PER_REPLAY = 1 if INTERPRETING else 10
"""Calls per timed unit: a replay, or a single call on the CPU."""


class LowLatencyDoor:
    """Calls of the integration and of the layer, compared bit for bit.

    Args:
        tokens: tokens per rank.
        same: raises unless two tensors have the same bits; its first argument names them.

    Attributes:
        calls: (op, provider, kind of rows) -> the timed call.
        eager: the same calls without graphs; they keep alive the tensors whose addresses the graphs hold.
        layers: layers of the calls, to be checked and finalized.
    """

    def __init__(
        self,
        tokens: int,
        sizes: tuple[int, int, int],
        num_sm: int,
        same: Callable[[str, torch.Tensor, torch.Tensor], None],
    ) -> None:
        hidden, topk, experts = sizes
        rank, ranks = dist.get_rank(), dist.get_world_size()
        room = Buffer.get_low_latency_rdma_size_hint(tokens, hidden, ranks, experts)
        buffer = Buffer(dist.group.WORLD, 0, room, low_latency_mode=True, timeout_s=120.0)
        of_layer = (dist.group.WORLD, tokens, hidden, topk, rank, experts, ranks, ranks)
        layer, one_byte = (
            EPAll2AllLayer(
                *of_layer,
                num_sm=num_sm,
                timeout_s=120.0,
                capacity=ranks * tokens * min(topk, experts // ranks),
                low_latency=True,
                enable_local_combine=True,
            )
            for _ in range(2)
        )
        self.layers = (layer, one_byte)
        device = layer.context.device
        x = coded_rows(rank, tokens, hidden, 0, device)
        idx = uniform_idx(rank, tokens, topk, experts, 0).to(device).long()
        weights = torch.rand(idx.shape, generator=torch.Generator().manual_seed(rank)).to(device)
        quantised = partial(quantize_channels, x, round_scale=False, use_ue8m0=False)

        recv_x, recv_weights, desc = layer.dispatch(x, idx, weights)
        slabs, counts, handle, _, _ = buffer.low_latency_dispatch(x, idx, tokens, experts, use_fp8=False)
        assert isinstance(recv_x, torch.Tensor) and isinstance(slabs, torch.Tensor)
        same("counts", counts, desc.num_recv_tokens_per_expert)
        bytes_, scales = buffer.low_latency_dispatch(x, idx, tokens, experts)[0]
        flat_bytes, flat_scales, _, _ = one_byte.dispatch_scaled(*quantised(), idx)
        for expert, (first, count) in enumerate(zip(desc.expert_offsets.tolist(), counts.tolist(), strict=False)):
            rows = slice(first, first + count)
            same("slabs", slabs[expert, :count], recv_x[rows])
            same("one-byte slabs", bytes_[expert, :count].view(torch.uint8), flat_bytes[rows].view(torch.uint8))
            same("slabs of scales", scales[expert, :count], flat_scales[rows].view(torch.float32))
        combined = buffer.low_latency_combine(slabs, idx, weights, handle)[0]
        bare_x, _, bare = layer.dispatch(x, idx)
        assert isinstance(bare_x, torch.Tensor)
        same("low-latency combine", combined, layer.combine(bare_x, bare, weights))
        # The same, but weights travel with the rows.
        early: dict[str, Any] = {"use_fp8": False, "topk_weights": weights}
        brought = buffer.low_latency_dispatch(x, idx, tokens, experts, **early)[2]
        same("combine by early weights", buffer.low_latency_combine(slabs, idx, weights, brought)[0], combined)
        same("the layer's combine by early weights", layer.combine(recv_x, desc, recv_weights), combined)

        def layer_round() -> torch.Tensor:
            rows, _, made = layer.dispatch(x, idx)
            assert isinstance(rows, torch.Tensor)
            return layer.combine(rows, made, weights)

        def layer_early_round() -> torch.Tensor:
            rows, with_rows, made = layer.dispatch(x, idx, weights)
            assert isinstance(rows, torch.Tensor)
            return layer.combine(rows, made, with_rows)

        def door_round() -> torch.Tensor:
            rows, _, made, _, _ = buffer.low_latency_dispatch(x, idx, tokens, experts, use_fp8=False)
            assert isinstance(rows, torch.Tensor)
            return buffer.low_latency_combine(rows, idx, weights, made)[0]

        def early_round() -> torch.Tensor:
            rows, _, made, _, _ = buffer.low_latency_dispatch(x, idx, tokens, experts, **early)
            assert isinstance(rows, torch.Tensor)
            return buffer.low_latency_combine(rows, idx, weights, made)[0]

        self._vllm = made = PrepareFinalize(dist.group.WORLD, **_sizes_of_vllm(tokens, sizes, num_sm))
        unquantised = SimpleNamespace(quant_dtype=None)

        def vllm_round() -> torch.Tensor:
            rows, *_ = made.prepare(x, weights, idx, experts, None, False, unquantised)
            out = torch.empty_like(x)
            made.finalize(out, rows, weights, idx, False, None)
            return out

        same("vLLM's batched format", vllm_round(), combined)
        kind = "low-latency"
        self.eager: dict[tuple[str, str, str], Callable[[], object]] = {
            ("dispatch", "triton_ep", kind): lambda: layer.dispatch(x, idx),
            ("dispatch", "deep_ep", kind): lambda: buffer.low_latency_dispatch(x, idx, tokens, experts, use_fp8=False),
            ("dispatch", "triton_ep", f"{kind}-fp8"): lambda: one_byte.dispatch_scaled(*quantised(), idx),
            ("dispatch", "deep_ep", f"{kind}-fp8"): lambda: buffer.low_latency_dispatch(x, idx, tokens, experts),
            ("combine", "triton_ep", kind): lambda: layer.combine(bare_x, bare, weights),
            ("combine", "deep_ep", kind): lambda: buffer.low_latency_combine(slabs, idx, weights, handle),
            ("roundtrip", "triton_ep", kind): layer_round,
            ("roundtrip", "deep_ep", kind): door_round,
            ("combine", "triton_ep", f"{kind}-early"): lambda: layer.combine(recv_x, desc, recv_weights),
            ("combine", "deep_ep", f"{kind}-early"): lambda: buffer.low_latency_combine(slabs, idx, weights, brought),
            ("roundtrip", "triton_ep", f"{kind}-early"): layer_early_round,
            ("roundtrip", "deep_ep", f"{kind}-early"): early_round,
            ("roundtrip", "vllm", f"{kind}-early"): vllm_round,
        }
        self.calls = {name: call if INTERPRETING else _replayed(call) for name, call in self.eager.items()}

    def finish(self) -> None:
        """Check and finalize the layers. Collective."""
        for layer in self.layers:
            layer.check()
            layer.finalize()
        self._vllm.close()


def _sizes_of_vllm(tokens: int, sizes: tuple[int, int, int], num_sm: int) -> dict[str, Any]:
    """Arguments of a `PrepareFinalize` in the batched format."""
    named = dict(zip(("hidden", "topk", "num_experts"), sizes, strict=True))
    return {**named, "max_tokens": tokens, "batched": True, "num_sm": num_sm, "timeout_s": 120.0}


def _replayed(call: Callable[[], object]) -> Callable[[], object]:
    """`PER_REPLAY` calls as one CUDA graph."""

    def calls() -> None:
        for _ in range(PER_REPLAY):
            call()

    return capture(calls).replay
