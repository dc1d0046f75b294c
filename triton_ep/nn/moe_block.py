"""Dispatch, experts and combine as one step of autograd, with a backward pass that the experts write by hand.

Autograd hands a gradient to an op as a tensor of the op's input. Experts want theirs as the exchange delivers it: rows
with one scale per row. So what lies between two exchanges is inside of one function, in both directions:

    forward     dispatch x -> rows;  experts;  combine y -> out
    backward    dispatch the gradient of out again -> rows;  experts;  combine -> gradient of x;  and each row's
                gradient of its weight back to its (token, k)

Every rank makes the same calls, so gradients must be asked for the same inputs on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils import _pytree

from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.context.overlap import EPEvent, current_stream
from triton_ep.errors import InputError
from triton_ep.exchange import slots as slot_ops
from triton_ep.exchange import steps
from triton_ep.layer import EPAll2AllLayer
from triton_ep.ops.row_scales import RowScaled

Params = Sequence[torch.Tensor | None]


def _nothing(room: bool) -> None:
    """Where there is nothing to prepare."""


def _no_work(params: Params) -> None:
    """Where there is nothing to do before the rows are there."""


@dataclass(frozen=True)
class ExpertGradients:
    """What the backward pass of experts gives.

    Calls are made in the order rows, prepare (twice), params. The memory of the rows that `backward` was given is free
    before the first.

    Attributes:
        rows: computes [R, H] of the layer's dtype, of the rows that were received; rows without a copy may hold
            anything. None where it was not asked for.
        row_weights: [R] float32, of their weights, likewise.
        params: computes those of the parameters, once the gradient of the rows has been sent. None for one that needs
            none, or whose gradient has been accumulated elsewhere (Megatron's main_grad).
        prepare: for what moves memory, while the gradient of the rows is on its way; with False before, with True after
            the memory of what `rows` gave is free. A product that fills the GPU would keep the exchange from its
            multiprocessors, and with it all other ranks.
    """

    rows: Callable[[], torch.Tensor] | None
    row_weights: torch.Tensor | None
    params: Callable[[], Params]
    prepare: Callable[[bool], None] = _nothing


class Experts(Protocol):
    """The experts of this rank, between a dispatch and its combine.

    Rows are what `EPAll2AllLayer.dispatch` gives: tensors, MXTensors or `RowScaled`, by expert. Those behind
    `desc.expert_offsets[-1]` mean nothing. Both calls run without autograd.
    """

    def forward(
        self, rows: Any, row_weights: torch.Tensor, params: Params, desc: EPAllToAllLayoutDesc, keep: bool
    ) -> tuple[torch.Tensor, Any]:
        """[R, H] of the layer's dtype, weighted; and what `backward` needs, if `keep`.

        That is any nest of tuples, lists and dicts of tensors, `RowScaled` and plain values. Parameters need not be in
        it.
        """

    def backward(
        self, grad: Any, saved: Any, params: Params, desc: EPAllToAllLayoutDesc, needs: Needs
    ) -> ExpertGradients:
        """Gradients, from that of the rows that `forward` gave. Nests of `saved` may be taken apart, to free memory."""


@dataclass(frozen=True)
class Needs:
    """Which gradients are wanted: of the rows, of their weights, of each parameter.

    last: no other backward pass will take what was saved, so that it may be overwritten.
    """

    rows: bool
    row_weights: bool
    params: tuple[bool, ...]
    last: bool = False


@dataclass(frozen=True)
class MoEBlock:
    """Dispatch, experts, combine over one layer.

    Attributes:
        layer: any that is not of low latency.
        experts: what lies between.
        landing: how rows come to the experts (`EPAll2AllLayer.dispatch`).
        grad_landing: how the gradients of their results do.
        turn: around each pass, with its name: may refuse it.
        before: what the experts have to do that needs no rows, or None: done beside the dispatch of a forward pass.
    """

    layer: EPAll2AllLayer
    experts: Experts
    landing: str | None = None
    grad_landing: str | None = None
    turn: Callable[[str], AbstractContextManager[Any]] = nullcontext
    before: Callable[[Params], Callable[[], None] | None] = _no_work

    def __call__(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, params: Params
    ) -> torch.Tensor:
        """[T, H]: of each token the sum of what its experts give. Collective, and so is the backward pass.

        Arguments:
            x: [T, H] of the layer's dtype, differentiable.
            topk_idx: [T, K] int32 or int64; -1 or num_tot_experts = dropped.
            topk_weights: [T, K] float32, differentiable.
            params: for the experts, differentiable.

        Raises:
            What `EPAll2AllLayer.dispatch` and `combine` raise, and the experts. An error of experts on one rank is told
            to the others.
        """
        given = (x, topk_weights, *params)
        if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in given):
            out: torch.Tensor = _Block.apply(self, x, topk_idx, topk_weights, *params)
            return out
        out, _, _ = self._forward(x, topk_idx, topk_weights, params, keep=False)
        return out

    def _forward(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, params: Params, keep: bool
    ) -> tuple[torch.Tensor, EPAllToAllLayoutDesc, Any]:
        with self.turn("the forward pass of a MoE module"):
            rows, row_weights, desc = self._dispatch(x, topk_idx, topk_weights, self.before(params))
            y, saved = self._of_experts(self.experts.forward, rows, row_weights, params, desc, keep)
            return self.layer.combine(y, desc), desc, saved

    def _dispatch(self, *args: Any) -> tuple[Any, torch.Tensor, EPAllToAllLayoutDesc]:
        """`layer.dispatch` of all arguments but the last, which is work of the experts that needs no rows, or None."""
        *given, work = args
        if work is None:
            received: tuple[Any, torch.Tensor, EPAllToAllLayoutDesc] = self.layer.dispatch(*given, landing=self.landing)
            return received
        # Launched first, because a dispatch of exact sizes keeps the host; the exchange has a stream of high priority.
        start = EPEvent.record()
        self._of_experts(work)
        *found, arrived = self.layer.dispatch(*given, landing=self.landing, async_finish=True, previous_event=start)
        arrived.current_stream_wait()
        rows, row_weights, desc = found
        return rows, row_weights, desc

    def _of_experts(self, call: Callable[..., Any], *args: Any) -> Any:
        """What the experts return; the other ranks are about to wait for this one."""
        try:
            return call(*args)
        except Exception as error:
            self.layer.context.fail("the experts of a MoE layer", error, begun=True)
            raise

    def _backward(
        self,
        grad: torch.Tensor,
        desc: EPAllToAllLayoutDesc,
        slots: torch.Tensor | None,
        saved: Any,
        params: Params,
        needs: Needs,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, Params]:
        """Gradients of x [T, H], of topk_weights [T, K] and of the parameters.

        slots: k of the copy in each row, [R] int32; None: as the descriptor says.
        """
        layer, ctx = self.layer, self.layer.context
        with self.turn("the backward pass of a MoE module"), ctx.backward_pass():
            # Rows are more than tokens: they are dropped as soon as nothing needs them.
            grad_rows, _ = layer.dispatch_again(_as_sent(grad), desc, landing=self.grad_landing)
            found = self._of_experts(self.experts.backward, grad_rows, saved, params, desc, needs)
            del grad_rows
            grad_x, grad_weights = self._send_back(found, desc, slots, needs)
            of_params: Params = self._of_experts(found.params)
            self._join(grad_x, grad_weights)
            del found  # row weights' gradients, whose memory belongs to this stream
        return grad_x, grad_weights, of_params

    def _send_back(
        self,
        found: ExpertGradients,
        desc: EPAllToAllLayoutDesc,
        slots: torch.Tensor | None,
        needs: Needs,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Gradients of x and of topk_weights, on the ranks that these belong to; on a GPU the latter after `_join`.

        There the exchanges have a stream of high priority. The products for the parameters, which come next, fill the
        GPU. They begin when the gradient of the rows has arrived: else they would keep its programs, here or on other
        ranks, from multiprocessors. The few that bring the gradients of the weights back find room beside them.
        """
        side = self.layer.comm_stream
        rows = None if found.rows is None else self._of_experts(found.rows)
        if side is None:
            grads = self._send_rows(rows, desc, needs), self._send_weights(found, desc, slots, needs)
            self._of_experts(found.prepare, False)
            del rows
            self._of_experts(found.prepare, True)
            return grads
        side.wait_stream(current_stream())
        with torch.cuda.stream(side):
            grad_x = self._send_rows(rows, desc, needs)
            arrived = EPEvent.record()
        self._of_experts(found.prepare, False)
        if rows is None or not steps.wait_published(self.layer.context, desc):
            arrived.current_stream_wait()
        del rows  # whose memory `prepare` may have now: what is still to be sent has been summed elsewhere
        with torch.cuda.stream(side):
            grad_weights = self._send_weights(found, desc, slots, needs)
        self._of_experts(found.prepare, True)
        arrived.current_stream_wait()
        return grad_x, grad_weights

    def _join(self, *grads: torch.Tensor | None) -> None:
        """The current stream waits for what `_send_back` gave, which is memory of the other stream."""
        side = self.layer.comm_stream
        if side is None:
            return
        current = current_stream()
        current.wait_stream(side)
        if not torch.cuda.is_current_stream_capturing():
            # In a capture nothing else can get it before that stream has waited again.
            for each in grads:
                if each is not None:
                    each.record_stream(current)

    def _send_rows(self, rows: torch.Tensor | None, desc: EPAllToAllLayoutDesc, needs: Needs) -> torch.Tensor | None:
        """Gradient of x, on the rank that it belongs to."""
        if not needs.rows:
            return None
        assert rows is not None, "asked for"
        return self.layer.combine(rows, desc)

    def _send_weights(
        self, found: ExpertGradients, desc: EPAllToAllLayoutDesc, slots: torch.Tensor | None, needs: Needs
    ) -> torch.Tensor | None:
        """Gradient of topk_weights, on the rank that it belongs to."""
        if not needs.row_weights:
            return None
        assert found.row_weights is not None, "asked for"
        return slot_ops.to_slots(self.layer.context, found.row_weights, slots, desc)

    def _refuse_backward(self, desc: EPAllToAllLayoutDesc, slots: torch.Tensor | None, needs: Needs) -> None:
        """In place of `_backward`: no rank waits for this one, gradients that it had a part in are NaN."""
        layer, ctx = self.layer, self.layer.context
        with self.turn("the backward pass of a MoE module"), ctx.backward_pass():
            layer.refuse(desc, combines=needs.rows)
            if needs.row_weights:
                nothing = torch.full((desc.num_recv_rows,), torch.nan, device=ctx.device)
                slot_ops.to_slots(ctx, nothing, slots, desc)


def _as_sent(grad: torch.Tensor) -> torch.Tensor:
    """A gradient in memory of its own: autograd's may be expanded, transposed, negated, or zeros without memory."""
    grad = grad.contiguous().resolve_neg()
    return grad if grad.data_ptr() or not grad.numel() else grad.clone()


class _Block(torch.autograd.Function):
    """`MoEBlock` where a gradient will be taken."""

    @staticmethod
    def forward(
        ctx: Any,
        block: MoEBlock,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        *params: torch.Tensor | None,
    ) -> torch.Tensor:
        """[T, H]."""
        out, desc, saved = block._forward(x, topk_idx, topk_weights, params, keep=True)
        # Known of the latest dispatch only.
        slots = slot_ops.needed_slots(block.layer.context, desc) if ctx.needs_input_grad[3] else None
        ctx.block = block
        tensors, ctx.rest = _split((desc, slots, saved))
        # Parameters are not for hooks of saved tensors (checkpoints, offloading), which would hand out others in their
        # place, without what Megatron has hung on them (main_grad). What was made of parameters is.
        ctx.leaves = [param if param is not None and param.is_leaf else None for param in params]
        ctx.versions = _versions(ctx.leaves)
        made = [None if leaf is not None else param for leaf, param in zip(ctx.leaves, params, strict=True)]
        ctx.save_for_backward(*made, *tensors)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Gradients of all inputs."""
        (grad,) = grads
        kept = ctx.saved_tensors  # once: a checkpoint makes them anew
        num_params = len(ctx.leaves)
        made, tensors = kept[:num_params], kept[num_params:]
        params = [saved if leaf is None else leaf for leaf, saved in zip(ctx.leaves, made, strict=True)]
        desc, slots, saved = _join(tensors, ctx.rest)
        del kept, made, tensors
        # What the experts drop is free then, unless there will be another backward pass.
        ctx.maybe_clear_saved_tensors()
        _, x, _, weights, *of_params = ctx.needs_input_grad
        last = not torch._C._autograd._get_current_graph_task_keep_graph()
        needs = Needs(x, weights, tuple(of_params), last)
        if ctx.versions != _versions(ctx.leaves):
            ctx.block._refuse_backward(desc, slots, needs)
            raise InputError(
                "weights of the experts were changed in place between a forward pass and its backward pass, whose "
                "gradients would be of other values. Change them when the last backward pass is through."
            )
        grad_x, grad_weights, grad_params = ctx.block._backward(grad, desc, slots, saved, params, needs)
        return None, grad_x, None, grad_weights, *grad_params


def _versions(tensors: Params) -> list[int]:
    """Version counters, which inference tensors lack."""
    return [tensor._version for tensor in tensors if tensor is not None and not tensor.is_inference()]


class _Rows:
    """Stands for a `RowScaled`, whose two parts are among the tensors."""


class _Tensor:
    """Stands for a tensor."""


def _split(value: Any) -> tuple[list[torch.Tensor], tuple[list[Any], Any]]:
    """The tensors of a nest, and the rest of it."""
    leaves, spec = _pytree.tree_flatten(value)
    tensors: list[torch.Tensor] = []
    rest: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, RowScaled):
            tensors += [leaf.qdata, leaf.scale]
            rest.append(_Rows)
        elif isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            rest.append(_Tensor)
        else:
            rest.append(leaf)
    return tensors, (rest, spec)


def _join(tensors: Sequence[torch.Tensor], rest: tuple[list[Any], Any]) -> Any:
    """What `_split` was given."""
    found, (marks, spec) = iter(tensors), rest
    leaves: list[Any] = []
    for mark in marks:
        if mark is _Rows:
            leaves.append(RowScaled(next(found), next(found)))
        else:
            leaves.append(next(found) if mark is _Tensor else mark)
    return _pytree.tree_unflatten(leaves, spec)
