"""Tensors of no or one row whose strides say nothing, as gradients of sums, numpy and slices make them."""

import torch


def odd(x: torch.Tensor) -> torch.Tensor:
    """The same values, for torch contiguous, with other strides than the shape implies, if it has no or one row.

    Rows of one element each become a column with a stride of its own.
    """
    if not x.numel():
        return torch.empty_strided(x.shape, (0,) * x.dim(), dtype=x.dtype, device=x.device)
    if x.dim() > 1 and x.shape[0] == 1:
        wide = x.new_zeros(3, *x.shape[1:-1], x.shape[-1] + 1)
        wide[:1, ..., : x.shape[-1]] = x
        found = wide[:1, ..., : x.shape[-1]]
    elif x.shape[-1] == 1:
        found = x.clone().as_strided(x.shape, (*x.stride()[:-1], 7))
    else:
        return x
    assert found.is_contiguous() or x.dim() > 2
    assert torch.equal(found.float(), x.float())
    return found
