"""A drop-in for the package `deep_ep`: its names and calling conventions over EPAll2AllLayer.

    deep_ep                                     here
    Buffer(group, num_nvl_bytes, ...)           layers over `group`, created when a call first needs one: by row size,
                                                  top-k, experts and num_sms
    Buffer.dispatch(x, topk_idx=, ...)          layer.dispatch_compact: one row per (token, rank), local expert ids, -1
    Buffer.dispatch((fp8, scales), ...)         the same, as bytes of shorter rows (row_elements) of the bf16 layer
    Buffer.dispatch(x, handle=)                 layer.dispatch_compact_again: the host does not wait
    Buffer.combine(x, handle)                   layer.combine, a plain sum over ranks in float32
    ... topk_weights=                           layer.combine_topk
    Buffer.low_latency_dispatch, _combine       a layer with low_latency=True, and one slab of rows per expert
    ElasticBuffer.dispatch, _combine            layer.dispatch_compact; with do_expand layer.dispatch, `alignment` =
                                                  expert_alignment
    EPBuffer                                    ElasticBuffer with the arguments of DeepEP's main branch
    HybridEPBuffer                              triton_ep.integrations.hybrid_ep
    deep_ep.utils.EventHandle, EventOverlap     triton_ep.EPEvent

`install()` makes `import deep_ep` return this module. Source: deep_ep/buffer.py of DeepEP 1.2.1 and deep_ep/buffers
of 2.1.0; docs/how-to/deep-ep.md has the details.
"""

from __future__ import annotations

import sys

import torch

from triton_ep.errors import ConfigError
from triton_ep.integrations import hybrid_ep as hybrid_ep_buffer
from triton_ep.integrations.deep_ep import buffer, buffers, elastic, ep, utils
from triton_ep.integrations.deep_ep.buffer import Buffer
from triton_ep.integrations.deep_ep.config import Config
from triton_ep.integrations.deep_ep.elastic import (
    ElasticBuffer,
    get_logical_domain_size,
    get_physical_domain_size,
)
from triton_ep.integrations.deep_ep.elastic_handle import EPHandle
from triton_ep.integrations.deep_ep.ep import EPBuffer
from triton_ep.integrations.deep_ep.layers import release
from triton_ep.integrations.deep_ep.utils import EventHandle, EventOverlap
from triton_ep.integrations.hybrid_ep import HybridEPBuffer

__all__ = [
    "Buffer",
    "Config",
    "EPBuffer",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "buffer",
    "buffers",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "hybrid_ep_buffer",
    "install",
    "release",
    "topk_idx_t",
    "uninstall",
    "utils",
]

__version__ = "2.1.0"
"""Version of DeepEP with this interface, for frameworks that compare versions."""

topk_idx_t = torch.int64
"""Dtype of expert ids, for frameworks that look it up; int32 is accepted as well."""


_MODULES = {
    "deep_ep.buffer": buffer,
    "deep_ep.buffers": buffers,
    "deep_ep.buffers.elastic": elastic,
    "deep_ep.buffers.ep": ep,
    "deep_ep.buffers.legacy": buffer,
    "deep_ep.hybrid_ep_buffer": hybrid_ep_buffer,
    "deep_ep.utils": utils,
    "deep_ep.utils.event": utils,
}


def install() -> None:
    """Make `import deep_ep`, and imports of its modules, return this package. Idempotent. Call `install` before the
    framework imports deep_ep.

    Raises:
        ConfigError: another `deep_ep` has been imported already.
    """
    this = sys.modules[__name__]
    found = sys.modules.get("deep_ep")
    if found is not None and found is not this:
        raise ConfigError(
            f"deep_ep has been imported already, from {getattr(found, '__file__', None)}. Call install() before "
            "anything imports it."
        )
    sys.modules["deep_ep"] = this
    sys.modules.update(_MODULES)


def uninstall() -> None:
    """Undo `install` for later imports; idempotent."""
    for name, module in {"deep_ep": sys.modules[__name__], **_MODULES}.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
