"""Who sits where: rank, node, local rank and expert owner, as plain arithmetic.

Ranks of a group are numbered node by node: node n has the ranks [n * local_world_size, (n + 1) * local_world_size).
Expert ids are numbered rank by rank: expert e lives on rank e // experts_per_rank.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """Position of one rank among `world_size` ranks on nodes of `local_world_size` ranks each."""

    rank: int
    world_size: int
    local_world_size: int

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.world_size // self.local_world_size

    @property
    def node(self) -> int:
        """Node of this rank."""
        return self.rank // self.local_world_size

    @property
    def local_rank(self) -> int:
        """Index of this rank on its node."""
        return self.rank % self.local_world_size

    @property
    def first_rank(self) -> int:
        """Lowest rank of this node."""
        return self.node * self.local_world_size

    def counterpart(self, node: int) -> int:
        """Rank of `node` with this rank's local rank: the one that network traffic goes through."""
        return node * self.local_world_size + self.local_rank
