"""deep_ep.Config: the number of communication CTAs, and the byte count of a buffer for a row size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton_ep.config import LOW_LATENCY_MOST
from triton_ep.errors import ConfigError
from triton_ep.integrations.arguments import integer

ROWS_PER_RANK = 256
"""Rows per rank that a buffer's byte count stands for. The size of layers follows the tokens, not this number."""


_NUMBERS = (
    "num_sms",
    "num_max_nvl_chunked_send_tokens",
    "num_max_nvl_chunked_recv_tokens",
    "num_max_rdma_chunked_send_tokens",
    "num_max_rdma_chunked_recv_tokens",
)


@dataclass(frozen=True)
class Config:
    """Settings of a call; only `num_sms` has an effect.

    Attributes:
        num_sms: CTAs of the communication kernels.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = ROWS_PER_RANK
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = ROWS_PER_RANK

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            # Only num_sms is used; callers may read the others.
            object.__setattr__(self, name, integer(f"Config.{name}", getattr(self, name), 1, ConfigError))

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """`num_nvl_bytes` of a `Buffer` for rows of `hidden_bytes`; `Buffer` derives its longest row from it."""
        hidden_bytes = integer("hidden_bytes", hidden_bytes, 0, ConfigError)
        return hidden_bytes * integer("num_ranks", num_ranks, 1, ConfigError) * ROWS_PER_RANK

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: traffic between nodes needs no separate size."""
        return 0


def longest_row(num_nvl_bytes: int, num_ranks: int) -> int:
    """Bytes of the longest row that a buffer of this size takes."""
    return num_nvl_bytes // (num_ranks * ROWS_PER_RANK)


def low_latency_bytes(max_tokens: int, hidden: int, num_ranks: int) -> int:
    """Bytes of received bf16 rows and of partial sums on a rank, double-buffered."""
    return 2 * 2 * num_ranks * max_tokens * hidden * 2


def check_room(low_latency_mode: bool, num_rdma_bytes: int, max_tokens: Any, hidden: Any, num_ranks: int) -> None:
    """Raise unless a buffer with these two arguments serves low-latency calls of these sizes.

    Raises:
        InputError: sizes that are no sizes.
        ConfigError: another mode, too many tokens, or too few bytes.
    """
    max_tokens = integer("num_max_dispatch_tokens_per_rank", max_tokens, 1)
    hidden = integer("hidden", hidden, 1)
    if max_tokens > LOW_LATENCY_MOST["max_tokens"]:
        raise ConfigError(
            f"num_max_dispatch_tokens_per_rank is {max_tokens}; low-latency calls take up to "
            f"{LOW_LATENCY_MOST['max_tokens']}. Send larger batches by dispatch and combine."
        )
    if not low_latency_mode:
        raise ConfigError("low-latency calls need low_latency_mode=True. Create such a Buffer on all ranks.")
    needed = low_latency_bytes(max_tokens, hidden, num_ranks)
    if num_rdma_bytes < needed:
        raise ConfigError(
            f"{max_tokens} tokens of {hidden} elements per rank need {needed} bytes, but this Buffer has "
            f"num_rdma_bytes={num_rdma_bytes}. Create one with the size that get_low_latency_rdma_size_hint returns."
        )
