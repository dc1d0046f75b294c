"""TransformerEngine's MXFP8 rule, written independently of triton_ep in float64.

t = amax * fl32(1 / largest); the scale byte is the exponent of t, rounded up; 0 for t = 0, 255 for NaN, 254 for
infinity. Elements are x * 2^(127 - byte), rounded to nearest even and saturated.
"""

from __future__ import annotations

import math

import torch

from triton_ep.runtime.launch import INTERPRETING

DEVICE = "cpu" if INTERPRETING else "cuda"
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_SMALLEST_EXPONENT = {torch.float8_e4m3fn: -6, torch.float8_e5m2: -14}
_MANTISSA = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}


def scale_bytes(amax: torch.Tensor, elem_dtype: torch.dtype) -> torch.Tensor:
    """Scale bytes, as int64, of blocks with these largest magnitudes."""
    factor = torch.tensor(1.0 / LARGEST[elem_dtype], dtype=torch.float32)
    t = (amax.float() * factor).double()
    mantissa, exponent = torch.frexp(t)
    up = torch.where(mantissa == 0.5, exponent - 1, exponent).long()
    byte = torch.where(t == 0, 0, (up + 127).clamp(0, 254))
    return torch.where(amax.isnan(), 255, torch.where(amax.isinf(), 254, byte))


def elements(values: torch.Tensor, elem_dtype: torch.dtype) -> torch.Tensor:
    """The values of the format nearest to float64 `values`, ties to even, saturating; zeros keep their sign."""
    largest = LARGEST[elem_dtype]
    exponent = (torch.frexp(values)[1] - 1).clamp(min=_SMALLEST_EXPONENT[elem_dtype])
    step = 2.0 ** (exponent - _MANTISSA[elem_dtype]).double()
    rounded = torch.where(values.isinf(), largest, (values / step).round().abs() * step)  # ties to even
    return torch.copysign(rounded.clamp(max=largest), values)


def quantize(x: torch.Tensor, elem_dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of elements [M, N] and of scales [M, N / 32] of x [M, N], on the CPU."""
    blocks = x.cpu().double().reshape(x.shape[0], -1, 32)
    byte = scale_bytes(blocks.abs().amax(2), elem_dtype)  # NaN if one of the values is
    exact = elements(torch.ldexp(blocks, 127 - byte.unsqueeze(2)), elem_dtype)
    data = exact.to(elem_dtype).view(torch.uint8)
    data = torch.where(byte.unsqueeze(2) == 255, 0x7F, data)
    return data.reshape(x.shape), byte.to(torch.uint8)


def dequantize(data: torch.Tensor, scale: torch.Tensor, elem_dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """float64 [M, N] of bytes [M, N] and [M, N / 32]."""
    factor = torch.where(scale == 255, math.nan, 2.0 ** (scale.double() - 127))
    return data.view(elem_dtype).double() * factor.repeat_interleave(32, -1)


def along_rows(x: torch.Tensor, elem_dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """float64 values on the CPU of x after quantisation along the last dimension."""
    return dequantize(*quantize(x, elem_dtype), elem_dtype)


def along_columns(x: torch.Tensor, elem_dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """float64 values on the CPU of x [M, N] along the first dimension; a short last block is filled with zeros."""
    filled = torch.nn.functional.pad(x.cpu(), (0, 0, 0, -x.shape[0] % 32))
    return along_rows(filled.t(), elem_dtype).t()[: x.shape[0]]


def swizzled_index(i: torch.Tensor, j: torch.Tensor, columns: int) -> torch.Tensor:
    """Indices in the GEMM order of bytes (i, j) of padded scales with that many columns."""
    return ((i // 128) * (columns // 4) + j // 4) * 512 + (i % 32) * 16 + ((i % 128) // 32) * 4 + j % 4


def snr(exact: torch.Tensor, seen: torch.Tensor) -> float:
    """Signal to noise in decibels."""
    exact = exact.detach().cpu().double()
    noise = (seen.detach().cpu().double() - exact).square().sum()
    return float(10 * torch.log10(exact.square().sum() / noise))
