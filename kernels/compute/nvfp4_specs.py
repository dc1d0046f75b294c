"""KernelSpecs of the NVFP4 kernels."""

from __future__ import annotations

from ..kernel_spec import KernelSpec, Variant
from . import nvfp4

_BLOCKS = {"BLOCKS": 128}  # with 128 threads, each stores the 8 bytes of one block


def _options(tensor_scale: bool, hadamard: bool, **more: bool) -> dict[str, bool | int]:
    return {"HAS_TENSOR_SCALE": tensor_scale, "HADAMARD": hadamard, **more, **_BLOCKS}


NVFP4_SPECS: tuple[KernelSpec, ...] = (
    KernelSpec(
        nvfp4.quantize_nvfp4_kernel,
        "x_ptr:*{VALUE} tensor_scale_ptr:*fp32 seed_ptr:*i64 elements_ptr:*u8 scale_ptr:*u8 num_blocks:i32 "
        "blocks_per_scale:i32 signs:i32",
        (
            Variant(_options(False, False, STOCHASTIC=False), {"VALUE": "bf16"}),
            Variant(_options(True, True, STOCHASTIC=True), {"VALUE": "bf16"}),
            Variant(_options(True, False, STOCHASTIC=True), {"VALUE": "fp32"}),
        ),
    ),
    KernelSpec(
        nvfp4.dequantize_nvfp4_kernel,
        "elements_ptr:*u8 scale_ptr:*u8 tensor_scale_ptr:*fp32 out_ptr:*{VALUE} num_blocks:i32 blocks_per_scale:i32 "
        "signs:i32",
        (
            Variant(_options(True, False), {"VALUE": "bf16"}),
            Variant(_options(False, True), {"VALUE": "fp32"}),
        ),
    ),
)
"""What NVFP4 quantisation compiles to."""
