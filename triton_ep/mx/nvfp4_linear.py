"""NVFP4Linear: a linear layer that trains with NVFP4 operands in all three of its products.

    y  = x W^T    x and W along K, to nearest
    dx = dy W     dy along N, stochastically; W along N, to nearest
    dW = dy^T x   both along the rows, after a random Hadamard transform; dy stochastically

Gradients are rounded stochastically because sums over many steps must not be biased. The transform removes outliers
from the one product whose sum runs over tokens, where both operands can be transformed alike. Every operand has two
levels of scales. The products multiply the dequantised values.

Source: NVIDIA, "Pretraining Large Language Models with NVFP4" (2025), section 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from triton_ep.mx.hadamard import check_signs
from triton_ep.mx.linear import ConfiguredLinear, fill_blocks, linear_by
from triton_ep.mx.nvfp4 import BLOCK, NVFP4Tensor, per_tensor_amax_to_scale

DEFAULT_SIGNS = 0x9D2C
"""Drawn once. All layers may share the signs, which only have to be independent of the data."""


@dataclass(frozen=True)
class NVFP4LinearConfig:
    """Options of an NVFP4Linear.

    Attributes:
        use_dynamic_per_tensor_scale: two levels of scales, the outer one from each operand's largest magnitude.
        stochastic_rounding: round output gradients stochastically.
        hadamard_signs: signs of the transform of dW's operands; None: no transform.
        wgrad_with_hp: compute the weight's gradient from unquantised operands.

    Raises:
        InputError: `hadamard_signs` is not a 16-bit mask.
    """

    use_dynamic_per_tensor_scale: bool = True
    stochastic_rounding: bool = True
    hadamard_signs: int | None = DEFAULT_SIGNS
    wgrad_with_hp: bool = False

    def __post_init__(self) -> None:
        if self.hadamard_signs is not None:
            check_signs(self.hadamard_signs)


def quantized(
    x: torch.Tensor, config: NVFP4LinearConfig, *, stochastic: bool = False, signs: int | None = None
) -> NVFP4Tensor:
    """Quantise x [A, B] along B, which is filled up with zeros to whole blocks.

    With signs: an NVFP4Tensor of the transformed values, not of `x`.
    """
    filled = fill_blocks(x, -1, BLOCK)
    outer = None
    if config.use_dynamic_per_tensor_scale:
        # The transform may quadruple a value; the scale of its block must still fit.
        amax = x.abs().amax() if x.numel() else x.new_zeros(())
        outer = per_tensor_amax_to_scale(amax if signs is None else 4 * amax.float())
    made = NVFP4Tensor.to_nvfp4(filled, per_tensor_scale=outer, stochastic_rounding=stochastic, hadamard_signs=signs)
    return made if signs is None else NVFP4Tensor(made.qdata, made.scale, made.orig_dtype, made.per_tensor_scale)


class _NVFP4Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, config: NVFP4LinearConfig) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.config = config
        return torch.mm(quantized(x, config), quantized(weight, config).t())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (dy,) = grads
        x, weight = ctx.saved_tensors
        config = ctx.config
        stochastic, signs = config.stochastic_rounding, config.hadamard_signs
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            left = quantized(dy, config, stochastic=stochastic)
            dx = torch.mm(left, quantized(weight.t().contiguous(), config).t())
        if ctx.needs_input_grad[1]:
            if config.wgrad_with_hp:
                dweight = torch.mm(dy.t(), x)
            else:
                left = quantized(dy.t().contiguous(), config, stochastic=stochastic, signs=signs)
                dweight = torch.mm(left, quantized(x.t().contiguous(), config, signs=signs).t())
        return dx, dweight, None


def nvfp4_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, config: NVFP4LinearConfig | None = None
) -> torch.Tensor:
    """[..., N] = x [..., K] times weight [N, K] transposed, plus bias [N], in NVFP4 values, and so are the gradients.

    Arguments:
        x: bf16, fp16 or fp32, of any sizes. The result has its dtype.
        weight: the same dtype.
        config: None: stochastic rounding of gradients, Hadamard transform in dW.

    Stochastic rounding draws from torch's generator of the device.

    Raises:
        InputError: shapes or dtypes that do not fit each other.
    """
    return linear_by(_NVFP4Linear, x, weight, bias, config or NVFP4LinearConfig())


class NVFP4Linear(ConfiguredLinear[NVFP4LinearConfig]):
    """torch.nn.Linear that multiplies NVFP4 operands, forward and backward; parameters in high precision."""

    _default = NVFP4LinearConfig

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., out_features] of x [..., in_features]."""
        return nvfp4_linear(x, self.weight, self.bias, self.config)

    def extra_repr(self) -> str:
        """Sizes and configuration, for printing."""
        return f"{super().extra_repr()}, {self.config}"
