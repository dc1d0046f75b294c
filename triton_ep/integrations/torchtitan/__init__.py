"""torchtitan's MoE over EPAll2AllLayer: a token dispatcher, and the grouped product of the experts.

    torchtitan                                 here
    ...TokenDispatcher.Config(num_experts,     TritonEPTokenDispatcher.Config; torchtitan fills hidden_dim and
      top_k, ...)                                num_max_tokens_per_rank, as for its HybridEP
    wire_meshes(ep_mesh=), init_buffer()       one EPAll2AllLayer per kind, shared by all MoE layers of the model
    dispatch(x, scores, ids, counts)           triton_ep.autograd.dispatch, `alignment` = pad_multiple
    num_tokens_per_local_expert_e              layout_desc.expert_offsets.diff(), padding included
    combine(rows, metadata, x)                 triton_ep.autograd.combine with the scores: product and sum in float32
    non_blocking_capacity_factor               `capacity`: no host synchronisation; overflow is counted
    GroupedExperts._grouped_mm                 triton_ep's grouped GEMM, in bf16 or MXFP8

`TritonEPTokenDispatcher`, `TritonEPGroupedExperts` and `use_triton_ep` derive from torchtitan's classes and need it
installed; the rest does not. Source: torchtitan/models/common/{token_dispatcher,moe}.py; docs/how-to/torchtitan.md.
"""

from __future__ import annotations

from typing import Any

from triton_ep.integrations.torchtitan.dispatcher import DispatchMetadata, TokenDispatch, close_layers
from triton_ep.integrations.torchtitan.experts import grouped_mm

__all__ = ["DispatchMetadata", "TokenDispatch", "close_layers", "grouped_mm"]

_OF_TORCHTITAN = ("TritonEPGroupedExperts", "TritonEPTokenDispatcher", "use_triton_ep")


def __getattr__(name: str) -> Any:
    if name not in _OF_TORCHTITAN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from triton_ep.integrations.torchtitan import classes

    return getattr(classes, name)
