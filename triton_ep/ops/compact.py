"""Compact rows, one per (token, this rank): copied from the staging buffer (kernels/intranode/compact.py), and back."""

from __future__ import annotations

from typing import NamedTuple

import torch

from triton_ep.context.context import DispatchCombineContext
from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.context.rows import RowFormat
from triton_ep.ops import combine as combine_ops
from triton_ep.ops.dispatch import Beside
from triton_ep.ops.routing import OwnRows
from triton_ep.ops.tuning import as_words, even, expanding_programs, forwarding_programs, pushing_programs
from triton_ep.runtime.plans import compact as plans


class Compact(NamedTuple):
    """Outputs of `receive`.

    Attributes:
        x: [R, H] of the token dtype; with `scale`, of one byte per element.
        topk_idx: [R, K] int32 or int64, local expert ids, -1 = not here; None = not wanted.
        topk_weights: [R, K] float32, or None.
        scale: [R, H / 32] uint8, or None.
        copy_rows: [C, 1] int32, for each staging row the row that combine publishes for it: the row of its number; -1
            for staging rows that were left out. None if no ids are wanted: combine gets the earlier descriptor.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    scale: torch.Tensor | None
    copy_rows: torch.Tensor | None


def make_compact(
    ctx: DispatchCombineContext,
    fmt: RowFormat,
    num_rows: int,
    num_arrivals: int,
    idx_dtype: torch.dtype | None,
    has_weights: bool,
) -> Compact:
    """Allocate `num_rows` rows for at most `num_arrivals` staging rows.

    If fewer arrive, the ids and weights of the rest become -1 and 0; if more, the last are left out.

    idx_dtype: dtype of the expert ids; None = neither ids nor weights are wanted.
    """
    if fmt.payload is None:
        x, scale = torch.empty(num_rows, fmt.hidden, dtype=fmt.dtype, device=ctx.device), None
    else:
        x = torch.empty(num_rows, fmt.hidden, dtype=torch.float8_e4m3fn, device=ctx.device)
        scale = torch.empty(num_rows, fmt.hidden // 32, dtype=torch.uint8, device=ctx.device)
    if idx_dtype is None:
        return Compact(x, None, None, scale, None)
    shape = (num_rows, ctx.config.topk)
    idx = torch.empty(shape, dtype=idx_dtype, device=ctx.device)
    weights = torch.empty(shape, dtype=torch.float32, device=ctx.device) if has_weights else None
    return Compact(x, idx, weights, scale, ctx.identity_rows(num_rows, num_arrivals))


def receive(
    ctx: DispatchCombineContext,
    fmt: RowFormat,
    received: Compact,
    placement: torch.Tensor,
    own: OwnRows,
    beside: Beside | None,
) -> None:
    """Copy the rows out as they arrive.

    own: as for `routing.place`.
    beside: from `ops.dispatch.fork` before the push, so that the first rows are copied while the last are in transit.
    """
    cfg, has_scales = ctx.config, received.scale is not None
    row_bytes = fmt.hidden * received.x.element_size()
    words = as_words(received.x, row_bytes, received.scale)
    row_words = row_bytes // words.element_size()
    kind = (has_scales, received.topk_idx is not None, received.topk_weights is not None, row_words)
    stream = None if beside is None else beside.stream
    early = beside is not None and stream is None
    launcher = ctx.launcher(("compact", early, *kind), plans.copy_out, *kind, fmt=fmt, early=early)
    launcher.launch(
        expanding_programs(ctx, fmt, launcher, beside is not None, "compact"),
        recv_x_ptr=words,
        recv_scale_ptr=ctx.no_bytes if received.scale is None else received.scale,
        recv_idx_ptr=placement if received.topk_idx is None else received.topk_idx,
        recv_weights_ptr=ctx.no_floats if received.topk_weights is None else received.topk_weights,
        placement_ptr=placement,
        row_words=row_words,
        row_limit=received.x.shape[0],
        x_ptr=own.x,
        tokens_ptr=own.tokens,
        in_place=own.in_place,
        num_senders=pushing_programs(ctx, fmt, beside is not None, "compact").flags,
        num_forwarders=0 if cfg.is_intra_node else even(forwarding_programs(cfg, ctx.device)),
        stream=stream,
    )
    if stream is not None:
        ctx.join()


def combine_topk(ctx: DispatchCombineContext, values: torch.Tensor, desc: EPAllToAllLayoutDesc) -> torch.Tensor:
    """Sum values [R, K] float32 of compact rows per token: [T, K] float32. Collective.

    A combine of short float32 rows, with the same kernels, buffers and epochs as any other. For each slot, one row of
    the token has the value and the other rows have zero, so the sum is exact.

    Raises:
        ConfigError: rows of the layer are too short for a float32 (`RowFormats.narrow`).
    """

    def columns(fmt: RowFormat, first: int) -> torch.Tensor:
        part = values[:, first : first + fmt.hidden]
        missing = fmt.hidden - part.shape[1]
        return torch.nn.functional.pad(part, (0, missing)) if missing else part.contiguous()

    return combine_ops.combine_columns(ctx, desc, columns)
