"""Convert models to small formats: `quantize_(model, config)` replaces the linear layers that a filter chooses.

| config | the layer becomes | for |
|---|---|---|
| MXLinearConfig | MXLinear | training |
| NVFP4LinearConfig | NVFP4Linear | training |
| MXWeightOnlyConfig | torch.nn.Linear with an MXTensor as weight | inference |
| NVFP4WeightOnlyConfig | torch.nn.Linear with an NVFP4Tensor as weight | inference |
| MXDynamicActivationMXWeightConfig | QuantizedLinear | inference, inputs quantised too |
| NVFP4DynamicActivationNVFP4WeightConfig | QuantizedLinear | inference, inputs quantised too |

The configurations for inference have torchao's names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, get_args

import torch
from torch import nn

from triton_ep.distributed.dtensors import is_dtensor
from triton_ep.errors import InputError
from triton_ep.mx.formats import BLOCK, ScalingMode, elem_format
from triton_ep.mx.linear import MXLinear, MXLinearConfig, flat
from triton_ep.mx.mm import check_path, mx_mm
from triton_ep.mx.nvfp4 import BLOCK as NVFP4_BLOCK
from triton_ep.mx.nvfp4 import NVFP4Tensor, per_tensor_amax_to_scale
from triton_ep.mx.nvfp4_linear import NVFP4Linear, NVFP4LinearConfig
from triton_ep.mx.tensor import MXTensor


@dataclass(frozen=True)
class MXWeightOnlyConfig:
    """Weights in MX; inputs and products in high precision.

    Attributes:
        weight_dtype: element type, as `MXTensor.to_mx` takes it.
        block_size: values per scale.
        scaling_mode: "rceil", "floor", "ceil" or "even".
    """

    weight_dtype: torch.dtype | str = torch.float8_e4m3fn
    block_size: int = BLOCK
    scaling_mode: ScalingMode | str | Enum = ScalingMode.RCEIL


@dataclass(frozen=True)
class MXDynamicActivationMXWeightConfig:
    """Weights in MX, and inputs quantised at each call.

    Attributes:
        activation_dtype, weight_dtype: element types.
        block_size: values per scale.
        scaling_mode: "rceil", "floor", "ceil" or "even".
        path: path of the product: "auto", "emulated" or "hardware", as `mx_mm` takes it.
    """

    activation_dtype: torch.dtype | str = torch.float8_e4m3fn
    weight_dtype: torch.dtype | str = torch.float8_e4m3fn
    block_size: int = BLOCK
    scaling_mode: ScalingMode | str | Enum = ScalingMode.RCEIL
    path: str = "auto"


@dataclass(frozen=True)
class NVFP4WeightOnlyConfig:
    """Weights in NVFP4; inputs and products in high precision.

    Attributes:
        use_dynamic_per_tensor_scale: two levels of scales.
    """

    use_dynamic_per_tensor_scale: bool = True


@dataclass(frozen=True)
class NVFP4DynamicActivationNVFP4WeightConfig:
    """Weights in NVFP4, and inputs quantised at each call.

    Attributes:
        use_dynamic_per_tensor_scale: two levels of scales; for inputs from the largest magnitude of each call.
    """

    use_dynamic_per_tensor_scale: bool = True


WeightConfig = MXWeightOnlyConfig | MXDynamicActivationMXWeightConfig
NVFP4Config = NVFP4WeightOnlyConfig | NVFP4DynamicActivationNVFP4WeightConfig
Config = MXLinearConfig | NVFP4LinearConfig | WeightConfig | NVFP4Config


class QuantizedLinear(nn.Linear):
    """torch.nn.Linear for inference with quantised weights; quantises its input along the sum at each call.

    `quantize_` creates it. Its state dict is that of torch.nn.Linear, with an MXTensor or NVFP4Tensor as weight.
    With MXWeightOnlyConfig inputs stay unquantised. Weights made of DTensors need this class: their inputs are DTensors
    too, and a DTensor accepts no other kind of tensor in a product.
    """

    config: WeightConfig | NVFP4Config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., out_features] of x [..., in_features]."""
        config, rows = self.config, flat(x)
        if isinstance(config, MXWeightOnlyConfig):
            assert isinstance(self.weight, MXTensor), "quantize_ set it"
            return nn.functional.linear(x, self.weight.dequantize(), self.bias)
        if isinstance(config, MXDynamicActivationMXWeightConfig):
            quantized = MXTensor.to_mx(rows, config.activation_dtype, config.block_size, config.scaling_mode)
            out = mx_mm(quantized, self.weight.t(), x.dtype, bias=self.bias, path=config.path)
        else:
            nvfp4 = _to_nvfp4(rows, config.use_dynamic_per_tensor_scale)
            out = nn.functional.linear(nvfp4, self.weight, self.bias)
        return out.reshape([*x.shape[:-1], out.shape[-1]])

    def extra_repr(self) -> str:
        """Sizes and configuration, for printing."""
        return f"{super().extra_repr()}, {self.config}"


