"""The symmetric heap: memory of every rank of a group that all ranks of the group can address.

One protocol, three backends: host.py (shared memory of CPU ranks), nvshmem.py and torch_symmetric.py (GPUs). A rank
allocates from its own arena, and the members of the group then exchange offsets. So offsets may differ between ranks,
and two disjoint groups may allocate at the same time.

All ranks of a layer use its memory. A piece returns to the arena when every rank has either finalized the layer and
drained its device, or ended its process (`retire`). Until then the piece stays reserved, however the layer ended: a
rank that is late for a call may still store to the piece and read from it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from triton_ep.errors import ConfigError, FinalizedError, HeapError, PeerFailed
from triton_ep.heap.allocator import Arena
from triton_ep.heap.bounded import within
from triton_ep.heap.farewells import Farewells
from triton_ep.runtime.environment import MOST_BYTES

_DYING_S = 0.5
_LONGEST_POLL_S = 0.02
_ASK_EACH_S = 0.1  # between two queries of single ranks, each of which costs a message
_LONGEST_WAIT_FOR_ROOM_S = 60.0
_DEFAULT_LIMIT_S = 1800.0  # torch's default, for a process group whose limit is unknown


@dataclass(frozen=True)
class SymmTensor:
    """One symmetric allocation, as a member of its group sees it.

    Valid until `SymmetricHeap.free`, or until the heap is closed.

    Attributes:
        local: this rank's copy, on the heap's device, 256-byte aligned.
        addrs: [n] int64 on the heap's device, n = members of the group: address at which THIS rank loads from and
            stores to the copy of member m; 0 = not reachable by peer access.
        net_addrs: [n] int64 on the heap's device: address that a put function takes for member m's copy.
        addresses: `addrs`, as the host has them.
        nbytes: size of each copy.
        offset: position of the copy in this rank's arena, in bytes.
    """

    local: torch.Tensor
    addrs: torch.Tensor
    net_addrs: torch.Tensor
    addresses: tuple[int, ...]
    nbytes: int
    offset: int


class _Piece(NamedTuple):
    """A member's report about its part in an allocation, in bytes. `offset` is None if it had no room.

    A further `held` bytes belong to layers that the ranks `late` have not ended.
    """

    rank: int
    offset: int | None
    asked: int
    free: int
    size: int
    held: int
    late: tuple[int, ...]


class _Answer(NamedTuple):
    """A member's message at a meeting: its call, the layer of the call, the layers it has ended, and a value."""

    call: str
    layer: str
    ended: tuple[str, ...]
    value: Any


class _Retired(NamedTuple):
    """Memory of a layer that this rank has ended and other ranks have not: pieces of the arena (offset, bytes)."""

    members: tuple[int, ...]
    pieces: tuple[tuple[int, int], ...]


