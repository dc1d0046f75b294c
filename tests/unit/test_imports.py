"""Who may import whom, read from the source: the layers of docs/concepts/architecture-in-a-page.md."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest

from tests.patience import LIMIT_S
from tests.programs import run_program

ROOT = Path(__file__).resolve().parents[2]

# (module prefix, layer). The longest matching prefix decides; every module must match one.
LAYERS = {
    "triton_ep.errors": 0,
    "triton_ep.reference": 0,
    "triton_ep.kernels": 0,
    "triton_ep.runtime": 1,
    "triton_ep.config": 2,
    "triton_ep.aot": 2,
    "triton_ep.heap": 2,
    "triton_ep.distributed": 3,
    "triton_ep.context": 4,
    "triton_ep.ops": 5,
    "triton_ep.mx": 6,
    "triton_ep.exchange": 6,
    "triton_ep.layer": 7,
    "triton_ep.autograd": 8,
    "triton_ep.nn": 8,
    "triton_ep.pipeline": 8,
    "triton_ep.bench": 9,
    "triton_ep.integrations": 9,
    "triton_ep.testing": 9,
    "triton_ep.cli": 9,
}
# Kernels are named by those who launch them. Constants of `kernels.device` (which wait is which, which
# buffer is where) are shared with the host side that allocates and reports; integrations see neither.
IMPORTERS_OF_KERNELS = (
    "triton_ep.ops",
    "triton_ep.runtime",
    "triton_ep.kernels",
    "triton_ep.aot",
)
FRONT_DOOR = 9
IMPORTERS_OF_NVSHMEM = {"triton_ep.heap.nvshmem", "triton_ep.heap.bitcode"}
READERS_OF_ENVIRONMENT = {"triton_ep.runtime.environment"}
# These may set TRITON_INTERPRET, which Triton itself reads when it is imported.
SETTERS_OF_INTERPRET = ("triton_ep.runtime.launch", "triton_ep.runtime.interpreter", "triton_ep.aot")


def _modules() -> dict[str, Path]:
    """Dotted name as installed -> file, for every module of the package."""
    found = {}
    for folder, package in (
        ("triton_ep", "triton_ep"),
        ("kernels", "triton_ep.kernels"),
        ("aot", "triton_ep.aot"),
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join([package, *(part for part in parts if part != "__init__")])
            found[name] = path
    return found


MODULES = _modules()


def _layer(module: str) -> int | None:
    """Layer of a module; None for the package itself, whose names load lazily."""
    parts = module.split(".")
    for end in range(len(parts), 1, -1):
        if (layer := LAYERS.get(".".join(parts[:end]))) is not None:
            return layer
    return None


def _statements(node: ast.AST, types_only: bool) -> Iterator[ast.AST]:
    """A node and all below it; without `types_only`, not those under `if TYPE_CHECKING`."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not types_only and isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for other in child.orelse:
                yield from _statements(other, types_only)
        else:
            yield from _statements(child, types_only)


