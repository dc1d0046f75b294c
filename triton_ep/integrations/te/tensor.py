"""MXFP8Tensor: a tensor in MXFP8 for modules, optimizers and autograd."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from triton_ep.errors import InputError
from triton_ep.integrations.te import layouts
from triton_ep.integrations.te.storage import FP8_DTYPES, MXFP8TensorStorage
from triton_ep.mx.formats import BLOCK
from triton_ep.mx.tensor import MXTensor

aten = torch.ops.aten


class MXFP8Tensor(MXFP8TensorStorage, torch.Tensor):
    """A tensor in MXFP8 that acts as one of a high-precision dtype, in modules and optimizers too.

    An operation that is not named here computes on the dequantised values. In place, its result is quantised again.

    Arguments:
        shape, dtype: of the tensor it stands for.
        requires_grad: whether it is a leaf that wants a gradient.
        The others: as in `MXFP8TensorStorage`.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type[MXFP8Tensor],
        shape: Iterable[int],
        dtype: torch.dtype,
        *,
        rowwise_data: torch.Tensor | None,
        rowwise_scale_inv: torch.Tensor | None,
        columnwise_data: torch.Tensor | None,
        columnwise_scale_inv: torch.Tensor | None,
        fp8_dtype: torch.dtype,
        quantizer: Any = None,
        requires_grad: bool = False,
        with_gemm_swizzled_scales: bool = False,
    ) -> MXFP8Tensor:
        """Wrap elements and scales; nothing is copied."""
        data = rowwise_data if rowwise_data is not None else columnwise_data
        device = data.device if data is not None else None
        shape = tuple(shape)
        if data is not None and tuple(data.shape) != shape:
            raise InputError(f"shape is {list(shape)}, the data {list(data.shape)}.")
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=requires_grad)

    def __init__(
        self,
        shape: Iterable[int],
        dtype: torch.dtype,
        *,
        rowwise_data: torch.Tensor | None,
        rowwise_scale_inv: torch.Tensor | None,
        columnwise_data: torch.Tensor | None,
        columnwise_scale_inv: torch.Tensor | None,
        fp8_dtype: torch.dtype,
        quantizer: Any = None,
        requires_grad: bool = False,
        with_gemm_swizzled_scales: bool = False,
    ) -> None:
        self._set(
            rowwise_data,
            rowwise_scale_inv,
            columnwise_data,
            columnwise_scale_inv,
            fp8_dtype,
            quantizer,
            with_gemm_swizzled_scales,
        )
        self._high_precision_init_val: torch.Tensor | None = None

    size = torch.Tensor.size
    device = torch.Tensor.device

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        usages = [name for name, there in self.get_usages().items() if there]
        return (
            f"MXFP8Tensor(shape={list(self.shape)}, {self._fp8_dtype}, {' and '.join(usages)}, for {self.dtype}, "
            f"device={str(self.device)!r}, requires_grad={self.requires_grad})"
        )

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values, in `dtype` or the dtype it stands for; gradients pass through unchanged."""
        result: torch.Tensor = _Dequantize.apply(self, self.dtype if dtype is None else dtype)
        return result

    def quantize_(self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None) -> MXFP8Tensor:
        """Put other values into this tensor, quantised in the directions that it has.

        noop_flag: a float32 scalar; where it is 1, nothing changes.
        """
        from triton_ep.integrations.te.quantizer import quantize_into

        quantize_into(tensor, self, noop_flag)
        return self

    def to_mxtensor(self, *, columnwise: bool = False, dtype: torch.dtype | None = None) -> MXTensor:
        """As `MXFP8TensorStorage.to_mxtensor`, by default for this tensor's dtype; without gradient."""
        return super().to_mxtensor(columnwise=columnwise, dtype=self.dtype if dtype is None else dtype)

    @classmethod
    def from_mxtensor(cls, mx: MXTensor, quantizer: Any = None) -> MXFP8Tensor:
        """The same elements as an MXTensor's, blocked along its last dimension, or the one before (2-D). No copy of
        elements; scales are copied only if they need padding.

        Raises:
            InputError: other blocks than 32, or another direction.
        """
        columnwise = mx.block_dim == -2 and mx.dim() == 2
        if mx.block_size != BLOCK or not (columnwise or mx.block_dim == -1) or mx.elem_dtype not in FP8_DTYPES:
            raise InputError(f"{mx!r} is no MXFP8 in blocks of {BLOCK} along its last dimension, or as [M, N] along M.")
        data = mx.qdata.view(torch.uint8)
        scale = mx.scale.view(torch.uint8)
        rows, columns = prod(data.shape[:-1]), data.shape[-1]
        scale = layouts.pad(
            scale if columnwise else scale.reshape(rows, columns // BLOCK),
            layouts.scale_shape(rows, columns, columnwise),
        )
        return cls(
            mx.shape,
            mx.dtype,
            rowwise_data=None if columnwise else data,
            rowwise_scale_inv=None if columnwise else scale,
            columnwise_data=data if columnwise else None,
            columnwise_scale_inv=scale if columnwise else None,
            fp8_dtype=mx.qdata.dtype,
            quantizer=quantizer,
        )

    def get_high_precision_init_val(self) -> torch.Tensor | None:
        """Initial values on the CPU that `quantized_model_init` was asked to keep; None otherwise."""
        return self._high_precision_init_val

    def clear_high_precision_init_val(self) -> None:
        """Forget the initial values."""
        self._high_precision_init_val = None

    def _like(self, fn: Any, dtype: torch.dtype | None = None) -> MXFP8Tensor:
        """The same tensor with `fn` of each of its parts."""
        parts = {k: fn(v) if isinstance(v, torch.Tensor) else v for k, v in self.get_metadata().items()}
        return MXFP8Tensor(self.shape, self.dtype if dtype is None else dtype, **parts)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        parts = self.get_metadata()
        names = [f"_{name}" for name, part in parts.items() if isinstance(part, torch.Tensor)]
        rest = {name: part for name, part in parts.items() if not isinstance(part, torch.Tensor)}
        return names, {"dtype": self.dtype, **rest}

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: dict[str, Any], outer_size: Any, outer_stride: Any
    ) -> MXFP8Tensor:
        parts = {name.removeprefix("_"): part for name, part in inner.items()}
        return MXFP8Tensor(outer_size, **{**context, **parts})

    def __reduce_ex__(self, protocol: Any) -> Any:
        parts = {**self.get_metadata(), "quantizer": None}
        return _rebuild, (tuple(self.shape), self.dtype, parts, self.requires_grad)


