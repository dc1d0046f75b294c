"""Report to the other ranks that this rank refused its arguments and sends nothing."""

from __future__ import annotations

from typing import Any

import torch

from triton_ep.context.context import DispatchCombineContext
from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.context.given import Rows
from triton_ep.errors import PeerFailed
from triton_ep.exchange import steps
from triton_ep.exchange.landings import EXPERT_MAJOR, Landing
from triton_ep.exchange.request import Request


def refuse(
    ctx: DispatchCombineContext,
    landing: Landing[Any] = EXPERT_MAJOR[None],
    *,
    scaled: bool = False,
    num_rows: int | None = None,
    others_know: bool = False,
    needed_tokens: int = 0,
) -> EPAllToAllLayoutDesc | None:
    """Report that this rank refused its arguments; stay in step with the other ranks by a dispatch of no rows.

    Returns the descriptor of that dispatch, or None if no rank completes the call.

    Args:
        landing: landing of the call.
        scaled: the call is for one-byte rows with scales, which this rank may have to forward.
        num_rows, others_know, needed_tokens: as in `Request`.

    Raises:
        CapacityError: the hosts wait, and some rank needs a larger layer; the same on all ranks.
    """
    rows, ids = _no_rows(ctx, scaled)
    request = Request(rows, ids, num_rows=num_rows, refused=True, needed_tokens=needed_tokens, others_know=others_know)
    try:
        if ctx.config.low_latency:
            return steps.dispatch_low_latency(ctx, request).desc
        return steps.dispatch(ctx, request, landing).desc
    except PeerFailed:
        if needed_tokens:
            raise
        # The report of this rank's own rejection: the caller raises its cause.
        return None
    finally:
        ctx.unread = None  # for the same reason `check` does not raise it again


def _no_rows(ctx: DispatchCombineContext, scaled: bool) -> tuple[Rows, torch.Tensor]:
    """Rows and ids of zero tokens; scaled: one-byte rows with scales, if the hidden size allows them."""
    cfg, device = ctx.config, ctx.device
    ids = torch.empty(0, cfg.topk, dtype=torch.int32, device=device)
    if not scaled or cfg.hidden % 32:
        return Rows(torch.empty(0, cfg.hidden, dtype=cfg.token_dtype, device=device)), ids
    data = torch.empty(0, cfg.hidden, dtype=torch.float8_e4m3fn, device=device)
    return Rows(data, torch.empty(0, cfg.hidden // 32, dtype=torch.uint8, device=device)), ids
