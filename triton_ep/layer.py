"""EPAll2AllLayer: dispatch tokens to their experts, combine the results.

This module holds all public calls. A call checks its arguments and builds a `Request` (triton_ep/exchange/accept.py),
runs the steps that all dispatches share (triton_ep/exchange/steps.py), and ends as the caller requests (finish.py).
The steps launch the operations of triton_ep/ops, in the order of the protocol (docs/concepts/protocol.md).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, TypeVar, overload

import torch

from triton_ep.config import EPConfig
from triton_ep.context.choice import Choice, choose
from triton_ep.context.context import DispatchCombineContext
from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.context.given import RoutingMap, Rows
from triton_ep.context.overlap import CommStream, EPEvent, RecvHook
from triton_ep.context.records import Reports
from triton_ep.distributed import current_heap, join_group, ranks_per_node
from triton_ep.errors import ConfigError
from triton_ep.exchange import checks, landings, refusals, steps
from triton_ep.exchange.accept import Requests
from triton_ep.exchange.barrier import BarrierAllContext
from triton_ep.exchange.finish import PLAIN, Ending, Finisher, InFlight, Launched, ending_of
from triton_ep.exchange.landings import EXPERT_MAJOR, WITH_COPIES, Ahead, CompactRows, ExpertMajor
from triton_ep.exchange.ranges import call_range
from triton_ep.exchange.request import Request, Sent
from triton_ep.kernels.device import codes
from triton_ep.mx.tensor import MXTensor
from triton_ep.ops import combine as combine_ops
from triton_ep.ops import dispatch as dispatch_ops
from triton_ep.ops.row_scales import RowScaled
from triton_ep.runtime.launch import aot_for
from triton_ep.runtime.tuned.table import TunedEntry
from triton_ep.runtime.untraced import untraced_calls

Received = tuple[torch.Tensor | MXTensor, torch.Tensor | None, EPAllToAllLayoutDesc]
ReceivedRows = tuple[RowScaled, torch.Tensor | None, EPAllToAllLayoutDesc]
ReceivedScaled = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, EPAllToAllLayoutDesc]
_Landed = torch.Tensor | MXTensor | RowScaled
_ExpertMajor = tuple[_Landed, torch.Tensor | None, EPAllToAllLayoutDesc]
_Biases = torch.Tensor | tuple[torch.Tensor, ...] | None
_Result = TypeVar("_Result")


def _field(name: str) -> Any:  # Any, because `property` cannot express the type of the field
    return property(lambda self: getattr(self.config, name), doc=f"`config.{name}`.")


@untraced_calls("use triton_ep.autograd or triton_ep.nn in graphs")
class EPAll2AllLayer:
    """Expert-parallel all-to-all: sends each token's row to the ranks of its experts and sums the expert outputs.

    All ranks of `ep_group` create and finalize the layer collectively; it is also a context manager. `dispatch` and
    `combine` are collective too and run asynchronously on the current stream. Several layers may exist at a time, over
    the same or different groups; calls of one layer must not overlap on several streams.

    Args:
        ep_group: process group of the layer, any sub-group of the world; None = the world.
        max_tokens: most tokens per rank and dispatch.
        hidden: elements per row.
        topk: experts per token.
        rank, world_size: this process's rank in `ep_group`, and the size of `ep_group`. None: taken from the group.
        num_tot_experts: experts over all ranks; must be given.
        local_world_size: ranks per node; a number below the ranks of a host creates virtual nodes. None: the number
            given to `initialize_distributed`, or ranks per host.
        dtype: dtype of rows: bfloat16, float16 or float32.
        weight_dtype: float32.
        num_sm: programs of the communication kernels. None: from `tuned`, else from the tuned table that has an
            entry for this GPU, topology and shape, else by a formula; `config` shows number and entry.
        enable_local_combine: combine first sums the rows of a token on the expert's rank, so one row per
            (token, rank) crosses a link, rounded to `dtype`. False: combine rounds once in all.
        use_aot: take kernels from the ahead-of-time library in `aot_dir`; aot="prefer": the JIT compiles missing ones.
        payload: None: rows travel as they are. "mxfp8": rows are quantised before they leave, e4m3 with one e8m0
            scale per 32 values (RCEIL), and arrive as an `MXTensor`; combine stays in `dtype`.
        alignment: every expert's segment of received rows starts at a multiple of this many rows.
        capacity: None (exact): the host waits for the row count and outputs have that size.
            n (static): n output rows, no host synchronisation; the descriptor reports overflow.
        low_latency: one launch per dispatch, one per combine, for at most 1024 tokens (decode): static, one node.
        sm_budget: multiprocessors that dispatch and combine take, including the layout and the sums of rows; limits
            `num_sm` to this number, or to half of it with several nodes. Not with `low_latency`. None: no budget.
        shared_staging: dispatch and combine stage rows in the same memory, one after the other, which saves up to half
            of the layer's symmetric memory. Needs `enable_local_combine`; calls cannot have `return_recv_hook` then.
        copy_engines: copy engines send the rows of a dispatch, not multiprocessors: all rows of a rank to every other
            rank; and compact rows of a combine if the host has read their counts. One node, no `shared_staging`.
        tuned: an entry of a tuned table (`triton_ep.runtime.tuned.table`), the same on all ranks; needs num_sm=None.
        timeout_s: bound of every wait, in seconds.

    Raises:
        ConfigError: sizes that cannot work, or that differ from the group's. HeapError: not enough symmetric memory.
        AotMiss, AotArchMismatch, AotNvshmemMismatch, AotCorrupted: the ahead-of-time library does not fit.

    Source: names follow the EP all-to-all layer of Triton-distributed; meanings are in docs/reference/layer.md.
    """

    def __init__(
        self,
        ep_group: Any,
        max_tokens: int,
        hidden: int,
        topk: int,
        rank: int | None = None,
        num_tot_experts: int | None = None,
        local_world_size: int | None = None,
        world_size: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        weight_dtype: torch.dtype = torch.float32,
        num_sm: int | None = 20,
        enable_local_combine: bool = False,
        use_aot: bool = False,
        *,
        payload: str | None = None,
        alignment: int = 1,
        capacity: int | None = None,
        low_latency: bool = False,
        sm_budget: int | None = None,
        shared_staging: bool = False,
        copy_engines: bool = False,
        tuned: TunedEntry | None = None,
        timeout_s: float = 30.0,
        aot: str | None = None,
        aot_dir: str | Path | None = None,
    ) -> None:
        if tuned is not None and not isinstance(tuned, TunedEntry):
            raise ConfigError(f"tuned must be an entry of a tuned table (TunedEntry), got {type(tuned).__name__}.")
        if num_sm is not None and tuned is not None:
            raise ConfigError(f"num_sm={num_sm} and a tuned entry with {tuned.num_sm}: pass num_sm=None with `tuned`.")
        if num_tot_experts is None:
            raise ConfigError("num_tot_experts is missing: the number of experts over all ranks.")
        if rank is None or world_size is None or local_world_size is None:
            group_size = join_group(ep_group)
            rank = torch.distributed.get_rank(ep_group) if rank is None else rank
            world_size = group_size if world_size is None else world_size
            local_world_size = ranks_per_node(ep_group) if local_world_size is None else local_world_size
        sizes = (max_tokens, hidden, topk, num_tot_experts, rank, world_size, local_world_size, dtype, weight_dtype)
        config = EPConfig(
            *sizes,
            alignment=alignment,
            recv_capacity=capacity,
            num_sm=tuned.num_sm if tuned is not None else 1 if num_sm is None else num_sm,
            enable_local_combine=enable_local_combine,
            timeout_s=timeout_s,
            payload=payload,
            low_latency=low_latency,
            tuned=tuned,
            sm_budget=sm_budget,
            shared_staging=shared_staging,
            copy_engines=copy_engines,
        )
        join_group(ep_group)
        choice: Choice | None = None
        if num_sm is None and tuned is None:
            config, choice = choose(config, current_heap().device)
        self.config = config
        kernels = aot_for(use_aot if aot is None else aot, aot_dir, current_heap())
        self.context = DispatchCombineContext.create(config, group=ep_group, aot=kernels, choice=choice)
        self.barrier = BarrierAllContext(self.context)
        self._comm = CommStream(self.context.device)
        self._finish = Finisher(self.context, self._comm)
        self._warned, self._overflow_told = False, 0
        self._requests = Requests(self.context)

    # --- the constructor's arguments --------------------------------------------------------------------

    rank, world_size, local_world_size = _field("rank"), _field("world_size"), _field("local_world_size")
    max_tokens, hidden, topk = _field("max_tokens"), _field("hidden"), _field("topk")
    num_tot_experts, num_sm = _field("num_experts"), _field("num_sm")
    dtype, weight_dtype = _field("token_dtype"), _field("weight_dtype")
    enable_local_combine, is_intra_node = _field("enable_local_combine"), _field("is_intra_node")

    @property
    def ep_group(self) -> Any:
        """The process group."""
        return self.context.group

    @property
    def ep_config(self) -> EPConfig:
        """`config`."""
        return self.config

    # --- dispatch ----------------------------------------------------------------------------------

    @overload
    def dispatch(
        self,
        input: torch.Tensor | MXTensor,
        exp_indices: torch.Tensor,
        weight: torch.Tensor | None = None,
        full_scatter_indices: torch.Tensor | None = None,
        *,
        landing: Literal["mx", "bf16"] | None = None,
        return_recv_hook: Literal[False] = False,
        async_finish: Literal[False] = False,
        previous_event: None = None,
    ) -> Received: ...

    @overload
    def dispatch(
        self,
        input: torch.Tensor | MXTensor,
        exp_indices: torch.Tensor,
        weight: torch.Tensor | None = None,
        full_scatter_indices: torch.Tensor | None = None,
        *,
        landing: Literal["mx", "bf16"] | None = None,
        return_recv_hook: Literal[True],
        async_finish: Literal[False] = False,
        previous_event: None = None,
    ) -> tuple[torch.Tensor | MXTensor, torch.Tensor | None, EPAllToAllLayoutDesc, RecvHook]: ...

    @overload
    def dispatch(
        self,
        input: torch.Tensor | MXTensor,
        exp_indices: torch.Tensor,
        weight: torch.Tensor | None = None,
        full_scatter_indices: torch.Tensor | None = None,
        *,
        landing: Literal["mx", "bf16"] | None = None,
        return_recv_hook: Literal[False] = False,
        async_finish: Literal[True],
        previous_event: EPEvent | None = None,
    ) -> tuple[torch.Tensor | MXTensor, torch.Tensor | None, EPAllToAllLayoutDesc, EPEvent]: ...

    @overload
    def dispatch(
        self,
        input: torch.Tensor | MXTensor,
        exp_indices: torch.Tensor,
        weight: torch.Tensor | None = None,
        full_scatter_indices: torch.Tensor | None = None,
        *,
        landing: Literal["row"],
        return_recv_hook: Literal[False] = False,
        async_finish: Literal[False] = False,
        previous_event: None = None,
    ) -> ReceivedRows: ...

    @overload
    def dispatch(
        self,
        input: torch.Tensor | MXTensor,
        exp_indices: torch.Tensor,
        weight: torch.Tensor | None = None,
        full_scatter_indices: torch.Tensor | None = None,
        *,
        landing: str | None,
        return_recv_hook: bool = False,
        async_finish: bool = False,
        previous_event: EPEvent | None = None,
    ) -> tuple[Any, ...]: ...

    def dispatch(
        self,
        input: torch.Tensor | MXTensor,
        exp_indices: torch.Tensor,
        weight: torch.Tensor | None = None,
        full_scatter_indices: torch.Tensor | None = None,
        *,
        landing: str | None = None,
        return_recv_hook: bool = False,
        async_finish: bool = False,
        previous_event: EPEvent | None = None,
    ) -> tuple[object, ...]:
        """Send every token's row to the ranks that own its experts. Collective.

        Args:
            input: [T, H] of the layer's dtype, contiguous; T may be 0 and differ between ranks. With
                payload="mxfp8" also an MXTensor (e4m3, blocks of 32), which travels as it is.
            exp_indices: [T, K] int32 or int64, contiguous; -1 or num_tot_experts = dropped.
            weight: [T, K] float32, contiguous; on all ranks or on none.
            full_scatter_indices: [T, K] int32 or int64: position of each kept entry in a stable sort of this
                rank's entries by expert (dropped last); replaces the computed order.
            landing: format of received rows with payload="mxfp8", written in the pass that lays them out. None or
                "mx": an `MXTensor`. "row": a `RowScaled`, e4m3 with one float32 scale per row. "bf16": a tensor of
                bfloat16, the values of the `MXTensor`. Ranks may choose differently.
            return_recv_hook: launch the sending half only, and return a hook. The hook launches the receiving half on
                the stream that is current then; the results are valid after it. The hook is collective: call it before
                the next dispatch of this layer and before the combine of this dispatch.
            async_finish: run on `comm_stream`, after the work already on the current stream. A stream may use the
                results after `EPEvent.current_stream_wait`.
            previous_event: with async_finish, the event to wait for in place of the current stream.

        Returns:
            recv_x [R, H] (with payload="mxfp8" in the format of `landing`), recv_weights [R] float32 or None, and the
            descriptor. Rows are sorted by local expert, then source rank, then (token, k). The caller owns all three.
            Then the hook (`RecvHook`) or the event (`EPEvent`), if requested.

        Raises:
            InputError: an argument does not fit, on the rank that got it; an id out of range, or weights on
                some ranks only, on every rank. In static mode ids out of range are dropped instead, and
                reported by `check`; with `low_latency` they are dropped and not reported. The hook of the previous
                dispatch has not been called.
            CallMismatch: other ranks are in other calls; in static mode also weights on some ranks only (on a GPU:
                from a later call or `check`).
            PeerFailed: another rank rejected its arguments (static mode: from `check`; with `low_latency` it is not
                reported), or (CPU) died.
            WaitTimeout: a rank did not come within `timeout_s`.
        """
        self._begin("dispatch", input, weight)
        arguments = (input, exp_indices, weight, full_scatter_indices)
        ending = ending_of(return_recv_hook, async_finish, previous_event)

        def send() -> Launched[_ExpertMajor]:
            request = self._requests.dispatch(ending, landing, *arguments)
            return self._send_expert_major(request, landing, return_recv_hook)

        received, end = self._finish("dispatch", send, arguments, ending)
        return received if end is None else (*received, end)

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
    ) -> tuple[_Landed, torch.Tensor | None]: ...

    def dispatch_again(
        self,
        input: torch.Tensor | MXTensor,
        layout_desc: EPAllToAllLayoutDesc,
        weight: torch.Tensor | None = None,
        *,
        landing: str | None = None,
    ) -> tuple[_Landed, torch.Tensor | None]:
        """Send other rows by the routing of an earlier dispatch. Collective; the host never waits, even in exact mode,
        because the row count is known.

        Args:
            input: [T, H] as in `dispatch`, with the T of `layout_desc`.
            layout_desc: descriptor of the same earlier dispatch of this layer on all ranks, however old.
            weight: [T, K] float32; on all ranks or on none.
            landing: as in `dispatch`.

        Returns:
            recv_x [R, H] and recv_weights [R] or None, in the row order of `layout_desc`. Combine these rows with
            `layout_desc` too.

        Raises:
            InputError: an argument does not fit, or the earlier dispatch had `full_scatter_indices`, whose order is
                not kept. Only the rank that got the argument raises; `check` reports it on the others, as in static
                mode.
            StaleHandleError: the descriptor is not of this layer.
            CallMismatch: descriptors of different dispatches, weights on some ranks only, or another call on another
                rank; before rows are sent (on a GPU: from a later call or `check`).
            WaitTimeout: a rank did not come within `timeout_s`.
        """
        self._begin()
        request = self._requests.dispatch_again(landing, input, layout_desc, weight)
        (recv_x, recv_weights, _), _ = self._send_expert_major(request, landing)
        return recv_x, recv_weights

    @overload
    def dispatch_scaled(
        self,
        input: torch.Tensor,
        scale: torch.Tensor,
        exp_indices: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        *,
        layout_desc: EPAllToAllLayoutDesc | None = None,
        return_recv_hook: Literal[False] = False,
    ) -> ReceivedScaled: ...

    @overload
    def dispatch_scaled(
        self,
        input: torch.Tensor,
        scale: torch.Tensor,
        exp_indices: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        *,
        layout_desc: EPAllToAllLayoutDesc | None = None,
        return_recv_hook: Literal[True],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, EPAllToAllLayoutDesc, RecvHook]: ...

    def dispatch_scaled(
        self,
        input: torch.Tensor,
        scale: torch.Tensor,
        exp_indices: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        *,
        layout_desc: EPAllToAllLayoutDesc | None = None,
        return_recv_hook: bool = False,
    ) -> ReceivedScaled | tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, EPAllToAllLayoutDesc, RecvHook]:
        """`dispatch` rows that the caller has quantised: one-byte elements with scales. Expert-major. Collective.

        Rows and scales travel as they are; their values are never read. `combine` takes rows of the layer's dtype.

        Args:
            input: [T, H] float8_e4m3fn, float8_e5m2 or uint8, contiguous.
            scale: [T, S] of any dtype, contiguous, a byte per 32 values: [T, H / 32] uint8, [T, H / 128] float32.
            exp_indices, weight: as in `dispatch`; ids are None with `layout_desc`.
            layout_desc: descriptor of an earlier dispatch, whose routing is used; no host waits (`dispatch_again`).
            return_recv_hook: as in `dispatch`.

        Returns:
            recv_x [R, H] and recv_scale [R, S] of the dtypes given, recv_weights [R] float32 or None, and the
            descriptor. Then the hook, if requested. Padding rows and their scales are zero.

        Raises:
            InputError: an argument does not fit; weights or scales on some ranks only, on every rank; a low-latency
                layer that has sent rows of its dtype.
            CallMismatch: static layer, or with `layout_desc`: weights or scales on some ranks only; otherwise as
                `dispatch`, `dispatch_again`.
            ConfigError: the layer has a payload, or, with `layout_desc`, low_latency.
            StaleHandleError, PeerFailed, WaitTimeout: as `dispatch`, `dispatch_again`.
        """
        checks.check_scaled_layer(self.config, again=layout_desc is not None)
        self._begin()
        given = Rows(input, scale)
        request = self._requests.dispatch_scaled(given, exp_indices, weight, layout_desc)
        sent = self._send(request, EXPERT_MAJOR[None], return_recv_hook)
        recv_x, recv_scale = sent.received.x.like(given)
        assert recv_scale is not None, "sent"
        results = (recv_x, recv_scale, sent.received.weights, sent.desc)
        if not return_recv_hook:
            return results
        return *results, InFlight(self.context, "dispatch", sent.receive).hook(results)

    def dispatch_with_row_map(
        self, rows: Rows, given: torch.Tensor | RoutingMap, weights: torch.Tensor | None
    ) -> tuple[Rows, torch.Tensor | None, EPAllToAllLayoutDesc, torch.Tensor]:
        """`dispatch` or `dispatch_scaled` for integrations; also returns [C, K] int32, the output rows of each staging
        row.

        given: expert ids, or a routing map; with a map the integration has already checked all arguments.

        Raises:
            CapacityError: a layer without capacity has room for fewer tokens than some rank has, or fewer slots than a
                token of a routing map has experts; on all ranks, before a row is sent.
        """
        self._begin()
        request = self._requests.dispatch_with_row_map(rows, given, weights)
        sent = self._send(request, WITH_COPIES)
        assert sent.received.copy_rows is not None, "asked for"
        return Rows(*sent.received.x.like(rows)), sent.received.weights, sent.desc, sent.received.copy_rows

    def dispatch_ahead(
        self,
        input: torch.Tensor,
        exp_indices: torch.Tensor,
        weight: torch.Tensor | None,
        landing: str | None,
        later: bool = True,
        checked: bool = False,
        keep_rows: bool = False,
    ) -> Ahead:
        """`dispatch` for callers that launch work on the rows before the host knows how many arrive. No low latency.

        later: without a capacity do not wait for this number; rows have room for some more than lately. If more come,
        or another rank refuses its arguments, no row is written, and the work is lost (`Ahead.settle`, until which
        `input` must not change). checked: arguments fit. keep_rows: keep rows as they arrive, too; without a payload.
        """
        if self.config.low_latency:
            raise ConfigError("dispatch_ahead is not for low-latency layers: call dispatch.")
        self._begin("dispatch", input, weight)
        with call_range("dispatch", self.context):
            request = self._requests.dispatch(PLAIN, landing, input, exp_indices, weight, None, checked)
            kind = landings.WITH_ROWS if keep_rows else EXPERT_MAJOR[landing]
            return kind.ahead(steps.dispatch(self.context, request, kind, later=later), self.config)

    def dispatch_to_slabs(
        self, rows: Rows, ids: torch.Tensor, weights: torch.Tensor | None, slabs: Rows, split: bool
    ) -> tuple[torch.Tensor | None, EPAllToAllLayoutDesc, RecvHook | EPEvent | None]:
        """`dispatch` or `dispatch_scaled` of a low-latency layer for integrations, into memory of the caller.

        Args:
            rows: [T, H]; if they or the slabs have scales, H a multiple of 128. bf16 rows for slabs with scales are
                quantised on the way: to MXFP8 with that payload, else by `ops.channel_scales.quantize_channels`, with
                scales not rounded.
            slabs: [e, n, H], contiguous, n >= world_size * max_tokens; if rows arrive with scales, also [e, n, H / 32]
                uint8 or [e, c, n] of 32 bits. The rows of local expert i begin at slabs[i, 0]; the scales of row j go
                to [i, j], or their first c words to [i, :, j]. The rest is left alone. A token that names an expert
                twice may overflow its slab.
            split: return a hook, which launches the receiving half.

        Returns:
            weights of rows [e * n], undefined for rows that did not arrive, or None; the descriptor, for expert outputs
            [e * n, H]; the hook or None.
        """
        self._begin("dispatch", rows.data, weights)

        def send() -> Launched[tuple[torch.Tensor | None, EPAllToAllLayoutDesc]]:
            request = self._requests.dispatch_to_slabs(rows, ids, weights, slabs)
            sent = self._send(request, EXPERT_MAJOR[None], split)
            return (sent.received.weights, sent.desc), sent.receive

        received, end = self._finish("dispatch", send, (rows, ids, weights, slabs), Ending(split) if split else PLAIN)
        return *received, end

    def dispatch_compact(
        self,
        input: torch.Tensor,
        exp_indices: torch.Tensor,
        weight: torch.Tensor | None = None,
        *,
        scale: torch.Tensor | None = None,
        num_rows: int | None = None,
        async_finish: bool = False,
        previous_event: EPEvent | None = None,
    ) -> CompactRows:
        """`dispatch` that sends a token to a rank once, even if several experts of that rank get it. Collective.

        `combine` with this descriptor takes [R, H]: one row per row of `x`, already summed over the experts of this
        rank. It adds the rows of all ranks in float32.

        Args:
            input, exp_indices, weight: as in `dispatch`.
            scale: scales of one-byte rows, as in `dispatch_scaled`; on all ranks or on none.
            num_rows: None: the host waits for the number of rows that arrive. n: n rows on every rank, and the host
                never waits; rows past the received ones have ids -1 and weights 0. Rows from n on are left out. The
                first such call allocates room for the most rows that can arrive, and waits for all ranks.
            async_finish, previous_event: as in `dispatch`.

        Raises:
            InputError: an argument does not fit; ids out of range, or weights or scales on some ranks only, on every
                rank (with `num_rows`: ids from `check`).
            CallMismatch: other ranks are in other calls; with `num_rows`, weights or scales on some ranks only.
            CapacityError: some rank has more than `max_tokens` tokens, on every rank; `needed` is the largest number.
            ConfigError: a layer with payload, capacity or low_latency.
            PeerFailed, WaitTimeout: as `dispatch`.
        """
        checks.check_compact_layer(self.config)
        self._begin()
        given, arguments = Rows(input, scale), (input, exp_indices, weight, scale)
        ending = ending_of(False, async_finish, previous_event)

        def send() -> Launched[CompactRows]:
            request = self._requests.dispatch_compact(ending, given, exp_indices, weight, num_rows)
            sent = steps.dispatch(self.context, request, landings.COMPACT[exp_indices.dtype])
            return landings.compact_rows(sent, given), sent.receive

        received, event = self._finish("dispatch", send, arguments, ending)
        assert not isinstance(event, RecvHook), "not asked for"
        return received if event is None else replace(received, event=event)

    @overload
    def dispatch_compact_again(
        self,
        input: torch.Tensor,
        layout_desc: EPAllToAllLayoutDesc,
        *,
        scale: None = None,
        async_finish: bool = False,
        previous_event: EPEvent | None = None,
    ) -> tuple[torch.Tensor, EPEvent | None]: ...

    @overload
    def dispatch_compact_again(
        self,
        input: torch.Tensor,
        layout_desc: EPAllToAllLayoutDesc,
        *,
        scale: torch.Tensor,
        async_finish: bool = False,
        previous_event: EPEvent | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, EPEvent | None]: ...

    def dispatch_compact_again(
        self,
        input: torch.Tensor,
        layout_desc: EPAllToAllLayoutDesc,
        *,
        scale: torch.Tensor | None = None,
        async_finish: bool = False,
        previous_event: EPEvent | None = None,
    ) -> tuple[object, ...]:
        """Send other rows by the routing of a `dispatch_compact`. Collective; the host waits for nothing.

        This is the backward pass of `combine` of that descriptor.

        Args:
            input: [T, H] of the layer's dtype, contiguous, T as in that dispatch.
            layout_desc: descriptor of that dispatch.
            scale: scales of one-byte rows, whatever that dispatch sent; on all ranks or on none.

        Returns:
            [R, H] in the row order of that dispatch; with `scale` also [R, S]; with async_finish the event, otherwise
            None.

        Raises:
            InputError: an argument does not fit.
            StaleHandleError: the descriptor is not of this layer.
            WaitTimeout: a rank did not come within `timeout_s` (on a GPU: from a later call or `check`).
        """
        checks.check_compact_layer(self.config)
        self._begin()
        given = Rows(input, scale)
        ending = ending_of(False, async_finish, previous_event)

        def send() -> Launched[tuple[torch.Tensor, torch.Tensor | None]]:
            request = self._requests.dispatch_compact_again(ending, given, layout_desc)
            sent = steps.dispatch(self.context, request, landings.ROWS_ALONE)
            return Rows(sent.received.x, sent.received.scale).like(given), sent.receive

        (x, scales), event = self._finish("dispatch", send, (input, layout_desc, scale), ending)
        return (x, event) if scales is None else (x, scales, event)

    @overload
    def combine(
        self,
        input: torch.Tensor,
        ep_a2a_layout_desc: EPAllToAllLayoutDesc,
        weights: torch.Tensor | None = None,
        *,
        bias: _Biases = None,
        out: torch.Tensor | None = None,
        return_recv_hook: Literal[False] = False,
        async_finish: Literal[False] = False,
        previous_event: None = None,
    ) -> torch.Tensor: ...

    @overload
    def combine(
        self,
        input: torch.Tensor,
        ep_a2a_layout_desc: EPAllToAllLayoutDesc,
        weights: torch.Tensor | None = None,
        *,
        bias: _Biases = None,
        out: torch.Tensor | None = None,
        return_recv_hook: Literal[True],
        async_finish: Literal[False] = False,
        previous_event: None = None,
    ) -> tuple[torch.Tensor, RecvHook]: ...

    @overload
    def combine(
        self,
        input: torch.Tensor,
        ep_a2a_layout_desc: EPAllToAllLayoutDesc,
        weights: torch.Tensor | None = None,
        *,
        bias: _Biases = None,
        out: torch.Tensor | None = None,
        return_recv_hook: Literal[False] = False,
        async_finish: Literal[True],
        previous_event: EPEvent | None = None,
    ) -> tuple[torch.Tensor, EPEvent]: ...

    def combine(
        self,
        input: torch.Tensor,
        ep_a2a_layout_desc: EPAllToAllLayoutDesc,
        weights: torch.Tensor | None = None,
        *,
        bias: _Biases = None,
        out: torch.Tensor | None = None,
        return_recv_hook: bool = False,
        async_finish: bool = False,
        previous_event: EPEvent | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, RecvHook | EPEvent]:
        """Bring expert outputs back and sum them per token. Collective.

        Args:
            input: [R, H] of the layer's dtype, contiguous: one output per row of `recv_x`.
            ep_a2a_layout_desc: descriptor of the dispatch, which need not be the latest one of this layer.
            weights: [R] float32, contiguous; multiplies each row in float32 before the sum; on all ranks or
                on none. None: a plain sum. A low-latency layer also takes those of the tokens, [T, K] as for
                `dispatch`, on all ranks, which then travel within this call; the bits are the same.
            bias: one or two [T, H] of the layer's dtype, contiguous. The float32 sums start with them, in this order:
                terms that need no exchange, such as a shared expert's output. Not for low-latency layers.
            out: [T, H] of the layer's dtype, contiguous, not overlapping `input`: memory for the result, which is then
                returned. None: it is allocated.
            return_recv_hook, async_finish, previous_event: as in `dispatch`. The hook must be called before the next
                combine of this layer. `input` may be overwritten once the sending half has run.

        Returns:
            [T, H] of the layer's dtype: the sum over k in float32, rounded once (with
            `enable_local_combine`, partial sums of ranks and nodes are rounded to the dtype as well).
            A token without assignments gets zeros, or its biases. Then the hook or the event, if requested.

        Raises:
            InputError: an argument does not fit. The hook of this dispatch, or of the previous combine, has not been
                called.
            StaleHandleError: the descriptor is not of this layer.
            CallMismatch: ranks combine different dispatches, weights on some ranks only, or are in other calls;
                WaitTimeout: a rank did not come within `timeout_s` (on a GPU: both from a later call or `check`).
        """
        ctx, desc = self.context, ep_a2a_layout_desc
        biases = bias if isinstance(bias, tuple) else () if bias is None else (bias,)
        self._begin_combine(input, weights, *biases)
        ending = ending_of(return_recv_hook, async_finish, previous_event)
        checks.check_combine(self.config, ctx.device, ctx.layer_id, input, desc, weights)
        if out is not None:
            checks.check_out(self.config, ctx.device, out, desc)
        if biases:
            checks.check_biases(self.config, ctx.device, biases, desc)
        if ending is not PLAIN:
            checks.check_overlap(self.config, *ending)
        ctx.calls.check_combine(desc.dispatch_number)

        def send() -> Launched[torch.Tensor]:
            return steps.combine(ctx, input, weights, desc, split=return_recv_hook, biases=biases, out=out)

        sums, end = self._finish("combine", send, (input, weights, desc, out, *biases), ending)
        return sums if end is None else (sums, end)

    def combine_topk(
        self,
        values: torch.Tensor,
        layout_desc: EPAllToAllLayoutDesc,
        *,
        async_finish: bool = False,
        previous_event: EPEvent | None = None,
    ) -> tuple[torch.Tensor, EPEvent | None]:
        """Bring a number per (row, k) back to its (token, k), summed over ranks in float32. Collective.

        If `values` is zero wherever `topk_idx` of the dispatch is -1, each entry gets the number of its own slot
        exactly, and a dropped entry gets zero: the gradient of the routing weights.

        Args:
            values: [R, K] float32, contiguous.
            layout_desc: descriptor of a `dispatch_compact`.

        Returns:
            [T, K] float32, and with async_finish the event.

        Raises:
            InputError, StaleHandleError, WaitTimeout: as `combine`.
            ConfigError: rows of the layer are too short for a float32: one element of 2 bytes, or up to 8 of them with
                `enable_local_combine` over several nodes, where partial sums have the dtype of rows.
        """
        ctx, desc = self.context, layout_desc
        checks.check_compact_layer(self.config)
        self._begin_combine()
        checks.check_compact_desc("combine_topk", ctx.layer_id, desc)
        checks.check_topk_values(self.config, ctx.device, values, desc.num_recv_rows)
        ctx.calls.check_combine(desc.dispatch_number)
        if not async_finish:
            return steps.combine_topk(ctx, values, desc), None
        return self._comm.run(lambda: steps.combine_topk(ctx, values, desc), (values, desc), previous_event)

    def combine_buffer(self, num_rows: int) -> torch.Tensor:
        """Symmetric buffer that `combine` reads. Write expert outputs here to skip the staging copy.

        For rows of `dispatch_compact` it saves nothing: `combine` sums them, and stores the sums in this memory.

        Waits, on the current stream, until no rank reads the rows of the previous combine. Pass the whole tensor to the
        next combine, on the same stream or one that is ordered after it; any other combine of this layer invalidates
        the buffer. Call it on all ranks or on none, after the dispatch, which may move the buffer of an exact layer.

        Args:
            num_rows: `num_recv_rows` of the descriptor that will be combined.

        Returns:
            [num_rows, H] of the layer's dtype, uninitialised symmetric memory.

        Raises:
            ConfigError: with `enable_local_combine` or `low_latency`, where `combine` sums before it stores.
            InputError: the buffer has fewer rows, also after a `dispatch_compact` with `num_rows` above world_size *
                max_tokens; the hook of the previous combine has not been called.
        """
        ctx = self.context
        ctx.check_open()
        ctx.poll_status()
        number = checks.check_combine_buffer(self.config, num_rows, ctx.sizes.output_rows)
        rows = combine_ops.lend_buffer(ctx)[:number]
        ctx.poll_status()
        return rows

    @property
    def comm_stream(self) -> torch.cuda.Stream | None:
        """The stream of calls with `async_finish`, created at first use. It has high priority: its programs get a free
        multiprocessor before those of other streams. None on the CPU."""
        return self._comm.stream

    def on_comm_stream(
        self, call: Callable[[], _Result], arguments: tuple[object, ...], previous_event: EPEvent | None = None
    ) -> tuple[_Result, EPEvent]:
        """Run `call` on `comm_stream`, after the work of the current stream or `previous_event`; return its result and
        end event. arguments: all that it reads and the caller may drop before the current stream waits for the end."""
        return self._comm.run(call, arguments, previous_event)

    @property
    def overflow_total(self) -> int:
        """Rows, with padding, that did not fit `capacity` on this rank so far (`EPAllToAllLayoutDesc.overflow`), in
        backward passes and graph replays, too. 0 without a capacity. Waits for this stream and `comm_stream`."""
        self.context.check_open()
        self._comm.join()
        return int(self.context.state[codes.OVERFLOW_TOTAL])

    # --- life -------------------------------------------------------------------------------------------

    def finalize(self) -> None:
        """Free the symmetric memory of the layer. All ranks call it, in any state of the layer; idempotent.

        Waits for the work of this rank's device, then, unless the layer has failed, until all ranks have come. After a
        failure it waits for no rank: the memory is reused when every rank has finalized the layer, or is dead.

        Raises:
            PeerFailed: a rank has not come within the time limit of host collectives, or is dead.
            WaitTimeout: this rank's device does not finish its work; finalize may be called again.
        """
        self.context.finalize()

    def check(self) -> None:
        """Wait for this stream and `comm_stream`, and raise the errors that the device reported, if any.

        Warns if rows, or their padding, have not fitted `capacity` since the last check; `overflow_total` counts both.

        Raises:
            WaitTimeout: an expired wait.
            CallMismatch: ranks were in different calls.
            InputError, PeerFailed: the errors of the latest dispatch for which its host did not wait, but for arguments
                that it refused on this rank; not of low-latency layers, nor of dispatches captured in CUDA graphs.
        """
        ctx = self.context
        ctx.check_open()
        self._comm.join()
        ctx.check_status()
        unread, ctx.unread = ctx.unread, None
        if unread is not None:
            words = unread[: codes.REPORT_WORDS * self.config.world_size].tolist()
            checks.raise_for_ranks(self.config, Reports(words, self.config.world_size))
        if self.config.recv_capacity is not None:
            self.warn_of_overflow()

    def warn_of_overflow(self) -> None:
        """Warn if rows have not fitted `capacity` of this rank since the last call; waits like `overflow_total`."""
        total = self.overflow_total
        new, self._overflow_told = total - self._overflow_told, total
        if new:
            align = self.config.alignment
            padding = f", padding to alignment={align} included," if align > 1 else ""
            warnings.warn(
                f"{new} rows{padding} did not fit capacity={self.config.recv_capacity} of rank {self.config.rank} "
                f"since the last check, {total} in all, and were left out. Raise the capacity, or make an exact layer "
                "(capacity=None).",
                stacklevel=3,
            )

    def refuse(self, layout_desc: EPAllToAllLayoutDesc | None = None, *, combines: bool = True) -> None:
        """Stand in for a `dispatch` and its `combine` if the caller has found wrong arguments. Collective.

        The other ranks make both calls, and see the error of a dispatch that refused its arguments: exact layers raise
        PeerFailed from `dispatch`, static ones from `check`, low-latency ones not at all. This rank also takes part in
        combine, so that no rank waits for it there, and sends NaN, so that nobody takes the sums for complete. The
        caller then raises.

        Args:
            layout_desc: the other ranks call `dispatch_again` with this descriptor, and combine with it.
            combines: the other ranks combine.
        """
        ctx = self.context
        self._begin()
        desc = refusals.refuse(ctx, others_know=layout_desc is not None)
        if layout_desc is not None:
            desc = layout_desc
        if desc is not None and combines:
            shape = desc.num_recv_rows, self.config.hidden
            steps.combine(
                ctx, torch.full(shape, torch.nan, dtype=self.config.token_dtype, device=ctx.device), None, desc
            )

    def ep_barrier_all(self, stream: torch.cuda.Stream | None = None, intra_node_only: bool = False) -> None:
        """Barrier on `stream` over all ranks, or over the ranks of this node (`BarrierAllContext.barrier_all`)."""
        self.barrier.barrier_all(stream, intra_node_only)

    def __enter__(self) -> EPAll2AllLayer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.context.failure is None:
            # The other ranks may never reach a barrier: free without one.
            self.context.failure = f"{type(error).__name__} left the layer's block."
        self.finalize()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config})"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ConfigError(
            "a layer holds symmetric memory of running processes, so it can be neither copied nor pickled. Make "
            "another on all ranks; in a module that is copied or saved keep it outside, and set it anew."
        )

    # --- what calls have in common ----------------------------------------------------------------------

    def _begin(self, call: str = "", *inputs: object) -> None:
        """Raise if a dispatch may not begin: before anything is reported to the other ranks, because a dispatch whose
        hook is still open counts.

        call, inputs: name and tensors to warn about if they would lose a gradient.
        """
        ctx = self.context
        ctx.check_open()
        ctx.poll_status()
        ctx.calls.check_dispatch()
        if call and not self._warned and torch.is_grad_enabled():
            self._warn_of_no_gradient(call, inputs)

    def _begin_combine(self, *inputs: object) -> None:
        """Raise if the layer has failed; warn if the inputs lose a gradient."""
        self.context.check_open()
        self.context.poll_status()
        if not self._warned and torch.is_grad_enabled():
            self._warn_of_no_gradient("combine", inputs)

    def _warn_of_no_gradient(self, call: str, inputs: tuple[object, ...]) -> None:
        """Warn, once in the life of the layer, if `call` would cut an autograd graph."""
        # Hot path: a loop, because a generator takes twice as long.
        for tensor in inputs:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                self._warned = True
                warnings.warn(
                    f"layer.{call} got a tensor that requires a gradient, but what it returns has none: the graph ends "
                    f"here. For training call triton_ep.autograd.{call}(layer, ...); otherwise detach, or use "
                    "torch.no_grad().",
                    stacklevel=4,
                )
                return

    def _send(self, request: Request, landing: ExpertMajor, split: bool = False) -> Sent[dispatch_ops.Received]:
        if self.config.low_latency:
            return steps.dispatch_low_latency(self.context, request, split)
        return steps.dispatch(self.context, request, landing, split)

    def _send_expert_major(self, request: Request, landing: str | None, split: bool = False) -> Launched[_ExpertMajor]:
        """Send a request and return the results of `dispatch`, with rows in the format of `landing`."""
        land = EXPERT_MAJOR[landing]
        sent = self._send(request, land, split)
        rows = land.output(sent.received.x, self.config)
        return (rows, sent.received.weights, sent.desc), sent.receive
