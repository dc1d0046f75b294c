"""Slabs of rows for DeepEP's low-latency calls: the rows of each local expert start at a fixed place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from triton_ep.context.given import Rows
from triton_ep.errors import InputError
from triton_ep.integrations.deep_ep.arguments import OF_LAYERS
from triton_ep.integrations.deep_ep.fp8 import CHANNELS
from triton_ep.integrations.deep_ep.utils import EventOverlap, to_overlap
from triton_ep.layer import EPAll2AllLayer


class Slabs:
    """Memory for one slab of rows per expert, and with `use_fp8` for their scales.

    Attributes:
        result: result of the call: [e, n, H], or with `use_fp8` a tuple of it and the scales.
        rows: the same memory, as `EPAll2AllLayer.dispatch_to_slabs` fills it.
    """

    def __init__(self, slab: tuple[int, int], x: torch.Tensor, use_fp8: bool, use_ue8m0: bool) -> None:
        experts, num_rows = slab
        self.result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
        if not use_fp8:
            self.result = torch.empty(*slab, x.shape[1], dtype=x.dtype, device=x.device)
            self.rows = Rows(self.result)
            return
        data = torch.empty(*slab, x.shape[1], dtype=torch.float8_e4m3fn, device=x.device)
        columns, dtype = x.shape[1] // CHANNELS, torch.float32
        if use_ue8m0:
            columns, dtype = columns // 4, torch.int32
        scales = torch.empty(experts, columns, num_rows, dtype=dtype, device=x.device)
        self.rows = Rows(data, scales)
        self.result = (data, scales.transpose(1, 2))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The memory, always as a tuple."""
        return tuple(each for each in self.rows if each is not None)


def run_halves(
    layer: EPAll2AllLayer,
    send: Callable[[], tuple[Any, Callable[[], None]]],
    arguments: tuple[object, ...],
    async_finish: bool,
    return_recv_hook: bool,
) -> tuple[Any, EventOverlap, Callable[[], None]]:
    """Run a low-latency call in two halves, or at once.

    Args:
        send: launches the sending half; returns the result and a function that launches the receiving half.
        arguments: tensors that the call reads and writes.

    Returns:
        the result, the event, and the hook. With `return_recv_hook` the hook launches the receiving half; otherwise
        both halves have been launched, and the hook does nothing.
    """

    def both() -> Any:
        result, receive = send()
        receive()
        return result

    try:
        if return_recv_hook:
            result, receive = send()
            return result, EventOverlap(), receive
        if not async_finish:
            return both(), EventOverlap(), no_hook
        result, event = layer.on_comm_stream(both, arguments)
    except InputError as error:
        raise error.with_names(OF_LAYERS) from None
    return result, to_overlap(event), no_hook


def no_hook() -> None:
    """Hook of a call whose receiving half has been launched."""
