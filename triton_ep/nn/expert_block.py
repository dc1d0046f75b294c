"""The experts of one rank as one differentiable function: both products, the activation between them, all gradients.

Operands by precision (R rows, E experts, H hidden, F ffn):

    None       bf16 rows, bf16 weights.
    "default"  FP8: rows and weights in MXFP8 along the sum of each product, moved to one scale per row; sums of 128
               terms are added in float32. The activation and the gradients of both products are quantised likewise.
    "fast"     the same operands; the tensor cores add all terms.
    "exact"    bf16 products of the MXFP8 values of the same operands.

With every precision, gradients of weights are products of bf16 rows; MXFP8 rows are converted to their values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from triton_ep.context.context import first_rows
from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.context.overlap import current_stream
from triton_ep.distributed.dtensors import PLAIN_TENSORS
from triton_ep.errors import ConfigError, InputError
from triton_ep.exchange.landings import Ahead
from triton_ep.mx.tensor import MXTensor
from triton_ep.nn.arrivals import Arrived
from triton_ep.nn.moe_block import ExpertGradients, Needs, Params
from triton_ep.nn.padded import down_dgrad_of_any_width
from triton_ep.nn.prepared import PreparedWeights
from triton_ep.ops.activation import Activation
from triton_ep.ops.experts import gate_up, gate_up_directly, rows_product, rows_product_directly
from triton_ep.ops.experts_backward import bias_gradient, fits_boxes, weight_gradient
from triton_ep.ops.library import is_observed, without_grad
from triton_ep.ops.mxfp8 import dequantize_rows, quantize_rows
from triton_ep.ops.row_scales import (
    RowScaled,
    dequantize_rows_beside,
    dequantize_rows_in_use,
    quantize_to_rows,
    rebase_rows,
)
from triton_ep.ops.tiles import tile_table

PRECISIONS = (None, "default", "fast", "exact")

Rows = torch.Tensor | RowScaled
Saved = dict[str, Any]
"""What the backward pass needs: "rows", only for the gradient of w13: as received or as multiplied, in 8 bits if that
form exists, or `Arrived`, and in the backward pass `_Columns`; "pre", the first product; "row_weights"."""

_SWIGLU = Activation()
_ALL = slice(None)
_STRIP = 128
"""Strips of rows have a multiple of this number of columns: the width of a tile of the gradients of weights."""


@dataclass(frozen=True)
class ExpertSettings:
    """Settings of all calls.

    Attributes:
        activation: between the two products.
        precision: see the module.
        aligned: every segment starts and ends at a multiple of 128 rows, which is faster. The caller guarantees it:
            results are wrong otherwise.

    Raises:
        ConfigError: unknown precision.
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
        """Whether products have e4m3 operands."""
        return self.precision in ("default", "fast")

    @property
    def fast(self) -> bool:
        """Whether tensor cores add all terms."""
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

    Differentiable in all tensors but `offs` and `tiles`; gradients that are not needed cost nothing. Bit-identical
    every time. Rows from offs[-1] on are neither read nor written, and their gradients are undefined.

    Arguments:
        x_rows: [R, H] bf16; with a precision also MXTensor or RowScaled. RowScaled has no gradient. FP8 products
            quantise bf16 rows; "exact" uses their values unchanged. The same holds for the gradient of the result,
            which may be bf16 or an MXTensor.
        row_weights: [R] float32; None: ones.
        w13: [E, 2F, H], rows of gate before those of up; not gated: [E, F, H]. w2: [E, H, F]. bf16, contiguous; with a
            precision what `PreparedWeights` takes. The gradient of one with a `main_grad` is added there, in float32 if
            that is float32, and none is returned. If it has the attribute `grad_added_to_main_grad`, too, that becomes
            True, and for hooks to see an uninitialised gradient is returned (zeros with `zero_out_wgrad`), which is
            Megatron-Core's convention.
        b13, b2: [E, 2F] ([E, F]) and [E, H], bf16 or float32, or None.
        prepared: prepared copies of the weights; None without a precision.
        offs: [E + 1] int32 on the device, first row of each expert's segment, then the end of the last.
        tiles: `tile_table(offs, R)`, if it exists already.

    Raises:
        InputError: operands that do not fit each other.
    """
    tiles = tile_table(offs, x_rows.shape[0]) if tiles is None else tiles
    block = ExpertBlock(prepared, settings)
    params = (w13, w2, b13, b2)
    given = (x_rows, row_weights, *params)
    if torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in given):
        result: torch.Tensor = _Function.apply(block, offs, tiles, x_rows, row_weights, *params)
        return result
    return block.run(x_rows, row_weights, params, offs, tiles, keep=False)[0]


@dataclass(slots=True)  # made in each pass, and a frozen one takes longer
class ExpertBlock:
    """Both directions of `expert_block` without autograd: the `Experts` of a `MoEBlock`. params: w13, w2, b13, b2.

    Attributes:
        prepared, settings: as of `expert_block`.
        arrived: makes what is saved instead of expert-major rows from those that the dispatch has kept. None: save the
            former.

    Raises:
        InputError: prepared weights without a precision, or a precision without prepared weights.
    """

    prepared: PreparedWeights | None
    settings: ExpertSettings
    arrived: Callable[[torch.Tensor], Arrived] | None = None

    def __post_init__(self) -> None:
        """Check that prepared weights and precision go together."""
        if (self.prepared is None) != (self.settings.precision is None):
            given = type(self.prepared).__name__
            raise InputError(f"prepared goes with precision={self.settings.precision!r}, got {given}.")

    def before(self, params: Params) -> Callable[[], None] | None:
        """A call that updates prepared copies of changed weights, which needs no rows; None if all are current."""
        prepared = self.prepared
        if prepared is None:
            return None
        weights = ("w13", params[0]), ("w2", params[1])
        stale = [(name, w) for name, w in weights if w is not None and prepared.is_stale(w, name=name)]
        if not stale:
            return None

        def refresh() -> None:
            for name, weight in stale:
                prepared.refresh(weight, name=name)

        return refresh

    def keeps_arrivals(self, params: Params) -> bool:
        """Whether a pass that is kept takes the rows that its dispatch has kept."""
        return self.arrived is not None and _needs_rows(params)

    def forward(
        self, rows: Rows, row_weights: torch.Tensor | None, params: Params, desc: EPAllToAllLayoutDesc, keep: bool
    ) -> tuple[torch.Tensor, Saved]:
        """As `run`, for rows that a dispatch delivered; overwrites them if nothing needs them."""
        tiles = _tiles(desc) if keep else desc.tiles
        wanted = keep and _needs_rows(params)
        overwrite = not wanted or self.arrived is not None
        offs = desc.expert_offsets
        return self.run(rows, row_weights, params, offs, tiles, keep=keep, overwrite=overwrite, checked=True)

    def kept(self, saved: Saved, found: Ahead) -> Saved:
        """What `forward` has kept, of the rows that arrived."""
        num, rows = found.desc.num_recv_rows, saved["rows"]
        if self.arrived is not None and found.kept is not None:
            rows = self.arrived(found.kept)
        elif isinstance(rows, RowScaled):
            rows = RowScaled.made(first_rows(rows.qdata, num), first_rows(rows.scale, num))
        elif rows is not None:
            rows = first_rows(rows, num)
        return {"rows": rows, **{name: first_rows(saved[name], num) for name in ("pre", "row_weights")}}

    def backward(
        self, grad: Rows, saved: Saved, params: Params, desc: EPAllToAllLayoutDesc, needs: Needs
    ) -> ExpertGradients:
        """As `differentiate`, for gradients that a dispatch delivered."""
        filled, rows = desc.num_recv_tokens_per_expert, saved["rows"]
        if isinstance(rows, Arrived):
            width, beside = rows.rows.shape[1], partial(rows.expand_beside, desc)
            saved["rows"] = _Columns(width, True, partial(rows.expand, desc), beside)
        return self.differentiate(grad, saved, params, desc.expert_offsets, _tiles(desc), needs, filled)

    @without_grad
    def run(
        self,
        rows: Rows,
        row_weights: torch.Tensor | None,
        params: Params,
        offs: torch.Tensor,
        tiles: torch.Tensor | None,
        *,
        keep: bool,
        overwrite: bool = False,
        checked: bool = False,
    ) -> tuple[torch.Tensor, Saved]:
        """The result [R, H], and, if `keep`, what `differentiate` needs.

        overwrite: the rows are not needed afterwards. The result takes the place of bf16 rows, and rows are not kept.
        checked: rows are as a dispatch delivers them, and parameters have the right shapes and device.
        """
        settings = self.settings
        if isinstance(rows, MXTensor | RowScaled) and settings.precision is None:
            raise InputError(f"the rows are {type(rows).__name__}; with precision=None they must be bf16.")
        w13, w2, b13, b2 = params
        operand = self._operand(rows, offs)
        direct = checked and not is_observed() and all(map(_is_plain, (b13, b2)))
        direct = direct and (self.prepared is not None or all(map(_is_bf16, (w13, w2))))
        first, second = (gate_up_directly, rows_product_directly) if direct else (gate_up, rows_product)
        act, pre = first(
            operand,
            self._weight(w13, "fprop", "w13"),
            offs,
            row_weights=row_weights,
            activation=settings.activation,
            bias=b13,
            keep_pre=keep,
            act="bf16" if settings.precision is None else "mx" if settings.fp8 else "mx_bf16",
            fast=settings.fast,
            tiles=tiles,
        )
        y = second(
            act,
            self._weight(w2, "fprop", "w2"),
            offs,
            bias=b2,
            row_weights=row_weights,
            out=_wide(rows) if overwrite else None,
            fast=settings.fast,
            aligned=settings.aligned,
            tiles=tiles,
        )
        if not keep:
            return y, {}
        kept = None
        if w13 is not None and w13.requires_grad and not overwrite:
            kept = operand if settings.fp8 else rows
        return y, {"rows": kept, "pre": pre, "row_weights": row_weights}

    @without_grad
    def differentiate(
        self,
        grad: Rows,
        saved: Saved,
        params: Params,
        offs: torch.Tensor,
        tiles: torch.Tensor,
        needs: Needs,
        filled: torch.Tensor | None = None,
    ) -> ExpertGradients:
        """Gradients from the gradient of the result [R, H], bf16, MXTensor or RowScaled; only those that are needed.

        Computes the gradient of w2 first: it needs `grad` and the activation, so both are freed before the gradients
        of the rows and of w13 are computed. The latter are returned as calls, because other ranks wait for the rows'
        gradient. Takes `saved` apart; its "rows" may be a call that returns bf16 rows.

        filled: [E] int32, rows of each segment before its padding, whose gradients are zero; None: no padding.
        """
        w13, w2, b13, b2 = params
        row_weights, aligned = saved["row_weights"], self.settings.aligned
        want_w13, want_w2, want_b13, want_b2 = needs.params
        dpre = act = dweights = dw2 = db2 = None
        first: _FirstGradient | None = None
        operand = self._operand(grad, offs)
        if needs.rows or needs.row_weights or want_w13 or want_w2 or want_b13:
            dpre, act, dweights = down_dgrad_of_any_width(
                operand,
                self._weight(w2, "dgrad", "w2"),
                saved.pop("pre"),
                offs,
                row_weights=row_weights,
                activation=self.settings.activation,
                bias=b2 if needs.row_weights else None,
                fast=self.settings.fast,
                tiles=tiles,
                overwrite=needs.last,
            )
        if want_w2 or want_b2:
            wide = operand if isinstance(grad, MXTensor) else grad
            of_w2 = _WeightGradient(w2, offs, aligned, filled) if want_w2 else None
            of_b2 = []
            for columns in _strips(wide.shape[1], aligned and isinstance(wide, RowScaled), 2):
                values = _values(wide, offs, columns)
                if b2 is not None and want_b2:
                    of_b2.append(bias_gradient(values, offs, row_weights).to(b2.dtype))
                if of_w2 is not None and act is not None:
                    of_w2.add(values, act, (_ALL, columns))
                del values  # the next one has its memory
            dw2 = None if of_w2 is None else of_w2.found()
            db2 = torch.cat(of_b2, 1) if of_b2 else None

        def rows() -> torch.Tensor:
            assert dpre is not None, "asked for"
            return self._rows_gradient(dpre, w13, offs, tiles)

        def of_params() -> Params:
            nonlocal dpre
            dw13 = db13 = None
            if dpre is not None and b13 is not None and want_b13:
                db13 = bias_gradient(dpre, offs).to(b13.dtype)
            if first is not None:
                dw13 = first.found()
            dpre = None
            return dw13, dw2, db13, db2

        x = saved.pop("rows", None)
        found = ExpertGradients(rows if needs.rows else None, dweights if needs.row_weights else None, of_params)
        if not want_w13:
            return found
        assert dpre is not None, "computed above"
        first = _FirstGradient(_WeightGradient(w13, offs, aligned, filled), dpre, _columns_of(x, offs), aligned)
        return replace(found, prepare=first.convert, early=first.add_beside if first.has_early_part else None)

    def _operand(self, x: Rows, offs: torch.Tensor) -> Rows:
        """Rows in the form that products of this precision take."""
        if not self.settings.fp8:
            return _values(x, offs)
        if isinstance(x, MXTensor):
            return rebase_rows(x.qdata, x.scale, offs)
        return x if isinstance(x, RowScaled) else quantize_to_rows(x.contiguous(), offs)

    def _weight(self, weight: torch.Tensor | None, use: str, name: str) -> Any:
        """Weights for x w^T: [E, N, K]; for dy w: RowScaled [E, K, N], or bf16 [E, N, K] unchanged."""
        assert weight is not None, "only biases may be left out"
        return weight if self.prepared is None else self.prepared.get(weight, use, name=name)

    def _rows_gradient(
        self, dpre: torch.Tensor, w13: torch.Tensor | None, offs: torch.Tensor, tiles: torch.Tensor
    ) -> torch.Tensor:
        """[R, H] bf16: dpre w13."""
        settings, weight = self.settings, self._weight(w13, "dgrad", "w13")
        if settings.precision == "exact":
            dpre = dequantize_rows(*quantize_rows(dpre))
        rows: Rows = quantize_to_rows(dpre, offs) if settings.fp8 else dpre
        transposed = weight if isinstance(weight, RowScaled) else weight.transpose(1, 2)
        return rows_product(rows, transposed, offs, fast=settings.fast, aligned=settings.aligned, tiles=tiles)


def _needs_rows(params: Params) -> bool:
    """Whether a gradient needs the rows themselves: that of w13."""
    return params[0] is not None and params[0].requires_grad


def _tiles(desc: EPAllToAllLayoutDesc) -> torch.Tensor:
    return tile_table(desc.expert_offsets, desc.num_recv_rows) if desc.tiles is None else desc.tiles


def _is_bf16(weight: torch.Tensor | None) -> bool:
    """Whether products take a weight as it is, apart from its shape and device."""
    return weight is not None and weight.dtype == torch.bfloat16 and _is_plain(weight)


def _is_plain(x: torch.Tensor | None) -> bool:
    """Whether this is None, or a contiguous tensor of no subclass."""
    return x is None or (type(x) in PLAIN_TENSORS and x.is_contiguous())


def _wide(x: Rows) -> torch.Tensor | None:
    """The rows if they are bf16, else None."""
    return x if isinstance(x, torch.Tensor) and not isinstance(x, MXTensor) and x.dtype == torch.bfloat16 else None


def _values(x: Rows, offs: torch.Tensor, columns: slice = _ALL) -> torch.Tensor:
    """Rows, or some of their columns, in bf16."""
    if isinstance(x, MXTensor):
        x = x.dequantize(torch.bfloat16)
    return dequantize_rows_in_use(x, offs, columns=columns) if isinstance(x, RowScaled) else x[:, columns].contiguous()


def _strips(width: int, cut: bool, parts: int) -> list[slice]:
    """Columns of rows to convert to bf16 at a time: one of `parts` equal parts, then the rest; or all.

    cut: fewer columns take less memory, and segments are aligned: otherwise gradients of weights are not computed in
    parts.
    """
    first = -(-width // (parts * _STRIP)) * _STRIP
    return [slice(0, first), slice(first, None)] if cut and first < width else [_ALL]


class _Columns(NamedTuple):
    """Rows whose columns can be had in bf16.

    Attributes:
        width: number of columns.
        made: they are made when they are asked for; otherwise they exist, and `values` takes no memory.
        values: returns the given columns.
        beside: makes them on a stream, next to products, as `dequantize_rows_beside` does; None: that is not possible.
    """

    width: int
    made: bool
    values: Callable[[slice], torch.Tensor]
    beside: Callable[[slice, torch.cuda.Stream], torch.Tensor] | None

    def converted(self, columns: slice, stream: torch.cuda.Stream | None) -> torch.Tensor:
        """The given columns, made on the stream if that is possible, else after its work so far."""
        if stream is not None and self.beside is not None:
            return self.beside(columns, stream)
        if stream is not None:
            current_stream().wait_stream(stream)
        return self.values(columns)


def _columns_of(rows: Rows | _Columns, offs: torch.Tensor) -> _Columns:
    if isinstance(rows, _Columns):
        return rows
    beside = partial(dequantize_rows_beside, rows, offs) if isinstance(rows, RowScaled) else None
    return _Columns(rows.shape[1], isinstance(rows, MXTensor | RowScaled), partial(_values, rows, offs), beside)


class _FirstGradient:
    """The gradient of w13, dpre_e^T x_e, whose rows x are made bf16 in strips of their columns."""

    def __init__(self, gradient: _WeightGradient, dpre: torch.Tensor, x: _Columns, aligned: bool) -> None:
        # Next to the gradient of the rows, a quarter takes no more memory than the peak before.
        self._strips = _strips(x.width, aligned and x.made, 4)
        self._gradient, self._dpre, self._aligned = gradient, dpre, aligned
        self._x = x
        self._ready: list[tuple[slice, torch.Tensor]] = []
        self._in_use: list[tuple[slice, torch.Tensor]] = []

    @property
    def has_early_part(self) -> bool:
        """Whether `convert(False)` will make rows ready whose products fit next to other kernels; the same on all
        ranks."""
        return self._aligned and (len(self._strips) > 1 or not self._x.made)

    def convert(self, room: bool, stream: torch.cuda.Stream | None = None) -> None:
        """Make the first strip bf16; room: all that are left. stream: as of `ExpertGradients.prepare`."""
        while self._strips and (room or not self._x.made or self._strips[0].stop is not None):
            columns = self._strips.pop(0)
            self._ready.append((columns, self._x.converted(columns, stream)))

    def add_beside(self) -> None:
        """Compute what `convert` has made ready, next to other kernels.

        Another stream may write the next strip meanwhile, so that must not get memory that these products use.
        """
        self._in_use = [*self._ready]
        if any(self._gradient.takes_memory(self._dpre, *each) for each in self._in_use):
            self._x = self._x._replace(beside=None)
        self._add(beside=True)

    def found(self) -> torch.Tensor | None:
        """Compute what is left; the gradient for autograd. Once."""
        self.convert(True)
        del self._x, self._in_use  # the current stream has waited for what used them
        self._add()
        del self._dpre  # what is called next may need the memory, while methods of this are still held
        return self._gradient.found()

    def _add(self, beside: bool = False) -> None:
        for columns, values in self._ready:
            self._gradient.add(self._dpre, values, (_ALL, _ALL, columns), beside)
        self._ready.clear()


class _WeightGradient:
    """The gradient of a weight, x_e^T y_e, new or added to the weight's `main_grad`."""

    def __init__(self, weight: Any, offs: torch.Tensor, aligned: bool, filled: torch.Tensor | None) -> None:
        self._weight, self._offs, self._aligned, self._filled = weight, offs, aligned, filled
        main: torch.Tensor | None = getattr(weight, "main_grad", None)
        self._main = None if main is None else main.view(weight.shape)
        self._in_place = main is not None and main.dtype == torch.float32 and main.is_contiguous()
        self._out = self._main if self._in_place else None  # else made with its first part

    def add(self, x: torch.Tensor, y: torch.Tensor, part: tuple[slice, ...], beside: bool = False) -> None:
        """Compute a part of the gradient; beside: next to an exchange."""
        weight_gradient(
            x,
            y,
            self._offs,
            out=self._to(part),
            accumulate=self._in_place,
            aligned=self._aligned,
            filled=self._filled,
            beside=beside,
        )

    def takes_memory(self, x: torch.Tensor, columns: slice, y: torch.Tensor) -> bool:
        """Whether `add` takes memory for these columns, which it has freed when it returns."""
        return not fits_boxes(x, y, self._to((_ALL, _ALL, columns)))

    def _to(self, part: tuple[slice, ...]) -> torch.Tensor:
        """A part of the result."""
        if self._out is None:
            self._out = torch.empty(self._weight.shape, dtype=torch.bfloat16, device=self._offs.device)
        return self._out[part]

    def found(self) -> torch.Tensor | None:
        """The gradient for autograd, after all parts have been computed."""
        assert self._out is not None, "all parts have been computed"
        if self._main is None:
            return self._out.to(self._weight.dtype)
        if not self._in_place:
            self._main.add_(self._out)
        if not hasattr(self._weight, "grad_added_to_main_grad"):
            return None
        self._weight.grad_added_to_main_grad = True
        make = torch.zeros_like if getattr(self._weight, "zero_out_wgrad", False) else torch.empty_like
        return make(self._weight, requires_grad=False)


