"""`autocast` and `quantized_model_init`: regions in which modules quantise, or are created with quantised weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch

from triton_ep.integrations import arguments as check
from triton_ep.integrations.te import state
from triton_ep.integrations.te.recipe import Recipe

_P = ParamSpec("_P")
_R = TypeVar("_R")


class autocast:
    """Region in which the modules of this package quantise.

    Regions nest to any depth; the innermost decides. An instance may be used again when its region has ended, and it
    can decorate a function.

    Arguments:
        enabled: False switches quantisation off inside.
        calibrating: accepted; MXFP8 has nothing to calibrate.
        recipe: None: MXFP8BlockScaling(). Changes to it take effect with the next forward pass.
        amax_reduction_group: accepted; every block's scale depends on the block alone.
        strict: refuse devices on which MXFP8 is emulated.

    Raises, from `__enter__` and before anything changes:
        RuntimeError: the instance's region has not ended.
        InputError: `recipe` is not a recipe, or not MXFP8BlockScaling.
        UnsupportedDeviceError: with strict, on a device that emulates MXFP8.
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
            state.enter_traced(self.enabled, self.recipe, self.strict)
            return
        if self._entry is not None:
            raise RuntimeError(
                "autocast: this instance cannot be entered more than once concurrently, and its region has not ended. "
                "Create another instance."
            )
        check.flag("enabled", self.enabled)
        self._entry = state.enter_region(
            self.enabled, self.calibrating, self.recipe, self.amax_reduction_group, self._graph, self.strict
        )

    def __exit__(self, *exc: object) -> None:
        if torch.compiler.is_compiling():
            state.leave_traced()
            return
        entry, self._entry = self._entry, None
        if entry is not None:
            state.leave_region(entry)

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """Decorate `function` to run inside a new region with these arguments."""

        @functools.wraps(function)
        def inside(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with autocast(
                self.enabled, self.calibrating, self.recipe, self.amax_reduction_group, self._graph, strict=self.strict
            ):
                return function(*args, **kwargs)

        return inside


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> autocast:
    """`autocast` under its former name and argument names."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Region in which modules are created with quantised weights, which take about half the memory of bf16.

    Arguments:
        enabled: False: unquantised weights, for use inside a region that quantises.
        recipe: None: MXFP8BlockScaling().
        preserve_high_precision_init_val: keep the initial values on the CPU: `weight.get_high_precision_init_val()`,
            until `weight.clear_high_precision_init_val()`.

    Raises:
        InputError: `recipe` is not a recipe, or not MXFP8BlockScaling; before anything changes.
    """
    if check.flag("enabled", enabled):
        state.check_recipe(recipe, strict=False)
    before = state.current_parameters()
    in_use = recipe or state.get_default_fp8_recipe()
    state.set_parameters(state.Parameters(enabled, in_use, preserve_high_precision_init_val))
    try:
        yield
    finally:
        state.set_parameters(before)


fp8_model_init = quantized_model_init
"""`quantized_model_init` under its former name."""
