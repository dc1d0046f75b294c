"""EPMoE: a mixture-of-experts block over EPAll2AllLayer that honours `autocast`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from triton_ep import autograd
from triton_ep.errors import InputError
from triton_ep.integrations import arguments as check
from triton_ep.integrations.te import plan
from triton_ep.integrations.te.modules import GroupedLinear
from triton_ep.integrations.te.operands import one_below_the_other
from triton_ep.integrations.te.plan import Plan
from triton_ep.layer import EPAll2AllLayer
from triton_ep.mx.formats import BLOCK
from triton_ep.mx.tensor import MXTensor
from triton_ep.nn.expert_block import ExpertSettings, expert_block
from triton_ep.nn.prepared import PreparedWeights
from triton_ep.ops.activation import Activation


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


ACTIVATIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "swiglu": (_swiglu, 2),
    "silu": (functional.silu, 1),
    "gelu": (functional.gelu, 1),
    "relu": (functional.relu, 1),
}
"""By name: the function, and its number of input columns per output column."""
_IN_BLOCK = {
    "swiglu": Activation(),
    "silu": Activation(gated=False),
    "gelu": Activation("gelu", gated=False),
    "relu": Activation("relu", gated=False),
}
"""The same activations for triton_ep's expert block."""
_PRECISIONS = {plan.OFF: None, Plan().encoded: "default"}
"""Precision of the expert block by plan code; all other plans run two grouped linear layers."""


class _Together(torch.autograd.Function):
    """[E, N, K] of E weights [N, K]: a view if they are adjacent in one storage."""

    @staticmethod
    def forward(ctx: Any, *weights: torch.Tensor) -> torch.Tensor:
        return one_below_the_other([weight.detach() for weight in weights]).unflatten(0, (len(weights), -1))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grads[0].unbind()


def _after_load(block: EPMoE, _: Any) -> None:
    """Quantise weights again: a state dict may have changed FSDP's shards, which gathered weights do not show."""
    block._prepared.invalidate()


