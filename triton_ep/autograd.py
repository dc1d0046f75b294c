"""Differentiable dispatch and combine over EPAll2AllLayer, as torch.library ops that torch.compile takes whole.

The backward pass of one is the other: the gradient of received rows is combined, and the gradient of combined
rows is dispatched again, by the routing of the forward pass. Both are collective, so every rank must run the same
forward and backward passes in the same order, with gradients asked for the same inputs.

An op takes tensors and ints only. It finds its layer by an integer key, in a table that holds layers weakly:
`enter` puts one there, `leave` takes it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F

from triton_ep.errors import InputError, StaleHandleError
from triton_ep.layer import EPAll2AllLayer
from triton_ep.layout_desc import EPAllToAllLayoutDesc
from triton_ep.mx.tensor import MXTensor
from triton_ep.ops import slots as slot_ops

__all__ = ["combine", "dispatch", "enter", "leave"]

_LAYERS: WeakValueDictionary[int, EPAll2AllLayer] = WeakValueDictionary()

_PLACED = ("topk_indices_tensor", "token_dst_scatter_idx", "stage_row", "node_slot")
_SMALL = (
    "expert_offsets",
    "num_recv_tokens_per_expert",
    "overflow",
    "tokens_from_node",
    "tokens_per_node",
    "report",
)
_FORWARD = ("forward_topk", "forward_dst_row", "forward_stage_row")
_COPIES = "skipped_token_topk_mapping_indices"
_BLOCK = 32
_REPORT_WORDS = 6  # of 8; the others have no meaning


def enter(layer: EPAll2AllLayer) -> int:
    """Make a layer known to the ops and return its key; idempotent, and the layer may still be collected.

    `dispatch` and `combine` do it by themselves, except while torch.compile traces them: call this before.
    """
    _LAYERS[layer.context.layer_id] = layer
    return layer.context.layer_id


def leave(layer: EPAll2AllLayer) -> None:
    """Forget a layer: graphs that were made with it can no longer run backward. Idempotent."""
    _LAYERS.pop(layer.context.layer_id, None)


def dispatch(
    layer: EPAll2AllLayer, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None, EPAllToAllLayoutDesc]:
    """`EPAll2AllLayer.dispatch`, differentiable in `x` and `topk_weights`. Collective, and so is its backward pass.

    Arguments:
        x: [T, H] of the layer's dtype; with payload="mxfp8" an MXTensor as well.
        topk_idx: [T, K] int32 or int64; -1 or num_tot_experts = dropped.
        topk_weights: [T, K] float32; on all ranks or on none.

    Returns:
        recv_x [R, H], recv_weights [R] float32 or None, and the descriptor. With payload="mxfp8" recv_x is an
        MXTensor. The gradient of `x` is the sum over k of the rows' gradients, in float32, rounded once; that of
        `topk_weights` is, entry by entry, the gradient of the row it went to, and zero where it was dropped.

    Raises:
        StaleHandleError: in the backward pass, after `leave` or when the layer is gone.
        What `EPAll2AllLayer.dispatch` raises.
    """
    key = _key(layer)
    want_slots = topk_weights is not None and topk_weights.requires_grad and torch.is_grad_enabled()
    if layer.config.token_dtype == _payload_dtype(layer):
        outputs = torch.ops.triton_ep.dispatch(x, None, topk_idx, topk_weights, want_slots, key)
    else:
        outputs = _DispatchMX.apply(x, topk_idx, topk_weights, want_slots, key)
    recv_x, _, recv_weights, _, placed, forward, copies, *small = outputs
    fields = dict(zip((*_PLACED, *_SMALL), (*placed.unbind(), *small), strict=True))
    if not layer.config.is_intra_node:
        fields.update(zip(_FORWARD, forward.unbind(), strict=True))
    if layer.config.enable_local_combine:
        fields[_COPIES] = copies
    # A compiled graph may run any number of dispatches: it does not know which one this is.
    epoch = 0 if torch.compiler.is_compiling() else layer.context.epoch
    desc = EPAllToAllLayoutDesc(
        num_dispatch_token_cur_rank=x.shape[0],
        num_recv_rows=recv_x.shape[0],
        num_input_tokens_per_rank=fields["report"][:, 2],
        layer_id=key,
        epoch=epoch,
        **fields,
    )
    return recv_x, recv_weights if topk_weights is not None else None, desc


def combine(
    layer: EPAll2AllLayer,
    y: torch.Tensor,
    layout_desc: EPAllToAllLayoutDesc,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """`EPAll2AllLayer.combine`, differentiable in `y` and `weights`. Collective, and so is its backward pass.

    Arguments:
        y: [R, H] of the layer's dtype, one output per row of `recv_x`.
        layout_desc: from `dispatch`. (A descriptor of a dispatch that was given `full_scatter_indices` has
            another order of rows than the one that the backward pass gets: not for this function.)
        weights: [R] float32, on all ranks or on none; None: a plain sum.

    Returns:
        [T, H] of the layer's dtype. The gradient of a row of `y` is that of its token, times its weight; the
        gradient of a weight is the product of both rows, summed in float32. With payload="mxfp8" gradients are
        quantised on their way as rows are, and the gradient of `y` is an MXTensor unless there are weights.
        Rows without a copy have gradient zero.

    Raises:
        InputError, StaleHandleError: as `EPAll2AllLayer.combine`.
    """
    if not isinstance(layout_desc, EPAllToAllLayoutDesc):
        raise InputError(f"combine needs the descriptor that dispatch returned, got {type(layout_desc).__name__}.")
    if layout_desc.layer_id != layer.context.layer_id:
        raise StaleHandleError(
            "combine got a descriptor of another layer, or of one that was finalized. Pass the one that dispatch of "
            "this layer returned."
        )
    result: torch.Tensor = torch.ops.triton_ep.combine(y, weights, _tensors(layout_desc), _key(layer))
    return result


# --- descriptors as lists of tensors --------------------------------------------------------------------


def _key(layer: EPAll2AllLayer) -> int:
    return layer.context.layer_id if torch.compiler.is_compiling() else enter(layer)


def _layer(key: int) -> EPAll2AllLayer:
    layer = _LAYERS.get(key)
    if layer is None:
        raise StaleHandleError(
            "this graph belongs to a layer that is gone, was left, or was never entered. Keep the layer until the "
            "last backward pass, and call triton_ep.autograd.enter(layer) before a torch.compile'd function uses it."
        )
    return layer


def _payload_dtype(layer: EPAll2AllLayer) -> torch.dtype:
    """Dtype of the elements that dispatch moves."""
    mx = getattr(layer.config, "payload", None) == "mxfp8"
    return torch.float8_e4m3fn if mx else layer.config.token_dtype


def _tensors(desc: EPAllToAllLayoutDesc) -> list[torch.Tensor]:
    """The tensors of a descriptor, in the order that `_descriptor` expects."""
    names = (*_PLACED, *_SMALL, *_FORWARD, _COPIES)
    return [tensor for name in names if (tensor := getattr(desc, name)) is not None]


def _descriptor(layer: EPAll2AllLayer, tensors: Sequence[torch.Tensor], num_rows: int) -> EPAllToAllLayoutDesc:
    names = [*_PLACED, *_SMALL]
    names += [] if layer.config.is_intra_node else _FORWARD
    names += [_COPIES] if layer.config.enable_local_combine else []
    fields: dict[str, Any] = dict(zip(names, tensors, strict=True))
    return EPAllToAllLayoutDesc(
        num_dispatch_token_cur_rank=fields["topk_indices_tensor"].shape[0],
        num_recv_rows=num_rows,
        num_input_tokens_per_rank=fields["report"][:, 2],
        layer_id=layer.context.layer_id,
        epoch=0,
        **fields,
    )


def _parts(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements and scale bytes of rows that may be an MXTensor; no scale bytes otherwise."""
    if isinstance(rows, MXTensor):
        return rows.qdata, rows.scale.view(torch.uint8)
    return rows, rows.new_empty(0, dtype=torch.uint8)


