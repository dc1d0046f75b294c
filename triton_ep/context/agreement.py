"""Compare the arguments that all ranks of a layer must share, before any rank allocates."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch.distributed as dist

from triton_ep.config import EPConfig
from triton_ep.context.choice import Choice, check_choices
from triton_ep.distributed import check_group
from triton_ep.errors import ConfigError
from triton_ep.heap.base import SymmetricHeap

_OWN = {"rank", "timeout_s", "tuned"}
_SHOWN_RANKS = 8


def check_agreement(config: EPConfig, group: Any, heap: SymmetricHeap, choice: Choice | None = None) -> str:
    """Raise unless the configuration fits the group and is the same on all its ranks. Collective.

    Each rank may have a `timeout_s` of its own. choice: this rank's choice of num_sm, if the caller gave none.

    Returns:
        a unique name for the layer, the same on all ranks.

    Raises:
        ConfigError: on every rank, with the field and the value of each rank; on this rank alone if it has no such
            group.
        PeerFailed: a rank did not come, or is in another call.
    """
    ranks, rank = check_group(group), dist.get_rank(group)
    mistake = None
    if (ranks, rank) != (config.world_size, config.rank):
        mistake = (
            f"EPConfig says rank {config.rank} of {config.world_size}, but this process is rank {rank} of {ranks} in "
            "the group. Take both from the group."
        )
    mine: dict[str, Any] = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in _OWN}
    if choice is not None:
        mine["num_sm"] = None
    own = _Answer(mistake, mine, choice, config.shape().tuned, secrets.token_hex(8))
    answers: list[_Answer] = heap.gather(own, group, "the constructor of a layer")
    if mistake is not None:
        raise ConfigError(mistake)
    for other, answer in enumerate(answers):
        if answer.mistake is not None:
            raise ConfigError(f"rank {other} of the group cannot make this layer: {answer.mistake}")
    for name in mine:
        compare(f"EPConfig.{name}", [answer.values[name] for answer in answers])
    if choice is not None:
        check_choices(choice, [answer.choice for answer in answers if answer.choice is not None])
    compare("EPConfig.tuned", [answer.tuned for answer in answers])
    return answers[0].name


class _Answer(NamedTuple):
    """What a rank reports about the layer that it is to create."""

    mistake: str | None
    values: dict[str, Any]
    choice: Choice | None
    tuned: Any
    name: str


def compare(name: str, values: Sequence[Any], remedy: str = "Give all the same.") -> None:
    """Raise ConfigError unless an argument has one value on all ranks."""
    holders: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    if len(holders) > 1:
        raise ConfigError(
            f"the ranks of the group were given different values of {name}: "
            f"{'; '.join(f'{value} by {named(who)}' for value, who in holders.items())}. {remedy}"
        )


def named(ranks: list[int]) -> str:
    """Name these ranks: the first ones by number, the others by count."""
    shown = ", ".join(map(str, ranks[:_SHOWN_RANKS]))
    more = len(ranks) - _SHOWN_RANKS
    return f"rank{'s' * (len(ranks) > 1)} {shown}" + (f" and {more} more" if more > 0 else "")
