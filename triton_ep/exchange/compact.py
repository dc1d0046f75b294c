"""Compact rows of a layer: one row per (token, rank), with the ids of its experts there, beside the expert-major ones.

What a dispatch does up to the arrival of rows is the same (triton_ep/exchange/steps.py). Then arrival rows are copied
out as they are, and combine starts from them: nothing is summed on the experts' rank, because the caller has done so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, overload

import torch

from triton_ep.context.context import told
from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.context.layout import placement_parts
from triton_ep.context.overlap import CommStream, EPEvent
from triton_ep.context.records import read_reports
from triton_ep.errors import ConfigError, InputError, StaleHandleError
from triton_ep.exchange import checks
from triton_ep.exchange.steps import DispatchSteps, Received
from triton_ep.kernels.device.codes import HOST_COMPACT, HOST_READS, HOST_REJECTED, HOST_SCALED
from triton_ep.ops import compact as compact_ops
from triton_ep.ops import dispatch as dispatch_ops
from triton_ep.ops import routing as routing_ops

__all__ = ["CompactCalls", "CompactRows", "Received"]


_Fields = tuple[Any, Any, torch.Tensor | None, list[int] | None, EPAllToAllLayoutDesc, torch.Tensor | None]


@dataclass(frozen=True)
class CompactRows:
    """What `dispatch_compact` returns. Rows are ordered by source rank, then by token.

    Attributes:
        x: [R, H] of the dtype given: one row per (token, this rank).
        topk_idx: [R, K] of the dtype given: local expert ids, 0 to e - 1; -1 = an expert of another rank, or dropped.
        topk_weights: [R, K] float32, zero where `topk_idx` is -1; None if no weights were sent.
        num_recv_tokens_per_expert: rows of each local expert, e numbers on the host; None with `num_rows`.
        layout_desc: for `combine`, `combine_topk` and `dispatch_compact_again`.
        scale: [R, S] as given, with one-byte rows; otherwise None.
        event: with async_finish, of the end of the call; otherwise None.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None
    num_recv_tokens_per_expert: list[int] | None
    layout_desc: EPAllToAllLayoutDesc
    scale: torch.Tensor | None = None
    event: EPEvent | None = None


