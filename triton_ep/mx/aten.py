"""What torch's operations do to an MXTensor, beside what operations.py has. One that is in neither is refused."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from triton_ep.errors import InputError
from triton_ep.mx.operations import Operations, axis_of, cuts_blocks
from triton_ep.mx.tensor import MXTensor

aten = torch.ops.aten

_OPERATIONS = Operations(
    MXTensor,
    ("elem_dtype", "block_size", "block_dim", "orig_dtype"),
    by_value="isfinite isclose allclose _grouped_mm",
)
_handles = _OPERATIONS.handles
run = _OPERATIONS.run
"""What `MXTensor.__torch_dispatch__` calls."""


@_handles(aten.detach.default, aten.alias.default, aten.clone.default)
def _same(func: Any, mx: MXTensor, **kwargs: Any) -> MXTensor:
    return mx._apply(lambda part: func(part, **kwargs))


@_handles(aten._to_copy.default)
def _to_copy(func: Any, mx: MXTensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> MXTensor:
    qdata, scale = (func(part.view(torch.uint8), **kwargs) for part in (mx.qdata, mx.scale))
    return mx._with(qdata, scale, orig_dtype=dtype)


@_handles(aten.copy_.default)
def _copy(func: Any, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if not isinstance(target, MXTensor):
        assert isinstance(source, MXTensor), "one of the two is"
        return func(target, source._plain(), non_blocking)
    alike = isinstance(source, MXTensor) and all(
        getattr(target, name) == getattr(source, name) for name in ("elem_dtype", "block_size", "block_dim", "shape")
    )
    if not alike:
        raise InputError(f"copy_ into {target!r} takes an MXTensor of the same shape and format, not {source!r}.")
    for name in ("qdata", "scale"):
        getattr(target, name).view(torch.uint8).copy_(getattr(source, name).view(torch.uint8), non_blocking)
    return target


@_handles(aten._pin_memory.default)
def _pin_memory(func: Any, mx: MXTensor, *args: Any, **kwargs: Any) -> MXTensor:
    return mx._apply(lambda part: func(part, *args, **kwargs))


@_handles(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(func: Any, mx: MXTensor, size: Sequence[int]) -> MXTensor:
    shape = list(torch.empty(mx.shape, device="meta").view(size).shape)
    if shape == list(mx.shape):
        return mx._apply(aten.alias.default)
    # Blocks are runs of values that are `inner` apart, and stay so if a dimension of whole blocks lies over as many.
    inner = prod(mx.shape[mx.dim() + mx.block_dim + 1 :])
    fits = [d for d in range(-len(shape), 0) if prod(shape[len(shape) + d + 1 :]) == inner]
    fits = [d for d in fits if shape[d] % mx.block_size == 0]
    if not fits:
        raise cuts_blocks(func, mx)
    block_dim = mx.block_dim if mx.block_dim in fits else fits[-1]
    sizes = []
    for divisor in (mx.elem_format.per_byte, mx.block_size):
        sizes.append(shape.copy())
        sizes[-1][block_dim] //= divisor
    # Scales of a slice may not be viewable where the elements are: they are few, a copy is right as well.
    return mx._with(mx.qdata.view(torch.uint8).view(sizes[0]), mx.scale.view(torch.uint8).reshape(sizes[1]), block_dim)


@_handles(aten.as_strided.default)
def _as_strided(
    func: Any, mx: MXTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> MXTensor:
    """The tensor itself, which is what FSDP asks for; nothing else has blocks."""
    if list(size) != list(mx.shape) or list(stride) != list(mx.stride()) or storage_offset:
        raise cuts_blocks(func, mx)
    return mx._apply(aten.alias.default)


@_handles(aten.permute.default)
def _permute(func: Any, mx: MXTensor, order: Sequence[int]) -> MXTensor:
    from_end = [axis_of(mx, dim) for dim in order]
    return mx._apply(lambda part: part.permute(from_end), from_end.index(mx.block_dim) - mx.dim())


@_handles(aten.slice.Tensor)
def _slice(
    func: Any, mx: MXTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> MXTensor:
    axis = axis_of(mx, dim)
    if axis != mx.block_dim:
        return mx._apply(lambda part: func(part, axis, start, end, step))
    first, last, _ = slice(start, end).indices(mx.shape[axis])
    last = max(first, last)
    if step != 1 or first % mx.block_size or last % mx.block_size:
        raise cuts_blocks(func, mx)
    parts = ((mx.qdata, mx.elem_format.per_byte), (mx.scale, mx.block_size))
    return mx._with(*(func(part.view(torch.uint8), axis, first // n, last // n) for part, n in parts))


@_handles(aten.select.int)
def _select(func: Any, mx: MXTensor, dim: int, index: int) -> MXTensor:
    axis = axis_of(mx, dim)
    if axis == mx.block_dim:
        raise cuts_blocks(func, mx)
    return mx._apply(lambda part: part.select(axis, index), mx.block_dim + (axis > mx.block_dim))
