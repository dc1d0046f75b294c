"""Arguments of TransformerEngine's functions for expert parallelism, read from its wheel: no GPU is needed."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path

import pytest

from triton_ep.integrations.te import ep, symmetric

pytestmark = pytest.mark.plain


def _source(module: str) -> ast.Module:
    """The module of the installed package, not imported: that would load its CUDA library."""
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("transformer-engine is not installed")
    return ast.parse((Path(spec.submodule_search_locations[0]) / "pytorch" / f"{module}.py").read_text())


def _arguments(function: ast.FunctionDef) -> list[tuple[str, bool, str | None]]:
    """Name, whether it is passed by name only, and default of each argument."""
    given = function.args
    required = len(given.args) - len(given.defaults)
    defaults = [None] * required + [ast.unparse(each) for each in given.defaults]
    found = [(each.arg, False, default) for each, default in zip(given.args, defaults, strict=True)]
    by_name = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    return found + [(each.arg, True, None if default is None else ast.unparse(default)) for each, default in by_name]


def _ours(module: object, name: str) -> list[tuple[str, bool, str | None]]:
    tree = ast.parse(inspect.getsource(getattr(module, name)))
    function = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return _arguments(function)


def _theirs(module: str, name: str) -> list[tuple[str, bool, str | None]]:
    for node in ast.walk(_source(module)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return _arguments(next(part for part in ast.walk(node) if isinstance(part, ast.FunctionDef)))
    raise AssertionError(f"transformer_engine.pytorch.{module} has no {name}")


@pytest.mark.parametrize(
    "name",
    [
        "EpBuffer",
        "ep_bootstrap",
        "ep_combine",
        "ep_dispatch",
        "ep_finalize",
        "ep_prepare",
        "is_ep_bootstrapped",
        "_ep_combine_raw",
        "_ep_dispatch_raw",
    ],
)
def test_arguments_have_their_names_order_and_defaults(name: str) -> None:
    """A call written for TransformerEngine, by position or by name, passes the same values here."""
    ours, theirs = _ours(ep, name), _theirs("ep", name)
    if name == "ep_bootstrap":  # num_topk was no argument before 2.19, and may be left out here
        assert theirs[4] == ("num_topk", False, None) and ours[4] == ("num_topk", False, "None")
        theirs[4] = ours[4]
    assert ours == theirs


@pytest.mark.parametrize("name", ["release_symm_mem_pool", "symm_mem_alloc"])
def test_arguments_of_symmetric_memory(name: str) -> None:
    """As above, for the functions that TransformerEngine has in `distributed`."""
    assert _ours(symmetric, name) == _theirs("distributed", name)


def test_every_public_name() -> None:
    """All names that TransformerEngine exports from `ep`."""
    listed = next(
        ast.literal_eval(node.value)
        for node in _source("ep").body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    assert listed and set(listed) <= set(ep.__all__)
