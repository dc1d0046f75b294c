"""Signals of a kernel on another stream: they count how much it has written of the rows `low_latency_combine` sends."""

from __future__ import annotations

from typing import Any

import torch

from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.errors import InputError
from triton_ep.exchange.request import Signals
from triton_ep.integrations import arguments as check

_MOST = (1 << 31) - 1


def per_expert(src_signals: Any, expected: Any, desc: EPAllToAllLayoutDesc) -> Signals:
    """The signals in `src_signals` [e] int32 or uint32, one per expert.

    Raises:
        InputError: another tensor, or `expected` is not an integer from 0 to 2**31 - 1.
    """
    values = _words("src_signals", src_signals, desc, _experts(desc))
    return Signals(values.unsqueeze(1), None, 1, check.integer("src_signal_expect_value", expected, 0, most=_MOST))


def per_block(comp_signal: Any, block_m: Any, threshold: Any, slab_rows: int, desc: EPAllToAllLayoutDesc) -> Signals:
    """The signals in `comp_signal`, int32 or uint32: signal i * ceil(slab_rows / block_m) + b counts for block b of
    expert i, rows b * block_m to (b + 1) * block_m.

    Raises:
        InputError: a shorter tensor, or numbers out of range.
    """
    block_rows = check.integer("block_m", block_m, 1)
    experts, blocks = _experts(desc), -(-slab_rows // block_rows)
    values = _words("comp_signal", comp_signal, desc, experts * blocks)
    counts = desc.num_recv_tokens_per_expert
    return Signals(
        values.view(experts, blocks), counts, block_rows, check.integer("threshold", threshold, 0, most=_MOST)
    )


def _experts(desc: EPAllToAllLayoutDesc) -> int:
    return desc.num_recv_tokens_per_expert.shape[0]


def _words(name: str, given: Any, desc: EPAllToAllLayoutDesc, least: int) -> torch.Tensor:
    """The first `least` words of a tensor of signals, as int32."""
    words = check.tensor(name, given, None, (torch.int32, torch.uint32), desc.placement.device)
    if words.numel() < least or not words.is_contiguous():
        raise InputError(f"{name} must be contiguous with at least {least} signals, got {list(words.shape)}.")
    return words.view(torch.int32).flatten()[:least]
