"""Ranges for profilers: a named range around each half of a call while a profiler records."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd import _profiler_enabled  # torch's own modules call this one, too

from triton_ep.context.context import DispatchCombineContext
from triton_ep.runtime.environment import read_environment

_NO_RANGE = nullcontext()


@functools.cache
def _wants_nvtx() -> bool:
    return read_environment().nvtx


def records_ranges() -> bool:
    """Whether a profiler records; if not, calls skip the cost of a range."""
    return _profiler_enabled() or _wants_nvtx()


def call_range(what: str, context: DispatchCombineContext) -> AbstractContextManager[object]:
    """The range of a call: `record_function` under torch's profiler, NVTX with TRITON_EP_NVTX=1, else an empty context.

    what: "dispatch", "hook of combine". The name is `triton_ep.dispatch 7, layer 3fa2`, with the number of earlier
    dispatches and the last digits of the layer's id.
    """
    if not records_ranges():
        return _NO_RANGE
    name = f"triton_ep.{what} {context.num_dispatches}, layer {context.layer_id & 0xFFFF:04x}"
    if _profiler_enabled():
        return torch.autograd.profiler.record_function(name)
    return torch.cuda.nvtx.range(name)
