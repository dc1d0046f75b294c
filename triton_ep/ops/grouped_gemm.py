"""Grouped GEMM of bf16 and MXFP8 operands: chooses the kernel.

Rows come in groups with one weight matrix each: R rows, E experts, N outputs, K terms. Three paths give a product:

"bf16"  A separate pass converts MX operands to bf16, then the bf16 kernel runs. Exact up to float32 accumulation and
        one rounding of the result: bf16 holds every e4m3 value times its power of two for scale bytes 3 to 246. With
        lower scale bytes, values under 2^-133 are rounded; with higher ones, values from 2^128 on become infinite.
"fp8"   Scales are made equal along 128 of K (`equal_scales`, with its error), or along whole rows if one operand is
        `RowScaled` (`rebase_rows`), then fp8 tensor cores multiply. Reads half the bytes of weights. For weights
        prepared once: with equal scales for few rows per expert, with row scales for any number.
"mx"    Tensor cores apply the MX scales (sm_100). Exact up to float32 accumulation and one rounding.
"""

from __future__ import annotations

from typing import Any

import torch

from triton_ep.errors import InputError
from triton_ep.ops import library
from triton_ep.ops.element_formats import MXOperand
from triton_ep.ops.grouped_bf16 import bf16_gemm, bf16_wgrad
from triton_ep.ops.grouped_fp8 import EqualScales, equalize_scales, fp8_gemm, scaled_gemm
from triton_ep.ops.row_scales import RowScaled, rebase_rows
from triton_ep.runtime.launch import INTERPRETING

PATHS = ("auto", "bf16", "fp8", "mx")
FEW_ROWS = 128
"""Up to this many mean rows per expert, weights with equal scales are multiplied in fp8; bf16 is faster from 256 on
(one H200, 32 experts, N = 4096, K = 7168)."""


# --- the paths as ops -----------------------------------------------------------------------------------