class _Function(torch.autograd.Function):
    """The autograd function of `expert_block`."""

    @staticmethod
    def forward(
        ctx: Any,
        block: ExpertBlock,
        offs: torch.Tensor,
        tiles: torch.Tensor,
        x_rows: Rows,
        row_weights: torch.Tensor | None,
        *params: torch.Tensor | None,
    ) -> torch.Tensor:
        """The result."""
        y, saved = block.run(x_rows, row_weights, params, offs, tiles, keep=True)
        rows = saved.pop("rows")
        ctx.block, ctx.scaled = block, isinstance(rows, RowScaled)
        parts = (rows.qdata, rows.scale) if isinstance(rows, RowScaled) else (rows, None)
        ctx.save_for_backward(*parts, saved["pre"], row_weights, offs, tiles, *params)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Gradients of the rows, their weights and the parameters."""
        rows, scale, pre, row_weights, offs, tiles, *params = ctx.saved_tensors
        saved = {"rows": RowScaled(rows, scale) if ctx.scaled else rows, "pre": pre, "row_weights": row_weights}
        _, _, _, want_rows, want_weights, *of_params = ctx.needs_input_grad
        found = ctx.block.differentiate(
            grad, saved, params, offs, tiles, Needs(want_rows, want_weights, tuple(of_params))
        )
        dx = None if found.rows is None else found.rows()
        return None, None, None, dx, found.row_weights, *found.params()
