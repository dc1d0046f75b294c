"""Differentiable dispatch and combine over EPAll2AllLayer: torch.library ops that torch.compile keeps as single nodes.

The backward pass of one is the other: the gradient of received rows is combined, and the gradient of combined
rows is dispatched again, by the routing of the forward pass. Both are collective, so every rank must run the same
forward and backward passes in the same order, with gradients required for the same inputs.

An op takes tensors and ints only. It finds its layer by an integer key, in a table of weak references: `enter` adds a
layer, `leave` removes it.
"""

from __future__ import annotations

import torch

from triton_ep.autograd import operations as ops
from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.errors import ConfigError, InputError, StaleHandleError
from triton_ep.layer import EPAll2AllLayer
from triton_ep.mx.tensor import MXTensor

__all__ = ["combine", "dispatch", "enter", "leave"]


def enter(layer: EPAll2AllLayer) -> int:
    """Register a layer for the ops and return its key. Idempotent; the layer may still be garbage-collected.

    `dispatch` and `combine` call it themselves, except while torch.compile traces them: call it before compiling.

    Raises:
        ConfigError: a layer with low_latency=True, which has no gradient.
    """
    _check_layer(layer)
    if layer.config.payload is not None:
        ops.let_compile()
    ops.LAYERS[layer.context.layer_id] = layer
    return layer.context.layer_id


def leave(layer: EPAll2AllLayer) -> None:
    """Unregister a layer: autograd graphs built with it can no longer run backward. Idempotent."""
    ops.LAYERS.pop(layer.context.layer_id, None)


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
        MXTensor. The gradient of `x` is the sum over k of the rows' gradients, in float32, rounded once. The gradient
        of an entry of `topk_weights` is the gradient of the row it went to, or zero if it was dropped.

    Raises:
        StaleHandleError: in the backward pass, after `leave` or when the layer is gone.
        Errors of `EPAll2AllLayer.dispatch`.
    """
    key = _key(layer)
    if not torch.compiler.is_compiling() and not _passable(layer, x, topk_idx, topk_weights):
        with torch.no_grad():
            layer.dispatch(x, topk_idx, topk_weights)  # raises, and reports that to the other ranks
    want_slots = topk_weights is not None and topk_weights.requires_grad and torch.is_grad_enabled()
    if layer.config.payload is None:
        recv_x, _, *outputs = torch.ops.triton_ep.dispatch(x, None, topk_idx, topk_weights, want_slots, key)
    else:
        recv_x, *outputs = ops.DispatchMX.apply(x, topk_idx, topk_weights, want_slots, key)
    recv_weights, _, entries, placement, forward, copies = outputs
    # A compiled graph may run any number of times, so its dispatches have no fixed number.
    number = 0 if torch.compiler.is_compiling() else layer.context.num_dispatches
    desc = ops.make_descriptor(
        layer,
        entries,
        placement,
        None if layer.config.is_intra_node else forward,
        copies if layer.config.enable_local_combine else None,
        recv_x.shape[0],
        number,
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
        layout_desc: from `dispatch`, or from a `layer.dispatch` without `full_scatter_indices`: the backward pass
            dispatches in the computed order.
        weights: [R] float32, on all ranks or on none; None: a plain sum.

    Returns:
        [T, H] of the layer's dtype. The gradient of a row of `y` is the gradient of its token, times its weight; the
        gradient of a weight is the product of both rows, summed in float32. With payload="mxfp8" gradients travel
        quantised as rows do, and the gradient of `y` is an MXTensor unless there are weights.
        Rows without an assignment have gradient zero.

    Raises:
        InputError, StaleHandleError: as `EPAll2AllLayer.combine`.
        InputError: a descriptor with a caller-given order of rows, or of compact rows.
    """
    if not isinstance(layout_desc, EPAllToAllLayoutDesc):
        raise InputError(f"combine needs the descriptor that dispatch returned, got {type(layout_desc).__name__}.")
    if layout_desc.layer_id != layer.context.layer_id:
        raise StaleHandleError(
            "combine got a descriptor of another layer, or of one that was finalized. Pass the one that dispatch of "
            "this layer returned."
        )
    if layout_desc.compact:
        raise InputError(
            "autograd.combine got a descriptor of dispatch_compact, but its backward pass would get expert-major rows. "
            "Use layer.combine, whose backward pass is layer.dispatch_compact_again."
        )
    if layout_desc.full_scatter:
        raise InputError(
            "autograd.combine got a descriptor of a dispatch with full_scatter_indices, but its backward pass would "
            "get rows in the computed order. Dispatch without them, or use layer.combine, which has no gradient."
        )
    for name, given in (("y", y), ("weights", weights)):
        if not isinstance(given, torch.Tensor) and not (given is None and name == "weights"):
            raise InputError(f"{name} of combine must be a tensor, got {type(given).__name__}.")
    result: torch.Tensor = torch.ops.triton_ep.combine(
        y, weights, ops.tensors_of(layout_desc), layout_desc.num_recv_rows, _key(layer)
    )
    return result


def _passable(layer: EPAll2AllLayer, x: object, *others: object) -> bool:
    """Whether an op accepts these arguments. If not, the op itself would raise without a report to the other ranks."""
    if layer.config.payload is None and isinstance(x, MXTensor):
        return False
    device = layer.context.device
    return all(
        argument is None
        or (isinstance(argument, torch.Tensor) and argument.layout is torch.strided and argument.device == device)
        for argument in (x, *others)
    )


def _check_layer(layer: EPAll2AllLayer) -> None:
    if layer.config.low_latency:
        raise ConfigError(
            "triton_ep.autograd got a layer with low_latency=True, whose calls have no gradient. Use layer.dispatch "
            "and layer.combine for decoding, and a layer with low_latency=False for training."
        )


def _key(layer: EPAll2AllLayer) -> int:
    _check_layer(layer)
    return layer.context.layer_id if torch.compiler.is_compiling() else enter(layer)
