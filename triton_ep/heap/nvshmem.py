"""Symmetric heap of ranks on GPUs, over NVSHMEM through nvshmem4py; any torch process group carries the start.

NVSHMEM allocates collectively over the world, one call after the other on all ranks. So this heap takes few,
large chunks and hands out pieces of them by itself: a sub-group can then allocate without the others.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from triton_ep.errors import ConfigError, HeapError, PeerFailed
from triton_ep.heap.allocator import Arena
from triton_ep.heap.base import SymmetricHeap
from triton_ep.heap.bounded import within
from triton_ep.runtime.environment import read_environment, set_defaults

DEFAULT_BYTES = 4 * 2**30
"""Bytes of the first chunk, on every GPU."""
_ALIGN_BYTES = 256
_CHUNK_STEP = 2**28
_OWN_BYTES = 2**27  # what NVSHMEM may need for itself beside our chunks
# On one host nothing but NVLink is needed, and the loopback interface carries the start. Multicast (NVLS) is
# not used by our kernels, and reserves memory.
_DEFAULTS = {"NVSHMEM_DISABLE_NVLS": "1"}
_ONE_HOST_DEFAULTS = {"NVSHMEM_REMOTE_TRANSPORT": "none", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo"}
_STATE_SYMBOL = b"nvshmemi_device_state_d"


class NvshmemHeap(SymmetricHeap):
    """Symmetric memory of one GPU per rank; collective over the world, on the current CUDA device.

    heap_bytes: size of the first chunk. More is added for allocations over the whole world; a sub-group must
        do with what is there.

    Raises:
        HeapError: nvshmem4py is missing, ranks share a GPU that may not, or the memory of one GPU does not suffice.
    """

    backend = "nvshmem"
    network = "nvshmem"
    remedy = (
        "Set NVSHMEM_SYMMETRIC_SIZE={gib}G on all ranks, or pass heap_bytes to initialize_distributed; max_tokens "
        "and capacity decide what a layer needs."
    )

    def __init__(self, heap_bytes: int = DEFAULT_BYTES) -> None:
        super().__init__(Arena(0, _ALIGN_BYTES))
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._check_placement()
        settings = dict(_DEFAULTS)
        if self._one_host:
            settings |= _ONE_HOST_DEFAULTS
        if "NVSHMEM_SYMMETRIC_SIZE" in read_environment().nvshmem:
            heap_bytes = max(heap_bytes - _OWN_BYTES, _CHUNK_STEP)
        else:
            settings["NVSHMEM_SYMMETRIC_SIZE"] = str(heap_bytes + _OWN_BYTES)
        set_defaults(settings)
        self._nvshmem, self._bindings = self._start()
        self._chunks: list[tuple[int, list[int], torch.Tensor]] = []  # (arena start, address per PE, memory)
        self._failed = False
        if not self._grow(heap_bytes, None):
            raise HeapError(
                f"the first {heap_bytes} bytes of symmetric memory do not fit on a GPU. Free GPU memory, or ask for "
                "less with heap_bytes or NVSHMEM_SYMMETRIC_SIZE."
            )
        self.nvshmem_version = str(self._nvshmem.get_version().libnvshmem_version)
        self._loads = _hook_of_loads()
        if self._loads is not None:
            self._loads.add(self._initialize_module)

    def close(self) -> None:
        """Give all memory back and end NVSHMEM; collective over the world, idempotent.

        If a peer is gone NVSHMEM cannot end, for that is collective; its memory then goes with the process.

        Raises:
            ConfigError: the process group was destroyed before; NVSHMEM's memory then goes with the process, too.
        """
        if self._closed:
            return
        if self._loads is not None:
            self._loads.remove(self._initialize_module)
        self._failed = self._failed or self.failed_peer() is not None
        try:
            if not self._failed:
                self.drain(self.limit_s())
                self.gather(None, None, "the end of the heap")
        except (PeerFailed, TimeoutError):
            self._failed = True
        except ConfigError:
            self._failed = True
            raise
        finally:
            self._closed = True
            for fd in self._pidfds.values():
                os.close(fd)
            self._pidfds.clear()
        if self._failed:
            return
        for _, addresses, _ in reversed(self._chunks):
            self._bindings.free(addresses[self.rank])
        self._chunks.clear()
        self._nvshmem.finalize()

    def failed_peer(self) -> int | None:
        """World rank of a peer of this host whose process has ended. An expired wait reveals peers of other hosts."""
        return next((rank for rank in self._pidfds if self._ended(rank)), None)

    def _ended(self, rank: int) -> bool:
        if rank not in self._pidfds:  # of another host
            return False
        poll = select.poll()
        poll.register(self._pidfds[rank], select.POLLIN)
        return bool(poll.poll(0))

    def drain(self, limit_s: float, network: bool = False) -> None:
        """Wait until this rank's device has run all that it was given, and its stores have arrived.

        network: kernels may have called put functions, which return before peers have what they sent.

        Raises:
            TimeoutError: it has not within `limit_s` seconds.
        """

        def work() -> None:
            with torch.cuda.device(self.device):
                torch.cuda.synchronize()
                if network:
                    self._bindings.quiet_on_stream(torch.cuda.current_stream().cuda_stream)
                    torch.cuda.synchronize()

        within(limit_s, work)

    def abort(self, reason: str) -> None:
        """Remember that this rank failed: `close` will not wait for the others, who run into their time limits."""
        self._failed = True

    def _check_placement(self) -> None:
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        told = self.gather((socket.gethostname(), uuid, os.getpid()), None, "the placement of ranks")
        places = [(host, gpu) for host, gpu, _ in told]
        check_sharing(places, read_environment().ranks_per_gpu)
        self._one_host = len({host for host, _ in places}) == 1
        here = [rank for rank, (host, _) in enumerate(places) if host == places[self.rank][0] and rank != self.rank]
        self._pidfds = {rank: os.pidfd_open(told[rank][2]) for rank in here}

    def _start(self) -> tuple[Any, Any]:
        """Start NVSHMEM with a unique id of rank 0; returns its Python modules."""
        failure, uid = None, None
        try:
            import nvshmem.bindings
            import nvshmem.core
            from cuda.core import Device

            uid = nvshmem.core.get_unique_id(empty=self.rank != 0)
        except ImportError as error:
            failure = f"rank {self.rank} cannot load nvshmem4py: {error}"
        told = self.gather((failure, uid), None, "the start of NVSHMEM")
        failures = [text for text, _ in told if text]
        if failures:
            major = (torch.version.cuda or "13").split(".")[0]
            raise HeapError(f"{failures[0]}. Install triton_ep[cu{major}].")
        device = Device(self.device.index)
        device.set_current()
        nvshmem.core.init(
            device=device, uid=told[0][1], rank=self.rank, nranks=self.world_size, initializer_method="uid"
        )
        return nvshmem.core, nvshmem.bindings

    def _grow(self, nbytes: int, group: Any) -> bool:
        if dist.get_world_size(group) != self.world_size:
            return False
        size = -(-nbytes // _CHUNK_STEP) * _CHUNK_STEP
        torch.cuda.empty_cache()  # what torch keeps for itself but does not use
        free, _ = torch.cuda.mem_get_info(self.device)
        # nvshmem_malloc is collective and ends the process on a CUDA error: ask only for what is there.
        if min(self.gather(free, None, "the growth of the heap")) < size + _OWN_BYTES:
            return False
        base = self._bindings.malloc(size)
        if min(self.gather(base, None, "the end of the growth of the heap")) == 0:
            if base:
                raise HeapError(f"nvshmem_malloc({size}) succeeded on rank {self.rank} and failed on another.")
            return False
        addresses = [base if pe == self.rank else self._bindings.ptr(base, pe) for pe in range(self.world_size)]
        self._chunks.append((self._arena.extend(size), addresses, _as_tensor(base, size, self.device)))
        return True

    def _zeroed(self, offset: int, nbytes: int) -> torch.Tensor:
        start, _, memory = self._chunk(offset)
        local = memory[offset - start : offset - start + nbytes].zero_()
        torch.cuda.synchronize(self.device)
        return local

    def _addresses(self, members: Sequence[int], offsets: Sequence[int]) -> list[int]:
        found = []
        for pe, offset in zip(members, offsets, strict=True):
            start, addresses, _ = self._chunk(offset)
            found.append(addresses[pe] + offset - start if addresses[pe] else 0)
        return found

    def _net_addresses(self, members: Sequence[int], offsets: Sequence[int]) -> list[int]:
        # A put names the peer's copy by the address that the same place has in this rank's own chunk.
        chunks = [self._chunk(offset) for offset in offsets]
        return [
            addresses[self.rank] + offset - start for (start, addresses, _), offset in zip(chunks, offsets, strict=True)
        ]

    def _discard(self, offset: int, nbytes: int) -> None:
        """Nothing: a chunk stays until the heap is closed."""

    def _chunk(self, offset: int) -> tuple[int, list[int], torch.Tensor]:
        return next(chunk for chunk in reversed(self._chunks) if chunk[0] <= offset)

    def _initialize_module(
        self, module: int, function: int, name: str, metadata_group: Mapping[str, str], hash: str
    ) -> None:
        """Give a freshly loaded kernel NVSHMEM's device state, if it has a place for it. A hook of Triton's."""
        from cuda.bindings import driver

        status, _, _ = driver.cuModuleGetGlobal(driver.CUmodule(module), _STATE_SYMBOL)
        if status == driver.CUresult.CUDA_ERROR_NOT_FOUND:
            return
        self._check_accepted(self._bindings.cumodule_init(module), name)

    def initialize_library(self, library: int, name: str) -> None:
        """Give a freshly loaded library (a CUlibrary) with the kernel `name` NVSHMEM's device state.

        Raises:
            HeapError: NVSHMEM refuses it.
        """
        self._check_accepted(self._bindings.culibrary_init(library), name)

    def _check_accepted(self, status: int, name: str) -> None:
        if status != 0:
            raise HeapError(f"NVSHMEM refused the kernel {name}: its device code does not fit the host library.")


def check_sharing(places: Sequence[tuple[str, str]], most: int) -> None:
    """At most `most` ranks are on one GPU; places: host and GPU of each rank.

    Raises:
        HeapError: there are more.
    """
    for host, gpu in dict.fromkeys(places):
        ranks = [rank for rank, place in enumerate(places) if place == (host, gpu)]
        if len(ranks) > most:
            raise HeapError(
                f"ranks {', '.join(map(str, ranks))} use the same GPU {gpu} of {host}, at most {most} may. Call "
                "torch.cuda.set_device(local_rank) first, or start fewer ranks; for tests "
                f"TRITON_EP_RANKS_PER_GPU={len(ranks)} lets them share it, in time slices."
            )


def _hook_of_loads() -> Any:
    """Triton's hook for freshly loaded kernels; None where nothing will be compiled, and Triton not be loaded."""
    if read_environment().aot == "require" and "triton" not in sys.modules:
        return None
    try:
        from triton import knobs
    except ImportError:
        return None  # kernels then come from the ahead-of-time library, or not at all: runtime.py says so
    return knobs.runtime.kernel_load_end_hook


class _Memory:
    """A raw device address as torch can import it, without a copy and without owning it."""

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
