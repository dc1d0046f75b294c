"""`autocast`, `quantized_model_init`, and what they have set: one state per thread and per async task.

TransformerEngine keeps this state in one object per process, which threads share. Here it is in context variables. A
region that ends takes out its own entry and nothing else. So regions of generators, which share the context of their
callers, may end in any order, and when all have ended the state is what it was before.

torch.compile cannot read a context variable. What is traced there knows the regions entered inside the traced function
(`traced_state`); of those outside it, it asks when it runs (triton_ep/integrations/te/_function.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch

from triton_ep.errors import InputError
from triton_ep.integrations.te import support
from triton_ep.integrations.te.recipe import MXFP8BlockScaling, Recipe


@dataclass(frozen=True)
class AutocastState:
    """What `autocast` sets and restores.

    Attributes:
        fp8_enabled, fp8_calibration, fp8_recipe, fp8_group: arguments of the innermost `autocast`.
        is_first_fp8_module: no module has asked since the outermost region began.
        fp8_graph_capturing: the region is part of a CUDA graph capture.
    """

    fp8_enabled: bool = False
    fp8_calibration: bool = False
    fp8_recipe: Recipe | None = None
    fp8_group: Any = None
    is_first_fp8_module: bool = False
    fp8_graph_capturing: bool = False


@dataclass(frozen=True)
class _Entry:
    """One open region; `key` tells it from all others."""

    key: object
    state: AutocastState


@dataclass(frozen=True)
class _Stack:
    """Open regions of a context, innermost last, and the state below them."""

    base: AutocastState = AutocastState()
    entries: tuple[_Entry, ...] = ()

    @property
    def state(self) -> AutocastState:
        return self.entries[-1].state if self.entries else self.base

    def with_state(self, state: AutocastState) -> _Stack:
        if not self.entries:
            return _Stack(state)
        return _Stack(self.base, (*self.entries[:-1], replace(self.entries[-1], state=state)))


@dataclass(frozen=True)
class _Parameters:
    """What `quantized_model_init` sets."""

    enabled: bool = False
    recipe: Recipe | None = None
    preserve: bool = False


_stack: ContextVar[_Stack] = ContextVar("triton_ep_te_autocast")
_parameters: ContextVar[_Parameters] = ContextVar("triton_ep_te_parameters")
_NOTHING = _Stack()
_NO_PARAMETERS = _Parameters()


def _current() -> _Stack:
    return _stack.get(_NOTHING)


class _Traced:
    """Regions that torch.compile is inside of while it traces; empty whenever nothing is traced."""

    def __init__(self) -> None:
        self.states: tuple[AutocastState, ...] = ()


_traced = _Traced()


def traced_state() -> AutocastState | None:
    """While torch.compile traces: state of the innermost region inside the traced function; None outside of all."""
    return _traced.states[-1] if _traced.states else None


def current_state() -> AutocastState:
    """State of the innermost open region of this context."""
    return _current().state


def _check_recipe(recipe: Recipe | None, strict: bool) -> None:
    if recipe is not None and not isinstance(recipe, Recipe):
        raise InputError(f"recipe is {recipe!r:.80}; it must be a Recipe such as MXFP8BlockScaling(), or None.")
    if recipe is not None and not recipe.mxfp8():
        raise InputError(
            f"recipe is a {type(recipe).__name__}; this package runs MXFP8BlockScaling. Pass that, or enabled=False."
        )
    if strict:
        support.mxfp8_mode(strict=True)


def get_default_fp8_recipe() -> Recipe:
    """What `autocast` takes for recipe=None."""
    return MXFP8BlockScaling()


get_default_recipe = get_default_fp8_recipe


class autocast:
    """Region in which the modules of this package quantise.

    Regions nest to any depth; the innermost decides. An instance may be used again when its region has ended.

    Arguments:
        enabled: False switches quantisation off inside.
        calibrating: accepted; MXFP8 has nothing to calibrate.
        recipe: None: MXFP8BlockScaling(). Changes to it take effect with the next forward pass.
        amax_reduction_group: accepted; every block's scale follows from the block alone.
        strict: refuse devices on which MXFP8 is emulated.

    Raises, from `__enter__` and before anything changes:
        RuntimeError: the instance's region has not ended.
        InputError: a recipe that is none, or another than MXFP8BlockScaling.
        UnsupportedDeviceError: with strict.
    """

    __slots__ = (
        "_entry",
        "_graph",
        "amax_reduction_group",
        "calibrating",
        "enabled",
        "recipe",
        "strict",
    )

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
        *,
        strict: bool = False,
    ) -> None:
        self.enabled = enabled
        self.calibrating = calibrating
        self.recipe = recipe
        self.amax_reduction_group = amax_reduction_group
        self.strict = strict
        self._graph = _graph
        self._entry: object | None = None

    def __enter__(self) -> None:
        if torch.compiler.is_compiling():
            self._enter_traced()
            return
        if self._entry is not None:
            raise RuntimeError(
                "autocast: this instance cannot be entered more than once concurrently, and its region has not ended. "
                "Make another instance."
            )
        self._entry = FP8GlobalStateManager.autocast_enter(
            self.enabled, self.calibrating, self.recipe, self.amax_reduction_group, self._graph, strict=self.strict
        )

    def __exit__(self, *exc: object) -> None:
        if torch.compiler.is_compiling():
            _traced.states = _traced.states[:-1]
            return
        entry, self._entry = self._entry, None
        if entry is not None:
            _leave(entry)

    def _enter_traced(self) -> None:
        if self.enabled:
            _check_recipe(self.recipe, self.strict)
        recipe = self.recipe
        if recipe is None and self.enabled:
            recipe = MXFP8BlockScaling()
        state = AutocastState(self.enabled, self.calibrating, recipe, self.amax_reduction_group, False, self._graph)
        _traced.states = (*_traced.states, state)


def _leave(key: object) -> None:
    """Take out one region, wherever it is; none if it was opened in another context."""
    stack = _current()
    _stack.set(_Stack(stack.base, tuple(entry for entry in stack.entries if entry.key is not key)))


class _Attributes(type):
    """TransformerEngine's class attributes, as views of the present state."""

    @property
    def FP8_ENABLED(cls) -> bool:
        return current_state().fp8_enabled

    @property
    def FP8_CALIBRATION(cls) -> bool:
        return current_state().fp8_calibration

    @property
    def FP8_RECIPE(cls) -> Recipe | None:
        return current_state().fp8_recipe

    @property
    def FP8_DISTRIBUTED_GROUP(cls) -> Any:
        return current_state().fp8_group

    @property
    def FP8_PARAMETERS(cls) -> bool:
        return _parameters.get(_NO_PARAMETERS).enabled

    @property
    def HIGH_PRECISION_INIT_VAL(cls) -> bool:
        return _parameters.get(_NO_PARAMETERS).preserve

    @property
    def IS_FIRST_FP8_MODULE(cls) -> bool:
        return current_state().is_first_fp8_module

    @property
    def FP8_GRAPH_CAPTURING(cls) -> bool:
        return current_state().fp8_graph_capturing

    @property
    def AUTOCAST_DEPTH(cls) -> int:
        return len(_current().entries)


