"""MXFP8 arithmetic on tiles: one power-of-two scale (e8m0, a byte) per 32 values, elements e4m3 or e5m2.

The scale byte s stands for 2**(s - 127); 255 is NaN. Elements are x * 2**(127 - s), rounded to nearest even.
A block that holds a NaN or an infinity has scale 255 and elements 0x7F. With RCEIL_SATFINITE this holds for NaN only;
infinities get scale 254 and the largest element. The float32 and integer arithmetic is exact and keeps subnormals, so
it gives the same bits on every machine (Triton emits no .ftz).

The mode says how a block's largest magnitude `amax` gives its scale. m is the largest element (448 or 57344) and p its
exponent (8 or 15); every scale is at least byte 0. The formats of mx_formats.py use the same modes:

    RCEIL  2**ceil(log2(amax / m)), the quotient rounded to float32: nothing saturates
    FLOOR  2**(floor(log2(amax)) - p): the largest values saturate
    CEIL   2**(ceil(log2(amax)) - p)
    EVEN   as FLOOR, of amax rounded to the mantissa of the elements
    RCEIL_SATFINITE  as RCEIL (fp8 only)

Source: OCP Microscaling Formats (MX) v1.0, section 6.3, for FLOOR; the other modes as torchao names them, the last one
as cvt.rp.satfinite.ue8m0x2.f32 of PTX, which TransformerEngine uses on sm_100.
"""

import triton
import triton.language as tl

from . import codes, mx_codes

MODE_RCEIL = tl.constexpr(codes.MODE_RCEIL)
MODE_FLOOR = tl.constexpr(codes.MODE_FLOOR)
MODE_CEIL = tl.constexpr(codes.MODE_CEIL)
MODE_EVEN = tl.constexpr(codes.MODE_EVEN)
MODE_RCEIL_SATFINITE = tl.constexpr(codes.MODE_RCEIL_SATFINITE)

FORMAT_E4M3 = tl.constexpr(mx_codes.FORMAT_E4M3)
FORMAT_E5M2 = tl.constexpr(mx_codes.FORMAT_E5M2)
FORMAT_E2M3 = tl.constexpr(mx_codes.FORMAT_E2M3)
FORMAT_E3M2 = tl.constexpr(mx_codes.FORMAT_E3M2)
FORMAT_E2M1 = tl.constexpr(mx_codes.FORMAT_E2M1)

BLOCK = tl.constexpr(32)
"""Values that share a scale."""

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_MANTISSA = tl.constexpr(0x007FFFFF)
_INF = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)
_HALF_OF_SMALLEST_NORMAL = tl.constexpr(0x00400000)  # 2**-127


@triton.jit
def block_amax(x, AXIS: tl.constexpr):
    """Largest magnitude of float32 values along an axis; NaN if one of them is NaN."""
    # Compare bit patterns: as an integer a NaN is above infinity, whereas a float maximum would drop it.
    magnitude = x.to(tl.int32, bitcast=True) & _MAGNITUDE
    return tl.max(magnitude, axis=AXIS).to(tl.float32, bitcast=True)


@triton.jit
def block_scale(amax, MODE: tl.constexpr, FORMAT: tl.constexpr):
    """Scale bytes, int32 0..255, of blocks whose largest magnitudes are `amax` (float32, not negative)."""
    E3M2: tl.constexpr = FORMAT == FORMAT_E3M2
    MAX_POW2: tl.constexpr = 8 if FORMAT == FORMAT_E4M3 else (15 if FORMAT == FORMAT_E5M2 else (4 if E3M2 else 2))
    MBITS: tl.constexpr = 1 if FORMAT == FORMAT_E2M1 else (2 if FORMAT == FORMAT_E5M2 else (2 if E3M2 else 3))
    FP8_INVERSE: tl.constexpr = 1 / 57344 if FORMAT == FORMAT_E5M2 else 1 / 448
    NARROW_INVERSE: tl.constexpr = 1 / 7.5 if FORMAT == FORMAT_E2M3 else (1 / 28 if E3M2 else 1 / 6)
    INVERSE: tl.constexpr = FP8_INVERSE if FORMAT <= FORMAT_E5M2 else NARROW_INVERSE
    bits = amax.to(tl.int32, bitcast=True)
    is_finite = bits < _INF
    if MODE == MODE_RCEIL or MODE == MODE_RCEIL_SATFINITE:
        # One rounding, as the mode requires; the product of a subnormal amax rounds to byte 0 or 1 by itself.
        bits = (amax * INVERSE).to(tl.int32, bitcast=True)
        exponent = bits >> 23
        mantissa = bits & _MANTISSA
        # Byte 0 is 2**-127, which float32 writes as a subnormal number.
        above = mantissa > tl.where(exponent > 0, 0, _HALF_OF_SMALLEST_NORMAL)
        scale = exponent + above.to(tl.int32)
    else:
        if MODE == MODE_EVEN:
            # Add half a unit of the element's mantissa; only a carry into the exponent matters.
            bits = tl.minimum(bits, _INF) + (1 << (22 - MBITS))
            is_finite = bits < _INF
        exponent = bits >> 23
        if MODE == MODE_CEIL:
            exponent += ((bits & _MANTISSA) > 0).to(tl.int32)
        scale = tl.maximum(exponent - MAX_POW2, 0)
    if MODE == MODE_RCEIL_SATFINITE:
        return tl.where(is_finite, scale, tl.where(amax.to(tl.int32, bitcast=True) == _INF, 254, 255))
    else:
        return tl.where(is_finite, scale, 255)


@triton.jit
def scale_value(scale):
    """Float32 value 2**(scale - 127) of scale bytes given as int32; 255 gives NaN."""
    bits = tl.where(scale == 0, _HALF_OF_SMALLEST_NORMAL, scale << 23)
    return tl.where(scale == 255, _NAN, bits).to(tl.float32, bitcast=True)


@triton.jit
def scaled_elements(x, scale, MODE: tl.constexpr, E5M2: tl.constexpr):
    """Float8 elements of float32 `x`; `scale` int32 scale bytes, broadcast to the shape of `x`."""
    # 1 / 2**(s - 127) is the value of byte 254 - s, exactly.
    value = x * scale_value(tl.where(scale == 255, 255, 254 - scale))
    if MODE == MODE_FLOOR or MODE == MODE_EVEN or MODE == MODE_RCEIL_SATFINITE:
        # Only in these modes can the scale be too small. Comparisons with NaN are false, so a NaN stays.
        LARGEST: tl.constexpr = 57344.0 if E5M2 else 448.0
        value = tl.where(value > LARGEST, LARGEST, value)
        value = tl.where(value < -LARGEST, -LARGEST, value)
    return value.to(tl.float8e5 if E5M2 else tl.float8e4nv)


@triton.jit
def quantize_tile(x, MODE: tl.constexpr, E5M2: tl.constexpr, AXIS: tl.constexpr = -1):
    """Quantise a tile of float32 whose dimension AXIS is one block of 32.

    Returns the elements, float8 with the shape of `x`, and the scale bytes, uint8 without that dimension.
    """
    scale = block_scale(block_amax(x, AXIS), MODE, E5M2)
    elements = scaled_elements(x, tl.expand_dims(scale, AXIS), MODE, E5M2)
    return elements, scale.to(tl.uint8)


@triton.jit
def dequantize_tile(elements, scale, AXIS: tl.constexpr = -1):
    """Float32 values of float8 `elements`; `scale` holds uint8 scale bytes, without dimension AXIS."""
    return elements.to(tl.float32) * scale_value(tl.expand_dims(scale.to(tl.int32), AXIS))
