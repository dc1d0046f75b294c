"""Quantisation with torch operations, for any device and block size: the same bits as the kernels give.

On the CPU this is what `MXTensor` runs, because an interpreted kernel is far slower. It works on the bits of
float32, as kernels/device/mxfp8.py does, whose docstring explains the modes.
"""

from __future__ import annotations

import torch

from triton_ep.mx.formats import ElemFormat, ScalingMode

_INF = 0x7F800000
_MANTISSA = 0x007FFFFF
_HALF_OF_SMALLEST_NORMAL = 0x00400000  # bits of 2**-127
_NAN = 0x7FC00000


def block_scales(amax: torch.Tensor, fmt: ElemFormat, mode: ScalingMode) -> torch.Tensor:
    """Scale bytes as int32 of blocks with largest magnitudes `amax`, float32 of any shape."""
    bits = amax.view(torch.int32)
    finite = bits < _INF
    if mode is ScalingMode.RCEIL:
        inverse = torch.tensor(1.0 / fmt.max_pos, dtype=torch.float32, device=amax.device)
        bits = (amax * inverse).view(torch.int32)
        exponent, mantissa = bits >> 23, bits & _MANTISSA
        above = mantissa > torch.where(exponent > 0, 0, _HALF_OF_SMALLEST_NORMAL)
        return torch.where(finite, exponent + above, 255)
    if mode is ScalingMode.EVEN:
        bits = bits.clamp(max=_INF) + (1 << (22 - fmt.mbits))
        finite = bits < _INF
    exponent = bits >> 23
    if mode is ScalingMode.CEIL:
        exponent = exponent + ((bits & _MANTISSA) > 0)
    return torch.where(finite, (exponent - fmt.max_pow2).clamp(min=0), 255)


def scale_values(scale: torch.Tensor) -> torch.Tensor:
    """Float32 values 2**(byte - 127) of scale bytes given as int32; 255 gives NaN."""
    bits = torch.where(scale == 0, _HALF_OF_SMALLEST_NORMAL, scale << 23)
    return torch.where(scale == 255, _NAN, bits).to(torch.int32).view(torch.float32)


def quantize(x: torch.Tensor, fmt: ElemFormat, mode: ScalingMode, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise blocks of consecutive values of the last dimension.

    Arguments:
        x: [..., H] bf16, fp16 or fp32; H a multiple of `block_size`.

    Returns elements, shaped as `x`, and scale bytes, [..., H / block_size] uint8.
    """
    blocks = x.float().unflatten(-1, (-1, block_size)).contiguous()
    # Integers, so that a NaN is the largest magnitude and subnormals stay.
    magnitude = blocks.view(torch.int32) & 0x7FFFFFFF
    scale = block_scales(magnitude.amax(-1).view(torch.float32), fmt, mode)
    inverse = scale_values(torch.where(scale == 255, 255, 254 - scale))
    # torch before 2.13 does not saturate; a NaN passes clamp.
    values = (blocks * inverse.unsqueeze(-1)).clamp(-fmt.max_pos, fmt.max_pos)
    bits = values.to(fmt.dtype).view(torch.uint8)
    bits = torch.where((scale == 255).unsqueeze(-1), fmt.nan, bits).to(torch.uint8)
    return bits.flatten(-2).view(fmt.dtype), scale.to(torch.uint8)


def dequantize(qdata: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values of elements [..., H] and their scale bytes [..., H / block] uint8, rounded once to `dtype`."""
    block_size = qdata.shape[-1] // scale.shape[-1] if scale.shape[-1] else 1
    blocks = qdata.float().unflatten(-1, (scale.shape[-1], block_size))
    return (blocks * scale_values(scale.to(torch.int32)).unsqueeze(-1)).flatten(-2).to(dtype)
