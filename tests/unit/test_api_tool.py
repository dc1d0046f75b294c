"""tools/api.py: breaches of public names, by class; private names and additions are no breach."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

griffe = pytest.importorskip("griffe")
PROGRAM = Path(__file__).resolve().parents[2] / "tools/api.py"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program as a module, for a package with three public names."""
    spec = importlib.util.spec_from_file_location("api_tool", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "public_names", lambda: ["sample.Layer", "sample.mx.quantize", "sample.start"])
    rows = {"sample": "stable", "sample.mx": "provisional", "sample.layer": "private"}
    monkeypatch.setattr(module, "classes", lambda: rows)
    return module


BEFORE = {
    "__init__.py": "from sample.layer import Layer\ndef start(rank=0): ...\n",
    "layer.py": "class Layer:\n    def send(self, x, k): ...\ndef helper(): ...\n",
    "mx.py": "def quantize(x): ...\n",
}
NOW = {
    "__init__.py": "from sample.layer import Layer\ndef start(rank=0, *, size=1): ...\n",
    "layer.py": "class Layer:\n    def send(self, x): ...\n",
    "mx.py": "def quantize(x, block): ...\n",
}


def test_breaches_have_their_class(tool: ModuleType) -> None:
    """An imported class counts by its public name; a removed helper does not count; a new option breaks nothing."""
    with (
        griffe.temporary_visited_package("sample", BEFORE, resolve_aliases=True) as before,
        griffe.temporary_visited_package("sample", NOW, resolve_aliases=True) as now,
    ):
        found = sorted(tool.breaches(before, now))
        assert sorted(tool.breaches(before, before)) == []
    assert [kind for kind, _ in found] == ["provisional", "stable"]
    (_, of_mx), (_, of_layer) = found
    assert of_mx.startswith("sample.mx.quantize(block)") and of_layer.startswith("sample.Layer.send(k)")


def test_the_longest_row_decides(tool: ModuleType) -> None:
    """The longest matching row gives the class, as the page says."""
    rows = {"triton_ep": "stable", "triton_ep.nn": "provisional", "triton_ep.nn.MoE": "stable"}
    assert tool.class_of("triton_ep.nn.MoE.forward", rows) == tool.class_of("triton_ep.EPConfig", rows) == "stable"
    assert tool.class_of("triton_ep.nn.new_exchange", rows) == "provisional"
