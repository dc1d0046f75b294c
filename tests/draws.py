"""What random tests draw, the same on all ranks, and comparisons of bits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from triton_ep.distributed import current_heap


def bits(x: torch.Tensor) -> torch.Tensor:
    """`x` on the CPU; one-byte dtypes as uint8, which torch compares and indexes."""
    return x.cpu().contiguous().view(torch.uint8) if x.element_size() == 1 else x.cpu()


def same(got: torch.Tensor | None, want: torch.Tensor) -> None:
    """Assert equal shapes, dtypes and bits."""
    assert got is not None
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert torch.equal(bits(got), bits(want))


def parametrize_sequences(metafunc: pytest.Metafunc, topologies: Sequence[tuple[int, int]]) -> None:
    """As many cases (nodes, ranks_per_node, seed) as `--sequences` says, over every topology in turn."""
    numbers = range(metafunc.config.getoption("sequences"))
    cases = [(*topologies[number % len(topologies)], number) for number in numbers]
    metafunc.parametrize(("nodes", "ranks_per_node", "seed"), cases)


class Draws:
    """Numbers of one sequence: all ranks draw the same, so each knows what the others send.

    Attributes:
        draw: for choices. data: for the values of tensors.
    """

    def __init__(self, rank: int, nodes: int, ranks_per_node: int, seed: int) -> None:
        self.rank, self.world, self.ranks_per_node = rank, nodes * ranks_per_node, ranks_per_node
        self.draw, self.data = random.Random(seed), torch.Generator().manual_seed(seed)
        self.device = current_heap().device

    def chance(self, share: float) -> bool:
        """True with this probability."""
        return self.draw.random() < share

    def integers(self, shape: tuple[int, ...], dtype: torch.dtype, most: int = 8) -> torch.Tensor:
        """Small integers, whose sums are exact in any order."""
        return torch.randint(-most, most + 1, shape, generator=self.data).to(dtype)

    def ids(self, tokens: int, topk: int, num_experts: int) -> torch.Tensor:
        """[T, K] distinct experts, of which some entries, or all, are dropped."""
        ids = torch.rand(tokens, num_experts, generator=self.data).argsort(1)[:, :topk]
        return torch.where(torch.rand(ids.shape, generator=self.data) < self.draw.choice([0.0, 0.3, 1.0]), -1, ids)

    def mine(self, each: list[Any] | None) -> Any:
        """This rank's part, on the device."""
        return None if each is None else each[self.rank].to(self.device)
