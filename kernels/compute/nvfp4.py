"""NVFP4 quantisation of rows and back: e2m1 elements, one e4m3 scale per 16 values, one float32 scale per tensor.

Protocol      Each program reads its blocks once, quantises them in registers, and writes packed elements and scales.
              scale = e4m3(clamp(amax / 6 / tensor scale, 2**-6, 448)), elements = e2m1(x * (1 / tensor scale / scale)).
              Every step is rounded to float32. Elements are rounded to nearest, ties to even, or stochastically: up
              with the probability that gives the correct mean. Stochastic rounding rounds scales up, so that nothing
              saturates. A block with a NaN has scale NaN and elements 0. Infinities saturate. A tensor scale of 0
              counts as 1.
Layout        x [num_blocks, 16]. elements [num_blocks, 8] bytes: values 2i and 2i + 1 in the low and high half of
              byte i. scale [num_blocks]. tensor_scale: one per blocks_per_scale consecutive blocks.
Memory order  Plain loads and stores.
Progress      No program waits.
Replay        Nothing is kept between calls. Random numbers are a Philox function of the seed and of a value's position.
              The kernel reads the seed from memory, so a replay draws new numbers if the caller changes the seed there.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..spec import Variant, ep_kernel

BLOCK = tl.constexpr(16)
"""Values that share a scale."""

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_NAN_SCALE = tl.constexpr(0x7F)
_SMALLEST = tl.constexpr(2.0**-6)
_LARGEST = tl.constexpr(448.0)
_FP32_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def hadamard_tile(x, signs, INVERSE: tl.constexpr, BLOCKS: tl.constexpr):
    """Random Hadamard transform of float32 rows [BLOCKS, 16]: signs, then Sylvester's matrix / 4; or back.

    signs: if bit i is set, lane i changes its sign. Additions have the same order as in triton_ep.mx.hadamard.
    """
    lane = tl.arange(0, 16)
    negate = ((signs >> lane) & 1)[None, :] == 1
    if not INVERSE:
        x = tl.where(negate, -x, x)
    for _ in tl.static_range(4):
        a, b = tl.split(tl.reshape(x, (BLOCKS, 8, 2)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (BLOCKS, 16))
    x = x * 0.25
    if INVERSE:
        x = tl.where(negate, -x, x)
    return x


@triton.jit
def random_words(seed, block):
    """Random uint32 [BLOCKS, 16] for blocks [BLOCKS] int64: word i is output i % 4 of counter 4 * block + i // 4."""
    counter = block[:, None] * 4 + tl.arange(0, 4)[None, :].to(tl.int64)
    low = counter.to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    zero = low * 0
    r0, r1, r2, r3 = tl.philox(seed, low, high, zero, zero)
    return tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), (block.shape[0], 16))


