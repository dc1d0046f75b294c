"""EPAllToAllLayoutDesc: the routing facts of one dispatch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.utils import _pytree


@dataclass(frozen=True, kw_only=True, eq=False)
class EPAllToAllLayoutDesc:
    """Routing facts of one dispatch, needed by its combine and by both backward passes.

    Made by `EPAll2AllLayer.dispatch`. It owns its tensors: any number may be live, in any order, until the
    layer is finalized. Holds tensors and ints only, so it is a pytree and passes through CUDA graphs.
    Letters: T tokens of this rank, K top-k, W ranks, N nodes, M max_tokens, e local experts, C arrival rows.

    A low-latency dispatch leaves out what its combine does not need: the fields marked (-) are None then.

    Attributes:
        num_dispatch_token_cur_rank: T.
        num_recv_rows: rows of `recv_x`: what arrived with padding (exact), or the capacity (static).
        num_input_tokens_per_rank: [W] int32, tokens that each rank dispatched.
        topk_indices_tensor: [T, K] int32, expert ids, -1 = dropped.
        owner_ranks: [T, K] int32, ranks that own them, -1 = dropped (-).
        token_dst_scatter_idx: [T, K] int32, row of each copy in its owner's `recv_x`, -1 = dropped (-).
        expert_offsets: [e + 1] int32, first row of each local expert; the last entry = rows in use.
        num_recv_tokens_per_expert: [e] int32, rows of each local expert without padding.
        overflow: [1] int32, rows that did not fit a static capacity on this rank; 0 = none.
        send_reqs_recv_tensor: None; the protocol has no ranges of tokens.
        skipped_token_mapping_indices: None; copies of a token are found through the next field.
        skipped_token_topk_mapping_indices: [C, K] int32, rows in `recv_x` of the copies of each arrived
            token, -1 = none; only with `enable_local_combine`. Low latency: C = W * M, a row per token of any rank,
            copies first, -2 = one beyond the capacity.
        stage_row: [T, K] int32, arrival row of the token at each rank, at the first k that goes there (-).
        node_slot: [T, K] int32, the token's slot among those for that node, at the first k that goes there (-).
        tokens_per_node: [N] int32, tokens of this rank for each node (-).
        tokens_from_node: [N] int32, tokens that this rank forwards for its counterpart of each node (-).
        forward_owner, forward_dst_row, forward_stage_row: [N, M, K] int32, tables of the forwarded tokens;
            None with one node.
        report: [W, 8] int32: rows, arrival rows and tokens of every rank, ...; in columns 6 and 7 the first arrival
            row here, and the number of arrival rows, of each source rank. Low latency: only tokens, the host words
            (column 5) and the own rows; zeros elsewhere.
        layer_id: identifies the layer that made it.
        epoch: number of the dispatch on its layer, from 1.
        full_scatter: `full_scatter_indices` gave the order of rows.
    """

    num_dispatch_token_cur_rank: int
    num_recv_rows: int
    num_input_tokens_per_rank: torch.Tensor
    topk_indices_tensor: torch.Tensor
    owner_ranks: torch.Tensor | None
    token_dst_scatter_idx: torch.Tensor | None
    expert_offsets: torch.Tensor
    num_recv_tokens_per_expert: torch.Tensor
    overflow: torch.Tensor
    stage_row: torch.Tensor | None
    node_slot: torch.Tensor | None
    tokens_per_node: torch.Tensor | None
    tokens_from_node: torch.Tensor | None
    report: torch.Tensor
    layer_id: int
    epoch: int
    forward_owner: torch.Tensor | None = None
    forward_dst_row: torch.Tensor | None = None
    forward_stage_row: torch.Tensor | None = None
    send_reqs_recv_tensor: torch.Tensor | None = None
    skipped_token_mapping_indices: torch.Tensor | None = None
    skipped_token_topk_mapping_indices: torch.Tensor | None = None
    full_scatter: bool = False


_NAMES = tuple(field.name for field in fields(EPAllToAllLayoutDesc))


def _flatten(desc: EPAllToAllLayoutDesc) -> tuple[list[Any], None]:
    return [getattr(desc, name) for name in _NAMES], None


def _unflatten(values: Any, _: None) -> EPAllToAllLayoutDesc:
    return EPAllToAllLayoutDesc(**dict(zip(_NAMES, values, strict=True)))


_pytree.register_pytree_node(
    EPAllToAllLayoutDesc,
    _flatten,
    _unflatten,
    serialized_type_name="triton_ep.EPAllToAllLayoutDesc",
)
