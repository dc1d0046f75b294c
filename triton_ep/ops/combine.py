"""Bringing expert outputs back (kernels/intranode/combine.py, kernels/internode/combine.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from triton_ep.context.context import DispatchCombineContext
from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.context.rows import RowFormat
from triton_ep.kernels.device.codes import COMBINE_BACKWARD, COMBINE_BESIDE, COMBINE_SLOTS, COMBINE_WEIGHTS, STEPS
from triton_ep.ops import copy_engines
from triton_ep.ops.dispatch import fork_network
from triton_ep.ops.tuning import (
    as_words,
    combining_beside,
    combining_programs,
    makes_room,
    sends_aside,
    summing_programs,
)
from triton_ep.runtime.launch import INTERPRETING, Launcher
from triton_ep.runtime.plans import exchange
from triton_ep.runtime.plans.shape import WORD_BYTES, word_type


def is_reduced(desc: EPAllToAllLayoutDesc) -> bool:
    """True if the experts' rank sums the rows of one token before it publishes them."""
    return desc.skipped_token_topk_mapping_indices is not None


def combine(
    ctx: DispatchCombineContext,
    fmt: RowFormat,
    y: torch.Tensor,
    weights: torch.Tensor | None,
    desc: EPAllToAllLayoutDesc,
    of_slots: bool = False,
    biases: tuple[torch.Tensor, ...] = (),
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Publish expert outputs y [R, H], bring them back and sum them: [T, H].

    fmt: format of `y` and the result. weights: [R] float32. biases: up to two [T, H]; the sums start from them.
    out: memory for the result; None: allocated.
    of_slots: rows carry one value per slot of their token instead of expert outputs. y [R]: each row carries the value
    of one slot, the column in which the descriptor lists the row.
    """
    plan = _plan(ctx, fmt, desc, weights is not None, of_slots, y.dim() == 1)
    # Later rows are summed while the first sums are pulled. A side stream reads `y` until it is joined.
    aside = plan.overlapped and not plan.early
    y, own_row = _publish(ctx, fmt, y, weights, desc, plan, aside)
    out = _make_output(ctx, fmt, desc) if out is None else out
    own = (y, own_row) if own_row >= 0 else (out, -1)  # a tensor of the right type, not read
    _receive(ctx, fmt, out, own, desc, plan, biases, split=False)
    if aside:
        ctx.join()
    return out


def combine_columns(
    ctx: DispatchCombineContext, desc: EPAllToAllLayoutDesc, columns: Callable[[RowFormat, int], torch.Tensor]
) -> torch.Tensor:
    """Sum K float32 columns of received rows per token: [T, K].

    Each combine carries as many columns as fit into a row of the layer.

    columns: returns the rows [R, hidden] of one combine, given their format and their first column; columns from K on
    are ignored.

    Raises:
        ConfigError: rows of the layer are too short for a float32 (`RowFormats.narrow`).
    """
    topk = ctx.config.topk
    fmt = ctx.rows.narrow(topk)
    parts = [combine(ctx, fmt, columns(fmt, first), None, desc, of_slots=True) for first in range(0, topk, fmt.hidden)]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return whole[:, :topk].contiguous()


def combine_slots(ctx: DispatchCombineContext, desc: EPAllToAllLayoutDesc, values: torch.Tensor) -> torch.Tensor:
    """Bring the value of each received row, [R] float32, back to its slot: [T, K]. For layers with local combine.

    Raises:
        ConfigError: as `combine_columns`.
    """
    copies, topk = desc.skipped_token_topk_mapping_indices, ctx.config.topk
    assert copies is not None and copies.shape[1] == topk, "the descriptor is of expert-major rows with local combine"
    fmt = ctx.rows.narrow(topk)
    if fmt.hidden == topk:
        return combine(ctx, fmt, values, None, desc, of_slots=True)
    parts = []
    for first in range(0, topk, fmt.hidden):
        part = copies[:, first : first + fmt.hidden]
        part = torch.nn.functional.pad(part, (0, fmt.hidden - part.shape[1]), value=-1).contiguous()
        of_part = replace(desc, skipped_token_topk_mapping_indices=part)
        parts.append(combine(ctx, fmt, values, None, of_part, of_slots=True))
    return torch.cat(parts, 1)[:, :topk].contiguous()


def wait_published(ctx: DispatchCombineContext, fmt: RowFormat, desc: EPAllToAllLayoutDesc) -> bool:
    """Make the current stream wait until the latest `combine` has read its rows.

    That `combine` must have had this descriptor and no weights, and must not have been a split-phase call.

    Returns False if no side stream reads the rows: the caller must then wait for the end of the combine.
    """
    plan = _plan(ctx, fmt, desc, False)
    if plan.early or not plan.overlapped:
        return False
    ctx.wait_joined()
    return True


def send(
    ctx: DispatchCombineContext,
    fmt: RowFormat,
    y: torch.Tensor,
    weights: torch.Tensor | None,
    desc: EPAllToAllLayoutDesc,
    biases: tuple[torch.Tensor, ...] = (),
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Publish expert outputs y [R, H] with weights [R] float32; biases, out: as in `combine`.

    Returns memory for the result [T, H], and a callable that launches the receiving half, which writes the sums there.
    """
    plan = _plan(ctx, fmt, desc, weights is not None)
    _publish(ctx, fmt, y, weights, desc, plan, split=True)
    out = _make_output(ctx, fmt, desc) if out is None else out
    return out, partial(_receive, ctx, fmt, out, (out, -1), desc, plan, biases, split=True)


class _Kind(NamedTuple):
    """What decides the kernels of a combine and their grids.

    Attributes:
        has_weights: the rows have weights.
        copies: most rows per token that are summed before they are published; 0: rows are published as they are.
        gathered: each row is one value.
        by_engines: copy engines send the rows, unless the combine buffer was lent.
        beside: the kernels run next to products (`DispatchCombineContext.making_room`).
    """

    has_weights: bool
    copies: int
    gathered: bool
    by_engines: bool
    beside: bool


class _Plan(NamedTuple):
    """How rows are published. Derived from the configuration alone, so ranks agree without communicating.

    Attributes:
        programs: number of programs that publish.
        pulling: number of programs that sum what all ranks publish.
        num_steps: steps in which rows are published.
        turns: steps in which tokens are summed.
        overlapped: publishing runs concurrently with the kernels that pull, except in a split-phase call.
        early: for that, the kernel that pulls is launched early, behind the kernel that publishes; otherwise the latter
            has a stream of its own: where others lie between the two, and in backward passes, whose products wait until
            rows have been published (`wait_published`).
        kind: which kernels these are.
        call: COMBINE_* (kernels/device/codes.py), which ranks compare.
    """

    programs: int
    pulling: int
    num_steps: int
    turns: int
    overlapped: bool
    early: bool
    kind: _Kind
    call: int


def _plan(
    ctx: DispatchCombineContext,
    fmt: RowFormat,
    desc: EPAllToAllLayoutDesc,
    has_weights: bool,
    of_slots: bool = False,
    gathered: bool = False,
) -> _Plan:
    copy_rows = desc.skipped_token_topk_mapping_indices
    copies = 0 if copy_rows is None else copy_rows.shape[1]
    by_engines = ctx.config.copy_engines and copy_engines.sends_compact(ctx, fmt, desc, has_weights or of_slots)
    beside = ctx.beside_products and makes_room(ctx) and not has_weights
    kind = _Kind(has_weights, copies, gathered, by_engines, beside)
    call = COMBINE_WEIGHTS * has_weights | COMBINE_SLOTS * of_slots | COMBINE_BACKWARD * ctx.backward
    call |= COMBINE_BESIDE * beside
    grids: tuple[int, int, int, int, bool] | None = fmt.grids.get(kind)
    if grids is None:
        grids = fmt.grids[kind] = _grids(ctx, fmt, kind)
    early = grids[-1] and ctx.config.is_intra_node and not ctx.backward
    return _Plan(*grids, early, kind, call)


def _grids(ctx: DispatchCombineContext, fmt: RowFormat, kind: _Kind) -> tuple[int, int, int, int, bool]:
    """The `_Plan` of a combine of such rows, up to `overlapped`."""
    if kind.beside:
        publishing, pulling, overlapped = combining_beside(ctx.device)
        return publishing, pulling, STEPS, STEPS, overlapped
    if kind.copies:
        publisher = _reducer(ctx, fmt, kind)
    else:  # another kernel publishes rows that are in place already, with as many programs
        publisher = _stager(ctx, fmt, kind.has_weights, fmt.payload_bytes // WORD_BYTES[word_type(fmt.payload_bytes)])
    puller = _puller(ctx, fmt, kind)
    programs = combining_programs(ctx.config, ctx.device, publisher.declared, puller.declared, kind.copies > 0)
    publishing, pulling, overlapped = programs
    # The extra releases of steps pay off only when overlapped; the interpreter uses two steps to exercise the path.
    turns = STEPS if overlapped or sends_aside(ctx.config, ctx.device) else 2 if INTERPRETING else 1
    # With several nodes, the first half of the steps has the rows whose sums cross the network.
    num_steps = turns if ctx.config.is_intra_node else max(turns, 2)
    if kind.by_engines:  # all rows arrive before the first is added
        return publishing, summing_programs(ctx.config, ctx.device, puller.declared), 1, 1, False
    return publishing, pulling, num_steps, turns, overlapped


def _reducer(ctx: DispatchCombineContext, fmt: RowFormat, kind: _Kind) -> Launcher:
    given = (kind.has_weights, kind.copies, kind.gathered, kind.beside)
    return ctx.launcher(("reduce", *given), exchange.reduce, *given, fmt=fmt)


def _stager(ctx: DispatchCombineContext, fmt: RowFormat, has_weights: bool, row_words: int) -> Launcher:
    return ctx.launcher(("stage", has_weights, row_words), exchange.stage, has_weights, row_words, fmt=fmt)


def _puller(
    ctx: DispatchCombineContext, fmt: RowFormat, kind: _Kind, has_bias: bool = False, early: bool = False
) -> Launcher:
    copies = kind.copies
    given = (kind.has_weights and not copies, copies > 0, has_bias, int(copies == 1), kind.beside)
    return ctx.launcher(("pull", early, *given), exchange.pull, *given, fmt=fmt, early=early)


def _make_output(ctx: DispatchCombineContext, fmt: RowFormat, desc: EPAllToAllLayoutDesc) -> torch.Tensor:
    return torch.empty(desc.num_dispatch_token_cur_rank, fmt.hidden, dtype=fmt.dtype, device=ctx.device)


def _receive(
    ctx: DispatchCombineContext,
    fmt: RowFormat,
    out: torch.Tensor,
    own: tuple[torch.Tensor, int],
    desc: EPAllToAllLayoutDesc,
    plan: _Plan,
    biases: tuple[torch.Tensor, ...],
    split: bool,
) -> None:
    """The receiving half. own, split: as of `_pull` and `dispatch.fork_network`."""
    aside = None
    if not ctx.config.is_intra_node:
        aside = fork_network(ctx, split)
        _send_partials(ctx, fmt, desc, plan, aside)
    _pull(ctx, fmt, out, own, desc, plan, biases, plan.early and not split)
    if aside is not None:
        ctx.crossing.join()


def _publish(
    ctx: DispatchCombineContext,
    fmt: RowFormat,
    y: torch.Tensor,
    weights: torch.Tensor | None,
    desc: EPAllToAllLayoutDesc,
    plan: _Plan,
    aside: bool = False,
    split: bool = False,
) -> tuple[torch.Tensor, int]:
    """Publish expert outputs to the ranks of this node; with local combine, sum them per token first.

    aside: the sums are computed on the side stream, which the caller joins. Until then it keeps the first result.
    split: the caller may overwrite `y` before the receiving half.

    Returns the rows that are read, `y` or a copy, and the first one that the receiving half sums there (`_pull`), -1:
    none.
    """
    ctx.calls.check_combine(desc.dispatch_number)
    weights_arg = ctx.no_floats if weights is None else weights
    copy_rows = desc.skipped_token_topk_mapping_indices
    if copy_rows is not None:
        lent = ctx.calls.lent
        # A layer with local combine never lends it.
        in_buffer = not ctx.config.enable_local_combine and y.data_ptr() == ctx.local_address("dispatch_output_buf")
        ctx.calls.end_loan(in_buffer)
        if in_buffer:
            y = y.clone()  # other ranks store sums there
        if lent or ctx.config.shared_staging:
            # They wait until every rank has moved lent rows, and reads no more rows of a dispatch.
            beside = plan.kind.beside
            ctx.launcher(("enter", beside), exchange.enter, beside).launch(1)
        if plan.kind.by_engines and not lent:
            return y, copy_engines.send_compact(ctx, fmt, y, desc, plan.programs, plan.call, split)
        side = ctx.fork() if aside else None
        _reducer(ctx, fmt, plan.kind).launch(
            plan.programs,
            y_ptr=y,
            weights_ptr=weights_arg,
            copy_rows_ptr=copy_rows,
            placement_ptr=desc.placement,
            hidden=fmt.hidden,
            row_capacity=copy_rows.shape[0],
            num_steps=plan.num_steps,
            call=plan.call,
            stream=side,
        )
        return y, -1
    in_place = y.data_ptr() == ctx.local_address("dispatch_output_buf")
    ctx.calls.end_loan(in_place)
    if in_place:
        if weights is not None:
            ctx.local("weight_recv_buf")[: weights.shape[0]].copy_(weights)
        _tell_published(ctx, desc, plan)
        return y, -1
    words = as_words(y, fmt.payload_bytes)
    row_words = fmt.payload_bytes // words.element_size()
    _stager(ctx, fmt, plan.kind.has_weights, row_words).launch(
        plan.programs,
        y_ptr=words,
        weights_ptr=weights_arg,
        placement_ptr=desc.placement,
        row_words=row_words,
        row_capacity=ctx.sizes.output_rows,
        call=plan.call,
    )
    return y, -1


def _tell_published(ctx: DispatchCombineContext, desc: EPAllToAllLayoutDesc, plan: _Plan) -> None:
    """Tell all ranks that the rows of this combine are in place."""
    launcher = ctx.launcher(("publish",), exchange.publish)
    launcher.launch(plan.programs, placement_ptr=desc.placement, call=plan.call)


def lend_buffer(ctx: DispatchCombineContext) -> torch.Tensor:
    """The combine buffer [rows, H]. Kernels launched next may write it: the stream waits until no rank reads it."""
    ctx.calls.lend()
    ctx.launcher(("free",), exchange.free).launch(1)
    return ctx.local("dispatch_output_buf")


def _send_partials(
    ctx: DispatchCombineContext,
    fmt: RowFormat,
    desc: EPAllToAllLayoutDesc,
    plan: _Plan,
    aside: torch.cuda.Stream | None,
) -> None:
    """Sum this node's rows of the tokens of other nodes and send the sums back.

    aside: stream on which that overlaps the kernel that sums the rows of this rank's tokens.
    """
    sizes, reduced = ctx.sizes, is_reduced(desc)
    assert desc.forward is not None, "a descriptor of several nodes has forward tables"
    kind = (plan.kind.has_weights and not reduced, reduced)
    ctx.launcher(("partial", *kind), exchange.partial, *kind, fmt=fmt).launch(
        plan.pulling,
        like_x_ptr=ctx.local_as("dispatch_output_buf", fmt.dtype),
        placement_ptr=desc.placement,
        forward_ptr=desc.forward,
        hidden=fmt.hidden,
        row_capacity=sizes.output_rows,
        num_stage_programs=plan.programs,
        call=plan.call,
        stream=aside,
    )


def _pull(
    ctx: DispatchCombineContext,
    fmt: RowFormat,
    out: torch.Tensor,
    own: tuple[torch.Tensor, int],
    desc: EPAllToAllLayoutDesc,
    plan: _Plan,
    biases: tuple[torch.Tensor, ...],
    early: bool,
) -> None:
    """Wait for the rows of this rank's tokens and sum them, and biases, into out [T, H].

    own: rows, and the first one that is a sum of this rank's own tokens, and is not in its combine buffer, or -1.
    early: as in `Launcher`.
    """
    sizes = ctx.sizes
    bias, second = biases[0] if biases else out, biases[-1] if biases else out
    if plan.kind.by_engines:
        ctx.launcher(("await",), exchange.await_staged).launch(
            1, placement_ptr=desc.placement, num_stage_programs=plan.programs, call=plan.call
        )
    _puller(ctx, fmt, plan.kind, bool(biases), early).launch(
        plan.pulling,
        out_ptr=out,
        bias_ptr=bias,
        second_bias_ptr=second,
        num_biases=len(biases),
        own_ptr=own[0],
        own_row=own[1],
        entries_ptr=desc.entries,
        placement_ptr=desc.placement,
        num_tokens=out.shape[0],
        hidden=fmt.hidden,
        row_capacity=sizes.output_rows,
        num_stage_programs=plan.programs,
        num_steps=plan.turns,
        call=plan.call,
    )
