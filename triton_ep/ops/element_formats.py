"""Element formats and scaling modes of MX blocks.

Source: OCP Microscaling Formats (MX) v1.0, table 1; the modes are explained in kernels/device/mxfp8.py.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from enum import Enum, StrEnum

import torch

from triton_ep.errors import InputError

BLOCK = 32
"""Number of values that share a scale, in every format of the MX specification."""


class ScalingMode(StrEnum):
    """How a block's largest magnitude becomes its scale; functions also take a string of the same name."""

    RCEIL = "rceil"
    FLOOR = "floor"
    CEIL = "ceil"
    EVEN = "even"

    @classmethod
    def parse(cls, mode: ScalingMode | str | Enum) -> ScalingMode:
        """The mode named by a string (in any case) or by another enum of the same names; InputError if none."""
        if isinstance(mode, cls):
            return mode
        name = mode.name if isinstance(mode, Enum) else mode
        try:
            return cls(name.lower())
        except (AttributeError, ValueError):
            known = ", ".join(repr(each.value) for each in cls)
            raise InputError(f"scaling_mode is {mode!r}; choose one of {known}.") from None


@dataclass(frozen=True)
class ElemFormat:
    """A float format of MX elements: 1 sign bit, exponent bits, `mbits` mantissa bits; no infinity.

    Attributes:
        name: short name, which `elem_format` takes as well as `dtype`.
        dtype: `elem_dtype` of an MXTensor: torch's dtype, or a name if torch has none.
        storage: dtype of the tensor that holds elements.
        bits: bits of an element; fewer than 8 are the low bits of a byte whose other bits are zero.
        per_byte: elements in a byte: 2 in packed fp4, the even one in the low bits; 1 otherwise.
        max_pos: largest finite value.
        max_pow2: exponent of `max_pos`.
        mbits: explicit mantissa bits.
        min_exponent: exponent of the smallest normal value.
        nan: bits of the elements of a NaN block: a NaN, or the largest element if the format has no NaN.
    """

    name: str
    dtype: torch.dtype | str
    storage: torch.dtype
    bits: int
    per_byte: int
    max_pos: float
    max_pow2: int
    mbits: int
    min_exponent: int
    nan: int


E4M3 = ElemFormat("e4m3", torch.float8_e4m3fn, torch.float8_e4m3fn, 8, 1, 448.0, 8, 3, -6, 0x7F)
E5M2 = ElemFormat("e5m2", torch.float8_e5m2, torch.float8_e5m2, 8, 1, 57344.0, 15, 2, -14, 0x7F)
E2M3 = ElemFormat("e2m3", "fp6_e2m3", torch.uint8, 6, 1, 7.5, 2, 3, 0, 0x1F)
E3M2 = ElemFormat("e3m2", "fp6_e3m2", torch.uint8, 6, 1, 28.0, 4, 2, -2, 0x1F)
E2M1 = ElemFormat("e2m1", "fp4_e2m1", torch.uint8, 4, 1, 6.0, 2, 1, 0, 0x7)
E2M1_PACKED = ElemFormat("e2m1_x2", torch.float4_e2m1fn_x2, torch.uint8, 4, 2, 6.0, 2, 1, 0, 0x7)

ALL_FORMATS = (E4M3, E5M2, E2M3, E3M2, E2M1, E2M1_PACKED)
"""All formats, widest first."""

FORMATS: dict[torch.dtype | str, ElemFormat] = {fmt.dtype: fmt for fmt in ALL_FORMATS}
"""Formats by `elem_dtype`, as the public functions take it."""

_BY_NAME = {name: fmt for fmt in ALL_FORMATS for name in (fmt.name, str(fmt.dtype), f"fp{fmt.bits}_{fmt.name}")}

HIGH_PRECISION = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that can be quantised, and dequantised to."""


def elem_format(elem_dtype: torch.dtype | str) -> ElemFormat:
    """Format of an `elem_dtype` or of a format's name; InputError if unknown."""
    found = FORMATS.get(elem_dtype) or (_BY_NAME.get(elem_dtype) if isinstance(elem_dtype, str) else None)
    if found is None:
        known = ", ".join(repr(each) for each in FORMATS)
        raise InputError(f"elem_dtype is {elem_dtype}; choose one of {known}.")
    return found


def fp8_dtype(elem_dtype: torch.dtype | str) -> torch.dtype:
    """The float8 dtype of an `elem_dtype`; InputError if its elements are narrower, or it is unknown."""
    fmt = elem_format(elem_dtype)
    if not isinstance(fmt.dtype, torch.dtype) or fmt.bits != 8:
        raise InputError(f"elem_dtype is {elem_dtype}; MXFP8 has {E4M3.dtype} and {E5M2.dtype}.")
    return fmt.dtype


def check_high_precision(dtype: torch.dtype, what: str) -> None:
    """Raise InputError unless `dtype` is in HIGH_PRECISION; `what` names it in the message."""
    if dtype not in HIGH_PRECISION:
        known = ", ".join(str(each) for each in HIGH_PRECISION)
        raise InputError(f"{what} is {dtype}; MX blocks are quantised from and dequantised to {known}.")


class MXOperand(torch.Tensor):
    """Interface of MX blocks for launchers: the attributes of `mx.tensor.MXTensor` that launchers read.

    Attributes:
        qdata: elements; of dtype `elem_dtype` if that is a float8.
        scale: float8_e8m0fnu, one per `block_size` values along `block_dim`.
        elem_dtype: as in `FORMATS`.
        block_dim: dimension along which blocks lie, counted from the end.
    """

    qdata: torch.Tensor
    scale: torch.Tensor
    elem_dtype: torch.dtype | str
    block_size: int
    block_dim: int

    @abstractmethod
    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values in `dtype`; None: in the dtype of the tensor."""