class FP8GlobalStateManager(metaclass=_Attributes):
    """Questions about the state of this thread or task; class methods only.

    Attributes, read only: FP8_ENABLED, FP8_CALIBRATION, FP8_RECIPE, FP8_DISTRIBUTED_GROUP, FP8_PARAMETERS,
    HIGH_PRECISION_INIT_VAL, IS_FIRST_FP8_MODULE, FP8_GRAPH_CAPTURING, and AUTOCAST_DEPTH, the open regions.
    """

    @classmethod
    def reset(cls) -> None:
        """Forget all open regions of this context."""
        _stack.set(_NOTHING)
        _parameters.set(_NO_PARAMETERS)

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Whether modules quantise."""
        return current_state().fp8_enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """Whether the innermost region was opened with calibrating=True."""
        return current_state().fp8_calibration

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Whether modules made now store quantised weights."""
        return _parameters.get(_NO_PARAMETERS).enabled

    @classmethod
    def with_high_precision_init_val(cls) -> bool:
        """Whether such modules keep the initial values as well."""
        return _parameters.get(_NO_PARAMETERS).preserve

    @classmethod
    def get_fp8_parameters_recipe(cls) -> Recipe:
        """Recipe of weights that are stored quantised."""
        return _parameters.get(_NO_PARAMETERS).recipe or get_default_fp8_recipe()

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        """Whether the innermost region was opened for a CUDA graph capture."""
        return current_state().fp8_graph_capturing

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """True the first time it is asked inside an outermost region."""
        stack = _current()
        first = stack.state.is_first_fp8_module
        if first:
            outer = (replace(entry, state=replace(entry.state, is_first_fp8_module=False)) for entry in stack.entries)
            _stack.set(_Stack(stack.base, tuple(outer)))
        return first

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """Recipe of the innermost region, or the default one."""
        return current_state().fp8_recipe or get_default_fp8_recipe()

    @classmethod
    def get_fp8_group(cls) -> Any:
        """`amax_reduction_group` of the innermost region."""
        return current_state().fp8_group

    @classmethod
    def get_autocast_state(cls) -> AutocastState:
        """The six values that `autocast` restores, for `set_autocast_state`."""
        return current_state()

    @classmethod
    def set_autocast_state(cls, fp8_state: AutocastState) -> None:
        """Put the six values of `get_autocast_state` in place of the present ones; the depth stays."""
        _stack.set(_current().with_state(fp8_state))

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
        """Open a region; what `autocast.__enter__` does. Returns the key of the region.

        Raises:
            InputError, UnsupportedDeviceError: before anything changes.
        """
        if enabled:
            _check_recipe(fp8_recipe, strict)
            support.warn_if_emulated()
        recipe = get_default_fp8_recipe() if fp8_recipe is None and enabled else fp8_recipe
        stack = _current()
        first = stack.state.is_first_fp8_module if stack.entries else True
        state = AutocastState(enabled, calibrating, recipe, fp8_group, first, _graph)
        key = object()
        _stack.set(_Stack(stack.base, (*stack.entries, _Entry(key, state))))
        return key

    @classmethod
    def autocast_exit(cls, enabled: bool = True, _graph: bool = False) -> None:
        """Close the innermost region."""
        stack = _current()
        if stack.entries:
            _leave(stack.entries[-1].key)

    @classmethod
    def get_unique_autocast_key(cls, recipe: Recipe | None = None, group: Any = None) -> str:
        """A string that is the same for equal recipes and the same group."""
        return f"{recipe!r}:{group!r}"

    @classmethod
    def is_mxfp8_available(cls) -> tuple[bool, str]:
        """As `check_mxfp8_support`."""
        return support.check_mxfp8_support()

    @classmethod
    def is_fp8_available(cls) -> tuple[bool, str]:
        """Per-tensor scaling, which this package does not have."""
        return False, "triton_ep.integrations.te has no FP8 recipe with one scale per tensor; use MXFP8BlockScaling."

    @classmethod
    def is_fp8_block_scaling_available(cls) -> tuple[bool, str]:
        """float32 scales per block, which this package does not have."""
        return False, "triton_ep.integrations.te has no FP8 recipe with float32 block scales; use MXFP8BlockScaling."

    @classmethod
    def is_nvfp4_available(cls) -> tuple[bool, str]:
        """NVFP4, which this package does not have as a recipe."""
        return False, "triton_ep.integrations.te has no NVFP4 recipe; use MXFP8BlockScaling."


