"""deep_ep.ElasticBuffer over EPAll2AllLayer: one row per (token, rank), or with `do_expand` per (token, expert)."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from operator import sub
from typing import Any, NamedTuple, NoReturn, cast

import torch
import torch.distributed as dist

from triton_ep.config import EPConfig
from triton_ep.context.choice import choose, default_num_sm
from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.context.given import Rows
from triton_ep.context.overlap import EPEvent
from triton_ep.distributed import check_group
from triton_ep.errors import ConfigError, EPError, FinalizedError, InputError, StaleHandleError
from triton_ep.exchange.landings import COMPACT, WITH_COPIES
from triton_ep.exchange.slots import to_slots
from triton_ep.integrations import arguments as check
from triton_ep.integrations import at_once
from triton_ep.integrations.deep_ep.arguments import biases_of, check_ids, with_own_names
from triton_ep.integrations.deep_ep.elastic_handle import EPHandle
from triton_ep.integrations.deep_ep.elastic_rows import ElasticRows
from triton_ep.integrations.deep_ep.fp8 import sendable
from triton_ep.integrations.deep_ep.layers import layers_of
from triton_ep.integrations.deep_ep.utils import EventHandle, EventOverlap, order_of, to_overlap
from triton_ep.integrations.layer_pool import LayerSizes
from triton_ep.layer import EPAll2AllLayer
from triton_ep.runtime.untraced import untraced_calls

_SIZE_STEP = 2 << 20
"""Byte counts of buffers are multiples of this."""
_ELSEWHERE = (
    "engram_",
    "pp_",
    "agrs_",
    "all_gather",
    "create_agrs_",
    "destroy_agrs_",
    "get_engram_",
    "get_pp_",
    "get_agrs_",
)
"""Name prefixes of DeepEP's calls that move no expert rows."""

_numbers = itertools.count()
Dispatched = tuple[Any, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]


def get_physical_domain_size(group: Any) -> tuple[int, int]:
    """Number of nodes of a group, and of ranks per node. Raises as `ElasticBuffer`."""
    pool = layers_of(group)
    return pool.world_size // pool.ranks_per_node, pool.ranks_per_node


