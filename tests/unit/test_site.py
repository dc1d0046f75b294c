"""The documentation site: every page is in its navigation, every public name in its reference."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs/reference/api.md").read_text(), re.MULTILINE)
PACKAGES = (
    "triton_ep",
    *(f"triton_ep.{name}" for name in ("nn", "autograd", "pipeline", "testing")),
    *(f"triton_ep.integrations.{name}" for name in ("deep_ep", "hybrid_ep", "megatron", "te", "torchtitan", "vllm")),
)


def _navigation() -> list[str]:
    """Pages of mkdocs.yml's `nav`, relative to docs/."""
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    return re.findall(r"([\w/-]+\.md)$", nav, re.MULTILINE)


def test_every_page_is_in_the_navigation_once() -> None:
    """mkdocs.yml lists every existing page, and no others."""
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(_navigation()) == sorted(pages)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_reference(package: str) -> None:
    """docs/reference/api.md has every name in `__all__` of each public package."""
    public = [name for name in importlib.import_module(package).__all__ if not name.startswith("_")]
    assert [name for name in public if f"{package}.{name}" not in NAMES] == []


def test_names_of_the_reference_exist() -> None:
    """No name is listed twice, and each can be imported."""
    assert len(NAMES) == len(set(NAMES))
    for name in NAMES:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="mkdocs-material is not installed: make site")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """A strict build succeeds; linked sources become pages, and the reference has every name."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site/source/examples/01_dispatch_combine.py.html").exists()
    reference = (tmp_path / "site/reference/api.html").read_text()
    assert all(f'id="{name}"' in reference for name in NAMES)
    assert "language-python no-run" not in (tmp_path / "site/how-to/vllm.html").read_text()
