"""The MoE block as a torch.library op, for torch.compile and other observers of ops.

Dispatch, experts and combine are one op forward, `torch.ops.triton_ep.moe.default` for the policies of selective
checkpoints, and one op backward. The saved tensors are outputs of the forward op. Exchange and experts are found by
integer keys, in tables that hold them weakly. Low-latency modules have an op of their own, `triton_ep::moe_decode`,
which torch.compile may capture in its CUDA graphs; the others run between these graphs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch

from triton_ep.autograd.operations import BETWEEN_GRAPHS, layer_of, make_descriptor
from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.context.layout import entry_fields
from triton_ep.errors import EPError, InputError, StaleHandleError
from triton_ep.exchange import slots as slot_ops
from triton_ep.exchange.checks import check_dispatch
from triton_ep.layer import EPAll2AllLayer
from triton_ep.mx.tensor import MXTensor
from triton_ep.nn.arrivals import Arrived, keeps_arrivals
from triton_ep.nn.exchanges import Exchange
from triton_ep.nn.moe_block import MoEBlock, Needs, versions_of
from triton_ep.ops.row_scales import RowScaled

_MODULES: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = itertools.count(1)
NAMES = {"input": "x", "exp_indices": "topk_idx", "weight": "topk_weights"}
"""Arguments of modules by their names in the exchange."""
NO_GRADIENT = "a MoE module with low_latency=True has no gradient. Call it under torch.no_grad()."
_MXTENSORS = (
    "parameters of the experts are MXTensors, which torch.compile and torch dispatch modes do not take. Call the "
    "module without these, or give it param.dequantize()."
)
_NUM_SAVED = 9
"""entries, placement, forward tables, copies, slots, rows (or staging rows), scales, first product, row weights."""


def register(module: Any) -> int:
    """Register a module, of experts or MoE, and return its key, a new one at each call."""
    key = next(_numbers)
    _MODULES[key] = module
    return key


def is_observed() -> bool:
    """True if torch.compile or a torch dispatch mode observes ops."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def moe(
    experts: Any, layer: EPAll2AllLayer, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    """Output [T, H] of `experts` over `layer`, as one op; differentiable as `MoEBlock` is. Collective.

    Raises:
        InputError: arguments or parameters do not fit, as in calls that nothing observes; a parameter is an MXTensor.
        StaleHandleError: a compiled graph runs after its module or exchange is gone.
        What `MoEBlock` raises.
    """
    params = experts.local_parameters()
    if any(isinstance(param, MXTensor) for param in params):
        return refused(layer, x, message=_MXTENSORS)
    needs = [param.requires_grad for param in params]
    keep = torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad or any(needs))
    ops, given, keys = torch.ops.triton_ep, (x, topk_idx, topk_weights, params), (layer.context.layer_id, experts.key)
    decodes = layer.config.low_latency and not keep
    out: torch.Tensor = ops.moe_decode(*given, *keys) if decodes else ops.moe(*given, keep, needs, *keys)[0]
    return out


def refused(
    layer: EPAll2AllLayer,
    x: torch.Tensor,
    topk_idx: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    *,
    moe: int = 0,
    message: str = "",
) -> torch.Tensor:
    """As one op: tell the other ranks that this one has refused its arguments, and raise InputError. An error while
    torch.compile traces would leave them waiting.

    moe: key of a MoE module, whose checks raise the error again: a traced message may have sizes that are not known.
    message: that of the error, without a module.
    """
    out: torch.Tensor = torch.ops.triton_ep.refuse(x, topk_idx, topk_weights, message, layer.context.layer_id, moe)
    return out


def _block(layer: int, experts: int) -> tuple[Any, MoEBlock, Exchange]:
    owner = _MODULES.get(experts)
    if owner is None:
        raise StaleHandleError("this compiled graph belongs to a deleted MoE module. Compile the current module.")
    exchange = Exchange(layer_of(layer))
    return owner, owner.block_over(exchange), exchange


