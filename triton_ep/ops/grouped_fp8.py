"""Launchers of the grouped GEMM on MXFP8 operands (kernels/compute/grouped_fp8.py), for few rows per expert.

The entry point is `ops.grouped_gemm`, which takes MXTensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from triton_ep.errors import InputError
from triton_ep.ops.experts import launch_rows_product
from triton_ep.ops.grouped_bf16 import OUT_DTYPES, boxes, fits_tma, group_ends, programs
from triton_ep.ops.mxfp8 import dequantize_rows
from triton_ep.ops.row_scales import RowScaled
from triton_ep.runtime.launch import INTERPRETING, launch
from triton_ep.runtime.plans import Plan
from triton_ep.runtime.plans.compute import (
    EQUALIZE_ROWS,
    FP8_TILES,
    HARDWARE_TILE,
    Tile,
    gemm_fp8_constexprs,
)

_STEP = 128


@dataclass(frozen=True)
class EqualScales:
    """MXFP8 values with one scale per 128 along K: fp8 tensor cores multiply them without conversion.

    Attributes:
        qdata: [R, K] (rows) or [E, N, K] (weights), float8_e4m3fn, contiguous.
        scale: [K/128, R] or [E, K/128, N] float32, powers of two or NaN; K/128 rounded up.
    """

    qdata: torch.Tensor
    scale: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """Values in bf16, with the shape of `qdata`."""
        k = self.qdata.shape[-1]
        exponents = (self.scale.view(torch.int32) >> 23).to(torch.uint8).transpose(-2, -1)  # 0: 2^-127; 255: NaN
        per_block = exponents.repeat_interleave(_STEP // 32, -1)[..., : k // 32]
        rows = self.qdata.numel() // k if k else 0
        return dequantize_rows(self.qdata.flatten(0, -2), per_block.reshape(rows, k // 32)).view(self.qdata.shape)


def _check(name: str, qdata: torch.Tensor, scale: torch.Tensor, ndim: int) -> None:
    shape = [*qdata.shape[:-1], qdata.shape[-1] // 32]
    if qdata.ndim != ndim or qdata.dtype != torch.float8_e4m3fn or qdata.shape[-1] % 32 or list(scale.shape) != shape:
        raise InputError(
            f"{name} must be {ndim}-D float8_e4m3fn with one scale per 32 values of the last dimension; it is "
            f"{qdata.dtype} {list(qdata.shape)} with scales {list(scale.shape)}."
        )


def equalize_scales(qdata: torch.Tensor, scale: torch.Tensor) -> EqualScales:
    """Give every 128 values along K the largest of their four scales.

    qdata: [R, K] or [E, N, K] float8_e4m3fn; scale: the same shape with K/32, uint8 or float8_e8m0fnu.

    A value is exact unless it becomes subnormal under the larger scale byte s. It is then rounded to a multiple of
    2^(s - 127 - 9), an error of at most 2^(s - 127 - 10). With scales from RCEIL the largest of the 128 values is
    above 224 * 2^(s - 127), so the error is below 2^-17 of that value.

    Raises:
        InputError: shapes or dtypes that do not fit each other.
    """
    _check("qdata", qdata, scale, qdata.ndim if qdata.ndim in (2, 3) else 2)
    qdata, scale = qdata.contiguous(), scale.view(torch.uint8).contiguous()
    *lead, rows, k = qdata.shape
    num_rows = qdata.numel() // k if k else 0
    out = torch.empty_like(qdata)
    out_scale = scale.new_empty(*lead, -(-k // _STEP), rows, dtype=torch.float32)
    grid = -(-num_rows // EQUALIZE_ROWS) * -(-k // _STEP)
    launch(
        Plan("equalize_scales_kernel", {"ROWS": EQUALIZE_ROWS}),
        grid,
        qdata_ptr=qdata,
        scale_ptr=scale,
        out_ptr=out,
        out_scale_ptr=out_scale,
        num_rows=num_rows,
        k=k,
        rows_per_matrix=rows,
    )
    return EqualScales(out, out_scale)


def _tile_for(num_rows: int, num_experts: int, hardware: bool) -> Tile:
    """Tile by the mean rows of a group."""
    if hardware:
        return HARDWARE_TILE
    mean = -(-num_rows // num_experts)
    return next((tile for tile in FP8_TILES if mean <= tile.m), FP8_TILES[-1])


def _result(
    a: torch.Tensor, w: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [R, N], not yet written, and [E] int32 ends of groups."""
    if a.shape[1] != w.shape[2]:
        raise InputError(f"the rows have K = {a.shape[1]}, the weights K = {w.shape[2]}.")
    if out_dtype not in OUT_DTYPES:
        raise InputError(f"out_dtype is {out_dtype}, choose from {OUT_DTYPES}.")
    ends = group_ends(offs, w.shape[0], a.shape[0])
    if not a.device == w.device == ends.device:
        raise InputError(f"rows, weights and offs are on {a.device}, {w.device} and {ends.device}.")
    return a.new_empty(a.shape[0], w.shape[1], dtype=out_dtype), ends


