"""KernelSpecs of the backward pass of experts."""

from __future__ import annotations

from ..kernel_spec import KernelSpec, Variant
from . import weighted_rows

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
)
"""What the backward pass of experts compiles to."""
