"""The DeepEP half of megatron.core.transformer.moe.fused_a2a: autograd functions over one Buffer."""

from __future__ import annotations

from array import array
from typing import Any

import torch

from triton_ep.distributed import check_group
from triton_ep.errors import ConfigError
from triton_ep.integrations import arguments as check
from triton_ep.integrations.deep_ep import Buffer, EventHandle, EventOverlap
from triton_ep.integrations.deep_ep.config import longest_row
from triton_ep.integrations.deep_ep.handles import DispatchHandle

_buffer: Buffer | None = None


def get_hidden_bytes(x: torch.Tensor) -> int:
    """Bytes of a row of x [T, H], with at least 2 bytes per element.

    Raises:
        InputError: x is no such tensor.
    """
    check.tensor("x", x, 2)
    return x.size(1) * max(x.element_size(), 2)


def get_buffer(group: Any, hidden_bytes: int) -> Buffer:
    """The buffer of this process. It is made if there is none, or replaced if it has another group or shorter rows.

    Handles of the replaced buffer stay valid.

    Raises:
        ConfigError: an unknown group, or one that this process is not in.
    """
    global _buffer
    hidden_bytes = check.integer("hidden_bytes", hidden_bytes, 1, ConfigError)
    if (
        _buffer is not None
        and _buffer.is_open
        and _buffer.group is group
        and longest_row(_buffer.num_nvl_bytes, _buffer.group_size) >= hidden_bytes
    ):
        return _buffer
    ranks = check_group(group)
    configs = (Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks))
    _buffer = Buffer(group, max(config.get_nvl_buffer_size_hint(hidden_bytes, ranks) for config in configs), 0)
    return _buffer


def _previous(async_finish: bool) -> EventOverlap | None:
    return EventOverlap(EventHandle()) if async_finish else None


class FusedDispatch(torch.autograd.Function):
    """Send one row per (token, rank) to the ranks of the experts. Collective, and so is the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        token_indices: torch.Tensor,
        token_probs: torch.Tensor,
        num_experts: int,
        group: Any,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, DispatchHandle]:
        """Dispatch.

        Args:
            x: [T, H], contiguous.
            token_indices: [T, K] int64 or int32; -1 = dropped.
            token_probs: [T, K] float32.
            num_experts: over all ranks of the group.
            async_finish: run on the communication stream; the current stream then waits for it.
            allocate_on_comm_stream: no effect.

        Returns:
            recv_x [R, H], by source rank, then by token; [R, K] local expert ids, -1 = another rank's; [R, K] float32
            probabilities; rows per local expert, int64 on the CPU; the handle.

        Raises:
            What `integrations.deep_ep.Buffer.dispatch` raises.
        """
        num_experts = check.integer("num_experts", num_experts, 1)
        buffer = get_buffer(group, get_hidden_bytes(x))
        rows, handle = buffer.dispatch_rows(
            x,
            token_indices,
            token_probs,
            num_experts,
            previous_event=_previous(async_finish),
            async_finish=async_finish,
        )
        if rows.event is not None:
            rows.event.current_stream_wait()
        ctx.group, ctx.handle, ctx.async_finish = group, handle, async_finish
        assert rows.num_recv_tokens_per_expert is not None, "the host waited for them"
        # A third of the time of torch.tensor.
        tokens_per_expert = torch.frombuffer(array("q", rows.num_recv_tokens_per_expert), dtype=torch.int64)
        ctx.mark_non_differentiable(rows.topk_idx, tokens_per_expert)
        return rows.x, rows.topk_idx, rows.topk_weights, tokens_per_expert, handle

    @staticmethod
    def backward(
        ctx: Any,
        grad_output: torch.Tensor,
        grad_token_indices: Any,
        grad_token_probs: torch.Tensor,
        grad_tokens_per_expert: Any,
        grad_handle: Any,
    ) -> tuple[Any, ...]:
        """Gradients of x, summed over ranks in float32, and of the probabilities, exact per slot."""
        buffer = get_buffer(ctx.group, get_hidden_bytes(grad_output))
        with ctx.handle.layer.context.backward_pass():
            grad_x, grad_probs, event = buffer.combine(
                grad_output.contiguous(),
                ctx.handle,
                topk_weights=grad_token_probs.float().contiguous() if ctx.needs_input_grad[2] else None,
                previous_event=_previous(ctx.async_finish),
                async_finish=ctx.async_finish,
            )
        if ctx.async_finish:
            event.current_stream_wait()
        return grad_x, None, grad_probs, None, None, None, None


class FusedCombine(torch.autograd.Function):
    """Send rows back to their tokens and sum them over ranks. Collective, and so is the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        group: Any,
        handle: DispatchHandle,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None]:
        """Combine x [R, H], one row per row of the dispatch that the handle is of: [T, H], and None.

        Raises:
            What `integrations.deep_ep.Buffer.combine` raises.
        """
        buffer = get_buffer(group, get_hidden_bytes(x))
        combined, _, event = buffer.combine(
            x, handle, previous_event=_previous(async_finish), async_finish=async_finish
        )
        if async_finish:
            event.current_stream_wait()
        ctx.group, ctx.handle, ctx.async_finish = group, handle, async_finish
        return combined, None

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor, previous_event: Any = None) -> tuple[Any, ...]:
        """Send each token's gradient to the ranks that sent rows for it; the host does not wait."""
        buffer = get_buffer(ctx.group, get_hidden_bytes(grad_output))
        with ctx.handle.layer.context.backward_pass():
            grad_x, *_, event = buffer.dispatch(
                grad_output.contiguous(),
                handle=ctx.handle,
                previous_event=_previous(ctx.async_finish),
                async_finish=ctx.async_finish,
            )
        if ctx.async_finish:
            event.current_stream_wait()
        return grad_x, None, None, None, None


def fused_dispatch(
    x: torch.Tensor,
    token_indices: torch.Tensor,
    token_probs: torch.Tensor,
    num_experts: int,
    group: Any,
    async_finish: bool = False,
    allocate_on_comm_stream: bool = False,
) -> Any:
    """`FusedDispatch`, differentiable in x and token_probs."""
    check.tensor("x", x, 2)
    return FusedDispatch.apply(
        x.contiguous(), token_indices, token_probs, num_experts, group, async_finish, allocate_on_comm_stream
    )


def fused_combine(
    x: torch.Tensor,
    group: Any,
    handle: DispatchHandle,
    async_finish: bool = False,
    allocate_on_comm_stream: bool = False,
) -> Any:
    """`FusedCombine`, differentiable in x: the combined rows, and None."""
    return FusedCombine.apply(x, group, handle, async_finish, allocate_on_comm_stream)


def set_deepep_num_sms(num_sms: int) -> None:
    """CTAs of the communication kernels, an even number."""
    Buffer.set_num_sms(num_sms)
