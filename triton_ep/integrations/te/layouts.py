"""Byte layouts of MXFP8 scales: compact with padding, or in the order that sm_100 GEMMs read.

For a tensor of M rows and N columns, both multiples of 32:

    rowwise      one byte per 1 x 32 values, [M, N / 32], padded to multiples of 128 and 4
    columnwise   one byte per 32 x 1 values, [M / 32, N], padded to multiples of 4 and 128

Padding bytes are 0. In the GEMM order, byte (i, j) of the padded scales is at

    ((i / 128) * (columns / 4) + j / 4) * 512 + (i % 32) * 16 + ((i % 128) / 32) * 4 + j % 4

with integer divisions and the padded number of columns; columnwise scales are transposed first.
"""

from __future__ import annotations

import torch

from triton_ep.mx.formats import BLOCK
from triton_ep.mx.swizzle import from_blocked, round_up, to_blocked


def scale_shape(rows: int, columns: int, columnwise: bool) -> tuple[int, int]:
    """Shape of the padded scales of a tensor [rows, columns]."""
    if columnwise:
        return round_up(-(-rows // BLOCK), 4), round_up(columns, 128)
    return round_up(rows, 128), round_up(columns // BLOCK, 4)


def pad(scale: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Pad scales with zeros to `shape`; returns the same tensor if it has that shape and is contiguous."""
    if tuple(scale.shape) == shape:
        return scale.contiguous()
    padded = scale.new_zeros(shape)
    padded[: scale.shape[0], : scale.shape[1]] = scale
    return padded


def swizzle(scale: torch.Tensor, columnwise: bool) -> torch.Tensor:
    """Reorder padded scales to the GEMM order, in a tensor of the same shape."""
    return to_blocked(scale.t() if columnwise else scale).view(scale.shape)


def unswizzle(scale: torch.Tensor, columnwise: bool) -> torch.Tensor:
    """Reorder the result of `swizzle` to compact order: the inverse of `swizzle`."""
    rows, columns = reversed(scale.shape) if columnwise else scale.shape
    plain = from_blocked(scale.flatten(), rows, columns)
    return plain.t().contiguous() if columnwise else plain
