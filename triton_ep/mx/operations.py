"""Torch operations that MXTensor and NVFP4Tensor share; tensor.py and nvfp4.py have the rest.

Each kind has an `Operations`, a table from ATen operations to functions. Its `__torch_dispatch__` runs them, below
autograd. An operation that is not in the table is refused.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map_only

from triton_ep.errors import InputError
from triton_ep.mx.serialize import reduce_blocks

aten = torch.ops.aten

Handler = Callable[..., Any]
"""Called with the operation and its arguments; at least one argument is a tensor of the kind."""

_BY_VALUE = (
    ("mm bmm addmm baddbmm mv dot linear", "default"),
    ("sum mean", "default dim_IntList dim"),
    ("amax amin max min any all abs neg isnan isinf equal linalg_vector_norm", "default"),
    ("add sub rsub mul div eq ne lt gt le ge", "Tensor Scalar"),
    ("add_ sub_ mul_ div_", "Tensor"),
)


def axis_of(x: torch.Tensor, dim: int) -> int:
    """Convert a dimension to one counted from the end."""
    return dim if dim < 0 else dim - x.dim()


def cuts_blocks(func: Any, x: BlockTensor) -> InputError:
    """Error for an operation whose result would not have whole blocks."""
    return InputError(
        f"{func} would cut or reorder the blocks of {x.block_size} along dimension {x.block_dim} of an "
        f"{type(x).__name__} of shape {list(x.shape)}; call .dequantize() first."
    )


class BlockTensor(torch.Tensor):
    """Elements with scales per block, which act as a tensor of the dtype that was quantised.

    Attributes:
        qdata: elements, as they are stored.
        scale: one per `block_size` values along `block_dim`.
        orig_dtype: the represented dtype.
        block_size: values that share a scale.
        block_dim: dimension along which blocks lie, counted from the end.
    """

    qdata: torch.Tensor
    scale: torch.Tensor
    orig_dtype: torch.dtype
    block_size: int
    block_dim: int

    # Only an implementation in a table returns a block-scaled tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @abstractmethod
    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]: ...

    @staticmethod
    @abstractmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: dict[str, Any], outer_size: Any, outer_stride: Any
    ) -> BlockTensor: ...

    @abstractmethod
    def _plain(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """`dequantize` without autograd."""

    @abstractmethod
    def _with(self, qdata: torch.Tensor, scale: torch.Tensor, **changed: Any) -> Self:
        """Other bytes in the same format, except for attributes in `changed`."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], block_dim: int | None = None) -> Self:
        """Apply `fn` to the bytes of the elements and to the bytes of the scales."""
        parts = fn(self.qdata.view(torch.uint8)), fn(self.scale.view(torch.uint8))
        return self._with(*parts, block_dim=self.block_dim if block_dim is None else block_dim)

    @property
    def data(self) -> torch.Tensor:
        """This tensor outside autograd. An assignment of a tensor of the same class replaces all parts and the format.

        Raises:
            InputError: assigned is a tensor of another class, which would have to be quantised.
        """
        return super().data

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if not isinstance(other, BlockTensor) or other.__tensor_flatten__()[0] != self.__tensor_flatten__()[0]:
            raise InputError(
                f"{type(other).__name__} {list(other.shape)} cannot be assigned to `data` of {type(self).__name__} "
                f"{list(self.shape)}: quantise it in that format."
            )
        # The wrapper holds shape and dtype, attributes hold the parts: both must change. torch's type stubs declare
        # `data` as an attribute, not as the descriptor that it is.
        torch.Tensor.data.__set__(self, other.detach())  # type: ignore[attr-defined]
        names, context = other.__tensor_flatten__()
        for name in (*names, *context):
            setattr(self, name, getattr(other, name))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_blocks(self)

    def share_memory_(self) -> Self:
        """Move all parts of the tensor to shared memory."""
        for part in _parts(self):
            part.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether all parts are in shared memory, as CUDA memory always is."""
        return all(part.is_shared() for part in _parts(self))


class Dequantize(torch.autograd.Function):
    """Dequantise a block-scaled tensor; the gradient passes through unchanged."""

    @staticmethod
    def forward(ctx: Any, mx: BlockTensor, dtype: torch.dtype) -> torch.Tensor:
        """The values in `dtype`."""
        ctx.orig_dtype = mx.orig_dtype
        return mx._plain(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient, in the represented dtype."""
        return grads[0].to(ctx.orig_dtype), None


