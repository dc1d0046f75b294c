"""Records of a call: the request of a dispatch, its state while rows are in flight, and the outputs that are summed."""

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
from triton_ep.ops.routing import OwnRows, Routing
from triton_ep.ops.strides import view_as

Received = TypeVar("Received", Expanded, Compact)
"""Results of a landing (triton_ep/exchange/landings.py)."""


def rows_of(x: torch.Tensor | MXTensor) -> Rows:
    """Rows to send; an MXTensor is sent as it is."""
    return Rows(x.qdata, x.scale.view(torch.uint8)) if isinstance(x, MXTensor) else Rows(x)


def as_sent(rows: Rows) -> Rows:
    """View rows with the dtypes of the wire: one-byte rows as e4m3 whatever they hold, their scales as bytes."""
    if rows.scale is None:
        return rows
    data = rows.data if rows.data.dtype == torch.float8_e4m3fn else rows.data.view(torch.float8_e4m3fn)
    return Rows(data, view_as(rows.scale, torch.uint8))


@dataclass(slots=True)
class Request:
    """A dispatch of this rank, with checked arguments.

    Attributes:
        rows: [T, H], with their scales if they have some.
        ids: expert ids [T, K] int32 or int64; or a routing map, which has weights of its own.
        weights: [T, K] float32, or None; None with a routing map.
        scatter: [T, K] int32 or int64, the caller's order of entries; None: the order is computed.
        routed: descriptor of the earlier dispatch whose routing is used; the same on all ranks.
        slabs: memory for the rows of a low-latency dispatch, a slab per expert; None: rows are expert-major.
        num_rows: rows that the caller gets, if known; None: the layer's capacity, or without one the host reads the
            row count.
        refused: this rank refused its arguments: it sends nothing, and reports that to the others.
        needed_tokens: refused calls: tokens of this rank, if they exceed the layer's room; else 0.
        others_know: refused calls: the other ranks know how many rows arrive, and their hosts read nothing.
    """

    rows: Rows
    ids: torch.Tensor | RoutingMap
    weights: torch.Tensor | None = None
    scatter: torch.Tensor | None = None
    routed: EPAllToAllLayoutDesc | None = None
    slabs: Rows | None = None
    num_rows: int | None = None
    refused: bool = False
    needed_tokens: int = 0
    others_know: bool = False

    @property
    def quantised(self) -> bool:
        """Whether rows without scales go to slabs with some: the dispatch quantises them."""
        return self.rows.scale is None and self.slabs is not None and self.slabs.scale is not None


class Counted(NamedTuple):
    """What the steps of a dispatch read whose first kernel, which counts its entries, has been launched.

    Attributes:
        rows: in wire form.
        routing, placement: of `steps.preprocess`.
        own: rows that stay here.
    """

    rows: Rows
    routing: Routing
    placement: torch.Tensor
    own: OwnRows


class Outputs(NamedTuple):
    """A whole combine of this rank, with checked arguments: those of `steps.combine`.

    Attributes:
        y: expert outputs [R, H]. weights: [R] float32, or None.
        desc: descriptor of the dispatch.
        biases: up to two [T, H].
        out: memory for the result [T, H]; None: it is allocated.
    """

    y: torch.Tensor
    weights: torch.Tensor | None
    desc: EPAllToAllLayoutDesc
    biases: tuple[torch.Tensor, ...]
    out: torch.Tensor | None


class Signals(NamedTuple):
    """Signals by which a kernel on another stream reports the expert outputs that it has written.

    Attributes:
        values: [e, n] int32, on the device.
        num_rows: [e] int32, rows of each expert; combine waits for no signal of a block without rows. None: for all.
        block_rows: rows per signal.
        expected: value that a signal reaches when the kernel has written its rows.
    """

    values: torch.Tensor
    num_rows: torch.Tensor | None
    block_rows: int
    expected: int


@dataclass(slots=True)
class Arrivals:
    """Numbers of rows that arrive on this rank.

    Attributes:
        num_rows: rows that the caller gets.
        num_staged: most staging rows that may arrive: one per (token, this rank).
        host_counts: the counts of the landing, as the host has read them; None: the host has read none, and fewer rows
            may arrive.
        host_rows: expert-major rows of every rank, as the host has read them; None like the last.
        host_arrivals: staging rows here of the tokens of every rank, of a layer with copy engines; None like the last.
    """

    num_rows: int
    num_staged: int
    host_counts: tuple[int, ...] | None
    host_rows: tuple[int, ...] | None = None
    host_arrivals: tuple[int, ...] | None = None


@dataclass(slots=True)
class Sent(Generic[Received]):
    """A dispatch whose sending half has been launched.

    Attributes:
        received: memory of the results, which the receiving half writes.
        desc: descriptor for combine.
        host_counts: as in `Arrivals`.
        receive: launches the receiving half; already launched unless the caller splits the call.
        settle: reads the counts, raises the errors of any rank, and returns whether the rows did not fit, so that they
            have been received anew, and the dispatch with the rows that arrived; call it before the combine. None: the
            host has read the counts, or never does.
    """

    received: Received
    desc: EPAllToAllLayoutDesc
    host_counts: tuple[int, ...] | None
    receive: Callable[[], None]
    settle: Callable[[], tuple[bool, Sent[Received]]] | None = None
