"""Common part of the GPU heaps: chunks of memory, the placement of ranks, detection of ended processes.

Allocating a chunk is collective and takes milliseconds. So a heap allocates few, large chunks and hands out pieces of
them itself.
"""

from __future__ import annotations

import os
import select
import socket
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from triton_ep.errors import ConfigError, HeapError, PeerFailed
from triton_ep.heap.allocator import Arena
from triton_ep.heap.base import SymmetricHeap
from triton_ep.heap.bounded import within
from triton_ep.runtime.environment import read_environment

ALIGN_BYTES = 256
CHUNK_STEP = 2**28
"""Sizes of chunks are multiples of this many bytes."""


@dataclass(frozen=True)
class Chunk:
    """Memory of the same size on every rank that allocated it together.

    Attributes:
        memory: [size] uint8, this rank's memory.
        places: by world rank: start of the chunk in that rank's arena, and address of that rank's memory in this
            process, 0 without peer access.
        owner: object that must live as long as the memory.
    """

    memory: torch.Tensor
    places: Mapping[int, tuple[int, int]]
    owner: Any = None

    def offset(self, rank: int, offset: int) -> int | None:
        """Convert an offset in a rank's arena to an offset in the chunk; None: it lies in another chunk."""
        start = self.places[rank][0] if rank in self.places else offset + 1
        return offset - start if start <= offset < start + self.memory.numel() else None


