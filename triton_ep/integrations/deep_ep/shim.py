"""A package `deep_ep` that processes find by themselves: in a folder first on the path, from a wheel, or by a plugin.

`install` works in the process that calls it. Frameworks start workers in which nobody calls it; they do read PYTHONPATH
and load plugins.
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
"""`deep_ep/__init__.py` of such a package; packaging/deepep-shim has the same."""


def serve() -> None:
    """Put this package's modules in the place of the `deep_ep` that is being imported. Its buffers join the job where
    nobody has called `initialize_distributed`."""
    sys.modules.pop("deep_ep", None)
    deep_ep.install()
    join_when_needed()


def register() -> None:
    """Entry point of the plugins of vLLM and SGLang: serve `deep_ep` where no other is installed. Idempotent."""
    if "deep_ep" not in sys.modules and importlib.util.find_spec("deep_ep") is None:
        serve()
