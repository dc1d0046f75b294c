"""The table of symmetric buffers: shape, dtype, writer, reader and reset of each buffer.

The context allocates by this table, and device code finds a buffer by its position in the table
(kernels/device/buffers.py; a test compares the two). A test checks docs/concepts/layout.md against it.

Letters: W ranks, LW ranks per node, N nodes, M max_tokens, H hidden, KP top-k rounded up to a power of two,
S splits row length, P programs, Q chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from triton_ep.config import EPConfig
from triton_ep.kernels.device.codes import (
    ENTRY_PULL_PARTIAL,
    PARTS,
    REPORT_WORDS,
    TAIL_WORDS,
    TILE_ROWS,
    TILE_WORDS,
    partial_stride,
)
from triton_ep.runtime.plans.shape import ROUTING_TOKENS, Shape, next_power_of_2

ALIGN_BYTES = 256
"""Alignment of every symmetric buffer."""


@lru_cache(maxsize=256)
def placement_parts(num_ranks: int, ranks_per_node: int, experts_per_rank: int) -> Mapping[str, tuple[int, int]]:
    """Parts of a dispatch's `placement`: index of the first int32, and length (kernels/device/tables.py)."""
    num_experts, num_nodes = num_ranks * experts_per_rank, num_ranks // ranks_per_node
    parts, at = {}, 0
    for name, count in (
        ("report", num_ranks * REPORT_WORDS),
        ("expert_offsets", experts_per_rank + 1),
        ("num_recv", experts_per_rank),
        ("overflow", 1),
        ("tokens_from_node", num_nodes),
        ("row", _fours(num_experts + num_ranks + num_nodes) + TAIL_WORDS),
        ("step_rows", PARTS * ranks_per_node),
        ("step_tokens", PARTS * num_nodes),
        ("bases", 2 * num_experts + num_ranks),
        ("sums", 3 * num_ranks),
        ("first_arrivals", num_ranks),
        ("tiles", 0),  # as many as the rows need: `tile_words`
    ):
        parts[name] = (at, count)
        at += _fours(count)
    parts["held"] = parts["overflow"][0] + 2, 1
    return parts


