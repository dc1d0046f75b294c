"""Quantisation to any MX element format and block size, and back (kernels/compute/mx_formats.py).

`ops.mxfp8` quantises MXFP8 rows in blocks of 32, and columns inside groups of rows, to the same bytes.
"""

from __future__ import annotations

from enum import Enum
from math import prod
from typing import Any

import torch

from triton_ep.errors import InputError
from triton_ep.kernels.device import mx_codes
from triton_ep.ops import library
from triton_ep.ops.element_formats import (
    BLOCK,
    E2M1,
    E2M1_PACKED,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    ElemFormat,
    ScalingMode,
    check_high_precision,
    elem_format,
)
from triton_ep.ops.mxfp8 import MODES
from triton_ep.ops.tuning import mx_blocks, mx_columns
from triton_ep.runtime import launch as runtime  # before the kernels: decides whether they are interpreted
from triton_ep.runtime.plans import Plan

BLOCK_SIZES = (16, 32, 64, 128)
"""Block sizes that the kernels support."""

_FORMATS = {
    E4M3.name: mx_codes.FORMAT_E4M3,
    E5M2.name: mx_codes.FORMAT_E5M2,
    E2M3.name: mx_codes.FORMAT_E2M3,
    E3M2.name: mx_codes.FORMAT_E3M2,
    E2M1.name: mx_codes.FORMAT_E2M1,
    E2M1_PACKED.name: mx_codes.FORMAT_E2M1,
}


def _constexprs(fmt: ElemFormat, block_size: int) -> dict[str, Any]:
    if block_size not in BLOCK_SIZES:
        raise InputError(f"block_size is {block_size}; the kernels know {', '.join(map(str, BLOCK_SIZES))}.")
    return {"FORMAT": _FORMATS[fmt.name], "PACKED": fmt.per_byte == 2, "BLOCK": block_size}


