"""Oracle of the routing step: what one rank computes from its own tokens before any communication."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RoutingResult:
    """Counts and positions of one rank's assignments; all int32, -1 = no position.

    Attributes:
        counts: [E] assignments of this rank to each expert.
        slot: [T, K] index of the assignment among this rank's assignments to the same expert, by (token, k).
        rank_slot: [T, K] index of the token among this rank's tokens that go to the same destination rank;
            given only at the first k that goes to that rank.
        node_slot: [T, K] the same for destination nodes.
        full_scatter_indices: [T, K] place of the entry in a stable sort of this rank's entries by expert,
            dropped ones last; a permutation of 0 .. T*K - 1.
    """

    counts: torch.Tensor
    slot: torch.Tensor
    rank_slot: torch.Tensor
    node_slot: torch.Tensor
    full_scatter_indices: torch.Tensor


def routing(idx: torch.Tensor, num_experts: int, world_size: int, ranks_per_node: int) -> RoutingResult:
    """Routing of one rank's tokens.

    Arguments:
        idx: [T, K] int32 or int64, expert of each (token, k); -1 or `num_experts` = dropped.
        num_experts: E, a multiple of `world_size`.
        world_size: W, a multiple of `ranks_per_node`.

    Raises:
        ValueError: E or W is not a multiple as required, or an expert id is out of range.
    """
    kept, expert = kept_experts(idx, num_experts)
    experts_per_rank = _divide(num_experts, world_size, "num_experts", "world_size")
    num_nodes = _divide(world_size, ranks_per_node, "world_size", "ranks_per_node")

    sort_key = torch.where(kept, expert, num_experts).flatten()
    scatter = torch.empty_like(sort_key)
    scatter[torch.argsort(sort_key, stable=True)] = torch.arange(sort_key.numel())
    scatter = scatter.view(idx.shape)

    counts = torch.bincount(sort_key, minlength=num_experts + 1)[:num_experts]
    start = torch.cumsum(counts, 0) - counts
    slot = torch.where(kept, scatter - start[expert], -1)

    dst_rank = expert // experts_per_rank
    return RoutingResult(
        counts=counts.int(),
        slot=slot.int(),
        rank_slot=_slot_of_first(dst_rank, kept, world_size),
        node_slot=_slot_of_first(dst_rank // ranks_per_node, kept, num_nodes),
        full_scatter_indices=scatter.int(),
    )


def kept_experts(idx: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask of kept entries, [T, K] bool, and their experts, [T, K] int64 with 0 for dropped entries.

    Raises:
        ValueError: an entry is neither an expert nor one of the two marks of a dropped entry, -1 and E.
    """
    idx = idx.long()
    wrong = (idx < -1) | (idx > num_experts)
    if wrong.any():
        token, k = torch.nonzero(wrong)[0].tolist()
        raise ValueError(f"idx[{token}, {k}] is {int(idx[token, k])}, must be in [-1, {num_experts}]")
    kept = (idx >= 0) & (idx < num_experts)
    return kept, torch.where(kept, idx, 0)


def _divide(whole: int, parts: int, whole_name: str, parts_name: str) -> int:
    if parts < 1 or whole % parts:
        raise ValueError(f"{whole_name} {whole} is not a multiple of {parts_name} {parts}")
    return whole // parts


def _slot_of_first(destination: torch.Tensor, kept: torch.Tensor, num_destinations: int) -> torch.Tensor:
    """[T, K] index of the token among the tokens for its destination, at the first k that goes there; else -1."""
    num_tokens, topk = destination.shape
    goes = torch.zeros(num_tokens, num_destinations, dtype=torch.bool)
    result = torch.full((num_tokens, topk), -1, dtype=torch.int32)
    first = torch.zeros(num_tokens, topk, dtype=torch.bool)
    token = torch.arange(num_tokens)
    for k in range(topk):
        first[:, k] = kept[:, k] & ~goes[token, destination[:, k]]
        goes[token[first[:, k]], destination[first[:, k], k]] = True
    index = torch.cumsum(goes, 0) - 1  # valid for tokens that go there
    for k in range(topk):
        result[:, k] = torch.where(first[:, k], index[token, destination[:, k]], -1).int()
    return result
