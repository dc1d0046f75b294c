"""How the other ranks learn that this one refused its arguments, and that it sends nothing."""

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
    """Report that this rank's arguments were refused; keep in step with the others by a dispatch of no rows.

    Returns its descriptor, None where nothing comes of the call on any rank.

    Args:
        landing: of the call.
        scaled: the call is for one-byte rows with scales, which this rank may have to pass on.
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
        # This rank's own rejection, seen in the exchange: the caller raises what caused it.
        return None


def _no_rows(ctx: DispatchCombineContext, scaled: bool) -> tuple[Rows, torch.Tensor]:
    """Rows and ids of no token; scaled: of one byte, with scales, where rows of the layer can be such."""
    cfg, device = ctx.config, ctx.device
    ids = torch.empty(0, cfg.topk, dtype=torch.int32, device=device)
    if not scaled or cfg.hidden % 32:
        return Rows(torch.empty(0, cfg.hidden, dtype=cfg.token_dtype, device=device)), ids
    data = torch.empty(0, cfg.hidden, dtype=torch.float8_e4m3fn, device=device)
    return Rows(data, torch.empty(0, cfg.hidden // 32, dtype=torch.uint8, device=device)), ids