class GpuHeap(SymmetricHeap):
    """Symmetric memory of one GPU per rank; collective over the world, on the current CUDA device.

    heap_bytes: minimum size of the first chunk.

    Raises:
        HeapError: more ranks share a GPU than allowed, or the memory of one GPU does not suffice.
    """

    sub_groups_grow: ClassVar[bool]
    """Whether the ranks of a group can allocate a chunk without the other ranks."""

    def __init__(self, heap_bytes: int) -> None:
        super().__init__(Arena(0, ALIGN_BYTES))
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._chunks: list[Chunk] = []
        self._failed = False
        self._check_placement()
        heap_bytes = self._begin(heap_bytes)
        if not self._grow(heap_bytes, None):
            raise HeapError(
                f"the first {heap_bytes} bytes of symmetric memory do not fit on a GPU. Free GPU memory, or request "
                "less with heap_bytes, TRITON_EP_HEAP_SIZE or NVSHMEM_SYMMETRIC_SIZE."
            )

    @abstractmethod
    def _begin(self, heap_bytes: int) -> int:
        """Start the library that allocates chunks, on all ranks. Returns the bytes of the first chunk."""

    @abstractmethod
    def _make_chunk(self, size: int, group: Any) -> tuple[torch.Tensor, Sequence[int], Any] | None:
        """Allocate a chunk: this rank's memory, the addresses of all members' memory, and the owner; None: no room.

        Collective over `group`; the outcome is the same on all members.
        """

    @abstractmethod
    def _end(self) -> None:
        """Free the chunks and end the library that allocated them; collective over the world."""

    def close(self) -> None:
        """Give all memory back; collective over the world, idempotent.

        If a peer is gone, the memory is freed when the process ends, since giving it back takes all ranks.

        Raises:
            ConfigError: the process group was destroyed before; the memory is then also freed when the process ends.
        """
        if self._closed:
            return
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
        if not self._failed:
            self._end()

    def failed_peer(self) -> int | None:
        """World rank of a peer on this host whose process has ended. On other hosts only a timeout reveals it."""
        return next((rank for rank in self._pidfds if self._ended(rank)), None)

    def drain(self, limit_s: float, network: bool = False) -> None:
        """Wait until this rank's device has finished all its work, and its stores have arrived.

        network: kernels may have called put functions, which return before the data has arrived at the peer.

        Raises:
            TimeoutError: not within `limit_s` seconds.
        """

        def work() -> None:
            with torch.cuda.device(self.device):
                torch.cuda.synchronize()
                if network:
                    self._quiet()

        within(limit_s, work)

    def abort(self, reason: str) -> None:
        """Remember that this rank failed: `close` will not wait for the others, which run into their time limits."""
        self._failed = True

    def _quiet(self) -> None:
        """Wait until the puts of kernels have arrived at the peers."""

    def _ended(self, rank: int) -> bool:
        if rank not in self._pidfds:  # a rank of another host
            return False
        poll = select.poll()
        poll.register(self._pidfds[rank], select.POLLIN)
        return bool(poll.poll(0))

    def _check_placement(self) -> None:
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        told = self.gather((socket.gethostname(), uuid, os.getpid()), None, "the placement of ranks")
        places = [(host, gpu) for host, gpu, _ in told]
        check_sharing(places, read_environment().ranks_per_gpu)
        self._hosts = sorted({host for host, _ in places})
        here = [rank for rank, (host, _) in enumerate(places) if host == places[self.rank][0] and rank != self.rank]
        self._pidfds = {rank: os.pidfd_open(told[rank][2]) for rank in here}

    def _grow(self, nbytes: int, group: Any) -> bool:
        members = self.members(group)
        whole = len(members) == self.world_size
        if not whole and not self.sub_groups_grow:
            return False
        size = -(-nbytes // CHUNK_STEP) * CHUNK_STEP
        torch.cuda.empty_cache()  # return unused memory that torch's allocator has cached
        made = self._make_chunk(size, group)
        if made is None:
            return False
        memory, addresses, owner = made
        start = self._arena.extend(size, None if whole else frozenset(members))
        starts = self.gather(start, group, "the end of the growth of the heap")
        places = dict(zip(members, zip(starts, addresses, strict=True), strict=True))
        self._chunks.append(Chunk(memory, places, owner))
        return True

    def _zeroed(self, offset: int, nbytes: int) -> torch.Tensor:
        chunk, inside = self._find(self.rank, offset)
        local = chunk.memory[inside : inside + nbytes].zero_()
        torch.cuda.synchronize(self.device)
        return local

    def _addresses(self, members: Sequence[int], offsets: Sequence[int]) -> list[int]:
        found = []
        for rank, offset in zip(members, offsets, strict=True):
            chunk, inside = self._find(rank, offset)
            address = chunk.places[rank][1]
            found.append(address + inside if address else 0)
        return found

    def _discard(self, offset: int, nbytes: int) -> None:
        """No effect: a chunk stays until the heap is closed."""

    def _find(self, rank: int, offset: int) -> tuple[Chunk, int]:
        """Chunk of an offset in a rank's arena, and the offset inside the chunk."""
        for chunk in self._chunks:
            if (inside := chunk.offset(rank, offset)) is not None:
                return chunk, inside
        raise AssertionError(f"offset {offset} of rank {rank} is in no chunk of this rank")


def check_sharing(places: Sequence[tuple[str, str]], most: int) -> None:
    """Raise if more than `most` ranks use one GPU; places: host and GPU of each rank.

    Raises:
        HeapError: more do.
    """
    for host, gpu in dict.fromkeys(places):
        ranks = [rank for rank, place in enumerate(places) if place == (host, gpu)]
        if len(ranks) > most:
            raise HeapError(
                f"ranks {', '.join(map(str, ranks))} use the same GPU {gpu} of {host}, at most {most} may. Call "
                "torch.cuda.set_device(local_rank) first, or start fewer ranks; for tests "
                f"TRITON_EP_RANKS_PER_GPU={len(ranks)} lets them share it, in time slices."
            )


def check_fits(heap: GpuHeap, size: int, group: Any, spare: int = 0) -> bool:
    """Whether a chunk of `size` bytes, and `spare` more, fits on the GPU of every member. Collective over `group`."""
    free, _ = torch.cuda.mem_get_info(heap.device)
    return min(heap.gather(free, group, "the growth of the heap")) >= size + spare
