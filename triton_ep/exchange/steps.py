"""The steps of a dispatch and of a combine, in the order of the protocol (docs/concepts/protocol.md).

A dispatch: count · exchange splits, quantise · place · send · push · forward · read back, raise, grow · land. If
buffers must grow, place, send, push and forward have done nothing and are launched again. In layers with `copy_engines`
these send the rows in place of the push. Every dispatch of a layer is one `Request` passed to `dispatch`, with a
`Landing` for the layout of the received rows. Low-latency layers use `dispatch_low_latency`, which sends rows first and
counts afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Generic

import torch

from triton_ep.context.context import MOST_WASTED, DispatchCombineContext, reports_failure
from triton_ep.context.descriptor import EPAllToAllLayoutDesc, made_desc
from triton_ep.context.given import RoutingMap, Rows
from triton_ep.context.layout import placement_parts
from triton_ep.context.records import ARRIVALS_HERE, ROWS, Reports
from triton_ep.context.rows import RowFormat
from triton_ep.exchange import checks, repeated_combine
from triton_ep.exchange import repeated_dispatch as repeated
from triton_ep.exchange.landings import Landing
from triton_ep.exchange.request import Arrivals, Counted, Outputs, Received, Request, Sent, Signals
from triton_ep.kernels.device.codes import (
    HOST_AGAIN,
    HOST_BACKWARD,
    HOST_COMPACT,
    HOST_READS,
    HOST_REJECTED,
    HOST_SCALED,
    HOST_SCATTER,
    HOST_WEIGHTS,
)
from triton_ep.ops import combine as combine_ops
from triton_ep.ops import compact as compact_ops
from triton_ep.ops import copy_engines, tuning
from triton_ep.ops import dispatch as dispatch_ops
from triton_ep.ops import low_latency as low_latency_ops
from triton_ep.ops import routing as routing_ops
from triton_ep.runtime.launch import INTERPRETING

_NOT_NOTED = nullcontext()
_AHEAD = 32
"""Rows of recent dispatches per row of additional room for the next one."""


@reports_failure("dispatch", begun=False)
def dispatch(
    ctx: DispatchCombineContext,
    request: Request,
    landing: Landing[Received],
    split: bool = False,
    later: bool = False,
) -> Sent[Received]:
    """Run all steps of a request.

    If the host reads no counts it cannot grow buffers later, so they grow first. Ranks with refused arguments take part
    in that, because the other ranks wait for them.

    split: the caller launches the receiving half; otherwise it has been launched.
    later: the host may read the counts later, by `Sent.settle`, and until then results may have more rows than arrive.
    """
    reads = ctx.config.recv_capacity is None and request.num_rows is None
    if reads:
        checks.check_not_captured(ctx.is_capturing)
    elif request.routed is None and ctx.config.recv_capacity is None:
        ctx.make_room_for_all()
    fmt = ctx.rows.own if request.rows.scale is None else ctx.rows.scaled
    known = None if split else repeated.find(ctx, fmt, request, landing, reads)
    with known if isinstance(known, repeated.NotedDispatch) else _NOT_NOTED:
        if isinstance(known, repeated.RepeatedDispatch):
            rows, entries, placement, tensors = known.begin(ctx, request, reads)
            counted = None
        else:
            counted, tensors = count(ctx, request, landing, split, reads, fmt), []
            rows, entries, placement = counted.rows, counted.routing.entries, counted.placement
        # From here on the other ranks wait for this rank; `reports_failure` compares this number.
        ctx.num_dispatches += 1
        forward = None if ctx.config.is_intra_node else dispatch_ops.make_forward(ctx)
        flight = Flight(ctx, request, landing, split, fmt, rows, entries, placement, forward, counted, known, tensors)
        # Launched before the host reads any counts; the kernels decide whether they may send (device/host_read.py).
        beside = flight.begin()
        ahead = flight.receive_ahead(beside) if reads and not split and not request.refused else None
        if ahead is not None and later:
            made = flight.sent(landing.room_ahead(ctx, ahead[1]), ahead[0])
            made.settle = partial(_settle, ctx, flight, *ahead)
        elif reads:
            made = flight.read_and_receive(ahead, beside)
        else:
            made = flight.receive(known_arrivals(ctx, request, placement), beside)
        if not split:
            ctx.poll_status()
        return made


@reports_failure("dispatch", begun=True)
def _settle(
    ctx: DispatchCombineContext, flight: Flight[Received], received: Received, room: int
) -> tuple[bool, Sent[Received]]:
    """Read the counts of a dispatch whose rows were received ahead; receive them again if they did not fit."""
    arrivals, grown, beside = flight.read_counts(None)
    again = grown or arrivals.num_rows > room
    if again:
        made = flight.receive(arrivals, beside)
    else:
        made = flight.sent(arrivals, flight.landing.narrow(received, arrivals))
    ctx.poll_status()
    return again, made


@dataclass(slots=True)
class Flight(Generic[Received]):
    """A dispatch whose counts have been exchanged, and its remaining steps.

    Attributes:
        ctx, request, landing, split: arguments of `dispatch`.
        fmt: the format of its rows.
        rows: in wire form.
        entries: of its routing. placement: of `preprocess`.
        forward: tables for rows that other nodes send, or None.
        counted: what the steps read; None: a `Repeat` has not needed it yet.
        known: how kernels are launched, of `repeated.find`. tensors: what a `Repeat` launches them with.
    """

    ctx: DispatchCombineContext
    request: Request
    landing: Landing[Received]
    split: bool
    fmt: RowFormat
    rows: Rows
    entries: torch.Tensor
    placement: torch.Tensor
    forward: torch.Tensor | None
    counted: Counted | None
    known: repeated.RepeatedDispatch | repeated.NotedDispatch | None
    tensors: Sequence[torch.Tensor]

    @property
    def has_weights(self) -> bool:
        """Whether rows arrive with weights."""
        ids, weights = self.request.ids, self.request.weights
        return weights is not None or (isinstance(ids, RoutingMap) and ids.probs is not None)

    def pieces(self) -> Counted:
        """`counted`, also after a `Repeat`."""
        if self.counted is None:
            assert isinstance(self.known, repeated.RepeatedDispatch), "the steps have counted otherwise"
            routing = routing_ops.prepare(self.ctx, self.request.ids, self.request.weights)
            routing = routing._replace(entries=self.entries)
            own = _own_rows(self.ctx, self.rows, routing, self.known.in_place)
            self.counted = Counted(self.rows, routing, self.placement, own)
        return self.counted

    def begin(self) -> dispatch_ops.Beside | None:
        """`send` for the first time."""
        known = self.known
        if isinstance(known, repeated.RepeatedDispatch):
            known.send(*self.tensors)
            return known.beside
        if known is not None:
            known.end_part()
        beside = self.send()
        if known is not None:
            known.end_part()
        return beside

    def send(self) -> dispatch_ops.Beside | None:
        """Place and send the rows, and forward those of other nodes unless the receiving half is the caller's.

        Returns how they are received meanwhile; None: afterwards.
        """
        ctx, fmt = self.ctx, self.fmt
        rows, routing, placement, own = self.pieces()
        routing_ops.place(ctx, fmt, routing, placement, self.request.scatter, own)
        if ctx.config.copy_engines:
            copy_engines.send(ctx, fmt, rows, own)
            return None
        beside = dispatch_ops.fork(ctx, self.split)
        network = None
        if not ctx.config.is_intra_node:
            network = dispatch_ops.fork_network(ctx, self.split)
            dispatch_ops.send(ctx, fmt, rows, routing, placement, network)
        dispatch_ops.push(ctx, fmt, rows, routing, placement, beside is not None, self.landing.laid)
        if self.forward is not None and not self.split:
            self.forward_rows()
        if network is not None:
            ctx.crossing.join()
        return beside

    def forward_rows(self) -> None:
        """Push rows that other nodes send on to the ranks of this node."""
        if self.forward is not None:
            reduced = self.ctx.config.enable_local_combine or self.landing.deduplicated
            dispatch_ops.forward(self.ctx, self.fmt, self.forward, self.has_weights, reduced, self.placement)

    def receive(self, arrivals: Arrivals, beside: dispatch_ops.Beside | None) -> Sent[Received]:
        """Allocate the results while rows are in flight; launch the receiving half, or leave that to the caller."""
        ctx, landing = self.ctx, self.landing
        received = landing.make(ctx, self.fmt, arrivals, self.has_weights)
        if self.split:
            return self.sent(arrivals, received, partial(self.receive_later, received))
        self.land(received, beside, arrivals.num_rows)
        return self.sent(arrivals, received)

    def land(self, received: Received, beside: dispatch_ops.Beside | None, num_rows: int) -> None:
        """Launch the receiving half, with room for `num_rows` rows."""
        known = self.known
        if isinstance(known, repeated.RepeatedDispatch) and beside is known.beside:
            known.finish(self.ctx, self.tensors, received, num_rows)
            return
        counted = self.pieces()
        self.landing.receive(self.ctx, self.fmt, received, self.placement, counted.own, beside)
        if isinstance(known, repeated.NotedDispatch):
            known.end(counted, received, beside)
            self.known = None

    def receive_later(self, received: Received) -> None:
        """The receiving half of a split dispatch."""
        self.forward_rows()
        self.landing.receive(self.ctx, self.fmt, received, self.placement, self.pieces().own, None)

    def receive_ahead(self, beside: dispatch_ops.Beside | None) -> tuple[Received, int] | None:
        """Launch the receiving half before the host reads the counts, with room for a few rows more than lately.

        Then rows are laid out as they arrive, and the host has less to do when it has read. The kernel does nothing if
        the dispatch is held or the room is too small. Returns the results, and for how many rows they have room; None:
        nothing was launched.
        """
        ctx, landing = self.ctx, self.landing
        before = ctx.rows_before(landing.counts, self.rows.data.shape[0])
        if not before:
            return None
        room = before + before // _AHEAD
        received = landing.make(ctx, self.fmt, landing.room_ahead(ctx, room), self.has_weights)
        self.land(received, beside, room)
        return received, room

    def read_counts(self, beside: dispatch_ops.Beside | None) -> tuple[Arrivals, bool, dispatch_ops.Beside | None]:
        """Read the counts. Returns them, whether buffers grew and rows were sent anew, and what `send` returned."""
        ctx, landing = self.ctx, self.landing
        arrivals, grown = init_output_buffer(ctx, self.request, landing, self.placement)
        ctx.note_rows(landing.counts, self.rows.data.shape[0], arrivals.num_rows)
        if not grown:
            return arrivals, False, beside
        release_held(ctx, self.placement)
        self.pieces()
        self.known = None  # its launches are for smaller buffers
        return arrivals, True, self.send()

    def read_and_receive(
        self, ahead: tuple[Received, int] | None, beside: dispatch_ops.Beside | None
    ) -> Sent[Received]:
        """Read the counts, and receive the rows unless the room of `receive_ahead` was right: neither too small, nor so
        large that memory is wasted."""
        arrivals, grown, beside = self.read_counts(beside if ahead is None else None)  # joined
        if ahead is None or grown or not arrivals.num_rows <= ahead[1] <= MOST_WASTED * arrivals.num_rows:
            return self.receive(arrivals, beside)
        return self.sent(arrivals, self.landing.narrow(ahead[0], arrivals))

    def sent(self, arrivals: Arrivals, received: Received, receive: Callable[[], None] | None = None) -> Sent[Received]:
        """The dispatch as `dispatch` returns it."""
        cfg, deduplicated = self.ctx.config, self.landing.deduplicated
        desc = made_desc(
            num_dispatch_token_cur_rank=self.rows.data.shape[0],
            num_recv_rows=arrivals.num_rows,
            entries=self.entries,
            placement=self.placement,
            shape=self.ctx.topology,
            layer_id=self.ctx.layer_id,
            dispatch_number=self.ctx.num_dispatches,
            forward=self.forward,
            skipped_token_topk_mapping_indices=received.copy_rows if cfg.enable_local_combine or deduplicated else None,
            full_scatter=self.request.scatter is not None,
            compact=deduplicated,
            host_expert_offsets=None if deduplicated else arrivals.host_counts,
            host_num_rows=None if deduplicated else arrivals.host_rows,
            host_arrivals=arrivals.host_arrivals,
        )
        return Sent(received, desc, arrivals.host_counts, receive or _no_more)


def count(
    ctx: DispatchCombineContext,
    request: Request,
    landing: Landing[Received],
    split: bool,
    reads: bool,
    fmt: RowFormat,
) -> Counted:
    """The first steps, until the counts of all ranks are exchanged."""
    rows, whole = dispatch_ops.to_send(ctx, fmt, request.rows)
    routing, placement = preprocess(ctx, request, rows, landing, reads)
    # Rows that the caller lays out later may have changed until then.
    return Counted(rows, routing, placement, _own_rows(ctx, rows, routing, int(whole and not split)))


def _own_rows(
    ctx: DispatchCombineContext, rows: Rows, routing: routing_ops.Routing, in_place: int
) -> routing_ops.OwnRows:
    given = (rows.data.view(torch.uint8) if INTERPRETING else rows.data) if in_place else ctx.no_bytes
    return routing_ops.OwnRows(given, routing.own_tokens, in_place)


def preprocess(
    ctx: DispatchCombineContext, request: Request, rows: Rows, landing: Landing[Received], reads: bool
) -> tuple[routing_ops.Routing, torch.Tensor]:
    """Count entries, assign slots, and exchange the counts of all ranks; quantise the rows to send meanwhile. Returns
    the routing and the `placement`.

    rows: from `to_send`. reads: the host will read the placement. The specification of `EPAll2AllLayer` names this
    step.
    """
    ids, bad_scatter = request.ids, None
    if request.scatter is not None and isinstance(ids, torch.Tensor):
        num_experts = ctx.config.num_experts
        good = routing_ops.legal_scatter(ids, request.scatter, num_experts)
        # A bad table drops all entries, because no row may be written by it. Illegal ids are still reported.
        legal = (ids >= 0) & (ids < num_experts)
        ids = torch.where(legal & ~good, -1, ids)
        bad_scatter = torch.where(good, 0, HOST_SCATTER).int().view(1)
    routing = routing_ops.prepare(ctx, ids, request.weights)
    word = _host_word(ctx, request, landing.deduplicated, routing.weights is not None)
    routed = None if request.routed is None else request.routed.placement
    room = landing.limits(ctx.sizes) if reads else None
    quantises = ctx.config.payload is not None and request.rows.scale is None
    unpacked = (request.rows.data, rows.data) if quantises else None
    return routing, routing_ops.exchange_splits(
        ctx, routing, word, bad_scatter, routed, room, request.needed_tokens, unpacked
    )


def _host_word(ctx: DispatchCombineContext, request: Request, deduplicated: bool, has_weights: bool) -> int:
    """The word that this rank reports to the others about the call (kernels/device/codes.py)."""
    cfg = ctx.config
    reads = cfg.recv_capacity is None and request.num_rows is None and not request.others_know
    return (
        HOST_REJECTED * request.refused
        | HOST_WEIGHTS * has_weights
        | HOST_SCALED * (request.rows.scale is not None and cfg.payload is None)
        | HOST_AGAIN * (request.routed is not None)
        | HOST_COMPACT * deduplicated
        | HOST_BACKWARD * ctx.backward
        | HOST_READS * reads
    )


def init_output_buffer(
    ctx: DispatchCombineContext, request: Request, landing: Landing[Received], placement: torch.Tensor
) -> tuple[Arrivals, bool]:
    """Read the row counts on the host; return them, and whether buffers grew. (The name is the specification's.)

    Raises the errors of any rank on all ranks, and grows buffers by the same numbers on all ranks. In both cases the
    device has decided, by the same reports, not to send any row.
    """
    cfg = ctx.config
    parts = placement_parts(cfg.world_size, cfg.local_world_size, cfg.num_experts_per_rank)
    first, count = parts[landing.counts]
    words = ctx.read_back()
    reports = Reports(words, cfg.world_size)
    own = reports[cfg.rank]
    if request.others_know:
        ctx.unread = placement
        return Arrivals(landing.num_rows(own), ctx.sizes.arrival_rows, None), False
    checks.raise_for_ranks(cfg, reports)
    grown = ctx.grow(*landing.room(cfg, reports))
    counts, rows = tuple(words[first : first + count]), tuple(reports.column(ROWS))
    here = tuple(reports.column(ARRIVALS_HERE)) if cfg.copy_engines else None
    return Arrivals(landing.num_rows(own), own.arrivals, counts, rows, here), grown


def known_arrivals(ctx: DispatchCombineContext, request: Request, placement: torch.Tensor) -> Arrivals:
    """Most rows that may arrive, if the host reads no counts: buffers are large enough, `check` raises the errors."""
    num_rows = request.num_rows if ctx.config.recv_capacity is None else ctx.config.recv_capacity
    assert num_rows is not None, "otherwise the host reads it"
    # A captured dispatch has not run, and may never run.
    ctx.unread = None if ctx.is_capturing else placement
    return Arrivals(num_rows, ctx.sizes.arrival_rows, None)


def release_held(ctx: DispatchCombineContext, placement: torch.Tensor) -> None:
    """Clear the `held` word, so that the kernels launched again send their rows: the buffers now have room."""
    cfg = ctx.config
    first, _ = placement_parts(cfg.world_size, cfg.local_world_size, cfg.num_experts_per_rank)["held"]
    placement[first].zero_()


@reports_failure("dispatch", begun=False)
def dispatch_low_latency(
    ctx: DispatchCombineContext, request: Request, split: bool = False
) -> Sent[dispatch_ops.Received]:
    """`dispatch` of a low-latency layer: push, then wait and lay rows out expert-major, or in the slabs of the request.
    The host never waits."""
    rows, ids = request.rows, request.ids
    assert isinstance(ids, torch.Tensor), "no integration has maps for it"
    ctx.num_dispatches += 1  # before the push, for which the other ranks wait
    scaled = rows.scale is not None or request.quantised
    word = HOST_REJECTED * request.refused | HOST_SCALED * (scaled and ctx.config.payload is None)
    fmt = ctx.rows.scaled if scaled else ctx.rows.own
    received, desc, receive = low_latency_ops.dispatch(ctx, fmt, rows, ids, request.weights, word, request.slabs, split)
    if not split:
        ctx.poll_status()
    return Sent(received, desc, None, receive)


@reports_failure("combine", begun=True)
def combine(
    ctx: DispatchCombineContext,
    y: torch.Tensor,
    weights: torch.Tensor | None,
    desc: EPAllToAllLayoutDesc,
    split: bool = False,
    biases: tuple[torch.Tensor, ...] = (),
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Bring expert outputs y [R, H] back and sum them, plus up to two biases [T, H].

    weights: [R] float32, which multiply the rows; of a low-latency layer also [T, K].

    Returns [T, H] and the receiving half. split: the caller launches that half; otherwise it has been launched. out:
    memory for the result; None: allocated.
    """
    if ctx.config.low_latency:
        out, receive = low_latency_ops.combine(ctx, y, weights, desc, split, out)
        if not split:
            receive()
    elif split:
        out, receive = combine_ops.send(ctx, ctx.rows.own, y, weights, desc, biases, out)
    else:  # the halves overlap
        out = repeated_combine.combine(ctx, Outputs(y, weights, desc, biases, out))
        receive = _no_more
    if not split:
        ctx.poll_status()
    return out, receive


@reports_failure("combine", begun=True)
def wait_signals(ctx: DispatchCombineContext, signals: Signals) -> None:
    """Make the current stream wait for the kernel that writes the rows of a low-latency combine."""
    low_latency_ops.wait_signals(ctx, *signals)
    ctx.poll_status()


def wait_published(ctx: DispatchCombineContext, desc: EPAllToAllLayoutDesc) -> bool:
    """Make the current stream wait until the rows of the latest `combine` have been read.

    That combine must have been a whole call, not split by a hook, with this descriptor and no weights.

    Returns False, without waiting, if only the end of that combine implies that its rows have been read.
    """
    return not ctx.config.low_latency and combine_ops.wait_published(ctx, ctx.rows.own, desc)


def makes_room(ctx: DispatchCombineContext) -> bool:
    """True if `DispatchCombineContext.making_room` has an effect."""
    return not ctx.config.low_latency and tuning.makes_room(ctx)


@reports_failure("combine", begun=True)
def combine_topk(ctx: DispatchCombineContext, values: torch.Tensor, desc: EPAllToAllLayoutDesc) -> torch.Tensor:
    """Bring values [R, K] float32 of deduplicated rows back and sum them per token: [T, K]."""
    out = compact_ops.combine_topk(ctx, values, desc)
    ctx.poll_status()
    return out


def _no_more() -> None:
    """The receiving half of a call that has already run it."""
