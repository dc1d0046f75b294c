"""MXFP8 quantisation and back (kernels/compute/mxfp8.py)."""

from __future__ import annotations

from enum import Enum
from itertools import pairwise
from typing import Any

import torch

from triton_ep.context.layout import next_power_of_2
from triton_ep.errors import InputError
from triton_ep.kernels.device.codes import MODE_CEIL, MODE_EVEN, MODE_FLOOR, MODE_RCEIL, MODE_RCEIL_SATFINITE
from triton_ep.ops import library
from triton_ep.ops.element_formats import BLOCK, ScalingMode, check_high_precision, fp8_dtype
from triton_ep.ops.tuning import mx_blocks, mx_columns
from triton_ep.runtime import launch as runtime  # before the kernels: decides whether they are interpreted
from triton_ep.runtime.plans import Plan

MODES: dict[str, int] = {
    ScalingMode.RCEIL: MODE_RCEIL,
    ScalingMode.FLOOR: MODE_FLOOR,
    ScalingMode.CEIL: MODE_CEIL,
    ScalingMode.EVEN: MODE_EVEN,
}
"""Codes of the modes in the kernels."""

RCEIL_SATFINITE = "rceil_satfinite"
"""A mode only for the functions of this module: "rceil", but infinities become the largest elements, scale byte 254."""


def _constexprs(elem_dtype: torch.dtype, mode: str) -> dict[str, Any]:
    code = MODE_RCEIL_SATFINITE if mode == RCEIL_SATFINITE else MODES[mode]
    return {"MODE": code, "E5M2": elem_dtype == torch.float8_e5m2}


def _format(elem_dtype: torch.dtype, scaling_mode: ScalingMode | str | Enum) -> tuple[torch.dtype, str]:
    """Arguments of the ops, checked; InputError for an unknown mode or dtype."""
    mode = RCEIL_SATFINITE if scaling_mode == RCEIL_SATFINITE else ScalingMode.parse(scaling_mode).value
    return fp8_dtype(elem_dtype), mode


def _check(x: torch.Tensor, whole_rows: bool) -> torch.Tensor:
    """`x`, contiguous; InputError if it is not [R, H] of a dtype that can be quantised."""
    check_high_precision(x.dtype, "dtype of x")
    if x.dim() != 2 or (whole_rows and x.shape[1] % BLOCK):
        raise InputError(f"x is {list(x.shape)}; it must be [R, H] with H a multiple of {BLOCK}.")
    return x.contiguous()


def max_scale_rows(num_rows: int, num_groups: int) -> int:
    """Upper bound of the scale rows for `num_rows` rows in `num_groups` groups of any sizes."""
    return (num_rows + (BLOCK - 1) * num_groups) // BLOCK


