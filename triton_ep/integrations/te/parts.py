"""Parts of a tensor in MXFP8: elements and padded scales, along rows or along columns, and checks of their shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import torch

from triton_ep.errors import InputError
from triton_ep.integrations.te import arithmetic, layouts
from triton_ep.mx.formats import BLOCK, HIGH_PRECISION

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class ShapeError(InputError, AssertionError):
    """Sizes that are not multiples of 32, where TransformerEngine has an assertion."""


def flatten(data: torch.Tensor) -> torch.Tensor:
    """Reshape [..., N] to [M, N]."""
    return data.reshape(prod(data.shape[:-1]), data.shape[-1])


def inferred(shape: Sequence[int], numel: int) -> tuple[int, ...]:
    """`shape` with -1 replaced by its size."""
    known = prod(size for size in shape if size != -1)
    return tuple(numel // known if size == -1 else size for size in shape)


def check_parts(data: torch.Tensor | None, scale: torch.Tensor | None, columnwise: bool) -> None:
    """Raise InputError if elements and padded scales do not fit each other; both may be None."""
    if data is None and scale is None:
        return
    which = "columnwise" if columnwise else "rowwise"
    for part in (data, scale):
        if part is not None and not isinstance(part, torch.Tensor):
            raise InputError(f"{which} data and scale_inv must be tensors or None, got {type(part).__name__}.")
    if data is None or scale is None or data.dtype != torch.uint8 or scale.dtype != torch.uint8 or data.dim() < 1:
        raise InputError(f"{which} data and scale_inv must be uint8 tensors, both or neither.")
    expected = layouts.scale_shape(prod(data.shape[:-1]), data.shape[-1], columnwise)
    if data.shape[-1] % BLOCK or tuple(scale.shape) != expected:
        raise InputError(
            f"{which} data is {list(data.shape)}, scale_inv {list(scale.shape)}; the last dimension must be a multiple "
            f"of {BLOCK}, and scale_inv, padded, {list(expected)}."
        )


def check_shape(shape: Iterable[int]) -> None:
    """Refuse sizes that are not multiples of 32.

    Raises:
        ShapeError: with TransformerEngine's message.
    """
    sizes = tuple(shape)
    if len(sizes) < 2 or sizes[-1] % BLOCK or prod(sizes[:-1]) % BLOCK:
        raise ShapeError(f"Incorrect shape {sizes} for MXFP8. Tensor dims must be divisible by {BLOCK}")


def check_quantizable(tensor: torch.Tensor) -> None:
    """Refuse a tensor whose dtype is not bf16, fp16 or fp32, or whose sizes are not multiples of 32."""
    if tensor.dtype not in HIGH_PRECISION:
        raise InputError(f"the tensor is {tensor.dtype}; MXFP8 is made from {', '.join(map(str, HIGH_PRECISION))}.")
    check_shape(tensor.shape)


def quantized_parts(
    tensor: torch.Tensor, elem_dtype: torch.dtype, rowwise: bool, columnwise: bool, swizzled: bool, tiles: bool
) -> dict[str, torch.Tensor | None]:
    """Elements and padded scales of [..., N] in the requested directions, by constructor argument."""
    flat = flatten(tensor)
    shape = tensor.shape
    parts: dict[str, torch.Tensor | None] = dict.fromkeys(
        ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
    )
    by_tile = arithmetic.quantize_tiles(flat, elem_dtype) if tiles else None
    for name, wanted, along_columns in (("rowwise", rowwise, False), ("columnwise", columnwise, True)):
        if not wanted:
            continue
        if by_tile is not None:
            data, scale = by_tile[0].clone(), by_tile[1].repeat_interleave(BLOCK, 1 if along_columns else 0)
        elif along_columns:
            data, scale = arithmetic.quantize_columns(flat, elem_dtype)
        else:
            data, scale = arithmetic.quantize_rows(flat, elem_dtype)
        scale = layouts.pad(scale, layouts.scale_shape(flat.shape[0], flat.shape[1], along_columns))
        parts[f"{name}_data"] = data.view(shape)
        parts[f"{name}_scale_inv"] = layouts.swizzle(scale, along_columns) if swizzled else scale
    return parts