def _imports(module: str, path: Path, types_only: bool = True) -> Iterator[tuple[str, int]]:
    """Every imported dotted name of a file with its line, those inside functions too; `types_only`: and for types."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in _statements(ast.parse(path.read_text()), types_only):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                full = f"{source}.{alias.name}"
                yield (full if full in MODULES else source), node.lineno


def _violations(module: str, path: Path) -> Iterator[str]:
    """Breaches of the layer table in one file."""
    own = _layer(module)
    for target, line in _imports(module, path):
        where = f"{module}:{line} imports {target}"
        top = target.split(".")[0]
        if module.startswith("triton_ep.kernels") and top in ("torch", "nvshmem", "numpy"):
            yield f"{where}: kernels know pointers only"
        if top == "nvshmem" and module not in IMPORTERS_OF_NVSHMEM:
            yield f"{where}: only {sorted(IMPORTERS_OF_NVSHMEM)} may"
        if top in ("kernels", "aot", "tests"):
            yield f"{where}: not a name of the installed package"
        if not target.startswith("triton_ep."):
            continue
        shared = target.startswith("triton_ep.kernels.device") and own != FRONT_DOOR
        if target.startswith("triton_ep.kernels") and not (shared or module.startswith(IMPORTERS_OF_KERNELS)):
            yield f"{where}: kernels are launched by ops"
        if target.startswith("triton_ep.heap") and own == FRONT_DOOR:
            yield f"{where}: an integration takes what the layer or distributed offers"
        if module.startswith("triton_ep.reference") and not target.startswith("triton_ep.reference"):
            yield f"{where}: an oracle must not share the bug"
        layer = _layer(target)
        if own is not None and layer is not None and layer > own:
            yield f"{where}: layer {own} imports layer {layer}"


def test_every_module_has_a_layer() -> None:
    """A new module is placed in the table when it is made, not when somebody wonders."""
    unplaced = [name for name in MODULES if name != "triton_ep" and _layer(name) is None]
    assert unplaced == []


def test_imports_point_downwards() -> None:
    """No module imports a higher layer, kernels import no framework, only the heap imports nvshmem."""
    assert [text for name, path in MODULES.items() if name != "triton_ep" for text in _violations(name, path)] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("triton_ep.heap.base", "from triton_ep.layer import EPAll2AllLayer"),
        ("triton_ep.heap.base", "def f():\n    import triton_ep.ops.dispatch"),
        ("triton_ep.kernels.intranode.dispatch", "import torch"),
        ("triton_ep.ops.dispatch", "import nvshmem.core"),
        ("triton_ep.cli.doctor", "from triton_ep.heap.host import HostHeap"),
        ("triton_ep.testing", "from triton_ep.kernels.device.waits import WAIT_SPLITS"),
        ("triton_ep.layer", "from triton_ep.kernels.intranode.dispatch import dispatch_kernel"),
        ("triton_ep.reference.dispatch", "from triton_ep.config import Topology"),
        ("triton_ep.heap.base", "from ..context.layout import BUFFERS"),
        ("triton_ep.ops.dispatch", "from kernels.spec import KernelSpec"),
    ],
)
def test_the_import_check_sees_a_breach(module: str, source: str, tmp_path: Path) -> None:
    """The check above is not blind to what it forbids."""
    path = tmp_path / "module.py"
    path.write_text(source)
    assert list(_violations(module, path)) != []


Graph = dict[str, set[str]]


def _module_graph(modules: dict[str, Path]) -> Graph:
    """Module -> modules of ours that it imports when it runs, anywhere in the file."""
    return {
        name: {target for target, _ in _imports(name, path, types_only=False) if target in modules} - {name}
        for name, path in modules.items()
    }


def _siblings(graph: Graph, folder: str) -> Graph:
    """The graph of what lies in a package: its modules, and its packages, each with all that is in it."""

    def child(module: str) -> str:
        return ".".join(module.split(".")[: folder.count(".") + 2])

    inside = [name for name in graph if name.startswith(f"{folder}.")]
    found: Graph = {child(name): set() for name in inside}
    for name in inside:
        targets = {child(target) for target in graph[name] if target.startswith(f"{folder}.")}
        found[child(name)] |= targets - {child(name)}
    return found


def _reached(graph: Graph, start: str) -> set[str]:
    """All that `start` imports, directly or not."""
    seen: set[str] = set()
    waiting = [*graph[start]]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += graph[name]
    return seen


def _circles(graph: Graph) -> set[tuple[str, ...]]:
    """Sets of modules that import each other, each in alphabetical order."""
    reached = {name: _reached(graph, name) for name in graph}
    return {
        tuple(sorted(other for other in there if name in reached[other]))
        for name, there in reached.items()
        if name in there
    }


def _all_circles(modules: dict[str, Path]) -> set[tuple[str, ...]]:
    """Circles among modules, and those among what lies beside each other in each package."""
    graph = _module_graph(modules)
    folders = [name for name, path in modules.items() if path.name == "__init__.py"]
    return _circles(graph).union(*(_circles(_siblings(graph, folder)) for folder in folders))


def test_no_circles() -> None:
    """No two modules need each other, and no two packages, whether when loaded or when called."""
    assert _all_circles(MODULES) == set()


def test_the_circle_check_sees_a_circle(tmp_path: Path) -> None:
    """Among modules, through a function, and among packages whose modules are in none; not for types alone."""
    sources = {
        "triton_ep.a": "def f():\n    import triton_ep.b",
        "triton_ep.b": "from .a import f",
        "triton_ep.c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import triton_ep.d",
        "triton_ep.d": "import triton_ep.c",
        "triton_ep.p": "",
        "triton_ep.p.low": "",
        "triton_ep.p.high": "import triton_ep.q.high",
        "triton_ep.q": "",
        "triton_ep.q.high": "import triton_ep.q.low",
        "triton_ep.q.low": "import triton_ep.p.low",
        "triton_ep": "",
    }
    modules = {}
    for name, text in sources.items():
        modules[name] = tmp_path / name / ("__init__.py" if name.count(".") == 0 else "m.py")
        modules[name].parent.mkdir()
        modules[name].write_text(text)
    assert _all_circles(modules) == {("triton_ep.a", "triton_ep.b"), ("triton_ep.p", "triton_ep.q")}


def _environment_uses(path: Path) -> Iterator[tuple[ast.AST, int]]:
    """`os.environ`, `os.getenv` and kin, by attribute or by imported name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv"):
            yield node, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            for alias in node.names:
                if alias.name in ("environ", "environb", "getenv", "putenv"):
                    yield node, node.lineno


