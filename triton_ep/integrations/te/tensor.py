"""MXFP8Tensor: a tensor in MXFP8, blocked along rows, along columns, or both; and its storage without autograd."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from triton_ep.errors import InputError
from triton_ep.integrations.te import arithmetic, layouts
from triton_ep.mx.formats import BLOCK
from triton_ep.mx.tensor import SCALE_DTYPE, MXTensor

aten = torch.ops.aten


class DType:
    """TransformerEngine's names of 8-bit formats, as torch dtypes."""

    kFloat8E4M3 = torch.float8_e4m3fn
    kFloat8E5M2 = torch.float8_e5m2


class UsageError(InputError, RuntimeError):
    """A direction was asked for in which the tensor was not quantised."""


class MXFP8TensorStorage:
    """Elements and scales of a tensor of M rows (all leading dimensions) and N columns.

    Attributes, None where there is no such direction:
        _rowwise_data: [..., N] uint8, e4m3 or e5m2 elements in blocks of 32 columns.
        _rowwise_scale_inv: uint8, [M up to a multiple of 128, N / 32 up to a multiple of 4]: exponent + 127.
        _columnwise_data: [..., N] uint8, not transposed: elements in blocks of 32 rows.
        _columnwise_scale_inv: uint8, [M / 32 up to a multiple of 4, N up to a multiple of 128].
        _fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        _quantizer: what made it, or None.
        _with_gemm_swizzled_scales: scales are in the order of `layouts.swizzle`, else compact.

    Arguments: the attributes without their underscore.

    Raises:
        InputError: neither direction, or shapes that do not fit each other.

    Source: triton_ep/integrations/te/layouts.py has the layout of scales.
    """

    _rowwise_data: torch.Tensor | None
    _rowwise_scale_inv: torch.Tensor | None
    _columnwise_data: torch.Tensor | None
    _columnwise_scale_inv: torch.Tensor | None
    _fp8_dtype: torch.dtype
    _quantizer: Any
    _with_gemm_swizzled_scales: bool

    def __init__(
        self,
        rowwise_data: torch.Tensor | None,
        rowwise_scale_inv: torch.Tensor | None,
        columnwise_data: torch.Tensor | None,
        columnwise_scale_inv: torch.Tensor | None,
        fp8_dtype: torch.dtype,
        quantizer: Any = None,
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

    def _set(
        self,
        rowwise_data: torch.Tensor | None,
        rowwise_scale_inv: torch.Tensor | None,
        columnwise_data: torch.Tensor | None,
        columnwise_scale_inv: torch.Tensor | None,
        fp8_dtype: torch.dtype,
        quantizer: Any,
        swizzled: bool,
    ) -> None:
        check_parts(rowwise_data, rowwise_scale_inv, False)
        check_parts(columnwise_data, columnwise_scale_inv, True)
        if rowwise_data is None and columnwise_data is None:
            raise InputError("an MXFP8 tensor needs rowwise data, columnwise data, or both; it got neither.")
        self._rowwise_data, self._rowwise_scale_inv = rowwise_data, rowwise_scale_inv
        self._columnwise_data, self._columnwise_scale_inv = columnwise_data, columnwise_scale_inv
        self._fp8_dtype, self._quantizer, self._with_gemm_swizzled_scales = fp8_dtype, quantizer, swizzled

    # --- what is there ------------------------------------------------------------------------------------

    @property
    def _any_data(self) -> torch.Tensor:
        data = self._rowwise_data if self._rowwise_data is not None else self._columnwise_data
        assert data is not None, "one direction is always there"
        return data

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
        """Elements by direction: both as a pair, or the one that is asked for."""
        if rowwise_data and columnwise_data:
            return self._rowwise_data, self._columnwise_data
        return self._rowwise_data if rowwise_data else self._columnwise_data

    def get_metadata(self) -> dict[str, Any]:
        """Arguments with which the constructor makes this tensor again."""
        return {
            "rowwise_data": self._rowwise_data,
            "rowwise_scale_inv": self._rowwise_scale_inv,
            "columnwise_data": self._columnwise_data,
            "columnwise_scale_inv": self._columnwise_scale_inv,
            "fp8_dtype": self._fp8_dtype,
            "quantizer": self._quantizer,
            "with_gemm_swizzled_scales": self._with_gemm_swizzled_scales,
        }

    def get_usages(self) -> dict[str, bool]:
        """Which directions are there."""
        return {"rowwise": self._rowwise_data is not None, "columnwise": self._columnwise_data is not None}

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop a direction with False; None leaves it as it is.

        Raises:
            UsageError: True for a direction that is not there, which would have to be quantised from values that
                are gone.
        """
        for asked, data, scale, which, scaled in (
            (rowwise_usage, self._rowwise_data, self._rowwise_scale_inv, "row-wise", "row-scaled"),
            (columnwise_usage, self._columnwise_data, self._columnwise_scale_inv, "column-wise", "column-scaled"),
        ):
            if asked and data is None:
                raise UsageError(f"Requested {which} usage, but MXFP8Tensor is missing {scaled} FP8 data")
            if asked and scale is None:
                raise UsageError(f"Requested {which} usage, but MXFP8Tensor is missing {scaled} scale-inverses")
        keep_rows = rowwise_usage is not False and self._rowwise_data is not None
        keep_columns = columnwise_usage is not False and self._columnwise_data is not None
        if not (keep_rows or keep_columns):
            raise UsageError("update_usage would drop the last direction of an MXFP8Tensor; delete the tensor instead.")
        if not keep_rows:
            self._rowwise_data = self._rowwise_scale_inv = None
        if not keep_columns:
            self._columnwise_data = self._columnwise_scale_inv = None

    def size(self, *args: Any) -> Any:
        """Shape of the tensor it stands for."""
        return self._any_data.size(*args)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where the elements are."""
        return self._any_data.device

    # --- parts without padding -----------------------------------------------------------------------------

    def compact(self, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Elements [M, N] and scales without padding, [M, N / 32] or [M / 32, N], of one direction; views if compact.

        Raises:
            UsageError: the direction is not there.
        """
        data = self._columnwise_data if columnwise else self._rowwise_data
        scale = self._columnwise_scale_inv if columnwise else self._rowwise_scale_inv
        if data is None or scale is None:
            name, scaled = ("column-wise", "column-scaled") if columnwise else ("row-wise", "row-scaled")
            raise UsageError(f"Requested {name} usage, but MXFP8Tensor is missing {scaled} FP8 data")
        flat = flatten(data)
        if self._with_gemm_swizzled_scales:
            scale = layouts.unswizzle(scale, columnwise)
        rows, columns = flat.shape
        if columnwise:
            return flat, scale[: -(-rows // BLOCK), :columns]
        return flat, scale[:rows, : columns // BLOCK]

    def _values(self, dtype: torch.dtype) -> torch.Tensor:
        columnwise = self._rowwise_data is None
        data, scale = self.compact(columnwise)
        dequantize = arithmetic.dequantize_columns if columnwise else arithmetic.dequantize_rows
        return dequantize(data, scale, self._fp8_dtype, dtype).view(self._any_data.shape)

    def dequantize(self, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values: of the rowwise elements if they are there. A float32 product each, rounded to `dtype`."""
        return self._values(dtype)

    def to_mxtensor(self, *, columnwise: bool = False, dtype: torch.dtype = torch.bfloat16) -> MXTensor:
        """The same elements and scales as an MXTensor that stands for `dtype`; nothing is copied if compact.

        Columnwise it has `block_dim` -2, and as many dimensions as this tensor only if these are two.
        """
        data, scale = self.compact(columnwise)
        if columnwise:
            return MXTensor(
                data.view(self._fp8_dtype), scale.view(SCALE_DTYPE), self._fp8_dtype, BLOCK, dtype, block_dim=-2
            )
        shape = self._any_data.shape
        if len(shape) != 2:
            data, scale = data.view(shape), scale.reshape(*shape[:-1], shape[-1] // BLOCK)
        return MXTensor(data.view(self._fp8_dtype), scale.view(SCALE_DTYPE), self._fp8_dtype, BLOCK, dtype)


def flatten(data: torch.Tensor) -> torch.Tensor:
    """[M, N] of [..., N]."""
    return data.reshape(prod(data.shape[:-1]), data.shape[-1])


def check_parts(data: torch.Tensor | None, scale: torch.Tensor | None, columnwise: bool) -> None:
    """Refuse elements and padded scales that do not fit each other; both may be None."""
    if data is None and scale is None:
        return
    which = "columnwise" if columnwise else "rowwise"
    if data is None or scale is None or data.dtype != torch.uint8 or scale.dtype != torch.uint8 or data.dim() < 1:
        raise InputError(f"{which} data and scale_inv must be uint8 tensors, both or neither.")
    expected = layouts.scale_shape(prod(data.shape[:-1]), data.shape[-1], columnwise)
    if data.shape[-1] % BLOCK or tuple(scale.shape) != expected:
        raise InputError(
            f"{which} data is {list(data.shape)}, scale_inv {list(scale.shape)}; the last dimension must be a multiple "
            f"of {BLOCK}, and scale_inv, padded, {list(expected)}."
        )


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

    size = torch.Tensor.size  # type: ignore[assignment]
    device = torch.Tensor.device  # type: ignore[assignment]

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
        if mx.block_size != BLOCK or not (columnwise or mx.block_dim == -1):
            raise InputError(f"{mx!r} is not blocked by {BLOCK} along its last dimension, or as [M, N] along M.")
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
            fp8_dtype=mx.elem_dtype,
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
        return tensor._values(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0].to(ctx.dtype), None


def _plain(tensor: MXFP8Tensor) -> torch.Tensor:
    return tensor._values(tensor.dtype)


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
    if func is aten.new_empty.default or func is aten.empty_like.default:
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
