"""deep_ep.Config: how many programs move rows, and how large a buffer a row size asks for."""

from __future__ import annotations

from dataclasses import dataclass

from triton_ep.errors import ConfigError

ROWS_PER_RANK = 256
"""What a byte count of a buffer stands for: this many rows from every rank. The layers' memory is sized by tokens."""


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
        if self.num_sms < 1:
            raise ConfigError(f"Config.num_sms is {self.num_sms}; it must be at least 1.")

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes to make a `Buffer` with, for rows of `hidden_bytes`: a number that says how long rows may be."""
        return hidden_bytes * num_ranks * ROWS_PER_RANK

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: what crosses nodes needs no number of its own."""
        return 0


def longest_row(num_nvl_bytes: int, num_ranks: int) -> int:
    """Bytes of the longest row that a buffer of this size was made for."""
    return num_nvl_bytes // (num_ranks * ROWS_PER_RANK)


def low_latency_bytes(max_tokens: int, hidden: int, num_ranks: int) -> int:
    """Bytes that arrivals and partial sums of bf16 rows take on a rank, in two halves each."""
    return 2 * 2 * num_ranks * max_tokens * hidden * 2
