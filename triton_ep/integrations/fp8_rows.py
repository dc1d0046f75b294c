"""Rows of one-byte values with their scales as bytes of bfloat16 rows: how doors send what others have quantised.

Nothing on the way looks at what a row holds. So values and scales travel as the bytes of bfloat16 elements: the values
first, the scales behind them, zeros up to the end.
"""

from __future__ import annotations

import torch

CHANNELS = 128
"""Values that share a scale."""


def pack_rows(data: torch.Tensor, scales: torch.Tensor, width: int) -> torch.Tensor:
    """[T, width] bfloat16 that hold the bytes of data [T, H] and scales [T, S], strided as they like.

    H and the bytes of a packed row are multiples of 8: bytes are copied as words of 8.
    """
    rows, hidden = data.shape
    end = hidden + scales.shape[1] * scales.element_size()
    packed = torch.empty(rows, 2 * width, dtype=torch.uint8, device=data.device)
    packed.view(torch.int64)[:, : hidden // 8] = data.contiguous().view(torch.int64)
    packed[:, hidden:end].view(scales.dtype).copy_(scales)
    packed[:, end:] = 0
    return packed.view(torch.bfloat16)


def unpack_rows(
    packed: torch.Tensor, hidden: int, columns: int, scale_dtype: torch.dtype, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """data [R, hidden] of `dtype` and scales [R, columns] of `scale_dtype`, both contiguous, from `pack_rows`."""
    data = packed.view(torch.int64)[:, : hidden // 8].contiguous().view(dtype)
    words = packed.view(scale_dtype)
    first = hidden // scale_dtype.itemsize
    return data, words[:, first : first + columns].contiguous()
