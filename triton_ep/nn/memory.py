"""Estimate the GPU memory that MoE layers take besides their parameters, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from triton_ep.config import EPConfig
from triton_ep.context.layout import Sizes, entry_fields, estimate_bytes, initial_sizes
from triton_ep.errors import ConfigError
from triton_ep.nn.arrivals import keeps_arrivals
from triton_ep.nn.exchanges import ALIGNMENT, ExchangeOptions, alignment_of, sizes_of
from triton_ep.nn.prepared import PREPARED
from triton_ep.nn.swiglu_experts import check_precision, check_sizes

_SCALE_BYTES = 4
_TABLE_BYTES = 4
_NUM_SM = 24


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one GPU.

    Attributes:
        rows: received rows, padding included, on which the other numbers are based.
        exchange: symmetric memory of one exchange, which all layers of these sizes share.
        prepared: quantised copies of the weights of one layer.
        saved: tensors that one layer keeps from its forward to its backward pass.
    """

    rows: int
    exchange: int
    prepared: int
    saved: int

    def total(self, layers: int, in_flight: int = 1) -> int:
        """Bytes of `layers` layers over one exchange; in_flight: micro-batches that wait for their backward pass."""
        return self.exchange + layers * (self.prepared + in_flight * self.saved)


def estimate_memory(
    hidden: int,
    ffn: int,
    *,
    world_size: int,
    precision: str = "default",
    prepared: str = "both",
    gated: bool = True,
    **exchange: Unpack[ExchangeOptions],
) -> MemoryEstimate:
    """Estimate the memory of `MoE` layers on `world_size` GPUs; the arguments are those of the `MoE` constructor
    that its memory depends on.

    exchange: `num_experts`, `topk`, `max_tokens` and the other `ExchangeOptions`. local_world_size=None: all GPUs are
    in one node; num_sm=None: 24. Without a capacity, rows and exchange are estimated for an even routing: the exchange
    grows when more rows arrive.

    Raises:
        ConfigError: sizes or options that cannot work.
    """
    given = sizes_of(hidden, exchange, world_size)
    payload, rows = given.payload, given.capacity
    check_precision(payload, precision)
    check_sizes(hidden, ffn, payload)
    if prepared not in PREPARED:
        raise ConfigError(f"prepared is {prepared!r}, choose from {', '.join(PREPARED)}.")
    config = EPConfig(
        max_tokens=given.max_tokens,
        hidden=hidden,
        topk=given.topk,
        num_experts=given.num_experts,
        rank=0,
        world_size=world_size,
        local_world_size=given.local_world_size or world_size,
        alignment=alignment_of(given.low_latency),
        recv_capacity=rows,
        num_sm=given.num_sm or _NUM_SM,
        enable_local_combine=True,
        payload=payload,
        low_latency=given.low_latency,
        shared_staging=not given.low_latency,
    )
    sizes = initial_sizes(config)
    experts = config.num_experts_per_rank
    if rows is None:
        rows = given.max_tokens * given.topk + experts * ALIGNMENT // 2
    return MemoryEstimate(
        rows=rows,
        exchange=estimate_bytes(sizes),
        prepared=_prepared_bytes(experts, hidden, ffn, payload, precision, prepared, gated),
        saved=_saved_bytes(rows, sizes, ffn, payload, precision, gated),
    )


def _prepared_bytes(
    experts: int, hidden: int, ffn: int, payload: str | None, precision: str, prepared: str, gated: bool
) -> int:
    """A byte per value and a scale per row of each operand (exact: two bytes per value), for each use."""
    if payload is None:
        return 0
    width = (2 if gated else 1) * ffn
    values = experts * hidden * (width + ffn)
    uses = {"both": 2, "fprop": 1, "none": 0}[prepared]
    if precision == "exact":
        return 2 * values * uses
    scales = experts * (width + hidden), experts * (hidden + ffn)  # rows of w13 and w2, of their transposes
    return values * uses + _SCALE_BYTES * sum(scales[:uses])


def _saved_bytes(rows: int, sizes: Sizes, ffn: int, payload: str | None, precision: str, gated: bool) -> int:
    """Bytes of the multiplied rows or staging rows, the first product in bf16, row weights, and exchange tables."""
    config = sizes.config
    kept = sizes.arrival_rows if keeps_arrivals(config) else rows
    row = 2 * config.hidden if payload is None or precision == "exact" else config.hidden + _SCALE_BYTES
    pre = 2 * (2 if gated else 1) * ffn
    tables = entry_fields(config) * config.max_tokens * config.topk  # of every (token, k)
    tables += sizes.arrival_rows * config.topk + sizes.placement_length
    if not config.is_intra_node:
        tables += 2 * config.num_nodes * config.max_tokens * config.topk
    return kept * row + rows * (pre + 4) + _TABLE_BYTES * tables
