"""Dispatch and combine of a low-latency layer (kernels/intranode/low_latency_dispatch.py, low_latency_combine.py)."""

from __future__ import annotations

from typing import Any

import torch

from triton_ep.context import DispatchCombineContext
from triton_ep.kernels.device.rows import MX, QUANTISE, WORDS
from triton_ep.layout import HOST_WEIGHTS, next_power_of_2
from triton_ep.layout_desc import EPAllToAllLayoutDesc
from triton_ep.ops.dispatch import Rows
from triton_ep.ops.tuning import as_words, common_constexprs
from triton_ep.runtime import INTERPRETING, launch

PUSH_WARPS = 8
EXPAND_WARPS = 8
EXPAND_ROWS = 2
REDUCE_WARPS = 8
SUM_WARPS = 8
SUM_PARTS = 2
BY_LOAD = False
"""Waits acquire by loads (kernels/device/waits.py)."""
EARLY = False
"""For programmatic dependent launches, which the launch itself must ask for (kernels/device/low_latency.py)."""


def dispatch(
    ctx: DispatchCombineContext, x: Rows, topk_idx: torch.Tensor, weights: torch.Tensor | None, host_word: int
) -> tuple[Rows, torch.Tensor | None, EPAllToAllLayoutDesc]:
    """Push the rows of x [T, H] and lay out what arrives; what `EPAll2AllLayer.dispatch` returns.

    Advances the epochs of host and device. Waits for nothing on the host.
    """
    ctx.epoch += 1
    tables = _Tables(ctx, topk_idx.shape[0])
    _push(ctx, x, topk_idx, weights, tables, host_word | (HOST_WEIGHTS if weights is not None else 0))
    recv, recv_weights = _expand(ctx, tables, weights is not None)
    ctx.poll_status()
    desc = EPAllToAllLayoutDesc(
        num_dispatch_token_cur_rank=topk_idx.shape[0],
        num_recv_rows=recv.data.shape[0],
        num_input_tokens_per_rank=tables.report[:, 2],
        topk_indices_tensor=tables.kept_idx,
        owner_ranks=None,
        token_dst_scatter_idx=None,
        expert_offsets=tables.expert_offsets,
        num_recv_tokens_per_expert=tables.num_recv,
        overflow=tables.overflow,
        stage_row=None,
        node_slot=None,
        tokens_per_node=None,
        tokens_from_node=None,
        report=tables.report,
        layer_id=ctx.layer_id,
        epoch=ctx.epoch,
        skipped_token_topk_mapping_indices=tables.copy_rows,
    )
    return recv, recv_weights, desc


