"""Import contracts of pyproject.toml (import-linter), and which modules read the environment."""

import ast
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import LIMIT_S
from tests.programs import run_program

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (("triton_ep", "triton_ep"), ("kernels", "triton_ep.kernels"), ("aot", "triton_ep.aot"))
"""Folder of the checkout, and the package that it is installed as."""
READERS_OF_ENVIRONMENT = {"triton_ep.runtime.environment"}
USES_OF_ENVIRONMENT = ("environ", "environb", "getenv", "putenv")
# These may set TRITON_INTERPRET, which Triton reads at import.
SETTERS_OF_INTERPRET = ("triton_ep.runtime.launch", "triton_ep.runtime.interpreter", "triton_ep.aot")


def _modules() -> dict[str, Path]:
    """Dotted name as installed -> file, for every module of the package."""
    found = {}
    for folder, package in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join([package, *(part for part in parts if part != "__init__")])
            found[name] = path
    return found


MODULES = _modules()


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with the package as installed: import-linter looks for modules only inside it."""
    for folder, package in FOLDERS:
        target = tmp_path.joinpath(*package.split("."))
        shutil.copytree(ROOT / folder, target, ignore=shutil.ignore_patterns("__pycache__", "cubins"))
    return tmp_path


def _lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """import-linter's verdict on the package in a folder."""
    program = Path(sysconfig.get_path("scripts"), "lint-imports")
    command = [sys.executable, program, "--no-cache", "--config", ROOT / "pyproject.toml"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)


needs_linter = pytest.mark.skipif(
    importlib.util.find_spec("importlinter") is None, reason="import-linter is not installed"
)


@needs_linter
def test_imports_keep_the_contracts(installed: Path) -> None:
    """Every module has a layer, there are no cycles, and kernels, heap and NVSHMEM have limited importers."""
    done = _lint(installed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 broken" in done.stdout


BREACHES = {
    "triton_ep.heap.up": "from triton_ep.layer import EPAll2AllLayer",
    "triton_ep.heap.inside": "def f():\n    import triton_ep.ops.dispatch",
    "triton_ep.heap.relative": "from ..context.layout import BUFFERS",
    "triton_ep.heap.typed": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import triton_ep.nn.moe",
    "triton_ep.kernels.intranode.framework": "import torch",
    "triton_ep.ops.library_of_others": "import nvshmem.core",
    "triton_ep.cli.memory_of_others": "from triton_ep.heap.host import HostHeap",
    "triton_ep.testing.codes": "from triton_ep.kernels.device.waits import WAIT_SPLITS",
    "triton_ep.integrations.launch": "from triton_ep.ops.combine import combine",
    "triton_ep.exchange.kernel": "from triton_ep.kernels.intranode.dispatch import dispatch_push_kernel",
    "triton_ep.reference.shared": "from triton_ep.config import Topology",
    "triton_ep.reference.shared_errors": "from triton_ep.errors import EPError",
    "triton_ep.ops.sibling": "from kernels.spec import KernelSpec",
    "triton_ep.nn.left": "def f():\n    import triton_ep.nn.right",
    "triton_ep.nn.right": "from .left import f",
}


@needs_linter
def test_the_contracts_see_a_breach(installed: Path) -> None:
    """Each breach is named, and so is a new package without a layer."""
    for name, source in BREACHES.items():
        installed.joinpath(*name.split(".")).with_suffix(".py").write_text(source)
    (installed / "triton_ep/newcomer").mkdir()
    (installed / "triton_ep/newcomer/__init__.py").touch()
    done = _lint(installed)
    assert done.returncode == 1, done.stdout + done.stderr
    assert [name for name in BREACHES if name not in done.stdout and not name.startswith("triton_ep.nn.")] == []
    assert "No cycles are allowed in triton_ep.nn" in done.stdout
    assert "newcomer" in done.stdout


def _environment_uses(path: Path) -> Iterator[tuple[ast.AST, int]]:
    """Uses of `os.environ`, `os.getenv` and the like, by attribute or by imported name."""
    text = path.read_text()
    if not any(name in text for name in USES_OF_ENVIRONMENT):  # most files: parsing all takes seconds
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr in USES_OF_ENVIRONMENT:
            yield node, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            for alias in node.names:
                if alias.name in USES_OF_ENVIRONMENT:
                    yield node, node.lineno


def _is_interpret_switch(path: Path, line: int) -> bool:
    """Whether the statement on this line names TRITON_INTERPRET and no other variable."""
    text = path.read_text().splitlines()[line - 1]
    strings = [
        n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant) and n.lineno == line
    ]
    return "TRITON_INTERPRET" in text and all(s in ("TRITON_INTERPRET", "0", "1", "", None) for s in strings)


