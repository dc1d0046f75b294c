"""MXFP8Quantizer: quantises high-precision tensors to MXFP8Tensor."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import torch

from triton_ep.errors import InputError
from triton_ep.integrations import arguments as check
from triton_ep.integrations.te import layouts, support
from triton_ep.integrations.te.parts import check_quantizable, check_shape, quantized_parts
from triton_ep.integrations.te.recipe import MXFP8BlockScaling
from triton_ep.integrations.te.storage import DType, MXFP8TensorStorage, quantize_into
from triton_ep.integrations.te.tensor import MXFP8Tensor
from triton_ep.mx.formats import BLOCK
from triton_ep.mx.tensor import MXTensor


class MXFP8Quantizer:
    """Quantises tensors to MXFP8. It holds options and no state, so one may serve many tensors, threads and streams.

    Arguments:
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2; DType has TransformerEngine's names for them.
        rowwise, columnwise: the directions to quantise in, both from the same values.
        with_2d_quantization: one scale per 32 x 32 values.

    Attributes:
        dtype: `fp8_dtype`.
        rowwise_usage, columnwise_usage: the directions; see `set_usage`.
        internal: return an MXFP8TensorStorage, without autograd, in place of an MXFP8Tensor.
        optimize_for_gemm: return scales in the order of `layouts.swizzle`.
        with_2d_quantization: as the argument.

    Raises:
        InputError: another format; no direction.
    """

    def __init__(
        self,
        fp8_dtype: torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
    ) -> None:
        if fp8_dtype not in (DType.kFloat8E4M3, DType.kFloat8E5M2):
            raise InputError(f"fp8_dtype is {check.shown(fp8_dtype)}; choose torch.float8_e4m3fn or torch.float8_e5m2.")
        self.dtype = fp8_dtype
        self.rowwise_usage = check.flag("rowwise", rowwise)
        self.columnwise_usage = check.flag("columnwise", columnwise)
        self.internal = False
        self.optimize_for_gemm = False
        self.with_2d_quantization = with_2d_quantization

    def __repr__(self) -> str:
        return (
            f"MXFP8Quantizer(dtype={self.dtype}, rowwise_usage={self.rowwise_usage}, "
            f"columnwise_usage={self.columnwise_usage}, internal={self.internal}, "
            f"optimize_for_gemm={self.optimize_for_gemm}, with_2d_quantization={self.with_2d_quantization})"
        )

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Choose directions; None leaves a direction unchanged."""
        if rowwise is not None:
            self.rowwise_usage = rowwise
        if columnwise is not None:
            self.columnwise_usage = columnwise

    def get_usages(self) -> dict[str, bool]:
        """The directions, as arguments of `set_usage`."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def copy(self) -> MXFP8Quantizer:
        """Create a quantiser with the same options."""
        other = MXFP8Quantizer(
            self.dtype,
            rowwise=self.rowwise_usage,
            columnwise=self.columnwise_usage,
            with_2d_quantization=self.with_2d_quantization,
        )
        other.internal, other.optimize_for_gemm = self.internal, self.optimize_for_gemm
        return other

    def is_quantizable(self, inp: torch.Tensor) -> bool:
        """Whether the last dimension, and the product of the others, are multiples of 32."""
        return inp.dim() >= 2 and inp.shape[-1] % BLOCK == 0 and prod(inp.shape[:-1]) % BLOCK == 0

    def get_scale_shape(self, shape: Iterable[int], columnwise: bool) -> tuple[int, int]:
        """Shape of the padded scales of a tensor of this shape."""
        *leading, last = shape
        return layouts.scale_shape(prod(leading), last, columnwise)

    def create_tensor_from_data(
        self,
        data: torch.Tensor,
        scale_inv: torch.Tensor,
        fake_dtype: torch.dtype,
        fp8_dtype: torch.dtype = DType.kFloat8E4M3,
    ) -> MXFP8Tensor:
        """A tensor of `fake_dtype` of row-wise elements [..., N] uint8 and their padded scales; nothing is copied.

        Raises:
            InputError: as of `MXFP8Tensor`.
        """
        return MXFP8Tensor(
            data.shape,
            fake_dtype,
            rowwise_data=data,
            rowwise_scale_inv=scale_inv,
            columnwise_data=None,
            columnwise_scale_inv=None,
            fp8_dtype=fp8_dtype,
            quantizer=self,
        )

    def get_columnwise_shape(self, rowwise_data_shape: Iterable[int]) -> tuple[int, ...]:
        """Shape of columnwise elements: the shape of the tensor."""
        return tuple(rowwise_data_shape)

    def calibrate(self, tensor: torch.Tensor) -> None:
        """No effect: scales depend only on the tensor that is quantised."""

    def _get_compatible_recipe(self) -> type[MXFP8BlockScaling]:
        return MXFP8BlockScaling

    def __call__(
        self, tensor: torch.Tensor, *, out: MXFP8TensorStorage | None = None, dtype: torch.dtype | None = None
    ) -> Any:
        """Same as `quantize`."""
        return self.quantize(tensor, out=out, dtype=dtype)

    def quantize(
        self, tensor: torch.Tensor, *, out: MXFP8TensorStorage | None = None, dtype: torch.dtype | None = None
    ) -> Any:
        """Quantise a tensor to MXFP8; gradients pass through unchanged (straight-through).

        Arguments:
            tensor: [..., N] bf16, fp16 or fp32; N, and the product of the other dimensions, multiples of 32.
            out: an MXFP8 tensor to fill, in the directions that it has; it is returned.
            dtype: dtype that the result represents; None: the dtype of `tensor`.

        Raises:
            InputError: the tensor is in MXFP8 already, or has another dtype.
            ShapeError: sizes that are not multiples of 32.
        """
        if out is not None:
            return self.update_quantized(tensor, out)
        if isinstance(tensor, MXFP8TensorStorage | MXTensor):
            raise InputError("the tensor is in MXFP8 already; dequantize it to quantise it again.")
        if not isinstance(tensor, torch.Tensor):
            raise InputError(f"a quantiser takes a torch.Tensor, got {type(tensor).__name__}.")
        if dtype is not None:
            check.dtype("dtype", dtype)
        if torch.is_grad_enabled() and tensor.requires_grad and not self.internal:
            return _Quantize.apply(tensor, self, dtype)
        return self.quantize_impl(tensor, dtype)

    def multi_quantize(self, tensors: Iterable[torch.Tensor]) -> list[Any]:
        """`quantize` each tensor."""
        return [self.quantize(tensor) for tensor in tensors]

    def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Any:
        """`quantize` without autograd."""
        check_quantizable(tensor)
        support.warn_if_emulated()
        return self._wrap(tensor.shape, tensor.dtype if dtype is None else dtype, self._parts(tensor))

    def update_quantized(
        self, src: torch.Tensor, dst: MXFP8TensorStorage, *, noop_flag: torch.Tensor | None = None
    ) -> MXFP8TensorStorage:
        """Fill an MXFP8 tensor with other values, keeping its directions and its order of scales."""
        if not isinstance(dst, MXFP8TensorStorage):
            raise InputError(f"Cannot store quantized MXFP8 in {type(dst)} type.")
        given: Any = src
        if not isinstance(given, MXFP8TensorStorage):
            check.tensor("src", given)
        if noop_flag is not None and check.tensor("noop_flag", noop_flag).numel() != 1:
            raise InputError(f"noop_flag must be one number, got {check.shown(noop_flag)}.")
        dst._fp8_dtype = self.dtype
        quantize_into(src, dst, noop_flag, self.with_2d_quantization)
        return dst

    def make_empty(
        self,
        shape: Iterable[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> Any:
        """Create a tensor with uninitialised elements and scales 0, in the directions of this quantiser.

        device: None: torch's default device. pin_memory: pinned host memory, for copies from and to a GPU.

        Raises:
            ShapeError: sizes that are not multiples of 32.
        """
        shape = check.sizes("shape", shape)
        check_shape(shape)
        check.dtype("dtype", dtype)
        device = None if device is None else check.device("device", device)
        parts: dict[str, Any] = {}
        for name, wanted, columnwise in (
            ("rowwise", self.rowwise_usage, False),
            ("columnwise", self.columnwise_usage, True),
        ):
            scales = self.get_scale_shape(shape, columnwise)
            where: dict[str, Any] = {"dtype": torch.uint8, "device": device, "pin_memory": pin_memory}
            parts[f"{name}_data"] = torch.empty(shape, **where) if wanted else None
            parts[f"{name}_scale_inv"] = torch.zeros(scales, **where) if wanted else None
        return self._wrap(shape, dtype, parts, requires_grad)

    def _wrap(
        self, shape: Iterable[int], dtype: torch.dtype, given: dict[str, Any], requires_grad: bool = False
    ) -> Any:
        parts: dict[str, Any] = dict(given)
        parts.update(fp8_dtype=self.dtype, quantizer=self.copy(), with_gemm_swizzled_scales=self.optimize_for_gemm)
        if self.internal:
            return MXFP8TensorStorage(**parts, fake_dtype=dtype)
        return MXFP8Tensor(shape, dtype, requires_grad=requires_grad, **parts)

    def _parts(self, tensor: torch.Tensor) -> dict[str, torch.Tensor | None]:
        return quantized_parts(
            tensor.detach(),
            self.dtype,
            self.rowwise_usage,
            self.columnwise_usage,
            self.optimize_for_gemm,
            self.with_2d_quantization,
        )


class _Quantize(torch.autograd.Function):
    """Straight-through estimator: the gradient of the quantised tensor becomes the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, quantizer: MXFP8Quantizer, dtype: torch.dtype | None) -> torch.Tensor:
        ctx.dtype = tensor.dtype
        result: torch.Tensor = quantizer.quantize_impl(tensor, dtype)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0].to(ctx.dtype), None, None


MXFP8TensorStorage._make_quantizer = MXFP8Quantizer
