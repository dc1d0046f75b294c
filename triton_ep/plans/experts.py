"""Tile shapes and constexprs of the experts' kernels (kernels/experts), and what call sites ask for."""

from __future__ import annotations

from typing import Any

from triton_ep.kernels.device.codes import TILE_ROWS
from triton_ep.plans.shape import next_power_of_2


def max_tiles(num_rows: int, num_experts: int) -> int:
    """Records that suffice for the tiles of `num_rows` rows in segments of any sizes."""
    return -(-num_rows // TILE_ROWS) + num_experts


def segments_power(num_experts: int) -> int:
    """SP: experts rounded up to a power of two."""
    return next_power_of_2(num_experts)


def row_scale_tile(k: int, interpreted: bool) -> dict[str, int]:
    """ROWS and BLOCKS of kernels that read whole rows of `k` values twice."""
    if interpreted:
        return {"ROWS": 32, "BLOCKS": min(next_power_of_2(k // 32), 16)}
    return {"ROWS": 4, "BLOCKS": 32}


def row_tile(k: int, interpreted: bool) -> dict[str, int]:
    """ROWS and BLOCK_K of kernels that read rows of `k` values once."""
    if interpreted:
        return {"ROWS": 32, "BLOCK_K": min(next_power_of_2(k), 512)}
    return {"ROWS": 4, "BLOCK_K": 1024}


def offsets_constexprs(has_offsets: bool) -> dict[str, Any]:
    """Constexprs of kernels that stop at the end of the last segment, where there are segments."""
    return {"HAS_OFFSETS": has_offsets}
