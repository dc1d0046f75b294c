"""Public names of the element formats and scaling modes of MX blocks, which `ops` defines."""

from triton_ep.ops.element_formats import (
    ALL_FORMATS,
    BLOCK,
    E2M1,
    E2M1_PACKED,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    FORMATS,
    HIGH_PRECISION,
    ElemFormat,
    ScalingMode,
    check_high_precision,
    elem_format,
    fp8_dtype,
)

__all__ = [
    "ALL_FORMATS",
    "BLOCK",
    "E2M1",
    "E2M1_PACKED",
    "E2M3",
    "E3M2",
    "E4M3",
    "E5M2",
    "FORMATS",
    "HIGH_PRECISION",
    "ElemFormat",
    "ScalingMode",
    "check_high_precision",
    "elem_format",
    "fp8_dtype",
]
