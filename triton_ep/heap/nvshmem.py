"""Symmetric heap of ranks on GPUs, over NVSHMEM through nvshmem4py; any torch process group can bootstrap it.

NVSHMEM allocates collectively over the world, in the same order on all ranks. So a sub-group takes pieces of existing
chunks, and cannot allocate a chunk.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from triton_ep.errors import HeapError
from triton_ep.heap.gpu import CHUNK_STEP, GpuHeap, check_fits
from triton_ep.runtime.environment import read_environment, set_defaults

_OWN_BYTES = 2**27  # memory left for NVSHMEM itself, besides our chunks
# On one host only NVLink is needed, and the loopback interface carries the bootstrap. Multicast (NVLS) reserves
# memory, and our kernels do not use it.
_DEFAULTS = {"NVSHMEM_DISABLE_NVLS": "1"}
_ONE_HOST_DEFAULTS = {"NVSHMEM_REMOTE_TRANSPORT": "none", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo"}
_STATE_SYMBOL = b"nvshmemi_device_state_d"


class NvshmemHeap(GpuHeap):
    """Symmetric memory of one GPU per rank, on any number of hosts.

    heap_bytes: size of the first chunk. Allocations over the whole world add chunks; a sub-group only uses existing
        ones.

    Raises:
        HeapError: nvshmem4py is missing, too many ranks share a GPU, or the memory of one GPU does not suffice.
    """

    backend = "nvshmem"
    network = "nvshmem"
    default_bytes = 4 * 2**30
    sub_groups_grow = False
    remedy = (
        "Set NVSHMEM_SYMMETRIC_SIZE={gib}G on all ranks, or pass heap_bytes to initialize_distributed; max_tokens "
        "and capacity determine the need of a layer."
    )

    def __init__(self, heap_bytes: int = default_bytes) -> None:
        super().__init__(heap_bytes)
        self.nvshmem_version = str(self._nvshmem.get_version().libnvshmem_version)
        self._loads = _hook_of_loads()
        if self._loads is not None:
            self._loads.add(self._initialize_module)

    def close(self) -> None:
        """Give all memory back and end NVSHMEM; collective over the world, idempotent.

        If a peer is gone, NVSHMEM cannot finalize, which is collective; its memory is freed when the process ends.

        Raises:
            ConfigError: the process group was destroyed before; the memory is then also freed when the process ends.
        """
        if not self._closed and self._loads is not None:
            self._loads.remove(self._initialize_module)
        super().close()

    def _begin(self, heap_bytes: int) -> int:
        settings = dict(_DEFAULTS)
        if len(self._hosts) == 1:
            settings |= _ONE_HOST_DEFAULTS
        if "NVSHMEM_SYMMETRIC_SIZE" in read_environment().nvshmem:
            heap_bytes = max(heap_bytes - _OWN_BYTES, CHUNK_STEP)
        else:
            settings["NVSHMEM_SYMMETRIC_SIZE"] = str(heap_bytes + _OWN_BYTES)
        set_defaults(settings)
        self._nvshmem, self._bindings = self._start()
        return heap_bytes

    def _end(self) -> None:
        for chunk in reversed(self._chunks):
            self._bindings.free(chunk.places[self.rank][1])
        self._chunks.clear()
        self._nvshmem.finalize()

    def _quiet(self) -> None:
        self._bindings.quiet_on_stream(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()

    def _start(self) -> tuple[Any, Any]:
        """Start NVSHMEM with the unique id of rank 0; return its Python modules."""
        failure, uid = None, None
        try:
            import nvshmem.bindings
            import nvshmem.core
            from cuda.core import Device

            uid = nvshmem.core.get_unique_id(empty=self.rank != 0)
        except ImportError as error:
            failure = f"rank {self.rank} cannot load nvshmem4py: {error}"
        answers = self.gather((failure, uid), None, "the start of NVSHMEM")
        failures = [text for text, _ in answers if text]
        if failures:
            major = (torch.version.cuda or "13").split(".")[0]
            raise HeapError(f"{failures[0]}. Install triton_ep[cu{major}].")
        device = Device(self.device.index)
        device.set_current()
        nvshmem.core.init(
            device=device, uid=answers[0][1], rank=self.rank, nranks=self.world_size, initializer_method="uid"
        )
        return nvshmem.core, nvshmem.bindings

    def _make_chunk(self, size: int, group: Any) -> tuple[torch.Tensor, Sequence[int], Any] | None:
        # nvshmem_malloc is collective and ends the process on a CUDA error: request only memory that is free.
        if not check_fits(self, size, group, _OWN_BYTES):
            return None
        base = self._bindings.malloc(size)
        if min(self.gather(base, None, "the allocation of a chunk")) == 0:
            if base:
                raise HeapError(f"nvshmem_malloc({size}) succeeded on rank {self.rank} and failed on another.")
            return None
        addresses = [base if pe == self.rank else self._bindings.ptr(base, pe) for pe in range(self.world_size)]
        return _as_tensor(base, size, self.device), addresses, None

    def _net_addresses(self, members: Sequence[int], offsets: Sequence[int]) -> list[int]:
        # A put takes this rank's own address of the corresponding place in the chunk.
        places = [self._find(rank, offset) for rank, offset in zip(members, offsets, strict=True)]
        return [chunk.places[self.rank][1] + inside for chunk, inside in places]

    def _initialize_module(
        self, module: int, function: int, name: str, metadata_group: Mapping[str, str], hash: str
    ) -> None:
        """Give a freshly loaded kernel NVSHMEM's device state, if its module has the symbol. A hook for Triton."""
        from cuda.bindings import driver

        status, _, _ = driver.cuModuleGetGlobal(driver.CUmodule(module), _STATE_SYMBOL)
        if status == driver.CUresult.CUDA_ERROR_NOT_FOUND:
            return
        self._check_accepted(self._bindings.cumodule_init(module), name)

    def initialize_library(self, library: int, name: str) -> None:
        """Give NVSHMEM's device state to a freshly loaded library (a CUlibrary) with the kernel `name`.

        Raises:
            HeapError: NVSHMEM refuses the library.
        """
        self._check_accepted(self._bindings.culibrary_init(library), name)

    def _check_accepted(self, status: int, name: str) -> None:
        if status != 0:
            raise HeapError(f"NVSHMEM refused the kernel {name}: its device code does not fit the host library.")


def _hook_of_loads() -> Any:
    """Triton's hook for freshly loaded kernels; None if nothing will be compiled and Triton must not be loaded."""
    if read_environment().aot == "require" and "triton" not in sys.modules:
        return None
    try:
        from triton import knobs
    except ImportError:
        return None  # kernels then come from the ahead-of-time library, or their launches raise
    return knobs.runtime.kernel_load_end_hook


class _Memory:
    """A raw device address that torch can import, without copying or owning the memory."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def _as_tensor(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(_Memory(address, nbytes), device=device)
