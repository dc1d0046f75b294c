"""Dispatches that repeat the launches of an earlier one (repeats.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from triton_ep.context.context import DispatchCombineContext
from triton_ep.context.given import Rows
from triton_ep.context.rows import RowFormat
from triton_ep.exchange.landings import Landing
from triton_ep.exchange.repeats import Facts, Kind, Noting, Repeat, look_up
from triton_ep.exchange.request import Counted, Request
from triton_ep.ops.compact import Compact
from triton_ep.ops.dispatch import Beside
from triton_ep.ops.dispatch import Received as Expanded
from triton_ep.runtime.repeat import ALIGNED, raw_stream, repeat

_READ, _ROWS = {"read_number": "read"}, {"num_rows": "rows", "row_limit": "rows"}
"""Arguments of kernels that differ between calls of one kind, and what they are."""


@dataclass(slots=True)
class RepeatedDispatch(Repeat):
    """The launches of one kind of dispatch.

    Attributes:
        entries, placement: shapes of these tables. packed: of rows that the first kernel quantises, or None.
        in_place: of `OwnRows`.
        beside: how rows are received meanwhile.
        count, send, land: launch the first kernel, those that send, and the one that lays rows out.
        ahead: entries and placement of the next call, and the stream for which they were allocated.
        stream: the stream for which this call may allocate them.
    """

    entries: tuple[int, ...]
    placement: tuple[int, ...]
    packed: tuple[int, ...] | None
    in_place: int
    beside: Beside | None
    count: Callable[..., None]
    send: Callable[..., None]
    land: Callable[..., None]
    ahead: tuple[torch.Tensor, torch.Tensor, int] | None = None
    stream: int | None = None

    def begin(
        self, ctx: DispatchCombineContext, request: Request, reads: bool
    ) -> tuple[Rows, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Launch the first kernel. Returns the rows in wire form, the entries and the placement, and the tensors that
        the other launches take."""
        self.stream = _stream_of(ctx)
        ahead, self.ahead = self.ahead, None
        if ahead is None or ahead[2] != self.stream:
            ahead = self._tables(ctx)
        entries, placement, _ = ahead
        rows = request.rows
        if self.packed is not None:
            rows = Rows(torch.empty(*self.packed, dtype=torch.uint8, device=ctx.device))
        tensors = _sent(request, rows, entries, placement)
        self.count(*tensors, ctx.host_read.begin() if reads else 0)
        return rows, entries, placement, tensors

    def _tables(self, ctx: DispatchCombineContext) -> tuple[torch.Tensor, torch.Tensor, int]:
        # Shapes as single numbers: torch takes half the time to read them.
        entries = torch.empty(*self.entries, dtype=torch.int32, device=ctx.device)
        return entries, torch.empty(*self.placement, dtype=torch.int32, device=ctx.device), self.stream or 0

    def finish(
        self, ctx: DispatchCombineContext, tensors: Sequence[torch.Tensor], received: Expanded | Compact, num_rows: int
    ) -> None:
        """Lay rows out, of which there is room for `num_rows`. tensors: from `begin`."""
        self.land(*tensors, *_received(received), num_rows)
        if self.stream is not None:  # while the GPU works, and in exact mode the host waits for it
            self.ahead = self._tables(ctx)


class NotedDispatch(Noting):
    """Notes the launches of a dispatch in three parts."""

    def __init__(self, ctx: DispatchCombineContext, fmt: RowFormat, kind: Kind, request: Request) -> None:
        super().__init__(ctx, fmt, kind)
        self._request = request

    def end(self, counted: Counted, received: Expanded | Compact, beside: Beside | None) -> None:
        """All launches have been made. beside: how the rows are received."""
        self.end_part()
        results = _received(received)
        if results[0].numel():  # memory by which the launches can be told from others
            self.keep(lambda facts: self._made(facts, counted, results, beside))

    def _made(
        self, facts: Facts, counted: Counted, results: list[torch.Tensor], beside: Beside | None
    ) -> RepeatedDispatch | None:
        request = self._request
        tensors = _sent(request, counted.rows, counted.routing.entries, counted.placement)
        sent = {f"sent_{number}": tensor for number, tensor in enumerate(tensors)}
        landed = {f"landed_{number}": tensor for number, tensor in enumerate(results)}
        counting, sending, landing = self.parts
        count, send, land = (
            repeat(counting, sent, _READ),
            repeat(sending, sent, {}),
            repeat(landing, sent | landed, _ROWS),
        )
        if count is None or send is None or land is None:
            return None
        return RepeatedDispatch(
            facts,
            tuple(counted.routing.entries.shape),
            tuple(counted.placement.shape),
            None if counted.rows.data is request.rows.data else tuple(counted.rows.data.shape),
            counted.own.in_place,
            beside,
            count,
            send,
            land,
        )


def find(
    ctx: DispatchCombineContext, fmt: RowFormat, request: Request, landing: Landing[Any], reads: bool
) -> RepeatedDispatch | NotedDispatch | None:
    """How a dispatch is launched, as of `look_up`."""
    (data, scale), ids, weights, routed = request.rows, request.ids, request.weights, request.routed
    # A single row may have any strides, and no row has no memory.
    if ctx.repeats is None or request.refused or request.scatter is not None or data.shape[0] < 2:
        return None
    parts = (ids,) if isinstance(ids, torch.Tensor) else ids
    given = ids.dtype if isinstance(ids, torch.Tensor) else (ids.probs is None, ids.excess is None)
    address = data.data_ptr()
    for part in (scale, weights, *parts, None if routed is None else routed.placement):
        if part is not None:
            address |= part.data_ptr()
    if address % ALIGNED:
        return None
    kind = (data.shape[0], scale is None, given, weights is None, routed is None, landing, reads, ctx.backward)
    return look_up(ctx, fmt, kind, RepeatedDispatch, NotedDispatch, request)


def _stream_of(ctx: DispatchCombineContext) -> int | None:
    """The current stream, if a later call on it may have memory that is allocated now; else None: memory of a graph
    belongs to its replays, that of inference mode to inference."""
    if torch.is_inference_mode_enabled() or ctx.is_capturing:
        return None
    return raw_stream(ctx.device.index) if ctx.device.type == "cuda" else 0


def _received(received: Expanded | Compact) -> list[torch.Tensor]:
    """The tensors of results, each once."""
    parts = [*received.x, *received[1:]] if isinstance(received, Expanded) else received
    return [part for part in parts if part is not None]


def _sent(request: Request, rows: Rows, entries: torch.Tensor, placement: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that kernels read or write until rows are laid out, each once. rows: in wire form."""
    data, scale = request.rows
    ids, weights = request.ids, request.weights
    found = [data, entries, placement]
    if scale is not None:
        found.append(scale)
    elif rows.data is not data:
        found.append(rows.data)
    if isinstance(ids, torch.Tensor):
        found.append(ids)
    else:
        found += [part for part in ids if part is not None]
    if weights is not None:
        found.append(weights)
    if request.routed is not None:
        found.append(request.routed.placement)
    return found
