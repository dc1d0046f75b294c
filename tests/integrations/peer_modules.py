"""Some modules of an installed package, as they are, where what they import cannot be: stand-ins for the rest of it.

Servers import hundreds of modules and need packages and compiled code that a machine without a GPU lacks. The class
that calls a door is in one or two files, which are loaded here unchanged. Every other module of the package is a
stand-in, whose names are what the test gives, or else objects that may be called, subscripted and derived from, and
that are false.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class _Kind(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing

    def __bool__(cls) -> bool:
        return False


class Nothing(metaclass=_Kind):
    """Whatever nobody asks for an answer: a class, an instance, a function, each of whose results is another."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def __call__(self, *args: Any, **kwargs: Any) -> Nothing:
        return Nothing()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __bool__(self) -> bool:
        return False


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class _StandInLoader(Loader):
    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self._names)


class _Finder(MetaPathFinder):
    """Finds all modules of one package."""

    def __init__(self, package: str, folder: Path, real: Sequence[str], names: Mapping[str, Mapping[str, Any]]) -> None:
        self._package, self._folder, self._real, self._names = package, folder, real, names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != self._package:
            return None
        if name in self._real:
            return importlib.util.spec_from_file_location(
                fullname, self._folder.joinpath(*name.split(".")).with_suffix(".py")
            )
        return ModuleSpec(fullname, _StandInLoader(self._names.get(name, {})), is_package=True)


def folder_of(package: str, file: str) -> Path | None:
    """Where a package is installed that has this file; None: nowhere. Nothing of it is run."""
    spec = importlib.util.find_spec(package)
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((Path(each) for each in folders if (Path(each) / file).is_file()), None)


@contextmanager
def loaded(
    package: str, folder: Path, real: Sequence[str], names: Mapping[str, Mapping[str, Any]]
) -> Iterator[list[Any]]:
    """The modules `real` of a package in `folder`, by their names within it; inside of the block they are imported.

    names: of stand-ins, what they have.
    """
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == package}
    for name in before:
        del sys.modules[name]
    finder = _Finder(package, folder, real, names)
    sys.meta_path.insert(0, finder)
    try:
        yield [importlib.import_module(f"{package}.{name}") for name in real]
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            del sys.modules[name]
        sys.modules.update(before)
