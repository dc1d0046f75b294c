"""NVFP4Tensor: packed e2m1 elements, an e4m3 scale per 16 elements, and a float32 scale per tensor, as one tensor.

A value is element * scale * per-tensor scale. The second level is optional: without it the scales alone must cover the
range, 2^-6 to 448. kernels/compute/nvfp4.py explains the quantisation.

The module has the class, then quantisation and dequantisation, then the torch operations that operations.py does not
have. An operation in neither is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from triton_ep.distributed.dtensors import is_dtensor
from triton_ep.errors import InputError
from triton_ep.mx import nvfp4_arithmetic as arithmetic
from triton_ep.mx.formats import check_high_precision
from triton_ep.mx.hadamard import check_signs
from triton_ep.mx.nvfp4_arithmetic import E2M1_LARGEST, E4M3_LARGEST
from triton_ep.mx.operations import BlockTensor, Dequantize, Operations, axis_of, cuts_blocks
from triton_ep.mx.serialize import saved_as
from triton_ep.mx.swizzle import blocked_shape, from_blocked, to_blocked
from triton_ep.ops import nvfp4 as ops

BLOCK = 16
"""Values that share a scale."""

SCALE_DTYPE = torch.float8_e4m3fn
_PARTS = ("qdata", "scale", "per_tensor_scale")
"""Names of the component tensors; the last may be missing."""
_PER_BYTE = 2
_TILE_ROWS, _TILE_VALUES = 128, 4 * BLOCK

aten = torch.ops.aten


def per_tensor_amax_to_scale(amax: torch.Tensor) -> torch.Tensor:
    """Per-tensor scale, float32, for a tensor with largest magnitude `amax`: its largest block gets scale 448."""
    # In float64: a compiled float32 division is approximate on a GPU, so the scale would differ from eager mode's.
    limit = torch.full((), E4M3_LARGEST * E2M1_LARGEST, dtype=torch.float64, device=amax.device)
    return (amax.to(torch.float64) / limit).to(torch.float32)


def nvfp4_quantize(
    x: torch.Tensor, block_size: int = BLOCK, per_tensor_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales [..., K / 16] float8_e4m3fn and packed elements [..., K / 2] uint8 of x [..., K]; see `to_nvfp4`."""
    made = NVFP4Tensor.to_nvfp4(x.detach(), block_size, per_tensor_scale)
    return made.scale, made.qdata


