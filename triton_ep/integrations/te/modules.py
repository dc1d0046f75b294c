"""Linear and GroupedLinear: torch modules that quantise inside `autocast`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from triton_ep.errors import InputError
from triton_ep.integrations import arguments as check
from triton_ep.integrations.te import options, plan
from triton_ep.integrations.te.function import Extra, linear
from triton_ep.integrations.te.manager import FP8GlobalStateManager
from triton_ep.integrations.te.operands import ends_of, quantised_already
from triton_ep.integrations.te.plan import Plan
from triton_ep.integrations.te.quantizer import MXFP8Quantizer
from triton_ep.integrations.te.recipe import MXFP8BlockScaling
from triton_ep.integrations.te.recipe_state import RecipeState
from triton_ep.integrations.te.state import is_own_recomputation
from triton_ep.integrations.te.support import MismatchError, check_whole, default_device
from triton_ep.integrations.te.tensor import MXFP8Tensor
from triton_ep.integrations.te.wgrad import WeightGradients
from triton_ep.mx.formats import BLOCK, HIGH_PRECISION


class QuantisingModule(nn.Module):
    """Base of both modules: weights, the plan set by `autocast`, quantised weights cached over micro-batches.

    Attributes:
        in_features, out_features, num_gemms: sizes.
        use_bias, apply_bias: whether the module has a bias, and whether it adds the bias itself.
        quantizers: {"scaling_fwd": ..., "scaling_bwd": ...} of the last forward pass inside `autocast`, 3 and 2 per
            product; empty lists before the first.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_gemms: int,
        *,
        bias: bool,
        return_bias: bool,
        params_dtype: torch.dtype | None,
        init_method: Callable[[torch.Tensor], Any] | None,
        device: torch.device | str | None,
        name: str | None,
        others: dict[str, Any],
    ) -> None:
        super().__init__()
        self._options = options.parse(type(self).__name__, others)
        in_features = check.integer("in_features", in_features, 1)
        out_features = check.integer("out_features", out_features, 1)
        num_gemms = check.integer("num_gemms", num_gemms, 1)
        bias, return_bias = check.flag("bias", bias), check.flag("return_bias", return_bias)
        if init_method is not None and not callable(init_method):
            raise InputError(f"init_method must be a function that fills a tensor, got {check.shown(init_method)}.")
        self.in_features, self.out_features, self.num_gemms = in_features, out_features, num_gemms
        self.use_bias, self.return_bias = bias, return_bias
        self.apply_bias = bias and not return_bias
        self.params_dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        if self.params_dtype not in HIGH_PRECISION:
            raise InputError(f"params_dtype is {self.params_dtype}; choose one of {HIGH_PRECISION}.")
        self.name = name
        self.init_method = init_method
        self.fuse_wgrad_accumulation = self._options.fuse_wgrad_accumulation
        fuse, delay = self._options.fuse_wgrad_accumulation, self._options.delay_wgrad_compute
        self._gradients = WeightGradients(fuse, delay) if fuse or delay else None
        self.tp_size, self.parallel_mode, self.sequence_parallel = 1, self._options.parallel_mode, False
        self.quantizers: dict[str, list[Any]] = {"scaling_fwd": [], "scaling_bwd": []}
        self._quantizers_plan_code = plan.OFF
        self._forward_plan_code: int | None = None
        self._cached_weights: list[MXFP8Tensor] | None = None
        self._cached_plan_code = plan.OFF
        device = default_device() if device is None else check.device("device", device)
        self._stored_by: MXFP8Quantizer | None = None
        if FP8GlobalStateManager.with_fp8_parameters():
            recipe = FP8GlobalStateManager.get_fp8_parameters_recipe()
            tiles = isinstance(recipe, MXFP8BlockScaling) and recipe.enable_2d_quantization
            self._stored_by = MXFP8Quantizer(torch.float8_e4m3fn, with_2d_quantization=tiles)
        self._keep_initial = FP8GlobalStateManager.with_high_precision_init_val()
        self._allocate(device)
        if device.type != "meta":
            self.reset_parameters()

    def _allocate(self, device: torch.device) -> None:
        """Create the parameters on a device, replacing existing ones."""
        # One storage for all weights, so that grouped products read them without a copy.
        weights = torch.empty(
            self.num_gemms, self.out_features, self.in_features, dtype=self.params_dtype, device=device
        )
        for index, weight in enumerate(weights.unbind()):
            self._replace_parameter(self._weight_name(index), weight)
            if self.use_bias:
                bias = torch.empty(self.out_features, dtype=self.params_dtype, device=device)
                self._replace_parameter(self._bias_name(index), bias)
            else:
                self.register_parameter(self._bias_name(index), None)

    def _replace_parameter(self, name: str, values: torch.Tensor) -> nn.Parameter:
        """Register `values` as parameter `name`; an older parameter of that name passes on its `requires_grad`."""
        before = self._parameters.get(name)
        parameter = nn.Parameter(values, before is None or before.requires_grad)
        self.register_parameter(name, parameter)
        return parameter

    def _weight_name(self, index: int) -> str:
        return f"weight{index}"

    def _bias_name(self, index: int) -> str:
        return f"bias{index}"

    @property
    def _weights(self) -> list[torch.Tensor]:
        return [getattr(self, self._weight_name(index)) for index in range(self.num_gemms)]

    @property
    def _biases(self) -> list[torch.Tensor]:
        if not self.use_bias:
            return []
        return [getattr(self, self._bias_name(index)) for index in range(self.num_gemms)]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise weights by `init_method`, by default normal with standard deviation 0.023, and biases to 0.

        Parameters on device "meta" are first created on the default device. A module created inside
        `quantized_model_init` quantises its weights; InputError if they are sharded already.
        """
        if any(parameter.is_meta for parameter in self.parameters()):
            self._allocate(default_device())
        for index, weight in enumerate(self._weights):
            stored = isinstance(weight, MXFP8Tensor)
            values = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device) if stored else weight.detach()
            with self._options.rng():
                if self.init_method is None:
                    values.normal_(0.0, 0.023)
                else:
                    self.init_method(values)
            if stored:
                weight.copy_(values)
            elif self._stored_by is not None:
                check_whole(weight)
                quantised: Any = self._replace_parameter(self._weight_name(index), self._stored_by(values))
                quantised._high_precision_init_val = values.cpu().clone() if self._keep_initial else None
        for bias in self._biases:
            bias.zero_()
        if self.need_backward_dw():
            for parameter in self._weights:
                parameter.skip_backward_post_hook = True  # type: ignore[attr-defined]  # data parallelism reads it

    def extra_repr(self) -> str:
        """Sizes and dtype."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, num_gemms={self.num_gemms}, "
            f"bias={self.use_bias}, params_dtype={self.params_dtype}"
        )

    # --- forward ------------------------------------------------------------------------------------------

    def _choose_plan_code(self) -> int:
        """Code of the plan (plan.py) for this forward pass. A recomputation reuses the plan of its forward pass.

        Raises:
            MismatchError: weights in MXFP8 under another recipe.
        """
        if torch.compiler.is_compiling():
            return plan.traced_plan_code()
        if FP8GlobalStateManager.is_fp8_enabled() and isinstance(self._weights[0], MXFP8Tensor):
            recipe = FP8GlobalStateManager.get_fp8_recipe()
            if not isinstance(recipe, MXFP8BlockScaling):
                weight = ".".join(part for part in (self.name, self._weight_name(0)) if part)
                raise MismatchError(
                    f"Recipe mismatch for '{weight}': it is quantised by MXFP8BlockScaling, the recipe is "
                    f"{type(recipe).__name__}. Use one recipe for quantized_model_init and autocast."
                )
        if is_own_recomputation() and self._forward_plan_code is not None:
            return self._forward_plan_code
        plan_code = plan.current_plan_code()
        self._forward_plan_code = plan_code
        if plan_code != plan.OFF:
            FP8GlobalStateManager.is_first_fp8_module()
            self._make_quantizers(plan_code)
        return plan_code

    def _make_quantizers(self, plan_code: int) -> None:
        if plan_code == self._quantizers_plan_code:
            return
        recipe = FP8GlobalStateManager.get_fp8_recipe()
        roles = ("input", "weight", "output") * self.num_gemms
        forward = RecipeState.create(recipe, mode="forward", num_quantizers=len(roles), roles=roles)
        backward = RecipeState.create(recipe, mode="backward", num_quantizers=2 * self.num_gemms)
        self.quantizers = {"scaling_fwd": forward.make_quantizers(), "scaling_bwd": backward.make_quantizers()}
        self._quantizers_plan_code = plan_code

    def _check_input(self, inp: torch.Tensor, plan_code: int) -> None:
        if inp.dim() < 1 or inp.shape[-1] != self.in_features:
            raise InputError(f"inp is {list(inp.shape)}; its last dimension must be in_features, {self.in_features}.")
        if inp.dtype not in HIGH_PRECISION:
            raise InputError(f"inp is {inp.dtype}; it must be one of {HIGH_PRECISION}, or an MXFP8 tensor of one.")
        if plan_code != plan.OFF and (self.in_features % BLOCK or self.out_features % BLOCK):
            raise InputError(
                f"in_features {self.in_features} and out_features {self.out_features} must be multiples of {BLOCK} to "
                "be quantised to MXFP8. Pad them, or leave this module out of autocast."
            )

    def _cache(self, plan_code: int, is_first_microbatch: bool | None) -> list[MXFP8Tensor] | None:
        """Quantised weights, cached as long as the caller says that the weights do not change; None: no cache."""
        how = Plan.decode(plan_code) if plan_code > plan.OFF else None
        if is_first_microbatch is None or how is None or isinstance(self._weights[0], MXFP8Tensor):
            return None
        if how.override == "high_precision":
            return None
        if is_first_microbatch or self._cached_weights is None or self._cached_plan_code != plan_code:
            quantizer = MXFP8Quantizer(torch.float8_e4m3fn, with_2d_quantization=how.tiles)
            self._cached_weights = [quantizer(weight.detach()) for weight in self._weights]
            self._cached_plan_code = plan_code
        return self._cached_weights

    def _run(self, inp: torch.Tensor, ends: torch.Tensor | None, is_first_microbatch: bool | None) -> Any:
        if not isinstance(inp, torch.Tensor):
            raise InputError(f"inp must be a tensor, got {check.shown(inp)}.")
        plan_code = self._choose_plan_code()
        self._check_input(inp, plan_code)
        dtype = inp.dtype
        if torch.is_autocast_enabled(inp.device.type):
            dtype = torch.get_autocast_dtype(inp.device.type)
            inp = inp if quantised_already(inp) else inp.to(dtype)
        cached = None if torch.compiler.is_compiling() else self._cache(plan_code, is_first_microbatch)
        biases = self._biases if self.apply_bias else []
        extra = Extra(cached, self._gradients, self._options.save_original_input, is_first_microbatch is True)
        return linear(inp, self._weights, biases, ends, plan_code, dtype, extra)

    # --- backward, storage --------------------------------------------------------------------------------

    @property
    def primary_weights_in_fp8(self) -> bool:
        """Whether the weights are stored quantised (`quantized_model_init`)."""
        return isinstance(self._weights[0], MXFP8Tensor)

    def need_backward_dw(self) -> bool:
        """Whether the caller must call `backward_dw` after each backward pass (delay_wgrad_compute=True)."""
        return self._options.delay_wgrad_compute

    def backward_dw(self) -> None:
        """Compute the weight gradients of the oldest pending backward pass; no effect without delay_wgrad_compute.

        Raises:
            NothingDelayedError: no backward pass is pending.
        """
        if self._gradients is not None and self._gradients.delay:
            self._gradients.run_oldest()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # TransformerEngine's checkpoints have this entry; for MXFP8 it holds no state.
        state_dict.pop(f"{prefix}_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class Linear(QuantisingModule):
    """y = x W^T + b; inside `autocast` with operands in MXFP8.

    Arguments:
        in_features, out_features: sizes; inside `autocast` multiples of 32.
        bias: whether the layer has a bias.
        init_method: fills the weight in place; None: normal with standard deviation 0.023.
        return_bias: return (y without bias, bias).
        params_dtype: of weight and bias; None: torch's default dtype.
        device: None: the current GPU, or the CPU if kernels are interpreted.
        name: name of the module in error messages.
        fuse_wgrad_accumulation: add the weight's gradient to `weight.main_grad`, or overwrite it if
            `weight.overwrite_main_grad` is true; `weight.grad` stays None.
        delay_wgrad_compute: `backward_dw` computes the weight's gradient, once per backward pass.
        save_original_input: save the unquantised input for the backward pass; same results.
        get_rng_state_tracker, rng_tracker_name: the weight is filled inside `get_rng_state_tracker().fork(name)`.
        others: TransformerEngine's other arguments. Tensor parallelism over more than one rank, user buffers, and
            split or packed parameters are refused; unknown names are a TypeError.

    Attributes:
        weight: [out_features, in_features]; an MXFP8Tensor if created inside `quantized_model_init`.
        bias: [out_features], or None.

    Raises:
        InputError: sizes, dtypes or options that cannot work.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        name: str | None = None,
        **others: Any,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            1,
            bias=bias,
            return_bias=return_bias,
            params_dtype=params_dtype,
            init_method=init_method,
            device=device,
            name=name,
            others=others,
        )

    def _weight_name(self, index: int) -> str:
        return "weight"

    def _bias_name(self, index: int) -> str:
        return "bias"

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """[..., out_features] of inp [..., in_features], in the dtype of inp or of torch.autocast.

        Arguments:
            inp: high precision, or MXFP8 (MXFP8Tensor, MXTensor), which is used as it is.
            is_first_microbatch: True: quantise the weight and cache it; False: use the cached weight; None: no cache.
                With fuse_wgrad_accumulation, True also overwrites `main_grad` instead of adding to it.
            fp8_output, fp8_grad: False: results and gradients are in high precision.

        Returns the result; with `return_bias` also the bias.

        Raises:
            InputError: sizes or dtypes that do not fit; another value of the last two arguments.
        """
        options.refuse("Linear", fp8_output=fp8_output, fp8_grad=fp8_grad)
        out = self._run(inp, None, is_first_microbatch)
        return (out, self.bias) if self.return_bias else out


class GroupedLinear(QuantisingModule):
    """One linear layer per group of rows; inside `autocast` with operands in MXFP8.

    Arguments:
        num_gemms: number of groups. The others: as in `Linear`.

    Attributes:
        weight0, weight1, ...: [out_features, in_features] each, in one storage.
        bias0, bias1, ...: [out_features] each, or None.

    Raises:
        InputError: sizes, dtypes or options that cannot work.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        name: str | None = None,
        **others: Any,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            num_gemms,
            bias=bias,
            return_bias=return_bias,
            params_dtype=params_dtype,
            init_method=init_method,
            device=device,
            name=name,
            others=others,
        )

    def forward(
        self,
        inp: torch.Tensor,
        m_splits: Sequence[int] | torch.Tensor,
        is_first_microbatch: bool | None = None,
        out: None = None,
        dgrad_out: None = None,
    ) -> Any:
        """[..., out_features] of inp [..., in_features], R rows: the first m_splits[0] by weight 0, and so on.

        Arguments:
            inp: high precision, or in MXFP8 along its rows.
            m_splits: rows of each group, 0 allowed. Integers, which must sum to R; or an integer tensor on the device,
                which the host does not read: rows past the last group then give zeros.
            is_first_microbatch: as in `Linear`.
            out, dgrad_out: None: results and gradients are allocated.

        Returns the result; with `return_bias` also the list of biases.

        Raises:
            InputError: sizes or dtypes that do not fit; another value of the last two arguments.
        """
        options.refuse("GroupedLinear", out=out, dgrad_out=dgrad_out)
        return self.forward_to_ends(inp, ends_of(m_splits, self.num_gemms, inp), is_first_microbatch)

    def forward_to_ends(self, inp: torch.Tensor, ends: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """`forward` with `ends` [num_gemms] int32 on the device: the row after the last row of each group."""
        out = self._run(inp, ends, is_first_microbatch)
        return (out, self._biases) if self.return_bias else out