@library.op(
    "(Tensor a, Tensor b_t, Tensor offs, ScalarType out_dtype) -> Tensor",
    lambda a, b_t, _, dtype: a.new_empty((a.shape[0], b_t.shape[2]), dtype=dtype),
)
def _grouped_bf16(a: torch.Tensor, b_t: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return bf16_gemm(a, b_t, offs, out_dtype=out_dtype)


@library.op(
    "(Tensor x, Tensor y, Tensor offs, SymInt num_experts, ScalarType out_dtype) -> Tensor",
    lambda x, y, _, num_experts, dtype: x.new_empty((num_experts, x.shape[1], y.shape[1]), dtype=dtype),
)
def _grouped_wgrad_bf16(
    x: torch.Tensor, y: torch.Tensor, offs: torch.Tensor, num_experts: int, out_dtype: torch.dtype
) -> torch.Tensor:
    return bf16_wgrad(x, y, offs, num_experts, out_dtype=out_dtype)


def _equalized_like(qdata: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    *lead, rows, k = qdata.shape
    return qdata.new_empty(qdata.shape), qdata.new_empty((*lead, -(-k // 128), rows), dtype=torch.float32)


@library.op("(Tensor qdata, Tensor scale) -> (Tensor, Tensor)", _equalized_like)
def _equalize_scales(qdata: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    equal = equalize_scales(qdata, scale)
    return equal.qdata, equal.scale


def _product_like(a: torch.Tensor, _: torch.Tensor, w: torch.Tensor, *rest: Any) -> torch.Tensor:
    return a.new_empty((a.shape[0], w.shape[1]), dtype=rest[-1])


_SCALED = "(Tensor a, Tensor a_scale, Tensor w, Tensor w_scale, Tensor offs, ScalarType out_dtype) -> Tensor"


@library.op(_SCALED, _product_like)
def _grouped_fp8(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    return fp8_gemm(EqualScales(a, a_scale), EqualScales(w, w_scale), offs, out_dtype=out_dtype)


@library.op(_SCALED, _product_like)
def _grouped_rows(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    return fp8_gemm(RowScaled(a, a_scale), RowScaled(w, w_scale), offs, out_dtype=out_dtype)


@library.op(_SCALED, _product_like)
def _grouped_mx(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    if not INTERPRETING and torch.cuda.get_device_capability(a.device) < (10, 0):
        raise InputError("path='mx' needs tensor cores that know MX scales (sm_100); choose 'bf16' or 'fp8'.")
    return scaled_gemm((a, a_scale), (w, w_scale), offs, out_dtype=out_dtype)


# --- the entry point --------------------------------------------------------------------------------------


def equal_scales(x: MXOperand) -> EqualScales:
    """Convert MX rows [R, K] or weights [E, K, N], e4m3 in blocks of 32 along K, to one scale per 128 of K.

    For weights that stay the same over many calls: pass the result to `grouped_gemm` instead of the weights.

    Raises:
        InputError: quantised along another dimension, or to another type.
    """
    return EqualScales(*_equalize_scales(*_parts(x, "x")))


Operand = torch.Tensor | EqualScales | RowScaled


def _parts(x: Operand, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements and scales with K last: [R, K], or [E, N, K] for weights given as [E, K, N]."""
    if not isinstance(x, MXOperand):
        raise InputError(f"{name} is not an MXTensor; quantise it along K, or choose path='bf16'.")
    along_k = -1 if x.dim() == 2 else -2
    if x.block_dim != along_k or x.block_size != 32 or x.elem_dtype != torch.float8_e4m3fn:
        raise InputError(f"{name} must be float8_e4m3fn in blocks of 32 along K, dimension {along_k}; it is {x!r}.")
    if x.dim() == 2:
        return x.qdata, x.scale
    return x.qdata.transpose(-2, -1), x.scale.view(torch.uint8).transpose(-2, -1)


def _values(x: Operand) -> torch.Tensor:
    """bf16 values; weights as [E, K, N]."""
    if isinstance(x, EqualScales | RowScaled):
        values = x.dequantize()
        return values.transpose(-2, -1) if values.dim() == 3 else values
    return x.dequantize(torch.bfloat16) if isinstance(x, MXOperand) else x


def _equal(x: Operand, name: str) -> EqualScales:
    return x if isinstance(x, EqualScales) else EqualScales(*_equalize_scales(*_parts(x, name)))


def _by_row(x: Operand, name: str) -> RowScaled:
    if isinstance(x, EqualScales):
        raise InputError(f"{name} has equal scales along 128, the other operand one per row: give both of one kind.")
    return x if isinstance(x, RowScaled) else rebase_rows(*_parts(x, name))


def _choose(a: Operand, b_t: Operand) -> str:
    if isinstance(b_t, RowScaled) and isinstance(a, MXOperand | RowScaled):
        return "fp8"
    if isinstance(b_t, EqualScales) and isinstance(a, MXOperand | EqualScales):
        rows = a.shape[0] if isinstance(a, MXOperand) else a.qdata.shape[0]
        if rows <= FEW_ROWS * b_t.qdata.shape[0]:
            return "fp8"
    return "bf16"


@torch.no_grad()
def grouped_gemm(
    a: Operand,
    b_t: Operand,
    offs: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    path: str = "auto",
) -> torch.Tensor:
    """[R, N] `out_dtype`: rows of group e times b_t[e]; zeros in the rows past the last group. No gradient.

    Arguments:
        a: [R, K] bf16, MXTensor, or the result of `equal_scales` or `rebase_rows` on an MXTensor.
        b_t: [E, K, N], the same choice; typically `w.transpose(-2, -1)` with w [E, N, K], without a copy. Weights
            prepared by `equal_scales` or `prepare_weights(w, "fprop")` are passed as they are.
        offs: [E] int32 on the device, the end of each group (one past its last row); or [E + 1] with the starts,
            0 first. Groups may have any size. The host does not read it.
        out_dtype: bf16, fp16 or fp32.
        path: see the module. "auto" is "fp8" for MX rows and weights with row scales, or with equal scales and
            R <= 128 E; else "bf16": nothing is approximated unless the weights already are. The host knows only R / E,
            an upper bound of the mean rows of a group.

    Raises:
        InputError: operands that do not fit each other, the path or the device.
    """
    if path not in PATHS:
        raise InputError(f"path is {path!r}, choose from {PATHS}.")
    chosen = _choose(a, b_t) if path == "auto" else path
    out: torch.Tensor
    if chosen == "bf16":
        out = _grouped_bf16(_values(a), _values(b_t), offs, out_dtype)
    elif chosen == "fp8":
        by_row = isinstance(a, RowScaled) or isinstance(b_t, RowScaled)
        scaled = _by_row if by_row else _equal
        left, right = scaled(a, "a"), scaled(b_t, "b_t")
        product = _grouped_rows if by_row else _grouped_fp8
        out = product(left.qdata, left.scale, right.qdata, right.scale, offs, out_dtype)
    else:
        out = _grouped_mx(*_parts(a, "a"), *_parts(b_t, "b_t"), offs, out_dtype)
    return out


@torch.no_grad()
def grouped_gemm_dgrad(
    dy: torch.Tensor, b_t: torch.Tensor, offs: torch.Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """[R, K]: gradient of the rows, dy[group e] times b_t[e]^T; zeros in the rows past the last group.

    dy: [R, N] bf16 or MXTensor. b_t: [E, K, N] bf16, or MXTensor quantised along N. Path "bf16".

    Raises:
        InputError: operands that do not fit each other.
    """
    out: torch.Tensor = _grouped_bf16(_values(dy), _values(b_t).transpose(-2, -1), offs, out_dtype)
    return out


@torch.no_grad()
def grouped_gemm_wgrad(
    x: torch.Tensor,
    y: torch.Tensor,
    offs: torch.Tensor,
    num_experts: int,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """[E, I, J]: x^T times y over the rows of each group; zeros for an empty group.

    x: [R, I], y: [R, J], bf16 or MXTensor. x = dY, y = A give the gradient of W [E, N, K]; x = A, y = dY give the
    gradient of W^T. Path "bf16".

    Raises:
        InputError: operands that do not fit each other.
    """
    out: torch.Tensor = _grouped_wgrad_bf16(_values(x), _values(y), offs, num_experts, out_dtype)
    return out


__all__ = [
    "FEW_ROWS",
    "PATHS",
    "EqualScales",
    "RowScaled",
    "equal_scales",
    "grouped_gemm",
    "grouped_gemm_dgrad",
    "grouped_gemm_wgrad",
]
