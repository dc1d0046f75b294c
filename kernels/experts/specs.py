"""KernelSpecs of the experts' kernels. With TMA operands are descriptors, whose types name the boxes."""

from __future__ import annotations

from typing import Any

from ..kernel_spec import KernelSpec, Variant
from . import gate_up, prepare, row_scales, rows_product, tiles

_ROW_SCALE_TILE = {"ROWS": 4, "BLOCKS": 32}
_BF16 = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "STAGES": 4, "BAND": 8}
_FP8 = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128, "STAGES": 3, "BAND": 8, "PROMOTE": True, "SPLIT": True}
_FAST = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 128, "STAGES": 3, "BAND": 8, "FLATTEN": True}
_FEW = {**_FP8, "BLOCK_M": 16, "STAGES": 6, "SWAP": True, "SPLIT": False, "TABLE": False, "SP": 64}
_OF_PRODUCTS = {
    "TMA": True,
    "TABLE": True,
    "SP": 1,
    "SCALED": False,
    "PROMOTE": False,
    "SWAP": False,
    "FLATTEN": False,
    "SPLIT": False,
    "HAS_BIAS": False,
    "HAS_WEIGHTS": False,
}
_SWIGLU = {"KIND": 0, "GATED": True, "CLAMP": False, "LIMIT": 0.0, "ALPHA": 1.0, "UP_OFFSET": 0.0}
_ABSENT = {"SCALE": "i32", "BIAS": "i32", "WEIGHTS": "i32", "ACT": "bf16", "ACT_SCALE": "i32", "PRE": "i32"}


def _operands(tile: dict[str, Any], scaled: bool, tma: bool) -> tuple[str, str]:
    """Types of rows and weights."""
    element = "fp8e4nv" if scaled else "bf16"
    if not tma:
        return f"*{element}", f"*{element}"
    n, k = tile["BLOCK_N"], tile["BLOCK_K"]
    rows = tile["BLOCK_M"] // 2 if tile.get("SPLIT") else tile["BLOCK_M"]
    return f"tensordesc<{element}[{rows},{k}]>", f"tensordesc<{element}[{n},{k}]>"