def _fours(count: int) -> int:
    return -(-count // 4) * 4


def tile_words(num_rows: int, experts_per_rank: int) -> int:
    """int32 words of the tile table of up to `num_rows` output rows, at the end of `placement`."""
    return TILE_WORDS * (1 + -(-num_rows // TILE_ROWS) + experts_per_rank)


def entry_fields(config: EPConfig) -> int:
    """Fields of every (token, k) in a dispatch's `entries` (kernels/device/tables.py)."""
    return ENTRY_PULL_PARTIAL + (0 if config.is_intra_node else 1)


@dataclass(frozen=True)
class Sizes:
    """Derived sizes of a layer's buffers; `arrival_rows` and `output_rows` may grow."""

    config: EPConfig
    arrival_rows: int
    output_rows: int

    @cached_property
    def shape(self) -> Shape:
        """The sizes that kernels are compiled for."""
        return self.config.shape()

    @cached_property
    def entry_fields(self) -> int:
        """As `entry_fields`."""
        return entry_fields(self.config)

    @cached_property
    def chunks_length(self) -> int:
        """int32 words of the tables kept per routing chunk (kernels/device/tables.py)."""
        c = self.config
        node_tokens = 0 if c.is_intra_node else c.num_nodes * c.max_tokens
        return -(-c.max_tokens // ROUTING_TOKENS) * (self.shape.num_columns + 2) + node_tokens

    @cached_property
    def placement_length(self) -> int:
        """int32 words of a dispatch's `placement`."""
        c = self.config
        # `placement` is allocated before the number of received rows is known.
        most = c.world_size * c.max_tokens * c.topk + c.num_experts_per_rank * (c.alignment - 1)
        first, _ = placement_parts(c.world_size, c.local_world_size, c.num_experts_per_rank)["tiles"]
        return first + tile_words(most if c.recv_capacity is None else c.recv_capacity, c.num_experts_per_rank)

    @cached_property
    def told_words(self) -> int:
        """Words published to the host in a dispatch: the words of `placement` before `overflow`, and one more."""
        c = self.config
        return placement_parts(c.world_size, c.local_world_size, c.num_experts_per_rank)["overflow"][0] + 1

    @cached_property
    def wire_bytes(self) -> int:
        """Bytes of the longest row in dispatch: of the layer's format, or of one-byte rows with scales, whose padding
        makes them longer than 32 two-byte elements."""
        has_scaled = self.config.hidden % 32 == 0
        return max(self.shape.wire_bytes, self.shape.scaled.wire_bytes if has_scaled else 0)

    @property
    def message_meta_offset(self) -> int:
        """Byte offset of the tables in a network message row."""
        return -(-self.wire_bytes // 16) * 16

    @property
    def message_bytes(self) -> int:
        """Bytes of a network message row: payload, then expert ids, output rows, staging rows, weights."""
        return self.message_meta_offset + 4 * self.shape.kp * 4

    @property
    def partial_stride(self) -> int:
        """Elements per row of the partial sums, a multiple of 8."""
        return partial_stride(self.config.hidden)


@dataclass(frozen=True)
class Buffer:
    """One row of the table."""

    name: str
    shape: Callable[[Sizes], tuple[int, ...]]
    dtype: Callable[[EPConfig], torch.dtype]
    writer: str
    reader: str
    reset: str
    grows: str = ""
    """"" = allocated once; "arrival" or "output" = reallocated with that number of rows."""

    def nbytes(self, sizes: Sizes) -> int:
        """Bytes this buffer takes, padding included."""
        count = 1
        for extent in self.shape(sizes):
            count *= extent
        return -(-count * self.dtype(sizes.config).itemsize // ALIGN_BYTES) * ALIGN_BYTES


def _fixed(dtype: torch.dtype) -> Callable[[EPConfig], torch.dtype]:
    return lambda _: dtype


def _world(s: Sizes) -> tuple[int, ...]:
    return (s.config.world_size,)


def _node_rows(s: Sizes) -> int:
    """Rows of a per-node network buffer; none with one node."""
    return 0 if s.config.is_intra_node else s.config.num_nodes * s.config.max_tokens


def _low_latency_rows(s: Sizes) -> int:
    """Rows of a low-latency buffer: one per token of any rank; none in other layers."""
    return s.config.world_size * s.config.max_tokens if s.config.low_latency else 0


def _token(c: EPConfig) -> torch.dtype:
    return c.token_dtype


_EPOCH = "never: values only grow"
_SPLITS = "none: free once this rank posts its next splits row"
_HALVES = "none: two halves by parity of the epoch"
_DONE = "none: free once every rank has posted done_flag"

BUFFERS: tuple[Buffer, ...] = (
    Buffer(
        "splits",
        lambda s: (2, s.config.world_size, s.shape.row_length),
        _fixed(torch.int32),
        "splits exchange of every rank, row = source",
        "splits exchange",
        _HALVES,
    ),
    Buffer("splits_flag", _world, _fixed(torch.int64), "splits exchange of every rank", "splits exchange", _EPOCH),
    Buffer(
        "stage_x",
        lambda s: (s.arrival_rows, s.wire_bytes),
        _fixed(torch.uint8),
        "dispatch push, forward and copy engines of the ranks of this node",
        "dispatch expand, copies for backward passes",
        _SPLITS,
        grows="arrival",
    ),
    Buffer(
        "stage_meta",
        lambda s: (s.config.world_size * s.config.max_tokens, 2 * s.shape.kp),
        _fixed(torch.int32),
        "routing slots and dispatch forward of the ranks of this node",
        "dispatch expand",
        _SPLITS,
    ),
    Buffer(
        "arrive_flag",
        lambda s: (s.config.num_nodes, s.config.local_world_size, s.shape.senders),
        _fixed(torch.int64),
        "dispatch push, forward and copy engines of the ranks of this node; for the latter routing slots of this rank",
        "dispatch expand",
        _EPOCH,
    ),
    Buffer(
        "dispatch_output_buf",
        lambda s: (s.output_rows, s.config.hidden),
        _token,
        "combine stage of this rank; combine reduce and copy engines of the ranks of this node",
        "combine pull and partial of the ranks of this node; sums only of this rank",
        _DONE,
        grows="output",
    ),
    Buffer(
        "weight_recv_buf",
        lambda s: (s.output_rows,),
        lambda c: c.weight_dtype,
        "combine stage of this rank",
        "combine pull and partial of the ranks of this node",
        _DONE,
        grows="output",
    ),
    Buffer(
        "staged_flag",
        lambda s: (s.config.local_world_size, s.shape.max_programs),
        _fixed(torch.int64),
        "combine stage, reduce or copy engines of the ranks of this node; for the latter combine begin of this rank",
        "combine pull and partial",
        _EPOCH,
    ),
    Buffer(
        "done_flag",
        _world,
        _fixed(torch.int64),
        "end of combine of every rank",
        "combine stage, reduce, begin or free",
        _EPOCH,
    ),
    Buffer("barrier_flag", _world, _fixed(torch.int64), "barrier of every rank", "barrier", _EPOCH),
    Buffer("node_barrier_flag", _world, _fixed(torch.int64), "barrier of the ranks of this node", "barrier", _EPOCH),
    Buffer(
        "barrier_scratch",
        lambda s: (s.config.world_size, 4),
        _fixed(torch.int32),
        "barrier and end of combine of every rank (payload without meaning)",
        "barrier and end of combine (source of their puts)",
        "none: no meaning",
    ),
    Buffer(
        "token_send_buf_rdma",
        lambda s: (_node_rows(s), s.message_bytes),
        _fixed(torch.uint8),
        "inter-node send of this rank",
        "inter-node send of this rank (source of its puts)",
        "none: free when the put returns",
    ),
    Buffer(
        "token_recv_buf_rdma",
        lambda s: (_node_rows(s), s.message_bytes),
        _fixed(torch.uint8),
        "inter-node send of the counterpart on each node",
        "inter-node forward",
        _SPLITS,
    ),
    Buffer(
        "token_flag",
        lambda s: (s.config.num_nodes, s.shape.max_chunks),
        _fixed(torch.int64),
        "inter-node send of the counterpart on each node",
        "inter-node forward",
        _EPOCH,
    ),
    Buffer(
        "partial_send_buf",
        lambda s: (_node_rows(s), s.partial_stride),
        lambda c: c.partial_dtype,
        "combine partial of this rank",
        "combine partial of this rank (source of its puts)",
        "none: free when the put returns",
    ),
    Buffer(
        "partial_recv_buf",
        lambda s: (_node_rows(s), s.partial_stride),
        lambda c: c.partial_dtype,
        "combine partial of the counterpart on each node",
        "combine pull",
        _DONE,
    ),
    Buffer(
        "partial_flag",
        lambda s: (s.config.num_nodes, s.shape.max_chunks),
        _fixed(torch.int64),
        "combine partial of the counterpart on each node",
        "combine pull",
        _EPOCH,
    ),
    Buffer(
        "ll_stage_x",
        lambda s: (2, _low_latency_rows(s), s.wire_bytes),
        _fixed(torch.uint8),
        "low-latency dispatch of every rank, part = source",
        "low-latency dispatch",
        _HALVES,
    ),
    Buffer(
        "ll_meta",
        lambda s: (2, _low_latency_rows(s), 2 * s.shape.kp),
        _fixed(torch.int32),
        "low-latency dispatch of every rank, part = source",
        "low-latency dispatch",
        _HALVES,
    ),
    Buffer(
        "ll_counts",
        lambda s: (2, s.config.world_size, next_power_of_2(s.config.num_experts_per_rank)),
        _fixed(torch.int64),
        "low-latency dispatch of every rank, row = source",
        "low-latency dispatch",
        _EPOCH,
    ),
    Buffer(
        "ll_flag",
        lambda s: (2, s.config.world_size),
        _fixed(torch.int64),
        "low-latency dispatch of every rank",
        "low-latency dispatch",
        _EPOCH,
    ),
    Buffer(
        "ll_combine",
        lambda s: (2, _low_latency_rows(s), s.config.hidden),
        _token,
        "low-latency combine of every rank, part = the experts' rank",
        "low-latency combine",
        "none: who has read sums puts zeros back",
    ),
    Buffer(
        "ll_combine_flag",
        lambda s: (2, s.config.world_size),
        _fixed(torch.int64),
        "low-latency combine of every rank",
        "low-latency combine",
        _EPOCH,
    ),
    Buffer(
        "ll_weights",
        lambda s: (2, _low_latency_rows(s), s.config.topk),
        _fixed(torch.int64),
        "low-latency combine of every rank, part = source",
        "low-latency combine",
        _EPOCH,
    ),
    Buffer(
        "ll_row_flag",
        lambda s: (2, _low_latency_rows(s)),
        _fixed(torch.int64),
        "low-latency dispatch of every rank, part = source",
        "low-latency dispatch",
        _EPOCH,
    ),
    Buffer(
        "entered_flag",
        _world,
        _fixed(torch.int64),
        "combine enter of the ranks of this node",
        "combine enter",
        _EPOCH,
    ),
    Buffer(
        "stage_source",
        lambda s: (s.config.world_size * s.config.max_tokens if s.config.copy_engines else 0,),
        _fixed(torch.int32),
        "routing slots of the ranks of this node",
        "dispatch expand",
        _SPLITS,
    ),
    Buffer(
        "overrun_flag",
        lambda s: (s.config.world_size if s.config.copy_engines else 0,),
        _fixed(torch.int64),
        "routing slots and combine begin of the ranks of this node, after an expired wait",
        "splits exchange, end of combine",
        "never: the layer has failed",
    ),
    Buffer(
        "arrived",
        lambda s: (s.config.num_nodes, s.config.local_world_size, s.shape.most_groups),
        _fixed(torch.int64),
        "dispatch expand of this rank",
        "dispatch expand of this rank",
        _EPOCH,
    ),
)


def rows_of_sums(config: EPConfig) -> int:
    """Most rows of a combine buffer for sums: of all tokens of one rank of each node, one per rank of this node that a
    token goes to; with copy engines as many for each rank as it may have at most."""
    if config.copy_engines:
        return config.world_size * config.max_tokens
    return config.num_nodes * min(config.topk, config.local_world_size) * config.max_tokens


def initial_sizes(config: EPConfig, capacity: float = 2) -> Sizes:
    """Initial rows: for a static context all rows; for an exact one, room for `capacity` times the average load.

    A token arrives once per rank, so a rank never gets more than W * M staging rows.
    """
    if config.low_latency:
        return Sizes(config, arrival_rows=1, output_rows=1)  # low latency has buffers of its own
    worst = config.world_size * config.max_tokens
    padding = config.num_experts_per_rank * (config.alignment - 1)
    if config.recv_capacity is not None:
        # Staging rows are not sorted by expert: with fewer of them, an assignment whose output row fits could be left
        # out, and that output row, which counts as the expert's, would be undefined.
        output, arrivals = config.recv_capacity, worst
    else:
        output = max(int(config.max_tokens * config.topk * capacity), 1) + padding
        arrivals = min(worst, output)
    if config.copy_engines:  # which send more rows than arrive, and sums to places of their own
        output, arrivals = max(output, worst), worst
    return sizes_of(config, arrivals, output)


def sizes_of(config: EPConfig, arrival_rows: int, output_rows: int) -> Sizes:
    """Sizes with room for these staging rows, and for the rows that combine reads: output rows, or as many sums as
    staging rows, because all ranks together have as many of either."""
    summed = min(arrival_rows, rows_of_sums(config))
    return Sizes(config, arrival_rows, summed if config.enable_local_combine else output_rows)


def blocks(config: EPConfig) -> Mapping[str, tuple[str, ...]]:
    """Blocks of symmetric memory by name, each with its growth classes, which overlap: each begins at its start."""
    if config.shared_staging:
        return {"": ("",), "staging": ("arrival", "output")}
    return {"": ("",), "arrival": ("arrival",), "output": ("output",)}


def members(grows: str) -> list[Buffer]:
    """The buffers of a growth class, in the order in which they lie in a block."""
    return [buffer for buffer in BUFFERS if buffer.grows == grows]


def class_bytes(sizes: Sizes, grows: str) -> int:
    """Bytes of the buffers of a growth class."""
    return sum(buffer.nbytes(sizes) for buffer in members(grows))


def block_bytes(sizes: Sizes, classes: tuple[str, ...]) -> int:
    """Bytes of a block of these growth classes."""
    return max(class_bytes(sizes, grows) for grows in classes)


def estimate_bytes(sizes: Sizes) -> int:
    """Symmetric memory that a context of these sizes takes on each rank, in bytes."""
    return sum(block_bytes(sizes, classes) for classes in blocks(sizes.config).values())
