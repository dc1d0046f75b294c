"""RecipeState: from a recipe to quantisers, by pass."""

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
    """What a recipe needs per module and pass. MXFP8 needs nothing that lasts: this makes quantisers.

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
        """State for a recipe.

        Arguments:
            mode: "forward" or "backward".
            num_quantizers: how many there will be: 3 per product forward (input, weight, output), 2 backward
                (gradients of output and input).
            device: accepted; there are no tensors.
            roles: what each quantiser is for, such as "linear_weight"; "weight" in it makes it one of weights.

        Raises:
            ValueError: a recipe without a state here, or a number of roles that is not that of quantisers.
            RuntimeError: another mode.
        """
        if not isinstance(recipe, MXFP8BlockScaling):
            raise InputError(f"{type(recipe).__name__} is not supported; there is MXFP8BlockScaling.")
        return MXFP8BlockScalingRecipeState(
            recipe, mode=mode, num_quantizers=num_quantizers, device=device, roles=roles
        )

    @abstractmethod
    def make_quantizers(self) -> list[Any]:
        """Fresh quantisers."""


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
        """`num_quantizers` of them; those of weights with tiles if the recipe says so, forward only."""
        tiles = isinstance(self.recipe, MXFP8BlockScaling) and self.recipe.enable_2d_quantization
        roles = self.roles if self.roles is not None else ("",) * self.num_quantizers
        return [
            MXFP8Quantizer(self.dtype, with_2d_quantization=tiles and self.mode == "forward" and "weight" in role)
            for role in roles
        ]