class Operations:
    """Operations on one kind of tensor.

    Arguments:
        kind: MXTensor or NVFP4Tensor.
        format: names of attributes that tensors must share to be concatenated.
        by_value: names of further operations that compute on the dequantised values.
        check: raises if the tensor's form does not allow moving blocks one by one.
    """

    def __init__(
        self,
        kind: type[BlockTensor],
        format: tuple[str, ...],
        *,
        by_value: str = "",
        check: Callable[[Any, Any], None] = lambda func, x: None,
    ) -> None:
        self._kind = kind
        self._format = format
        self._check = check
        self._handlers: dict[Any, Handler] = {}
        self._by_value = {
            overload
            for packet, names in (*_BY_VALUE, (by_value, "default"))
            for each in packet.split()
            for name in names.split()
            if (overload := getattr(getattr(aten, each), name, None)) is not None
        }
        self.handles(
            *(getattr(aten, f"{name}_like").default for name in ("empty", "zeros", "ones", "full", "rand", "randn")),
            *(getattr(aten, f"new_{name}").default for name in ("empty", "zeros", "ones", "full", "empty_strided")),
        )(_like)
        self.handles(aten.t.default)(self._t)
        self.handles(aten.transpose.int)(self._transpose)
        self.handles(aten.unbind.int)(self._unbind)
        self.handles(aten.split.Tensor, aten.split_with_sizes.default)(self._split)
        self.handles(aten.unsqueeze.default)(self._unsqueeze)
        self.handles(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)(self._squeeze)
        self.handles(aten.expand.default)(self._expand)
        self.handles(aten.index.Tensor)(self._index)
        self.handles(aten.index_select.default)(self._index_select)
        self.handles(aten.stack.default)(self._stack)
        self.handles(aten.cat.default)(self._cat)
        self.handles(aten.is_pinned.default)(_is_pinned)
        self.handles(aten.record_stream.default)(_record_stream)

    def handles(self, *overloads: Any) -> Callable[[Handler], Handler]:
        """Decorator: register a function for these operations."""

        def register(handler: Handler) -> Handler:
            self._handlers.update(dict.fromkeys(overloads, handler))
            return handler

        return register

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation.

        Raises:
            InputError: the operation is not defined here, or would need to requantise blocks.
        """
        first = args[0]
        in_place = func._schema.is_mutable and isinstance(first, self._kind)
        if func in self._by_value and not in_place:
            plain_args, plain_kwargs = tree_map_only(self._kind, self._kind._plain, (args, kwargs))
            return func(*plain_args, **plain_kwargs)
        handler = self._handlers.get(func)
        if handler is None:
            raise InputError(f"{func} is not defined for an {self._kind.__name__}; call .dequantize() first.")
        if torch.is_inference_mode_enabled() and isinstance(first, torch.Tensor) and not first.is_inference():
            # A tensor created in inference mode has no version counter; torch gives a view its base's counter.
            with torch.inference_mode(False):
                return handler(func, *args, **kwargs)
        return handler(func, *args, **kwargs)

    def _t(self, func: Any, x: torch.Tensor) -> Any:
        return self._handlers[aten.permute.default](func, x, list(reversed(range(x.dim()))))

    def _transpose(self, func: Any, x: torch.Tensor, dim0: int, dim1: int) -> Any:
        order = list(range(-x.dim(), 0))
        dim0, dim1 = axis_of(x, dim0), axis_of(x, dim1)
        order[dim0], order[dim1] = dim1, dim0
        return self._handlers[aten.permute.default](func, x, order)

    def _unbind(self, func: Any, x: torch.Tensor, dim: int = 0) -> list[Any]:
        return [self._handlers[aten.select.int](func, x, dim, index) for index in range(x.shape[dim])]

    def _split(self, func: Any, x: torch.Tensor, sizes: int | Sequence[int], dim: int = 0) -> list[Any]:
        length = x.shape[dim]
        if isinstance(sizes, int):
            sizes = [min(sizes, length - first) for first in range(0, length, sizes)] or [0]
        parts = zip(accumulate(sizes), sizes, strict=True)
        return [self._handlers[aten.slice.Tensor](aten.slice.Tensor, x, dim, end - size, end) for end, size in parts]

    def _unsqueeze(self, func: Any, x: BlockTensor, dim: int) -> Any:
        self._check(func, x)
        behind = dim if dim < 0 else dim - x.dim() - 1
        return x._apply(lambda part: part.unsqueeze(dim), x.block_dim - (behind > x.block_dim - 1))

    def _squeeze(self, func: Any, x: BlockTensor, dims: int | Sequence[int] | None = None) -> Any:
        dims = range(x.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
        axes = {axis_of(x, dim) for dim in dims}
        gone = sorted(axis for axis in axes if x.shape[axis] == 1 and axis != x.block_dim)
        if not gone:
            return self._handlers[aten.alias.default](aten.alias.default, x)
        self._check(func, x)
        return x._apply(lambda part: part.squeeze(gone), x.block_dim + sum(axis > x.block_dim for axis in gone))

    def _expand(self, func: Any, x: BlockTensor, size: Sequence[int], **kwargs: Any) -> Any:
        size = list(size)
        if len(size) == x.dim() and all(new in (-1, old) for new, old in zip(size, x.shape, strict=True)):
            return self._handlers[aten.alias.default](aten.alias.default, x)
        self._check(func, x)
        if len(size) < -x.block_dim or size[x.block_dim] not in (-1, x.shape[x.block_dim]):
            raise cuts_blocks(func, x)
        size[x.block_dim] = -1
        return x._apply(lambda part: part.expand(size))

    def _index(self, func: Any, x: BlockTensor, indices: Sequence[torch.Tensor | None]) -> Any:
        self._check(func, x)
        each: list[torch.Tensor | None] = []
        for index in indices:
            # A boolean mask indexes as many dimensions as it has.
            is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
            each += index.nonzero().unbind(1) if index is not None and is_mask else [index]
        places = [place for place, index in enumerate(each) if index is not None]
        at = x.dim() + x.block_dim
        if at in places:
            raise cuts_blocks(func, x)
        # Adjacent indices put their broadcast dimensions in their place; indices that are apart put them first.
        together = places == list(range(places[0], places[-1] + 1))
        new = torch.broadcast_shapes(*(index.shape for index in each if index is not None))
        before = sum(place < at for place in places)
        at += (len(new) if before or not together else 0) - before
        num_dims = x.dim() - len(places) + len(new)
        return x._apply(lambda part: func(part, each), at - num_dims)

    def _index_select(self, func: Any, x: BlockTensor, dim: int, index: torch.Tensor) -> Any:
        self._check(func, x)
        axis = axis_of(x, dim)
        if axis == x.block_dim:
            raise cuts_blocks(func, x)
        return x._apply(lambda part: part.index_select(axis, index))

    def _stack(self, func: Any, tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
        new = dim if dim >= 0 else dim + tensors[0].dim() + 1
        parts = [self._unsqueeze(func, each, new) if isinstance(each, self._kind) else each for each in tensors]
        return self._cat(func, parts, new)

    def _cat(self, func: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
        parts = [each for each in tensors if isinstance(each, self._kind)]
        for each in parts:
            self._check(func, each)
        first = parts[0]
        if len(parts) < len(tensors) or not all(_alike(each, first, self._format) for each in parts):
            given = "; ".join(repr(each) if isinstance(each, self._kind) else str(type(each)) for each in tensors)
            name = self._kind.__name__
            raise InputError(f"{func} takes {name}s of one format, not {given}. Call .dequantize() on all.")
        axis = axis_of(first, dim)
        bytes_of = ([getattr(each, part).view(torch.uint8) for each in parts] for part in ("qdata", "scale"))
        return first._with(*(torch.cat(each, axis) for each in bytes_of))


def _alike(x: BlockTensor, y: BlockTensor, names: tuple[str, ...]) -> bool:
    """Whether attributes are equal. Tensors are compared by identity, because their values are on the device."""
    pairs = [(getattr(x, name), getattr(y, name)) for name in names]
    return all(a is b if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) else a == b for a, b in pairs)


def _parts(x: BlockTensor) -> list[torch.Tensor]:
    """The parts of the tensor, in dtypes that torch's operations accept."""
    parts = (getattr(x, name) for name in x.__tensor_flatten__()[0])
    return [part if part.dtype.itemsize > 1 else part.view(torch.uint8) for part in parts]


