"""deep_ep.Buffer over EPAll2AllLayer: dispatch and combine of rows that arrive once per rank."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from triton_ep.errors import CapacityError, ConfigError, InputError, StaleHandleError
from triton_ep.exchange.compact import CompactRows
from triton_ep.integrations import arguments as check
from triton_ep.integrations.deep_ep.arguments import (
    add,
    biases_of,
    check_counts,
    check_ids,
    ids_of_ranks,
    sum_of_counts,
)
from triton_ep.integrations.deep_ep.config import Config, longest_row
from triton_ep.integrations.deep_ep.fp8 import QuantizedRows, check_hidden
from triton_ep.integrations.deep_ep.handles import DispatchHandle
from triton_ep.integrations.deep_ep.layers import Kind, layers_of
from triton_ep.integrations.deep_ep.low_latency import LowLatencyCalls
from triton_ep.integrations.deep_ep.utils import EventHandle, EventOverlap, order_of, to_overlap
from triton_ep.layer import EPAll2AllLayer
from triton_ep.ops.compact import token_layout

_numbers = itertools.count()
Dispatched = tuple[Any, torch.Tensor | None, torch.Tensor | None, list[int] | None, DispatchHandle | None, EventOverlap]


class Buffer(LowLatencyCalls):
    """Dispatch and combine in DeepEP's calling convention. All calls but the static ones are collective.

    Letters: T tokens of this rank (any number, different on every rank, zero too), K top-k, W ranks, E experts over all
    ranks, e of this one, H hidden, R received rows.

    Args:
        group: process group, any sub-group of the world.
        num_nvl_bytes: says how long rows may be: what `Config.get_nvl_buffer_size_hint` returns for them. Memory is
            taken by the first call that needs it, for the tokens that there are.
        num_rdma_bytes: at least `get_low_latency_rdma_size_hint(...)` for low-latency calls.
        low_latency_mode: allows the low-latency calls.
        explicitly_destroy: kept as told. Memory is freed by `destroy` in any case, never by a destructor.
        timeout_s: bound of every wait, in seconds.

    The other arguments are settings of a transport that does not exist here; they are accepted and change nothing.

    Raises:
        ConfigError: an unknown group, or one that this process is not in; sizes that cannot work.
        EPError: `triton_ep.initialize_distributed` has not been called.
    """

    num_sms: int = 20
    """Programs of the exchange in calls without `config`."""

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        timeout_s: float = 30.0,
    ) -> None:
        check.seconds("timeout_s", timeout_s)
        low_latency_mode = check.flag("low_latency_mode", low_latency_mode, ConfigError)
        num_nvl_bytes = check.integer("num_nvl_bytes", num_nvl_bytes, 0, ConfigError, most=1 << 62)
        num_rdma_bytes = check.integer("num_rdma_bytes", num_rdma_bytes, 0, ConfigError, most=1 << 62)
        if check.flag("enable_shrink", enable_shrink, ConfigError):
            raise ConfigError(
                "enable_shrink=True masks ranks that do not answer; here they raise WaitTimeout. Pass False."
            )
        if comm is not None:
            raise ConfigError("comm= is a communicator of mpi4py. Pass group=, a process group of torch.distributed.")
        self.group = group
        self._layers = layers_of(group)
        self._layers.timeout_s = timeout_s
        self.rank, self.group_size = dist.get_rank(group), dist.get_world_size(group)
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self._longest_row = longest_row(num_nvl_bytes, self.group_size)
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self._number = next(_numbers)
        self._closed = False
        self._latest: EPAll2AllLayer | None = None

    # --- life and settings ------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Free the memory that no other buffer of the group used. Collective, idempotent; no call may follow."""
        if not self._closed:
            self._layers.free(self._number)
        self._closed = True

    @property
    def is_open(self) -> bool:
        """False after `destroy`."""
        return not self._closed

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: kernels are compiled for the GPU they run on."""
        return True

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        """Programs of the exchange in calls to come; another number takes layers of its own.

        Raises:
            ConfigError: an odd number, or none.
        """
        if check.integer("new_num_sms", new_num_sms, 2, ConfigError) % 2:
            raise ConfigError(f"set_num_sms got {new_num_sms}; it must be an even number of at least 2.")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """The point that the current stream has come to."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Settings for `dispatch` with any number of ranks."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Settings for `combine` with any number of ranks."""
        return Config(Buffer.num_sms)

    def get_comm_stream(self) -> torch.cuda.Stream | None:
        """Stream of the calls with `async_finish` that came last; None on the CPU.

        Raises:
            InputError: no call has been made yet.
        """
        if self._latest is None:
            raise InputError("get_comm_stream: streams belong to layers, and no call has made one yet. Dispatch first.")
        return self._latest.comm_stream

    # --- calls ------------------------------------------------------------------------------------------

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Where the tokens of this rank go. No communication. `dispatch` only uses len(num_tokens_per_expert).

        Args:
            topk_idx: [T, K] int64 or int32, contiguous; -1 = dropped.
            num_experts: E.

        Returns:
            Tokens per rank [W] int32, tokens per node [N] int32 (None with one node), entries per expert [E] int32,
            [T, W] bool which token goes where, and the event.

        Raises:
            InputError: ids that are no such table, or experts that the ranks cannot share alike.
        """
        self._check_open()
        check_ids(topk_idx)
        num_experts = check.integer("num_experts", num_experts, 1)
        if num_experts % self.group_size:
            raise InputError(f"num_experts is {num_experts}; it must be a multiple of the {self.group_size} ranks.")
        order_of(previous_event, False)
        per_node = self._layers.ranks_per_node
        found = token_layout(topk_idx, num_experts, self.group_size, per_node, self._layers.zeros)
        nodes = None if per_node == self.group_size else found.tokens_per_node
        event = Buffer.capture() if async_finish else EventOverlap()
        return found.tokens_per_rank, nodes, found.entries_per_expert, found.in_rank, event

    def dispatch(
        self,
        x: Any,
        handle: DispatchHandle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Dispatched:
        """Send each row once to every rank that owns one of its experts. Collective.

        Args:
            x: [T, H] bfloat16, float16 or float32, contiguous; or a tuple of such float8_e4m3fn and scales
                [T, H / 128] float32 (or int32, of [T, H / 512] too), strided as they like; so on all ranks or on none.
            handle: of an earlier dispatch: its routing is taken, and the host waits for nothing.
            num_tokens_per_expert: [E], from `get_dispatch_layout`; its length is E. The other three of that call are
                counted anew, and not looked at where there is `topk_idx`.
            topk_idx: [T, K] int64 or int32, contiguous; -1 = dropped. None, on all ranks: rows go by
                `is_token_in_rank` [T, W] bool, through a layer for that, and `num_tokens_per_expert` is summed over
                the ranks in a collective of the group.
            topk_weights: [T, K] float32, contiguous; on all ranks or on none.
            expert_alignment: counts per expert are rounded up to a multiple of it; rows are not padded.
            num_worst_tokens: n > 0: n rows on every rank, and the host waits for nothing; ids behind the arrivals are
                -1. The first such call makes room for all tokens of all ranks, and waits for that.
            config: its `num_sms`; None: `Buffer.num_sms`.
            previous_event, async_finish: as `EPAll2AllLayer.dispatch`; without `async_finish` the current stream waits
                for the event.
            allocate_on_comm_stream: changes nothing: memory may be used and dropped on both streams.

        Returns:
            recv_x [R, H], rows by source rank, then by token, or a tuple of such and scales; recv_topk_idx [R, K],
            local expert ids, -1 = elsewhere; recv_topk_weights [R, K] float32, zero there (None without `topk_idx`);
            rows per local expert, a list (empty with `num_worst_tokens`); the handle; the event. With `handle` only
            the first and the last.

        Raises:
            InputError: an argument does not fit; ids out of range, on every rank.
            ConfigError: rows longer than the buffer was made for.
            StaleHandleError: `handle` is of another group, or none.
            FinalizedError: after `destroy`.
            PeerFailed, WaitTimeout: as `EPAll2AllLayer.dispatch`.
        """
        self._check_open()
        if handle is not None:
            pair = self._check_rows(x)
            if topk_idx is not None or topk_weights is not None:
                raise InputError(
                    "dispatch got a handle, which has the routing, and topk_idx or topk_weights. Pass one."
                )
            layer = self._layer_of(handle)
            if pair is not None:
                check_hidden(layer, pair)
                recv_x, event = pair.again(layer, handle.layout_desc, previous_event, async_finish)
            else:
                order = order_of(previous_event, async_finish)
                recv_x, event = layer.dispatch_compact_again(x, handle.layout_desc, **order)
            return recv_x, None, None, None, None, to_overlap(event)
        num_experts, ids = check_counts(num_tokens_per_expert, expert_alignment), topk_idx
        if ids is None:
            if topk_weights is not None:
                raise InputError("dispatch got topk_weights, but no topk_idx that they belong to. Pass both or none.")
            pair = self._check_rows(x)
            num_tokens = (x if pair is None else pair.data).shape[0]
            ids = ids_of_ranks(is_token_in_rank, num_tokens, self.group_size, num_experts)
        rows, made = self.dispatch_rows(
            x,
            ids,
            topk_weights,
            num_experts,
            num_worst_tokens=num_worst_tokens,
            config=config,
            previous_event=previous_event,
            async_finish=async_finish,
        )
        counts = rows.num_recv_tokens_per_expert or []
        if topk_idx is None and counts and num_tokens_per_expert is not None:
            counts = sum_of_counts(num_tokens_per_expert, self.group)
        aligned = counts
        align = int(expert_alignment)
        if align != 1:
            aligned = [-(-count // align) * align for count in counts]
        recv_idx = None if topk_idx is None else rows.topk_idx
        return rows.x, recv_idx, rows.topk_weights, aligned, made, to_overlap(rows.event)

    def dispatch_rows(
        self,
        x: Any,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        num_experts: int,
        *,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
    ) -> tuple[CompactRows, DispatchHandle]:
        """`dispatch` of a routing that nobody has counted: rows (for a tuple `x` is one, too), and the handle."""
        self._check_open()
        pair = self._check_rows(x)
        check_ids(topk_idx)
        num_sm = Buffer.num_sms if config is None else _config(config).num_sms
        num_worst_tokens = check.integer("num_worst_tokens", num_worst_tokens, 0)
        num_tokens, hidden = x.shape if pair is None else pair.data.shape
        # What comes back for quantised rows is bfloat16, so the layer is for such.
        kind = Kind(x.dtype if pair is None else torch.bfloat16, hidden, topk_idx.shape[1], num_experts, num_sm)
        order = {} if pair is not None else order_of(previous_event, async_finish)
        while True:
            layer = self._latest = self._layers.get(kind, num_tokens, self._number)
            call = partial(
                layer.dispatch_compact, exp_indices=topk_idx, weight=topk_weights, num_rows=num_worst_tokens or None
            )
            try:
                if pair is None:
                    rows = call(x, **order)
                else:
                    rows = pair.dispatch(layer, call, (topk_idx, topk_weights), previous_event, async_finish)
            except CapacityError as error:
                # The same on all ranks, before a row was sent.
                self._layers.grow(kind, error.needed_tokens)
                continue
            return rows, DispatchHandle(layer, rows.layout_desc)

    def combine(
        self,
        x: torch.Tensor,
        handle: DispatchHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Bring one row per (token, rank) back and sum them per token, in float32, rounded once. Collective.

        Args:
            x: [R, H], contiguous: one row per row of `recv_x`, summed over the experts of this rank.
            handle: of that dispatch.
            topk_weights: [R, K] float32, contiguous: brought back and summed over ranks too; on all ranks or on none.
            bias: up to two [T, H] of the dtype of x, added to the sums in float32, which are rounded once more for it;
                the current stream waits for `previous_event` then, too.
            config: changes nothing: the handle has its layer.

        Returns:
            [T, H], [T, K] float32 or None, the event.

        Raises:
            InputError: an argument does not fit.
            StaleHandleError, FinalizedError, WaitTimeout: as `dispatch`.
        """
        self._check_open()
        layer, desc = self._layer_of(handle), handle.layout_desc
        check.tensor("x", x, 2)
        biases = biases_of(bias, (desc.num_dispatch_token_cur_rank, layer.config.hidden), x)
        order = order_of(previous_event, async_finish)
        result: Any
        if biases:

            def summed() -> torch.Tensor:
                return add(layer.combine(x, desc), biases)

            if async_finish:
                order_of(previous_event, False)
            result = layer.on_comm_stream(summed, (x, desc, *biases)) if async_finish else summed()
        else:
            result = layer.combine(x, desc, None, **order)
        out, event = result if async_finish else (result, None)
        weights = None
        if topk_weights is not None:
            if async_finish:
                order["previous_event"] = event
            weights, event = layer.combine_topk(topk_weights, desc, **order)
        return out, weights, to_overlap(event)

    # --- checks -----------------------------------------------------------------------------------------

    def _check_rows(self, x: Any) -> QuantizedRows | None:
        pair = QuantizedRows.of(x) if isinstance(x, tuple) else None
        x = x if pair is None else pair.data
        if not isinstance(x, torch.Tensor) or x.dim() != 2:
            raise InputError("x must be a tensor of rows [T, H], or a tuple of quantised rows and their scales.")
        nbytes = x.shape[1] * max(x.element_size(), 2)
        if nbytes > self._longest_row:
            raise ConfigError(
                f"rows of {nbytes} bytes do not fit: with num_nvl_bytes={self.num_nvl_bytes} this Buffer was made for "
                f"up to {self._longest_row}. Make a new Buffer on all ranks, with what "
                "Config.get_nvl_buffer_size_hint(hidden_bytes, num_ranks) says."
            )
        return pair

    def _layer_of(self, handle: Any) -> EPAll2AllLayer:
        if not isinstance(handle, DispatchHandle):
            raise StaleHandleError(f"a handle that dispatch returned is needed, got {type(handle).__name__}.")
        layer = handle.layer
        if layer.context.group is not self.group:
            raise StaleHandleError("the handle is of a dispatch over another group. Pass one of this Buffer's group.")
        self._latest = layer
        return layer


def _config(given: Any) -> Config:
    if not isinstance(given, Config):
        raise InputError(f"config must be a deep_ep.Config or None, got {check.shown(given)}.")
    return given
