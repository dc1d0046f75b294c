"""tools/environment.py: the torch that it requests from pip on other machines."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.patience import LIMIT_S
from triton_ep.runtime.machine import MIN_PYTHON

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tools/environment.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """The program as a module."""
    spec = importlib.util.spec_from_file_location("make_environment", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PLAIN = ["torch==2.13.0", "triton==3.7.1"]


def test_cpu_wheels_where_there_is_no_driver(tool: ModuleType) -> None:
    """The local version selects CPU wheels, PyPI stays the first index; without an answer PyPI's build is next."""
    first, second = tool.torch_requirements("2.13.0", "3.7.1", driver=False, own_index=False)
    assert first[-2:] == ["torch==2.13.0+cpu", "triton==3.7.1"]
    assert first[first.index("--extra-index-url") + 1] == tool.CPU_WHEELS and "--index-url" not in first
    assert second == PLAIN


@pytest.mark.parametrize(("driver", "own_index"), [(True, False), (False, True), (True, True)])
def test_the_index_decides_elsewhere(tool: ModuleType, driver: bool, own_index: bool) -> None:
    """With a driver the CUDA build is wanted; with an index of its own pip gets no extra index."""
    assert tool.torch_requirements("2.13.0", "3.7.1", driver=driver, own_index=own_index) == [PLAIN]


@pytest.mark.parametrize(
    ("config", "own"),
    [
        ("", False),
        (":env:.default-timeout='180'\nglobal.cert='/etc/ssl/ca.crt'", False),
        ("global.index-url='https://mirror.example.org/simple'", True),
        (":env:.extra-index-url='https://mirror.example.org/simple'", True),
        ("install.find-links='/opt/wheels'", True),
        (":env:.no-index='1'", True),
        ("global.trusted-host='index-url'", False),
    ],
)
def test_where_pip_looks(tool: ModuleType, config: str, own: bool) -> None:
    """Settings that name an index count as own sources, others do not."""
    assert tool.own_sources(config) is own


def test_it_knows_the_least_python(tool: ModuleType) -> None:
    """The least Python is a constant: the table cannot be read by an older Python."""
    assert tool.LEAST_PYTHON == MIN_PYTHON


# Modules that stand for others. Installing pip takes ten seconds, and here pip only has to fail.
STAND_INS = {
    "torch": "raise ImportError('this Python has no torch')",
    "venv": "import os, runpy, sys; sys.path.remove(os.path.dirname(__file__)); sys.argv.append('--without-pip'); "
    "runpy.run_module('venv', run_name='__main__')",
    "pip": "import sys; print('pip', *sys.argv[1:], flush=True); sys.exit('no packages here')",
}


def test_it_says_at_once_what_it_will_download(tool: ModuleType, tmp_path: Path) -> None:
    """The first lines precede any pip call; if pip fails, the program fails and marks nothing as ready."""
    folder, stand_ins = tmp_path / "venv", tmp_path / "stand-ins"
    stand_ins.mkdir()
    for name, code in STAND_INS.items():
        (stand_ins / f"{name}.py").write_text(code)
    command = [sys.executable, str(PROGRAM), str(folder), "--torch", "no-such-package==0.0"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(stand_ins)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("looking whether") and lines[1].startswith(f"creating {folder} with no-such-package")
    told = lines.index("pip install no-such-package==0.0")
    assert lines[told + 1 :] == ["pip --disable-pip-version-check install --no-compile no-such-package==0.0"]
    assert (folder / "bin/python").exists()
    assert done.returncode != 0 and not (folder / ".ready").exists()


@pytest.mark.parametrize(("kind", "calls"), [("own", 1), ("host", 0)])
def test_tools_come_after_the_demo(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, calls: int
) -> None:
    """`--tools` adds the tests' extra to an own environment and nothing to a lent one, and writes its mark."""
    (tmp_path / ".ready").write_text(f"{kind}\n")
    asked: list[list[str]] = []
    monkeypatch.setattr(tool.subprocess, "run", lambda command, **_: asked.append(command))
    monkeypatch.setattr(sys, "argv", ["environment.py", str(tmp_path), "--tools"])
    tool.main()
    assert [command[-2:] for command in asked] == [["-e", ".[test]"]] * calls
    assert (tmp_path / ".tools").exists()


def test_the_demo_does_not_wait_for_the_tests_tools() -> None:
    """In the Makefile `demo` needs only the environment, `test` also its tools."""
    needs = dict(re.findall(r"^([a-z-]+): (\$\(\w+\))", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert needs["demo"] == "$(READY)" and needs["test"] == needs["aot"] == "$(TOOLS)"


def test_python_keeps_what_it_has_compiled() -> None:
    """Bytecode is kept even if the environment forbids it: tests start dozens of processes that import torch."""
    show = "show:; @echo [$$PYTHONDONTWRITEBYTECODE]"
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    command = ["make", "--no-print-directory", f"--eval={show}", "show"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout == "[]\n", done.stderr
