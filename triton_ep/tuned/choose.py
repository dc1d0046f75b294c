"""What a layer made with num_sm=None runs with: the entry of a table, or a formula; the same on all its ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from triton_ep.config import EPConfig
from triton_ep.errors import ConfigError
from triton_ep.tuned.table import Key, TunedEntry, look_up

_PROGRAM_GBPS = 30  # that one program of the push moves (8 of them 238, 8 x H200)
_LINK_GBPS = {8: 230, 9: 343, 10: 686}  # out of a GPU, by major compute capability; 9 measured, others by NVLink's rate
_PROGRAMS_INTERPRETED = 2


def key_of(config: EPConfig, device: torch.device) -> Key:
    """What a layer is looked up by. Rows of float32 have a payload that no table holds."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    dtype = config.token_dtype
    payload = config.payload or ("bf16" if dtype.itemsize == 2 else str(dtype).removeprefix("torch."))
    tokens = 1 << (config.max_tokens - 1).bit_length()
    return Key(gpu, config.local_world_size, config.num_nodes, payload, config.hidden, tokens)


def default_num_sm(device: torch.device) -> int:
    """Programs of the exchange where no table has an entry: twice as many as would fill the links if each kept its
    pace beside the others, in eights, and a quarter of the multiprocessors at most. H200: 24."""
    if device.type != "cuda":
        return _PROGRAMS_INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    return programs_for(_LINK_GBPS.get(properties.major, max(_LINK_GBPS.values())), properties.multi_processor_count)


def programs_for(link_gbps: float, multiprocessors: int) -> int:
    """The formula of `default_num_sm`; link_gbps: 10^9 bytes per second out of a GPU."""
    wanted = round(2 * link_gbps / _PROGRAM_GBPS / 8) * 8
    return max(min(wanted, multiprocessors // 4), 1)


def choose(config: EPConfig, device: torch.device, group: Any) -> EPConfig:
    """The configuration with num_sm and entry of a table, or with num_sm by the formula. Collective over `group`.

    Raises:
        ConfigError: on all ranks, if one cannot read a table, or if they find different choices.
    """
    entry: TunedEntry | None = None
    failure = None
    try:
        entry = look_up(key_of(config, device))
    except ConfigError as error:
        failure = str(error)
    num_sm = default_num_sm(device) if entry is None else entry.num_sm
    source = "by formula" if entry is None else entry.source
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, (failure, num_sm, source), group=group)
    if failure is not None:
        raise ConfigError(failure)
    for rank, (theirs, *_) in enumerate(told):
        if theirs is not None:
            raise ConfigError(f"rank {rank} cannot choose num_sm: {theirs}")
    for rank, (_, number, where) in enumerate(told):
        if number != num_sm:
            raise ConfigError(
                f"this rank would run with num_sm={num_sm} ({source}), rank {rank} with {number} ({where}). "
                "Give all ranks the same TRITON_EP_TUNED and the same GPUs, or pass num_sm."
            )
    return replace(config, num_sm=num_sm, tuned=entry)
