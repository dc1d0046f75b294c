"""DeepEP's e4m3 rows with one scale per 128 values; triton_ep/ops/channel_scales.py quantises them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch

from triton_ep.config import TOKEN_DTYPES
from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.context.given import Rows
from triton_ep.context.overlap import EPEvent
from triton_ep.errors import ConfigError, InputError
from triton_ep.exchange.landings import CompactRows
from triton_ep.integrations.deep_ep.utils import EventOverlap, order_of
from triton_ep.layer import EPAll2AllLayer
from triton_ep.ops.channel_scales import CHANNELS, quantize_channels
from triton_ep.ops.strides import view_as

SCALE_DTYPES = (torch.float32, torch.int32)
"""Dtypes of scales, one to a word: float32, or their bits."""
_Result = TypeVar("_Result")


def scale_bytes(scales: torch.Tensor, hidden: int) -> torch.Tensor:
    """[T, H / 32] uint8 that a layer sends with rows of H bytes: the scales [T, S], of any strides, then zeros."""
    given = view_as(scales.contiguous(), torch.uint8)
    missing = hidden // 32 - given.shape[1]
    return torch.nn.functional.pad(given, (0, missing)) if missing else given


def scales_of_bytes(sent: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """[..., columns] of `dtype`, contiguous: the inverse of `scale_bytes`."""
    return view_as(sent[..., : columns * dtype.itemsize].contiguous(), dtype)


def check_quantizable(x: Any, round_scale: bool, use_ue8m0: bool) -> None:
    """Raise InputError unless `quantize_channels` takes these arguments."""
    if use_ue8m0 and not round_scale:
        raise InputError("use_ue8m0=True keeps only the exponents of scales. Pass round_scale=True with it.")
    multiple = 4 * CHANNELS if use_ue8m0 else CHANNELS
    if not isinstance(x, torch.Tensor) or x.dim() != 2 or x.dtype != torch.bfloat16:
        got = f"{list(x.shape)} {x.dtype}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise InputError(f"use_fp8=True quantises rows [T, H] bfloat16, got {got}. Pass these, or use_fp8=False.")
    if x.shape[1] % multiple:
        raise InputError(
            f"rows have {x.shape[1]} values, but use_fp8=True{' with use_ue8m0=True' * use_ue8m0} needs a multiple of "
            f"{multiple}: one scale per {CHANNELS} values. Pad the rows, or pass use_fp8=False."
        )


def quantized(x: torch.Tensor, use_ue8m0: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_channels` of rows on `device`, with rounded scales. For rows elsewhere, empty tensors of the same
    shapes: the layer then refuses the rows on all ranks."""
    if x.device == device:
        return quantize_channels(x.contiguous(), True, use_ue8m0)
    data = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    return data, x.new_empty((x.shape[0], x.shape[1] // 32), dtype=torch.uint8)


def sendable(x: Any) -> Rows | None:
    """The argument `x` of a dispatch as the rows that a layer sends; the layer checks everything else about them.

    None: a tuple of other tensors than e4m3 rows and scales of one word per 128 values.
    """
    if type(x) is not tuple:
        return Rows(x)
    data, scales = x if len(x) == 2 else (None, None)
    if not isinstance(data, torch.Tensor) or not isinstance(scales, torch.Tensor):
        return None
    return Rows(data, scales) if data.dtype == torch.float8_e4m3fn and scales.dtype in SCALE_DTYPES else None


class QuantizedRows(NamedTuple):
    """Rows that the caller has quantised, with their scales.

    Attributes:
        data: [T, H] float8_e4m3fn, contiguous.
        scales: [T, H / 128] float32 or int32, or [T, H / 512] int32, of any strides.
        repack: a layer sends contiguous scales, one byte per 32 values. Scales with four exponents to a word are
            shorter, and strided scales are not contiguous: both are copied before sending and cut after receiving.
    """

    data: torch.Tensor
    scales: torch.Tensor
    repack: bool

    @classmethod
    def of(cls, pair: tuple[Any, ...]) -> QuantizedRows:
        """The pair that `dispatch` takes as `x`.

        Raises:
            InputError: `pair` is not [T, H] e4m3 and matching scales.
        """
        data, scales = pair if len(pair) == 2 else (None, None)
        tensors = isinstance(data, torch.Tensor) and isinstance(scales, torch.Tensor)
        if data is None or scales is None or not tensors or data.dim() != 2 or scales.dim() != 2:
            raise InputError("a tuple x must hold rows [T, H] float8_e4m3fn and scales [T, H / 128] float32.")
        if data.dtype != torch.float8_e4m3fn or not data.is_contiguous():
            raise InputError(
                f"quantised rows must be float8_e4m3fn and contiguous, got {data.dtype} with strides {data.stride()}. "
                "Convert them, or pass bfloat16 rows without scales."
            )
        rows, hidden = data.shape
        if hidden % CHANNELS:
            raise InputError(f"quantised rows have {hidden} values; pad them to a multiple of {CHANNELS}.")
        words, shape, kind = hidden // CHANNELS, scales.shape, scales.dtype
        one_per_word = shape[1] == words and kind in SCALE_DTYPES
        four_per_word = 4 * shape[1] == words and kind == torch.int32
        if shape[0] != rows or not (one_per_word or four_per_word):
            raise InputError(
                f"scales are {list(scales.shape)} {scales.dtype}; rows [{rows}, {hidden}] need [{rows}, "
                f"{hidden // CHANNELS}] float32, one per {CHANNELS} values, or as int32, with one or four to a word."
            )
        if scales.device != data.device:
            raise InputError(f"rows are on {data.device}, scales on {scales.device}. Move one of them.")
        return cls(data, scales, not (one_per_word and scales.is_contiguous()))

    def dispatch(
        self,
        layer: EPAll2AllLayer,
        call: Callable[..., CompactRows],
        arguments: tuple[object, ...],
        previous_event: EventOverlap | None,
        async_finish: bool,
    ) -> CompactRows:
        """The result of `call`, a `layer.dispatch_compact`, with scales in the caller's format; arguments: other
        tensors that `call` reads."""
        if not self.repack:
            return call(self.data, scale=self.scales, **order_of(previous_event, async_finish))

        def repacked() -> CompactRows:
            rows = call(self.data, scale=scale_bytes(self.scales, self.data.shape[1]))
            assert rows.scale is not None, "sent"
            return replace(rows, scale=scales_of_bytes(rows.scale, self.scales.shape[1], self.scales.dtype))

        rows, event = self._run(layer, repacked, arguments, previous_event, async_finish)
        return rows if event is None else replace(rows, event=event)

    def again(
        self, layer: EPAll2AllLayer, desc: EPAllToAllLayoutDesc, previous_event: EventOverlap | None, async_finish: bool
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], EPEvent | None]:
        """Dispatch with the routing of an earlier dispatch; returns the received pair and the event."""
        call: Callable[..., Any] = layer.dispatch_compact_again
        if not self.repack:
            order = order_of(previous_event, async_finish)
            recv, scales, event = call(self.data, desc, scale=self.scales, **order)
            return (recv, scales), event

        def repacked() -> tuple[torch.Tensor, torch.Tensor]:
            recv, sent, _ = call(self.data, desc, scale=scale_bytes(self.scales, self.data.shape[1]))
            return recv, scales_of_bytes(sent, self.scales.shape[1], self.scales.dtype)

        return self._run(layer, repacked, (desc,), previous_event, async_finish)

    def _run(
        self,
        layer: EPAll2AllLayer,
        call: Callable[[], _Result],
        arguments: tuple[object, ...],
        previous_event: EventOverlap | None,
        async_finish: bool,
    ) -> tuple[_Result, EPEvent | None]:
        """The result of `call`, which reads these rows and the arguments, and with `async_finish` its event."""
        order_of(previous_event, False)  # the current stream waits for the event
        if async_finish:
            return layer.on_comm_stream(call, (self.data, self.scales, *arguments))
        return call(), None


def checked_rows(x: Any, longest_row: int | None = None, num_nvl_bytes: int = 0) -> QuantizedRows | None:
    """The pair that `dispatch` takes as `x`; None for rows without scales.

    longest_row: bytes of the longest rows that a Buffer of `num_nvl_bytes` takes; None: any.

    Raises:
        InputError: no dispatch takes such rows.
        ConfigError: they are longer.
    """
    pair = QuantizedRows.of(x) if isinstance(x, tuple) else None
    x = x if pair is None else pair.data
    if not isinstance(x, torch.Tensor) or x.dim() != 2:
        raise InputError("x must be a tensor of rows [T, H], or a tuple of quantised rows and their scales.")
    if pair is None and x.dtype not in TOKEN_DTYPES:
        kinds = ", ".join(map(str, TOKEN_DTYPES))
        raise InputError(f"x must be {kinds}, or a tuple of quantised rows and their scales, got {x.dtype}. Cast it.")
    nbytes = x.shape[1] * max(x.element_size(), 2)
    if longest_row is not None and nbytes > longest_row:
        raise ConfigError(
            f"rows of {nbytes} bytes do not fit: with num_nvl_bytes={num_nvl_bytes} this Buffer takes rows of up to "
            f"{longest_row}. Create a new Buffer on all ranks, with the size that "
            "Config.get_nvl_buffer_size_hint(hidden_bytes, num_ranks) returns."
        )
    return pair


def check_hidden(layer: EPAll2AllLayer, rows: QuantizedRows) -> None:
    """Raise InputError unless rows fit the layer of a handle."""
    cfg = layer.config
    if (cfg.hidden, cfg.token_dtype) != (rows.data.shape[1], torch.bfloat16):
        raise InputError(
            f"quantised rows of {rows.data.shape[1]} values were given, but the handle is for rows of {cfg.hidden} "
            f"{cfg.token_dtype}. Pass a handle of a dispatch of such rows, or of bfloat16 rows of that length."
        )