@contextmanager
def restored(state: AutocastState) -> Iterator[None]:
    """Region with a state of before, for a recomputation; the state below it comes back at its end."""
    stack = _current()
    key = object()
    _stack.set(_Stack(stack.base, (*stack.entries, _Entry(key, state))))
    token = _explicit.set(True)
    try:
        yield
    finally:
        _leave(key)
        _explicit.reset(token)


_explicit: ContextVar[bool] = ContextVar("triton_ep_te_restored")


def is_restored() -> bool:
    """Whether a recomputation has brought its state along (`restored`)."""
    return _explicit.get(False)


@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Region in which modules are made with quantised weights, which take about half the memory of bf16.

    Arguments:
        enabled: False: with weights as ever, inside a region that quantises.
        recipe: None: MXFP8BlockScaling().
        preserve_high_precision_init_val: keep the initial values on the CPU: `weight.get_high_precision_init_val()`,
            until `weight.clear_high_precision_init_val()`.

    Raises:
        InputError: a recipe that is none, or another than MXFP8BlockScaling; before anything changes.
    """
    if enabled:
        _check_recipe(recipe, strict=False)
    before = _parameters.get(_NO_PARAMETERS)
    _parameters.set(_Parameters(enabled, recipe or get_default_fp8_recipe(), preserve_high_precision_init_val))
    try:
        yield
    finally:
        _parameters.set(before)
