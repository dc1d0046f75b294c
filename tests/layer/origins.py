"""Experts, weights and error bounds for large inputs (triton_ep/bench/origins.py), on the device of the test."""

from __future__ import annotations

import torch

from triton_ep.testing import apply_expert

_CHUNK = 1024


def drawn_weights(rank: int, num_tokens: int, topk: int, seed: int) -> torch.Tensor:
    """[num_tokens, topk] float32 in [0.5, 1) on the CPU."""
    generator = torch.Generator().manual_seed(seed * 4096 + 2048 + rank)
    return torch.rand(num_tokens, topk, generator=generator) / 2 + 0.5


def row_experts(expert_offsets: torch.Tensor, num_rows: int, first_expert: int) -> torch.Tensor:
    """[num_rows] int64 global expert of each row, without host work; unused rows at the end get the last expert."""
    row = torch.arange(num_rows, dtype=expert_offsets.dtype, device=expert_offsets.device)
    local = torch.searchsorted(expert_offsets[1:].contiguous(), row, right=True)
    return first_expert + local.clamp(max=expert_offsets.numel() - 2)


def apply_experts_in_place(rows: torch.Tensor, experts: torch.Tensor) -> None:
    """`apply_expert` on rows [R, H] with their experts [R], in pieces, to save memory."""
    for begin in range(0, rows.shape[0], 8 * _CHUNK):
        part = slice(begin, begin + 8 * _CHUNK)
        rows[part] = apply_expert(rows[part], experts[part])


def combine_excess(out: torch.Tensor, x: torch.Tensor, idx: torch.Tensor, *, local_combine: bool = False) -> float:
    """By how much out [T, H] exceeds the error bound of combining `apply_expert` of x; at most 0 = correct.

    The bound: float32 accumulation, one rounding to bfloat16; with local combine one per partial sum as well.
    """
    worst = -1.0
    half_ulp = torch.finfo(out.dtype).eps / 2
    for begin in range(0, x.shape[0], _CHUNK):
        part, experts = x[begin : begin + _CHUNK], idx[begin : begin + _CHUNK].to(x.device)
        total = torch.zeros(part.shape, dtype=torch.float64, device=x.device)
        size = torch.zeros_like(total)
        for k in range(idx.shape[1]):
            term = apply_expert(part, experts[:, k].clamp(min=0)).double() * (experts[:, k : k + 1] >= 0)
            total += term
            size += term.abs()
        bound = total.abs() * half_ulp * (1 + 1e-6) + size * idx.shape[1] * 2.0**-24 + 1e-30
        if local_combine:
            bound += size * half_ulp * 2
        excess = (out[begin : begin + _CHUNK].double() - total).abs() - bound
        # Comparisons with NaN are False: a NaN must not pass as "not greater".
        worst = max(worst, float("inf") if bool(excess.isnan().any()) else excess.max().item())
    return worst
