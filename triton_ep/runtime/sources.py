"""The source files that a kernel is compiled from, and their hash. Needs neither torch nor Triton."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

_IMPORT = re.compile(r"^from (\.+)([\w.]*) import ((?:\([^)]*\))|.*)$", re.MULTILINE)


def kernels_folder() -> Path:
    """Folder of `triton_ep.kernels`."""
    import triton_ep.kernels

    return Path(triton_ep.kernels.__path__[0])


def source_hash(file: str) -> str:
    """Hash of a file of `kernels/` (its path below that folder) and of all files that it imports from there; "" if it
    does not exist."""
    try:
        return _hash(kernels_folder(), file)
    except OSError:
        return ""


@functools.cache
def hash_of_all() -> str:
    """Hash of all files of `kernels/` and of compiler.py, which turns a request into the input of Triton's compiler.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in [Path(__file__).with_name("compiler.py"), *sorted(kernels_folder().rglob("*.py"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def _hash(root: Path, file: str) -> str:
    found: set[Path] = set()
    waiting = [root / file]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _imported(path)
    digest = hashlib.sha256()
    for path in sorted(found):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


@functools.cache
def _imported(path: Path) -> tuple[Path, ...]:
    """Files that a file imports by relative import."""
    found = []
    for dots, module, names in _IMPORT.findall(path.read_text(encoding="utf-8")):
        folder = path.parents[len(dots) - 1].joinpath(*module.split(".") if module else ())
        if folder.with_suffix(".py").is_file():
            found.append(folder.with_suffix(".py"))
            continue
        for name in re.findall(r"(\w+)(?: as \w+)?", names):
            if (folder / f"{name}.py").is_file():
                found.append(folder / f"{name}.py")
    return tuple(found)
