"""NVFP4 quantisation and back (kernels/compute/nvfp4.py)."""

from __future__ import annotations

import torch

from triton_ep.context.layout import next_power_of_2
from triton_ep.errors import InputError
from triton_ep.ops import library
from triton_ep.ops.element_formats import check_high_precision
from triton_ep.runtime import launch as runtime  # before the kernels: decides whether they are interpreted
from triton_ep.runtime.plans import Plan

BLOCK = 16


def _tile(num_blocks: int) -> int:
    """Blocks of a program; large in the interpreter, which pays per operation."""
    return min(2048, next_power_of_2(num_blocks)) if runtime.INTERPRETING else 128


def _blocks_per_scale(num_blocks: int, tensor_scale: torch.Tensor | None) -> int:
    if tensor_scale is None:
        return max(num_blocks, 1)
    count = tensor_scale.numel()
    if tensor_scale.dtype != torch.float32 or count == 0 or num_blocks % count:
        raise InputError(
            f"tensor_scale is {list(tensor_scale.shape)} {tensor_scale.dtype}; it must be float32 and divide the "
            f"{num_blocks} blocks evenly."
        )
    return max(num_blocks // count, 1)


def _quantized_like(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    lead, k = x.shape[:-1], x.shape[-1]
    return x.new_empty((*lead, k // 2), dtype=torch.uint8), x.new_empty((*lead, k // BLOCK), dtype=torch.uint8)


@library.op(
    "(Tensor x, Tensor? tensor_scale, Tensor? seed, int signs) -> (Tensor, Tensor)",
    lambda x, *_: _quantized_like(x),
)
def _nvfp4_quantize(
    x: torch.Tensor, tensor_scale: torch.Tensor | None, seed: torch.Tensor | None, signs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    check_high_precision(x.dtype, "dtype of x")
    if x.dim() == 0 or x.shape[-1] % BLOCK:
        raise InputError(f"x is {list(x.shape)}: its last dimension must be a multiple of {BLOCK}.")
    x = x.contiguous()
    elements, scale = _quantized_like(x)
    blocks = _tile(scale.numel())
    constexprs = {
        "HAS_TENSOR_SCALE": tensor_scale is not None,
        "STOCHASTIC": seed is not None,
        "HADAMARD": signs >= 0,
        "BLOCKS": blocks,
    }
    runtime.launch(
        Plan("quantize_nvfp4_kernel", constexprs),
        -(-scale.numel() // blocks),
        x_ptr=x,
        tensor_scale_ptr=x if tensor_scale is None else tensor_scale.contiguous(),
        seed_ptr=x if seed is None else seed,
        elements_ptr=elements,
        scale_ptr=scale,
        num_blocks=scale.numel(),
        blocks_per_scale=_blocks_per_scale(scale.numel(), tensor_scale),
        signs=max(signs, 0),
    )
    return elements, scale


def quantize_nvfp4(
    x: torch.Tensor,
    tensor_scale: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    signs: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise blocks of 16 values of the last dimension of [..., K], K a multiple of 16.

    Arguments:
        x: bf16, fp16 or fp32.
        tensor_scale: float32, one value, or one per equal share of the rows; None: only block scales.
        seed: [1] int64 on the device of `x`: round stochastically. None: round to nearest.
        signs: Hadamard-transform each block first (`triton_ep.mx.hadamard`) with these signs. None: no transform.

    Returns packed elements [..., K / 2] uint8, and the bits of e4m3 scales [..., K / 16] uint8.

    Raises:
        InputError: bad shape or dtype.
    """
    elements, scale = _nvfp4_quantize(x, tensor_scale, seed, -1 if signs is None else signs)
    return elements, scale


@library.op(
    "(Tensor qdata, Tensor scale, Tensor? tensor_scale, int signs, ScalarType dtype) -> Tensor",
    lambda qdata, _, __, ___, dtype: qdata.new_empty((*qdata.shape[:-1], 2 * qdata.shape[-1]), dtype=dtype),
)
def _nvfp4_dequantize(
    qdata: torch.Tensor, scale: torch.Tensor, tensor_scale: torch.Tensor | None, signs: int, dtype: torch.dtype
) -> torch.Tensor:
    check_high_precision(dtype, "dtype")
    if qdata.dtype != torch.uint8 or qdata.shape != (*scale.shape[:-1], scale.shape[-1] * BLOCK // 2):
        raise InputError(
            f"qdata is {list(qdata.shape)} {qdata.dtype}, scale {list(scale.shape)}; they must be [..., K / 2] uint8 "
            f"and [..., K / {BLOCK}]."
        )
    qdata, scale = qdata.contiguous(), scale.contiguous()
    out = qdata.new_empty((*qdata.shape[:-1], 2 * qdata.shape[-1]), dtype=dtype)
    blocks = _tile(scale.numel())
    constexprs = {"HAS_TENSOR_SCALE": tensor_scale is not None, "HADAMARD": signs >= 0, "BLOCKS": blocks}
    runtime.launch(
        Plan("dequantize_nvfp4_kernel", constexprs),
        -(-scale.numel() // blocks),
        elements_ptr=qdata,
        scale_ptr=scale,
        tensor_scale_ptr=out if tensor_scale is None else tensor_scale.contiguous(),
        out_ptr=out,
        num_blocks=scale.numel(),
        blocks_per_scale=_blocks_per_scale(scale.numel(), tensor_scale),
        signs=max(signs, 0),
    )
    return out


def dequantize_nvfp4(
    qdata: torch.Tensor,
    scale: torch.Tensor,
    tensor_scale: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    signs: int | None = None,
) -> torch.Tensor:
    """Values [..., K] of packed elements [..., K / 2] and scale bits [..., K / 16] uint8.

    Values are rounded to float32, then to `dtype`. signs: invert the transform of `quantize_nvfp4` with these signs.

    Raises:
        InputError: shapes or dtypes that do not fit each other.
    """
    values: torch.Tensor = _nvfp4_dequantize(
        qdata, scale.view(torch.uint8), tensor_scale, -1 if signs is None else signs, dtype
    )
    return values
