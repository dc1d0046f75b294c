"""DispatchCombineContext: the symmetric memory and device state of one layer.

A context belongs to one process group; contexts of different groups live side by side. It allocates the
buffers of triton_ep/context/layout.py, keeps their addresses at every rank, grows the two that may grow, and turns
a status record that a kernel left behind into an exception.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from triton_ep.config import EPConfig, as_integer
from triton_ep.context import layout, status
from triton_ep.context.agreement import check_agreement
from triton_ep.context.calls import mismatch
from triton_ep.context.choice import Choice
from triton_ep.context.overlap import OpenCalls, current_stream
from triton_ep.context.rows import RowFormat, RowFormats
from triton_ep.context.status import StatusRecord
from triton_ep.context.streams import SideStream
from triton_ep.distributed import current_heap  # before kernels: decides whether they are interpreted
from triton_ep.errors import (
    AotArchMismatch,
    AotCorrupted,
    AotMiss,
    ConfigError,
    EPError,
    FinalizedError,
    HeapError,
    LaunchError,
    PeerFailed,
    WaitTimeout,
)
from triton_ep.heap.base import SymmetricHeap, SymmTensor
from triton_ep.kernels.device import codes
from triton_ep.runtime.cubins import Aot
from triton_ep.runtime.launch import INTERPRETING, Launcher, aot_for
from triton_ep.runtime.plans import Plan

_INDEX = {buffer.name: index for index, buffer in enumerate(layout.BUFFERS)}
_SLACK_BYTES = 4096  # what a heap may add to one allocation to align it
NO_LIMIT = 2**31 - 1
"""Row limit of kernels in exact mode, where buffers are grown before anything is written."""
_OF_ONE_RANK = (AotArchMismatch, AotCorrupted, AotMiss, LaunchError)
"""Errors of ours that may come in the middle of a call, and on one rank alone."""
_Call = TypeVar("_Call", bound=Callable[..., Any])


def told(what: str, *, begun: bool) -> Callable[[_Call], _Call]:
    """Decorator of what a layer or context does in a collective call: if it breaks off, the layer has failed.

    begun: other ranks wait for this one from the start; False: once the dispatch counts (`num_dispatches`).
    """

    def decorate(call: _Call) -> _Call:
        @functools.wraps(call)
        def guarded(owner: Any, *args: Any, **kwargs: Any) -> Any:
            ctx = getattr(owner, "context", owner)
            before = ctx.num_dispatches
            try:
                return call(owner, *args, **kwargs)
            except Exception as error:
                ctx.fail(what, error, begun or ctx.num_dispatches != before)
                raise

        return guarded  # type: ignore[return-value]

    return decorate


class DispatchCombineContext:
    """Symmetric buffers, addresses, open calls and status of one layer on this rank.

    Made by `create`, collective over the group; ended by `finalize`, collective as well. Nothing is freed by
    a destructor, because freeing symmetric memory out of step hangs the other ranks.
    """

    @torch.inference_mode(False)  # these tensors outlive inference mode and must stay writable outside it
    def __init__(
        self, config: EPConfig, sizes: layout.Sizes, group: Any, heap: SymmetricHeap, aot: Aot | None, name: str
    ) -> None:
        self.config, self.sizes, self.aot = config, sizes, aot
        self.group, self.heap, self.device = group, heap, heap.device
        self.layer_id = secrets.randbits(62)
        self.name, self._members = name, heap.members(group)
        # Dispatches that this host has made, the number of each from 1. The device counts for itself, and further where
        # a CUDA graph replays: what ranks compare is the device's number (kernels/device/calls.py).
        self.num_dispatches = 0
        self.calls, self._closed = OpenCalls(), False
        self.failure: str | None = None
        self.backward = False  # calls made now send gradients
        self.unread: torch.Tensor | None = None  # placement of the latest static dispatch, which no host has looked at
        self._blocks: dict[str, SymmTensor] = {}
        self._offsets: dict[str, tuple[str, int]] = {}
        num_ranks, num_buffers = config.world_size, len(layout.BUFFERS)
        # What kernels see: kernels/device/buffers.py says what is where.
        self.tables = torch.zeros(2 * num_buffers + 1, num_ranks, dtype=torch.int64, device=self.device)
        self._addrs, self._net_addrs = self.tables[:num_buffers], self.tables[num_buffers:-1]
        self.tables[-1] = heap.pes(group)
        self.state = torch.zeros(codes.STATE_WORDS + num_ranks, dtype=torch.int64, device=self.device)
        self.state[codes.TIMEOUT_US] = int(config.timeout_s * 1e6)
        self.status = self.state[codes.STATUS :][: codes.STATUS_WORDS]
        self._bound = {
            "state_ptr": self.state,
            "tables_ptr": self.tables,
            "rank": config.rank,
            "num_ranks": config.world_size,
            "ranks_per_node": config.local_world_size,
            "experts_per_rank": config.num_experts_per_rank,
            "max_tokens": config.max_tokens,
        }
        self.network = codes.P2P if config.is_intra_node or heap.network == "p2p" else codes.NVSHMEM
        # A word that the host can read at any time; the device sets it beside the status record.
        self._alarm = torch.zeros(1, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self.state[codes.ALARM] = self._alarm.data_ptr()
        self._alarmed = ctypes.c_int64.from_address(self._alarm.data_ptr())
        self.no_bytes = torch.zeros(16, dtype=torch.uint8, device=self.device)
        self.no_floats = self.no_bytes.view(torch.float32)
        self._told: dict[int, tuple[torch.Tensor, torch.cuda.Event]] = {}  # where the host reads so many words
        side = SideStream(self.device)
        self.fork, self.join = side.fork, side.join
        self._extern_libs: dict[str, str] | None = None
        self.rows = RowFormats(config.shape(self.network, INTERPRETING), config.token_dtype)
        self._scratch: dict[str, torch.Tensor] = {}
        self._identity_rows = torch.empty(0, 1, dtype=torch.int32, device=self.device)
        try:
            if aot is not None:
                aot.check(config.shape(self.network))
            classes = ("", "arrival", "output")
            heap.require(layout.estimate_bytes(sizes) + len(classes) * _SLACK_BYTES, group, name)
            for grows in classes:
                self._allocate(grows)
        except BaseException as error:
            self.failure = f"its constructor raised {type(error).__name__}."
            self.finalize()  # other ranks may have gone on, and store here
            raise

    @classmethod
    def create(
        cls,
        ep_config: EPConfig,
        capacity: float = 2,
        *,
        group: Any = None,
        heap: SymmetricHeap | None = None,
        aot: Aot | None = None,
        choice: Choice | None = None,
    ) -> DispatchCombineContext:
        """Allocate a context; collective over `group` (default: the whole world).

        capacity: room for received rows at the start, in multiples of the average max_tokens * topk; an
            exact context grows beyond it, a static one has `ep_config.recv_capacity` rows and ignores this.
        aot: library to take kernels from; None: as TRITON_EP_AOT says.
        choice: what this rank found for `num_sm`, where it was not given.

        Raises:
            ConfigError: on every rank, if the group does not fit the configuration, or the ranks have different ones.
            HeapError: not enough symmetric memory, on every rank of the group.
        """
        group = group if group is not None else dist.group.WORLD
        heap = heap if heap is not None else current_heap()
        aot = aot_for(None, None, heap) if aot is None else aot
        if not isinstance(capacity, int | float) or not capacity > 0:
            raise ConfigError(f"capacity must be a number above 0, got {capacity!r}.")
        name = check_agreement(ep_config, group, heap, choice)
        return cls(ep_config, layout.initial_sizes(ep_config, capacity), group, heap, aot, name)

    @property
    def ep_config(self) -> EPConfig:
        """`config`."""
        return self.config

    # --- memory -----------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def _allocate(self, grows: str) -> None:
        """Allocate the buffers of one growth class as one block and enter their addresses in the tables."""
        members = [buffer for buffer in layout.BUFFERS if buffer.grows == grows]
        nbytes = sum(buffer.nbytes(self.sizes) for buffer in members)
        block = self.heap.alloc((nbytes,), torch.uint8, self.group, self.name)
        self._blocks[grows] = block
        offset = 0
        for buffer in members:
            self._offsets[buffer.name] = (grows, offset)
            self._addrs[_INDEX[buffer.name]] = torch.where(block.addrs != 0, block.addrs + offset, 0)
            self._net_addrs[_INDEX[buffer.name]] = block.net_addrs + offset
            offset += buffer.nbytes(self.sizes)

    def local(self, name: str) -> torch.Tensor:
        """This rank's copy of a buffer, as a tensor of the shape and dtype in triton_ep/context/layout.py."""
        self.check_open()
        buffer = layout.BUFFERS[_INDEX[name]]
        grows, offset = self._offsets[name]
        shape, dtype = buffer.shape(self.sizes), buffer.dtype(self.config)
        count = torch.Size(shape).numel() * dtype.itemsize
        return self._blocks[grows].local[offset : offset + count].view(dtype).view(shape)

    def local_as(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """All memory of this rank's copy of a buffer, as elements of a dtype."""
        grows, offset = self._offsets[name]
        nbytes = layout.BUFFERS[_INDEX[name]].nbytes(self.sizes)
        return self._blocks[grows].local[offset : offset + nbytes].view(dtype)

    def local_address(self, name: str) -> int:
        """Address of `local(name)`, at less cost."""
        grows, offset = self._offsets[name]
        return self._blocks[grows].local.data_ptr() + offset

    @property
    def dispatch_output_buf(self) -> torch.Tensor:
        """[rows, H] of the token dtype: expert outputs, from which combine pulls; another one once it has grown."""
        return self.local("dispatch_output_buf")

    @property
    def weight_recv_buf(self) -> torch.Tensor:
        """[rows] float32: their weights; another one once it has grown."""
        return self.local("weight_recv_buf")

    def reallocate_dispatch_output_buf(self, dispatch_recv_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Make room for `dispatch_recv_tokens` output rows on every rank; collective.

        Returns (dispatch_output_buf [rows, H] of the token dtype, weight_recv_buf [rows] float32), with
        rows >= dispatch_recv_tokens. Must be called between two calls of the layer, with the same number on all
        ranks; waits until all of them have ended the call before.
        """
        self.check_open()
        rows = as_integer("dispatch_recv_tokens", dispatch_recv_tokens, 0)
        self._meet()
        self.grow(self.sizes.arrival_rows, rows)
        return self.local("dispatch_output_buf"), self.local("weight_recv_buf")

    def grow(self, arrival_rows: int, output_rows: int) -> None:
        """Make room for that many rows on every rank; collective, the same numbers on all ranks.

        Safe right after a splits exchange: every rank has then finished its previous call.

        Raises:
            InputError: somebody still reads or writes rows that would be given up (overlap.OpenCalls).
            HeapError: on all ranks, if one has no room; the buffers then stay as large as they were.
        """
        worst = self.config.world_size * self.config.max_tokens
        for grows, needed, held in (
            ("arrival", arrival_rows, self.sizes.arrival_rows),
            ("output", output_rows, self.sizes.output_rows),
        ):
            if needed <= held:
                continue
            # A quarter more, so that a slow increase does not grow the buffers at every call.
            rows = needed + needed // 4
            if grows == "arrival":
                rows = min(rows, worst)
                sizes = layout.Sizes(self.config, rows, self.sizes.output_rows)
            else:
                self.calls.check_growth(rows)
                sizes = layout.Sizes(self.config, self.sizes.arrival_rows, rows)
            before = self.sizes
            self.heap.free(self._blocks.pop(grows))
            self.sizes = sizes
            with self._together():
                try:
                    self._allocate(grows)
                except HeapError:
                    self.sizes = before
                    self._allocate(grows)  # smaller calls still work
                    raise

    def make_room_for_all(self) -> None:
        """Make room for every token of every rank; collective where it is not there yet, the same on all ranks.

        Raises:
            HeapError: on all ranks, if one has no room.
        """
        worst = self.config.world_size * self.config.max_tokens
        if min(self.sizes.arrival_rows, self.sizes.output_rows) < worst:
            self._meet()
            self.grow(worst, worst)

    def _meet(self) -> None:
        """Wait until no rank of the group has work under way that reaches into the buffers of another."""
        self._drain()
        with self._together():
            self.heap.barrier(self.group, self.name)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """A meeting of the ranks. One that does not come about leaves the layer failed: it may lack a buffer."""
        try:
            yield
        except PeerFailed as error:
            self.failure = str(error)
            raise

    def _drain(self) -> None:
        """Wait until the device has run what it was given, on any stream and in any graph.

        Raises:
            WaitTimeout: it does not end.
        """
        # The waits of our kernels have a bound each; the rest is for what the program has given the device.
        limit_s = 2 * self.config.timeout_s + max(60.0, self.heap.limit_s())
        try:
            self.heap.drain(limit_s, self.network != codes.P2P)
        except TimeoutError as error:
            self.failure = "the GPU did not end its work."
            raise WaitTimeout(
                f"rank {self.config.rank} waited {limit_s:.0f} s on the host for its GPU to end what it was given. "
                "Look for a kernel that does not end. The layer's memory stays reserved; finalize may be called again."
            ) from error
        except RuntimeError:
            if self.failure is None:
                raise
            # A GPU with an error runs nothing any more, and the caller has the first report of it.

    def extern_libs(self) -> dict[str, str] | None:
        """Device bitcode for kernels that call NVSHMEM; None if this context has none of them."""
        if self.network != codes.P2P and self._extern_libs is None:
            from triton_ep.heap.bitcode import pruned_bitcode

            self._extern_libs = {"libnvshmem_device": str(pruned_bitcode(codes.NVSHMEM_SYMBOLS))}
        return self._extern_libs

    def finalize(self) -> None:
        """Give the symmetric memory back, once the device has run what it was given; idempotent.

        A healthy layer waits until all ranks have ended it. After a failure (an expired wait, a dead peer, an exception
        in the layer's block) nobody waits, and the memory comes back when every rank has ended the layer, or its
        process has: those that were late still read and write there. No rank meets another here, so it does not matter
        which of them saw the failure.

        Raises:
            PeerFailed: of a healthy layer, a rank has not ended it in time, or is dead.
            WaitTimeout: the GPU does not end its work; finalize may be called again.
        """
        if self._closed:
            return
        if not self.heap.closed:
            self._drain()
        self._closed = True
        blocks = list(self._blocks.values())
        self._blocks.clear()
        if not self.heap.closed:
            self.heap.retire(blocks, self.name, self._members, wait=self.failure is None)

    # --- state ------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `finalize` or `finalize_distributed` has ended it."""
        return self._closed or self.heap.closed

    def check_open(self) -> None:
        """Raise if the context was finalized, or failed before.

        Raises:
            FinalizedError: after `finalize`, or `finalize_distributed`.
            WaitTimeout: after an expired wait; the ranks are out of step.
        """
        if self._closed:
            raise FinalizedError("This layer was finalized. Make a new EPAll2AllLayer on all ranks of its group.")
        if self.heap.closed:
            raise FinalizedError(
                "finalize_distributed() was called, which ended this layer, too. Call initialize_distributed() and "
                "make a new layer on all ranks."
            )
        if self.failure is not None:
            raise WaitTimeout(
                f"This layer failed before and its ranks are out of step: {self.failure} Finalize it and make another."
            )

    def fail(self, what: str, error: Exception, begun: bool) -> None:
        """Note that a call broke off here in the middle, and tell the ranks that wait for it, where the heap can.

        Nothing for errors that all ranks raise, or that are raised before anything is sent: those of this package.
        What another rank has told this one is noted, and not told again.

        begun: other ranks wait for this one.
        """
        if self.failure is not None:
            return
        if isinstance(error, PeerFailed) and self.heap.failed_peer() is not None:
            self.failure = f"{what} broke off: {error}"
            return
        if not begun or (isinstance(error, EPError) and not isinstance(error, _OF_ONE_RANK)):
            return
        self.failure = f"{what} broke off on rank {self.config.rank} with {type(error).__name__}: {error}"
        if self.heap.backend == "host":  # the others on GPUs learn it from their time limit
            self.heap.abort(self.failure)

    def launcher(
        self, key: tuple[object, ...], plan: Callable[..., Plan], *args: Any, fmt: RowFormat | None = None
    ) -> Launcher:
        """The launcher of this key; at first it is made, from `plan(shape, *args)` of triton_ep/runtime/plans.

        What is the same in all launches of a layer is bound to it: its state and tables, ranks, experts, most tokens.

        fmt: of the rows that the kernel moves; None: the layer's own, or it moves none.
        """
        rows = self.rows.own if fmt is None else fmt
        found = rows.launchers.get(key)
        if found is None:
            wanted = plan(rows.shape, *args)
            libs = self.extern_libs if wanted.constexprs.get("NETWORK") == codes.NVSHMEM else None
            found = rows.launchers[key] = Launcher(wanted, self._bound, libs, self.aot)
        return found

    def scratch(self, name: str, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory that the kernels of a call leave to each other; kept, because allocating it takes host time."""
        found = self._scratch.get(name)
        if found is None:
            found = torch.empty(length, dtype=dtype, device=self.device)
            # What is allocated in a capture belongs to that graph.
            if self.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
                self._scratch[name] = found
        return found

    def identity_rows(self, num_rows: int) -> torch.Tensor:
        """[num_rows, 1] int32, each row's own number; a view of one table, which only grows."""
        table = self._identity_rows
        if table.shape[0] < num_rows:
            size = max(num_rows, self.sizes.arrival_rows)
            table = self._identity_rows = torch.arange(size, dtype=torch.int32, device=self.device).unsqueeze(1)
        return table[:num_rows]

    @contextlib.contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Calls made inside send gradients; so they are told from those of a forward pass on another rank."""
        before, self.backward = self.backward, True
        try:
            yield
        finally:
            self.backward = before

    def check_status(self) -> None:
        """Wait for the stream of this device and raise what a kernel reported.

        Raises:
            CallMismatch: ranks are in different calls.
            WaitTimeout: naming the operation, the missing ranks, expected and seen epochs.
            PeerFailed: the wait expired, and the process of a rank has ended.
        """
        self.raise_for_status(self.status.tolist())

    def poll_status(self) -> None:
        """Raise what a kernel has reported up to now, without waiting for the stream."""
        if self._alarmed.value != 0 and not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            self.check_status()

    def read_back(self, placement: torch.Tensor, count: int) -> list[int]:
        """The first `count` words of a dispatch's `placement` on the host, once the device has written them.

        Raises:
            WaitTimeout: the splits exchange did not finish.
        """
        words = placement.narrow(0, 0, count)
        if self.device.type != "cuda":
            self.check_status()
            return words.tolist()
        if count not in self._told:  # kept, because to make an event is a call of the driver
            with torch.inference_mode(False):
                self._told[count] = torch.empty(count, dtype=words.dtype, pin_memory=True), torch.cuda.Event()
        told, done = self._told[count]
        told.copy_(words, non_blocking=True)
        done.record(current_stream())
        # The device bounds its own wait; twice that covers earlier work on the stream.
        deadline = time.monotonic() + 2 * self.config.timeout_s + 60
        while not done.query():
            if time.monotonic() > deadline:
                self.failure = "the GPU did not finish the splits exchange."
                raise WaitTimeout(
                    f"dispatch waited {2 * self.config.timeout_s + 60:.0f} s on the host for the GPU of rank "
                    f"{self.config.rank}. Look for an earlier kernel on this stream that does not end."
                )
        self.poll_status()
        return told.tolist()

    def raise_for_status(self, record: list[int]) -> None:
        """Turn a status record (kernels/device/waits.py) into an exception; nothing if it is clean."""
        if record[0] == 0:
            return
        found = StatusRecord(*record)
        if found.operation not in status.OPERATIONS:
            differ = mismatch(found.operation, self.state[codes.STATE_WORDS :].tolist())
            self.failure = str(differ)
            raise differ
        error = status.expired_wait(found, self.sizes, self.local, self.heap.failed_peer())
        self.failure = f"{status.OPERATIONS[found.operation].what} expired."
        raise error
