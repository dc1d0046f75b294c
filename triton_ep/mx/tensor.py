"""MXTensor: MX elements and their scales, which represent a high-precision tensor.

The module has the class, then quantisation and dequantisation, then the torch operations that operations.py does not
have. An operation in neither is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import prod
from operator import index
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from triton_ep.errors import InputError
from triton_ep.mx import arithmetic
from triton_ep.mx.formats import BLOCK, ElemFormat, ScalingMode, check_high_precision, elem_format
from triton_ep.mx.operations import BlockTensor, Dequantize, Operations, axis_of, cuts_blocks
from triton_ep.mx.serialize import saved_as
from triton_ep.mx.swizzle import from_blocked
from triton_ep.ops import mx_formats, mxfp8
from triton_ep.ops.element_formats import MXOperand

aten = torch.ops.aten

SCALE_DTYPE = torch.float8_e8m0fnu


@saved_as("mx", parts=("qdata", "scale"), scale_dtype=SCALE_DTYPE)
class MXTensor(BlockTensor, MXOperand):
    """Elements with one power-of-two scale per block, which act as a tensor of the dtype that was quantised.

    Shape, dtype and device are those of the represented high-precision tensor, so autograd accepts it as a
    gradient. Views and copies that keep blocks whole move elements and scales together; products and sums compute
    on the dequantised values; anything else raises InputError, because a silent conversion to high precision
    would cost what the format saves.

    Arguments:
        qdata: elements, any shape: of dtype `elem_dtype` if that is a float8; else uint8, one element per byte, or
            two along `block_dim` in packed fp4, the even one in the low bits.
        scale: torch.float8_e8m0fnu, shaped like the values but `block_size` times shorter along `block_dim`.
        elem_dtype: torch.float8_e4m3fn, torch.float8_e5m2, "fp6_e2m3", "fp6_e3m2", torch.float4_e2m1fn_x2 (packed)
            or "fp4_e2m1" (one per byte).
        block_size: values per scale, 32 in the MX specification.
        orig_dtype: bf16, fp16 or fp32, the represented dtype.
        block_dim: dimension along which blocks lie, counted from the end; the last one unless transposed.

    Attributes: the arguments, under the same names.

    Raises:
        InputError: shapes or dtypes that do not fit each other.

    Source: OCP Microscaling Formats (MX) v1.0.
    """

    qdata: torch.Tensor
    scale: torch.Tensor
    elem_dtype: torch.dtype | str
    block_size: int
    orig_dtype: torch.dtype
    block_dim: int

    @staticmethod
    def __new__(
        cls: type[MXTensor],
        qdata: torch.Tensor,
        scale: torch.Tensor,
        elem_dtype: torch.dtype | str,
        block_size: int,
        orig_dtype: torch.dtype,
        *,
        block_dim: int = -1,
    ) -> MXTensor:
        """Wrap elements and scales; nothing is copied."""
        fmt = _check(qdata, scale, elem_dtype, block_size, orig_dtype, block_dim)
        shape, strides = _as_values(qdata, fmt, block_dim)
        return torch.Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=orig_dtype, device=qdata.device)

    def __init__(
        self,
        qdata: torch.Tensor,
        scale: torch.Tensor,
        elem_dtype: torch.dtype | str,
        block_size: int,
        orig_dtype: torch.dtype,
        *,
        block_dim: int = -1,
    ) -> None:
        self.qdata = qdata
        self.scale = scale
        self.elem_dtype = elem_format(elem_dtype).dtype
        self.block_size = block_size
        self.orig_dtype = orig_dtype
        self.block_dim = block_dim

    @staticmethod
    def to_mx(
        x: torch.Tensor,
        elem_dtype: torch.dtype | str = torch.float8_e4m3fn,
        block_size: int = BLOCK,
        scaling_mode: ScalingMode | str | Enum = ScalingMode.RCEIL,
        *,
        block_dim: int = -1,
    ) -> MXTensor:
        """Quantise blocks along a dimension; gradients pass through unchanged (straight-through).

        Arguments:
            x: bf16, fp16 or fp32; its dimension `block_dim` is a multiple of `block_size`.
            elem_dtype: torch.float8_e4m3fn, torch.float8_e5m2, "fp6_e2m3", "fp6_e3m2", torch.float4_e2m1fn_x2 (two
                elements per byte) or "fp4_e2m1" (one per byte).
            block_size: values per scale; an even number if elements are packed.
            scaling_mode: "rceil", "floor", "ceil", "even", or an enum of these names.
            block_dim: dimension along which blocks lie; the last one, or any other, counted from either end.

        Raises:
            InputError: a shape or dtype that cannot be quantised, or an unknown mode.
        """
        if isinstance(x, MXTensor):
            raise InputError("x is an MXTensor already; to_mx(x.dequantize(), ...) changes its format.")
        fmt = elem_format(elem_dtype)
        check_high_precision(x.dtype, "dtype of x")
        if not -x.dim() <= block_dim < x.dim():
            raise InputError(f"block_dim is {block_dim}; x has {x.dim()} dimensions.")
        block_dim = block_dim if block_dim < 0 else block_dim - x.dim()
        block_size = index(block_size)
        if block_size < 1 or block_size % fmt.per_byte or x.shape[block_dim] % block_size:
            which = "its last dimension" if block_dim == -1 else f"its dimension {block_dim}"
            even = ", an even number" if fmt.per_byte == 2 else ""
            raise InputError(f"x is {list(x.shape)}: {which} must be a multiple of block_size, {block_size}{even}.")
        result: MXTensor = _Quantize.apply(x, fmt, block_size, ScalingMode.parse(scaling_mode), block_dim)
        return result

    @staticmethod
    def from_qdata_and_scales(
        qdata: torch.Tensor,
        scales: torch.Tensor,
        orig_dtype: torch.dtype,
        *,
        block_size: int = BLOCK,
        elem_dtype: torch.dtype | str | None = None,
        block_dim: int = -1,
        is_swizzled_scales: bool = False,
    ) -> MXTensor:
        """Wrap elements, as the class describes them, and scales [..., H / block_size]; both may be bytes, uint8.

        `elem_dtype` may be left out if the dtype of `qdata` determines it: a float8, or torch.float4_e2m1fn_x2.
        With `is_swizzled_scales`, scales of a matrix are tiles (`mx.swizzle.to_blocked`) and are converted back.
        """
        if scales.dtype == torch.uint8:
            scales = scales.view(SCALE_DTYPE)
        fmt = elem_format(qdata.dtype if elem_dtype is None else elem_dtype)
        if qdata.dtype in (torch.uint8, fmt.dtype):
            qdata = qdata.view(fmt.storage)
        if is_swizzled_scales:
            if qdata.dim() != 2 or block_dim not in (-1, -2):
                raise InputError(
                    f"qdata is {list(qdata.shape)}, block_dim {block_dim}; only a matrix has scales in tiles."
                )
            _check_block_size(block_size)
            num_rows, width = qdata.movedim(block_dim, -1).shape
            tiles = from_blocked(scales, num_rows, width * fmt.per_byte // block_size)
            scales = tiles.movedim(-1, block_dim)
        return MXTensor(qdata, scales, fmt.dtype, block_size, orig_dtype, block_dim=block_dim)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values in `dtype`, by default `orig_dtype`, rounded once; gradients pass through unchanged.

        bf16 and fp32 hold every value exactly, unless the value is beyond their range.
        """
        dtype = self.orig_dtype if dtype is None else dtype
        check_high_precision(dtype, "dtype")
        result: torch.Tensor = Dequantize.apply(self, dtype)
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"MXTensor(shape={list(self.shape)}, {self.elem_dtype} in blocks of {self.block_size} along dimension "
            f"{self.block_dim}, for {self.orig_dtype}, device={str(self.device)!r}, "
            f"requires_grad={self.requires_grad})"
        )

    @property
    def elem_format(self) -> ElemFormat:
        """Properties of `elem_dtype`."""
        return elem_format(self.elem_dtype)

    def _plain(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """`dequantize` without autograd."""
        dtype = self.orig_dtype if dtype is None else dtype
        if _is_wrapper(self.qdata):
            from triton_ep.mx import shards

            if isinstance(self.qdata, shards.DTensor) and isinstance(self.scale, shards.DTensor):
                return shards.dequantize_shards(
                    self.qdata, self.scale, self.shape, lambda *parts: self._with(*parts)._plain(dtype)
                )
        scale = self.scale.view(torch.uint8)
        way = _choose(self.qdata, self.elem_format, self.block_size, self.block_dim)
        if way is _Way.COLUMNS:
            form = {"block_size": self.block_size, "dim": self.block_dim}
            return mx_formats.dequantize(self.qdata, scale, self.elem_dtype, dtype, **form)
        elements = self.qdata
        if self.block_dim != -1:
            elements, scale = elements.movedim(self.block_dim, -1), scale.movedim(self.block_dim, -1)
        if way is _Way.TORCH:
            values = arithmetic.dequantize(elements, scale, dtype, self.elem_format)
        elif way is _Way.MXFP8_ROWS:
            values = mxfp8.dequantize_rows(_as_rows(elements), _as_rows(scale), dtype).view(elements.shape)
        else:
            values = mx_formats.dequantize(elements, scale, self.elem_dtype, dtype, block_size=self.block_size)
        return values if self.block_dim == -1 else values.movedim(-1, self.block_dim)

    def _with(self, qdata: torch.Tensor, scale: torch.Tensor, **changed: Any) -> MXTensor:
        """Other bytes in the same format, except for attributes in `changed`."""
        context = {**self.__tensor_flatten__()[1], **changed}
        return MXTensor(qdata.view(self.elem_format.storage), scale.view(SCALE_DTYPE), **context)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _OPERATIONS.run(func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        names = ("elem_dtype", "block_size", "orig_dtype", "block_dim")
        return ["qdata", "scale"], {name: getattr(self, name) for name in names}

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: dict[str, Any], outer_size: Any, outer_stride: Any
    ) -> MXTensor:
        return MXTensor(inner["qdata"], inner["scale"], **context)


def _as_values(qdata: torch.Tensor, fmt: ElemFormat, block_dim: int) -> tuple[list[int], list[int]]:
    """Shape and strides of the values that stored elements represent."""
    shape, strides = list(qdata.shape), list(qdata.stride())
    if fmt.per_byte == 1:
        return shape, strides
    shape[block_dim] *= fmt.per_byte
    if qdata.is_contiguous():  # regardless of strides along dimensions of size 1
        return shape, [prod(shape[d + 1 :]) for d in range(len(shape))]
    packed = strides[block_dim]
    strides = [fmt.per_byte * stride if stride >= packed else stride for stride in strides]
    strides[block_dim] = packed
    return shape, strides


def _check_block_size(block_size: int) -> None:
    if block_size < 1:
        raise InputError(f"block_size is {block_size}; a block has at least one value.")


def _check(
    qdata: torch.Tensor,
    scale: torch.Tensor,
    elem_dtype: torch.dtype | str,
    block_size: int,
    orig_dtype: torch.dtype,
    block_dim: int,
) -> ElemFormat:
    fmt = elem_format(elem_dtype)
    check_high_precision(orig_dtype, "orig_dtype")
    if qdata.dtype != fmt.storage or scale.dtype != SCALE_DTYPE:
        raise InputError(f"qdata is {qdata.dtype}, scale {scale.dtype}; they must be {fmt.storage} and {SCALE_DTYPE}.")
    if not -qdata.dim() <= block_dim < 0:
        raise InputError(f"block_dim is {block_dim}; counted from the end of {qdata.dim()} dimensions, it is negative.")
    _check_block_size(block_size)
    expected, _ = _as_values(qdata, fmt, block_dim)
    num_values = expected[block_dim]
    expected[block_dim] //= block_size
    if list(scale.shape) != expected or num_values % block_size or block_size % fmt.per_byte:
        raise InputError(
            f"qdata is {list(qdata.shape)}, scale {list(scale.shape)}; {fmt.per_byte} elements per byte in blocks of "
            f"{block_size} along dimension {block_dim}: scale must be {expected}."
        )
    return fmt


def _is_wrapper(x: Any) -> bool:
    """Whether this is a wrapper around other tensors, as DTensors are."""
    return is_traceable_wrapper_subclass(x)


def _has_kernel(x: torch.Tensor, block_size: int) -> bool:
    """Whether a compiled kernel takes this tensor; the CPU and tensor subclasses use torch operations.

    torch.compile uses torch operations too, and fuses them with the operations before and after. The test of the type
    detects it as well: it traces with tensors of its own classes, and torch 2.11's is_compiling is not always True.
    """
    if torch.compiler.is_compiling() or type(x) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return x.is_cuda and block_size in mx_formats.BLOCK_SIZES


class _Way(Enum):
    """Implementation that quantises or dequantises blocks: torch operations, or one of three kernels."""

    TORCH = "torch operations"
    MXFP8_ROWS = "kernels/compute/mxfp8.py"
    ROWS = "kernels/compute/mx_formats.py, by rows"
    COLUMNS = "kernels/compute/mx_formats.py, by columns"


def _choose(x: torch.Tensor, fmt: ElemFormat, block_size: int, block_dim: int) -> _Way:
    """Choose the implementation for `x`, values or elements, with blocks along `block_dim`."""
    if not _has_kernel(x, block_size):
        return _Way.TORCH
    # By columns if that saves a copy; a transposed row-major tensor counts as rows again.
    if block_dim != -1 and not x.movedim(block_dim, -1).is_contiguous():
        return _Way.COLUMNS
    return _Way.MXFP8_ROWS if fmt.bits == 8 and block_size == BLOCK else _Way.ROWS


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    # Not -1: torch cannot infer it if the other dimension is 0.
    return x if x.dim() == 2 else x.reshape(prod(x.shape[:-1]), x.shape[-1])


def _quantize_rows(
    rows: torch.Tensor, fmt: ElemFormat, block_size: int, mode: ScalingMode, way: _Way
) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements and scale bytes of blocks along the last dimension."""
    if way is _Way.TORCH:
        return arithmetic.quantize(rows, fmt, mode, block_size)
    if way is _Way.ROWS:
        return mx_formats.quantize(rows, fmt.dtype, mode, block_size=block_size)
    if rows.dim() == 2:  # skip the views, which cost host time before the launch
        return mxfp8.quantize_rows(rows, fmt.storage, mode)
    qdata, scale = mxfp8.quantize_rows(_as_rows(rows), fmt.storage, mode)
    return qdata.view(rows.shape), scale.view(*rows.shape[:-1], rows.shape[-1] // block_size)


def _quantize(
    x: torch.Tensor, fmt: ElemFormat, block_size: int, mode: ScalingMode, block_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements and scales of blocks along any dimension, in the layout of `x`."""
    way = _choose(x, fmt, block_size, block_dim)
    if way is _Way.COLUMNS:
        qdata, scale = mx_formats.quantize(x, fmt.dtype, mode, block_size=block_size, dim=block_dim)
    elif block_dim == -1:
        qdata, scale = _quantize_rows(x, fmt, block_size, mode, way)
    else:
        rows = x.movedim(block_dim, -1)
        parts = (part.view(torch.uint8) for part in _quantize_rows(rows, fmt, block_size, mode, way))
        qdata, scale = (part.movedim(-1, block_dim) for part in parts)
        if not rows.is_contiguous():
            qdata, scale = qdata.contiguous(), scale.contiguous()
    return qdata if qdata.dtype == fmt.storage else qdata.view(fmt.storage), scale.view(SCALE_DTYPE)


def _shards(
    x: torch.Tensor, fmt: ElemFormat, block_size: int, mode: ScalingMode, block_dim: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`_quantize` of a DTensor, as DTensors; None for any other tensor."""
    from triton_ep.mx import shards

    if not isinstance(x, shards.DTensor):
        return None
    return shards.quantize_shards(
        x, block_dim, block_size, fmt.per_byte, lambda local: _quantize(local, fmt, block_size, mode, block_dim)
    )


class _Quantize(torch.autograd.Function):
    """Straight-through estimator: the gradient of the quantised tensor becomes the gradient of `x`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, fmt: ElemFormat, block_size: int, mode: ScalingMode, block_dim: int
    ) -> MXTensor:
        parts = _shards(x, fmt, block_size, mode, block_dim) if _is_wrapper(x) else None
        qdata, scale = parts or _quantize(x, fmt, block_size, mode, block_dim)
        return MXTensor(qdata, scale, fmt.dtype, block_size, x.dtype, block_dim=block_dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0], None, None, None, None


_OPERATIONS = Operations(
    MXTensor,
    ("elem_dtype", "block_size", "block_dim", "orig_dtype"),
    by_value="isfinite isclose allclose _grouped_mm",
)
_handles = _OPERATIONS.handles


@_handles(aten.detach.default, aten.alias.default, aten.clone.default)
def _same(func: Any, mx: MXTensor, **kwargs: Any) -> MXTensor:
    return mx._apply(lambda part: func(part, **kwargs))


@_handles(aten._to_copy.default)
def _to_copy(func: Any, mx: MXTensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> MXTensor:
    qdata, scale = (func(part.view(torch.uint8), **kwargs) for part in (mx.qdata, mx.scale))
    return mx._with(qdata, scale, orig_dtype=mx.orig_dtype if dtype is None else dtype)


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
    # A block's values are `inner` apart. They stay so along a dimension of whole blocks with as many values inside it.
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
    # The scales of a slice may not be viewable even if the elements are; scales are few, so a copy will do.
    qdata, scale = mx.qdata.view(torch.uint8).view(sizes[0]), mx.scale.view(torch.uint8).reshape(sizes[1])
    return mx._with(qdata, scale, block_dim=block_dim)


@_handles(aten.as_strided.default)
def _as_strided(
    func: Any, mx: MXTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> MXTensor:
    """Return the tensor itself, which is all that FSDP requests; other strides would not keep blocks."""
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
