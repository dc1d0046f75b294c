"""Tensors whose strides say nothing, and memory seen under another dtype.

Where a dimension has no or one element, its stride may be any number: of the gradient of a sum, of an empty array of
numpy, of one row cut out of a wider tensor. torch calls such tensors contiguous all the same, but refuses to view them
under a dtype of another size.
"""

from __future__ import annotations

import torch


def dense(x: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor with the strides that its shape implies: the same memory, if there is any."""
    if not x.numel():
        return x.new_empty(x.shape)
    strides, step = [], 1
    for extent in reversed(x.shape):
        strides.append(step)
        step *= extent
    return x.as_strided(x.shape, strides[::-1])


def view_as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The memory of a contiguous tensor under another dtype, whatever its strides say.

    Its last dimension and its address must be multiples of the new elements.
    """
    try:
        return x.view(dtype)
    except RuntimeError:  # not asked for beforehand, because that would cost time in every call
        return dense(x).view(dtype)
