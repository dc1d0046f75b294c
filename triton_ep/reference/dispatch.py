"""Oracle of dispatch: the rank and the row of every assignment."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from triton_ep.reference.routing import kept_experts


@dataclass(frozen=True)
class DispatchResult:
    """Rows that one rank receives, and the destinations of every rank's assignments.

    Rows are expert-major; within an expert by source rank, within a source rank by (token, k).

    Attributes:
        recv_x: [R, H] received rows; padding rows are zero.
        recv_weights: [R] float32, zero in padding rows; None if no weights were sent.
        expert_offsets: [e + 1] int32, first row of each local expert; last entry = R, padding included.
        num_recv_tokens_per_expert: [e] int32, rows without padding.
        src: [R, 3] int64 (source rank, token, k) of each row, (-1, -1, -1) for padding.
        dst_rank: per source rank [T, K] int64, owner of the assignment's expert; -1 = dropped.
        dst_row: per source rank [T, K] int64, row of the assignment in the owner's `recv_x`; -1 = dropped.
    """

    recv_x: torch.Tensor
    recv_weights: torch.Tensor | None
    expert_offsets: torch.Tensor
    num_recv_tokens_per_expert: torch.Tensor
    src: torch.Tensor
    dst_rank: list[torch.Tensor]
    dst_row: list[torch.Tensor]


def dispatch(
    xs: Sequence[torch.Tensor],
    idxs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor] | None,
    rank: int,
    num_experts: int,
    alignment: int = 1,
    full_scatter_indices: Sequence[torch.Tensor] | None = None,
) -> DispatchResult:
    """Rows that rank `rank` receives when all ranks dispatch together.

    Arguments:
        xs: per source rank [T, H], any dtype; T may differ.
        idxs: per source rank [T, K] int32 or int64; -1 or `num_experts` = dropped.
        weights: per source rank [T, K] float32, or None.
        rank: the receiver.
        num_experts: E, a multiple of the number of ranks.
        alignment: every expert's first row is a multiple of it; rows in between are padding.
        full_scatter_indices: per source rank [T, K], used instead of the computed place of each assignment in the
            sort of that rank's assignments by expert (`routing.RoutingResult.full_scatter_indices`).

    Raises:
        ValueError: E is not a multiple of W, an expert id is out of range, `alignment` < 1.
    """
    world_size = len(xs)
    if num_experts % world_size or alignment < 1:
        raise ValueError(f"{num_experts} experts over {world_size} ranks with alignment {alignment}")
    experts_per_rank = num_experts // world_size

    kept, expert = zip(*(kept_experts(idx, num_experts) for idx in idxs), strict=True)
    counts = torch.stack(
        [torch.bincount(e[k], minlength=num_experts) for k, e in zip(kept, expert, strict=True)]
    )  # [W, E]
    in_use = counts.sum(0)  # [E]
    padded = (in_use + alignment - 1) // alignment * alignment
    by_owner = padded.view(world_size, experts_per_rank)
    first_row = (torch.cumsum(by_owner, 1) - by_owner).flatten()  # [E], in the owner's output
    first_row_of_source = first_row + torch.cumsum(counts, 0) - counts  # [W, E]

    dst_rank, dst_row = [], []
    for source in range(world_size):
        given = None if full_scatter_indices is None else full_scatter_indices[source]
        slot = _slots(kept[source], expert[source], counts[source], given)
        dst_rank.append(torch.where(kept[source], expert[source] // experts_per_rank, -1))
        dst_row.append(torch.where(kept[source], first_row_of_source[source][expert[source]] + slot, -1))

    mine = by_owner[rank]
    num_rows = int(mine.sum())
    recv_x = xs[rank].new_zeros(num_rows, xs[rank].shape[1])
    recv_bytes = recv_x.view(torch.uint8)  # torch indexes bytes, but not every 8-bit float
    recv_weights = None if weights is None else torch.zeros(num_rows)
    src = torch.full((num_rows, 3), -1)
    for source in range(world_size):
        token, k = torch.nonzero(dst_rank[source] == rank, as_tuple=True)
        row = dst_row[source][token, k]
        recv_bytes[row] = xs[source].contiguous().view(torch.uint8)[token]
        src[row] = torch.stack([torch.full_like(token, source), token, k], 1)
        if weights is not None and recv_weights is not None:
            recv_weights[row] = weights[source][token, k]

    owned = slice(rank * experts_per_rank, (rank + 1) * experts_per_rank)
    return DispatchResult(
        recv_x=recv_x,
        recv_weights=recv_weights,
        expert_offsets=torch.cat([torch.zeros(1), torch.cumsum(mine, 0)]).int(),
        num_recv_tokens_per_expert=in_use[owned].int(),
        src=src,
        dst_rank=dst_rank,
        dst_row=dst_row,
    )


def _slots(kept: torch.Tensor, expert: torch.Tensor, counts: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
    """[T, K] index of each assignment among its source's assignments to the same expert."""
    if given is not None:
        return given.long() - (torch.cumsum(counts, 0) - counts)[expert]
    seen = [0] * counts.numel()
    slot, experts = torch.zeros_like(expert).flatten().tolist(), expert.flatten().tolist()
    for place in torch.nonzero(kept.flatten()).flatten().tolist():
        slot[place] = seen[experts[place]]
        seen[experts[place]] += 1
    return torch.tensor(slot, dtype=expert.dtype).view_as(expert)
