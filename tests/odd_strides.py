"""Tensors with no or one row and meaningless strides, as gradients of sums, numpy and slices produce them."""

import torch


def odd(x: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous for torch, but with unusual strides in every dimension that allows it."""
    if not x.numel():
        return torch.empty_strided(x.shape, (0,) * x.dim(), dtype=x.dtype, device=x.device)
    plain = x.clone(memory_format=torch.contiguous_format)
    # Like a row of a wider tensor, or a column of separated rows.
    strides = [stride + 1 if extent == 1 else stride for extent, stride in zip(x.shape, plain.stride(), strict=True)]
    found = plain.as_strided(x.shape, strides)
    assert found.is_contiguous()
    return found
