"""KernelSpecs of the experts' kernels. With TMA operands are descriptors, whose types name the boxes."""

from __future__ import annotations

from ..kernel_spec import KernelSpec, Variant
from . import row_scales, tiles

_ROW_SCALE_TILE = {"ROWS": 4, "BLOCKS": 32}

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
)
"""What the experts' kernels compile to."""
