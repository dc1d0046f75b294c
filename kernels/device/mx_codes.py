"""Element formats of MX kernels and their tiles, as plain integers, so the host can import them without Triton."""

from __future__ import annotations

# mxfp8.py, mx_formats.py: element formats. A boolean, E5M2, also selects between the first two.
FORMAT_E4M3 = 0
FORMAT_E5M2 = 1
FORMAT_E2M3 = 2
FORMAT_E3M2 = 3
FORMAT_E2M1 = 4


def row_blocks(block_size: int) -> int:
    """Blocks of a row tile on a GPU."""
    return 4096 // block_size


def column_tile(block_size: int) -> dict[str, int]:
    """BLOCK_H and STEPS of a column tile on a GPU."""
    return {"BLOCK_H": min(4096 // block_size, 128), "STEPS": 4}
