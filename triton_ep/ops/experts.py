"""The two products of the experts, forward (kernels/experts/gate_up.py and rows_product.py).

Rows are in segments, one per expert: `offs` [E + 1] int32 on the device, first row of each segment, then the end of
the last. Rows past it are neither computed nor written. E experts, R rows, H hidden, F columns of the activation.

Operands are bf16, or both rows and weights are `RowScaled` for FP8 tensor cores. TMA reads operands that start at
multiples of 16 bytes and have rows of multiples of 16 bytes: H and F multiples of 8 in bf16, of 32 in FP8. Other bf16
shapes take a slower path.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from triton_ep.errors import InputError
from triton_ep.kernels.device.codes import TILE_WORDS
from triton_ep.ops import library
from triton_ep.ops.activation import Activation, check_activation
from triton_ep.ops.grouped_bf16 import boxes, fits_tma, programs
from triton_ep.ops.row_scales import RowScaled, rebase_rows, rebase_rows_directly
from triton_ep.ops.strides import dense
from triton_ep.ops.tiles import check_offsets, tile_table
from triton_ep.runtime import launch as runtime
from triton_ep.runtime.launch import INTERPRETING, Boxes
from triton_ep.runtime.plans import Plan
from triton_ep.runtime.plans.experts import (
    ACT_OUT,
    ProductTile,
    gate_up_plan,
    most_programs,
    product_tile,
    rows_plan,
)

_SWIGLU = Activation()
_MOST_WAYS = 512
"""Sizes of products whose tile, plan and grid are remembered. Exact dispatches bring new ones at each call."""
_Operand = torch.Tensor | RowScaled
_Parts = tuple[torch.Tensor, torch.Tensor | None]
"""Values, and their row scales if they have some."""


# --- common to both products ------------------------------------------------------------------------------


def _parts(x: _Operand | _Parts) -> _Parts:
    if isinstance(x, tuple):
        return x
    return (x.qdata, x.scale) if isinstance(x, RowScaled) else (x, None)


def _check_operands(rows: _Operand, weights: _Operand, names: tuple[str, str]) -> None:
    """Raise InputError unless both are bf16 or both RowScaled, [R, K] and [E, N, K], on one device."""
    scaled = [isinstance(each, RowScaled) for each in (rows, weights)]
    if scaled[0] != scaled[1]:
        raise InputError(
            f"{names[0]} and {names[1]} must both be bf16 or both RowScaled; {names[scaled.index(True)]} alone has "
            "row scales."
        )
    for name, x, ndim in zip(names, (rows, weights), (2, 3), strict=True):
        if not scaled[0] and (not isinstance(x, torch.Tensor) or x.dtype != torch.bfloat16):
            raise InputError(f"{name} must be bfloat16 or RowScaled, it is {getattr(x, 'dtype', type(x).__name__)}.")
        if len(x.shape) != ndim:
            raise InputError(f"{name} must be {ndim}-D, it is {list(x.shape)}.")
    if rows.shape[1] != weights.shape[2]:
        raise InputError(f"{names[0]} has rows of {rows.shape[1]}, {names[1]} of {weights.shape[2]}.")
    if rows.device != weights.device:
        raise InputError(f"{names[0]} is on {rows.device}, {names[1]} on {weights.device}: move one of them.")
    k = rows.shape[1]
    if k == 0:
        raise InputError(f"{names[0]} is {list(rows.shape)}: there is nothing to sum over.")
    if scaled[0] and k % 32:
        raise InputError(f"sums of {k} terms are not whole blocks of MXFP8; the nearest above is {-(-k // 32) * 32}.")


def _check_vector(
    name: str, x: torch.Tensor | None, shape: list[int], dtypes: tuple[torch.dtype, ...], like: Any
) -> None:
    if x is None:
        return
    if list(x.shape) != shape or x.dtype not in dtypes or x.device != like.device:
        raise InputError(
            f"{name} must be {shape} {dtypes} on {like.device}; it is {list(x.shape)} {x.dtype} on {x.device}."
        )


def _check_segments(offs: torch.Tensor, tiles: torch.Tensor | None, num_experts: int, rows: Any) -> None:
    check_offsets(offs, num_experts, rows.device)
    if tiles is None:
        return
    if tiles.dtype != torch.int32 or tiles.dim() != 2 or tiles.shape[1] != TILE_WORDS or not tiles.is_contiguous():
        raise InputError(f"tiles must be the table that tile_table returns; it is {tiles.dtype} {list(tiles.shape)}.")


class _Sizes(NamedTuple):
    """Sizes of a product, and the device. columns: of the results; for the first product, of one half."""

    num_rows: int
    num_experts: int
    columns: int
    device: torch.device


def _choose(product: str, sizes: _Sizes, scaled: bool, fast: bool, tma: bool, halves: int = 1) -> ProductTile:
    arithmetic = ("fast" if fast else "fp8") if scaled else "bf16"
    arch = None if INTERPRETING else runtime.architecture()
    return product_tile(product, arithmetic, -(-sizes.num_rows // sizes.num_experts), arch, tma, halves)


def _places(tile: ProductTile, offs: torch.Tensor, tiles: torch.Tensor | None, num_rows: int) -> torch.Tensor:
    """The tile table, or the offsets if the kernel takes its tiles from these."""
    if not tile.table:
        return offs.contiguous()
    return tile_table(offs, num_rows) if tiles is None else tiles


def _grid(tile: ProductTile, sizes: _Sizes) -> int:
    per_sm = 1 if INTERPRETING else tile.per_sm
    return min(programs(sizes.device) * per_sm, most_programs(tile, *sizes[:3]))


# --- gate and up --------------------------------------------------------------------------------------------


@functools.lru_cache(_MOST_WAYS)
def _gate_up_way(
    sizes: _Sizes,
    scaled: bool,
    fast: bool,
    tma: bool,
    has: tuple[bool, bool, bool],
    act: str,
    activation: Activation,
    tile: ProductTile | None,
) -> tuple[ProductTile, Plan, int]:
    """Tile, plan and grid; tile: None = by size."""
    tile = tile or _choose("gate_up", sizes, scaled, fast, tma, 2 if activation.gated else 1)
    return tile, gate_up_plan(tile, sizes.num_experts, tma, scaled, has, act, activation), _grid(tile, sizes)


def launch_gate_up(
    x: _Operand | _Parts,
    w13: _Operand | _Parts,
    offs: torch.Tensor,
    tiles: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: Activation,
    keep_pre: bool,
    act: str,
    fast: bool,
    tile: ProductTile | None = None,
    tma: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The activation, its scale bytes (None unless act="mx") and its input (None unless keep_pre).

    Operands must be checked already. tile: None = by size. tma: None = wherever sizes and addresses allow.
    """
    (rows, x_scale), (w, w_scale) = _parts(x), _parts(w13)
    (num_rows, k), (num_experts, width, _) = rows.shape, w.shape
    halves = 2 if activation.gated else 1
    f = width // halves
    out, out_scale, pre = _gate_up_memory(rows, w, activation.gated, keep_pre, act)
    if num_rows == 0 or width == 0:
        return out, out_scale, pre
    rows = dense(rows.contiguous())
    tma = fits_tma((rows, k), (w, k)) and not INTERPRETING if tma is None else tma
    has = (bias is not None, row_weights is not None, keep_pre)
    sizes = _Sizes(num_rows, num_experts, f, rows.device)
    tile, plan, grid = _gate_up_way(sizes, x_scale is not None, fast, tma, has, act, activation, tile)
    places = _places(tile, offs, tiles, num_rows)
    operands: tuple[Any, Any] = (rows, w)
    if tma:
        by_half = Boxes(w, [num_experts * halves, f, k], [f * k, k, 1], [halves, tile.n, tile.k])
        operands = (boxes(rows, num_rows, k, k, [tile.box_rows, tile.k]), by_half)
    runtime.launch(
        plan,
        grid,
        x=operands[0],
        w=operands[1],
        # Pointers that the kernel does not read get `places`.
        x_scale_ptr=places if x_scale is None else x_scale,
        w_scale_ptr=places if w_scale is None else w_scale,
        bias_ptr=places if bias is None else bias,
        row_weights_ptr=places if row_weights is None else row_weights,
        act_ptr=out,
        act_scale_ptr=places if out_scale is None else out_scale,
        pre_ptr=places if pre is None else pre,
        tiles_ptr=places,
        taken_ptr=rows.new_zeros(1, dtype=torch.int32) if tile.split else places,
        num_rows=num_rows,
        f=f,
        k=k,
        num_experts=num_experts,
    )
    return out, out_scale, pre


