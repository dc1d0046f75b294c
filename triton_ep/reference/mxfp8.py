"""Oracle of quantisation to MX formats: the rules as arithmetic on float64 values.

Scales come from frexp, and elements are rounded explicitly to their grid. So nothing here depends on how a version of
torch casts to float8, or on bit patterns of float32. float64 holds every intermediate value exactly.
"""

import itertools

import torch

ElemDtype = torch.dtype | str

# elem_dtype -> largest value, its exponent, mantissa bits, exponent of the smallest normal number.
_FORMATS: dict[ElemDtype, tuple[float, int, int, int]] = {
    torch.float8_e4m3fn: (448.0, 8, 3, -6),
    torch.float8_e5m2: (57344.0, 15, 2, -14),
    "fp6_e2m3": (7.5, 2, 3, 0),
    "fp6_e3m2": (28.0, 4, 2, -2),
    "fp4_e2m1": (6.0, 2, 1, 0),
    torch.float4_e2m1fn_x2: (6.0, 2, 1, 0),
}
_NAN_BYTE = 255
_NAN_ELEMENT = {"fp6_e2m3": 0x1F, "fp6_e3m2": 0x1F, "fp4_e2m1": 0x7, torch.float4_e2m1fn_x2: 0x7}  # else 0x7F


def positive_values(elem_dtype: ElemDtype) -> list[float]:
    """Values of the codes without sign, from 0 up: element k has bits k. Only for formats without NaN."""
    largest, _, mbits, smallest = _FORMATS[elem_dtype]
    values, exponent = [step * 2.0 ** (smallest - mbits) for step in range(2**mbits)], smallest
    while values[-1] < largest:
        values += [(1 + step / 2**mbits) * 2.0**exponent for step in range(2**mbits)]
        exponent += 1
    return values


def _codes(values: torch.Tensor, elem_dtype: ElemDtype) -> torch.Tensor:
    """Bits, uint8, of float64 values that the format represents exactly."""
    if isinstance(elem_dtype, torch.dtype) and elem_dtype != torch.float4_e2m1fn_x2:
        return values.float().to(elem_dtype).view(torch.uint8)
    table = torch.tensor(positive_values(elem_dtype), dtype=torch.float64, device=values.device)
    return (torch.searchsorted(table, values.abs()) + len(table) * values.signbit()).to(torch.uint8)


def _stored(codes: torch.Tensor, elem_dtype: ElemDtype) -> torch.Tensor:
    if elem_dtype == torch.float4_e2m1fn_x2:
        return codes[..., ::2] + 16 * codes[..., 1::2]
    return codes.view(elem_dtype) if isinstance(elem_dtype, torch.dtype) else codes


def _power_of_2(exponent: torch.Tensor) -> torch.Tensor:
    """Exact float64 powers of int64 exponents; `ldexp` would go through float32 and the library's `pow`."""
    return ((exponent + 1023) << 52).view(torch.float64)


def _floor_log2(value: torch.Tensor) -> torch.Tensor:
    """Exponents of positive finite float64; results for other values are not used."""
    return torch.frexp(value).exponent.long() - 1


def _ceil_log2(value: torch.Tensor) -> torch.Tensor:
    mantissa, exponent = torch.frexp(value)
    return torch.where(mantissa == 0.5, exponent - 1, exponent).long()


def _block_scale(amax: torch.Tensor, elem_dtype: ElemDtype, scaling_mode: str) -> torch.Tensor:
    """Scale bytes, int64, of largest magnitudes: float32 numbers given as float64."""
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
        # An amax at most half a unit below the next power of two rounds up to it.
        exponent = _floor_log2(amax)
        mantissa = torch.frexp(amax).mantissa * 2
        exponent = exponent + (mantissa >= 2.0 - 2.0 ** -(mbits + 1))
        finite = finite & (exponent < 128)
        exponent, zero = exponent - max_pow2, amax == 0
    else:
        raise ValueError(f"no such scaling mode: {scaling_mode!r}")
    exponent = torch.where(zero, -127, exponent.clamp(min=-127))
    return torch.where(finite, exponent + 127, _NAN_BYTE)


