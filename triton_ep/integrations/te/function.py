"""A linear layer's forward and backward pass by a plan: the autograd node, and the ops for torch.compile.

Linear (one matrix) and GroupedLinear (one matrix per group of rows) both use these; without groups `ends` is None.

In eager mode the node keeps x in 8 bits for the backward pass, quantised along columns. A compiled graph has one op for
the forward and one for the backward pass. If the plan is not known while tracing, the forward op looks it up when it
runs and returns it for the backward op. So one traced graph serves any recipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from triton_ep.errors import InputError
from triton_ep.integrations.te import operands, plan, support
from triton_ep.integrations.te.operands import E4M3, Operand, Quantised
from triton_ep.integrations.te.plan import Plan
from triton_ep.integrations.te.wgrad import WeightGradients
from triton_ep.mx.tensor import MXTensor
from triton_ep.ops import library


def forward(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    ends: torch.Tensor | None,
    how: Plan | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Result [..., N] in `out_dtype` of x [..., K], weights [N, K] each, biases [N] each or none."""
    left: Operand
    right: Operand
    if how is None:
        left = operands.values_of(x, out_dtype)
        right = operands.one_below_the_other([operands.values_of(w, out_dtype) for w in weights])
    else:
        support.warn_if_emulated()
        left, right = operands.rows_of(x, E4M3), operands.weight_rows(weights, how.tiles)
    if ends is None:
        out = operands.product(left, right, False, False)
        out = out + biases[0].float() if biases else out
        return out.to(out_dtype).view(*x.shape[:-1], out.shape[-1])
    sum_dtype = torch.float32 if biases else out_dtype
    out = operands.grouped_forward(left, right, ends, len(weights), sum_dtype)
    if biases:
        out = out + operands.rows_of_groups(torch.stack(list(biases)).float(), ends, out.shape[0])
    return out.to(out_dtype).view(*x.shape[:-1], out.shape[-1])


