"""Counts of this rank's tokens per destination, without communication (kernels/compute/token_layout.py)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from triton_ep.runtime.launch import INTERPRETING, Launcher, default_aot
from triton_ep.runtime.plans import compact as plans

_CLEARED = 64  # pieces of memory that are zeroed at once


class TokenLayout(NamedTuple):
    """Destinations of this rank's tokens.

    Attributes:
        tokens_per_rank: [W] int32; counts a token once per rank.
        tokens_per_node: [N] int32; counts a token once per node.
        entries_per_expert: [E] int32.
        in_rank: [T, W] bool, whether a token goes to a rank.
    """

    tokens_per_rank: torch.Tensor
    tokens_per_node: torch.Tensor
    entries_per_expert: torch.Tensor
    in_rank: torch.Tensor


class ZeroCounts:
    """Zeroed memory for counts. One launch clears it for many calls, because a launch takes longer than counting.

    Each piece is handed out once, on the stream that cleared it.
    """

    def __init__(self) -> None:
        self._left: dict[tuple[int, int | None, int], list[torch.Tensor]] = {}

    def take(self, length: int, device: torch.device) -> torch.Tensor:
        """`length` int32 zeros, rounded up to a multiple of 4, that start at a multiple of 16 bytes."""
        length = -(-length // 4) * 4
        # A captured graph must clear its own memory at each replay.
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return torch.zeros(length, dtype=torch.int32, device=device)
        # Private, because torch.cuda.current_stream takes microseconds (triton_ep/runtime/launch.py).
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        left = self._left.setdefault((length, device.index, stream), [])
        if not left:
            with torch.inference_mode(False):  # a piece may be used outside inference mode
                left += torch.zeros(_CLEARED, length, dtype=torch.int32, device=device).unbind()
        return left.pop()


def token_layout(
    topk_idx: torch.Tensor, num_experts: int, num_ranks: int, ranks_per_node: int, zeros: ZeroCounts
) -> TokenLayout:
    """Count the destinations of topk_idx [T, K] int32 or int64, -1 = dropped. Local; the host waits for nothing."""
    num_tokens, topk = topk_idx.shape
    num_nodes = num_ranks // ranks_per_node
    counts = zeros.take(num_ranks + num_nodes + num_experts, topk_idx.device)
    in_rank = torch.empty(num_tokens, num_ranks, dtype=torch.bool, device=topk_idx.device)
    _launcher(topk, num_ranks).launch(
        -(-num_tokens // plans.token_layout_tokens(INTERPRETING)),
        topk_idx_ptr=topk_idx,
        counts_ptr=counts,
        in_rank_ptr=in_rank.view(torch.uint8) if INTERPRETING else in_rank,
        num_tokens=num_tokens,
        num_experts=num_experts,
        num_ranks=num_ranks,
        experts_per_rank=num_experts // num_ranks,
        ranks_per_node=ranks_per_node,
    )
    used = [num_ranks, num_nodes, num_experts]
    ranks, nodes, experts, _ = counts.split_with_sizes([*used, counts.shape[0] - sum(used)])
    return TokenLayout(ranks, nodes, experts, in_rank)


@functools.cache
def _launcher(topk: int, num_ranks: int) -> Launcher:
    return Launcher(plans.token_layout(topk, num_ranks, INTERPRETING), aot=default_aot())
