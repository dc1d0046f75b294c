"""The experts of one rank as one differentiable function: both products, the activation between them, all gradients.

What is multiplied, by precision (R rows, E experts, H hidden, F ffn):

    None       bf16 rows, bf16 weights.
    "default"  FP8: rows and weights in MXFP8 along the sum of each product, moved to one scale per row; every 128 terms
               are added in float32. The activation, and the gradients of both products, are quantised in the same way.
    "fast"     the same, added up by the tensor cores.
    "exact"    bf16 products of the MXFP8 values of the same operands.

Gradients of weights are bf16 products of rows in bf16, whatever the precision: of MXFP8 rows, of their values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from triton_ep.errors import ConfigError, InputError
from triton_ep.mx.tensor import MXTensor
from triton_ep.nn.prepared import PreparedWeights
from triton_ep.ops.activation import Activation
from triton_ep.ops.experts import gate_up, rows_product
from triton_ep.ops.experts_backward import bias_gradient, down_dgrad, weight_gradient
from triton_ep.ops.mxfp8 import dequantize_rows, quantize_rows
from triton_ep.ops.row_scales import RowScaled, dequantize_rows_in_use, quantize_to_rows, rebase_rows
from triton_ep.ops.tiles import tile_table

PRECISIONS = (None, "default", "fast", "exact")

Rows = torch.Tensor | RowScaled

_SWIGLU = Activation()


@dataclass(frozen=True)
class ExpertSettings:
    """What does not change from call to call.

    Attributes:
        activation: between the two products.
        precision: see the module.
        aligned: every segment starts and ends at a multiple of 128 rows, which is faster. That is a promise: results
            are wrong where it is broken.

    Raises:
        ConfigError: another precision.
    """

    activation: Activation = _SWIGLU
    precision: str | None = None
    aligned: bool = False

    def __post_init__(self) -> None:
        """Check the precision."""
        if self.precision not in PRECISIONS:
            raise ConfigError(f"precision is {self.precision!r}, choose from {PRECISIONS}.")

    @property
    def fp8(self) -> bool:
        """Products are of e4m3 operands."""
        return self.precision in ("default", "fast")

    @property
    def fast(self) -> bool:
        """Tensor cores add up by themselves."""
        return self.precision == "fast"


def expert_block(
    x_rows: Rows,
    row_weights: torch.Tensor | None,
    w13: torch.Tensor,
    w2: torch.Tensor,
    b13: torch.Tensor | None,
    b2: torch.Tensor | None,
    prepared: PreparedWeights | None,
    offs: torch.Tensor,
    tiles: torch.Tensor | None,
    settings: ExpertSettings,
) -> torch.Tensor:
    """[R, H] bf16: activation(x w13^T + b13) times the row's weight, times w2^T, plus b2 times the row's weight.

    Differentiable in all tensors but `offs` and `tiles`; what needs no gradient costs none. The same bits every time.
    Rows from offs[-1] on are neither read nor written, and have no gradients: what stands there means nothing.

    Arguments:
        x_rows: [R, H] bf16; with a precision an MXTensor or RowScaled as well. Of bf16 rows FP8 products quantise their
            own, and "exact" takes the values as they are. RowScaled has no gradient.
        row_weights: [R] float32, or None: ones.
        w13: [E, 2F, H], rows of gate before those of up; not gated: [E, F, H]. w2: [E, H, F]. bf16, contiguous; with a
            precision what `PreparedWeights` takes. The gradient of one with a `main_grad` is added there, in float32 if
            that is float32, and none is returned. If it has the attribute `grad_added_to_main_grad`, too, that becomes
            True, and for hooks to see an uninitialised gradient is returned (zeros with `zero_out_wgrad`), which is
            Megatron-Core's convention.
        b13, b2: [E, 2F] ([E, F]) and [E, H], bf16 or float32, or None.
        prepared: copies of the weights; None without a precision.
        offs: [E + 1] int32 on the device, first row of each expert's segment, then the end of the last.
        tiles: `tile_table(offs, R)`, where it is there already.

    Raises:
        InputError: operands that do not fit each other.
    """
    if (prepared is None) != (settings.precision is None):
        raise InputError(f"prepared goes with precision={settings.precision!r}, got {type(prepared).__name__}.")
    if isinstance(x_rows, MXTensor | RowScaled) and settings.precision is None:
        raise InputError(f"x_rows is an {type(x_rows).__name__}; products of bf16 rows need precision=None and bf16.")
    tiles = tile_table(offs, x_rows.shape[0]) if tiles is None else tiles
    arguments = (x_rows, row_weights, w13, w2, b13, b2, prepared, offs, tiles, settings)
    given = (x_rows, row_weights, w13, w2, b13, b2)
    if torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in given):
        result: torch.Tensor = _ExpertBlock.apply(*arguments)
        return result
    with torch.no_grad():
        return _forward(_operand(x_rows, offs, settings), *arguments[1:], keep_pre=False)[0]


# --- operands -----------------------------------------------------------------------------------------------


def _operand(x: Rows, offs: torch.Tensor, settings: ExpertSettings) -> Rows:
    """Rows as the products of this precision take them."""
    if not settings.fp8:
        return _values(x, offs)
    if isinstance(x, MXTensor):
        return rebase_rows(x.qdata, x.scale, offs)
    return x if isinstance(x, RowScaled) else quantize_to_rows(x.contiguous(), offs)


def _values(x: Rows, offs: torch.Tensor) -> torch.Tensor:
    """Rows in bf16."""
    if isinstance(x, MXTensor):
        return x.dequantize(torch.bfloat16)
    return dequantize_rows_in_use(x, offs) if isinstance(x, RowScaled) else x.contiguous()


def _weight(weight: torch.Tensor, use: str, name: str, prepared: PreparedWeights | None) -> Any:
    """The weight for a product: [E, N, K] for x w^T; for dy w, bf16 [E, N, K] or RowScaled [E, K, N]."""
    return weight if prepared is None else prepared.get(weight, use, name=name)


def _forward(
    x: Rows,
    row_weights: torch.Tensor | None,
    w13: torch.Tensor,
    w2: torch.Tensor,
    b13: torch.Tensor | None,
    b2: torch.Tensor | None,
    prepared: PreparedWeights | None,
    offs: torch.Tensor,
    tiles: torch.Tensor,
    settings: ExpertSettings,
    *,
    keep_pre: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Both products of an operand; also the first one's result, if it is to be kept."""
    act, pre = gate_up(
        x,
        _weight(w13, "fprop", "w13", prepared),
        offs,
        row_weights=row_weights,
        activation=settings.activation,
        bias=b13,
        keep_pre=keep_pre,
        act="bf16" if settings.precision is None else "mx" if settings.fp8 else "mx_bf16",
        fast=settings.fast,
        tiles=tiles,
    )
    y = rows_product(
        act,
        _weight(w2, "fprop", "w2", prepared),
        offs,
        bias=b2,
        row_weights=row_weights,
        fast=settings.fast,
        aligned=settings.aligned,
        tiles=tiles,
    )
    return y, pre


