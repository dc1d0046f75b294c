"""Plain calls of a layer, without what only other calls need: no hook, event, bias, capacity or payload.

An integration makes most of its calls with arguments of the same kinds, on a layer that an earlier call has created. It
then leaves the checks to the layer, which makes them anyway, and builds its own results instead of the layer's. If an
argument does not fit, it makes the full call, whose errors name arguments as its caller knows them.
"""

from __future__ import annotations

import torch

from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.context.given import RoutingMap, Rows
from triton_ep.errors import InputError, StaleHandleError
from triton_ep.exchange import checks, steps
from triton_ep.exchange.accept import again
from triton_ep.exchange.landings import COMPACT, Landing, SentCompact
from triton_ep.exchange.ranges import call_range, records_ranges
from triton_ep.exchange.request import Received, Request, Sent, as_sent
from triton_ep.layer import EPAll2AllLayer


def dispatch(
    layer: EPAll2AllLayer,
    rows: Rows,
    given: torch.Tensor | RoutingMap,
    weights: torch.Tensor | None,
    landing: Landing[Received],
) -> Sent[Received] | None:
    """A dispatch for which the host waits. Collective.

    given: expert ids, or a routing map, which has its own weights; in either case not checked yet.

    Returns None if an argument does not fit: nothing was sent, and the other ranks do not know. The full call then
    raises, and reports that to them.

    Raises:
        CapacityError: as `EPAll2AllLayer.dispatch_with_row_map`, if another rank or a routing map needs a larger layer.
        Others: as `EPAll2AllLayer.dispatch`.
    """
    ctx = layer.context
    ctx.check_open()
    ctx.poll_status()
    ctx.calls.check_dispatch()
    try:
        if isinstance(given, torch.Tensor):
            checks.check_dispatch(layer.config, ctx.device, rows.data, given, weights, None, scale=rows.scale)
        else:  # a map has a column per expert
            checks.check_map(layer.config, ctx.device, rows, given)
    except InputError:  # the full call says what does not fit
        return None
    request = Request(as_sent(rows), given, weights)
    if not records_ranges():
        return steps.dispatch(ctx, request, landing)
    with call_range("dispatch", ctx):
        return steps.dispatch(ctx, request, landing)


def compact_again(
    layer: EPAll2AllLayer, rows: Rows, desc: EPAllToAllLayoutDesc, idx_dtype: torch.dtype
) -> SentCompact | None:
    """`layer.dispatch_compact_again`, with the ids of the rows. Collective; the host does not wait.

    Returns None if an argument does not fit: nothing was sent, and the other ranks do not know.
    """
    ctx = layer.context
    ctx.check_open()
    ctx.poll_status()
    ctx.calls.check_dispatch()
    try:
        checks.check_compact_desc("dispatch", ctx.layer_id, desc)
        checks.check_rows(layer.config, ctx.device, rows.data, desc.num_dispatch_token_cur_rank, rows.scale)
    except (InputError, StaleHandleError):  # the full call says what does not fit
        return None
    request = again(as_sent(rows), desc)
    if not records_ranges():
        return steps.dispatch(ctx, request, COMPACT[idx_dtype])
    with call_range("dispatch", ctx):
        return steps.dispatch(ctx, request, COMPACT[idx_dtype])


def combine(layer: EPAll2AllLayer, x: torch.Tensor, desc: EPAllToAllLayoutDesc, name: str) -> torch.Tensor:
    """`layer.combine(x, desc)`. Raises and warns as it does. name: of the rows, in errors."""
    if records_ranges() or (torch.is_grad_enabled() and x.requires_grad):
        return layer.combine(x, desc)
    ctx = layer.context
    ctx.check_open()
    ctx.poll_status()
    checks.check_combine(layer.config, ctx.device, ctx.layer_id, x, desc, None, name)
    ctx.calls.check_combine(desc.dispatch_number)
    return steps.combine(ctx, x, None, desc)[0]
