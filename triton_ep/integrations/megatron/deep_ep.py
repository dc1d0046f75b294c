"""The DeepEP half of megatron.core.transformer.moe.fused_a2a: autograd functions over one Buffer."""

from __future__ import annotations

from typing import Any

import torch

from triton_ep.distributed import check_group
from triton_ep.errors import ConfigError
from triton_ep.integrations import arguments as check
from triton_ep.integrations.deep_ep import Buffer
from triton_ep.integrations.deep_ep.handles import DispatchHandle
from triton_ep.integrations.host_counts import HostCounts
from triton_ep.runtime.untraced import untraced

_buffer: Buffer | None = None
_counts = HostCounts()


def get_hidden_bytes(x: torch.Tensor) -> int:
    """Bytes of a row of x [T, H], with at least 2 bytes per element.

    Raises:
        InputError: x is no tensor [T, H].
    """
    check.tensor("x", x, 2)
    return x.size(1) * max(x.element_size(), 2)


def get_buffer(group: Any, hidden_bytes: int) -> Buffer:
    """The buffer of this process: created at first use, and replaced if it has another group or shorter rows.

    Handles of a replaced buffer stay valid.

    Raises:
        ConfigError: an unknown group, or a group without this process.
    """
    global _buffer
    hidden_bytes = check.integer("hidden_bytes", hidden_bytes, 1, ConfigError)
    if _buffer is not None and _buffer.is_open and _buffer.group is group and _buffer.longest_row >= hidden_bytes:
        return _buffer
    ranks = check_group(group)
    configs = (Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks))
    _buffer = Buffer(group, max(config.get_nvl_buffer_size_hint(hidden_bytes, ranks) for config in configs), 0)
    return _buffer


def _buffer_for(x: torch.Tensor, group: Any) -> Buffer:
    """`get_buffer` for rows x."""
    if _buffer is not None and _buffer.group is group and isinstance(x, torch.Tensor) and _buffer.takes(x):
        return _buffer
    return get_buffer(group, get_hidden_bytes(x))


Dispatched = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, DispatchHandle]


def _dispatched(x: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor | None, experts: int, group: Any) -> Dispatched:
    """Compute the results of `FusedDispatch`."""
    known = _buffer is not None and _buffer.group is group and type(experts) is int
    at_once = _buffer.dispatch_at_once(x, ids, probs, experts) if _buffer is not None and known else None
    rows: Any
    if at_once is not None:
        sent, handle = at_once
        rows, counts = sent.received, sent.host_counts
    else:
        buffer = get_buffer(group, get_hidden_bytes(x))
        rows, handle = buffer.dispatch_rows(x, ids, probs, check.integer("num_experts", experts, 1))
        counts = rows.num_recv_tokens_per_expert
    assert counts is not None, "the host waited for them"
    return rows.x, rows.topk_idx, rows.topk_weights, _counts.tensor(counts), handle


def _combined(x: torch.Tensor, group: Any, handle: DispatchHandle) -> torch.Tensor:
    """Compute the rows that `FusedCombine` returns."""
    return _buffer_for(x, group).combine(x, handle)[0]


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """`function.apply`. Outside torch.func's transforms, without what torch does for them: a third of its time."""
    if torch.compiler.is_dynamo_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]


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
    ) -> Dispatched:
        """Dispatch.

        Args:
            x: [T, H], contiguous.
            token_indices: [T, K] int64 or int32; -1 = dropped.
            token_probs: [T, K] float32.
            num_experts: over all ranks of the group.
            async_finish, allocate_on_comm_stream: no effect. Megatron makes the current stream wait for the call right
                away, so the call runs on that stream, without events or a second stream.

        Returns:
            recv_x [R, H], by source rank, then by token; [R, K] local expert ids, -1 = another rank's expert; [R, K]
            float32 probabilities; rows per local expert, int64 on the CPU; the handle.

        Raises:
            As `integrations.deep_ep.Buffer.dispatch`.
        """
        found = _dispatched(x, token_indices, token_probs, num_experts, group)
        _, ids, _, tokens_per_expert, ctx.handle = found
        ctx.group = group
        ctx.set_materialize_grads(False)  # else torch would fill zeros for ids and counts in every backward pass
        ctx.mark_non_differentiable(ids, tokens_per_expert)
        return found

    @staticmethod
    def backward(
        ctx: Any,
        grad_output: torch.Tensor | None,
        grad_token_indices: Any,
        grad_token_probs: torch.Tensor | None,
        grad_tokens_per_expert: Any,
        grad_handle: Any,
    ) -> tuple[Any, ...]:
        """Gradients of x, summed over ranks in float32, and of the probabilities, exact per slot.

        Sends zeros for an output without a gradient, because other ranks may have a gradient."""
        desc, layer = ctx.handle.layout_desc, ctx.handle.layer
        if grad_output is None:
            shape, dtype = (desc.num_recv_rows, layer.config.hidden), layer.config.token_dtype
            grad_output = torch.zeros(shape, dtype=dtype, device=layer.context.device)
        weights = None
        if ctx.needs_input_grad[2]:
            if grad_token_probs is None:
                grad_token_probs = grad_output.new_zeros(desc.num_recv_rows, layer.config.topk, dtype=torch.float32)
            weights = grad_token_probs.float().contiguous()
        buffer = _buffer_for(grad_output, ctx.group)
        with layer.context.backward_pass():
            grad_x, grad_probs, _ = buffer.combine(grad_output.contiguous(), ctx.handle, topk_weights=weights)
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
        """Combine x [R, H], one row per received row of the handle's dispatch; returns [T, H] and None.

        Raises:
            As `integrations.deep_ep.Buffer.combine`.
        """
        ctx.group, ctx.handle = group, handle
        return _combined(x, group, handle), None

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor, previous_event: Any = None) -> tuple[Any, ...]:
        """Send each token's gradient to the ranks that sent rows for it; the host does not wait."""
        buffer = _buffer_for(grad_output, ctx.group)
        with ctx.handle.layer.context.backward_pass():
            grad_x, *_ = buffer.dispatch(grad_output.contiguous(), handle=ctx.handle)
        return grad_x, None, None, None, None


@untraced("an exchange between ranks")
@check.renamed(input="x", exp_indices="token_indices", weight="token_probs")
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
    if not isinstance(x, torch.Tensor) or not x.is_contiguous():
        x = check.tensor("x", x, 2).contiguous()
    if not torch.is_grad_enabled():
        return _dispatched(x, token_indices, token_probs, num_experts, group)
    return _apply(FusedDispatch, x, token_indices, token_probs, num_experts, group)


@untraced("an exchange between ranks")
def fused_combine(
    x: torch.Tensor,
    group: Any,
    handle: DispatchHandle,
    async_finish: bool = False,
    allocate_on_comm_stream: bool = False,
) -> Any:
    """`FusedCombine`, differentiable in x; returns the combined rows and None."""
    if not torch.is_grad_enabled():
        return _combined(x, group, handle), None
    return _apply(FusedCombine, x, group, handle)


def set_deepep_num_sms(num_sms: int) -> None:
    """Set the number of communication CTAs, an even number."""
    Buffer.set_num_sms(num_sms)
