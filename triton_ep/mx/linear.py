"""MXLinear: a linear layer that trains with MX operands in all three of its products.

Each product quantises its operands along the dimension that it sums over:

    y  = x W^T    x along K, W along K
    dx = dy W     dy along N, W along N
    dW = dy^T x   both along the rows, or neither with wgrad_with_hp

x [..., K] is flattened to rows, W is [N, K]. A short last block is filled up with zeros, which add nothing to a sum, so
sizes are arbitrary. Weights and optimizer steps stay in high precision.

Source: torchao's mx_linear; the thresholds of its tests hold here (tests/mx/test_linear.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import nn

from triton_ep.errors import InputError
from triton_ep.mx.formats import BLOCK, ScalingMode, elem_format
from triton_ep.mx.mm import PATHS, mx_mm
from triton_ep.mx.tensor import MXTensor

Config = TypeVar("Config")


@dataclass(frozen=True)
class MXLinearConfig:
    """Formats of an MXLinear.

    Attributes:
        elem_dtype: of inputs, and of operands without an override; as `MXTensor.to_mx` takes it.
        elem_dtype_weight_override: of weights.
        elem_dtype_grad_output_override: of output gradients.
        block_size: values per scale.
        scaling_mode: "rceil", "floor", "ceil" or "even".
        wgrad_with_hp: compute the weight's gradient from unquantised operands.
        path: path of the products: "auto", "emulated" or "hardware", as `triton_ep.mx.mm.mx_mm` takes it.

    Raises:
        InputError: an unknown format, mode or path, or an invalid block size.
    """

    elem_dtype: torch.dtype | str = torch.float8_e4m3fn
    elem_dtype_weight_override: torch.dtype | str | None = None
    elem_dtype_grad_output_override: torch.dtype | str | None = None
    block_size: int = BLOCK
    scaling_mode: ScalingMode | str | Enum = ScalingMode.RCEIL
    wgrad_with_hp: bool = False
    path: str = "auto"

    def __post_init__(self) -> None:
        for dtype in (self.elem_dtype, self.weight_dtype, self.grad_dtype):
            if self.block_size < 1 or self.block_size % elem_format(dtype).per_byte:
                raise InputError(f"block_size is {self.block_size}; {dtype} needs a positive number of whole bytes.")
        if self.path not in PATHS:
            raise InputError(f"path is {self.path!r}; choose one of {', '.join(map(repr, PATHS))}.")
        object.__setattr__(self, "scaling_mode", ScalingMode.parse(self.scaling_mode))

    @property
    def weight_dtype(self) -> torch.dtype | str:
        """Element type of weights."""
        return self.elem_dtype if self.elem_dtype_weight_override is None else self.elem_dtype_weight_override

    @property
    def grad_dtype(self) -> torch.dtype | str:
        """Element type of output gradients."""
        override = self.elem_dtype_grad_output_override
        return self.elem_dtype if override is None else override


def fill_blocks(x: torch.Tensor, dim: int, block_size: int) -> torch.Tensor:
    """Pad `x` with zeros at the end of `dim`, -1 or -2, to a multiple of `block_size`."""
    missing = -x.shape[dim] % block_size
    if not missing:
        return x
    return torch.nn.functional.pad(x, (0, missing) if dim == -1 else (0, 0, 0, missing))


def _along(x: torch.Tensor, dim: int, elem_dtype: torch.dtype | str, config: MXLinearConfig) -> MXTensor:
    """Quantise x [A, B] along `dim`, -1 or -2; x is returned unchanged if it has this form already."""
    if isinstance(x, MXTensor):
        if x.block_dim == dim and x.elem_dtype == elem_format(elem_dtype).dtype and x.block_size == config.block_size:
            return x
        x = x.dequantize()
    filled = fill_blocks(x, dim, config.block_size)
    return MXTensor.to_mx(filled, elem_dtype, config.block_size, config.scaling_mode, block_dim=dim)


class _MXLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, config: MXLinearConfig) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.config = config
        left = _along(x, -1, config.elem_dtype, config)
        right = _along(weight, -1, config.weight_dtype, config)
        return mx_mm(left, right.t(), x.dtype, path=config.path)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (dy,) = grads
        x, weight = ctx.saved_tensors
        config = ctx.config
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            left = _along(dy, -1, config.grad_dtype, config)
            dx = mx_mm(left, _along(weight, -2, config.weight_dtype, config), x.dtype, path=config.path)
        if ctx.needs_input_grad[1]:
            if config.wgrad_with_hp:
                dweight = torch.mm(dy.t(), x).to(weight.dtype)
            else:
                left = _along(dy, -2, config.grad_dtype, config)
                right = _along(x, -2, config.elem_dtype, config)
                dweight = mx_mm(left.t(), right, weight.dtype, path=config.path)
        return dx, dweight, None


def check_operands(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Raise InputError unless x [..., K] and weight [N, K] fit each other and have one dtype."""
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise InputError(f"x must be [..., K] and weight [N, K]; they are {list(x.shape)} and {list(weight.shape)}.")
    if x.dtype != weight.dtype:
        raise InputError(f"x is {x.dtype}, weight {weight.dtype}; cast one of them, or use torch.autocast.")


