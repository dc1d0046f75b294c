"""Recipes: which 8-bit formats a module uses, forward and backward.

Names, fields and defaults are those of `transformer_engine.common.recipe`. The only supported recipe is
`MXFP8BlockScaling`; `Recipe` is its base class.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch

from triton_ep.config import read_environment
from triton_ep.errors import ConfigError, InputError


class _Largest(NamedTuple):
    """Largest values of a format in the forward and in the backward pass."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """8-bit (and 4-bit) formats by pass; HYBRID is E4M3 forward and E5M2 for gradients."""

    E2M1 = _Largest(6, 6)
    E4M3 = _Largest(448, 448)
    E5M2 = _Largest(57344, 57344)
    HYBRID = _Largest(448, 57344)


BACKWARD_OVERRIDES = (None, "high_precision", "dequantized")


class RecipeError(ConfigError, AssertionError):
    """Invalid value of a recipe's field, where TransformerEngine has an assertion."""


class Recipe:
    """Base class of recipes; its queries depend on the class alone."""

    @classmethod
    def nvfp4(cls) -> bool:
        """Whether the recipe is NVFP4 block scaling."""
        return False

    @classmethod
    def mxfp8(cls) -> bool:
        """Whether the recipe is MXFP8 block scaling."""
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def delayed(cls) -> bool:
        """Whether scales come from earlier steps."""
        return False

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Whether each tensor has one scale, computed from its current values."""
        return False

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Whether each tensor has one scale."""
        return cls.delayed() or cls.float8_current_scaling()

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Whether each block has one float32 scale."""
        return False

    @classmethod
    def custom(cls) -> bool:
        """Whether a function of the user creates the quantisers."""
        return False


@torch.compiler.assume_constant_result
def _override_of_environment() -> str | None:
    return read_environment().backward_override


@dataclass(repr=False)
class MXFP8BlockScaling(Recipe):
    """One E8M0 scale per 32 consecutive values, computed anew for every tensor.

    A recipe may be changed between two calls, also inside `autocast`: modules read it in every forward pass. Two
    recipes with equal fields are equal.

    Attributes:
        margin: accepted; scales do not depend on it.
        fp8_format: Format.E4M3, or Format.HYBRID with E5M2 gradients.
        fp8_dpa, fp8_mha: attention in 8 bits, which is not supported; must be False.
        backward_override: None: gradients are computed from quantised operands. "high_precision": from the operands
            before quantisation. "dequantized": from the values of the forward pass's quantised operands and the
            unquantised gradient. Default: NVTE_BACKWARD_OVERRIDE in the environment, else None.
        enable_2d_quantization: one scale per 32 x 32 values of weights, so that both orientations have the same values.

    Raises:
        RecipeError: an invalid value of a field, also when the field is set later.
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = field(default_factory=_override_of_environment)
    enable_2d_quantization: bool = False

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "fp8_format":
            if value == Format.E5M2:
                raise RecipeError("Pure E5M2 training is not supported.")
            if value not in (Format.E4M3, Format.HYBRID):
                raise RecipeError(f"fp8_format is {value!r}; choose Format.E4M3 or Format.HYBRID.")
        elif name in ("fp8_dpa", "fp8_mha") and value:
            raise RecipeError(f"{name}=True requests attention in 8 bits, which this package does not have.")
        elif name == "backward_override" and value not in BACKWARD_OVERRIDES:
            raise RecipeError(
                f"backward_override, or NVTE_BACKWARD_OVERRIDE, is {value!r}; it must be None or one of: "
                "'high_precision', 'dequantized'."
            )
        elif name == "margin" and (not isinstance(value, int) or isinstance(value, bool)):
            raise RecipeError(f"margin is {value!r}; it must be an integer.")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return (
            f"recipe_type={type(self).__name__}, margin={self.margin}, format={self.fp8_format.name}, "
            f"backward_override={self.backward_override}, enable_2d_quantization={self.enable_2d_quantization}"
        )


def check_recipe_support(recipe: Recipe | None) -> None:
    """Refuse a recipe that this package does not run.

    Raises:
        InputError: the recipe is not MXFP8BlockScaling.
    """
    if not isinstance(recipe, MXFP8BlockScaling):
        raise InputError(f"recipe is {recipe!r:.80}; this package runs MXFP8BlockScaling.")


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """Row multiple that operands of a recipe need: 32 for MXFP8, 16 otherwise."""
    return 32 if recipe.mxfp8() else 16
