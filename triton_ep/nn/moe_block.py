"""Dispatch, experts and combine as one autograd function, with a hand-written backward pass of the experts.

Autograd gives an op the gradient of its result as one tensor. Experts take their gradient as the exchange delivers it:
rows with one scale per row. So one function contains the exchanges and the experts, in both directions:

    forward     dispatch x -> rows;  experts;  combine y -> out
    backward    dispatch the gradient of out again -> rows;  experts;  combine -> gradient of x;  and each row's
                gradient of its weight back to its (token, k)

All ranks make the same calls, so all ranks must request gradients of the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.context.overlap import EPEvent, current_stream
from triton_ep.errors import InputError
from triton_ep.exchange import slots as slot_ops
from triton_ep.exchange import steps
from triton_ep.exchange.landings import Ahead
from triton_ep.layer import EPAll2AllLayer
from triton_ep.ops.row_scales import RowScaled

Params = Sequence[torch.Tensor | None]


def _nothing(room: bool, stream: torch.cuda.Stream | None) -> None:
    """Default of `prepare`: nothing."""


def _no_work(params: Params) -> None:
    """Default of `before`: no work."""


def _keeps_none(params: Params) -> bool:
    """Default of `keeps_arrivals`: False."""
    return False


@dataclass(frozen=True)
class ExpertGradients:
    """Result of the backward pass of experts.

    The block calls rows, then prepare, perhaps early, prepare again, then params. It frees the memory of the rows
    passed to `backward` before the first call.

    Attributes:
        rows: computes the gradient of the received rows, [R, H] of the layer's dtype; padding and unused rows may hold
            anything. None if it was not requested.
        row_weights: [R] float32, gradient of the rows' weights, likewise.
        params: computes the gradients of the parameters, after the gradient of the rows has been sent. None for a
            parameter that needs none, or whose gradient was accumulated elsewhere (Megatron's main_grad).
        prepare: memory-bound work that runs while the gradient of the rows is in flight; called with False before, and
            with True after, the memory of the result of `rows` is free. If `early` follows, the first call runs before
            that gradient is sent, and the second is given a stream, after whose work so far the memory is free: what
            fits next to products runs there, and the current stream, which will wait for it, does the rest after it. A
            product that fills the GPU would keep the exchange, and so all other ranks, from the multiprocessors.
        early: computes a part of the gradients of the parameters, after the first `prepare`, by kernels next to which
            those of `DispatchCombineContext.making_room` fit on every multiprocessor, as next to those of `params`.
            None: there is no such part. The same on all ranks.
    """

    rows: Callable[[], torch.Tensor] | None
    row_weights: torch.Tensor | None
    params: Callable[[], Params]
    prepare: Callable[[bool, torch.cuda.Stream | None], None] = _nothing
    early: Callable[[], None] | None = None


class Experts(Protocol):
    """The experts of this rank, between a dispatch and its combine.

    Rows are as `EPAll2AllLayer.dispatch` returns them, sorted by expert: tensors, MXTensors or `RowScaled`. Rows from
    `desc.expert_offsets[-1]` on are undefined. Both calls run without autograd.
    """

    def forward(
        self, rows: Any, row_weights: torch.Tensor, params: Params, desc: EPAllToAllLayoutDesc, keep: bool
    ) -> tuple[torch.Tensor, Any]:
        """Weighted results [R, H] of the layer's dtype, and, if `keep`, what `backward` needs.

        The latter is any nest of tuples, lists and dicts of tensors, `RowScaled` and plain values, without the
        parameters.
        """

    def backward(
        self, grad: Any, saved: Any, params: Params, desc: EPAllToAllLayoutDesc, needs: Needs
    ) -> ExpertGradients:
        """Gradients, from the gradient of the result of `forward`. May take `saved` apart, to free memory."""


@dataclass(frozen=True)
class Needs:
    """Which gradients are requested: of the rows, of their weights, of each parameter.

    last: no other backward pass needs what was saved, so it may be overwritten.
    """

    rows: bool
    row_weights: bool
    params: tuple[bool, ...]
    last: bool = False


@dataclass(slots=True)  # made in each pass, and a frozen one takes longer
class MoEBlock:
    """Dispatch, experts, combine over one layer.

    Attributes:
        layer: any layer that is not low-latency.
        experts: computes on the rows between dispatch and combine.
        landing: form of the rows for the experts (`EPAll2AllLayer.dispatch`).
        grad_landing: form of the gradients of their results.
        turn: context manager around each pass, given its name; may refuse the pass.
        before: returns work of the experts that needs no rows, or None; it overlaps the dispatch of a forward pass.
        keeps_arrivals: whether a pass that is kept takes the rows as they arrived (`Ahead.kept`).
        kept: returns what a pass keeps, from what `forward` has kept and the results of the dispatch: of the rows that
            arrived, because checkpoints compare the shapes of repeated passes. With it, and without a capacity, the
            experts are launched before the host knows how many rows arrive. There may be room for fewer than
            `expert_offsets` says: then kernels must leave out what does not fit, and `forward` is called again. None:
            the host waits for the number of rows first.
        checked: the caller has checked tokens, ids and weights.
    """

    layer: EPAll2AllLayer
    experts: Experts
    landing: str | None = None
    grad_landing: str | None = None
    turn: Callable[[str], AbstractContextManager[Any]] = nullcontext
    before: Callable[[Params], Callable[[], None] | None] = _no_work
    keeps_arrivals: Callable[[Params], bool] = _keeps_none
    kept: Callable[[Any, Ahead], Any] | None = None
    checked: bool = False

    def __call__(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, params: Params
    ) -> torch.Tensor:
        """[T, H]: for each token the sum of its experts' results. Collective, like the backward pass.

        Arguments:
            x: [T, H] of the layer's dtype, differentiable.
            topk_idx: [T, K] int32 or int64; -1 or num_tot_experts = dropped.
            topk_weights: [T, K] float32, differentiable.
            params: for the experts, differentiable.

        Raises:
            The errors of `EPAll2AllLayer.dispatch` and `combine`, and of the experts. An error of the experts on one
            rank is reported to the others.
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
            keeps = keep and self.keeps_arrivals(params)
            found = self._dispatch((x, topk_idx, topk_weights), self.before(params), keeps)
            y, saved = self._of_experts(self.experts.forward, *found[:2], params, found.desc, keep)
            if found.settle is not None:
                # The host waits for the counts here, where the GPU has work.
                again, found = found.settle()
                if again:
                    del y, saved
                    y, saved = self._of_experts(self.experts.forward, *found[:2], params, found.desc, keep)
                else:
                    y = y[: found.desc.num_recv_rows]
            if keep and self.kept is not None:
                saved = self.kept(saved, found)
            return self.layer.combine(y, found.desc), found.desc, saved

    def _dispatch(
        self,
        given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        work: Callable[[], None] | None,
        keeps: bool,
    ) -> Ahead:
        """Results as of `layer.dispatch_ahead`.

        work: of the experts, which needs no rows; None: none. keeps: keep the rows as they arrive.
        """
        if work is None:
            return self.layer.dispatch_ahead(*given, self.landing, self.kept is not None, self.checked, keeps)
        assert not keeps, "bf16 weights, whose rows may be kept so, are not prepared"
        # Launched first, because a dispatch of exact sizes keeps the host; the exchange has a stream of high priority.
        start = EPEvent.record()
        self._of_experts(work)
        # The caller holds what is given until this stream has waited, so the allocator need not know of the other
        # stream; and it must not, because graphs of torch.compile refuse memory that another stream has used.
        (rows, row_weights, desc), arrived = self.layer.on_comm_stream(
            lambda: self.layer.dispatch(*given, landing=self.landing), (), start
        )
        arrived.current_stream_wait()
        return Ahead(rows, row_weights, desc)

    def _of_experts(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call the experts. If they raise, report the failure to the other ranks, which will wait for this one."""
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

        slots: k of the assignment of each row, [R] int32; None: as the descriptor says.
        """
        layer, ctx = self.layer, self.layer.context
        with self.turn("the backward pass of a MoE module"), ctx.backward_pass():
            # Rows take more memory than tokens, so drop them as soon as possible.
            grad_rows, _ = layer.dispatch_again(_as_sent(grad), desc, landing=self.grad_landing)
            found = self._of_experts(self.experts.backward, grad_rows, saved, params, desc, needs)
            del grad_rows
            beside = needs.rows and found.early is not None and layer.comm_stream is not None and steps.makes_room(ctx)
            send = self._send_beside if beside else self._send_back
            grad_x, grad_weights, of_params = send(found, desc, slots, needs)
            self._join(grad_x, grad_weights)
            del found  # row weights' gradients, whose memory belongs to this stream
        return grad_x, grad_weights, of_params

    def _send_back(
        self,
        found: ExpertGradients,
        desc: EPAllToAllLayoutDesc,
        slots: torch.Tensor | None,
        needs: Needs,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, Params]:
        """Gradients of x and of topk_weights, on the ranks that these belong to, and of the parameters; on a GPU those
        two after `_join`.

        On a GPU the exchanges use a stream of high priority. The products for the parameters fill the GPU. They begin
        when the gradient of the rows has arrived; otherwise they would keep its programs, here or on other ranks, from
        multiprocessors. Few programs return the gradients of the weights, next to `prepare`.
        """
        side = self.layer.comm_stream
        rows = None if found.rows is None else self._of_experts(found.rows)
        if side is None:
            grads = self._send_rows(rows, desc, needs), self._send_weights(found, desc, slots, needs)
            self._of_experts(found.prepare, False, None)
            if found.early is not None:
                self._of_experts(found.early)
            del rows
            self._of_experts(found.prepare, True, None)
            return *grads, self._of_experts(found.params)
        side.wait_stream(current_stream())
        with torch.cuda.stream(side):
            grad_x = self._send_rows(rows, desc, needs)
            arrived = EPEvent.record()
        self._of_experts(found.prepare, False, None)
        if rows is None or not steps.wait_published(self.layer.context, desc):
            arrived.current_stream_wait()
        del rows  # `prepare` may reuse the memory: rows still to be sent have been summed into another buffer
        with torch.cuda.stream(side):
            grad_weights = self._send_weights(found, desc, slots, needs)
        self._of_experts(found.prepare, True, None)
        arrived.current_stream_wait()
        return grad_x, grad_weights, self._of_experts(found.params)

    def _send_beside(
        self,
        found: ExpertGradients,
        desc: EPAllToAllLayoutDesc,
        slots: torch.Tensor | None,
        needs: Needs,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, Params]:
        """As `_send_back`, on a GPU, next to products for the parameters, which leave room for both exchanges.

        Products come first each time: a multiprocessor divides its memory for the first program on it, and a small
        program on every one would keep all products waiting (LITTLE_SHARED in runtime/plans/residency.py). They wait
        for the sums that leave this rank, whose memory they take, not for those that arrive.
        """
        ctx, side = self.layer.context, self.layer.comm_stream
        assert side is not None and found.rows is not None and found.early is not None, "`_backward` has looked"
        rows = self._of_experts(found.rows)
        self._of_experts(found.prepare, False, None)
        side.wait_stream(current_stream())
        aside = ctx.converting.fork()
        self._of_experts(found.early)
        with torch.cuda.stream(side), ctx.making_room():
            grad_x = self._send_rows(rows, desc, needs)
        with torch.cuda.stream(aside):
            published = steps.wait_published(ctx, desc)
        assert published, "sums overlap the kernel that pulls them"
        del rows  # `prepare` may reuse the memory: rows still to be sent have been summed into another buffer
        self._of_experts(found.prepare, True, aside)
        ctx.converting.join()
        side.wait_stream(current_stream())
        of_params: Params = self._of_experts(found.params)
        with torch.cuda.stream(side), ctx.making_room():
            grad_weights = self._send_weights(found, desc, slots, needs)
        return grad_x, grad_weights, of_params

    def _join(self, *grads: torch.Tensor | None) -> None:
        """Make the current stream wait for the results of `_send_back`, which are memory of the other stream."""
        side = self.layer.comm_stream
        if side is None:
            return
        current = current_stream()
        current.wait_stream(side)
        if not torch.cuda.is_current_stream_capturing():
            # During a capture nothing else can reuse the memory before that stream has waited again.
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

    def refuse_backward(self, desc: EPAllToAllLayoutDesc, slots: torch.Tensor | None, needs: Needs) -> NoReturn:
        """Replaces `_backward` after weights have changed.

        No rank waits for this one, and gradients that depend on it are NaN.

        Raises:
            InputError: always.
        """
        layer, ctx = self.layer, self.layer.context
        with self.turn("the backward pass of a MoE module"), ctx.backward_pass():
            layer.refuse(desc, combines=needs.rows)
            if needs.row_weights:
                nothing = torch.full((desc.num_recv_rows,), torch.nan, device=ctx.device)
                slot_ops.to_slots(ctx, nothing, slots, desc)
        raise InputError(
            "weights of the experts were changed in place between a forward pass and its backward pass, whose "
            "gradients would be of other values. Change them when the last backward pass is through."
        )


def _as_sent(grad: torch.Tensor) -> torch.Tensor:
    """The gradient in contiguous memory: autograd may pass expanded, transposed or negated tensors, or zero tensors."""
    grad = grad.contiguous().resolve_neg()
    return grad if grad.data_ptr() or not grad.numel() else grad.clone()


class _Block(torch.autograd.Function):
    """The autograd function of `MoEBlock`."""

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
        # Known only for the latest dispatch.
        slots = slot_ops.needed_slots(block.layer.context, desc) if ctx.needs_input_grad[3] else None
        ctx.block = block
        tensors: list[torch.Tensor] = []
        ctx.rest = _split((desc, slots, saved), tensors)
        # Leaves bypass hooks of saved tensors (checkpoints, offloading): these return other tensors, without Megatron's
        # attributes (main_grad). Tensors computed from parameters pass through the hooks.
        ctx.leaves = [param if param is not None and param.is_leaf else None for param in params]
        ctx.versions = versions_of(ctx.leaves)
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
        # Then what the experts drop is freed, unless another backward pass follows.
        ctx.maybe_clear_saved_tensors()
        _, x, _, weights, *of_params = ctx.needs_input_grad
        last = not torch._C._autograd._get_current_graph_task_keep_graph()
        needs = Needs(x, weights, tuple(of_params), last)
        if ctx.versions != versions_of(ctx.leaves):
            ctx.block.refuse_backward(desc, slots, needs)
        grad_x, grad_weights, grad_params = ctx.block._backward(grad, desc, slots, saved, params, needs)
        return None, grad_x, None, grad_weights, *grad_params


def versions_of(tensors: Params) -> list[int]:
    """Version counters, which inference tensors lack."""
    return [tensor._version for tensor in tensors if tensor is not None and not tensor.is_inference()]


class _Mark(NamedTuple):
    """Place of a tensor, or of the two tensors of a `RowScaled`, in a nest; first: index of the (first) tensor."""

    first: int
    scaled: bool = False


class _Nest(NamedTuple):
    """A split descriptor, tuple, list or dict.

    Attributes:
        of: keys of a dict, else what makes the nest from its parts.
        parts: its values, split.
    """

    of: Any
    parts: list[Any]


def _split(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A nest without its tensors, which are appended to `tensors`.

    torch's pytree would take a tenth of a step's host time for this.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Mark(len(tensors) - 1)
    if isinstance(value, RowScaled):
        tensors.extend((value.qdata, value.scale))
        return _Mark(len(tensors) - 2, scaled=True)
    if isinstance(value, EPAllToAllLayoutDesc):
        return _Nest(EPAllToAllLayoutDesc, [_split(vars(value), tensors)])
    if isinstance(value, dict):
        return _Nest(list(value), [_split(each, tensors) for each in value.values()])
    if isinstance(value, tuple | list):
        return _Nest(getattr(value, "_make", type(value)), [_split(each, tensors) for each in value])
    return value


def _join(tensors: Sequence[torch.Tensor], rest: Any) -> Any:
    """Inverse of `_split`."""
    if isinstance(rest, _Mark):
        first = tensors[rest.first]
        return RowScaled(first, tensors[rest.first + 1]) if rest.scaled else first
    if not isinstance(rest, _Nest):
        return rest
    parts = [_join(tensors, each) for each in rest.parts]
    if rest.of is EPAllToAllLayoutDesc:
        return EPAllToAllLayoutDesc(**parts[0])
    return dict(zip(rest.of, parts, strict=True)) if isinstance(rest.of, list) else rest.of(parts)
