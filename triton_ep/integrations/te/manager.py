"""FP8GlobalStateManager: queries of the state that `autocast` and `quantized_model_init` set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from triton_ep.integrations.te import state, support
from triton_ep.integrations.te.recipe import Recipe


class _Attributes(type):
    """TransformerEngine's class attributes, as views of the current state."""

    @property
    def FP8_ENABLED(cls) -> bool:
        return state.current_state().fp8_enabled

    @property
    def FP8_CALIBRATION(cls) -> bool:
        return state.current_state().fp8_calibration

    @property
    def FP8_RECIPE(cls) -> Recipe | None:
        return state.current_state().fp8_recipe

    @property
    def FP8_DISTRIBUTED_GROUP(cls) -> Any:
        return state.current_state().fp8_group

    @property
    def FP8_PARAMETERS(cls) -> bool:
        return state.current_parameters().enabled

    @property
    def HIGH_PRECISION_INIT_VAL(cls) -> bool:
        return state.current_parameters().preserve

    @property
    def IS_FIRST_FP8_MODULE(cls) -> bool:
        return state.current_state().is_first_fp8_module

    @property
    def FP8_GRAPH_CAPTURING(cls) -> bool:
        return state.current_state().fp8_graph_capturing

    @property
    def AUTOCAST_DEPTH(cls) -> int:
        return len(state.current_stack().entries)


class FP8GlobalStateManager(metaclass=_Attributes):
    """Queries of the state of this thread or task; class methods only.

    Attributes, read only: FP8_ENABLED, FP8_CALIBRATION, FP8_RECIPE, FP8_DISTRIBUTED_GROUP, FP8_PARAMETERS,
    HIGH_PRECISION_INIT_VAL, IS_FIRST_FP8_MODULE, FP8_GRAPH_CAPTURING, and AUTOCAST_DEPTH, the number of open regions.
    """

    @classmethod
    def reset(cls) -> None:
        """Forget all open regions of this context."""
        state.set_stack(state.Stack())
        state.set_parameters(state.Parameters())

    @staticmethod
    def get_meta_tensor_key(forward: bool = True) -> str:
        """The key of a direction in the scaling state of a module."""
        return "scaling_fwd" if forward else "scaling_bwd"

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Whether modules quantise."""
        return state.current_state().fp8_enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """Whether the innermost region was opened with calibrating=True."""
        return state.current_state().fp8_calibration

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Whether modules created now store quantised weights."""
        return state.current_parameters().enabled

    @classmethod
    def with_high_precision_init_val(cls) -> bool:
        """Whether such modules keep the initial values as well."""
        return state.current_parameters().preserve

    @classmethod
    def get_fp8_parameters_recipe(cls) -> Recipe:
        """Recipe for weights that are stored quantised."""
        return state.current_parameters().recipe or state.get_default_fp8_recipe()

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        """Whether the innermost region was opened for a CUDA graph capture."""
        return state.current_state().fp8_graph_capturing

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """True at the first call inside an outermost region."""
        stack = state.current_stack()
        first = stack.state.is_first_fp8_module
        if first:
            outer = (replace(entry, state=replace(entry.state, is_first_fp8_module=False)) for entry in stack.entries)
            state.set_stack(state.Stack(stack.base, tuple(outer)))
        return first

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """Recipe of the innermost region, or the default one."""
        return state.current_state().fp8_recipe or state.get_default_fp8_recipe()

    @classmethod
    def get_fp8_group(cls) -> Any:
        """`amax_reduction_group` of the innermost region."""
        return state.current_state().fp8_group

    @classmethod
    def get_autocast_state(cls) -> state.AutocastState:
        """The six values that `autocast` restores, for `set_autocast_state`."""
        return state.current_state()

    @classmethod
    def set_autocast_state(cls, fp8_state: state.AutocastState) -> None:
        """Restore the six values of `get_autocast_state`; the depth stays."""
        state.set_stack(state.current_stack().with_state(fp8_state))

    @classmethod
    def autocast_enter(
        cls,
        enabled: bool = False,
        calibrating: bool = False,
        fp8_recipe: Recipe | None = None,
        fp8_group: Any = None,
        _graph: bool = False,
        *,
        strict: bool = False,
    ) -> object:
        """Open a region, as `autocast.__enter__` does, and return its key.

        Raises:
            InputError, UnsupportedDeviceError: before anything changes.
        """
        return state.enter_region(enabled, calibrating, fp8_recipe, fp8_group, _graph, strict)

    @classmethod
    def autocast_exit(cls, enabled: bool = True, _graph: bool = False) -> None:
        """Close the innermost region."""
        stack = state.current_stack()
        if stack.entries:
            state.leave_region(stack.entries[-1].key)

    @classmethod
    def get_unique_autocast_key(cls, recipe: Recipe | None = None, group: Any = None) -> str:
        """A string that is equal for equal recipes and the same group."""
        return f"{recipe!r}:{group!r}"

    @classmethod
    def is_mxfp8_available(cls) -> tuple[bool, str]:
        """As `check_mxfp8_support`."""
        return support.check_mxfp8_support()

    @classmethod
    def is_fp8_available(cls) -> tuple[bool, str]:
        """False, and why."""
        return support.check_fp8_support()

    @classmethod
    def is_fp8_block_scaling_available(cls) -> tuple[bool, str]:
        """False, and why."""
        return support.check_fp8_block_scaling_support()

    @classmethod
    def is_nvfp4_available(cls) -> tuple[bool, str]:
        """False, and why."""
        return support.check_nvfp4_support()
