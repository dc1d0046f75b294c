"""MXFP8TensorStorage: the bytes of a tensor in MXFP8, blocked along rows, along columns, or both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from triton_ep.errors import InputError
from triton_ep.integrations.te import arithmetic, layouts
from triton_ep.integrations.te.parts import check_parts, check_quantizable, flatten, inferred, quantized_parts
from triton_ep.mx.formats import BLOCK
from triton_ep.mx.tensor import SCALE_DTYPE, MXTensor


class DType:
    """TransformerEngine's names of 8-bit formats, as torch dtypes."""

    kFloat8E4M3 = torch.float8_e4m3fn
    kFloat8E5M2 = torch.float8_e5m2


class UsageError(InputError, RuntimeError):
    """The tensor is not quantised in the requested direction."""


class MXFP8TensorStorage:
    """Elements and scales of a tensor of M rows (all leading dimensions) and N columns.

    Attributes, None for a missing direction:
        _rowwise_data: [..., N] uint8, e4m3 or e5m2 elements in blocks of 32 columns.
        _rowwise_scale_inv: uint8, [M up to a multiple of 128, N / 32 up to a multiple of 4]: exponent + 127.
        _columnwise_data: [..., N] uint8, not transposed: elements in blocks of 32 rows.
        _columnwise_scale_inv: uint8, [M / 32 up to a multiple of 4, N up to a multiple of 128].
        _fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        _quantizer: the quantiser that created the tensor, or None.
        _with_gemm_swizzled_scales: scales are in the order of `layouts.swizzle`, else compact.
        _fake_dtype: dtype that the tensor represents and `dequantize` returns by default; None: float32.

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
    _fake_dtype: torch.dtype | None = None
    _make_quantizer: ClassVar[Callable[..., Any]]  # set by quantizer.py, which imports this module

    def __init__(
        self,
        rowwise_data: torch.Tensor | None,
        rowwise_scale_inv: torch.Tensor | None,
        columnwise_data: torch.Tensor | None,
        columnwise_scale_inv: torch.Tensor | None,
        fp8_dtype: torch.dtype,
        quantizer: Any = None,
        with_gemm_swizzled_scales: bool = False,
        *,
        fake_dtype: torch.dtype | None = None,
    ) -> None:
        if fake_dtype is not None and not (isinstance(fake_dtype, torch.dtype) and fake_dtype.is_floating_point):
            raise InputError(f"fake_dtype is {fake_dtype!r}; it must be a floating-point dtype or None.")
        self._fake_dtype = fake_dtype
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

    # --- directions and parts -----------------------------------------------------------------------------

    @property
    def _any_data(self) -> torch.Tensor:
        data = self._rowwise_data if self._rowwise_data is not None else self._columnwise_data
        assert data is not None, "one direction is always there"
        return data

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
        """Elements by direction: both as a pair, or the requested one."""
        if rowwise_data and columnwise_data:
            return self._rowwise_data, self._columnwise_data
        return self._rowwise_data if rowwise_data else self._columnwise_data

    def get_metadata(self) -> dict[str, Any]:
        """Constructor arguments that recreate this tensor."""
        return {
            "rowwise_data": self._rowwise_data,
            "rowwise_scale_inv": self._rowwise_scale_inv,
            "columnwise_data": self._columnwise_data,
            "columnwise_scale_inv": self._columnwise_scale_inv,
            "fp8_dtype": self._fp8_dtype,
            "quantizer": self._quantizer,
            "with_gemm_swizzled_scales": self._with_gemm_swizzled_scales,
            "fake_dtype": self._fake_dtype,
        }

    def get_usages(self) -> dict[str, bool]:
        """The directions that the tensor has."""
        return {"rowwise": self._rowwise_data is not None, "columnwise": self._columnwise_data is not None}

    def _get_quantizer(self) -> Any:
        """The quantiser that created this tensor, or a new one with its format and directions."""
        if self._quantizer is not None:
            return self._quantizer
        return self._make_quantizer(self._fp8_dtype, **self.get_usages())

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop a direction with False; None leaves it unchanged.

        Raises:
            UsageError: True for a missing direction, which cannot be computed without the original values.
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
        """Shape of the represented tensor."""
        return self._any_data.size(*args)

    @property
    def device(self) -> torch.device:
        """Device of the elements."""
        return self._any_data.device

    def view(self, *shape: Any) -> Any:
        """The same bytes with other leading dimensions, of which one may be -1.

        Raises:
            InputError: another last dimension.
        """
        sizes = inferred(
            shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape, self._any_data.numel()
        )
        if sizes[-1:] != self._any_data.shape[-1:]:
            raise InputError(
                f"MXFP8 of {list(self._any_data.shape)} cannot be viewed as {list(sizes)}: it would cut blocks."
            )
        parts = self.get_metadata()
        for name in ("rowwise_data", "columnwise_data"):
            parts[name] = None if parts[name] is None else parts[name].view(sizes)
        return MXFP8TensorStorage(**parts)

    # --- parts without padding -----------------------------------------------------------------------------

    def compact(self, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Elements [M, N] and unpadded scales, [M, N / 32] or [M / 32, N], of one direction; views if compact.

        Raises:
            UsageError: the tensor does not have the direction.
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

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """`dequantize` without autograd."""
        columnwise = self._rowwise_data is None
        data, scale = self.compact(columnwise)
        dequantize = arithmetic.dequantize_columns if columnwise else arithmetic.dequantize_rows
        return dequantize(data, scale, self._fp8_dtype, dtype).view(self._any_data.shape)

    @property
    def _dtype(self) -> torch.dtype:
        """Dtype that the tensor represents."""
        return self._fake_dtype or torch.float32

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values, from the rowwise elements if present: float32 products, rounded to `dtype`; None: the dtype that
        the tensor represents."""
        return self.dequantized(self._dtype if dtype is None else dtype)

    def to_mxtensor(self, *, columnwise: bool = False, dtype: torch.dtype | None = None) -> MXTensor:
        """The same elements and scales as an MXTensor that represents `dtype`; nothing is copied if compact.

        dtype: None = `fake_dtype`, or bfloat16 if that is None.

        With columnwise=True the result has `block_dim` -2 and is two-dimensional, whatever this tensor's dimensions.
        """
        dtype = dtype or self._fake_dtype or torch.bfloat16
        data, scale = self.compact(columnwise)
        if columnwise:
            return MXTensor(
                data.view(self._fp8_dtype), scale.view(SCALE_DTYPE), self._fp8_dtype, BLOCK, dtype, block_dim=-2
            )
        shape = self._any_data.shape
        if len(shape) != 2:
            data, scale = data.view(shape), scale.reshape(*shape[:-1], shape[-1] // BLOCK)
        return MXTensor(data.view(self._fp8_dtype), scale.view(SCALE_DTYPE), self._fp8_dtype, BLOCK, dtype)


@torch.no_grad()
def quantize_into(
    src: torch.Tensor, dst: MXFP8TensorStorage, noop_flag: torch.Tensor | None = None, tiles: bool | None = None
) -> None:
    """Fill `dst` with the values of `src`, in the directions and the scale order of `dst`.

    Raises:
        InputError: `src` has another shape, or a dtype that cannot be quantised.
    """
    values = src.dequantize() if isinstance(src, MXFP8TensorStorage | MXTensor) else src.detach()
    data = dst._any_data
    if values.shape != data.shape:
        raise InputError(f"the values are {list(values.shape)}, the MXFP8 tensor {list(data.shape)}.")
    values = values.to(data.device)
    check_quantizable(values)
    if tiles is None:
        tiles = dst._quantizer is not None and dst._quantizer.with_2d_quantization
    usages = dst.get_usages()
    parts = quantized_parts(
        values, dst._fp8_dtype, usages["rowwise"], usages["columnwise"], dst._with_gemm_swizzled_scales, tiles
    )
    for name, part in parts.items():
        if part is not None:
            target = getattr(dst, f"_{name}")
            target.copy_(part if noop_flag is None else torch.where(noop_flag.to(part.device) == 1, target, part))
