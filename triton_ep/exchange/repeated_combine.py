"""Combines that repeat the launches of an earlier one (repeats.py)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from triton_ep.context.context import DispatchCombineContext
from triton_ep.exchange.repeats import Facts, Noting, Repeat, look_up
from triton_ep.exchange.request import Outputs
from triton_ep.ops import combine as combine_ops
from triton_ep.runtime.repeat import ALIGNED, repeat

_COPIES, _TOKENS = {"row_capacity": "copies"}, {"num_tokens": "tokens"}
"""Arguments of kernels that differ between calls of one kind, and what they are. With rows that are published as they
are, `row_capacity` is the room of a buffer, always the same."""


@dataclass(slots=True)
class RepeatedCombine(Repeat):
    """The launches of one kind of combine.

    Attributes:
        publish, pull: launch the kernels up to the one that publishes rows, and the one that sums them.
    """

    publish: Callable[..., None]
    pull: Callable[..., None]

    def run(self, ctx: DispatchCombineContext, given: Outputs) -> torch.Tensor:
        """The sums [T, H]."""
        _, _, desc, biases, out = given
        ctx.calls.check_combine(desc.dispatch_number)
        copies, tokens = desc.skipped_token_topk_mapping_indices, desc.num_dispatch_token_cur_rank
        if copies is None:
            self.publish(*_published(given))
        else:
            self.publish(*_published(given), copies.shape[0])
        if out is None:
            fmt = ctx.rows.own
            out = torch.empty(tokens, fmt.hidden, dtype=fmt.dtype, device=ctx.device)
        self.pull(out, desc.entries, desc.placement, *biases, tokens)
        return out


class NotedCombine(Noting):
    """Notes the launches of a combine."""

    def end(self, given: Outputs, out: torch.Tensor) -> None:
        """All launches have been made; out: the result."""
        self.end_part()
        if not out.numel():  # no memory by which the launches can be told from others
            return
        desc = given.desc
        published = {f"sent_{number}": each for number, each in enumerate(_published(given))}
        results = (out, desc.entries, desc.placement, *given.biases)
        summed = {f"summed_{number}": each for number, each in enumerate(results)}

        def make(facts: Facts) -> RepeatedCombine | None:
            *publishing, pulling = self.parts[0]
            publish = repeat(publishing, published, {} if desc.skipped_token_topk_mapping_indices is None else _COPIES)
            pull = repeat([pulling], summed, _TOKENS)
            return None if publish is None or pull is None else RepeatedCombine(facts, publish, pull)

        self.keep(make)


def combine(ctx: DispatchCombineContext, given: Outputs) -> torch.Tensor:
    """The sums [T, H] of a combine whose halves overlap, by repeated launches or by those of `ops.combine`."""
    known = find(ctx, given)
    if isinstance(known, RepeatedCombine):
        return known.run(ctx, given)
    y, weights, desc, biases, out = given
    with known or nullcontext():
        out = combine_ops.combine(ctx, ctx.rows.own, y, weights, desc, biases=biases, out=out)
        if known is not None:
            known.end(given, out)
    return out


def find(ctx: DispatchCombineContext, given: Outputs) -> RepeatedCombine | NotedCombine | None:
    """How a combine is launched, as of `look_up`."""
    y, weights, desc, biases, out = given
    if ctx.repeats is None or ctx.calls.lent or y.shape[0] < 2:  # a single row may have any strides
        return None
    copies, address = desc.skipped_token_topk_mapping_indices, y.data_ptr()
    if not ctx.config.enable_local_combine and address == ctx.local_address("dispatch_output_buf"):
        return None  # of an earlier loan
    address |= desc.entries.data_ptr() | desc.placement.data_ptr()
    for part in (weights, copies, out, *biases):
        if part is not None:
            address |= part.data_ptr()
    if address % ALIGNED:
        return None
    of_rows = 0 if copies is None else copies.shape[1]
    kind = ("combine", of_rows, weights is None, len(biases), ctx.backward, ctx.beside_products)
    return look_up(ctx, ctx.rows.own, kind, RepeatedCombine, NotedCombine)


def _published(given: Outputs) -> list[torch.Tensor]:
    """The tensors that kernels read until rows are published, each once."""
    y, weights, desc, _, _ = given
    found = [y, desc.placement]
    if weights is not None:
        found.append(weights)
    if desc.skipped_token_topk_mapping_indices is not None:
        found.append(desc.skipped_token_topk_mapping_indices)
    return found
