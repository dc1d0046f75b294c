"""Product of two MX matrices, and of groups of rows with one matrix per group.

"emulated"  Multiplies the values of both operands: any formats, block sizes and device. This defines the product; it is
            exact up to accumulation and one rounding of the result.
"hardware"  torch's scaled_mm, if the GPU multiplies MX blocks itself (sm_100 and later): e4m3 by e4m3, or packed fp4
            by packed fp4 if torch was built for it, in blocks of 32. It multiplies the same values and accumulates in
            float32.
"auto"      "hardware" for e4m3 if possible, else "emulated".
"""

from __future__ import annotations

import torch
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from triton_ep.errors import InputError
from triton_ep.mx.formats import BLOCK, E2M1_PACKED, E4M3, check_high_precision
from triton_ep.mx.swizzle import to_blocked
from triton_ep.mx.tensor import MXTensor
from triton_ep.ops.grouped_bf16 import group_ends
from triton_ep.ops.grouped_gemm import grouped_gemm

PATHS = ("emulated", "hardware", "auto")
_FIRST_WITH_MX = (10, 0)
"""Compute capability from which tensor cores multiply MX blocks."""


def mx_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    bias: torch.Tensor | None = None,
    path: str = "emulated",
) -> torch.Tensor:
    """[M, N] = a [M, K] times b [K, N], plus bias [N]: the product of the values that the operands represent.

    Arguments:
        a: MXTensor, with blocks along K for "hardware"; a plain tensor is multiplied as it is.
        b: the same; for a weight w [N, K] that is quantised along K, `w.t()`.
        out_dtype: of the result: bf16, fp16 or fp32; by default the promoted dtype of `a` and `b`.
        bias: [N], added after the product was rounded to `out_dtype`.
        path: "emulated", "hardware" or "auto", see the module. Only "emulated" is differentiable.

    Raises:
        InputError: shapes do not fit, neither operand is an MXTensor, or "hardware" is not available.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise InputError(f"a must be [M, K] and b [K, N]; they are {list(a.shape)} and {list(b.shape)}.")
    if not (isinstance(a, MXTensor) or isinstance(b, MXTensor)):
        raise InputError(f"neither a nor b is an MXTensor: {type(a).__name__} and {type(b).__name__}.")
    if bias is not None and bias.shape != b.shape[1:]:
        raise InputError(f"bias must be [{b.shape[1]}], it is {list(bias.shape)}.")
    check_path(path)
    out_dtype = torch.promote_types(a.dtype, b.dtype) if out_dtype is None else out_dtype
    check_high_precision(out_dtype, "out_dtype")
    obstacle = hardware_obstacle(a, b) if path != "emulated" else ""
    if path == "auto" and isinstance(a, MXTensor) and a.elem_dtype != E4M3.dtype:
        obstacle = "what torch was built for shows only when it is called"
    if path == "hardware" and obstacle is not None:
        raise InputError(f'path "hardware" cannot be taken: {obstacle}. Use "auto" or "emulated".')
    out = _hardware(a, b, out_dtype) if obstacle is None else _emulated(a, b, out_dtype)
    return out if bias is None else out + bias.to(out_dtype)


def check_path(path: str) -> None:
    """Raise InputError unless this is the name of a path."""
    if path not in PATHS:
        raise InputError(f"path is {path!r}; choose one of {', '.join(map(repr, PATHS))}.")


def hardware_obstacle(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """Why torch's scaled_mm does not take these operands here, or None if it does."""
    if not isinstance(a, MXTensor) or not isinstance(b, MXTensor):
        return "both operands must be MXTensors"
    if (a.block_dim, b.block_dim) != (-1, -2) or a.block_size != BLOCK or b.block_size != BLOCK:
        return (
            f"blocks must be {BLOCK} values along K; they are {a.block_size} along dimension {a.block_dim} of a and "
            f"{b.block_size} along dimension {b.block_dim} of b"
        )
    if a.elem_dtype != b.elem_dtype or a.elem_dtype not in (E4M3.dtype, E2M1_PACKED.dtype):
        return f"both must be {E4M3.dtype} or both {E2M1_PACKED.dtype}; they are {a.elem_dtype} and {b.elem_dtype}"
    if not a.numel() or not b.numel() or b.shape[1] % 16 or a.shape[1] % BLOCK:
        return f"K must be a multiple of {BLOCK} and N of 16, not {a.shape[1]} and {b.shape[1]}, and none zero"
    if not a.is_cuda:
        return f"it needs a GPU, the operands are on {a.device}"
    capability = torch.cuda.get_device_capability(a.device)
    if capability < _FIRST_WITH_MX:
        return (
            f"the GPU has compute capability {capability[0]}.{capability[1]}, tensor cores multiply MX blocks from "
            f"{_FIRST_WITH_MX[0]}.{_FIRST_WITH_MX[1]} on"
        )
    return None


