"""Bringing expert outputs back (kernels/intranode/combine.py, kernels/internode/combine.py)."""

from __future__ import annotations

from typing import Any

import torch

from triton_ep.context import DispatchCombineContext
from triton_ep.layout import CHUNK
from triton_ep.layout_desc import EPAllToAllLayoutDesc
from triton_ep.ops.tuning import as_words, common_constexprs, exchange_programs, local_programs, summing_tile, tile
from triton_ep.runtime import launch


def _where(ctx: DispatchCombineContext) -> tuple[int, int, int]:
    return ctx.config.rank, ctx.config.world_size, ctx.config.local_world_size


def stage(
    ctx: DispatchCombineContext, y: torch.Tensor, weights: torch.Tensor | None, desc: EPAllToAllLayoutDesc
) -> None:
    """Publish expert outputs y [R, H] to the ranks of this node; with local combine, summed per token."""
    sizes = ctx.sizes
    programs = local_programs(ctx.device)
    weights_arg = weights if weights is not None else desc.report.view(torch.float32)
    state = (ctx.state, ctx.tables)
    constexprs = {
        "HAS_WEIGHTS": weights is not None,
        **common_constexprs(sizes, "WP", "LWP", "MAX_PROGRAMS"),
    }
    copy_rows = desc.skipped_token_topk_mapping_indices
    args: tuple[Any, ...]
    if copy_rows is not None:
        constexprs.update(common_constexprs(sizes, "TOPK"), **summing_tile(ctx.config.hidden))
        args = (y, weights_arg, copy_rows, desc.report, *state, ctx.config.hidden, sizes.output_rows)
        launch("combine_reduce_kernel", programs, (*args, *_where(ctx)), constexprs)
        return
    words = as_words(y, sizes.payload_bytes)
    row_words = sizes.payload_bytes // words.element_size()
    constexprs.update(tile(row_words))
    args = (words, weights_arg, desc.expert_offsets[-1:], *state, row_words, sizes.output_rows)
    launch("combine_stage_kernel", programs, (*args, *_where(ctx)), constexprs)


def _pull_constexprs(ctx: DispatchCombineContext, has_weights: bool) -> dict[str, Any]:
    import triton.language as tl

    dtypes = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
    return {
        "PARTIAL_DTYPE": dtypes[ctx.config.partial_dtype],
        "HAS_WEIGHTS": has_weights,
        **common_constexprs(ctx.sizes, "TOPK", "LWP", "MAX_PROGRAMS", "MAX_CHUNKS"),
        "CHUNK": CHUNK,
        **summing_tile(ctx.config.hidden, ctx.config.num_nodes),
    }


def send_partials(ctx: DispatchCombineContext, has_weights: bool, desc: EPAllToAllLayoutDesc) -> None:
    """Sum this node's rows of the tokens of other nodes and send the sums back."""
    cfg, sizes = ctx.config, ctx.sizes
    local = desc.skipped_token_topk_mapping_indices is not None
    assert desc.forward_owner is not None, "a descriptor of several nodes has forward tables"
    launch(
        "combine_partial_kernel",
        exchange_programs(cfg.num_sm),
        (
            ctx.local("dispatch_output_buf"),
            desc.tokens_from_node,
            desc.forward_owner,
            desc.forward_stage_row if local else desc.forward_dst_row,
            ctx.state,
            ctx.tables,
            cfg.max_tokens,
            cfg.hidden,
            sizes.output_rows,
            *_where(ctx),
            local_programs(ctx.device),
        ),
        {"NETWORK": ctx.network, **_pull_constexprs(ctx, has_weights and not local)},
        ctx.extern_libs(),
    )


def pull(ctx: DispatchCombineContext, has_weights: bool, desc: EPAllToAllLayoutDesc) -> torch.Tensor:
    """Wait for the rows of this rank's tokens and sum them: [T, H] of the token dtype."""
    cfg, sizes = ctx.config, ctx.sizes
    local = desc.skipped_token_topk_mapping_indices is not None
    num_tokens = desc.num_dispatch_token_cur_rank
    out = torch.empty(num_tokens, cfg.hidden, dtype=cfg.token_dtype, device=ctx.device)
    launch(
        "combine_pull_kernel",
        exchange_programs(cfg.num_sm),
        (
            out,
            desc.owner_ranks,
            desc.stage_row if local else desc.token_dst_scatter_idx,
            desc.node_slot,
            desc.tokens_per_node,
            ctx.state,
            ctx.tables,
            num_tokens,
            cfg.max_tokens,
            cfg.hidden,
            sizes.output_rows,
            *_where(ctx),
            local_programs(ctx.device),
        ),
        {**common_constexprs(sizes, "NNP"), **_pull_constexprs(ctx, has_weights and not local)},
    )
    return out
