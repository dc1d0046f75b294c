"""Calls that torch.compile neither traces nor looks into: it breaks the graph there, and goes on behind them."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch

_FRAMES: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
"""Private: a torch that lacks what is used of it would look into the calls that these calls make."""

_Call = TypeVar("_Call", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)


def untraced(reason: str) -> Callable[[_Call], _Call]:
    """Decorator: as `torch.compiler.disable`, which imports the compiler and costs each call microseconds.

    reason: shown by torch.compile with `fullgraph=True`.
    """

    def mark(call: _Call) -> _Call:
        function: Any = call
        function._torchdynamo_disable, function._torchdynamo_disable_msg = True, reason
        if hasattr(_FRAMES, "set_code_exec_strategy"):
            function.__code__ = function.__code__.replace()  # functions that a decorator returns share theirs
            skip = _FRAMES._FrameAction.SKIP
            _FRAMES.set_code_exec_strategy(function.__code__, _FRAMES._FrameExecStrategy(skip, skip))
        return call

    return mark


def untraced_calls(reason: str) -> Callable[[_Class], _Class]:
    """Decorator of a class: `untraced` for each of its public methods."""
    mark = untraced(reason)

    def of_class(owner: _Class) -> _Class:
        for name, member in vars(owner).items():
            if isinstance(member, FunctionType) and not name.startswith("_"):
                mark(member)
        return owner

    return of_class
