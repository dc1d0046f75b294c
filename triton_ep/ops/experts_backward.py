"""Launchers of the backward pass of experts (kernels/experts).

Rows are in segments, one per expert: `offs` [E + 1] int32 on the device, first row of each, then the end of the last.
Rows past that end are neither read nor written. R rows, E experts, H hidden, F ffn.
"""

from __future__ import annotations

from typing import Any

import torch

from triton_ep.errors import InputError
from triton_ep.kernels.device.codes import TILE_WORDS
from triton_ep.ops import library
from triton_ep.ops.activation import Activation, check_activation
from triton_ep.ops.grouped_bf16 import bf16_wgrad, fits_tma, programs
from triton_ep.ops.row_scales import RowScaled
from triton_ep.ops.strides import dense
from triton_ep.ops.tiles import check_offsets, tile_table
from triton_ep.ops.weighted_rows import weighted_rows_backward
from triton_ep.runtime import launch as runtime
from triton_ep.runtime.launch import INTERPRETING, Boxes
from triton_ep.runtime.plans import experts_backward as plans
from triton_ep.runtime.plans.experts import most_programs

__all__ = ["bias_gradient", "down_dgrad", "weight_gradient", "weighted_rows_backward"]

_BOX_BYTES = 16
"""Rows of a matrix read in boxes are multiples of this."""


# --- rows of the second product ---------------------------------------------------------------------------


