"""The steps of `EPAll2AllLayer.dispatch`, in the order of the protocol (docs/concepts/protocol.md)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, overload

import torch

from triton_ep.config import EPConfig
from triton_ep.context.context import DispatchCombineContext, told
from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.context.layout import placement_parts
from triton_ep.context.names import LayerNames
from triton_ep.context.overlap import EPEvent, RecvHook
from triton_ep.context.records import read_reports
from triton_ep.context.rows import RowFormat
from triton_ep.errors import ConfigError, InputError, PeerFailed, StaleHandleError
from triton_ep.exchange import checks
from triton_ep.kernels.device.codes import (
    HOST_AGAIN,
    HOST_BACKWARD,
    HOST_READS,
    HOST_REJECTED,
    HOST_SCALED,
    HOST_SCATTER,
    HOST_WEIGHTS,
)
from triton_ep.mx.tensor import MXTensor
from triton_ep.ops import dispatch as dispatch_ops
from triton_ep.ops import low_latency as low_latency_ops
from triton_ep.ops import routing as routing_ops
from triton_ep.ops import splits as splits_ops
from triton_ep.ops.row_scales import RowScaled

Expected = tuple[int, int, tuple[int, ...] | None]
Received = tuple[torch.Tensor | MXTensor, torch.Tensor | None, EPAllToAllLayoutDesc]
ReceivedRows = tuple[RowScaled, torch.Tensor | None, EPAllToAllLayoutDesc]


class DispatchSteps(LayerNames):
    """What a layer does in `dispatch`; the layer sets the attributes.

    Attributes:
        config: sizes.
        context: symmetric memory and device state.
    """

    config: EPConfig
    context: DispatchCombineContext
    _scaled: bool | None = None  # whether a low-latency layer sends one-byte rows with scales, once there were some

    @overload
    def dispatch_again(
        self,
        input: torch.Tensor | MXTensor,
        layout_desc: EPAllToAllLayoutDesc,
        weight: torch.Tensor | None = None,
        *,
        landing: Literal["mx", "bf16"] | None = None,
    ) -> tuple[torch.Tensor | MXTensor, torch.Tensor | None]: ...

    @overload
    def dispatch_again(
        self,
        input: torch.Tensor | MXTensor,
        layout_desc: EPAllToAllLayoutDesc,
        weight: torch.Tensor | None = None,
        *,
        landing: Literal["row"],
    ) -> tuple[RowScaled, torch.Tensor | None]: ...

    @overload
    def dispatch_again(
        self,
        input: torch.Tensor | MXTensor,
        layout_desc: EPAllToAllLayoutDesc,
        weight: torch.Tensor | None = None,
        *,
        landing: str | None,
    ) -> tuple[Any, torch.Tensor | None]: ...

    def dispatch_again(
        self,
        input: torch.Tensor | MXTensor,
        layout_desc: EPAllToAllLayoutDesc,
        weight: torch.Tensor | None = None,
        *,
        landing: str | None = None,
    ) -> tuple[Any, torch.Tensor | None]:
        """Send other rows by the routing of an earlier dispatch. Collective; nothing waits for the host, in exact mode
        either: how many rows arrive is known.

        Args:
            input: [T, H] as in `dispatch`, with the T of `layout_desc`.
            layout_desc: of the same earlier dispatch of this layer on all ranks, any that is still held.
            weight: [T, K] float32; on all ranks or on none.
            landing: as in `dispatch`.

        Returns:
            recv_x [R, H] and recv_weights [R] or None, in the rows that `layout_desc` describes, which serves their
            combine as well.

        Raises:
            InputError: an argument does not fit; a dispatch with `full_scatter_indices`, whose order is not kept. On
                the rank that got it only; what the others learn, `check` tells them, as in static mode.
            StaleHandleError: the descriptor is not of this layer.
            CallMismatch: descriptors of different dispatches, weights on some ranks only, or another call on another
                rank; before rows are sent (on a GPU: from a later call or `check`).
            WaitTimeout: a rank did not come within `timeout_s`.
        """
        ctx = self.context
        ctx.check_open()
        ctx.poll_status()
        ctx.calls.check_dispatch()
        try:
            checks.check_landing(self.config, landing)
            checks.check_again(self.config, ctx.device, ctx.layer_id, input, layout_desc, weight)
        except (InputError, StaleHandleError):
            self._reject(again=True)
            raise
        arguments = (input, layout_desc.topk_indices_tensor, weight, None)
        (recv_x, recv_weights, _), _ = self._checked_dispatch(arguments, (False, False, None), landing, layout_desc)
        return recv_x, recv_weights

    def dispatch_scaled(
        self,
        input: torch.Tensor,
        scale: torch.Tensor,
        exp_indices: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        *,
        layout_desc: EPAllToAllLayoutDesc | None = None,
        return_recv_hook: bool = False,
    ) -> tuple[Any, ...]:
        """`dispatch`, expert-major, of rows that somebody has quantised: bytes with their scales. Collective.

        They travel as they are, and nothing looks at what they hold. `combine` takes rows of the layer's dtype.

        Args:
            input: [T, H] float8_e4m3fn, float8_e5m2 or uint8, contiguous.
            scale: [T, S] of any dtype, contiguous, a byte per 32 values: [T, H / 32] uint8, [T, H / 128] float32.
            exp_indices, weight: as in `dispatch`; ids are None with `layout_desc`.
            layout_desc: of an earlier dispatch, whose routing is taken; the host waits for nothing (`dispatch_again`).
            return_recv_hook: as in `dispatch`.

        Returns:
            recv_x [R, H] and recv_scale [R, S] of the dtypes given, recv_weights [R] float32 or None, and the
            descriptor. Then the hook, if asked for. Rows that pad an expert's are zero, scales too.

        Raises:
            InputError: an argument does not fit; weights or scales on some ranks only, on every rank; a low-latency
                layer that has sent rows of its dtype.
            CallMismatch: of a static layer, or with `layout_desc`: weights or scales on some ranks only; as
                `dispatch`, `dispatch_again`.
            ConfigError: a layer with payload; with `layout_desc` one with low_latency.
            StaleHandleError, PeerFailed, WaitTimeout: as `dispatch`, `dispatch_again`.
        """
        ctx, cfg = self.context, self.config
        if cfg.payload is not None or (cfg.low_latency and layout_desc is not None):
            raise ConfigError(
                f"rows with scales are for layers that quantise none, but this one has payload={cfg.payload!r}, "
                f"low_latency={cfg.low_latency} (refused with layout_desc). Make a layer without."
            )
        ctx.check_open()
        ctx.poll_status()
        ctx.calls.check_dispatch()
        try:
            if scale is None:
                raise InputError("scale must be a tensor, got NoneType. Rows without scales go by dispatch.")
            if layout_desc is None:
                checks.check_dispatch(cfg, ctx.device, input, exp_indices, weight, None, scale=scale)
            else:
                checks.check_again(cfg, ctx.device, ctx.layer_id, input, layout_desc, weight, scale)
                exp_indices = layout_desc.topk_indices_tensor
            if cfg.low_latency:
                self._check_kind(scaled=True)
        except (InputError, StaleHandleError):
            self._reject(again=layout_desc is not None, scaled=True)
            raise
        assert exp_indices is not None, "checked"
        sent = dispatch_ops.Rows(input, scale)
        found, desc, receive = self._dispatch(
            sent.as_bytes(), exp_indices, weight, None, HOST_SCALED, return_recv_hook, layout_desc
        )
        received = (*found.x.like(sent), found.weights, desc)
        return (*received, self._recv_hook(receive, received)) if return_recv_hook else received

    def dispatch_noting(
        self, rows: dispatch_ops.Rows, given: torch.Tensor | routing_ops.RoutingMap, weights: torch.Tensor | None
    ) -> tuple[dispatch_ops.Rows, torch.Tensor | None, EPAllToAllLayoutDesc, torch.Tensor]:
        """`dispatch` or `dispatch_scaled` for front doors, with output rows [C, K] int32 of each arrival row.

        given: expert ids, or a routing map, with which the door has looked at all arguments.

        Raises:
            CapacityError: a layer without capacity has room for fewer tokens than some rank has, or fewer slots than a
                token of a routing map has experts; on all ranks, before a row is sent.
        """
        ctx, cfg = self.context, self.config
        ctx.check_open()
        ctx.poll_status()
        ctx.calls.check_dispatch()
        try:
            if rows.data.shape[0] > cfg.max_tokens and cfg.recv_capacity is None:
                checks.check_rows(cfg, ctx.device, rows.data, None, rows.scale)
            elif isinstance(given, torch.Tensor):
                checks.check_dispatch(cfg, ctx.device, rows.data, given, weights, None, scale=rows.scale)
            else:
                checks.check_num_tokens(cfg, rows.data.shape[0])
        except InputError:
            self._reject(scaled=rows.scale is not None)
            raise
        if rows.data.shape[0] > cfg.max_tokens:
            self._reject(needed_tokens=rows.data.shape[0])
        sent = rows.as_bytes()
        word = HOST_SCALED if sent.scale is not None else 0
        received, desc, _ = self._dispatch(sent, given, weights, None, word, keep_copies=True)
        assert received.copy_rows is not None, "asked for"
        return dispatch_ops.Rows(*received.x.like(rows)), received.weights, desc, received.copy_rows

    def _checked_dispatch(
        self,
        arguments: tuple[Any, Any, Any, Any],
        overlap: tuple[bool, bool, EPEvent | None],
        landing: str | None,
        again: EPAllToAllLayoutDesc | None = None,
    ) -> tuple[Received | ReceivedRows, Callable[[], None]]:
        """What `dispatch` returns, and its receiving half, which has been launched unless a hook was asked for.

        again: of the earlier dispatch whose routing is taken.
        """
        x, topk_idx, weights, scatter = arguments
        try:
            checks.check_overlap(*overlap)
            checks.check_landing(self.config, landing)
            checks.check_dispatch(self.config, self.context.device, x, topk_idx, weights, scatter)
            if self.config.low_latency:
                self._check_kind(scaled=False)
        except InputError:
            self._reject()
            raise
        rows = dispatch_ops.Rows(x)
        if isinstance(x, MXTensor):
            rows = dispatch_ops.Rows(x.qdata, x.scale.view(torch.uint8))
        received, desc, receive = self._dispatch(
            rows, topk_idx, weights, scatter, 0, split=overlap[0], again=again, landing=landing
        )
        recv = received.x
        if recv.scale is None:
            return (recv.data, received.weights, desc), receive
        if landing == "row":
            return (RowScaled(recv.data, recv.scale), received.weights, desc), receive
        scale = recv.scale.view(torch.float8_e8m0fnu)
        recv_x = MXTensor(recv.data, scale, torch.float8_e4m3fn, 32, self.config.token_dtype)
        return (recv_x, received.weights, desc), receive

    @told("dispatch", begun=False)
    def _dispatch(
        self,
        x: dispatch_ops.Rows,
        topk_idx: torch.Tensor | routing_ops.RoutingMap,
        weights: torch.Tensor | None,
        scatter: torch.Tensor | None,
        host_word: int,
        split: bool = False,
        again: EPAllToAllLayoutDesc | None = None,
        keep_copies: bool = False,
        known_rows: int | None = None,
        landing: str | None = None,
        needed_tokens: int = 0,
    ) -> tuple[dispatch_ops.Received, EPAllToAllLayoutDesc, Callable[[], None]]:
        """What a dispatch receives, its descriptor, and its receiving half.

        split: the caller launches that half; otherwise it has been launched. again: of the earlier dispatch whose
        routing is taken. known_rows: without it, -1 if the other ranks know what comes.
        """
        ctx, cfg = self.context, self.config
        if cfg.low_latency:
            assert isinstance(topk_idx, torch.Tensor), "no front door has maps for it"
            ctx.epoch += 1
            result = low_latency_ops.dispatch(ctx, self._format(x), x, topk_idx, weights, host_word)
            if not split:
                result[-1]()
                ctx.poll_status()
            return result
        given, x = x, dispatch_ops.quantize(ctx, x)
        known_rows = known_rows if again is None else again.num_recv_rows
        if cfg.recv_capacity is None and known_rows is None:
            host_word |= HOST_READS
        routing, placement = self.preprocess(topk_idx, weights, scatter, host_word, again, needed_tokens)
        has_weights = routing.weights is not None
        ctx.epoch += 1
        num_rows, num_arrivals, offsets = self.init_output_buffer(placement, known_rows)
        fmt = self._format(x)
        routing_ops.place(ctx, fmt, routing, placement, scatter)
        exact = offsets is not None
        sizes = (num_rows, num_arrivals)
        make = partial(dispatch_ops.make_received, ctx, fmt, *sizes, has_weights, exact, keep_copies, landing)
        received = None if exact else make()
        forward = dispatch_ops.make_forward(ctx)
        side = dispatch_ops.fork(ctx, x is not given, split)
        if not cfg.is_intra_node:
            dispatch_ops.send(ctx, fmt, x, routing, placement)
        dispatch_ops.push(ctx, fmt, x, routing, placement)
        received = received or make()  # what is not filled, while rows are on their way
        receive = partial(dispatch_ops.receive, ctx, fmt, received, placement, forward, side)
        if not split:
            receive()
            ctx.poll_status()
        desc = EPAllToAllLayoutDesc(
            num_dispatch_token_cur_rank=x.data.shape[0],
            num_recv_rows=num_rows,
            entries=routing.entries,
            placement=placement,
            shape=(cfg.world_size, cfg.local_world_size, cfg.num_experts_per_rank),
            layer_id=ctx.layer_id,
            epoch=ctx.epoch,
            forward=forward,
            skipped_token_topk_mapping_indices=received.copy_rows if cfg.enable_local_combine else None,
            full_scatter=scatter is not None,
            host_expert_offsets=offsets,
        )
        return received, desc, receive

    def _format(self, x: dispatch_ops.Rows) -> RowFormat:
        """How these rows travel."""
        formats = self.context.rows
        return formats.own if x.scale is None else formats.scaled

    def _check_kind(self, scaled: bool) -> None:
        """Hold a low-latency layer to rows of one kind.

        Its arrivals have two halves, by the parity of the epoch, and where the second begins depends on the length of
        rows: with others, rows of a dispatch would land among those of the one before, which a slower rank still reads.

        Raises:
            InputError: the first dispatch had rows of the other kind.
        """
        if self._scaled not in (None, scaled):
            kinds = (f"rows of {self.config.token_dtype}", "one-byte rows with scales")
            raise InputError(
                f"a low-latency layer sends rows of one kind: this one began with {kinds[not scaled]}, now there are "
                f"{kinds[scaled]}. Make another layer for these, on all ranks."
            )
        self._scaled = scaled

    def _recv_hook(self, receive: Callable[[], None], received: tuple[Any, ...]) -> RecvHook:
        """The hook of a dispatch whose sending half has been launched."""
        ctx = self.context
        ctx.calls.dispatch = ctx.epoch
        return RecvHook(partial(self._end_dispatch, receive), received, ctx.device.type == "cuda")

    @told("the hook of dispatch", begun=True)
    def _end_dispatch(self, receive: Callable[[], None]) -> None:
        self.context.check_open()
        self.context.calls.dispatch = 0
        receive()
        self.context.poll_status()

    def preprocess(
        self,
        topk_idx: torch.Tensor | routing_ops.RoutingMap,
        weights: torch.Tensor | None,
        scatter: torch.Tensor | None,
        host_word: int,
        again: EPAllToAllLayoutDesc | None = None,
        needed_tokens: int = 0,
    ) -> tuple[routing_ops.Routing, torch.Tensor]:
        """Count, give slots, and exchange the splits of all ranks; what they say is the second.

        again: of the earlier dispatch whose routing is taken, which must be the same on all ranks.
        """
        ctx, num_experts = self.context, self.config.num_experts
        bad_scatter = None
        if scatter is not None and not isinstance(topk_idx, routing_ops.RoutingMap):
            good = routing_ops.legal_scatter(topk_idx, scatter, num_experts)
            # A bad table counts as no tokens at all: nobody may write by it. Illegal ids are still reported.
            legal = (topk_idx >= 0) & (topk_idx < num_experts)
            topk_idx = torch.where(legal & ~good, -1, topk_idx)
            bad_scatter = torch.where(good, 0, HOST_SCATTER).int().view(1)
        routing = routing_ops.count(ctx, topk_idx, weights)
        host_word |= 0 if routing.weights is None else HOST_WEIGHTS
        host_word |= (0 if again is None else HOST_AGAIN) | (HOST_BACKWARD if ctx.backward else 0)
        routed = None if again is None else again.placement
        return routing, splits_ops.exchange(ctx, routing, host_word, bad_scatter, routed, needed_tokens)

    def init_output_buffer(self, placement: torch.Tensor, known_rows: int | None = None) -> Expected:
        """Rows of this rank's output, arrival rows to expect, and in exact mode, where the host reads what comes, the
        first row of each local expert.

        In exact mode this is where errors of any rank surface on all, before any row is sent, and where
        buffers grow, by the same numbers on all ranks. With known_rows buffers are large enough, and errors are left
        to `check`, as in static mode; -1: known to the other ranks only.
        """
        ctx, cfg = self.context, self.config
        if cfg.recv_capacity is not None or known_rows is not None:
            # What is captured has not run, and may never do so.
            capturing = ctx.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            ctx.unread = None if capturing else placement
            num_rows = known_rows if cfg.recv_capacity is None else cfg.recv_capacity
            if num_rows is not None and num_rows >= 0:
                return num_rows, ctx.sizes.arrival_rows, None
        first, count = placement_parts(cfg.world_size, cfg.local_world_size, cfg.num_experts_per_rank)["expert_offsets"]
        words = ctx.read_back(placement, first + count)
        reports = read_reports(words, cfg.world_size)
        own = reports[cfg.rank]
        if known_rows is not None:
            return own.rows, ctx.sizes.arrival_rows, None
        checks.raise_for_ranks(cfg, reports)
        arrivals = max(report.arrivals for report in reports)
        rows = arrivals if cfg.enable_local_combine else max(report.rows for report in reports)
        ctx.grow(arrivals, rows)
        return own.rows, own.arrivals, tuple(words[first:])

    def _reject(self, again: bool = False, scaled: bool = False, needed_tokens: int = 0) -> EPAllToAllLayoutDesc | None:
        """Tell the other ranks that this one's arguments were refused, and keep its epochs in step.

        Returns the descriptor of a dispatch without rows, None where nothing comes of it on any rank.

        again: the others send rows, and wait for this one's, whatever they are told. scaled: these are one-byte rows
        with scales, which this rank may have to pass on. needed_tokens: of this rank, if these are more than the layer
        has room for.

        Raises:
            CapacityError: the hosts wait, and some rank needs a larger layer; the same on all ranks.
        """
        x, idx = self._nothing(scaled)
        try:
            _, desc, _ = self._dispatch(
                x, idx, None, None, HOST_REJECTED, known_rows=-1 if again else None, needed_tokens=needed_tokens
            )
        except PeerFailed:
            # This rank's own rejection, seen in the exchange: the caller raises what caused it.
            return None
        return desc

    def _nothing(self, scaled: bool) -> tuple[dispatch_ops.Rows, torch.Tensor]:
        """Rows and ids of no token; scaled: of one byte, with scales, where rows of the layer can be such."""
        cfg, device = self.config, self.context.device
        idx = torch.empty(0, cfg.topk, dtype=torch.int32, device=device)
        if not scaled or cfg.hidden % 32:
            return dispatch_ops.Rows(torch.empty(0, cfg.hidden, dtype=cfg.token_dtype, device=device)), idx
        data = torch.empty(0, cfg.hidden, dtype=torch.float8_e4m3fn, device=device)
        return dispatch_ops.Rows(data, torch.empty(0, cfg.hidden // 32, dtype=torch.uint8, device=device)), idx
