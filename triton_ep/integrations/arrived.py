"""Experts on received rows, with the weights of a framework: triton_ep.nn's expert block without an exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from triton_ep.distributed.dtensors import local_part
from triton_ep.errors import ConfigError, InputError
from triton_ep.mx.tensor import MXTensor
from triton_ep.nn.expert_block import ExpertSettings, expert_block
from triton_ep.nn.joined import Joined
from triton_ep.nn.prepared import PreparedWeights
from triton_ep.ops.activation import Activation, check_activation

RECIPES = {"bf16": None, "mxfp8": "default", "mxfp8-fast": "fast", "mxfp8-exact": "exact"}
"""Recipe -> precision of the products (triton_ep.nn.expert_block)."""


class ArrivedExperts:
    """The experts of one MoE layer. Keeps quantised copies of its weights, and gate and up joined into one weight.

    Arguments:
        recipe: one of RECIPES.
        activation: activation between the two products.
        prepared: which quantised copies to keep, as in `triton_ep.nn.SwiGLUExperts`.

    Raises:
        ConfigError: another recipe or activation.
    """

    def __init__(self, recipe: str = "bf16", activation: Activation | None = None, prepared: str = "both") -> None:
        if not isinstance(recipe, str) or recipe not in RECIPES:
            raise ConfigError(f"recipe is {recipe!r}; choose one of {', '.join(RECIPES)}.")
        activation = Activation() if activation is None else activation
        check_activation(activation)
        precision = RECIPES[recipe]
        self.settings = ExpertSettings(activation, precision)
        self._prepared = None if precision is None else PreparedWeights(prepared, precision)
        self._joined = Joined()

    def invalidate(self) -> None:
        """Drop the kept copies. Call it when weights have changed and torch's version counters do not show it."""
        self._joined.invalidate()
        if self._prepared is not None:
            self._prepared.invalidate()

    def __call__(
        self,
        rows: torch.Tensor,
        counts: torch.Tensor,
        w13: torch.Tensor | Sequence[torch.Tensor],
        w2: torch.Tensor,
        *,
        row_weights: torch.Tensor | None = None,
        biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Apply the experts to rows [R, H], ordered by expert; returns [R, H] bf16. Differentiable.

        Arguments:
            rows: bf16, or an `MXTensor` with an MXFP8 recipe. Rows past the last expert's are undefined, in the result
                as well.
            counts: [e] integers on the rows' device, rows of each expert, padding included; the host does not read it.
            w13: [e, 2F, H], gate rows before up rows ([e, F, H] for an activation without a gate); or gate and up,
                [e, F, H] each. w2: [e, H, F]. bf16 or float32; of DTensors, this rank's shards are used.
            row_weights: [R] float32, multiply each row's result. biases: [e, 2F] and [e, H].

        Raises:
            InputError: operands that do not fit each other.
        """
        for name, given in (("rows", rows), ("counts", counts)):
            if not isinstance(given, torch.Tensor):
                raise InputError(f"{name} must be a tensor, got {type(given).__name__}.")
        if counts.dim() != 1 or counts.dtype.is_floating_point or counts.device != rows.device:
            raise InputError(
                f"counts must be integers [e] on {rows.device}, got {list(counts.shape)} {counts.dtype} on "
                f"{counts.device}."
            )
        offs = torch.nn.functional.pad(torch.cumsum(counts, 0, dtype=torch.int32), (1, 0))
        parts = [local_part(each) for each in ([w13] if isinstance(w13, torch.Tensor) else w13)]
        weight = parts[0] if len(parts) == 1 else self._joined(*parts)
        down = local_part(w2)
        if self._prepared is None:
            weight, down = weight.to(torch.bfloat16), down.to(torch.bfloat16)
        b13, b2 = (None, None) if biases is None else biases
        x: Any = rows if isinstance(rows, MXTensor) else rows.to(torch.bfloat16)
        if row_weights is not None:
            row_weights = row_weights.float().contiguous()
        return expert_block(x, row_weights, weight, down, b13, b2, self._prepared, offs, None, self.settings)