class SymmetricHeap(ABC):
    """Symmetric memory of one process. Created by `initialize_distributed`, ended by `close`.

    Destructors free nothing: symmetric memory freed out of step hangs the other ranks.

    Attributes:
        backend: "host", "nvshmem" or "torch" (registry.py).
        network: "p2p" if puts are stores through `addrs`, "nvshmem" if they call NVSHMEM.
        device: device of the memory.
        rank, world_size: of this process in the world.
        nvshmem_version: release of NVSHMEM's host library, "3.4.5"; None without NVSHMEM.
        default_bytes: size of this rank's first memory, unless set.
        remedy: advice for an allocation without room; {gib} stands for the heap size it needs.
    """

    backend: str
    network: str
    device: torch.device
    rank: int
    world_size: int
    default_bytes: ClassVar[int]
    remedy: str
    nvshmem_version: str | None = None

    def __init__(self, arena: Arena) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._arena = arena
        self._closed = False
        self._retired: dict[str, _Retired] = {}  # by layer
        store = dist.distributed_c10d._get_default_store()
        if store is None:  # as with MPI
            raise HeapError(
                "the process group of the world has no store. Let initialize_distributed create it, or use gloo."
            )
        self._farewells = Farewells(store, self.rank)

    @property
    def closed(self) -> bool:
        """Whether `close` was called. The memory must then not be used any more."""
        return self._closed

    def alloc(self, shape: Sequence[int], dtype: torch.dtype, group: Any = None, layer: str = "") -> SymmTensor:
        """Allocate a zero-filled tensor of that shape on every member; collective over `group` only.

        group: process group, any sub-group of the world; None = the world.
        layer: name of the layer that will own the memory, the same on all members; for `retire`.

        Raises:
            HeapError: on all members, if one has no room (with bytes requested, bytes free, what to do), or if they
                requested different sizes.
            ConfigError: this rank is not a member of `group`.
            PeerFailed: a member is gone, late, or in another call.
            FinalizedError: after `close`.
        """
        self._check_open()
        count = 1
        for extent in shape:
            if extent < 0:
                raise HeapError(f"a symmetric tensor cannot have the shape {list(shape)}.")
            count *= int(extent)
        nbytes = max(count * dtype.itemsize, 1)
        pieces = self._reserve(nbytes, group, layer)
        members = [piece.rank for piece in pieces]
        offsets = [piece.offset for piece in pieces if piece.offset is not None]
        offset = offsets[members.index(self.rank)]
        local = self._zeroed(offset, nbytes)
        # Once a member returns, it may store to the others, so all zero-fills must be done before.
        self.gather(None, group, "the end of an allocation", layer)
        addresses = self._addresses(members, offsets)
        return SymmTensor(
            local=local[: count * dtype.itemsize].view(dtype).view(list(shape)),
            addrs=self._table(addresses),
            net_addrs=self._table(self._net_addresses(members, offsets)),
            addresses=tuple(addresses),
            nbytes=nbytes,
            offset=offset,
        )

    def require(self, nbytes: int, group: Any = None, layer: str = "") -> None:
        """Check that every member has room for `nbytes` more, in one piece; collective over `group`.

        Before several allocations, check their total: the error then reports the whole need.

        Raises:
            HeapError: on all members, if one has no room: bytes requested, bytes free, what to do.
        """
        self._check_open()
        own = next(piece for piece in self._reserve(nbytes, group, layer) if piece.rank == self.rank)
        assert own.offset is not None  # _reserve raises where a member has none
        self._arena.give(own.offset, nbytes)

    def free(self, tensor: SymmTensor) -> None:
        """Give this rank's copy back. Local: the caller ensures that no member uses the tensor any more."""
        self._check_open()
        self._arena.give(tensor.offset, tensor.nbytes)
        self._discard(tensor.offset, tensor.nbytes)

    def retire(self, tensors: Sequence[SymmTensor], layer: str, members: Sequence[int], wait: bool) -> None:
        """Give back this rank's memory of a layer: it returns to the arena once all ranks of the layer have ended it.

        Not a meeting: a member may call this at any time, and continue with any other call. This rank's device must
        have finished the layer's work (`drain`).

        members: world ranks of the layer.
        wait: return when all members have ended the layer; without `wait`, a later allocation takes the memory back.

        Raises:
            PeerFailed: with `wait`, a member has not ended the layer within the limit of host collectives, and the
                memory stays reserved; or the member is gone, and the memory is back.
            FinalizedError: after `close`.
        """
        self._check_open()
        left = _Retired(tuple(members), tuple((tensor.offset, tensor.nbytes) for tensor in tensors))
        self._retired[layer] = left
        if left.members == (self.rank,):
            self._release(layer)
            return
        limit_s = self.limit_s() if wait else 0.0
        stop = threading.Event()
        try:
            late = within(limit_s + _LONGEST_WAIT_FOR_ROOM_S, lambda: self._end_layer(layer, limit_s, stop))
        except (RuntimeError, TimeoutError) as error:
            if not wait:
                return  # the job is over: no rank reads notes any more
            raise PeerFailed(
                f"rank {self.rank} ended a layer, but cannot report it to the others: the process that serves the "
                f"store of the job is gone, or stopped: {error}"
            ) from error
        finally:
            stop.set()
        if all(self._ended(rank) for rank in late):
            self._release(layer)
        if wait and late:
            fates = [self._fate(rank) or "is late" for rank in late]
            raise PeerFailed(
                f"rank {self.rank} ended a layer and waited for {_ranks(late)} to end it, too: rank {late[0]} "
                f"{fates[0]}. All ranks of a layer finalize it, within {limit_s:g} s of each other."
            )

    def available(self) -> int:
        """Bytes of the largest allocation that fits on this rank now."""
        return self._arena.largest_free()

    def pes(self, group: Any = None) -> torch.Tensor:
        """[n] int32 on the device: world rank of every member of `group`."""
        self._check_open()
        return torch.tensor(self.members(group), dtype=torch.int32, device=self.device)

    def members(self, group: Any = None) -> list[int]:
        """World rank of every member of `group`, in the group's order.

        Raises:
            ConfigError: this rank is not a member, or the group was destroyed.
        """
        try:
            # torch's collectives of a group without this rank return at once, without an error, so check here.
            if dist.get_world_size(group) > 0:
                return list(dist.get_process_group_ranks(group))
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"rank {self.rank} meets other ranks through a process group that was destroyed. Call "
                "finalize_distributed() before destroy_process_group()."
            ) from error
        raise ConfigError(f"rank {self.rank} takes part in a group it is not a member of.")

    def limit_s(self, group: Any = None) -> float:
        """Time limit of host collectives of `group`, in seconds."""
        try:
            world: Any = dist.group.WORLD if group is None else group
            backend = world._get_backend(self.device)
            return float(backend.options._timeout.total_seconds())
        except (AttributeError, RuntimeError):  # a backend without options, or a destroyed group
            return _DEFAULT_LIMIT_S

    def barrier(self, group: Any = None, layer: str = "") -> None:
        """Wait on the host until all members of `group` arrive; does not wait for work on streams.

        Raises:
            PeerFailed: a member is gone, late, or in another call.
        """
        self._check_open()
        self.gather(None, group, "a barrier", layer)  # not dist.barrier: with NCCL that would be a kernel

    def drain(self, limit_s: float, network: bool = False) -> None:  # noqa: B027  kernels of a CPU have ended
        """Wait until this rank's device has finished all its work, and its stores have arrived.

        network: kernels may have called put functions.

        Raises:
            TimeoutError: not within `limit_s` seconds.
        """

    @abstractmethod
    def close(self) -> None:
        """Give all memory back; collective over the world, idempotent."""

    @abstractmethod
    def failed_peer(self) -> int | None:
        """World rank of a peer that died or aborted, as far as this backend knows; else None."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Make peers that wait for this rank fail with `reason`, if the backend can."""

    # --- steps of alloc -----------------------------------------------------------------------------------

    def _reserve(self, nbytes: int, group: Any, layer: str) -> list[_Piece]:
        """Take a piece on every member; grow the heap if needed. HeapError on all members if one has no room."""
        pieces = self._take(nbytes, group, layer)
        if _lacking(pieces) and self._grow(nbytes, group):
            pieces = self._take(nbytes, group, layer)
        if any(piece.late for piece in _lacking(pieces)):
            # The other members come to the next meeting at once and wait there, so stay well below their limit.
            pieces = self._take(nbytes, group, layer, min(self.limit_s(group) / 2, _LONGEST_WAIT_FOR_ROOM_S))
        if lacking := _lacking(pieces):
            raise self._no_room(lacking[0], nbytes)
        return pieces

    def _take(self, nbytes: int, group: Any, layer: str, patience_s: float = 0.0) -> list[_Piece]:
        """Take a piece here and gather all members' reports; give the piece back if another member got none.

        patience_s: time to wait for memory of layers that other ranks have not ended.
        """
        deadline, owner = time.monotonic() + patience_s, frozenset(self.members(group))
        late = self._reclaim()
        while (offset := self._arena.take(nbytes, owner)) is None and late and time.monotonic() < deadline:
            time.sleep(_LONGEST_POLL_S)
            late = self._reclaim()
        sizes, lacking = None, True
        try:
            held = sum(size for left in self._retired.values() for _, size in left.pieces)
            free = self._arena.largest_free(owner)
            own = _Piece(self.rank, offset, nbytes, free, self._arena.size, held, late)
            pieces = self.gather(own, group, "an allocation", layer)
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
        held = (
            f" {piece.held} bytes more come back when {_ranks(piece.late)} finalize"
            f"{'s' * (len(piece.late) == 1)} the layers that the others have ended."
            if piece.late
            else ""
        )
        remedy = self.remedy.format(gib=needed)
        if needed > MOST_BYTES // 2**30:
            remedy = (
                f"Such a heap takes {needed} GiB, and none has more than {MOST_BYTES // 2**30}. Create layers with a "
                "smaller max_tokens, hidden or capacity."
            )
        return HeapError(
            f"no room for {nbytes} bytes of symmetric memory on rank {piece.rank}: {piece.free} of {piece.size} bytes "
            f"are free in one piece.{held} {remedy}"
        )

    # --- memory of layers that not all ranks have ended ---------------------------------------------------

    def _end_layer(self, layer: str, limit_s: float, stop: threading.Event) -> list[int]:
        """Report that this rank has ended the layer, and wait for the others. Returns the members that have not.

        Unless the time limit has passed, all of these are gone or have failed.
        """
        deadline, asked, pause_s = time.monotonic() + limit_s, time.monotonic(), 1e-4
        members = self._retired[layer].members
        self._farewells.say(layer, members)
        while not self._farewells.all_said(layer):
            now = time.monotonic()
            if now >= deadline or now - asked >= _ASK_EACH_S or stop.is_set():
                asked, late = now, self._farewells.silent(layer, members)
                if now >= deadline or stop.is_set() or all(self._fate(rank) is not None for rank in late):
                    return late
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)
        return []

    def _reclaim(self) -> tuple[int, ...]:
        """Return memory of layers that all ranks have ended to the arena. Returns the ranks that others wait for."""
        awaited: set[int] = set()
        for layer, left in list(self._retired.items()):
            try:
                late = within(_LONGEST_WAIT_FOR_ROOM_S, lambda: self._late(layer, left.members))  # noqa: B023
            except (RuntimeError, TimeoutError):
                late = list(left.members)  # the store's server is gone, so no rank counts as done
            late = [rank for rank in late if rank != self.rank and not self._ended(rank)]
            awaited.update(late)
            if not late:
                self._release(layer)
        return tuple(sorted(awaited))

    def _late(self, layer: str, members: Sequence[int]) -> list[int]:
        return [] if self._farewells.all_said(layer) else self._farewells.silent(layer, members)

    def _release(self, layer: str) -> None:
        """Return the memory of a layer that no rank uses any more to the arena."""
        left = self._retired.pop(layer)
        for offset, nbytes in left.pieces:
            self._arena.give(offset, nbytes)
            self._discard(offset, nbytes)
        if len(left.members) > 1:
            with contextlib.suppress(RuntimeError, TimeoutError):  # keys left in the store do no harm
                within(_LONGEST_WAIT_FOR_ROOM_S, lambda: self._farewells.forget(layer, left.members))

    # --- meetings -----------------------------------------------------------------------------------------

    def gather(self, value: Any, group: Any, call: str, layer: str = "") -> list[Any]:
        """The value of every member of `group`; collective over `group`.

        Collectives of a group match by their order alone, and ranks lose that order when a layer fails on some of them.
        So every rank sends the name of its call. A rank whose layer another rank has ended raises; the others repeat
        the collective, and the raising rank takes part in the repetition with its next call.

        call: name of the call, for error messages. layer: layer of the call.

        Raises:
            ConfigError: this rank is not a member, or the group was destroyed.
            PeerFailed: a member is gone, in another call, has ended this layer, or did not come within the process
                group's own time limit.
        """
        members = self.members(group)
        while True:
            answers = self._meet(_Answer(call, layer, tuple(self._retired), value), members, group)
            if all((other.call, other.layer) == (call, layer) for other in answers):
                return [other.value for other in answers]
            ended = {name: rank for rank, other in zip(members, answers, strict=True) for name in other.ended}
            if layer in ended:
                raise PeerFailed(
                    f"rank {self.rank} came to {call} of a layer that rank {ended[layer]} has finalized after a "
                    "failure; its own error says why. Finalize the layer here as well, and make another on all ranks."
                )
            if not any(other.layer in ended for other in answers):
                raise PeerFailed(
                    f"the ranks of a group are in different calls: {_calls(members, answers)}. Make the same calls in "
                    "the same order on all of them."
                )

    def _meet(self, own: _Answer, members: Sequence[int], group: Any) -> list[_Answer]:
        answers: list[Any] = [None] * len(members)
        try:
            dist.all_gather_object(answers, own, group=group)
        except RuntimeError as error:
            peer = self._await_failed_peer()
            who = "a rank of the group" if peer is None else f"rank {peer}"
            raise PeerFailed(
                f"rank {self.rank} met the other ranks in the symmetric heap, but {who} is gone or late (its own error "
                f"says why): {error}"
            ) from error
        strange = [rank for rank, other in zip(members, answers, strict=True) if not isinstance(other, _Answer)]
        if strange:
            raise PeerFailed(
                f"rank {self.rank} came to {own.call}, but {_ranks(strange)} to a collective of the program on the "
                "same process group. Make the same calls in the same order on all ranks."
            )
        return answers

    def _await_failed_peer(self) -> int | None:
        """`failed_peer`, after a short wait if needed: the sockets of a dying process close before it has ended."""
        deadline = time.monotonic() + _DYING_S
        while (peer := self.failed_peer()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return peer

    def _grow(self, nbytes: int, group: Any) -> bool:
        """Make room for `nbytes` more on every member, collectively; False if the heap cannot grow."""
        return False

    def _table(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _check_open(self) -> None:
        if self._closed:
            raise FinalizedError("the symmetric heap was closed. Call initialize_distributed again.")

    @abstractmethod
    def _ended(self, rank: int) -> bool:
        """Whether the process of `rank` is known to have ended, so that it stores nothing any more."""

    def _fate(self, rank: int) -> str | None:
        """Reason not to wait for a rank, as a clause without subject; None = the rank may still come."""
        return "has ended" if self._ended(rank) else None

    @abstractmethod
    def _zeroed(self, offset: int, nbytes: int) -> torch.Tensor:
        """[nbytes] uint8: the piece at `offset` of this rank's arena, zero-filled, as peers see it too."""

    @abstractmethod
    def _addresses(self, members: Sequence[int], offsets: Sequence[int]) -> list[int]:
        """Address in this process of each member's copy; 0 = no peer access."""

    @abstractmethod
    def _net_addresses(self, members: Sequence[int], offsets: Sequence[int]) -> list[int]:
        """Address that a put function takes for each member's copy."""

    @abstractmethod
    def _discard(self, offset: int, nbytes: int) -> None:
        """Return the memory of an unused piece to the system, if possible."""


def _lacking(pieces: Sequence[_Piece]) -> list[_Piece]:
    return [piece for piece in pieces if piece.offset is None]


def _calls(members: Sequence[int], answers: Sequence[_Answer]) -> str:
    """Text of which ranks are in which call. Several layers get numbers, in the order of their first ranks."""
    found: dict[tuple[str, str], list[int]] = {}
    for rank, other in zip(members, answers, strict=True):
        found.setdefault((other.call, other.layer), []).append(rank)
    layers = list(dict.fromkeys(layer for _, layer in found if layer))
    return "; ".join(
        f"{call}{f' of layer {layers.index(layer) + 1}' if len(layers) > 1 and layer else ''} by {_ranks(ranks)}"
        for (call, layer), ranks in found.items()
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
