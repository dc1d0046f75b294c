"""Oracle of compact rows: one row per (token, rank), in the order of source rank and token, and their combine."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from triton_ep.reference.routing import kept_experts


@dataclass(frozen=True)
class CompactResult:
    """Rows that one rank receives.

    Attributes:
        recv_x: [R, H].
        recv_topk_idx: [R, K] int64, local expert ids; -1 = the expert is on another rank, or the entry was dropped.
        recv_topk_weights: [R, K] float32, zero where `recv_topk_idx` is -1; None if no weights were sent.
        num_recv_tokens_per_expert: [e] int64.
        src: [R, 2] int64, (source rank, token) of each row.
    """

    recv_x: torch.Tensor
    recv_topk_idx: torch.Tensor
    recv_topk_weights: torch.Tensor | None
    num_recv_tokens_per_expert: torch.Tensor
    src: torch.Tensor


def dispatch(
    xs: Sequence[torch.Tensor],
    idxs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor] | None,
    rank: int,
    num_experts: int,
) -> CompactResult:
    """Rows that rank `rank` receives when all ranks dispatch together; arguments as in `reference.dispatch`."""
    experts_per_rank = num_experts // len(xs)
    rows, ids, row_weights, src = [], [], [], []
    counts = torch.zeros(experts_per_rank, dtype=torch.int64)
    for source, (x, idx) in enumerate(zip(xs, idxs, strict=True)):
        kept, expert = kept_experts(idx, num_experts)
        here = kept & (expert // experts_per_rank == rank)
        counts += torch.bincount(expert[here] - rank * experts_per_rank, minlength=experts_per_rank)
        token = torch.nonzero(here.any(1)).flatten()
        rows.append(x[token])
        ids.append(torch.where(here, expert - rank * experts_per_rank, -1)[token])
        src.append(torch.stack([torch.full_like(token, source), token], 1))
        if weights is not None:
            row_weights.append(torch.where(here, weights[source], 0.0)[token])
    return CompactResult(
        recv_x=torch.cat(rows),
        recv_topk_idx=torch.cat(ids),
        recv_topk_weights=torch.cat(row_weights) if weights is not None else None,
        num_recv_tokens_per_expert=counts,
        src=torch.cat(src),
    )


def combine(
    ys: Sequence[torch.Tensor],
    results: Sequence[CompactResult],
    rank: int,
    first_k: torch.Tensor,
    out_dtype: torch.dtype,
    biases: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Result of combine on rank `rank`: [T, n] `out_dtype`, the float32 sum of each token's rows, rounded once.

    Arguments:
        ys: every rank's rows [R_r, n].
        results: every rank's dispatch.
        first_k: [T, W] int64, the first k of each token that goes to each rank, K = none. Ranks are added in this
            order.
        biases: [T, n] each, of this rank; the sum starts with them.
    """
    num_tokens, world_size = first_k.shape
    terms = torch.zeros(world_size, num_tokens, ys[rank].shape[1])
    for owner, (y, result) in enumerate(zip(ys, results, strict=True)):
        mine = result.src[:, 0] == rank
        terms[owner, result.src[mine, 1]] = y[mine].float()
    order = first_k.argsort(dim=1, stable=True)
    total = torch.zeros(num_tokens, ys[rank].shape[1])
    for bias in biases:
        total = total + bias.float()
    for place in range(world_size):
        total = total + terms[order[:, place], torch.arange(num_tokens)]
    return total.to(out_dtype)


def first_choice(idx: torch.Tensor, num_experts: int, world_size: int) -> torch.Tensor:
    """[T, W] int64: the first k of each token that goes to each rank; K if none does."""
    kept, expert = kept_experts(idx, num_experts)
    topk = idx.shape[1]
    owner = torch.where(kept, expert // (num_experts // world_size), -1)
    ks = torch.arange(topk).expand_as(owner)
    per_rank = [torch.where(owner == r, ks, topk).min(1).values for r in range(world_size)]
    return torch.stack(per_rank, 1) if idx.numel() else torch.full((idx.shape[0], world_size), topk)
