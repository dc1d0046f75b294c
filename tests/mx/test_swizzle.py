"""Scales in tiles of 128 x 4, as block-scaled tensor cores read them: the place of every byte, and back."""

import pytest
import torch

from tests.mx.blocks import DEVICE
from triton_ep.errors import InputError
from triton_ep.mx import swizzle

pytestmark = pytest.mark.plain


def _scale(*shape: int) -> torch.Tensor:
    """Bytes that are not 0 and differ from their neighbours."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) * 7 % 251 + 1).view(shape).to(torch.uint8).to(DEVICE)


def _tiles(scale: torch.Tensor, first_row: int = 0, into: torch.Tensor | None = None) -> torch.Tensor:
    """Write the layout byte by byte; rows start at `first_row` of a larger matrix `into`."""
    num_rows, num_columns = scale.shape
    tiles_per_row = -(-num_columns // 4)
    out = torch.zeros(-(-num_rows // 128) * tiles_per_row * 512, dtype=torch.uint8) if into is None else into
    for r, values in enumerate(scale.view(torch.uint8).tolist(), first_row):
        for c, value in enumerate(values):
            out[(r // 128 * tiles_per_row + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = value
    return out


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (130, 5), (300, 9), (256, 32), (0, 4), (5, 0)])
def test_tiles_and_back(shape: tuple[int, int]) -> None:
    """Any sizes; the padding of tiles is zero; the dtype stays."""
    scale = _scale(*shape)
    blocked = swizzle.to_blocked(scale)
    assert blocked.tolist() == _tiles(scale).tolist()
    assert torch.equal(swizzle.from_blocked(blocked, *shape), scale)
    typed = swizzle.to_blocked(scale.view(torch.float8_e8m0fnu))
    assert typed.dtype == swizzle.from_blocked(typed, *shape).dtype == torch.float8_e8m0fnu
    assert torch.equal(typed.view(torch.uint8), blocked)


def test_experts_are_matrices_of_their_own() -> None:
    """Leading dimensions, and the two-dimensional shape that other libraries use for the same bytes."""
    scale = _scale(2, 3, 140, 6)
    blocked = swizzle.to_blocked(scale)
    assert blocked.shape == (2, 3, 2 * 2 * 512)
    assert torch.equal(blocked[1, 2], swizzle.to_blocked(scale[1, 2]))
    assert torch.equal(swizzle.from_blocked(blocked, 140, 6), scale)
    assert torch.equal(swizzle.from_blocked(blocked[0, 1].view(64, 32), 140, 6), scale[0, 1])


SIZES = {"ragged": (130, 0, 1, 128), "none": (0, 0), "aligned": (128, 256), "one": (5,), "many": (1,) * 9}


@pytest.mark.parametrize("spare", [0, 3])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_groups_of_rows(sizes: tuple[int, ...], spare: int) -> None:
    """Each group starts at a tile; rows past the last group are left out; the buffer fits any groups."""
    scale = _scale(sum(sizes) + spare, 5)
    ends = torch.tensor(sizes).cumsum(0).int().to(DEVICE)
    got = swizzle.grouped_rows_to_blocked(scale, ends)
    padded_rows = (len(scale) + 127 * len(sizes)) // 128 * 128
    wanted = torch.zeros(padded_rows * 8, dtype=torch.uint8)
    start = place = 0
    for size in sizes:
        _tiles(scale[start : start + size], place, wanted)
        start, place = start + size, place + -(-size // 128) * 128
    assert got.tolist() == wanted.tolist()


@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize("sizes", [(5, 0, 1, 8), (4, 4), (0,), (1,) * 5], ids=str)
def test_groups_of_columns(sizes: tuple[int, ...], spare: int) -> None:
    """Each group is a separate matrix with its own tiles; groups are stored in order."""
    scale = _scale(150, sum(sizes) + spare)
    ends = torch.tensor(sizes).cumsum(0).int().to(DEVICE)
    got = swizzle.grouped_columns_to_blocked(scale, ends)
    parts = [swizzle.to_blocked(part) for part in scale[:, : sum(sizes)].split(sizes, 1)]
    wanted = torch.cat(parts)
    assert len(got) == 256 * ((sum(sizes) + spare + 3 * len(sizes)) // 4 * 4)
    assert torch.equal(got[: len(wanted)], wanted)
    assert not got[len(wanted) :].any()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda s: swizzle.to_blocked(s[0]), r"\[4\].*must be \[\.\.\., R, C\]"),
        (lambda s: swizzle.to_blocked(s.float()), "float32"),
        (lambda s: swizzle.from_blocked(s, 4, 4), r"tiles of a \[4, 4\] matrix have 512 bytes, 128 x 4"),
        (lambda s: swizzle.grouped_rows_to_blocked(s[0], s[0].int()), r"\[R, C\]"),
        (lambda s: swizzle.grouped_columns_to_blocked(s, s[0]), r"ends is \[4\] torch.uint8"),
    ],
)
def test_mistakes_are_named(call, text: str) -> None:
    """Invalid shapes and dtypes."""
    with pytest.raises(InputError, match=text):
        call(_scale(4, 4))
