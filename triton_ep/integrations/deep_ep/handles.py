"""Handles: state of a dispatch that its combine needs. DeepEP's items are computed when they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.integrations.lazy_items import LazyItems
from triton_ep.layer import EPAll2AllLayer


def _nothing() -> None:
    """None: value of an item that only DeepEP's transport needs."""


@dataclass(eq=False)  # not frozen: a frozen class sets attributes more slowly, and every call creates one
class DispatchHandle(LazyItems):
    """State of a dispatch that its combine, and later dispatches with the same routing, need.

    Any number of handles may be live, and they may be used in any order. A handle outlives the buffer that created it,
    until the memory is freed (`Buffer.destroy`, `release`).

    Items on the device; T tokens, W ranks, N nodes. Inside a node DeepEP's 6 items: rank_prefix_matrix [W, W] int32
    (column of this rank: row i is the number of rows from ranks 0 to i; other columns -1), None, None, None,
    is_token_in_rank [T, W] bool, None. Between nodes DeepEP's 10 items: is_token_in_rank, None, None, None,
    recv_rdma_rank_prefix_sum [N] int32 (tokens that this rank receives from nodes 0 to n, its own node included), None,
    recv_gbl_rank_prefix_sum [W] int32 (rows from ranks 0 to r), None, None, None. Items that are None describe DeepEP's
    channels, or tokens of other ranks, which rows do not carry.
    """

    layer: EPAll2AllLayer
    layout_desc: EPAllToAllLayoutDesc

    def _makers(self) -> tuple[Callable[[], Any], ...]:
        if self.layer.config.is_intra_node:
            return self._rank_prefix_matrix, _nothing, _nothing, _nothing, self._in_rank, _nothing
        return (
            self._in_rank,
            _nothing,
            _nothing,
            _nothing,
            self._node_prefix_sum,
            _nothing,
            self._rank_prefix_sum,
            _nothing,
            _nothing,
            _nothing,
        )

    def _rank_prefix_sum(self) -> torch.Tensor:
        return self.layout_desc.arrivals_from_rank.cumsum(0, dtype=torch.int32)

    def _rank_prefix_matrix(self) -> torch.Tensor:
        sums = self._rank_prefix_sum()
        matrix = torch.full((sums.shape[0], sums.shape[0]), -1, dtype=torch.int32, device=sums.device)
        matrix[:, self.layer.config.rank] = sums
        return matrix

    def _in_rank(self) -> torch.Tensor:
        return ranks_of_tokens(self.layout_desc, self.layer.config.world_size)

    def _node_prefix_sum(self) -> torch.Tensor:
        cfg, desc = self.layer.config, self.layout_desc
        from_node, per_node = desc.tokens_from_node, desc.tokens_per_node
        assert from_node is not None and per_node is not None
        own = cfg.rank // cfg.local_world_size
        counts = from_node.clone()
        counts[own] = per_node[own]
        return counts.cumsum(0, dtype=torch.int32)


@dataclass(eq=False)
class LowLatencyHandle(LazyItems):
    """State of a low-latency dispatch that its combine needs. The handle and its items are valid after the hook ran.

    DeepEP's items, with e local experts, W ranks, M most tokens per rank: [e, W * M] int32, the token number on its
    source rank of each row in its slab, -1 past the received rows; [e, W] int64, first row << 32 | rows of each source
    rank; M; H; the number of experts.

    Attributes:
        layer, layout_desc: layer and descriptor of the dispatch.
        given_weights: [T, K] float32, weights that the dispatch got; None: it got none.
        row_weights: [e * W * M] float32, weights received with the rows, by place in the slabs; None: the dispatch got
            no weights.
    """

    layer: EPAll2AllLayer
    layout_desc: EPAllToAllLayoutDesc
    given_weights: torch.Tensor | None
    row_weights: torch.Tensor | None

    def _makers(self) -> tuple[Callable[[], Any], ...]:
        cfg = self.layer.config
        return (
            self._source_tokens,
            self._layout_range,
            lambda: cfg.max_tokens,
            lambda: cfg.hidden,
            lambda: cfg.num_experts,
        )

    def _rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[W * M * K] int64 each: row of every assignment in all slabs, R = none, and its source rank * M + token."""
        copies, none = self.layout_desc.skipped_token_topk_mapping_indices, self.layout_desc.num_recv_rows
        assert copies is not None, "a descriptor of a low-latency dispatch has it"
        row = torch.where((copies < 0) | (copies >= none), none, copies).long()
        source = torch.arange(copies.shape[0], device=copies.device).unsqueeze(1).expand(copies.shape)
        return row.flatten(), source.flatten()

    def _source_tokens(self) -> torch.Tensor:
        desc, cfg = self.layout_desc, self.layer.config
        row, source = self._rows()
        tokens = torch.full((desc.num_recv_rows + 1,), -1, dtype=torch.int32, device=row.device)
        tokens.scatter_(0, row, (source % cfg.max_tokens).int())
        place = torch.arange(cfg.world_size * cfg.max_tokens, device=row.device)
        arrived = place < desc.num_recv_tokens_per_expert.unsqueeze(1)
        where = desc.expert_offsets[:-1].unsqueeze(1) + place
        return torch.where(arrived, tokens[where.clamp(max=desc.num_recv_rows)], -1)

    def _layout_range(self) -> torch.Tensor:
        desc, ranks = self.layout_desc, self.layer.config.world_size
        experts = desc.num_recv_tokens_per_expert.shape[0]
        row, source = self._rows()
        expert = torch.bucketize(row, desc.expert_offsets[1:].long(), right=True)
        counts = torch.zeros(experts + 1, ranks, dtype=torch.int64, device=row.device)
        ones = torch.where(row < desc.num_recv_rows, 1, 0)
        cell = expert.clamp(max=experts) * ranks + source // self.layer.config.max_tokens
        counts = counts.view(-1).scatter_add_(0, cell, ones).view(-1, ranks)[:experts]
        return (counts.cumsum(1) - counts) << 32 | counts


def ranks_of_tokens(desc: EPAllToAllLayoutDesc, num_ranks: int) -> torch.Tensor:
    """[T, W] bool: whether each token goes to each rank. Not for a low-latency dispatch."""
    owners = desc.owner_ranks
    assert owners is not None, "a low-latency dispatch has a handle of its own"
    column = torch.where(owners < 0, num_ranks, owners).long()
    out = torch.zeros(owners.shape[0], num_ranks + 1, dtype=torch.bool, device=owners.device)
    return out.scatter_(1, column, True)[:, :num_ranks].contiguous()
