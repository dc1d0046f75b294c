"""Slots: the (token, k) of each received row, and the experts that a routing map puts into a token's slots.

The gradient of routing weights needs the value of each received row back at its own (token, k). Combine sums over k, so
each slot gets a column of its own: a row puts its value into column k and zeros into the others. That is a combine of
short float32 rows, with the same kernels, buffers and epochs as any other; all terms but one are zero, so the sum is
exact. With local combine the kernel that sums the rows of a token on their rank writes these columns itself, from the
table of the token's output rows.
"""

from __future__ import annotations

import torch

from triton_ep.context.context import DispatchCombineContext, reports_failure
from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.context.given import RoutingMap
from triton_ep.context.rows import RowFormat
from triton_ep.ops import combine as combine_ops
from triton_ep.ops import routing as routing_ops


def known_copies(
    ctx: DispatchCombineContext, desc: EPAllToAllLayoutDesc, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """[C, K] int32: output rows of each staging row, R = none; arguments as in `row_slots`."""
    if rows is None:
        rows = ctx.local("stage_meta")[:, : ctx.config.topk]
    arrivals = desc.arrivals_of_rank[ctx.config.rank].clamp(max=ctx.sizes.arrival_rows)
    arrived = (torch.arange(rows.shape[0], device=ctx.device) < arrivals).unsqueeze(1)
    none = desc.num_recv_rows
    return torch.where(arrived & (rows >= 0) & (rows < none), rows, none)


def row_slots(
    ctx: DispatchCombineContext, desc: EPAllToAllLayoutDesc, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """[R] int32: k of the assignment in each row of a dispatch, -1 in rows without one.

    rows: [C, K] int32, `copy_rows` of that dispatch (`ops.dispatch.Received`); None: it is the latest dispatch.
    """
    target = known_copies(ctx, desc, rows).long()
    slots = torch.full((desc.num_recv_rows + 1,), -1, dtype=torch.int32, device=ctx.device)
    ks = torch.arange(ctx.config.topk, dtype=torch.int32, device=ctx.device).expand(target.shape)
    return slots.scatter_(0, target.flatten(), ks.flatten())[: desc.num_recv_rows]


def needed_slots(
    ctx: DispatchCombineContext, desc: EPAllToAllLayoutDesc, rows: torch.Tensor | None = None
) -> torch.Tensor | None:
    """`row_slots`, or None if `to_slots` finds the slots in the descriptor."""
    return None if combine_ops.is_reduced(desc) else row_slots(ctx, desc, rows)


@reports_failure("combine", begun=True)
def to_slots(
    ctx: DispatchCombineContext, values: torch.Tensor, slots: torch.Tensor | None, desc: EPAllToAllLayoutDesc
) -> torch.Tensor:
    """Send the value of each row back to its slot. Collective.

    Arguments:
        values: [R] float32.
        slots: [R] int32, from `needed_slots`.

    Returns [T, K] float32; a dropped entry gets zero.

    Raises:
        ConfigError: rows of the layer are too short for a float32 (`RowFormats.narrow`).
    """

    if slots is None:
        return combine_ops.combine_slots(ctx, desc, values.contiguous().resolve_neg())
    of_rows = slots.unsqueeze(1)

    def columns(fmt: RowFormat, first: int) -> torch.Tensor:
        column = torch.arange(first, first + fmt.hidden, dtype=torch.int32, device=values.device)
        return torch.where(of_rows == column, values.unsqueeze(1), 0.0)

    return combine_ops.combine_columns(ctx, desc, columns)


def slots_of_map(ctx: DispatchCombineContext, given: RoutingMap) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Ids [T, K] int32 of the experts of a routing map, ascending, -1 in empty slots; their weights [T, K] float32, or
    None. Local.

    A map on another device than the layer's gives ids -1 on that device, which the layer refuses.
    """
    shape, device = (given.routed.shape[0], ctx.config.topk), given.routed.device
    if device != ctx.device:
        return torch.full(shape, -1, dtype=torch.int32, device=device), None
    ids = torch.empty(shape, dtype=torch.int32, device=device)
    weights = None if given.probs is None else torch.empty(shape, dtype=torch.float32, device=device)
    routing_ops.map_slots(ctx, given, ids, weights)
    return ids, weights
