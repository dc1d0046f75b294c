"""Routing of one rank's tokens: counts and slots, then rows at their owners (kernels/compute/routing.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triton_ep.context import NO_LIMIT, DispatchCombineContext
from triton_ep.layout import next_power_of_2
from triton_ep.ops.tuning import ROUTING_TOKENS
from triton_ep.runtime import launch


@dataclass(frozen=True)
class Routing:
    """What is known before the splits exchange. Letters as in EPAllToAllLayoutDesc; S, C as in the kernels.

    Attributes:
        topk_idx: [T, K] int32, -1 = dropped.
        owner: [T, K] int32, rank that owns the expert, -1 = dropped.
        dst_row, stage_row, node_slot: [T, K] int32, slots within the chunk; final after `place`.
        chunk_counts: [chunks, C] int32, exclusive prefix over chunks.
        row: [S] int32, this rank's splits row.
    """

    topk_idx: torch.Tensor
    owner: torch.Tensor
    dst_row: torch.Tensor
    stage_row: torch.Tensor
    node_slot: torch.Tensor
    chunk_counts: torch.Tensor
    row: torch.Tensor


@dataclass(frozen=True)
class Placement:
    """What the splits of all ranks say about this rank's tokens and outputs; fields as in EPAllToAllLayoutDesc;
    `bases` as in the kernels."""

    expert_offsets: torch.Tensor
    num_recv: torch.Tensor
    overflow: torch.Tensor
    tokens_from_node: torch.Tensor
    report: torch.Tensor
    bases: torch.Tensor


def route(ctx: DispatchCombineContext, topk_idx: torch.Tensor, host_word: int) -> Routing:
    """Count this rank's entries and give each its slot; `host_word` goes into the splits row as it is."""
    cfg, sizes = ctx.config, ctx.sizes
    num_tokens = topk_idx.shape[0]
    chunks = -(-num_tokens // ROUTING_TOKENS)
    tables = torch.empty(5, num_tokens, cfg.topk, dtype=torch.int32, device=ctx.device)
    chunk_counts = torch.empty(chunks, sizes.num_columns, dtype=torch.int32, device=ctx.device)
    chunk_bad = torch.empty(chunks, 2, dtype=torch.int32, device=ctx.device)
    row = torch.zeros(sizes.row_length, dtype=torch.int32, device=ctx.device)
    where = (cfg.num_experts, cfg.world_size, cfg.num_experts_per_rank, cfg.local_world_size)
    launch(
        "routing_count_kernel",
        chunks,
        (topk_idx, *tables, chunk_counts, chunk_bad, num_tokens, *where),
        {
            "TOPK": cfg.topk,
            "KP": sizes.kp,
            "BLOCK_T": ROUTING_TOKENS,
            "BLOCK_C": min(next_power_of_2(sizes.num_columns), 512),
        },
    )
    columns = 16
    launch(
        "routing_scan_kernel",
        -(-sizes.num_columns // columns),
        (chunk_counts, chunk_bad, row, chunks, sizes.num_columns, sizes.row_length, num_tokens, host_word),
        {"BLOCK_N": min(max(next_power_of_2(chunks), 16), 256), "BLOCK_C": columns},
    )
    kept_idx, owner, dst_row, stage_row, node_slot = tables.unbind()
    return Routing(kept_idx, owner, dst_row, stage_row, node_slot, chunk_counts, row)


def check_scatter(routing: Routing, scatter: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[] bool on the device: the caller's scatter indices are a sort of the kept entries by expert.

    Every kept entry must have a position inside its expert's range, and no two the same one.
    """
    kept = routing.topk_idx >= 0
    counts = routing.row[:num_experts].long()
    expert = routing.topk_idx.clamp(min=0).long()
    slot = scatter.long() - (counts.cumsum(0) - counts)[expert]
    inside = (slot >= 0) & (slot < counts[expert])
    taken = torch.zeros(scatter.numel() + 1, dtype=torch.int32, device=scatter.device)
    position = torch.where(kept & inside, scatter.long(), scatter.numel())
    taken.scatter_add_(0, position.flatten(), kept.flatten().int())
    return (inside | ~kept).all() & (taken[:-1] <= 1).all()


def offsets(ctx: DispatchCombineContext) -> Placement:
    """Derive every segment's start from the exchanged splits."""
    cfg, sizes = ctx.config, ctx.sizes
    experts = cfg.num_experts_per_rank

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=ctx.device)

    out = Placement(
        expert_offsets=empty(experts + 1),
        num_recv=empty(experts),
        overflow=empty(1),
        tokens_from_node=empty(cfg.num_nodes),
        report=empty(cfg.world_size, 8),
        bases=empty(2 * cfg.num_experts + cfg.world_size),
    )
    launch(
        "routing_offsets_kernel",
        cfg.world_size,
        (
            ctx.state,
            ctx.tables,
            out.bases,
            out.expert_offsets,
            out.num_recv,
            out.overflow,
            out.tokens_from_node,
            out.report,
            cfg.rank,
            cfg.world_size,
            experts,
            cfg.local_world_size,
            sizes.row_length,
            cfg.alignment,
            NO_LIMIT if cfg.recv_capacity is None else cfg.recv_capacity,
        ),
        {
            "WP": next_power_of_2(cfg.world_size),
            "EP": next_power_of_2(experts),
            "BLOCK_E": min(next_power_of_2(cfg.num_experts), 256),
        },
    )
    return out


def place(
    ctx: DispatchCombineContext, routing: Routing, placement: Placement, scatter: torch.Tensor | None
) -> torch.Tensor:
    """Turn slots into rows, in place; returns node_token [N, M] int32, this rank's tokens for each node."""
    cfg = ctx.config
    num_tokens = routing.topk_idx.shape[0]
    static = cfg.recv_capacity is not None
    node_token = torch.empty(cfg.num_nodes, cfg.max_tokens, dtype=torch.int32, device=ctx.device)
    launch(
        "routing_slots_kernel",
        -(-num_tokens // ROUTING_TOKENS),
        (
            routing.topk_idx,
            routing.topk_idx if scatter is None else scatter,
            routing.chunk_counts,
            placement.bases,
            routing.dst_row,
            routing.stage_row,
            routing.node_slot,
            node_token,
            num_tokens,
            cfg.max_tokens,
            cfg.world_size,
            cfg.num_experts_per_rank,
            cfg.local_world_size,
            cfg.recv_capacity if static else NO_LIMIT,
            ctx.sizes.arrival_rows if static else NO_LIMIT,
        ),
        {
            "HAS_SCATTER": scatter is not None,
            "TOPK": cfg.topk,
            "KP": ctx.sizes.kp,
            "BLOCK_T": ROUTING_TOKENS,
        },
    )
    return node_token
