"""Launchers that move rows to their experts (kernels/intranode/dispatch.py, kernels/internode/dispatch.py)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from triton_ep.context.context import DispatchCombineContext
from triton_ep.context.given import Rows
from triton_ep.context.rows import RowFormat
from triton_ep.kernels.device.codes import (
    LANDING_BF16,
    LANDING_MX,
    LANDING_ROW,
    LANDING_WORDS,
    MX,
    WORDS,
)
from triton_ep.ops import copy_engines
from triton_ep.ops.element_formats import BLOCK
from triton_ep.ops.routing import OwnRows, Routing
from triton_ep.ops.strides import view_as
from triton_ep.ops.tuning import (
    Laid,
    as_words,
    even,
    exchange_programs,
    expanding_programs,
    forwarding_programs,
    overlaps,
    pushing_programs,
    sends_aside,
)
from triton_ep.runtime.plans import exchange
from triton_ep.runtime.plans.layers import LANDINGS, landed_words

_LANDED_WORDS = {"i32": torch.int32, "i64": torch.int64}


def to_send(ctx: DispatchCombineContext, fmt: RowFormat, x: Rows) -> tuple[Rows, bool]:
    """The rows as they travel: `x` itself, or with payload="mxfp8" memory [T, bytes] uint8 for rows of the layer's
    dtype, which `exchange_splits` quantises by RCEIL; for copy engines always in one piece.

    Returns also whether they can be laid out from there: rows without scales of their own, dense, and in pieces of 16
    bytes, as kernels load them.
    """
    wire_bytes = fmt.wire_bytes
    if ctx.config.payload is not None and x.scale is None:
        return Rows(torch.empty(x.data.shape[0], wire_bytes, dtype=torch.uint8, device=ctx.device)), True
    if ctx.config.copy_engines:
        x = copy_engines.packed(fmt, x)
    dense = x.data.is_contiguous() and x.data.stride(1) == 1  # an empty tensor may have any strides
    return x, x.scale is None and dense and (x.data.data_ptr() | wire_bytes) % 16 == 0


def _source(ctx: DispatchCombineContext, rows: Rows) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Arguments of the sending kernels for `rows`: data in words, scales, words per row, payload."""
    row_bytes = rows.data.shape[1] * rows.data.element_size()
    words = as_words(rows.data, row_bytes)
    row_words = row_bytes // words.element_size()
    if rows.scale is None:
        return words, ctx.no_bytes, row_words, WORDS
    return words, rows.scale, row_words, MX


def push(
    ctx: DispatchCombineContext,
    fmt: RowFormat,
    x: Rows,
    routing: Routing,
    placement: torch.Tensor,
    overlapped: bool,
    laid: Laid,
) -> None:
    """Push each row of x [T, H] once to every rank of this node that needs it; release after each step.

    overlapped: the receiving half runs concurrently. laid: how it lays rows out.
    """
    words, scale, row_words, payload = _source(ctx, x)
    programs, flags, sent, spread = pushing_programs(ctx, fmt, overlapped, laid)
    kind = (payload, row_words, spread, (words.data_ptr() | scale.data_ptr()) % 16 == 0)
    ctx.launcher(("spread" if spread else "push", *kind), exchange.push, *kind, fmt=fmt).launch(
        programs,
        x_ptr=words,
        scale_ptr=scale,
        push_addrs_ptr=routing.push_addrs,
        placement_ptr=placement,
        num_tokens=routing.num_tokens,
        row_words=row_words,
        num_flags=flags,
        sent=sent,
    )


def send(
    ctx: DispatchCombineContext,
    fmt: RowFormat,
    x: Rows,
    routing: Routing,
    placement: torch.Tensor,
    aside: torch.cuda.Stream | None,
) -> None:
    """Send each row of x [T, H] once to every other node that needs it.

    aside: from `fork_network`, so that rows cross nodes while others are pushed within this one.
    """
    cfg, weights = ctx.config, routing.weights
    words, scale, row_words, payload = _source(ctx, x)
    kind = (payload, row_words, weights is not None)
    ctx.launcher(("send", *kind), exchange.send, *kind, fmt=fmt).launch(
        exchange_programs(cfg.num_sm),
        x_ptr=words,
        scale_ptr=scale,
        entries_ptr=routing.entries,
        weights_ptr=ctx.no_floats if weights is None else weights,
        chunks_ptr=routing.chunks,
        placement_ptr=placement,
        num_tokens=routing.num_tokens,
        row_words=row_words,
        stream=aside,
    )