@triton.jit
def e2m1_codes(value, words, STOCHASTIC: tl.constexpr):
    """Codes, int32 0..15, of float32 values; words: random uint32 of the same shape, read if STOCHASTIC."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = tl.minimum((bits & _MAGNITUDE).to(tl.float32, bitcast=True), 6.0)
    # Steps are 0.5 below 2, 1 below 4, and 2 from 4 on; codes count steps.
    small = magnitude < 2.0
    middle = magnitude < 4.0
    steps = magnitude * tl.where(small, 2.0, tl.where(middle, 1.0, 0.5))
    whole = steps.to(tl.int32)
    part = steps - whole.to(tl.float32)
    code = whole + tl.where(small, 0, tl.where(middle, 2, 4))
    if STOCHASTIC:
        up = (words >> 8).to(tl.int32).to(tl.float32) < part * 16777216.0
    else:
        up = (part > 0.5) | ((part == 0.5) & ((code & 1) == 1))
    return code + up.to(tl.int32) + ((bits >> 28) & 8)


@triton.jit
def _scale_value(bits):
    """float32 of e4m3 bits [n] int32 of 8 (2**-6, the smallest normal number) or more, below NaN."""
    return ((bits << 20) + (120 << 23)).to(tl.float32, bitcast=True)


@triton.jit
def _scale_bits(wanted):
    """Round float32 values from 2**-6 to 448 to e4m3, to nearest, ties to even; returns the bits [n] int32.

    Uses integers: a conversion to e4m3 and back gave another value with Triton 3.6 in some variants of the kernel.
    """
    word = wanted.to(tl.int32, bitcast=True)
    return ((word + 0x7FFFF + ((word >> 20) & 1)) >> 20) - (120 << 3)


def _variant(value, tensor_scale, hadamard, **more):
    """Variant with BLOCKS = 128: each of 128 threads stores the 8 bytes of one block."""
    return Variant(
        {"HAS_TENSOR_SCALE": tensor_scale, "HADAMARD": hadamard, **more, "BLOCKS": 128}, types={"VALUE": value}
    )


class TensorScales(NamedTuple):
    """Scales of whole tensors.

    Attributes:
        tensor_scale_ptr: [ceil(num_blocks / blocks_per_scale)] fp32, read if HAS_TENSOR_SCALE.
        blocks_per_scale: blocks of one tensor.
        HAS_TENSOR_SCALE: False: no tensor scales, as if all were 1.
    """

    tensor_scale_ptr: Any
    blocks_per_scale: Any
    HAS_TENSOR_SCALE: tl.constexpr


class Rounding(NamedTuple):
    """Rounding to nearest, or stochastic from a seed: seed_ptr [1] int64, read if STOCHASTIC."""

    seed_ptr: Any
    STOCHASTIC: tl.constexpr


class Transform(NamedTuple):
    """The Hadamard transform, if HADAMARD, with the signs of its 16 elements."""

    signs: Any
    HADAMARD: tl.constexpr


@ep_kernel(
    x_ptr="*{VALUE}",
    tensor_scale_ptr="*fp32",
    seed_ptr="*i64",
    elements_ptr="*u8",
    scale_ptr="*u8",
    variants=(
        _variant("bf16", tensor_scale=False, hadamard=False, STOCHASTIC=False),
        _variant("bf16", tensor_scale=True, hadamard=True, STOCHASTIC=True),
        _variant("fp32", tensor_scale=True, hadamard=False, STOCHASTIC=True),
    ),
)
def quantize_nvfp4_kernel(
    x_ptr,  # [num_blocks, 16] bf16, fp16 or fp32
    outer: TensorScales,
    rounding: Rounding,
    elements_ptr,  # out [num_blocks, 8] uint8
    scale_ptr,  # out [num_blocks] uint8, bits of e4m3
    num_blocks,
    transform: Transform,
    BLOCKS: tl.constexpr,
):
    # int64: 2**31 elements are 300k rows of H = 7168.
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    block = first + tl.arange(0, BLOCKS)
    # Load and store by values, not by blocks: a block's 8 bytes would be half of a full store.
    lane = tl.arange(0, BLOCKS * 16)
    x = tl.load(x_ptr + first * 16 + lane, mask=first * 16 + lane < num_blocks.to(tl.int64) * 16, other=0.0)
    x = tl.reshape(x.to(tl.float32), (BLOCKS, 16))
    if transform.HADAMARD:
        x = hadamard_tile(x, transform.signs, False, BLOCKS)

    # Compare bit patterns: as an integer a NaN is above infinity, whereas a float maximum would drop it.
    amax = tl.max(x.to(tl.int32, bitcast=True) & _MAGNITUDE, axis=1).to(tl.float32, bitcast=True)
    # Division by `/` is an approximation on a GPU.
    wanted = tl.math.div_rn(amax, tl.full((BLOCKS,), 6.0, tl.float32))
    one = tl.full((BLOCKS,), 1.0, tl.float32)
    inverse = one
    if outer.HAS_TENSOR_SCALE:
        index = tl.minimum(block, num_blocks - 1) // outer.blocks_per_scale
        scale_of_tensor = tl.load(outer.tensor_scale_ptr + index)
        scale_of_tensor = tl.where(scale_of_tensor == 0.0, 1.0, scale_of_tensor)
        wanted = tl.math.div_rn(wanted, scale_of_tensor)
        inverse = tl.math.div_rn(one, scale_of_tensor)
    is_nan = wanted != wanted
    wanted = tl.where(wanted > _SMALLEST, wanted, _SMALLEST)
    wanted = tl.where(wanted < _LARGEST, wanted, _LARGEST)
    bits = _scale_bits(wanted)
    if rounding.STOCHASTIC:
        bits += (_scale_value(bits) < wanted).to(tl.int32)
    inverse = tl.math.div_rn(inverse, _scale_value(bits))
    inverse = tl.where(inverse < _FP32_MAX, inverse, _FP32_MAX)
    value = x * inverse[:, None]
    words = random_words(tl.load(rounding.seed_ptr), block) if rounding.STOCHASTIC else value
    codes = tl.where(is_nan[:, None], 0, e2m1_codes(value, words, rounding.STOCHASTIC))
    low, high = tl.split(tl.reshape(codes, (BLOCKS, 8, 2)))
    packed = tl.reshape(low | (high << 4), (BLOCKS * 8,)).to(tl.uint8)
    byte = first * 8 + tl.arange(0, BLOCKS * 8)
    tl.store(elements_ptr + byte, packed, mask=byte < num_blocks.to(tl.int64) * 8)
    tl.store(scale_ptr + block, tl.where(is_nan, _NAN_SCALE, bits).to(tl.uint8), mask=block < num_blocks)


@ep_kernel(
    elements_ptr="*u8",
    scale_ptr="*u8",
    tensor_scale_ptr="*fp32",
    out_ptr="*{VALUE}",
    variants=(
        _variant("bf16", tensor_scale=True, hadamard=False),
        _variant("fp32", tensor_scale=False, hadamard=True),
    ),
)
def dequantize_nvfp4_kernel(
    elements_ptr,  # [num_blocks, 8] uint8
    scale_ptr,  # [num_blocks] uint8, bits of e4m3
    outer: TensorScales,
    out_ptr,  # out [num_blocks, 16] bf16, fp16 or fp32
    num_blocks,
    transform: Transform,
    BLOCKS: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    block = first + tl.arange(0, BLOCKS)
    byte = first * 8 + tl.arange(0, BLOCKS * 8)
    packed = tl.load(elements_ptr + byte, mask=byte < num_blocks.to(tl.int64) * 8, other=0).to(tl.int32)
    scale = tl.load(scale_ptr + block, mask=block < num_blocks, other=0).to(tl.float8e4nv, bitcast=True)
    codes = tl.reshape(tl.join(packed & 15, packed >> 4), (BLOCKS, 16))
    exponent = (codes >> 1) & 3
    # Assemble the bits of a float32; the only value between 0 and the smallest normal number, 1, is one half.
    normal = (((exponent + 126) << 23) | ((codes & 1) << 22)).to(tl.float32, bitcast=True)
    value = tl.where(exponent > 0, normal, (codes & 1).to(tl.float32) * 0.5)
    # Exact: the factors have 2 and 4 significant bits.
    value = tl.where(codes >= 8, -value, value) * scale.to(tl.float32)[:, None]
    if transform.HADAMARD:
        value = hadamard_tile(value, transform.signs, True, BLOCKS)
    # The inexact product comes last: before the sums of the transform, it might be fused with them.
    if outer.HAS_TENSOR_SCALE:
        index = tl.minimum(block, num_blocks - 1) // outer.blocks_per_scale
        value = value * tl.load(outer.tensor_scale_ptr + index)[:, None]
    lane = tl.arange(0, BLOCKS * 16)
    out = tl.reshape(value, (BLOCKS * 16,)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + first * 16 + lane, out, mask=first * 16 + lane < num_blocks.to(tl.int64) * 16)