def _down_like(
    pre: torch.Tensor,
    weights: torch.Tensor | None,
    gated: bool,
    fp8: bool,
    fast: bool,
    dpre: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (rows, width), ffn = pre.shape, pre.shape[1] // (2 if gated else 1)
    tile = plans.down_tile(fp8, fast, INTERPRETING)
    shares = 0 if weights is None else -(-ffn // tile.n)
    dpre = pre.new_empty(rows, width) if dpre is None else dpre
    return dpre, pre.new_empty(rows, ffn), pre.new_empty(shares, rows, dtype=torch.float32)


_DOWN = (
    "(Tensor dy, Tensor? dy_scale, Tensor w, Tensor? w_scale, bool k_major, Tensor{} pre, Tensor? weights, "
    "Tensor tiles, str kind, bool gated, float? limit, float alpha, float up_offset, bool fast) -> "
)


@library.op(
    f"{_DOWN.format('')} (Tensor, Tensor, Tensor)",
    lambda dy, dy_scale, w, w_scale, k_major, pre, weights, tiles, kind, gated, limit, alpha, up_offset, fast: (
        _down_like(pre, weights, gated, dy_scale is not None, fast)
    ),
)
def _down_dgrad(
    dy: torch.Tensor,
    dy_scale: torch.Tensor | None,
    w: torch.Tensor,
    w_scale: torch.Tensor | None,
    k_major: bool,
    pre: torch.Tensor,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dpre, act, and shares of the row weights' gradient; w: [E, H, F], with k_major [E, F, H]."""
    dpre, act, shares = _down_like(pre, options[0], options[3], dy_scale is not None, options[-1])
    _launch_down((dy, dy_scale, w, w_scale, k_major, pre), (dpre, act, shares), options)
    return dpre, act, shares


@library.op(
    f"{_DOWN.format('(a!)')} (Tensor, Tensor)",
    lambda dy, dy_scale, w, w_scale, k_major, pre, weights, tiles, kind, gated, limit, alpha, up_offset, fast: (
        _down_like(pre, weights, gated, dy_scale is not None, fast)[1:]
    ),
)
def _down_dgrad_over(
    dy: torch.Tensor,
    dy_scale: torch.Tensor | None,
    w: torch.Tensor,
    w_scale: torch.Tensor | None,
    k_major: bool,
    pre: torch.Tensor,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """act and shares as in `_down_dgrad`; dpre overwrites `pre`."""
    _, act, shares = _down_like(pre, options[0], options[3], dy_scale is not None, options[-1], pre)
    _launch_down((dy, dy_scale, w, w_scale, k_major, pre), (pre, act, shares), options)
    return act, shares


def _launch_down(operands: tuple[Any, ...], results: tuple[torch.Tensor, ...], options: tuple[Any, ...]) -> None:
    """operands, options: arguments of the ops above up to `pre`, and after it. results: dpre, act, shares."""
    dy, dy_scale, w, w_scale, k_major, pre = operands
    dpre, act, shares = results
    weights, tiles, *activation, fast = options
    if not pre.numel():
        return
    fp8 = dy_scale is not None
    (num_rows, hidden), ffn, experts = dy.shape, act.shape[1], w.shape[0]
    tile = plans.down_tile(fp8, fast, INTERPRETING)
    plan = plans.down_dgrad(tile, fp8, k_major, weights is not None, tuple(activation))
    lines, length = (ffn, hidden) if k_major else (hidden, ffn)
    box = [1, tile.n, tile.k] if k_major else [1, tile.k, tile.n]
    runtime.launch(
        plan,
        min(programs(dy.device) * tile.per_sm, most_programs(tile, num_rows, experts, ffn)),
        dy=Boxes(dy, [num_rows, hidden], [hidden, 1], [tile.box_rows, tile.k]),
        w=Boxes(w, [experts, lines, length], [lines * length, length, 1], box),
        # Pointers that the kernel does not read get the table of tiles.
        dy_scale_ptr=tiles if dy_scale is None else dy_scale,
        w_scale_ptr=tiles if w_scale is None else w_scale,
        pre_ptr=pre,
        weights_ptr=tiles if weights is None else weights,
        tiles_ptr=tiles,
        taken_ptr=tiles.new_zeros(1) if tile.split else tiles,
        dpre_ptr=dpre,
        act_ptr=act,
        shares_ptr=tiles if weights is None else shares,
        num_rows=num_rows,
        hidden=hidden,
        ffn=ffn,
    )


@library.op(
    "(Tensor shares, Tensor dy, Tensor? dy_scale, Tensor? bias, Tensor tiles) -> Tensor",
    lambda shares, *_: shares.new_empty(shares.shape[1]),
)
def _row_weight_gradient(
    shares: torch.Tensor,
    dy: torch.Tensor,
    dy_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    tiles: torch.Tensor,
) -> torch.Tensor:
    out = shares.new_empty(shares.shape[1])
    hidden = dy.shape[1]
    plan = plans.row_weight_gradient(hidden, bias is not None, dy_scale is not None, INTERPRETING)
    grid = (tiles.shape[0] - 1) * (plans.TILE_ROWS // plan.constexprs["ROWS"])
    runtime.launch(
        plan,
        grid if out.shape[0] else 0,
        shares_ptr=shares,
        # The kernel reads dy and its scales only if there is a bias.
        dy_ptr=tiles if bias is None else dy,
        dy_scale_ptr=tiles if bias is None or dy_scale is None else dy_scale,
        bias_ptr=tiles if bias is None else bias,
        tiles_ptr=tiles,
        out_ptr=out,
        num_rows=out.shape[0],
        shares=shares.shape[0],
        hidden=hidden,
    )
    return out


@library.without_grad
def down_dgrad(
    dy: torch.Tensor | RowScaled,
    w2: torch.Tensor | RowScaled,
    pre: torch.Tensor,
    offs: torch.Tensor,
    *,
    row_weights: torch.Tensor | None = None,
    activation: Activation | None = None,
    bias: torch.Tensor | None = None,
    fast: bool = False,
    tiles: torch.Tensor | None = None,
    overwrite: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Backward of `rows_product` and of the activation before it, in one kernel. No gradient.

    Arguments:
        dy: [R, H] bf16 or RowScaled, the gradient of the second product.
        w2: bf16 [E, H, F], contiguous, or the transpose of a contiguous [E, F, H]; if dy is RowScaled, RowScaled
            [E, F, H]: the weights quantised along H.
        pre: [R, 2F] bf16 of `gate_up`, gate columns first; not gated: [R, F].
        offs: [E + 1] int32, see the module.
        row_weights: [R] float32, the same as for `gate_up`.
        activation: None: SwiGLU.
        bias: [E, H] float32 or bf16 of the second product, which was also multiplied by the row weights: it contributes
            to their gradient.
        fast: sum in the FP8 tensor cores, on Hopper with about 14 bits: faster, but 12 % off if all terms have one
            sign.
        tiles: `tile_table(offs, R)`, if it exists already.
        overwrite: dpre overwrites `pre`, which must be contiguous.

    Returns dpre [R, 2F] bf16; act [R, F] bf16, the activation times the rows' weights, recomputed from `pre`;
    and the gradient of the row weights [R] float32, summed in a fixed order, or None without row weights.

    Raises:
        InputError: operands that do not fit each other, or rows that are not multiples of 16 bytes. ConfigError: an
            activation that no kernel computes.
    """
    activation = Activation() if activation is None else activation
    check_activation(activation)
    rows, dy_scale = (dy.qdata, dy.scale) if isinstance(dy, RowScaled) else (dy, None)
    weights, w_scale = (w2.qdata, w2.scale) if isinstance(w2, RowScaled) else (w2, None)
    _check_down(rows, weights, dy_scale is not None, w_scale is not None, pre, activation.gated)
    num_rows, hidden = rows.shape
    experts = weights.shape[0]
    check_offsets(offs, experts, rows.device)
    k_major = w_scale is not None or not weights.is_contiguous()
    if w_scale is None and k_major:
        weights = weights.transpose(1, 2)
    rows, pre = dense(rows.contiguous()), pre.contiguous()
    for name, each in (("dy", rows), ("w2", weights)):
        if not weights.is_contiguous() or not fits_tma((each, each.shape[-1])):
            raise InputError(_misfit(name, each))
    _check_vector("row_weights", row_weights, [num_rows], (torch.float32,), rows)
    _check_vector("bias", bias, [experts, hidden], (torch.float32, torch.bfloat16), rows)
    table = tile_table(offs, num_rows) if tiles is None else tiles
    if table.dtype != torch.int32 or table.shape != (table.shape[0], TILE_WORDS) or not table.is_contiguous():
        raise InputError(f"tiles must be the table that tile_table returns; it is {table.dtype} {list(table.shape)}.")
    row_weights, bias = (None if each is None else each.contiguous() for each in (row_weights, bias))
    given = (rows, dy_scale, weights, w_scale, k_major, pre, row_weights, table, *activation, fast)
    if overwrite:
        dpre, (act, shares) = pre, _down_dgrad_over(*given)
    else:
        dpre, act, shares = _down_dgrad(*given)
    if row_weights is None:
        return dpre, act, None
    return dpre, act, _row_weight_gradient(shares, rows, dy_scale, bias, table)


def _check_down(dy: torch.Tensor, w2: torch.Tensor, dy_fp8: bool, w2_fp8: bool, pre: torch.Tensor, gated: bool) -> None:
    wanted = torch.float8_e4m3fn if dy_fp8 else torch.bfloat16
    if dy_fp8 != w2_fp8 or dy.dtype != wanted or w2.dtype != wanted or pre.dtype != torch.bfloat16:
        raise InputError(
            f"dy is {dy.dtype}, w2 {w2.dtype}, pre {pre.dtype}; dy and w2 must be bfloat16, or both RowScaled, and pre "
            "bfloat16."
        )
    if dy.ndim != 2 or w2.ndim != 3 or pre.ndim != 2:
        raise InputError(f"dy, w2 and pre must have 2, 3 and 2 dimensions: {dy.ndim}, {w2.ndim} and {pre.ndim}.")
    num_rows, hidden = dy.shape
    ffn, of_w2 = (w2.shape[1], w2.shape[2]) if w2_fp8 else (w2.shape[2], w2.shape[1])
    width = 2 * ffn if gated else ffn
    if of_w2 != hidden or pre.shape != (num_rows, width):
        raise InputError(
            f"dy is {list(dy.shape)}, w2 {list(w2.shape)}, pre {list(pre.shape)}; for H = {hidden} and F = {ffn}, w2 "
            f"must be {'[E, F, H]' if w2_fp8 else '[E, H, F]'} and pre {[num_rows, width]}."
        )
    if not dy.device == w2.device == pre.device:
        raise InputError(f"dy, w2 and pre are on {dy.device}, {w2.device} and {pre.device}: move them to one device.")


def _misfit(name: str, x: torch.Tensor) -> str:
    unit = _BOX_BYTES // x.element_size()
    width = x.shape[-1]
    return (
        f"{name} {list(x.shape)} with strides {list(x.stride())} fits no TMA box: it must be contiguous, begin at a "
        f"multiple of {_BOX_BYTES} bytes, and have rows of a multiple of {unit} values; the nearest above {width} is "
        f"{-(-width // unit) * unit}."
    )


def _check_vector(
    name: str, x: torch.Tensor | None, shape: list[int], dtypes: tuple[torch.dtype, ...], like: torch.Tensor
) -> None:
    if x is not None and (list(x.shape) != shape or x.dtype not in dtypes or x.device != like.device):
        raise InputError(
            f"{name} must be {shape} of {', '.join(map(str, dtypes))} on {like.device}; it is {x.dtype} "
            f"{list(x.shape)} on {x.device}."
        )


# --- biases -----------------------------------------------------------------------------------------------


@library.op(
    "(Tensor x, Tensor offs, Tensor? row_weights) -> Tensor",
    lambda x, offs, _: x.new_empty((offs.shape[0] - 1, x.shape[1]), dtype=torch.float32),
)
def _bias_gradient(x: torch.Tensor, offs: torch.Tensor, row_weights: torch.Tensor | None) -> torch.Tensor:
    experts, n = offs.shape[0] - 1, x.shape[1]
    out = x.new_empty((experts, n), dtype=torch.float32)
    plan = plans.bias_gradient(n, row_weights is not None, INTERPRETING)
    weights = x if row_weights is None else row_weights.contiguous()
    grid = experts * -(-n // plan.constexprs["BLOCK_N"])
    runtime.launch(plan, grid, x_ptr=x.contiguous(), offs_ptr=offs.contiguous(), weights_ptr=weights, out_ptr=out, n=n)
    return out


@library.without_grad
def bias_gradient(x: torch.Tensor, offs: torch.Tensor, row_weights: torch.Tensor | None = None) -> torch.Tensor:
    """[E, N] float32: sums of the rows [R, N] bf16 of each segment, each row times its weight if row_weights are given.

    row_weights: [R] float32. Sums have a fixed order. No gradient.

    Raises:
        InputError: operands that do not fit each other.
    """
    if x.ndim != 2 or x.dtype != torch.bfloat16:
        raise InputError(f"x must be bfloat16 [R, N]; it is {x.dtype} {list(x.shape)}.")
    check_offsets(offs, device=x.device)
    _check_vector("row_weights", row_weights, [x.shape[0]], (torch.float32,), x)
    made: torch.Tensor = _bias_gradient(x, offs, row_weights)
    return made


# --- weights ----------------------------------------------------------------------------------------------


def fits_boxes(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether boxes hold the operands and the result of `weight_gradient`. Then it takes no memory of its own."""
    return all(t.is_contiguous() and fits_tma((t, t.shape[-1])) for t in (x, y)) and fits_tma((out, out.stride(1)))


@library.op(
    "(Tensor x, Tensor y, Tensor offs, Tensor? filled, Tensor(a!) out, bool accumulate, bool aligned, bool beside)"
    " -> ()",
    lambda *_: None,
)
def _weight_gradient(
    x: torch.Tensor,
    y: torch.Tensor,
    offs: torch.Tensor,
    filled: torch.Tensor | None,
    out: torch.Tensor,
    accumulate: bool,
    aligned: bool,
    beside: bool,
) -> None:
    num_experts, num_i, num_j = out.shape
    num_rows = x.shape[0]
    if not (aligned and fits_boxes(x, y, out) and out.numel() and num_rows):
        if out.is_contiguous():
            bf16_wgrad(x, y, offs, num_experts, out=out, accumulate=accumulate)
        else:
            made = bf16_wgrad(x, y, offs, num_experts, out_dtype=out.dtype)
            out.add_(made) if accumulate else out.copy_(made)
        return
    plan, tile, per_multiprocessor = plans.weight_gradient(num_experts, accumulate, beside, INTERPRETING)
    runtime.launch(
        plan,
        programs(x.device) * per_multiprocessor,
        x=Boxes(x, [num_rows, num_i], [num_i, 1], [tile.k, tile.m]),
        y=Boxes(y, [num_rows, num_j], [num_j, 1], [tile.k, tile.n]),
        out=out if accumulate else Boxes(out, [*out.shape], [*out.stride()], [1, tile.m, tile.n // 2]),
        offs_ptr=offs.contiguous(),
        filled_ptr=torch.diff(offs) if filled is None else filled.contiguous(),
        num_rows=num_rows,
        num_i=num_i,
        num_j=num_j,
        stride_e=out.stride(0),
        stride_i=out.stride(1),
        num_experts=num_experts,
    )


@library.without_grad
def weight_gradient(
    x: torch.Tensor,
    y: torch.Tensor,
    offs: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    aligned: bool = False,
    filled: torch.Tensor | None = None,
    beside: bool = False,
) -> torch.Tensor:
    """[E, I, J]: x_e^T @ y_e over the rows of each segment; zeros for an empty segment. No gradient.

    Arguments:
        x, y: [R, I] and [R, J] bf16. With x = dY and y = A the result is the gradient of W [E, N, K].
        offs: [E + 1] int32, see the module.
        out: [E, I, J], receives the result: bf16, or with `accumulate` float32. May be a slice of columns, or of every
            expert's rows, of a contiguous tensor. None: new, bf16.
        accumulate: add the result to `out`; the part of an empty segment is not touched.
        aligned: every segment holds a multiple of 64 rows: a fifth faster if rows are multiples of 16 bytes. This is
            not checked: if it is false, rows of other segments enter the sums.
        filled: [E] int32, rows of each segment before the padding at its end. Products of padding must be zero: with
            `aligned` most of them are skipped.
        beside: leave room on every multiprocessor for kernels of an exchange. Only the time of `accumulate` with
            `aligned` depends on it, by a fifth.

    Raises:
        InputError: shapes, dtypes or devices that do not fit each other.
    """
    if x.ndim != 2 or y.ndim != 2 or x.dtype != torch.bfloat16 or y.dtype != torch.bfloat16:
        raise InputError(
            f"x and y must be bfloat16 [R, I] and [R, J]; they are {x.dtype} {list(x.shape)} and {y.dtype} "
            f"{list(y.shape)}."
        )
    if y.shape[0] != x.shape[0] or y.device != x.device:
        raise InputError(f"x has {x.shape[0]} rows on {x.device}, y {y.shape[0]} on {y.device}.")
    check_offsets(offs, device=x.device)
    wanted = torch.float32 if accumulate else torch.bfloat16
    shape = (offs.shape[0] - 1, x.shape[1], y.shape[1])
    if accumulate and out is None:
        raise InputError("accumulate=True adds to a float32 out, which is missing.")
    if out is None:
        out = x.new_empty(shape)
    elif out.shape != shape or out.dtype != wanted or out.stride(2) != 1 or out.device != x.device:
        raise InputError(
            f"out is {out.dtype} {list(out.shape)} with strides {list(out.stride())} on {out.device}; with accumulate="
            f"{accumulate} it must be {wanted} {list(shape)} on {x.device}, the last dimension dense."
        )
    _check_vector("filled", filled, [offs.shape[0] - 1], (torch.int32,), x)
    _weight_gradient(x, y, offs, filled, out, accumulate, aligned, beside)
    return out
