"""Oracle of a router: the experts of a token and their weights, token by token in float64.

The rule is DeepSeek-V3's ("noaux_tc"): experts are chosen by their scores plus a correction bias, in the best groups
only; weights are the scores without the bias. Plain top-k is the case of one group and no bias.
"""

from __future__ import annotations

import torch


def topk(
    logits: torch.Tensor,
    num_chosen: int,
    *,
    score: str,
    expert_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    normalize: bool = True,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts [T, K] int64, best first, and their weights [T, K] float64, from logits [T, E].

    score: "softmax" or "sigmoid". expert_bias: [E], added to the scores for the choice only. A group's score is the sum
    of its two best experts' scores with a bias, its best expert's score without.
    """
    per_group = logits.shape[1] // num_groups
    ids, weights = [], []
    for row in logits.double():
        scores = row.softmax(0) if score == "softmax" else 1 / (1 + torch.exp(-row))
        wanted = scores if expert_bias is None else scores + expert_bias.double()
        best = 1 if expert_bias is None else min(2, per_group)
        of_group = [sum(sorted(group.tolist())[-best:]) for group in wanted.split(per_group)]
        groups = sorted(range(num_groups), key=lambda group: -of_group[group])[:topk_groups]
        allowed = [expert for expert in range(len(row)) if expert // per_group in groups]
        chosen = sorted(allowed, key=lambda expert: -float(wanted[expert]))[:num_chosen]
        found = scores[chosen]
        ids.append(chosen)
        weights.append(found / found.sum() * scale if normalize else found * scale)
    empty = logits.new_zeros(0, num_chosen, dtype=torch.float64)
    return torch.tensor(ids, dtype=torch.int64).view(-1, num_chosen), torch.stack([*weights]) if weights else empty
