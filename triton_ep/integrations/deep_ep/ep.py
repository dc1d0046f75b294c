"""deep_ep.EPBuffer, which DeepEP's main branch has in place of ElasticBuffer: the same calls with other arguments."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from triton_ep.errors import ConfigError, InputError
from triton_ep.integrations import arguments as check
from triton_ep.integrations.deep_ep.elastic import Dispatched, ElasticBuffer
from triton_ep.integrations.deep_ep.elastic_handle import EPHandle
from triton_ep.integrations.deep_ep.utils import EventHandle, EventOverlap

__all__ = ["EPBuffer", "EPHandle"]


class EPBuffer(ElasticBuffer):
    """Dispatch and combine in the calling convention of DeepEP's main branch. Calls are collective.

    Args:
        lb_allocation_plan_or_num_bytes: must be 0: experts with copies on several ranks are not served.
        Others, errors and letters: as `ElasticBuffer`.

    Source: deep_ep/buffers/ep.py of DeepEP at 13b3aba.
    """

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        lb_allocation_plan_or_num_bytes: Any = 0,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int | None = None,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: float = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        if lb_allocation_plan_or_num_bytes != 0:
            raise ConfigError("lb_allocation_plan_or_num_bytes is for copies of experts, which are not served. Pass 0.")
        super().__init__(
            group,
            num_bytes,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            hidden=hidden,
            num_topk=num_topk,
            use_fp8_dispatch=use_fp8_dispatch,
            deterministic=deterministic,
            allow_hybrid_mode=allow_hybrid_mode,
            allow_multiple_reduction=allow_multiple_reduction,
            prefer_overlap_with_compute=prefer_overlap_with_compute,
            num_allocated_qps=num_allocated_qps,
            num_cpu_timeout_secs=num_cpu_timeout_secs,
            num_gpu_timeout_secs=num_gpu_timeout_secs,
            explicitly_destroy=explicitly_destroy,
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("lb_"):
            raise AttributeError(f"EPBuffer.{name} is not supported: each expert is on one rank.")
        super().__getattr__(name)

    def dispatch(  # type: ignore[override]
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
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = False,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        defer_epilogue: bool = False,
    ) -> Dispatched | EventOverlap:
        """`ElasticBuffer.dispatch`, whose handle refers to `topk_idx`: do not change these ids while it is in use.

        Args:
            do_handle_copy: must be False.
            defer_epilogue: return the event alone, whose `current_stream_wait()` returns (recv_x, recv_topk_idx,
                recv_topk_weights, handle); needs `async_with_compute_stream`. Rows are laid out as they arrive, on the
                communication stream, and the host waits for the counts in this call: nothing is left for later.
            Others, results and errors: as `ElasticBuffer.dispatch`.
        """
        if check.flag("do_handle_copy", do_handle_copy):
            raise InputError("do_handle_copy must be False: EPBuffer's handles refer to topk_idx. Pass a copy of it.")
        deferred = _deferred(defer_epilogue, async_with_compute_stream)
        *results, event = super().dispatch(
            x,
            topk_idx,
            topk_weights,
            cumulative_local_expert_recv_stats,
            num_experts,
            num_max_tokens_per_rank,
            expert_alignment,
            num_sms,
            num_qps,
            previous_event,
            async_with_compute_stream=async_with_compute_stream,
            allocate_on_comm_stream=allocate_on_comm_stream,
            handle=handle,
            do_handle_copy=False,
            do_cpu_sync=do_cpu_sync,
            do_expand=do_expand,
            do_zero_padding=do_zero_padding,
            use_tma_aligned_col_major_sf=use_tma_aligned_col_major_sf,
        )
        if deferred:
            return _later(event, tuple(results))
        recv_x, ids, weights, made = results
        return recv_x, ids, weights, made, event

    def combine(  # type: ignore[override]
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        defer_epilogue: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap] | EventOverlap:
        """`ElasticBuffer.combine`.

        Args:
            defer_epilogue: return the event alone, whose `current_stream_wait()` returns (combined_x,
                combined_topk_weights); needs `async_with_compute_stream`.
            Others, results and errors: as `ElasticBuffer.combine`.
        """
        deferred = _deferred(defer_epilogue, async_with_compute_stream)
        out, weights, event = super().combine(
            x,
            handle,
            topk_weights,
            bias,
            num_sms,
            num_qps,
            previous_event,
            async_with_compute_stream=async_with_compute_stream,
            allocate_on_comm_stream=allocate_on_comm_stream,
        )
        return _later(event, (out, weights)) if deferred else (out, weights, event)


def _deferred(defer_epilogue: bool, asynchronous: bool) -> bool:
    deferred = check.flag("defer_epilogue", defer_epilogue)
    if deferred and not check.flag("async_with_compute_stream", asynchronous):
        raise InputError("defer_epilogue=True needs async_with_compute_stream=True.")
    return deferred


def _later(event: EventOverlap, results: tuple[Any, ...]) -> EventOverlap:
    """The event, whose first wait returns the results."""
    event.register_hook_after_wait(lambda: results)
    return event
