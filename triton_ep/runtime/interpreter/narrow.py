"""Conversions of bfloat16, float8 e4m3fn and float8 e5m2 as numpy bit patterns, with the rounding of NVIDIA GPUs.

They match PTX `cvt.rn.bf16.f32` and `cvt.rn.satfinite.{e4m3x2,e5m2x2}.f32`, which Triton emits for `.to()`: round to
nearest even; float8 saturates at its largest finite value, infinities included; a NaN becomes the format's one
canonical NaN. Needs numpy only; independent of Triton.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_F32_MANTISSA = 23
_F32_BIAS = 127
_F32_INF = np.uint32(0x7F800000)


@dataclass(frozen=True)
class NarrowFloat:
    """A float format of 8 or 16 bits, stored as unsigned integers.

    Attributes:
        name: Triton's name of the dtype.
        bits, mantissa, bias: the layout; one sign bit.
        largest: bit pattern of the largest finite number.
        nan: canonical NaN.
        saturates: overflow and infinity become `largest`.
    """

    name: str
    bits: int
    mantissa: int
    bias: int
    largest: int
    nan: int
    saturates: bool

    @property
    def storage(self) -> type[np.unsignedinteger[Any]]:
        """Unsigned integer type of the stored bits."""
        return np.uint8 if self.bits == 8 else np.uint16

    @cached_property
    def values(self) -> Array:
        """[2**bits] float32: value of every bit pattern."""
        pattern = np.arange(1 << self.bits, dtype=np.int64)
        magnitude = pattern & ((1 << (self.bits - 1)) - 1)
        exponent, fraction = magnitude >> self.mantissa, magnitude & ((1 << self.mantissa) - 1)
        significand = np.where(exponent > 0, fraction + (1 << self.mantissa), fraction)
        scale = np.maximum(exponent, 1) - self.bias - self.mantissa
        with np.errstate(over="ignore"):  # exponents of Inf and NaN, replaced below
            value = np.ldexp(significand.astype(np.float64), scale).astype(np.float32)
        if self.name == "fp8e4nv":  # no infinity, one NaN
            value[magnitude == self.nan] = np.nan
        else:
            top = exponent == (1 << (self.bits - 1 - self.mantissa)) - 1
            value[top] = np.where(fraction[top] == 0, np.inf, np.nan)
        return np.where(pattern >> (self.bits - 1) == 1, -value, value)

    def decode(self, stored: Array) -> Array:
        """Bit patterns to float32, exactly."""
        if self.name == "bf16":
            return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return self.values[stored]

    def encode(self, values: Array, truncate: bool = False) -> Array:
        """Numbers of any numpy dtype to bit patterns, rounded once to nearest even; `truncate`: towards zero."""
        wide = np.atleast_1d(_to_float32(values)).view(np.uint32)
        sign = (wide >> np.uint32(31)) << np.uint32(self.bits - 1)
        magnitude = wide & np.uint32(0x7FFFFFFF)
        is_nan = magnitude > _F32_INF
        result = self._round(magnitude, truncate)
        if self.saturates:
            result = np.minimum(result, np.uint32(self.largest))
        result = np.where(is_nan, np.uint32(self.nan), result | sign)
        return result.astype(self.storage).reshape(np.shape(values))

    def _round(self, magnitude: Array, truncate: bool) -> Array:
        """Bits of non-negative float32 to this format, overflow not yet handled."""
        dropped = _F32_MANTISSA - self.mantissa
        # NaN would wrap around below; the caller replaces it.
        magnitude = np.minimum(magnitude, _F32_INF)
        odd = (magnitude >> np.uint32(dropped)) & np.uint32(1)
        bias = np.uint32(0) if truncate else np.uint32((1 << (dropped - 1)) - 1) + odd
        normal = (magnitude + bias) >> np.uint32(dropped)
        if self.bias == _F32_BIAS:
            return normal
        rebase = (_F32_BIAS - self.bias) << self.mantissa
        # Below the smallest normal number, results are multiples of the smallest subnormal one.
        smallest_normal = np.float32(2.0 ** (1 - self.bias))
        value = magnitude.view(np.float32)
        steps = np.minimum(value, smallest_normal) * np.float32(2.0 ** (self.bias - 1 + self.mantissa))
        subnormal = (np.trunc(steps) if truncate else np.rint(steps)).astype(np.uint32)
        return np.where(value < smallest_normal, subnormal, normal - np.uint32(rebase))


BF16 = NarrowFloat("bf16", 16, mantissa=7, bias=127, largest=0x7F7F, nan=0x7FFF, saturates=False)
E4M3 = NarrowFloat("fp8e4nv", 8, mantissa=3, bias=7, largest=0x7E, nan=0x7F, saturates=True)
E5M2 = NarrowFloat("fp8e5", 8, mantissa=2, bias=15, largest=0x7B, nan=0x7F, saturates=True)
FORMATS = {fmt.name: fmt for fmt in (BF16, E4M3, E5M2)}


def _to_float32(values: Array) -> Array:
    """Float32 values that round to any narrower format as `values` itself would.

    Wider numbers are rounded to odd: an inexact result has its lowest bit set, so that the second rounding cannot
    mistake it for a tie.
    """
    if values.dtype in (np.float32, np.float16, np.bool_):
        return np.ascontiguousarray(values, dtype=np.float32)
    exact = values.astype(np.float64)
    with np.errstate(over="ignore"):
        near = np.atleast_1d(exact.astype(np.float32))
    exact = np.atleast_1d(exact)
    bits = near.view(np.uint32).copy()
    inexact = (near.astype(np.float64) != exact) & ~np.isnan(exact)
    too_large = inexact & (np.abs(near.astype(np.float64)) > np.abs(exact))
    bits[too_large] -= np.uint32(1)
    bits[inexact] |= np.uint32(1)
    return bits.view(np.float32).reshape(values.shape)


_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=np.float32)


def decode_e2m1(packed: Array, axis: int) -> Array:
    """Two fp4 values per byte, low nibble first along `axis`, to float32; the axis doubles."""
    last = np.moveaxis(packed, axis, -1)
    flat = np.stack([last & 0xF, last >> 4], axis=-1).reshape(*last.shape[:-1], -1)
    values = np.where(flat & 8, -_E2M1[flat & 7], _E2M1[flat & 7])
    return np.moveaxis(values, -1, axis)


def decode_e8m0(stored: Array) -> Array:
    """Powers of two, 2**(byte - 127), to float32; 255 is NaN."""
    exponent = stored.view(np.uint8).astype(np.int32)
    with np.errstate(over="ignore"):
        value = np.ldexp(np.float32(1.0), exponent - 127)
    return np.where(exponent == 255, np.float32(np.nan), value)
