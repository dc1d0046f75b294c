"""Largest magnitudes of a tile of weights, and weights times powers of two. Two bf16 values share a register.

Protocol      Magnitudes are compared as unsigned integers, in which order a NaN is the largest. Compiled for bf16 they
              are uint16, and one instruction compares two neighbours in a row; otherwise they are the int32 bits of
              float32 values. Both give the same results: `row_maxima` and `column_maxima` return float32 bits.
              A tile holds the even rows of a matrix in its upper half and the odd rows in its lower half, so that a
              thread holds rows 2i and 2i + 1, and their e4m3 elements are stored as one 16-bit value.
Layout        Tiles [ROWS, COLUMNS], ROWS a multiple of 4, COLUMNS of 16. Speed, but not correctness, depends on a
              thread holding 16 columns of a row.
Memory order  Nothing is stored.
Progress      No program waits.
Replay        Nothing is kept between calls.
"""

import triton
import triton.language as tl

from ..device.spin import INTERPRET

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)

if INTERPRET.value:

    @triton.jit
    def magnitudes(x):
        """Unsigned integers that order bf16 or float32 values by magnitude."""
        return x.to(tl.float32).to(tl.int32, bitcast=True) & _MAGNITUDE

    @triton.jit
    def larger(a, b):
        """The larger magnitude of each pair."""
        return tl.maximum(a, b)

    @triton.jit
    def product(x, factor):
        """`x` times `factor`, a power of two or NaN, as float32."""
        return x.to(tl.float32) * factor

    @triton.jit
    def e4m3_pair(low, high):
        """e4m3 elements of two float32 values in one uint16, `low` in the low byte."""
        low_byte = low.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.uint16)
        high_byte = high.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.uint16)
        return low_byte | (high_byte << 8)

else:

    @triton.jit
    def magnitudes(x):
        """Unsigned integers that order bf16 or float32 values by magnitude."""
        if x.dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(
                "and.b32 $0, $1, 0x7fff7fff;",
                "=r,r",
                [x.to(tl.uint16, bitcast=True)],
                dtype=tl.uint16,
                is_pure=True,
                pack=2,
            )
        else:
            return x.to(tl.int32, bitcast=True) & _MAGNITUDE

    @triton.jit
    def larger(a, b):
        """The larger magnitude of each pair."""
        if a.dtype == tl.uint16:
            return tl.inline_asm_elementwise(
                "max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.uint16, is_pure=True, pack=2
            )
        else:
            return tl.maximum(a, b)

    @triton.jit
    def product(x, factor):
        """`x` times `factor`, a power of two or NaN, as float32."""
        if x.dtype == tl.bfloat16:
            # Exact except below 2**-126, where every product rounds to zero in e4m3.
            x, factor = tl.broadcast(x, factor.to(tl.bfloat16))
            return tl.inline_asm_elementwise(
                "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, factor], dtype=tl.bfloat16, is_pure=True, pack=2
            ).to(tl.float32)
        else:
            return x * factor

    @triton.jit
    def e4m3_pair(low, high):
        """e4m3 elements of two float32 values in one uint16, `low` in the low byte."""
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [low, high], dtype=tl.uint16, is_pure=True, pack=1
        )

    @triton.jit
    def _larger_of_each_half(a, b):
        """Maximum of the upper 16 bits and maximum of the lower 16 bits of int32 values."""
        return tl.inline_asm_elementwise(
            "max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def upper_and_lower(x):
    """The upper and the lower half of the rows of a tile, or of a vector."""
    HALF: tl.constexpr = x.shape[0] // 2
    if len(x.shape) == 2:
        return x.reshape(2, HALF, x.shape[1]).permute(1, 2, 0).split()
    else:
        return x.reshape(2, HALF).permute(1, 0).split()


@triton.jit
def _larger_half(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Maximum, column by column, of the left and right half of each run of COLUMNS columns."""
    left, right = x.reshape(ROWS, x.shape[1] // COLUMNS, 2, COLUMNS // 2).permute(0, 1, 3, 2).split()
    return larger(left, right).reshape(ROWS, x.shape[1] // 2)


@triton.jit
def row_maxima(x):
    """Float32 bits, int32, of the largest magnitude of each row: [ROWS / 2] of the upper half, then of the lower."""
    ROWS: tl.constexpr = x.shape[0]
    if x.dtype == tl.uint16:
        found = _larger_half(_larger_half(_larger_half(x, ROWS, 16), ROWS, 8), ROWS, 4)
        left, right = found.reshape(ROWS, found.shape[1] // 2, 2).split()
        upper, lower = upper_and_lower(tl.maximum(left, right))
        both = tl.reduce(upper.to(tl.int32) | (lower.to(tl.int32) << 16), 1, _larger_of_each_half)
        return both << 16, (both >> 16) << 16
    else:
        return upper_and_lower(tl.max(x, 1))


@triton.jit
def column_maxima(x):
    """Float32 bits, int32, of the largest magnitude of each column: [COLUMNS / 2] of the even ones, then of the odd."""
    even, odd = x.reshape(x.shape[0], x.shape[1] // 2, 2).split()
    if x.dtype == tl.uint16:
        both = tl.reduce(even.to(tl.int32) | (odd.to(tl.int32) << 16), 0, _larger_of_each_half)
        return both << 16, (both >> 16) << 16
    else:
        return tl.max(even, 0), tl.max(odd, 0)


@triton.jit
def fold(x):
    """[ROWS / 4, COLUMNS]: the largest magnitudes of rows i, i + ROWS / 4 and so on, which one thread holds."""
    upper, lower = upper_and_lower(x)
    upper, lower = upper_and_lower(larger(upper, lower))
    return larger(upper, lower)
