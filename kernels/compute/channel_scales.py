"""Quantise rows to e4m3 with one scale per 128 values, the format of DeepEP and of blockwise FP8 models.

Protocol      Each program quantises BLOCKS blocks of 128 values in registers, and writes elements and scales.
Layout        x and elements [T, H], row-major: one list of T * H / 128 blocks. scale: 4 bytes per block. The scales of
              a row are [H / 128] float32; with EXPONENTS [H / 128] uint8, then zeros.
Memory order  Plain loads and stores.
Progress      No program waits.
Replay        Nothing is kept between calls; every byte of the outputs is written once.
"""

import triton.language as tl

from ..device.channel_scales import CHANNELS, channel_elements, channel_scale
from ..device.mxfp8 import block_amax
from ..spec import ep_kernel


@ep_kernel(x_ptr="*bf16", elements_ptr="*fp8e4nv", scale_ptr="*{SCALE}")
def quantize_channels_kernel(
    x_ptr,  # [num_blocks, 128] bf16
    elements_ptr,  # out [num_blocks, 128] e4m3
    scale_ptr,  # out [num_blocks] float32; with EXPONENTS [T, 4, blocks_per_row] uint8
    num_blocks,
    blocks_per_row,
    ROUND: tl.constexpr,  # round scales up to powers of two
    EXPONENTS: tl.constexpr,  # store only the exponents of such scales
    BLOCKS: tl.constexpr,
):
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    alive = block < num_blocks
    offs = block.to(tl.int64)[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    x = tl.load(x_ptr + offs, mask=alive[:, None], other=0.0).to(tl.float32)
    scale, factor, exponent = channel_scale(block_amax(x, 1), ROUND)
    tl.store(elements_ptr + offs, channel_elements(x * factor[:, None]), mask=alive[:, None])
    if EXPONENTS:
        row, column = block // blocks_per_row, block % blocks_per_row
        quarter = tl.arange(0, 4)[None, :]
        at = (row.to(tl.int64)[:, None] * 4 + quarter) * blocks_per_row + column[:, None]
        tl.store(scale_ptr + at, tl.where(quarter == 0, exponent[:, None], 0).to(tl.uint8), mask=alive[:, None])
    else:
        tl.store(scale_ptr + block, scale, mask=alive)
