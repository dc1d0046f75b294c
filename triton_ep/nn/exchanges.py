"""Exchanges of MoE layers: one EPAll2AllLayer for all layers with the same group and sizes.

An exchange holds symmetric memory (0.44 GiB for 4096 tokens of 7168 on 8 GPUs) but nothing of a model, and any number
of its dispatches may wait for their backward passes. So layers share it: `shared_exchange` finds an existing exchange.
Two passes must not run on one exchange at a time, on two streams or in two threads: `Exchange.use` orders passes where
it can and refuses the rest.

The table of shared exchanges is the only state of this package that belongs to the process. Only collective calls
(`shared_exchange`, `Exchange.release`, `finalize_exchanges`) change it, so it is the same on all ranks of a group.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, NamedTuple, NoReturn, Required, TypedDict, Unpack
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from triton_ep.autograd.operations import LAYERS
from triton_ep.config import as_integer
from triton_ep.context.overlap import current_stream
from triton_ep.distributed import check_group, ranks_per_node
from triton_ep.errors import ConfigError, EPError, FinalizedError, InputError
from triton_ep.kernels.device import codes
from triton_ep.layer import EPAll2AllLayer

ALIGNMENT = 128
"""Alignment of an expert's segment, in rows: a tile of the grouped products holds rows of one expert."""
TIMEOUT_S = 120.0
"""Default bound of waits. Kernel compilation between a dispatch and its combine may take different times per rank."""
_FREE = ("max_tokens", "num_sm", "timeout_s", "local_world_size")
"""Fields in which a given exchange may differ from the module's sizes; its max_tokens may only be larger."""
_FIELDS = {"capacity": "recv_capacity", "dtype": "token_dtype"}


class Sizes(NamedTuple):
    """Sizes that two layers must have in common to share an exchange; the fields are those of `new_exchange`."""

    hidden: int
    num_experts: int
    topk: int
    max_tokens: int
    payload: str | None = None
    capacity: int | None = None
    low_latency: bool = False
    dtype: torch.dtype = torch.bfloat16
    num_sm: int | None = None
    timeout_s: float = TIMEOUT_S
    local_world_size: int | None = None


class ExchangeOptions(TypedDict, total=False):
    """Arguments of `MoE` that decide its exchange, the same on all ranks. Those without a default are required.

    Attributes:
        num_experts: over all ranks. topk: experts per token. max_tokens: most tokens per rank and call.
        payload: None, or "mxfp8". capacity: None = exact; an int is rows, a float multiplies max_tokens * topk.
        low_latency: for decoding. dtype: of rows; bfloat16. num_sm: CTAs of the exchange; None = the tuned number.
        timeout_s: bound of every wait, in seconds. local_world_size: ranks per node; None = taken from the job.
    """

    num_experts: Required[int]
    topk: Required[int]
    max_tokens: Required[int]
    payload: str | None
    capacity: int | float | None
    low_latency: bool
    dtype: torch.dtype
    num_sm: int | None
    timeout_s: float
    local_world_size: int | None


def sizes_of(hidden: int, options: ExchangeOptions, world_size: int) -> Sizes:
    """Resolve options for `world_size` ranks: fill in defaults, convert the capacity to rows.

    Raises:
        ConfigError: as `capacity_rows`.
        TypeError: an unknown option, or a missing one.
    """
    named: dict[str, Any] = {**options, "capacity": None}
    sizes = Sizes(hidden=hidden, **named)
    capacity, per_rank = options.get("capacity"), (sizes.num_experts, sizes.topk, sizes.max_tokens)
    return sizes._replace(capacity=capacity_rows(capacity, sizes.low_latency, *per_rank, world_size))


def new_exchange(hidden: int, *, group: Any = None, **options: Unpack[ExchangeOptions]) -> EPAll2AllLayer:
    """Create an unshared exchange for a `MoE` of these sizes: for a second micro-batch in flight. Collective.

    The caller finalizes it. Arguments are those of `MoE` (`ExchangeOptions`).

    Raises:
        ConfigError: sizes that cannot work, or that differ between ranks. HeapError: not enough symmetric memory.
    """
    group = dist.group.WORLD if group is None else group
    return _make(group, sizes_of(hidden, options, check_group(group)))