def _is_pinned(func: Any, x: BlockTensor, *args: Any, **kwargs: Any) -> bool:
    return all(func(part, *args, **kwargs) for part in _parts(x))


def _record_stream(func: Any, x: BlockTensor, stream: Any) -> None:
    for part in _parts(x):
        part.record_stream(stream)


def _like(func: Any, x: BlockTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A plain tensor: values written to it later need not fit any scale. Memory for a tensor on meta is in its format,
    because `Module.to_empty` asks for it in order to load values of this format."""
    device = kwargs.get("device")
    if func is aten.empty_like.default and device is not None and _is_moved_from_meta(x, device, kwargs.get("dtype")):
        names, context = x.__tensor_flatten__()
        parts = {name: torch.empty_like(getattr(x, name), device=device) for name in names}
        return type(x).__tensor_unflatten__(parts, context, x.shape, x.stride())
    shape_only = torch.empty_strided(x.shape, x.stride(), dtype=x.orig_dtype, device="meta")
    if device is None:
        kwargs["device"] = x.device
    result: torch.Tensor = func(shape_only, *args, **kwargs)
    return result


def _is_moved_from_meta(x: BlockTensor, device: Any, dtype: torch.dtype | None) -> bool:
    return x.device.type == "meta" != torch.device(device).type and dtype in (None, x.orig_dtype)
