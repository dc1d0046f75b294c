"""The symmetric heap: memory that every rank of a group can address in all of them.

One protocol, two backends: host.py (shared memory of CPU ranks) and nvshmem.py (GPUs). A rank allocates from
its own arena and the members of the group then tell each other where, so offsets may differ between ranks and
two disjoint groups may allocate at the same time.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from triton_ep.errors import ConfigError, FinalizedError, HeapError, PeerFailed
from triton_ep.heap.allocator import Arena

_DYING_S = 0.5


@dataclass(frozen=True)
class SymmTensor:
    """One symmetric allocation, as a member of its group sees it.

    Valid until `SymmetricHeap.free`, or until the heap is closed.

    Attributes:
        local: this rank's copy, on the heap's device, 256-byte aligned.
        addrs: [n] int64 on that device, n = members of the group: address through which THIS rank loads and
            stores the copy of member m; 0 = not reachable by peer access.
        net_addrs: [n] int64 on that device: address that names member m's copy to a put function.
        nbytes: size of each copy.
        offset: where the copy lies in this rank's arena, in bytes.
    """

    local: torch.Tensor
    addrs: torch.Tensor
    net_addrs: torch.Tensor
    nbytes: int
    offset: int


class _Piece(NamedTuple):
    """What a member says of its part in an allocation; bytes. `offset` is None where there was no room."""

    rank: int
    offset: int | None
    asked: int
    free: int
    size: int


class SymmetricHeap(ABC):
    """Symmetric memory of one process. Made by `initialize_distributed`, ended by `close`.

    Nothing is freed by a destructor: symmetric memory freed out of step hangs the other ranks.

    Attributes:
        backend: "host" or "nvshmem".
        network: "p2p" if puts are stores through `addrs`, "nvshmem" if they call NVSHMEM.
        device: where the memory is.
        rank, world_size: this process in the world.
        nvshmem_version: release of NVSHMEM's host library, "3.4.5"; None without NVSHMEM.
        remedy: what to do when an allocation finds no room; {gib} stands for the heap size it needs.
    """

    backend: str
    network: str
    device: torch.device
    rank: int
    world_size: int
    remedy: str
    nvshmem_version: str | None = None

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._closed = False

    def alloc(self, shape: Sequence[int], dtype: torch.dtype, group: Any = None) -> SymmTensor:
        """Allocate a zero-filled tensor of that shape on every member; collective over `group` alone.

        group: process group, any sub-group of the world; None = the world.

        Raises:
            HeapError: on all members, if one has no room: bytes asked, bytes free, what to do; or if they asked for
                different sizes.
            ConfigError: this rank is not a member of `group`.
            PeerFailed: a member is gone, or late.
            FinalizedError: after `close`.
        """
        self._check_open()
        count = 1
        for extent in shape:
            if extent < 0:
                raise HeapError(f"a symmetric tensor cannot have the shape {list(shape)}.")
            count *= int(extent)
        nbytes = max(count * dtype.itemsize, 1)
        pieces = self._reserve(nbytes, group)
        members = [piece.rank for piece in pieces]
        offsets = [piece.offset for piece in pieces if piece.offset is not None]
        offset = offsets[members.index(self.rank)]
        local = self._zeroed(offset, nbytes)
        self.barrier(group)  # a member that returns may store to the others, which must have their zeros by then
        return SymmTensor(
            local=local[: count * dtype.itemsize].view(dtype).view(list(shape)),
            addrs=self._table(self._addresses(members, offsets)),
            net_addrs=self._table(self._net_addresses(members, offsets)),
            nbytes=nbytes,
            offset=offset,
        )

    def require(self, nbytes: int, group: Any = None) -> None:
        """Make sure that every member has room for `nbytes` more, in one piece; collective over `group`.

        Says what a user of several allocations needs in all before the first of them is made.

        Raises:
            HeapError: on all members, if one has no room: bytes asked, bytes free, what to do.
        """
        self._check_open()
        own = next(piece for piece in self._reserve(nbytes, group) if piece.rank == self.rank)
        assert own.offset is not None  # _reserve raises where a member has none
        self._arena.give(own.offset, nbytes)

    def free(self, tensor: SymmTensor) -> None:
        """Give this rank's copy back. Local: the caller knows that no member uses it any more."""
        self._check_open()
        self._arena.give(tensor.offset, tensor.nbytes)
        self._discard(tensor.offset, tensor.nbytes)

    def available(self) -> int:
        """Bytes of the largest allocation that would find room on this rank now."""
        return self._arena.largest_free()

    def pes(self, group: Any = None) -> torch.Tensor:
        """[n] int32 on the device: world rank of every member of `group`; collective over it."""
        return torch.tensor(self.gather(self.rank, group), dtype=torch.int32, device=self.device)

    def barrier(self, group: Any = None) -> None:
        """Wait on the host until all members of `group` have come here; work on streams is not awaited.

        Raises:
            PeerFailed: a member is gone, or late.
        """
        self._check_open()
        self.gather(None, group)  # not dist.barrier: with NCCL that would be a kernel

    @abstractmethod
    def close(self) -> None:
        """Give all memory back; collective over the world, idempotent."""

    @abstractmethod
    def failed_peer(self) -> int | None:
        """World rank of a peer that died or aborted, if this backend can tell."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Make peers that wait for this rank fail with `reason`, where the backend can."""

    # --- steps of alloc -----------------------------------------------------------------------------------

    def _reserve(self, nbytes: int, group: Any) -> list[_Piece]:
        """Take a piece on every member, growing the heap if need be; HeapError on all if one has no room."""
        pieces = self._take(nbytes, group)
        if _lacking(pieces) and self._grow(nbytes, group):
            pieces = self._take(nbytes, group)
        if lacking := _lacking(pieces):
            raise self._no_room(lacking[0], nbytes)
        return pieces

    def _take(self, nbytes: int, group: Any) -> list[_Piece]:
        """Take a piece here and hear from all members; this rank's goes back if another has none."""
        offset = self._arena.take(nbytes)
        sizes, lacking = None, True
        try:
            own = _Piece(self.rank, offset, nbytes, self.available(), self._arena.size)
            pieces = self.gather(own, group)
            sizes, lacking = sorted({piece.asked for piece in pieces}), bool(_lacking(pieces))
        finally:
            if offset is not None and (lacking or sizes != [nbytes]):
                self._arena.give(offset, nbytes)
        if len(sizes) > 1:
            raise HeapError(
                f"the ranks of a group asked for different sizes of one symmetric tensor: {sizes} bytes. "
                "Give all ranks the same configuration."
            )
        return pieces

    def _no_room(self, piece: _Piece, nbytes: int) -> HeapError:
        needed = -(-(piece.size - piece.free + nbytes) // 2**30)
        return HeapError(
            f"no room for {nbytes} bytes of symmetric memory on rank {piece.rank}: {piece.free} of {piece.size} bytes "
            f"are free in one piece. {self.remedy.format(gib=needed)}"
        )

    def gather(self, value: Any, group: Any) -> list[Any]:
        """What every member of `group` gave; collective over it.

        Raises:
            ConfigError: this rank is not a member.
            PeerFailed: a member is gone, or did not come within the process group's own time limit.
        """
        size = dist.get_world_size(group)
        if size < 1:  # torch would return at once, without the others
            raise ConfigError(f"rank {self.rank} takes part in a group it is not a member of.")
        told: list[Any] = [None] * size
        try:
            dist.all_gather_object(told, value, group=group)
        except RuntimeError as error:
            peer = self._await_failed_peer()
            who = "a rank of the group" if peer is None else f"rank {peer}"
            raise PeerFailed(
                f"rank {self.rank} met the other ranks in the symmetric heap, but {who} is gone or late (its own error "
                f"says why): {error}"
            ) from error
        return told

    def _await_failed_peer(self) -> int | None:
        """`failed_peer`, with a moment's patience: the sockets of a dying process close before it has ended."""
        deadline = time.monotonic() + _DYING_S
        while (peer := self.failed_peer()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return peer

    def _grow(self, nbytes: int, group: Any) -> bool:
        """Make room for `nbytes` more on every member, collectively; False if this heap cannot."""
        return False

    def _table(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _check_open(self) -> None:
        if self._closed:
            raise FinalizedError("the symmetric heap was closed. Call initialize_distributed again.")

    @abstractmethod
    def _zeroed(self, offset: int, nbytes: int) -> torch.Tensor:
        """[nbytes] uint8: that piece of this rank's arena, all zeros, as peers will see it too."""

    @abstractmethod
    def _addresses(self, members: Sequence[int], offsets: Sequence[int]) -> list[int]:
        """Address in this process of each member's copy; 0 = no peer access."""

    @abstractmethod
    def _net_addresses(self, members: Sequence[int], offsets: Sequence[int]) -> list[int]:
        """Address that names each member's copy to a put function."""

    @abstractmethod
    def _discard(self, offset: int, nbytes: int) -> None:
        """The piece is unused from now on: give its memory to the system, where that is possible."""


def _lacking(pieces: Sequence[_Piece]) -> list[_Piece]:
    return [piece for piece in pieces if piece.offset is None]
