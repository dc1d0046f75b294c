"""Tile shapes and constexprs of the backward pass of experts (kernels/experts)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triton_ep.kernels.device.codes import TILE_ROWS
from triton_ep.plans.compute import BAND, Tile
from triton_ep.plans.experts import ProductTile
from triton_ep.plans.shape import Plan, next_power_of_2

WGRAD = Tile(128, 256, 64, 4)
"""Rows and columns of a weight, and rows of its segment per step: what segments hold multiples of."""
WGRAD_INTERPRETED = Tile(64, 64, 64, 1)
WEIGHTED_ROWS, WEIGHTED_COLUMNS = 2, 1024
BIAS_ROWS, BIAS_COLUMNS = 32, 128
ROW_WEIGHTS, ROW_WEIGHTS_COLUMNS = 16, 256

DOWN_BF16 = ProductTile(128, 256, 64, 4)
DOWN_FP8 = ProductTile(64, 128, 128, 4, 4, per_sm=2, promote=True)
DOWN_FAST = ProductTile(128, 256, 128, 4)
DOWN_INTERPRETED = ProductTile(64, 64, 128, 1, promote=True)
DOWN_COLUMNS = 32
"""Of a tile on their way through the activation at once: more, and values spill."""


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


def down_tile(fp8: bool, fast: bool, interpreted: bool) -> ProductTile:
    """The tile for operands of one kind."""
    if interpreted:
        return DOWN_INTERPRETED
    return (DOWN_FAST if fast else DOWN_FP8) if fp8 else DOWN_BF16


def down_dgrad(tile: ProductTile, fp8: bool, k_major: bool, has_weights: bool, activation: Mapping[str, Any]) -> Plan:
    """Gradient of the rows of the second product and of the activation; activation: its constexprs."""
    constexprs = {
        "FP8": fp8,
        "PROMOTE": tile.promote,
        "K_MAJOR": k_major,
        "HAS_WEIGHTS": has_weights,
        **activation,
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "LEVELS": (tile.n // DOWN_COLUMNS).bit_length() - 1,
        "BAND": BAND,
        "STAGES": tile.stages,
        "FLATTEN": tile.flatten,
    }
    return Plan("down_dgrad_kernel", constexprs, tile.warps)


def row_weight_gradient(hidden: int, has_bias: bool, fp8: bool, interpreted: bool) -> Plan:
    """Gradient of the rows' weights from the shares of tiles, and of a bias."""
    rows, block = ROW_WEIGHTS, ROW_WEIGHTS_COLUMNS
    if interpreted:
        rows, block = TILE_ROWS, min(next_power_of_2(hidden), 256)
    constexprs = {"HAS_BIAS": has_bias, "FP8": fp8 and has_bias, "ROWS": rows, "BLOCK_H": block}
    return Plan("row_weight_gradient_kernel", constexprs)


def bias_gradient(n: int, has_weights: bool, interpreted: bool) -> Plan:
    """Sums of the rows of segments."""
    rows, block = (64, min(next_power_of_2(n), 256)) if interpreted else (BIAS_ROWS, BIAS_COLUMNS)
    return Plan("bias_gradient_kernel", {"HAS_WEIGHTS": has_weights, "BLOCK_R": rows, "BLOCK_N": block})


def weighted_rows(num_rows: int, hidden: int, mx: bool, offs: bool, interpreted: bool) -> Plan:
    """Gradients of a weighted sum of rows."""
    rows, block = WEIGHTED_ROWS, WEIGHTED_COLUMNS
    if interpreted:
        rows, block = min(next_power_of_2(-(-num_rows // 2)), 32), min(max(next_power_of_2(hidden), 32), 1024)
    constexprs = {"IS_MX": mx, "HAS_OFFS": offs, "ROWS": rows, "BLOCK_H": block}
    return Plan("weighted_rows_backward_kernel", constexprs)
