"""Launchers of the backward pass of experts (kernels/experts).

Rows stand in segments, one per expert: `offs` [E + 1] int32 on the device, first row of each, then the end of the last.
What stands behind it is neither read nor written. R rows, E experts, H hidden, F ffn.
"""

from __future__ import annotations

import torch

from triton_ep.errors import InputError
from triton_ep.ops.grouped_bf16 import bf16_wgrad, fits_tma, programs
from triton_ep.ops.weighted_rows import weighted_rows_backward
from triton_ep.plans import experts_backward as plans
from triton_ep.runtime import INTERPRETING, Boxes, launch

__all__ = ["weight_gradient", "weighted_rows_backward"]


def weight_gradient(
    x: torch.Tensor,
    y: torch.Tensor,
    offs: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    aligned: bool = False,
) -> torch.Tensor:
    """[E, I, J]: x_e^T @ y_e over the rows of each segment; zeros for an empty one.

    Arguments:
        x, y: [R, I] and [R, J] bf16. With x = dY and y = A it is the gradient of W [E, N, K].
        offs: [E + 1] int32.
        out: [E, I, J] contiguous, where the result goes: bf16, or with `accumulate` float32; None: new, bf16.
        accumulate: add the result to `out`; what belongs to an empty segment is not touched.
        aligned: the caller promises that every segment holds a multiple of 64 rows, which is a fifth faster.

    Raises:
        InputError: shapes, dtypes or devices that do not fit each other.
    """
    num_experts = offs.shape[0] - 1
    if accumulate and (out is None or out.dtype != torch.float32):
        raise InputError(f"accumulate=True adds to a float32 out; it is {None if out is None else out.dtype}.")
    if out is not None and not accumulate and out.dtype != torch.bfloat16:
        raise InputError(f"out is {out.dtype}; it must be bfloat16, or float32 with accumulate=True.")
    if not aligned or not x.numel() or not y.numel() or not _fit(x, y, out):
        return bf16_wgrad(x, y, offs, num_experts, out=out, accumulate=accumulate)
    (num_rows, num_i), num_j = x.shape, y.shape[1]
    if y.shape[0] != num_rows or offs.dtype != torch.int32:
        raise InputError(f"x has {num_rows} rows, y {y.shape[0]}, offs is {offs.dtype}: as many rows, and int32.")
    if out is None:
        out = x.new_empty(num_experts, num_i, num_j)
    elif out.shape != (num_experts, num_i, num_j):
        raise InputError(f"out is {list(out.shape)}; it must be [{num_experts}, {num_i}, {num_j}].")
    plan, tile = plans.weight_gradient(num_experts, accumulate, INTERPRETING)
    # float32 is stored in twice as many boxes.
    box = [1, tile.m, tile.n // (4 if accumulate else 2)]
    operands = (
        Boxes(x, [num_rows, num_i], [num_i, 1], [tile.k, tile.m]),
        Boxes(y, [num_rows, num_j], [num_j, 1], [tile.k, tile.n]),
        Boxes(out, [num_experts, num_i, num_j], [num_i * num_j, num_j, 1], box),
    )
    sizes = (num_rows, num_i, num_j, num_experts)
    launch(plan.kernel, programs(x.device), (*operands, offs, *sizes), plan.constexprs, num_warps=plan.num_warps)
    return out


def _fit(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor | None) -> bool:
    """Whether boxes can be read and written: bf16 matrices without gaps, rows of whole 16 bytes."""
    if x.dtype != torch.bfloat16 or y.dtype != torch.bfloat16 or x.ndim != 2 or y.ndim != 2:
        return False
    matrices = [x, y] if out is None else [x, y, out]
    return all(t.is_contiguous() and fits_tma((t, t.shape[-1])) for t in matrices) and y.shape[1] % 8 == 0
