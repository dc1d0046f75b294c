"""Grouped matrix product for training with MXFP8 operands, and its gradients.

Each product quantises its operands in blocks of 32 along the dimension that it sums over:

    y  = A  W^T   A along K, W along K
    dA = dY W     dY along N, W along N
    dW = dY^T A   both along the rows of each group, blocks starting again at each group

The products run on the dequantised values (`ops.grouped_gemm`, path "bf16"): float32 accumulation, one rounding. Rows
that arrive quantised are used as they are: dW then takes the values of A, and of dY as quantised for dA.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from triton_ep.errors import InputError
from triton_ep.mx.formats import BLOCK, ScalingMode
from triton_ep.mx.tensor import MXTensor
from triton_ep.ops.grouped_bf16 import group_ends
from triton_ep.ops.grouped_gemm import grouped_gemm, grouped_gemm_dgrad, grouped_gemm_wgrad
from triton_ep.ops.mxfp8 import dequantize_columns, quantize_columns


def _along_last(x: torch.Tensor, mode: ScalingMode) -> torch.Tensor:
    """bf16 values after quantisation along the last dimension; an MXTensor is only dequantised."""
    mx = x if isinstance(x, MXTensor) else MXTensor.to_mx(x, scaling_mode=mode)
    return mx.dequantize(torch.bfloat16)


def _along_rows(x: torch.Tensor, offsets: torch.Tensor | None, mode: ScalingMode) -> torch.Tensor:
    """bf16 values [R, H] after quantisation along the rows of each group."""
    qdata, scale = quantize_columns(x, offsets, scaling_mode=mode)
    return dequantize_columns(qdata, scale, offsets)


def _weights_along(b_t: torch.Tensor, dim: int, mode: ScalingMode) -> torch.Tensor:
    """b_t [E, K, N] after quantisation along `dim`, -2 or -1, in its own layout."""
    k_major = _is_k_major(b_t)
    stored = (b_t.transpose(-2, -1) if k_major else b_t).contiguous()
    if (dim == -2) == k_major:
        values = _along_last(stored, mode)
    else:
        # Blocks of a column do not cross experts: each expert has a multiple of 32 rows.
        values = _along_rows(stored.flatten(0, 1), None, mode).view(stored.shape)
    return values.transpose(-2, -1) if k_major else values


def _is_k_major(b_t: torch.Tensor) -> bool:
    return b_t.stride(-2) == 1 and b_t.stride(-1) != 1


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: torch.Tensor,
        b_t: torch.Tensor,
        ends: torch.Tensor,
        out_dtype: torch.dtype,
        wgrad_with_hp: bool,
        mode: ScalingMode,
    ) -> torch.Tensor:
        ctx.save_for_backward(a, b_t, ends)
        ctx.wgrad_with_hp, ctx.mode = wgrad_with_hp, mode
        return grouped_gemm(_along_last(a, mode), _weights_along(b_t, -2, mode), ends, out_dtype=out_dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (dy,) = grads
        a, b_t, ends = ctx.saved_tensors
        needs_da, needs_db = ctx.needs_input_grad[:2]
        da = db_t = None
        a_is_mx = isinstance(a, MXTensor)
        full_dy = dy.dequantize(torch.bfloat16) if isinstance(dy, MXTensor) else dy.to(torch.bfloat16)
        rounded_dy = full_dy
        if not isinstance(dy, MXTensor) and (needs_da or (a_is_mx and not ctx.wgrad_with_hp)):
            rounded_dy = _along_last(dy, ctx.mode)
        if needs_da:
            da = grouped_gemm_dgrad(rounded_dy, _weights_along(b_t, -1, ctx.mode), ends, out_dtype=a.dtype)
        if needs_db:
            if a_is_mx:
                left, right = full_dy if ctx.wgrad_with_hp else rounded_dy, a.dequantize(torch.bfloat16)
            elif ctx.wgrad_with_hp:
                left, right = full_dy, a
            else:
                offsets = torch.nn.functional.pad(ends, (1, 0))
                left, right = (_along_rows(x, offsets, ctx.mode) for x in (full_dy, a))
            # Return the gradient in the layout of the weights, so that an optimizer's update copies nothing.
            if _is_k_major(b_t):
                db_t = grouped_gemm_wgrad(left, right, ends, b_t.shape[0]).transpose(-2, -1)
            else:
                db_t = grouped_gemm_wgrad(right, left, ends, b_t.shape[0])
        return da, db_t, None, None, None, None


def _check_options(kernel_preference: Any, wgrad_with_hp: Any, out_dtype: Any) -> None:
    """Refuse arguments that a positional call may have silently misplaced."""
    if kernel_preference is not None and not isinstance(kernel_preference, Enum | str):
        raise InputError(
            f"kernel_preference is {kernel_preference!r}; it must be None, a name or a member of torchao's enum. It is "
            "the sixth argument, and wgrad_with_hp the seventh."
        )
    if not isinstance(wgrad_with_hp, bool):
        raise InputError(f"wgrad_with_hp is {wgrad_with_hp!r}; it must be True or False.")
    if out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise InputError(f"out_dtype is {out_dtype!r}; it must be torch.bfloat16, torch.float16 or torch.float32.")


def _check(a: Any, b_t: Any, block_size: Any) -> None:
    for name, given in (("A", a), ("B_t", b_t)):
        if not isinstance(given, torch.Tensor):
            raise InputError(f"{name} must be a tensor, got {type(given).__name__}.")
    if a.dim() != 2 or b_t.dim() != 3 or a.shape[1] != b_t.shape[1]:
        raise InputError(f"A must be [R, K] and B_t [E, K, N]; they are {list(a.shape)} and {list(b_t.shape)}.")
    if isinstance(b_t, MXTensor) or a.dtype != torch.bfloat16 or b_t.dtype != torch.bfloat16:
        raise InputError(f"A must be bfloat16 or an MXTensor that stands for it, B_t bfloat16: {a.dtype}, {b_t!r:.80}.")
    if not isinstance(block_size, int) or block_size != BLOCK:
        raise InputError(f"block_size is {block_size!r:.40}; MXFP8 has blocks of {BLOCK}.")
    if b_t.shape[1] % BLOCK or b_t.shape[2] % BLOCK:
        raise InputError(f"K and N must be multiples of {BLOCK}; they are {b_t.shape[1]} and {b_t.shape[2]}.")
    if isinstance(a, MXTensor) and (a.block_dim != -1 or a.block_size != BLOCK):
        raise InputError(f"A must be quantised in blocks of {BLOCK} along K; it is {a!r}.")


def _add_bias(out: torch.Tensor, bias: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Add bias [N], or [E, N] by group, and round to the dtype of `out`; rows past the last group get no bias."""
    rows = torch.arange(out.shape[0], device=out.device, dtype=ends.dtype)
    # Not searchsorted: inductor of torch < 2.13 compiles it to read the whole tensor when `ends` is a slice
    # (https://github.com/pytorch/pytorch/issues/182343).
    group = (rows.unsqueeze(1) >= ends).sum(1)
    if bias.dim() == 1:
        total = torch.where((group < ends.shape[0]).unsqueeze(1), out + bias, out)
    else:
        total = out + torch.nn.functional.pad(bias, (0, 0, 0, 1))[group]
    return total.to(out.dtype)  # a bias of a wider dtype promotes the sum


