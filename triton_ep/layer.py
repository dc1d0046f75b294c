"""EPAll2AllLayer: dispatch tokens to their experts, combine the results.

Reading order: `dispatch` and `combine` are the two calls; everything they launch is in triton_ep/ops, in the
order of the protocol (docs/concepts/protocol.md).
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from triton_ep import checks
from triton_ep.barrier import BarrierAllContext
from triton_ep.config import EPConfig
from triton_ep.context import DispatchCombineContext
from triton_ep.distributed import current_heap
from triton_ep.errors import AotMiss, ConfigError, InputError, PeerFailed
from triton_ep.layout import HOST_REJECTED, HOST_SCATTER, HOST_WEIGHTS
from triton_ep.layout_desc import EPAllToAllLayoutDesc
from triton_ep.mx.tensor import MXTensor
from triton_ep.ops import combine as combine_ops
from triton_ep.ops import dispatch as dispatch_ops
from triton_ep.ops import low_latency as low_latency_ops
from triton_ep.ops import routing as routing_ops
from triton_ep.ops import splits as splits_ops
from triton_ep.tuned.choose import choose
from triton_ep.tuned.table import TunedEntry


class EPAll2AllLayer:
    """Expert-parallel all-to-all: every token's row goes to the ranks that own its experts, and back summed.

    Made and finalized collectively by all ranks of `ep_group`; also a context manager. `dispatch` and
    `combine` are collective too and run asynchronously on the current stream. Several layers, over the same
    or different groups, live side by side; calls of one layer must not overlap on several streams.

    Args:
        ep_group: process group of the layer, any sub-group of the world; None = the world.
        max_tokens: most tokens per rank and dispatch.
        hidden: elements per row.
        topk: experts per token.
        rank, world_size: this process in `ep_group`, and its size.
        num_tot_experts: experts over all ranks.
        local_world_size: ranks per node; smaller than the ranks of a host, it makes virtual nodes.
        dtype: dtype of rows: bfloat16, float16 or float32.
        weight_dtype: float32.
        num_sm: programs of the communication kernels. None: from `tuned`, else from the tuned table that has an
            entry for this GPU, topology and shape, else by a formula; `config` shows number and entry.
        enable_local_combine: combine sums the rows of a token on the expert's rank first, so one row per
            (token, rank) crosses a link, rounded to `dtype`; False: one rounding in all.
        use_aot: take kernels from the ahead-of-time library.
        payload: None: rows travel as they are. "mxfp8": they are quantised on the way out, e4m3 with one e8m0
            scale per 32 values (RCEIL), and arrive as an `MXTensor`; combine stays in `dtype`.
        alignment: every expert's segment of received rows starts at a multiple of this many rows.
        capacity: None (exact): outputs are sized to what arrives and the host waits for the count.
            n (static): n output rows, no host synchronisation; overflow is flagged in the descriptor.
        low_latency: two launches per call, for a few tokens (decode): static, one node, at most 512 `max_tokens`;
            combine sums as with `enable_local_combine`.
        tuned: an entry of a tuned table (`triton_ep.tuned.table`), with num_sm=None only; the same on all ranks.
        timeout_s: bound of every wait, in seconds.

    Raises:
        ConfigError: sizes that cannot work, or that differ from the group's.
        HeapError: not enough symmetric memory.
        AotMiss: `use_aot=True`; this version has no ahead-of-time library.

    Source: names and arguments follow the EP all-to-all layer of Triton-distributed; meanings are settled in
    docs/reference/layer.md.
    """

    def __init__(
        self,
        ep_group: Any,
        max_tokens: int,
        hidden: int,
        topk: int,
        rank: int,
        num_tot_experts: int,
        local_world_size: int,
        world_size: int,
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
    ) -> None:
        if use_aot:
            raise AotMiss("use_aot=True, but this version builds no ahead-of-time kernels. Pass use_aot=False (JIT).")
        if num_sm is not None and tuned is not None:
            raise ConfigError(f"num_sm={num_sm} and a tuned entry with {tuned.num_sm}: pass num_sm=None with `tuned`.")
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
        looked_up = num_sm is None and tuned is None
        self.config = choose(config, current_heap().device, ep_group) if looked_up else config
        self.context = DispatchCombineContext.create(self.config, group=ep_group)
        self.barrier = BarrierAllContext(self.context)

    # --- the two calls ----------------------------------------------------------------------------------

    def dispatch(
        self,
        input: torch.Tensor | MXTensor,
        exp_indices: torch.Tensor,
        weight: torch.Tensor | None = None,
        full_scatter_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | MXTensor, torch.Tensor | None, EPAllToAllLayoutDesc]:
        """Send every token's row to the ranks that own its experts. Collective.

        Args:
            input: [T, H] of the layer's dtype, contiguous; T may be 0 and differ between ranks. With
                payload="mxfp8" also an MXTensor (e4m3, blocks of 32), which travels as it is.
            exp_indices: [T, K] int32 or int64, contiguous; -1 or num_tot_experts = dropped.
            weight: [T, K] float32, contiguous; on all ranks or on none.
            full_scatter_indices: [T, K] int32 or int64: position of each kept entry in a stable sort of this
                rank's entries by expert (dropped last); replaces the computed order.

        Returns:
            recv_x [R, H] (with payload="mxfp8" an MXTensor), recv_weights [R] float32 or None, and the
            descriptor. Rows are expert-major, inside
            an expert by source rank, inside a source rank by (token, k). All three are owned by the caller.

        Raises:
            InputError: an argument does not fit, on the rank that got it; an id out of range, or weights on
                some ranks only, on every rank. In static mode ids out of range are dropped instead, and
                reported by `check`.
            PeerFailed: another rank rejected its arguments, or (CPU) died.
            WaitTimeout: a rank did not come within `timeout_s`.
        """
        ctx = self.context
        ctx.check_open()
        ctx.poll_status()
        try:
            checks.check_dispatch(self.config, ctx.device, input, exp_indices, weight, full_scatter_indices)
        except InputError:
            self._reject()
            raise
        rows = dispatch_ops.Rows(input)
        if isinstance(input, MXTensor):
            rows = dispatch_ops.Rows(input.qdata, input.scale.view(torch.uint8))
        recv, recv_weights, desc = self._dispatch(rows, exp_indices, weight, full_scatter_indices, 0)
        if recv.scale is None:
            return recv.data, recv_weights, desc
        scale = recv.scale.view(torch.float8_e8m0fnu)
        recv_x = MXTensor(recv.data, scale, torch.float8_e4m3fn, 32, self.config.token_dtype)
        return recv_x, recv_weights, desc

    def combine(
        self,
        input: torch.Tensor,
        ep_a2a_layout_desc: EPAllToAllLayoutDesc,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Bring expert outputs back and sum them per token. Collective.

        Args:
            input: [R, H] of the layer's dtype, contiguous: one output per row of `recv_x`.
            ep_a2a_layout_desc: descriptor of the dispatch, any of this layer that is still held.
            weights: [R] float32, contiguous; multiplies each row in float32 before the sum; on all ranks or
                on none. None: a plain sum.

        Returns:
            [T, H] of the layer's dtype: the sum over k in float32, rounded once (with
            `enable_local_combine`, partial sums of ranks and nodes are rounded to the dtype as well).
            A token whose copies were all dropped gets zeros.

        Raises:
            InputError: an argument does not fit.
            StaleHandleError: the descriptor is not of this layer.
            WaitTimeout: a rank did not come within `timeout_s` (on a GPU: from a later call or `check`).
        """
        ctx = self.context
        ctx.check_open()
        ctx.poll_status()
        desc = ep_a2a_layout_desc
        checks.check_combine(self.config, ctx.device, ctx.layer_id, input, desc, weights)
        if self.config.low_latency:
            return low_latency_ops.combine(ctx, input, weights, desc)
        out = combine_ops.combine(ctx, input, weights, desc)
        ctx.poll_status()
        return out

    # --- life -------------------------------------------------------------------------------------------

    def finalize(self) -> None:
        """Free the symmetric memory of the layer. Collective, idempotent."""
        self.context.finalize()

    def check(self) -> None:
        """Wait for the stream and raise what the device reported since the last call; nothing if all is well.

        Raises:
            WaitTimeout: an expired wait.
        """
        self.context.check_open()
        self.context.check_status()

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

    # --- steps of dispatch ------------------------------------------------------------------------------

    def _dispatch(
        self,
        x: dispatch_ops.Rows,
        topk_idx: torch.Tensor,
        weights: torch.Tensor | None,
        scatter: torch.Tensor | None,
        host_word: int,
    ) -> tuple[dispatch_ops.Rows, torch.Tensor | None, EPAllToAllLayoutDesc]:
        ctx, cfg = self.context, self.config
        if cfg.low_latency:
            return low_latency_ops.dispatch(ctx, x, topk_idx, weights, host_word)
        has_weights = weights is not None
        x = dispatch_ops.quantize(ctx, x)
        routing, placement = self.preprocess(topk_idx, scatter, host_word | (HOST_WEIGHTS if has_weights else 0))
        ctx.epoch += 1
        num_rows, num_arrivals = self.init_output_buffer(placement)
        routing_ops.place(ctx, routing, placement, weights, scatter)
        received = dispatch_ops.make_received(ctx, num_rows, num_arrivals, has_weights)
        side = dispatch_ops.fork(ctx)
        if not cfg.is_intra_node:
            dispatch_ops.send(ctx, x, weights, routing, placement)
        dispatch_ops.push(ctx, x, routing, placement)
        forward = None if cfg.is_intra_node else dispatch_ops.forward(ctx, has_weights, placement)
        dispatch_ops.expand(ctx, received, placement, side)
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
        return received.x, received.weights, desc

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
