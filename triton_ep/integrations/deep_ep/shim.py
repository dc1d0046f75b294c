"""A package `deep_ep` that every process imports: from a folder first on the path, from a wheel, or through a plugin.

`install` only works in the process that calls it. Worker processes of a framework do not call it, but they do read
PYTHONPATH and load plugins.
"""

from __future__ import annotations

import importlib.util
import sys

from triton_ep.integrations import deep_ep
from triton_ep.integrations.layer_pool import join_when_needed

PACKAGE = """\"\"\"deep_ep, served by triton_ep.\"\"\"

from triton_ep.integrations.deep_ep.shim import serve

serve()
"""
"""`deep_ep/__init__.py` of such a package; packaging/deepep-shim has the same file."""


def serve() -> None:
    """Replace the `deep_ep` that is being imported by this package's modules. Its buffers join the job if the program
    has not called `initialize_distributed`."""
    sys.modules.pop("deep_ep", None)
    deep_ep.install()
    join_when_needed()


def register() -> None:
    """Plugin entry point for vLLM and SGLang: serve `deep_ep` unless another one is installed. Idempotent."""
    if "deep_ep" not in sys.modules and importlib.util.find_spec("deep_ep") is None:
        serve()
