"""The HybridEP half of megatron.core.transformer.moe.fused_a2a: autograd functions over one HybridEPBuffer.

    megatron                                    here
    _hybrid_ep_buffer                           the same: one buffer per process, created by the first dispatch
    init_hybrid_ep_buffer(group, hidden_dim,    HybridEPBuffer; replaces and frees the previous one
      num_tokens or seq_len, ...)
    reset_hybrid_ep_buffer()                    frees it; collective
    hybrid_ep_dispatch / HybridEPDispatch       HybridEPBuffer.dispatch_with_permute; backward combine_with_unpermute
    hybrid_ep_combine / HybridEPCombine         HybridEPBuffer.combine_with_unpermute; backward dispatch_with_permute
                                                  with the handle, without the host

A group or hidden size other than the buffer's is an error; no second buffer is created.

Source: megatron/core/transformer/moe/fused_a2a.py; docs/how-to/hybrid-ep.md has both argument lists.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from triton_ep.distributed import check_group
from triton_ep.errors import ConfigError, FinalizedError, InputError
from triton_ep.integrations import arguments as check
from triton_ep.integrations.hybrid_ep import HybridEPBuffer
from triton_ep.integrations.hybrid_ep.handle import backward_pass
from triton_ep.runtime.untraced import untraced

__all__ = [
    "HybridEPCombine",
    "HybridEPDispatch",
    "hybrid_ep_combine",
    "hybrid_ep_dispatch",
    "init_hybrid_ep_buffer",
    "reset_hybrid_ep_buffer",
]

_hybrid_ep_buffer: HybridEPBuffer | None = None


def init_hybrid_ep_buffer(
    group: Any,
    hidden_dim: int,
    num_tokens: int | None = None,
    num_local_experts: int | None = None,
    num_sms_dispatch_api: int | None = None,
    num_sms_combine_api: int | None = None,
    num_blocks_permute: int | bool | None = None,
    num_blocks_unpermute: int | None = None,
    fp8_dispatch: bool = False,
    num_sms_preprocessing_api: int | None = None,
    *,
    seq_len: int | None = None,
    topk: int | None = None,
) -> None:
    """Create the buffer of this process. Collective; frees an existing buffer.

    Args:
        group: process group for HybridEP.
        hidden_dim: elements per row.
        num_tokens: tokens per rank of the first memory allocation; `seq_len` is its older name.
        num_local_experts: experts of this rank.
        num_sms_dispatch_api, num_sms_combine_api: CTAs of the communication kernels; None: as tuned.
        fp8_dispatch: must be False. It was the seventh argument of the older list, so a bool in seventh place is taken
            as `fp8_dispatch`.
        topk: most experts per token, saves the ranks a collective (`HybridEPBuffer`); Megatron does not pass it.

    Raises:
        ConfigError: fp8_dispatch=True, an unknown group, sizes that cannot work.
        InputError: both or neither of num_tokens and seq_len; no num_local_experts.
    """
    global _hybrid_ep_buffer
    if isinstance(num_blocks_permute, bool):
        fp8_dispatch = num_blocks_permute
    if fp8_dispatch:
        raise ConfigError(
            "fp8_dispatch=True: hybrid_ep_dispatch takes rows without scales. Pass False; HybridEPBuffer(use_fp8=True) "
            "sends one-byte rows with scales."
        )
    if (num_tokens is None) == (seq_len is None):
        raise InputError(f"pass num_tokens or, its older name, seq_len; they are {num_tokens} and {seq_len}.")
    tokens = num_tokens if num_tokens is not None else seq_len
    if num_local_experts is None or tokens is None:
        raise InputError("num_local_experts is needed: the experts of this rank.")
    # Check first: if the arguments are refused, the existing buffer stays.
    check_group(group)
    for name, size in (("hidden_dim", hidden_dim), ("num_tokens", tokens), ("num_local_experts", num_local_experts)):
        check.integer(name, size, 1, ConfigError)
    reset_hybrid_ep_buffer()
    _hybrid_ep_buffer = HybridEPBuffer(
        group,
        hidden_dim,
        tokens,
        num_local_experts,
        num_sms_dispatch_api=num_sms_dispatch_api,
        num_sms_combine_api=num_sms_combine_api,
        topk=topk,
    )


def reset_hybrid_ep_buffer() -> None:
    """Free the buffer of this process, if any. Collective; the next dispatch creates another."""
    global _hybrid_ep_buffer
    if _hybrid_ep_buffer is not None:
        _hybrid_ep_buffer.close()
    _hybrid_ep_buffer = None


def _buffer_of(handle: Any) -> HybridEPBuffer:
    """The existing buffer, for a call with a handle: a new buffer could not serve it."""
    if _hybrid_ep_buffer is None:
        raise FinalizedError(
            "no HybridEP buffer exists: the buffer of this handle was freed by reset_hybrid_ep_buffer(), or no "
            "dispatch has been called. Reset it after the last backward pass."
        )
    return _hybrid_ep_buffer


def _check_same_group(buffer: HybridEPBuffer, group: Any) -> None:
    check_group(group)
    held, given = (dist.get_process_group_ranks(g) for g in (buffer.group, group))
    if held != given:
        raise ConfigError(
            f"hybrid_ep_dispatch got a group of ranks {given}, but the HybridEP buffer has ranks {held}. Call "
            "reset_hybrid_ep_buffer() and init_hybrid_ep_buffer() with the other group, on all its ranks."
        )


def _settings(rest: tuple[Any, ...]) -> dict[str, Any]:
    """Name the arguments after num_local_experts: the current list of 8, or the older list of up to 4."""
    names: tuple[str, ...]
    if len(rest) > 4:
        names = ("dispatch", "combine", "permute", "unpermute", "fused", "budget", "pad_multiple", "preprocessing")
    else:
        names = ("dispatch", "combine", "budget", "pad_multiple")
    if len(rest) > len(names):
        raise InputError(f"HybridEPDispatch takes at most {5 + len(names)} arguments, got {5 + len(rest)}.")
    return dict(zip(names, rest, strict=False))


class HybridEPDispatch(torch.autograd.Function):
    """`HybridEPBuffer.dispatch_with_permute`, differentiable in x and probs. Collective, and so is its backward pass.

    `apply` takes the current 13 arguments, or the older 9: (x, routing_map, probs, group, num_local_experts,
    num_sms_dispatch_api, num_sms_combine_api, num_permuted_tokens, pad_multiple). See `hybrid_ep_dispatch`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        routing_map: torch.Tensor,
        probs: torch.Tensor | None,
        group: Any,
        num_local_experts: int,
        *rest: Any,
    ) -> tuple[Any, ...]:
        """Returns (hidden [P, H], probs [P] or None, None, tokens_per_expert [e] int64, handle)."""
        settings = _settings(rest)
        if _hybrid_ep_buffer is None:
            programs = (settings.get("dispatch"), settings.get("combine"))
            check.tensor("x", x, 2)
            init_hybrid_ep_buffer(group, x.shape[-1], max(x.shape[-2], 1), num_local_experts, *programs)
        assert _hybrid_ep_buffer is not None
        _check_same_group(_hybrid_ep_buffer, group)
        budget, ctx.pad_multiple = settings.get("budget"), settings.get("pad_multiple")
        result = _hybrid_ep_buffer.dispatch_with_permute(
            hidden=x,
            routing_map=routing_map,
            probs=probs,
            num_of_experts_per_rank=num_local_experts,
            pad_multiple=ctx.pad_multiple,
            num_permuted_tokens=budget,
            non_blocking=budget is not None,
        )
        ctx.handle, ctx.num_inputs, ctx.with_probs = result[-1], 5 + len(rest), probs is not None
        ctx.mark_non_differentiable(result[3])
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x [T, H] and of probs [T, E], the latter exact in float32."""
        buffer = _buffer_of(ctx.handle)
        with backward_pass(ctx.handle):
            grad_x, grad_probs = buffer.combine_with_unpermute(
                hidden=grads[0],
                probs=grads[1].float() if ctx.with_probs else None,
                handle=ctx.handle,
                pad_multiple=ctx.pad_multiple,
            )
        return (grad_x, None, grad_probs, *[None] * (ctx.num_inputs - 3))


class HybridEPCombine(torch.autograd.Function):
    """`HybridEPBuffer.combine_with_unpermute`, differentiable in x. Collective, and so is its backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        handle: Any,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        fused: bool = False,
    ) -> torch.Tensor:
        """Returns [T, H]."""
        out, _ = _buffer_of(handle).combine_with_unpermute(hidden=x, handle=handle, pad_multiple=pad_multiple)
        ctx.handle, ctx.pad_multiple, ctx.num_permuted_tokens = handle, pad_multiple, num_permuted_tokens
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradient of x [P, H]; with a budget, rows past the last expert's are undefined."""
        buffer = _buffer_of(ctx.handle)
        with backward_pass(ctx.handle):
            grad, *_ = buffer.dispatch_with_permute(
                hidden=grads[0],
                handle=ctx.handle,
                pad_multiple=ctx.pad_multiple,
                num_permuted_tokens=ctx.num_permuted_tokens,
            )
        return grad, None, None, None, None


