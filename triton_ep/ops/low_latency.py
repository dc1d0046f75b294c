"""Dispatch and combine of a low-latency layer (kernels/intranode/low_latency_dispatch.py, low_latency_combine.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from triton_ep.context.context import DispatchCombineContext
from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.context.given import Rows
from triton_ep.context.rows import RowFormat
from triton_ep.kernels.device.codes import (
    COMBINE_TOKEN_WEIGHTS,
    COMBINE_WEIGHTS,
    HOST_WEIGHTS,
    LL_NO_WEIGHTS,
    LL_RECEIVES,
    LL_ROW_WEIGHTS,
    LL_SENDS,
    LL_TOKEN_WEIGHTS,
    MX,
    QUANTISE,
    QUANTISE_CHANNELS,
    WORDS,
)
from triton_ep.ops.dispatch import Received
from triton_ep.ops.strides import view_as
from triton_ep.ops.tuning import as_words, low_latency_workers
from triton_ep.runtime.launch import INTERPRETING
from triton_ep.runtime.plans import low_latency as plans

_CALLS = {LL_NO_WEIGHTS: 0, LL_ROW_WEIGHTS: COMBINE_WEIGHTS, LL_TOKEN_WEIGHTS: COMBINE_TOKEN_WEIGHTS}


def dispatch(
    ctx: DispatchCombineContext,
    fmt: RowFormat,
    x: Rows,
    topk_idx: torch.Tensor,
    weights: torch.Tensor | None,
    host_word: int,
    slabs: Rows | None = None,
    split: bool = False,
) -> tuple[Received, EPAllToAllLayoutDesc, Callable[[], None]]:
    """Push the rows of x [T, H]; those without scales are quantised if rows arrive with some: to MXFP8 with that
    payload, else with a float32 scale per 128 values.

    slabs: memory for the received rows, [e, n, H], the rows of each expert from the start of its slab on; for rows with
    scales also [e, n, H / 32] uint8, or [e, columns, n] of 32 bits, the first `columns` words of the scales of each
    row. None: rows are expert-major.

    split: launch only the sending half; otherwise one launch does both.

    Returns the outputs, the descriptor, and a callable that launches the receiving half, which fills the outputs.
    The device advances its epoch; the host has advanced its own. The host waits for nothing.
    """
    cfg = ctx.config
    num_tokens = topk_idx.shape[0]
    ids = torch.empty(1, num_tokens, cfg.topk, dtype=torch.int32, device=ctx.device)
    copies = torch.empty(cfg.world_size * cfg.max_tokens, cfg.topk, dtype=torch.int32, device=ctx.device)
    placement = torch.empty(ctx.sizes.placement_length, dtype=torch.int32, device=ctx.device)
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
    received = Received(recv, recv_weights, copies, None)
    word = host_word | (HOST_WEIGHTS if weights is not None else 0)
    return received, desc, _launch_dispatch(ctx, fmt, x, topk_idx, weights, received, desc, word, split)


def _launch_dispatch(
    ctx: DispatchCombineContext,
    fmt: RowFormat,
    x: Rows,
    topk_idx: torch.Tensor,
    weights: torch.Tensor | None,
    received: Received,
    desc: EPAllToAllLayoutDesc,
    host_word: int,
    split: bool,
) -> Callable[[], None]:
    """Launch a dispatch, or with `split` its sending half; returns a callable that launches the rest."""
    cfg, (data, scale), slabs = ctx.config, received.x, received.x.data.dim() == 3
    words, payload = x.data, QUANTISE_CHANNELS if cfg.payload is None else QUANTISE
    if fmt.payload is None or x.scale is not None:
        words = as_words(x.data, x.data.shape[1] * x.data.element_size())
        payload = WORDS if x.scale is None else MX
    x_words = x.data.shape[1] * x.data.element_size() // words.element_size()
    row_bytes = data.shape[-1] * data.element_size()
    recv = as_words(data, row_bytes)
    row_words = row_bytes // recv.element_size()
    columns = slabs and scale is not None and scale.dtype != torch.uint8
    kind = (payload, weights is not None, x_words, row_words, slabs, columns)
    launcher = ctx.launcher(("ll_dispatch", *kind), plans.dispatch, *kind, fmt=fmt, early=True)
    groups = -(-cfg.world_size * cfg.max_tokens // launcher.plan.constexprs["ROWS"])
    senders, receivers = 1 + topk_idx.shape[0], 1 + min(groups, low_latency_workers(ctx.device, launcher))
    # Pointers of the right type stand for what is not there, and are not read.
    launch = partial(
        launcher.launch,
        x_ptr=words,
        scale_ptr=ctx.no_bytes if x.scale is None else x.scale,
        topk_idx_ptr=topk_idx,
        weights_ptr=ctx.no_floats if weights is None else weights,
        kept_idx_ptr=desc.entries,
        num_tokens=topk_idx.shape[0],
        x_words=x_words,
        recv_x_ptr=recv,
        recv_scale_ptr=ctx.no_bytes if scale is None else view_as(scale, torch.uint8) if columns else scale,
        recv_weights_ptr=ctx.no_floats if received.weights is None else received.weights,
        copy_rows_ptr=received.copy_rows,
        placement_ptr=desc.placement,
        row_words=row_words,
        host_word=host_word,
        others=senders + receivers - 1,
        capacity=data.shape[:-1].numel(),
        alignment=cfg.alignment,
        slab_rows=data.shape[1] if slabs else 0,
        scale_words=scale.shape[1] if columns and scale is not None else 0,
    )
    if split:
        launch(senders, first_waiting=senders)
        return partial(launch, receivers, first_waiting=0)
    launch(senders + receivers, first_waiting=senders)
    return _no_more


def combine(
    ctx: DispatchCombineContext,
    y: torch.Tensor,
    weights: torch.Tensor | None,
    desc: EPAllToAllLayoutDesc,
    split: bool = False,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Sum expert outputs y [R, H] per token at their rank, and send the sums back.

    weights: [R] of the rows, or [T, K] of the tokens, which the call then sends first.
    split: launch only the sending half; otherwise one launch does both.
    out: memory for the result [T, H]; None: allocated. Returns it, and a callable that launches the receiving half,
    which sums into it.
    """
    cfg, copy_rows = ctx.config, desc.skipped_token_topk_mapping_indices
    assert copy_rows is not None, "a descriptor of a low-latency dispatch has it"
    if out is None:
        out = torch.empty(desc.num_dispatch_token_cur_rank, cfg.hidden, dtype=cfg.token_dtype, device=ctx.device)
    kind = LL_NO_WEIGHTS if weights is None else LL_ROW_WEIGHTS if weights.dim() == 1 else LL_TOKEN_WEIGHTS
    launcher = ctx.launcher(("ll_combine", kind), plans.combine, kind, early=True)
    tiles, num_tokens = launcher.plan.constexprs, out.shape[0]
    senders = 1 + (-(-num_tokens // tiles["SHARE"]) if kind == LL_TOKEN_WEIGHTS else 0)
    most = low_latency_workers(ctx.device, launcher)
    reduced, summed = plans.combining_items(tiles, copy_rows.shape[0], num_tokens)
    reducing, summing = min(reduced, most), min(summed, most)
    meeting = 0 if INTERPRETING else 1
    launch = partial(
        launcher.launch,
        # Without weights: a pointer of the right type, not read.
        weights_ptr=ctx.no_floats if weights is None else weights,
        copy_rows_ptr=copy_rows,
        out_ptr=out,
        kept_idx_ptr=desc.entries,
        num_tokens=num_tokens,
        placement_ptr=desc.placement,
        call=_CALLS[kind],
        hidden=cfg.hidden,
    )
    if split:
        sending, receiving = senders + reducing + meeting, max(summing + meeting, 1)
        others = sending + receiving - 1
        launch(sending, y_ptr=y, halves=LL_SENDS, first_waiting=senders, others=others)
        return out, partial(launch, receiving, y_ptr=out, halves=LL_RECEIVES, first_waiting=0, others=others)
    both = senders + max(reducing, summing) + meeting
    launch(both, y_ptr=y, halves=LL_SENDS | LL_RECEIVES, first_waiting=senders, others=both - 1)
    return out, _no_more


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
