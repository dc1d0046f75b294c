"""The stored pictures of the pages equal the output of docs/pictures/draw.py, which reads stored rows."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module draw.py, with its folder on the path during a test."""
    monkeypatch.syspath_prepend(str(ROOT / "docs/pictures"))
    before = set(sys.modules)
    import draw

    yield draw
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_stored_pictures_are_up_to_date(drawn: Any) -> None:
    """`make pictures` changes nothing."""
    assert [path.name for path, draw in drawn.PICTURES.items() if path.read_text() != draw().svg()] == []


def test_pictures_are_legible_on_a_phone(drawn: Any) -> None:
    """At a width of 360 pixels no letter is below 11 pixels; light and dark modes have their own colours."""
    for path, draw in drawn.PICTURES.items():
        text = draw().svg()
        assert 'viewBox="0 0 720 ' in text, path.name
        assert min(map(int, re.findall(r'font-size="(\d+)"', text))) >= 22, path.name
        assert "prefers-color-scheme: dark" in text


def test_a_bar_without_a_row_is_refused(drawn: Any) -> None:
    """Every time must come from a stored row."""
    import speed

    wanted = {"op": "dispatch", "provider": "nccl", "ranks": "4", "commit": "a7519e2", "routing": "uniform:0"}
    assert speed.median_us("dispatch_combine.csv", wanted) > 0
    with pytest.raises(LookupError, match="no row"):
        speed.median_us("dispatch_combine.csv", wanted | {"ranks": "8"})


def test_losses_stay_inside_of_their_panels(drawn: Any) -> None:
    """Every run has a loss for every step; losses shown in a panel lie within its limits."""
    import losses

    runs = losses.runs()
    assert list(runs) == ["bf16 seed 0", "bf16 seed 1", "bf16 seed 2", "MXFP8"]
    assert {len(values) for values in runs.values()} == {losses.STEPS}
    for _, (first, last), (low, high), _, _ in losses.PANELS:
        shown = [loss for values in runs.values() for loss in values[first - 1 : last]]
        assert low < min(shown) <= max(shown) < high
