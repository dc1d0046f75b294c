"""Dispatches that repeat the launches of an earlier one: working out a launch takes longer than the launch.

The kernels of a dispatch, their grids and most of their arguments follow from the layer and from the kind of the call:
how many tokens, which arguments of which dtypes, and how rows land. When a kind comes for the second time, `Noting`
notes its launches while the ordinary steps make them (triton_ep/exchange/steps.py). From then on a `Repeat` makes the
same launches with the tensors of the call, unless something else has changed, which `find` looks at: the sizes of
buffers, kernels compiled since, addresses that are no multiples of 16, hooks of a profiler.

Only dispatches within a node are repeated: by expert ids, a routing map, or the routing of an earlier dispatch, without
scatter indices, hooks and copy engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from triton_ep.context.context import DispatchCombineContext
from triton_ep.context.given import RoutingMap, Rows
from triton_ep.context.layout import Sizes
from triton_ep.context.rows import RowFormat
from triton_ep.exchange.landings import Landing
from triton_ep.exchange.request import Request
from triton_ep.ops.compact import Compact
from triton_ep.ops.dispatch import Beside
from triton_ep.ops.dispatch import Received as Expanded
from triton_ep.ops.routing import OwnRows, Routing
from triton_ep.runtime.launch import INTERPRETING, Launch, Launcher
from triton_ep.runtime.repeat import ALIGNED, repeat

_MOST = 32
"""Kinds that a layer remembers. Where every call has another number of tokens, none comes again."""
_READ, _ROWS = {"read_number": "read"}, {"num_rows": "rows", "row_limit": "rows"}
_FIRST, _NEVER = object(), object()
"""Of a kind that has come once, and of one that cannot be repeated."""


class Counted(NamedTuple):
    """What the steps of a dispatch read whose first kernel, which counts its entries, has been launched.

    Attributes:
        rows: in wire form.
        routing, placement: of `steps.preprocess`.
        own: rows that stay here.
    """

    rows: Rows
    routing: Routing
    placement: torch.Tensor
    own: OwnRows


@dataclass(slots=True)
class Repeat:
    """The launches of one kind of dispatch.

    Attributes:
        sizes, num_compiled: of the buffers, and how many kernels had been compiled, when they were noted.
        first: one of the launchers; all have the same hooks.
        entries, placement: shapes of these tables. packed: of rows that the first kernel quantises, or None.
        noted: what other calls have in common with the noted one; `Counted.rows` is not.
        beside: how rows are received meanwhile.
        count, send, land: launch the first kernel, those that send, and the one that lays rows out.
        ahead: entries and placement of the next call, and the stream for which they were allocated.
        stream: the stream for which this call may allocate them.
    """

    sizes: Sizes
    num_compiled: int
    first: Launcher
    entries: tuple[int, ...]
    placement: tuple[int, ...]
    packed: tuple[int, ...] | None
    noted: Counted
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

    def counted(self, request: Request, rows: Rows, entries: torch.Tensor, placement: torch.Tensor) -> Counted:
        """The same for steps that are not repeated."""
        _, routing, _, own = self.noted
        if isinstance(request.ids, RoutingMap):  # its ids and weights are in memory of the layer
            routing = routing._replace(given=request.ids, entries=entries)
        else:
            routing = routing._replace(ids=request.ids, weights=request.weights, entries=entries)
        if own.in_place:
            own = own._replace(x=rows.data.view(torch.uint8) if INTERPRETING else rows.data)
        return Counted(rows, routing, placement, own)


class Noting:
    """Notes the launches of a dispatch; a context manager around it, which keeps them as a `Repeat`."""

    def __init__(
        self,
        ctx: DispatchCombineContext,
        repeats: dict[tuple[object, ...], object],
        fmt: RowFormat,
        kind: tuple[object, ...],
        request: Request,
    ) -> None:
        self._ctx, self._repeats, self._kind, self._request = ctx, repeats, kind, request
        self._launchers = [*ctx.rows.own.launchers.values(), *fmt.launchers.values()]
        self._fmt, self._sizes, self._num_compiled = fmt, ctx.sizes, Launcher.num_compiled
        self._num_launchers = self._count()
        self._launches: list[Launch] = []
        self._parts: list[list[Launch]] = []  # of `Repeat.count` and `Repeat.send`
        self._result: Repeat | object = _FIRST

    def _count(self) -> int:
        return len(self._ctx.rows.own.launchers) + len(self._fmt.launchers)

    def __enter__(self) -> None:
        for launcher in self._launchers:
            launcher.noted = self._launches

    def __exit__(self, *raised: object) -> None:
        for launcher in self._launchers:
            launcher.noted = None
        self._repeats[self._kind] = self._result

    def end_part(self) -> None:
        """The launches of `Repeat.count`, or of `Repeat.send`, have been made."""
        self._parts.append(list(self._launches))
        self._launches.clear()

    def end(self, counted: Counted, received: Expanded | Compact, beside: Beside | None) -> None:
        """All launches have been made."""
        ctx, request = self._ctx, self._request
        results = _received(received)
        if ctx.sizes is not self._sizes or self._count() != self._num_launchers or not results[0].numel():
            return  # the next call of this kind may do
        if Launcher.num_compiled != self._num_compiled:
            return
        self._result = _NEVER
        tensors = _sent(request, counted.rows, counted.routing.entries, counted.placement)
        sent = {f"sent_{number}": tensor for number, tensor in enumerate(tensors)}
        landed = {f"landed_{number}": tensor for number, tensor in enumerate(results)}
        count, send = repeat(self._parts[0], sent, _READ), repeat(self._parts[1], sent, {})
        land = repeat(list(self._launches), sent | landed, _ROWS)
        if count is None or send is None or land is None:
            return
        self._result = Repeat(
            ctx.sizes,
            self._num_compiled,
            self._launchers[0],
            tuple(counted.routing.entries.shape),
            tuple(counted.placement.shape),
            None if counted.rows.data is request.rows.data else tuple(counted.rows.data.shape),
            _without(counted, request, ctx.no_bytes),
            beside,
            count,
            send,
            land,
        )


def find(
    ctx: DispatchCombineContext, fmt: RowFormat, request: Request, landing: Landing[Any], reads: bool
) -> Repeat | Noting | None:
    """How a dispatch is launched: by repeating noted launches, by the ordinary steps while they are noted, or, None, by
    these alone."""
    (data, scale), ids, weights = request.rows, request.ids, request.weights
    repeats, routed = ctx.repeats, request.routed
    if repeats is None or request.refused or request.scatter is not None or data.shape[0] < 2:
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
    known = repeats.get(kind)
    if isinstance(known, Repeat) and known.sizes is ctx.sizes and known.num_compiled == Launcher.num_compiled:
        return None if known.first.is_hooked else known
    if known is None:
        if len(repeats) >= _MOST:
            repeats.clear()
        repeats[kind] = _FIRST
    if known is None or known is _NEVER or ctx.is_capturing:  # memory of a graph belongs to its replays
        return None
    return Noting(ctx, repeats, fmt, kind, request)


def _stream_of(ctx: DispatchCombineContext) -> int | None:
    """The current stream, if a later call on it may have memory that is allocated now; else None: memory of a graph
    belongs to its replays, that of inference mode to inference."""
    if torch.is_inference_mode_enabled():
        return None
    if ctx.device.type != "cuda":
        return 0
    # Private, because their public counterparts take microseconds (triton_ep/runtime/launch.py).
    if torch._C._cuda_isCurrentStreamCapturing():
        return None
    return int(torch._C._cuda_getCurrentRawStream(ctx.device.index))


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


def _without(counted: Counted, request: Request, nothing: torch.Tensor) -> Counted:
    """The same without the memory of its call."""
    _, routing, _, own = counted
    if isinstance(request.ids, torch.Tensor):
        routing = routing._replace(ids=nothing, weights=None)
    own = own._replace(x=nothing) if own.in_place else own
    return Counted(Rows(nothing), routing._replace(given=None, entries=nothing), nothing, own)
