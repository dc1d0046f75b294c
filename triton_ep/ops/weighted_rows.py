"""Backward of a weighted sum of rows (kernels/experts/weighted_rows.py)."""

from __future__ import annotations

import torch

from triton_ep.errors import InputError
from triton_ep.ops import library
from triton_ep.ops.element_formats import BLOCK
from triton_ep.runtime import launch as runtime  # before the kernels: decides whether they are interpreted
from triton_ep.runtime.plans.experts_backward import weighted_rows


@library.op(
    "(Tensor dy, Tensor? scale, Tensor y, Tensor weights, Tensor? offs) -> (Tensor, Tensor)",
    lambda dy, scale, y, weights, offs: (y.new_empty(y.shape), weights.new_empty(weights.shape)),
)
def _weighted_rows_backward(
    dy: torch.Tensor,
    scale: torch.Tensor | None,
    y: torch.Tensor,
    weights: torch.Tensor,
    offs: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, hidden = y.shape
    dy, y, weights = dy.contiguous(), y.contiguous(), weights.contiguous()
    grad, grad_weights = torch.empty_like(y), torch.empty_like(weights)
    if hidden == 0 or num_rows == 0:
        return grad, grad_weights.zero_()
    plan = weighted_rows(hidden, scale is not None, offs is not None, runtime.INTERPRETING)
    runtime.launch(
        plan,
        -(-num_rows // plan.constexprs["ROWS"]),
        dy_ptr=dy,
        dy_scale_ptr=dy if scale is None else scale.contiguous(),
        y_ptr=y,
        weights_ptr=weights,
        offs_ptr=weights if offs is None else offs.contiguous(),
        grad_ptr=grad,
        grad_weights_ptr=grad_weights,
        num_rows=num_rows,
        hidden=hidden,
        last=0 if offs is None else offs.shape[0] - 1,
    )
    return grad, grad_weights


def weighted_rows_backward(
    dy: torch.Tensor,
    y: torch.Tensor,
    weights: torch.Tensor,
    offs: torch.Tensor | None = None,
    *,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of sum(weights[r] * y[r]) over rows: dy * weights [R, H] in the dtype of `y`, and <dy, y> [R] float32.

    Arguments:
        dy: [R, H], the gradient of the sum that each row enters: bf16, fp16 or fp32; with `scale` e4m3.
        y: [R, H] bf16, fp16 or fp32.
        weights: [R] float32.
        offs: int32 on the device; its last entry is the end of the rows in use. Past it both gradients are zero, and
            `dy`, `y` and `weights` are not read. None: all rows are in use.
        scale: [R, H / 32] uint8, scale bytes of MXFP8 rows `dy`.

    Raises:
        InputError: shapes or dtypes that do not fit each other.
    """
    if y.ndim != 2 or dy.shape != y.shape or weights.shape != y.shape[:1] or weights.dtype != torch.float32:
        raise InputError(
            f"dy is {list(dy.shape)}, y {list(y.shape)}, weights {weights.dtype} {list(weights.shape)}; they must be "
            "[R, H], [R, H] and float32 [R]."
        )
    if (dy.dtype == torch.float8_e4m3fn) != (scale is not None):
        raise InputError(f"dy is {dy.dtype}, scale {'missing' if scale is None else 'given'}: both, or neither, of MX.")
    if scale is not None and scale.shape != (y.shape[0], y.shape[1] // BLOCK):
        raise InputError(f"scale is {list(scale.shape)}; for dy {list(dy.shape)} it must be [R, H / {BLOCK}].")
    grad, grad_weights = _weighted_rows_backward(dy, scale, y, weights, offs)
    return grad, grad_weights