def make_forward(ctx: DispatchCombineContext) -> torch.Tensor:
    """Allocate the tables that `forward` writes with several nodes, [2, N, M, K] int32."""
    cfg = ctx.config
    return torch.empty(2, cfg.num_nodes, cfg.max_tokens, cfg.topk, dtype=torch.int32, device=ctx.device)


def forward(
    ctx: DispatchCombineContext,
    fmt: RowFormat,
    tables: torch.Tensor,
    has_weights: bool,
    reduced: bool,
    placement: torch.Tensor,
) -> None:
    """Push the rows that other nodes sent here on to the ranks of this node, and release.

    tables: from `make_forward`: tell combine where the forwarded rows are.
    reduced: combine will pull one row per (token, rank).
    """
    cfg = ctx.config
    words = as_words(ctx.local_as("stage_x", torch.uint8), fmt.wire_bytes)
    row_words = fmt.wire_bytes // words.element_size()
    ctx.launcher(("forward", has_weights, reduced), exchange.forward, has_weights, reduced, row_words, fmt=fmt).launch(
        forwarding_programs(cfg, ctx.device),
        word_ptr=words,
        placement_ptr=placement,
        forward_ptr=tables,
        row_words=row_words,
        stage_capacity=ctx.sizes.arrival_rows,
        num_flags=even(forwarding_programs(cfg, ctx.device)),
    )


class Received(NamedTuple):
    """Outputs of `receive`.

    Attributes:
        x: recv_x [R, H]. Rows past the last segment (static mode) are undefined.
        weights: [R] float32, or None; zero past the last segment.
        copy_rows: with local combine, or if the caller keeps them, [C, K] int32, the output rows of each staging row.
        kept: if the caller keeps them, [C, H], the staging rows.
    """

    x: Rows
    weights: torch.Tensor | None
    copy_rows: torch.Tensor | None
    kept: torch.Tensor | None


def make_received(
    ctx: DispatchCombineContext,
    fmt: RowFormat,
    num_rows: int,
    num_arrivals: int,
    has_weights: bool,
    keep_copies: bool,
    landing: str | None,
    keep_rows: bool = False,
) -> Received:
    """Allocate `num_rows` output rows for `num_arrivals` staging rows.

    keep_copies: keep the output rows of staging rows even if combine does not need them.
    landing: as in `EPAll2AllLayer.dispatch`. keep_rows: keep the staging rows themselves; only without a payload.
    """
    cfg = ctx.config
    weights = None
    if has_weights:
        weights = torch.empty(num_rows, dtype=torch.float32, device=ctx.device)
    copy_rows = None
    if cfg.enable_local_combine or keep_copies:
        copy_rows = torch.empty(num_arrivals, cfg.topk, dtype=torch.int32, device=ctx.device)
    kept = None
    if keep_rows:
        # A row that arrives has an output row; if there is no room for those, nothing is copied.
        kept = torch.empty(min(num_arrivals, num_rows), fmt.hidden, dtype=fmt.dtype, device=ctx.device)
    return Received(_make_rows(fmt, ctx.device, num_rows, landing), weights, copy_rows, kept)