def _gate_up(tile: dict[str, Any], warps: int, types: dict[str, str], **constexprs: Any) -> Variant:
    """A variant of the first product; `tile` has the columns of gate and up together."""
    scaled, halves = constexprs.get("SCALED", False), 2 if constexprs.get("GATED", True) else 1
    tile = {**tile, "BLOCK_N": tile["BLOCK_N"] // halves}
    values = {**_OF_PRODUCTS, "HAS_PRE": False, "OUT": 0, **_SWIGLU, **tile, **constexprs}
    x, w = _operands(tile, scaled, values["TMA"])
    w = w.replace("[", f"[{halves},")
    types = {**_ABSENT, "X": x, "W": w, **({"SCALE": "fp32"} if scaled else {}), **types}
    return Variant(values, types, ("f", "k"), warps)


def _rows(tile: dict[str, Any], warps: int, types: dict[str, str], **constexprs: Any) -> Variant:
    """A variant of the product of rows."""
    scaled = constexprs.get("SCALED", False)
    values = {**_OF_PRODUCTS, "BOX_STORES": False, "K_MAJOR": True, **tile, **constexprs}
    a, w = _operands(tile, scaled, values["TMA"])
    m, n, k = tile["BLOCK_M"], tile["BLOCK_N"], tile["BLOCK_K"]
    if values["TMA"] and not values["K_MAJOR"]:
        w = f"tensordesc<bf16[{k},{n}]>"
    out = f"tensordesc<bf16[{m},{n // 2}]>" if values["BOX_STORES"] else "*bf16"
    types = {**_ABSENT, "A": a, "W": w, "OUT": out, **({"SCALE": "fp32"} if scaled else {}), **types}
    return Variant(values, types, ("n", "k", "stride_om"), warps)


EXPERT_SPECS: tuple[KernelSpec, ...] = (
    KernelSpec(
        tiles.tile_table_kernel,
        "offs_ptr:*i32 table_ptr:*i32 num_rows:i32 num_segments:i32 max_tiles:i32",
        (Variant({"SP": 64}),),
        num_warps=1,
    ),
    KernelSpec(
        row_scales.rebase_rows_kernel,
        "elements_ptr:*fp8e4nv scale_ptr:*u8 offs_ptr:*{OFFS} out_ptr:*fp8e4nv row_scale_ptr:*fp32 num_rows:i32 k:i32 "
        "num_segments:i32",
        (
            Variant({"HAS_OFFSETS": True, **_ROW_SCALE_TILE}, {"OFFS": "i32"}, ("k",)),
            Variant({"HAS_OFFSETS": False, **_ROW_SCALE_TILE}, {"OFFS": "fp8e4nv"}, ("k",)),
        ),
    ),
    KernelSpec(
        row_scales.quantize_to_rows_kernel,
        "x_ptr:*{X} offs_ptr:*{OFFS} out_ptr:*fp8e4nv row_scale_ptr:*fp32 num_rows:i32 k:i32 num_segments:i32",
        (
            Variant({"HAS_OFFSETS": True, **_ROW_SCALE_TILE}, {"X": "bf16", "OFFS": "i32"}, ("k",)),
            Variant({"HAS_OFFSETS": False, **_ROW_SCALE_TILE}, {"X": "fp32", "OFFS": "fp32"}, ("k",)),
        ),
    ),
    KernelSpec(
        row_scales.dequantize_rows_in_use_kernel,
        "elements_ptr:*fp8e4nv row_scale_ptr:*fp32 offs_ptr:*{OFFS} out_ptr:*{OUT} num_rows:i32 k:i32 num_segments:i32",
        (Variant({"HAS_OFFSETS": True, "ROWS": 4, "BLOCK_K": 1024}, {"OFFS": "i32", "OUT": "bf16"}, ("k",)),),
    ),
    KernelSpec(
        prepare.weight_maxima_kernel,
        "w_ptr:*{W} row_max_ptr:*i32 column_max_ptr:*i32 n:i32 k:i32",
        tuple(
            Variant({"ROWS": rows, "COLUMNS": True, "BLOCK_N": 128, "BLOCK_K": 64, "STAGES": 3}, {"W": w}, ("n", "k"))
            for rows, w in ((True, "bf16"), (False, "fp32"))
        ),
    ),
    KernelSpec(
        prepare.prepare_weights_kernel,
        "w_ptr:*{W} row_max_ptr:*i32 column_max_ptr:*i32 out_ptr:*fp8e4nv scale_ptr:*fp32 transposed_ptr:*fp8e4nv "
        "transposed_scale_ptr:*fp32 n:i32 k:i32",
        tuple(
            Variant({"FPROP": rows, "DGRAD": True, "BLOCK_N": 128, "BLOCK_K": 64}, {"W": w}, ("n", "k"))
            for rows, w in ((True, "bf16"), (False, "fp32"))
        ),
    ),
    KernelSpec(
        gate_up.gate_up_kernel,
        "x:{X} w:{W} x_scale_ptr:*{SCALE} w_scale_ptr:*{SCALE} bias_ptr:*{BIAS} row_weights_ptr:*{WEIGHTS} "
        "act_ptr:*{ACT} act_scale_ptr:*{ACT_SCALE} pre_ptr:*{PRE} tiles_ptr:*i32 num_rows:i32 f:i32 k:i32 "
        "num_experts:i32",
        (
            _gate_up(_BF16, 8, {"PRE": "bf16", "WEIGHTS": "fp32"}, HAS_PRE=True, HAS_WEIGHTS=True),
            _gate_up(
                _FP8,
                4,
                {"PRE": "bf16", "WEIGHTS": "fp32", "ACT": "fp8e4nv", "ACT_SCALE": "u8"},
                HAS_PRE=True,
                HAS_WEIGHTS=True,
                SCALED=True,
                OUT=1,
            ),
            _gate_up(
                {**_FAST, "FLATTEN": False},
                8,
                {"PRE": "bf16", "WEIGHTS": "fp32", "ACT": "fp8e4nv", "ACT_SCALE": "u8"},
                HAS_PRE=True,
                HAS_WEIGHTS=True,
                SCALED=True,
                OUT=1,
            ),
            _gate_up(_FEW, 4, {"WEIGHTS": "fp32"}, HAS_WEIGHTS=True, SCALED=True),
            _gate_up({**_BF16, "BLOCK_N": 128}, 8, {"BIAS": "bf16"}, HAS_BIAS=True, TMA=False, OUT=2),
        ),
    ),
    KernelSpec(
        rows_product.rows_product_kernel,
        "a:{A} w:{W} out:{OUT} a_scale_ptr:*{SCALE} w_scale_ptr:*{SCALE} bias_ptr:*{BIAS} row_weights_ptr:*{WEIGHTS} "
        "out_ptr:*bf16 tiles_ptr:*i32 num_rows:i32 n:i32 k:i32 num_experts:i32 stride_om:i32",
        (
            _rows({**_BF16, "STAGES": 3, "FLATTEN": True}, 8, {}),
            _rows({**_BF16, "STAGES": 3, "FLATTEN": True}, 8, {}, BOX_STORES=True),
            _rows({**_BF16, "STAGES": 3, "FLATTEN": True}, 8, {}, BOX_STORES=True, K_MAJOR=False),
            _rows(_FP8, 4, {}, SCALED=True),
            _rows(_FAST, 8, {}, SCALED=True),
            _rows(_FAST, 8, {}, SCALED=True, BOX_STORES=True),
            _rows(_FEW, 4, {}, SCALED=True),
            _rows(
                {**_BF16, "BLOCK_N": 128},
                8,
                {"BIAS": "fp32", "WEIGHTS": "fp32"},
                HAS_BIAS=True,
                HAS_WEIGHTS=True,
                TMA=False,
            ),
        ),
    ),
)
"""What the experts' kernels compile to."""
