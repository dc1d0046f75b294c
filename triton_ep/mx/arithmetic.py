"""Quantisation with torch operations, for any device and block size; bit-identical to the kernels.

`MXTensor` runs this on the CPU, where an interpreted kernel is far slower. It works on the bits of float32, as
kernels/device/mxfp8.py does, whose docstring explains the modes.
"""

from __future__ import annotations

import torch

from triton_ep.mx.formats import ElemFormat, ScalingMode, elem_format

_INF = 0x7F800000
_MANTISSA = 0x007FFFFF
_HALF_OF_SMALLEST_NORMAL = 0x00400000  # bits of 2**-127
_NAN = 0x7FC00000


def block_scales(amax: torch.Tensor, fmt: ElemFormat, mode: ScalingMode) -> torch.Tensor:
    """Scale bytes, as int32, of blocks with largest magnitudes `amax`, float32 of any shape."""
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
    """Float32 values 2**(byte - 127) of scale bytes given as int32; 255 becomes NaN."""
    bits = torch.where(scale == 0, _HALF_OF_SMALLEST_NORMAL, scale << 23)
    return torch.where(scale == 255, _NAN, bits).to(torch.int32).view(torch.float32)


def encode(values: torch.Tensor, fmt: ElemFormat) -> torch.Tensor:
    """Encode float32 values as uint8 codes, one per byte: nearest element, ties to even, saturating.

    fp6 and fp4 have no NaN: a NaN becomes an arbitrary code.
    """
    if fmt.bits == 8:
        # torch before 2.13 does not saturate. clamp passes NaN through.
        return values.clamp(-fmt.max_pos, fmt.max_pos).to(fmt.storage).view(torch.uint8)
    magnitude = values.abs().clamp(max=fmt.max_pos)
    bits, shift = magnitude.view(torch.int32), 23 - fmt.mbits
    # Round away the mantissa's low bits; a carry correctly runs into the exponent.
    rounded = bits + ((1 << (shift - 1)) - 1) + ((bits >> shift) & 1)
    normal = (rounded >> shift) - ((126 + fmt.min_exponent) << fmt.mbits)
    # Subnormals have a fixed step, which is the float32 step from 2**unit on: adding 2**unit rounds to it.
    unit = fmt.min_exponent - fmt.mbits + 23
    subnormal = (magnitude + 2.0**unit).view(torch.int32) - ((127 + unit) << 23)
    code = torch.where(magnitude >= 2.0**fmt.min_exponent, normal, subnormal)
    sign = (values.view(torch.int32) >> 31) & (1 << (fmt.bits - 1))
    return (code | sign).to(torch.uint8)


def decode(codes: torch.Tensor, fmt: ElemFormat) -> torch.Tensor:
    """Decode uint8 codes, one per byte, to float32 values; bits outside the element are ignored."""
    if fmt.bits == 8:
        return codes.view(fmt.storage).float()
    wide = codes.to(torch.int32)
    magnitude = wide & ((1 << (fmt.bits - 1)) - 1)
    normal = (magnitude + ((126 + fmt.min_exponent) << fmt.mbits)) << (23 - fmt.mbits)
    subnormal = magnitude.float() * 2.0 ** (fmt.min_exponent - fmt.mbits)
    value = torch.where(magnitude >> fmt.mbits > 0, normal.view(torch.float32), subnormal)
    return torch.where((wide >> (fmt.bits - 1)) & 1 > 0, -value, value)


def pack(codes: torch.Tensor, fmt: ElemFormat) -> torch.Tensor:
    """Pack codes [..., n] uint8 to stored elements [..., n / per_byte] of the format's storage dtype."""
    if fmt.per_byte == 2:
        return codes[..., ::2] | codes[..., 1::2] << 4
    return codes.view(fmt.storage)


def unpack(qdata: torch.Tensor, fmt: ElemFormat) -> torch.Tensor:
    """Unpack stored elements [..., n / per_byte] to codes [..., n] uint8."""
    codes = qdata.view(torch.uint8)
    if fmt.per_byte == 2:
        return torch.stack((codes & 0xF, codes >> 4), -1).flatten(-2)
    return codes


def quantize(x: torch.Tensor, fmt: ElemFormat, mode: ScalingMode, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise blocks of consecutive values of the last dimension.

    Arguments:
        x: [..., H] bf16, fp16 or fp32; H a multiple of `block_size`.

    Returns elements as the format stores them, [..., H / per_byte], and scale bytes, [..., H / block_size] uint8.
    """
    blocks = x.float().unflatten(-1, (-1, block_size)).contiguous()
    # Compare magnitudes as integers: a NaN is then the largest, and subnormals are kept.
    magnitude = blocks.view(torch.int32) & 0x7FFFFFFF
    scale = block_scales(magnitude.amax(-1).view(torch.float32), fmt, mode)
    inverse = scale_values(torch.where(scale == 255, 255, 254 - scale))
    codes = encode(blocks * inverse.unsqueeze(-1), fmt)
    codes = torch.where((scale == 255).unsqueeze(-1), fmt.nan, codes).to(torch.uint8)
    return pack(codes.flatten(-2), fmt), scale.to(torch.uint8)


def dequantize(
    qdata: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, fmt: ElemFormat | None = None
) -> torch.Tensor:
    """Values of stored elements and their scale bytes [..., H / block] uint8, rounded once to `dtype`.

    Without `fmt`, the dtype of `qdata` determines the format.
    """
    fmt = elem_format(qdata.dtype) if fmt is None else fmt
    values = decode(unpack(qdata, fmt), fmt)
    block_size = values.shape[-1] // scale.shape[-1] if scale.shape[-1] else 1
    blocks = values.unflatten(-1, (scale.shape[-1], block_size))
    return (blocks * scale_values(scale.to(torch.int32)).unsqueeze(-1)).flatten(-2).to(dtype)
