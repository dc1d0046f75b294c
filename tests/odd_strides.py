"""Tensors of no or one row whose strides say nothing, as gradients of sums, numpy and slices make them."""

import torch


def odd(x: torch.Tensor) -> torch.Tensor:
    """The same values, for torch contiguous, with other strides than the shape implies, where a dimension lets it."""
    if not x.numel():
        return torch.empty_strided(x.shape, (0,) * x.dim(), dtype=x.dtype, device=x.device)
    plain = x.clone(memory_format=torch.contiguous_format)
    # As of a row of a wider tensor; a column of rows that are apart.
    strides = [stride + 1 if extent == 1 else stride for extent, stride in zip(x.shape, plain.stride(), strict=True)]
    found = plain.as_strided(x.shape, strides)
    assert found.is_contiguous()
    return found
