"""Oracle of MXFP8 quantisation: the rules as arithmetic on float64 values.

Scales follow from frexp, elements are rounded on their own grid by hand, so that nothing here depends on how
a version of torch casts to float8, or on bit patterns of float32. float64 holds every value in between exactly.
"""

import itertools

import torch

# elem_dtype -> largest value, its exponent, mantissa bits, exponent of the smallest normal number.
_FORMATS = {torch.float8_e4m3fn: (448.0, 8, 3, -6), torch.float8_e5m2: (57344.0, 15, 2, -14)}
_NAN_BYTE = 255
_NAN_ELEMENT = 0x7F


def _power_of_2(exponent: torch.Tensor) -> torch.Tensor:
    """Float64 powers of int64 exponents, exactly: `ldexp` passes through float32 and the library's `pow`."""
    return ((exponent + 1023) << 52).view(torch.float64)


def _floor_log2(value: torch.Tensor) -> torch.Tensor:
    """Exponents of positive finite float64; what it says of other values is not used."""
    return torch.frexp(value).exponent.long() - 1


def _ceil_log2(value: torch.Tensor) -> torch.Tensor:
    mantissa, exponent = torch.frexp(value)
    return torch.where(mantissa == 0.5, exponent - 1, exponent).long()


def _block_scale(amax: torch.Tensor, elem_dtype: torch.dtype, scaling_mode: str) -> torch.Tensor:
    """Scale bytes, int64, of largest magnitudes given as float64 that are float32 numbers."""
    largest, max_pow2, mbits, _ = _FORMATS[elem_dtype]
    finite = amax.isfinite()
    if scaling_mode == "rceil":
        quotient = amax.float() * torch.tensor(1.0 / largest, dtype=torch.float32)
        exponent = _ceil_log2(quotient.double())
        zero = quotient == 0
    elif scaling_mode == "floor":
        exponent, zero = _floor_log2(amax) - max_pow2, amax == 0
    elif scaling_mode == "ceil":
        exponent, zero = _ceil_log2(amax) - max_pow2, amax == 0
    elif scaling_mode == "even":
        # From half a unit below the next power of two on, amax rounds up to it.
        exponent = _floor_log2(amax)
        mantissa = torch.frexp(amax).mantissa * 2
        exponent = exponent + (mantissa >= 2.0 - 2.0 ** -(mbits + 1))
        finite = finite & (exponent < 128)
        exponent, zero = exponent - max_pow2, amax == 0
    else:
        raise ValueError(f"no such scaling mode: {scaling_mode!r}")
    exponent = torch.where(zero, -127, exponent.clamp(min=-127))
    return torch.where(finite, exponent + 127, _NAN_BYTE)


def _round_to_format(value: torch.Tensor, elem_dtype: torch.dtype) -> torch.Tensor:
    """Nearest element of the format, ties to even, saturating; float64 in and out."""
    largest, _, mbits, smallest = _FORMATS[elem_dtype]
    step = _power_of_2(_floor_log2(value.abs()).clamp(min=smallest) - mbits)
    return (torch.round(value / step) * step).clamp(-largest, largest)


def quantize(
    x: torch.Tensor,
    elem_dtype: torch.dtype = torch.float8_e4m3fn,
    scaling_mode: str = "rceil",
    block_size: int = 32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of `block_size` consecutive values of the last dimension, each with its scale.

    Arguments:
        x: [..., H] bf16, fp16 or fp32, H a multiple of `block_size`.

    Returns elements shaped as `x`, and scale bytes [..., H / block_size] uint8; 255 = NaN, its elements 0x7F.
    """
    blocks = x.double().unflatten(-1, (-1, block_size))
    amax = blocks.abs().amax(-1)  # a NaN wins
    scale = _block_scale(amax, elem_dtype, scaling_mode)
    # 2**(127 - s); the value of a NaN block is replaced below.
    factor = _power_of_2(127 - scale).unsqueeze(-1)
    is_nan = (scale == _NAN_BYTE).unsqueeze(-1)
    values = torch.where(is_nan, 0.0, blocks) * factor
    elements = _round_to_format(values, elem_dtype).float().to(elem_dtype).view(torch.uint8)
    elements = torch.where(is_nan, _NAN_ELEMENT, elements).to(torch.uint8)
    return elements.flatten(-2).view(elem_dtype), scale.to(torch.uint8)


def dequantize(qdata: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values of elements [..., H] and scale bytes [..., H / block] uint8, rounded once to `dtype`."""
    block_size = qdata.shape[-1] // scale.shape[-1]
    blocks = qdata.float().double().unflatten(-1, (-1, block_size))
    factor = torch.where(scale == _NAN_BYTE, torch.nan, _power_of_2(scale.long() - 127))
    # Exact in float64; fp16 is reached through float32, in which at most an overflow happens before it.
    return (blocks * factor.unsqueeze(-1)).flatten(-2).float().to(dtype)


def quantize_columns(
    x: torch.Tensor,
    offsets: torch.Tensor | None = None,
    elem_dtype: torch.dtype = torch.float8_e4m3fn,
    scaling_mode: str = "rceil",
    block_size: int = 32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of `block_size` rows of each column, anew in each group.

    Arguments:
        x: [R, H] bf16, fp16 or fp32.
        offsets: [groups + 1] int32, first row of each group, then the end of the last; None: one group.

    Returns elements [R, H], zero behind the last group, and scale bytes [S, H] uint8,
    S = (R + (block_size - 1) * groups) // block_size; one scale row per block, group after group, then zeros.
    """
    bounds = [0, x.shape[0]] if offsets is None else offsets.tolist()
    groups = len(bounds) - 1
    elements = torch.zeros_like(x, dtype=torch.uint8)
    scale = torch.zeros((x.shape[0] + (block_size - 1) * groups) // block_size, x.shape[1], dtype=torch.uint8)
    scale_row = 0
    for first, end in itertools.pairwise(bounds):
        for row in range(first, end, block_size):
            part = x[row : min(row + block_size, end)]
            # A short block is one that zeros fill up.
            full = torch.zeros(block_size, x.shape[1], dtype=x.dtype)
            full[: len(part)] = part
            codes, scales = quantize(full.T, elem_dtype, scaling_mode, block_size)
            elements[row : row + len(part)] = codes.view(torch.uint8).T[: len(part)]
            scale[scale_row] = scales.squeeze(-1)
            scale_row += 1
    return elements.view(elem_dtype), scale
