"""Element formats and scaling modes of MX blocks.

Source: OCP Microscaling Formats (MX) v1.0, table 1; the modes are explained in kernels/device/mxfp8.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum

import torch

from triton_ep.errors import InputError

BLOCK = 32
"""Values that share a scale in every format of the MX specification."""


class ScalingMode(StrEnum):
    """How a block's largest magnitude becomes its scale; a string of the same name serves as well."""

    RCEIL = "rceil"
    FLOOR = "floor"
    CEIL = "ceil"
    EVEN = "even"

    @classmethod
    def parse(cls, mode: ScalingMode | str | Enum) -> ScalingMode:
        """The mode that a string, in any case, or an enum of the same names means; InputError if none."""
        name = mode.name if isinstance(mode, Enum) else mode
        try:
            return cls(name.lower())
        except (AttributeError, ValueError):
            known = ", ".join(repr(each.value) for each in cls)
            raise InputError(f"scaling_mode is {mode!r}; choose one of {known}.") from None


@dataclass(frozen=True)
class ElemFormat:
    """A float format of MX elements.

    Attributes:
        name: as in the MX specification.
        dtype: torch's dtype of stored elements.
        max_pos: largest finite value.
        max_pow2: its exponent.
        mbits: explicit mantissa bits.
        nan: bits of the elements of a NaN block.
    """

    name: str
    dtype: torch.dtype
    max_pos: float
    max_pow2: int
    mbits: int
    nan: int


E4M3 = ElemFormat("e4m3", torch.float8_e4m3fn, 448.0, 8, 3, 0x7F)
E5M2 = ElemFormat("e5m2", torch.float8_e5m2, 57344.0, 15, 2, 0x7F)

FORMATS: dict[torch.dtype | str, ElemFormat] = {fmt.dtype: fmt for fmt in (E4M3, E5M2)}
"""By `elem_dtype`, as the public functions take it."""

HIGH_PRECISION = (torch.bfloat16, torch.float16, torch.float32)
"""What can be quantised, and what blocks can be turned back into."""


def elem_format(elem_dtype: torch.dtype | str) -> ElemFormat:
    """Format of an `elem_dtype`; InputError if there is none."""
    if elem_dtype not in FORMATS:
        known = ", ".join(str(each) for each in FORMATS)
        raise InputError(f"elem_dtype is {elem_dtype}; choose one of {known}.")
    return FORMATS[elem_dtype]


def check_high_precision(dtype: torch.dtype, what: str) -> None:
    """Refuse a dtype that is not one of HIGH_PRECISION; `what` names it in the message."""
    if dtype not in HIGH_PRECISION:
        known = ", ".join(str(each) for each in HIGH_PRECISION)
        raise InputError(f"{what} is {dtype}; MX blocks are made of and turned into {known}.")
