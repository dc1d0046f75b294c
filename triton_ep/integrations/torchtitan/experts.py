"""The grouped product of torchtitan's experts: `GroupedExperts._grouped_mm` in bf16 or MXFP8."""

from __future__ import annotations

from typing import Any

import torch

from triton_ep.errors import ConfigError
from triton_ep.integrations import arguments as check
from triton_ep.mx.grouped_mm import _to_mxfp8_then_scaled_grouped_mm
from triton_ep.ops.grouped_gemm import grouped_gemm, grouped_gemm_dgrad, grouped_gemm_wgrad


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b_t, offs)
        return grouped_gemm(a, b_t, offs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (dy,) = grads
        a, b_t, offs = ctx.saved_tensors
        dy = dy.contiguous()
        da = grouped_gemm_dgrad(dy, b_t, offs) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return da, None, None
        # Same layout as the stored weights, [E, N, K], so that the optimizer's update copies nothing.
        return da, grouped_gemm_wgrad(dy, a, offs, b_t.shape[0]).transpose(-2, -1), None


def grouped_mm(A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor, recipe: str = "bf16") -> torch.Tensor:
    """[R, N] bf16: rows of expert e times B_t[e], as `GroupedExperts._grouped_mm` computes; differentiable.

    Args:
        A: [R, K] bf16; with recipe="mxfp8" it may be an `MXTensor`.
        B_t: [e, K, N] bf16, a transposed view of [e, N, K].
        offs: [e] int32 on the device, the end of each expert's rows.
        recipe: "bf16", or "mxfp8": all three products of a training step take operands quantised to MXFP8.

    Rows past the last expert's are zeros, in the gradient of A as well.

    Raises:
        ConfigError: another recipe. InputError: shapes or dtypes that do not fit each other.
    """
    if not isinstance(recipe, str) or recipe not in ("bf16", "mxfp8"):
        raise ConfigError(f'recipe must be "bf16" or "mxfp8", got {check.shown(recipe)}.')
    for name, given, dim in (("A", A, 2), ("B_t", B_t, 3), ("offs", offs, 1)):
        check.tensor(name, given, dim)
    if recipe == "mxfp8":
        return _to_mxfp8_then_scaled_grouped_mm(A, B_t, offs)
    out: torch.Tensor = _GroupedMM.apply(A, B_t, offs)
    return out
