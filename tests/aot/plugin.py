"""pytest plugin: run the suite on kernels of an ahead-of-time library, or record the kernels that it requests.

    pytest -p tests.aot.plugin --aot DIR --backend nvshmem -m multi_gpu tests
    pytest -p tests.aot.plugin --aot-record FILE --backend nvshmem -m multi_gpu tests
    pytest -p tests.aot.plugin --aot DIR --aot-record FILE --backend nvshmem -m multi_gpu tests

With --aot every layer, and every op outside layers, takes its kernels from DIR, and ranks cannot import Triton:
`import triton` raises ImportError there, so nothing can fall back to the JIT. With --aot-record the ranks compile as
usual and append their requests to FILE, one variant per line: `python -m triton_ep.aot build --variant FILE` builds
them. With both, they compile only what DIR lacks.
"""

import os
from pathlib import Path
from typing import Any

import pytest

_BLOCK = "sys.modules['triton'] = None; sys.modules['triton.compiler'] = None; "
_START = "from triton_ep.testing import process; "


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the two options."""
    group = parser.getgroup("triton_ep")
    group.addoption("--aot", metavar="DIR", help="take all kernels from this ahead-of-time library, without Triton")
    group.addoption("--aot-record", metavar="FILE", help="append what is asked for to FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Prepare ranks, before any of them starts."""
    folder, record = config.getoption("--aot"), config.getoption("--aot-record")
    if folder:
        os.environ |= {"TRITON_EP_AOT": "prefer" if record else "1", "TRITON_EP_AOT_DIR": str(Path(folder).resolve())}
    if record:
        path = str(Path(record).resolve())
        _inject(f"from tests.aot import recorder; recorder.install({path!r}); ", before=False)
    elif folder:
        _inject(_BLOCK, before=True)


def _inject(code: str, before: bool) -> None:
    """Run `code` in every rank that compiles, before or after it has imported this package."""
    from triton_ep.testing import process

    plain = process._python

    def _python(call: str, *, interpret: bool) -> list[str]:
        command = plain(call, interpret=interpret)
        if not interpret:
            assert _START in command[-1], command[-1]
            command[-1] = command[-1].replace(_START, code + _START if before else _START + code)
        return command

    process._python = _python


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """Skip tests that need Triton's own compiler."""
    if not config.getoption("--aot") or config.getoption("--aot-record"):
        return
    for item in items:
        if "compiles_into_one_graph" in item.name:  # on GPUs by inductor
            item.add_marker(pytest.mark.skip(reason="inductor compiles kernels of its own with Triton"))
        elif item.path.name == "test_megatron_core.py" and item.name.endswith("deepep]"):
            item.add_marker(pytest.mark.skip(reason="Megatron-Core compiles functions of its own with Triton"))
        elif item.path.name == "test_gpu.py" and item.path.parent.name == "aot":
            item.add_marker(pytest.mark.skip(reason="compares with the JIT, which cannot be imported"))
