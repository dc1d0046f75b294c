"""Reference for HybridEP in plain torch, from the inputs of all ranks, as an all-gather would return them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triton_ep.testing import make_workload


@dataclass(frozen=True)
class Inputs:
    """One rank's tokens [T, H], routing map [T, E] and probabilities [T, E], zero where not routed."""

    hidden: torch.Tensor
    routing_map: torch.Tensor
    probs: torch.Tensor

    def to(self, device: torch.device) -> Inputs:
        return Inputs(*(t.to(device) for t in (self.hidden, self.routing_map, self.probs)))


def inputs_of(
    rank: int, world_size: int, tokens: int, *, hidden: int, topk: int, experts: int, seed: int = 0, idle=(), dtype=None
) -> Inputs:
    """Rows that encode their origin; tokens have 0 to `topk` experts, and experts in `idle` get no token."""
    work = make_workload(
        rank,
        world_size,
        tokens,
        hidden=hidden,
        topk=topk,
        num_experts=experts,
        seed=seed,
        dtype=dtype or torch.bfloat16,
    )
    column = torch.where(work.topk_idx < 0, experts, work.topk_idx).long()
    routed = torch.zeros(tokens, experts + 1, dtype=torch.bool).scatter_(1, column, True)[:, :experts]
    probs = torch.zeros(tokens, experts + 1).scatter_(1, column, work.topk_weights)[:, :experts]
    routed[:, list(idle)] = False
    return Inputs(work.x, routed.contiguous(), torch.where(routed, probs, 0.0))


def dispatch(
    inputs: list[Inputs], rank: int, experts_per_rank: int, pad: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Permuted rows and probabilities of a rank, and its rows per expert, padding included."""
    rows, probs, counts = [], [], []
    for expert in range(rank * experts_per_rank, (rank + 1) * experts_per_rank):
        picked = [i.hidden[i.routing_map[:, expert]] for i in inputs]
        weights = [i.probs[i.routing_map[:, expert], expert] for i in inputs]
        real = sum(p.shape[0] for p in picked)
        padding = -real % pad
        rows += [*picked, picked[0].new_zeros(padding, picked[0].shape[1])]
        probs += [*weights, weights[0].new_zeros(padding)]
        counts.append(real + padding)
    return torch.cat(rows), torch.cat(probs), torch.tensor(counts)


def combine(
    outputs: list[torch.Tensor],
    inputs: list[Inputs],
    rank: int,
    pad: int,
    per_rank: bool = True,
    ranks_per_node: int | None = None,
) -> torch.Tensor:
    """[T, H]: sum in float32, expert by expert, of the rows of all ranks' outputs.

    per_rank: as HybridEP, round the sum of each rank before ranks are added, and of each other node before nodes are;
    False: round once. ranks_per_node: None: one node.
    """
    mine, each_node = inputs[rank], ranks_per_node or len(inputs)
    total = torch.zeros(mine.hidden.shape, dtype=torch.float32)

    def rounded(sums: torch.Tensor) -> torch.Tensor:
        return sums.to(mine.hidden.dtype).float()

    of_node = total
    for owner, out in enumerate(outputs):
        if owner % each_node == 0:
            of_node = torch.zeros_like(total)
        partial = torch.zeros_like(total)
        _add_rows(partial if per_rank else total, out, owner, inputs, rank, pad)
        if per_rank and owner // each_node == rank // each_node:
            total += rounded(partial)
        elif per_rank:
            of_node += rounded(partial)
            total += rounded(of_node) if owner % each_node == each_node - 1 else 0
    return total.to(mine.hidden.dtype)


def _add_rows(sums: torch.Tensor, out: torch.Tensor, owner: int, inputs: list[Inputs], rank: int, pad: int) -> None:
    """Add the outputs of the experts of `owner` for the tokens of `rank`."""
    of_rank, start = inputs[rank].routing_map.shape[1] // len(inputs), 0
    for expert in range(owner * of_rank, (owner + 1) * of_rank):
        counts = [int(i.routing_map[:, expert].sum()) for i in inputs]
        first = start + sum(counts[:rank])
        sums[inputs[rank].routing_map[:, expert]] += out[first : first + counts[rank]].float()
        start += -(-sum(counts) // pad) * pad


def slots_of_map(routing_map: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert ids [T, topk] int32, ascending, then -1; and [1] int32, number of experts that did not fit into `topk`."""
    tokens, experts = routing_map.shape
    position = routing_map.cumsum(1, dtype=torch.int32)
    fits = routing_map & (position <= topk)
    # Ids that do not fit go to an extra last column, which is cut off.
    slot = torch.where(fits, position - 1, topk).long()
    ids = torch.full((tokens, topk + 1), -1, dtype=torch.int32, device=routing_map.device)
    expert = torch.arange(experts, dtype=torch.int32, device=routing_map.device).expand(tokens, experts)
    ids.scatter_(1, slot, expert)
    excess = (position[:, -1] - topk).clamp(min=0).sum(dtype=torch.int32).view(1)
    return ids[:, :topk].contiguous(), excess
