"""The torch.library ops of triton_ep.autograd: dispatch, combine, and the backward pass of each.

An op takes and returns tensors and ints only, and no tensor is a view of another. So a descriptor is passed as a list
of tensors, rows that may be an MXTensor as elements and scale bytes, and a layer as an integer key.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast
from weakref import WeakValueDictionary

import torch

from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.context.layout import entry_fields, placement_parts
from triton_ep.errors import StaleHandleError
from triton_ep.exchange import slots as slot_ops
from triton_ep.layer import EPAll2AllLayer
from triton_ep.mx.formats import BLOCK
from triton_ep.mx.tensor import MXTensor
from triton_ep.ops.weighted_rows import weighted_rows_backward

BETWEEN_GRAPHS = (torch.Tag.cudagraph_unsafe,)
"""Tags of ops that torch.compile's mode "reduce-overhead" runs between its CUDA graphs, not in them. Hosts of exact
dispatches wait for counts, and layers keep memory between calls, which those graphs do not allow."""
LAYERS: WeakValueDictionary[int, EPAll2AllLayer] = WeakValueDictionary()
"""Layers by key, as weak references; `triton_ep.autograd.enter` and `leave` change this table."""


def layer_of(key: int) -> EPAll2AllLayer:
    """The layer registered under a key.

    Raises:
        StaleHandleError: no layer is registered, or it is gone.
    """
    layer = LAYERS.get(key)
    if layer is None:
        raise StaleHandleError(
            "this graph belongs to a layer that is gone, was left, or was never entered. Keep the layer until the "
            "last backward pass, and call triton_ep.autograd.enter(layer) before a torch.compile'd function uses it."
        )
    return layer


# --- descriptors as lists of tensors --------------------------------------------------------------------


def tensors_of(desc: EPAllToAllLayoutDesc) -> list[torch.Tensor]:
    """The tensors of a descriptor, in the order that `_descriptor` expects: entries, placement, then optional ones."""
    found = (desc.entries, desc.placement, desc.forward, desc.skipped_token_topk_mapping_indices)
    return [tensor for tensor in found if tensor is not None]


def _descriptor(layer: EPAll2AllLayer, tensors: Sequence[torch.Tensor], num_rows: int) -> EPAllToAllLayoutDesc:
    entries, placement, *optional = tensors
    forward = None if layer.config.is_intra_node else optional[0]
    copies = optional[-1] if layer.config.enable_local_combine else None
    return make_descriptor(layer, entries, placement, forward, copies, num_rows, dispatch_number=0)


def make_descriptor(
    layer: EPAll2AllLayer,
    entries: torch.Tensor,
    placement: torch.Tensor,
    forward: torch.Tensor | None,
    copies: torch.Tensor | None,
    num_rows: int,
    dispatch_number: int,
) -> EPAllToAllLayoutDesc:
    """Build a descriptor from its tensors."""
    cfg = layer.config
    return EPAllToAllLayoutDesc(
        num_dispatch_token_cur_rank=entries.shape[1],
        num_recv_rows=num_rows,
        entries=entries,
        placement=placement,
        shape=(cfg.world_size, cfg.local_world_size, cfg.num_experts_per_rank),
        layer_id=layer.context.layer_id,
        dispatch_number=dispatch_number,
        forward=forward,
        skipped_token_topk_mapping_indices=copies,
    )


def _parts(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements and scale bytes of rows; no scale bytes unless the rows are an MXTensor."""
    if isinstance(rows, MXTensor):
        return rows.qdata, rows.scale.view(torch.uint8)
    return rows, rows.new_empty(0, dtype=torch.uint8)


def _plain(rows: torch.Tensor) -> torch.Tensor:
    return (rows.dequantize() if isinstance(rows, MXTensor) else rows).contiguous()


# --- dispatch -------------------------------------------------------------------------------------------


@torch.library.custom_op(
    "triton_ep::dispatch",
    mutates_args=(),
    schema="(Tensor x, Tensor? scale, Tensor topk_idx, Tensor? weights, bool want_slots, int layer) -> (Tensor, "
    "Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=BETWEEN_GRAPHS,
)
def _dispatch(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    topk_idx: torch.Tensor,
    weights: torch.Tensor | None,
    want_slots: bool,
    layer: int,
) -> tuple[torch.Tensor, ...]:
    """recv_x, its scale bytes, recv_weights, slots of rows, the descriptor's tensors; absent outputs are empty."""
    owner = layer_of(layer)
    given = x if scale is None else MXTensor.from_qdata_and_scales(x, scale, owner.config.token_dtype)
    recv_x, recv_weights, desc = owner.dispatch(given, topk_idx, weights)
    nothing = x.new_empty(0, dtype=torch.int32)
    slots = slot_ops.needed_slots(owner.context, desc) if want_slots else None
    copies, tiles = desc.skipped_token_topk_mapping_indices, desc.tiles
    assert tiles is not None, "neither compact nor low latency"
    # The tile table has room for more tiles than these rows need. Zero the rest: equal inputs must give equal outputs.
    unused = desc.placement[tiles.storage_offset() + tiles.numel() :]
    if unused.numel():
        unused.zero_()
    return (
        *_parts(recv_x),
        recv_weights if recv_weights is not None else x.new_empty(0, dtype=torch.float32),
        nothing.clone() if slots is None else slots,
        desc.entries,
        desc.placement,
        nothing.clone() if desc.forward is None else desc.forward,
        nothing.clone() if copies is None else copies,
    )


