"""TransformerEngine's MXFP8: autocast, recipes, quantisers, modules and expert parallelism under its names.

    import triton_ep.integrations.te as te

    layer = te.GroupedLinear(8, 1024, 4096, bias=False, params_dtype=torch.bfloat16)
    with te.autocast(recipe=te.MXFP8BlockScaling()):
        y = layer(x, m_splits)

TransformerEngine itself is not needed. It runs MXFP8 only on compute capability 10.x; this package runs it on every
device, emulated where tensor cores do not support MX scales. docs/how-to/transformer-engine.md has a table of names and
differences.
"""

from typing import NoReturn

from triton_ep.integrations.te.ep import (
    EpBuffer,
    EpStateError,
    ep_bootstrap,
    ep_combine,
    ep_dispatch,
    ep_finalize,
    ep_prepare,
    is_ep_bootstrapped,
)
from triton_ep.integrations.te.layouts import swizzle, unswizzle
from triton_ep.integrations.te.manager import FP8GlobalStateManager
from triton_ep.integrations.te.modules import GroupedLinear, Linear
from triton_ep.integrations.te.moe import EPMoE
from triton_ep.integrations.te.parts import ShapeError
from triton_ep.integrations.te.quantizer import MXFP8Quantizer
from triton_ep.integrations.te.recipe import (
    Format,
    MXFP8BlockScaling,
    Recipe,
    RecipeError,
    check_recipe_support,
    get_align_size_for_quantization,
)
from triton_ep.integrations.te.recipe_state import MXFP8BlockScalingRecipeState, RecipeState, get_fp8_te_dtype
from triton_ep.integrations.te.recompute import checkpoint, checkpoint_contexts
from triton_ep.integrations.te.regions import autocast, fp8_autocast, fp8_model_init, quantized_model_init
from triton_ep.integrations.te.state import AutocastState, get_default_fp8_recipe, get_default_recipe
from triton_ep.integrations.te.storage import DType, MXFP8TensorStorage, UsageError
from triton_ep.integrations.te.support import (
    UnsupportedDeviceError,
    check_fp8_block_scaling_support,
    check_fp8_support,
    check_mxfp8_support,
    check_nvfp4_support,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    mxfp8_mode,
)
from triton_ep.integrations.te.symmetric import is_symm_backed, release_symm_mem_pool, symm_mem_alloc
from triton_ep.integrations.te.tensor import MXFP8Tensor
from triton_ep.integrations.te.wgrad import NothingDelayedError

# TransformerEngine's base classes; here each has one implementation.
Quantizer = MXFP8Quantizer
QuantizedTensor = MXFP8Tensor
QuantizedTensorStorage = MXFP8TensorStorage

_NOT_HERE = {
    "QuantizerRole": "is for custom recipes; here MXFP8BlockScaling is the only recipe",
}


def __getattr__(name: str) -> NoReturn:
    """Names of TransformerEngine that are not available say why."""
    why = f"{name} {_NOT_HERE[name]}" if name in _NOT_HERE else f"no attribute {name!r}"
    raise AttributeError(f"module {__name__!r}: {why}.")


__all__ = [
    "AutocastState",
    "DType",
    "EPMoE",
    "EpBuffer",
    "EpStateError",
    "FP8GlobalStateManager",
    "Format",
    "GroupedLinear",
    "Linear",
    "MXFP8BlockScaling",
    "MXFP8BlockScalingRecipeState",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "NothingDelayedError",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "Recipe",
    "RecipeError",
    "RecipeState",
    "ShapeError",
    "UnsupportedDeviceError",
    "UsageError",
    "autocast",
    "check_fp8_block_scaling_support",
    "check_fp8_support",
    "check_mxfp8_support",
    "check_nvfp4_support",
    "check_recipe_support",
    "checkpoint",
    "checkpoint_contexts",
    "ep_bootstrap",
    "ep_combine",
    "ep_dispatch",
    "ep_finalize",
    "ep_prepare",
    "fp8_autocast",
    "fp8_model_init",
    "get_align_size_for_quantization",
    "get_default_fp8_recipe",
    "get_default_recipe",
    "get_fp8_te_dtype",
    "is_ep_bootstrapped",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "is_symm_backed",
    "mxfp8_mode",
    "quantized_model_init",
    "release_symm_mem_pool",
    "swizzle",
    "symm_mem_alloc",
    "unswizzle",
]
