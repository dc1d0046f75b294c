"""Oracle of NVFP4 quantisation: float64 and tables, no bit tricks and no torch cast to a small float.

Source: the arithmetic of torchao's NVFP4Tensor. Each of its float32 steps is one float64 step rounded to float32
here. The result is the same, because float64 has more than twice the bits plus two.
"""

from __future__ import annotations

import torch

BLOCK = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3 = tuple(
    (m / 8 if e == 0 else 1 + m / 8) * 2.0 ** (max(e, 1) - 7) for e in range(16) for m in range(8) if (e, m) != (15, 7)
)
NAN_SCALE = 0x7F


def _float32(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32).to(torch.float64)


def _nearest(x: torch.Tensor, values: tuple[float, ...]) -> torch.Tensor:
    """Index of the table value nearest to each finite x >= 0, ties to the even index."""
    table = torch.tensor(values, dtype=torch.float64)
    above = torch.searchsorted(table, x).clamp(1, len(values) - 1)
    below = above - 1
    middle = (table[below] + table[above]) / 2
    up = (x > middle) | ((x == middle) & (above % 2 == 0))
    return torch.where(up, above, below)


def _stochastic(x: torch.Tensor, values: tuple[float, ...], random: torch.Tensor) -> torch.Tensor:
    """Index of one of the two neighbours of each x: the upper one if `random` < 2**24 is below its share of 2**24."""
    table = torch.tensor(values, dtype=torch.float64)
    below = (torch.searchsorted(table, x, right=True) - 1).clamp(0, len(values) - 2)
    share = (x - table[below]) / (table[below + 1] - table[below])
    return below + (random.double() < share * 2**24)


def quantize(
    x: torch.Tensor, per_tensor_scale: torch.Tensor | None = None, random: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed elements [..., K / 2] uint8, the even one in the low bits, and scale bytes [..., K / 16] uint8.

    Arguments:
        x: [..., K] bf16, fp16 or fp32.
        per_tensor_scale: float32 that broadcasts against the scales; None: one level of scales.
        random: [..., K] integers below 2**24: round stochastically, with scales rounded up; None: round to nearest.
    """
    blocks = x.double().unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1)
    wanted = _float32(amax / 6)
    factor = torch.ones((), dtype=torch.float64)
    if per_tensor_scale is not None:
        outer = per_tensor_scale.double().cpu()
        outer = torch.where(outer == 0, 1.0, outer)
        wanted = _float32(wanted / outer)
        factor = _float32(1 / outer)
    is_nan = wanted.isnan()
    wanted = wanted.nan_to_num(0.0, posinf=448.0).clamp(2.0**-6, 448.0)
    scale = _nearest(wanted, E4M3)
    if random is not None:
        scale = scale + (torch.tensor(E4M3, dtype=torch.float64)[scale] < wanted)
    inverse = _float32(factor / torch.tensor(E4M3, dtype=torch.float64)[scale])
    inverse = inverse.clamp(max=torch.finfo(torch.float32).max)
    scaled = _float32(blocks * inverse.unsqueeze(-1)).abs().nan_to_num(0.0, posinf=6.0).clamp(max=6.0)
    if random is None:
        codes = _nearest(scaled, E2M1)
    else:
        codes = _stochastic(scaled, E2M1, random.unflatten(-1, (-1, BLOCK)))
    codes = torch.where(is_nan.unsqueeze(-1), 0, codes + 8 * blocks.signbit()).flatten(-2)
    packed = codes[..., 0::2] + 16 * codes[..., 1::2]
    return packed.to(torch.uint8), torch.where(is_nan, NAN_SCALE, scale).to(torch.uint8)


def dequantize(
    packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, per_tensor_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Values [..., K] of packed elements and scale bytes, rounded to float32, then to `dtype`."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).long()
    elements = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)[codes]
    scales = torch.tensor([*E4M3, float("nan")], dtype=torch.float64)[scale.long()].unsqueeze(-1)
    if per_tensor_scale is not None:
        scales = scales * per_tensor_scale.double().cpu().unsqueeze(-1)
    return (elements.unflatten(-1, (-1, BLOCK)) * scales).flatten(-2).to(torch.float32).to(dtype)


def hadamard(x: torch.Tensor, signs: int) -> torch.Tensor:
    """Multiply blocks of 16 of x [..., K] by the signs (bit i: negate lane i) and Sylvester's matrix / 4; float64."""
    lanes = range(BLOCK)
    matrix = torch.tensor([[(-1.0) ** (i & j).bit_count() / 4 for j in lanes] for i in lanes], dtype=torch.float64)
    sign = torch.tensor([-1.0 if signs >> i & 1 else 1.0 for i in lanes], dtype=torch.float64)
    return ((x.double().unflatten(-1, (-1, BLOCK)) * sign) @ matrix).flatten(-2)


def philox(seed: int, counter: int) -> list[int]:
    """Four random words of 32 bits: Philox 4x32 with 10 rounds, as Salmon et al. describe it (SC 2011)."""
    mask = 2**32 - 1
    words = [counter & mask, counter >> 32 & mask, 0, 0]
    key = [seed & mask, seed >> 32 & mask]
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * words[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * words[2], 2**32)
        words = [high1 ^ words[1] ^ key[0], low1, high0 ^ words[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return words
