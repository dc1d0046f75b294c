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
_Kind = tuple[int, tuple[int, int, int], torch.device, int]
"""What memory is for: tokens; ranks, nodes and experts; device; and stream."""


class LayoutMemory:
    """Memory for layouts. One launch clears it, and a few calls of torch make the views, for many layouts at once:
    either takes longer than the counting.

    Each piece is handed out once, on the stream that cleared it.
    """

    def __init__(self) -> None:
        self._kind: _Kind | None = None  # of the pieces at hand
        self._counts: list[Memory] = []  # at hand
        self._tables: list[torch.Tensor] = []  # at hand
        self._all_counts: dict[tuple[object, ...], list[Memory]] = {}  # by all of a kind but the tokens

    def take(self, parts: tuple[int, int, int], num_tokens: int, device: torch.device) -> Memory:
        """A piece for these numbers of ranks, nodes and experts, and tokens."""
        stream = 0
        if device.type == "cuda":
            # Private, because their public counterparts take microseconds (triton_ep/runtime/launch.py).
            if torch._C._cuda_isCurrentStreamCapturing():
                # A captured graph must clear its own memory at each replay.
                return (*_cleared(parts, device, 1)[0], *_tables((num_tokens, parts[0]), device, 1))
            stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        kind = (num_tokens, parts, device, stream)
        if kind != self._kind or not self._counts or not self._tables:
            self._provide(kind)
        return (*self._counts.pop(), self._tables.pop())

    def _provide(self, kind: _Kind) -> None:
        """Have pieces of this kind at hand."""
        again, self._kind = kind == self._kind, kind
        num_tokens, parts, device, _ = kind
        self._counts = self._all_counts.setdefault(kind[1:], [])
        if not self._counts:
            self._counts += _cleared(parts, device, _CLEARED)
        if not again or not self._tables:
            # More at once only for a number of tokens that comes again.
            most = min(_CLEARED, _MOST_BYTES // max(num_tokens * parts[0], 1))
            self._tables = _tables((num_tokens, parts[0]), device, max(1, most) if again else 1)


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