@torch.library.custom_op(
    "triton_ep::refuse",
    mutates_args=(),
    schema="(Tensor x, Tensor? topk_idx, Tensor? topk_weights, str message, int layer, int moe) -> Tensor",
    tags=BETWEEN_GRAPHS,
)
def _refuse(
    x: torch.Tensor,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    message: str,
    layer: int,
    moe: int,
) -> torch.Tensor:
    with contextlib.suppress(EPError):
        layer_of(layer).refuse()
    if moe in _MODULES:
        _MODULES[moe].route(x, topk_idx, topk_weights)
    raise InputError(message or "the arguments of a compiled MoE module do not fit.")


@_refuse.register_fake
def _(x: Any, topk_idx: Any, topk_weights: Any, message: str, layer: int, moe: int) -> Any:
    return x.new_empty(x.shape)


# Traced with the graph, never called: the forward pass raises.
_refuse.register_autograd(lambda ctx, grad: (grad, None, None, None, None, None))


# --- forward --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _own_names() -> Iterator[None]:
    """Give arguments in errors the names that callers of modules know."""
    try:
        yield
    except InputError as error:
        error.with_names(NAMES)
        raise


def _check(
    owner: Any,
    layer: EPAll2AllLayer,
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    params: list[torch.Tensor],
    keep: bool = False,
) -> None:
    """Check the arguments of an op, and tell the other ranks if this one refuses them. given: x, ids and weights."""
    device = layer.context.device
    try:
        check_dispatch(layer.config, device, *given, None)
        owner.check_parameters(params, device)
        if layer.config.low_latency and keep:
            raise InputError(NO_GRADIENT)
    except Exception:
        with contextlib.suppress(EPError):
            layer.refuse()
        raise


@torch.library.custom_op(
    "triton_ep::moe",
    mutates_args=(),
    schema="(Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor[] params, bool keep, bool[] needs, int layer, "
    "int experts) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=BETWEEN_GRAPHS,
)
def _moe(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    params: list[torch.Tensor],
    keep: bool,
    needs: list[bool],
    layer: int,
    experts: int,
) -> tuple[torch.Tensor, ...]:
    """The result and, if `keep`, the tensors that `_moe_backward` needs; absent ones are empty tensors."""
    owner, block, exchange = _block(layer, experts)
    with _own_names():
        _check(owner, exchange.layer, (x, topk_idx, topk_weights), params, keep)
        with torch.no_grad():
            joined = list(owner.joined(params))
            if keep and owner.joined_needs(needs)[0]:
                joined[0] = joined[0].detach().requires_grad_()  # makes the block keep the rows
            out, desc, saved = block._forward(x, topk_idx, topk_weights, joined, keep=keep)
            kept = _kept(exchange.layer, desc, saved) if keep else [x.new_empty(0) for _ in range(_NUM_SAVED)]
    exchange.watch_overflow()
    return out, *kept


@torch.library.custom_op(
    "triton_ep::moe_decode",
    mutates_args=(),
    schema="(Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor[] params, int layer, int experts) -> Tensor",
)
def _moe_decode(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    params: list[torch.Tensor],
    layer: int,
    experts: int,
) -> torch.Tensor:
    """The result of a low-latency module. Nothing that a call allocates outlives it."""
    owner, _, exchange = _block(layer, experts)
    with _own_names():
        _check(owner, exchange.layer, (x, topk_idx, topk_weights), params)
        with torch.no_grad():
            out: torch.Tensor = owner.low_latency_pass(exchange, x, topk_idx, topk_weights, owner.joined(params))
    exchange.watch_overflow()
    return out


@_moe_decode.register_fake
def _(x: Any, topk_idx: Any, topk_weights: Any, params: Any, layer: int, experts: int) -> Any:
    return x.new_empty(x.shape)


