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

_OPERATIONS = Operations(MXTensor, "isfinite isclose allclose _grouped_mm")
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


@_handles(aten.is_pinned.default)
def _is_pinned(func: Any, mx: MXTensor, *args: Any, **kwargs: Any) -> bool:
    return all(func(part.view(torch.uint8), *args, **kwargs) for part in (mx.qdata, mx.scale))


@_handles(aten.record_stream.default)
def _record_stream(func: Any, mx: MXTensor, stream: Any) -> None:
    mx.qdata.record_stream(stream)
    mx.scale.record_stream(stream)


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


@_handles(aten.unsqueeze.default)
def _unsqueeze(func: Any, mx: MXTensor, dim: int) -> MXTensor:
    behind = dim if dim < 0 else dim - mx.dim() - 1
    return mx._apply(lambda part: part.unsqueeze(dim), mx.block_dim - (behind > mx.block_dim - 1))


@_handles(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(func: Any, mx: MXTensor, dims: int | Sequence[int] | None = None) -> MXTensor:
    dims = range(mx.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    axes = {axis_of(mx, dim) for dim in dims}
    gone = sorted(axis for axis in axes if mx.shape[axis] == 1 and axis != mx.block_dim)
    if not gone:
        return mx._apply(aten.alias.default)
    return mx._apply(lambda part: part.squeeze(gone), mx.block_dim + sum(axis > mx.block_dim for axis in gone))


@_handles(aten.expand.default)
def _expand(func: Any, mx: MXTensor, size: Sequence[int], **kwargs: Any) -> MXTensor:
    size = list(size)
    if len(size) < -mx.block_dim or size[mx.block_dim] not in (-1, mx.shape[mx.block_dim]):
        raise cuts_blocks(func, mx)
    size[mx.block_dim] = -1
    return mx._apply(lambda part: part.expand(size))


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


@_handles(aten.index.Tensor)
def _index(func: Any, mx: MXTensor, indices: Sequence[torch.Tensor | None]) -> MXTensor:
    each: list[torch.Tensor | None] = []
    for index in indices:
        # A boolean mask takes as many dimensions as it has.
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        each += index.nonzero().unbind(1) if index is not None and is_mask else [index]
    places = [place for place, index in enumerate(each) if index is not None]
    at = mx.dim() + mx.block_dim
    if at in places:
        raise cuts_blocks(func, mx)
    # The dimensions that the indices have together come where they stand, or first if they stand apart.
    together = places == list(range(places[0], places[-1] + 1))
    new = torch.broadcast_shapes(*(index.shape for index in each if index is not None))
    before = sum(place < at for place in places)
    at += (len(new) if before or not together else 0) - before
    num_dims = mx.dim() - len(places) + len(new)
    return mx._apply(lambda part: func(part, each), at - num_dims)


@_handles(aten.index_select.default)
def _index_select(func: Any, mx: MXTensor, dim: int, index: torch.Tensor) -> MXTensor:
    axis = axis_of(mx, dim)
    if axis == mx.block_dim:
        raise cuts_blocks(func, mx)
    return mx._apply(lambda part: part.index_select(axis, index))


@_handles(aten.stack.default)
def _stack(func: Any, tensors: Sequence[torch.Tensor], dim: int = 0) -> MXTensor:
    num_dims = tensors[0].dim() + 1
    new = dim if dim >= 0 else dim + num_dims
    parts = [_unsqueeze(func, each, new) if isinstance(each, MXTensor) else each for each in tensors]
    return _cat(func, parts, new)


@_handles(aten.cat.default)
def _cat(func: Any, tensors: Sequence[torch.Tensor], dim: int = 0) -> MXTensor:
    first = next(each for each in tensors if isinstance(each, MXTensor))
    names = ("elem_dtype", "block_size", "block_dim", "orig_dtype")
    parts = [each for each in tensors if isinstance(each, MXTensor)]
    if len(parts) < len(tensors) or any(getattr(each, n) != getattr(first, n) for each in parts for n in names):
        given = "; ".join(repr(each) if isinstance(each, MXTensor) else str(type(each)) for each in tensors)
        raise InputError(f"{func} takes MXTensors of one format, not {given}. Call .dequantize() on all.")
    axis = axis_of(first, dim)
    return first._with(
        torch.cat([each.qdata.view(torch.uint8) for each in parts], axis),
        torch.cat([each.scale.view(torch.uint8) for each in parts], axis),
    )