def _round_to_format(value: torch.Tensor, elem_dtype: ElemDtype) -> torch.Tensor:
    """Nearest element of the format, ties to even, saturating; float64 in and out."""
    largest, _, mbits, smallest = _FORMATS[elem_dtype]
    step = _power_of_2(_floor_log2(value.abs()).clamp(min=smallest) - mbits)
    return (torch.round(value / step) * step).clamp(-largest, largest)


def quantize(
    x: torch.Tensor,
    elem_dtype: ElemDtype = torch.float8_e4m3fn,
    scaling_mode: str = "rceil",
    block_size: int = 32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise blocks of `block_size` consecutive values of the last dimension, each with its scale.

    Arguments:
        x: [..., H] bf16, fp16 or fp32, H a multiple of `block_size`.
        elem_dtype: float8, or uint8 codes: "fp6_e2m3", "fp6_e3m2", "fp4_e2m1", torch.float4_e2m1fn_x2 (two per byte).

    Returns elements shaped like `x` ([..., H / 2] if packed), and scale bytes [..., H / block_size] uint8. A NaN block
    has scale 255 and elements 0x7F, or the largest element in formats without NaN.
    """
    blocks = x.double().unflatten(-1, (-1, block_size))
    amax = blocks.abs().amax(-1)  # propagates NaN
    scale = _block_scale(amax, elem_dtype, scaling_mode)
    # 2**(127 - s); the values of a NaN block are replaced below.
    factor = _power_of_2(127 - scale).unsqueeze(-1)
    is_nan = (scale == _NAN_BYTE).unsqueeze(-1)
    values = torch.where(is_nan, 0.0, blocks) * factor
    codes = _codes(_round_to_format(values, elem_dtype), elem_dtype)
    codes = torch.where(is_nan, _NAN_ELEMENT.get(elem_dtype, 0x7F), codes).to(torch.uint8)
    return _stored(codes.flatten(-2), elem_dtype), scale.to(torch.uint8)


def _element_values(qdata: torch.Tensor, elem_dtype: ElemDtype) -> torch.Tensor:
    """Float64 values of stored elements."""
    if elem_dtype == torch.float4_e2m1fn_x2:
        qdata = torch.stack((qdata % 16, qdata // 16), -1).flatten(-2)
    elif isinstance(elem_dtype, torch.dtype):
        return qdata.float().double()
    positive = torch.tensor(positive_values(elem_dtype), dtype=torch.float64, device=qdata.device)
    return torch.cat([positive, -positive])[qdata.long()]


def dequantize(
    qdata: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, elem_dtype: ElemDtype | None = None
) -> torch.Tensor:
    """Values [..., H] of stored elements and scale bytes [..., H / block] uint8, rounded once to `dtype`.

    Without `elem_dtype`, the dtype of `qdata` determines the format.
    """
    values = _element_values(qdata, qdata.dtype if elem_dtype is None else elem_dtype)
    block_size = values.shape[-1] // scale.shape[-1]
    blocks = values.unflatten(-1, (-1, block_size))
    factor = torch.where(scale == _NAN_BYTE, torch.nan, _power_of_2(scale.long() - 127))
    # Exact in float64. fp16 goes through float32, where nothing but an overflow can happen first.
    return (blocks * factor.unsqueeze(-1)).flatten(-2).float().to(dtype)


def quantize_columns(
    x: torch.Tensor,
    offsets: torch.Tensor | None = None,
    elem_dtype: torch.dtype = torch.float8_e4m3fn,
    scaling_mode: str = "rceil",
    block_size: int = 32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise blocks of `block_size` rows of each column; blocks start again in each group.

    Arguments:
        x: [R, H] bf16, fp16 or fp32.
        offsets: [groups + 1] int32, first row of each group, then the end of the last; None: one group.

    Returns elements [R, H], zero past the last group, and scale bytes [S, H] uint8,
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
            # Zeros fill up a short block.
            full = torch.zeros(block_size, x.shape[1], dtype=x.dtype)
            full[: len(part)] = part
            codes, scales = quantize(full.T, elem_dtype, scaling_mode, block_size)
            elements[row : row + len(part)] = codes.view(torch.uint8).T[: len(part)]
            scale[scale_row] = scales.squeeze(-1)
            scale_row += 1
    return elements.view(elem_dtype), scale
