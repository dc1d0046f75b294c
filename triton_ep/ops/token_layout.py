"""Counts of this rank's tokens per destination, without communication (kernels/compute/token_layout.py)."""

from __future__ import annotations

import functools

import torch

from triton_ep.runtime.launch import INTERPRETING, Launcher, check_place, default_aot
from triton_ep.runtime.plans import compact as plans

_CLEARED = 64  # pieces of memory that are made at once
_MOST_BYTES = 4 << 20  # of tables that are made at once
_TOKENS = plans.token_layout_tokens(INTERPRETING)  # of a program


TokenLayout = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Destinations of this rank's tokens: [W] int32, tokens per rank; [N] int32, tokens per node, each counted once;
[E] int32, entries per expert; [T, W] bool, whether a token goes to a rank."""
Memory = tuple[torch.Tensor, ...]
"""Memory for one layout: int32 counts, zeroed, which are the next three as one; then the four parts of the result."""


class LayoutMemory:
    """Memory for layouts. One launch clears it, and a few calls of torch make the views, for many layouts at once:
    either takes longer than the counting.

    Each piece is handed out once, on the stream that cleared it.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[tuple[int, ...], torch.device, int], list[Memory]] = {}
        self._tables: list[torch.Tensor] = []
        self._kind: tuple[object, ...] = ()  # of these tables

    def take(self, parts: tuple[int, int, int], num_tokens: int, device: torch.device) -> Memory:
        """A piece for these numbers of ranks, nodes and experts, and tokens."""
        on_gpu = device.type == "cuda"
        # A captured graph must clear its own memory at each replay.
        if on_gpu and torch.cuda.is_current_stream_capturing():
            return (*_cleared(parts, device, 1)[0], *_tables((num_tokens, parts[0]), device, 1))
        # Private, because torch.cuda.current_stream takes microseconds (triton_ep/runtime/launch.py).
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice()) if on_gpu else 0
        key = (parts, device, stream)
        counts, tables = self._counts.get(key), self._tables
        if not counts:
            counts = self._counts[key] = _cleared(parts, device, _CLEARED)
        kind = (num_tokens, *key)
        if not tables or kind != self._kind:
            # More at once only for a number of tokens that comes again.
            size = num_tokens * parts[0]
            number = max(1, min(_CLEARED, _MOST_BYTES // max(size, 1))) if kind == self._kind else 1
            tables = self._tables = _tables((num_tokens, parts[0]), device, number)
            self._kind = kind
        return (*counts.pop(), tables.pop())


@torch.inference_mode(False)  # a piece may be used outside inference mode
def _cleared(parts: tuple[int, ...], device: torch.device, number: int) -> list[Memory]:
    """That many times zeros for parts of these lengths: all of them as one, at a multiple of 16 bytes, then each."""
    length = sum(parts)
    memory = torch.zeros(number, -(-length // 4) * 4, dtype=torch.int32, device=device)
    used = memory[:, :length]
    return list(zip(used.unbind(), *[part.unbind() for part in used.split_with_sizes(parts, 1)], strict=True))


@torch.inference_mode(False)
def _tables(shape: tuple[int, int], device: torch.device, number: int) -> list[torch.Tensor]:
    """That many uninitialised tables of bool, each at a multiple of 16 bytes."""
    tokens, ranks = shape
    step = -(-tokens * ranks // 16) * 16
    memory = torch.empty(number * step, dtype=torch.bool, device=device)
    return list(memory.as_strided((number, tokens, ranks), (step, ranks, 1)).unbind())


def token_layout(
    topk_idx: torch.Tensor, num_experts: int, num_ranks: int, ranks_per_node: int, memory: LayoutMemory
) -> TokenLayout:
    """Count the destinations of topk_idx [T, K] int32 or int64, -1 = dropped. Local; the host waits for nothing.

    Raises:
        InputError: `topk_idx` is where no kernel runs.
    """
    check_place("topk_idx", topk_idx)
    num_tokens, topk = topk_idx.shape
    parts = (num_ranks, num_ranks // ranks_per_node, num_experts)
    counts, ranks, nodes, experts, in_rank = memory.take(parts, num_tokens, topk_idx.device)
    _launcher(topk, num_ranks).launch(
        -(-num_tokens // _TOKENS),
        topk_idx_ptr=topk_idx,
        counts_ptr=counts,
        in_rank_ptr=in_rank.view(torch.uint8) if INTERPRETING else in_rank,
        num_tokens=num_tokens,
        num_experts=num_experts,
        num_ranks=num_ranks,
        experts_per_rank=num_experts // num_ranks,
        ranks_per_node=ranks_per_node,
    )
    return ranks, nodes, experts, in_rank


@functools.cache
def _launcher(topk: int, num_ranks: int) -> Launcher:
    return Launcher(plans.token_layout(topk, num_ranks, INTERPRETING), aot=default_aot())