@saved_as("nvfp4", parts=_PARTS, scale_dtype=SCALE_DTYPE)
class NVFP4Tensor(BlockTensor):
    """Elements of 4 bits with two levels of scales, which act as a tensor of the dtype that was quantised.

    Shape, dtype and device are those of the represented tensor. Views and copies that keep blocks whole move the
    parts together; products, sums and comparisons compute on the dequantised values; anything else raises InputError.

    Arguments:
        qdata: uint8, the shape of the values with half the size along `block_dim`; the even element in the low bits.
        scale: float8_e4m3fn, the shape of the values with a 16th of the size along `block_dim`; with swizzled scales
            [ceil(R / 128) * 32, ceil(K / 64) * 16], the 128 x 4 tiles of a matrix [R, K].
        orig_dtype: bf16, fp16 or fp32, the represented dtype.
        per_tensor_scale: float32 of one value, or one per matrix: [E, 1, 1] for [E, R, K]; None: one level.
        block_dim: dimension along which blocks lie, counted from the end; the last one unless transposed.
        is_swizzled_scales: scales are in the layout of block-scaled matrix instructions.
        hadamard_signs: the elements hold the values transformed by `triton_ep.mx.hadamard.hadamard` with these signs.

    Attributes: the arguments, under the same names, and `block_size`, 16.

    Raises:
        InputError: shapes or dtypes that do not fit each other.

    Source: NVIDIA, "Pretraining Large Language Models with NVFP4" (2025); scales as in torchao's NVFP4Tensor.
    """

    qdata: torch.Tensor
    scale: torch.Tensor
    per_tensor_scale: torch.Tensor | None
    orig_dtype: torch.dtype
    block_dim: int
    is_swizzled_scales: bool
    hadamard_signs: int | None
    block_size = BLOCK

    @staticmethod
    def __new__(
        cls: type[NVFP4Tensor],
        qdata: torch.Tensor,
        scale: torch.Tensor,
        orig_dtype: torch.dtype,
        per_tensor_scale: torch.Tensor | None = None,
        *,
        block_dim: int = -1,
        is_swizzled_scales: bool = False,
        hadamard_signs: int | None = None,
    ) -> NVFP4Tensor:
        """Wrap the parts; nothing is copied."""
        _check(qdata, scale, orig_dtype, per_tensor_scale, block_dim, is_swizzled_scales)
        shape, strides = list(qdata.shape), list(qdata.stride())
        packed = strides[block_dim]
        strides = [_PER_BYTE * stride if stride >= packed else stride for stride in strides]
        shape[block_dim], strides[block_dim] = _PER_BYTE * shape[block_dim], packed
        return torch.Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=orig_dtype, device=qdata.device)

    def __init__(
        self,
        qdata: torch.Tensor,
        scale: torch.Tensor,
        orig_dtype: torch.dtype,
        per_tensor_scale: torch.Tensor | None = None,
        *,
        block_dim: int = -1,
        is_swizzled_scales: bool = False,
        hadamard_signs: int | None = None,
    ) -> None:
        self.qdata = qdata
        self.scale = scale
        self.orig_dtype = orig_dtype
        if per_tensor_scale is not None and per_tensor_scale.numel() == 1 and per_tensor_scale.dim():
            per_tensor_scale = per_tensor_scale.reshape(())
        self.per_tensor_scale = per_tensor_scale
        self.block_dim = block_dim
        self.is_swizzled_scales = is_swizzled_scales
        self.hadamard_signs = hadamard_signs if hadamard_signs is None else check_signs(hadamard_signs)

    @staticmethod
    def to_nvfp4(
        x: torch.Tensor,
        block_size: int = BLOCK,
        per_tensor_scale: torch.Tensor | None = None,
        *,
        is_swizzled_scales: bool = False,
        stochastic_rounding: bool = False,
        seed: torch.Tensor | int | None = None,
        hadamard_signs: int | None = None,
    ) -> NVFP4Tensor:
        """Quantise blocks of 16 values of the last dimension; gradients pass through unchanged (straight-through).

        Arguments:
            x: [..., K] bf16, fp16 or fp32; K a multiple of 16.
            block_size: 16.
            per_tensor_scale: float32 of one value or one per matrix, usually
                `per_tensor_amax_to_scale(x.abs().max())`; None: one level of scales, magnitudes beyond 2688 saturate.
            is_swizzled_scales: store scales as 128 x 4 tiles; x must be a matrix.
            stochastic_rounding: round so that the mean over seeds is x; scales are rounded up, so nothing saturates.
            seed: int64 of one value on the device of x, or a number. None: drawn from torch's generator.
            hadamard_signs: transform each block first; `dequantize` inverts the transform.

        Raises:
            InputError: shape, dtype or an argument does not fit.
        """
        if isinstance(x, NVFP4Tensor):
            raise InputError("x is an NVFP4Tensor already; to_nvfp4(x.dequantize(), ...) changes its scales.")
        check_high_precision(x.dtype, "dtype of x")
        if is_dtensor(x):
            raise InputError("x is a DTensor, whose shards NVFP4 does not quantise; MXTensor.to_mx does.")
        if block_size != BLOCK or x.dim() == 0 or x.shape[-1] % BLOCK:
            raise InputError(
                f"x is {list(x.shape)}, block_size {block_size}: NVFP4 has blocks of {BLOCK} of the last dimension."
            )
        if is_swizzled_scales and x.dim() != 2:
            raise InputError(f"x is {list(x.shape)}; scales are swizzled for matrices only.")
        if seed is not None and not stochastic_rounding:
            raise InputError("seed is for stochastic_rounding=True; without it nothing is drawn.")
        if hadamard_signs is not None:
            check_signs(hadamard_signs)
        place = _seed(seed, x.device) if stochastic_rounding else None
        made: NVFP4Tensor = _Quantize.apply(x, _outer(per_tensor_scale, x), place, hadamard_signs)
        return made.swizzled() if is_swizzled_scales else made

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values, rounded to float32 and then to `dtype`, by default `orig_dtype`; gradients pass through."""
        dtype = self.orig_dtype if dtype is None else dtype
        check_high_precision(dtype, "dtype")
        values: torch.Tensor = Dequantize.apply(self, dtype)
        return values

    def get_hp_scales(self) -> torch.Tensor:
        """Product of both levels of scales, float32 with a 16th of the size along `block_dim`."""
        scale = self.unswizzled().scale.float()
        return scale if self.per_tensor_scale is None else scale * self.per_tensor_scale

    def swizzled(self) -> NVFP4Tensor:
        """The same tensor with scales as 128 x 4 tiles. InputError unless it is a matrix quantised along its rows."""
        if self.is_swizzled_scales:
            return self
        if self.dim() != 2 or self.block_dim != -1:
            raise InputError(f"scales are swizzled for matrices quantised along their last dimension, not {self!r}.")
        tiles = to_blocked(self.scale.view(torch.uint8))
        return self._with(self.qdata, tiles.view(_swizzled_shape(self.qdata)), is_swizzled_scales=True)

    def unswizzled(self) -> NVFP4Tensor:
        """The same tensor with each block's scale in its natural place."""
        if not self.is_swizzled_scales:
            return self
        rows = self.qdata.movedim(self.block_dim, -1)
        scale = from_blocked(self.scale.view(torch.uint8).flatten(), rows.shape[0], rows.shape[1] * _PER_BYTE // BLOCK)
        return self._with(self.qdata, scale.movedim(-1, self.block_dim), is_swizzled_scales=False)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        outer = "one level" if self.per_tensor_scale is None else "two levels"
        return (
            f"NVFP4Tensor(shape={list(self.shape)}, {outer} of scales, blocks along dimension {self.block_dim}, for "
            f"{self.orig_dtype}, device={str(self.device)!r}, requires_grad={self.requires_grad})"
        )

    def _plain(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """`dequantize` without autograd."""
        dtype = self.orig_dtype if dtype is None else dtype
        mx = self.unswizzled()
        packed, scale = (part.view(torch.uint8).movedim(mx.block_dim, -1) for part in (mx.qdata, mx.scale))
        outer = mx.per_tensor_scale
        if outer is not None and outer.numel() > 1:
            outer = outer.movedim(mx.block_dim, -1)
        if _has_kernel(packed):
            values = ops.dequantize_nvfp4(packed, scale, outer, dtype, mx.hadamard_signs)
        else:
            values = arithmetic.dequantize(packed, scale, outer, mx.hadamard_signs).to(dtype)
        return values.movedim(-1, mx.block_dim)

    def _with(self, qdata: torch.Tensor, scale: torch.Tensor, **changed: Any) -> NVFP4Tensor:
        """Other bytes in the same format, except for attributes in `changed`; keeps the per-tensor scale."""
        context = {**self.__tensor_flatten__()[1], "per_tensor_scale": self.per_tensor_scale, **changed}
        return NVFP4Tensor(qdata, scale.view(SCALE_DTYPE), **context)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _OPERATIONS.run(func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        names = ("orig_dtype", "block_dim", "is_swizzled_scales", "hadamard_signs")
        parts = [name for name in _PARTS if getattr(self, name) is not None]
        return parts, {name: getattr(self, name) for name in names}

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: dict[str, Any], outer_size: Any, outer_stride: Any
    ) -> NVFP4Tensor:
        return NVFP4Tensor(inner["qdata"], inner["scale"], per_tensor_scale=inner.get("per_tensor_scale"), **context)


def _swizzled_shape(qdata: torch.Tensor) -> tuple[int, int]:
    rows, columns = blocked_shape(qdata.shape[0], qdata.shape[1] * _PER_BYTE // BLOCK)
    return rows // 4, columns * 4


def _check(
    qdata: torch.Tensor,
    scale: torch.Tensor,
    orig_dtype: torch.dtype,
    per_tensor_scale: torch.Tensor | None,
    block_dim: int,
    is_swizzled_scales: bool,
) -> None:
    check_high_precision(orig_dtype, "orig_dtype")
    if qdata.dtype != torch.uint8 or scale.dtype != SCALE_DTYPE:
        raise InputError(f"qdata is {qdata.dtype}, scale {scale.dtype}; they must be {torch.uint8} and {SCALE_DTYPE}.")
    if not -qdata.dim() <= block_dim < 0:
        raise InputError(f"block_dim is {block_dim}; counted from the end of {qdata.dim()} dimensions, it is negative.")
    rows = qdata.movedim(block_dim, -1)
    expected = [*rows.shape[:-1], rows.shape[-1] * _PER_BYTE // BLOCK]
    given = list(scale.shape)
    if is_swizzled_scales:
        expected = list(_swizzled_shape(rows)) if rows.dim() == 2 else expected
    else:
        given = list(scale.movedim(block_dim, -1).shape) if scale.dim() == rows.dim() else given
    if given != expected or rows.shape[-1] * _PER_BYTE % BLOCK:
        raise InputError(
            f"qdata is {list(qdata.shape)}, scale {list(scale.shape)}, swizzled: {is_swizzled_scales}; with blocks "
            f"along dimension {block_dim}, which is last here, scale must be {expected}."
        )
    if per_tensor_scale is not None:
        _check_outer(per_tensor_scale, qdata)


def _check_outer(per_tensor_scale: torch.Tensor, like: torch.Tensor) -> None:
    """Refuse scales that are neither one value nor one per matrix of a tensor shaped like `like`."""
    given, per_matrix = list(per_tensor_scale.shape), [*like.shape[:-2], 1, 1]
    fits = per_tensor_scale.numel() == 1 or (like.dim() > 2 and given == per_matrix)
    if per_tensor_scale.dtype != torch.float32 or not fits:
        raise InputError(
            f"per_tensor_scale is {given} {per_tensor_scale.dtype}; it must be float32 of one value, or {per_matrix}, "
            "one per matrix."
        )


def _outer(per_tensor_scale: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    if per_tensor_scale is None:
        return None
    if not isinstance(per_tensor_scale, torch.Tensor) or per_tensor_scale.device != x.device:
        raise InputError(f"per_tensor_scale is {per_tensor_scale!r:.80}; it must be a float32 tensor on {x.device}.")
    _check_outer(per_tensor_scale, x)
    outer = per_tensor_scale.detach()
    return outer.reshape(()) if outer.numel() == 1 else outer


def _seed(seed: torch.Tensor | int | None, device: torch.device) -> torch.Tensor:
    """The seed as [1] int64 on the device."""
    if seed is None:
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
    if not isinstance(seed, torch.Tensor):
        number = index(seed)
        if not -(2**63) <= number < 2**63:
            raise InputError(f"seed is {number}; it must be an int64, -2**63 to 2**63 - 1.")
        return torch.full((1,), number, dtype=torch.int64, device=device)
    if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != device:
        raise InputError(f"seed is {list(seed.shape)} {seed.dtype} on {seed.device}; it must be one int64 on {device}.")
    return seed.reshape(1)


def _has_kernel(x: torch.Tensor) -> bool:
    """Whether a compiled kernel takes this tensor; the CPU and tensor subclasses use torch operations."""
    return x.is_cuda and not is_traceable_wrapper_subclass(x)


class _Quantize(torch.autograd.Function):
    """Straight-through estimator: the gradient of the quantised tensor becomes the gradient of `x`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, outer: torch.Tensor | None, seed: torch.Tensor | None, signs: int | None
    ) -> NVFP4Tensor:
        quantize = ops.quantize_nvfp4 if _has_kernel(x) else arithmetic.quantize
        qdata, scale = quantize(x, outer, seed, signs)
        return NVFP4Tensor(qdata, scale.view(SCALE_DTYPE), x.dtype, outer, hadamard_signs=signs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0], None, None, None


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
    if not _has_many(x):
        return x._apply(lambda part: part.permute(from_end), block_dim)
    if sorted(from_end[-2:]) != [-2, -1]:
        _one_scale(func, x)
    outer = x.per_tensor_scale
    assert outer is not None, "it has many"
    qdata, scale = (part.view(torch.uint8).permute(from_end) for part in (x.qdata, x.scale))
    return x._with(qdata, scale, block_dim=block_dim, per_tensor_scale=outer.permute(from_end))


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
