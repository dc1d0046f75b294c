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


def scale_byte(amax: float, elem_dtype: torch.dtype) -> int:
    """Scale byte of a block with this largest magnitude."""
    if math.isnan(amax):
        return 255
    if math.isinf(amax):
        return 254
    factor = torch.tensor(1.0 / LARGEST[elem_dtype], dtype=torch.float32)
    t = float(torch.tensor(amax, dtype=torch.float32) * factor)
    if t == 0:
        return 0
    mantissa, exponent = math.frexp(t)
    up = exponent - 1 if mantissa == 0.5 else exponent
    return min(max(up + 127, 0), 254)


def element(value: float, elem_dtype: torch.dtype) -> float:
    """The value of the format nearest to `value`, ties to even, saturating."""
    largest = LARGEST[elem_dtype]
    if math.isinf(value) or value == 0:
        return math.copysign(largest, value) if value else value
    exponent = max(math.frexp(abs(value))[1] - 1, _SMALLEST_EXPONENT[elem_dtype])
    step = 2.0 ** (exponent - _MANTISSA[elem_dtype])
    rounded = round(value / step) * step  # Python rounds ties to even
    return math.copysign(min(abs(rounded), largest), value)


def quantize(x: torch.Tensor, elem_dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of elements [M, N] and of scales [M, N / 32] of x [M, N], on the CPU."""
    rows, columns = x.shape
    data = torch.empty(rows, columns, dtype=torch.uint8)
    scale = torch.empty(rows, columns // 32, dtype=torch.uint8)
    for row, values in enumerate(x.cpu().double().tolist()):
        for block in range(columns // 32):
            part = values[32 * block : 32 * block + 32]
            amax = math.nan if any(map(math.isnan, part)) else max(map(abs, part))
            byte = scale_byte(amax, elem_dtype)
            scale[row, block] = byte
            if byte == 255:
                data[row, 32 * block : 32 * block + 32] = 0x7F
                continue
            exact = [element(math.ldexp(value, 127 - byte), elem_dtype) for value in part]
            data[row, 32 * block : 32 * block + 32] = torch.tensor(exact).to(elem_dtype).view(torch.uint8)
    return data, scale


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


def swizzled_index(i: int, j: int, columns: int) -> int:
    """Index in the GEMM order of byte (i, j) of padded scales with that many columns."""
    return ((i // 128) * (columns // 4) + j // 4) * 512 + (i % 32) * 16 + ((i % 128) // 32) * 4 + j % 4


def snr(exact: torch.Tensor, seen: torch.Tensor) -> float:
    """Signal to noise in decibels."""
    exact = exact.detach().cpu().double()
    noise = (seen.detach().cpu().double() - exact).square().sum()
    return float(10 * torch.log10(exact.square().sum() / noise))