def test_environment_is_read_in_one_place() -> None:
    """Only triton_ep.runtime.environment reads the environment; a few modules may set TRITON_INTERPRET."""
    elsewhere = []
    for name, path in MODULES.items():
        if name in READERS_OF_ENVIRONMENT:
            continue
        for _, line in _environment_uses(path):
            if not (name.startswith(SETTERS_OF_INTERPRET) and _is_interpret_switch(path, line)):
                elsewhere.append(f"{path.relative_to(ROOT)}:{line}")
    assert elsewhere == []


def test_the_environment_check_sees_a_breach(tmp_path: Path) -> None:
    """`os.environ`, `os.getenv` and `from os import environ` are all found."""
    path = tmp_path / "module.py"
    path.write_text("import os\nfrom os import environ\nos.getenv('A')\nos.environ['B']\n")
    assert sorted(line for _, line in _environment_uses(path)) == [2, 3, 4]
    path.write_text("import os\nos.environ['TRITON_INTERPRET'] = '1'\nos.environ['HOME'] = '1'\n")
    assert [_is_interpret_switch(path, line) for line in (2, 3)] == [True, False]


def _last_line(code: str) -> str:
    """Last line of output of a program started in the checkout; it has loaded torch, but not Triton or the package."""
    done = run_program(["-c", code])
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_importing_the_package_loads_neither_torch_nor_triton() -> None:
    """`import triton_ep`, and its errors, work without torch and Triton."""
    code = "import sys, triton_ep; triton_ep.EPError; print({'torch', 'triton', 'numpy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.strip() == "set()", done.stderr


def test_importing_modules_loads_no_compiler() -> None:
    """Neither torch.compile's compiler nor DTensors, which take longer to import than the whole package."""
    doors = ("deep_ep", "hybrid_ep", "megatron", "torchtitan", "vllm")
    names = ["autograd", "bench.run", "layer", "mx", "nn", "testing", *(f"integrations.{name}" for name in doors)]
    imports = "; ".join(f"import triton_ep.{name}" for name in names)
    code = f"{imports}; import sys; print({{'torch._dynamo', 'torch.distributed.tensor'}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.strip() == "set()", done.stderr


def test_public_names_are_there() -> None:
    """Every name of `triton_ep.__all__` loads, and the type checker sees the same names."""
    code = "import triton_ep as t; print(all(getattr(t, name).__name__ == name for name in t.__all__))"
    assert _last_line(code) == "True"
    tree = ast.parse((ROOT / "triton_ep/__init__.py").read_text())
    typed = [
        alias.name
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert sorted(typed) == sorted(__import__("triton_ep").__all__)


@pytest.mark.parametrize(
    "module",
    [
        "exchange.barrier",
        "cli.demo_moe",
        "context.context",
        "distributed",
        "ops",
        "pipeline",
        "testing",
    ],
)
def test_any_module_may_be_imported_first(module: str) -> None:
    """Whichever module comes first, the choice to interpret or compile kernels precedes the import of Triton."""
    assert _last_line(f"import sys; assert 'triton' not in sys.modules; import triton_ep.{module}; print('ok')") == "ok"


def test_unknown_name_is_an_attribute_error() -> None:
    """The lazy loader keeps AttributeError for a mistyped name."""
    import triton_ep

    with pytest.raises(AttributeError, match="no_such_name"):
        _ = triton_ep.no_such_name  # type: ignore[attr-defined]


def test_kernels_are_empty_as_a_top_level_package() -> None:
    """From the checkout's root nothing can be imported out of `kernels`, and the right import is named; packages that
    look for another one of that name go on."""
    program = (
        "import kernels; assert getattr(kernels, '__version__', None) is None\n"
        "try: import kernels.device\n"
        "except ModuleNotFoundError: from kernels import device"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode != 0
    assert "ImportError: this folder was imported as 'kernels'" in done.stderr and "triton_ep.kernels" in done.stderr
