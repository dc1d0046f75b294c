"""The tile table against the oracle's list of tiles."""

from __future__ import annotations

import pytest
import torch

from tests.ops.grouped import DEVICE
from triton_ep.errors import InputError
from triton_ep.kernels.device import codes, tiles
from triton_ep.ops.tiles import tile_table
from triton_ep.reference import experts as oracle


def offsets(sizes: tuple[int, ...], first: int = 0) -> torch.Tensor:
    """[E + 1] int32 offsets of consecutive segments."""
    return torch.tensor((first, *sizes)).cumsum(0).int().to(DEVICE)


def _records(table: torch.Tensor) -> list[list[int]]:
    rows: list[list[int]] = table[: 1 + int(table[0, codes.TABLE_NUM_TILES])].tolist()
    return rows


@pytest.mark.parametrize(
    "sizes",
    [(1,), (0, 0, 0), (0, 128, 0, 129, 7), (1300, 0, 1), (2200, 9), (127, 255, 128)],
    ids=str,
)
@pytest.mark.parametrize("spare", [0, 200])
def test_table_is_the_oracles_list(sizes: tuple[int, ...], spare: int) -> None:
    """Every tile in order, the number of tiles and the rows in use; room for any segments of as many rows in total."""
    offs = offsets(sizes)
    rows = sum(sizes) + spare
    table = tile_table(offs, rows)
    want = [
        (*tile, 65536 * tile[2] + 256 * height + place)
        for tile, (height, place) in zip(oracle.tile_table(offs), oracle.tile_bands(offs), strict=True)
    ]
    assert table.shape == (1 + -(-rows // 128) + len(sizes), 4)
    assert _records(table) == [[len(want), sum(sizes), 0, 0], *map(list, want)]


def test_the_example_of_the_kernels_page() -> None:
    """The example in kernels/device/tiles.py has every word of the records right."""
    lines = (tiles.__doc__ or "").split("padding:\n\n")[1].splitlines()
    want = [list(eval(line[: line.index(")") + 1])) for line in lines if line.strip()]
    assert _records(tile_table(offsets((300, 0, 128)), 428)) == want


def test_offsets_that_make_no_sense_stay_within_the_table() -> None:
    """Segments that end past the rows or overlap: tiles stay within the rows, and no more are written than fit."""
    for offs in ([0, 500, 90, 4000], [-7, 3, 2**31 - 1, 5]):
        num_rows = 300
        table = tile_table(torch.tensor(offs, dtype=torch.int32, device=DEVICE), num_rows)
        (num_tiles, in_use, _, _), *records = _records(table)
        assert num_tiles < len(table) and in_use <= num_rows
        assert all(first >= 0 and rows >= 1 and first + rows <= num_rows for _, first, rows, _ in records)


@pytest.mark.parametrize(
    ("offs", "match"),
    [(torch.zeros(3), "int32"), (torch.zeros(1, dtype=torch.int32), r"\[1\]"), ([0, 4], "a list")],
    ids=["dtype", "shape", "type"],
)
def test_errors(offs: torch.Tensor, match: str) -> None:
    """Arguments that are not offsets are refused."""
    with pytest.raises(InputError, match=match):
        tile_table(offs, 4)
