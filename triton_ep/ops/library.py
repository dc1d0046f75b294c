"""Launchers as torch.library ops, which is how torch.compile, CUDA graphs of it and fake tensors take them.

Such an op has no gradient: those who differentiate call it from a torch.autograd.Function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("triton_ep", "FRAGMENT")


def op(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register the decorated function as torch.ops.triton_ep.<its name>, and return that op in its place.

    Arguments:
        schema: of the arguments and results, as `torch.library.define` takes it; no result is a view of anything.
        fake: the same arguments to results of the right shape, dtype and strides, without data.
    """

    def register(function: Callable[..., Any]) -> Any:
        name = function.__name__.lstrip("_")
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"triton_ep::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.triton_ep, name).default

    return register
