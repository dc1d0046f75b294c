"""Large inputs that know their origin, and what must arrive of them; all computed on the device of the test.

`triton_ep.testing.make_workload` and triton_ep/reference work on the CPU, which takes minutes at model sizes.
Here each rank makes the rows of all ranks on its own GPU and sorts entries there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triton_ep.testing import apply_expert

_CHUNK = 1024
_MASK = 0xFFFFFFFF
MAX_TOKENS = 1 << 22


def coded_rows(rank: int, num_tokens: int, hidden: int, seed: int, device: torch.device) -> torch.Tensor:
    """[num_tokens, hidden] bfloat16, the same wherever it is made, hidden >= 3.

    Columns 0 and 1 hold the token and column 2 the rank, 11 bits each, as +-(1 + m/128) * 2**e with
    -3 <= e <= 4; the others hold 11 bits of a hash of (rank, token, column, seed) in the same form.
    """
    assert num_tokens <= MAX_TOKENS and rank < 2048 and hidden >= 3
    rows = torch.empty(num_tokens, hidden, dtype=torch.bfloat16, device=device)
    column = torch.arange(hidden, device=device) * 0x85EBCA77
    for begin in range(0, num_tokens, _CHUNK):
        token = torch.arange(begin, min(begin + _CHUNK, num_tokens), device=device).unsqueeze(1)
        code = (token * 0x9E3779B1 + column + (rank + 1) * 0xC2B2AE3D + seed * 0x27D4EB2F) & _MASK
        for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
            code = ((code ^ (code >> shift)) * factor) & _MASK
        code = (code >> 15) & 2047
        code[:, 0], code[:, 1], code[:, 2] = token[:, 0] & 2047, token[:, 0] >> 11, rank
        # The three fields of a bfloat16: sign, exponent (biased by 127), mantissa.
        bits = (code >> 10 << 15) | ((((code >> 7) & 7) + 124) << 7) | (code & 127)
        rows[begin : begin + _CHUNK] = torch.where(bits > 32767, bits - 65536, bits).to(torch.int16).view(rows.dtype)
    return rows


def uniform_idx(rank: int, num_tokens: int, topk: int, num_experts: int, seed: int, drop: float = 0.0) -> torch.Tensor:
    """[num_tokens, topk] int32 on the CPU: distinct experts, all equally likely; a fraction `drop` of -1."""
    generator = torch.Generator().manual_seed(seed * 4096 + rank)
    idx = torch.rand(num_tokens, num_experts, generator=generator).topk(topk, dim=1).indices.int()
    return torch.where(torch.rand(num_tokens, topk, generator=generator) < drop, -1, idx)


def drawn_weights(rank: int, num_tokens: int, topk: int, seed: int) -> torch.Tensor:
    """[num_tokens, topk] float32 in [0.5, 1) on the CPU."""
    generator = torch.Generator().manual_seed(seed * 4096 + 2048 + rank)
    return torch.rand(num_tokens, topk, generator=generator) / 2 + 0.5


@dataclass(frozen=True)
class Arrivals:
    """What rank r must receive.

    Attributes:
        entry: [R] int64, which entry of all ranks' (token, k) lists, joined in rank order, each row is.
        expert_offsets: [e + 1] int32.
    """

    entry: torch.Tensor
    expert_offsets: torch.Tensor


def arrivals(idxs: list[torch.Tensor], rank: int, experts_per_rank: int, device: torch.device) -> Arrivals:
    """Rows of `rank`, expert-major, then by source rank, token and k; idxs: [T_r, K] of every rank."""
    expert = torch.cat([idx.flatten() for idx in idxs]).to(device).long() - rank * experts_per_rank
    mine = torch.nonzero((expert >= 0) & (expert < experts_per_rank)).flatten()
    entry = mine[torch.argsort(expert[mine], stable=True)]
    counts = torch.bincount(expert[mine], minlength=experts_per_rank)
    offsets = torch.zeros(experts_per_rank + 1, dtype=torch.int32, device=device)
    offsets[1:] = counts.cumsum(0)
    return Arrivals(entry, offsets)


def first_difference(actual: torch.Tensor, rows: torch.Tensor, source: torch.Tensor) -> str | None:
    """Compare actual [R, H] with rows[source] bit for bit; None, or which row differs and what it holds."""
    for begin in range(0, source.numel(), 8 * _CHUNK):
        want = rows[source[begin : begin + 8 * _CHUNK]]
        have = actual[begin : begin + want.shape[0]]
        if not torch.equal(have.view(torch.uint8), want.view(torch.uint8)):
            wrong = (have.view(torch.uint8) != want.view(torch.uint8)).any(1)
            row = int(torch.nonzero(wrong)[0])
            return (
                f"row {begin + row} should be row {int(source[begin + row])} of all ranks' input "
                f"({want[row, :4].tolist()} ...), is {have[row, :4].tolist()} ...; "
                f"{int(wrong.sum())} of {want.shape[0]} rows of its chunk differ"
            )
    return None


def row_experts(expert_offsets: torch.Tensor, num_rows: int, first_expert: int) -> torch.Tensor:
    """[num_rows] int64 global expert of each row, without host work; rows behind the last one get the last expert."""
    row = torch.arange(num_rows, dtype=expert_offsets.dtype, device=expert_offsets.device)
    local = torch.searchsorted(expert_offsets[1:].contiguous(), row, right=True)
    return first_expert + local.clamp(max=expert_offsets.numel() - 2)


def apply_experts_in_place(rows: torch.Tensor, experts: torch.Tensor) -> None:
    """`apply_expert` on rows [R, H] with their experts [R], in pieces, so that little extra memory is needed."""
    for begin in range(0, rows.shape[0], 8 * _CHUNK):
        part = slice(begin, begin + 8 * _CHUNK)
        rows[part] = apply_expert(rows[part], experts[part])


def combine_excess(out: torch.Tensor, x: torch.Tensor, idx: torch.Tensor, *, local_combine: bool = False) -> float:
    """How far out [T, H] is beyond the error bound of combining `apply_expert` of x; at most 0 = right.

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
        # A NaN compares as nothing: it must not pass as "not greater".
        worst = max(worst, float("inf") if bool(excess.isnan().any()) else excess.max().item())
    return worst