def backward(
    dy: torch.Tensor,
    x: torch.Tensor | Quantised,
    weights: Sequence[torch.Tensor],
    ends: torch.Tensor | None,
    how: Plan | None,
    compute_dtype: torch.dtype,
    wanted: tuple[torch.dtype | None, torch.dtype | None, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of x [M, K], of weights [E, N, K], and of biases [E, N] float32.

    Arguments:
        x: input of the forward pass, or x quantised along columns for the weights' gradient.
        compute_dtype: of products whose operands are not quantised.
        wanted: dtypes of the gradients of x and of the weights, None for one that is not wanted; then whether the
            gradient of the biases is wanted.
    """
    x_dtype, w_dtype, want_bias = wanted
    experts = len(weights)
    offsets = None if ends is None else torch.nn.functional.pad(ends, (1, 0))
    in_8_bits = how is not None and how.override is None
    dx = dw = db = None
    plain_dy = operands.values_of(dy, compute_dtype)
    if x_dtype is not None:
        dx = _dgrad(dy, plain_dy, weights, ends, how, compute_dtype, x_dtype)
    if w_dtype is not None:
        left: Operand
        right: Operand
        if in_8_bits:
            assert how is not None, "8 bits come from a plan"
            left = operands.columns_of(dy if operands.quantised_already(dy) else plain_dy, how.grad_dtype, offsets)
            right = x if isinstance(x, Quantised) else operands.columns_of(x, E4M3, offsets)
        else:
            left = plain_dy
            right = _forward_values(x, how, compute_dtype)
        if ends is None:
            dw = operands.product(left, right, True, True).to(w_dtype).unsqueeze(0)
        else:
            dw = operands.grouped_wgrad(left, right, ends, experts, w_dtype)
    if want_bias:
        if ends is None:
            db = plain_dy.float().sum(0, keepdim=True)
        else:
            db = operands.grouped_bias_grad(plain_dy, ends, experts)
    return dx, dw, db


def _dgrad(
    dy: torch.Tensor,
    plain_dy: torch.Tensor,
    weights: Sequence[torch.Tensor],
    ends: torch.Tensor | None,
    how: Plan | None,
    compute_dtype: torch.dtype,
    x_dtype: torch.dtype,
) -> torch.Tensor:
    left: Operand = plain_dy
    right: Operand
    if how is None or how.override == "high_precision":
        right = operands.one_below_the_other([operands.values_of(w, compute_dtype) for w in weights])
    elif how.override == "dequantized":
        right = operands.weight_rows(weights, how.tiles).values(compute_dtype)
    else:
        left = operands.rows_of(dy if operands.quantised_already(dy) else plain_dy, how.grad_dtype)
        right = operands.weight_columns(weights, how.tiles)
    if ends is None:
        return operands.product(left, right, False, True).to(x_dtype)
    return operands.grouped_dgrad(left, right, ends, len(weights), x_dtype)


def _forward_values(x: torch.Tensor | Quantised, how: Plan | None, dtype: torch.dtype) -> torch.Tensor:
    """x for a product in high precision: unquantised, or the values that the forward pass used."""
    if isinstance(x, Quantised):
        return x.values(dtype)
    if how is not None and how.override == "dequantized":
        return operands.rows_of(x, E4M3).values(dtype)
    return operands.values_of(x, dtype)


@dataclass(frozen=True)
class Extra:
    """Options of a module for its autograd node.

    Attributes:
        cached: quantised weights, in both directions, used in place of the weights; None: quantise the weights.
        gradients: receives the weights' gradients in place of autograd; None: autograd receives them.
        keep_input: keep x unquantised for the backward pass.
        overwrite: `gradients` overwrites `main_grad` instead of adding to it.
    """

    cached: Sequence[Any] | None = None
    gradients: WeightGradients | None = None
    keep_input: bool = False
    overwrite: bool = False


class LinearFunction(torch.autograd.Function):
    """`forward` and `backward` as an autograd node.

    Inputs: x, ends, code of the plan, dtype of the result, `Extra`, number of weights, the weights, the biases (as
    many, or none).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        ends: torch.Tensor | None,
        plan_code: int,
        out_dtype: torch.dtype,
        extra: Extra,
        num: int,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        """The result; keeps x quantised along columns if the weights' gradient needs it so."""
        how = Plan.decode(plan_code)
        weights, biases = parameters[:num], parameters[num:]
        out = forward(x, extra.cached or weights, biases, ends, how, out_dtype)
        ctx.how, ctx.out_dtype, ctx.extra, ctx.num, ctx.x_shape, ctx.x_dtype = (
            how,
            out_dtype,
            extra,
            num,
            x.shape,
            x.dtype,
        )
        # Keep the weights themselves: autograd may return saved tensors without their attributes.
        ctx.parameters = weights if extra.gradients is not None else ()
        kept: tuple[torch.Tensor, ...] = ()
        ctx.kept = None
        if any(ctx.needs_input_grad[6 : 6 + num]):
            ctx.kept = "as it was"
            kept = (x,)
            as_it_was = extra.keep_input or operands.quantised_already(x)
            if how is not None and how.override != "high_precision" and not as_it_was:
                offsets = None if ends is None else torch.nn.functional.pad(ends, (1, 0))
                columnwise = how.override is None
                quantised = operands.columns_of(x, E4M3, offsets) if columnwise else operands.rows_of(x, E4M3)
                ctx.kept = "columns" if columnwise else "rows"
                kept = (quantised.data, quantised.scale)
        ctx.save_for_backward(ends, *kept, *weights)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x, weights and biases."""
        ends, *rest = ctx.saved_tensors
        weights = rest[len(rest) - ctx.num :]
        x: Any = None
        if ctx.kept == "as it was":
            x = rest[0]
        elif ctx.kept is not None:
            offsets = torch.nn.functional.pad(ends, (1, 0)) if ends is not None and ctx.kept == "columns" else None
            x = Quantised(rest[0], rest[1], E4M3, ctx.kept == "columns", offsets)
        need_x, need = ctx.needs_input_grad[0], ctx.needs_input_grad[6:]
        need_w, need_b = need[: ctx.num], any(need[ctx.num :])
        gradients: WeightGradients | None = ctx.extra.gradients if any(need_w) else None
        given = (grads[0], x, ctx.extra.cached or weights, ends, ctx.how, ctx.out_dtype)
        w_dtype = weights[0].dtype if any(need_w) and gradients is None else None
        dx, dw, db = backward(*given, (ctx.x_dtype if need_x else None, w_dtype, need_b))
        of_weights: list[torch.Tensor | None] = [None] * ctx.num if dw is None else list(dw.unbind())
        if gradients is not None:
            of_weights = gradients.take(ctx.parameters, need_w, partial(_weight_gradients, given), ctx.extra.overwrite)
        of_biases = [None] * (len(need) - ctx.num) if db is None else list(db.to(weights[0].dtype).unbind())
        return None if dx is None else dx.view(ctx.x_shape), None, None, None, None, None, *of_weights, *of_biases


def _weight_gradients(given: tuple[Any, Any, Any, Any, Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """[E, N, K]: the second result of `backward`."""
    gradients = backward(*given, (None, dtype, False))[1]
    assert gradients is not None, "the weights' gradients were requested"
    return gradients


# --- in compiled graphs -----------------------------------------------------------------------------------


def _mx(data: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return data if scale is None else MXTensor.from_qdata_and_scales(data, scale, dtype)


@library.op(
    "(Tensor x, Tensor? scale, Tensor[] weights, Tensor[] biases, Tensor? ends, int plan_code, ScalarType out_dtype) "
    "-> (Tensor, Tensor)",
    lambda x, _, weights, __, ___, ____, dtype: (
        x.new_empty((*x.shape[:-1], weights[0].shape[0]), dtype=dtype),
        torch.empty((), dtype=torch.int64, device="cpu"),
    ),
)
def _te_linear(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    ends: torch.Tensor | None,
    plan_code: int,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and the code of the plan that computed it."""
    plan_code = plan.current_plan_code() if plan_code == plan.ASK else plan_code
    given = _mx(x, scale, out_dtype)
    return forward(given, weights, biases, ends, Plan.decode(plan_code), out_dtype), torch.tensor(plan_code)


def _te_gradients_like(
    dy: Any,
    _: Any,
    x: Any,
    __: Any,
    weights: Any,
    ends: Any,
    plan_code: Any,
    x_dtype: Any,
    out_dtype: Any,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor, ...]:
    want_x, want_w, want_b = wanted
    experts, (outputs, inputs) = len(weights), weights[0].shape
    return (
        x.new_empty((x.numel() // inputs, inputs) if want_x else (0,), dtype=x_dtype),
        x.new_empty((experts, outputs, inputs) if want_w else (0,), dtype=weights[0].dtype),
        x.new_empty((experts, outputs) if want_b else (0,), dtype=torch.float32),
    )


@library.op(
    "(Tensor dy, Tensor? dy_scale, Tensor x, Tensor? scale, Tensor[] weights, Tensor? ends, Tensor plan_code, "
    "ScalarType x_dtype, ScalarType out_dtype, bool[] wanted) -> (Tensor, Tensor, Tensor)",
    _te_gradients_like,
)
def _te_linear_backward(
    dy: torch.Tensor,
    dy_scale: torch.Tensor | None,
    x: torch.Tensor,
    scale: torch.Tensor | None,
    weights: list[torch.Tensor],
    ends: torch.Tensor | None,
    plan_code: torch.Tensor,
    x_dtype: torch.dtype,
    out_dtype: torch.dtype,
    wanted: list[bool],
) -> tuple[torch.Tensor, ...]:
    """Gradients of x, weights and biases; an empty tensor for each that is not wanted."""
    want_x, want_w, want_b = wanted
    grads = backward(
        _mx(dy, dy_scale, out_dtype),
        _mx(x, scale, x_dtype),
        weights,
        ends,
        Plan.decode(int(plan_code)),
        out_dtype,
        (x_dtype if want_x else None, weights[0].dtype if want_w else None, want_b),
    )
    nothing = (x_dtype, weights[0].dtype, torch.float32)
    return tuple(
        x.new_empty(0, dtype=dtype) if grad is None else grad.contiguous()
        for grad, dtype in zip(grads, nothing, strict=True)
    )


def _parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    if isinstance(x, MXTensor):
        return x.qdata, x.scale.view(torch.uint8)
    return x, None


class TracedLinearFunction(torch.autograd.Function):
    """The two ops as an autograd node; the inputs are those of `LinearFunction` without `Extra`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        ends: torch.Tensor | None,
        plan_code: int,
        out_dtype: torch.dtype,
        num: int,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        """The result; keeps x unquantised."""
        data, scale = _parts(x)
        weights, biases = list(parameters[:num]), list(parameters[num:])
        out, ran = torch.ops.triton_ep.te_linear(data, scale, weights, biases, ends, plan_code, out_dtype)
        ctx.save_for_backward(ran, data, scale, ends, *weights)
        ctx.x_dtype, ctx.out_dtype, ctx.num, ctx.x_shape = x.dtype, out_dtype, num, x.shape
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x, weights and biases."""
        ran, data, scale, ends, *weights = ctx.saved_tensors
        dy, dy_scale = _parts(grads[0])
        need_x, need = ctx.needs_input_grad[0], ctx.needs_input_grad[5:]
        need_w, need_b = any(need[: ctx.num]), any(need[ctx.num :])
        dx, dw, db = torch.ops.triton_ep.te_linear_backward(
            dy, dy_scale, data, scale, weights, ends, ran, ctx.x_dtype, ctx.out_dtype, [need_x, need_w, need_b]
        )
        of_weights = list(dw.unbind()) if need_w else [None] * ctx.num
        of_biases = list(db.to(weights[0].dtype).unbind()) if need_b else [None] * (len(need) - ctx.num)
        return dx.view(ctx.x_shape) if need_x else None, None, None, None, None, *of_weights, *of_biases


def linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    ends: torch.Tensor | None,
    plan_code: int,
    out_dtype: torch.dtype,
    extra: Extra,
) -> torch.Tensor:
    """Apply a linear layer: [..., N] in `out_dtype`, differentiable in x, weights and biases.

    Arguments:
        x: [..., K], high precision or in MXFP8. weights: [N, K] each. biases: [N] each, or none.
        ends: None with one weight; else [E] int32 on the device, the row after the last of each weight's rows.
        plan_code: code of the plan.
        extra: not used while torch.compile traces; the traced node keeps x unquantised.

    Raises:
        InputError: fused or delayed gradients while torch.compile traces.
    """
    if torch.compiler.is_compiling():
        if extra.gradients is not None:
            raise InputError(
                "torch.compile cannot trace fuse_wgrad_accumulation or delay_wgrad_compute: a graph has no attributes "
                "of weights. Leave the module out of the compiled function (torch.compiler.disable)."
            )
        return TracedLinearFunction.apply(x, ends, plan_code, out_dtype, len(weights), *weights, *biases)
    return LinearFunction.apply(x, ends, plan_code, out_dtype, extra, len(weights), *weights, *biases)
