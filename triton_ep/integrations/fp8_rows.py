"""Rows of one-byte values with their scales as bytes of bfloat16 rows: how doors send what others have quantised.

Nothing on the way looks at what a row holds. So values and scales travel as the bytes of bfloat16 elements: the values
first, the scales behind them, zeros up to the end.
"""

from __future__ import annotations

import torch

CHANNELS = 128
"""Values that share a scale."""


def pack_rows(data: torch.Tensor, scales: torch.Tensor, width: int) -> torch.Tensor:
    """[T, width] bfloat16 that hold the bytes of data [T, H] and scales [T, S], strided as they like."""
    rows, hidden = data.shape
    packed = torch.zeros(rows, 2 * width, dtype=torch.uint8, device=data.device)
    packed[:, :hidden] = data.view(torch.uint8)
    packed[:, hidden : hidden + scales.shape[1] * scales.element_size()].view(scales.dtype).copy_(scales)
    return packed.view(torch.bfloat16)


def unpack_rows(
    packed: torch.Tensor, hidden: int, columns: int, scale_dtype: torch.dtype, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """data [R, hidden] of `dtype` and scales [R, columns] of `scale_dtype`, both contiguous, from `pack_rows`."""
    all_bytes = packed.view(torch.uint8)
    data = all_bytes[:, :hidden].contiguous().view(dtype)
    scales = all_bytes[:, hidden : hidden + columns * scale_dtype.itemsize].contiguous().view(scale_dtype)
    return data, scales
