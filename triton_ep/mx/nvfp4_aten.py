"""What torch's operations do to an NVFP4Tensor, beside what operations.py has. One that is in neither is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from triton_ep.errors import InputError
from triton_ep.mx.nvfp4 import BLOCK, NVFP4Tensor
from triton_ep.mx.operations import Operations, axis_of, cuts_blocks

aten = torch.ops.aten

_TILE_ROWS, _TILE_VALUES = 128, 4 * BLOCK


def _scales_in_place(func: Any, x: NVFP4Tensor) -> None:
    if x.is_swizzled_scales:
        raise InputError(f"{func} needs a scale per block in its place; call .unswizzled() first.")


def _one_scale(func: Any, x: NVFP4Tensor) -> None:
    if x.per_tensor_scale is not None and x.per_tensor_scale.numel() > 1:
        raise InputError(f"{func} would mix matrices of different per-tensor scales; call .dequantize() first.")


def _has_many(x: NVFP4Tensor) -> bool:
    return x.per_tensor_scale is not None and x.per_tensor_scale.dim() == x.dim()


def _movable(func: Any, x: NVFP4Tensor) -> None:
    _scales_in_place(func, x)
    _one_scale(func, x)


_OPERATIONS = Operations(NVFP4Tensor, ("block_dim", "orig_dtype", "hadamard_signs", "per_tensor_scale"), check=_movable)
_handles = _OPERATIONS.handles
run = _OPERATIONS.run
"""What `NVFP4Tensor.__torch_dispatch__` calls."""


@_handles(aten.detach.default, aten.alias.default, aten.clone.default, aten._pin_memory.default)
def _same(func: Any, x: NVFP4Tensor, *args: Any, **kwargs: Any) -> NVFP4Tensor:
    outer = x.per_tensor_scale if x.per_tensor_scale is None else func(x.per_tensor_scale, *args)
    qdata, scale = (func(part.view(torch.uint8), *args, **kwargs) for part in (x.qdata, x.scale))
    return x._with(qdata, scale, per_tensor_scale=outer)


@_handles(aten._to_copy.default)
def _to_copy(func: Any, x: NVFP4Tensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> NVFP4Tensor:
    outer = x.per_tensor_scale if x.per_tensor_scale is None else func(x.per_tensor_scale, **kwargs)
    qdata, scale = (func(part.view(torch.uint8), **kwargs) for part in (x.qdata, x.scale))
    return x._with(qdata, scale, per_tensor_scale=outer, orig_dtype=x.orig_dtype if dtype is None else dtype)


@_handles(aten.copy_.default)
def _copy(func: Any, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if not isinstance(target, NVFP4Tensor):
        assert isinstance(source, NVFP4Tensor), "one of the two is"
        return func(target, source._plain(), non_blocking)
    names = ("shape", "block_dim", "is_swizzled_scales", "hadamard_signs")
    levels = target.__tensor_flatten__()[0]
    if (
        not isinstance(source, NVFP4Tensor)
        or any(getattr(target, name) != getattr(source, name) for name in names)
        or levels != source.__tensor_flatten__()[0]
    ):
        raise InputError(f"copy_ into {target!r} takes an NVFP4Tensor of the same shape and format, not {source!r}.")
    for name in ("qdata", "scale"):
        getattr(target, name).view(torch.uint8).copy_(getattr(source, name).view(torch.uint8), non_blocking)
    if target.per_tensor_scale is not None and source.per_tensor_scale is not None:
        target.per_tensor_scale.copy_(source.per_tensor_scale, non_blocking)
    return target


@_handles(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(func: Any, x: NVFP4Tensor, size: Sequence[int]) -> NVFP4Tensor:
    shape = list(torch.empty(x.shape, device="meta").view(size).shape)
    if shape == list(x.shape):
        return _same(aten.alias.default, x)
    _movable(func, x)
    if x.block_dim != -1 or not shape or shape[-1] != x.shape[-1]:
        raise cuts_blocks(func, x)
    return x._with(
        x.qdata.view([*shape[:-1], x.qdata.shape[-1]]),
        x.scale.view(torch.uint8).reshape([*shape[:-1], x.scale.shape[-1]]),
    )


@_handles(aten.permute.default)
def _permute(func: Any, x: NVFP4Tensor, order: Sequence[int]) -> NVFP4Tensor:
    from_end = [axis_of(x, dim) for dim in order]
    block_dim = from_end.index(x.block_dim) - x.dim()
    if x.is_swizzled_scales:  # tiles stay as they are
        return x._with(x.qdata.permute(from_end), x.scale, block_dim=block_dim)
    if _has_many(x) and sorted(from_end[-2:]) != [-2, -1]:
        _one_scale(func, x)
    return x._apply(lambda part: part.permute(from_end), block_dim)


@_handles(aten.slice.Tensor)
def _slice(
    func: Any, x: NVFP4Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> NVFP4Tensor:
    axis = axis_of(x, dim)
    first, last, _ = slice(start, end).indices(x.shape[axis])
    last = max(first, last)
    if first == 0 and last == x.shape[axis] and step == 1:
        return _same(aten.alias.default, x)
    if x.is_swizzled_scales:
        unit = _TILE_VALUES if axis == x.block_dim else _TILE_ROWS
        if step != 1 or first % unit or (last % unit and last != x.shape[axis]):
            raise InputError(
                f"a slice from {first} to {last} with swizzled scales would cut their tiles; along dimension {axis} it "
                f"must start and end at multiples of {unit}. Call .unswizzled() first."
            )
        moved = _slice(func, x.unswizzled(), dim, start, end, step)
        rows = moved._apply(lambda part: part.movedim(x.block_dim, -1), -1).swizzled()
        return x._with(rows.qdata.movedim(-1, x.block_dim), rows.scale)
    if axis == x.block_dim:
        if step != 1 or first % BLOCK or last % BLOCK:
            raise cuts_blocks(func, x)
        parts = ((x.qdata, 2), (x.scale, BLOCK))
        return x._with(*(func(part.view(torch.uint8), axis, first // n, last // n) for part, n in parts))
    outer = x.per_tensor_scale
    if outer is not None and _has_many(x) and outer.shape[axis] > 1:
        outer = func(outer, axis, start, end, step)
    qdata, scale = (func(part.view(torch.uint8), axis, start, end, step) for part in (x.qdata, x.scale))
    return x._with(qdata, scale, per_tensor_scale=outer)


@_handles(aten.select.int)
def _select(func: Any, x: NVFP4Tensor, dim: int, index: int) -> NVFP4Tensor:
    axis = axis_of(x, dim)
    _scales_in_place(func, x)
    if axis == x.block_dim:
        raise cuts_blocks(func, x)
    outer = x.per_tensor_scale
    if outer is not None and _has_many(x):
        if axis > -3:
            _one_scale(func, x)
        outer = outer.select(axis, index if outer.shape[axis] > 1 else 0)
    qdata, scale = (part.view(torch.uint8).select(axis, index) for part in (x.qdata, x.scale))
    return x._with(qdata, scale, per_tensor_scale=outer, block_dim=x.block_dim + (axis > x.block_dim))
