"""Launchers as torch.library ops, as torch.compile, its CUDA graphs and fake tensors require.

Such an op has no gradient: differentiable code calls it from a torch.autograd.Function and enters a graph through
`in_graph`. Where nothing observes ops, the launcher is called without torch's dispatcher, which takes longer than a
launch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from triton_ep.runtime import launch as runtime  # noqa: F401  before Dynamo, which imports Triton: decides whether kernels are interpreted

P = ParamSpec("P")
R = TypeVar("R")

_LIBRARY = torch.library.Library("triton_ep", "FRAGMENT")
_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str, torch.dtype}
"""Types of arguments that no subclass of tensors observes."""


def op(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: register the function as torch.ops.triton_ep.<its name>; calls run the op, or the function itself if
    nothing observes ops.

    Arguments:
        schema: arguments and results, as in `torch.library.define`; no result may be a view.
        fake: takes the same arguments, returns results of the right shape, dtype and strides without data.
    """

    def register(function: Callable[..., Any]) -> Any:
        name = function.__name__.lstrip("_")
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"triton_ep::{name}", fake, lib=_LIBRARY)
        made = getattr(torch.ops.triton_ep, name).default
        arguments = made._schema.arguments
        written = [i for i, each in enumerate(arguments) if each.alias_info is not None and each.alias_info.is_write]

        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            if is_observed() or not _PLAIN.issuperset(map(type, (*args, *named.values()))):
                return made(*args, **named)
            found = function(*args, **named)
            for i in written:  # as the dispatcher does
                if args[i] is not None and not args[i].is_inference():
                    torch.autograd.graph.increment_version(args[i])
            return found

        return call

    return register


def is_observed() -> bool:
    """True if autograd, torch.compile, a torch mode, a transform of torch.func or a profiler may observe ops.

    Who has several ops to run may ask once, and call launchers instead.
    """
    return (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._autograd._profiler_enabled()
    )


def without_grad(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: torch.no_grad(), which is not entered, and costs nothing, where gradients are off already."""
    guarded = torch.no_grad()(function)

    @functools.wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> R:
        return guarded(*args, **named) if torch.is_grad_enabled() else function(*args, **named)

    return call


def in_graph(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function into one call that Dynamo does not trace into; AOTAutograd traces it with its gradients."""
    from torch._dynamo import nonstrict_trace

    return nonstrict_trace(function)