def _rows_like(x: torch.Tensor, elem_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.new_empty((x.shape[0], x.shape[1] // BLOCK), dtype=torch.uint8)
    return x.new_empty(x.shape, dtype=elem_dtype), scale


@library.op("(Tensor x, ScalarType elem_dtype, str mode) -> (Tensor, Tensor)", lambda x, dtype, _: _rows_like(x, dtype))
def _quantize_rows(x: torch.Tensor, elem_dtype: torch.dtype, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    x = _check(x, whole_rows=True)
    elements, scale = _rows_like(x, elem_dtype)
    blocks = mx_blocks(scale.numel())
    runtime.launch(
        Plan("quantize_rows_kernel", {**_constexprs(elem_dtype, mode), "BLOCKS": blocks}),
        -(-scale.numel() // blocks),
        x_ptr=x,
        elements_ptr=elements,
        scale_ptr=scale,
        num_blocks=scale.numel(),
    )
    return elements, scale


def quantize_rows(
    x: torch.Tensor,
    elem_dtype: torch.dtype = torch.float8_e4m3fn,
    scaling_mode: ScalingMode | str | Enum = "rceil",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise blocks of 32 columns of [R, H] bf16, fp16 or fp32; H a multiple of 32.

    Returns elements [R, H] of `elem_dtype` and scale bytes [R, H / 32] uint8.

    Raises:
        InputError: bad shape or dtype, or an unknown mode.
    """
    elements, scale = _quantize_rows(x, *_format(elem_dtype, scaling_mode))
    return elements, scale


@library.op(
    "(Tensor qdata, Tensor scale, ScalarType dtype) -> Tensor",
    lambda qdata, _, dtype: qdata.new_empty(qdata.shape, dtype=dtype),
)
def _dequantize_rows(qdata: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    fp8_dtype(qdata.dtype)
    check_high_precision(dtype, "dtype")
    if qdata.dim() != 2 or qdata.shape[1] % BLOCK or scale.shape != (qdata.shape[0], qdata.shape[1] // BLOCK):
        raise InputError(
            f"qdata is {list(qdata.shape)}, scale {list(scale.shape)}; they must be [R, H] and [R, H / {BLOCK}]."
        )
    qdata, scale = qdata.contiguous(), scale.contiguous()
    out = torch.empty_like(qdata, dtype=dtype)
    blocks = mx_blocks(scale.numel())
    runtime.launch(
        Plan("dequantize_rows_kernel", {"BLOCKS": blocks}),
        -(-scale.numel() // blocks),
        elements_ptr=qdata,
        scale_ptr=scale,
        out_ptr=out,
        num_blocks=scale.numel(),
    )
    return out


def dequantize_rows(qdata: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Values [R, H] of elements [R, H] and scale bytes [R, H / 32] uint8, rounded once to `dtype`.

    Raises:
        InputError: shapes or dtypes that do not fit each other.
    """
    values: torch.Tensor = _dequantize_rows(qdata, scale.view(torch.uint8), dtype)
    return values


def _groups(offsets: torch.Tensor | None, rows: torch.Tensor) -> tuple[int, torch.Tensor, dict[str, Any]]:
    """Number of groups, the offsets (or a stand-in that is not read), and the constexprs about groups."""
    if offsets is None:
        return 1, rows, {"HAS_OFFSETS": False, "GP": 1}
    if offsets.dim() != 1 or offsets.numel() < 1 or offsets.dtype != torch.int32 or offsets.device != rows.device:
        raise InputError(
            f"offsets is {list(offsets.shape)} {offsets.dtype} on {offsets.device}; it must be [groups + 1] int32 "
            f"on {rows.device}: the first row of each group, then the end of the last."
        )
    if offsets.device.type == "cpu":  # to check offsets on a GPU, the host would have to wait for it
        _check_starts(offsets, rows.shape[0])
    groups = offsets.numel() - 1
    return groups, offsets.contiguous(), {"HAS_OFFSETS": True, "GP": next_power_of_2(groups + 1)}


def _check_starts(offsets: torch.Tensor, num_rows: int) -> None:
    """Raise InputError unless groups begin at 0, follow one another, and end within the rows."""
    starts = offsets.tolist()
    if starts[0] != 0 or starts[-1] > num_rows or any(first > second for first, second in pairwise(starts)):
        raise InputError(
            f"offsets is {starts} for {num_rows} rows; it must begin with 0, never decrease, and end at {num_rows} or "
            "before."
        )


def _column_grid(rows: torch.Tensor, groups: int, has_offsets: bool) -> tuple[int, dict[str, int]]:
    """Programs and tile of a kernel over blocks of 32 rows; rows past the last group count as one more group."""
    tile = mx_columns(rows.shape[1])
    strips = -(-rows.shape[1] // (tile["BLOCK_H"] * tile["STEPS"]))
    return max_scale_rows(rows.shape[0], groups + has_offsets) * strips, tile


def _columns_like(
    x: torch.Tensor, offsets: torch.Tensor | None, elem_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    groups = 1 if offsets is None else offsets.shape[0] - 1
    scale = x.new_empty((max_scale_rows(x.shape[0], groups), x.shape[1]), dtype=torch.uint8)
    return x.new_empty(x.shape, dtype=elem_dtype), scale


@library.op(
    "(Tensor x, Tensor? offsets, ScalarType elem_dtype, str mode) -> (Tensor, Tensor)",
    lambda x, offsets, dtype, _: _columns_like(x, offsets, dtype),
)
def _quantize_columns(
    x: torch.Tensor, offsets: torch.Tensor | None, elem_dtype: torch.dtype, mode: str
) -> tuple[torch.Tensor, torch.Tensor]:
    x = _check(x, whole_rows=False)
    groups, starts, about_groups = _groups(offsets, x)
    elements, scale = _columns_like(x, offsets, elem_dtype)
    grid, tile = _column_grid(x, groups, offsets is not None)
    runtime.launch(
        Plan("quantize_columns_kernel", {**_constexprs(elem_dtype, mode), **about_groups, **tile}),
        grid,
        x_ptr=x,
        offsets_ptr=starts,
        elements_ptr=elements,
        scale_ptr=scale,
        num_rows=x.shape[0],
        hidden=x.shape[1],
        num_groups=groups,
        num_scale_rows=scale.shape[0],
    )
    return elements, scale


def quantize_columns(
    x: torch.Tensor,
    offsets: torch.Tensor | None = None,
    elem_dtype: torch.dtype = torch.float8_e4m3fn,
    scaling_mode: ScalingMode | str | Enum = "rceil",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise blocks of 32 rows of each column; blocks start anew in each group of rows.

    Arguments:
        x: [R, H] bf16, fp16 or fp32.
        offsets: [groups + 1] int32 on the device of `x`, first row of each group (0 for the first), then the end
            of the last; None: all rows are one group. The last block of a group may be short.

    Returns elements [R, H] of `elem_dtype`, zero past the last group, and scale bytes [S, H] uint8 with
    S = `max_scale_rows(R, groups)`. The blocks of all groups, in order, have consecutive scale rows: scale row
    row // 32 if all group sizes are multiples of 32. Scale rows without a block are zero.

    Raises:
        InputError: bad shape or dtype, or an unknown mode; on the CPU also offsets that do not begin with 0, decrease,
            or pass the last row. Offsets on a GPU are not checked and must be right.
    """
    elements, scale = _quantize_columns(x, offsets, *_format(elem_dtype, scaling_mode))
    return elements, scale


@library.op(
    "(Tensor x, Tensor? offsets, ScalarType elem_dtype, str mode) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda x, offsets, dtype, _: (*_rows_like(x, dtype), *_columns_like(x, offsets, dtype)),
)
def _quantize_both(
    x: torch.Tensor, offsets: torch.Tensor | None, elem_dtype: torch.dtype, mode: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    x = _check(x, whole_rows=True)
    groups, starts, about_groups = _groups(offsets, x)
    row_elements, row_scale = _rows_like(x, elem_dtype)
    column_elements, column_scale = _columns_like(x, offsets, elem_dtype)
    grid, tile = _column_grid(x, groups, offsets is not None)
    runtime.launch(
        Plan("quantize_both_kernel", {**_constexprs(elem_dtype, mode), **about_groups, **tile}),
        grid,
        x_ptr=x,
        offsets_ptr=starts,
        row_elements_ptr=row_elements,
        row_scale_ptr=row_scale,
        column_elements_ptr=column_elements,
        column_scale_ptr=column_scale,
        num_rows=x.shape[0],
        hidden=x.shape[1],
        num_groups=groups,
        num_scale_rows=column_scale.shape[0],
    )
    return row_elements, row_scale, column_elements, column_scale


def quantize_both(
    x: torch.Tensor,
    offsets: torch.Tensor | None = None,
    elem_dtype: torch.dtype = torch.float8_e4m3fn,
    scaling_mode: ScalingMode | str | Enum = "rceil",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`quantize_rows` and `quantize_columns` of [R, H], H a multiple of 32, reading `x` once.

    Returns elements and scale of rows, then elements and scale of columns.
    """
    rows, row_scale, columns, column_scale = _quantize_both(x, offsets, *_format(elem_dtype, scaling_mode))
    return rows, row_scale, columns, column_scale


@library.op(
    "(Tensor qdata, Tensor scale, Tensor? offsets, ScalarType dtype) -> Tensor",
    lambda qdata, _, __, dtype: qdata.new_empty(qdata.shape, dtype=dtype),
)
def _dequantize_columns(
    qdata: torch.Tensor, scale: torch.Tensor, offsets: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    fp8_dtype(qdata.dtype)
    check_high_precision(dtype, "dtype")
    groups, starts, about_groups = _groups(offsets, qdata)
    if qdata.dim() != 2 or scale.shape != (max_scale_rows(qdata.shape[0], groups), qdata.shape[1]):
        raise InputError(
            f"qdata is {list(qdata.shape)}, scale {list(scale.shape)}; for {groups} groups they must be [R, H] and "
            f"[(R + {BLOCK - 1} * {groups}) // {BLOCK}, H]."
        )
    qdata, scale = qdata.contiguous(), scale.contiguous()
    out = torch.empty_like(qdata, dtype=dtype)
    grid, tile = _column_grid(qdata, groups, offsets is not None)
    runtime.launch(
        Plan("dequantize_columns_kernel", {**about_groups, **tile}),
        grid,
        elements_ptr=qdata,
        scale_ptr=scale,
        offsets_ptr=starts,
        out_ptr=out,
        num_rows=qdata.shape[0],
        hidden=qdata.shape[1],
        num_groups=groups,
    )
    return out


def dequantize_columns(
    qdata: torch.Tensor,
    scale: torch.Tensor,
    offsets: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Values [R, H] of elements and scales from `quantize_columns` with the same `offsets`; zero past the last group.

    Raises:
        InputError: shapes or dtypes that do not fit each other.
    """
    values: torch.Tensor = _dequantize_columns(qdata, scale.view(torch.uint8), offsets, dtype)
    return values
