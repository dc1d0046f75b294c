"""Arithmetic of every MX element format on tiles: float32 values to codes and back, with one scale per block.

The 8-bit formats use mxfp8.py and give the same bytes. The narrow formats have no dtype in Triton, so a code is an
integer: sign, exponent and mantissa bits, with the mantissa in the lowest bits.

    format  bits  largest  smallest normal  steps below it
    e2m3    6     7.5      1                1/8
    e3m2    6     28       1/4              1/16
    e2m1    4     6        1                1/2

Rounding is to nearest even and saturates; subnormal values and the sign of zero are kept. The narrow formats have no
NaN: in a block whose scale is NaN, all elements are the largest one, 0x1F or 0x7. The float32 and integer arithmetic
is exact.

Source: OCP Microscaling Formats (MX) v1.0, section 5.3.
"""

import triton
import triton.language as tl

from .mxfp8 import FORMAT_E2M1, FORMAT_E2M3, FORMAT_E3M2, FORMAT_E5M2, block_amax, block_scale, scale_value
from .mxfp8 import scaled_elements as fp8_elements

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def narrow_codes(value, FORMAT: tl.constexpr):
    """Round float32 values to fp6 or fp4; int32 codes. A NaN gives an arbitrary code."""
    MBITS: tl.constexpr = 3 if FORMAT == FORMAT_E2M3 else (2 if FORMAT == FORMAT_E3M2 else 1)
    MIN_EXPONENT: tl.constexpr = -2 if FORMAT == FORMAT_E3M2 else 0
    LARGEST: tl.constexpr = 7.5 if FORMAT == FORMAT_E2M3 else (28.0 if FORMAT == FORMAT_E3M2 else 6.0)
    SIGN: tl.constexpr = 0x8 if FORMAT == FORMAT_E2M1 else 0x20
    SHIFT: tl.constexpr = 23 - MBITS
    # Below the normal range the step is fixed. It is the step of float32 numbers from 2**UNIT on, so adding 2**UNIT
    # rounds to it. Fusing this sum with the product that gave `value` changes nothing: the product is inexact only
    # below 2**-126.
    UNIT: tl.constexpr = MIN_EXPONENT - MBITS + 23
    raw = value.to(tl.int32, bitcast=True)
    magnitude = (raw & _MAGNITUDE).to(tl.float32, bitcast=True)
    magnitude = tl.where(magnitude > LARGEST, LARGEST, magnitude)
    bits = magnitude.to(tl.int32, bitcast=True)
    # Round the low bits away; a carry correctly runs on into the exponent.
    rounded = bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)
    normal = (rounded >> SHIFT) - ((126 + MIN_EXPONENT) << MBITS)
    subnormal = (magnitude + (1 << UNIT)).to(tl.int32, bitcast=True) - ((127 + UNIT) << 23)
    code = tl.where(bits >= (127 + MIN_EXPONENT) << 23, normal, subnormal)
    return tl.where(raw < 0, code | SIGN, code)


@triton.jit
def narrow_values(code, FORMAT: tl.constexpr):
    """Float32 values of int32 codes of fp6 or fp4; higher bits are ignored."""
    MBITS: tl.constexpr = 3 if FORMAT == FORMAT_E2M3 else (2 if FORMAT == FORMAT_E3M2 else 1)
    MIN_EXPONENT: tl.constexpr = -2 if FORMAT == FORMAT_E3M2 else 0
    SIGN: tl.constexpr = 0x8 if FORMAT == FORMAT_E2M1 else 0x20
    STEPS_PER_UNIT: tl.constexpr = 1 << (MBITS - MIN_EXPONENT)
    magnitude = code & (SIGN - 1)
    normal = (magnitude + ((126 + MIN_EXPONENT) << MBITS)) << (23 - MBITS)
    subnormal = (magnitude.to(tl.float32) * (1.0 / STEPS_PER_UNIT)).to(tl.int32, bitcast=True)
    bits = tl.where(magnitude >= 1 << MBITS, normal, subnormal)
    return tl.where((code & SIGN) != 0, bits | -0x80000000, bits).to(tl.float32, bitcast=True)


@triton.jit
def quantize_codes(x, MODE: tl.constexpr, FORMAT: tl.constexpr, AXIS: tl.constexpr):
    """Quantise a tile of float32 whose dimension AXIS is one block.

    Returns codes, uint8 with the shape of `x`, and the scale bytes, uint8 without that dimension.
    """
    scale = block_scale(block_amax(x, AXIS), MODE, FORMAT)
    wide = tl.expand_dims(scale, AXIS)
    if FORMAT <= FORMAT_E5M2:
        codes = fp8_elements(x, wide, MODE, FORMAT).to(tl.uint8, bitcast=True)
    else:
        LARGEST_CODE: tl.constexpr = 0x7 if FORMAT == FORMAT_E2M1 else 0x1F
        # 1 / 2**(s - 127) is the value of byte 254 - s, exactly.
        codes = narrow_codes(x * scale_value(tl.where(wide == 255, 255, 254 - wide)), FORMAT)
        codes = tl.where(wide == 255, LARGEST_CODE, codes).to(tl.uint8)
    return codes, scale.to(tl.uint8)


@triton.jit
def dequantize_codes(codes, scale, FORMAT: tl.constexpr, AXIS: tl.constexpr):
    """Float32 values of uint8 codes; `scale` holds uint8 scale bytes, without dimension AXIS."""
    if FORMAT <= FORMAT_E5M2:
        values = codes.to(tl.float8e5 if FORMAT == FORMAT_E5M2 else tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        values = narrow_values(codes.to(tl.int32), FORMAT)
    return values * scale_value(tl.expand_dims(scale.to(tl.int32), AXIS))
