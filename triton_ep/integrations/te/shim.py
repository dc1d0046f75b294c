"""Provide `transformer_engine.pytorch.ep` over this package's functions, found through the import path.

A folder first on the path has a package `transformer_engine` that loads the installed package in its place and adds the
module to it. Megatron's `moe_flex_dispatcher_backend="ncclep"` imports the module from there.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from triton_ep.integrations.layer_pool import join_when_needed
from triton_ep.integrations.te import ep

PACKAGE = """\"\"\"The installed transformer_engine, with expert parallelism of triton_ep.\"\"\"

from triton_ep.integrations.te.shim import serve

serve(__file__)
"""
"""Text of `transformer_engine/__init__.py` in such a folder."""


def install() -> None:
    """Make `import transformer_engine.pytorch.ep` return this package's module. Idempotent."""
    sys.modules["transformer_engine.pytorch.ep"] = ep


def uninstall() -> None:
    """Undo `install` for later imports; idempotent."""
    if sys.modules.get("transformer_engine.pytorch.ep") is ep:
        del sys.modules["transformer_engine.pytorch.ep"]


def serve(file: str) -> None:
    """Load the installed transformer_engine in place of the package of `file`, and `install`. Buffers join the job if
    nobody has called `initialize_distributed`.

    Raises:
        ImportError: transformer_engine is not installed.
    """
    here = Path(file).resolve().parents[1]
    spec = PathFinder.find_spec("transformer_engine", [entry for entry in sys.path if Path(entry).resolve() != here])
    if spec is None or spec.loader is None:
        raise ImportError(
            f"transformer_engine is not installed beside {here}, which only adds transformer_engine.pytorch.ep to it.",
            name="transformer_engine",
        )
    join_when_needed()
    install()
    module = importlib.util.module_from_spec(spec)
    sys.modules["transformer_engine"] = module
    spec.loader.exec_module(module)
