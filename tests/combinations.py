"""Combinations of parameters: all of them on GPUs, on CPU ranks those that show something of their own.

A combination costs nothing on GPUs and a second or more on CPU ranks, where kernels are interpreted. There a test takes
every value of every parameter once, and further combinations only where a kernel or a path of the host differs.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest


def combinations(
    *axes: Sequence[Any], on_cpu: Callable[..., bool], in_chaos: Callable[..., bool] | None = None
) -> list[Any]:
    """Arguments of `parametrize` for every combination of the axes; a tuple on an axis is several parameters.

    Combinations for which `on_cpu(*parameters)` is false get the mark `on_gpus`, those for which `in_chaos` is false
    the mark `plain`; without `in_chaos` none does.
    """
    found = []
    for values in itertools.product(*axes):
        flat = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
        names = [str(getattr(part, "name", part)) for part in flat]
        marks = [] if on_cpu(*flat) else [pytest.mark.on_gpus]
        if in_chaos is not None and not in_chaos(*flat):
            marks.append(pytest.mark.plain)
        found.append(pytest.param(*flat, marks=marks, id="-".join(names)))
    return found
