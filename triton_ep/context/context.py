"""DispatchCombineContext: one layer on this rank, as its steps see it.

A context belongs to one process group; contexts of different groups can coexist. It joins parts with a file each:
symmetric memory (memory.py), launches (launches.py), streams (streams.py, overlap.py), counts read by the host
(host_read.py), status reported by kernels (status.py). It also knows whether the layer is open, failed or finalized.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from triton_ep.config import EPConfig, as_integer
from triton_ep.context import layout, status
from triton_ep.context.agreement import check_agreement
from triton_ep.context.choice import Choice
from triton_ep.context.host_read import HostRead
from triton_ep.context.launches import Launches
from triton_ep.context.memory import SymmetricBuffers
from triton_ep.context.overlap import OpenCalls
from triton_ep.context.rows import RowFormats
from triton_ep.context.streams import SideStream
from triton_ep.distributed import current_heap  # before kernels: decides whether they are interpreted
from triton_ep.errors import (
    AotArchMismatch,
    AotCorrupted,
    AotMiss,
    ConfigError,
    EPError,
    FinalizedError,
    InputError,
    LaunchError,
    PeerFailed,
    WaitTimeout,
)
from triton_ep.heap.base import SymmetricHeap
from triton_ep.kernels.device import codes
from triton_ep.runtime.cubins import Aot
from triton_ep.runtime.launch import INTERPRETING, aot_for

NO_LIMIT = 2**31 - 1
"""Row limit of kernels in exact mode, where buffers are grown before anything is written."""
MOST_WASTED = 2
"""Most rows of room per row that an exact dispatch receives."""
_FORGOTTEN = 256
"""A dispatch takes one part in so many off the rows that earlier ones received."""
_OF_ONE_RANK = (AotArchMismatch, AotCorrupted, AotMiss, LaunchError)
"""Errors of this package that a single rank may raise in the middle of a call."""
_Call = TypeVar("_Call", bound=Callable[..., Any])


def first_rows(x: torch.Tensor, num: int) -> torch.Tensor:
    """The first rows, to be kept: in memory of their own if the others would waste too much."""
    if x.shape[0] == num:
        return x
    return x[:num] if x.shape[0] <= MOST_WASTED * num else x[:num].clone()


def reports_failure(what: str, *, begun: bool) -> Callable[[_Call], _Call]:
    """Decorator for parts of a collective call: an exception in the middle of the call marks the layer as failed.

    begun: other ranks wait for this rank from the start; False: once the call has increased `num_dispatches`.
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
    """Symmetric buffers, launchers, open calls and state of one layer on this rank.

    `create` and `finalize` are collective over the group. No destructor frees anything, because freeing symmetric
    memory out of step hangs the other ranks.

    Attributes:
        sizes: rows for which the buffers have room; exact layers grow.
        topology: ranks, ranks per node, and experts per rank.
        repeats: what is known of launches, by kind of call (triton_ep/exchange/repeats.py); None: no call is repeated.
    """

    @torch.inference_mode(False)  # these tensors outlive inference mode and must stay writable outside it
    def __init__(
        self, config: EPConfig, sizes: layout.Sizes, group: Any, heap: SymmetricHeap, aot: Aot | None, name: str
    ) -> None:
        self.config, self.aot = config, aot
        self.group, self.heap, self.device = group, heap, heap.device
        self.topology = (config.world_size, config.local_world_size, config.num_experts_per_rank)
        self._gpu = self.device.index if self.device.type == "cuda" else None
        self.layer_id = secrets.randbits(62)
        self.name, self._members = name, heap.members(group)
        # Dispatches that this host has made; their numbers start at 1. The device keeps a count of its own, which
        # replays of a CUDA graph advance too. Ranks compare the device's number (kernels/device/calls.py).
        self.num_dispatches = 0
        self.calls, self._closed = OpenCalls(), False
        self.failure: str | None = None
        self.backward = False  # calls made now send gradients
        self.beside_products = False  # combines made now leave room for products that compute gradients of weights
        self._rows_before: dict[tuple[str, int], int] = {}
        self.repeats: dict[tuple[object, ...], object] | None = None
        if config.is_intra_node and not config.copy_engines:
            self.repeats = {}
        self.unread: torch.Tensor | None = None  # placement of the latest dispatch whose reports no host has read
        self.network = codes.P2P if config.is_intra_node or heap.network == "p2p" else codes.NVSHMEM
        self.rows = RowFormats(config.shape(self.network, INTERPRETING), config.token_dtype)
        self.no_bytes = torch.zeros(16, dtype=torch.uint8, device=self.device)
        self.no_floats = self.no_bytes.view(torch.float32)
        self.no_map = {  # arguments about a routing map, where ids are given
            "map_ptr": self.no_bytes,
            "probs_ptr": self.no_floats,
            "weights_ptr": self.no_floats,
            "excess_ptr": self.no_bytes.view(torch.int32),
        }

        self._status = status.DeviceState(config.world_size, config.timeout_s, self.device)
        self.state, self._alarm = self._status.words, self._status.alarm
        self.memory, self.sizes = SymmetricBuffers(config, sizes, group, heap, name), sizes
        self.local_as, self.local_address = self.memory.local_as, self.memory.local_address
        launches = Launches(self.rows, self._bound(), aot, self.network, self.device)
        self.launcher, self.scratch, self._identity_rows = launches.launcher, launches.scratch, launches.identity_rows
        side = SideStream(self.device)
        self.fork, self.join, self.wait_joined = side.fork, side.join, side.wait_joined
        self.crossing = SideStream(self.device)  # for kernels that send to other nodes
        self.converting = SideStream(self.device)  # for conversions next to products
        # The device bounds its own wait; the host waits twice as long, which covers earlier work on the stream.
        self.host_read = HostRead(sizes.told_words, 2 * config.timeout_s + 60, self.device)
        try:
            if aot is not None:
                aot.check(config.shape(self.network))
            self.memory.allocate()
        except BaseException as error:
            self.failure = f"its constructor raised {type(error).__name__}."
            self.finalize()  # other ranks may have gone on and store into this rank's buffers
            raise

    def _bound(self) -> dict[str, Any]:
        """Arguments shared by all launches of the layer."""
        return {
            "state_ptr": self.state,
            "tables_ptr": self.memory.tables,
            "rank": self.config.rank,
            "num_ranks": self.config.world_size,
            "ranks_per_node": self.config.local_world_size,
            "experts_per_rank": self.config.num_experts_per_rank,
            "max_tokens": self.config.max_tokens,
        }

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
        aot: library to take kernels from; None: decided by TRITON_EP_AOT.
        choice: this rank's choice of `num_sm`, if the caller gave none.

        Raises:
            ConfigError: on every rank, if the configuration does not fit the group or differs between ranks.
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

    def local(self, name: str) -> torch.Tensor:
        """This rank's copy of a buffer, as a tensor of the shape and dtype in triton_ep/context/layout.py."""
        self.check_open()
        return self.memory.local(name)

    @property
    def dispatch_output_buf(self) -> torch.Tensor:
        """[rows, H] of the token dtype: expert outputs that combine pulls; a new buffer after each growth."""
        return self.local("dispatch_output_buf")

    @property
    def weight_recv_buf(self) -> torch.Tensor:
        """[rows] float32: weights of the expert outputs; a new buffer after each growth."""
        return self.local("weight_recv_buf")

    def identity_rows(self, num_rows: int, num_staged: int) -> torch.Tensor:
        """[max(num_rows, num_staged), 1] int32: each row's own number, -1 from `num_rows` on."""
        return self._identity_rows(num_rows, num_staged, self.sizes.arrival_rows)

    def reallocate_dispatch_output_buf(self, dispatch_recv_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Make room for `dispatch_recv_tokens` output rows on every rank; collective.

        Returns (dispatch_output_buf [rows, H] of the token dtype, weight_recv_buf [rows] float32), with
        rows >= dispatch_recv_tokens. Must be called between two calls of the layer, with the same number on all
        ranks; waits until all ranks have ended the previous call.
        """
        self.check_open()
        rows = as_integer("dispatch_recv_tokens", dispatch_recv_tokens, 0)
        self._meet()
        self.grow(self.sizes.arrival_rows, rows)
        return self.local("dispatch_output_buf"), self.local("weight_recv_buf")

    def grow(self, arrival_rows: int, output_rows: int) -> bool:
        """Make room for that many rows on every rank; collective, the same numbers on all ranks.

        False: the buffers had room. Safe right after a splits exchange: every rank has then finished its previous call.

        Raises:
            InputError: other ranks still read the rows to be freed, or the caller may write there (overlap.OpenCalls).
            HeapError: on all ranks, if one has no room; the buffers then stay as large as they were.
        """
        wanted = self.memory.wanted_sizes(arrival_rows, output_rows)
        if wanted is self.sizes:
            return False
        if wanted.output_rows > self.sizes.output_rows:
            self.calls.check_growth(wanted.output_rows)
        try:
            with self._together():
                self.memory.grow(wanted)
        finally:
            self.sizes = self.memory.sizes
        return True

    def make_room_for_all(self) -> None:
        """Make room for every token of every rank; collective if buffers must grow, which all ranks decide alike.

        Raises:
            HeapError: on all ranks, if one has no room.
        """
        worst = self.config.world_size * self.config.max_tokens
        # Without local combine the combine buffer may be lent, for as many rows as arrive.
        read = layout.rows_of_sums(self.config) if self.config.enable_local_combine else worst
        if self.sizes.arrival_rows < worst or self.sizes.output_rows < read:
            self._meet()
            self.grow(worst, read)

    def _meet(self) -> None:
        """Wait until no rank of the group has work in flight that accesses the buffers of another rank."""
        self._drain()
        with self._together():
            self.heap.barrier(self.group, self.name)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Run a host collective. If a rank is missing, the layer has failed: it may lack a buffer."""
        try:
            yield
        except PeerFailed as error:
            self.failure = str(error)
            raise

    # --- life -------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Wait until the device has finished all work, on any stream and in any graph.

        Raises:
            WaitTimeout: the work does not end.
        """
        # Each wait of this package's kernels is bounded; the rest is for other work of the program.
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
            # A GPU with an error runs no more work, and the caller has already seen the error.

    def finalize(self) -> None:
        """Give the symmetric memory back, once the device has finished its work; idempotent.

        A healthy layer waits until all ranks have finalized it. After a failure (an expired wait, a dead peer, an
        exception in the layer's block) no rank waits. The memory is reused when every rank has finalized the layer or
        has died, because late ranks still read and write there. This is no barrier, so it does not matter which ranks
        saw the failure.

        Raises:
            PeerFailed: the layer is healthy, but a rank has not finalized it in time, or is dead.
            WaitTimeout: the GPU does not finish its work; finalize may be called again.
        """
        if self._closed:
            return
        if not self.heap.closed:
            self._drain()
        self._closed = True
        if not self.heap.closed:
            self.memory.retire(self._members, wait=self.failure is None)

    @property
    def closed(self) -> bool:
        """Whether `finalize` or `finalize_distributed` has ended it."""
        return self._closed or self.heap.closed

    def check_open(self) -> None:
        """Raise if no call may begin.

        Raises:
            FinalizedError: after `finalize`, or `finalize_distributed`.
            InputError: another GPU than that of the layer is current; kernels would run there.
            WaitTimeout: after an expired wait; the ranks are out of step.
        """
        if self._closed:
            raise FinalizedError("This layer was finalized. Make a new EPAll2AllLayer on all ranks of its group.")
        if self.heap.closed:
            raise FinalizedError(
                "finalize_distributed() was called, which ended this layer, too. Call initialize_distributed() and "
                "make a new layer on all ranks."
            )
        # Private, because torch.cuda.current_device takes microseconds.
        if self._gpu is not None and torch._C._cuda_getDevice() != self._gpu:
            raise InputError(
                f"this layer is on cuda:{self._gpu}, but the current GPU of this thread is "
                f"cuda:{torch._C._cuda_getDevice()}, where its kernels would run. Call torch.cuda.set_device("
                f"{self._gpu}) first, in each thread: new threads begin with cuda:0."
            )
        if self.failure is not None:
            raise WaitTimeout(
                f"This layer failed before and its ranks are out of step: {self.failure.rstrip('.')}. Finalize it and "
                "make another."
            )

    def fail(self, what: str, error: Exception, begun: bool) -> None:
        """Mark the layer as failed because a call broke off in the middle; report it to waiting ranks, if the heap can.

        Ignores this package's own errors: all ranks raise them, or they come before anything is sent. A failure that
        another rank has reported marks the layer too, but is not reported again.

        begun: other ranks wait for this rank.
        """
        if self.failure is not None:
            return
        if isinstance(error, PeerFailed) and self.heap.failed_peer() is not None:
            self.failure = f"{what} broke off: {error}"
            return
        if not begun or (isinstance(error, EPError) and not isinstance(error, _OF_ONE_RANK)):
            return
        self.failure = f"{what} broke off on rank {self.config.rank} with {type(error).__name__}: {error}"
        if self.heap.backend == "host":  # on GPUs the waits of the other ranks expire
            self.heap.abort(self.failure)

    @contextlib.contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Mark the calls inside as sending gradients; a forward-pass call on another rank is then a mismatch."""
        before, self.backward = self.backward, True
        try:
            yield
        finally:
            self.backward = before

    @contextlib.contextmanager
    def making_room(self) -> Iterator[None]:
        """Let combines inside run next to products that compute gradients of weights, launched before them, on every
        multiprocessor; a combine without that on another rank is then a mismatch."""
        before, self.beside_products = self.beside_products, True
        try:
            yield
        finally:
            self.beside_products = before

    # --- what the device reports --------------------------------------------------------------------------

    def check_status(self) -> None:
        """Wait for the current stream and raise the error that a kernel reported, if any.

        Raises:
            CallMismatch: ranks are in different calls.
            WaitTimeout: naming the operation, the missing ranks, expected and seen epochs.
            PeerFailed: the wait expired, and the process of a rank has ended; or another rank may have overwritten rows
                that this one has read (kernels/device/overruns.py).
        """
        record = self._status.record()
        if record is None:
            return
        error = self._status.error(record, self.sizes, self.local, self.heap.failed_peer())
        operation = status.OPERATIONS.get(record.operation)
        self.failure = str(error) if operation is None else f"{operation.what} expired."
        raise error

    def poll_status(self) -> None:
        """Raise the error that a kernel has reported so far, if any, without waiting for the stream."""
        if self._alarm.value and not self.is_capturing:
            self.check_status()

    def reported(self) -> torch.Tensor:
        """Bool on the device: whether a kernel has reported an error, in the order of the current stream."""
        return self.state[codes.STATUS] != 0

    def missing_ranks(self) -> set[int]:
        """Wait for the current stream and return the ranks for which a reported wait has waited in vain."""
        record = self._status.record()
        if record is None or record.operation not in status.OPERATIONS or record.operation == codes.WAIT_SIGNALS:
            return set()
        return status.missing_ranks(record, self.sizes, self.memory.local)

    @property
    def is_capturing(self) -> bool:
        """Whether a CUDA graph captures the current stream."""
        # Private, because its public counterpart takes twice as long.
        return self._gpu is not None and bool(torch._C._cuda_isCurrentStreamCapturing())

    def note_rows(self, landing: str, num_tokens: int, num_rows: int) -> None:
        """Note how many rows an exact dispatch of `num_tokens` tokens of this rank received, for `rows_before`."""
        key, before = (landing, num_tokens.bit_length()), self.rows_before(landing, num_tokens)
        if before > MOST_WASTED * num_rows:
            before = 0  # other sizes from now on
        self._rows_before[key] = max(num_rows, before - -(-before // _FORGOTTEN))

    def rows_before(self, landing: str, num_tokens: int) -> int:
        """The most rows that a recent exact dispatch of about as many tokens received; 0: there was none.

        Each later dispatch takes a little off an earlier number. Prefill and decoding, whose numbers of tokens differ,
        have numbers of their own.
        """
        return self._rows_before.get((landing, num_tokens.bit_length()), 0)

    def read_back(self) -> list[int]:
        """The words of a dispatch's `placement` up to `overflow`, once the device has published them to the host.

        Raises:
            WaitTimeout: the splits exchange did not finish.
            CallMismatch: ranks are in different calls.
        """
        try:
            *words, failed = self.host_read.wait()
        except TimeoutError as error:
            self.failure = "the GPU did not finish the splits exchange."
            raise WaitTimeout(
                f"dispatch waited {self.host_read.limit_s:.0f} s on the host for the GPU of rank "
                f"{self.config.rank}. Look for an earlier kernel on this stream that does not end."
            ) from error
        if failed:
            self.check_status()
        self.poll_status()
        return words
