"""Experts: the second object of vLLM's modular MoE kernels, built on triton_ep's expert block."""

from __future__ import annotations

from typing import Any

import torch

from triton_ep.errors import ConfigError, InputError
from triton_ep.integrations.arrived import ArrivedExperts
from triton_ep.integrations.vllm.prepare_finalize import PrepareFinalize
from triton_ep.mx.tensor import MXTensor
from triton_ep.ops.activation import Activation
from triton_ep.ops.slabs import from_slabs, to_slabs

ACTIVATIONS = {
    "silu": Activation(),
    "gelu": Activation("gelu"),
    "relu2_no_mul": Activation("relu2", gated=False),
    "silu_no_mul": Activation(gated=False),
    "gelu_no_mul": Activation("gelu", gated=False),
}
"""vLLM's names of activations. swigluoai is missing: it interleaves gate and up rows, which no product here takes."""


class Experts:
    """Experts of this rank, for rows that a `PrepareFinalize` returns. No gradient.

    Arguments:
        prepare_finalize: the kernel's first object; it determines the format of rows.
        quant_config: vLLM's, or any object with `quant_dtype` (None: bf16 products; "mxfp8": products of FP8 operands;
            weights are given in bf16 and quantised here) and, for experts with biases, w1_bias, w2_bias; None: bf16.
        formats, delegate: vLLM's FusedMoEActivationFormat, and a TopKWeightAndReduceDelegate object; None: strings
            instead.

    Raises:
        ConfigError: another quant_dtype.
    """

    def __init__(
        self, prepare_finalize: PrepareFinalize, quant_config: Any = None, *, formats: Any = None, delegate: Any = None
    ) -> None:
        dtype = getattr(quant_config, "quant_dtype", None)
        if dtype not in (None, "mxfp8"):
            raise ConfigError(f'experts multiply rows in bf16 (quant_dtype None) or "mxfp8", not {dtype!r}.')
        self.quant_config, self.batched = quant_config, prepare_finalize.batched
        self._formats, self._delegate = formats, delegate
        self._recipe = "bf16" if dtype is None else "mxfp8"
        self._experts: dict[str, ArrivedExperts] = {}

    @property
    def activation_formats(self) -> tuple[Any, Any]:
        """Formats of rows and of results: both are the format of `prepare_finalize`."""
        name = "BatchedExperts" if self.batched else "Standard"
        found = name if self._formats is None else self._formats[name]
        return found, found

    def activation_format(self) -> Any:
        """The same format, under the name that newer vLLM versions call."""
        return self.activation_formats[0]

    # vLLM calls these before it selects a class for a configuration.

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key is None  # weights are given in bf16

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return getattr(activation, "value", activation) in ACTIVATIONS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    def supports_chunking(self) -> bool:
        """False: rows are grouped by expert, so chunks cannot start at any row."""
        return False

    def supports_expert_map(self) -> bool:
        """True: rows belong only to experts of this rank, in the order of their places."""
        return True

    def supports_packed_ue8m0_act_scales(self) -> bool:
        """False: scales are one byte each."""
        return False

    def workspace_dtype(self, act_dtype: torch.dtype) -> torch.dtype:
        """Dtype of the results."""
        return act_dtype

    def workspace_shapes(
        self, M: int, N: int, K: int, topk: int, global_num_experts: int, local_num_experts: int, *_: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Shapes of two empty workspaces and of the result."""
        return (0,), (0,), (local_num_experts, M, K) if self.batched else (M, K)

    def finalize_weight_and_reduce_impl(self) -> Any:
        """The delegate: `finalize` applies the weights and sums."""
        return "delegate" if self._delegate is None else self._delegate

    @torch.no_grad()
    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor | None,
        workspace2: torch.Tensor | None,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write the unweighted expert outputs of rows into `output`; its places past the rows are undefined.

        Arguments:
            output, hidden_states: [R, H], or in the batched format [e, S, H]; bf16; hidden_states e4m3 with MXFP8.
            w1: [e, 2F, H] bf16, gate rows first ([e, F, H] for an activation without a gate). w2: [e, H, F] bf16.
            activation: one of ACTIVATIONS, or an enumeration member with such a value.
            a1q_scale: uint8 [.., H / 32] of MXFP8 rows; None: bf16 rows.
            expert_tokens_meta: `expert_num_tokens` [e], rows of each expert.
            The others: not used.

        Raises:
            InputError: another activation, no counts, or operands that do not fit each other.
        """
        counts = _field(expert_tokens_meta, "expert_num_tokens")
        if counts is None:
            raise InputError("experts need expert_tokens_meta with expert_num_tokens, as PrepareFinalize returns it.")
        experts = self._of(getattr(activation, "value", activation))
        rows, offsets = hidden_states, torch.nn.functional.pad(torch.cumsum(counts, 0, dtype=torch.int32), (1, 0))
        scales = a1q_scale
        if self.batched:
            num_rows = rows.shape[0] * rows.shape[1]
            rows = from_slabs(rows, offsets, counts, num_rows)
            scales = None if scales is None else from_slabs(scales, offsets, counts, num_rows)
        if scales is not None:
            rows = MXTensor.from_qdata_and_scales(rows, scales, torch.bfloat16)
        b13, b2 = (getattr(self.quant_config, name, None) for name in ("w1_bias", "w2_bias"))
        y = experts(rows, counts, w1, w2, biases=None if b13 is None or b2 is None else (b13, b2))
        if self.batched:
            to_slabs(y, offsets, counts, output)
        else:
            output.copy_(y)

    def _of(self, activation: Any) -> ArrivedExperts:
        if activation not in ACTIVATIONS:
            raise InputError(f"activation is {activation!r}; choose one of {', '.join(ACTIVATIONS)}.")
        if activation not in self._experts:
            self._experts[activation] = ArrivedExperts(self._recipe, ACTIVATIONS[activation], prepared="fprop")
        return self._experts[activation]


def _field(meta: Any, name: str) -> Any:
    return meta.get(name) if isinstance(meta, dict) else getattr(meta, name, None)