def _to_mxfp8_then_scaled_grouped_mm(
    A: torch.Tensor,
    B_t: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    kernel_preference: Enum | str | None = None,
    wgrad_with_hp: bool = False,
    scale_calculation_mode: ScalingMode | str | Enum = "rceil",
    pad_token_groups_for_grouped_mm: bool = False,
    block_size: int = BLOCK,
) -> torch.Tensor:
    """[R, N]: rows of group e times B_t[e], in MXFP8 values; differentiable, with gradients in MXFP8 values too.

    Arguments are in torchao's order; `block_size`, which torchao's function does not have, comes last.

    Arguments:
        A: [R, K] bf16, or MXTensor quantised along K. Its gradient is bf16.
        B_t: [E, K, N] bf16, w.transpose(-2, -1) or contiguous. The gradient has the same layout.
        offs: [E] int32 or int64 on the device, the row after the last row of each group, or [E + 1] with the starts.
        bias: [N], or [E, N] one per group; added to the rounded product. The sum is rounded to `out_dtype`.
        out_dtype: of the result: bf16, fp16 or fp32.
        kernel_preference: accepted for callers of torchao, a member of its enum or a name; the device alone decides.
        wgrad_with_hp: compute the weights' gradient from dY (and A, if bf16) without quantisation along the rows.
        scale_calculation_mode: how a block's scale is computed: "rceil", "floor", "ceil", "even".
        pad_token_groups_for_grouped_mm: accepted and not needed: groups have any size, here and in the gradients.
        block_size: 32.

    The incoming gradient may be an MXTensor; its values are used as they are.
    Rows past the last group are zeros, also in the gradient of A. They add nothing to the gradients of B_t and bias.

    Raises:
        InputError: `offs` is missing, K or N is not a multiple of 32, or a dtype, shape, preference or switch does not
            fit.

    Source: torchao.prototype.moe_training, `_to_mxfp8_then_scaled_grouped_mm`.
    """
    _check(A, B_t, block_size)
    _check_options(kernel_preference, wgrad_with_hp, out_dtype)
    num_experts, _, width = B_t.shape
    if bias is not None and not isinstance(bias, torch.Tensor):
        raise InputError(f"bias must be a tensor or None, got {type(bias).__name__}.")
    if bias is not None and tuple(bias.shape) not in ((width,), (num_experts, width)):
        raise InputError(
            f"bias is {list(bias.shape)}; it must be [{width}], or [{num_experts}, {width}], one per group."
        )
    if offs is None:
        raise InputError("offs is None; it must be the ends of the groups: [E] int32 on the device, or [E + 1] starts.")
    ends = group_ends(offs, num_experts, A.shape[0])
    mode = ScalingMode.parse(scale_calculation_mode)
    out: torch.Tensor = _GroupedMM.apply(A, B_t, ends, out_dtype, wgrad_with_hp, mode)
    return out if bias is None else _add_bias(out, bias, ends)
