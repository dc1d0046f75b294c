"""How a compiler takes a stage of the pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from triton_ep.runtime import launch as runtime  # noqa: F401  before Dynamo, which imports Triton: decides whether kernels are interpreted

P = ParamSpec("P")
R = TypeVar("R")


def in_graph(stage: Callable[P, R]) -> Callable[P, R]:
    """The stage as one call that Dynamo does not look into; AOTAutograd traces it, with the gradients that flow."""
    from torch._dynamo import nonstrict_trace

    return nonstrict_trace(stage)
