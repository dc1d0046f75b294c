"""Reports in `placement`, as the host reads them (kernels/device/codes.py, kernels/device/tables.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from triton_ep.kernels.device.codes import (
    HOST_REJECTED,
    HOST_SCALED,
    HOST_SCATTER,
    HOST_WEIGHTS,
    NEEDED_TOPK,
    REPORT_WORDS,
)


class Report(NamedTuple):
    """Report of one rank from its splits: one row of `placement`'s report, REPORT_WORDS int32, in this order.

    Two ranks of two experts each, one expert per token: rank 0 sends its tokens to the experts 0, 2, 3, rank 1 to 2, 1.
    Both send weights, and their hosts read (HOST_WEIGHTS | HOST_READS = 130). Rank 1, with experts 2 and 3, has

        Report(rows=2, arrivals=2, tokens=3, bad_entry=0, bad_id=0, host_word=130, sums=3, arrivals_here=2)
        Report(rows=3, arrivals=3, tokens=2, bad_entry=0, bad_id=0, host_word=130, sums=2, arrivals_here=1)

    Attributes:
        rows: output rows of that rank, padding included.
        arrivals: staging rows of that rank.
        tokens: tokens that it dispatches.
        bad_entry: 1 + index of its first illegal expert id among its T * K; 0 = none.
        bad_id: that id.
        host_word: HOST_* of its call.
        sums: rows of sums in its combine buffer.
        arrivals_here: staging rows on this rank for tokens of that rank.
    """

    rows: int
    arrivals: int
    tokens: int
    bad_entry: int
    bad_id: int
    host_word: int
    sums: int
    arrivals_here: int

    @property
    def is_rejected(self) -> bool:
        """Whether its host refused the arguments of the call."""
        return bool(self.host_word & HOST_REJECTED)

    @property
    def has_bad_scatter(self) -> bool:
        """Whether its scatter indices are not a sort of its entries."""
        return bool(self.host_word & HOST_SCATTER)

    @property
    def has_weights(self) -> bool:
        """Whether it sends weights."""
        return bool(self.host_word & HOST_WEIGHTS)

    @property
    def is_scaled(self) -> bool:
        """Whether it sends one-byte rows with scales."""
        return bool(self.host_word & HOST_SCALED)

    @property
    def needed_topk(self) -> int:
        """Experts of a token that has more experts than slots (NEEDED_TOPK). Not valid for other illegal ids."""
        return max(self.bad_id - NEEDED_TOPK, 0)


class Reports:
    """The reports of all ranks, in order. Hosts look at columns: with many ranks a `Report` of each takes longer than
    all else that a host does with them.

    Args:
        words: at least the first W * REPORT_WORDS words of `placement`.
        num_ranks: W.
    """

    __slots__ = ("_end", "_words")

    def __init__(self, words: list[int], num_ranks: int) -> None:
        self._words, self._end = words, num_ranks * REPORT_WORDS

    def __len__(self) -> int:
        return self._end // REPORT_WORDS

    def __getitem__(self, rank: int) -> Report:
        at = range(0, self._end, REPORT_WORDS)[rank]
        return Report(*self._words[at : at + REPORT_WORDS])

    def __iter__(self) -> Iterator[Report]:
        return map(self.__getitem__, range(len(self)))

    def column(self, field: int) -> list[int]:
        """A field of every rank, by its number."""
        return self._words[field : self._end : REPORT_WORDS]


ROWS, ARRIVALS, BAD_ENTRY, HOST_WORD, SUMS, ARRIVALS_HERE = map(
    Report._fields.index, ("rows", "arrivals", "bad_entry", "host_word", "sums", "arrivals_here")
)
"""Numbers of fields, for `Reports.column`."""