# --- the two passes -----------------------------------------------------------------------------------------


class Saved(NamedTuple):
    """What the backward pass needs of a forward pass, besides the weights.

    Attributes:
        rows: [R, H] as they were multiplied, in 8 bits where they were; None: the gradient of w13 is not wanted.
        pre: [R, 2F] bf16 of the first product.
        row_weights: [R] float32, or None.
    """

    rows: Rows | None
    pre: torch.Tensor
    row_weights: torch.Tensor | None


class Weights(NamedTuple):
    """Parameters of the experts, as `expert_block` takes them, or their gradients."""

    w13: torch.Tensor | None
    w2: torch.Tensor | None
    b13: torch.Tensor | None
    b2: torch.Tensor | None


@dataclass(frozen=True)
class Passes:
    """Forward and backward pass of the experts, without autograd.

    Attributes:
        prepared, offs, tiles, settings: as of `expert_block`.
    """

    prepared: PreparedWeights | None
    offs: torch.Tensor
    tiles: torch.Tensor
    settings: ExpertSettings

    def forward(
        self, x_rows: Rows, row_weights: torch.Tensor | None, weights: Sequence[Any], keep: bool, keep_rows: bool = True
    ) -> tuple[torch.Tensor, Saved | None]:
        """[R, H] bf16, and what `backward` needs, if `keep`. weights: as of `Weights`."""
        settings = self.settings
        operand = _operand(x_rows, self.offs, settings)
        rest = (self.prepared, self.offs, self.tiles, settings)
        y, pre = _forward(operand, row_weights, *weights, *rest, keep_pre=keep)
        if pre is None:
            return y, None
        # The rows are for the gradient of w13 alone; the smallest form of what was multiplied is kept.
        rows = operand if settings.fp8 else x_rows
        return y, Saved(rows if keep_rows else None, pre, row_weights)

    def backward(
        self, dy: Rows, saved: Saved, weights: Sequence[Any], needs: Sequence[bool]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, Callable[[], Weights]]:
        """Gradients of the rows [R, H] bf16 and of their weights [R] float32, and what computes those of `weights`.

        needs: of the rows, of their weights, and of each of `weights`; what is not needed is None. The gradients of
        weights are computed apart because other ranks wait for that of the rows.
        """
        w13, w2, b13, b2 = weights
        settings, offs = self.settings, self.offs
        want_x, want_weights, want_w13, want_w2, want_b13, want_b2 = needs
        dx = dweights = dpre = act = None
        operand = _operand(dy, offs, settings)
        if want_x or want_weights or want_w13 or want_w2 or want_b13:
            dpre, act, dweights = down_dgrad(
                operand,
                _weight(w2, "dgrad", "w2", self.prepared),
                saved.pre,
                offs,
                row_weights=saved.row_weights,
                activation=settings.activation,
                bias=b2 if want_weights else None,
                fast=settings.fast,
                tiles=self.tiles,
            )
        if want_x:
            dx = _rows_gradient(dpre, w13, self.prepared, offs, self.tiles, settings)

        def of_weights() -> Weights:
            dw13 = dw2 = db13 = db2 = dy_values = None
            if want_w2 or want_b2:
                dy_values = _values(operand if isinstance(dy, MXTensor) else dy, offs)
            if want_b2:
                db2 = bias_gradient(dy_values, offs, saved.row_weights).to(b2.dtype)
            if want_w2:
                dw2 = _weight_gradient(w2, dy_values, act, offs, settings.aligned)
            if want_b13:
                db13 = bias_gradient(dpre, offs).to(b13.dtype)
            if want_w13:
                assert saved.rows is not None, "kept for it"
                dw13 = _weight_gradient(w13, dpre, _values(saved.rows, offs), offs, settings.aligned)
            return Weights(dw13, dw2, db13, db2)

        return dx, dweights if want_weights else None, of_weights