def _whole(layer: EPAll2AllLayer, rows: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """The inverse of `_parts`."""
    if rows.dtype == layer.config.token_dtype or scale is None:
        return rows
    return MXTensor.from_qdata_and_scales(rows, scale, layer.config.token_dtype)


def _plain(rows: torch.Tensor) -> torch.Tensor:
    return (rows.dequantize() if isinstance(rows, MXTensor) else rows).contiguous()


# --- dispatch -------------------------------------------------------------------------------------------


@torch.library.custom_op(
    "triton_ep::dispatch",
    mutates_args=(),
    schema="(Tensor x, Tensor? scale, Tensor topk_idx, Tensor? weights, bool want_slots, int layer) -> (Tensor, "
    "Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _dispatch(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    topk_idx: torch.Tensor,
    weights: torch.Tensor | None,
    want_slots: bool,
    layer: int,
) -> tuple[torch.Tensor, ...]:
    """recv_x, its scale bytes, recv_weights, slots of rows, and the descriptor's tensors; what is not, is empty."""
    owner = _layer(layer)
    recv_x, recv_weights, desc = owner.dispatch(_whole(owner, x, scale), topk_idx, weights)
    nothing = x.new_empty(0, dtype=torch.int32)
    copies = getattr(desc, _COPIES)
    rows, row_scale = _parts(recv_x)
    return (
        rows,
        row_scale,
        recv_weights if recv_weights is not None else x.new_empty(0, dtype=torch.float32),
        slot_ops.row_slots(owner.context, desc) if want_slots else nothing,
        # Views of one storage: outputs of an op must not share any.
        torch.stack([getattr(desc, name) for name in _PLACED]),
        nothing.clone() if desc.forward_topk is None else torch.stack([getattr(desc, name) for name in _FORWARD]),
        nothing.clone() if copies is None else copies,
        *(getattr(desc, name) for name in _SMALL[:-2]),
        desc.tokens_per_node.clone(),  # a piece of a longer tensor
        F.pad(desc.report[:, :_REPORT_WORDS], (0, 8 - _REPORT_WORDS)),
    )


@_dispatch.register_fake
def _(x: Any, scale: Any, topk_idx: Any, weights: Any, want_slots: bool, layer: int) -> tuple[Any, ...]:
    owner = _layer(layer)
    cfg = owner.config

    def integers(*shape: Any) -> torch.Tensor:
        return x.new_empty(shape, dtype=torch.int32)

    rows: Any = cfg.recv_capacity
    arrivals: Any = owner.context.sizes.arrival_rows
    if rows is None:
        rows = torch.library.get_ctx().new_dynamic_size()
        arrivals = torch.library.get_ctx().new_dynamic_size() if cfg.enable_local_combine else 0
    recv_x = x.new_empty((rows, cfg.hidden), dtype=_payload_dtype(owner))
    is_mx = recv_x.dtype != cfg.token_dtype
    return (
        recv_x,
        x.new_empty((rows, cfg.hidden // _BLOCK) if is_mx else (0,), dtype=torch.uint8),
        x.new_empty((rows if weights is not None else 0,), dtype=torch.float32),
        integers(rows if want_slots else 0),
        integers(4, *topk_idx.shape),
        integers(0) if cfg.is_intra_node else integers(3, cfg.num_nodes, cfg.max_tokens, cfg.topk),
        integers(arrivals, cfg.topk) if cfg.enable_local_combine else integers(0),
        integers(cfg.num_experts_per_rank + 1),
        integers(cfg.num_experts_per_rank),
        integers(1),
        integers(cfg.num_nodes),
        integers(cfg.num_nodes),
        integers(cfg.world_size, 8),
    )


@torch.library.custom_op(
    "triton_ep::dispatch_backward",
    mutates_args=(),
    schema="(Tensor grad_rows, Tensor? grad_weights, Tensor slots, Tensor[] desc, bool want_x, int layer) "
    "-> (Tensor, Tensor)",
)
def _dispatch_backward(
    grad_rows: torch.Tensor,
    grad_weights: torch.Tensor | None,
    slots: torch.Tensor,
    desc: list[torch.Tensor],
    want_x: bool,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x [T, H] and of the weights [T, K] float32; empty if not wanted. One op, hence one order."""
    owner = _layer(layer)
    layout_desc = _descriptor(owner, desc, grad_rows.shape[0])
    grad_x = owner.combine(grad_rows, layout_desc) if want_x else grad_rows.new_empty(0)
    if grad_weights is None:
        return grad_x, grad_rows.new_empty(0, dtype=torch.float32)
    return grad_x, slot_ops.to_slots(owner.context, grad_weights, slots, layout_desc)


@_dispatch_backward.register_fake
def _(
    grad_rows: Any, grad_weights: Any, slots: Any, desc: Any, want_x: bool, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, topk = desc[0].shape
    return (
        grad_rows.new_empty((tokens, grad_rows.shape[1]) if want_x else (0,)),
        grad_rows.new_empty((tokens, topk) if grad_weights is not None else (0,), dtype=torch.float32),
    )


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.want_slots, ctx.layer = inputs[4], inputs[5]
    _, _, _, slots, placed, forward, copies, *small = output
    cfg = _layer(ctx.layer).config
    # What is not there is empty, and must not be taken for a part of the descriptor.
    optional = ([] if cfg.is_intra_node else [forward]) + ([copies] if cfg.enable_local_combine else [])
    ctx.save_for_backward(slots, placed, *small, *optional)


def _dispatch_grads(ctx: Any, grad_rows: torch.Tensor, grad_weights: torch.Tensor | None, x: int, weights: int) -> Any:
    """Gradients of the inputs with these positions."""
    slots, placed, *rest = ctx.saved_tensors
    cfg = _layer(ctx.layer).config
    small, optional = rest[: len(_SMALL)], rest[len(_SMALL) :]
    desc = [*placed.unbind(), *small]
    desc += [] if cfg.is_intra_node else optional[0].unbind()
    desc += optional[-1:] if cfg.enable_local_combine else []
    want_x, want_weights = ctx.needs_input_grad[x], ctx.want_slots and ctx.needs_input_grad[weights]
    if not (want_x or want_weights):
        return None, None
    grad_x, grad_topk = torch.ops.triton_ep.dispatch_backward(
        _plain(grad_rows),
        cast(torch.Tensor, grad_weights).contiguous() if want_weights else None,
        slots,
        desc,
        want_x,
        ctx.layer,
    )
    return grad_x if want_x else None, grad_topk if want_weights else None


def _backward_of_dispatch(ctx: Any, grad_rows: torch.Tensor, _: Any, grad_weights: Any, *__: Any) -> tuple[Any, ...]:
    grad_x, grad_topk = _dispatch_grads(ctx, grad_rows, grad_weights, 0, 3)
    return grad_x, None, None, grad_topk, None, None


_dispatch.register_autograd(_backward_of_dispatch, setup_context=_save_dispatch)


class _DispatchMX(torch.autograd.Function):
    """The op where rows arrive quantised: autograd sees an MXTensor instead of its parts."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        weights: torch.Tensor | None,
        want_slots: bool,
        layer: int,
    ) -> tuple[torch.Tensor, ...]:
        data, scale = _parts(x)
        given = scale if isinstance(x, MXTensor) else None
        output = torch.ops.triton_ep.dispatch(data, given, topk_idx, weights, want_slots, layer)
        _save_dispatch(ctx, (None, None, None, None, want_slots, layer), output)
        dtype = x.dtype
        return MXTensor.from_qdata_and_scales(output[0], output[1], dtype), *output[1:]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        grad_x, grad_topk = _dispatch_grads(ctx, grads[0], grads[2], 0, 2)
        return grad_x, None, grad_topk, None, None


# --- combine --------------------------------------------------------------------------------------------


@torch.library.custom_op(
    "triton_ep::combine",
    mutates_args=(),
    schema="(Tensor y, Tensor? weights, Tensor[] desc, int layer) -> Tensor",
)
def _combine(y: torch.Tensor, weights: torch.Tensor | None, desc: list[torch.Tensor], layer: int) -> torch.Tensor:
    """`EPAll2AllLayer.combine`."""
    owner = _layer(layer)
    return owner.combine(y.contiguous(), _descriptor(owner, desc, y.shape[0]), weights)


@_combine.register_fake
def _(y: Any, weights: Any, desc: Any, layer: int) -> torch.Tensor:
    return y.new_empty((desc[0].shape[0], y.shape[1]))


@torch.library.custom_op(
    "triton_ep::combine_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor topk_idx, SymInt num_rows, int layer) -> (Tensor, Tensor)",
)
def _combine_backward(
    grad: torch.Tensor, topk_idx: torch.Tensor, num_rows: int, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's copy of its token's gradient, [R, H], and its scale bytes: a dispatch by the same routing.

    The same expert ids give the same rows, because no atomic decides a slot.
    """
    rows, _, _ = _layer(layer).dispatch(grad, topk_idx)
    assert rows.shape[0] == num_rows, "dispatch is deterministic: the same expert ids give the same rows"
    return _parts(rows)


@_combine_backward.register_fake
def _(grad: Any, topk_idx: Any, num_rows: Any, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    owner = _layer(layer)
    dtype = _payload_dtype(owner)
    scale = (num_rows, grad.shape[1] // _BLOCK) if dtype != owner.config.token_dtype else (0,)
    return grad.new_empty((num_rows, grad.shape[1]), dtype=dtype), grad.new_empty(scale, dtype=torch.uint8)


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    y, weights, desc, ctx.layer = inputs
    ctx.num_rows, ctx.num_desc = y.shape[0], len(desc)
    with_weights = () if weights is None else (weights, y)
    topk_idx, expert_offsets = desc[0], desc[len(_PLACED)]
    ctx.save_for_backward(topk_idx, expert_offsets, *with_weights)


def _backward_of_combine(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    topk_idx, expert_offsets, *with_weights = ctx.saved_tensors
    owner = _layer(ctx.layer)
    data, scale = torch.ops.triton_ep.combine_backward(_plain(grad), topk_idx, ctx.num_rows, ctx.layer)
    rows = _whole(owner, data, scale)
    in_use = None
    if owner.config.recv_capacity is not None:
        # Static mode leaves rows behind the last expert as they are.
        in_use = torch.arange(ctx.num_rows, device=grad.device) < expert_offsets[-1]
        rows = _zero_unused(rows, in_use)
    if not with_weights:
        return rows, None, [None] * ctx.num_desc, None
    weights, y = with_weights
    rows = _plain(rows).float()
    grad_y = (rows * weights.unsqueeze(1)).to(y.dtype)
    products = rows * y.float()
    if in_use is not None:
        products = torch.where(in_use.unsqueeze(1), products, 0.0)
        grad_y = torch.where(in_use.unsqueeze(1), grad_y, 0.0)
    return grad_y, products.sum(1), [None] * ctx.num_desc, None


def _zero_unused(rows: torch.Tensor, in_use: torch.Tensor) -> torch.Tensor:
    keep = in_use.unsqueeze(1)
    if not isinstance(rows, MXTensor):
        return torch.where(keep, rows, torch.zeros((), dtype=rows.dtype, device=rows.device))
    data = torch.where(keep, rows.qdata.view(torch.uint8), 0).view(rows.elem_dtype)
    scale = torch.where(keep, rows.scale.view(torch.uint8), 0)
    return MXTensor.from_qdata_and_scales(data, scale, rows.orig_dtype)


_combine.register_autograd(_backward_of_combine, setup_context=_save_combine)