@_dispatch.register_fake
def _(x: Any, scale: Any, topk_idx: Any, weights: Any, want_slots: bool, layer: int) -> tuple[Any, ...]:
    owner = layer_of(layer)
    cfg = owner.config

    def integers(*shape: Any) -> torch.Tensor:
        return x.new_empty(shape, dtype=torch.int32)

    rows: Any = cfg.recv_capacity
    arrivals: Any = owner.context.sizes.arrival_rows
    if rows is None:
        rows = torch.library.get_ctx().new_dynamic_size()
        arrivals = torch.library.get_ctx().new_dynamic_size() if cfg.enable_local_combine else 0
    return (
        *_fake_rows(x, owner, rows),
        x.new_empty((rows if weights is not None else 0,), dtype=torch.float32),
        integers(rows if want_slots and not cfg.enable_local_combine else 0),
        integers(entry_fields(cfg), *topk_idx.shape),
        integers(owner.context.sizes.placement_length),
        integers(0) if cfg.is_intra_node else integers(2, cfg.num_nodes, cfg.max_tokens, cfg.topk),
        integers(arrivals, cfg.topk) if cfg.enable_local_combine else integers(0),
    )


def _fake_rows(like: Any, owner: EPAll2AllLayer, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Fake elements and scale bytes of `rows` rows that dispatch returns."""
    cfg = owner.config
    if cfg.payload is None:
        return like.new_empty((rows, cfg.hidden), dtype=cfg.token_dtype), like.new_empty(0, dtype=torch.uint8)
    return (
        like.new_empty((rows, cfg.hidden), dtype=torch.float8_e4m3fn),
        like.new_empty((rows, cfg.hidden // BLOCK), dtype=torch.uint8),
    )


@torch.library.custom_op(
    "triton_ep::dispatch_backward",
    mutates_args=(),
    schema="(Tensor grad_rows, Tensor? grad_weights, Tensor slots, Tensor[] desc, bool want_x, int layer) "
    "-> (Tensor, Tensor)",
    tags=BETWEEN_GRAPHS,
)
def _dispatch_backward(
    grad_rows: torch.Tensor,
    grad_weights: torch.Tensor | None,
    slots: torch.Tensor,
    desc: list[torch.Tensor],
    want_x: bool,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x [T, H] and of the weights [T, K] float32; empty if not wanted. One op, so that all ranks run both
    collectives in the same order."""
    owner = layer_of(layer)
    layout_desc = _descriptor(owner, desc, grad_rows.shape[0])
    with owner.context.backward_pass():
        grad_x = owner.combine(grad_rows, layout_desc) if want_x else grad_rows.new_empty(0)
        if grad_weights is None:
            return grad_x, grad_rows.new_empty(0, dtype=torch.float32)
        of_rows = None if owner.config.enable_local_combine else slots
        return grad_x, slot_ops.to_slots(owner.context, grad_weights, of_rows, layout_desc)


@_dispatch_backward.register_fake
def _(
    grad_rows: Any, grad_weights: Any, slots: Any, desc: Any, want_x: bool, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    entries, *_ = desc
    _, tokens, topk = entries.shape
    return (
        grad_rows.new_empty((tokens, grad_rows.shape[1]) if want_x else (0,)),
        grad_rows.new_empty((tokens, topk) if grad_weights is not None else (0,), dtype=torch.float32),
    )


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.want_slots, ctx.layer = inputs[4], inputs[5]
    _, _, _, slots, entries, placement, forward, copies = output
    cfg = layer_of(ctx.layer).config
    # Absent outputs are empty tensors, and must not become parts of the descriptor.
    optional = ([] if cfg.is_intra_node else [forward]) + ([copies] if cfg.enable_local_combine else [])
    ctx.save_for_backward(slots, entries, placement, *optional)


def _dispatch_grads(ctx: Any, grad_rows: torch.Tensor, grad_weights: torch.Tensor | None, x: int, weights: int) -> Any:
    """Gradients of the inputs at positions `x` and `weights`."""
    slots, *desc = ctx.saved_tensors
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


class DispatchMX(torch.autograd.Function):
    """The dispatch op for quantised rows: autograd sees an MXTensor instead of its parts."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        weights: torch.Tensor | None,
        want_slots: bool,
        layer: int,
    ) -> tuple[torch.Tensor, ...]:
        """recv_x as an MXTensor, then the outputs of the op from the weights on."""
        data, scale = _parts(x)
        given = scale if isinstance(x, MXTensor) else None
        output = torch.ops.triton_ep.dispatch(data, given, topk_idx, weights, want_slots, layer)
        _save_dispatch(ctx, (None, None, None, None, want_slots, layer), output)
        ctx.mark_non_differentiable(*output[3:])
        dtype = layer_of(layer).config.token_dtype
        return MXTensor.from_qdata_and_scales(output[0], output[1], dtype), *output[2:]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Gradients of x and of the weights."""
        grad_x, grad_topk = _dispatch_grads(ctx, grads[0], grads[1], 0, 2)
        return grad_x, None, grad_topk, None, None


@functools.cache
def let_compile() -> None:
    """Make `DispatchMX` one node in graphs of torch.compile, which cannot trace a table of weak references."""
    torch.compiler.allow_in_graph(DispatchMX)


# --- combine --------------------------------------------------------------------------------------------


@torch.library.custom_op(
    "triton_ep::combine",
    mutates_args=(),
    schema="(Tensor y, Tensor? weights, Tensor[] desc, SymInt num_rows, int layer) -> Tensor",
    tags=BETWEEN_GRAPHS,
)
def _combine(
    y: torch.Tensor, weights: torch.Tensor | None, desc: list[torch.Tensor], num_rows: int, layer: int
) -> torch.Tensor:
    """`EPAll2AllLayer.combine`; num_rows: received rows of the dispatch, which `y` must have."""
    owner = layer_of(layer)
    return owner.combine(y.contiguous(), _descriptor(owner, desc, num_rows), weights)


@_combine.register_fake
def _(y: Any, weights: Any, desc: Any, num_rows: Any, layer: int) -> torch.Tensor:
    entries, *_ = desc
    _, tokens, _ = entries.shape
    return y.new_empty((tokens, y.shape[1]))


@torch.library.custom_op(
    "triton_ep::combine_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor entries, Tensor placement, SymInt num_rows, int layer) -> (Tensor, Tensor)",
    tags=BETWEEN_GRAPHS,
)
def _combine_backward(
    grad: torch.Tensor, entries: torch.Tensor, placement: torch.Tensor, num_rows: int, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dispatch the tokens' gradients by the same routing: [R, H], and its scale bytes.

    The same expert ids give the same rows, because no atomic decides a slot, and the host knows the row count.
    """
    owner = layer_of(layer)
    # Unlike combine, `dispatch_again` needs neither forward tables nor the rows of each token.
    desc = make_descriptor(owner, entries, placement, None, None, num_rows, dispatch_number=0)
    with owner.context.backward_pass():
        rows, _ = owner.dispatch_again(grad, desc)
    return _parts(rows)


@_combine_backward.register_fake
def _(grad: Any, entries: Any, placement: Any, num_rows: Any, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _fake_rows(grad, layer_of(layer), num_rows)


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    y, weights, desc, ctx.num_rows, ctx.layer = inputs
    ctx.num_desc = len(desc)
    entries, placement, *_ = desc
    with_weights = () if weights is None else (weights, y)
    ctx.save_for_backward(entries, placement, *with_weights)


def _backward_of_combine(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    entries, placement, *with_weights = ctx.saved_tensors
    cfg = layer_of(ctx.layer).config
    data, scale = torch.ops.triton_ep.combine_backward(_plain(grad), entries, placement, ctx.num_rows, ctx.layer)
    offs = None
    if cfg.recv_capacity is not None:
        # Static mode does not write rows past the last expert.
        first, count = placement_parts(cfg.world_size, cfg.local_world_size, cfg.num_experts_per_rank)["expert_offsets"]
        offs = placement[first : first + count]
    if with_weights:
        weights, y = with_weights
        grads = weighted_rows_backward(data, y, weights, offs, scale=scale if cfg.payload else None)
        return *grads, [None] * ctx.num_desc, None, None
    if offs is not None:
        in_use = (torch.arange(ctx.num_rows, device=grad.device) < offs[-1]).unsqueeze(1)
        data, scale = _zero_unused(data, in_use), _zero_unused(scale, in_use) if cfg.payload else scale
    rows = data if cfg.payload is None else MXTensor.from_qdata_and_scales(data, scale, cfg.token_dtype)
    return rows, None, [None] * ctx.num_desc, None, None


def _zero_unused(rows: torch.Tensor, in_use: torch.Tensor) -> torch.Tensor:
    """Rows [R, n] of any dtype, zero where `in_use` [R, 1] is False."""
    if rows.dtype == torch.float8_e4m3fn:
        return torch.where(in_use, rows.view(torch.uint8), 0).view(rows.dtype)
    return torch.where(in_use, rows, 0)


_combine.register_autograd(_backward_of_combine, setup_context=_save_combine)
