"""RecipeState: creates the quantisers of a recipe for the forward or the backward pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from triton_ep.errors import InputError
from triton_ep.integrations.te.quantizer import MXFP8Quantizer
from triton_ep.integrations.te.recipe import Format, MXFP8BlockScaling, Recipe


def get_fp8_te_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> torch.dtype:
    """Format of elements in the forward (`fprop_tensor`) or the backward pass."""
    hybrid = isinstance(fp8_recipe, MXFP8BlockScaling) and fp8_recipe.fp8_format == Format.HYBRID
    return torch.float8_e5m2 if hybrid and not fprop_tensor else torch.float8_e4m3fn


class RecipeState(ABC):
    """State of a recipe per module and pass. MXFP8 has no lasting state: this only creates quantisers.

    Attributes:
        recipe, mode, num_quantizers: as given to `create`.
        dtype: format of elements.
    """

    recipe: Recipe
    mode: str
    num_quantizers: int
    dtype: torch.dtype

    @staticmethod
    def create(
        recipe: Recipe,
        *,
        mode: str,
        num_quantizers: int = 1,
        device: torch.device | None = None,
        roles: Sequence[str] | None = None,
    ) -> RecipeState:
        """Create the state of a recipe.

        Arguments:
            mode: "forward" or "backward".
            num_quantizers: 3 per product forward (input, weight, output), 2 backward (gradients of output and input).
            device: accepted without effect; the state holds no tensors.
            roles: role of each quantiser, such as "linear_weight"; a role with "weight" in it is for weights.

        Raises:
            ValueError: the recipe has no state here, or the number of roles is not `num_quantizers`.
            RuntimeError: another mode.
        """
        if not isinstance(recipe, MXFP8BlockScaling):
            raise InputError(f"{type(recipe).__name__} is not supported; use MXFP8BlockScaling.")
        return MXFP8BlockScalingRecipeState(
            recipe, mode=mode, num_quantizers=num_quantizers, device=device, roles=roles
        )

    @abstractmethod
    def make_quantizers(self) -> list[Any]:
        """Create new quantisers."""


class MXFP8BlockScalingRecipeState(RecipeState):
    """State of MXFP8BlockScaling; see `RecipeState.create`."""

    def __init__(
        self,
        recipe: MXFP8BlockScaling,
        *,
        mode: str,
        num_quantizers: int = 1,
        device: torch.device | None = None,
        roles: Sequence[str] | None = None,
    ) -> None:
        if roles is not None and len(roles) != num_quantizers:
            raise InputError(f"there are {len(roles)} roles for {num_quantizers} quantisers.")
        if mode not in ("forward", "backward"):
            raise RuntimeError(f"Unexpected recipe mode ({mode})")
        self.recipe, self.mode, self.num_quantizers, self.roles = recipe, mode, num_quantizers, roles
        self.device = device
        self.dtype = get_fp8_te_dtype(recipe, mode == "forward")

    def make_quantizers(self) -> list[MXFP8Quantizer]:
        """Create `num_quantizers` quantisers; forward ones for weights use tiles if the recipe says so."""
        tiles = isinstance(self.recipe, MXFP8BlockScaling) and self.recipe.enable_2d_quantization
        roles = self.roles if self.roles is not None else ("",) * self.num_quantizers
        return [
            MXFP8Quantizer(self.dtype, with_2d_quantization=tiles and self.mode == "forward" and "weight" in role)
            for role in roles
        ]
