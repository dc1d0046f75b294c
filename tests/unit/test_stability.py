"""docs/reference/stability.md: every public name has a class, and every row names something that exists."""

import importlib
import re
from pathlib import Path

from tests.unit.test_imports import MODULES
from tests.unit.test_site import NAMES, PACKAGES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/reference/stability.md").read_text()
ROWS = re.findall(r"^\| `(triton_ep[\w.]*)` \| (\w+) \|", PAGE, re.MULTILINE)
CLASSES = dict(ROWS)
PUBLIC = sorted(
    {*NAMES, *(f"{package}.{name}" for package in PACKAGES for name in importlib.import_module(package).__all__)}
)


def _row(name: str) -> str:
    """The longest name of the table that is a prefix of this one."""
    parts = name.split(".")
    return next(row for end in range(len(parts), 0, -1) if (row := ".".join(parts[:end])) in CLASSES)


def test_the_table_is_sane() -> None:
    """No name is repeated, there are three classes, and each name is a module of this package or in one."""
    assert len(ROWS) == len(CLASSES) > 30
    assert set(CLASSES.values()) == {"stable", "provisional", "private"}
    for name in CLASSES:
        module, _, attribute = name.rpartition(".")
        assert name in MODULES or hasattr(importlib.import_module(module), attribute), name


def test_every_public_name_is_stable_or_provisional() -> None:
    """No name of the reference falls under a private row."""
    assert [name for name in PUBLIC if CLASSES[_row(name)] == "private"] == []


def test_every_package_has_a_row_of_its_own() -> None:
    """A new package inside triton_ep does not become stable by the row of `triton_ep`."""
    beside = {".".join(name.split(".")[:2]) for name in MODULES if "." in name and "._" not in name}
    assert sorted(beside - set(CLASSES)) == []


def test_no_row_is_idle() -> None:
    """Every public row decides for some name of the reference."""
    used = {_row(name) for name in PUBLIC}
    assert [name for name, kind in CLASSES.items() if kind != "private" and name not in used] == []


def test_a_private_row_is_seen() -> None:
    """The longest row decides: a name of a private package is private unless it has a row of its own."""
    assert CLASSES[_row("triton_ep.ops.dispatch.anything")] == "private"
    assert CLASSES[_row("triton_ep.ops.grouped_gemm.grouped_gemm")] == "provisional"
