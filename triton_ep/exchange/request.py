"""A dispatch as it is asked for, and as it is while its rows are on their way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch

from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.context.given import RoutingMap, Rows
from triton_ep.mx.tensor import MXTensor
from triton_ep.ops.compact import Compact
from triton_ep.ops.dispatch import Received as Expanded
from triton_ep.ops.strides import view_as

Received = TypeVar("Received", Expanded, Compact)
"""What a landing gives (triton_ep/exchange/landings.py)."""


def rows_of(x: torch.Tensor | MXTensor) -> Rows:
    """Rows to send; an MXTensor goes as it is."""
    return Rows(x.qdata, x.scale.view(torch.uint8)) if isinstance(x, MXTensor) else Rows(x)


def as_sent(rows: Rows) -> Rows:
    """The same memory under the dtypes that travel: one-byte rows as e4m3 whatever they hold, their scales as bytes."""
    if rows.scale is None:
        return rows
    data = rows.data if rows.data.dtype == torch.float8_e4m3fn else rows.data.view(torch.float8_e4m3fn)
    return Rows(data, view_as(rows.scale, torch.uint8))


@dataclass(slots=True)
class Request:
    """A dispatch of this rank: arguments that have been checked.

    Attributes:
        rows: [T, H], with their scales where they have some.
        ids: expert ids [T, K] int32 or int64; or a routing map, which has weights of its own.
        weights: [T, K] float32, or None; None with a routing map.
        scatter: [T, K] int32 or int64, the order of entries that the caller gives; None: it is computed.
        routed: of the earlier dispatch whose routing is taken; the same on all ranks.
        num_rows: rows that the caller gets, where they are known; None: the layer's capacity, or else the host reads
            how many arrive.
        refused: this rank's arguments were refused: it sends nothing, and reports that to the others.
        needed_tokens: of a refused call: tokens of this rank, if these are more than the layer has room for.
        others_know: of a refused call: the other ranks know how many rows arrive, and read nothing.
    """

    rows: Rows
    ids: torch.Tensor | RoutingMap
    weights: torch.Tensor | None = None
    scatter: torch.Tensor | None = None
    routed: EPAllToAllLayoutDesc | None = None
    num_rows: int | None = None
    refused: bool = False
    needed_tokens: int = 0
    others_know: bool = False


class Signals(NamedTuple):
    """How a kernel on another stream says which expert outputs it has written.

    Attributes:
        values: [e, n] int32, on the device.
        num_rows: [e] int32, rows of each expert: signals of blocks without rows are not awaited; None: all are.
        block_rows: rows for which a signal stands.
        expected: what the kernel counts a signal up to.
    """

    values: torch.Tensor
    num_rows: torch.Tensor | None
    block_rows: int
    expected: int


@dataclass(slots=True)
class Arrivals:
    """What arrives on this rank.

    Attributes:
        num_rows: rows that the caller gets.
        num_staged: arrival rows that there may be: one per (token, this rank).
        host_counts: the counts of the landing, as the host has read them; None: it has read none, and fewer rows may
            come.
    """

    num_rows: int
    num_staged: int
    host_counts: tuple[int, ...] | None


@dataclass(slots=True)
class Sent(Generic[Received]):
    """A dispatch whose sending half has been launched.

    Attributes:
        received: memory for what arrives; the receiving half writes it.
        desc: what its combine needs.
        host_counts: as in `Arrivals`.
        receive: launches the receiving half; it has been launched unless the caller parts the halves.
    """

    received: Received
    desc: EPAllToAllLayoutDesc
    host_counts: tuple[int, ...] | None
    receive: Callable[[], None]
