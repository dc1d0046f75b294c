"""What a KernelSpec is. The specs themselves are in spec.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .device.transport import NVSHMEM


@dataclass(frozen=True)
class Variant:
    """One choice of dtypes and constexprs of a kernel."""

    constexprs: Mapping[str, Any]
    types: Mapping[str, str] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()
    """Integer arguments known to be multiples of 16."""
    num_warps: int | None = None
    """Warps of a program, where it is not the number of the spec."""


@dataclass(frozen=True)
class KernelSpec:
    """A kernel, its run-time arguments in order, and the variants that the compile gate builds.

    Attributes:
        kernel: the `triton.jit` function.
        args: "name:type" of every run-time argument, in order, separated by spaces.
        num_warps: warps of a program on a GPU, unless a variant has its own.
        maxnreg: registers of a thread at most, so that programs of other kernels fit beside it; None: as many as
            the compiler likes.
        variants: what the compile gate builds.
    """

    kernel: Any
    args: str
    variants: tuple[Variant, ...]
    num_warps: int = 4
    maxnreg: int | None = None

    @cached_property
    def name(self) -> str:
        """Name of the kernel function."""
        return str(self.kernel.__name__)

    @cached_property
    def arguments(self) -> dict[str, str]:
        """Type of every run-time argument, in order."""
        return dict(item.split(":") for item in self.args.split())

    @cached_property
    def specialised(self) -> tuple[str, ...]:
        """Integer arguments that the compiler may know to be 1, or multiples of 16."""
        open_to_it = {p.name for p in self.kernel.params if not p.is_constexpr and not p.do_not_specialize}
        return tuple(name for name, kind in self.arguments.items() if name in open_to_it and kind[0] not in "*{")

    @property
    def may_use_network(self) -> bool:
        """True if a variant of it calls NVSHMEM."""
        return any(uses_nvshmem(v.constexprs) for v in self.variants)


def uses_nvshmem(constexprs: Mapping[str, Any]) -> bool:
    """True if a kernel with these constexprs calls NVSHMEM functions."""
    return constexprs.get("NETWORK") == NVSHMEM.value