class CompactCalls(DispatchSteps):
    """The calls of a layer that know compact rows. For layers without payload, static capacity or low latency."""

    _comm: CommStream
    _rows_themselves: torch.Tensor | None = None

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
        """`dispatch`, but a token that several experts of a rank want arrives there once. Collective.

        `combine` of the descriptor takes [R, H], one row per row of `x`, already summed over the experts of this rank,
        and adds those of all ranks in float32.

        Args:
            input, exp_indices, weight: as in `dispatch`.
            scale: of one-byte rows, as in `dispatch_scaled`; on all ranks or on none.
            num_rows: None: as many rows as arrive, for which the host waits. n: n rows on every rank, and the host
                waits for nothing; ids in rows behind the arrivals are -1, their weights 0. The first such call makes
                room for the most that can arrive, and waits for that. Arrivals from row n on are left out.
            async_finish, previous_event: as in `dispatch`.

        Raises:
            InputError: an argument does not fit; ids out of range, or weights or scales on some ranks only, on every
                rank (with `num_rows`: ids from `check`).
            CallMismatch: other ranks are in other calls; with `num_rows`, weights or scales on some ranks only.
            CapacityError: some rank has more than `max_tokens` tokens, on every rank; `needed` is the largest number.
            ConfigError: a layer with payload, capacity or low_latency.
            PeerFailed, WaitTimeout: as `dispatch`.
        """
        self._begin_compact(num_rows)
        self._check_compact(input, exp_indices, weight, num_rows, scale)
        rows = dispatch_ops.Rows(input, scale)
        call = partial(self._dispatch_rows, rows, exp_indices, weight, num_rows, exp_indices.dtype)
        return self._compact_call(call, (input, exp_indices, weight, scale), async_finish, previous_event)

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
    ) -> tuple[Any, ...]:
        """Send other rows by the routing of a `dispatch_compact`. Collective; the host waits for nothing.

        This is the backward pass of `combine` of that descriptor.

        Args:
            input: [T, H] of the layer's dtype, contiguous, T as in that dispatch.
            layout_desc: of that dispatch.
            scale: of one-byte rows, whatever was sent then; on all ranks or on none.

        Returns:
            [R, H], rows as there, with `scale` [R, S], and with async_finish the event, otherwise None.

        Raises:
            InputError: an argument does not fit.
            StaleHandleError: the descriptor is not of this layer.
            WaitTimeout: a rank did not come within `timeout_s` (on a GPU: from a later call or `check`).
        """
        ctx, desc = self.context, layout_desc
        self._begin_compact(None)
        try:
            checks.check_compact_desc("dispatch_compact_again", ctx.layer_id, desc)
            idx, num_rows = desc.topk_indices_tensor, desc.num_recv_rows
            checks.check_rows(self.config, ctx.device, input, idx.shape[0], scale)
        except (InputError, StaleHandleError):
            self._reject_compact(0, HOST_REJECTED, scale is not None)
            raise
        call = partial(self._dispatch_rows, dispatch_ops.Rows(input, scale), idx, None, num_rows, None, again=desc)
        rows = self._compact_call(call, (input, desc, scale), async_finish, previous_event)
        return (rows.x, rows.event) if rows.scale is None else (rows.x, rows.scale, rows.event)

    def combine_topk(
        self,
        values: torch.Tensor,
        layout_desc: EPAllToAllLayoutDesc,
        *,
        async_finish: bool = False,
        previous_event: EPEvent | None = None,
    ) -> tuple[torch.Tensor, EPEvent | None]:
        """Bring a number per (row, k) back to its (token, k), summed over ranks in float32. Collective.

        With zeros where `topk_idx` of the dispatch is -1 every entry gets the number of its own slot exactly, and
        zero where it was dropped: the gradient of the routing weights.

        Args:
            values: [R, K] float32, contiguous.
            layout_desc: of a `dispatch_compact`.

        Returns:
            [T, K] float32, and with async_finish the event.

        Raises:
            InputError, StaleHandleError, WaitTimeout: as `combine`.
            ConfigError: rows of the layer are shorter than one float32.
        """
        ctx, desc = self.context, layout_desc
        self._begin_compact(None)
        checks.check_compact_desc("combine_topk", ctx.layer_id, desc)
        checks.check_topk_values(self.config, ctx.device, values, desc.num_recv_rows)
        ctx.calls.check_combine(desc.epoch)
        call = partial(compact_ops.combine_topk, ctx, values, desc)
        if async_finish:
            return self._comm.run(call, (values, desc), previous_event)
        out = call()
        ctx.poll_status()
        return out, None

    def on_comm_stream(self, call: Callable[[], Any], arguments: tuple[object, ...]) -> tuple[Any, EPEvent]:
        """What `call` returns on `comm_stream`, behind the current stream, and the event of its end.

        arguments: what the call reads, which may then be dropped on the current stream.
        """
        return self._comm.run(call, arguments, None)

    # --- steps ------------------------------------------------------------------------------------------

    def _begin_compact(self, num_rows: int | None) -> None:
        cfg, ctx = self.config, self.context
        for name, value in (("payload", cfg.payload), ("capacity", cfg.recv_capacity)):
            if value is not None:
                raise ConfigError(
                    f"compact rows are for layers that send rows as they are and size their outputs, but this one has "
                    f"{name}={value!r}. Make a layer without; for outputs of a fixed size pass num_rows."
                )
        if num_rows is not None and num_rows < 0:
            raise InputError(f"num_rows is {num_rows}; it must be None (exact) or a number of rows.")
        ctx.check_open()
        ctx.poll_status()
        ctx.calls.check_dispatch()

    def _check_compact(self, x: Any, topk_idx: Any, weights: Any, num_rows: int | None, scale: Any) -> None:
        """Raise what this rank sees in its arguments, on this rank as InputError, on the others as they learn of it."""
        ctx, cfg, scaled = self.context, self.config, scale is not None
        try:
            if num_rows is None and isinstance(x, torch.Tensor) and x.dim() == 2 and x.shape[0] > cfg.max_tokens:
                checks.check_rows(cfg, ctx.device, x, None, scale)
            else:
                checks.check_dispatch(cfg, ctx.device, x, topk_idx, weights, None, scale=scale)
        except InputError:
            self._reject_compact(num_rows, HOST_REJECTED, scaled)
            raise
        if x.shape[0] > cfg.max_tokens:
            self._reject_compact(None, HOST_REJECTED, scaled, x.shape[0])

    def _reject_compact(self, num_rows: int | None, host_word: int, scaled: bool, needed_tokens: int = 0) -> None:
        """Tell the other ranks; with `num_rows` they go on without this one's rows, so it keeps in step.

        needed_tokens: of this rank, if these are more than the layer has room for.

        Raises:
            CapacityError: tokens did not fit, here or on another rank.
        """
        if num_rows is None:
            self._reject(needed_tokens=needed_tokens)
            return
        x, idx = self._nothing(scaled)
        self._dispatch_rows(x, idx, None, num_rows, None, host_word)

    def _compact_call(
        self,
        call: Callable[[], _Fields],
        arguments: tuple[object, ...],
        async_finish: bool,
        previous_event: EPEvent | None,
    ) -> CompactRows:
        checks.check_overlap(False, async_finish, previous_event)
        if async_finish:
            result, event = self._comm.run(call, arguments, previous_event)
            return CompactRows(*result, event)
        return CompactRows(*call())

    @told("dispatch", begun=False)
    def _dispatch_rows(
        self,
        given: dispatch_ops.Rows,
        topk_idx: torch.Tensor,
        weights: torch.Tensor | None,
        num_rows: int | None,
        idx_dtype: torch.dtype | None,
        host_word: int = 0,
        again: EPAllToAllLayoutDesc | None = None,
    ) -> _Fields:
        """The fields of `CompactRows`. idx_dtype: of expert ids; None = the caller has them already.

        again: of the earlier dispatch whose routing is taken.
        num_rows: None = the host reads how many arrive, and what other ranks report.
        """
        ctx, cfg = self.context, self.config
        if num_rows is not None and idx_dtype is not None:
            ctx.make_room_for_all()
        rows = given.as_bytes()
        host_word |= HOST_COMPACT | HOST_SCALED * (rows.scale is not None) | HOST_READS * (num_rows is None)
        routing, placement = self.preprocess(topk_idx, weights, None, host_word, again)
        ctx.epoch += 1
        counts = None
        if num_rows is None:
            num_arrivals, counts = self._read_counts(placement)
        else:
            num_arrivals, ctx.unread = num_rows, self._unread(placement)
        fmt = self._format(rows)
        routing_ops.place(ctx, fmt, routing, placement, None)
        exact = num_rows is None
        make = partial(compact_ops.make_compact, ctx, fmt, num_arrivals, exact, idx_dtype, weights is not None)
        received = None if exact else make()
        forward = dispatch_ops.make_forward(ctx)
        side = dispatch_ops.fork(ctx, quantized=False, split=False)
        if not cfg.is_intra_node:
            dispatch_ops.send(ctx, fmt, rows, routing, placement)
        dispatch_ops.push(ctx, fmt, rows, routing, placement)
        received = received or make()  # what is not filled, while rows are on their way
        compact_ops.receive(ctx, fmt, received, placement, forward, side)
        if side is not None:
            ctx.join()
        ctx.poll_status()
        desc = EPAllToAllLayoutDesc(
            num_dispatch_token_cur_rank=rows.data.shape[0],
            num_recv_rows=num_arrivals,
            entries=routing.entries,
            placement=placement,
            shape=(cfg.world_size, cfg.local_world_size, cfg.num_experts_per_rank),
            layer_id=ctx.layer_id,
            epoch=ctx.epoch,
            forward=forward,
            skipped_token_topk_mapping_indices=self._themselves(num_arrivals),
            compact=True,
        )
        x, scale = dispatch_ops.Rows(received.x, received.scale).like(given)
        return x, received.topk_idx, received.topk_weights, counts, desc, scale

    def _read_counts(self, placement: torch.Tensor) -> tuple[int, list[int]]:
        """Rows that arrive here, and those of each local expert; grows buffers, raises what any rank reported.

        Raises:
            CapacityError: a rank has too many tokens; the same on all ranks.
        """
        ctx, cfg = self.context, self.config
        first, count = placement_parts(cfg.world_size, cfg.local_world_size, cfg.num_experts_per_rank)["num_recv"]
        words = ctx.read_back(placement, first + count)
        reports = read_reports(words, cfg.world_size)
        checks.raise_for_ranks(cfg, reports)
        arrivals = max(report.arrivals for report in reports)
        ctx.grow(arrivals, arrivals)
        return reports[cfg.rank].arrivals, words[first : first + count]

    def _unread(self, placement: torch.Tensor) -> torch.Tensor | None:
        # What is captured has not run, and may never do so.
        capturing = placement.is_cuda and torch.cuda.is_current_stream_capturing()
        return None if capturing else placement

    def _themselves(self, num_rows: int) -> torch.Tensor:
        """[num_rows, 1] int32, each row's own number; a view of one table, which only grows."""
        table = self._rows_themselves
        if table is None or table.shape[0] < num_rows:
            size = max(num_rows, self.context.sizes.arrival_rows)
            table = torch.arange(size, dtype=torch.int32, device=self.context.device).unsqueeze(1)
            self._rows_themselves = table
        return table[:num_rows]
