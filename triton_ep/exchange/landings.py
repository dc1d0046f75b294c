"""Layouts of received rows: a row per expert (`ExpertMajor`), or a row per (token, rank) with the ids of its experts
(`Deduplicated`).

All dispatches share the steps until rows arrive (triton_ep/exchange/steps.py). A landing counts the received rows,
allocates them, and copies the staging rows into them. Low-latency layers always receive expert-major rows
(`steps.dispatch_low_latency`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias

import torch

from triton_ep.config import EPConfig
from triton_ep.context.context import NO_LIMIT, DispatchCombineContext, first_rows
from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.context.given import Rows
from triton_ep.context.layout import Sizes
from triton_ep.context.overlap import EPEvent
from triton_ep.context.records import ARRIVALS, ROWS, SUMS, Report, Reports
from triton_ep.context.rows import RowFormat
from triton_ep.exchange.request import Arrivals, Received, Sent
from triton_ep.mx.tensor import MXTensor
from triton_ep.ops import compact as compact_ops
from triton_ep.ops import dispatch as dispatch_ops
from triton_ep.ops.routing import OwnRows
from triton_ep.ops.row_scales import RowScaled
from triton_ep.ops.tuning import Laid
from triton_ep.runtime.plans.layers import LANDINGS


class Landing(ABC, Generic[Received]):
    """Layout of the received rows of a dispatch.

    Attributes:
        deduplicated: a token for several experts of a rank is one row there.
        counts: the part of `placement` that the host reads, after the reports of all ranks.
        laid: how the rows are laid out, for numbers of programs.
    """

    deduplicated: ClassVar[bool]
    counts: ClassVar[str]
    laid: Laid

    @abstractmethod
    def num_rows(self, report: Report) -> int:
        """Rows that the rank of this report receives."""

    @abstractmethod
    def room(self, config: EPConfig, reports: Reports) -> tuple[int, int]:
        """Staging rows, and rows that combine reads, for which all ranks must have room."""

    @abstractmethod
    def limits(self, sizes: Sizes) -> tuple[int, int, int]:
        """Most staging rows, output rows and sums of a rank for which buffers of these sizes have the `room`."""

    @abstractmethod
    def make(self, ctx: DispatchCombineContext, fmt: RowFormat, arrivals: Arrivals, has_weights: bool) -> Received:
        """Allocate the results. The receiving half fills what does not arrive."""

    @abstractmethod
    def room_ahead(self, ctx: DispatchCombineContext, num_rows: int) -> Arrivals:
        """Numbers with which to `make` room for `num_rows` rows before the host knows how many arrive."""

    @abstractmethod
    def narrow(self, received: Received, arrivals: Arrivals) -> Received:
        """The part of results with more room that `make` would have allocated for these numbers."""

    @abstractmethod
    def receive(
        self,
        ctx: DispatchCombineContext,
        fmt: RowFormat,
        received: Received,
        placement: torch.Tensor,
        own: OwnRows,
        beside: dispatch_ops.Beside | None,
    ) -> None:
        """Launch the receiving half; arguments as in `ops.dispatch.receive`."""


@dataclass(slots=True, eq=False)
class ExpertMajor(Landing[dispatch_ops.Received]):
    """A row per (token, expert), sorted by expert, source rank, token, k.

    Attributes:
        kind: `landing` of `EPAll2AllLayer.dispatch`.
        keep_copies: return the output rows of each staging row, even if combine does not need them.
        keep_rows: return the staging rows, too, in memory of their own; only without a payload.
    """

    deduplicated = False
    counts = "expert_offsets"

    kind: str | None = None
    keep_copies: bool = False
    keep_rows: bool = False
    laid: Laid = field(init=False)

    def __post_init__(self) -> None:
        """Rows land as they travel, or are converted."""
        self.laid = "converted" if self.kind in ("row", "bf16") else "experts"

    def num_rows(self, report: Report) -> int:
        """Output rows, padding included."""
        return report.rows

    def room(self, config: EPConfig, reports: Reports) -> tuple[int, int]:
        """With local combine, combine reads sums, else the output rows."""
        return max(reports.column(ARRIVALS)), max(reports.column(SUMS if config.enable_local_combine else ROWS))

    def limits(self, sizes: Sizes) -> tuple[int, int, int]:
        """As `room`."""
        if sizes.config.enable_local_combine:
            return sizes.arrival_rows, NO_LIMIT, sizes.output_rows
        return sizes.arrival_rows, sizes.output_rows, NO_LIMIT

    def make(
        self, ctx: DispatchCombineContext, fmt: RowFormat, arrivals: Arrivals, has_weights: bool
    ) -> dispatch_ops.Received:
        """Allocate rows; weights if there are some; output rows of staging rows, and these, if needed."""
        numbers, kind = (arrivals.num_rows, arrivals.num_staged), self.kind
        return dispatch_ops.make_received(ctx, fmt, *numbers, has_weights, self.keep_copies, kind, self.keep_rows)

    def room_ahead(self, ctx: DispatchCombineContext, num_rows: int) -> Arrivals:
        """All staging rows: the table of their output rows is short."""
        return Arrivals(num_rows, ctx.sizes.arrival_rows, None)

    def narrow(self, received: dispatch_ops.Received, arrivals: Arrivals) -> dispatch_ops.Received:
        """The first rows, the first lines of the table, and the first staging rows, which are kept for long."""
        (data, scale), weights, copies, kept = received
        rows, staged = arrivals.num_rows, arrivals.num_staged
        return dispatch_ops.Received(
            Rows(data[:rows], None if scale is None else scale[:rows]),
            None if weights is None else weights[:rows],
            None if copies is None else copies[:staged],
            None if kept is None else first_rows(kept, staged),
        )

    def receive(
        self,
        ctx: DispatchCombineContext,
        fmt: RowFormat,
        received: dispatch_ops.Received,
        placement: torch.Tensor,
        own: OwnRows,
        beside: dispatch_ops.Beside | None,
    ) -> None:
        """Wait, and copy each row to its output rows."""
        dispatch_ops.receive(ctx, fmt, received, placement, own, beside, self.laid)

    def output(self, rows: Rows, config: EPConfig) -> torch.Tensor | MXTensor | RowScaled:
        """`recv_x` of a dispatch that received these rows."""
        if rows.scale is None:
            return rows.data
        if self.kind == "row":
            return RowScaled.made(rows.data, rows.scale)
        scale = rows.scale.view(torch.float8_e8m0fnu)
        return MXTensor(rows.data, scale, torch.float8_e4m3fn, 32, config.token_dtype)

    def ahead(self, sent: Sent[dispatch_ops.Received], config: EPConfig) -> Ahead:
        """The results of a dispatch whose counts the host may not have read."""
        received, late = sent.received, sent.settle
        made = Ahead(self.output(received.x, config), received.weights, sent.desc, received.kept)
        if late is None:
            return made

        def settle() -> tuple[bool, Ahead]:
            again, found = late()
            return again, self.ahead(found, config)

        return made._replace(settle=settle)


EXPERT_MAJOR = {kind: ExpertMajor(kind) for kind in (None, *LANDINGS)}
"""Expert-major landings by the `landing` of a dispatch."""
WITH_COPIES = ExpertMajor(keep_copies=True)
"""The expert-major landing of integrations, whose handles describe the rows."""
WITH_ROWS = ExpertMajor(keep_rows=True)
"""The expert-major landing of callers that read rows as they arrived, too."""


@dataclass(slots=True, eq=False)
class Deduplicated(Landing[compact_ops.Compact]):
    """A row per (token, rank), sorted by source rank and token, with the local ids of its experts and their weights.

    Attributes:
        idx_dtype: dtype of expert ids; None: the caller has ids and weights already.
    """

    deduplicated = True
    counts = "num_recv"

    idx_dtype: torch.dtype | None = None
    laid: Laid = field(init=False, default="compact")

    def num_rows(self, report: Report) -> int:
        """Staging rows."""
        return report.arrivals

    def room(self, config: EPConfig, reports: Reports) -> tuple[int, int]:
        """Combine reads sums. Without local combine the buffer may also be lent, for as many rows as arrive."""
        staged, sums = max(reports.column(ARRIVALS)), max(reports.column(SUMS))
        return staged, sums if config.enable_local_combine else max(sums, staged)

    def limits(self, sizes: Sizes) -> tuple[int, int, int]:
        """As `room`."""
        staged = sizes.arrival_rows
        if not sizes.config.enable_local_combine:
            staged = min(staged, sizes.output_rows)
        return staged, NO_LIMIT, sizes.output_rows

    def make(
        self, ctx: DispatchCombineContext, fmt: RowFormat, arrivals: Arrivals, has_weights: bool
    ) -> compact_ops.Compact:
        """Allocate rows; ids and weights if ids are wanted."""
        return compact_ops.make_compact(ctx, fmt, arrivals.num_rows, arrivals.num_staged, self.idx_dtype, has_weights)

    def room_ahead(self, ctx: DispatchCombineContext, num_rows: int) -> Arrivals:
        """A row per staging row."""
        return Arrivals(num_rows, num_rows, None)

    def narrow(self, received: compact_ops.Compact, arrivals: Arrivals) -> compact_ops.Compact:
        """The first rows."""
        rows = arrivals.num_rows
        of_rows = [None if part is None else part[:rows] for part in received[1:]]
        return compact_ops.Compact(received.x[:rows], *of_rows)

    def receive(
        self,
        ctx: DispatchCombineContext,
        fmt: RowFormat,
        received: compact_ops.Compact,
        placement: torch.Tensor,
        own: OwnRows,
        beside: dispatch_ops.Beside | None,
    ) -> None:
        """Wait, and copy each row to the output as it is."""
        compact_ops.receive(ctx, fmt, received, placement, own, beside)


SentExpertMajor: TypeAlias = Sent[dispatch_ops.Received]
SentCompact: TypeAlias = Sent[compact_ops.Compact]
COMPACT = {dtype: Deduplicated(dtype) for dtype in (torch.int32, torch.int64)}
"""Compact landings by the dtype of expert ids."""
ROWS_ALONE = Deduplicated()
"""The compact landing of callers that have ids and weights already."""


class Ahead(NamedTuple):
    """Results of `dispatch_ahead`: what `dispatch` returns, and what is left to do.

    Attributes:
        rows, weights, desc: as of `dispatch`; rows from `desc.expert_offsets[-1]` on are undefined.
        kept: [C, H], each row as it arrived, once, by its place in the staging buffer; None: not kept.
        settle: to be called once, before `combine`: waits for the counts and raises the errors of `dispatch`. Returns
            whether the room was too small, so that the work must be repeated, and the results of `dispatch`. None: the
            host has read the counts, or never does.
    """

    rows: Any
    weights: Any
    desc: EPAllToAllLayoutDesc
    kept: torch.Tensor | None = None
    settle: Callable[[], tuple[bool, Ahead]] | None = None


@dataclass(frozen=True)
class CompactRows:
    """Results of `dispatch_compact`. Rows are sorted by source rank, then by token.

    Attributes:
        x: [R, H] of the dtype given: one row per (token, this rank).
        topk_idx: [R, K] of the dtype given: local expert ids, 0 to e - 1; -1 = an expert of another rank, or dropped.
        topk_weights: [R, K] float32, zero where `topk_idx` is -1; None if no weights were sent.
        num_recv_tokens_per_expert: rows of each local expert, e numbers on the host; None with `num_rows`.
        layout_desc: descriptor for `combine`, `combine_topk` and `dispatch_compact_again`.
        scale: [R, S] of the dtype given, with one-byte rows; otherwise None.
        event: with async_finish, the end of the call; otherwise None.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None
    num_recv_tokens_per_expert: list[int] | None
    layout_desc: EPAllToAllLayoutDesc
    scale: torch.Tensor | None = None
    event: EPEvent | None = None


def compact_rows(sent: Sent[compact_ops.Compact], given: Rows) -> CompactRows:
    """Build the results of `dispatch_compact`, with the dtypes of `given`; the dispatch must have written ids."""
    rows, ids = sent.received, sent.received.topk_idx
    assert ids is not None, "asked for"
    x, scales = Rows(rows.x, rows.scale).like(given)
    counts = None if sent.host_counts is None else list(sent.host_counts)
    return CompactRows(x, ids, rows.topk_weights, counts, sent.desc, scales)
