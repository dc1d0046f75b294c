"""Moving rows to their experts (kernels/intranode/dispatch.py, kernels/internode/dispatch.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from triton_ep.context import DispatchCombineContext
from triton_ep.kernels.device.rows import MX, QUANTISE, WORDS
from triton_ep.ops.routing import Placement, Routing
from triton_ep.ops.tuning import (
    QUANTISING_WARPS,
    ROUTING_TOKENS,
    STEP_CHUNKS,
    as_words,
    common_constexprs,
    exchange_programs,
    local_programs,
    quantising_tile,
    tile,
    waiting_programs,
)
from triton_ep.runtime import launch


@dataclass(frozen=True)
class ForwardTables:
    """[N, M, K] int32 tables of the tokens that this rank forwards for other nodes, kept for combine."""

    owner: torch.Tensor
    dst_row: torch.Tensor
    stage_row: torch.Tensor


@dataclass(frozen=True)
class Rows:
    """Rows to send, [T, H]: as they are, to be quantised on the way, or quantised already.

    Attributes:
        data: of the token dtype, or e4m3.
        scale: [T, H / 32] uint8, with e4m3 data only.
    """

    data: torch.Tensor
    scale: torch.Tensor | None = None


def _source(ctx: DispatchCombineContext, rows: Rows) -> tuple[torch.Tensor, torch.Tensor, int, dict[str, Any]]:
    """What kernels that send take of `rows`: pointer to data, to scales, words per row, constexprs."""
    hidden, payload = ctx.config.hidden, ctx.config.payload
    if payload is not None and rows.scale is None:
        # Any pointer of the right type: not read.
        unused = rows.data.view(torch.uint8)
        return rows.data, unused, hidden, {"PAYLOAD": QUANTISE.value, **quantising_tile(hidden)}
    row_bytes = hidden * rows.data.element_size()
    words = as_words(rows.data, row_bytes)
    row_words = row_bytes // words.element_size()
    if rows.scale is None:
        return words, words.view(torch.uint8), row_words, {"PAYLOAD": WORDS.value, **tile(row_words)}
    return words, rows.scale, row_words, {"PAYLOAD": MX.value, **tile(row_words)}


def push(ctx: DispatchCombineContext, x: Rows, weights: torch.Tensor | None, routing: Routing) -> None:
    """Push each row of x [T, H] once to every rank of this node that needs it, and release, step by step."""
    cfg, sizes = ctx.config, ctx.sizes
    data, scale, row_words, payload = _source(ctx, x)
    launch(
        "dispatch_push_kernel",
        exchange_programs(cfg.num_sm),
        (
            data,
            scale,
            routing.owner,
            routing.dst_row,
            routing.stage_row,
            # A pointer of the right type; not read without weights.
            weights if weights is not None else routing.dst_row.view(torch.float32),
            routing.chunk_counts,
            ctx.state,
            ctx.tables,
            x.data.shape[0],
            row_words,
            sizes.arrival_rows,
            cfg.num_experts_per_rank,
            cfg.rank,
            cfg.world_size,
            cfg.local_world_size,
        ),
        {
            "HAS_WEIGHTS": weights is not None,
            "BLOCK_T": ROUTING_TOKENS,
            "STEP_CHUNKS": STEP_CHUNKS,
            **common_constexprs(sizes, "TOPK", "KP", "LWP", "MAX_PROGRAMS"),
            **payload,
        },
        num_warps=QUANTISING_WARPS if payload["PAYLOAD"] == QUANTISE.value else None,
    )


def send(
    ctx: DispatchCombineContext,
    x: Rows,
    weights: torch.Tensor | None,
    routing: Routing,
    node_token: torch.Tensor,
    tokens_per_node: torch.Tensor,
) -> None:
    """Send each row of x [T, H] once to every other node that needs it."""
    cfg, sizes = ctx.config, ctx.sizes
    data, scale, row_words, payload = _source(ctx, x)
    launch(
        "internode_send_kernel",
        exchange_programs(cfg.num_sm),
        (
            data,
            scale,
            routing.owner,
            routing.dst_row,
            routing.stage_row,
            weights if weights is not None else routing.dst_row.view(torch.float32),
            node_token,
            tokens_per_node,
            ctx.state,
            ctx.tables,
            x.data.shape[0],
            cfg.max_tokens,
            row_words,
            cfg.rank,
            cfg.world_size,
            cfg.local_world_size,
        ),
        {
            "HAS_WEIGHTS": weights is not None,
            "NETWORK": ctx.network,
            **common_constexprs(sizes, "TOPK", "KP", "MAX_CHUNKS", "CHUNK"),
            **payload,
        },
        ctx.extern_libs(),
    )


def forward(ctx: DispatchCombineContext, has_weights: bool, placement: Placement) -> ForwardTables:
    """Push the rows that other nodes sent here on to the ranks of this node, and release."""
    cfg, sizes = ctx.config, ctx.sizes
    shape = (3, cfg.num_nodes, cfg.max_tokens, cfg.topk)
    tables = ForwardTables(*torch.empty(shape, dtype=torch.int32, device=ctx.device))
    words = as_words(ctx.local("stage_x"), sizes.wire_bytes)
    row_words = sizes.wire_bytes // words.element_size()
    launch(
        "internode_forward_kernel",
        exchange_programs(cfg.num_sm),
        (
            words,
            placement.tokens_from_node,
            tables.owner,
            tables.dst_row,
            tables.stage_row,
            ctx.state,
            ctx.tables,
            cfg.max_tokens,
            row_words,
            sizes.arrival_rows,
            cfg.rank,
            cfg.world_size,
            cfg.local_world_size,
        ),
        {
            "HAS_WEIGHTS": has_weights,
            **common_constexprs(sizes, "TOPK", "KP", "LWP", "MAX_PROGRAMS", "MAX_CHUNKS", "CHUNK"),
            **tile(row_words),
        },
    )
    return tables


@dataclass(frozen=True)
class Received:
    """What `expand` writes.

    Attributes:
        x: recv_x [R, H]. Rows behind the last expert's (static mode) are undefined.
        weights: [R] float32, or None; zero behind the last expert's rows.
        copy_rows: with local combine [C, K] int32, the output rows of each arrival row.
    """

    x: Rows
    weights: torch.Tensor | None
    copy_rows: torch.Tensor | None


def make_received(ctx: DispatchCombineContext, num_rows: int, num_arrivals: int, has_weights: bool) -> Received:
    """Memory for `num_rows` output rows from `num_arrivals` arrival rows."""
    cfg = ctx.config
    has_scales = cfg.payload is not None
    dtype = torch.float8_e4m3fn if has_scales else cfg.token_dtype
    recv_x = torch.empty(num_rows, cfg.hidden, dtype=dtype, device=ctx.device)
    recv_scale = None
    if has_scales:
        recv_scale = torch.empty(num_rows, cfg.hidden // 32, dtype=torch.uint8, device=ctx.device)
    weights = torch.zeros(num_rows, dtype=torch.float32, device=ctx.device) if has_weights else None
    copy_rows = None
    if cfg.enable_local_combine:
        copy_rows = torch.empty(num_arrivals, cfg.topk, dtype=torch.int32, device=ctx.device)
    return Received(Rows(recv_x, recv_scale), weights, copy_rows)


def fork(ctx: DispatchCombineContext) -> torch.cuda.Stream | None:
    """Stream for `expand` to run on beside what is launched next; None where there is no room for both."""
    return ctx.fork() if waiting_programs(ctx.device, ctx.config.num_sm) else None


def expand(
    ctx: DispatchCombineContext, received: Received, placement: Placement, side: torch.cuda.Stream | None
) -> None:
    """Wait for the rows, as they come, and lay them out expert by expert.

    side: from `fork` before the push, so that first rows are laid out while the last are on their way.
    """
    if side is None:
        _expand(ctx, received, placement, local_programs(ctx.device))
        return
    with torch.cuda.stream(side):
        _expand(ctx, received, placement, waiting_programs(ctx.device, ctx.config.num_sm))
    ctx.join(side)


def _expand(ctx: DispatchCombineContext, received: Received, placement: Placement, programs: int) -> None:
    cfg, sizes = ctx.config, ctx.sizes
    recv_x, recv_scale = received.x.data, received.x.scale
    weights, copy_rows = received.weights, received.copy_rows
    row_bytes = cfg.hidden * recv_x.element_size()
    words = as_words(recv_x, row_bytes)
    row_words = row_bytes // words.element_size()
    senders = exchange_programs(cfg.num_sm)
    launch(
        "dispatch_expand_kernel",
        programs,
        (
            words,
            recv_scale if recv_scale is not None else words.view(torch.uint8),
            weights if weights is not None else placement.report.view(torch.float32),
            copy_rows if copy_rows is not None else placement.report,
            placement.expert_offsets,
            placement.num_recv,
            placement.report,
            ctx.state,
            ctx.tables,
            row_words,
            cfg.rank,
            cfg.world_size,
            cfg.local_world_size,
            cfg.num_experts_per_rank,
            sizes.arrival_rows,
            senders,
        ),
        {
            "HAS_SCALES": recv_scale is not None,
            "HAS_WEIGHTS": weights is not None,
            "HAS_PADDING": cfg.alignment > 1,
            "KEEP_COPY_ROWS": copy_rows is not None,
            **common_constexprs(sizes, "TOPK", "KP", "LWP", "MAX_PROGRAMS"),
            **tile(row_words),
        },
    )
