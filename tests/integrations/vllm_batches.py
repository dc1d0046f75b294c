"""Tokens, experts and the check that the tests with vLLM's own kernel share.

Each expert multiplies by its own number, in float32, against a dense sum.
"""

from __future__ import annotations

from typing import Any

import torch

from triton_ep.distributed import current_heap
from triton_ep.testing import make_workload

HIDDEN, TOPK, EXPERTS, MOST = 2048, 3, 2, 16  # experts per rank; the least hidden size of vLLM's low-latency class

# Tokens by rank, share of dropped ids, and whether only experts of rank 0 get rows.
BATCHES = (((7, 12), 0.2, False), ((0, 5), 0.0, False), ((9, 6), 0.0, True), ((16, 0), 0.3, False))


def values_of(rows: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Rows as float32, with scales [..., H / 128] or none."""
    values = rows.float()
    return values if scale is None else (values.unflatten(-1, (-1, 128)) * scale.unsqueeze(-1)).flatten(-2)


def numbered_experts(mk: Any, reduce: Any, moe: Any, batched: bool, **arguments: Any) -> Any:
    """Experts over vLLM's base class that multiply by the number of the expert.

    mk, reduce: vLLM's modules modular_kernel and topk_weight_and_reduce. moe: FusedMoEConfig.
    """

    class Numbered(mk.FusedMoEExpertsModular):
        @staticmethod
        def activation_format() -> Any:
            return mk.FusedMoEActivationFormat["BatchedExperts" if batched else "Standard"]

        def finalize_weight_and_reduce_impl(self) -> Any:
            return reduce.TopKWeightAndReduceDelegate() if batched else reduce.TopKWeightAndReduceNoOP()

        def workspace_shapes(self, num_rows: int, n: int, k: int, topk: int, *_: Any) -> Any:
            slabs = (EXPERTS, num_rows, HIDDEN)
            return (0,), (0,), slabs if batched else (num_rows, HIDDEN)

        def apply(self, output: torch.Tensor, hidden_states: torch.Tensor, **given: Any) -> None:
            values = values_of(hidden_states, given["a1q_scale"])
            mine = (given["expert_map"] >= 0).nonzero().flatten()
            if batched:
                counts = given["expert_tokens_meta"].expert_num_tokens
                here = torch.arange(values.shape[1], device=counts.device) < counts.unsqueeze(1)
                output.copy_(torch.where(here.unsqueeze(2), values * (mine.view(-1, 1, 1) + 1), 0.0))
                return
            ids, weights = given["topk_ids"], given["topk_weights"]
            kept = (ids >= 0) & (given["expert_map"][ids.clamp(min=0)] >= 0)
            factors = torch.where(kept, weights * (ids + 1), 0.0).sum(1, keepdim=True)
            output.copy_(torch.where(kept.any(1, keepdim=True), values * factors, 0.0))

        def supports_expert_map(self) -> bool:
            return True

        @staticmethod
        def _supports(*_: Any) -> bool:
            return True

        _supports_current_device = _supports_no_act_and_mul = _supports_quant_scheme = _supports
        _supports_activation = _supports_parallel_config = _supports

    return Numbered(moe, **arguments)


def batch(
    rank: int, ranks: int, tokens: int, drop: float, only_first: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows [T, H], their weights and ids [T, K]."""
    sizes = {"hidden": HIDDEN, "topk": TOPK, "num_experts": EXPERTS * ranks, "drop": drop, "seed": tokens}
    work, device = make_workload(rank, ranks, tokens, **sizes), current_heap().device
    ids = torch.where(work.topk_idx >= EXPERTS * (1 if only_first else ranks), -1, work.topk_idx).long()
    return work.x.to(device), work.topk_weights.to(device), ids.to(device)


def expert_map(rank: int, ranks: int) -> torch.Tensor:
    places = torch.full((EXPERTS * ranks,), -1, dtype=torch.int32)
    places[EXPERTS * rank :][:EXPERTS] = torch.arange(EXPERTS, dtype=torch.int32)
    return places.to(current_heap().device)


def check(kernel: Any, rank: int, ranks: int, quantised: bool) -> None:
    """Every batch through vLLM's FusedMoEKernel over numbered experts."""
    device, places = current_heap().device, expert_map(rank, ranks)
    w1, w2 = torch.zeros(EXPERTS, 2, HIDDEN, device=device), torch.zeros(EXPERTS, HIDDEN, 1, device=device)
    for tokens, drop, only_first in BATCHES:
        x, weights, ids = batch(rank, ranks, tokens[rank % 2], drop, only_first)
        want = x.float() * torch.where(ids >= 0, weights * (ids + 1), 0.0).sum(1, keepdim=True)
        out = kernel.apply(x, w1, w2, weights, ids, "silu", EXPERTS * ranks, places, False)
        # bf16 rounds rows, sums per rank and the result; e4m3 rounds rows by 1/16.
        bound = (0.07 if quantised else 0.012) * want.abs() + 0.02 * want.abs().mean()
        assert out.shape == want.shape and ((out.float() - want).abs() <= bound).all()