def _is_interpret_switch(path: Path, line: int) -> bool:
    """Whether the statement on this line names TRITON_INTERPRET and no other variable."""
    text = path.read_text().splitlines()[line - 1]
    strings = [
        n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant) and n.lineno == line
    ]
    return "TRITON_INTERPRET" in text and all(s in ("TRITON_INTERPRET", "0", "1", "", None) for s in strings)


def test_environment_is_read_in_one_place() -> None:
    """Only triton_ep.runtime.environment reads the environment; TRITON_INTERPRET is set where it must be."""
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
    """What a program started in the checkout says last; it has torch, but neither Triton nor the package."""
    done = run_program(["-c", code], timeout_s=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_importing_the_package_loads_neither_torch_nor_triton() -> None:
    """`import triton_ep`, and its errors, work where neither torch nor Triton is installed."""
    code = "import sys, triton_ep; triton_ep.EPError; print({'torch', 'triton', 'numpy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.strip() == "set()", done.stderr


def test_public_names_are_there() -> None:
    """Every name of `triton_ep.__all__` loads, and what the type checker sees is what there is."""
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
        "layer",
        "ops",
        "testing",
    ],
)
def test_any_module_may_be_imported_first(module: str) -> None:
    """Whichever comes first, kernels are set to be interpreted or compiled before Triton is imported."""
    assert _last_line(f"import sys; assert 'triton' not in sys.modules; import triton_ep.{module}; print('ok')") == "ok"


def test_unknown_name_is_an_attribute_error() -> None:
    """The lazy loader does not turn a typing error into something else."""
    import triton_ep

    with pytest.raises(AttributeError, match="no_such_name"):
        _ = triton_ep.no_such_name  # type: ignore[attr-defined]


def test_kernels_refuse_to_be_a_top_level_package() -> None:
    """`import kernels` from the checkout's root says what to write instead of loading a second copy."""
    done = subprocess.run(
        [sys.executable, "-c", "import kernels"], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode != 0
    assert "triton_ep.kernels" in done.stderr
