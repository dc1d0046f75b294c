"""KernelSpecs of the kernels that quantise to any MX format."""

from __future__ import annotations

from typing import Any

from ..device.codes import MODE_CEIL, MODE_EVEN, MODE_FLOOR, MODE_RCEIL
from ..device.mx_codes import FORMAT_E2M1, FORMAT_E2M3, FORMAT_E3M2, FORMAT_E5M2, column_tile, row_blocks
from ..kernel_spec import KernelSpec, Variant
from . import mx_formats

# dtype of values, mode, format, packed, block size
_ROWS = (
    ("bf16", MODE_RCEIL, FORMAT_E2M1, True, 32),
    ("fp32", MODE_FLOOR, FORMAT_E2M3, False, 32),
    ("fp16", MODE_EVEN, FORMAT_E3M2, False, 128),
    ("bf16", MODE_CEIL, FORMAT_E5M2, False, 16),
)
_BACK = _ROWS[:2]
_COLUMNS = (_ROWS[0], _ROWS[2])


def _quantize(mode: int, fmt: int, packed: bool, block: int) -> dict[str, Any]:
    return {"MODE": mode, **_dequantize(fmt, packed, block)}


def _dequantize(fmt: int, packed: bool, block: int) -> dict[str, Any]:
    return {"FORMAT": fmt, "PACKED": packed, "BLOCK": block}


MX_SPECS: tuple[KernelSpec, ...] = (
    KernelSpec(
        mx_formats.mx_quantize_rows_kernel,
        "x_ptr:*{TOKEN} elements_ptr:*u8 scale_ptr:*u8 num_blocks:i32",
        tuple(
            Variant({**_quantize(m, f, p, b), "BLOCKS": row_blocks(b)}, {"TOKEN": token}) for token, m, f, p, b in _ROWS
        ),
    ),
    KernelSpec(
        mx_formats.mx_dequantize_rows_kernel,
        "elements_ptr:*u8 scale_ptr:*u8 out_ptr:*{TOKEN} num_blocks:i32",
        tuple(
            Variant({**_dequantize(f, p, b), "BLOCKS": row_blocks(b)}, {"TOKEN": token}) for token, _, f, p, b in _BACK
        ),
    ),
    KernelSpec(
        mx_formats.mx_quantize_columns_kernel,
        "x_ptr:*{TOKEN} elements_ptr:*u8 scale_ptr:*u8 hidden:i32",
        tuple(
            Variant({**_quantize(m, f, p, b), **column_tile(b)}, {"TOKEN": token}, ("hidden",))
            for token, m, f, p, b in _COLUMNS
        ),
    ),
    KernelSpec(
        mx_formats.mx_dequantize_columns_kernel,
        "elements_ptr:*u8 scale_ptr:*u8 out_ptr:*{TOKEN} hidden:i32",
        tuple(
            Variant({**_dequantize(f, p, b), **column_tile(b)}, {"TOKEN": token}, ("hidden",))
            for token, _, f, p, b in _BACK
        ),
    ),
)
"""What they compile to."""