def autocast(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Cast the tensors to torch.autocast's dtype for their device, if autocast is enabled."""
    kind = next(each.device.type for each in tensors if each is not None)
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(each if each is None else each.to(dtype) for each in tensors)


def linear_by(
    product: type[torch.autograd.Function],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    config: object,
) -> torch.Tensor:
    """[..., N] = x [..., K] times weight [N, K] transposed by `product` (x [R, K], weight, config), plus bias [N].

    Raises:
        InputError: shapes or dtypes that do not fit each other.
    """
    lowered_x, lowered_weight, lowered_bias = autocast(x, weight, bias)
    assert lowered_x is not None and lowered_weight is not None, "they were not None"
    check_operands(lowered_x, lowered_weight)
    if lowered_bias is not None and lowered_bias.shape != lowered_weight.shape[:1]:
        raise InputError(f"bias must be [{lowered_weight.shape[0]}], it is {list(lowered_bias.shape)}.")
    rows: torch.Tensor = product.apply(flat(lowered_x), lowered_weight, config)
    out = rows if x.dim() == 2 else rows.reshape([*x.shape[:-1], rows.shape[-1]])
    return out if lowered_bias is None else out + lowered_bias.to(out.dtype)


def flat(x: torch.Tensor) -> torch.Tensor:
    """Reshape [..., K] to rows [R, K]."""
    return x if x.dim() == 2 else x.reshape(prod(x.shape[:-1]), x.shape[-1])


def mx_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, config: MXLinearConfig | None = None
) -> torch.Tensor:
    """[..., N] = x [..., K] times weight [N, K] transposed, plus bias [N], in MX values, and so are the gradients.

    Arguments:
        x: bf16, fp16 or fp32. The result has its dtype.
        weight: the same dtype; or an MXTensor quantised along K in the weight's format, which the first product
            takes as it is; dx uses its values.
        config: formats; None: e4m3 in blocks of 32.

    Under torch.autocast the operands are cast first, as for torch.nn.functional.linear.

    Raises:
        InputError: shapes or dtypes that do not fit each other.
    """
    return linear_by(_MXLinear, x, weight, bias, config or MXLinearConfig())


class ConfiguredLinear(nn.Linear, Generic[Config]):
    """torch.nn.Linear with a configuration: the common base of MXLinear and NVFP4Linear.

    Arguments: those of torch.nn.Linear, and the configuration; None: the default one. Parameters are those of
    torch.nn.Linear, in high precision: an optimizer, a state dict or a parallel plan sees no difference.
    """

    config: Config
    _default: ClassVar[type[Any]]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        config: Config | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.config = config or self._default()

    @classmethod
    def from_float(cls, linear: nn.Linear, config: Config | None = None) -> Self:
        """Convert the layer itself to this class; parameters, hooks and mode stay.

        Raises:
            InputError: the layer is a subclass of torch.nn.Linear, whose own forward would be lost.
        """
        if type(linear) is not nn.Linear:
            raise InputError(f"from_float takes a torch.nn.Linear, not a {type(linear).__name__}.")
        linear.__class__ = cls
        assert isinstance(linear, cls), "its class was just set"
        linear.config = config or cls._default()
        return linear


class MXLinear(ConfiguredLinear[MXLinearConfig]):
    """torch.nn.Linear that multiplies MX operands, forward and backward; parameters in high precision."""

    _default = MXLinearConfig

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., out_features] of x [..., in_features]."""
        return mx_linear(x, self.weight, self.bias, self.config)

    def extra_repr(self) -> str:
        """Sizes and formats, for printing."""
        c = self.config
        formats = ", ".join(str(each) for each in (c.elem_dtype, c.weight_dtype, c.grad_dtype))
        return f"{super().extra_repr()}, mx=({formats}) in blocks of {c.block_size}"
