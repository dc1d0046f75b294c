"""Symmetric heap of ranks on GPUs of one host, over torch's own symmetric memory: needs no package other than torch.

The ranks of any group can allocate a chunk, so a sub-group grows without the other ranks. The program's own allocations
in torch's symmetric memory stay separate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from triton_ep.errors import HeapError
from triton_ep.heap.gpu import GpuHeap, check_fits
from triton_ep.runtime.environment import read_environment, set_defaults

# Multicast reserves memory and needs a fabric manager, and our kernels do not use it.
_DEFAULTS = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
_SPARE_BYTES = 2**27  # left for torch and the driver


class TorchHeap(GpuHeap):
    """Symmetric memory of one GPU per rank, all on one host.

    heap_bytes: size of the first chunk. Chunks are added as needed, for sub-groups too.

    Raises:
        HeapError: ranks are on several hosts, more ranks share a GPU than allowed, GPUs cannot address each other's
            memory, or the memory of one GPU does not suffice.
    """

    backend = "torch"
    network = "p2p"
    default_bytes = 2**30
    sub_groups_grow = True
    remedy = "Free GPU memory, or create layers with a smaller max_tokens or capacity; the heap needs {gib} GiB."

    def __init__(self, heap_bytes: int = default_bytes) -> None:
        super().__init__(heap_bytes)

    def _begin(self, heap_bytes: int) -> int:
        if len(self._hosts) > 1:
            raise HeapError(
                f"the heap of torch needs all ranks on one host, these are on {len(self._hosts)}: "
                f'{", ".join(self._hosts)}. Several hosts need NVSHMEM: install nvshmem4py and choose heap="nvshmem".'
            )
        settings = dict(_DEFAULTS)
        if read_environment().ranks_per_gpu > 1:
            settings["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        set_defaults(settings)
        return heap_bytes

    def _make_chunk(self, size: int, group: Any) -> tuple[torch.Tensor, Sequence[int], Any] | None:
        if not check_fits(self, size, group, _SPARE_BYTES):
            return None
        # The public symm_mem.empty may use a pool, whose blocks start at different offsets on different ranks.
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed._symmetric_memory import rendezvous

        memory, failure = None, None
        try:
            memory = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, self.device)
        except RuntimeError as error:
            failure = str(error)
        if any(self.gather(failure, group, "the allocation of a chunk")):
            return None
        assert memory is not None
        everybody: Any = dist.group.WORLD
        try:
            handle = rendezvous(memory, everybody if group is None else group)
        except RuntimeError as error:
            raise HeapError(
                f"rank {self.rank} cannot map the symmetric memory of the other ranks: {error}. Every GPU must reach "
                "every other by NVLink or PCIe peer access, and the ranks run in one container."
            ) from error
        own = self.members(group).index(self.rank)
        inside = memory.data_ptr() - handle.buffer_ptrs[own]
        told = self.gather(inside, group, "the addresses of a chunk")
        addresses = [int(base) + there for base, there in zip(handle.buffer_ptrs, told, strict=True)]
        return memory, addresses, handle

    def _end(self) -> None:
        self._chunks.clear()  # the memory is freed with the last tensor over it

    def _net_addresses(self, members: Sequence[int], offsets: Sequence[int]) -> list[int]:
        return self._addresses(members, offsets)
