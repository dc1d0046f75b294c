"""Backward product of the experts for widths that the kernel does not take: pads operands with zeros."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from triton_ep.ops.activation import Activation
from triton_ep.ops.experts_backward import down_dgrad
from triton_ep.ops.row_scales import RowScaled

_UNIT = 8  # bf16 values in 16 bytes, the unit of the kernel's boxes


def down_dgrad_of_any_width(
    dy: torch.Tensor | RowScaled,
    w2: Any,
    pre: torch.Tensor,
    offs: torch.Tensor,
    *,
    activation: Activation,
    bias: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`down_dgrad` in bf16 for any H, F and address of w2; copies all operands unless both sizes are multiples of 8,
    and w2 unless it begins at a multiple of 16 bytes."""
    if isinstance(dy, RowScaled) or (dy.shape[1] % _UNIT == 0 and w2.shape[2] % _UNIT == 0):
        if isinstance(w2, torch.Tensor) and w2.data_ptr() % 16:  # a part of a larger buffer
            w2 = w2.clone()
        return down_dgrad(dy, w2, pre, offs, activation=activation, bias=bias, **options)
    hidden, ffn, halves = dy.shape[1], w2.shape[2], 2 if activation.gated else 1
    more_h, more_f = -hidden % _UNIT, -ffn % _UNIT
    dpre, act, of_weights = down_dgrad(
        pad(dy, (0, more_h)),
        pad(w2, (0, more_f, 0, more_h)),
        pad(pre.unflatten(1, (halves, ffn)), (0, more_f)).flatten(1),
        offs,
        activation=activation,
        bias=None if bias is None else pad(bias, (0, more_h)),
        **options,
    )
    dpre = dpre.unflatten(1, (halves, ffn + more_f))[..., :ffn].flatten(1)
    return dpre, act[:, :ffn].contiguous(), of_weights
