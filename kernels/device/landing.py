"""Convert received MXFP8 rows on their way to the output: to elements with one scale per row, or to bfloat16.

The scale of a row is the largest of its block scales, 2**(s - 127) in float32; NaN if one of them is NaN. Elements of a
block with a smaller scale are rebased to it: multiplied by a power of two and rounded to nearest even on e4m3's grid.
Only elements that become subnormal lose bits. The arithmetic is float16, where one instruction converts two elements.
Values that float16 cannot hold exactly are below 2**-20, and become zero either way.

A tile is [ROWS, BLOCKS, 8] words of four elements: a thread holds 16 bytes of one block, and their scale. Single bytes
would take a register each while a tile is stored to its output rows, and would be packed again for each of them.
"""

import triton
import triton.language as tl

from . import codes
from .mxfp8 import scale_value

ROW = tl.constexpr(codes.LANDING_ROW)
BF16 = tl.constexpr(codes.LANDING_BF16)

WORD = tl.constexpr(4)
"""Elements of a word."""
BLOCK_WORDS = tl.constexpr(8)
"""Words of a block."""


@triton.jit
def block_words(first, row_words, BLOCKS: tl.constexpr):
    """Positions [1, BLOCKS, 8] in a row of the words from `first` on, and mask [1, BLOCKS, 1] of blocks in the row."""
    block = first + tl.arange(0, BLOCKS)[None, :, None] * BLOCK_WORDS
    return block + tl.arange(0, BLOCK_WORDS)[None, None, :], block < row_words


@triton.jit
def load_block_scales(
    scale_ptrs,  # [ROWS] pointers to rows of uint8 scales
    alive,  # [ROWS]
    first,  # word
    row_words,
    BLOCKS: tl.constexpr,
):
    """Scale bytes [ROWS, BLOCKS] of a tile, int32; zero outside the rows."""
    block = first // BLOCK_WORDS + tl.arange(0, BLOCKS)
    mask = alive[:, None] & (block < row_words // BLOCK_WORDS)[None, :]
    return tl.load(scale_ptrs[:, None] + block[None, :], mask=mask, other=0).to(tl.int32)


@triton.jit
def _element(words, INDEX: tl.constexpr):
    """Element INDEX of each word, in float16, exactly."""
    byte = (words.to(tl.uint32, bitcast=True) >> (8 * INDEX)).to(tl.uint8)
    return byte.to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def _rebased(words, factor, INDEX: tl.constexpr):
    """Element INDEX of each word times `factor`, as bits at its place in the word."""
    byte = (_element(words, INDEX) * factor).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return byte.to(tl.uint32) << (8 * INDEX)


@triton.jit
def rebase_words(words, scales, largest):
    """Rebase words [ROWS, BLOCKS, 8] int32 of elements from scale bytes `scales` [ROWS, BLOCKS] to `largest` [ROWS],
    which are not smaller."""
    # 2**(scale - largest), exactly, and zero where even the largest element would become zero.
    factor = scale_value(tl.maximum(127 - (largest[:, None] - scales), 0)).to(tl.float16)[:, :, None]
    moved = _rebased(words, factor, 0) | _rebased(words, factor, 1) | _rebased(words, factor, 2)
    return (moved | _rebased(words, factor, 3)).to(tl.int32, bitcast=True)


@triton.jit
def _value_bits(words, value, INDEX: tl.constexpr):
    """Element INDEX of each word times `value`, as the bits of bfloat16, uint32."""
    bits = (_element(words, INDEX).to(tl.float32) * value).to(tl.bfloat16).to(tl.uint16, bitcast=True)
    return bits.to(tl.uint32)


@triton.jit
def dequantize_words(words, scales):
    """Values of words [ROWS, BLOCKS, 8] int32 of elements with scale bytes [ROWS, BLOCKS], four bfloat16 per int64."""
    value = scale_value(scales)[:, :, None]
    low = _value_bits(words, value, 0) | (_value_bits(words, value, 1) << 16)
    high = _value_bits(words, value, 2) | (_value_bits(words, value, 3) << 16)
    return low.to(tl.int64) | (high.to(tl.int64) << 32)


@triton.jit
def land_words(words, scales, largest, LANDING: tl.constexpr):
    """Output words of a tile: int32 of e4m3 with the scales `largest`, or int64 of bfloat16."""
    if LANDING == ROW:
        return rebase_words(words, scales, largest)
    else:
        return dequantize_words(words, scales)