def _launch(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    hardware: bool,
    tma: bool | None,
) -> torch.Tensor:
    out, ends = _result(a, w, offs, out_dtype)
    (num_rows, k), (num_experts, n, _) = a.shape, w.shape
    if out.numel() == 0 or k == 0 or num_experts == 0:
        return out.zero_()
    tile = _tile_for(num_rows, num_experts, hardware)
    tma = fits_tma((a, k), (w, k)) and not INTERPRETING if tma is None else tma
    operands: tuple[Any, Any] = (a, w)
    if tma:
        operands = (
            boxes(a, num_rows, k, k, [tile.m, _STEP]),
            boxes(w, num_experts * n, k, k, [tile.n, _STEP]),
        )
    constexprs = gemm_fp8_constexprs(num_experts, tile, tma, hardware)
    launch(
        Plan("grouped_fp8_kernel", constexprs, tile.warps),
        programs(a.device),
        a=operands[0],
        b=operands[1],
        a_scale_ptr=a_scale,
        b_scale_ptr=w_scale,
        out_ptr=out,
        ends_ptr=ends,
        num_rows=num_rows,
        n=n,
        k=k,
        num_experts=num_experts,
    )
    return out


def fp8_gemm(
    a: EqualScales | RowScaled,
    w: EqualScales | RowScaled,
    offs: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    tma: bool | None = None,
) -> torch.Tensor:
    """[R, N]: rows of group e of `a` [R, K] times w[e]^T, w [E, N, K]; zeros in the rows past the last group.

    Both operands have equal scales along 128 of K, or both have one scale per row. Computes one fp8 product per 128 of
    K and adds the products in float32. Inside a product, Hopper's tensor cores keep about 14 bits of the sums; other
    devices and the interpreter keep all of float32.

    Raises:
        InputError: shapes, dtypes or devices that do not fit each other.
    """
    if type(a) is not type(w):
        raise InputError(f"a is {type(a).__name__}, w is {type(w).__name__}: give both scales of one kind.")
    if a.qdata.ndim != 2 or w.qdata.ndim != 3:
        raise InputError(f"rows must be [R, K] and weights [E, N, K]: {list(a.qdata.shape)}, {list(w.qdata.shape)}.")
    if isinstance(a, EqualScales) or isinstance(w, EqualScales):
        return _launch(a.qdata, a.scale, w.qdata, w.scale, offs, out_dtype, False, tma)
    out, ends = _result(a.qdata, w.qdata, offs, out_dtype)
    if out.numel() == 0 or a.qdata.shape[1] == 0 or w.qdata.shape[0] == 0:
        return out.zero_()
    starts = offs if offs.shape[0] > len(ends) and offs.dtype == torch.int32 else F.pad(ends, (1, 0))
    launch_rows_product(a, w, starts.contiguous(), out, None, None, None, False, False, tma=tma, zero_rest=True)
    return out


def scaled_gemm(
    a: tuple[torch.Tensor, torch.Tensor],
    w: tuple[torch.Tensor, torch.Tensor],
    offs: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    tma: bool | None = None,
) -> torch.Tensor:
    """`fp8_gemm` of MX elements [.., K] and scales [.., K/32] without preparation, for tensor cores that apply scales.

    Exact up to float32 accumulation. sm_100 has such tensor cores; elsewhere the compiler emulates them, slowly.

    Raises:
        InputError: shapes, dtypes or devices that do not fit each other.
    """
    _check("a", *a, 2)
    _check("w", *w, 3)
    (a_q, a_s), (w_q, w_s) = ((q.contiguous(), s.view(torch.uint8).contiguous()) for q, s in (a, w))
    return _launch(a_q, a_s, w_q, w_s, offs, out_dtype, True, tma)