class EPMoE(nn.Module):
    """Router, dispatch, two grouped linear layers, combine: [..., H] to [..., H].

    Experts in bf16 run triton_ep's expert block: two products with the activation fused into the first, quantised
    inside `autocast`, in bf16 outside. The block runs E4M3 in both directions: x w^T and dy w take the operands as the
    recipe quantises them, at one scale per row; dy^T x takes the values of the same quantised dy and x. Other recipes
    (HYBRID, `backward_override`, 2-D tiles), weights in MXFP8, other dtypes, torch.autocast, fused or delayed gradients
    and torch.compile run the products of two GroupedLinear instead, by TransformerEngine's rule to the bit.

    The layer decides how rows travel: with payload="mxfp8" they are quantised on the way, inside `autocast` or not, and
    arrive as the first product's operand.

    Arguments:
        layer: an EPAll2AllLayer; it decides hidden size, top-k, experts and ranks. This module does not finalize it.
        ffn_hidden_size: columns between the two products.
        activation: "swiglu" (the first product then has twice the columns: gate, then up), "silu", "gelu", "relu".
        bias: whether the experts have biases.
        params_dtype: of the experts' weights; None: the layer's dtype.
        router_seed: ranks with the same seed start with the same router.
        prepared: which quantised copies of the weights the expert block keeps: "both" (2 bytes per weight), "fprop" (1
            byte; every backward pass builds the copies for dy w) or "none". Copies are rebuilt when a weight's version
            counter or address has moved and after any torch optimizer's step; in a captured CUDA graph, at every use.

    Attributes:
        router: [E, H] float32, the same on all ranks; its gradients must be summed over the ranks.
        fc1, fc2: GroupedLinear of this rank's experts.

    Raises:
        InputError: an unknown activation.
        ConfigError: a layer with low_latency=True; an unknown value of `prepared`.
    """

    def __init__(
        self,
        layer: EPAll2AllLayer,
        ffn_hidden_size: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        params_dtype: torch.dtype | None = None,
        router_seed: int = 0,
        prepared: str = "both",
    ) -> None:
        super().__init__()
        if not isinstance(layer, EPAll2AllLayer):
            raise InputError(f"layer must be an EPAll2AllLayer, got {check.shown(layer)}.")
        ffn_hidden_size = check.integer("ffn_hidden_size", ffn_hidden_size, 1)
        router_seed = check.integer("router_seed", router_seed, 0)
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            raise InputError(f"activation is {check.shown(activation)}; choose one of {', '.join(ACTIVATIONS)}.")
        autograd.enter(layer)
        self.layer = layer
        self.activation = activation
        self._prepared = PreparedWeights(prepared)
        self._prepared_of: list[tuple[int, int]] = []
        self.register_load_state_dict_post_hook(_after_load)
        cfg, device = layer.config, layer.context.device
        dtype = cfg.token_dtype if params_dtype is None else params_dtype
        function, factor = ACTIVATIONS[activation]
        self._activate = function
        generator = torch.Generator().manual_seed(router_seed)
        router = torch.randn(cfg.num_experts, cfg.hidden, generator=generator) * cfg.hidden**-0.5
        self.router = nn.Parameter(router.to(device))
        experts = cfg.num_experts_per_rank
        make = partial(GroupedLinear, experts, bias=bias, params_dtype=dtype, device=device)
        self.fc1 = make(cfg.hidden, factor * ffn_hidden_size)
        self.fc2 = make(ffn_hidden_size, cfg.hidden)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Route x [T, H]: weights [T, K] float32 that sum to 1, and experts [T, K] int32."""
        scores = functional.linear(x.float(), self.router).softmax(-1)
        weights, experts = scores.topk(self.layer.config.topk, -1)
        return weights / weights.sum(-1, keepdim=True), experts.int()

    def _code_of_block(self, rows: torch.Tensor) -> int | None:
        """Code of the plan (in a recomputation, the forward pass's plan) if the expert block runs it, else None.

        The block supports bf16 and plain MXFP8, with gradients handled by autograd.
        """
        if torch.compiler.is_compiling() or torch.is_autocast_enabled(rows.device.type):
            return None
        linears = (self.fc1, self.fc2)
        if any(fc.need_backward_dw() or fc.fuse_wgrad_accumulation for fc in linears):
            return None
        weights = [weight for fc in linears for weight in fc._weights]
        plain = all(type(weight) is nn.Parameter and weight.dtype == torch.bfloat16 for weight in weights)
        if not plain or rows.dtype != torch.bfloat16:
            return None
        code, _ = (fc._choose_plan_code() for fc in linears)  # each keeps its code for a recomputation
        in_blocks = all(size % BLOCK == 0 for fc in linears for size in (fc.in_features, fc.out_features))
        return code if code in _PRECISIONS and (code == plan.OFF or in_blocks) else None

    def _block(self, rows: torch.Tensor, offsets: torch.Tensor, code: int) -> torch.Tensor:
        """Expert outputs [R, H] bf16, not weighted."""
        precision = _PRECISIONS[code]
        if precision is None and isinstance(rows, MXTensor):
            rows = rows.dequantize(torch.bfloat16)
        w1, w2 = (_Together.apply(*fc._weights) for fc in (self.fc1, self.fc2))
        b1, b2 = (torch.stack(fc._biases) if fc.use_bias else None for fc in (self.fc1, self.fc2))
        settings = ExpertSettings(_IN_BLOCK[self.activation], precision)
        prepared = None if precision is None else self._copies()
        return expert_block(rows, None, w1, w2, b1, b2, prepared, offsets, None, settings)

    def _copies(self) -> PreparedWeights:
        """Kept quantised weights; during the capture of a CUDA graph, ones that every replay builds again."""
        weights = [weight for fc in (self.fc1, self.fc2) for weight in fc._weights]
        if weights[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return PreparedWeights("none")
        # The block sees one view of all weights, with the version counter of only one of them.
        made_of = [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in weights]
        if made_of != self._prepared_of:
            self._prepared.invalidate()
            self._prepared_of = made_of
        return self._prepared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] of x [..., H], in the layer's dtype. Collective, and so is its backward pass."""
        tokens = x.reshape(-1, x.shape[-1])
        weights, experts = self.route(tokens)
        rows, row_weights, desc = autograd.dispatch(self.layer, tokens.contiguous(), experts, weights)
        code = self._code_of_block(rows)
        if code is not None:
            out = self._block(rows, desc.expert_offsets, code)
            return autograd.combine(self.layer, out, desc, row_weights).view(x.shape)
        ends = desc.expert_offsets[1:]
        hidden = self._activate(self.fc1.forward_to_ends(rows, ends))
        out = self.fc2.forward_to_ends(hidden, ends)
        return autograd.combine(self.layer, out, desc, row_weights).view(x.shape)
