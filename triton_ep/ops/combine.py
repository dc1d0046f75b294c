"""Bringing expert outputs back (kernels/intranode/combine.py, kernels/internode/combine.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from triton_ep.context import DispatchCombineContext
from triton_ep.layout import STEPS
from triton_ep.layout_desc import EPAllToAllLayoutDesc
from triton_ep.ops.tuning import (
    ROUTING_TOKENS,
    as_words,
    chosen,
    common_constexprs,
    exchange_programs,
    local_programs,
    overlaps,
    summing_tile,
    tile,
    waiting_programs,
)
from triton_ep.runtime import INTERPRETING, Launcher


def _where(ctx: DispatchCombineContext) -> tuple[int, int, int]:
    return ctx.config.rank, ctx.config.world_size, ctx.config.local_world_size


def is_reduced(desc: EPAllToAllLayoutDesc) -> bool:
    """True if rows of one token are summed on the expert's rank first."""
    return desc.skipped_token_topk_mapping_indices is not None


def combine(
    ctx: DispatchCombineContext, y: torch.Tensor, weights: torch.Tensor | None, desc: EPAllToAllLayoutDesc
) -> torch.Tensor:
    """Publish expert outputs y [R, H], bring them back and sum them: [T, H]. weights: [R] float32."""
    if not _overlapped(ctx, desc):
        out, receive = send(ctx, y, weights, desc)
        receive()
        return out
    # Rows are summed while the first sums are on their way.
    with torch.cuda.stream(ctx.fork()):
        _publish(ctx, y, weights, desc, *_steps(ctx, desc))
    out = _make_output(ctx, desc)
    _receive(ctx, out, weights is not None, desc)
    ctx.join()
    return out