def combine(
    ctx: DispatchCombineContext, y: torch.Tensor, weights: torch.Tensor | None, desc: EPAllToAllLayoutDesc
) -> torch.Tensor:
    """Sum expert outputs y [R, H] per token at their rank, send the sums back, and sum those: [T, H]."""
    cfg = ctx.config
    copy_rows = desc.skipped_token_topk_mapping_indices
    assert copy_rows is not None, "a descriptor of a low-latency dispatch has it"
    rows = 16 if INTERPRETING else 1
    launch(
        "low_latency_reduce_kernel",
        -(-copy_rows.shape[0] // rows),
        (
            y,
            # A pointer of the right type; not read without weights.
            weights if weights is not None else desc.report.view(torch.float32),
            copy_rows,
            ctx.state,
            ctx.tables,
            cfg.max_tokens,
            cfg.hidden,
            cfg.rank,
            cfg.world_size,
        ),
        {
            "HAS_WEIGHTS": weights is not None,
            "EARLY": EARLY,
            "ROWS": rows,
            **_columns(cfg.hidden, 8192),
            **common_constexprs(ctx.sizes, "TOPK", "WP"),
        },
        num_warps=REDUCE_WARPS,
    )
    num_tokens = desc.num_dispatch_token_cur_rank
    out = torch.empty(num_tokens, cfg.hidden, dtype=cfg.token_dtype, device=ctx.device)
    block = next_power_of_2(-(-cfg.hidden // (1 if INTERPRETING else SUM_PARTS)))
    block = min(max(block, 128), 8192)
    parts = -(-cfg.hidden // block)
    launch(
        "low_latency_sum_kernel",
        max(-(-num_tokens // rows), 1) * parts,
        (
            out,
            desc.topk_indices_tensor,
            ctx.state,
            ctx.tables,
            num_tokens,
            cfg.max_tokens,
            cfg.hidden,
            cfg.num_experts_per_rank,
            cfg.rank,
            cfg.world_size,
        ),
        {
            "PARTS": parts,
            "ROWS": rows,
            "BLOCK_H": block,
            "BY_LOAD": BY_LOAD,
            "EARLY": EARLY,
            **common_constexprs(ctx.sizes, "TOPK", "KP", "WP"),
        },
        num_warps=SUM_WARPS,
    )
    ctx.poll_status()
    return out


class _Tables:
    """The int32 tensors of a dispatch, views of one allocation; each starts at a multiple of 16 bytes.

    Attributes:
        small: what the expand kernel writes at once: report [W, 8], expert_offsets, num_recv, overflow.
        copy_rows: [W * M, K].
        kept_idx: [T, K].
    """

    def __init__(self, ctx: DispatchCombineContext, num_tokens: int) -> None:
        cfg = ctx.config
        experts, world, topk = cfg.num_experts_per_rank, cfg.world_size, cfg.topk
        at_offsets = world * 8
        at_num_recv = at_offsets + (experts + 4) // 4 * 4
        at_overflow = at_num_recv + (experts + 3) // 4 * 4
        at_copies = at_overflow + 4
        at_kept = at_copies + -(-world * cfg.max_tokens * topk // 4) * 4
        words = torch.empty(at_kept + num_tokens * topk, dtype=torch.int32, device=ctx.device)
        self.small = words
        self.report = words[:at_offsets].view(world, 8)
        self.expert_offsets = words[at_offsets : at_offsets + experts + 1]
        self.num_recv = words[at_num_recv : at_num_recv + experts]
        self.overflow = words[at_overflow : at_overflow + 1]
        self.copy_rows = words[at_copies : at_copies + world * cfg.max_tokens * topk].view(-1, topk)
        self.kept_idx = words[at_kept:].view(num_tokens, topk)


def _push(
    ctx: DispatchCombineContext,
    x: Rows,
    topk_idx: torch.Tensor,
    weights: torch.Tensor | None,
    tables: _Tables,
    host_word: int,
) -> None:
    cfg = ctx.config
    words, scale, payload = x.data, x.scale, QUANTISE
    if cfg.payload is None or scale is not None:
        words = as_words(x.data, cfg.hidden * x.data.element_size())
        payload = WORDS if scale is None else MX
    row_words = cfg.hidden * x.data.element_size() // words.element_size()
    num_tokens = topk_idx.shape[0]
    launch(
        "low_latency_push_kernel",
        max(num_tokens, 1),
        (
            words,
            # Pointers of the right type; not read with other payloads, or without weights.
            scale if scale is not None else words.view(torch.uint8),
            topk_idx,
            weights if weights is not None else tables.report.view(torch.float32),
            tables.kept_idx,
            ctx.state,
            ctx.tables,
            num_tokens,
            cfg.max_tokens,
            row_words,
            cfg.num_experts_per_rank,
            cfg.rank,
            cfg.world_size,
            host_word,
        ),
        {
            "PAYLOAD": payload.value,
            "EARLY": EARLY,
            "HAS_WEIGHTS": weights is not None,
            "BLOCK_N": min(max(next_power_of_2(cfg.max_tokens * cfg.topk), 16), 1024),
            **_columns(row_words, 8192 if payload is QUANTISE else 2048),
            **common_constexprs(ctx.sizes, "TOPK", "KP", "WP"),
        },
        num_warps=PUSH_WARPS,
    )


def _expand(ctx: DispatchCombineContext, tables: _Tables, has_weights: bool) -> tuple[Rows, torch.Tensor | None]:
    cfg = ctx.config
    capacity, has_scales = cfg.recv_capacity, cfg.payload is not None
    assert capacity is not None, "EPConfig refuses a low-latency layer without"
    dtype = torch.float8_e4m3fn if has_scales else cfg.token_dtype
    recv_x = torch.empty(capacity, cfg.hidden, dtype=dtype, device=ctx.device)
    scale = weights = None
    if has_scales:
        scale = torch.empty(capacity, cfg.hidden // 32, dtype=torch.uint8, device=ctx.device)
    if has_weights:
        weights = torch.empty(capacity, dtype=torch.float32, device=ctx.device)
    words = as_words(recv_x, cfg.hidden * recv_x.element_size())
    row_words = words.numel() // capacity
    rows = 16 if INTERPRETING else EXPAND_ROWS
    launch(
        "low_latency_expand_kernel",
        -(-cfg.world_size * cfg.max_tokens // rows),
        (
            words,
            scale if scale is not None else words.view(torch.uint8),
            weights if weights is not None else tables.report.view(torch.float32),
            tables.copy_rows,
            tables.small,
            ctx.state,
            ctx.tables,
            row_words,
            cfg.max_tokens,
            cfg.num_experts_per_rank,
            capacity,
            cfg.alignment,
            cfg.rank,
            cfg.world_size,
        ),
        {
            "BY_LOAD": BY_LOAD,
            "EARLY": EARLY,
            "HAS_SCALES": has_scales,
            "HAS_WEIGHTS": has_weights,
            "HAS_PADDING": cfg.alignment > 1,
            "EP": next_power_of_2(cfg.num_experts_per_rank),
            "ROWS": rows,
            **_columns(row_words, 2048),
            **common_constexprs(ctx.sizes, "TOPK", "KP", "WP"),
        },
        num_warps=EXPAND_WARPS,
    )
    return Rows(recv_x, scale), weights


def _columns(row_words: int, most: int) -> dict[str, Any]:
    """TILES and BLOCK_H of a kernel that takes rows of `row_words` in one piece if they have no more than `most`."""
    block = min(max(next_power_of_2(row_words), 32 if INTERPRETING else 128), most)
    return {"TILES": -(-row_words // block), "BLOCK_H": block}
