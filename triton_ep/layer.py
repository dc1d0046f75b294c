"""EPAll2AllLayer: dispatch tokens to their experts, combine the results.

Reading order: `dispatch` and `combine` are the two calls; the steps of a dispatch are in triton_ep/exchange/steps.py;
everything they launch is in triton_ep/ops, in the order of the protocol (docs/concepts/protocol.md).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

import torch

from triton_ep.config import EPConfig
from triton_ep.context.choice import Choice, choose
from triton_ep.context.context import DispatchCombineContext, told
from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.context.overlap import CommStream, EPEvent, RecvHook
from triton_ep.context.records import read_reports
from triton_ep.distributed import current_heap, join_group, ranks_per_node
from triton_ep.errors import ConfigError
from triton_ep.exchange import checks
from triton_ep.exchange.barrier import BarrierAllContext
from triton_ep.exchange.compact import CompactCalls, Received
from triton_ep.exchange.steps import ReceivedRows
from triton_ep.kernels.device import codes
from triton_ep.mx.tensor import MXTensor
from triton_ep.ops import combine as combine_ops
from triton_ep.ops import low_latency as low_latency_ops
from triton_ep.runtime.launch import aot_for
from triton_ep.runtime.tuned.table import TunedEntry


class EPAll2AllLayer(CompactCalls):
    """Expert-parallel all-to-all: every token's row goes to the ranks that own its experts, and back summed.

    Made and finalized collectively by all ranks of `ep_group`; also a context manager. `dispatch` and
    `combine` are collective too and run asynchronously on the current stream. Several layers, over the same
    or different groups, live side by side; calls of one layer must not overlap on several streams.

    Args:
        ep_group: process group of the layer, any sub-group of the world; None = the world.
        max_tokens: most tokens per rank and dispatch.
        hidden: elements per row.
        topk: experts per token.
        rank, world_size: this process in `ep_group`, and its size; None: as the group says.
        num_tot_experts: experts over all ranks; must be given.
        local_world_size: ranks per node; smaller than the ranks of a host, it makes virtual nodes. None: as
            `initialize_distributed` was told, or ranks per host.
        dtype: dtype of rows: bfloat16, float16 or float32.
        weight_dtype: float32.
        num_sm: programs of the communication kernels. None: from `tuned`, else from the tuned table that has an
            entry for this GPU, topology and shape, else by a formula; `config` shows number and entry.
        enable_local_combine: combine sums the rows of a token on the expert's rank first, so one row per
            (token, rank) crosses a link, rounded to `dtype`; False: one rounding in all.
        use_aot: kernels come from the ahead-of-time library in `aot_dir`; aot="prefer": from the JIT what it lacks.
        payload: None: rows travel as they are. "mxfp8": they are quantised before they leave, e4m3 with one e8m0
            scale per 32 values (RCEIL), and arrive as an `MXTensor`; combine stays in `dtype`.
        alignment: every expert's segment of received rows starts at a multiple of this many rows.
        capacity: None (exact): outputs are sized to what arrives and the host waits for the count.
            n (static): n output rows, no host synchronisation; overflow is flagged in the descriptor.
        low_latency: two launches per call, for at most 512 tokens (decode): static, one node.
        tuned: an entry of a tuned table (`triton_ep.runtime.tuned.table`), with num_sm=None only, the same everywhere.
        timeout_s: bound of every wait, in seconds.

    Raises:
        ConfigError: sizes that cannot work, or that differ from the group's. HeapError: not enough symmetric memory.
        AotMiss, AotArchMismatch, AotNvshmemMismatch, AotCorrupted: of the ahead-of-time library.

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
        config = EPConfig(
            max_tokens=max_tokens,
            hidden=hidden,
            topk=topk,
            num_experts=num_tot_experts,
            rank=rank,
            world_size=world_size,
            local_world_size=local_world_size,
            token_dtype=dtype,
            weight_dtype=weight_dtype,
            alignment=alignment,
            recv_capacity=capacity,
            num_sm=tuned.num_sm if tuned is not None else 1 if num_sm is None else num_sm,
            enable_local_combine=enable_local_combine,
            timeout_s=timeout_s,
            payload=payload,
            low_latency=low_latency,
            tuned=tuned,
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
        self._warned, self._overflow_told = False, 0

    # --- the two calls ----------------------------------------------------------------------------------

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
    ) -> Any: ...

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
    ) -> Any:
        """Send every token's row to the ranks that own its experts. Collective.

        Args:
            input: [T, H] of the layer's dtype, contiguous; T may be 0 and differ between ranks. With
                payload="mxfp8" also an MXTensor (e4m3, blocks of 32), which travels as it is.
            exp_indices: [T, K] int32 or int64, contiguous; -1 or num_tot_experts = dropped.
            weight: [T, K] float32, contiguous; on all ranks or on none.
            full_scatter_indices: [T, K] int32 or int64: position of each kept entry in a stable sort of this
                rank's entries by expert (dropped last); replaces the computed order.
            landing: what rows of payload="mxfp8" become where they arrive, written in the same pass. None or "mx": an
                `MXTensor`. "row": a `RowScaled`, e4m3 with one float32 scale per row. "bf16": a tensor of bfloat16, the
                values of the `MXTensor`. Ranks need not agree.
            return_recv_hook: launch the sending half only. What comes back is valid after the hook, which launches
                the receiving half on the stream that is current then; it is collective, and must be called before
                the next dispatch of this layer and before the combine of this one.
            async_finish: run on `comm_stream`, behind what the current stream has been given. What comes back may
                be used on a stream after `EPEvent.current_stream_wait`.
            previous_event: with async_finish, what to wait for in place of the current stream.

        Returns:
            recv_x [R, H] (of payload="mxfp8" as `landing` says), recv_weights [R] float32 or None, and the descriptor.
            Rows are expert-major, inside an expert by source rank, inside a source rank by (token, k). All three are
            owned by the caller. Then the hook (`RecvHook`) or the event (`EPEvent`), if asked for.

        Raises:
            InputError: an argument does not fit, on the rank that got it; an id out of range, or weights on
                some ranks only, on every rank. In static mode ids out of range are dropped instead, and
                reported by `check`. The hook of the dispatch before has not been called.
            CallMismatch: other ranks are in other calls; in static mode also of weights on some ranks only (on a GPU:
                from a later call or `check`).
            PeerFailed: another rank rejected its arguments, or (CPU) died.
            WaitTimeout: a rank did not come within `timeout_s`.
        """
        ctx = self.context
        ctx.check_open()
        ctx.poll_status()
        if not self._warned and torch.is_grad_enabled():
            self._warn_of_no_gradient("dispatch", input, weight)
        # Before anything is told to the other ranks: the open call still needs its epoch.
        ctx.calls.check_dispatch()
        call = partial(
            self._checked_dispatch,
            (input, exp_indices, weight, full_scatter_indices),
            (return_recv_hook, async_finish, previous_event),
            landing,
        )
        if async_finish:
            (received, _), event = self._comm.run(
                call, (input, exp_indices, weight, full_scatter_indices), previous_event
            )
            return *received, event
        received, receive = call()
        return (*received, self._recv_hook(receive, received)) if return_recv_hook else received

    @overload
    def combine(
        self,
        input: torch.Tensor,
        ep_a2a_layout_desc: EPAllToAllLayoutDesc,
        weights: torch.Tensor | None = None,
        *,
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
        return_recv_hook: bool = False,
        async_finish: bool = False,
        previous_event: EPEvent | None = None,
    ) -> Any:
        """Bring expert outputs back and sum them per token. Collective.

        Args:
            input: [R, H] of the layer's dtype, contiguous: one output per row of `recv_x`.
            ep_a2a_layout_desc: descriptor of the dispatch, any of this layer that is still held.
            weights: [R] float32, contiguous; multiplies each row in float32 before the sum; on all ranks or
                on none. None: a plain sum.
            return_recv_hook, async_finish, previous_event: as in `dispatch`. The hook must be called before the next
                combine of this layer. `input` may be overwritten when the sending half is through.

        Returns:
            [T, H] of the layer's dtype: the sum over k in float32, rounded once (with
            `enable_local_combine`, partial sums of ranks and nodes are rounded to the dtype as well).
            A token whose copies were all dropped gets zeros. Then the hook or the event, if asked for.

        Raises:
            InputError: an argument does not fit. The hook of this dispatch, or of the combine before, has not been
                called.
            StaleHandleError: the descriptor is not of this layer.
            CallMismatch: ranks combine different dispatches, weights on some ranks only, or are in other calls;
                WaitTimeout: a rank did not come within `timeout_s` (on a GPU: both from a later call or `check`).
        """
        ctx = self.context
        ctx.check_open()
        ctx.poll_status()
        if not self._warned and torch.is_grad_enabled():
            self._warn_of_no_gradient("combine", input, weights)
        desc = ep_a2a_layout_desc
        checks.check_combine(self.config, ctx.device, ctx.layer_id, input, desc, weights)
        checks.check_overlap(return_recv_hook, async_finish, previous_event)
        ctx.calls.check_combine(desc.epoch)
        if async_finish:
            call = partial(self._combine, input, weights, desc)
            return self._comm.run(call, (input, weights, desc), previous_event)
        if not return_recv_hook:
            return self._combine(input, weights, desc)
        out, receive = self._send_combine(input, weights, desc)
        ctx.calls.combine = True
        return out, RecvHook(partial(self._end_combine, receive), (out, desc), ctx.device.type == "cuda")

    def combine_buffer(self, num_rows: int) -> torch.Tensor:
        """Symmetric buffer that `combine` reads; write expert outputs here to skip its staging copy.

        Waits, on the current stream, until no rank reads the rows of the combine before. Pass the whole tensor to the
        next combine, on the same stream or one that is ordered behind it; any other combine of this layer takes the
        buffer back. Call it on all ranks or on none, after the dispatch, which may move the buffer of an exact layer.

        Args:
            num_rows: `num_recv_rows` of the descriptor that will be combined.

        Returns:
            [num_rows, H] of the layer's dtype, uninitialised symmetric memory.

        Raises:
            ConfigError: with `enable_local_combine` or `low_latency`, where `combine` sums before it stores.
            InputError: more rows than there are; the hook of the combine before has not been called.
        """
        ctx = self.context
        ctx.check_open()
        ctx.poll_status()
        checks.check_combine_buffer(self.config, num_rows, ctx.sizes.output_rows)
        rows = combine_ops.lend_buffer(ctx)[:num_rows]
        ctx.poll_status()
        return rows

    @property
    def comm_stream(self) -> torch.cuda.Stream | None:
        """The stream of calls with `async_finish`, made at first use; its programs go before those of other streams
        when both wait for a multiprocessor. None on the CPU."""
        return self._comm.stream

    @property
    def overflow_total(self) -> int:
        """Rows that did not fit `capacity` on this rank, in all dispatches of the layer so far: those of backward
        passes and of every replay of a CUDA graph are counted, too. 0 without a capacity. Waits for this stream and
        `comm_stream`."""
        self.context.check_open()
        self._comm.join()
        return int(self.context.state[codes.OVERFLOW_TOTAL])

    # --- life -------------------------------------------------------------------------------------------

    def finalize(self) -> None:
        """Free the symmetric memory of the layer. All ranks call it, in any state of the layer; idempotent.

        Waits for the work of this rank's device, then, unless the layer has failed, until all ranks have come. After a
        failure nothing more is awaited: the memory is used again when every rank has finalized the layer, or is dead.

        Raises:
            PeerFailed: a rank has not come within the time limit of host collectives, or is dead.
            WaitTimeout: this rank's device does not end its work; finalize may be called again.
        """
        self.context.finalize()

    def check(self) -> None:
        """Wait for this stream and `comm_stream`, and raise what the device reported; nothing if all is well.

        Warns if rows have not fitted `capacity` since the last check; `overflow_total` says how many there were.

        Raises:
            WaitTimeout: an expired wait.
            CallMismatch: ranks were in different calls.
            InputError, PeerFailed: what the latest dispatch would have raised on all ranks had it waited for them; of
                static layers that are not of low latency, outside of CUDA graphs.
        """
        ctx = self.context
        ctx.check_open()
        self._comm.join()
        ctx.check_status()
        unread, ctx.unread = ctx.unread, None
        if unread is not None:
            words = unread[: codes.REPORT_WORDS * self.config.world_size].tolist()
            checks.raise_for_ranks(self.config, read_reports(words, self.config.world_size))
        if self.config.recv_capacity is not None:
            self.warn_of_overflow()

    def warn_of_overflow(self) -> None:
        """Warn if rows have not fitted `capacity` of this rank since the last such call; waits as `overflow_total`."""
        total = self.overflow_total
        new, self._overflow_told = total - self._overflow_told, total
        if new:
            warnings.warn(
                f"{new} rows did not fit capacity={self.config.recv_capacity} of rank {self.config.rank} since the "
                f"last check, {total} in all, and were left out. Raise the capacity, or make an exact layer "
                "(capacity=None).",
                stacklevel=3,
            )

    def refuse(self, layout_desc: EPAllToAllLayoutDesc | None = None, *, combines: bool = True) -> None:
        """In place of a `dispatch` and its `combine`, where the caller has found arguments that do not fit. Collective.

        The other ranks, which make both calls, learn what they would of a dispatch that refused its arguments: exact
        layers raise PeerFailed from `dispatch`, others from `check`. No rank waits in combine for this one; what it
        gives there is NaN, so that nobody takes the sums for whole. The caller then raises.

        Args:
            layout_desc: the others make a `dispatch_again` with it, and combine with it.
            combines: they combine.
        """
        ctx = self.context
        ctx.check_open()
        ctx.poll_status()
        ctx.calls.check_dispatch()
        desc = self._reject(again=layout_desc is not None)
        if layout_desc is not None:
            desc = layout_desc
        if desc is not None and combines:
            shape = desc.num_recv_rows, self.config.hidden
            self._combine(torch.full(shape, torch.nan, dtype=self.config.token_dtype, device=ctx.device), None, desc)
        ctx.unread = None  # this rank knows

    def ep_barrier_all(self, stream: Any = None, intra_node_only: bool = False) -> None:
        """Barrier on `stream` over all ranks, or over those of this node (`BarrierAllContext.barrier_all`)."""
        self.barrier.barrier_all(stream, intra_node_only)

    def __enter__(self) -> EPAll2AllLayer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.context.failure is None:
            # The other ranks may never come to a barrier: free without one.
            self.context.failure = f"{type(error).__name__} left the layer's block."
        self.finalize()

    # --- what a first program may not expect ------------------------------------------------------------

    def _warn_of_no_gradient(self, call: str, *tensors: Any) -> None:
        """Warn, once in the life of the layer, if `call` would cut a graph of autograd."""
        if any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors):
            self._warned = True
            warnings.warn(
                f"layer.{call} got a tensor that requires a gradient, but what it returns has none: the graph ends "
                f"here. For training call triton_ep.autograd.{call}(layer, ...); otherwise detach, or use "
                "torch.no_grad().",
                stacklevel=3,
            )

    # --- halves and streams -----------------------------------------------------------------------------

    @told("the hook of combine", begun=True)
    def _end_combine(self, receive: Callable[[], None]) -> None:
        self.context.check_open()
        self.context.calls.combine = False
        receive()
        self.context.poll_status()

    @told("combine", begun=True)
    def _send_combine(
        self, y: torch.Tensor, weights: torch.Tensor | None, desc: EPAllToAllLayoutDesc
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        if self.config.low_latency:
            return low_latency_ops.combine(self.context, y, weights, desc)
        return combine_ops.send(self.context, self.context.rows.own, y, weights, desc)

    @told("combine", begun=True)
    def _combine(self, y: torch.Tensor, weights: torch.Tensor | None, desc: EPAllToAllLayoutDesc) -> torch.Tensor:
        ctx = self.context
        if self.config.low_latency:
            out, receive = low_latency_ops.combine(ctx, y, weights, desc)
            receive()
        else:
            out = combine_ops.combine(ctx, ctx.rows.own, y, weights, desc)
        ctx.poll_status()
        return out
