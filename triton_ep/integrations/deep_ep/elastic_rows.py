"""Rows of ElasticBuffer's calls: plain rows, or e4m3 rows with packs of scales."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from triton_ep.errors import InputError
from triton_ep.integrations.deep_ep.fp8 import checked_rows, scale_bytes, scales_of_bytes
from triton_ep.integrations.hybrid_ep.rows import Arrived, SentRows

_PACKS = 4
"""Each column of column-major scales starts at a multiple of this many packs, 16 bytes."""


class ElasticRows(NamedTuple):
    """Rows to send.

    Attributes:
        sent: rows [T, H], and scales as a layer sends them: as given, or repacked to [T, H / 32] uint8.
        packs: number of repacked scales per row, four bytes each; 0: scales travel as given.
        dtype: dtype of the repacked scales; None: scales travel as given.
    """

    sent: SentRows
    packs: int = 0
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, x: Any) -> ElasticRows:
        """Check and convert the argument `x` of a dispatch.

        Raises:
            InputError: neither rows [T, H], nor a tuple of e4m3 rows and their scales.
        """
        pair = checked_rows(x)
        if pair is None:
            return cls(SentRows(x.contiguous(), None))
        if not pair.repack:
            return cls(SentRows(pair.data, pair.scales))
        sent = SentRows(pair.data, scale_bytes(pair.scales, pair.data.shape[1]))
        return cls(sent, pair.scales.shape[1], pair.scales.dtype)

    @property
    def tensors(self) -> tuple[object, ...]:
        """Tensors that a call reads."""
        return tuple(self.sent)

    def check_layer(self, hidden: int, dtype: torch.dtype) -> None:
        """Raise InputError unless these rows fit the layer of a handle, with rows of `hidden` values in `dtype`."""
        mine = self.sent.hidden.shape[1], self.sent.dtype
        if mine != (hidden, dtype):
            raise InputError(
                f"rows of {mine[0]} values, {mine[1]} in combine, were given, but the handle is for rows of {hidden} "
                f"{dtype}. Pass rows of that length, or dispatch without a handle."
            )

    def arrived(self, rows: Arrived, column_major: bool) -> Any:
        """Received rows [R, H] as `dispatch` returns them: a tuple of rows and scales, or rows without scales.

        column_major: rows are the fast dimension of scales, and each column starts at a multiple of 16 bytes.
        """
        data, scales = rows
        if scales is None:
            return data
        if self.dtype is not None:
            scales = scales_of_bytes(scales, self.packs, self.dtype)
        if column_major:
            strides = (1, -(-scales.shape[0] // _PACKS) * _PACKS)
            scales = torch.empty_strided(scales.shape, strides, dtype=scales.dtype, device=data.device).copy_(scales)
        return data, scales
