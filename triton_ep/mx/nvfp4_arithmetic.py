"""NVFP4 quantisation with torch operations, for any device; bit-identical to kernels/compute/nvfp4.py.

That module's docstring has the rules. Divisors are tensors: torch on a GPU divides by a Python number by multiplying by
its reciprocal.
"""

from __future__ import annotations

import torch

from triton_ep.mx.hadamard import BLOCK, hadamard, inverse_hadamard

E4M3_SMALLEST, E4M3_LARGEST, E2M1_LARGEST = 2.0**-6, 448.0, 6.0
"""Smallest normal and largest scale; largest element."""

_NAN_SCALE = 0x7F
_MASK = 0xFFFFFFFF


def _number(value: float, like: torch.Tensor) -> torch.Tensor:
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _high_low(factor: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # int64 wraps at 2**64; the masks remove the resulting sign.
    product = factor * word
    return (product >> 32) & _MASK, product & _MASK


def random_words(seed: torch.Tensor, num_words: int) -> torch.Tensor:
    """[num_words] int64 in [0, 2**32): word i % 4 of Philox 4x32-10 with counter i // 4, keyed by `seed` int64."""
    counter = torch.arange(-(-num_words // 4), device=seed.device)
    zero = torch.zeros_like(counter)
    words = [counter & _MASK, counter >> 32, zero, zero]
    keys = [seed & _MASK, (seed >> 32) & _MASK]
    for _ in range(10):
        high0, low0 = _high_low(0xD2511F53, words[0])
        high1, low1 = _high_low(0xCD9E8D57, words[2])
        words = [high1 ^ words[1] ^ keys[0], low1, high0 ^ words[3] ^ keys[1], low0]
        keys = [(keys[0] + 0x9E3779B9) & _MASK, (keys[1] + 0xBB67AE85) & _MASK]
    return torch.stack(words, -1).flatten()[:num_words]


def _codes(values: torch.Tensor, words: torch.Tensor | None) -> torch.Tensor:
    """int32 codes 0..15."""
    magnitude = values.abs().clamp(max=E2M1_LARGEST).nan_to_num(0.0)
    small, middle = magnitude < 2, magnitude < 4
    steps = magnitude * torch.where(small, 2.0, torch.where(middle, 1.0, 0.5))
    whole = steps.to(torch.int32)
    part = steps - whole
    code = whole + torch.where(small, 0, torch.where(middle, 2, 4))
    if words is None:
        up = (part > 0.5) | ((part == 0.5) & (code % 2 == 1))
    else:
        up = (words >> 8).float() < part * 2.0**24
    return code + up + (values.view(torch.int32) >> 28 & 8)


def quantize(
    x: torch.Tensor,
    per_tensor_scale: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    signs: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise blocks of 16 values of the last dimension.

    Arguments:
        x: [..., K] bf16, fp16 or fp32; K a multiple of 16.
        per_tensor_scale: float32 that broadcasts against the scales, or None.
        seed: [] or [1] int64: round stochastically. None: round to nearest.
        signs: signs of a Hadamard transform applied first; None: no transform.

    Returns packed elements, [..., K / 2] uint8, and scale bits, [..., K / 16] uint8.
    """
    x = x.float() if signs is None else hadamard(x, signs)
    blocks = x.unflatten(-1, (x.shape[-1] // BLOCK, BLOCK))
    # Compare as integers, as in MX arithmetic: a NaN is the largest magnitude.
    amax = (blocks.contiguous().view(torch.int32) & 0x7FFFFFFF).amax(-1).view(torch.float32)
    wanted = amax / _number(6.0, amax)
    inverse = _number(1.0, amax)
    if per_tensor_scale is not None:
        outer = torch.where(per_tensor_scale == 0, 1.0, per_tensor_scale)
        wanted, inverse = wanted / outer, inverse / outer
    is_nan = wanted.isnan()
    wanted = wanted.clamp(E4M3_SMALLEST, E4M3_LARGEST)
    rounded = torch.where(is_nan, 1.0, wanted).to(torch.float8_e4m3fn)
    bits = rounded.view(torch.uint8)
    words = None
    if seed is not None:
        bits = bits + (rounded.float() < wanted)
        words = random_words(seed, x.numel()).view(blocks.shape)
    inverse = (inverse / bits.view(torch.float8_e4m3fn).float()).clamp(max=torch.finfo(torch.float32).max)
    codes = torch.where(is_nan.unsqueeze(-1), 0, _codes(blocks * inverse.unsqueeze(-1), words)).flatten(-2)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    return packed.to(torch.uint8), torch.where(is_nan, _NAN_SCALE, bits).to(torch.uint8)


def dequantize(
    packed: torch.Tensor,
    scale: torch.Tensor,
    per_tensor_scale: torch.Tensor | None = None,
    signs: int | None = None,
) -> torch.Tensor:
    """Float32 values [..., K] of packed elements [..., K / 2] and scale bits [..., K / 16] uint8."""
    pairs = packed.to(torch.int32)
    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
    exponent, half = codes >> 1 & 3, codes & 1
    normal = (exponent + 126 << 23 | half << 22).view(torch.float32)
    values = torch.where(exponent > 0, normal, half * 0.5)
    values = torch.where(codes >= 8, -values, values).unflatten(-1, (scale.shape[-1], BLOCK))
    values = values * scale.view(torch.float8_e4m3fn).float().unsqueeze(-1)
    if signs is not None:
        values = inverse_hadamard(values, signs)
    if per_tensor_scale is not None:
        values = values * per_tensor_scale.unsqueeze(-1)
    return values.flatten(-2)
