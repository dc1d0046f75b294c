"""KernelSpecs of the backward pass of experts."""

from __future__ import annotations

from ..kernel_spec import KernelSpec, Variant
from . import weighted_rows, wgrad


def _wgrad(accumulate: bool) -> Variant:
    types = {
        "X": "tensordesc<bf16[64,128]>",
        "Y": "tensordesc<bf16[64,256]>",
        "OUT": "tensordesc<fp32[1,128,64]>" if accumulate else "tensordesc<bf16[1,128,128]>",
    }
    blocks = {"EP": 64, "BLOCK_I": 128, "BLOCK_J": 256, "BLOCK_R": 64, "BAND": 8, "STAGES": 4}
    return Variant({"ACCUMULATE": accumulate, **blocks}, types, ("num_i", "num_j"))


BACKWARD_SPECS: tuple[KernelSpec, ...] = (
    KernelSpec(
        weighted_rows.weighted_rows_backward_kernel,
        "dy_ptr:*{ROWS} dy_scale_ptr:*{SCALE} y_ptr:*{TOKEN} weights_ptr:*fp32 offs_ptr:*{OFFS} grad_ptr:*{TOKEN} "
        "grad_weights_ptr:*fp32 num_rows:i32 hidden:i32 last:i32",
        tuple(
            Variant(
                {"IS_MX": mx, "HAS_OFFS": True, "ROWS": 2, "BLOCK_H": 1024},
                {"ROWS": rows, "SCALE": scale, "TOKEN": "bf16", "OFFS": "i32"},
                ("hidden",),
            )
            for mx, rows, scale in ((False, "bf16", "bf16"), (True, "fp8e4nv", "u8"))
        ),
    ),
    KernelSpec(
        wgrad.weight_gradient_kernel,
        "x:{X} y:{Y} out:{OUT} offs_ptr:*i32 num_rows:i32 num_i:i32 num_j:i32 num_experts:i32",
        (_wgrad(accumulate=False), _wgrad(accumulate=True)),
        num_warps=8,
    ),
)
"""What the backward pass of experts compiles to."""
