"""The pages about frameworks agree with the table docs/frameworks.toml."""

import runpy
from datetime import date
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = runpy.run_path(str(ROOT / "tools/frameworks.py"))
RUNS = TOOL["table"]()["run"]


def test_the_page_shows_the_table() -> None:
    """The page shows the table; run tools/frameworks.py after a change."""
    assert TOOL["PAGE"].read_text() == TOOL["page"]()


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['name']}-{run['version']}")
def test_a_run_can_be_found_again(run: dict) -> None:
    """Its tests are files, its date is not in the future, and its page begins with how to switch it on."""
    assert all((ROOT / path).is_file() for path in run.get("tests", []))
    assert date.fromisoformat(run["date"]) <= date.today()
    head = (ROOT / "docs/how-to" / run["page"]).read_text().split("\n\n")[1]
    assert head.startswith("Switched on") and "support.md#frameworks" in head


def test_make_peers_installs_what_the_tests_need() -> None:
    """`make peers` installs the packages of the table, with their versions."""
    makefile = (ROOT / "Makefile").read_text()
    needed = {each for run in RUNS for each in run.get("needs", [])}
    assert needed
    assert all(each in makefile for each in needed)
