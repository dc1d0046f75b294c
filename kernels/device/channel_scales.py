"""e4m3 elements with one float32 scale per 128 values, the format of DeepEP and of blockwise FP8 models."""

import triton
import triton.language as tl

from . import codes
from .mxfp8 import block_amax

CHANNELS = tl.constexpr(codes.CHANNELS)

_LARGEST = tl.constexpr(448.0)
_LEAST_AMAX = tl.constexpr(1e-4)
_MANTISSA = tl.constexpr(0x7FFFFF)


@triton.jit
def channel_scale(amax, ROUND: tl.constexpr):
    """(scale, factor of the values, exponent of the scale) of blocks with these largest magnitudes, float32; the
    exponent, int32, is that of a power of two with ROUND, else 0. NaN stays NaN."""
    amax = tl.where(amax < _LEAST_AMAX, _LEAST_AMAX, amax)
    scale = amax * (1 / 448)
    if ROUND:
        bits = scale.to(tl.int32, bitcast=True)
        # Exponent of the next power of two. An infinite amax gets the largest exponent, and the factor 0.
        exponent = tl.minimum((bits >> 23) + ((bits & _MANTISSA) != 0).to(tl.int32), 254)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        factor = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    else:
        exponent = tl.zeros(amax.shape, tl.int32)
        factor = tl.math.div_rn(tl.full(amax.shape, _LARGEST, tl.float32), amax)
    return scale, factor, exponent


@triton.jit
def channel_elements(values):
    """e4m3 elements of values that their factor has scaled, saturated. NaN stays NaN."""
    # Comparisons with NaN are false.
    values = tl.where(values > _LARGEST, _LARGEST, values)
    return tl.where(values < -_LARGEST, -_LARGEST, values).to(tl.float8e4nv)


@triton.jit
def quantize_channel_tile(x):
    """Elements [ROWS, COLUMNS] of float32 values, and the bytes of their float32 scales, [ROWS, COLUMNS / 32] uint8."""
    ROWS: tl.constexpr = x.shape[0]
    BLOCKS: tl.constexpr = x.shape[1] // CHANNELS
    blocks = tl.reshape(x, [ROWS, BLOCKS, CHANNELS])
    scale, factor, _ = channel_scale(block_amax(blocks, 2), False)
    elements = channel_elements(blocks * factor[:, :, None])
    bits = scale.to(tl.int32, bitcast=True)[:, :, None] >> (8 * tl.arange(0, 4))[None, None, :]
    return tl.reshape(elements, [ROWS, BLOCKS * CHANNELS]), tl.reshape(bits.to(tl.uint8), [ROWS, BLOCKS * 4])
