"""Views under another dtype, also of tensors with arbitrary strides.

The stride of a dimension with no or one element may be any number, as in the gradient of a sum, an empty numpy array,
or one row cut out of a wider tensor. torch calls such tensors contiguous, but refuses to view them under a dtype of
another size.
"""

from __future__ import annotations

import torch


def dense(x: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor with the strides that its shape implies. It shares the memory unless it is empty."""
    if x.is_contiguous() and min(x.shape, default=1) > 1:
        return x
    if not x.numel():
        return x.new_empty(x.shape)
    strides: list[int] = []
    step = 1
    for extent in reversed(x.shape):
        strides.insert(0, step)
        step *= extent
    return x if x.stride() == tuple(strides) else x.as_strided(x.shape, strides)


def view_as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View a contiguous tensor under another dtype, whatever its strides.

    Its last dimension and its address must be multiples of the new elements.
    """
    try:
        return x.view(dtype)
    except RuntimeError:  # a check beforehand would cost time in every call
        return dense(x).view(dtype)
