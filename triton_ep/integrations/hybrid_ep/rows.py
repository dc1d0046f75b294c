"""Rows that a dispatch of HybridEPBuffer sends: plain rows, or one-byte rows with their scales."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.context.given import RoutingMap, Rows
from triton_ep.errors import InputError
from triton_ep.exchange.checks import ONE_BYTE
from triton_ep.exchange.slots import slots_of_map
from triton_ep.integrations import arguments as check
from triton_ep.layer import EPAll2AllLayer
from triton_ep.mx.tensor import MXTensor
from triton_ep.ops.channel_scales import CHANNELS

Arrived = tuple[torch.Tensor, torch.Tensor | None]


def dtype_of_layer(hidden: Any) -> torch.dtype:
    """Dtype of the layer that sends these rows; bfloat16 for an argument that is no tensor."""
    if not isinstance(hidden, torch.Tensor):
        return torch.bfloat16
    return torch.bfloat16 if hidden.dtype in ONE_BYTE else hidden.dtype


def sendable(hidden: Any, scaling_factor: Any, buffer_fp8: bool, call_fp8: Any) -> tuple[Rows, torch.dtype] | None:
    """The rows of a dispatch as a layer sends them, and the dtype of that layer's rows; arguments as in `SentRows.of`.

    None: an argument does not fit. The layer checks everything else about these rows.
    """
    if not isinstance(hidden, torch.Tensor):
        return None
    if hidden.dtype not in ONE_BYTE:
        return (Rows(hidden), hidden.dtype) if call_fp8 is None or call_fp8 is False else None
    allowed = buffer_fp8 if call_fp8 is None else call_fp8 is True
    if not allowed or not isinstance(scaling_factor, torch.Tensor) or scaling_factor.dtype != torch.float32:
        return None
    return Rows(hidden, scaling_factor), torch.bfloat16


class SentRows(NamedTuple):
    """Rows [T, H], and for one-byte rows one scale per 128 values.

    Attributes:
        hidden: [T, H].
        scales: [T, H / 128] float32; None: rows travel without scales.
    """

    hidden: torch.Tensor
    scales: torch.Tensor | None

    @classmethod
    def of(
        cls, hidden: torch.Tensor, scaling_factor: torch.Tensor | None, buffer_fp8: bool, call_fp8: bool | None
    ) -> SentRows:
        """Check the arguments of a dispatch and return its rows.

        buffer_fp8, call_fp8: `use_fp8` of the buffer and of the call.

        Raises:
            InputError: one-byte rows without `use_fp8`, or without fitting scales; other rows with `use_fp8=True` in
                the call.
        """
        check.tensor("hidden", hidden, 2)
        if call_fp8 is not None:
            call_fp8 = check.flag("use_fp8", call_fp8)
        one_byte = hidden.dtype in ONE_BYTE
        if not one_byte:
            if call_fp8:
                raise InputError(f"use_fp8=True sends one-byte rows, but hidden is {hidden.dtype}. Quantise it first.")
            return cls(hidden.contiguous(), None)
        if not (buffer_fp8 if call_fp8 is None else call_fp8):
            raise InputError(
                f"hidden is {hidden.dtype}, but use_fp8 is False. Create the buffer with use_fp8=True, or pass it."
            )
        tokens, width = hidden.shape
        wanted = (tokens, width // CHANNELS)
        if width % CHANNELS:
            raise InputError(f"one-byte rows have {width} values; pad them to a multiple of {CHANNELS}.")
        if (
            not isinstance(scaling_factor, torch.Tensor)
            or tuple(scaling_factor.shape) != wanted
            or scaling_factor.dtype != torch.float32
            or scaling_factor.device != hidden.device
        ):
            raise InputError(
                f"scaling_factor is {check.shown(scaling_factor)}; rows {list(hidden.shape)} "
                f"{hidden.dtype} need {list(wanted)} float32 on "
                f"{hidden.device}, one per {CHANNELS} values."
            )
        return cls(hidden.contiguous(), scaling_factor.contiguous())

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the layer that sends these rows, and of the rows that `combine` takes."""
        return dtype_of_layer(self.hidden)

    def dispatch(
        self, layer: EPAll2AllLayer, idx: torch.Tensor | RoutingMap, weights: torch.Tensor | None
    ) -> tuple[Arrived, torch.Tensor | None, EPAllToAllLayoutDesc, torch.Tensor]:
        """Dispatch expert-major; returns rows and scales, weights, the descriptor, and the row of each assignment.

        weights: None with a map, which has its own.
        """
        if isinstance(idx, RoutingMap) and (
            isinstance(self.hidden, MXTensor) or self.hidden.device != layer.context.device
        ):
            idx, weights = slots_of_map(layer.context, idx)  # the layer then refuses hidden, by name
        return layer.dispatch_with_row_map(Rows(*self), idx, weights)

    def again(
        self, layer: EPAll2AllLayer, desc: EPAllToAllLayoutDesc, weights: torch.Tensor | None
    ) -> tuple[Arrived, torch.Tensor | None]:
        """Dispatch with the routing of an earlier dispatch; returns expert-major rows and scales, and weights."""
        if self.scales is None:
            recv_x, recv_weights = layer.dispatch_again(self.hidden, desc, weights)
            assert isinstance(recv_x, torch.Tensor)
            return (recv_x, None), recv_weights
        recv_x, scales, recv_weights, _ = layer.dispatch_scaled(
            self.hidden, self.scales, None, weights, layout_desc=desc
        )
        return (recv_x, scales), recv_weights

    def by_rank(
        self, layer: EPAll2AllLayer, idx: torch.Tensor | RoutingMap, weights: torch.Tensor | None, num_rows: int | None
    ) -> tuple[Arrived, torch.Tensor, torch.Tensor | None, EPAllToAllLayoutDesc]:
        """Dispatch once per rank; returns rows and scales, local expert ids, weights, and the descriptor.

        weights: None with a map, which has its own.
        """
        if isinstance(idx, RoutingMap):
            idx, weights = slots_of_map(layer.context, idx)
        received = layer.dispatch_compact(self.hidden, idx, weights, scale=self.scales, num_rows=num_rows)
        return (received.x, received.scale), received.topk_idx, received.topk_weights, received.layout_desc

    def by_rank_again(self, layer: EPAll2AllLayer, desc: EPAllToAllLayoutDesc) -> Arrived:
        """Dispatch once per rank with the routing of an earlier dispatch; returns rows and scales."""
        if self.scales is None:
            return layer.dispatch_compact_again(self.hidden, desc)[0], None
        return layer.dispatch_compact_again(self.hidden, desc, scale=self.scales)[:2]
