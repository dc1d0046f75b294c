"""State that `autocast` and `quantized_model_init` set: one per thread and per async task.

TransformerEngine keeps this state in one object per process, which threads share. Here it is in context variables. A
region that ends removes only its own entry. So regions of generators, which share the context of their callers, may end
in any order; when all have ended, the initial state is back.

torch.compile cannot read a context variable. A traced function knows the regions entered inside it (`traced_state`);
the state of regions outside is read when the graph runs (triton_ep/integrations/te/function.py).
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
    """State that `autocast` sets and restores.

    Attributes:
        fp8_enabled, fp8_calibration, fp8_recipe, fp8_group: arguments of the innermost `autocast`.
        is_first_fp8_module: no module has queried this since the outermost region began.
        fp8_graph_capturing: the region is part of a CUDA graph capture.
    """

    fp8_enabled: bool = False
    fp8_calibration: bool = False
    fp8_recipe: Recipe | None = None
    fp8_group: Any = None
    is_first_fp8_module: bool = False
    fp8_graph_capturing: bool = False


@dataclass(frozen=True)
class Entry:
    """One open region; `key` is unique, `task` is the backward pass that opened it, or -1."""

    key: object
    state: AutocastState
    task: int = -1


@dataclass(frozen=True)
class Stack:
    """Open regions of a context, innermost last, and the state below them."""

    base: AutocastState = AutocastState()
    entries: tuple[Entry, ...] = ()

    @property
    def state(self) -> AutocastState:
        """State of the innermost region."""
        return self.entries[-1].state if self.entries else self.base

    def with_state(self, state: AutocastState) -> Stack:
        """Copy of the stack with another state for the innermost region."""
        if not self.entries:
            return Stack(state)
        return Stack(self.base, (*self.entries[:-1], replace(self.entries[-1], state=state)))


@dataclass(frozen=True)
class Parameters:
    """State that `quantized_model_init` sets."""

    enabled: bool = False
    recipe: Recipe | None = None
    preserve: bool = False


_stack: ContextVar[Stack] = ContextVar("triton_ep_te_autocast")
_parameters: ContextVar[Parameters] = ContextVar("triton_ep_te_parameters")
_NOTHING = Stack()
_NO_PARAMETERS = Parameters()


def current_stack() -> Stack:
    """Open regions of this context."""
    return _stack.get(_NOTHING)


def set_stack(stack: Stack) -> None:
    """Replace the open regions of this context."""
    _stack.set(stack)


def current_parameters() -> Parameters:
    """State of `quantized_model_init` in this context."""
    return _parameters.get(_NO_PARAMETERS)


def set_parameters(parameters: Parameters) -> None:
    """Replace the state of `quantized_model_init` in this context."""
    _parameters.set(parameters)


def current_state() -> AutocastState:
    """State of the innermost open region of this context."""
    return current_stack().state


def check_recipe(recipe: Recipe | None, strict: bool) -> None:
    """Refuse a recipe that this package does not run and, with strict, a device that emulates it."""
    if recipe is not None and not isinstance(recipe, Recipe):
        raise InputError(f"recipe is {recipe!r:.80}; it must be a Recipe such as MXFP8BlockScaling(), or None.")
    if recipe is not None and not recipe.mxfp8():
        raise InputError(
            f"recipe is a {type(recipe).__name__}; this package runs MXFP8BlockScaling. Pass that, or enabled=False."
        )
    if strict:
        support.mxfp8_mode(strict=True)


def get_default_fp8_recipe() -> Recipe:
    """Recipe that `autocast` uses for recipe=None."""
    return MXFP8BlockScaling()


get_default_recipe = get_default_fp8_recipe


def backward_task() -> int:
    """Number of the backward pass that this thread runs; -1 outside a backward pass."""
    return int(torch._C._current_graph_task_id())


def is_own_recomputation() -> bool:
    """Whether a forward pass now would recompute for a backward pass that has opened no region itself."""
    task, entries = backward_task(), current_stack().entries
    return task != -1 and (not entries or entries[-1].task != task)


def enter_region(
    enabled: bool, calibrating: bool, recipe: Recipe | None, group: Any, graph: bool, strict: bool
) -> object:
    """Open a region and return its key.

    Raises:
        InputError, UnsupportedDeviceError: before anything changes.
    """
    if enabled:
        check_recipe(recipe, strict)
        support.warn_if_emulated()
    stack = current_stack()
    first = stack.state.is_first_fp8_module if stack.entries else True
    in_use = get_default_fp8_recipe() if recipe is None and enabled else recipe
    state = AutocastState(enabled, calibrating, in_use, group, first, graph)
    key = object()
    set_stack(Stack(stack.base, (*stack.entries, Entry(key, state, backward_task()))))
    return key


def leave_region(key: object) -> None:
    """Remove one region from any position; no effect if it was opened in another context."""
    stack = current_stack()
    set_stack(Stack(stack.base, tuple(entry for entry in stack.entries if entry.key is not key)))


@contextmanager
def restored(state: AutocastState) -> Iterator[None]:
    """Region with an earlier state, for a recomputation; its end restores the state below."""
    stack = current_stack()
    key = object()
    set_stack(Stack(stack.base, (*stack.entries, Entry(key, state, backward_task()))))
    try:
        yield
    finally:
        leave_region(key)


class _Traced:
    """Open regions of the function that torch.compile traces; empty while nothing is traced."""

    def __init__(self) -> None:
        self.states: tuple[AutocastState, ...] = ()


_traced = _Traced()


def enter_traced(enabled: bool, recipe: Recipe | None, strict: bool) -> None:
    """Open a region while torch.compile traces."""
    if enabled:
        check_recipe(recipe, strict)
    in_use = MXFP8BlockScaling() if recipe is None and enabled else recipe
    _traced.states = (*_traced.states, AutocastState(enabled, False, in_use))


def leave_traced() -> None:
    """Close the innermost region while torch.compile traces."""
    _traced.states = _traced.states[:-1]


def traced_state() -> AutocastState | None:
    """While torch.compile traces: state of the innermost region inside the traced function; None without one."""
    return _traced.states[-1] if _traced.states else None
