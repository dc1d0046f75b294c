"""DTensors, torch's sharded tensors: recognised without importing torch.distributed.tensor, which takes long."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_PLAIN = (torch.nn.Parameter, torch.Tensor)


def is_dtensor(x: Any) -> TypeGuard[DTensor]:
    """Whether this is a DTensor; torch.distributed.tensor is imported only for wrapper subclasses."""
    # Few tensors are subclasses, and to find out about these takes a tenth of a MoE layer's host time.
    if type(x) in _PLAIN or not is_traceable_wrapper_subclass(x):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


def local_part(x: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds: a DTensor's shard, else the tensor itself."""
    return x.to_local() if is_dtensor(x) else x