@untraced("an exchange between ranks")
def hybrid_ep_dispatch(
    x: torch.Tensor,
    routing_map: torch.Tensor,
    probs: torch.Tensor | None,
    group: Any,
    num_local_experts: int,
    num_sms_dispatch_api: int | None = None,
    num_sms_combine_api: int | None = None,
    num_blocks_permute: int | None = None,
    num_blocks_unpermute: int | None = None,
    fused: bool = False,
    num_permuted_tokens: int | None = None,
    pad_multiple: int | None = None,
    num_sms_preprocessing_api: int | None = None,
) -> tuple[Any, ...]:
    """Send rows to their experts, grouped by expert and padded. Collective.

    Args:
        x: [T, H].
        routing_map: [T, E] bool. probs: [T, E] float32.
        group, num_local_experts: as for `init_hybrid_ep_buffer`, which the first call runs.
        num_permuted_tokens: budget of rows; the host then does not wait. None: the number of rows received.
        pad_multiple: each expert's rows are padded with zero rows to a multiple of this.

    Returns:
        (hidden [P, H], probs [P], None, tokens_per_expert [e] int64, handle); handle[-1] is not zero if the budget
        was too small.

    Raises:
        ConfigError: a group other than the buffer's. Others: as `HybridEPBuffer.dispatch_with_permute`.
    """
    result: tuple[Any, ...] = HybridEPDispatch.apply(
        x,
        routing_map,
        probs,
        group,
        num_local_experts,
        num_sms_dispatch_api,
        num_sms_combine_api,
        num_blocks_permute,
        num_blocks_unpermute,
        fused,
        num_permuted_tokens,
        pad_multiple,
        num_sms_preprocessing_api,
    )
    return result


@untraced("an exchange between ranks")
def hybrid_ep_combine(
    x: torch.Tensor,
    handle: Any,
    num_permuted_tokens: int | None = None,
    pad_multiple: int | None = None,
    fused: bool = False,
) -> torch.Tensor:
    """Send expert outputs [P, H] back and sum them per token: [T, H]. Collective.

    Raises:
        FinalizedError: the buffer was freed. Others: as `HybridEPBuffer.combine_with_unpermute`.
    """
    out: torch.Tensor = HybridEPCombine.apply(x, handle, num_permuted_tokens, pad_multiple, fused)
    return out
