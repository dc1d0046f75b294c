"""Routing: ids from routing maps (kernels/compute/map_slots.py), counts, slots and the counts of all ranks
(kernels/internode/splits.py); then rows at their owners (kernels/compute/routing.py)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from triton_ep.context.context import NO_LIMIT, DispatchCombineContext
from triton_ep.context.given import RoutingMap
from triton_ep.context.rows import RowFormat
from triton_ep.ops.element_formats import BLOCK
from triton_ep.ops.tuning import packing_programs
from triton_ep.runtime.launch import INTERPRETING
from triton_ep.runtime.plans import compact, exchange
from triton_ep.runtime.plans.shape import ROUTING_TOKENS

_MAP_TOKENS = compact.map_slots_tokens(INTERPRETING)  # of a program


class Routing(NamedTuple):
    """Tables of one dispatch (kernels/device/tables.py).

    Attributes:
        given: routing map, from which `exchange_splits` writes ids and weights; None: these are given.
        ids: [T, K] expert ids.
        entries: [F, T, K] int32; hold slots within the chunk, and rows once `place` has run.
        chunks: int32, counts and other tables by chunk.
        push_addrs: memory for [T, K] int64; written by `place`.
        own_tokens: of `OwnRows`; likewise.
        weights: [T, K] float32, valid for this dispatch only; None: no weights.
        num_tokens: T.
        num_chunks: number of routing chunks of the tokens.
    """

    given: RoutingMap | None
    ids: torch.Tensor
    entries: torch.Tensor
    chunks: torch.Tensor
    push_addrs: torch.Tensor
    own_tokens: torch.Tensor
    weights: torch.Tensor | None
    num_tokens: int
    num_chunks: int


class OwnRows(NamedTuple):
    """Where the rows are that this rank sends to itself (kernels/device/arrivals.py).

    Attributes:
        x: all rows of this rank as bytes, in wire form; read with `in_place`.
        tokens: memory for the tokens of these rows, [max_tokens] int64.
        in_place: 1: they are laid out from x. 0: they are staged like those of other ranks.
    """

    x: torch.Tensor
    tokens: torch.Tensor
    in_place: int


def prepare(
    ctx: DispatchCombineContext, topk_idx: torch.Tensor | RoutingMap, weights: torch.Tensor | None = None
) -> Routing:
    """Allocate the tables of a dispatch, and with a routing map its ids and weights.

    weights: [T, K] float32; None with a routing map, which has its own.
    """
    cfg, sizes = ctx.config, ctx.sizes
    most = cfg.max_tokens * cfg.topk
    given = None
    if isinstance(topk_idx, RoutingMap):
        given, num_tokens = topk_idx, topk_idx.routed.shape[0]
        topk_idx = ctx.scratch("map_ids", most, torch.int32)
        weights = None if given.probs is None else ctx.scratch("map_weights", most, torch.float32)
    else:
        num_tokens = topk_idx.shape[0]
    return Routing(
        given,
        topk_idx,
        torch.empty(sizes.entry_fields, num_tokens, cfg.topk, dtype=torch.int32, device=ctx.device),
        ctx.scratch("chunks", sizes.chunks_length, torch.int32),
        ctx.scratch("push_addrs", most, torch.int64),
        ctx.scratch("own_tokens", cfg.max_tokens, torch.int64),
        weights,
        num_tokens,
        -(-num_tokens // ROUTING_TOKENS),
    )


def exchange_splits(
    ctx: DispatchCombineContext,
    routing: Routing,
    host_word: int,
    bad_scatter: torch.Tensor | None = None,
    routed: torch.Tensor | None = None,
    room: tuple[int, int, int] | None = None,
    needed_tokens: int = 0,
    unpacked: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Read ids from a routing map if there is one, count this rank's entries, give each its slot within its chunk,
    publish the counts to all ranks, wait for the counts of all ranks, and derive where all segments start
    (kernels/internode/splits.py). Collective; advances the dispatch epoch.

    routing: from `prepare`.
    host_word: published unchanged, plus `bad_scatter` [1] int32 from the device, and with HOST_AGAIN the number of the
        dispatch that wrote `routed`.
    room: staging rows, output rows and sums for which there is room, if the host will read the counts; None: it will
        not.
    needed_tokens: token count that a rank reports when it has more tokens than the layer has room for and sends none.
    unpacked: rows [T, H] of the layer's dtype, and memory [T, bytes] uint8 in which the same kernel quantises them to
        MXFP8, packed as they travel.

    Returns `placement`, int32 (kernels/device/tables.py).
    """
    cfg, sizes = ctx.config, ctx.sizes
    arrival_room, output_room, sum_room = (0, 0, 0) if room is None else room
    placement = torch.empty(sizes.placement_length, dtype=torch.int32, device=ctx.device)
    chunks = routing.num_chunks
    first_packing = chunks + -(-sizes.shape.num_columns // exchange.SPLITS_COLUMNS)
    given = routing.given
    kind = (bad_scatter is not None, unpacked is not None, None if given is None else _kind_of(given))
    launcher = ctx.launcher(("splits", *kind), exchange.splits, *kind)
    if unpacked is None:
        rows = packed = ctx.no_bytes  # not read
        num_blocks = packing = 0
    else:
        rows, packed = unpacked
        num_blocks = rows.numel() // BLOCK
        packing = packing_programs(cfg, launcher, -(-num_blocks // exchange.PACKED_BLOCKS))
    launcher.launch(
        first_packing + packing,
        topk_idx_ptr=routing.ids,
        **(ctx.no_map if given is None else _map_arguments(ctx, given, routing.weights)),
        entries_ptr=routing.entries,
        chunks_ptr=routing.chunks,
        placement_ptr=placement,
        # If None: pointers of the right type, not read.
        bad_scatter_ptr=placement if bad_scatter is None else bad_scatter,
        routed_ptr=placement if routed is None else routed,
        told_ptr=ctx.host_read.memory,
        num_tokens=routing.num_tokens,
        reported_tokens=needed_tokens or routing.num_tokens,
        host_word=host_word,
        first_waiting=chunks,
        alignment=cfg.alignment,
        recv_capacity=NO_LIMIT if cfg.recv_capacity is None else cfg.recv_capacity,
        read_number=0 if room is None else ctx.host_read.begin(),
        arrival_room=arrival_room,
        output_room=output_room,
        sum_room=sum_room,
        unpacked_ptr=rows,
        packed_ptr=packed,
        num_blocks=num_blocks,
        row_blocks=cfg.hidden // BLOCK,
        first_packing=first_packing,
    )
    return placement


def _kind_of(given: RoutingMap) -> tuple[bool, bool]:
    """Whether a routing map has weights, and whether its experts without a slot are counted."""
    return given.probs is not None, given.excess is not None


def _map_arguments(
    ctx: DispatchCombineContext, given: RoutingMap, weights: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Pointers of a kernel that reads a routing map, and writes the weights."""
    routed = given.routed
    if routed.data_ptr() % 8:
        routed = routed.clone()  # the kernel reads words
    return {
        "map_ptr": routed.view(torch.uint8) if INTERPRETING else routed,
        "probs_ptr": ctx.no_floats if given.probs is None else given.probs,
        "weights_ptr": ctx.no_floats if weights is None else weights,
        "excess_ptr": ctx.no_map["excess_ptr"] if given.excess is None else given.excess,
    }


def map_slots(ctx: DispatchCombineContext, given: RoutingMap, ids: torch.Tensor, weights: torch.Tensor | None) -> None:
    """Write the ids [T, K] int32 of a routing map, ascending, padded with -1, and its weights [T, K] float32, padded
    with 0."""
    num_tokens, num_experts = given.routed.shape
    kind = _kind_of(given)
    ctx.launcher(("map_slots", *kind), compact.map_slots, *kind).launch(
        -(-num_tokens // _MAP_TOKENS),
        **_map_arguments(ctx, given, weights),
        ids_ptr=ids,
        num_tokens=num_tokens,
        num_experts=num_experts,
        topk=ctx.config.topk,
    )


def legal_scatter(topk_idx: torch.Tensor, scatter: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[] bool on the device: True if the caller's scatter indices sort the kept entries by expert.

    Every kept entry must have a position inside its expert's range, and no two entries the same position.
    """
    kept = (topk_idx >= 0) & (topk_idx < num_experts)
    expert = torch.where(kept, topk_idx, num_experts).long().flatten()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=scatter.device)
    counts.scatter_add_(0, expert, torch.ones_like(expert))
    slot = scatter.long().flatten() - (counts.cumsum(0) - counts)[expert]
    inside = (slot >= 0) & (slot < counts[expert])
    kept = kept.flatten()
    taken = torch.zeros(scatter.numel() + 1, dtype=torch.int32, device=scatter.device)
    position = torch.where(kept & inside, scatter.long().flatten(), scatter.numel())
    taken.scatter_add_(0, position, kept.int())
    return (inside | ~kept).all() & (taken[:-1] <= 1).all()


def place(
    ctx: DispatchCombineContext,
    fmt: RowFormat,
    routing: Routing,
    placement: torch.Tensor,
    scatter: torch.Tensor | None,
    own: OwnRows,
) -> None:
    """Turn slots into rows, in place; publish to the ranks of this node what will arrive; write the tile table, and the
    tokens of the own rows. Launched early, behind `exchange_splits`."""
    cfg, weights = ctx.config, routing.weights
    static = cfg.recv_capacity is not None
    make = (exchange.place, weights is not None, scatter is not None)
    ctx.launcher(("place", *make[1:]), *make, fmt=fmt, early=True).launch(
        routing.num_chunks + 1,
        entries_ptr=routing.entries,
        scatter_idx_ptr=routing.entries if scatter is None else scatter,
        # Without weights: a pointer of the right type, not read.
        weights_ptr=ctx.no_floats if weights is None else weights,
        chunks_ptr=routing.chunks,
        placement_ptr=placement,
        push_addrs_ptr=routing.push_addrs,
        tokens_ptr=own.tokens,
        in_place=own.in_place,
        num_tokens=routing.num_tokens,
        row_bytes=fmt.wire_bytes,
        recv_capacity=cfg.recv_capacity if static else NO_LIMIT,
        stage_capacity=ctx.sizes.arrival_rows,
    )
