"""House rules that a machine can check."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = sorted(path for folder in ("triton_ep", "kernels", "aot") for path in (ROOT / folder).rglob("*.py"))
KERNEL_FILES = [path for path in PRODUCT if "kernels" in path.relative_to(ROOT).parts]
MAX_OF_KERNELS = 10
MAX_LINES = 800
MAX_PARAMETERS = 10
# By class and function. Signatures that people call, where each argument is an option with a default.
LONG_SIGNATURES = {
    # Given by the specification, or by users of torch modules, whose options are arguments of the constructor.
    "EPAll2AllLayer.__init__",
    "MoE.__init__",
    "TopKRouter.__init__",
    "SwiGLUExperts.__init__",
    # Those of another package, taken over argument by argument: DeepEP, Megatron, torchtitan, TransformerEngine, vLLM.
    "Buffer.__init__",
    "Buffer.dispatch",
    "Buffer.low_latency_combine",
    "Buffer.low_latency_dispatch",
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
LONG_OF_EXPERTS = {"experts", "experts_backward", "launch_gate_up", "launch_rows_product", "_run_rows_product"}


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _public_without_docstring(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Public functions, classes and methods of a module that do not say what they are for.

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


@pytest.mark.parametrize("path", [p for p in PRODUCT if p not in KERNEL_FILES], ids=_name)
def test_public_things_have_docstrings(path: Path) -> None:
    """Every module, public class and public function says what it is for."""
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the module has no docstring"
    assert list(_public_without_docstring(tree.body)) == []


def test_the_docstring_check_sees_a_breach() -> None:
    """Functions, classes and methods without a docstring are all found."""
    source = "class A:\n    def f(self): ...\n    def _g(self): ...\ndef h(): ...\n"
    assert [text.split()[0] for text in _public_without_docstring(ast.parse(source).body)] == [
        "A",
        "A.f",
        "h",
    ]


def _kernels(path: Path) -> Iterator[ast.FunctionDef]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and node.decorator_list:
            yield node


@pytest.mark.parametrize("path", KERNEL_FILES, ids=_name)
def test_kernel_file_states_its_protocol(path: Path) -> None:
    """A file that holds a kernel opens with its protocol, under the fixed headings."""
    kernels = list(_kernels(path))
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert docstring
    if kernels:
        headings = ("Protocol", "Layout", "Memory order", "Progress", "Replay")
        assert [h for h in headings if not re.search(rf"^{h}\b", docstring, re.MULTILINE)] == []


@pytest.mark.parametrize("path", KERNEL_FILES, ids=_name)
def test_kernel_has_few_parameters(path: Path) -> None:
    """Kernels and what they call: what travels together is a group (kernels/spec.py)."""
    assert list(_many_parameters(ast.parse(path.read_text()).body, most=MAX_OF_KERNELS)) == []


@pytest.mark.parametrize("path", PRODUCT, ids=_name)
def test_a_file_has_one_subject(path: Path) -> None:
    """What is longer has become two subjects; a shorter file is no aim. Overloads do not count."""
    text = path.read_text()
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    overloads = [node for node in functions if any(ast.unparse(d) == "overload" for d in node.decorator_list)]
    repeated = sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in overloads)
    assert len(text.splitlines()) - repeated <= MAX_LINES


def test_no_module_is_named_as_private() -> None:
    """An underscore said "the rest of that file". What is private is a name in a module, not a module."""
    assert [_name(path) for path in PRODUCT if re.match(r"_(?!_)", path.name)] == []


def _many_parameters(body: list[ast.stmt], prefix: str = "", most: int = MAX_PARAMETERS) -> Iterator[str]:
    """Functions and methods of more than `most` parameters, without those that implement an op: its schema says what it
    takes, and has no records."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _many_parameters(node.body, f"{node.name}.", most)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if any(re.search(r"\b(op|custom_op|overload)\b", ast.unparse(each)) for each in node.decorator_list):
                continue
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            if len([a for a in arguments if a.arg not in ("self", "cls")]) > most:
                yield f"{prefix}{node.name}"


@pytest.mark.parametrize("path", [p for p in PRODUCT if p not in KERNEL_FILES], ids=_name)
def test_function_has_few_parameters(path: Path) -> None:
    """More of them are a record that has no name yet."""
    assert set(_many_parameters(ast.parse(path.read_text()).body)) <= LONG_SIGNATURES | LONG_OF_EXPERTS


def test_the_parameter_check_sees_a_breach() -> None:
    """Functions and methods; not a method's own object."""
    many = ", ".join(f"a{i}" for i in range(MAX_PARAMETERS + 1))
    source = f"def f({many}): ...\nclass A:\n    def g(self, {many[4:]}): ...\n    def h(self, *, {many}): ...\n"
    assert list(_many_parameters(ast.parse(source).body)) == ["f", "A.h"]


@pytest.mark.parametrize("path", PRODUCT, ids=_name)
def test_no_unfinished_business(path: Path) -> None:
    """No swallowed exception, no stub, no reminder without an issue number."""
    text = path.read_text()
    assert not re.search(r"\b(TODO|FIXME|XXX)\b(?!\(#\d+\))", text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"bare except in line {node.lineno}"
            silent = all(isinstance(s, ast.Pass) for s in node.body)
            broad = ast.unparse(node.type) in ("Exception", "BaseException")
            assert not (silent and broad), f"swallowed exception in line {node.lineno}"
        if isinstance(node, ast.Raise) and node.exc is not None:
            assert "NotImplementedError" not in ast.unparse(node.exc), f"stub in line {node.lineno}"
