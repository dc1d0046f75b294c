"""Tile shapes, constexprs and kernel requests of the experts' kernels (kernels/experts)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from triton_ep.kernels.device.codes import (
    ACT_GELU,
    ACT_OUT_BF16,
    ACT_OUT_MX,
    ACT_OUT_MX_BF16,
    ACT_RELU,
    ACT_RELU2,
    ACT_SILU,
    TILE_ROWS,
)
from triton_ep.runtime.plans.compute import BAND
from triton_ep.runtime.plans.request import KernelRequest
from triton_ep.runtime.plans.shape import Plan, next_power_of_2

KINDS = {"silu": ACT_SILU, "gelu": ACT_GELU, "relu": ACT_RELU, "relu2": ACT_RELU2}
"""Activations by name, with their numbers in kernels."""
ACT_OUT = {"bf16": ACT_OUT_BF16, "mx": ACT_OUT_MX, "mx_bf16": ACT_OUT_MX_BF16}
"""Output formats of the activation by name, with their numbers in the kernel."""


PREPARED, PREPARED_WARPS, PREPARED_REGISTERS = (128, 64), 4, 128
"""Rows and columns of a tile of weights to prepare. With this many registers four programs fit on a multiprocessor."""
PREPARED_STEPS = 4
"""Tiles per program, one below the other."""
MENDED = 32
"""Rows or columns that a program checks. With more, it rereads more unchanged ones; with fewer, more programs start."""
QUANTIZED_BLOCKS = 256
"""Most blocks of 32 in a row that a tile holds whole. Longer rows take steps; quantising then reads them twice."""
LEAST_BLOCKS = 128
"""Blocks per program that quantises: it takes several rows if they are shorter."""
REBASED_BLOCKS = 256
"""The same for a program that moves e4m3 elements, which are half as long."""
COPIED_COLUMNS = 8192
"""Values that a program of `row_tile` holds at once."""


def activation_constexprs(
    kind: str = "silu", gated: bool = True, limit: float | None = None, alpha: float = 1.0, up_offset: float = 0.0
) -> dict[str, Any]:
    """Constexprs of kernels that compute an activation or its gradients."""
    return {
        "KIND": KINDS[kind],
        "GATED": bool(gated),
        "CLAMP": limit is not None,
        "LIMIT": float(limit or 0.0),
        "ALPHA": float(alpha),
        "UP_OFFSET": float(up_offset),
    }


def max_tiles(num_rows: int, num_experts: int) -> int:
    """Number of records that suffices for the tiles of `num_rows` rows in segments of any sizes."""
    return -(-num_rows // TILE_ROWS) + num_experts


def segments_power(num_experts: int) -> int:
    """SP: experts rounded up to a power of two."""
    return next_power_of_2(num_experts)


@functools.cache
def quantized_tile(k: int, interpreted: bool, rebased: bool = False) -> dict[str, int]:
    """WHOLE, ROWS and BLOCKS of kernels that give rows of `k` values one scale; up to 8192, a tile holds whole rows.

    rebased: the rows are e4m3 already.
    """
    if interpreted:
        blocks = min(next_power_of_2(k // 32), 16)
        return {"WHOLE": k <= 32 * blocks, "ROWS": 128, "BLOCKS": blocks}
    blocks = max(next_power_of_2(k // 32), 32)
    if blocks > QUANTIZED_BLOCKS:
        return {"WHOLE": False, "ROWS": 4, "BLOCKS": 32}
    least = REBASED_BLOCKS if rebased else LEAST_BLOCKS
    return {"WHOLE": True, "ROWS": max(least // blocks, 1), "BLOCKS": blocks}


@functools.cache
def row_tile(k: int, interpreted: bool) -> dict[str, int]:
    """ROWS, BLOCK_K and DIRECT of the kernel that converts rows of `k` values back."""
    if interpreted:
        return {"ROWS": 128, "BLOCK_K": min(next_power_of_2(k), 512), "DIRECT": False}
    columns = min(max(next_power_of_2(k), 512), COPIED_COLUMNS)
    return {"ROWS": COPIED_COLUMNS // columns, "BLOCK_K": columns, "DIRECT": False}


@functools.cache
def dequantize_beside(interpreted: bool) -> Plan:
    """Plan that converts rows in use next to products of gradients of weights: a program fits on a multiprocessor that
    holds as many of those as it can (`BESIDE_PRODUCTS` in exchange.py)."""
    tile = row_tile(2048, interpreted) if interpreted else {"ROWS": 4, "BLOCK_K": 2048, "DIRECT": True}
    constexprs = offsets_constexprs(True) | tile
    return Plan("dequantize_rows_in_use_kernel", constexprs, 8, 80, side_by_side=True)


def offsets_constexprs(has_offsets: bool) -> dict[str, Any]:
    """Constexprs of kernels that, given offsets, stop at the end of the last segment."""
    return {"HAS_OFFSETS": has_offsets}


def maxima_tile(interpreted: bool) -> dict[str, int]:
    """BLOCK_N, BLOCK_K and loads in flight (STAGES) of the kernel that finds the largest weights."""
    return {"BLOCK_N": 128, "BLOCK_K": 128 if interpreted else 64, "STAGES": 1 if interpreted else 3}


def prepare_weights_plan(
    uses: dict[str, bool], check: bool, interpreted: bool, wide: bool = False
) -> tuple[Plan, tuple[int, int]]:
    """Plan that prepares weights in both forms, and the rows and columns that a program takes.

    uses: FPROP, DGRAD. check: start from the scales of existing copies. wide: weights are float32, which take twice the
    registers.
    """
    rows, columns = (128, 128) if interpreted else PREPARED
    steps = 2 if interpreted else PREPARED_STEPS
    tile = {"BLOCK_N": rows, "BLOCK_K": columns, "STEPS": steps}
    registers = None if interpreted or wide else PREPARED_REGISTERS
    plan = Plan("prepare_weights_kernel", {**uses, "CHECK": check, **tile}, PREPARED_WARPS, registers)
    return plan, (rows * steps, columns)


def mend_weights_plan(uses: dict[str, bool], interpreted: bool) -> Plan:
    """Plan that prepares again the rows and columns whose scales have changed. A program takes LINES of them."""
    return Plan("mend_weights_kernel", {**uses, "LINES": 128 if interpreted else MENDED, "STEP": 64})


# --- products ---------------------------------------------------------------------------------------------


class ProductTile(NamedTuple):
    """Tile of a product over segments of rows.

    Attributes:
        m, n, k: rows, columns, step along the sum. A gated first product has `n` columns of gate and `n` of up.
        stages: steps in flight.
        warps: warps of a program. per_sm: programs per multiprocessor.
        promote: add each step in float32, not in the tensor cores.
        swap: compute the transposed product, whose rows are those of the weights: for few rows.
        flatten: one loop over tiles and steps.
        table: tiles come from the tile table, else from the segments' offsets.
        split: sum the tile as two halves of its rows, one after the other: not both have a whole step's sum in
            registers, and a half without rows costs nothing. Programs share tiles (kernels/experts/turns.py).
            Requires TMA, `promote` and `table`.
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
    split: bool = False

    @property
    def box_rows(self) -> int:
        """Rows of a box, which are loaded at once."""
        return self.m // 2 if self.split else self.m

    def halved(self) -> ProductTile:
        """The tile for two matrices with half as many columns each."""
        return _halved(self)


