"""Re-implementation of Megatron-Core's flex dispatcher, call by call: its fused_a2a functions over the module that
`import deep_ep` finds, and the steps of its DeepEP manager around them.
"""

from dataclasses import dataclass
from typing import Any

import torch

_buffer: Any = None


def get_buffer(group: Any, hidden_bytes: int) -> Any:
    """The buffer of this process, replaced if it has another group or is too small."""
    from deep_ep import Buffer

    global _buffer
    ranks = group.size()
    configs = (Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks))
    nvl = max(config.get_nvl_buffer_size_hint(hidden_bytes, ranks) for config in configs)
    rdma = max(config.get_rdma_buffer_size_hint(hidden_bytes, ranks) for config in configs)
    if _buffer is None or _buffer.group != group or _buffer.num_nvl_bytes < nvl or _buffer.num_rdma_bytes < rdma:
        _buffer = Buffer(group, nvl, rdma)
    return _buffer


def forget_buffer() -> None:
    """Drop the buffer without destroying it, as a process does when it ends."""
    global _buffer
    _buffer = None


def _row_bytes(x: torch.Tensor) -> int:
    return x.size(1) * max(x.element_size(), 2)


class Dispatch(torch.autograd.Function):
    """Layout, then dispatch; the backward pass is a combine that carries the gradient of the probabilities."""

    @staticmethod
    def forward(ctx: Any, x: Any, idx: Any, probs: Any, num_experts: int, group: Any, asynchronous: bool) -> Any:
        """Returns recv_x, recv_idx, recv_probs, tokens per expert on the CPU, handle."""
        from deep_ep.utils import EventHandle, EventOverlap

        buffer = get_buffer(group, _row_bytes(x))
        order = {"async_finish": asynchronous, "allocate_on_comm_stream": asynchronous}
        previous = EventOverlap(EventHandle()) if asynchronous else None
        per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
            idx, num_experts, previous_event=previous, **order
        )
        recv_x, recv_idx, recv_probs, counts, handle, after = buffer.dispatch(
            x,
            topk_idx=idx,
            topk_weights=probs,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=event,
            **order,
        )
        if asynchronous:
            after.current_stream_wait()
        ctx.group, ctx.handle, ctx.order = group, handle, order
        return recv_x, recv_idx, recv_probs, torch.tensor(counts), handle

    @staticmethod
    def backward(ctx: Any, grad_x: Any, grad_idx: Any, grad_probs: Any, grad_counts: Any, grad_handle: Any) -> Any:
        """Gradients of x and of the probabilities."""
        from deep_ep.utils import EventHandle, EventOverlap

        asynchronous = ctx.order["async_finish"]
        grad, grad_probs, after = get_buffer(ctx.group, _row_bytes(grad_x)).combine(
            grad_x.contiguous(),
            ctx.handle,
            topk_weights=grad_probs.float(),
            previous_event=EventOverlap(EventHandle()) if asynchronous else None,
            **ctx.order,
        )
        if asynchronous:
            after.current_stream_wait()
        return grad, None, grad_probs, None, None, None


class Combine(torch.autograd.Function):
    """Combine; the backward pass is a dispatch with the handle."""

    @staticmethod
    def forward(ctx: Any, x: Any, group: Any, handle: Any, asynchronous: bool) -> Any:
        """The rows of this rank's tokens."""
        from deep_ep.utils import EventHandle, EventOverlap

        order = {"async_finish": asynchronous, "allocate_on_comm_stream": asynchronous}
        previous = EventOverlap(EventHandle()) if asynchronous else None
        out, _, after = get_buffer(group, _row_bytes(x)).combine(x, handle=handle, previous_event=previous, **order)
        if asynchronous:
            after.current_stream_wait()
        ctx.group, ctx.handle, ctx.order = group, handle, order
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """The gradient of the rows."""
        from deep_ep.utils import EventHandle, EventOverlap

        asynchronous = ctx.order["async_finish"]
        rows, _, _, _, _, after = get_buffer(ctx.group, _row_bytes(grad)).dispatch(
            grad.contiguous(),
            handle=ctx.handle,
            previous_event=EventOverlap(EventHandle()) if asynchronous else None,
            **ctx.order,
        )
        if asynchronous:
            after.current_stream_wait()
        return rows, None, None, None


@dataclass
class Flex:
    """One pass of the flex dispatcher with its DeepEP manager.

    Attributes:
        group: expert-parallel group.
        num_experts, topk: experts over all ranks, and per token.
        drops: entries of probability zero are dropped (a capacity factor was set).
        pad: rows of each expert are padded to a multiple of it, by routing more tokens to it with probability 0.
    """

    group: Any
    num_experts: int
    topk: int
    drops: bool = False
    pad: int = 0
    asynchronous: bool = True

    def dispatch(self, hidden: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows by expert, their probabilities, and rows per expert, from hidden [T, H] and probs [T, E]."""
        chosen, idx = torch.topk(probs, self.topk, dim=-1)
        if self.drops:
            idx = idx.masked_fill(chosen == 0, -1)
        rows, row_idx, row_probs, counts, self.handle = Dispatch.apply(
            hidden, idx, chosen.float(), self.num_experts, self.group, self.asynchronous
        )
        local = self.num_experts // self.group.size()
        routing = torch.zeros(rows.shape[0], local, dtype=torch.bool, device=rows.device)
        dense = torch.zeros(rows.shape[0], local, device=rows.device)
        token, k = torch.nonzero(row_idx != -1, as_tuple=True)
        routing[token, row_idx[token, k]] = True
        dense = dense.index_put((token, row_idx[token, k]), row_probs[token, k])
        if self.pad:
            target = torch.ceil(counts / self.pad).long() * self.pad
            if bool((target <= rows.shape[0]).all()):
                spare = (~routing).cumsum(0) <= (target.to(rows.device) - routing.sum(0))
                routing, counts = routing | spare, target
        expert, self.source = torch.nonzero(routing.T, as_tuple=True)
        self.num_rows = rows.shape[0]
        return rows[self.source], dense[self.source, expert], counts

    def combine(self, outputs: torch.Tensor) -> torch.Tensor:
        """Rows of this rank's tokens, from one output per dispatched row."""
        rows = outputs.new_zeros(self.num_rows, outputs.shape[1]).index_add(0, self.source, outputs)
        return Combine.apply(rows, self.group, self.handle, self.asynchronous)
