"""Choose num_sm for a layer with num_sm=None, from a tuned table or by a formula; the same on all its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from triton_ep.config import EPConfig
from triton_ep.errors import ConfigError
from triton_ep.runtime.tuned.table import Key, TunedEntry, look_up

_PROGRAM_GBPS = 30  # moved by one program of the push (a prototype on 8 H200: 8 programs move 238)
_LINK_GBPS = {8: 230, 9: 343, 10: 686}  # out of a GPU, by major compute capability; 9 measured, others by NVLink's rate
_PROGRAMS_INTERPRETED = 2


def key_of(config: EPConfig, device: torch.device) -> Key:
    """The key of a layer in tuned tables. Rows of float32 have a payload that no table holds."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    dtype = config.token_dtype
    payload = config.payload or ("bf16" if dtype.itemsize == 2 else str(dtype).removeprefix("torch."))
    tokens = 1 << (config.max_tokens - 1).bit_length()
    return Key(gpu, config.local_world_size, config.num_nodes, payload, config.hidden, tokens)


def default_num_sm(device: torch.device) -> int:
    """Programs of the exchange if no table has an entry. Twice the number that would fill the links if programs did not
    slow each other down, rounded to a multiple of 8; at most a quarter of the multiprocessors. H200: 24."""
    if device.type != "cuda":
        return _PROGRAMS_INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    return programs_for(_LINK_GBPS.get(properties.major, max(_LINK_GBPS.values())), properties.multi_processor_count)


def programs_for(link_gbps: float, multiprocessors: int) -> int:
    """The formula of `default_num_sm`; link_gbps: 10^9 bytes per second out of a GPU."""
    wanted = round(2 * link_gbps / _PROGRAM_GBPS / 8) * 8
    return max(min(wanted, multiprocessors // 4), 1)


class Choice(NamedTuple):
    """A rank's choice: the number, its source, and the error if the rank cannot choose."""

    num_sm: int
    source: str
    failure: str | None


def choose(config: EPConfig, device: torch.device) -> tuple[EPConfig, Choice]:
    """The configuration with num_sm and entry from a table, or with num_sm by the formula; ranks compare it later."""
    entry: TunedEntry | None = None
    failure = None
    try:
        entry = look_up(key_of(config, device))
    except ConfigError as error:
        failure = str(error)
    num_sm = default_num_sm(device) if entry is None else entry.num_sm
    source = "by formula" if entry is None else entry.source
    return replace(config, num_sm=num_sm, tuned=entry), Choice(num_sm, source, failure)


def check_choices(own: Choice, choices: Sequence[Choice]) -> None:
    """Raise unless all ranks of a group, in the order of `choices`, would run with the same number.

    Raises:
        ConfigError: on all ranks, if one cannot read a table, or if they find different choices.
    """
    if own.failure is not None:
        raise ConfigError(own.failure)
    for rank, other in enumerate(choices):
        if other.failure is not None:
            raise ConfigError(f"rank {rank} cannot choose num_sm: {other.failure}")
    for rank, other in enumerate(choices):
        if other.num_sm != own.num_sm:
            raise ConfigError(
                f"this rank would run with num_sm={own.num_sm} ({own.source}), rank {rank} with {other.num_sm} "
                f"({other.source}). Give all ranks the same TRITON_EP_TUNED and the same GPUs, or pass num_sm."
            )