def mx_grouped_mm(
    a: torch.Tensor, b_t: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """[R, N]: rows of group e times b_t[e], multiplying the values that the operands represent, as bf16.

    Arguments:
        a: [R, K], an MXTensor of any format or bf16.
        b_t: [E, K, N], the same; for weights w [E, N, K] quantised along K, `w.transpose(-2, -1)`.
        offs: [E] int32 on the device, the row after the last row of each group, or [E + 1] with the starts.
        out_dtype: of the result: bf16, fp16 or fp32.

    Rows past the last group are zeros. For MXFP8 operands with gradients use `mx.grouped_mm`.

    Raises:
        InputError: shapes or dtypes that do not fit.
    """
    if a.dim() != 2 or b_t.dim() != 3 or a.shape[1] != b_t.shape[1]:
        raise InputError(f"a must be [R, K] and b_t [E, K, N]; they are {list(a.shape)} and {list(b_t.shape)}.")
    check_high_precision(out_dtype, "out_dtype")
    values = _values(a, torch.bfloat16), _values(b_t, torch.bfloat16)
    return grouped_gemm(*values, group_ends(offs, b_t.shape[0], a.shape[0]), out_dtype=out_dtype)


def _values(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.dequantize(dtype) if isinstance(x, MXTensor) else x.to(dtype)


def _emulated(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    # bf16 has the range of MX values and holds them exactly; other dtypes go through float32.
    all_bf16 = a.dtype == b.dtype == out_dtype == torch.bfloat16
    dtype = torch.bfloat16 if all_bf16 else torch.float32
    product = torch.mm(_values(a, dtype), _values(b, dtype))
    # Skip a `to` that changes nothing: if a torch.autograd.Function returns its result, torch.compile of torch 2.11
    # returns gradients of zero.
    return product if product.dtype == out_dtype else product.to(out_dtype)


def _hardware(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    assert isinstance(a, MXTensor) and isinstance(b, MXTensor), "hardware_obstacle names anything else"
    # scaled_mm takes b^T, stored as rows along K.
    b_rows, b_scale = b.qdata.t().contiguous(), b.scale.t().contiguous()
    a_rows = a.qdata.contiguous()
    if a.elem_dtype == E2M1_PACKED.dtype:
        a_rows, b_rows = (rows.view(torch.float4_e2m1fn_x2) for rows in (a_rows, b_rows))
    try:
        return scaled_mm(
            a_rows,
            b_rows.t(),
            to_blocked(a.scale),
            ScalingType.BlockWise1x32,
            to_blocked(b_scale),
            ScalingType.BlockWise1x32,
            SwizzleType.SWIZZLE_32_4_4,
            SwizzleType.SWIZZLE_32_4_4,
            output_dtype=out_dtype,
        )
    except NotImplementedError as error:
        raise InputError(
            f'path "hardware" cannot be taken: torch {torch.__version__} does not multiply {a.elem_dtype} here: '
            f'{error}. Use "emulated".'
        ) from error
