"""Tile shapes of the kernels that no layer owns: MXFP8 and back."""

from __future__ import annotations

from triton_ep.plans.shape import next_power_of_2


def mx_blocks(num_blocks: int, interpreted: bool) -> int:
    """Blocks of 32 that a program quantises along rows."""
    if interpreted:
        return min(next_power_of_2(-(-num_blocks // 2)), 2048)
    return 128


def mx_columns(hidden: int, interpreted: bool) -> dict[str, int]:
    """BLOCK_H and STEPS of kernels that go by blocks of 32 rows."""
    if interpreted:
        return {"BLOCK_H": min(max(next_power_of_2(hidden), 32), 512), "STEPS": 2}
    return {"BLOCK_H": 128, "STEPS": 4}
