"""deep_ep.Buffer over EPAll2AllLayer: one row per (token, rank), and low-latency calls with one slab per expert."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.context.given import Rows
from triton_ep.context.overlap import RecvHook
from triton_ep.errors import CapacityError, ConfigError, FinalizedError, InputError, StaleHandleError
from triton_ep.exchange import steps
from triton_ep.exchange.checks import check_out
from triton_ep.exchange.landings import COMPACT, CompactRows, SentCompact
from triton_ep.integrations import arguments as check
from triton_ep.integrations import at_once
from triton_ep.integrations.deep_ep import fp8
from triton_ep.integrations.deep_ep.arguments import (
    OF_LAYERS,
    aligned,
    biases_of,
    check_counts,
    check_ids,
    config_of,
    ids_of_ranks,
    refuse,
    same_elements,
    sum_of_counts,
    with_own_names,
)
from triton_ep.integrations.deep_ep.config import Config, check_room, longest_row, low_latency_bytes
from triton_ep.integrations.deep_ep.handles import DispatchHandle, LowLatencyHandle
from triton_ep.integrations.deep_ep.layers import (
    layers_of,
    low_latency_sizes,
    more_than_share,
    report_refusal,
    room_for,
)
from triton_ep.integrations.deep_ep.signals import per_block, per_expert
from triton_ep.integrations.deep_ep.slabs import Slabs, no_hook, run_halves
from triton_ep.integrations.deep_ep.utils import EventHandle, EventOverlap, order_of, to_overlap
from triton_ep.integrations.layer_pool import LayerSizes
from triton_ep.layer import EPAll2AllLayer
from triton_ep.ops.token_layout import LayoutMemory, token_layout
from triton_ep.runtime.untraced import untraced_calls

_numbers = itertools.count()
Dispatched = tuple[Any, torch.Tensor | None, torch.Tensor | None, list[int] | None, DispatchHandle | None, EventOverlap]


@untraced_calls("an exchange between ranks")
class Buffer:
    """Dispatch and combine in DeepEP's calling convention. All calls but the static ones are collective.

    Letters: T tokens of this rank (any number, zero included; it may differ between ranks), K top-k, W ranks, E experts
    over all ranks, e experts of this rank, H hidden, R received rows.

    Args:
        group: process group, any sub-group of the world.
        num_nvl_bytes: the value of `Config.get_nvl_buffer_size_hint` for the longest rows. The first call that needs
            memory allocates it, for the number of tokens of that call.
        num_rdma_bytes: at least `get_low_latency_rdma_size_hint(...)` for low-latency calls.
        low_latency_mode: allow the low-latency calls.
        explicitly_destroy: stored only. `destroy` always frees the memory, a destructor never does.
        timeout_s: limit of every wait of a call, in seconds. Ranks that create a layer wait for each other for as
            long as the process group allows.

    Attributes:
        longest_row: bytes of the longest row that `num_nvl_bytes` allows.

    The other arguments are settings of DeepEP's transport; they are accepted and have no effect.

    Raises:
        ConfigError: an unknown group, or a group without this process; sizes that cannot work.
        EPError: `triton_ep.initialize_distributed` has not been called.
    """

    num_sms: int = 20
    """CTAs of the communication kernels in calls without `config`."""
    budgeted: bool = False
    """`set_num_sms` has been called: any `num_sms`, also of a `config`, is a budget of multiprocessors."""

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
        self._pool = layers_of(group)
        self._timeout_s = timeout_s
        self._layouts = LayoutMemory()
        self.rank, self.group_size = dist.get_rank(group), dist.get_world_size(group)
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.longest_row = longest_row(num_nvl_bytes, self.group_size)
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self._number = next(_numbers)
        self._closed = False
        self._latest: EPAll2AllLayer | None = None

    # --- life and settings ------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Free the layers that no other buffer of the group used. Collective, idempotent; later calls raise."""
        if not self._closed:
            self._pool.free(self._number)
        self._closed = True

    @property
    def is_open(self) -> bool:
        """False after `destroy`."""
        return not self._closed

    def takes(self, x: torch.Tensor) -> bool:
        """Whether the buffer is open, and the rows x [T, H] are short enough for it."""
        return not self._closed and x.dim() == 2 and x.shape[1] * max(x.element_size(), 2) <= self.longest_row

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: kernels are compiled for the GPU that runs them."""
        return True

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        """Limit later calls of the normal mode to `new_num_sms` multiprocessors (`sm_budget` of the layer). Each number
        has its own layers.

        Raises:
            ConfigError: an odd number, or no integer.
        """
        if check.integer("new_num_sms", new_num_sms, 2, ConfigError) % 2:
            raise ConfigError(f"set_num_sms got {new_num_sms}; it must be an even number of at least 2.")
        Buffer.num_sms, Buffer.budgeted = new_num_sms, True

    @staticmethod
    def capture() -> EventOverlap:
        """The current point of the current stream."""
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
        """Stream that the latest calls with `async_finish` use; None on the CPU.

        Raises:
            InputError: no call has been made yet.
        """
        if self._latest is None:
            raise InputError(
                "get_comm_stream: a stream belongs to a layer, and no call has created a layer yet. Dispatch first."
            )
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
        """Count the destinations of this rank's tokens, without communication. `dispatch` only uses
        len(num_tokens_per_expert).

        Args:
            topk_idx: [T, K] int64 or int32, contiguous; -1 = dropped.
            num_experts: E.

        Returns:
            Tokens per rank [W] int32, tokens per node [N] int32 (None with one node), assignments per expert [E]
            int32, is_token_in_rank [T, W] bool, and the event.

        Raises:
            InputError: `topk_idx` is no table of ids, or `num_experts` is no multiple of the number of ranks.
        """
        self._check_open()
        check_ids(topk_idx)
        num_experts = check.integer("num_experts", num_experts, 1)
        if num_experts % self.group_size:
            raise InputError(f"num_experts is {num_experts}; it must be a multiple of the {self.group_size} ranks.")
        if previous_event is not None:
            order_of(previous_event, False)
        per_node = self._pool.ranks_per_node
        ranks, nodes, experts, in_rank = token_layout(topk_idx, num_experts, self.group_size, per_node, self._layouts)
        event = Buffer.capture() if async_finish else EventOverlap()
        return ranks, None if per_node == self.group_size else nodes, experts, in_rank, event

    @with_own_names
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
        """Send each row once to every rank that owns at least one of its experts. Collective.

        Args:
            x: [T, H] bfloat16, float16 or float32, contiguous; or a tuple of [T, H] float8_e4m3fn, contiguous, and
                scales [T, H / 128] float32 or int32, or [T, H / 512] int32, with any strides. Scales on all ranks or
                on none.
            handle: handle of an earlier dispatch. Its routing is used again; the host does not wait.
            num_tokens_per_expert: [E], from `get_dispatch_layout`; only its length is used. With `topk_idx` the other
                three results of that call are ignored.
            topk_idx: [T, K] int64 or int32, contiguous; -1 = dropped. None, on all ranks: `is_token_in_rank` [T, W]
                bool is the routing, and a collective of the group sums `num_tokens_per_expert` over the ranks.
            topk_weights: [T, K] float32, contiguous; on all ranks or on none.
            expert_alignment: counts per expert are rounded up to a multiple of it; rows are not padded.
            num_worst_tokens: n > 0, the same on all ranks: return n rows on every rank; the host does not wait. Ids
                past the received rows are -1; rows from n on are left out, and their tokens get nothing from this rank
                in combine. Each rank may have n / W tokens, or as many as in an earlier call. The first such call, or
                one with a larger n, allocates room for all tokens of all ranks, and waits for the allocation.
            config: its `num_sms` is used; None: `Buffer.num_sms`.
            previous_event, async_finish: as `EPAll2AllLayer.dispatch`; without `async_finish` the current stream waits
                for the event.
            allocate_on_comm_stream: no effect: memory may be used and dropped on both streams.

        Returns:
            recv_x [R, H], rows ordered by source rank, then by token, or a tuple of rows and scales; recv_topk_idx [R,
            K], local expert ids, -1 = another rank's expert; recv_topk_weights [R, K] float32, zero where the id is -1
            (both None without `topk_idx`); rows per local expert, a list (empty with `num_worst_tokens`); the handle;
            the event. With `handle` only the first and the last.

        Raises:
            InputError: an argument does not fit; ids out of range, on every rank.
            ConfigError: rows longer than the buffer was created for.
            StaleHandleError: `handle` belongs to another group, or is no handle.
            FinalizedError: after `destroy`.
            PeerFailed, WaitTimeout: as `EPAll2AllLayer.dispatch`.
        """
        plain = handle is config is previous_event is None and async_finish is False and topk_idx is not None
        if plain and type(num_worst_tokens) is int and not num_worst_tokens:
            experts = check_counts(num_tokens_per_expert, expert_alignment)
            found = self.dispatch_at_once(x, topk_idx, topk_weights, experts)
            if found is not None:
                rows, counts = found[0].received, aligned(list(found[0].host_counts or ()), expert_alignment)
                recv_x = Rows(*x).returned(Rows(rows.x, rows.scale)) if type(x) is tuple else rows.x
                return recv_x, rows.topk_idx, rows.topk_weights, counts, found[1], EventOverlap()
        self._check_open()
        if handle is not None:
            pair = fp8.checked_rows(x, self.longest_row, self.num_nvl_bytes)
            if topk_idx is not None or topk_weights is not None:
                raise InputError(
                    "dispatch got a handle, which holds the routing, and topk_idx or topk_weights. Pass one."
                )
            layer = self._layer_of(handle)
            if pair is not None:
                fp8.check_hidden(layer, pair)
                recv_x, event = pair.again(layer, handle.layout_desc, previous_event, async_finish)
            else:
                order = order_of(previous_event, async_finish)
                recv_x, event = layer.dispatch_compact_again(x, handle.layout_desc, **order)
            return recv_x, None, None, None, None, to_overlap(event)
        num_experts, ids = check_counts(num_tokens_per_expert, expert_alignment), topk_idx
        if ids is None:
            if topk_weights is not None:
                raise InputError("dispatch got topk_weights, but no topk_idx that they belong to. Pass both or none.")
            pair = fp8.checked_rows(x, self.longest_row, self.num_nvl_bytes)
            num_tokens = (x if pair is None else pair.data).shape[0]
            ids = ids_of_ranks(is_token_in_rank, num_tokens, self.group_size, num_experts)
        received, made = self.dispatch_rows(
            x,
            ids,
            topk_weights,
            num_experts,
            num_worst_tokens=num_worst_tokens,
            config=config,
            previous_event=previous_event,
            async_finish=async_finish,
        )
        counts = received.num_recv_tokens_per_expert or []
        if topk_idx is None and counts and num_tokens_per_expert is not None:
            counts = sum_of_counts(num_tokens_per_expert, self.group)
        recv_idx = None if topk_idx is None else received.topk_idx
        arrived = received.x if received.scale is None else (received.x, received.scale)
        counts = aligned(counts, expert_alignment)
        return arrived, recv_idx, received.topk_weights, counts, made, to_overlap(received.event)

    def dispatch_at_once(
        self, x: Any, topk_idx: Any, topk_weights: Any, num_experts: int
    ) -> tuple[SentCompact, DispatchHandle] | None:
        """`dispatch_rows` on the layer of the latest call with as many experts, with no other check than the layer's.

        None: no row was sent, because there is no such layer, or an argument does not fit it. Make the full call then.
        """
        rows = fp8.sendable(x) if type(x) is tuple else Rows(x)  # in place: every function counts here
        layer = self._pool.found.get((self._number, num_experts, Buffer.num_sms, Buffer.budgeted, type(x) is tuple))
        landing = COMPACT.get(topk_idx.dtype) if isinstance(topk_idx, torch.Tensor) else None
        if rows is None or layer is None or landing is None:
            return None
        self._latest = layer
        try:
            sent = at_once.dispatch(layer, rows, topk_idx, topk_weights, landing)
        except CapacityError as error:
            cfg = layer.config
            self._grow((cfg.hidden, cfg.topk, num_experts, cfg.token_dtype, Buffer.num_sms), error)
            return None
        return None if sent is None else (sent, DispatchHandle(layer, sent.desc))

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
        """`dispatch` without counts: the rows and the handle. `scale` of the rows has the format given, or is None."""
        self._check_open()
        try:
            pair = fp8.checked_rows(x, self.longest_row, self.num_nvl_bytes)
        except InputError:
            if self._latest is not None:  # the other ranks presumably use it again
                report_refusal(self._latest, None, num_worst_tokens or None)
            raise
        refused: InputError | None = None
        try:
            check_ids(topk_idx)
        except InputError as error:
            if not isinstance(topk_idx, torch.Tensor) or topk_idx.dim() != 2:
                raise
            refused = error  # the layer of the call is known, so the other ranks can be told
        num_sm = Buffer.num_sms if config is None else config_of(config).num_sms
        num_worst_tokens = check.integer("num_worst_tokens", num_worst_tokens, 0)
        data = x if pair is None else pair.data
        # combine of quantised rows takes bfloat16 rows, so their layer has bfloat16 rows.
        dtype = torch.bfloat16 if pair is not None else data.dtype
        kind = (data.shape[1], topk_idx.shape[1], num_experts, dtype, num_sm)
        layer = self._pool.found.get((self._number, Buffer.budgeted, kind))
        # No rank learns from such a call how many tokens another one has, but all know what each may have.
        share = -(-num_worst_tokens // self.group_size)
        if layer is None:
            layer = self._layer(kind, room_for(max(data.shape[0], share)))
        if layer.config.max_tokens < share:
            layer = self._outgrow(kind, share)
        order = {} if pair is not None else order_of(previous_event, async_finish)
        num_rows = num_worst_tokens or None
        if num_rows is not None:
            refused = refused or more_than_share(layer, data.shape[0], num_rows)
        while True:
            key = self._number, num_experts, num_sm, Buffer.budgeted, pair is not None
            self._latest = self._pool.found[key] = layer
            try:
                if refused is not None:
                    report_refusal(layer, None if pair is None else pair.scales, num_rows)
                    raise refused
                if pair is None:
                    rows = layer.dispatch_compact(x, topk_idx, topk_weights, num_rows=num_rows, **order)
                else:
                    call = partial(layer.dispatch_compact, exp_indices=topk_idx, weight=topk_weights, num_rows=num_rows)
                    rows = pair.dispatch(layer, call, (topk_idx, topk_weights), previous_event, async_finish)
            except CapacityError as error:
                layer = self._grow(kind, error)
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
        """Send one row per (token, rank) back and sum the rows of each token in float32, rounded once. Collective.

        Args:
            x: [R, H], contiguous: one row per row of `recv_x`, summed over the experts of this rank.
            handle: handle of that dispatch.
            topk_weights: [R, K] float32, contiguous: also sent back and summed over ranks; on all ranks or on none.
            bias: up to two [T, H] with the dtype of x; the float32 sums start from them.
            config: no effect: the handle refers to its layer.

        Returns:
            [T, H], [T, K] float32 or None, the event.

        Raises:
            InputError: an argument does not fit.
            StaleHandleError, FinalizedError, WaitTimeout: as `dispatch`.
        """
        self._check_open()
        layer, desc = self._layer_of(handle), handle.layout_desc
        check.tensor("x", x, 2)
        if topk_weights is bias is previous_event is None and async_finish is False:
            return at_once.combine(layer, x, desc, "x"), None, EventOverlap()
        biases = biases_of(bias, (desc.num_dispatch_token_cur_rank, layer.config.hidden), x)
        order = order_of(previous_event, async_finish)
        weights = None
        try:
            result: Any = layer.combine(x, desc, None, bias=biases, **order)
            out, event = result if async_finish else (result, None)
            if topk_weights is not None:
                if async_finish:
                    order["previous_event"] = event
                weights, event = layer.combine_topk(topk_weights, desc, **order)
        except InputError as error:
            raise error.with_names(OF_LAYERS) from None
        return out, weights, to_overlap(event)

    # DeepEP's names for the same calls between nodes.
    internode_dispatch = dispatch
    internode_combine = combine

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: Any = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        """Not supported: memory belongs to layers, not to a Buffer.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "get_local_buffer_tensor is not supported: memory belongs to layers, not to a Buffer. Use the tensors that "
            "dispatch returns."
        )

    # --- low latency: M is the most tokens per rank, the same on all ranks -------------------------------

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """`num_rdma_bytes` of a buffer for low-latency calls of these sizes."""
        return low_latency_bytes(
            check.integer("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 1, ConfigError),
            check.integer("hidden", hidden, 1, ConfigError),
            check.integer("num_ranks", num_ranks, 1, ConfigError),
        )

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """No effect: flags only grow, so there is nothing to clear."""
        self._check_low_latency(num_max_dispatch_tokens_per_rank, hidden)

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        use_nvfp4: bool = False,
        x_global_scale: torch.Tensor | None = None,
        use_ue8m0_for_sf: bool = False,
        topk_weights: torch.Tensor | None = None,
    ) -> tuple[
        torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        torch.Tensor,
        LowLatencyHandle,
        EventOverlap,
        Callable[[], None],
    ]:
        """Send rows to the slabs of their experts. Collective; the host does not wait.

        Args:
            x: [T, H] bfloat16, contiguous, T up to M.
            topk_idx: [T, K] int64 or int32; -1 = dropped.
            num_max_dispatch_tokens_per_rank: M, up to 1024.
            num_experts: E.
            cumulative_local_expert_recv_stats: [e] int32; the counts are added to it.
            use_fp8: quantise rows to e4m3 with one scale per 128 values before sending; H a multiple of 128; the same
                on all ranks.
            round_scale: round scales up to powers of two.
            use_ue8m0: return scales as exponents, four to an int32; needs `round_scale` and H a multiple of 512.
            async_finish: run on the communication stream.
            return_recv_hook: launch the sending half only; the hook, the fifth result, launches the receiving half.
            topk_weights: [T, K] float32, contiguous; they travel with the rows. `low_latency_combine` must then get the
                same tensor, unchanged, and sends no weights. On all ranks or on none.
            use_nvfp4, x_global_scale: not supported; leave them out. use_ue8m0_for_sf: of NVFP4, without effect.

        Returns:
            [e, W * M, H]: the rows of each expert at the start of its slab, by source rank, then by token; the other
            rows are undefined. With `use_fp8` a tuple: these rows as float8_e4m3fn, and the scales to multiply by, [e,
            W * M, H / 128] float32, or [e, W * M, H / 512] int32 with `use_ue8m0`; rows are their fast dimension. Then
            the rows of each expert, [e] int32; the handle; the event; and the hook, which does nothing without
            `return_recv_hook`.

        Raises:
            InputError: an argument does not fit.
            ConfigError: the buffer was not created for these sizes, or a low-latency layer does not support them.
        """
        refuse("low_latency_dispatch", {"use_nvfp4": use_nvfp4, "x_global_scale": x_global_scale})
        check.tensor("x", x, 2)
        check_ids(topk_idx)
        use_fp8, round_scale = check.flag("use_fp8", use_fp8), check.flag("round_scale", round_scale)
        if use_fp8:
            fp8.check_quantizable(x, round_scale, use_ue8m0)
        elif round_scale or use_ue8m0:
            raise InputError(
                "round_scale and use_ue8m0 choose the format of scales, but use_fp8=False has no scales. Drop them."
            )
        if dispatch_wait_recv_cost_stats is not None:
            raise InputError("dispatch_wait_recv_cost_stats is not supported. Pass None.")
        if async_finish and return_recv_hook:
            raise InputError("async_finish=True and return_recv_hook=True exclude each other. Choose one.")
        most = check.integer("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 1)
        num_experts = check.integer("num_experts", num_experts, 1)
        self._check_low_latency(most, x.shape[-1])
        sizes = (topk_idx.shape[1], num_experts, x.dtype, self.num_sms, most)
        # A low-latency layer sends all rows with scales or all without, so FP8 has its own layer.
        layer = self._low_latency_layer(x.shape[1], *sizes, "fp8" if use_fp8 else None)
        slab = (num_experts // self.group_size, self.group_size * most)
        stats = check.optional_tensor("cumulative_local_expert_recv_stats", cumulative_local_expert_recv_stats)
        if stats is not None and (tuple(stats.shape), stats.dtype) != ((slab[0],), torch.int32):
            raise InputError(
                f"cumulative_local_expert_recv_stats must be [{slab[0]}] int32, got {list(stats.shape)} {stats.dtype}."
            )
        slabs = Slabs(slab, x, use_fp8, use_ue8m0)

        def send() -> tuple[tuple[EPAllToAllLayoutDesc, torch.Tensor, torch.Tensor | None], Callable[[], None]]:
            # The dispatch quantises rows itself, unless it would have to round their scales.
            if round_scale:
                rows = Rows(*fp8.quantized(x, use_ue8m0, layer.context.device))
            else:
                rows = Rows(x.contiguous() if use_fp8 else x)
            row_weights, desc, hook = layer.dispatch_to_slabs(
                rows, topk_idx, topk_weights, slabs.rows, return_recv_hook
            )
            counts = desc.num_recv_tokens_per_expert

            def receive() -> None:
                if isinstance(hook, RecvHook):
                    hook()
                if stats is not None:
                    stats.add_(counts)

            return (desc, counts, row_weights), receive

        tensors = (x, topk_idx, topk_weights, *slabs.tensors)
        found, event, hook = run_halves(layer, send, tensors, async_finish, return_recv_hook)
        desc, counts, row_weights = found
        return slabs.result, counts, LowLatencyHandle(layer, desc, topk_weights, row_weights), event, hook

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
        *,
        overlap: bool = False,
        src_signals: torch.Tensor | None = None,
        src_signal_expect_value: int = 0,
        packed_recv_count: torch.Tensor | None = None,
        comp_signal: torch.Tensor | None = None,
        block_m: int = 64,
        threshold: int = 0,
        num_sms: int = 0,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None]]:
        """Multiply the rows of slabs by their weights, send them back, and sum them per token. Collective; the host
        does not wait.

        The experts' rank multiplies and sums in float32, in k order, and rounds its sum; the sums of the ranks are
        added in float32. The experts' rank thus needs the weights: they travel first, unless they came with the rows
        (`topk_weights` of `low_latency_dispatch`).

        Args:
            x: [e, W * M, H], contiguous: outputs for the rows of that dispatch.
            topk_idx: [T, K] of that dispatch.
            topk_weights: [T, K] float32, contiguous; the tensor that the dispatch got, if it got one.
            handle: handle of that dispatch.
            use_logfmt: must be False.
            zero_copy: no effect: `x` may be the tensor of `get_next_low_latency_combine_buffer` or any other.
            async_finish, return_recv_hook: as in `low_latency_dispatch`.
            out: [T, H], contiguous, receives the result; it must not overlap `x`.
            overlap: a kernel on another stream still writes `x`; the sending half waits for its signals before it reads
                a row, with the limit of all waits. The caller clears the signals. False: the other arguments about
                signals have no effect.
            src_signals, src_signal_expect_value: [e] int32 or uint32, one per expert, and the count to wait for.
            comp_signal, block_m, threshold: int32, one per expert and block of `block_m` rows of its slab, expert by
                expert, and the count to wait for. Signals of blocks without rows are not awaited.
            packed_recv_count, num_sms: no effect: the handle knows the counts, and one program waits.

        Returns:
            [T, H], the event, and the hook.

        Raises:
            InputError: an argument does not fit.
            StaleHandleError: `handle` does not come from a low-latency dispatch.
        """
        self._check_handle(handle)
        if use_logfmt:
            raise InputError("low_latency_combine sends rows as they are. Pass use_logfmt=False.")
        if combine_wait_recv_cost_stats is not None:
            raise InputError("combine_wait_recv_cost_stats is not supported. Pass None.")
        if async_finish and return_recv_hook:
            raise InputError("async_finish=True and return_recv_hook=True exclude each other. Choose one.")
        layer, desc, cfg = handle.layer, handle.layout_desc, handle.layer.config
        check.tensor("x", x)
        check.tensor("topk_idx", topk_idx, 2)
        if handle.row_weights is None:
            check.tensor("topk_weights", topk_weights, 2)
        wanted = (cfg.num_experts_per_rank, self.group_size * cfg.max_tokens, cfg.hidden)
        if tuple(x.shape) != wanted or x.dtype != cfg.token_dtype or not x.is_contiguous():
            raise InputError(f"x must be {list(wanted)} {cfg.token_dtype}, contiguous; got {list(x.shape)} {x.dtype}.")
        ids = desc.topk_indices_tensor
        if topk_idx.shape != ids.shape:
            raise InputError(f"topk_idx is {list(topk_idx.shape)}, but the dispatch got {list(ids.shape)}.")
        if out is not None:
            check_out(cfg, layer.context.device, out, desc)
        signals = None
        if check.flag("overlap", overlap):
            if (src_signals is None) == (comp_signal is None):
                raise InputError("overlap=True needs the signals to wait for: pass src_signals or comp_signal.")
            if comp_signal is None:
                signals = per_expert(src_signals, src_signal_expect_value, desc)
            else:
                signals = per_block(comp_signal, block_m, threshold, x.shape[1], desc)
        if handle.row_weights is not None and not same_elements(topk_weights, handle.given_weights):
            raise InputError(
                "low_latency_combine got other topk_weights than low_latency_dispatch, which sent them with the rows. "
                "Pass the same tensor, or none to low_latency_dispatch."
            )

        def send() -> tuple[torch.Tensor, Callable[[], None]]:
            weights = topk_weights if handle.row_weights is None else handle.row_weights
            if signals is not None:
                steps.wait_signals(layer.context, signals)
            rows = x.view(desc.num_recv_rows, cfg.hidden)
            if return_recv_hook:
                return layer.combine(rows, desc, weights, out=out, return_recv_hook=True)
            return layer.combine(rows, desc, weights, out=out), no_hook  # one launch instead of two

        tensors = (x, topk_weights, desc, *(each for each in (out, src_signals, comp_signal) if each is not None))
        result, event, hook = run_halves(layer, send, tensors, async_finish, return_recv_hook)
        return result, event, hook

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """No effect with mask=False: no rank is ever masked.

        Raises:
            ConfigError: mask=True. A rank that does not answer raises WaitTimeout on the others.
        """
        check.integer("rank_to_mask", rank_to_mask, 0, most=self.group_size - 1)
        if check.flag("mask", mask):
            raise ConfigError(
                f"rank {rank_to_mask} cannot be masked: a rank that does not answer raises WaitTimeout on the others. "
                "Create a group without it."
            )

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Fill mask_status [W] int32 with 0: no rank is masked."""
        status = check.tensor("mask_status", mask_status, 1, (torch.int32,))
        if status.shape[0] != self.group_size:
            raise InputError(f"mask_status must be [{self.group_size}] int32, got {list(status.shape)}.")
        status.zero_()

    def low_latency_clean_mask_buffer(self) -> None:
        """No effect: no rank is ever masked."""

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """Uninitialised [e, W * M, H] for the expert outputs that `low_latency_combine` takes.

        Raises:
            StaleHandleError: `handle` does not come from a low-latency dispatch.
        """
        self._check_handle(handle)
        cfg = handle.layer.config
        shape = (cfg.num_experts_per_rank, self.group_size * cfg.max_tokens, cfg.hidden)
        return torch.empty(shape, dtype=cfg.token_dtype, device=handle.layout_desc.placement.device)

    # --- layers and checks ------------------------------------------------------------------------------

    def _low_latency_layer(
        self,
        hidden: int,
        topk: int,
        num_experts: int,
        dtype: torch.dtype,
        num_sm: int,
        max_tokens: int,
        variant: str | None = None,
    ) -> EPAll2AllLayer:
        """The low-latency layer of these sizes, with room for the most rows that can arrive."""
        key = (self._number, hidden, topk, num_experts, dtype, num_sm, max_tokens, variant)
        layer = self._pool.found.get(key)
        if layer is None:
            given = (hidden, topk, num_experts, dtype, num_sm, self._timeout_s)
            sizes = low_latency_sizes(LayerSizes(*given, max_tokens=max_tokens, variant=variant), self.group_size)
            layer = self._pool.found[key] = self._pool.get(sizes, user=self._number)
        return layer

    def _check_handle(self, handle: Any) -> None:
        self._check_open()
        if not isinstance(handle, LowLatencyHandle):
            raise StaleHandleError(f"handle must come from low_latency_dispatch, got {type(handle).__name__}.")

    def _check_low_latency(self, max_tokens: int, hidden: int) -> None:
        self._check_open()
        check_room(self.low_latency_mode, self.num_rdma_bytes, max_tokens, hidden, self.group_size)

    def _check_open(self) -> None:
        """Raise if the buffer was destroyed."""
        if self._closed:
            raise FinalizedError("this Buffer was destroyed, its memory is freed. Create a new one on all its ranks.")

    def _layer(self, kind: tuple[int, int, int, torch.dtype, int], room: int) -> EPAll2AllLayer:
        """The layer for rows of these `_sizes`; room: tokens of this rank, for a layer still to be created."""
        layer = self._pool.get(self._sizes(*kind), room, self._number)
        self._pool.found[self._number, Buffer.budgeted, kind] = layer
        return layer

    def _grow(self, kind: tuple[int, int, int, torch.dtype, int], error: CapacityError) -> EPAll2AllLayer:
        """The layer that replaces one of this `kind`. All ranks raise the same error before any row is sent."""
        return self._outgrow(kind, error.needed_tokens + error.needed_tokens // 4)

    def _outgrow(self, kind: tuple[int, int, int, torch.dtype, int], num_tokens: int) -> EPAll2AllLayer:
        """Replace the layer of this `kind` by one for `num_tokens` per rank. All ranks make the same call."""
        self._pool.outgrow(self._sizes(*kind))
        return self._layer(kind, room_for(num_tokens))

    def _sizes(self, hidden: int, topk: int, num_experts: int, dtype: torch.dtype, num_sm: int) -> LayerSizes:
        # In one node this only changes the number of rows to reserve: a token has fewer ranks than experts.
        one_node = self._pool.ranks_per_node == self.group_size
        budget = num_sm if Buffer.budgeted else None
        return LayerSizes(
            hidden, topk, num_experts, dtype, num_sm, self._timeout_s, enable_local_combine=one_node, sm_budget=budget
        )

    def _layer_of(self, handle: Any) -> EPAll2AllLayer:
        if not isinstance(handle, DispatchHandle):
            raise StaleHandleError(f"handle must come from dispatch, got {type(handle).__name__}.")
        layer = handle.layer
        if layer.context.group is not self.group:
            raise StaleHandleError("the handle belongs to another group. Pass one of this buffer's group.")
        self._latest = layer
        return layer