def _rows(constexprs: dict[str, Any], num_blocks: int) -> tuple[int, dict[str, Any]]:
    """Programs and constexprs of a kernel over blocks along rows."""
    blocks = mx_blocks(num_blocks) if runtime.INTERPRETING else mx_codes.row_blocks(constexprs["BLOCK"])
    return -(-num_blocks // blocks), {**constexprs, "BLOCKS": blocks}


def _columns(constexprs: dict[str, Any], num_scale_rows: int, width: int) -> tuple[int, dict[str, Any]]:
    """Programs and constexprs of a kernel over blocks along columns."""
    tile = mx_columns(width) if runtime.INTERPRETING else mx_codes.column_tile(constexprs["BLOCK"])
    return num_scale_rows * -(-width // (tile["BLOCK_H"] * tile["STEPS"])), {**constexprs, **tile}


def _split(shape: list[int] | torch.Size, dim: int) -> tuple[int, int, int]:
    """Number of elements before a dimension (counted from the end), its size, and number of elements after it."""
    at = len(shape) + dim
    return prod(shape[:at]), shape[at], prod(shape[at + 1 :])


def _shapes(shape: list[int] | torch.Size, fmt: ElemFormat, block_size: int, dim: int) -> tuple[list[int], list[int]]:
    """Shapes of the elements and of the scales of values of this shape."""
    elements, scale = list(shape), list(shape)
    elements[dim] //= fmt.per_byte
    scale[dim] //= block_size
    return elements, scale


def _quantized_like(x: torch.Tensor, elem: str, block_size: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = _shapes(x.shape, elem_format(elem), block_size, dim)
    elements, scale = (x.new_empty(shape, dtype=torch.uint8) for shape in shapes)
    return elements, scale


@library.op(
    "(Tensor x, str elem, str mode, int block_size, int dim) -> (Tensor, Tensor)",
    lambda x, elem, _, block_size, dim: _quantized_like(x, elem, block_size, dim),
)
def _mx_quantize(x: torch.Tensor, elem: str, mode: str, block_size: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    constexprs = {"MODE": MODES[mode], **_constexprs(elem_format(elem), block_size)}
    x = x.contiguous()
    elements, scale = _quantized_like(x, elem, block_size, dim)
    if dim == -1:
        grid, constexprs = _rows(constexprs, scale.numel())
        plan = Plan("mx_quantize_rows_kernel", constexprs)
        runtime.launch(plan, grid, x_ptr=x, elements_ptr=elements, scale_ptr=scale, num_blocks=scale.numel())
    else:
        lead, rows, width = _split(scale.shape, dim)
        grid, constexprs = _columns(constexprs, lead * rows, width)
        plan = Plan("mx_quantize_columns_kernel", constexprs)
        runtime.launch(plan, grid, x_ptr=x, elements_ptr=elements, scale_ptr=scale, hidden=width)
    return elements, scale


def quantize(
    x: torch.Tensor,
    elem_dtype: torch.dtype | str,
    scaling_mode: ScalingMode | str | Enum = "rceil",
    *,
    block_size: int = BLOCK,
    dim: int = -1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise blocks of consecutive values along a dimension.

    Arguments:
        x: bf16, fp16 or fp32, of any shape; dimension `dim` is a multiple of `block_size`.
        elem_dtype: any format in `mx.formats`.
        block_size: 16, 32, 64 or 128.
        dim: counted from the end, -1 along rows, -2 along columns.

    Returns elements, as the format stores them, and scale bytes uint8; both shaped as `x` except along `dim`.

    Raises:
        InputError: bad shape, dtype or block size, or an unknown mode.
    """
    fmt = elem_format(elem_dtype)
    check_high_precision(x.dtype, "dtype of x")
    if not -x.dim() <= dim < 0 or block_size < 1 or x.shape[dim] % block_size:
        raise InputError(f"x is {list(x.shape)}; its dimension {dim} must be a multiple of block_size, {block_size}.")
    elements, scale = _mx_quantize(x, fmt.name, ScalingMode.parse(scaling_mode).value, block_size, dim)
    return elements.view(fmt.storage), scale


def _values_like(qdata: torch.Tensor, elem: str, dim: int, dtype: torch.dtype) -> torch.Tensor:
    shape = list(qdata.shape)
    shape[dim] *= elem_format(elem).per_byte
    return qdata.new_empty(shape, dtype=dtype)


@library.op(
    "(Tensor qdata, Tensor scale, str elem, int block_size, int dim, ScalarType dtype) -> Tensor",
    lambda qdata, _, elem, __, dim, dtype: _values_like(qdata, elem, dim, dtype),
)
def _mx_dequantize(
    qdata: torch.Tensor, scale: torch.Tensor, elem: str, block_size: int, dim: int, dtype: torch.dtype
) -> torch.Tensor:
    constexprs = _constexprs(elem_format(elem), block_size)
    qdata, scale = qdata.contiguous(), scale.contiguous()
    out = _values_like(qdata, elem, dim, dtype)
    if dim == -1:
        grid, constexprs = _rows(constexprs, scale.numel())
        plan = Plan("mx_dequantize_rows_kernel", constexprs)
        runtime.launch(plan, grid, elements_ptr=qdata, scale_ptr=scale, out_ptr=out, num_blocks=scale.numel())
    else:
        lead, rows, width = _split(scale.shape, dim)
        grid, constexprs = _columns(constexprs, lead * rows, width)
        plan = Plan("mx_dequantize_columns_kernel", constexprs)
        runtime.launch(plan, grid, elements_ptr=qdata, scale_ptr=scale, out_ptr=out, hidden=width)
    return out


def dequantize(
    qdata: torch.Tensor,
    scale: torch.Tensor,
    elem_dtype: torch.dtype | str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    block_size: int = BLOCK,
    dim: int = -1,
) -> torch.Tensor:
    """Values of elements and scales from `quantize` with the same arguments, rounded once to `dtype`.

    Raises:
        InputError: shapes or dtypes that do not fit each other.
    """
    fmt = elem_format(elem_dtype)
    check_high_precision(dtype, "dtype")
    if qdata.dtype != fmt.storage or not -qdata.dim() <= dim < 0:
        raise InputError(
            f"qdata is {list(qdata.shape)} {qdata.dtype}, dim {dim}; it must be {fmt.storage}, and dim negative."
        )
    values = list(qdata.shape)
    values[dim] *= fmt.per_byte
    expected = _shapes(values, fmt, block_size, dim)[1]
    if list(scale.shape) != expected or values[dim] % block_size:
        raise InputError(
            f"qdata stands for {values}, scale is {list(scale.shape)}; with blocks of {block_size} along dimension "
            f"{dim} it must be {expected}."
        )
    parts = qdata.view(torch.uint8), scale.view(torch.uint8)
    out: torch.Tensor = _mx_dequantize(*parts, fmt.name, block_size, dim, dtype)
    return out
