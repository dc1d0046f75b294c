"""Compact rows (kernels/intranode/compact.py), slabs (kernels/compute/slab.py), where tokens go
(kernels/compute/token_layout.py): what integrations need beside expert-major rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from triton_ep.context.context import DispatchCombineContext
from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.context.rows import RowFormat
from triton_ep.ops import combine as combine_ops
from triton_ep.ops import dispatch as dispatch_ops
from triton_ep.ops.strides import view_as
from triton_ep.ops.tuning import as_words, exchange_programs, expanding_programs, local_programs
from triton_ep.runtime.launch import INTERPRETING, Launcher, default_aot
from triton_ep.runtime.plans import Plan
from triton_ep.runtime.plans import compact as plans


class Compact(NamedTuple):
    """What `receive` writes.

    Attributes:
        x: [R, H] of the token dtype; with scale of one byte.
        topk_idx: [R, K] int32 or int64, local expert ids, -1 = not here; None = not wanted.
        topk_weights: [R, K] float32, or None.
        scale: [R, H / 32] uint8, or None.
        copy_rows: [R, 1] int32, each row itself: what combine sums for it first.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    scale: torch.Tensor | None
    copy_rows: torch.Tensor


def make_compact(
    ctx: DispatchCombineContext,
    fmt: RowFormat,
    num_rows: int,
    exact: bool,
    idx_dtype: torch.dtype | None,
    has_weights: bool,
) -> Compact:
    """Memory for `num_rows` rows; not `exact`: fewer may arrive, and ids and weights of the others are -1 and 0.

    idx_dtype: of the expert ids; None = neither ids nor weights are wanted.
    """
    if fmt.payload is None:
        x, scale = torch.empty(num_rows, fmt.hidden, dtype=fmt.dtype, device=ctx.device), None
    else:
        x = torch.empty(num_rows, fmt.hidden, dtype=torch.float8_e4m3fn, device=ctx.device)
        scale = torch.empty(num_rows, fmt.hidden // 32, dtype=torch.uint8, device=ctx.device)
    if idx_dtype is None:
        return Compact(x, None, None, scale, ctx.identity_rows(num_rows))
    shape = (num_rows, ctx.config.topk)
    idx = torch.empty(shape, dtype=idx_dtype, device=ctx.device)
    weights = torch.empty(shape, dtype=torch.float32, device=ctx.device) if has_weights else None
    if not exact:
        idx.fill_(-1)
        if weights is not None:
            weights.zero_()
    return Compact(x, idx, weights, scale, ctx.identity_rows(num_rows))


def receive(
    ctx: DispatchCombineContext,
    fmt: RowFormat,
    received: Compact,
    placement: torch.Tensor,
    forward_tables: torch.Tensor | None,
    side: torch.cuda.Stream | None,
) -> None:
    """Pass on what came over the network, wait for the rows, as they come, and copy them out.

    side: from `dispatch_ops.fork` before the push, so that first rows are copied while the last are on their way.
    """
    if forward_tables is not None:
        dispatch_ops.forward(ctx, fmt, forward_tables, received.topk_weights is not None, True, placement)
    _copy_out(ctx, fmt, received, placement, side)
    if side is not None:
        ctx.join()


def _copy_out(
    ctx: DispatchCombineContext,
    fmt: RowFormat,
    received: Compact,
    placement: torch.Tensor,
    side: torch.cuda.Stream | None,
) -> None:
    cfg, has_scales = ctx.config, received.scale is not None
    row_bytes = fmt.hidden * received.x.element_size()
    words = as_words(received.x, row_bytes)
    row_words = row_bytes // words.element_size()
    kind = (has_scales, received.topk_idx is not None, received.topk_weights is not None, row_words)
    ctx.launcher(("compact", *kind), plans.copy_out, *kind, fmt=fmt).launch(
        expanding_programs(cfg, ctx.device, overlapped=side is not None),
        recv_x_ptr=words,
        recv_scale_ptr=ctx.no_bytes if received.scale is None else received.scale,
        recv_idx_ptr=placement if received.topk_idx is None else received.topk_idx,
        recv_weights_ptr=ctx.no_floats if received.topk_weights is None else received.topk_weights,
        placement_ptr=placement,
        row_words=row_words,
        row_limit=received.x.shape[0],
        num_senders=exchange_programs(cfg.num_sm),
        stream=side,
    )


def combine_topk(ctx: DispatchCombineContext, values: torch.Tensor, desc: EPAllToAllLayoutDesc) -> torch.Tensor:
    """Sum values [R, K] float32 of compact rows per token: [T, K] float32. Collective.

    A combine of short float32 rows, with the same kernels, buffers and epochs as any other. Of the rows of a token
    one has the value of a slot and the others zero, so the sum is exact.

    Raises:
        ConfigError: rows of the layer are shorter than one float32.
    """
    topk = ctx.config.topk
    narrow = ctx.rows.narrow(topk)
    width = narrow.hidden
    parts = []
    for first in range(0, topk, width):
        columns = values[:, first : first + width]
        if columns.shape[1] < width:
            columns = torch.nn.functional.pad(columns, (0, width - columns.shape[1]))
        parts.append(combine_ops.combine(ctx, narrow, columns.contiguous(), None, desc, of_slots=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)[:, :topk].contiguous()


_CLEARED = 64  # pieces of memory that are zeroed at once


@functools.cache
def _launcher(plan: Callable[..., Plan], *args: int | bool) -> Launcher:
    return Launcher(plan(*args, INTERPRETING), aot=default_aot())


# --- slabs: rows of an expert at a fixed place ----------------------------------------------------------


def to_slabs(rows: torch.Tensor, offsets: torch.Tensor, counts: torch.Tensor, out: torch.Tensor) -> None:
    """Expert-major rows [R, H] into out [e, n, H]: those of each expert at the start of its slab; the rest is left.

    offsets: [e + 1] int32, first row of each expert; counts: [e] int32, its rows, at most n.
    """
    _move(rows, out, offsets, counts, out.shape[1], pack=True)


def from_slabs(slabs: torch.Tensor, offsets: torch.Tensor, counts: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[num_rows, H]: `to_slabs` backwards; rows behind the last expert's are undefined."""
    rows = torch.empty(num_rows, slabs.shape[2], dtype=slabs.dtype, device=slabs.device)
    _move(slabs, rows, offsets, counts, slabs.shape[1], pack=False)
    return rows


def _move(
    source: torch.Tensor, dest: torch.Tensor, offsets: torch.Tensor, counts: torch.Tensor, slab_rows: int, pack: bool
) -> None:
    num_experts, row_bytes = counts.shape[0], dest.shape[-1] * dest.element_size()
    words = as_words(source, row_bytes)
    into = view_as(dest, words.dtype)
    row_words = row_bytes // words.element_size()
    programs = num_experts * max(local_programs(dest.device) * 4 // num_experts, 1)
    _launcher(plans.slab_rows, pack, row_words).launch(
        programs,
        source_ptr=words,
        dest_ptr=into,
        offsets_ptr=offsets,
        counts_ptr=counts,
        num_experts=num_experts,
        slab_rows=slab_rows,
        row_words=row_words,
    )


# --- where tokens go ------------------------------------------------------------------------------------


class TokenLayout(NamedTuple):
    """Where the tokens of this rank go.

    Attributes:
        tokens_per_rank: [W] int32, a token once per rank.
        tokens_per_node: [N] int32, a token once per node.
        entries_per_expert: [E] int32.
        in_rank: [T, W] bool.
    """

    tokens_per_rank: torch.Tensor
    tokens_per_node: torch.Tensor
    entries_per_expert: torch.Tensor
    in_rank: torch.Tensor


class ZeroCounts:
    """Memory for counts, cleared for many calls at once: clearing it is a launch, which takes longer than counting.

    Each piece is handed out once, on the stream that cleared it.
    """

    def __init__(self) -> None:
        self._left: dict[tuple[int, int | None, int], list[torch.Tensor]] = {}

    def take(self, length: int, device: torch.device) -> torch.Tensor:
        """[length or up to three more] int32 zeros that start at a multiple of 16 bytes."""
        length = -(-length // 4) * 4
        # What a graph captures must clear its own memory at each replay.
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return torch.zeros(length, dtype=torch.int32, device=device)
        # Private, because torch.cuda.current_stream takes microseconds (triton_ep/runtime/launch.py).
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        left = self._left.setdefault((length, device.index, stream), [])
        if not left:
            with torch.inference_mode(False):  # who gets a piece may be outside of that mode
                left += torch.zeros(_CLEARED, length, dtype=torch.int32, device=device).unbind()
        return left.pop()


def token_layout(
    topk_idx: torch.Tensor, num_experts: int, num_ranks: int, ranks_per_node: int, zeros: ZeroCounts
) -> TokenLayout:
    """Count the destinations of topk_idx [T, K] int32 or int64, -1 = dropped; local, and the host waits for nothing."""
    num_tokens, topk = topk_idx.shape
    num_nodes = num_ranks // ranks_per_node
    counts = zeros.take(num_ranks + num_nodes + num_experts, topk_idx.device)
    in_rank = torch.empty(num_tokens, num_ranks, dtype=torch.bool, device=topk_idx.device)
    _launcher(plans.token_layout, topk, num_ranks).launch(
        -(-num_tokens // plans.token_layout_tokens(INTERPRETING)),
        topk_idx_ptr=topk_idx,
        counts_ptr=counts,
        in_rank_ptr=in_rank.view(torch.uint8) if INTERPRETING else in_rank,
        num_tokens=num_tokens,
        num_experts=num_experts,
        num_ranks=num_ranks,
        experts_per_rank=num_experts // num_ranks,
        ranks_per_node=ranks_per_node,
    )
    used = [num_ranks, num_nodes, num_experts]
    ranks, nodes, experts, _ = counts.split_with_sizes([*used, counts.shape[0] - sum(used)])
    return TokenLayout(ranks, nodes, experts, in_rank)
