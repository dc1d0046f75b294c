"""Plan: how a recipe computes a product. Its code, one integer, is an argument of torch.library ops and is stored by
modules and backward passes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triton_ep.integrations.te import state
from triton_ep.integrations.te.recipe import (
    BACKWARD_OVERRIDES,
    Format,
    MXFP8BlockScaling,
    Recipe,
    check_recipe_support,
)

OFF = 0
"""Code of products in high precision."""
ASK = -1
"""Code in a compiled graph: `autocast` decides the plan when the graph runs."""


@dataclass(frozen=True)
class Plan:
    """Which operands a product quantises, and how its gradients are computed.

    Attributes:
        hybrid: gradients are e5m2; everything else is e4m3.
        override: `backward_override` of the recipe.
        tiles: weights have one scale per 32 x 32 values.
    """

    hybrid: bool = False
    override: str | None = None
    tiles: bool = False

    @property
    def encoded(self) -> int:
        """Code of the plan, a positive integer; `Plan.decode` reverses it."""
        return 1 | self.hybrid << 1 | BACKWARD_OVERRIDES.index(self.override) << 2 | self.tiles << 4

    @staticmethod
    def decode(code: int) -> Plan | None:
        """Plan of a code; None for OFF."""
        if code == OFF:
            return None
        return Plan(bool(code >> 1 & 1), BACKWARD_OVERRIDES[code >> 2 & 3], bool(code >> 4 & 1))

    @property
    def grad_dtype(self) -> torch.dtype:
        """Format of gradients."""
        return torch.float8_e5m2 if self.hybrid else torch.float8_e4m3fn


def encode(enabled: bool, recipe: Recipe | None) -> int:
    """Code of the plan for a state of `autocast`.

    Raises:
        InputError: a recipe that this package does not run.
    """
    if not enabled:
        return OFF
    check_recipe_support(recipe)
    assert isinstance(recipe, MXFP8BlockScaling), "no other recipe is supported"
    return Plan(recipe.fp8_format == Format.HYBRID, recipe.backward_override, recipe.enable_2d_quantization).encoded


def current_plan_code() -> int:
    """Plan code of the innermost region of this context."""
    now = state.current_state()
    return encode(now.fp8_enabled, now.fp8_recipe)


def traced_plan_code() -> int:
    """Code in a graph that torch.compile traces: the plan's code if the region is traced as well, else ASK."""
    now = state.traced_state()
    return ASK if now is None else encode(now.fp8_enabled, now.fp8_recipe)
