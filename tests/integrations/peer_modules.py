"""Load some modules of an installed package unchanged, with stand-ins for the modules that cannot be imported.

Servers import hundreds of modules and need packages and compiled code that a machine without a GPU lacks. The class
that calls an integration is in one or two files, which are loaded here unchanged. Every other module of the package is
a stand-in. Its names are given by the test, or else are objects that are false and can be called, subscripted and
derived from.
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
    """Stand-in for any name: usable as a class, an instance or a function; every result is another `Nothing`."""

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
    """Folder of the installed package if it has this file; None: not installed. Runs no code of the package."""
    spec = importlib.util.find_spec(package)
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((Path(each) for each in folders if (Path(each) / file).is_file()), None)


@contextmanager
def loaded(
    package: str, folder: Path, real: Sequence[str], names: Mapping[str, Mapping[str, Any]]
) -> Iterator[list[Any]]:
    """Import the modules `real`, named relative to a package in `folder`, for the duration of the block.

    names: names that stand-ins define.
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
