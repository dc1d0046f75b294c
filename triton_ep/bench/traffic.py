"""Payload bytes between ranks, from the routing alone; copies within a rank do not count."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triton_ep.config import Topology


@dataclass(frozen=True)
class Routing:
    """Where the tokens of all ranks go.

    Attributes:
        copies: [W, T, W] int64: copies of token t of rank s for rank r.
        ranks_per_node: ranks of one node are numbered in a row.
    """

    copies: torch.Tensor
    ranks_per_node: int

    @classmethod
    def of(cls, idxs: list[torch.Tensor], num_experts: int, ranks_per_node: int) -> Routing:
        """From the expert ids [T, K] of every rank, -1 = dropped; the same T on all ranks."""
        idx = torch.stack(idxs).long()
        owner = torch.where(idx >= 0, idx // (num_experts // len(idxs)), len(idxs))
        copies = torch.zeros(*idx.shape[:2], len(idxs) + 1, dtype=torch.int64)
        copies.scatter_add_(2, owner, torch.ones_like(owner))
        return cls(copies[:, :, :-1], ranks_per_node)

    @property
    def num_ranks(self) -> int:
        """W."""
        return self.copies.shape[0]

    def most_rows(self) -> int:
        """Rows that the rank with most of them receives."""
        return int(self.copies.sum((0, 1)).max())

    def tokens(self) -> torch.Tensor:
        """[W, W] int64: tokens of one rank of which another one has a copy."""
        return (self.copies > 0).sum(1)

    def relays(self, source: int) -> list[tuple[int, list[int]]]:
        """Per node: the rank through which tokens of `source` reach it, and the ranks of the node."""
        here = Topology(source, self.num_ranks, self.ranks_per_node)
        nodes = range(here.num_nodes)
        first = [node * self.ranks_per_node for node in nodes]
        return [(here.counterpart(node), list(range(first[node], first[node] + self.ranks_per_node))) for node in nodes]


def out_of(between: torch.Tensor) -> list[int]:
    """Bytes that leave each rank; between: [W, W], from row to column."""
    return [int(value) for value in between.sum(1)]


def busiest(between: torch.Tensor) -> int:
    """Bytes of the busiest rank in its busier direction; between: [W, W], from row to column."""
    return int(torch.maximum(between.sum(0), between.sum(1)).max())


def dispatch_bytes(routing: Routing, row_bytes: int) -> torch.Tensor:
    """[W, W] bytes: a token goes once to each rank of its node, and once to each other node.

    The rank of the same number on that node passes it on to the others there, once each.
    """
    rows = torch.zeros(routing.num_ranks, routing.num_ranks, dtype=torch.int64)
    for source in range(routing.num_ranks):
        for relay, members in routing.relays(source):
            wanted = routing.copies[source][:, members] > 0
            if relay != source:
                rows[source, relay] += wanted.any(1).sum()
            for place, rank in enumerate(members):
                if rank != relay:
                    rows[relay, rank] += wanted[:, place].sum()
    return rows * row_bytes


def combine_bytes(routing: Routing, row_bytes: int, partial_bytes: int, *, local_combine: bool) -> torch.Tensor:
    """[W, W] bytes: rows that ranks of a node read from each other, and partial sums sent to other nodes.

    Without local combine every copy's row is read; with it, one row per (token, rank). `partial_bytes`: of the
    row in which partial sums of a token cross the network, once per token and node.
    """
    out = torch.zeros(routing.num_ranks, routing.num_ranks, dtype=torch.int64)
    for source in range(routing.num_ranks):
        for relay, members in routing.relays(source):
            copies = routing.copies[source]
            rows = (copies > 0).long() if local_combine else copies
            for rank in members:
                if rank != relay:
                    out[rank, relay] += rows[:, rank].sum() * row_bytes
            if relay != source:
                out[relay, source] += (copies[:, members] > 0).any(1).sum() * partial_bytes
    return out


def plain_bytes(routing: Routing, row_bytes: int) -> torch.Tensor:
    """[W, W] bytes when every copy travels by itself on the way there; the transposed, on the way back."""
    between = routing.copies.sum(1)
    between.fill_diagonal_(0)
    return between * row_bytes
