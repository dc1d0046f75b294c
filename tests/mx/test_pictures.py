"""The figures of the page about formats are as computed, and its pictures can be drawn."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from triton_ep.mx import pictures
from triton_ep.mx.formats import E2M1, E2M3, E3M2, E4M3, E5M2

pytestmark = pytest.mark.plain
FOLDER = Path(__file__).resolve().parents[2] / "docs" / "concepts"


def test_tables_of_the_page_are_those_computed() -> None:
    """Noise by format and kind of data, and by scaling mode, to the digit."""
    lines = (FOLDER / "mxfp8.md").read_text().splitlines()
    cells = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    rows = [row for row in cells if all(re.fullmatch(r"\d+(\.\d+)?", cell) for cell in row[1:])]
    errors = [[name, f"{bits:g}", *map(str, values)] for name, (bits, values) in pictures.error_table().items()]
    modes = [[mode, *map(str, values)] for mode, values in pictures.mode_table().items()]
    assert rows == errors + modes
    # Statements of the page about these figures.
    table = {row[0]: [float(value) for value in row[2:]] for row in errors}
    assert table["MX e4m3"][0] >= 18 and all(values[0] >= 13 for values in table.values())
    assert table["NVFP4"][2] < table["MX e2m1"][2] and table["NVFP4"][0] > table["MX e2m1"][0]


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E3M2, E2M3, E2M1], ids=lambda fmt: fmt.name)
def test_grids_have_every_value(fmt: object) -> None:
    """All values of torch's dtypes; for formats without a torch dtype, count and extremes."""
    values = pictures.positive_values(fmt)
    assert values == sorted(set(values)) and values[-1] == fmt.max_pos
    if fmt.bits == 8:
        codes = torch.arange(128, dtype=torch.uint8).view(fmt.dtype).float()
        assert values == codes[codes.isfinite() & (codes > 0)].tolist()
    else:
        assert len(values) == 2 ** (fmt.bits - 1) - 1


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_pictures_can_be_drawn(name: str, tmp_path: Path) -> None:
    """Each picture appears in the folder, with its axes named."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    pictures.PICTURES[name](tmp_path / name)
    for folder in (tmp_path, FOLDER):
        text = (folder / name).read_text()
        assert ElementTree.fromstring(text).tag.endswith("svg")
        assert "value" in text or "noise" in text
    assert f"]({name})" in (FOLDER / "mxfp8.md").read_text()