def get_logical_domain_size(group: Any, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """Number of scale-out ranks of a group (its nodes), and of scale-up ranks in each (ranks per node). Without
    `allow_hybrid_mode`: 1, and all ranks. Raises as `ElasticBuffer`."""
    if check.flag("allow_hybrid_mode", allow_hybrid_mode, ConfigError):
        return get_physical_domain_size(group)
    return 1, layers_of(group).world_size


class _Call(NamedTuple):
    """A dispatch without a handle.

    Attributes:
        max_tokens: most tokens of any rank.
        num_sms: 0: the layer chooses.
        keeps_copies: the handle takes `topk_idx` from the dispatch, so the caller may change what it passed.
    """

    topk_idx: torch.Tensor
    num_experts: int
    max_tokens: int
    alignment: int
    num_sms: int
    do_expand: bool
    do_cpu_sync: bool
    keeps_copies: bool


@untraced_calls("an exchange between ranks")
class ElasticBuffer:
    """Dispatch and combine in the calling convention of DeepEP's version 2. Calls are collective.

    Letters: T tokens of this rank (any number up to M, zero included), M most tokens of any rank, K top-k, W ranks, E
    experts over all ranks, e experts of this rank, H hidden, R received rows, U scale-up ranks.

    Args:
        group: process group, any sub-group of the world.
        num_bytes: the value of `get_buffer_size_hint`; None: computed from the sizes that follow. Stored only: the
            first call that needs memory allocates it.
        num_max_tokens_per_rank: M of calls that do not give their own. Layers have room for the larger of both.
        hidden: H; used for sizes only.
        num_topk, use_fp8_dispatch: stored only.
        deterministic: no effect: the same input always gives the same bits.
        allow_hybrid_mode: count nodes as scale-out ranks (`get_logical_domain_size`).
        allow_multiple_reduction: combine of expanded rows sums the rows of a token on one rank there, and rounds the
            sum; False: the token's rank sums all rows, rounded once.
        num_gpu_timeout_secs: limit of every wait, in seconds.
        explicitly_destroy: stored only. `destroy` always frees the memory, a destructor never does.

    The other arguments, except `num_cpu_bytes`, are settings of DeepEP's transport; they are accepted and have no
    effect.

    Raises:
        ConfigError: an unknown group, or a group without this process; sizes that cannot work; num_cpu_bytes > 0.
        EPError: `triton_ep.initialize_distributed` has not been called.
    """

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: float = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        self._timeout_s = float(check.seconds("num_gpu_timeout_secs", num_gpu_timeout_secs))
        self.num_max_tokens_per_rank = check.integer("num_max_tokens_per_rank", num_max_tokens_per_rank, 0, ConfigError)
        self.hidden = check.integer("hidden", hidden, 0, ConfigError)
        self.num_topk = check.integer("num_topk", num_topk, 0, ConfigError)
        if check.integer("num_cpu_bytes", num_cpu_bytes, 0, ConfigError, most=1 << 62):
            raise ConfigError(f"num_cpu_bytes={num_cpu_bytes} is for Engram's tables, which are not served. Pass 0.")
        self.group = group
        self._pool = layers_of(group)
        self.rank_idx, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.allow_hybrid_mode = check.flag("allow_hybrid_mode", allow_hybrid_mode, ConfigError)
        self.allow_multiple_reduction = check.flag("allow_multiple_reduction", allow_multiple_reduction, ConfigError)
        self.deterministic, self.use_fp8_dispatch = deterministic, use_fp8_dispatch
        self.prefer_overlap_with_compute, self.explicitly_destroy = prefer_overlap_with_compute, explicitly_destroy
        self.num_allocated_qps = check.integer("num_allocated_qps", num_allocated_qps, 0, ConfigError)
        if num_bytes is None:
            num_bytes = self.get_buffer_size_hint(group, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch)
        self.num_bytes = check.integer("num_bytes", num_bytes, 0, ConfigError, most=1 << 62)
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(self.rank_idx, self.num_scaleup_ranks)
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self._user = ("elastic", next(_numbers))
        self._closed = False
        self._latest: EPAll2AllLayer | None = None
        self._chosen_sms: dict[tuple[int, int], int] = {}

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith(_ELSEWHERE):
            raise AttributeError(
                f"ElasticBuffer.{name} is not supported: this package only moves expert rows. Use DeepEP's own package."
            )
        raise AttributeError(f"ElasticBuffer has no attribute {name!r}.")

    # --- life and settings ------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Free the layers that no other buffer of the group used. Collective, idempotent; later calls raise."""
        if not self._closed:
            self._pool.free(self._user)
        self._closed = True

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """`num_bytes` of a buffer for such calls: M rows of 2 H bytes from and to every rank, rounded up to 2 MB.
        Frameworks compare this number; layers allocate what calls need."""
        tokens = check.integer("num_max_tokens_per_rank", num_max_tokens_per_rank, 0, ConfigError)
        hidden = check.integer("hidden", hidden, 0, ConfigError)
        return -(-2 * check_group(group) * tokens * hidden * 2 // _SIZE_STEP) * _SIZE_STEP

    def get_physical_domain_size(self) -> tuple[int, int]:
        """`get_physical_domain_size` of the buffer's group."""
        return get_physical_domain_size(self.group)

    def get_logical_domain_size(self) -> tuple[int, int]:
        """`get_logical_domain_size` of the buffer's group, with its `allow_hybrid_mode`."""
        return get_logical_domain_size(self.group, self.allow_hybrid_mode)

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """Number of communication CTAs that a layer of these sizes chooses, from the tuned table or a formula. The
        rates have no effect."""
        key = (num_experts, num_topk)
        if key not in self._chosen_sms:
            device, tokens = self._pool.heap.device, self.num_max_tokens_per_rank
            self._chosen_sms[key] = default_num_sm(device)
            if tokens and self.hidden:
                config = EPConfig(
                    max_tokens=tokens,
                    hidden=self.hidden,
                    topk=check.integer("num_topk", num_topk, 1),
                    num_experts=check.integer("num_experts", num_experts, 1),
                    rank=self.rank_idx,
                    world_size=self.num_ranks,
                    local_world_size=self._pool.ranks_per_node,
                )
                self._chosen_sms[key] = choose(config, device)[1].num_sm
        return self._chosen_sms[key]

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """`num_allocated_qps`: queue pairs belong to the transport."""
        return self.num_allocated_qps

    @staticmethod
    def capture() -> EventHandle:
        """The current point of the current stream."""
        return EventHandle()

    def get_comm_stream(self) -> torch.cuda.Stream | None:
        """Stream that the latest calls with `async_with_compute_stream` use; None on the CPU.

        Raises:
            InputError: no call has been made yet.
        """
        if self._latest is None:
            raise InputError("get_comm_stream: no call has created a layer with a stream yet. Dispatch first.")
        return self._latest.comm_stream

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Wait for all ranks of the group, on the current stream.

        with_cpu_sync: the host waits for the device before and after the barrier. The other arguments have no effect.
        """
        self._check_open()
        synchronize = torch.cuda.synchronize if with_cpu_sync and torch.cuda.is_available() else _nothing
        synchronize()
        dist.barrier(self.group)
        synchronize()

    # --- calls ------------------------------------------------------------------------------------------

    @with_own_names
    def dispatch(
        self,
        x: Any,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> Dispatched:
        """Send rows to the ranks of their experts. Collective.

        Args:
            x: [T, H] bfloat16, float16 or float32; or a tuple of float8_e4m3fn rows, contiguous, and scales
                [T, H / 128] float32 or int32, or [T, H / 512] int32, with any strides. Scales on all ranks or on none.
            topk_idx: [T, K] int64 or int32, contiguous; -1 = dropped. None with a handle.
            topk_weights: [T, K] float32, contiguous; on all ranks or on none. With a handle only for expanded rows.
            cumulative_local_expert_recv_stats: [e] int32; the counts of the experts are added to it.
            num_experts: E; may be None only with a handle.
            num_max_tokens_per_rank: M, the same on all ranks; None: M of the buffer, or of the handle.
            expert_alignment: expanded rows of each expert start at a multiple of it, and counts are rounded up to it.
            num_sms: CTAs of the kernels; 0, or the value of `get_theoretical_num_sms`: the layer chooses.
            num_qps: no effect.
            previous_event, previous_event_before_epilogue: the current stream waits for them.
            async_with_compute_stream: run on the communication stream; use the results after the event.
            allocate_on_comm_stream: no effect: memory may be used and dropped on both streams.
            handle: handle of an earlier dispatch with the same `do_expand`. Its routing is used again; the host does
                not wait.
            do_handle_copy: the handle has a copy of `topk_idx`. Nothing else that was passed or returned belongs to it.
            do_cpu_sync: the host waits for the number of received rows. False: R = W * M, or with `do_expand` the most
                rows that can arrive, and the host does not wait. None: True without a handle.
            do_expand: one row per (token, expert), by expert, source rank and token; False: one row per token.
            do_zero_padding: no effect: padding rows are always zero.
            use_tma_aligned_col_major_sf: scales arrive with rows as the fast dimension, columns at multiples of 16
                bytes.

        Returns:
            recv_x [R, H], or a tuple of rows and scales; recv_topk_idx [R, K], local expert ids, -1 = another rank's
            expert, None with `do_expand`; recv_topk_weights [R, K], zero where the id is -1, or [R] with `do_expand`,
            or None; the handle; the event. Rows past the received ones have id -1 and undefined values.

        Raises:
            InputError: an argument does not fit; ids out of range, on every rank.
            StaleHandleError: `handle` belongs to another group, or is no handle.
            FinalizedError: after `destroy`.
            PeerFailed, WaitTimeout: as `EPAll2AllLayer.dispatch`.
        """
        self._check_open()
        plain = previous_event is previous_event_before_epilogue is cumulative_local_expert_recv_stats is None
        if plain and async_with_compute_stream is use_tma_aligned_col_major_sf is False:
            found: Dispatched | None = None
            if handle is None:
                sizes = num_experts, num_max_tokens_per_rank, expert_alignment, num_sms
                modes = do_expand, True if do_cpu_sync is None else do_cpu_sync, do_handle_copy
                found = self._at_once(x, topk_idx, topk_weights, sizes, modes)
            elif topk_idx is topk_weights is do_cpu_sync is num_experts is num_max_tokens_per_rank is None:
                found = None if expert_alignment is not None else self._again_at_once(x, handle, do_expand)
            if found is not None:
                return found
        try:
            rows = ElasticRows.of(x)
        except InputError:
            if handle is None and self._latest is not None:
                sizes = num_experts, num_max_tokens_per_rank, expert_alignment, num_sms
                modes = do_expand is True, do_cpu_sync is not False, False
                self._refuse(self._like_latest(self._latest), topk_idx, sizes, modes, async_with_compute_stream is True)
            raise
        do_expand = check.flag("do_expand", do_expand)
        column_major = check.flag("use_tma_aligned_col_major_sf", use_tma_aligned_col_major_sf)
        if do_cpu_sync is not None:
            do_cpu_sync = check.flag("do_cpu_sync", do_cpu_sync)
        _wait(previous_event, previous_event_before_epilogue)
        if handle is not None:
            if topk_idx is not None or do_cpu_sync:
                raise InputError("dispatch got a handle and topk_idx or do_cpu_sync=True. Leave these out.")
            given = (("num_experts", num_experts), ("num_max_tokens_per_rank", num_max_tokens_per_rank))
            self._check_handle(handle, do_expand, (*given, ("expert_alignment", expert_alignment)))
            stats = self._stats(cumulative_local_expert_recv_stats, handle.num_experts)
            layer, tensors = handle.layer, (*rows.tensors, topk_weights, handle.layout_desc, stats)
            rows.check_layer(layer.config.hidden, layer.config.token_dtype)
            if topk_weights is not None and not do_expand:
                raise InputError("topk_weights with a handle are for do_expand=True. Leave them out, or pass topk_idx.")

            def again() -> tuple[Any, torch.Tensor | None, torch.Tensor | None]:
                _count(stats, handle)
                return _again(rows, topk_weights, handle, column_major)

            (recv, ids, weights), event = self._run(layer, again, tensors, async_with_compute_stream)
            return recv, ids, weights, handle, to_overlap(event)
        modes = do_expand, do_cpu_sync is not False, check.flag("do_handle_copy", do_handle_copy)
        sizes = num_experts, num_max_tokens_per_rank, expert_alignment, num_sms
        try:
            call = self._call(topk_idx, *sizes, modes)
            stats = self._stats(cumulative_local_expert_recv_stats, call.num_experts)
            if rows.sent.hidden.shape[0] > call.max_tokens:
                raise InputError(
                    f"{rows.sent.hidden.shape[0]} tokens were given, but num_max_tokens_per_rank is {call.max_tokens}. "
                    "Raise it on all ranks, in the call or in the buffer."
                )
        except InputError:
            self._refuse(rows, topk_idx, sizes, modes, async_with_compute_stream is True)
            raise
        layer = self._layer(rows, call)

        def send() -> tuple[Any, torch.Tensor | None, torch.Tensor | None, EPHandle]:
            work = self._expand if do_expand else self._compact
            recv, ids, weights, made = work(layer, rows, call, topk_weights, column_major)
            _count(stats, made)
            return recv, ids, weights, made

        tensors = (*rows.tensors, topk_idx, topk_weights, stats)
        (recv, ids, weights, made), event = self._run(layer, send, tensors, async_with_compute_stream)
        return recv, ids, weights, made, to_overlap(event)

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Send rows back and sum them per token, in float32. Collective.

        Args:
            x: [R, H] with the dtype of the layer, one row per row of `recv_x`; without `do_expand` already summed over
                the experts of this rank.
            handle: handle of that dispatch.
            topk_weights: [R, K] float32, or [R] with `do_expand`: sent back to their (token, k). They multiply nothing.
                On all ranks or on none.
            bias: up to two [T, H] with the dtype of x; the float32 sums start from them.
            num_sms, num_qps, allocate_on_comm_stream: no effect: the handle refers to its layer.
            previous_event, previous_event_before_epilogue, async_with_compute_stream: as in `dispatch`.

        Returns:
            [T, H], [T, K] float32 or None, the event.

        Raises:
            InputError: an argument does not fit.
            StaleHandleError, FinalizedError, WaitTimeout: as `dispatch`.
        """
        self._check_open()
        self._check_handle(handle)
        layer, desc = handle.layer, handle.layout_desc
        x = check.tensor("x", x, 2).contiguous()
        plain = topk_weights is bias is previous_event is previous_event_before_epilogue is None
        if plain and async_with_compute_stream is False:
            return at_once.combine(layer, x, desc, "x"), None, EventOverlap()
        biases = biases_of(bias, (desc.num_dispatch_token_cur_rank, layer.config.hidden), x)
        shape = (desc.num_recv_rows,) if handle.do_expand else (desc.num_recv_rows, layer.config.topk)
        if topk_weights is not None:
            topk_weights = check.tensor("topk_weights", topk_weights, len(shape), (torch.float32,), x.device)
            if tuple(topk_weights.shape) != shape:
                raise InputError(f"topk_weights must be {list(shape)} float32, got {list(topk_weights.shape)}.")
        _wait(previous_event, previous_event_before_epilogue)

        @with_own_names
        def bring_back() -> tuple[torch.Tensor, torch.Tensor | None]:
            out = layer.combine(x, desc, bias=biases)
            if topk_weights is None:
                return out, None
            values = topk_weights.contiguous()
            if handle.do_expand:
                return out, to_slots(layer.context, values, handle.row_slots, desc)
            return out, layer.combine_topk(values, desc)[0]

        tensors = (x, topk_weights, desc, *biases)
        (out, weights), event = self._run(layer, bring_back, tensors, async_with_compute_stream)
        return out, weights, to_overlap(event)

    def _at_once(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        sizes: tuple[Any, Any, Any, Any],
        modes: tuple[Any, Any, Any],
    ) -> Dispatched | None:
        """A dispatch for which the host waits, on the layer of the latest call with these numbers, with no other check
        than the layer's.

        sizes: arguments of `_call` between ids and modes. modes: the last three fields of `_Call`.

        None: nothing was sent, because there is no such layer, or an argument does not fit it. Make the full call then.
        """
        num_experts, most, alignment, num_sms = sizes
        most = self.num_max_tokens_per_rank if most is None else most
        alignment = 1 if alignment is None else alignment
        if not type(num_experts) is type(most) is type(alignment) is type(num_sms) is int or modes[1] is not True:
            return None
        if not type(modes[0]) is type(modes[2]) is bool or not isinstance(topk_idx, torch.Tensor):
            return None
        call, rows = _Call(topk_idx, num_experts, most, alignment, num_sms, *modes), sendable(x)
        layer = self._pool.found.get((self._user, type(x) is tuple, *call[1:-1]))
        if layer is None or rows is None or not isinstance(rows.data, torch.Tensor) or rows.data.dim() != 2:
            return None
        if rows.data.shape[0] > most:
            return None
        self._latest = layer
        if call.do_expand:
            expanded = at_once.dispatch(layer, rows, topk_idx, topk_weights, WITH_COPIES)
            if expanded is None:
                return None
            arrived, weights, copies, _ = expanded.received
            made = self._handle(layer, call, expanded.desc, copies, _rows_of_experts(expanded.desc))
            return rows.returned(arrived), None, weights, made, EventOverlap()
        landing = COMPACT.get(topk_idx.dtype)
        sent = None if landing is None else at_once.dispatch(layer, rows, topk_idx, topk_weights, landing)
        if sent is None or sent.received.topk_idx is None:
            return None
        ids, counts = sent.received.topk_idx, None if sent.host_counts is None else list(sent.host_counts)
        made = self._handle(layer, call, sent.desc, None, None if counts is None else _rounded(counts, call))
        arrived = Rows(sent.received.x, sent.received.scale)
        return rows.returned(arrived), ids, sent.received.topk_weights, made, EventOverlap()

    def _again_at_once(self, x: Any, handle: EPHandle, do_expand: Any) -> Dispatched | None:
        """A dispatch of plain rows with a handle and nothing else; None: nothing was sent, make the full call."""
        self._check_handle(handle)
        layer, desc = handle.layer, handle.layout_desc
        if do_expand is not handle.do_expand or not isinstance(x, torch.Tensor) or not x.is_contiguous():
            return None
        if x.dim() != 2 or (x.shape[1], x.dtype) != (layer.config.hidden, layer.config.token_dtype):
            return None
        if do_expand:
            return layer.dispatch_again(x, desc)[0], None, None, handle, EventOverlap()
        found = at_once.compact_again(layer, Rows(x), desc, handle.idx_dtype)
        return None if found is None else (found.received.x, found.received.topk_idx, None, handle, EventOverlap())

    # --- layers and checks ------------------------------------------------------------------------------

    def _call(
        self,
        topk_idx: Any,
        num_experts: Any,
        max_tokens: Any,
        alignment: Any,
        num_sms: Any,
        modes: tuple[bool, bool, bool],
    ) -> _Call:
        """Check the arguments that select the layer of a dispatch; modes: the last three fields of `_Call`."""
        check_ids(topk_idx)
        if num_experts is None:
            raise InputError("dispatch without a handle needs num_experts, over all ranks.")
        most = self.num_max_tokens_per_rank if max_tokens is None else max_tokens
        return _Call(
            topk_idx,
            check.integer("num_experts", num_experts, 1),
            check.integer("num_max_tokens_per_rank", most, 1),
            1 if alignment is None else check.integer("expert_alignment", alignment, 1),
            check.integer("num_sms", num_sms, 0),
            *modes,
        )

    def _refuse(
        self,
        rows: ElasticRows,
        topk_idx: Any,
        sizes: tuple[Any, Any, Any, Any],
        modes: tuple[bool, bool, bool],
        asynchronous: bool,
    ) -> None:
        """Report to the other ranks that this rank refused a dispatch, if its arguments tell the layer of the call.

        sizes: arguments of `_call` between ids and modes.
        """
        if not isinstance(topk_idx, torch.Tensor) or topk_idx.dim() != 2:
            return
        scales, nothing = rows.sent.scales, cast(Any, None)  # the layer refuses nothing, and reports that

        def refuse() -> None:
            if not call.do_expand:
                layer.dispatch_compact(nothing, nothing, scale=scales, num_rows=self._compact_rows(call))
            elif scales is None:
                layer.dispatch(nothing, nothing)
            else:
                layer.dispatch_scaled(nothing, scales, nothing)

        with contextlib.suppress(EPError):  # the caller raises the cause
            call = self._call(topk_idx.new_empty(topk_idx.shape, dtype=torch.int32), *sizes, modes)
            layer = self._layer(rows, call)
            self._run(layer, refuse, (), asynchronous)

    def _like_latest(self, layer: EPAll2AllLayer) -> ElasticRows:
        """No rows, of the kind that the other ranks presumably send: that of the latest call."""
        cfg = layer.config
        return ElasticRows.of(torch.empty(0, cfg.hidden, dtype=cfg.token_dtype, device=self._pool.heap.device))

    def _stats(self, stats: Any, num_experts: int) -> torch.Tensor | None:
        """The argument `cumulative_local_expert_recv_stats`: [e] int32, or None."""
        if stats is None:
            return None
        name, local = "cumulative_local_expert_recv_stats", num_experts // self.num_ranks
        given = check.tensor(name, stats, 1, (torch.int32,), self._pool.heap.device)
        if given.shape[0] != local:
            raise InputError(f"{name} must be [{local}] int32, got {list(given.shape)}.")
        return given

    def _layer(self, rows: ElasticRows, call: _Call) -> EPAll2AllLayer:
        """The layer that serves a dispatch."""
        hidden, dtype, topk = rows.sent.hidden.shape[1], rows.sent.dtype, call.topk_idx.shape[1]
        key = (self._user, hidden, dtype, topk, *call[1:-1])
        layer = self._pool.found.get(key)
        if layer is None:
            layer = self._pool.found[key] = self._pool.get(self._sizes(hidden, dtype, topk, call), user=self._user)
        self._latest = self._pool.found[self._user, rows.sent.scales is not None, *call[1:-1]] = layer
        return layer

    def _sizes(self, hidden: int, dtype: torch.dtype, topk: int, call: _Call) -> LayerSizes:
        chosen = call.num_sms in (0, self.get_theoretical_num_sms(call.num_experts, topk))
        sizes = LayerSizes(
            hidden,
            topk,
            call.num_experts,
            dtype,
            None if chosen else call.num_sms,
            self._timeout_s,
            max_tokens=max(call.max_tokens, self.num_max_tokens_per_rank),
            # In one node this only changes the number of rows to reserve: compact rows are fewer than expanded ones.
            enable_local_combine=self.num_rdma_ranks == 1,
        )
        if not call.do_expand:
            return sizes
        capacity = None if call.do_cpu_sync else self._most_rows(call)
        local = self.allow_multiple_reduction
        return sizes._replace(alignment=call.alignment, capacity=capacity, enable_local_combine=local)

    def _compact_rows(self, call: _Call) -> int | None:
        """Number of compact rows that a dispatch returns; None: those that arrive."""
        return None if call.do_cpu_sync else self.num_ranks * call.max_tokens

    def _most_rows(self, call: _Call) -> int:
        """Most expanded rows that can arrive, padding included."""
        experts, align = call.num_experts // self.num_ranks, call.alignment
        most = self.num_ranks * call.max_tokens * min(call.topk_idx.shape[1], experts) + (align - 1) * experts
        return -(-most // align) * align

    def _compact(
        self,
        layer: EPAll2AllLayer,
        rows: ElasticRows,
        call: _Call,
        weights: torch.Tensor | None,
        column_major: bool,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, EPHandle]:
        sent, num_rows = rows.sent, self._compact_rows(call)
        recv = layer.dispatch_compact(sent.hidden, call.topk_idx, weights, scale=sent.scales, num_rows=num_rows)
        counts = recv.num_recv_tokens_per_expert
        made = self._handle(layer, call, recv.layout_desc, None, None if counts is None else _rounded(counts, call))
        return rows.arrived((recv.x, recv.scale), column_major), recv.topk_idx, recv.topk_weights, made

    def _expand(
        self,
        layer: EPAll2AllLayer,
        rows: ElasticRows,
        call: _Call,
        weights: torch.Tensor | None,
        column_major: bool,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, EPHandle]:
        recv, recv_weights, desc, copies = rows.sent.dispatch(layer, call.topk_idx, weights)
        made = self._handle(layer, call, desc, copies, _rows_of_experts(desc))
        return rows.arrived(recv, column_major), None, recv_weights, made

    def _handle(
        self, layer: EPAll2AllLayer, call: _Call, desc: Any, copies: torch.Tensor | None, counts: list[int] | None
    ) -> EPHandle:
        """counts: rows of each local expert, rounded up to the alignment; None: the host has not read them."""
        most = self.num_ranks * call.max_tokens
        if counts is None:
            tokens = most
        else:
            tokens = desc.num_recv_rows if copies is None else copies.shape[0]
        return EPHandle(
            layer=layer,
            layout_desc=desc,
            scaleup_ranks=self.num_scaleup_ranks,
            do_expand=call.do_expand,
            num_experts=call.num_experts,
            expert_alignment=call.alignment,
            num_max_tokens_per_rank=call.max_tokens,
            num_sms=layer.config.num_sm,
            given_idx=None if call.keeps_copies else call.topk_idx,
            idx_dtype=call.topk_idx.dtype,
            num_recv_tokens=tokens,
            num_expanded_tokens=self._most_rows(call) if counts is None else sum(counts),
            num_recv_tokens_per_expert_list=counts or [],
            copies=copies,
        )

    def _run(
        self, layer: EPAll2AllLayer, call: Callable[[], Any], tensors: tuple[object, ...], asynchronous: Any
    ) -> tuple[Any, EPEvent | None]:
        if check.flag("async_with_compute_stream", asynchronous):
            return layer.on_comm_stream(call, tensors)
        return call(), None

    def _check_open(self) -> None:
        if self._closed:
            raise FinalizedError(
                "this ElasticBuffer was destroyed, its memory is freed. Create a new one on all ranks of its group."
            )

    def _check_handle(
        self, handle: Any, do_expand: bool | None = None, given: tuple[tuple[str, Any], ...] = ()
    ) -> None:
        """Raise unless `handle` belongs to this group and has every value given that is not None."""
        if not isinstance(handle, EPHandle):
            raise StaleHandleError(f"handle must come from dispatch, got {type(handle).__name__}.")
        if handle.layer.context.group is not self.group:
            raise StaleHandleError("the handle belongs to another group. Pass one of this buffer's group.")
        self._latest = handle.layer
        if do_expand is None:
            return
        for name, value in (("do_expand", do_expand), *given):
            if value is not None and value != getattr(handle, name):
                raise InputError(
                    f"{name} is {check.shown(value)}, but the handle has {getattr(handle, name)}. Pass the same."
                )


def _again(
    rows: ElasticRows, weights: torch.Tensor | None, handle: EPHandle, column_major: bool
) -> tuple[Any, torch.Tensor | None, torch.Tensor | None]:
    """Dispatch with the routing of a handle; returns rows, ids, weights."""
    layer, desc = handle.layer, handle.layout_desc
    if handle.do_expand:
        recv, recv_weights = rows.sent.again(layer, desc, weights)
        return rows.arrived(recv, column_major), None, recv_weights
    sent = Rows(*rows.sent)
    found = at_once.compact_again(layer, sent, desc, handle.idx_dtype)
    if found is None:
        rows.sent.by_rank_again(layer, desc)
        raise AssertionError("the full call raises")
    arrived = found.received
    return rows.arrived(Rows(arrived.x, arrived.scale).like(sent), column_major), arrived.topk_idx, None


def _count(stats: torch.Tensor | None, handle: EPHandle) -> None:
    if stats is not None:
        stats.add_(handle.layout_desc.num_recv_tokens_per_expert)


def _rows_of_experts(desc: EPAllToAllLayoutDesc) -> list[int] | None:
    """Rows of each local expert, padding included; None: the host has not read them."""
    offsets = desc.host_expert_offsets
    return None if offsets is None else list(map(sub, offsets[1:], offsets))


def _rounded(counts: list[int], call: _Call) -> list[int]:
    align = call.alignment
    return counts if align == 1 else [-(-count // align) * align for count in counts]


def _wait(*events: Any) -> None:
    """Make the current stream wait for the events that are not None."""
    for event in events:
        if event is not None:
            order_of(event, False)


def _nothing() -> None:
    """Stands for `synchronize` where the host does not wait."""
