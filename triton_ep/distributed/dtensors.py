"""DTensors, torch's sharded tensors: recognised without importing torch.distributed.tensor, which takes long."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PLAIN_TENSORS = (torch.nn.Parameter, torch.Tensor)
"""Types of tensors that are no subclass with a behaviour of its own."""


def is_dtensor(x: Any) -> TypeGuard[DTensor]:
    """Whether this is a DTensor; torch.distributed.tensor is imported only for wrapper subclasses."""
    # Hot path: most tensors are plain, and torch's search for wrapper subclasses takes longer.
    if type(x) in PLAIN_TENSORS or not is_traceable_wrapper_subclass(x):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


def local_part(x: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds: a DTensor's shard, else the tensor itself."""
    return x.to_local() if is_dtensor(x) else x
