"""Facts of a release: supported versions, extras, addresses. Each has one source, and all other places agree."""

import re
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from triton_ep.runtime.machine import SUPPORTED, version_tuple

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def _requirement(name: str) -> str:
    """Requirement of a package that pyproject.toml must have, by the table."""
    versions = SUPPORTED[name]
    return f"{name}>={versions['min']}" + (f",<{versions['below']}" if "below" in versions else "")


def test_pyproject_asks_for_what_is_supported() -> None:
    """Least versions, the range of numpy, Python and the classifiers agree with the table."""
    assert PROJECT["dependencies"] == [_requirement(name) for name in ("torch", "triton", "numpy")]
    assert PROJECT["requires-python"] == f">={SUPPORTED['python']['min']}"
    classifiers = [text.rpartition(" :: ")[2] for text in PROJECT["classifiers"] if re.search(r"Python :: 3\.", text)]
    assert classifiers == SUPPORTED["python"]["tested"]
    cuda = [int(text.rpartition(" :: ")[2]) for text in PROJECT["classifiers"] if "NVIDIA CUDA :: " in text]
    assert cuda == SUPPORTED["cuda"]["tested"]


def test_the_table_is_sane() -> None:
    """Tested versions and those that `make` installs lie in the range, in order; each CUDA version has an extra."""
    for name, versions in SUPPORTED.items():
        tested = [version_tuple(text) for text in versions.get("tested", []) if isinstance(text, str)]
        assert all(one < other for one, other in pairwise(tested)), name
        least, below = (version_tuple(versions.get(key, other)) for key, other in (("min", "0"), ("below", "1000")))
        assert all(least <= version < below for version in tested), name
        if "make" in versions:
            assert version_tuple(versions["make"])[:2] in tested, name
    assert sorted(extra for extra in EXTRAS if re.fullmatch(r"cu\d+", extra)) == [
        f"cu{major}" for major in SUPPORTED["cuda"]["majors"]
    ]


def test_readme_says_what_is_supported() -> None:
    """README's table agrees, cell by cell."""
    cells = dict(re.findall(r"^\| (\S+) \| (.+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE))
    numpy = version_tuple(SUPPORTED["numpy"]["below"])
    assert cells["Python"] == f"{SUPPORTED['python']['min']} and later"
    assert cells["torch"] == f"{SUPPORTED['torch']['min']} and later"
    assert cells["Triton"] == ", ".join(SUPPORTED["triton"]["tested"])
    assert cells["numpy"] == f"{SUPPORTED['numpy']['min']} to {numpy[0]}.{numpy[1] - 1}"
    assert all(arch in cells["GPUs"] for arch in SUPPORTED["gpus"]["compiled"])


def test_extras_agree_on_nvshmem() -> None:
    """All extras but the tests' have one range of the library; the tests pin a tested version."""
    asked = [text for name, needs in EXTRAS.items() if name != "test" for text in needs if "nvidia-nvshmem" in text]
    expected = {f"nvidia-nvshmem-cu{major}{_requirement('nvshmem')[7:]}" for major in SUPPORTED["cuda"]["majors"]}
    assert set(asked) == expected
    assert len(asked) == 3
    (pinned,) = (text.partition("==")[2] for text in EXTRAS["test"] if "nvidia-nvshmem" in text)
    assert pinned in SUPPORTED["nvshmem"]["tested"]
    (names,) = (re.fullmatch(r"triton-ep\[(.+)\]", text) for text in EXTRAS["all"])
    assert names is not None and set(names[1].split(",")) <= set(EXTRAS)


ADDRESS = re.compile(r"https://example\.org/triton-ep[\w/.-]*[\w/]")
PAGES = [
    path
    for pattern in ("*.md", "*.yml", "*.cff", ".github/**/*.yml", ".github/**/*.md", "docs/**/*.md")
    for path in ROOT.glob(pattern)
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_addresses_are_those_of_the_table(page: Path) -> None:
    """Addresses come from one table, `project.urls`; a page with another address fails here."""
    assert set(ADDRESS.findall(page.read_text())) <= set(PROJECT["urls"].values())


def test_where_addresses_must_be() -> None:
    """SECURITY.md and the issue templates have the table's addresses; reports request `doctor --full`."""
    urls = PROJECT["urls"]
    templates = ROOT / ".github/ISSUE_TEMPLATE"
    assert f"<{urls['Security']}>" in (ROOT / "SECURITY.md").read_text()
    config = (templates / "config.yml").read_text()
    assert urls["Security"] in config and urls["Documentation"] in config
    for name in ("bug.yml", "feature.yml"):
        assert "triton-ep doctor --full" in (templates / name).read_text()
