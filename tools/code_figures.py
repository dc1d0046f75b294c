"""Figures of the code that CHANGELOG.md quotes: python tools/code_figures.py [checkout ...], a column per checkout.

git worktree add /tmp/before 8fb6e15 && python tools/code_figures.py /tmp/before .
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

LAYOUT_VALUES = ("state_ptr", "tables_ptr", "num_ranks", "ranks_per_node", "experts_per_rank")
RECORDS = ("placement", "report", "entries", "step", "status", "host_word", "small", "desc", "placement_ptr")
MOST_PARAMETERS = 10


def functions(folder: Path) -> Iterator[tuple[Path, ast.FunctionDef]]:
    """Every function and method under a folder, with its file."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield path, node


def has_many_parameters(node: ast.FunctionDef) -> bool:
    """Whether a function has more than MOST_PARAMETERS parameters, not counting self or cls."""
    given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
    overloaded = any(ast.unparse(each) == "overload" for each in node.decorator_list)
    return not overloaded and len([a for a in given if a.arg not in ("self", "cls")]) > MOST_PARAMETERS


def occurrences(folder: Path, names: tuple[str, ...]) -> int:
    """Occurrences of whole words in the sources under a folder."""
    pattern = re.compile(rf"\b({'|'.join(names)})\b")
    return sum(len(pattern.findall(path.read_text())) for path in folder.rglob("*.py"))


def bare_indices(folder: Path) -> int:
    """Subscripts of the records of a dispatch by a number, or a slice with a number, which hide the field's name."""
    found = 0
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value).split(".")[-1] in RECORDS:
                parts = [node.slice.lower, node.slice.upper] if isinstance(node.slice, ast.Slice) else [node.slice]
                found += any(isinstance(part, ast.Constant) and isinstance(part.value, int) for part in parts)
    return found


def inherited_calls(package: Path) -> int:
    """Public methods that EPAll2AllLayer inherits."""
    classes = {
        node.name: node
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }

    def of_bases(name: str) -> int:
        bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name) and base.id in classes]
        own = [
            sum(isinstance(node, ast.FunctionDef) and not node.name.startswith("_") for node in classes[base].body)
            for base in bases
        ]
        return sum(own) + sum(of_bases(base) for base in bases)

    return of_bases("EPAll2AllLayer")


def lines(paths: Iterator[Path]) -> int:
    """Total number of lines of these files."""
    return sum(len(path.read_text().splitlines()) for path in paths)


def figures(root: Path) -> dict[str, int]:
    """The figures of one checkout."""
    package, kernels = root / "triton_ep", root / "kernels"
    return {
        f"functions in kernels/ with more than {MOST_PARAMETERS} parameters": sum(
            has_many_parameters(node) for _, node in functions(kernels)
        ),
        f"functions elsewhere with more than {MOST_PARAMETERS} parameters": sum(
            has_many_parameters(node) for folder in (package, root / "aot") for _, node in functions(folder)
        ),
        "occurrences of the five layout values in kernels/": occurrences(kernels, LAYOUT_VALUES),
        "lines of kernel specs": lines(path for path in kernels.glob("*spec*.py")),
        "bare indices into records of a dispatch": sum(bare_indices(folder) for folder in (package, kernels)),
        "public methods of the layer outside layer.py": inherited_calls(package),
        "entries of triton_ep/": sum(not path.name.startswith("__pycache__") for path in package.iterdir()),
        "lines of the longest file of triton_ep/": max(lines(iter([path])) for path in package.rglob("*.py")),
    }


def main(checkouts: list[str]) -> None:
    """Print one line per figure."""
    columns = [figures(Path(checkout)) for checkout in checkouts or ["."]]
    for name in columns[0]:
        print(f"{name:65}", *(f"{column[name]:6}" for column in columns))


if __name__ == "__main__":
    main(sys.argv[1:])
