"""Declare a kernel with one decorator, in the kernel's file. Launches, builds and checks read the declaration.

    @ep_kernel(x_ptr="*{WORD}", addrs_ptr="*i64", specialised=("row_words",), num_warps=16)
    def push_kernel(x_ptr, addrs_ptr, num_rows, row_words, BLOCK: tl.constexpr): ...

The signature gives names and order; the decorator adds what a signature cannot express. Types are Triton's: "*i64" is a
pointer. "{WORD}" is a type that each launch decides: the dtype of rows or expert ids, or the kind of an operand.

Arguments that belong together form one parameter, a *group*, annotated with a NamedTuple class like `Job`
(device/job.py). Each field of the class is an argument; fields annotated tl.constexpr are compile-time arguments.
Launches, plans and the decorator name the fields as if each were a parameter; only the kernel sees the group:

    class Tile(NamedTuple):
        ROWS: tl.constexpr
        BLOCK_H: tl.constexpr

    @ep_kernel(x_ptr="*{WORD}")
    def copy_kernel(x_ptr, job: Job, tile: Tile):
        rows = tl.arange(0, tile.ROWS)
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import triton
import triton.language as tl

_COMMON = {"state_ptr": "*i64", "tables_ptr": "*i64", "placement_ptr": "*i32"}
"""Types of pointers that have the same meaning in every kernel."""


@dataclass(frozen=True)
class Variant:
    """One choice of types and constexprs of a kernel.

    Attributes:
        constexprs: values of all constexprs; dtypes by Triton's names ("fp32").
        types: types of the names in braces in the declaration, keyed without braces.
        aligned: specialised integers that are multiples of 16.
    """

    constexprs: Mapping[str, Any]
    types: Mapping[str, str] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()


class Parameter(NamedTuple):
    """One parameter of a kernel.

    Attributes:
        name: name in the kernel's signature.
        fields: names of its arguments: its own name, or the fields of its group.
        group: class of the group; None if the parameter is one argument.
    """

    name: str
    fields: tuple[str, ...]
    group: Any = None

    def of(self, values: Mapping[str, Any]) -> Any:
        """Build the parameter from a value for each argument."""
        return values[self.name] if self.group is None else self.group(*[values[name] for name in self.fields])


@dataclass(frozen=True)
class KernelSpec:
    """A declared kernel.

    Attributes:
        name: name of the function.
        kernel: the `triton.jit` function.
        parameters: parameters, in the kernel's order.
        arguments: type of every run-time argument, pointers and operands before integers: the order of launches.
        constexprs: names of the compile-time arguments.
        specialised: integers for which the compiler may use that they are 1, or multiples of 16.
        num_warps: warps of a program on a GPU; None: the plan of each call site chooses.
        maxnreg: most registers of a thread, so that programs of other kernels fit next to it; None: the plan or the
            compiler chooses.
        variants: variants built ahead of time in addition to those of plans.
    """

    name: str
    kernel: Any
    parameters: tuple[Parameter, ...]
    arguments: Mapping[str, str]
    constexprs: tuple[str, ...]
    specialised: tuple[str, ...]
    num_warps: int | None
    maxnreg: int | None
    variants: tuple[Variant, ...]

    @property
    def runtime_order(self) -> tuple[str, ...]:
        """Names of the run-time arguments in the order of the kernel's parameters, as compiled kernels take them."""
        return tuple(name for each in self.parameters for name in each.fields if name in self.arguments)

    def for_interpreter(self, values: Mapping[str, Any]) -> list[Any]:
        """Build the parameters of an interpreted call from a value for each argument."""
        # In a group, the interpreter would take a plain number for a run-time argument.
        kept = {**values, **{name: tl.constexpr(values[name]) for name in self.constexprs}}
        return [parameter.of(values if parameter.group is None else kept) for parameter in self.parameters]

    @property
    def moves_rows(self) -> bool:
        """True if the kernel takes rows of tokens."""
        return any("{WORD}" in kind or "{TOKEN}" in kind for kind in self.arguments.values())


_DECLARED: dict[str, KernelSpec] = {}


def ep_kernel(
    *,
    specialised: tuple[str, ...] = (),
    num_warps: int | None = 4,
    maxnreg: int | None = None,
    variants: tuple[Variant, ...] = (),
    **types: str,
) -> Callable[[Callable[..., Any]], Any]:
    """Declare the decorated function as a kernel, and wrap it in `triton.jit`.

    Arguments:
        specialised, num_warps, maxnreg, variants: as in `KernelSpec`.
        types: types of pointers and operands, by name. Run-time arguments named neither here nor in `_COMMON` are
            integers: "i32".

    Raises:
        TypeError: a type or a specialised integer names no run-time argument, a pointer has no type, or two arguments
            share a name.
    """

    def declare(function: Callable[..., Any]) -> Any:
        name = function.__name__
        parameters, constexprs = _parameters(function)
        known = _COMMON | types
        named = [field for parameter in parameters for field in parameter.fields if field not in constexprs]
        kinds = {field: known.get(field, "i32") for field in named}
        if unknown := sorted({*types, *specialised} - set(kinds)):
            raise TypeError(f"{name} has no run-time arguments {unknown}; it has {named}.")
        if untyped := [field for field, kind in kinds.items() if kind == "i32" and field.endswith("_ptr")]:
            raise TypeError(f"{name}: {untyped} are declared without a type.")
        if len({*named, *constexprs}) < len(named) + len(constexprs):
            raise TypeError(f"{name}: two of the arguments {[*named, *constexprs]} have one name.")
        arguments = dict(sorted(kinds.items(), key=lambda item: item[1] == "i32"))
        _DECLARED[name] = KernelSpec(
            name, triton.jit(function), parameters, arguments, constexprs, specialised, num_warps, maxnreg, variants
        )
        return _DECLARED[name].kernel

    return declare


def _parameters(function: Callable[..., Any]) -> tuple[tuple[Parameter, ...], tuple[str, ...]]:
    """Parameters of a kernel, and the names of its compile-time arguments."""
    parameters, constexprs = [], []
    for parameter in inspect.signature(function).parameters.values():
        name, kind = parameter.name, parameter.annotation
        if hasattr(kind, "_fields"):
            parameters.append(Parameter(name, kind._fields, kind))
            constexprs += [field for field, of_field in kind.__annotations__.items() if "constexpr" in str(of_field)]
        else:
            parameters.append(Parameter(name, (name,)))
            constexprs += [name] if "constexpr" in str(kind) else []
    return tuple(parameters), tuple(constexprs)


@functools.cache
def all_kernels() -> Mapping[str, KernelSpec]:
    """Every kernel of the package by name. Imports all files of this folder, and so Triton."""
    package = importlib.import_module(__package__)
    for module in pkgutil.walk_packages(package.__path__, f"{__package__}."):
        importlib.import_module(module.name)
    return dict(sorted(_DECLARED.items()))
