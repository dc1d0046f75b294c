"""The steps of a dispatch and of a combine, in the order of the protocol (docs/concepts/protocol.md).

A dispatch: quantise · count · exchange splits · place · send · push · read back, raise, grow · land. Where buffers
grow, place, send and push have done nothing and are launched again. Every dispatch of a layer is one `Request` that
goes through `dispatch`; a `Landing` says what becomes of its rows. That of a low-latency layer goes through
`dispatch_low_latency`: rows fly first, and counting comes after.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from triton_ep.context.context import DispatchCombineContext, reports_failure
from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.context.layout import placement_parts
from triton_ep.context.records import read_reports
from triton_ep.exchange import checks
from triton_ep.exchange.landings import Landing
from triton_ep.exchange.request import Arrivals, Received, Request, Sent, Signals
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
from triton_ep.ops import dispatch as dispatch_ops
from triton_ep.ops import low_latency as low_latency_ops
from triton_ep.ops import routing as routing_ops


@reports_failure("dispatch", begun=False)
def dispatch(
    ctx: DispatchCombineContext, request: Request, landing: Landing[Received], split: bool = False
) -> Sent[Received]:
    """Send the rows of a request; all steps of it.

    Buffers that the host cannot grow later, because it reads no counts, grow first: on ranks with refused arguments as
    on the others, which wait for them.

    split: the caller launches the receiving half; otherwise it has been launched.
    """
    reads = ctx.config.recv_capacity is None and request.num_rows is None
    if reads:
        checks.check_not_captured(ctx.is_capturing)
    elif request.routed is None and ctx.config.recv_capacity is None:
        ctx.make_room_for_all()
    rows = dispatch_ops.quantize(ctx, request.rows)
    routing, placement = preprocess(ctx, request, landing, reads)
    # From here on the other ranks wait for this one; `reports_failure` compares this number.
    ctx.num_dispatches += 1
    fmt = ctx.rows.own if rows.scale is None else ctx.rows.scaled
    has_weights = routing.weights is not None
    forward = dispatch_ops.make_forward(ctx)
    quantized = rows is not request.rows

    def push() -> torch.cuda.Stream | None:
        side = dispatch_ops.fork(ctx, quantized, split)
        if not ctx.config.is_intra_node:
            dispatch_ops.send(ctx, fmt, rows, routing, placement)
        dispatch_ops.push(ctx, fmt, rows, routing, placement)
        return side

    routing_ops.place(ctx, fmt, routing, placement, request.scatter)
    if reads:
        # Launched before the host knows what it reads; whether they may send, kernels know (device/host_read.py).
        side = push()
        arrivals, grown = init_output_buffer(ctx, request, landing, placement)
        if grown:
            release_held(ctx, placement)
            routing_ops.place(ctx, fmt, routing, placement, request.scatter)
            side = push()
        # Allocated while rows are on their way.
        received = landing.make(ctx, fmt, arrivals, has_weights)
    else:
        arrivals = known_arrivals(ctx, request, placement)
        # What is filled is filled before the side stream begins.
        received = landing.make(ctx, fmt, arrivals, has_weights)
        side = push()
    receive = partial(landing.receive, ctx, fmt, received, placement, forward, side)
    if not split:
        receive()
        ctx.poll_status()
    cfg, deduplicated = ctx.config, landing.deduplicated
    desc = EPAllToAllLayoutDesc(
        num_dispatch_token_cur_rank=rows.data.shape[0],
        num_recv_rows=arrivals.num_rows,
        entries=routing.entries,
        placement=placement,
        shape=(cfg.world_size, cfg.local_world_size, cfg.num_experts_per_rank),
        layer_id=ctx.layer_id,
        dispatch_number=ctx.num_dispatches,
        forward=forward,
        skipped_token_topk_mapping_indices=received.copy_rows if cfg.enable_local_combine or deduplicated else None,
        full_scatter=request.scatter is not None,
        compact=deduplicated,
        host_expert_offsets=None if deduplicated else arrivals.host_counts,
    )
    return Sent(received, desc, arrivals.host_counts, receive)


def preprocess(
    ctx: DispatchCombineContext, request: Request, landing: Landing[Received], reads: bool
) -> tuple[routing_ops.Routing, torch.Tensor]:
    """Count entries, give them slots, and exchange the counts of all ranks: routing, and what the ranks said.

    reads: the host will read what the ranks said. The step has its name from the specification of `EPAll2AllLayer`.
    """
    ids, bad_scatter = request.ids, None
    if request.scatter is not None and isinstance(ids, torch.Tensor):
        num_experts = ctx.config.num_experts
        good = routing_ops.legal_scatter(ids, request.scatter, num_experts)
        # A bad table counts as no tokens at all: nobody may write by it. Illegal ids are still reported.
        legal = (ids >= 0) & (ids < num_experts)
        ids = torch.where(legal & ~good, -1, ids)
        bad_scatter = torch.where(good, 0, HOST_SCATTER).int().view(1)
    routing, ids = routing_ops.prepare(ctx, ids, request.weights)
    word = _host_word(ctx, request, landing.deduplicated, routing.weights is not None)
    routed = None if request.routed is None else request.routed.placement
    room = landing.limits(ctx.sizes) if reads else None
    return routing, routing_ops.exchange_splits(
        ctx, routing, ids, word, bad_scatter, routed, room, request.needed_tokens
    )


def _host_word(ctx: DispatchCombineContext, request: Request, deduplicated: bool, has_weights: bool) -> int:
    """What this rank reports to the others about the call (kernels/device/codes.py)."""
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
    """What arrives here, as the host reads it, and whether buffers had to grow. (The name is the specification's.)

    Errors of any rank surface on all, and buffers grow by the same numbers on all ranks. In both cases the device has
    decided, by the same reports, that no row was sent.
    """
    cfg = ctx.config
    parts = placement_parts(cfg.world_size, cfg.local_world_size, cfg.num_experts_per_rank)
    first, count = parts[landing.counts]
    words = ctx.read_back()
    reports = read_reports(words, cfg.world_size)
    own = reports[cfg.rank]
    if request.others_know:
        ctx.unread = placement
        return Arrivals(landing.num_rows(own), ctx.sizes.arrival_rows, None), False
    checks.raise_for_ranks(cfg, reports)
    grown = ctx.grow(*landing.room(cfg, reports))
    return Arrivals(landing.num_rows(own), own.arrivals, tuple(words[first : first + count])), grown


def known_arrivals(ctx: DispatchCombineContext, request: Request, placement: torch.Tensor) -> Arrivals:
    """What may arrive here, where the host does not read it: buffers are large enough, errors are left to `check`."""
    num_rows = request.num_rows if ctx.config.recv_capacity is None else ctx.config.recv_capacity
    assert num_rows is not None, "otherwise the host reads it"
    # What is captured has not run, and may never do so.
    ctx.unread = None if ctx.is_capturing else placement
    return Arrivals(num_rows, ctx.sizes.arrival_rows, None)


def release_held(ctx: DispatchCombineContext, placement: torch.Tensor) -> None:
    """Let the kernels that send rows, launched once more, do so, now that there is room."""
    cfg = ctx.config
    first, _ = placement_parts(cfg.world_size, cfg.local_world_size, cfg.num_experts_per_rank)["held"]
    placement[first].zero_()


@reports_failure("dispatch", begun=False)
def dispatch_low_latency(
    ctx: DispatchCombineContext, request: Request, split: bool = False
) -> Sent[dispatch_ops.Received]:
    """`dispatch` of a low-latency layer: push, then wait and land, expert-major. The host waits for nothing."""
    rows, ids = request.rows, request.ids
    assert isinstance(ids, torch.Tensor), "no integration has maps for it"
    ctx.num_dispatches += 1  # before the push, for which others wait
    scaled = rows.scale is not None and ctx.config.payload is None
    word = HOST_REJECTED * request.refused | HOST_SCALED * scaled
    fmt = ctx.rows.own if rows.scale is None else ctx.rows.scaled
    received, desc, receive = low_latency_ops.dispatch(ctx, fmt, rows, ids, request.weights, word)
    if not split:
        receive()
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
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Bring expert outputs y [R, H] back and sum them, weighted by weights [R] float32, and up to two biases [T, H].

    Returns [T, H] and the receiving half. split: the caller launches that; otherwise it has been launched.
    """
    if ctx.config.low_latency:
        out, receive = low_latency_ops.combine(ctx, y, weights, desc, split)
        if not split:
            receive()
    elif split:
        out, receive = combine_ops.send(ctx, ctx.rows.own, y, weights, desc, biases)
    else:  # its halves overlap
        out = combine_ops.combine(ctx, ctx.rows.own, y, weights, desc, biases=biases)
        receive = _no_more
    if not split:
        ctx.poll_status()
    return out, receive


@reports_failure("combine", begun=True)
def wait_signals(ctx: DispatchCombineContext, signals: Signals) -> None:
    """Let the current stream wait for the kernel that writes the rows of a low-latency combine."""
    low_latency_ops.wait_signals(ctx, *signals)
    ctx.poll_status()


def wait_published(ctx: DispatchCombineContext, desc: EPAllToAllLayoutDesc) -> bool:
    """Make the current stream wait until the rows of the latest `combine` have been read.

    That was a whole call, not one taken apart by a hook, with this descriptor and no weights.

    False: nothing waits, because only the end of that combine says so.
    """
    return not ctx.config.low_latency and combine_ops.wait_published(ctx, ctx.rows.own, desc)


@reports_failure("combine", begun=True)
def combine_topk(ctx: DispatchCombineContext, values: torch.Tensor, desc: EPAllToAllLayoutDesc) -> torch.Tensor:
    """Bring values [R, K] float32 of deduplicated rows back and sum them per token: [T, K]."""
    out = compact_ops.combine_topk(ctx, values, desc)
    ctx.poll_status()
    return out


def _no_more() -> None:
    """The receiving half of a call that has been received."""
