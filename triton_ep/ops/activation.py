"""The activation between the two products of an expert, as callers name it (see kernels/experts/activation.py)."""

from __future__ import annotations

from math import isfinite
from numbers import Real
from typing import Any, NamedTuple

from triton_ep.errors import ConfigError
from triton_ep.runtime.plans.experts import KINDS


class Activation(NamedTuple):
    """act(g) * (u + up_offset) for the two halves g and u of the first product; without gate: act(g).

    Attributes:
        kind: "silu", "gelu" (by the error function), "relu" or "relu2" (the square of "relu").
        gated: the first product has a second half u.
        limit: clamps g from above and u from both sides; None: clamps neither.
        alpha: "silu" computes g * sigmoid(alpha * g).
        up_offset: added to u.
    """

    kind: str = "silu"
    gated: bool = True
    limit: float | None = None
    alpha: float = 1.0
    up_offset: float = 0.0


def check_activation(activation: Activation) -> None:
    """Raise ConfigError for an activation that no kernel computes."""
    kind, gated, limit, alpha, up_offset = activation
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"Activation.kind is {kind!r}, choose from {', '.join(KINDS)}.")
    numbers: dict[str, Any] = {"limit": 0.0 if limit is None else limit, "alpha": alpha, "up_offset": up_offset}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            wanted = "a number or None" if name == "limit" else "a number"
            raise ConfigError(f"Activation.{name} must be {wanted}, got {value!r}.")
    if limit is not None and not (isfinite(limit) and limit > 0):
        raise ConfigError(f"Activation.limit is {limit}; it must be positive and finite, or None.")
    if not isfinite(alpha) or (alpha != 1.0 and kind != "silu"):
        raise ConfigError(f"Activation.alpha is {alpha}; it must be finite, and 1.0 for {kind!r}.")
    if not isfinite(up_offset) or (up_offset != 0.0 and not gated):
        raise ConfigError(f"Activation.up_offset is {up_offset}; it must be finite, and 0.0 where nothing is gated.")