@functools.cache
def _halved(tile: ProductTile) -> ProductTile:
    return tile._replace(n=tile.n // 2)


_BF16_FEW = ProductTile(64, 128, 64, 6, table=False)
_FP8_FEW = (
    (16, ProductTile(16, 128, 128, 4, 4, per_sm=2, promote=True, swap=True, table=False)),
    (32, ProductTile(32, 128, 128, 4, 4, per_sm=2, promote=True, swap=True, table=False)),
    (64, ProductTile(64, 256, 128, 4, 8, promote=True, swap=True, table=False)),
)
_FP8 = ProductTile(128, 128, 128, 3, 4, per_sm=2, promote=True, split=True)
_FP8_FAST = ProductTile(128, 256, 128, 3, 8, flatten=True)
_ANY = 2**31

PRODUCT_TILES: dict[str, dict[tuple[str, str], tuple[tuple[int, ProductTile], ...]]] = {
    "sm_90": {
        ("gate_up", "bf16"): ((64, _BF16_FEW), (_ANY, ProductTile(128, 256, 64, 4, flatten=True))),
        ("gate_up", "fp8"): (*_FP8_FEW, (_ANY, _FP8)),
        ("gate_up", "fast"): (*_FP8_FEW, (_ANY, _FP8_FAST._replace(flatten=False))),
        ("rows", "bf16"): ((64, _BF16_FEW), (_ANY, ProductTile(128, 256, 64, 3, flatten=True))),
        ("rows", "fp8"): (*_FP8_FEW, (_ANY, _FP8)),
        ("rows", "fast"): (*_FP8_FEW, (_ANY, _FP8_FAST)),
    }
}
"""By architecture, product and arithmetic: (most rows per expert, tile of one matrix) in ascending order. Fastest of
those tried on one H200 with 32 and 64 experts, K 7168 and 2048; other architectures use them until they are measured.
"""

PLAIN_TILES = {"bf16": ProductTile(128, 128, 64, 4), "fp8": ProductTile(64, 128, 128, 3, 4, promote=True)}
"""Without TMA: addresses occupy the registers that a larger tile would need."""

_INTERPRETED: tuple[tuple[int, ProductTile], ...] = (
    (16, ProductTile(16, 64, 128, 1, swap=True, promote=True, table=False)),
    (_ANY, ProductTile(128, 128, 128, 1, promote=True)),
)


def product_tile(
    product: str, arithmetic: str, rows_per_expert: int, arch: str | None, tma: bool, halves: int = 1
) -> ProductTile:
    """Tile of a product.

    Arguments:
        product: "gate_up" or "rows".
        arithmetic: "bf16", "fp8", or "fast": e4m3 summed in the tensor cores.
        rows_per_expert: the mean, as far as the host knows it.
        arch: such as "sm_90"; None: the interpreter.
        halves: matrices of the first product: 2 if gated.
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
    """Constexprs common to both products."""
    return {
        "TMA": tma,
        "TABLE": tile.table,
        "SP": 1 if tile.table else segments_power(num_experts),
        "SCALED": scaled,
        "PROMOTE": tile.promote,
        "SWAP": tile.swap,
        "FLATTEN": tile.flatten,
        "SPLIT": tile.split,
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "BAND": BAND,
        "STAGES": tile.stages,
    }


def most_programs(tile: ProductTile, num_rows: int, num_experts: int, columns: int) -> int:
    """Largest possible number of tiles."""
    rows = (
        max_tiles(num_rows, num_experts) * (TILE_ROWS // tile.m) if tile.table else -(-num_rows // tile.m) + num_experts
    )
    return rows * -(-columns // tile.n)


@functools.cache
def gate_up_plan(
    tile: ProductTile,
    num_experts: int,
    tma: bool,
    scaled: bool,
    has: tuple[bool, bool, bool],
    act: str,
    activation: tuple[Any, ...],
) -> Plan:
    """Plan of the first product. has: bias, row weights, product kept. activation: arguments of
    `activation_constexprs`."""
    options: dict[str, Any] = dict(zip(("HAS_BIAS", "HAS_WEIGHTS", "HAS_PRE"), has, strict=True))
    options |= {"OUT": ACT_OUT[act], **activation_constexprs(*activation)}
    return Plan("gate_up_kernel", {**tile_constexprs(tile, num_experts, tma, scaled), **options}, tile.warps)


@functools.cache
def rows_plan(
    tile: ProductTile,
    num_experts: int,
    tma: bool,
    scaled: bool,
    k_major: bool,
    aligned: bool,
    has: tuple[bool, bool],
    zero_rest: bool = False,
) -> Plan:
    """Plan of the other products of rows.

    aligned: results, in bf16, may be stored in boxes. has: bias, row weights of the bias. zero_rest: zero the rows past
    the last segment.
    """
    box_stores = tma and aligned and tile.table and tile.m == TILE_ROWS
    options = {"BOX_STORES": box_stores, "K_MAJOR": k_major, "HAS_BIAS": has[0], "HAS_WEIGHTS": all(has)}
    options["ZERO_REST"] = zero_rest
    return Plan("rows_product_kernel", {**tile_constexprs(tile, num_experts, tma, scaled), **options}, tile.warps)


# --- requests for an ahead-of-time library ----------------------------------------------------------------------


def experts(
    experts_per_rank: int,
    arithmetic: tuple[str, ...] = ("bf16", "fp8"),
    training: tuple[bool, ...] = (True, False),
    few_rows: tuple[bool, ...] = (False,),
    weights: tuple[bool, ...] = (True,),
    aligned: tuple[bool, ...] = (True,),
    bias: str | None = None,
    exact: bool = False,
    tma: bool = True,
    kind: str = "silu",
    gated: bool = True,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    arch: str = "sm_90",
) -> list[KernelRequest]:
    """The experts of a MoE layer, forward and the gradients of rows, for sizes that are multiples of 64.

    Arguments:
        arithmetic: "bf16"; "fp8" and "fast": MXFP8 with row scales, summed in float32 or in tensor cores.
        training: keep the first product for the backward pass (True), or not.
        few_rows: 64 rows per expert or fewer (True), or more (False).
        weights: rows have weights. aligned: segments are multiples of 128 rows.
        bias: dtype of biases, "bf16" or "fp32"; None: no biases.
        exact: include the activation as MXFP8 in bf16.
        tma: read operands in boxes (True), or by addresses, for operands that fit no box.
        kind, gated, limit, alpha, up_offset: the activation.
        arch: architecture of the tiles.
    """
    activation = (kind, gated, limit, alpha, up_offset)
    found = [KernelRequest("tile_table_kernel", {"SP": segments_power(experts_per_rank)})]
    for how in arithmetic:
        rows_of = {few: 1 if few else TILE_ROWS for few in few_rows}
        for few, mean in rows_of.items():
            means = [16, 32, 64] if few and how != "bf16" else [mean]
            for rows in means:
                acts = ["mx"] if how != "bf16" else ["bf16", "mx_bf16"] if exact else ["bf16"]
                tile = product_tile("gate_up", how, rows, arch, tma, 2 if gated else 1)
                for act in acts:
                    for pre in training:
                        for weighted in weights:
                            has = (bias is not None, weighted, pre)
                            found.append(_gate_up(tile, experts_per_rank, tma, how, has, act, activation, bias))
                tile = product_tile("rows", how, rows, arch, tma)
                majors = [True, False] if how == "bf16" and any(training) else [True]
                for k_major in majors:
                    for whole in aligned:
                        # A gradient of rows has no bias; bf16 reads weights without K_MAJOR, FP8 transposed copies.
                        back = how != "bf16" and any(training)
                        for given in {bias if k_major else None, *([None] if back else [])}:
                            found.append(_rows(tile, experts_per_rank, tma, how, k_major, whole, given, any(weights)))
    if set(arithmetic) - {"bf16"}:
        found += _row_scales(training)
    return found


def _gate_up(
    tile: ProductTile,
    experts: int,
    tma: bool,
    how: str,
    has: tuple[bool, bool, bool],
    act: str,
    activation: tuple[Any, ...],
    bias: str | None,
) -> KernelRequest:
    plan = gate_up_plan(tile, experts, tma, how != "bf16", has, act, activation)
    scaled, halves = how != "bf16", 2 if plan.constexprs["GATED"] else 1
    element = "fp8e4nv" if scaled else "bf16"
    types = {
        "x": _operand(element, tma, tile.box_rows, tile.k),
        "w": _operand(element, tma, halves, tile.n, tile.k),
        "x_scale_ptr": "*fp32" if scaled else "*i32",
        "w_scale_ptr": "*fp32" if scaled else "*i32",
        "bias_ptr": f"*{bias}" if bias else "*i32",
        "row_weights_ptr": "*fp32" if has[1] else "*i32",
        "act_ptr": "*fp8e4nv" if act == "mx" else "*bf16",
        "act_scale_ptr": "*u8" if act == "mx" else "*i32",
        "pre_ptr": "*bf16" if has[2] else "*i32",
    }
    return KernelRequest(plan.kernel, plan.constexprs, types, ("f", "k"), num_warps=plan.num_warps)


def _operand(element: str, tma: bool, *box: int) -> str:
    return f"tensordesc<{element}[{','.join(map(str, box))}]>" if tma else f"*{element}"


def _rows(
    tile: ProductTile,
    experts: int,
    tma: bool,
    how: str,
    k_major: bool,
    aligned: bool,
    bias: str | None,
    weighted: bool,
    out: str = "bf16",
    zero_rest: bool = False,
) -> KernelRequest:
    scaled = how != "bf16"
    element = "fp8e4nv" if scaled else "bf16"
    has = (bias is not None, weighted)
    plan = rows_plan(tile, experts, tma, scaled, k_major, aligned, has, zero_rest)
    types = {
        "a": _operand(element, tma, tile.box_rows, tile.k),
        "w": _operand(element, tma, *((tile.n, tile.k) if k_major else (tile.k, tile.n))),
        "out": f"tensordesc<bf16[{tile.box_rows},{tile.n // 2}]>" if plan.constexprs["BOX_STORES"] else f"*{out}",
        "out_ptr": f"*{out}",
        "x_scale_ptr": "*fp32" if scaled else "*i32",
        "w_scale_ptr": "*fp32" if scaled else "*i32",
        "bias_ptr": f"*{bias}" if bias else "*i32",
        "row_weights_ptr": "*fp32" if bias and weighted else "*i32",
    }
    return KernelRequest(plan.kernel, plan.constexprs, types, ("k", "n", "stride_om"), num_warps=plan.num_warps)


def products_with_row_scales(experts_per_rank: int, out: str, tma: bool, arch: str = "sm_90") -> list[KernelRequest]:
    """Products of MXFP8 rows and weights with one scale per row, over segments of any size; rows past them become zero.

    out: dtype of the results. tma: read operands in boxes. arch: architecture of the tiles.
    """
    tiles = {product_tile("rows", "fp8", mean, arch, tma) for mean in (16, 32, 64, TILE_ROWS)}
    return [
        _rows(tile, experts_per_rank, tma, "fp8", True, False, None, False, out, zero_rest=True)
        for tile in sorted(tiles, key=repr)
    ]


def rebased_rows(has_offsets: bool) -> list[KernelRequest]:
    """Moving MXFP8 rows to one scale each: the rows in use, or all rows."""
    types = {"offs_ptr": "*i32" if has_offsets else "*fp8e4nv"}
    sizes = (1024, 2048, 4096, 8192, 16384)
    tiles = [quantized_tile(k, interpreted=False, rebased=True) for k in sizes]
    return [KernelRequest("rebase_rows_kernel", offsets_constexprs(has_offsets) | t, types, ("k",)) for t in tiles]


def _row_scales(training: tuple[bool, ...]) -> list[KernelRequest]:
    """Kernels that quantise to row scales and back: rows in use, and whole weights."""
    found = rebased_rows(has_offsets=True)
    for k in (1024, 2048, 4096, 8192, 16384):
        constexprs = offsets_constexprs(True) | quantized_tile(k, interpreted=False)
        types = {"x_ptr": "*bf16", "offs_ptr": "*i32"}
        found.append(KernelRequest("quantize_to_rows_kernel", constexprs, types, ("k",)))
    if any(training):
        for k in (512, 1024, 2048, 4096, 8192):
            back = offsets_constexprs(True) | row_tile(k, interpreted=False)
            types = {"offs_ptr": "*i32", "out_ptr": "*bf16"}
            found.append(KernelRequest("dequantize_rows_in_use_kernel", back, types, ("k", "stride_em")))
        found.append(KernelRequest.of(dequantize_beside(interpreted=False), types, {"k": 16, "stride_em": 16}))
        for fprop, dgrad in ((True, True), (True, False), (False, True)):
            maxima = {"ROWS": fprop, "COLUMNS": dgrad, **maxima_tile(interpreted=False)}
            found.append(_of_weights(Plan("weight_maxima_kernel", maxima)))
            uses = {"FPROP": fprop, "DGRAD": dgrad}
            for check in (False, True):
                found.append(_of_weights(prepare_weights_plan(uses, check, interpreted=False)[0]))
            found.append(_of_weights(mend_weights_plan(uses, interpreted=False)))
    return found


def _of_weights(plan: Plan) -> KernelRequest:
    types = {"w_ptr": "*bf16"}
    return KernelRequest(
        plan.kernel, plan.constexprs, types, ("k", "n"), num_warps=plan.num_warps, maxnreg=plan.maxnreg
    )