def _rebuild(shape: tuple[int, ...], dtype: torch.dtype, parts: dict[str, Any], requires_grad: bool) -> MXFP8Tensor:
    """What `pickle` and `torch.load` call."""
    return MXFP8Tensor(shape, dtype, requires_grad=requires_grad, **parts)


torch.serialization.add_safe_globals([_rebuild])  # torch.load(weights_only=True)


class _Dequantize(torch.autograd.Function):
    """The values; their gradient is that of the tensor they came from."""

    @staticmethod
    def forward(ctx: Any, tensor: MXFP8Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = tensor.dtype
        return tensor.dequantized(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0].to(ctx.dtype), None


def _plain(tensor: MXFP8Tensor) -> torch.Tensor:
    return tensor.dequantized(tensor.dtype)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Result of an operation with at least one MXFP8Tensor among its arguments."""
    first = args[0] if args else None
    if isinstance(first, MXFP8Tensor):
        if func in (aten.detach.default, aten.alias.default):
            return first._like(lambda part: part)
        if func is aten.clone.default:
            return first._like(torch.clone)
        if func is aten._to_copy.default and kwargs.get("layout") in (None, torch.strided):
            where = {k: v for k, v in kwargs.items() if k in ("device", "pin_memory", "non_blocking") and v is not None}
            copy = torch.ops.aten._to_copy.default
            return first._like(lambda part: copy(part, **where), kwargs.get("dtype"))
        if func in (aten.view.default, aten._unsafe_view.default) and list(args[1]) == list(first.shape):
            return first._like(lambda part: part)
        if func is aten.copy_.default and isinstance(args[1], MXFP8Tensor) and _same_format(first, args[1]):
            for name, part in first.get_metadata().items():
                if isinstance(part, torch.Tensor):
                    part.copy_(args[1].get_metadata()[name])
            return first
    if isinstance(first, torch.Tensor) and func in (aten.new_empty.default, aten.empty_like.default):
        kwargs = {"device": first.device, **kwargs}
        return func(torch.empty(first.shape, dtype=first.dtype, device="meta"), *args[1:], **kwargs)
    return _by_value(func, args, kwargs)


def _same_format(first: MXFP8Tensor, second: MXFP8Tensor) -> bool:
    ours, theirs = first.get_metadata(), second.get_metadata()
    return (
        first._fp8_dtype == second._fp8_dtype
        and all(
            (ours[name] is None) == (theirs[name] is None)
            and (ours[name] is None or ours[name].shape == theirs[name].shape)
            for name in ("rowwise_data", "columnwise_data")
        )
        and ours["with_gemm_swizzled_scales"] == theirs["with_gemm_swizzled_scales"]
    )


def _by_value(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func` of the dequantised values; what it changes in place is quantised again."""
    plain: dict[int, tuple[MXFP8Tensor, torch.Tensor]] = {}

    def value(tensor: MXFP8Tensor) -> torch.Tensor:
        if id(tensor) not in plain:
            plain[id(tensor)] = tensor, _plain(tensor)
        return plain[id(tensor)][1]

    result = func(*tree_map_only(MXFP8Tensor, value, args), **tree_map_only(MXFP8Tensor, value, kwargs))
    if not func._schema.is_mutable:
        return result
    changed: dict[int, MXFP8Tensor] = {}

    def write_back(tensor: MXFP8Tensor) -> MXFP8Tensor:
        tensor.quantize_(plain[id(tensor)][1])
        changed[id(plain[id(tensor)][1])] = tensor
        return tensor

    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            tree_map_only(MXFP8Tensor, write_back, given)
    return tree_map_only(torch.Tensor, lambda each: changed.get(id(each), each), result)
