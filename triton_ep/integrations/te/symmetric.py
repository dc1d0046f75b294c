"""Tensors of the caller in the symmetric heap: TransformerEngine's `symm_mem_alloc` and what belongs to it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from triton_ep.distributed import check_group, current_heap
from triton_ep.errors import InputError
from triton_ep.integrations import arguments as check


class _Allocated(NamedTuple):
    """A tensor that `symm_mem_alloc` made, in which heap and for which group: of `current_heap`, and of its `alloc`."""

    heap: Any
    group: Any
    tensor: Any


class _Pool:
    """What this process holds; tensors of a heap that is closed are gone."""

    tensors: tuple[_Allocated, ...] = ()


def symm_mem_alloc(shape: Any, dtype: torch.dtype, ep_group: Any, device: torch.device | None = None) -> torch.Tensor:
    """A tensor of zeros in the symmetric heap, which the other ranks of the group can read and write. Collective.

    shape: as many bytes on all ranks. ep_group: process group; device: that of the heap, or None.
    It is valid until `release_symm_mem_pool`, whether it is referred to or not.

    Raises:
        InputError: no shape, or another device than the heap's. ConfigError: no dtype, or an unknown group.
        HeapError: on all ranks, where one has no room, or they ask for different sizes.
    """
    check_group(ep_group)
    heap, sizes, kind = current_heap(), check.sizes("shape", shape), check.dtype("dtype", dtype)
    if device is not None:
        where = check.device("device", device)
        index = heap.device.index if where.index is None else where.index
        if (where.type, index) != (heap.device.type, heap.device.index):
            raise InputError(f"symmetric memory of this rank is on {heap.device}, got device={where}. Pass None.")
    made = heap.alloc(sizes, kind, ep_group)
    held = tuple(each for each in _Pool.tensors if not each.heap.closed)
    _Pool.tensors = (*held, _Allocated(heap, ep_group, made))
    return made.local


def is_symm_backed(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or the one that it is a view of, is one of `symm_mem_alloc` that has not been released."""
    start = check.tensor("tensor", tensor).data_ptr()
    return any(
        not heap.closed and made.local.data_ptr() <= start < made.local.data_ptr() + made.nbytes
        for heap, _, made in _Pool.tensors
    )


def release_symm_mem_pool() -> None:
    """Free all tensors of `symm_mem_alloc`, none of which may be used any more. Collective over their groups."""
    tensors, _Pool.tensors = _Pool.tensors, ()
    for heap, group, made in tensors:
        if not heap.closed:
            heap.barrier(group)  # no rank reads or writes it any more
            heap.free(made)
