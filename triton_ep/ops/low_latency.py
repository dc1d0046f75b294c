"""Dispatch and combine of a low-latency layer (kernels/intranode/low_latency_dispatch.py, low_latency_combine.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from triton_ep.context.context import DispatchCombineContext
from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.context.given import Rows
from triton_ep.context.rows import RowFormat
from triton_ep.kernels.device.codes import COMBINE_WEIGHTS, HOST_WEIGHTS, MX, QUANTISE, WORDS
from triton_ep.ops.dispatch import Received
from triton_ep.ops.strides import view_as
from triton_ep.ops.tuning import as_words, summing_programs
from triton_ep.runtime.launch import INTERPRETING
from triton_ep.runtime.plans import low_latency as plans


def dispatch(
    ctx: DispatchCombineContext,
    fmt: RowFormat,
    x: Rows,
    topk_idx: torch.Tensor,
    weights: torch.Tensor | None,
    host_word: int,
    slabs: Rows | None = None,
) -> tuple[Received, EPAllToAllLayoutDesc, Callable[[], None]]:
    """Push the rows of x [T, H].

    slabs: memory for the received rows, [e, n, H], the rows of each expert from the start of its slab on; for rows with
    scales also [e, columns, n] of 32 bits, the first `columns` words of the scales of each row. None: rows are
    expert-major.

    Returns the outputs, the descriptor, and a callable that launches the receiving half, which fills the outputs.
    The device advances its epoch; the host has advanced its own. The host waits for nothing.
    """
    cfg = ctx.config
    num_tokens = topk_idx.shape[0]
    ids = torch.empty(1, num_tokens, cfg.topk, dtype=torch.int32, device=ctx.device)
    copies = torch.empty(cfg.world_size * cfg.max_tokens, cfg.topk, dtype=torch.int32, device=ctx.device)
    placement = torch.empty(ctx.sizes.placement_length, dtype=torch.int32, device=ctx.device)
    _push(ctx, fmt, x, topk_idx, weights, ids, host_word | (HOST_WEIGHTS if weights is not None else 0))
    if slabs is None:
        recv, recv_weights = _make_received(ctx, fmt, weights is not None)
        num_rows = recv.data.shape[0]
    else:
        recv, num_rows = slabs, slabs.data.shape[0] * slabs.data.shape[1]
        recv_weights = None if weights is None else torch.empty(num_rows, dtype=torch.float32, device=ctx.device)
    desc = EPAllToAllLayoutDesc(
        num_dispatch_token_cur_rank=num_tokens,
        num_recv_rows=num_rows,
        entries=ids,
        placement=placement,
        shape=(cfg.world_size, cfg.local_world_size, cfg.num_experts_per_rank),
        layer_id=ctx.layer_id,
        dispatch_number=ctx.num_dispatches,
        skipped_token_topk_mapping_indices=copies,
    )
    received = Received(recv, recv_weights, copies)
    return received, desc, partial(_expand, ctx, fmt, recv, recv_weights, copies, placement)


def combine(
    ctx: DispatchCombineContext,
    y: torch.Tensor,
    weights: torch.Tensor | None,
    desc: EPAllToAllLayoutDesc,
    split: bool = False,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Sum expert outputs y [R, H] per token at their rank, and send the sums back.

    split: launch only the sending half; otherwise one launch does both.
    out: memory for the result [T, H]; None: allocated. Returns it, and a callable that launches the receiving half,
    which sums into it.
    """
    cfg, copy_rows = ctx.config, desc.skipped_token_topk_mapping_indices
    assert copy_rows is not None, "a descriptor of a low-latency dispatch has it"
    if out is None:
        out = torch.empty(desc.num_dispatch_token_cur_rank, cfg.hidden, dtype=cfg.token_dtype, device=ctx.device)
    launcher = ctx.launcher(("ll_combine", weights is not None), plans.combine, weights is not None)
    tiles = launcher.plan.constexprs
    launch = partial(
        launcher.launch,
        # Without weights: a pointer of the right type, not read.
        weights_ptr=ctx.no_floats if weights is None else weights,
        copy_rows_ptr=copy_rows,
        out_ptr=out,
        kept_idx_ptr=desc.entries,
        num_tokens=out.shape[0],
        placement_ptr=desc.placement,
        call=COMBINE_WEIGHTS if weights is not None else 0,
        hidden=cfg.hidden,
    )
    reducing = plans.reducing_programs(tiles, copy_rows.shape[0])
    items = -(-out.shape[0] // tiles["ROWS"]) * tiles["PARTS"]
    # One more program waits for the ranks themselves.
    waiting = min(1 + items, summing_programs(ctx.device, launcher))
    if split:
        launch(reducing, y_ptr=y, first_waiting=reducing)
        return out, partial(launch, waiting, y_ptr=out, first_waiting=0)
    launch(reducing + waiting, y_ptr=y, first_waiting=reducing)
    return out, _no_more


def send_weights(ctx: DispatchCombineContext, weights: torch.Tensor, desc: EPAllToAllLayoutDesc) -> torch.Tensor:
    """[R] float32: weights [T, K] at the rows of their assignments; other rows are undefined."""
    copy_rows = desc.skipped_token_topk_mapping_indices
    assert copy_rows is not None, "a descriptor of a low-latency dispatch has it"
    out = torch.empty(desc.num_recv_rows, dtype=torch.float32, device=ctx.device)
    shares = plans.weight_shares(ctx.sizes.shape)
    ctx.launcher(("ll_weights",), plans.send_weights).launch(
        2 * shares,  # the first half push, the others copy
        weights_ptr=weights,
        kept_idx_ptr=desc.entries,
        copy_rows_ptr=copy_rows,
        out_ptr=out,
        num_tokens=weights.shape[0],
        first_waiting=shares,
    )
    return out


def wait_signals(
    ctx: DispatchCombineContext, signals: torch.Tensor, num_rows: torch.Tensor | None, block_rows: int, expected: int
) -> None:
    """Make the current stream wait until signals [e, n] int32 are at least `expected`.

    num_rows: [e] int32, rows of each expert. Signal i stands for `block_rows` rows from i * block_rows on; signals
    without rows are not awaited. None: all signals are awaited.
    """
    by_blocks = num_rows is not None
    ctx.launcher(("wait_signals", by_blocks), plans.wait_signals, by_blocks).launch(
        1,
        signals_ptr=signals,
        # Without blocks: a pointer of the right type, not read.
        num_rows_ptr=signals if num_rows is None else num_rows,
        blocks=signals.shape[1],
        block_rows=block_rows,
        expected=expected,
    )


def _no_more() -> None:
    """The receiving half of a call whose single launch has done it."""


def _push(
    ctx: DispatchCombineContext,
    fmt: RowFormat,
    x: Rows,
    topk_idx: torch.Tensor,
    weights: torch.Tensor | None,
    ids: torch.Tensor,
    host_word: int,
) -> None:
    words, scale, payload = x.data, x.scale, QUANTISE
    if fmt.payload is None or scale is not None:
        words = as_words(x.data, x.data.shape[1] * x.data.element_size())
        payload = WORDS if scale is None else MX
    row_words = x.data.shape[1] * x.data.element_size() // words.element_size()
    num_tokens = topk_idx.shape[0]
    kind = (payload, weights is not None, row_words)
    ctx.launcher(("ll_push", *kind), plans.push, *kind, fmt=fmt).launch(
        max(num_tokens, 1),  # without tokens, one program releases
        x_ptr=words,
        # With other payloads, or without weights: pointers of the right type, not read.
        scale_ptr=ctx.no_bytes if scale is None else scale,
        topk_idx_ptr=topk_idx,
        weights_ptr=ctx.no_floats if weights is None else weights,
        kept_idx_ptr=ids,
        num_tokens=num_tokens,
        row_words=row_words,
        host_word=host_word,
    )


def _make_received(ctx: DispatchCombineContext, fmt: RowFormat, has_weights: bool) -> tuple[Rows, torch.Tensor | None]:
    capacity, has_scales = ctx.config.recv_capacity, fmt.payload is not None
    assert capacity is not None, "EPConfig refuses a low-latency layer without"
    dtype = torch.float8_e4m3fn if has_scales else fmt.dtype
    recv_x = torch.empty(capacity, fmt.hidden, dtype=dtype, device=ctx.device)
    scale = weights = None
    if has_scales:
        scale = torch.empty(capacity, fmt.hidden // 32, dtype=torch.uint8, device=ctx.device)
    if has_weights:
        weights = torch.empty(capacity, dtype=torch.float32, device=ctx.device)
    return Rows(recv_x, scale), weights


def _expand(
    ctx: DispatchCombineContext,
    fmt: RowFormat,
    recv: Rows,
    weights: torch.Tensor | None,
    copies: torch.Tensor,
    placement: torch.Tensor,
) -> None:
    cfg, recv_x, scale = ctx.config, recv.data, recv.scale
    slabs, has_weights = recv_x.dim() == 3, weights is not None
    row_bytes = recv_x.shape[-1] * recv_x.element_size()
    words = as_words(recv_x, row_bytes)
    row_words = row_bytes // words.element_size()
    kind = (has_weights, row_words, slabs)
    ctx.launcher(("ll_expand", *kind), plans.expand, *kind, fmt=fmt).launch(
        -(-cfg.world_size * cfg.max_tokens // plans.expanded_rows(INTERPRETING)),
        recv_x_ptr=words,
        recv_scale_ptr=ctx.no_bytes if scale is None else view_as(scale, torch.uint8) if slabs else scale,
        recv_weights_ptr=ctx.no_floats if weights is None else weights,
        copy_rows_ptr=copies,
        placement_ptr=placement,
        row_words=row_words,
        capacity=recv_x.shape[:-1].numel(),
        alignment=cfg.alignment,
        slab_rows=recv_x.shape[1] if slabs else 0,
        scale_words=scale.shape[1] if slabs and scale is not None else 0,
    )
