"""One compiled kernel as a call site asks for it, and its name in a library of compiled ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from triton_ep.kernels.device.codes import NVSHMEM
from triton_ep.runtime.plans.shape import Plan

WORD = 16
"""Pointers and integers that are multiples of it let the compiler use wider accesses."""


@dataclass(frozen=True)
class KernelRequest:
    """A plan, and what of the arguments decides machine code: what Triton's JIT specialises a kernel by.

    Attributes:
        kernel: name.
        constexprs: all of them; dtypes by Triton's names.
        types: of arguments whose declaration leaves the type open, or which have another: "*bf16", "tensordesc<..>".
        aligned: integer arguments that the kernel is specialised by and that are multiples of 16.
        ones: those that are 1, and hence no arguments of the compiled kernel.
        unaligned: pointers to addresses that are no multiples of 16.
        num_warps, maxnreg: None: as the kernel declares.
    """

    kernel: str
    constexprs: Mapping[str, Any]
    types: Mapping[str, str] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()
    ones: tuple[str, ...] = ()
    unaligned: tuple[str, ...] = ()
    num_warps: int | None = None
    maxnreg: int | None = None

    @classmethod
    def of(
        cls,
        plan: Plan,
        types: Mapping[str, str] | None = None,
        integers: Mapping[str, int] | None = None,
        unaligned: Sequence[str] = (),
    ) -> KernelRequest:
        """A plan with the types of arguments, and the integers that the kernel is specialised by."""
        numbers = {} if integers is None else integers
        return cls(
            plan.kernel,
            dict(plan.constexprs),
            {} if types is None else dict(types),
            tuple(sorted(name for name, value in numbers.items() if value % WORD == 0)),
            tuple(sorted(name for name, value in numbers.items() if value == 1)),
            tuple(sorted(unaligned)),
            plan.num_warps,
            plan.maxnreg,
        )

    @property
    def calls_nvshmem(self) -> bool:
        """True if this variant is linked with device code of NVSHMEM."""
        return self.constexprs.get("NETWORK") == NVSHMEM

    def as_dict(self) -> dict[str, Any]:
        """For JSON: sorted, and without what is empty."""
        values = {name: value for name, value in asdict(self).items() if value not in (None, {}, ())}
        return {
            name: dict(sorted(value.items())) if isinstance(value, dict) else _plain(value)
            for name, value in sorted(values.items())
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> KernelRequest:
        """What `as_dict` wrote; KeyError or TypeError for anything else."""
        lists = {name: tuple(values[name]) for name in ("aligned", "ones", "unaligned") if name in values}
        return cls(**{"constexprs": {}, **values, **lists})

    def text(self) -> str:
        """As JSON on one line."""
        return json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"))

    def signature(self) -> str:
        """Hash of all of it, 32 hexadecimal digits."""
        return hashlib.sha256(self.text().encode()).hexdigest()[:32]


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, tuple) else value
