"""How rows land: a row per expert (`ExpertMajor`), or a row per (token, rank) with its experts' ids (`Deduplicated`).

Up to their arrival all rows take the same steps (triton_ep/exchange/steps.py). A landing says how many rows that makes,
allocates them, writes them from what arrives, and what of them the combine needs. Low-latency layers have no steps
before the rows: they land expert-major, in `steps.dispatch_low_latency`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic

import torch

from triton_ep.config import EPConfig
from triton_ep.context.context import NO_LIMIT, DispatchCombineContext
from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.context.given import Rows
from triton_ep.context.layout import Sizes
from triton_ep.context.overlap import EPEvent
from triton_ep.context.records import Report
from triton_ep.context.rows import RowFormat
from triton_ep.exchange.request import Arrivals, Received, Sent
from triton_ep.mx.tensor import MXTensor
from triton_ep.ops import compact as compact_ops
from triton_ep.ops import dispatch as dispatch_ops
from triton_ep.ops.row_scales import RowScaled
from triton_ep.runtime.plans.layers import LANDINGS


class Landing(ABC, Generic[Received]):
    """What becomes of rows where they arrive.

    Attributes:
        deduplicated: a token that several experts of a rank want is one row there.
        counts: the part of `placement` that the host reads, after the reports of all ranks.
    """

    deduplicated: ClassVar[bool]
    counts: ClassVar[str]

    @abstractmethod
    def num_rows(self, report: Report) -> int:
        """Rows that a rank gets."""

    @abstractmethod
    def room(self, config: EPConfig, reports: Sequence[Report]) -> tuple[int, int]:
        """Arrival rows and output rows for which all ranks must have room."""

    @abstractmethod
    def limits(self, sizes: Sizes) -> tuple[int, int]:
        """Most arrivals and most output rows of a rank for which buffers of these sizes have the `room`."""

    @abstractmethod
    def make(self, ctx: DispatchCombineContext, fmt: RowFormat, arrivals: Arrivals, has_weights: bool) -> Received:
        """Memory for what arrives. Where fewer rows may come, it is filled, after what the current stream has got."""

    @abstractmethod
    def receive(
        self,
        ctx: DispatchCombineContext,
        fmt: RowFormat,
        received: Received,
        placement: torch.Tensor,
        forward: torch.Tensor | None,
        side: torch.cuda.Stream | None,
    ) -> None:
        """Launch the receiving half; arguments as in `ops.dispatch.receive`."""


@dataclass(slots=True)
class ExpertMajor(Landing[dispatch_ops.Received]):
    """A row per (token, expert), by expert, source rank, token, k.

    Attributes:
        kind: `landing` of `EPAll2AllLayer.dispatch`.
        keep_copies: the caller wants the output rows of each arrival row, whatever the combine needs.
    """

    deduplicated = False
    counts = "expert_offsets"

    kind: str | None = None
    keep_copies: bool = False

    def num_rows(self, report: Report) -> int:
        """Output rows, padding included."""
        return report.rows

    def room(self, config: EPConfig, reports: Sequence[Report]) -> tuple[int, int]:
        """A row per arrival to combine from where rows are summed first, else one per output row."""
        staged = max(report.arrivals for report in reports)
        return staged, staged if config.enable_local_combine else max(report.rows for report in reports)

    def limits(self, sizes: Sizes) -> tuple[int, int]:
        """As `room`."""
        if sizes.config.enable_local_combine:
            return min(sizes.arrival_rows, sizes.output_rows), NO_LIMIT
        return sizes.arrival_rows, sizes.output_rows

    def make(
        self, ctx: DispatchCombineContext, fmt: RowFormat, arrivals: Arrivals, has_weights: bool
    ) -> dispatch_ops.Received:
        """Rows, weights where there are some, output rows of arrival rows where they are wanted."""
        exact = arrivals.host_counts is not None
        return dispatch_ops.make_received(
            ctx, fmt, arrivals.num_rows, arrivals.num_staged, has_weights, exact, self.keep_copies, self.kind
        )

    def receive(
        self,
        ctx: DispatchCombineContext,
        fmt: RowFormat,
        received: dispatch_ops.Received,
        placement: torch.Tensor,
        forward: torch.Tensor | None,
        side: torch.cuda.Stream | None,
    ) -> None:
        """Forward, wait, and copy each arrived row to its output rows."""
        dispatch_ops.receive(ctx, fmt, received, placement, forward, side)

    def output(self, rows: Rows, config: EPConfig) -> torch.Tensor | MXTensor | RowScaled:
        """`recv_x` of a dispatch that received these rows."""
        if rows.scale is None:
            return rows.data
        if self.kind == "row":
            return RowScaled(rows.data, rows.scale)
        scale = rows.scale.view(torch.float8_e8m0fnu)
        return MXTensor(rows.data, scale, torch.float8_e4m3fn, 32, config.token_dtype)


EXPERT_MAJOR = {kind: ExpertMajor(kind) for kind in (None, *LANDINGS)}
"""Expert-major landings by the `landing` of a dispatch."""


@dataclass(slots=True)
class Deduplicated(Landing[compact_ops.Compact]):
    """A row per (token, rank), by source rank and token, with the local ids of its experts and their weights.

    Attributes:
        idx_dtype: of expert ids; None: the caller has ids and weights already.
    """

    deduplicated = True
    counts = "num_recv"

    idx_dtype: torch.dtype | None = None

    def num_rows(self, report: Report) -> int:
        """Arrival rows."""
        return report.arrivals

    def room(self, config: EPConfig, reports: Sequence[Report]) -> tuple[int, int]:
        """A row per arrival to combine from."""
        staged = max(report.arrivals for report in reports)
        return staged, staged

    def limits(self, sizes: Sizes) -> tuple[int, int]:
        """As `room`."""
        return min(sizes.arrival_rows, sizes.output_rows), NO_LIMIT

    def make(
        self, ctx: DispatchCombineContext, fmt: RowFormat, arrivals: Arrivals, has_weights: bool
    ) -> compact_ops.Compact:
        """Rows; ids and weights where ids are wanted."""
        exact = arrivals.host_counts is not None
        return compact_ops.make_compact(ctx, fmt, arrivals.num_rows, exact, self.idx_dtype, has_weights)

    def receive(
        self,
        ctx: DispatchCombineContext,
        fmt: RowFormat,
        received: compact_ops.Compact,
        placement: torch.Tensor,
        forward: torch.Tensor | None,
        side: torch.cuda.Stream | None,
    ) -> None:
        """Forward, wait, and copy each arrived row out as it is."""
        compact_ops.receive(ctx, fmt, received, placement, forward, side)


@dataclass(frozen=True)
class CompactRows:
    """What `dispatch_compact` returns. Rows are ordered by source rank, then by token.

    Attributes:
        x: [R, H] of the dtype given: one row per (token, this rank).
        topk_idx: [R, K] of the dtype given: local expert ids, 0 to e - 1; -1 = an expert of another rank, or dropped.
        topk_weights: [R, K] float32, zero where `topk_idx` is -1; None if no weights were sent.
        num_recv_tokens_per_expert: rows of each local expert, e numbers on the host; None with `num_rows`.
        layout_desc: for `combine`, `combine_topk` and `dispatch_compact_again`.
        scale: [R, S] as given, with one-byte rows; otherwise None.
        event: with async_finish, of the end of the call; otherwise None.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None
    num_recv_tokens_per_expert: list[int] | None
    layout_desc: EPAllToAllLayoutDesc
    scale: torch.Tensor | None = None
    event: EPEvent | None = None


def compact_rows(sent: Sent[compact_ops.Compact], given: Rows) -> CompactRows:
    """What `dispatch_compact` returns of rows whose dtypes are those of `given`; ids were asked for."""
    rows, ids = sent.received, sent.received.topk_idx
    assert ids is not None, "asked for"
    x, scales = Rows(rows.x, rows.scale).like(given)
    counts = None if sent.host_counts is None else list(sent.host_counts)
    return CompactRows(x, ids, rows.topk_weights, counts, sent.desc, scales)