def _kept(layer: EPAll2AllLayer, desc: EPAllToAllLayoutDesc, saved: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors of a descriptor and those that the experts saved, in the order that `_found` expects."""
    nothing = desc.entries.new_empty(0)
    copies, rows, tiles = desc.skipped_token_topk_mapping_indices, saved["rows"], desc.tiles
    assert tiles is not None, "neither compact nor low latency"
    # Clear the room for tiles that these rows do not use: equal inputs must give equal outputs.
    unused = desc.placement[tiles.storage_offset() + tiles.numel() :]
    if unused.numel():
        unused.zero_()
    rows = rows.rows if isinstance(rows, Arrived) else rows
    parts = (rows.qdata, rows.scale) if isinstance(rows, RowScaled) else (rows, None)
    slots = slot_ops.needed_slots(layer.context, desc)
    found = (desc.entries, desc.placement, desc.forward, copies, slots, *parts, saved["pre"], saved["row_weights"])
    return [nothing.clone() if each is None else each for each in found]


def _found(
    layer: EPAll2AllLayer, kept: Sequence[torch.Tensor]
) -> tuple[EPAllToAllLayoutDesc, torch.Tensor | None, dict[str, Any]]:
    """Descriptor, slots of rows, and the tensors that the experts saved."""
    entries, placement, forward, copies, slots, rows, scale, pre, row_weights = kept
    cfg = layer.config
    desc = make_descriptor(
        layer,
        entries,
        placement,
        None if cfg.is_intra_node else forward,
        copies if cfg.enable_local_combine else None,
        pre.shape[0],
        dispatch_number=0,
    )
    of_rows: Any = RowScaled(rows, scale) if rows.dtype == torch.float8_e4m3fn else rows
    if keeps_arrivals(cfg):
        of_rows = Arrived(rows, cfg.rank)
    saved = {"rows": of_rows, "pre": pre, "row_weights": row_weights}
    return desc, None if cfg.enable_local_combine else slots, saved


@_moe.register_fake
def _(x: Any, idx: Any, weights: Any, params: Any, keep: bool, needs: Any, layer: int, experts: int) -> Any:
    owner, cfg = _MODULES[experts], layer_of(layer).config
    if not keep:
        return x.new_empty(x.shape), *(x.new_empty(0) for _ in range(_NUM_SAVED))

    def integers(*shape: Any) -> torch.Tensor:
        return x.new_empty(shape, dtype=torch.int32)

    sizes = layer_of(layer).context.sizes
    rows: Any = cfg.recv_capacity
    arrivals: Any = sizes.arrival_rows
    if rows is None:
        rows = torch.library.get_ctx().new_dynamic_size()
        arrivals = torch.library.get_ctx().new_dynamic_size()
    nothing, kept_rows = integers(0), arrivals if keeps_arrivals(cfg) else rows
    fp8 = owner.payload is not None and owner.precision != "exact"
    want_rows = owner.joined_needs(needs)[0]
    row_dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    return (
        x.new_empty(x.shape),
        integers(entry_fields(cfg), *idx.shape),
        integers(sizes.placement_length),
        nothing if cfg.is_intra_node else integers(2, cfg.num_nodes, cfg.max_tokens, cfg.topk),
        integers(arrivals, cfg.topk) if cfg.enable_local_combine else integers(0),
        integers(0) if cfg.enable_local_combine else integers(rows),
        x.new_empty((kept_rows, owner.hidden), dtype=row_dtype) if want_rows else integers(0),
        x.new_empty(rows, dtype=torch.float32) if want_rows and fp8 else integers(0),
        x.new_empty((rows, (2 if owner.activation.gated else 1) * owner.ffn)),
        x.new_empty(rows, dtype=torch.float32),
    )


# --- backward -------------------------------------------------------------------------------------------


@torch.library.custom_op(
    "triton_ep::moe_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor[] kept, Tensor[] params, bool[] needs, int layer, int experts) -> Tensor[]",
    tags=BETWEEN_GRAPHS,
)
def _moe_backward(
    grad: torch.Tensor,
    kept: list[torch.Tensor],
    params: list[torch.Tensor],
    needs: list[bool],
    layer: int,
    experts: int,
) -> list[torch.Tensor]:
    """Gradients of x, of the router's weights, and of each parameter; an empty tensor if there is none to return.

    needs: whether each of these gradients is needed, in the same order.
    """
    owner, block, exchange = _block(layer, experts)
    desc, slots, saved = _found(exchange.layer, kept)
    own = owner.own_parameters(params)
    want_x, want_weights, *want_params = needs
    wanted = Needs(want_x, want_weights, owner.joined_needs(want_params))
    with torch.no_grad():
        joined = owner.joined(own)
        grad_x, grad_weights, of_joined = block._backward(grad, desc, slots, saved, joined, wanted)
        of_params = owner.parted(of_joined, own)
    return _apart([grad.new_empty(0) if each is None else each for each in (grad_x, grad_weights, *of_params)])


def _apart(found: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, copied where they lie in the memory of another one, as the halves of one expert's gradient do: an op
    may not return those."""
    storages: set[int] = set()
    for number, each in enumerate(found):
        address = each.untyped_storage().data_ptr()
        if address in storages:
            found[number] = each.clone()
        storages.add(address)
    return found


def _refuse_backward(kept: Sequence[torch.Tensor], needs: list[bool], layer: int, experts: int) -> None:
    """In place of `_moe_backward`: `MoEBlock.refuse_backward`."""
    owner, block, exchange = _block(layer, experts)
    desc, slots, _ = _found(exchange.layer, kept)
    want_x, want_weights, *want_params = needs
    with torch.no_grad():
        block.refuse_backward(desc, slots, Needs(want_x, want_weights, owner.joined_needs(want_params)))


@_moe_backward.register_fake
def _(grad: Any, kept: Any, params: Any, needs: Any, layer: int, experts: int) -> list[torch.Tensor]:
    owner, topk = _MODULES[experts], layer_of(layer).config.topk
    want_x, want_weights, *want_params = needs
    found = [grad.new_empty(grad.shape if want_x else 0)]
    found.append(grad.new_empty((grad.shape[0], topk) if want_weights else 0, dtype=torch.float32))
    for param, own, want in zip(params, owner.own_parameters(params), want_params, strict=True):
        found.append(torch.empty_like(param) if want and returns_gradient(own) else grad.new_empty(0))
    return found


def returns_gradient(param: torch.Tensor) -> bool:
    """False for a parameter whose gradient is only accumulated in its `main_grad`."""
    return getattr(param, "main_grad", None) is None or hasattr(param, "grad_added_to_main_grad")


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, _, _, params, _, ctx.needs, ctx.layer, ctx.experts = inputs
    ctx.num_params, ctx.versions = len(params), versions_of(params)
    ctx.save_for_backward(*params, *output[1:])
    ctx.set_materialize_grads(False)


def _backward_of_moe(ctx: Any, grad: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # read once: under activation checkpointing every read recomputes
    params, kept = saved[: ctx.num_params], saved[ctx.num_params :]
    assert grad is not None, "gradient of the only differentiable output"
    needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[2], *ctx.needs]
    if ctx.versions != versions_of(params):  # a checkpoint makes saved tensors anew, of the weights as they are now
        _refuse_backward(kept, needs, ctx.layer, ctx.experts)
    found = torch.ops.triton_ep.moe_backward(grad.contiguous(), list(kept), list(params), needs, ctx.layer, ctx.experts)
    owner = _MODULES[ctx.experts]
    returned = [True, True, *(returns_gradient(own) for own in owner.own_parameters(params))]
    grads = [each if need and here else None for each, need, here in zip(found, needs, returned, strict=True)]
    return grads[0], None, grads[1], grads[2:], None, None, None, None


_moe.register_autograd(_backward_of_moe, setup_context=_save)
