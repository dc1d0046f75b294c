"""Compare the arguments of a module's constructor between ranks, before any of them waits for another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from triton_ep.context.agreement import compare
from triton_ep.distributed import gather

_REMEDY = "Give all the same, and create the same modules in the same order."


def check_agreement(group: Any, options: Mapping[str, Any]) -> None:
    """Raise ConfigError, on every rank, unless all ranks of the group give the same options. Collective.

    Without this check a rank whose exchange exists already would go on, while one that asks for another exchange waits
    for all ranks to create it.
    """
    with torch.device("cpu"):  # a model may be built on the meta device
        answers: list[Mapping[str, str]] = gather(
            {name: repr(value) for name, value in options.items()}, group, "the constructor of a MoE module"
        )
    for name in options:
        compare(f"MoE's {name}", [answer[name] for answer in answers], _REMEDY)
