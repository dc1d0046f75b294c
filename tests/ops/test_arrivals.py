"""Rows expanded again from arrived rows, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.ops.grouped import DEVICE
from triton_ep.errors import InputError
from triton_ep.ops.arrivals import expand_arrivals, expand_arrivals_beside
from triton_ep.reference import experts as oracle


def _case(
    num_arrivals: int, count: int, hidden: int, sizes: tuple[int, ...], alignment: int, topk: int = 3
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Arrived rows, copies, offs and filled: every row of `sizes` is an assignment of one of the first `count` rows."""
    generator = torch.Generator().manual_seed(hidden)
    arrived = torch.randn(num_arrivals, hidden, generator=generator).bfloat16()
    arrived[count:] = torch.nan
    copies = torch.full((num_arrivals, topk), -1, dtype=torch.int32)
    copies[count:] = 1 << 30  # must not be read
    ends = [-(-size // alignment) * alignment for size in sizes]
    offs = torch.tensor([0, *ends], dtype=torch.int32).cumsum(0).int()
    rows = torch.cat([first + torch.arange(size) for first, size in zip(offs.tolist(), sizes, strict=False)])
    slots = torch.randperm(count * topk, generator=generator)[: len(rows)]
    copies.view(-1)[slots] = rows.int()
    return arrived.to(DEVICE), copies.to(DEVICE), offs.to(DEVICE), torch.tensor(sizes, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("hidden", [16, 1104])
@pytest.mark.parametrize(
    ("num_arrivals", "count", "sizes", "alignment"),
    [(9, 9, (5, 0, 7), 16), (9, 4, (1, 10, 0), 8), (12, 12, (36,), 1), (3, 0, (0, 0), 128)],
)
def test_rows_are_those_of_the_dispatch(
    num_arrivals: int, count: int, sizes: tuple[int, ...], alignment: int, hidden: int
) -> None:
    """Assignments are in their rows, with zeros past them; rows that have not arrived are not read."""
    arrived, copies, offs, filled = _case(num_arrivals, count, hidden, sizes, alignment)
    end = int(offs[-1])
    counts = torch.tensor([77, count], dtype=torch.int32, device=DEVICE)
    out = expand_arrivals(arrived, copies, counts, 1, offs, filled, end + 5)
    assert out.shape == (end + 5, hidden) and out.dtype == torch.bfloat16
    want = oracle.expanded(arrived, copies, count, offs, end + 5)
    assert torch.equal(out[:end], want)
    for columns in (slice(0, 16), slice(hidden // 2, None)):
        some = expand_arrivals(arrived, copies, counts, 1, offs, filled, end + 5, columns)
        assert torch.equal(some[:end], want[:, columns])
        some = expand_arrivals_beside(arrived, copies, counts, 1, offs, filled, end + 5, columns, None)
        assert torch.equal(some[:end], want[:, columns])


def test_no_rows() -> None:
    """No arrived rows and no output rows: nothing is launched."""
    arrived, copies, offs, filled = _case(0, 0, 32, (0, 0), 8)
    assert expand_arrivals(arrived, copies, filled, 0, offs, filled, 0).shape == (0, 32)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("arrived", torch.zeros(9, 32), "arrived must be"),
        ("copies", torch.zeros(8, 3, dtype=torch.int32), "copies must be"),
        ("copies", torch.zeros(9, dtype=torch.int32), "copies must be"),
        ("filled", torch.zeros(1, dtype=torch.int32), "filled must be"),
        ("counts", torch.zeros(9, dtype=torch.int64), "counts must be"),
        ("at", 2, "an entry of counts"),
        ("columns", slice(0, 32, 2), "columns must be"),
        ("columns", slice(32, 16), "columns must be"),
    ],
)
def test_bad_operands_are_refused(name: str, value: object, message: str) -> None:
    """The error describes the bad operand."""
    arrived, copies, offs, filled = _case(9, 9, 32, (5, 7), 8)
    given = {"arrived": arrived, "copies": copies, "counts": filled, "at": 0, "offs": offs, "filled": filled}
    given[name] = value.to(DEVICE) if isinstance(value, torch.Tensor) else value
    with pytest.raises(InputError, match=message):
        expand_arrivals(**given, num_rows=16)
