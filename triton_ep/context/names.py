"""Attributes under the names that layers and contexts of Triton-distributed give them."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from triton_ep.config import EPConfig
from triton_ep.errors import ConfigError


def _field(name: str) -> Any:
    return property(lambda self: getattr(self.config, name), doc=f"`config.{name}`.")


class LayerNames:
    """Arguments of a layer's constructor, as it was made; its context has the process group."""

    config: EPConfig
    context: Any

    rank, world_size, local_world_size = _field("rank"), _field("world_size"), _field("local_world_size")
    max_tokens, hidden, topk, num_tot_experts = (
        _field("max_tokens"),
        _field("hidden"),
        _field("topk"),
        _field("num_experts"),
    )
    dtype, weight_dtype, num_sm = _field("token_dtype"), _field("weight_dtype"), _field("num_sm")
    enable_local_combine, is_intra_node = _field("enable_local_combine"), _field("is_intra_node")

    @property
    def ep_group(self) -> Any:
        """The process group."""
        return self.context.group

    @property
    def ep_config(self) -> EPConfig:
        """`config`."""
        return self.config

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigError(
            "a layer holds symmetric memory of running processes, so it can be neither copied nor pickled. Make "
            "another on all ranks; in a module that is copied or saved keep it outside, and set it anew."
        )


class ContextNames:
    """Buffers of a context that others know by name; those that grow are others after it."""

    config: EPConfig
    local: Any

    @property
    def ep_config(self) -> EPConfig:
        """`config`."""
        return self.config

    @property
    def dispatch_output_buf(self) -> torch.Tensor:
        """[rows, H] of the token dtype: expert outputs, from which combine pulls."""
        rows: torch.Tensor = self.local("dispatch_output_buf")
        return rows

    @property
    def weight_recv_buf(self) -> torch.Tensor:
        """[rows] float32: their weights."""
        weights: torch.Tensor = self.local("weight_recv_buf")
        return weights
