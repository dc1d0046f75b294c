"""deep_ep.Config: how many programs move rows, and how large a buffer a row size asks for."""

from __future__ import annotations

from dataclasses import dataclass

from triton_ep.errors import ConfigError
from triton_ep.integrations.arguments import integer

ROWS_PER_RANK = 256
"""What a byte count of a buffer stands for: this many rows from every rank. The layers' memory is sized by tokens."""


_NUMBERS = (
    "num_sms",
    "num_max_nvl_chunked_send_tokens",
    "num_max_nvl_chunked_recv_tokens",
    "num_max_rdma_chunked_send_tokens",
    "num_max_rdma_chunked_recv_tokens",
)


@dataclass(frozen=True)
class Config:
    """Settings of a call; only `num_sms` changes anything.

    Attributes:
        num_sms: programs of the kernels that talk to other ranks.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = ROWS_PER_RANK
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = ROWS_PER_RANK

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            # num_sms moves rows; the others are kept for callers that look at them.
            object.__setattr__(self, name, integer(f"Config.{name}", getattr(self, name), 1, ConfigError))

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes to make a `Buffer` with, for rows of `hidden_bytes`: a number that says how long rows may be."""
        hidden_bytes = integer("hidden_bytes", hidden_bytes, 0, ConfigError)
        return hidden_bytes * integer("num_ranks", num_ranks, 1, ConfigError) * ROWS_PER_RANK

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: what crosses nodes needs no number of its own."""
        return 0


def longest_row(num_nvl_bytes: int, num_ranks: int) -> int:
    """Bytes of the longest row that a buffer of this size was made for."""
    return num_nvl_bytes // (num_ranks * ROWS_PER_RANK)


def low_latency_bytes(max_tokens: int, hidden: int, num_ranks: int) -> int:
    """Bytes that arrivals and partial sums of bf16 rows take on a rank, in two halves each."""
    return 2 * 2 * num_ranks * max_tokens * hidden * 2
