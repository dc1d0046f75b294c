"""Oracle of kernels/compute/channel_scales.py: e4m3 rows with one scale per 128 values."""

from __future__ import annotations

import torch

CHANNELS = 128
"""Values that share a scale."""
_MAX = 448.0  # of e4m3
_LEAST_AMAX = 1e-4


def quantize_channels(x: torch.Tensor, round_scale: bool, use_ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise every 128 values of a row: amax at least 1e-4, data = x * (448 / amax), scale = amax * (1 / 448).

    Source: dispatch of DeepEP's csrc/kernels/internode_ll.cu, calculate_fp8_scales of its utils.cuh.

    Args:
        x: [T, H] bfloat16, H a multiple of 128.
        round_scale: scales are powers of two, rounded up, and data = x / scale.
        use_ue8m0: store only the exponents of such scales, four to a word, the first in the lowest byte.

    Returns:
        Data [T, H] float8_e4m3fn, saturated; scales [T, H / 128] float32, or with `use_ue8m0` [T, H / 512] int32. A
        value is data times scale.
    """
    values = x.float().unflatten(1, (-1, CHANNELS))
    amax = values.abs().amax(2).clamp(min=_LEAST_AMAX)
    scale = amax * (1 / _MAX)
    if round_scale:
        bits = scale.view(torch.int32)
        # Exponent of the next power of two. An infinite amax gets the largest exponent and the factor 0.
        exponent = ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).clamp(max=254).int()
        scale = (exponent << 23).view(torch.float32)
        factor = ((254 - exponent) << 23).view(torch.float32)
        if use_ue8m0:
            scale = exponent.to(torch.uint8).view(torch.int32)
    else:
        factor = torch.full_like(amax, _MAX) / amax  # a number / tensor would multiply by the rounded reciprocal
    data = (values * factor.unsqueeze(2)).clamp(-_MAX, _MAX).to(torch.float8_e4m3fn)
    return data.flatten(1), scale