def _parts(x: Rows | None) -> tuple[tuple[torch.Tensor, ...], Callable[..., Any]]:
    """Plain tensors, and what makes the rows of them again: 8-bit rows are kept as they are."""
    if x is None:
        return (), lambda: None
    if isinstance(x, MXTensor):
        dtype = x.dtype
        return (x.qdata, x.scale), lambda *parts: MXTensor.from_qdata_and_scales(*parts, dtype)
    return ((x.qdata, x.scale), RowScaled) if isinstance(x, RowScaled) else ((x,), lambda rows: rows)


class _ExpertBlock(torch.autograd.Function):
    """`expert_block` where a gradient may be asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        x_rows: Rows,
        row_weights: torch.Tensor | None,
        w13: torch.Tensor,
        w2: torch.Tensor,
        b13: torch.Tensor | None,
        b2: torch.Tensor | None,
        prepared: PreparedWeights | None,
        offs: torch.Tensor,
        tiles: torch.Tensor,
        settings: ExpertSettings,
    ) -> torch.Tensor:
        """The result; keeps the rows, the first product, and what was given."""
        passes, weights = Passes(prepared, offs, tiles, settings), (w13, w2, b13, b2)
        y, saved = passes.forward(x_rows, row_weights, weights, True, ctx.needs_input_grad[2])
        assert saved is not None, "asked for"
        kept, ctx.rows_of = _parts(saved.rows)
        ctx.num_kept = len(kept)
        ctx.prepared, ctx.settings = prepared, settings
        ctx.save_for_backward(*kept, saved.pre, row_weights, *weights, offs, tiles)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        """Gradients of rows and weights; each only where it is needed."""
        kept, (pre, row_weights, *weights, offs, tiles) = _split(ctx.saved_tensors, ctx.num_kept)
        passes = Passes(ctx.prepared, offs, tiles, ctx.settings)
        saved = Saved(ctx.rows_of(*kept), pre, row_weights)
        dx, dweights, of_weights = passes.backward(dy, saved, weights, ctx.needs_input_grad[:6])
        return dx, dweights, *of_weights(), None, None, None, None


def _split(saved: tuple[Any, ...], count: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return saved[:count], saved[count:]


def _rows_gradient(
    dpre: torch.Tensor,
    w13: torch.Tensor,
    prepared: PreparedWeights | None,
    offs: torch.Tensor,
    tiles: torch.Tensor,
    settings: ExpertSettings,
) -> torch.Tensor:
    """[R, H] bf16: dpre w13."""
    weight = _weight(w13, "dgrad", "w13", prepared)
    if settings.precision == "exact":
        dpre = dequantize_rows(*quantize_rows(dpre))
    rows: Rows = quantize_to_rows(dpre, offs) if settings.fp8 else dpre
    transposed = weight if isinstance(weight, RowScaled) else weight.transpose(1, 2)
    return rows_product(rows, transposed, offs, fast=settings.fast, aligned=settings.aligned, tiles=tiles)


def _weight_gradient(
    weight: torch.Tensor, x: torch.Tensor, y: torch.Tensor, offs: torch.Tensor, aligned: bool
) -> torch.Tensor | None:
    """x_e^T y_e as the gradient of a weight; or added to its `main_grad`."""
    main: torch.Tensor | None = getattr(weight, "main_grad", None)
    if main is None:
        return weight_gradient(x, y, offs, aligned=aligned).to(weight.dtype)
    if main.dtype == torch.float32 and main.is_contiguous():
        weight_gradient(x, y, offs, out=main.view(weight.shape), accumulate=True, aligned=aligned)
    else:
        main.view(weight.shape).add_(weight_gradient(x, y, offs, aligned=aligned))
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return make(weight, requires_grad=False)
