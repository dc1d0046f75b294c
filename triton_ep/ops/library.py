"""Launchers as torch.library ops, as torch.compile, its CUDA graphs and fake tensors require.

Such an op has no gradient: differentiable code calls it from a torch.autograd.Function and enters a graph through
`in_graph`.
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
    """Decorator: register the function as torch.ops.triton_ep.<its name>, and return the op instead.

    Arguments:
        schema: arguments and results, as in `torch.library.define`; no result may be a view.
        fake: takes the same arguments, returns results of the right shape, dtype and strides without data.
    """

    def register(function: Callable[..., Any]) -> Any:
        name = function.__name__.lstrip("_")
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"triton_ep::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.triton_ep, name).default

    return register


def in_graph(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function into one call that Dynamo does not trace into; AOTAutograd traces it with its gradients."""
    from torch._dynamo import nonstrict_trace

    return nonstrict_trace(function)
