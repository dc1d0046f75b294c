"""KernelSpecs of the backward pass of experts."""

from __future__ import annotations

from ..device.codes import ACT_SILU
from ..kernel_spec import KernelSpec, Variant
from . import bias_gradient, down_dgrad, weighted_rows, wgrad


def _wgrad(accumulate: bool) -> Variant:
    types = {
        "X": "tensordesc<bf16[64,128]>",
        "Y": "tensordesc<bf16[64,128]>",
        "OUT": "tensordesc<fp32[1,128,32]>" if accumulate else "tensordesc<bf16[1,128,64]>",
    }
    blocks = {"EP": 32, "BLOCK_I": 128, "BLOCK_J": 128, "BLOCK_R": 64, "BAND": 8, "STAGES": 3}
    return Variant({"ACCUMULATE": accumulate, **blocks}, types, ("num_i", "num_j"), num_warps=4)


_SWIGLU = {"KIND": ACT_SILU, "GATED": True, "CLAMP": False, "LIMIT": 0.0, "ALPHA": 1.0, "UP_OFFSET": 0.0}


def _down(m: int, n: int, k: int, levels: int, warps: int, fp8: bool, promote: bool = False) -> Variant:
    dtype, scale = ("fp8e4nv", "fp32") if fp8 else ("bf16", "i32")
    box = f"[1,{n},{k}]" if fp8 else f"[1,{k},{n}]"
    split = promote and m == 128
    types = {
        "DY": f"tensordesc<{dtype}[{m // 2 if split else m},{k}]>",
        "W": f"tensordesc<{dtype}{box}>",
        "SCALE": scale,
    }
    about = {"FP8": fp8, "PROMOTE": promote, "K_MAJOR": fp8, "HAS_WEIGHTS": True, **_SWIGLU}
    blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "LEVELS": levels, "SPLIT": split, "FLATTEN": False}
    blocks["STAGES"] = 3 if split else 4
    return Variant({**about, **blocks}, types, ("hidden", "ffn"), warps)


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
        down_dgrad.down_dgrad_kernel,
        "dy:{DY} w:{W} dy_scale_ptr:*{SCALE} w_scale_ptr:*{SCALE} pre_ptr:*bf16 weights_ptr:*fp32 tiles_ptr:*i32 "
        "dpre_ptr:*bf16 act_ptr:*bf16 shares_ptr:*fp32 num_rows:i32 hidden:i32 ffn:i32",
        (
            _down(128, 256, 64, levels=3, warps=8, fp8=False),
            _down(128, 128, 128, levels=2, warps=4, fp8=True, promote=True),
            _down(128, 256, 128, levels=3, warps=8, fp8=True),
        ),
    ),
    KernelSpec(
        down_dgrad.row_weight_gradient_kernel,
        "shares_ptr:*fp32 dy_ptr:*{DY} dy_scale_ptr:*{SCALE} bias_ptr:*{BIAS} tiles_ptr:*i32 out_ptr:*fp32 "
        "num_rows:i32 shares:i32 hidden:i32",
        tuple(
            Variant({"HAS_BIAS": bias, "FP8": fp8, "ROWS": 16, "BLOCK_H": 256}, types, ("hidden",))
            for bias, fp8, types in (
                (False, False, {"DY": "i32", "SCALE": "i32", "BIAS": "i32"}),
                (True, True, {"DY": "fp8e4nv", "SCALE": "fp32", "BIAS": "bf16"}),
            )
        ),
    ),
    KernelSpec(
        bias_gradient.bias_gradient_kernel,
        "x_ptr:*bf16 offs_ptr:*i32 weights_ptr:*{WEIGHTS} out_ptr:*fp32 n:i32",
        (Variant({"HAS_WEIGHTS": True, "BLOCK_R": 32, "BLOCK_N": 128}, {"WEIGHTS": "fp32"}, ("n",)),),
    ),
    KernelSpec(
        wgrad.weight_gradient_kernel,
        "x:{X} y:{Y} out:{OUT} offs_ptr:*i32 filled_ptr:*i32 num_rows:i32 num_i:i32 num_j:i32 num_experts:i32",
        (_wgrad(accumulate=False), _wgrad(accumulate=True)),
        num_warps=8,
    ),
)
"""What the backward pass of experts compiles to."""
