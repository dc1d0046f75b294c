"""How a kernel is declared: one decorator, in the file of the kernel. Launches, builds and checks read the declaration.

    @ep_kernel(x_ptr="*{WORD}", addrs_ptr="*i64", specialised=("row_words",), num_warps=16)
    def push_kernel(x_ptr, addrs_ptr, state_ptr, num_rows, row_words, BLOCK: tl.constexpr): ...

The signature gives names and order; the decorator adds what a signature cannot say. Types are Triton's: "*i64" is a
pointer, "{WORD}" a type that each launch decides: the dtype of rows, of expert ids, or what an operand is.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import triton

_COMMON = {"state_ptr": "*i64", "tables_ptr": "*i64", "placement_ptr": "*i32"}
"""Types of pointers that mean the same in every kernel."""


@dataclass(frozen=True)
class Variant:
    """One choice of types and constexprs of a kernel.

    Attributes:
        constexprs: all of them; dtypes by Triton's names ("fp32").
        types: of the letters in the declaration, without braces.
        aligned: specialised integers that are multiples of 16.
    """

    constexprs: Mapping[str, Any]
    types: Mapping[str, str] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()


@dataclass(frozen=True)
class KernelSpec:
    """A declared kernel.

    Attributes:
        name: of the function.
        kernel: the `triton.jit` function.
        arguments: type of every run-time argument, in order; pointers and operands come before integers.
        constexprs: names of its compile-time arguments.
        specialised: integers that the compiler may know to be 1, or multiples of 16.
        num_warps: warps of a program on a GPU; None: the plan of each call site chooses them.
        maxnreg: registers of a thread at most, so that programs of other kernels fit beside it; None: as many as the
            compiler likes, or as the plan says.
        variants: what is built ahead of time besides what plans ask for.
    """

    name: str
    kernel: Any
    arguments: Mapping[str, str]
    constexprs: tuple[str, ...]
    specialised: tuple[str, ...]
    num_warps: int | None
    maxnreg: int | None
    variants: tuple[Variant, ...]

    @property
    def moves_rows(self) -> bool:
        """True if it takes rows of tokens."""
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
    """Declare the decorated function as a kernel, and compile it by `triton.jit`.

    Arguments:
        specialised, num_warps, maxnreg, variants: as in `KernelSpec`.
        types: of pointers and operands, by name. What is named neither here nor in `_COMMON` is an integer: "i32".

    Raises:
        TypeError: a type or a specialised integer is no argument, a pointer has no type, or comes behind an integer.
    """

    def declare(function: Callable[..., Any]) -> Any:
        parameters = inspect.signature(function).parameters.values()
        constexprs = tuple(p.name for p in parameters if "constexpr" in str(p.annotation))
        known = _COMMON | types
        arguments = {p.name: known.get(p.name, "i32") for p in parameters if p.name not in constexprs}
        integers = [name for name, kind in arguments.items() if kind == "i32"]
        name = function.__name__
        if unknown := sorted({*types, *specialised} - set(arguments)):
            raise TypeError(f"{name} has no run-time arguments {unknown}; it has {list(arguments)}.")
        if untyped := [argument for argument in integers if argument.endswith("_ptr")]:
            raise TypeError(f"{name}: {untyped} are declared without a type.")
        if list(arguments)[len(arguments) - len(integers) :] != integers:
            raise TypeError(f"{name}: pointers come before the integers {integers}.")
        jit = triton.jit(do_not_specialize=[argument for argument in integers if argument not in specialised])
        _DECLARED[name] = KernelSpec(
            name, jit(function), arguments, constexprs, specialised, num_warps, maxnreg, variants
        )
        return _DECLARED[name].kernel

    return declare


@functools.cache
def all_kernels() -> Mapping[str, KernelSpec]:
    """Every kernel of the package by its name. Imports all files of this folder, and so Triton."""
    package = importlib.import_module(__package__)
    for module in pkgutil.walk_packages(package.__path__, f"{__package__}."):
        importlib.import_module(module.name)
    return dict(sorted(_DECLARED.items()))