def _to_nvfp4(x: torch.Tensor, two_levels: bool) -> NVFP4Tensor:
    # An empty tensor has no largest magnitude.
    outer = per_tensor_amax_to_scale(x.abs().amax()) if two_levels and x.numel() else None
    return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=outer)


def is_linear(module: nn.Module, name: str) -> bool:
    """The default filter: plain torch.nn.Linear layers that are not quantised yet."""
    return type(module) is nn.Linear and not isinstance(module.weight, MXTensor | NVFP4Tensor)


def _check_config(config: Any) -> None:
    """Raise InputError unless this is a configuration whose names are known."""
    if not isinstance(config, Config):
        names = ", ".join(each.__name__ for each in get_args(Config))
        raise InputError(f"config is {config!r:.80}; it must be one of {names}.")
    if isinstance(config, WeightConfig):
        elem_format(config.weight_dtype)
        ScalingMode.parse(config.scaling_mode)
    if isinstance(config, MXDynamicActivationMXWeightConfig):
        elem_format(config.activation_dtype)
        check_path(config.path)


def _check(linear: nn.Linear, name: str, config: WeightConfig | NVFP4Config) -> None:
    """Raise InputError unless the layer's weight can be quantised."""
    name = name or "the model"
    if isinstance(linear.weight, MXTensor | NVFP4Tensor):
        raise InputError(f"{name} is quantised already: {linear.weight!r}.")
    if is_dtensor(linear.weight) and isinstance(config, NVFP4Config):
        raise InputError(f"the weight of {name} is a DTensor; only the MX configurations take one.")
    block_size = config.block_size if isinstance(config, WeightConfig) else NVFP4_BLOCK
    if block_size > 0 and linear.in_features % block_size:
        raise InputError(
            f"{name} has {linear.in_features} input features, blocks have {block_size} values; leave it out with "
            "filter_fn."
        )
    try:
        _quantized(torch.empty(0, linear.in_features, dtype=linear.weight.dtype), config)
    except InputError as error:
        raise InputError(f"the weight of {name} cannot be quantised: {error}") from error


def _quantized(weight: torch.Tensor, config: WeightConfig | NVFP4Config) -> torch.Tensor:
    if isinstance(config, WeightConfig):
        return MXTensor.to_mx(weight, config.weight_dtype, config.block_size, config.scaling_mode)
    return _to_nvfp4(weight, config.use_dynamic_per_tensor_scale)


@torch.no_grad()
def _convert(linear: nn.Linear, config: Config) -> None:
    if isinstance(config, MXLinearConfig):
        MXLinear.from_float(linear, config)
        return
    if isinstance(config, NVFP4LinearConfig):
        NVFP4Linear.from_float(linear, config)
        return
    sharded = is_dtensor(linear.weight)
    linear.weight = nn.Parameter(_quantized(linear.weight, config).detach(), requires_grad=False)
    if sharded or isinstance(config, MXDynamicActivationMXWeightConfig | NVFP4DynamicActivationNVFP4WeightConfig):
        linear.__class__ = QuantizedLinear
        assert isinstance(linear, QuantizedLinear), "its class was just set"
        linear.config = config


def quantize_(model: nn.Module, config: Config, filter_fn: Callable[[nn.Module, str], bool] | None = None) -> None:
    """Replace layers of a model by quantised ones, in place: for training, parameters stay the same objects.

    Arguments:
        model: the model, or one layer.
        config: one of the configurations of this module; it decides what the layers become.
        filter_fn: called with each module and its name ("" for the model); True: convert the module. None: `is_linear`.

    Raises:
        InputError: `config` is not a configuration, or a chosen module is not a torch.nn.Linear or does not fit. The
            model is unchanged then.
    """
    _check_config(config)
    chosen = [(name, module) for name, module in model.named_modules() if (filter_fn or is_linear)(module, name)]
    for name, module in chosen:
        if type(module) is not nn.Linear:
            what = f"{name or 'the model'}, a {type(module).__name__}"
            raise InputError(
                f"filter_fn chose {what}; only torch.nn.Linear can be turned into {type(config).__name__}'s."
            )
        if isinstance(config, WeightConfig | NVFP4Config):
            _check(module, name, config)
    for _, module in chosen:
        assert isinstance(module, nn.Linear), "checked above"
        _convert(module, config)
