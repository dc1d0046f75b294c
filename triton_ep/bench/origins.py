"""Large inputs that carry their origin, and the rows that must arrive, all computed on the device of the benchmark.

`triton_ep.testing.make_workload` and triton_ep/reference work on the CPU, which takes minutes at model sizes.
Here each rank builds the rows of all ranks on its own GPU and sorts entries there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_CHUNK = 1024
_MASK = 0xFFFFFFFF
MAX_TOKENS = 1 << 22


def coded_rows(rank: int, num_tokens: int, hidden: int, seed: int, device: torch.device) -> torch.Tensor:
    """[num_tokens, hidden] bfloat16, hidden >= 3; the same on every rank that builds it.

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


@dataclass(frozen=True)
class Arrivals:
    """The rows that rank r must receive.

    Attributes:
        entry: [R] int64, index of each row in the (token, k) lists of all ranks, joined in rank order.
        place: [R] int64, its row in the output, where segments of experts are aligned.
        expert_offsets: [e + 1] int32, first row of each segment.
    """

    entry: torch.Tensor
    place: torch.Tensor
    expert_offsets: torch.Tensor


def arrivals(
    idxs: list[torch.Tensor], rank: int, experts_per_rank: int, device: torch.device, alignment: int = 1
) -> Arrivals:
    """Rows of `rank`, expert-major, then by source rank, token and k; idxs: [T_r, K] of every rank."""
    expert = torch.cat([idx.flatten() for idx in idxs]).to(device).long() - rank * experts_per_rank
    mine = torch.nonzero((expert >= 0) & (expert < experts_per_rank)).flatten()
    order = torch.argsort(expert[mine], stable=True)
    counts = torch.bincount(expert[mine], minlength=experts_per_rank)
    aligned = (counts + alignment - 1) // alignment * alignment
    offsets = torch.zeros(experts_per_rank + 1, dtype=torch.int32, device=device)
    offsets[1:] = aligned.cumsum(0)
    padding_before = (aligned - counts).cumsum(0) - (aligned - counts)
    place = torch.arange(mine.numel(), device=device) + padding_before[expert[mine][order]]
    return Arrivals(mine[order], place, offsets)


def first_difference(
    actual: torch.Tensor, rows: torch.Tensor, source: torch.Tensor, place: torch.Tensor | None = None
) -> str | None:
    """Compare actual [R, H], or its rows `place`, with rows[source] bit for bit; None, or the first difference."""
    for begin in range(0, source.numel(), 8 * _CHUNK):
        want = rows[source[begin : begin + 8 * _CHUNK]]
        part = slice(begin, begin + want.shape[0])
        have = actual[part] if place is None else actual[place[part]]
        if not torch.equal(have.view(torch.uint8), want.view(torch.uint8)):
            wrong = (have.view(torch.uint8) != want.view(torch.uint8)).any(1)
            row = int(torch.nonzero(wrong)[0])
            return (
                f"row {begin + row} should be row {int(source[begin + row])} of all ranks' input "
                f"({want[row, :4].tolist()} ...), is {have[row, :4].tolist()} ...; "
                f"{int(wrong.sum())} of {want.shape[0]} rows of its chunk differ"
            )
    return None


def wrong_sums(sums: torch.Tensor, exact: torch.Tensor, limit: torch.Tensor) -> str | None:
    """Compare sums [T, H] with `exact` of float64; None, or the largest difference and where sums differ by more than
    `limit` [T, H]. NaN differs."""
    error = (sums.double() - exact).abs()
    wrong = ~(error <= limit)
    if not bool(wrong.any()):
        return None
    tokens = torch.nonzero(wrong.any(1)).flatten().tolist()
    columns = torch.nonzero(wrong[tokens[0]]).flatten().tolist()
    return (
        f"off by {error.max().item()} where only rounding may differ, in {len(tokens)} of {wrong.shape[0]} tokens; of "
        f"the first, {tokens[0]}, in {len(columns)} columns from {columns[0]} on"
    )
