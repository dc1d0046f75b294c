"""The steps of `EPAll2AllLayer.dispatch`, in the order of the protocol (docs/concepts/protocol.md)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from triton_ep import checks
from triton_ep.config import EPConfig
from triton_ep.context import DispatchCombineContext
from triton_ep.errors import InputError, PeerFailed
from triton_ep.layout import HOST_REJECTED, HOST_SCATTER, HOST_WEIGHTS
from triton_ep.layout_desc import EPAllToAllLayoutDesc
from triton_ep.mx.tensor import MXTensor
from triton_ep.ops import dispatch as dispatch_ops
from triton_ep.ops import low_latency as low_latency_ops
from triton_ep.ops import routing as routing_ops
from triton_ep.ops import splits as splits_ops
from triton_ep.overlap import EPEvent

Received = tuple[torch.Tensor | MXTensor, torch.Tensor | None, EPAllToAllLayoutDesc]


class DispatchSteps:
    """What a layer does in `dispatch`; the layer sets the attributes.

    Attributes:
        config: sizes.
        context: symmetric memory and device state.
    """

    config: EPConfig
    context: DispatchCombineContext

    def _checked_dispatch(
        self, arguments: tuple[Any, Any, Any, Any], overlap: tuple[bool, bool, EPEvent | None]
    ) -> tuple[Received, Callable[[], None]]:
        """What `dispatch` returns, and its receiving half, which has been launched unless a hook was asked for."""
        x, topk_idx, weights, scatter = arguments
        try:
            checks.check_overlap(*overlap)
            checks.check_dispatch(self.config, self.context.device, x, topk_idx, weights, scatter)
        except InputError:
            self._reject()
            raise
        rows = dispatch_ops.Rows(x)
        if isinstance(x, MXTensor):
            rows = dispatch_ops.Rows(x.qdata, x.scale.view(torch.uint8))
        recv, recv_weights, desc, receive = self._dispatch(rows, topk_idx, weights, scatter, 0, split=overlap[0])
        if recv.scale is None:
            return (recv.data, recv_weights, desc), receive
        scale = recv.scale.view(torch.float8_e8m0fnu)
        recv_x = MXTensor(recv.data, scale, torch.float8_e4m3fn, 32, self.config.token_dtype)
        return (recv_x, recv_weights, desc), receive

    def _dispatch(
        self,
        x: dispatch_ops.Rows,
        topk_idx: torch.Tensor,
        weights: torch.Tensor | None,
        scatter: torch.Tensor | None,
        host_word: int,
        split: bool = False,
    ) -> tuple[dispatch_ops.Rows, torch.Tensor | None, EPAllToAllLayoutDesc, Callable[[], None]]:
        """Rows, weights and descriptor of a dispatch, and its receiving half.

        split: the caller launches that half; otherwise it has been launched.
        """
        ctx, cfg = self.context, self.config
        if cfg.low_latency:
            result = low_latency_ops.dispatch(ctx, x, topk_idx, weights, host_word)
            if not split:
                result[-1]()
                ctx.poll_status()
            return result
        has_weights = weights is not None
        given, x = x, dispatch_ops.quantize(ctx, x)
        routing, placement = self.preprocess(topk_idx, scatter, host_word | (HOST_WEIGHTS if has_weights else 0))
        ctx.epoch += 1
        num_rows, num_arrivals = self.init_output_buffer(placement)
        routing_ops.place(ctx, routing, placement, weights, scatter)
        received = dispatch_ops.make_received(ctx, num_rows, num_arrivals, has_weights)
        forward = dispatch_ops.make_forward(ctx)
        side = dispatch_ops.fork(ctx, x is not given, split)
        if not cfg.is_intra_node:
            dispatch_ops.send(ctx, x, weights, routing, placement)
        dispatch_ops.push(ctx, x, routing, placement)
        receive = partial(dispatch_ops.receive, ctx, received, placement, forward, side)
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
            skipped_token_topk_mapping_indices=received.copy_rows,
            full_scatter=scatter is not None,
        )
        return received.x, received.weights, desc, receive

    def preprocess(
        self, topk_idx: torch.Tensor, scatter: torch.Tensor | None, host_word: int
    ) -> tuple[routing_ops.Routing, torch.Tensor]:
        """Count, give slots, and exchange the splits of all ranks; what they say is the second."""
        ctx, num_experts = self.context, self.config.num_experts
        bad_scatter = None
        if scatter is not None:
            good = routing_ops.legal_scatter(topk_idx, scatter, num_experts)
            # A bad table counts as no tokens at all: nobody may write by it. Illegal ids are still reported.
            legal = (topk_idx >= 0) & (topk_idx < num_experts)
            topk_idx = torch.where(legal & ~good, -1, topk_idx)
            bad_scatter = torch.where(good, 0, HOST_SCATTER).int().view(1)
        routing = routing_ops.count(ctx, topk_idx)
        return routing, splits_ops.exchange(ctx, routing, host_word, bad_scatter)

    def init_output_buffer(self, placement: torch.Tensor) -> tuple[int, int]:
        """Rows of this rank's output and arrival rows to expect; in exact mode read from the device.

        In exact mode this is where errors of any rank surface on all, before any row is sent, and where
        buffers grow, by the same numbers on all ranks.
        """
        ctx, cfg = self.context, self.config
        if cfg.recv_capacity is not None:
            # What is captured has not run, and may never do so.
            capturing = ctx.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            ctx.unread = None if capturing else placement
            return cfg.recv_capacity, ctx.sizes.arrival_rows
        report = ctx.read_back(placement[: 8 * cfg.world_size].view(-1, 8))
        checks.raise_for_ranks(cfg, report)
        arrivals = max(row[1] for row in report)
        rows = arrivals if cfg.enable_local_combine else max(row[0] for row in report)
        ctx.grow(arrivals, rows)
        return report[cfg.rank][0], report[cfg.rank][1]

    def _reject(self) -> None:
        """Tell the other ranks that this one's arguments were refused, and keep its epochs in step."""
        cfg = self.config
        x = torch.empty(0, cfg.hidden, dtype=cfg.token_dtype, device=self.context.device)
        idx = torch.empty(0, cfg.topk, dtype=torch.int32, device=self.context.device)
        try:
            self._dispatch(dispatch_ops.Rows(x), idx, None, None, HOST_REJECTED)
        except PeerFailed:
            # This rank's own rejection, seen in the exchange: the caller raises what caused it.
            return
