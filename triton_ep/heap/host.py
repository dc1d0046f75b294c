"""Symmetric heap of CPU ranks on one host: one memfd per rank, mapped by every peer.

A memfd has no name: nothing stays in /dev/shm after a kill -9, and that file system does not limit its size.
Peers open it through /proc/<pid>/fd/<n>, which requires the same user and pid namespace. Pages are allocated
when they are touched, and given back when an allocation is freed.

A control page precedes the arena: it records whether this rank has aborted, and why. A waiting kernel checks the
control pages and the processes of its peers, so that it fails instead of waiting for a rank that is gone.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Sequence

import torch

from triton_ep.errors import HeapError, PeerFailed
from triton_ep.heap.allocator import Arena
from triton_ep.heap.base import SymmetricHeap
from triton_ep.runtime import interpreter

_CONTROL_BYTES = mmap.PAGESIZE
_WORD = struct.Struct("=q")  # length of the reason + 1 after an abort, else 0; the reason follows
_LONGEST_REASON = 2000
_GRACE_S = 1.0


class HostHeap(SymmetricHeap):
    """Symmetric memory of ranks that are processes of one host; collective over the world.

    heap_bytes: address space of the arena per rank.

    Raises:
        HeapError: ranks are on several hosts, or cannot open each other's memory.
    """

    backend = "host"
    network = "p2p"
    default_bytes = 8 * 2**30  # address space; memory is allocated as it is used
    remedy = "Set TRITON_EP_HEAP_SIZE={gib}G, or pass heap_bytes to initialize_distributed."

    def __init__(self, heap_bytes: int = default_bytes) -> None:
        super().__init__(Arena(heap_bytes, mmap.PAGESIZE))
        self.device = torch.device("cpu")
        self._maps: list[mmap.mmap] = []
        self._pidfds: list[int] = []
        self._gone_since: dict[int, float] = {}
        self._aborted = False
        self._fd = os.memfd_create("triton_ep-heap")
        try:
            self._map_all()
        except BaseException:
            self._let_go()
            raise
        self._memory = torch.frombuffer(self._maps[self.rank], dtype=torch.uint8)[_CONTROL_BYTES:]
        self._bases = [_address(mapped) + _CONTROL_BYTES for mapped in self._maps]
        for base, mapped in zip(self._bases, self._maps, strict=True):
            interpreter.register_heap(base, len(mapped) - _CONTROL_BYTES)
        interpreter.set_wait_hook(self.check_peers)

    def _map_all(self) -> None:
        """Create this rank's memory and map the memory of all ranks; collective over the world."""
        failure = None
        try:
            os.ftruncate(self._fd, _CONTROL_BYTES + self._arena.size)
        except (OSError, OverflowError) as error:
            failure = (
                f"rank {self.rank} cannot make {self._arena.size} bytes of symmetric memory: {error}. Choose less with "
                "TRITON_EP_HEAP_SIZE or heap_bytes, or raise the limit on file sizes (ulimit -f)."
            )
        place = socket.gethostname(), os.getpid(), self._fd, self._arena.size
        answers = self.gather((failure, place), None, "the start of the heap")
        if failures := [text for text, _ in answers if text]:
            raise HeapError(failures[0])
        places = [place for _, place in answers]
        hosts = sorted({host for host, *_ in places})
        if len(hosts) > 1:
            raise HeapError(
                f"the host backend needs all ranks on one host, these are on {len(hosts)}: {', '.join(hosts)}. "
                "Ranks of several hosts need GPUs and backend='nvshmem'."
            )
        try:
            for _, pid, fd, size in places:
                self._maps.append(_map_peer(pid, fd, _CONTROL_BYTES + size))
                self._pidfds.append(os.pidfd_open(pid))
        except OSError as error:
            failure = f"rank {self.rank} cannot map the memory of rank {len(self._maps)}: {error}. " + (
                f"Choose less address space than {size} bytes with TRITON_EP_HEAP_SIZE."
                if error.errno == errno.ENOMEM
                else "The ranks must run as one user, in one container."
            )
        if failures := [text for text in self.gather(failure, None, "the mapping of the heap") if text]:
            raise HeapError(failures[0])

    def close(self) -> None:
        """Give all memory back; collective over the world unless a rank has failed; idempotent.

        Raises:
            PeerFailed: a peer did not call `close`, or ended meanwhile. ConfigError: the process group was destroyed
                before. In both cases the heap is closed, and its memory is freed when no rank maps it any more.
        """
        if self._closed:
            return
        met = False
        try:
            if not self._aborted and self.failed_peer() is None:
                self.gather(None, None, "the end of the heap")
                met = True
        finally:
            self._end(met)

    def _end(self, met: bool) -> None:
        """Unmap and close; met: all ranks have met, so no rank uses another's memory any more."""
        self._closed = True
        interpreter.set_wait_hook(None)
        for base in self._bases:
            interpreter.unregister_heap(base)
        # Tensors over the memory may live on: their pages are freed now, the mapping with the last tensor. The control
        # page stays for peers that have not yet read why this rank failed.
        if met and len(self._maps[self.rank]) > _CONTROL_BYTES:
            self._maps[self.rank].madvise(mmap.MADV_REMOVE, _CONTROL_BYTES)
        del self._memory
        self._let_go()

    def _let_go(self) -> None:
        self._maps.clear()
        for fd in (self._fd, *self._pidfds):
            os.close(fd)
        self._pidfds.clear()

    def failed_peer(self) -> int | None:
        """World rank of a peer that has aborted or whose process has ended; None if there is none, or after close."""
        for rank in range(len(self._pidfds)):
            if rank != self.rank and (self._reason(rank) is not None or self._ended(rank)):
                return rank
        return None

    def abort(self, reason: str) -> None:
        """Make every peer that waits in a kernel raise PeerFailed with `reason`; cannot be undone."""
        self._check_open()
        text = reason.encode()[:_LONGEST_REASON]
        own = self._maps[self.rank]
        own[_WORD.size : _WORD.size + len(text)] = text
        own[: _WORD.size] = _WORD.pack(len(text) + 1)  # written last: a reader that sees the word finds the text
        self._aborted = True

    def check_peers(self) -> None:
        """Check the peers; a waiting kernel calls this every few milliseconds.

        Raises:
            PeerFailed: a peer aborted, or its process ended more than a second ago and the wait is still not over. The
                second allows for a peer that ended after sending the data this rank waits for.
        """
        for rank in range(self.world_size):
            if rank == self.rank:
                continue
            if (reason := self._reason(rank)) is not None:
                raise PeerFailed(f"rank {rank} failed while rank {self.rank} waited: {reason}")
            if self._ended(rank):
                since = self._gone_since.setdefault(rank, time.monotonic())
                if time.monotonic() - since > _GRACE_S:
                    raise PeerFailed(f"the process of rank {rank} ended while rank {self.rank} waited for it.")

    def _reason(self, rank: int) -> str | None:
        page = self._maps[rank]
        (word,) = _WORD.unpack(page[: _WORD.size])
        if word == 0:
            return None
        return page[_WORD.size : _WORD.size + word - 1].decode(errors="replace")

    def _fate(self, rank: int) -> str | None:
        reason = self._reason(rank)
        return super()._fate(rank) if reason is None else f"failed: {reason}"

    def _ended(self, rank: int) -> bool:
        poll = select.poll()
        poll.register(self._pidfds[rank], select.POLLIN)
        return bool(poll.poll(0))

    def _zeroed(self, offset: int, nbytes: int) -> torch.Tensor:
        self._discard(offset, nbytes)  # a missing page reads as zeros, and takes no memory until it is used
        return self._memory[offset : offset + nbytes]

    def _addresses(self, members: Sequence[int], offsets: Sequence[int]) -> list[int]:
        return [self._bases[rank] + offset for rank, offset in zip(members, offsets, strict=True)]

    def _net_addresses(self, members: Sequence[int], offsets: Sequence[int]) -> list[int]:
        return self._addresses(members, offsets)

    def _discard(self, offset: int, nbytes: int) -> None:
        pages = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._maps[self.rank].madvise(mmap.MADV_REMOVE, _CONTROL_BYTES + offset, pages)


def _map_peer(pid: int, fd: int, nbytes: int) -> mmap.mmap:
    """Map `nbytes` of the file that process `pid` has open as `fd`."""
    opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(opened, nbytes)
    finally:
        os.close(opened)


def _address(mapped: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))
