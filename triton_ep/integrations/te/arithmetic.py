"""MXFP8 quantisation by TransformerEngine's rule, along rows or along columns, and back.

The rule is the project's RCEIL (triton_ep/ops/mxfp8.py, triton_ep/mx/arithmetic.py) except in one case: a block whose
largest magnitude is infinite gets the scale byte 254, not NaN's 255, and its infinities become the largest value of the
format. On GPUs the kernels implement this case; on CPUs and for tiles a second step corrects the result of the
project's arithmetic.

When rows are quantised along columns, the last block may be short: it counts as filled up with zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch.nn.functional import pad

from triton_ep.errors import InputError
from triton_ep.mx import arithmetic
from triton_ep.mx.formats import BLOCK, ScalingMode, check_high_precision, elem_format
from triton_ep.ops import mxfp8

_OF_INFINITY = 254


def _elements_of_infinite(x: torch.Tensor, elem_dtype: torch.dtype) -> torch.Tensor:
    """Elements (bytes) of values in blocks whose largest magnitude is infinite."""
    largest = elem_format(elem_dtype).max_pos
    # 2**-127 as two factors, because it is not a normal number itself.
    return (x.float() * 2.0**-64 * 2.0**-63).clamp(-largest, largest).to(elem_dtype).view(torch.uint8)


def _saturate(
    x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, elem_dtype: torch.dtype, along: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Correct elements (bytes) and scales of blocks whose largest magnitude is infinite.

    along: dimension of x [R, H] in which blocks lie.
    """
    blocks = x.unflatten(along, (x.shape[along] // BLOCK, BLOCK))
    inside = along + 1
    infinite = blocks.isinf().any(inside) & ~blocks.isnan().any(inside)
    values = _elements_of_infinite(blocks, elem_dtype)
    data = torch.where(infinite.unsqueeze(inside), values, data.unflatten(along, (x.shape[along] // BLOCK, BLOCK)))
    return data.flatten(along, inside), torch.where(infinite, _OF_INFINITY, scale).to(torch.uint8)


def _checked(x: torch.Tensor) -> torch.Tensor:
    check_high_precision(x.dtype, "dtype of x")
    if x.dim() != 2 or x.shape[1] % BLOCK:
        raise InputError(f"x is {list(x.shape)}; it must be [M, N] with N a multiple of {BLOCK}.")
    return x.contiguous()


def quantize_rows(x: torch.Tensor, elem_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements [M, N] and scales [M, N / 32] of x [M, N], as bytes.

    Raises:
        InputError: the dtype is not bf16, fp16 or fp32, or N is not a multiple of 32.
    """
    x = _checked(x)
    if x.is_cuda and x.numel():
        data, scale = mxfp8.quantize_rows(x, elem_dtype, mxfp8.RCEIL_SATFINITE)
        return data.view(torch.uint8), scale
    data, scale = arithmetic.quantize(x, elem_format(elem_dtype), ScalingMode.RCEIL, BLOCK)
    return _saturate(x, data.view(torch.uint8), scale, elem_dtype, 1)


def quantize_columns(x: torch.Tensor, elem_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements [M, N] and scales [M / 32 rounded up, N] of x [M, N], as bytes.

    Raises:
        InputError: as `quantize_rows`.
    """
    x = _checked(x)
    rows = x.shape[0]
    if rows % BLOCK:
        x = pad(x, (0, 0, 0, -rows % BLOCK))
    if x.is_cuda and x.numel():
        data, scale = mxfp8.quantize_columns(x, None, elem_dtype, mxfp8.RCEIL_SATFINITE)
        return data[:rows].view(torch.uint8), scale
    by_column = arithmetic.quantize(x.t(), elem_format(elem_dtype), ScalingMode.RCEIL, BLOCK)
    data, scale = (part.t() for part in by_column)
    data, scale = _saturate(x, data.view(torch.uint8), scale, elem_dtype, 0)
    return data[:rows].contiguous(), scale.contiguous()


def quantize_tiles(x: torch.Tensor, elem_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements [M, N] and scales [M / 32, N / 32] of x [M, N], one scale per 32 x 32 values, as bytes.

    Raises:
        InputError: as `quantize_rows`, or M is not a multiple of 32.
    """
    x = _checked(x)
    rows, columns = x.shape
    if rows % BLOCK:
        raise InputError(f"x is {list(x.shape)}; tiles of {BLOCK} x {BLOCK} need multiples of {BLOCK}.")
    tiles = x.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK).transpose(1, 2)
    flat = tiles.reshape(-1, BLOCK * BLOCK)
    data, scale = arithmetic.quantize(flat, elem_format(elem_dtype), ScalingMode.RCEIL, BLOCK * BLOCK)
    infinite = flat.isinf().any(1, keepdim=True) & ~flat.isnan().any(1, keepdim=True)
    data = torch.where(infinite, _elements_of_infinite(flat, elem_dtype), data.view(torch.uint8))
    data = data.view(tiles.shape).transpose(1, 2)
    scale = torch.where(infinite, _OF_INFINITY, scale).to(torch.uint8)
    return data.reshape(rows, columns), scale.view(rows // BLOCK, columns // BLOCK)


def dequantize_rows(
    data: torch.Tensor, scale: torch.Tensor, elem_dtype: torch.dtype, dtype: torch.dtype
) -> torch.Tensor:
    """Values [M, N] of elements [M, N] and scales [M, N / 32], bytes: float32 products, rounded to `dtype`."""
    elements = data.view(elem_dtype)
    if data.is_cuda and data.numel():
        return mxfp8.dequantize_rows(elements, scale, dtype)
    return arithmetic.dequantize(elements, scale, dtype)


def dequantize_columns(
    data: torch.Tensor, scale: torch.Tensor, elem_dtype: torch.dtype, dtype: torch.dtype
) -> torch.Tensor:
    """Values [M, N] of elements [M, N] and scales [M / 32 rounded up, N], bytes."""
    rows = data.shape[0]
    elements = data.view(elem_dtype)
    if data.is_cuda and data.numel() and rows % BLOCK == 0:
        return mxfp8.dequantize_columns(elements, scale, None, dtype)
    factors = arithmetic.scale_values(scale.to(torch.int32)).repeat_interleave(BLOCK, 0)[:rows]
    return (elements.float() * factors).to(dtype)


# --- columns of groups of rows ------------------------------------------------------------------------------


def quantize_groups(
    x: torch.Tensor, offsets: torch.Tensor, elem_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_columns` with blocks that start again in each group of rows.

    offsets: [groups + 1] int32 on the device, first row of each group, then the end of the last.

    Returns elements [M, N], zero past the last group, and scales [S, N] in the layout of `ops.mxfp8.quantize_columns`:
    one row per block, group after group.
    """
    x = _checked(x)
    if x.is_cuda and x.numel():
        data, scale = mxfp8.quantize_columns(x, offsets, elem_dtype, mxfp8.RCEIL_SATFINITE)
        return data.view(torch.uint8), scale
    data = torch.zeros_like(x, dtype=torch.uint8)
    scale = x.new_zeros(mxfp8.max_scale_rows(x.shape[0], len(offsets) - 1), x.shape[1], dtype=torch.uint8)
    for rows, blocks in _groups(offsets):
        data[rows], scale[blocks] = quantize_columns(x[rows], elem_dtype)
    return data, scale


def dequantize_groups(
    data: torch.Tensor, scale: torch.Tensor, offsets: torch.Tensor, elem_dtype: torch.dtype, dtype: torch.dtype
) -> torch.Tensor:
    """Dequantise the result of `quantize_groups` to values [M, N]; zero past the last group."""
    if data.is_cuda and data.numel():
        return mxfp8.dequantize_columns(data.view(elem_dtype), scale, offsets, dtype)
    values = torch.zeros_like(data, dtype=dtype)
    for rows, blocks in _groups(offsets):
        values[rows] = dequantize_columns(data[rows], scale[blocks], elem_dtype, dtype)
    return values


def _groups(offsets: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows and scale rows of each non-empty group."""
    block = 0
    for first, end in itertools.pairwise(offsets.tolist()):
        blocks = -(-(end - first) // BLOCK)
        if blocks:
            yield slice(first, end), slice(block, block + blocks)
        block += blocks
