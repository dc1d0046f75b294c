"""Tile shapes and constexprs of the experts' kernels (kernels/experts), and what call sites ask for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from triton_ep.kernels.device.codes import TILE_ROWS
from triton_ep.plans.compute import BAND
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


def maxima_tile(interpreted: bool) -> dict[str, int]:
    """BLOCK_N and BLOCK_K of the kernel that looks for the largest weights."""
    return {"BLOCK_N": 128, "BLOCK_K": 128 if interpreted else 64}


def prepare_tile(interpreted: bool) -> dict[str, int]:
    """BLOCK_N and BLOCK_K of the kernel that writes weights in both forms."""
    return {"BLOCK_N": 128, "BLOCK_K": 128 if interpreted else 64}


# --- products ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class ProductTile:
    """Tile of a product over segments of rows.

    Attributes:
        m, n, k: rows, columns, step along the sum. Of a gated first product, `n` columns of gate and as many of up.
        stages: steps in flight.
        warps: of a program. per_sm: programs on a multiprocessor.
        promote: each step is added in float32, not by the tensor cores.
        swap: the weights' rows are the rows of the product: for few rows.
        flatten: one loop over tiles and steps.
        table: tiles come from the tile table, else from the segments' offsets.
    """

    m: int
    n: int
    k: int
    stages: int
    warps: int = 8
    per_sm: int = 1
    promote: bool = False
    swap: bool = False
    flatten: bool = False
    table: bool = True

    def halved(self) -> ProductTile:
        """For two matrices of half as many columns each."""
        return replace(self, n=self.n // 2)


_BF16_FEW = ProductTile(64, 128, 64, 6, table=False)
_FP8_FEW = (
    (16, ProductTile(16, 128, 128, 6, 4, promote=True, swap=True, table=False)),
    (32, ProductTile(32, 128, 128, 6, 4, promote=True, swap=True, table=False)),
    (64, ProductTile(64, 256, 128, 4, 8, promote=True, swap=True, table=False)),
)
_FP8 = ProductTile(64, 128, 128, 4, 4, per_sm=2, promote=True)
_FP8_FAST = ProductTile(128, 256, 128, 3, 8, flatten=True)
_ANY = 2**31

PRODUCT_TILES: dict[str, dict[tuple[str, str], tuple[tuple[int, ProductTile], ...]]] = {
    "sm_90": {
        ("gate_up", "bf16"): ((64, _BF16_FEW), (_ANY, ProductTile(128, 256, 64, 4))),
        ("gate_up", "fp8"): (*_FP8_FEW, (_ANY, _FP8)),
        ("gate_up", "fast"): (*_FP8_FEW, (_ANY, _FP8_FAST)),
        ("rows", "bf16"): ((64, _BF16_FEW), (_ANY, ProductTile(128, 256, 64, 3, flatten=True))),
        ("rows", "fp8"): (*_FP8_FEW, (_ANY, _FP8)),
        ("rows", "fast"): (*_FP8_FEW, (_ANY, _FP8_FAST)),
    }
}
"""By architecture, product and arithmetic: up to how many rows per expert which tile, of one matrix. Fastest of those
tried on one H200 with 32 and 64 experts, K 7168 and 2048; other architectures take the same until they are measured."""

PLAIN_TILES = {"bf16": ProductTile(128, 128, 64, 4), "fp8": ProductTile(64, 128, 128, 3, 4, promote=True)}
"""Without TMA: addresses take the registers that a larger tile would need."""

_INTERPRETED = (
    (16, ProductTile(16, 64, 128, 1, swap=True, promote=True, table=False)),
    (_ANY, ProductTile(64, 128, 128, 1, promote=True)),
)


def product_tile(
    product: str, arithmetic: str, rows_per_expert: int, arch: str | None, tma: bool, halves: int = 1
) -> ProductTile:
    """Tile of a product.

    Arguments:
        product: "gate_up" or "rows".
        arithmetic: "bf16", "fp8", or "fast" for e4m3 that tensor cores add up themselves.
        rows_per_expert: mean, as far as the host knows it.
        arch: "sm_90"; None: the interpreter.
        halves: matrices of the first product.
    """
    if arch is None:
        choices = _INTERPRETED
    elif tma:
        choices = PRODUCT_TILES.get(arch, PRODUCT_TILES["sm_90"])[product, arithmetic]
    else:
        choices = ((_ANY, PLAIN_TILES["bf16" if arithmetic == "bf16" else "fp8"]),)
    tile = next(tile for most, tile in choices if rows_per_expert <= most)
    return tile if halves == 1 else tile.halved()


def tile_constexprs(tile: ProductTile, num_experts: int, tma: bool, scaled: bool) -> dict[str, Any]:
    """Constexprs that both products have."""
    return {
        "TMA": tma,
        "TABLE": tile.table,
        "SP": 1 if tile.table else segments_power(num_experts),
        "SCALED": scaled,
        "PROMOTE": tile.promote,
        "SWAP": tile.swap,
        "FLATTEN": tile.flatten,
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "BAND": BAND,
        "STAGES": tile.stages,
    }


def most_programs(tile: ProductTile, num_rows: int, num_experts: int, columns: int) -> int:
    """Tiles that there can be at most."""
    rows = (
        max_tiles(num_rows, num_experts) * (TILE_ROWS // tile.m) if tile.table else -(-num_rows // tile.m) + num_experts
    )
    return rows * -(-columns // tile.n)
