"""Launchers as torch.library ops, which is how torch.compile, CUDA graphs of it and fake tensors take them.

Such an op has no gradient: those who differentiate call it from a torch.autograd.Function, and what they make of it
enters a graph through `in_graph`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from triton_ep.runtime import launch as runtime  # noqa: F401  before Dynamo, which imports Triton: decides whether kernels are interpreted

P = ParamSpec("P")
R = TypeVar("R")

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


def in_graph(function: Callable[P, R]) -> Callable[P, R]:
    """The function as one call that Dynamo does not look into; AOTAutograd traces it, with the gradients that flow."""
    from torch._dynamo import nonstrict_trace

    return nonstrict_trace(function)
