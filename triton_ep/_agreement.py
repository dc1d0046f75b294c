"""What the ranks of a layer must have been given alike, compared before any of them allocates."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch.distributed as dist

from triton_ep.config import EPConfig
from triton_ep.distributed import check_group
from triton_ep.errors import ConfigError
from triton_ep.heap.base import SymmetricHeap

_OWN = {"rank", "timeout_s", "tuned"}
_SHOWN_RANKS = 8


def check_agreement(config: EPConfig, group: Any, heap: SymmetricHeap) -> None:
    """Raise unless the group is as the configuration says, and that is the same on all its ranks. Collective.

    Each rank may have a `timeout_s` of its own.

    Raises:
        ConfigError: on every rank, with the field and who has which value; no such group on this rank alone.
        PeerFailed: a rank did not come.
    """
    ranks, rank = check_group(group), dist.get_rank(group)
    mistake = None
    if (ranks, rank) != (config.world_size, config.rank):
        mistake = (
            f"EPConfig says rank {config.rank} of {config.world_size}, but this process is rank {rank} of {ranks} in "
            "the group. Take both from the group."
        )
    mine: dict[str, Any] = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in _OWN}
    mine["tuned"] = config.shape().tuned
    told = heap.gather((mistake, mine), group)
    if mistake is not None:
        raise ConfigError(mistake)
    for other, (error, _) in enumerate(told):
        if error is not None:
            raise ConfigError(f"rank {other} of the group cannot make this layer: {error}")
    for name in mine:
        holders: dict[Any, list[int]] = {}
        for other, (_, values) in enumerate(told):
            holders.setdefault(values[name], []).append(other)
        if len(holders) > 1:
            raise ConfigError(
                f"the ranks of the group were given different values of EPConfig.{name}: "
                f"{'; '.join(f'{value} by {named(who)}' for value, who in holders.items())}. Give all the same."
            )


def named(ranks: list[int]) -> str:
    """These ranks in words, the first ones by number."""
    shown = ", ".join(map(str, ranks[:_SHOWN_RANKS]))
    more = len(ranks) - _SHOWN_RANKS
    return f"rank{'s' * (len(ranks) > 1)} {shown}" + (f" and {more} more" if more > 0 else "")
