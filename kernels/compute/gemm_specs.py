"""KernelSpecs of the grouped GEMMs. With TMA their operands are descriptors, whose types name the boxes."""

from __future__ import annotations

from ..kernel_spec import KernelSpec, Variant
from . import grouped_fp8, grouped_gemm

_COMMON = {"EP": 64, "BAND": 8}
_LARGE = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "STAGES": 4}
_SMALL = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "STAGES": 6}
_PLAIN = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "STAGES": 4}
_SIZES = ("n", "k", "stride_am", "stride_be", "stride_bw", "stride_om")


def _bf16(tile: dict[str, int], tma: bool, k_major: bool) -> Variant:
    m, n, k = tile["BLOCK_M"], tile["BLOCK_N"], tile["BLOCK_K"]
    types = {"A": "*bf16", "B": "*bf16", "OUT": "bf16"}
    if tma:
        types["A"] = f"tensordesc<bf16[{m},{k}]>"
        types["B"] = f"tensordesc<bf16[{n},{k}]>" if k_major else f"tensordesc<bf16[{k},{n}]>"
    return Variant({"TMA": tma, "K_MAJOR": k_major, **_COMMON, **tile}, types, _SIZES)


def _fp8(m: int, n: int, stages: int, warps: int, tma: bool, hardware: bool = False, rows: bool = False) -> Variant:
    types = {"A": "*fp8e4nv", "B": "*fp8e4nv", "OUT": "bf16", "SCALE": "u8" if hardware else "fp32"}
    if tma:
        types |= {"A": f"tensordesc<fp8e4nv[{m},128]>", "B": f"tensordesc<fp8e4nv[{n},128]>"}
    blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 128, "STAGES": stages}
    scales = {"HARDWARE": hardware, "ROW_SCALES": rows}
    return Variant({"TMA": tma, **scales, **_COMMON, **blocks}, types, ("n", "k"), warps)


def _wgrad(tma: bool, accumulate: bool = False) -> Variant:
    width = 128 if accumulate else 256
    boxes = {"X": "tensordesc<bf16[64,128]>", "Y": f"tensordesc<bf16[64,{width}]>"}
    types = boxes if tma else {"X": "*bf16", "Y": "*bf16"}
    blocks = {"BLOCK_I": 128, "BLOCK_J": width, "BLOCK_R": 64, "STAGES": 4}
    return Variant(
        {"TMA": tma, "ACCUMULATE": accumulate, **_COMMON, **blocks},
        types | {"OUT": "fp32" if accumulate else "bf16"},
        ("num_i", "num_j", "stride_xm", "stride_ym"),
    )


GEMM_SPECS: tuple[KernelSpec, ...] = (
    KernelSpec(
        grouped_gemm.grouped_gemm_kernel,
        "a:{A} b:{B} out_ptr:*{OUT} ends_ptr:*i32 num_rows:i32 n:i32 k:i32 num_experts:i32 "
        "stride_am:i32 stride_be:i32 stride_bw:i32 stride_om:i32",
        (
            _bf16(_LARGE, tma=True, k_major=True),
            _bf16(_LARGE, tma=True, k_major=False),
            _bf16(_SMALL, tma=True, k_major=True),
            _bf16(_PLAIN, tma=False, k_major=True),
            _bf16(_PLAIN, tma=False, k_major=False),
        ),
        num_warps=8,
    ),
    KernelSpec(
        grouped_gemm.grouped_wgrad_kernel,
        "x_ptr:*bf16 y_ptr:*bf16 x_desc:{X} y_desc:{Y} out_ptr:*{OUT} ends_ptr:*i32 num_rows:i32 num_i:i32 num_j:i32 "
        "num_experts:i32 stride_xm:i32 stride_ym:i32",
        (_wgrad(tma=True), _wgrad(tma=False), _wgrad(tma=True, accumulate=True)),
        num_warps=8,
    ),
    KernelSpec(
        grouped_fp8.equalize_scales_kernel,
        "qdata_ptr:*fp8e4nv scale_ptr:*u8 out_ptr:*fp8e4nv out_scale_ptr:*fp32 num_rows:i32 k:i32 rows_per_matrix:i32",
        (Variant({"ROWS": 32}, aligned=("k",)),),
    ),
    KernelSpec(
        grouped_fp8.grouped_fp8_kernel,
        "a:{A} b:{B} a_scale_ptr:*{SCALE} b_scale_ptr:*{SCALE} out_ptr:*{OUT} ends_ptr:*i32 num_rows:i32 n:i32 k:i32 "
        "num_experts:i32",
        (
            _fp8(16, 128, 6, 4, tma=True),
            _fp8(32, 128, 6, 4, tma=True),
            _fp8(64, 256, 4, 8, tma=True),
            _fp8(16, 128, 6, 4, tma=True, rows=True),
            _fp8(128, 64, 4, 4, tma=True, rows=True),
            _fp8(16, 128, 6, 4, tma=False),
            _fp8(64, 256, 4, 8, tma=False),
            _fp8(128, 128, 3, 8, tma=True, hardware=True),
        ),
    ),
)
"""What the grouped GEMMs compile to."""
