"""The low-latency calls of deep_ep.Buffer: a slab of rows per expert, two launches each way, hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.errors import ConfigError, FinalizedError, InputError, StaleHandleError
from triton_ep.integrations import arguments as check
from triton_ep.integrations.deep_ep.arguments import check_ids
from triton_ep.integrations.deep_ep.config import low_latency_bytes
from triton_ep.integrations.deep_ep.fp8 import (
    CHANNELS,
    check_quantizable,
    quantize_rows,
    scale_bytes,
    scales_of_bytes,
)
from triton_ep.integrations.deep_ep.handles import LowLatencyHandle
from triton_ep.integrations.deep_ep.layers import GroupLayers, Kind
from triton_ep.integrations.deep_ep.utils import EventOverlap, to_overlap
from triton_ep.layer import EPAll2AllLayer
from triton_ep.ops.compact import from_slabs, to_slabs

_WEIGHTS_HIDDEN = 8
"""Elements of the rows that only accompany weights."""


class LowLatencyCalls:
    """What `Buffer` inherits. Letters as there; M most tokens per rank, the same on all."""

    group_size: int
    num_rdma_bytes: int
    low_latency_mode: bool
    num_sms: int
    _layers: GroupLayers
    _number: int
    _closed: bool

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
        """Nothing: flags only grow, and no call leaves anything to be cleared."""
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
    ) -> tuple[
        torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        torch.Tensor,
        LowLatencyHandle,
        EventOverlap,
        Callable[[], None],
    ]:
        """Send rows to their experts' slabs. Collective; the host waits for nothing.

        Args:
            x: [T, H] bfloat16, contiguous, T up to M.
            topk_idx: [T, K] int64 or int32; -1 = dropped.
            num_max_dispatch_tokens_per_rank: M, up to 512.
            num_experts: E.
            cumulative_local_expert_recv_stats: [e] int32, to which the counts are added.
            use_fp8: quantise rows to e4m3 with a scale per 128 values (H a multiple of it) before they are sent; the
                same on all ranks.
            round_scale: scales are powers of two, rounded up.
            use_ue8m0: exponents of such scales, four to an int32; H a multiple of 512.
            async_finish: run on the communication stream.
            return_recv_hook: send now; the fifth, called, receives.

        Returns:
            [e, W * M, H]: the rows of each expert at the start of its slab, by source rank, then by token; the rest is
            undefined. With `use_fp8` these as float8_e4m3fn, and [e, W * M, H / 128] float32, or with `use_ue8m0`
            [e, W * M, H / 512] int32, the scales, which multiply; rows are their fast dimension. [e] int32, how many
            there are. The handle, the event, and the hook, which without `return_recv_hook` does nothing.

        Raises:
            InputError: an argument does not fit.
            ConfigError: a buffer that was not made for it, or sizes that a low-latency layer does not take.
        """
        check.tensor("x", x, 2)
        check_ids(topk_idx)
        use_fp8, round_scale = check.flag("use_fp8", use_fp8), check.flag("round_scale", round_scale)
        if use_fp8:
            check_quantizable(x, round_scale, use_ue8m0)
        elif round_scale or use_ue8m0:
            raise InputError("round_scale and use_ue8m0 are about scales, which use_fp8=False has none of. Drop them.")
        if dispatch_wait_recv_cost_stats is not None:
            raise InputError("dispatch_wait_recv_cost_stats is not filled. Pass None.")
        if async_finish and return_recv_hook:
            raise InputError("async_finish=True and return_recv_hook=True were asked for in one call. Choose one.")
        most = check.integer("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 1)
        num_experts = check.integer("num_experts", num_experts, 1)
        self._check_low_latency(most, x.shape[-1])
        kind = Kind(x.dtype, x.shape[1], topk_idx.shape[1], num_experts, self.num_sms, most, use_fp8)
        layer = self._layers.get(kind, most, self._number)
        slab = (num_experts // self.group_size, self.group_size * most)
        stats = check.optional_tensor("cumulative_local_expert_recv_stats", cumulative_local_expert_recv_stats)
        if stats is not None and (tuple(stats.shape), stats.dtype) != ((slab[0],), torch.int32):
            raise InputError(
                f"cumulative_local_expert_recv_stats must be [{slab[0]}] int32, got {list(stats.shape)} {stats.dtype}."
            )
        slabs = _Slabs(slab, x, use_fp8, use_ue8m0)

        def send() -> tuple[EPAllToAllLayoutDesc, Callable[[], None]]:
            if use_fp8:
                data, scales = quantize_rows(x, round_scale, use_ue8m0)
                sent = data, scale_bytes(scales, x.shape[1])
                *flat, _, desc, hook = layer.dispatch_scaled(*sent, topk_idx, return_recv_hook=True)
            else:
                *flat, _, desc, hook = layer.dispatch(x, topk_idx, return_recv_hook=True)

            def receive() -> None:
                hook()
                counts = desc.num_recv_tokens_per_expert
                slabs.fill(flat, desc.expert_offsets, counts)
                if stats is not None:
                    stats.add_(counts)

            return desc, receive

        desc, event, hook = _run(layer, send, (x, topk_idx, *slabs.tensors), async_finish, return_recv_hook)
        handle = LowLatencyHandle(layer, desc, kind)
        return slabs.result, desc.num_recv_tokens_per_expert, handle, event, hook

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
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None]]:
        """Bring slabs back, weigh and sum them per token. Collective; the host waits for nothing.

        Rows are weighed and summed in float32 on the experts' rank, in k order, rounded for their way, and the sums of
        the ranks are added in float32. The weights travel first, in a small dispatch of their own.

        Args:
            x: [e, W * M, H], outputs for the rows of that dispatch; contiguous.
            topk_idx: [T, K] of that dispatch.
            topk_weights: [T, K] float32, contiguous.
            handle: of that dispatch.
            use_logfmt: must be False.
            zero_copy: changes nothing: `x` may be what `get_next_low_latency_combine_buffer` lent, or not.
            async_finish, return_recv_hook: as in `low_latency_dispatch`.
            out: [T, H], for the result.

        Returns:
            [T, H], the event, and the hook.

        Raises:
            InputError: an argument does not fit.
            StaleHandleError: no handle of a low-latency dispatch.
        """
        self._check_handle(handle)
        if use_logfmt:
            raise InputError("low_latency_combine sends rows as they are. Pass use_logfmt=False.")
        if combine_wait_recv_cost_stats is not None:
            raise InputError("combine_wait_recv_cost_stats is not filled. Pass None.")
        if async_finish and return_recv_hook:
            raise InputError("async_finish=True and return_recv_hook=True were asked for in one call. Choose one.")
        layer, desc, kind = handle.layer, handle.layout_desc, handle.kind
        check.tensor("x", x)
        check.tensor("topk_idx", topk_idx, 2)
        check.optional_tensor("out", out)
        experts = desc.num_recv_tokens_per_expert.shape[0]
        wanted = (experts, self.group_size * kind.max_tokens, kind.hidden)
        if tuple(x.shape) != wanted or x.dtype != kind.dtype or not x.is_contiguous():
            raise InputError(f"x must be {list(wanted)} {kind.dtype}, contiguous; got {list(x.shape)} {x.dtype}.")
        ids = desc.topk_indices_tensor
        if topk_idx.shape != ids.shape:
            raise InputError(f"topk_idx is {list(topk_idx.shape)}, that of the dispatch was {list(ids.shape)}.")
        if out is not None and (tuple(out.shape) != (ids.shape[0], kind.hidden) or out.dtype != kind.dtype):
            raise InputError(
                f"out must be [{ids.shape[0]}, {kind.hidden}] {kind.dtype}, got {list(out.shape)} {out.dtype}."
            )
        companion = self._layers.get(
            kind._replace(dtype=torch.bfloat16, hidden=_WEIGHTS_HIDDEN, scaled=False), kind.max_tokens, self._number
        )

        def send() -> tuple[torch.Tensor, Callable[[], None]]:
            flat = from_slabs(x, desc.expert_offsets, desc.num_recv_tokens_per_expert, desc.num_recv_rows)
            nothing = torch.zeros(ids.shape[0], _WEIGHTS_HIDDEN, dtype=torch.bfloat16, device=x.device)
            _, weights, _ = companion.dispatch(nothing, ids, topk_weights)
            combined, hook = layer.combine(flat, desc, weights, return_recv_hook=True)

            def receive() -> None:
                hook()
                if out is not None:
                    out.copy_(combined)

            return combined if out is None else out, receive

        tensors = (x, topk_weights, desc) if out is None else (x, topk_weights, desc, out)
        result, event, hook = _run(layer, send, tensors, async_finish, return_recv_hook)
        return result, event, hook

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """[e, W * M, H], uninitialised, for the outputs that `low_latency_combine` takes.

        Raises:
            StaleHandleError: no handle of a low-latency dispatch.
        """
        self._check_handle(handle)
        kind, experts = handle.kind, handle.layout_desc.num_recv_tokens_per_expert.shape[0]
        shape = (experts, self.group_size * kind.max_tokens, kind.hidden)
        return torch.empty(shape, dtype=kind.dtype, device=handle.layout_desc.placement.device)

    def _check_handle(self, handle: Any) -> None:
        self._check_open()
        if not isinstance(handle, LowLatencyHandle):
            raise StaleHandleError(f"a handle of low_latency_dispatch is needed, got {type(handle).__name__}.")

    def _check_low_latency(self, max_tokens: int, hidden: int) -> None:
        self._check_open()
        max_tokens = check.integer("num_max_dispatch_tokens_per_rank", max_tokens, 1)
        hidden = check.integer("hidden", hidden, 1)
        if not self.low_latency_mode:
            raise ConfigError("low-latency calls need a Buffer made with low_latency_mode=True. Make one on all ranks.")
        needed = low_latency_bytes(max_tokens, hidden, self.group_size)
        if self.num_rdma_bytes < needed:
            raise ConfigError(
                f"{max_tokens} tokens of {hidden} elements per rank need {needed} bytes, this Buffer was made with "
                f"num_rdma_bytes={self.num_rdma_bytes}. Make one with what get_low_latency_rdma_size_hint says."
            )

    def _check_open(self) -> None:
        """Raise if the buffer was destroyed."""
        if self._closed:
            raise FinalizedError(
                "this Buffer was destroyed, its memory is freed. Make a new one on all ranks of its group."
            )


class _Slabs:
    """Memory for the rows of each expert at a fixed place, and with `use_fp8` for their scales.

    Attributes:
        result: what the call returns: [e, n, H], or with `use_fp8` that and the scales.
        tensors: the same as a tuple.
    """

    def __init__(self, slab: tuple[int, int], x: torch.Tensor, use_fp8: bool, use_ue8m0: bool) -> None:
        experts, rows = slab
        self.result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
        if not use_fp8:
            self.result = torch.empty(*slab, x.shape[1], dtype=x.dtype, device=x.device)
            self.tensors: tuple[torch.Tensor, ...] = (self.result,)
            return
        data = torch.empty(*slab, x.shape[1], dtype=torch.float8_e4m3fn, device=x.device)
        columns, dtype = x.shape[1] // CHANNELS, torch.float32
        if use_ue8m0:
            columns, dtype = columns // 4, torch.int32
        scales = torch.empty(experts, columns, rows, dtype=dtype, device=x.device).transpose(1, 2)
        self.result = self.tensors = (data, scales)

    def fill(self, flat: list[torch.Tensor], offsets: torch.Tensor, counts: torch.Tensor) -> None:
        """Copy expert-major rows [R, H], and with `use_fp8` bytes of scales [R, H / 32], to their slabs."""
        rows, *sent = flat
        if isinstance(self.result, torch.Tensor):
            to_slabs(rows, offsets, counts, self.result)
            return
        data, scales = self.result
        to_slabs(rows, offsets, counts, data)
        row_major = torch.empty(*data.shape[:2], sent[0].shape[1], dtype=torch.uint8, device=data.device)
        to_slabs(sent[0], offsets, counts, row_major)
        scales.copy_(scales_of_bytes(row_major, scales.shape[2], scales.dtype))


def _run(
    layer: EPAll2AllLayer,
    send: Callable[[], tuple[Any, Callable[[], None]]],
    arguments: tuple[object, ...],
    async_finish: bool,
    return_recv_hook: bool,
) -> tuple[Any, EventOverlap, Callable[[], None]]:
    """What the sending half returns, the event, and the hook; without a hook the receiving half has been launched."""
    if return_recv_hook:
        result, receive = send()
        return result, EventOverlap(), receive

    def both() -> Any:
        result, receive = send()
        receive()
        return result

    if not async_finish:
        return both(), EventOverlap(), _no_hook
    result, event = layer.on_comm_stream(both, arguments)
    return result, to_overlap(event), _no_hook


def _no_hook() -> None:
    """What has been received needs no second half."""