def _gate_up_memory(
    x: torch.Tensor, w: torch.Tensor, gated: bool, keep_pre: bool, act: str
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Memory of the results of `launch_gate_up`."""
    rows, width = x.shape[0], w.shape[1]
    f = width // 2 if gated else width
    out = x.new_empty((rows, f), dtype=torch.float8_e4m3fn if act == "mx" else torch.bfloat16)
    scale = x.new_empty((rows, f // 32), dtype=torch.uint8) if act == "mx" else None
    return out, scale, x.new_empty((rows, width), dtype=torch.bfloat16) if keep_pre else None


def _without_none(
    out: torch.Tensor, scale: torch.Tensor | None, pre: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The results with empty tensors for those that are absent, as an op returns them."""
    scale = out.new_empty((0,), dtype=torch.uint8) if scale is None else scale
    return out, scale, out.new_empty((0,), dtype=torch.bfloat16) if pre is None else pre


@library.op(
    "(Tensor x, Tensor? x_scale, Tensor w, Tensor? w_scale, Tensor offs, Tensor? tiles, Tensor? row_weights, "
    "Tensor? bias, str kind, bool gated, float? limit, float alpha, float up_offset, bool keep_pre, str act, "
    "bool fast) -> (Tensor, Tensor, Tensor)",
    lambda x, _, w, *rest: _without_none(*_gate_up_memory(x, w, rest[6], rest[10], rest[11])),
)
def _gate_up(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    w: torch.Tensor,
    w_scale: torch.Tensor | None,
    offs: torch.Tensor,
    tiles: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    kind: str,
    gated: bool,
    limit: float | None,
    alpha: float,
    up_offset: float,
    keep_pre: bool,
    act: str,
    fast: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    activation = Activation(kind, gated, limit, alpha, up_offset)
    operands = (x, x_scale), (w, w_scale)
    found = launch_gate_up(*operands, offs, tiles, row_weights, bias, activation, keep_pre, act, fast)
    return _without_none(*found)


@library.without_grad
def gate_up(
    x: _Operand,
    w13: _Operand,
    offs: torch.Tensor,
    *,
    row_weights: torch.Tensor | None = None,
    activation: Activation | None = None,
    bias: torch.Tensor | None = None,
    keep_pre: bool = False,
    act: str = "bf16",
    fast: bool = False,
    tiles: torch.Tensor | None = None,
) -> tuple[_Operand, torch.Tensor | None]:
    """First product of the experts and its activation, in one kernel. No gradient.

    Arguments:
        x: [R, H] bf16 or RowScaled.
        w13: [E, 2F, H] of the same kind, contiguous, gate rows before up rows; not gated: [E, F, H].
        offs: [E + 1] int32, see the module.
        row_weights: [R] float32 factors of the activation.
        activation: None: SwiGLU.
        bias: [E, 2F] float32 or bf16 ([E, F]), added to the product.
        keep_pre: also return the product.
        act: "bf16"; "mx": MXFP8 (RCEIL, blocks of 32 along F) of the float32 values, moved to one scale per row;
            "mx_bf16": that MXFP8 as bf16 values. The last two need F to be a multiple of 32.
        fast: sum in the FP8 tensor cores, on Hopper with about 14 bits: faster, but 12 % off if all terms have one
            sign.
        tiles: `tile_table(offs, R)`, if it exists already.

    Returns the activation [R, F], bf16 or RowScaled ("mx"), and with keep_pre the product [R, 2F] ([R, F]) bf16, bias
    included, gate columns first, else None.

    Raises:
        InputError: operands that do not fit each other. ConfigError: an activation that no kernel computes.
    """
    activation = activation or _SWIGLU
    _check_gate_up(x, w13, offs, row_weights, activation, bias, act, tiles)
    (rows, x_scale), (w, w_scale) = _parts(x), _parts(w13)
    vectors = [None if each is None else each.contiguous() for each in (row_weights, bias)]
    operands = (rows, x_scale, w, w_scale, offs, tiles, *vectors)
    value, scale, pre = _gate_up(*operands, *_spelled(activation), keep_pre, act, fast)
    result: _Operand = rebase_rows(value, scale, offs) if act == "mx" else value
    return result, pre if keep_pre else None


def gate_up_directly(
    x: _Operand,
    w13: _Operand,
    offs: torch.Tensor,
    *,
    row_weights: torch.Tensor | None,
    activation: Activation,
    bias: torch.Tensor | None,
    keep_pre: bool,
    act: str,
    fast: bool,
    tiles: torch.Tensor | None,
) -> tuple[_Operand, torch.Tensor | None]:
    """`gate_up` of plain tensors that are known to fit and contiguous, where nothing observes ops: less host time."""
    value, scale, pre = launch_gate_up(x, w13, offs, tiles, row_weights, bias, activation, keep_pre, act, fast)
    return value if scale is None else rebase_rows_directly(value, scale, offs), pre


def _check_gate_up(
    x: _Operand,
    w13: _Operand,
    offs: torch.Tensor,
    row_weights: torch.Tensor | None,
    activation: Activation,
    bias: torch.Tensor | None,
    act: str,
    tiles: torch.Tensor | None,
) -> None:
    """Raise the errors of `gate_up`."""
    check_activation(activation)
    if act not in ACT_OUT:
        raise InputError(f"act is {act!r}, choose from {', '.join(ACT_OUT)}.")
    _check_operands(x, w13, ("x", "w13"))
    (rows, _), (w, _) = _parts(x), _parts(w13)
    num_experts, width, _ = w.shape
    _check_segments(offs, tiles, num_experts, rows)
    if not w.is_contiguous():
        raise InputError(f"w13 must be contiguous [E, 2F, H]; its strides are {list(w.stride())}.")
    if activation.gated and width % 2:
        raise InputError(f"w13 has {width} rows per expert; gate and up must have the same number.")
    f = width // 2 if activation.gated else width
    if act != "bf16" and f % 32:
        raise InputError(f"act={act!r} quantises blocks of 32 of {f} columns; the nearest above is {-(-f // 32) * 32}.")
    _check_vector("row_weights", row_weights, [rows.shape[0]], (torch.float32,), rows)
    _check_vector("bias", bias, [num_experts, width], (torch.float32, torch.bfloat16), rows)


@functools.cache
def _spelled(activation: Activation) -> tuple[Any, ...]:
    """The activation as arguments of an op, whose numbers must be floats."""
    kind, gated, limit, alpha, up_offset = activation
    return kind, gated, None if limit is None else float(limit), float(alpha), float(up_offset)


# --- rows times weights ---------------------------------------------------------------------------------------


@functools.lru_cache(_MOST_WAYS)
def _rows_way(
    sizes: _Sizes,
    scaled: bool,
    fast: bool,
    tma: bool,
    k_major: bool,
    aligned: bool,
    has: tuple[bool, bool],
    zero_rest: bool,
    tile: ProductTile | None,
) -> tuple[ProductTile, Plan, int]:
    """Tile, plan and grid; tile: None = by size."""
    tile = tile or _choose("rows", sizes, scaled, fast, tma)
    plan = rows_plan(tile, sizes.num_experts, tma, scaled, k_major, aligned, has, zero_rest)
    return tile, plan, _grid(tile, sizes)


def launch_rows_product(
    a: _Operand | _Parts,
    w: _Operand | _Parts,
    offs: torch.Tensor,
    out: torch.Tensor | None,
    tiles: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    fast: bool,
    aligned: bool,
    tile: ProductTile | None = None,
    tma: bool | None = None,
    zero_rest: bool = False,
) -> torch.Tensor:
    """Write the product to `out`, None = a new bf16 tensor, and return that. Operands must be checked already.

    tile: None = by size. tma: None = wherever possible. zero_rest: zero the rows past the last segment.
    """
    (rows, a_scale), (weights, w_scale) = _parts(a), _parts(w)
    (num_rows, k), (num_experts, n, _) = rows.shape, weights.shape
    if out is None:
        out = rows.new_empty((num_rows, n), dtype=torch.bfloat16)
    if num_rows == 0 or n == 0:
        return out
    rows = dense(rows.contiguous())
    row_weights = None if bias is None else row_weights
    k_major = weights.is_contiguous()
    # bf16 tiles step by 64 terms. With a transposed w, a box that crosses K would load rows of the next expert.
    able = fits_tma((rows, k), (weights, k if k_major else n)) and (k_major or k % 64 == 0)
    tma = able and not INTERPRETING if tma is None else tma
    has = (bias is not None, row_weights is not None)
    aligned = aligned and fits_tma((out, out.stride(0)))
    sizes = _Sizes(num_rows, num_experts, n, rows.device)
    tile, plan, grid = _rows_way(sizes, a_scale is not None, fast, tma, k_major, aligned, has, zero_rest, tile)
    places = _places(tile, offs, tiles, num_rows)
    operands: tuple[Any, Any, Any] = (rows, weights, out)
    box_stores = plan.constexprs["BOX_STORES"]
    if tma:
        box = [tile.n, tile.k] if k_major else [tile.k, tile.n]
        lines, length = (n, k) if k_major else (k, n)
        operands = (
            boxes(rows, num_rows, k, k, [tile.box_rows, tile.k]),
            boxes(weights, num_experts * lines, length, length, box),
            boxes(out, num_rows, n, out.stride(0), [tile.box_rows, tile.n // 2]) if box_stores else out,
        )
    runtime.launch(
        plan,
        grid,
        a=operands[0],
        w=operands[1],
        out=operands[2],
        x_scale_ptr=places if a_scale is None else a_scale,
        w_scale_ptr=places if w_scale is None else w_scale,
        bias_ptr=places if bias is None else bias,
        row_weights_ptr=places if row_weights is None else row_weights,
        out_ptr=out,
        tiles_ptr=places,
        taken_ptr=rows.new_zeros(1, dtype=torch.int32) if tile.split else places,
        num_rows=num_rows,
        n=n,
        k=k,
        num_experts=num_experts,
        stride_om=out.stride(0),
    )
    return out


_OPERANDS = (
    "(Tensor a, Tensor? a_scale, Tensor w, Tensor? w_scale, Tensor offs, Tensor? tiles, Tensor? row_weights, "
    "Tensor? bias, bool fast, bool aligned"
)


@library.op(
    f"{_OPERANDS}) -> Tensor", lambda a, _, w, *rest: a.new_empty((a.shape[0], w.shape[1]), dtype=torch.bfloat16)
)
def _rows_product(
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    w: torch.Tensor,
    w_scale: torch.Tensor | None,
    offs: torch.Tensor,
    tiles: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    fast: bool,
    aligned: bool,
) -> torch.Tensor:
    return launch_rows_product((a, a_scale), (w, w_scale), offs, None, tiles, row_weights, bias, fast, aligned)


@library.op(f"{_OPERANDS}, Tensor(a!) out) -> ()", lambda *_: None)
def _rows_product_into(
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    w: torch.Tensor,
    w_scale: torch.Tensor | None,
    offs: torch.Tensor,
    tiles: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    fast: bool,
    aligned: bool,
    out: torch.Tensor,
) -> None:
    launch_rows_product((a, a_scale), (w, w_scale), offs, out, tiles, row_weights, bias, fast, aligned)


@library.without_grad
def rows_product(
    a: _Operand,
    w: _Operand,
    offs: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    row_weights: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    fast: bool = False,
    aligned: bool = False,
    tiles: torch.Tensor | None = None,
) -> torch.Tensor:
    """Second product of the experts, or a gradient of rows: [R, N] bf16, rows of segment e times w[e]^T. No gradient.

    Arguments:
        a: [R, K] bf16 or RowScaled.
        w: [E, N, K] of the same kind, contiguous; or bf16 [E, N, K] that is the transpose of a contiguous [E, K, N].
        offs: [E + 1] int32, see the module.
        bias: [E, N] float32 or bf16, added to the product. row_weights: [R] float32 factors of the bias alone.
        out: [R, N] bf16 with consecutive columns, to be written; None: a new one. Rows past the last segment are not
            written.
        aligned: every segment starts and ends at a multiple of 128 rows. This is not checked: if it is false, rows of
            other segments come out wrong.
        fast, tiles: as for `gate_up`.

    Raises:
        InputError: operands that do not fit each other.
    """
    _check_rows_product(a, w, offs, bias, row_weights, out, tiles)
    (rows, a_scale), (weights, w_scale) = _parts(a), _parts(w)
    vectors = [None if each is None else each.contiguous() for each in (row_weights, bias)]
    operands = (rows, a_scale, weights, w_scale, offs, tiles, *vectors, fast, aligned)
    if out is None:
        made: torch.Tensor = _rows_product(*operands)
        return made
    _rows_product_into(*operands, out)
    return out


def rows_product_directly(
    a: _Operand,
    w: _Operand,
    offs: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    out: torch.Tensor | None,
    fast: bool,
    aligned: bool,
    tiles: torch.Tensor | None,
) -> torch.Tensor:
    """`rows_product` of plain tensors that are known to fit and contiguous, where nothing observes ops: less host
    time."""
    return launch_rows_product(a, w, offs, out, tiles, row_weights, bias, fast, aligned)


def _check_rows_product(
    a: _Operand,
    w: _Operand,
    offs: torch.Tensor,
    bias: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    out: torch.Tensor | None,
    tiles: torch.Tensor | None,
) -> None:
    """Raise the errors of `rows_product`."""
    _check_operands(a, w, ("a", "w"))
    (rows, _), (weights, _) = _parts(a), _parts(w)
    num_experts, n, _ = weights.shape
    _check_segments(offs, tiles, num_experts, rows)
    if not (weights.is_contiguous() or weights.transpose(1, 2).is_contiguous()):
        raise InputError(f"w must be contiguous [E, N, K] or its transpose; its strides are {list(weights.stride())}.")
    _check_vector("row_weights", row_weights, [rows.shape[0]], (torch.float32,), rows)
    _check_vector("bias", bias, [num_experts, n], (torch.float32, torch.bfloat16), rows)
    if out is None:
        return
    shape = (rows.shape[0], n)
    if out.shape != shape or out.dtype != torch.bfloat16 or out.device != rows.device or (n > 1 and out.stride(1) != 1):
        raise InputError(
            f"out must be bf16 {list(shape)} with consecutive columns on {rows.device}; it is {out.dtype} "
            f"{list(out.shape)} with strides {list(out.stride())} on {out.device}."
        )


__all__ = ["Activation", "RowScaled", "gate_up", "rows_product"]
