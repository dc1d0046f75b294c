"""The caller's tensors in the symmetric heap: TransformerEngine's `symm_mem_alloc` and its companions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from triton_ep.distributed import check_group, current_heap
from triton_ep.errors import InputError
from triton_ep.integrations import arguments as check


class _Allocated(NamedTuple):
    """A tensor of `symm_mem_alloc`: the heap (`current_heap`), the group, and the result of the heap's `alloc`."""

    heap: Any
    group: Any
    tensor: Any


class _Pool:
    """Tensors that this process holds; tensors of a closed heap are no longer valid."""

    tensors: tuple[_Allocated, ...] = ()


def symm_mem_alloc(
    shape: Any,
    dtype: torch.dtype,
    ep_group: Any,
    device: torch.device | None = None,
    use_pool: bool = False,
    backend: str = "NCCL",
) -> torch.Tensor:
    """Allocate zeros in the symmetric heap, which the other ranks of the group can read and write. Collective.

    shape: the same number of bytes on all ranks. ep_group: process group; device: the heap's device, or None.
    use_pool: must be False. With True TransformerEngine frees the tensor with its last reference, on each rank alone.
    backend: accepted; the memory is that of `initialize_distributed`.
    The tensor is valid until `release_symm_mem_pool`, even without references to it.

    Raises:
        InputError: an invalid shape, another device than the heap's, or use_pool. ConfigError: not a dtype, or an
        unknown group. HeapError: on all ranks, if one has no room or the ranks request different sizes.
    """
    if check.flag("use_pool", use_pool):
        raise InputError("symm_mem_alloc: use_pool=True is not supported; pass False, and call release_symm_mem_pool.")
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
    """Whether a tensor is, or is a view of, a tensor of `symm_mem_alloc` that has not been released."""
    start = check.tensor("tensor", tensor).data_ptr()
    return any(
        not heap.closed and made.local.data_ptr() <= start < made.local.data_ptr() + made.nbytes
        for heap, _, made in _Pool.tensors
    )


def release_symm_mem_pool() -> None:
    """Free all tensors of `symm_mem_alloc`, which are no longer valid afterwards. Collective over their groups."""
    tensors, _Pool.tensors = _Pool.tensors, ()
    for heap, group, made in tensors:
        if not heap.closed:
            heap.barrier(group)  # after it, no rank reads or writes the tensor
            heap.free(made)
