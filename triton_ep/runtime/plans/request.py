"""A call site's request for a compiled kernel, and its name in a library of compiled kernels."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from triton_ep.kernels.device.codes import NVSHMEM
from triton_ep.runtime.plans.shape import Plan

WORD = 16
"""Pointers and integers that are multiples of WORD let the compiler use wider accesses."""


@dataclass(frozen=True)
class KernelRequest:
    """A plan, and the properties of arguments that decide machine code, by which Triton's JIT specialises a kernel.

    Attributes:
        kernel: name.
        constexprs: all of them; dtypes by Triton's names.
        types: types of arguments whose declaration leaves the type open or differs: "*bf16", "tensordesc<..>".
        aligned: integer arguments that the kernel is specialised by and that are multiples of 16.
        ones: integer arguments that it is specialised by and that are 1: the compiled kernel does not take them.
        unaligned: pointers to addresses that are no multiples of 16.
        num_warps, maxnreg: None: as the kernel declares.
        side_by_side: as in `Plan`; None: no.
    """

    kernel: str
    constexprs: Mapping[str, Any]
    types: Mapping[str, str] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()
    ones: tuple[str, ...] = ()
    unaligned: tuple[str, ...] = ()
    num_warps: int | None = None
    maxnreg: int | None = None
    side_by_side: bool | None = None

    @classmethod
    def of(
        cls,
        plan: Plan,
        types: Mapping[str, str] | None = None,
        integers: Mapping[str, int] | None = None,
        unaligned: Sequence[str] = (),
    ) -> KernelRequest:
        """The request of a plan with these types of arguments, and these integers that the kernel is specialised by."""
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
            plan.side_by_side or None,
        )

    @property
    def calls_nvshmem(self) -> bool:
        """True if this variant is linked with device code of NVSHMEM."""
        return self.constexprs.get("NETWORK") == NVSHMEM

    def as_dict(self) -> dict[str, Any]:
        """The request for JSON: sorted, without empty fields."""
        values = {name: value for name, value in asdict(self).items() if value not in (None, {}, ())}
        return {
            name: dict(sorted(value.items())) if isinstance(value, dict) else _plain(value)
            for name, value in sorted(values.items())
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> KernelRequest:
        """Inverse of `as_dict`; KeyError or TypeError for other values."""
        lists = {name: tuple(values[name]) for name in ("aligned", "ones", "unaligned") if name in values}
        return cls(**{"constexprs": {}, **values, **lists})

    def text(self) -> str:
        """The request as JSON on one line."""
        return json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"))

    def signature(self) -> str:
        """Hash of the request, 32 hexadecimal digits."""
        return hashlib.sha256(self.text().encode()).hexdigest()[:32]


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, tuple) else value
