"""MXFP8Tensor: a tensor in MXFP8 for modules, optimizers and autograd."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from triton_ep.errors import InputError
from triton_ep.integrations.te import layouts
from triton_ep.integrations.te.parts import FP8_DTYPES, check_parts, inferred
from triton_ep.integrations.te.storage import MXFP8TensorStorage, quantize_into
from triton_ep.mx.formats import BLOCK
from triton_ep.mx.tensor import MXTensor

aten = torch.ops.aten


class MXFP8Tensor(MXFP8TensorStorage, torch.Tensor):
    """A tensor in MXFP8 that acts as a tensor of a high-precision dtype, in modules and optimizers too.

    Copies, moves, views that keep the last dimension, and splits of the first dimension into multiples of 32 rows
    return MXFP8Tensors with the same bytes; pieces of a split are copies. Any other operation computes on the
    dequantised values and returns plain tensors, which are copies: slices, `.to(dtype)` of another dtype and `.float()`
    among them. Results of in-place operations are quantised again, and so are values assigned to `data` or by index.
    For a subclass with the same constructor, operations that return an MXFP8Tensor return the subclass, as
    `torch.nn.Parameter` demands of `detach`.

    Arguments:
        shape, dtype: of the represented tensor.
        requires_grad: whether the tensor is a leaf that requires a gradient.
        fake_dtype: None, or `dtype` once more, as TransformerEngine passes it.
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
        fake_dtype: torch.dtype | None = None,
    ) -> MXFP8Tensor:
        """Wrap elements and scales; nothing is copied."""
        if fake_dtype not in (None, dtype):
            raise InputError(f"fake_dtype is {fake_dtype}, dtype {dtype}: a tensor represents one dtype. Pass one.")
        if not isinstance(dtype, torch.dtype):
            raise InputError(f"dtype must be a torch.dtype, got {type(dtype).__name__}.")
        check_parts(rowwise_data, rowwise_scale_inv, False)
        check_parts(columnwise_data, columnwise_scale_inv, True)
        data = rowwise_data if rowwise_data is not None else columnwise_data
        device = data.device if data is not None else None
        shape = _shape_of(shape)
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
        fake_dtype: torch.dtype | None = None,
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
    view = torch.Tensor.view

    @property
    def data(self) -> torch.Tensor:
        """This tensor outside autograd. An assignment replaces values, shape and dtype, quantised to MXFP8."""
        return super().data

    @data.setter
    def data(self, tensor: torch.Tensor) -> None:
        with torch.no_grad():
            quantizer = self._get_quantizer().copy()
            quantizer.set_usage(**self.get_usages())
            quantizer.internal, quantizer.optimize_for_gemm = False, self._with_gemm_swizzled_scales
            other: MXFP8Tensor = tensor if isinstance(tensor, MXFP8Tensor) else quantizer(tensor.detach())
            # The wrapper holds shape and dtype, attributes hold the parts: both must change.
            torch.Tensor.data.__set__(self, other.detach())  # type: ignore[attr-defined]
            parts = other.get_metadata()
            del parts["fake_dtype"]
            self._set(*parts.values())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        usages = [name for name, there in self.get_usages().items() if there]
        return (
            f"MXFP8Tensor(shape={list(self.shape)}, {self._fp8_dtype}, {' and '.join(usages)}, for {self.dtype}, "
            f"device={str(self.device)!r}, requires_grad={self.requires_grad})"
        )

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values, in `dtype` or the represented dtype; gradients pass through unchanged."""
        result: torch.Tensor = _Dequantize.apply(self, self.dtype if dtype is None else dtype)
        return result

    @torch.no_grad()
    def __setitem__(self, index: Any, values: Any) -> None:
        """Assign values to a part of the tensor and quantise the tensor again."""
        plain = self.dequantized(self.dtype)
        plain[index] = values
        self.quantize_(plain)

    def share_memory_(self) -> MXFP8Tensor:
        """Move the bytes to memory that processes share."""
        for part in self.get_metadata().values():
            if isinstance(part, torch.Tensor):
                part.share_memory_()
        return self

    def float(self) -> torch.Tensor:
        """The values in float32, as a plain tensor."""
        return self.dequantize(dtype=torch.float32)

    def half(self) -> torch.Tensor:
        """The values in float16, as a plain tensor."""
        return self.dequantize(dtype=torch.float16)

    def bfloat16(self) -> torch.Tensor:
        """The values in bfloat16, as a plain tensor."""
        return self.dequantize(dtype=torch.bfloat16)

    def quantize_(self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None) -> MXFP8Tensor:
        """Quantise other values into this tensor, in the directions that it has.

        noop_flag: a float32 scalar; if it is 1, nothing changes.
        """
        quantize_into(tensor, self, noop_flag)
        return self

    def to_mxtensor(self, *, columnwise: bool = False, dtype: torch.dtype | None = None) -> MXTensor:
        """As `MXFP8TensorStorage.to_mxtensor`, by default with this tensor's dtype; without gradient."""
        return super().to_mxtensor(columnwise=columnwise, dtype=self.dtype if dtype is None else dtype)

    @classmethod
    def make_like(
        cls,
        tensor: MXFP8Tensor,
        *,
        shape: Iterable[int] | None = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
    ) -> MXFP8Tensor:
        """Create another tensor over the same bytes.

        shape: with the same last dimension. dtype: the represented dtype.

        Raises:
            InputError: a shape with another last dimension or number of elements.
        """
        sizes = tuple(tensor.shape if shape is None else shape)
        if prod(sizes) != tensor.numel() or sizes[-1:] != tensor.shape[-1:]:
            raise InputError(f"shape is {list(sizes)}; of {list(tensor.shape)} only the leading dimensions can change.")
        parts = tensor.get_metadata()
        for name in ("rowwise_data", "columnwise_data"):
            parts[name] = None if parts[name] is None else parts[name].view(sizes)
        return cls(sizes, tensor.dtype if dtype is None else dtype, requires_grad=requires_grad, **parts)

    @classmethod
    def from_mxtensor(cls, mx: MXTensor, quantizer: Any = None) -> MXFP8Tensor:
        """Wrap an MXTensor blocked along its last dimension or, in 2-D, along the first. Elements are not copied;
        scales are copied only if they need padding.

        Raises:
            InputError: the block size is not 32, or blocks lie in another direction.
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
        """Initial values on the CPU, if `quantized_model_init` kept them; else None."""
        return self._high_precision_init_val

    def clear_high_precision_init_val(self) -> None:
        """Drop the initial values."""
        self._high_precision_init_val = None

    def _like(self, fn: Any) -> MXFP8Tensor:
        """The same tensor with `fn` applied to each part."""
        parts = {k: fn(v) if isinstance(v, torch.Tensor) else v for k, v in self.get_metadata().items()}
        return type(self)(self.shape, self.dtype, **parts)

    def _piece(self, start: int, end: int) -> MXFP8Tensor:
        """Copy [start:end] of the first dimension: a multiple of 32 rows that starts at a block."""
        shape = (end - start, *self.shape[1:])
        inner = prod(self.shape[1:-1])
        parts = self.get_metadata()
        for name, columnwise in (("rowwise", False), ("columnwise", True)):
            if parts[f"{name}_data"] is None:
                continue
            data, scale = self.compact(columnwise)
            rows = slice(start * inner, end * inner)
            blocks = slice(rows.start // BLOCK, rows.stop // BLOCK) if columnwise else rows
            padded = layouts.scale_shape(rows.stop - rows.start, self.shape[-1], columnwise)
            scale = layouts.pad(scale[blocks].clone(), padded)
            parts[f"{name}_data"] = data[rows].clone().view(shape)
            parts[f"{name}_scale_inv"] = (
                layouts.swizzle(scale, columnwise) if self._with_gemm_swizzled_scales else scale
            )
        return type(self)(shape, self.dtype, **parts)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        parts = self.get_metadata()
        names = [f"_{name}" for name, part in parts.items() if isinstance(part, torch.Tensor)]
        rest = {name: part for name, part in parts.items() if not isinstance(part, torch.Tensor)}
        return names, {"cls": type(self), "dtype": self.dtype, **rest}

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: dict[str, Any], outer_size: Any, outer_stride: Any
    ) -> MXFP8Tensor:
        parts = {name.removeprefix("_"): part for name, part in inner.items()}
        rest = dict(context)
        made: MXFP8Tensor = rest.pop("cls")(outer_size, **{**rest, **parts})
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        parts, made_by = self.get_metadata(), self._quantizer
        # The quantiser as plain values, which torch.load(weights_only=True) accepts.
        parts["quantizer"] = None if made_by is None else (made_by.get_usages(), made_by.with_2d_quantization)
        # A subclass is stored by name; its owner must allow it for torch.load(weights_only=True).
        subclass = () if type(self) is MXFP8Tensor else (type(self),)
        return _rebuild, (tuple(self.shape), self.dtype, parts, self.requires_grad, *subclass)


def _shape_of(given: Any) -> tuple[int, ...]:
    """Sizes as a tuple; under torch.compile they may be symbols."""
    if isinstance(given, torch.Tensor) or not isinstance(given, Iterable):
        raise InputError(f"shape must be a sequence of sizes, got {type(given).__name__}.")
    return tuple(given)


def _rebuild(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    parts: dict[str, Any],
    requires_grad: bool,
    made_as: type[MXFP8Tensor] = MXFP8Tensor,
) -> MXFP8Tensor:
    """Rebuild a tensor for `pickle` and `torch.load`."""
    tensor = made_as(shape, dtype, requires_grad=requires_grad, **{**parts, "quantizer": None})
    if parts["quantizer"] is not None:
        usages, tiles = parts["quantizer"]
        tensor._quantizer = tensor._get_quantizer()
        tensor._quantizer.set_usage(**usages)
        tensor._quantizer.with_2d_quantization = tiles
    return tensor


torch.serialization.add_safe_globals([_rebuild])  # torch.load(weights_only=True)


class _Dequantize(torch.autograd.Function):
    """Dequantise; the gradient passes through to the MXFP8 tensor."""

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
    """Run an operation with at least one MXFP8Tensor among its arguments."""
    first = args[0] if args else None
    if isinstance(first, MXFP8Tensor):
        if func in (aten.detach.default, aten.alias.default):
            return first._like(lambda part: part)
        if func is aten.clone.default:
            return first._like(torch.clone)
        if func is aten._to_copy.default and kwargs.get("layout") in (None, torch.strided):
            where = {k: v for k, v in kwargs.items() if k in ("device", "pin_memory", "non_blocking") and v is not None}
            copy = torch.ops.aten._to_copy.default
            if kwargs.get("dtype") in (None, first.dtype):
                return first._like(lambda part: copy(part, **where))
            return copy(first.dequantized(torch.float32), dtype=kwargs["dtype"], **where)
        if func in (aten.view.default, aten._unsafe_view.default):
            shape = inferred(args[1], first.numel())
            if shape[-1:] == first.shape[-1:]:
                return type(first).make_like(first, shape=shape)
        if func is aten.split.Tensor and _splits_blocks(first, *args[1:], **kwargs):
            return [first._piece(at, min(at + args[1], first.shape[0])) for at in range(0, first.shape[0], args[1])]
        if func is aten.copy_.default and isinstance(args[1], MXFP8Tensor) and _same_format(first, args[1]):
            for name, part in first.get_metadata().items():
                if isinstance(part, torch.Tensor):
                    part.copy_(args[1].get_metadata()[name])
            return first
    if isinstance(first, torch.Tensor) and func in (aten.new_empty.default, aten.empty_like.default):
        kwargs = {"device": first.device, **kwargs}
        return func(torch.empty(first.shape, dtype=first.dtype, device="meta"), *args[1:], **kwargs)
    return _by_value(func, args, kwargs)


def _splits_blocks(tensor: MXFP8Tensor, size: int, dim: int = 0) -> bool:
    """Whether pieces of `size` along `dim` are whole blocks in both directions."""
    along_rows = dim % tensor.dim() == 0 and tensor.dim() >= 2
    return along_rows and size > 0 and all(n * prod(tensor.shape[1:-1]) % BLOCK == 0 for n in (size, tensor.shape[0]))


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
    """Apply `func` to the dequantised values; tensors that it changes in place are quantised again."""
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
