"""Compare the arguments of a module's constructor between ranks, before any of them waits for another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from triton_ep.distributed import gather
from triton_ep.errors import ConfigError


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
        holders: dict[str, list[int]] = {}
        for rank, answer in enumerate(answers):
            holders.setdefault(answer[name], []).append(rank)
        if len(holders) > 1:
            given = "; ".join(f"{value} by rank {', '.join(map(str, ranks))}" for value, ranks in holders.items())
            raise ConfigError(
                f"the ranks of the group gave MoE different values of {name}: {given}. Give all the same, and create "
                "the same modules in the same order."
            )