def send(
    ctx: DispatchCombineContext, y: torch.Tensor, weights: torch.Tensor | None, desc: EPAllToAllLayoutDesc
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Publish expert outputs y [R, H] with weights [R] float32.

    Returns memory for the result [T, H], and the receiving half: launched, it brings there the sums.
    """
    _publish(ctx, y, weights, desc, *_steps(ctx, desc))
    out = _make_output(ctx, desc)
    return out, partial(_receive, ctx, out, weights is not None, desc)


def _overlapped(ctx: DispatchCombineContext, desc: EPAllToAllLayoutDesc) -> bool:
    return is_reduced(desc) and ctx.config.is_intra_node and overlaps(ctx.config, ctx.device)


def _steps(ctx: DispatchCombineContext, desc: EPAllToAllLayoutDesc) -> tuple[int, int]:
    """Programs that publish, and their steps. In two halves or in one: ranks must agree, and need not tell."""
    overlapped = _overlapped(ctx, desc)
    programs = (waiting_programs if overlapped else local_programs)(ctx.device, ctx.config.num_sm)
    # Only then is a step worth its releases; the interpreter takes two, so that steps are met there.
    return programs, STEPS if overlapped else 2 if INTERPRETING else 1


def _make_output(ctx: DispatchCombineContext, desc: EPAllToAllLayoutDesc) -> torch.Tensor:
    cfg = ctx.config
    return torch.empty(desc.num_dispatch_token_cur_rank, cfg.hidden, dtype=cfg.token_dtype, device=ctx.device)


def _receive(ctx: DispatchCombineContext, out: torch.Tensor, has_weights: bool, desc: EPAllToAllLayoutDesc) -> None:
    programs, num_steps = _steps(ctx, desc)
    if not ctx.config.is_intra_node:
        _send_partials(ctx, has_weights, desc, programs)
    _pull(ctx, out, has_weights, desc, programs, num_steps)


def _publish(
    ctx: DispatchCombineContext,
    y: torch.Tensor,
    weights: torch.Tensor | None,
    desc: EPAllToAllLayoutDesc,
    programs: int,
    num_steps: int,
) -> None:
    """Make expert outputs readable to the ranks of this node; with local combine, summed per token."""
    ctx.calls.check_combine(desc.epoch)
    cfg, sizes = ctx.config, ctx.sizes
    has_weights = weights is not None
    weights_arg = ctx.no_floats if weights is None else weights
    state = (ctx.state, ctx.tables)
    copy_rows = desc.skipped_token_topk_mapping_indices
    if copy_rows is not None:
        launcher = ctx.launcher(("reduce", has_weights), _reduce, has_weights)
        arguments = (copy_rows, desc.placement, *state, cfg.hidden, sizes.output_rows, *_where(ctx), num_steps)
        launcher(programs, y, weights_arg, *arguments)
        return
    in_place = y.data_ptr() == ctx.local_address("dispatch_output_buf")
    ctx.calls.end_loan(in_place)
    if in_place:
        if weights is not None:
            ctx.local("weight_recv_buf")[: weights.shape[0]].copy_(weights)
        ctx.launcher(("publish",), _make_publish)(programs, *state, *_where(ctx))
        return
    words = as_words(y, sizes.payload_bytes)
    row_words = sizes.payload_bytes // words.element_size()
    launcher = ctx.launcher(("stage", has_weights, row_words), _stage, has_weights, row_words)
    sizes_arg = (row_words, sizes.output_rows, cfg.num_experts_per_rank)
    launcher(programs, words, weights_arg, desc.placement, *state, *sizes_arg, *_where(ctx))


def _reduce(ctx: DispatchCombineContext, has_weights: bool) -> Launcher:
    common = common_constexprs(ctx.sizes, "TOPK", "WP", "LWP", "MAX_PROGRAMS")
    constexprs = {"HAS_WEIGHTS": has_weights, **common, **summing_tile(ctx.config.hidden)}
    rows, options = chosen(ctx.config, "reduce")
    return Launcher("combine_reduce_kernel", constexprs | rows, **options)


def _stage(ctx: DispatchCombineContext, has_weights: bool, row_words: int) -> Launcher:
    common = common_constexprs(ctx.sizes, "WP", "LWP", "MAX_PROGRAMS")
    return Launcher("combine_stage_kernel", {"HAS_WEIGHTS": has_weights, **common, **tile(row_words)})


def _make_publish(ctx: DispatchCombineContext) -> Launcher:
    return Launcher("combine_publish_kernel", common_constexprs(ctx.sizes, "LWP", "MAX_PROGRAMS"))


def lend_buffer(ctx: DispatchCombineContext) -> torch.Tensor:
    """The combine buffer [rows, H], once no rank reads it any more: what is launched next may write there."""
    ctx.calls.lend()
    ctx.launcher(("free",), _free)(1, ctx.state, ctx.tables, ctx.config.rank, ctx.config.world_size)
    return ctx.local("dispatch_output_buf")


def _free(ctx: DispatchCombineContext) -> Launcher:
    return Launcher("combine_free_kernel", common_constexprs(ctx.sizes, "WP"))


def _pull_constexprs(ctx: DispatchCombineContext, has_weights: bool, reduced: bool) -> dict[str, Any]:
    import triton.language as tl

    dtypes = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
    return {
        "REDUCED": reduced,
        "PARTIAL_DTYPE": dtypes[ctx.config.partial_dtype],
        "HAS_WEIGHTS": has_weights,
        "NETWORK": ctx.network,
        **common_constexprs(ctx.sizes, "TOPK", "LWP", "MAX_PROGRAMS", "MAX_CHUNKS", "CHUNK"),
        **summing_tile(ctx.config.hidden),
    }


def _send_partials(ctx: DispatchCombineContext, has_weights: bool, desc: EPAllToAllLayoutDesc, publishing: int) -> None:
    """Sum this node's rows of the tokens of other nodes and send the sums back."""
    cfg, sizes = ctx.config, ctx.sizes
    reduced = is_reduced(desc)
    assert desc.forward is not None, "a descriptor of several nodes has forward tables"
    kind = (has_weights and not reduced, reduced)
    ctx.launcher(("partial", *kind), _partial, *kind)(
        exchange_programs(cfg.num_sm),
        ctx.local("dispatch_output_buf"),
        desc.placement,
        desc.forward,
        ctx.state,
        ctx.tables,
        cfg.max_tokens,
        cfg.hidden,
        sizes.output_rows,
        cfg.num_experts_per_rank,
        *_where(ctx),
        publishing,
    )


def _partial(ctx: DispatchCombineContext, has_weights: bool, reduced: bool) -> Launcher:
    return Launcher("combine_partial_kernel", _pull_constexprs(ctx, has_weights, reduced), ctx.extern_libs())


def _pull(
    ctx: DispatchCombineContext,
    out: torch.Tensor,
    has_weights: bool,
    desc: EPAllToAllLayoutDesc,
    publishing: int,
    num_steps: int,
) -> None:
    """Wait for the rows of this rank's tokens and sum them into out [T, H]."""
    cfg, sizes = ctx.config, ctx.sizes
    reduced = is_reduced(desc)
    kind = (has_weights and not reduced, reduced)
    ctx.launcher(("pull", *kind), _make_pull, *kind)(
        exchange_programs(cfg.num_sm),
        out,
        desc.entries,
        desc.placement,
        ctx.state,
        ctx.tables,
        out.shape[0],
        cfg.max_tokens,
        cfg.hidden,
        sizes.output_rows,
        cfg.num_experts_per_rank,
        *_where(ctx),
        publishing,
        num_steps,
    )


def _make_pull(ctx: DispatchCombineContext, has_weights: bool, reduced: bool) -> Launcher:
    constexprs = {
        **_pull_constexprs(ctx, has_weights, reduced),
        **common_constexprs(ctx.sizes, "NNP"),
        "BLOCK_T": ROUTING_TOKENS,
    }
    rows, options = chosen(ctx.config, "pull")
    return Launcher("combine_pull_kernel", constexprs | rows, ctx.extern_libs(), **options)