def _make_rows(fmt: RowFormat, device: torch.device, num_rows: int, landing: str | None) -> Rows:
    if fmt.payload is None:
        return Rows(torch.empty(num_rows, fmt.hidden, dtype=fmt.dtype, device=device))
    code = LANDINGS[landing or "mx"]
    if code == LANDING_BF16:
        return Rows(torch.empty(num_rows, fmt.hidden, dtype=torch.bfloat16, device=device))
    data = torch.empty(num_rows, fmt.hidden, dtype=torch.float8_e4m3fn, device=device)
    if code == LANDING_ROW:
        return Rows(data, torch.empty(num_rows, dtype=torch.float32, device=device))
    return Rows(data, torch.empty(num_rows, fmt.hidden // BLOCK, dtype=torch.uint8, device=device))


def _landing_of(rows: Rows) -> int:
    """The landing code of rows that were sent in MXFP8 (kernels/device/codes.py)."""
    if rows.scale is None:
        return LANDING_BF16
    return LANDING_ROW if rows.scale.dtype == torch.float32 else LANDING_MX


class Beside(NamedTuple):
    """How `receive` overlaps the kernels that send rows.

    Attributes:
        stream: the stream of its kernel, joined after it. None: the current one, where this kernel is launched early:
            it starts when the push, the kernel ahead of it, has started.
    """

    stream: torch.cuda.Stream | None


_BEHIND_PUSH = Beside(None)


def fork(ctx: DispatchCombineContext, split: bool) -> Beside | None:
    """How `receive` overlaps the kernels launched next; None: it runs after them.

    With several nodes there are others behind the push, so it has a stream of its own.
    split: the caller decides when rows are received.
    """
    if split or not overlaps(ctx.config, ctx.device):
        return None
    return _BEHIND_PUSH if ctx.config.is_intra_node else Beside(ctx.fork())


def fork_network(ctx: DispatchCombineContext, split: bool) -> torch.cuda.Stream | None:
    """Stream on which `send` overlaps the kernels launched next; None if it runs before them.

    split: the caller may run kernels of its own concurrently with the sending half, which then takes no more
    multiprocessors than a push. `ctx.crossing.join` must follow.
    """
    return ctx.crossing.fork() if not split and sends_aside(ctx.config, ctx.device) else None


def receive(
    ctx: DispatchCombineContext,
    fmt: RowFormat,
    received: Received,
    placement: torch.Tensor,
    own: OwnRows,
    beside: Beside | None,
    laid: Laid,
) -> None:
    """Lay the rows out expert by expert as they arrive.

    own: as for `routing.place`. laid: as for `push`.
    beside: from `fork` before the push, so that the first rows are laid out while the last are in transit.
    """
    cfg = ctx.config
    recv_x, recv_scale = received.x.data, received.x.scale
    weights, copy_rows, kept = received.weights, received.copy_rows, received.kept
    landing = LANDING_WORDS if fmt.payload is None else _landing_of(received.x)
    if landing in (LANDING_ROW, LANDING_BF16):
        word, row_words = landed_words(landing, fmt.hidden)
        words = view_as(recv_x, _LANDED_WORDS[word])
    else:
        row_bytes = fmt.hidden * recv_x.element_size()
        words = as_words(recv_x, row_bytes, recv_scale)
        row_words = row_bytes // words.element_size()
    kind = (landing, weights is not None, copy_rows is not None, row_words, kept is not None)
    stream = None if beside is None else beside.stream
    early = beside is not None and stream is None
    launcher = ctx.launcher(("expand", early, *kind), exchange.expand, *kind, fmt=fmt, early=early)
    launcher.launch(
        expanding_programs(ctx, fmt, launcher, beside is not None, laid),
        recv_x_ptr=words,
        recv_scale_ptr=ctx.no_bytes if recv_scale is None else recv_scale,
        recv_weights_ptr=ctx.no_floats if weights is None else weights,
        copy_rows_ptr=placement if copy_rows is None else copy_rows,
        kept_ptr=ctx.no_bytes if kept is None else view_as(kept, torch.uint8),
        placement_ptr=placement,
        row_words=row_words,
        num_rows=recv_x.shape[0],
        stage_capacity=ctx.sizes.arrival_rows,
        x_ptr=own.x,
        tokens_ptr=own.tokens,
        in_place=own.in_place,
        num_senders=pushing_programs(ctx, fmt, beside is not None, laid).flags,
        num_forwarders=0 if cfg.is_intra_node else even(forwarding_programs(cfg, ctx.device)),
        stream=stream,
    )
    if stream is not None:
        ctx.join()
