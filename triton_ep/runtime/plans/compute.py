"""Tile shapes and constexprs of the kernels that belong to no layer: MXFP8 and back, grouped GEMM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton_ep.runtime.plans.shape import Plan, next_power_of_2


def mx_blocks(num_blocks: int, interpreted: bool) -> int:
    """Blocks of 32 along rows that one program quantises."""
    if interpreted:
        return min(next_power_of_2(-(-num_blocks // 2)), 2048)
    return 128


def mx_columns(hidden: int, interpreted: bool) -> dict[str, int]:
    """BLOCK_H and STEPS of kernels over blocks of 32 rows."""
    if interpreted:
        return {"BLOCK_H": min(max(next_power_of_2(hidden), 32), 512), "STEPS": 2}
    return {"BLOCK_H": 128, "STEPS": 4}


def channel_blocks(interpreted: bool) -> int:
    """Blocks of 128 along rows that one program quantises."""
    return 256 if interpreted else 16


def quantize_channels(round_scale: bool, exponents: bool, interpreted: bool) -> Plan:
    """Quantise rows to e4m3 with a scale per 128 values; exponents: store only the exponents of power-of-two scales."""
    constexprs = {"ROUND": round_scale, "EXPONENTS": exponents, "BLOCKS": channel_blocks(interpreted)}
    return Plan("quantize_channels_kernel", constexprs)


@dataclass(frozen=True, order=True)
class Tile:
    """Tile of a grouped GEMM: rows, columns, step along the sum, number of steps in flight; warps of a program."""

    m: int
    n: int
    k: int
    stages: int
    warps: int = 8


BAND = 8
"""Number of tile rows that are computed together."""
LARGE = Tile(128, 256, 64, 4)
SMALL = Tile(64, 128, 64, 6)
PLAIN = Tile(128, 128, 64, 4)
"""Without TMA: addresses occupy the registers that a larger tile would need."""
WGRAD = Tile(128, 256, 64, 4)
WGRAD_ADDED = Tile(128, 128, 64, 4)
"""For adding to existing values, which take as many registers as the tile."""
EQUALIZE_ROWS = 32
HARDWARE_TILE = Tile(128, 128, 128, 3)
FP8_TILES = (Tile(16, 128, 128, 6, 4), Tile(32, 128, 128, 6, 4), Tile(64, 256, 128, 4))
"""For up to 16, 32 and more rows per expert: the fastest of ten at 8, 16, 32, 64 and 128 (one H200, N = 4096,
K = 7168)."""


def gemm_constexprs(num_experts: int, tile: Tile, tma: bool, k_major: bool) -> dict[str, Any]:
    """Constexprs of the grouped GEMM in bf16."""
    blocks = {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k}
    return {"TMA": tma, "K_MAJOR": k_major, **blocks, **_common(num_experts, tile)}


def wgrad_constexprs(num_experts: int, tile: Tile, tma: bool, accumulate: bool = False) -> dict[str, Any]:
    """Constexprs of the weight gradient of the grouped GEMM."""
    blocks = {"BLOCK_I": tile.m, "BLOCK_J": tile.n, "BLOCK_R": tile.k}
    return {"TMA": tma, "ACCUMULATE": accumulate, **blocks, **_common(num_experts, tile)}


def gemm_fp8_constexprs(num_experts: int, tile: Tile, tma: bool, hardware: bool) -> dict[str, Any]:
    """Constexprs of the grouped GEMM of MXFP8 operands, with equal scales along 128 or for tensor cores that scale."""
    blocks = {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k}
    return {"TMA": tma, "HARDWARE": hardware, **blocks, **_common(num_experts, tile)}


def _common(num_experts: int, tile: Tile) -> dict[str, int]:
    return {"EP": next_power_of_2(num_experts + 1), "BAND": BAND, "STAGES": tile.stages}
