"""Style rules that can be checked automatically. A test per rule checks all files and names those that break it."""

import ast
import functools
import gc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = sorted(path for folder in ("triton_ep", "kernels", "aot") for path in (ROOT / folder).rglob("*.py"))
KERNEL_FILES = [path for path in PRODUCT if "kernels" in path.relative_to(ROOT).parts]
OTHER_FILES = [path for path in PRODUCT if path not in KERNEL_FILES]
MAX_OF_KERNELS = 10
MAX_LINES = 800
MAX_PARAMETERS = 10
LAYOUT_VALUES = re.compile(r"\b(state_ptr|tables_ptr|num_ranks|ranks_per_node|experts_per_rank)\b")
MOST_LAYOUT_VALUES = 100
# By class and function: public signatures whose arguments are options with defaults.
LONG_SIGNATURES = {
    # Given by the specification, or by the convention of torch modules, whose options are constructor arguments.
    "EPAll2AllLayer.__init__",
    "MoE.__init__",
    "TopKRouter.__init__",
    "SwiGLUExperts.__init__",
    # Signatures of other packages, argument by argument: DeepEP, Megatron, torchtitan, TransformerEngine, vLLM.
    "Buffer.__init__",
    "Buffer.dispatch",
    "Buffer.low_latency_combine",
    "Buffer.low_latency_dispatch",
    "EPBuffer.__init__",
    "EPBuffer.dispatch",
    "ElasticBuffer.__init__",
    "ElasticBuffer.dispatch",
    "HybridEPBuffer.__init__",
    "HybridEPBuffer.dispatch",
    "HybridEPBuffer.dispatch_with_permute",
    "init_hybrid_ep_buffer",
    "hybrid_ep_dispatch",
    "Experts.apply",
    "TokenDispatch.__init__",
    "MXFP8Tensor.__new__",
    "MXFP8Tensor.__init__",
    "PrepareFinalize.__init__",
}
# Plans and launches of the expert block.
LONG_OF_EXPERTS = {"experts", "experts_backward", "launch_gate_up", "launch_rows_product"}


