"""MXFP8 quantisation of one GPU's rows: along rows, along tokens inside groups, both in one read, and back.

Protocol      Each program reads its tile once, quantises it in registers, and writes elements and scale bytes.
Layout        x, elements [R, H], row-major. Rowwise scale [R, H / 32]: one byte per 32 columns. A row is a
              whole number of blocks, so the rowwise kernels see one list of R * H / 32 blocks.
              Columnwise scale [S, H]: one byte per column and block of 32 rows. Blocks start anew at each
              group of rows (an expert's tokens); the last block of a group may be short. Scale row of row r
              of group g: first_block[g] + (r - offsets[g]) // 32, where first_block counts the blocks of the
              earlier groups, first_block[g + 1] = first_block[g] + ceil(rows of g / 32). It is r // 32
              if all groups are multiples of 32. S = (R + 31 * groups) // 32 suffices for any groups;
              scale rows without a block are zero. Rows past the last group have zero elements.
Memory order  Plain loads and stores.
Progress      No program waits.
Replay        Nothing is kept between calls; every byte of the outputs is written once.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.mxfp8 import BLOCK, dequantize_tile, quantize_tile
from ..spec import ep_kernel

_END = tl.constexpr(2**31 - 1)


@ep_kernel(x_ptr="*{TOKEN}", elements_ptr="*{ELEMENT}", scale_ptr="*u8")
def quantize_rows_kernel(
    x_ptr,  # [num_blocks, 32] bf16, fp16 or fp32
    elements_ptr,  # out [num_blocks, 32] float8
    scale_ptr,  # out [num_blocks] uint8
    num_blocks,
    MODE: tl.constexpr,
    E5M2: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    alive = block < num_blocks
    # int64: 2**31 elements are 300k rows of H = 7168.
    offs = block.to(tl.int64)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + offs, mask=alive[:, None], other=0.0)
    elements, scale = quantize_tile(x.to(tl.float32), MODE, E5M2)
    tl.store(elements_ptr + offs, elements, mask=alive[:, None])
    tl.store(scale_ptr + block, scale, mask=alive)


@ep_kernel(elements_ptr="*{ELEMENT}", scale_ptr="*u8", out_ptr="*{TOKEN}")
def dequantize_rows_kernel(
    elements_ptr,  # [num_blocks, 32] float8
    scale_ptr,  # [num_blocks] uint8
    out_ptr,  # out [num_blocks, 32] bf16, fp16 or fp32
    num_blocks,
    BLOCKS: tl.constexpr,
):
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    alive = block < num_blocks
    offs = block.to(tl.int64)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    scale = tl.load(scale_ptr + block, mask=alive, other=0)
    elements = tl.load(elements_ptr + offs, mask=alive[:, None], other=0.0)
    values = dequantize_tile(elements, scale)
    tl.store(out_ptr + offs, values.to(out_ptr.dtype.element_ty), mask=alive[:, None])


class RowGroups(NamedTuple):
    """Groups of rows that are quantised along columns independently of each other.

    Attributes:
        offsets_ptr: [groups + 1] int32, first row of each group, then the end of the last; read if HAS_OFFSETS.
        num_groups: number of groups.
        HAS_OFFSETS: False: all rows are one group.
        GP: a power of two greater than the number of groups.
    """

    offsets_ptr: Any
    num_groups: Any
    HAS_OFFSETS: tl.constexpr
    GP: tl.constexpr


class Scaling(NamedTuple):
    """Mode of the scales, MODE_* (device/mxfp8.py), and whether elements are e5m2."""

    MODE: tl.constexpr
    E5M2: tl.constexpr


class Strip(NamedTuple):
    """Columns of a program: STEPS blocks of BLOCK_H."""

    BLOCK_H: tl.constexpr
    STEPS: tl.constexpr


class OfRows(NamedTuple):
    """Out: quantised along rows, [R, H] float8 and [R, H / 32] uint8."""

    row_elements_ptr: Any
    row_scale_ptr: Any


class OfColumns(NamedTuple):
    """Out: quantised along columns, [R, H] float8 and [S, H] uint8."""

    column_elements_ptr: Any
    column_scale_ptr: Any


@triton.jit
def rows_of_block(groups, block, num_rows):
    """First and end row of a scale row's block, and whether a group owns it. A block without rows has first = end.

    Rows past the last group count as one more group, whose blocks follow.
    """
    if groups.HAS_OFFSETS:
        group = tl.arange(0, groups.GP)
        start = tl.load(groups.offsets_ptr + group, mask=group <= groups.num_groups, other=_END)
        stop = tl.load(groups.offsets_ptr + group + 1, mask=group < groups.num_groups, other=_END)
        start = tl.minimum(start, num_rows)
        stop = tl.minimum(stop, num_rows)
        blocks = (tl.maximum(stop - start, 0) + 31) // 32
        end_block = tl.cumsum(blocks, axis=0)
        first_block = end_block - blocks
        mine = (block >= first_block) & (block < end_block)
        first = tl.sum(tl.where(mine, start + (block - first_block) * 32, 0))
        end = tl.minimum(tl.sum(tl.where(mine, stop, 0)), first + 32)
        owned = tl.sum((mine & (group < groups.num_groups)).to(tl.int32)) > 0
    else:
        first = tl.minimum(block * 32, num_rows)
        end = tl.minimum(first + 32, num_rows)
        owned = first < end
    return first, end, owned


@ep_kernel(x_ptr="*{TOKEN}", offsets_ptr="*i32", elements_ptr="*{ELEMENT}", scale_ptr="*u8", specialised=("hidden",))
def quantize_columns_kernel(
    x_ptr,  # [R, H] bf16, fp16 or fp32
    groups: RowGroups,
    elements_ptr,  # out [R, H] float8
    scale_ptr,  # out [S, H] uint8
    num_rows,
    hidden,
    num_scale_rows,
    scaling: Scaling,
    strip: Strip,
):
    strips = tl.cdiv(hidden, strip.BLOCK_H * strip.STEPS)
    block = tl.program_id(0) // strips
    first, end, owned = rows_of_block(groups, block, num_rows)
    row = first + tl.arange(0, BLOCK)
    columns = tl.program_id(0) % strips * (strip.BLOCK_H * strip.STEPS) + tl.arange(0, strip.BLOCK_H)
    for _ in range(strip.STEPS):
        mask = (row < end)[:, None] & (columns < hidden)[None, :]
        offs = row.to(tl.int64)[:, None] * hidden + columns[None, :]
        x = tl.load(x_ptr + offs, mask=mask & owned, other=0.0).to(tl.float32)
        elements, scale = quantize_tile(x, scaling.MODE, scaling.E5M2, AXIS=0)
        tl.store(elements_ptr + offs, elements, mask=mask)
        scale_ptrs = scale_ptr + block.to(tl.int64) * hidden + columns
        tl.store(scale_ptrs, scale, mask=(columns < hidden) & (block < num_scale_rows))
        columns += strip.BLOCK_H


@ep_kernel(
    x_ptr="*{TOKEN}",
    offsets_ptr="*i32",
    row_elements_ptr="*{ELEMENT}",
    row_scale_ptr="*u8",
    column_elements_ptr="*{ELEMENT}",
    column_scale_ptr="*u8",
    specialised=("hidden",),
)
def quantize_both_kernel(
    x_ptr,  # [R, H] bf16, fp16 or fp32
    groups: RowGroups,
    rows: OfRows,
    by_columns: OfColumns,
    num_rows,
    hidden,
    num_scale_rows,
    scaling: Scaling,
    strip: Strip,
):
    strips = tl.cdiv(hidden, strip.BLOCK_H * strip.STEPS)
    block = tl.program_id(0) // strips
    first, end, owned = rows_of_block(groups, block, num_rows)
    row = first + tl.arange(0, BLOCK)
    # [32 rows, blocks of a row, 32 columns]: one tile, quantised along its first and along its last dimension.
    of_row = tl.program_id(0) % strips * (strip.BLOCK_H // BLOCK * strip.STEPS) + tl.arange(0, strip.BLOCK_H // BLOCK)
    for _ in range(strip.STEPS):
        in_row = of_row < hidden // BLOCK
        columns = of_row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        mask = (row < end)[:, None, None] & in_row[None, :, None]
        offs = row.to(tl.int64)[:, None, None] * hidden + columns[None, :, :]
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)

        elements, scale = quantize_tile(x, scaling.MODE, scaling.E5M2)
        tl.store(rows.row_elements_ptr + offs, elements, mask=mask)
        scale_ptrs = rows.row_scale_ptr + row.to(tl.int64)[:, None] * (hidden // BLOCK) + of_row[None, :]
        tl.store(scale_ptrs, scale, mask=(row < end)[:, None] & in_row[None, :])

        elements, scale = quantize_tile(tl.where(owned, x, 0.0), scaling.MODE, scaling.E5M2, AXIS=0)
        tl.store(by_columns.column_elements_ptr + offs, elements, mask=mask)
        scale_ptrs = by_columns.column_scale_ptr + block.to(tl.int64) * hidden + columns
        tl.store(scale_ptrs, scale, mask=in_row[:, None] & (block < num_scale_rows))
        of_row += strip.BLOCK_H // BLOCK


@ep_kernel(elements_ptr="*{ELEMENT}", scale_ptr="*u8", offsets_ptr="*i32", out_ptr="*{TOKEN}", specialised=("hidden",))
def dequantize_columns_kernel(
    elements_ptr,  # [R, H] float8
    scale_ptr,  # [S, H] uint8
    groups: RowGroups,
    out_ptr,  # out [R, H] bf16, fp16 or fp32
    num_rows,
    hidden,
    strip: Strip,
):
    strips = tl.cdiv(hidden, strip.BLOCK_H * strip.STEPS)
    block = tl.program_id(0) // strips
    first, end, owned = rows_of_block(groups, block, num_rows)
    row = first + tl.arange(0, BLOCK)
    columns = tl.program_id(0) % strips * (strip.BLOCK_H * strip.STEPS) + tl.arange(0, strip.BLOCK_H)
    for _ in range(strip.STEPS):
        in_row = columns < hidden
        mask = (row < end)[:, None] & in_row[None, :]
        offs = row.to(tl.int64)[:, None] * hidden + columns[None, :]
        scale = tl.load(scale_ptr + block.to(tl.int64) * hidden + columns, mask=in_row & owned, other=0)
        values = dequantize_tile(tl.load(elements_ptr + offs, mask=mask, other=0.0), scale, AXIS=0)
        # Select, do not multiply: past the last group the elements may be anything.
        values = tl.where(owned, values, 0.0)
        tl.store(out_ptr + offs, values.to(out_ptr.dtype.element_ty), mask=mask)
        columns += strip.BLOCK_H