def alignment_of(low_latency: bool) -> int:
    """Alignment of segments: whole tiles, or 1 for low latency, whose tiles follow the segments as rows are few."""
    return 1 if low_latency else ALIGNMENT


def capacity_rows(
    capacity: int | float | None, low_latency: bool, num_experts: int, topk: int, max_tokens: int, world_size: int
) -> int | None:
    """Convert `capacity` to rows, rounded up to a multiple of ALIGNMENT so that no segment ends inside a tile.

    An int is rows. A float multiplies the mean load max_tokens * topk; padding for every expert is added, up to the
    rows that can arrive. None is exact mode, which low_latency lacks: there None means all rows that can arrive, and an
    int is limited to that number too, because the largest row count selects the tiles of the products.

    Raises:
        ConfigError: neither None nor a number above 0; other sizes are no integers.
    """
    if capacity is None and not low_latency:
        return None
    num_experts, topk = as_integer("num_experts", num_experts), as_integer("topk", topk)
    max_tokens = as_integer("max_tokens", max_tokens)
    per_rank = max(num_experts // world_size, 1)
    padding = per_rank * (alignment_of(low_latency) - 1)
    most = world_size * max_tokens * min(topk, per_rank) + padding
    if capacity is None:
        rows = most
    elif isinstance(capacity, float):
        if not 0 < capacity < 1 << 20:
            raise ConfigError(f"capacity={capacity} must be above 0: it multiplies max_tokens * topk; an int is rows.")
        rows = min(int(capacity * max_tokens * topk) + padding, most)
    else:
        rows = as_integer("capacity (rows; a float multiplies max_tokens * topk; None for exact outputs)", capacity)
        rows = min(rows, most) if low_latency else rows
    return -(-rows // ALIGNMENT) * ALIGNMENT


def _make(group: Any, sizes: Sizes) -> EPAll2AllLayer:
    # A model built on the meta device still needs its exchange on the real device.
    with torch.device("cpu"):
        return EPAll2AllLayer(
            group,
            sizes.max_tokens,
            sizes.hidden,
            sizes.topk,
            dist.get_rank(group),
            sizes.num_experts,
            sizes.local_world_size or ranks_per_node(group),
            dist.get_world_size(group),
            sizes.dtype,
            num_sm=sizes.num_sm,
            enable_local_combine=True,
            payload=sizes.payload,
            alignment=alignment_of(sizes.low_latency),
            capacity=sizes.capacity,
            low_latency=sizes.low_latency,
            timeout_s=sizes.timeout_s,
            shared_staging=not sizes.low_latency,  # a pass ends its dispatch before it combines
        )


# --- one pass at a time ---------------------------------------------------------------------------------


class _Turns:
    """The open pass of a layer and the streams of earlier passes; one per layer, shared by all its holders."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.what = ""
        self.last: Any = None  # stream of the latest pass outside a capture
        self.captured: Any = None  # stream of all captures
        self.told: torch.Tensor | None = None  # host copy of the overflow counter, complete once `event` is
        self.event: torch.cuda.Event | None = None
        self.seen = 0


_turns: WeakKeyDictionary[EPAll2AllLayer, _Turns] = WeakKeyDictionary()


def _stream_now(device: torch.device) -> tuple[Any, bool]:
    """The current stream (None on the CPU), and whether it is being captured."""
    if device.type != "cuda":
        return None, False
    return current_stream(), torch.cuda.is_current_stream_capturing()


class _Turn:
    """A pass on an exchange. Hot path: a class, because a generator takes longer."""

    __slots__ = ("_device", "_turns", "_what")

    def __init__(self, turns: _Turns, what: str, device: torch.device) -> None:
        self._turns, self._what, self._device = turns, what, device

    def __enter__(self) -> None:
        turns = self._turns
        if not turns.lock.acquire(blocking=False):
            raise InputError(
                f"{self._what} began while {turns.what or 'another pass'} is open on the same exchange, whose rows it "
                "would overwrite. Give the modules of each micro-batch an exchange of their own: "
                "exchange=new_exchange(...)."
            )
        try:
            self._order()
        except BaseException:
            turns.lock.release()
            raise
        turns.what = self._what

    def __exit__(self, *_: object) -> None:
        self._turns.what = ""
        self._turns.lock.release()

    def _order(self) -> None:
        """Make the current stream wait for the previous pass."""
        turns = self._turns
        stream, capturing = _stream_now(self._device)
        if not capturing:
            if turns.last is not None and turns.last != stream:
                stream.wait_stream(turns.last)
            turns.last = stream
            return
        if turns.captured is not None and turns.captured != stream:
            raise InputError(
                f"{self._what} is captured on another stream than earlier captures on this exchange: the graphs could "
                "be replayed at the same time. Capture on one stream (torch.cuda.graph(..., stream=s)), give the "
                "modules an exchange of their own, or, if the other graphs are gone, call forget_captures()."
            )
        turns.captured = stream


class Exchange:
    """An EPAll2AllLayer and how many modules hold it.

    Attributes:
        layer: the layer.
        key: key in the table of shared exchanges; None: it belongs to the caller and is not finalized here.
        holders: number of connections to it.
    """

    def __init__(self, layer: EPAll2AllLayer, key: tuple[Any, ...] | None = None) -> None:
        self.layer, self.key, self.holders = layer, key, 1
        self._turns = _turns.setdefault(layer, _Turns())
        LAYERS[layer.context.layer_id] = layer  # ops look the layer up here

    def use(self, what: str) -> _Turn:
        """Context manager: run its block as a pass (dispatch to combine) on this exchange; no other pass may be open.

        A pass on another stream than the previous pass waits for the previous pass.

        Raises:
            InputError: another pass is open in another thread, or a capture is on another stream than earlier captures.
        """
        return _Turn(self._turns, what, self.layer.context.device)

    def forget_captures(self) -> None:
        """Allow captures on any stream again; no graph captured so far may be replayed afterwards."""
        self._turns.captured = None

    def watch_overflow(self) -> None:
        """Warn if rows did not fit the capacity. On a GPU the host does not wait, so the warning comes calls later."""
        layer, turns = self.layer, self._turns
        if layer.config.recv_capacity is None:
            return
        counter = layer.context.state[codes.OVERFLOW_TOTAL]
        if counter.device.type != "cuda":
            self._tell(int(counter))
            return
        if torch.cuda.is_current_stream_capturing():
            return
        if turns.told is None or turns.event is None:
            with torch.inference_mode(False):  # the tensor outlives inference mode and must stay writable outside it
                turns.told = torch.zeros((), dtype=torch.int64, pin_memory=True)
            turns.event = torch.cuda.Event()
        elif not turns.event.query():
            return
        self._tell(int(turns.told))
        turns.told.copy_(counter, non_blocking=True)
        turns.event.record(current_stream())

    def _tell(self, total: int) -> None:
        if total != self._turns.seen:
            self._turns.seen = total
            self.layer.warn_of_overflow()

    def release(self) -> None:
        """Drop one holder; the last holder of a shared exchange frees its memory. Collective.

        Raises:
            PeerFailed, WaitTimeout: as `EPAll2AllLayer.finalize`.
        """
        self.holders -= 1
        if self.holders <= 0 and self.key is not None:
            _shared.pop(self.key, None)
            _finalize(self)


# --- shared ones ----------------------------------------------------------------------------------------

_shared: dict[tuple[Any, ...], Exchange] = {}


def shared_exchange(group: Any, sizes: Sizes) -> Exchange:
    """Find or create the exchange of these sizes over this group. Collective.

    Raises:
        ConfigError, HeapError: as `new_exchange`.
        WaitTimeout: the existing exchange has failed: call `finalize_exchanges` before.
    """
    check_group(group)
    key = (tuple(dist.get_process_group_ranks(group)), sizes)
    found = _shared.get(key)
    if found is not None:
        try:
            found.layer.context.check_open()
        except FinalizedError:
            del _shared[key]
        else:
            found.holders += 1
            return found
    found = _shared[key] = Exchange(_make(group, sizes), key)
    return found


class Connection:
    """A module's hold on its exchange: the shared one of these sizes, or one given by the caller.

    A copy of the module holds the exchange as well. A connection cannot be pickled: the exchange is memory of running
    processes.
    """

    def __init__(self, group: Any, sizes: Sizes, given: Any = None) -> None:
        self.group, self.sizes = group, sizes
        self._exchange: Exchange | None
        self._exchange = shared_exchange(group, sizes) if given is None else given_exchange(given, group, sizes)

    def __deepcopy__(self, memo: Any) -> Connection:
        copy = object.__new__(Connection)
        copy.__dict__.update(self.__dict__)
        if copy._exchange is not None:
            copy._exchange.holders += 1
        return copy

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigError(
            "a MoE module holds an exchange of running processes, so it cannot be pickled. Save its state_dict(), and "
            "create the module again where it is loaded."
        )

    @property
    def exchange(self) -> Exchange:
        """The exchange, if it can be used.

        Raises:
            FinalizedError: it was finalized, by this module or `finalize_exchanges`.
            WaitTimeout: it has failed.
        """
        found = self._exchange
        if found is None or found.layer.context.closed:
            raise FinalizedError(
                "the exchange of this MoE module was finalized. Call connect() on all ranks of its group for a new one."
            )
        found.layer.context.check_open()
        return found

    @property
    def traced(self) -> Exchange:
        """The exchange, for a graph that torch.compile builds. Whether it is usable is checked when the graph runs.

        Raises:
            FinalizedError: it was released.
        """
        found = self._exchange
        if found is None:
            raise FinalizedError("the exchange of this MoE module was finalized. Call connect() on all ranks first.")
        return found

    def connect(self, given: Any = None) -> None:
        """Replace the exchange by `given`, or by a shared one unless an open shared one is held already. Collective."""
        before = self._exchange
        if given is not None:
            self._exchange = given_exchange(given, self.group, self.sizes)
        elif before is None or before.key is None or before.layer.context.closed:
            self._exchange = shared_exchange(self.group, self.sizes)
        else:
            return
        if before is not None and not before.layer.context.closed:
            before.release()

    def release(self) -> None:
        """Release the exchange; idempotent. Collective: the last holder of a shared exchange frees it."""
        before = self._exchange
        self._exchange = None
        if before is not None and not before.layer.context.closed:
            before.release()


def given_exchange(layer: Any, group: Any, sizes: Sizes) -> Exchange:
    """Wrap a layer of the caller for modules of these sizes.

    Raises:
        ConfigError: the layer does not fit these sizes.
    """
    if not isinstance(layer, EPAll2AllLayer):
        raise ConfigError(f"exchange must be an EPAll2AllLayer, as new_exchange makes it, got {type(layer).__name__}.")
    cfg = layer.config
    wanted = {name: value for name, value in sizes._asdict().items() if name not in _FREE}
    if sizes.capacity is None:
        del wanted["capacity"]
    for name, value in {**wanted, "alignment": alignment_of(sizes.low_latency)}.items():
        has = getattr(cfg, _FIELDS.get(name, name))
        if has != value:
            raise ConfigError(
                f"the exchange has {name}={has!r}, the module needs {value!r}. Create it by triton_ep.nn.new_exchange "
                "with the arguments of the module."
            )
    if cfg.recv_capacity is not None and cfg.recv_capacity % ALIGNMENT:
        raise ConfigError(f"the exchange has capacity={cfg.recv_capacity}; modules need a multiple of {ALIGNMENT}.")
    if cfg.max_tokens < sizes.max_tokens:
        raise ConfigError(f"the exchange has max_tokens={cfg.max_tokens}, the module needs {sizes.max_tokens}.")
    members = [dist.get_process_group_ranks(one) for one in (layer.context.group, group)]
    if members[0] != members[1]:
        raise ConfigError(f"the exchange is over ranks {members[0]}, the module over ranks {members[1]}.")
    layer.context.check_open()
    return Exchange(layer)


def finalize_exchanges() -> None:
    """Free the symmetric memory of all shared exchanges of this process. Collective, idempotent.

    Call it at the end of training, before `finalize_distributed`, or after a failure. Afterwards `connect()` gives a
    module a new exchange. Exchanges passed as `exchange=` are left to their creator.

    Raises:
        PeerFailed, WaitTimeout: as `EPAll2AllLayer.finalize`, from the first exchange that failed to finalize; all
            others have been finalized.
    """
    exchanges = list(_shared.values())
    _shared.clear()
    failure: EPError | None = None
    for exchange in exchanges:
        try:
            _finalize(exchange)
        except EPError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def _finalize(exchange: Exchange) -> None:
    ctx = exchange.layer.context
    if ctx.failure is None and not ctx.heap.closed and exchange.layer.config.recv_capacity is not None:
        with contextlib.suppress(FinalizedError):
            exchange.layer.warn_of_overflow()
    exchange.layer.finalize()
