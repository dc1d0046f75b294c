"""Tile shapes and constexprs of the backward pass of experts (kernels/experts)."""

from __future__ import annotations

from triton_ep.plans.compute import BAND, Tile
from triton_ep.plans.shape import Plan, next_power_of_2

WGRAD = Tile(128, 256, 64, 4)
"""Rows and columns of a weight, and rows of its segment per step: what segments hold multiples of."""
WGRAD_INTERPRETED = Tile(64, 64, 64, 1)
WEIGHTED_ROWS, WEIGHTED_COLUMNS = 2, 1024


def weight_gradient(num_experts: int, accumulate: bool, interpreted: bool) -> tuple[Plan, Tile]:
    """Gradient of the weights of segments of whole tiles, and the tile."""
    tile = WGRAD_INTERPRETED if interpreted else WGRAD
    constexprs = {
        "ACCUMULATE": accumulate,
        "EP": next_power_of_2(num_experts),
        "BLOCK_I": tile.m,
        "BLOCK_J": tile.n,
        "BLOCK_R": tile.k,
        "BAND": BAND,
        "STAGES": tile.stages,
    }
    return Plan("weight_gradient_kernel", constexprs, tile.warps), tile


def weighted_rows(num_rows: int, hidden: int, mx: bool, offs: bool, interpreted: bool) -> Plan:
    """Gradients of a weighted sum of rows."""
    rows, block = WEIGHTED_ROWS, WEIGHTED_COLUMNS
    if interpreted:
        rows, block = min(next_power_of_2(-(-num_rows // 2)), 32), min(max(next_power_of_2(hidden), 32), 1024)
    constexprs = {"IS_MX": mx, "HAS_OFFS": offs, "ROWS": rows, "BLOCK_H": block}
    return Plan("weighted_rows_backward_kernel", constexprs)