@pytest.fixture(scope="module", autouse=True)
def _without_collections() -> Iterator[None]:
    """Collections of garbage would look through the trees of all files again and again."""
    gc.disable()
    yield
    gc.enable()


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _public_without_docstring(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Public functions, classes and methods of a module without a docstring.

    One line is enough. Nested functions, overloads, overrides and setters are not public.
    """
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
        if any(d.endswith((".setter", "overload", "override")) for d in decorators):
            continue
        if ast.get_docstring(node) is None:
            yield f"{prefix}{node.name} (line {node.lineno})"
        if isinstance(node, ast.ClassDef):
            yield from _public_without_docstring(node.body, f"{prefix}{node.name}.")


def test_public_things_have_docstrings() -> None:
    """Every module, public class and public function has a docstring."""
    assert [_name(path) for path in OTHER_FILES if not ast.get_docstring(_tree(path))] == []
    without = {_name(path): list(_public_without_docstring(_tree(path).body)) for path in OTHER_FILES}
    assert {name: found for name, found in without.items() if found} == {}


def test_the_docstring_check_sees_a_breach() -> None:
    """Functions, classes and methods without a docstring are all found."""
    source = "class A:\n    def f(self): ...\n    def _g(self): ...\ndef h(): ...\n"
    assert [text.split()[0] for text in _public_without_docstring(ast.parse(source).body)] == [
        "A",
        "A.f",
        "h",
    ]


def _kernels(path: Path) -> Iterator[ast.FunctionDef]:
    for node in _tree(path).body:
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and node.decorator_list:
            yield node


def test_kernel_files_state_their_protocols() -> None:
    """A file with a kernel begins with its protocol, under the fixed headings."""
    headings = ("Protocol", "Layout", "Memory order", "Progress", "Replay")
    docstrings = {path: ast.get_docstring(_tree(path)) or "" for path in KERNEL_FILES}
    assert [_name(path) for path, text in docstrings.items() if not text] == []
    of_kernels = {_name(path): text for path, text in docstrings.items() if any(_kernels(path))}
    missing = [(name, h) for name, text in of_kernels.items() for h in headings if not re.search(rf"(?m)^{h}\b", text)]
    assert of_kernels and missing == []


def test_kernels_have_few_parameters() -> None:
    """Kernels and their device functions have few parameters: group those that belong together (kernels/spec.py)."""
    many = {_name(path): list(_many_parameters(_tree(path).body, most=MAX_OF_KERNELS)) for path in KERNEL_FILES}
    assert {name: found for name, found in many.items() if found} == {}


def _length(path: Path) -> int:
    """Number of lines of a file, without overloads."""
    functions = [node for node in ast.walk(_tree(path)) if isinstance(node, ast.FunctionDef)]
    overloads = [node for node in functions if any(ast.unparse(d) == "overload" for d in node.decorator_list)]
    repeated = sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in overloads)
    return len(path.read_text().splitlines()) - repeated


def test_a_file_has_one_subject() -> None:
    """A longer file has two subjects; shortness by itself is not the aim."""
    assert [_name(path) for path in PRODUCT if _length(path) > MAX_LINES] == []


def test_no_module_is_named_as_private() -> None:
    """Modules have no leading underscore: names in modules are private, not modules."""
    assert [_name(path) for path in PRODUCT if re.match(r"_(?!_)", path.name)] == []


def _many_parameters(body: list[ast.stmt], prefix: str = "", most: int = MAX_PARAMETERS) -> Iterator[str]:
    """Functions and methods with more than `most` parameters. Implementations of ops are exempt: their parameters
    follow the op's schema, which has no records."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _many_parameters(node.body, f"{node.name}.", most)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if any(re.search(r"\b(op|custom_op|overload)\b", ast.unparse(each)) for each in node.decorator_list):
                continue
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            if len([a for a in arguments if a.arg not in ("self", "cls")]) > most:
                yield f"{prefix}{node.name}"


def test_kernels_take_the_layout_from_the_job() -> None:
    """Kernels read the values of the layout through functions of the job; copies of them grow back by and by."""
    count = sum(len(LAYOUT_VALUES.findall(path.read_text())) for path in KERNEL_FILES)
    assert count <= MOST_LAYOUT_VALUES


def test_functions_have_few_parameters() -> None:
    """Functions have few parameters: more of them should become a record."""
    many = {
        _name(path): {*_many_parameters(_tree(path).body)} - LONG_SIGNATURES - LONG_OF_EXPERTS for path in OTHER_FILES
    }
    assert {name: found for name, found in many.items() if found} == {}


def test_the_parameter_check_sees_a_breach() -> None:
    """Functions and methods count, self does not."""
    many = ", ".join(f"a{i}" for i in range(MAX_PARAMETERS + 1))
    source = f"def f({many}): ...\nclass A:\n    def g(self, {many[4:]}): ...\n    def h(self, *, {many}): ...\n"
    assert list(_many_parameters(ast.parse(source).body)) == ["f", "A.h"]


def _unfinished(path: Path) -> Iterator[str]:
    if found := re.search(r"\b(TODO|FIXME|XXX)\b(?!\(#\d+\))", path.read_text()):
        yield f"{found[1]} without an issue number"
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                yield f"bare except in line {node.lineno}"
            elif all(isinstance(s, ast.Pass) for s in node.body) and _is_broad(node.type):
                yield f"swallowed exception in line {node.lineno}"
        if isinstance(node, ast.Raise) and node.exc is not None and "NotImplementedError" in ast.unparse(node.exc):
            yield f"stub in line {node.lineno}"


def _is_broad(caught: ast.expr) -> bool:
    return ast.unparse(caught) in ("Exception", "BaseException")


def test_no_unfinished_business() -> None:
    """No swallowed exception, no stub, no TODO without an issue number."""
    assert [f"{_name(path)}: {breach}" for path in PRODUCT for breach in _unfinished(path)] == []


def test_the_check_for_unfinished_business_sees_a_breach(tmp_path: Path) -> None:
    """Each kind is found, but not a TODO with a number or a narrow exception."""
    wrong, right = tmp_path / "wrong.py", tmp_path / "right.py"
    wrong.write_text("# TODO\ntry: f()\nexcept: g()\ntry: f()\nexcept Exception: pass\nraise NotImplementedError()\n")
    found = ("TODO without an issue number", "bare except in line 3", "stub in line 6", "swallowed exception in line 5")
    assert sorted(_unfinished(wrong)) == sorted(found)
    right.write_text("# TODO(#3)\ntry: f()\nexcept KeyError: pass\n")
    assert list(_unfinished(right)) == []
