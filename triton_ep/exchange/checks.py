"""Check the arguments of the layer's calls, and raise on every rank the mistakes that one rank reports.

Parameters have the types that callers promise; a check of the type itself takes `object`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

import torch

from triton_ep.config import MOST_ROWS, EPConfig, as_integer
from triton_ep.context.calls import dispatch_name, of_calls
from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.context.given import RoutingMap, Rows
from triton_ep.context.overlap import EPEvent
from triton_ep.context.records import BAD_ENTRY, HOST_WORD, Reports
from triton_ep.errors import CapacityError, ConfigError, EPError, InputError, PeerFailed, StaleHandleError
from triton_ep.kernels.device.codes import HOST_REJECTED, HOST_SCALED, HOST_SCATTER, HOST_WEIGHTS
from triton_ep.mx.tensor import MXTensor
from triton_ep.runtime.plans.layers import LANDINGS

ONE_BYTE = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
"""Elements of rows that travel with scales."""
_FARTHEST_ID = 2**31 - 1
_Arguments = ParamSpec("_Arguments")


def _refusing(check: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
    """Wrap `check`: InputError for tensors that the check cannot read because their kind raises its own errors."""

    @functools.wraps(check)
    def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        try:
            check(*args, **kwargs)
        except EPError:
            raise
        except Exception as error:
            raise InputError(
                f"an argument cannot be checked ({type(error).__name__}: {error}). Pass plain strided tensors."
            ) from error

    return checked


def raise_for_ranks(cfg: EPConfig, reports: Reports) -> None:
    """Raise the errors that the splits exchange reported about the arguments of any rank; the same on all ranks.

    reports: one report of each of the W ranks.

    Raises:
        CapacityError: a rank has more tokens, or a token more experts, than the layer has room for.
        PeerFailed: a rank rejected its arguments.
        InputError: an id out of range, bad scatter indices, weights or scales on some ranks only.
        CallMismatch: ranks are in different calls.
    """
    words = reports.column(HOST_WORD)
    alike = words.count(words[0]) == len(words) and not any(reports.column(BAD_ENTRY))
    if alike and not words[0] & (HOST_REJECTED | HOST_SCATTER):
        return
    _raise_for_capacity(cfg, reports)
    for rank, report in enumerate(reports):
        if report.is_rejected:
            raise PeerFailed(f"rank {rank} rejected its arguments to dispatch; see the InputError it raised.")
    # Mask the bits of optional arguments; the rest is the kind of call.
    if len({report.host_word & ~(HOST_WEIGHTS | HOST_SCALED | HOST_SCATTER) for report in reports}) > 1:
        raise of_calls({rank: report.host_word for rank, report in enumerate(reports)}, dispatch_name, failed=False)
    for rank, report in enumerate(reports):
        if report.has_bad_scatter:
            raise InputError(
                f"full_scatter_indices of rank {rank} is not a sort of its entries by expert: a kept entry lies "
                "outside its expert's range, or two share a position. Pass None to have it computed."
            )
        if report.bad_entry:
            token, k = divmod(report.bad_entry - 1, cfg.topk)
            raise InputError(
                f"exp_indices[{token}, {k}] of rank {rank} is {_reported(report.bad_id)}: expert ids are 0 to "
                f"{cfg.num_experts - 1}; -1 or {cfg.num_experts} drops an entry."
            )
    lacking = [rank for rank, report in enumerate(reports) if not report.has_weights]
    if 0 < len(lacking) < len(reports):
        raise InputError(f"dispatch got weights on some ranks only; without: {lacking}. Pass them on all or none.")
    scaled = [rank for rank, report in enumerate(reports) if report.is_scaled]
    if 0 < len(scaled) < len(reports):
        raise InputError(
            f"ranks {scaled} of {len(reports)} dispatch one-byte rows with scales, the others {cfg.token_dtype} ones. "
            "Send rows of one kind on all ranks."
        )


def _reported(bad_id: int) -> str:
    """An illegal id in words: ranks report ids of 64 bits as the nearest number of 32 bits."""
    if abs(bad_id) < _FARTHEST_ID:
        return str(bad_id)
    return f"{bad_id} or {'more' if bad_id > 0 else 'less'}"


def _raise_for_capacity(cfg: EPConfig, reports: Reports) -> None:
    """Raise CapacityError if a rank needs a larger layer.

    A rank that has too many tokens rejects its arguments and reports its number of tokens. A token with more experts
    than slots is reported as the first illegal id.

    reports: one report of each of the W ranks.
    """
    tokens = max(report.tokens if report.is_rejected else 0 for report in reports)
    # An illegal id of the caller can have any value; a real count is at most `num_experts`.
    topk = max(report.needed_topk if report.needed_topk <= cfg.num_experts else 0 for report in reports)
    if tokens:
        raise CapacityError(
            f"a rank has {tokens} tokens for one dispatch, the layer was made for max_tokens={cfg.max_tokens}. "
            "Make a layer with more on all ranks, or split the batch.",
            needed_tokens=tokens,
            needed_topk=topk,
        )
    if topk:
        raise CapacityError(
            f"a token is routed to {topk} experts, the layer was made for topk={cfg.topk}. Make a layer with more on "
            "all ranks.",
            needed_topk=topk,
        )


def check_not_captured(is_capturing: bool) -> None:
    """Raise ConfigError if a CUDA graph would capture a dispatch whose output size the host must read."""
    if is_capturing:
        raise ConfigError(
            "dispatch is captured in a CUDA graph, but in exact mode the host sizes its output by what arrives, which "
            "a graph cannot do. Make the layer with capacity=, or pass num_rows= to dispatch_compact."
        )


def check_num_tokens(cfg: EPConfig, num_tokens: int) -> None:
    """Raise InputError if this rank has more tokens than the layer has room for."""
    if num_tokens > cfg.max_tokens:
        raise InputError(
            f"dispatch got {num_tokens} tokens on rank {cfg.rank}, the layer was made for max_tokens="
            f"{cfg.max_tokens}. Raise max_tokens on all ranks, or split the batch."
        )


def _check_dispatch(
    cfg: EPConfig,
    device: torch.device,
    x: torch.Tensor,
    topk_idx: torch.Tensor | None,
    weights: torch.Tensor | None,
    scatter: torch.Tensor | None,
    known_tokens: int | None = None,
    scale: torch.Tensor | None = None,
) -> None:
    """Raise InputError unless the arguments of `EPAll2AllLayer.dispatch` fit the layer.

    known_tokens: T of the earlier dispatch whose routing is used, if any. scale: scales of one-byte rows.
    """
    _check_rows(cfg, device, x, known_tokens, scale)
    num_tokens = x.shape[0]
    if num_tokens > cfg.max_tokens:
        check_num_tokens(cfg, num_tokens)
    shape, ids = (num_tokens, cfg.topk), (torch.int32, torch.int64)
    _check_tensor(device, "exp_indices", topk_idx, shape, ids)
    if weights is not None:
        _check_tensor(device, "weight", weights, shape, (cfg.weight_dtype,))
    if scatter is not None and cfg.low_latency:
        raise InputError(
            "full_scatter_indices were given to a layer with low_latency=True, which computes the order while rows are "
            "under way. Pass None, or make the layer with low_latency=False."
        )
    if scatter is not None:
        if isinstance(scatter, torch.Tensor) and scatter.dim() == 2 and scatter.shape[0] > num_tokens:
            raise InputError(
                f"full_scatter_indices has {scatter.shape[0]} rows, but this rank has {num_tokens} tokens: it must "
                "sort the entries of this rank alone. Of a table over all ranks take the own rows and pass "
                "own.flatten().argsort().argsort().view_as(own), or None to have it computed."
            )
        _check_tensor(device, "full_scatter_indices", scatter, shape, ids)


def _check_rows(
    cfg: EPConfig,
    device: torch.device,
    x: torch.Tensor,
    num_tokens: int | None,
    scale: torch.Tensor | None = None,
) -> None:
    """Raise InputError unless `x` is `num_tokens` rows that the layer can send (None = any number).

    scale: scales of one-byte rows, which a layer without payload also accepts.
    """
    if num_tokens is not None and isinstance(x, torch.Tensor) and x.dim() == 2 and x.shape[0] != num_tokens:
        raise InputError(
            f"input has {x.shape[0]} rows on rank {cfg.rank}, but the dispatch whose routing it is to take had "
            f"{num_tokens} tokens. Pass the descriptor that belongs to these rows."
        )
    if scale is not None:
        _check_scaled(cfg, device, x, scale)
    elif isinstance(x, MXTensor):
        _check_mx(cfg, device, x)
    else:
        _check_tensor(device, "input", x, (None, cfg.hidden), (cfg.token_dtype,))


check_dispatch, check_rows = _refusing(_check_dispatch), _refusing(_check_rows)


@_refusing
def check_map(cfg: EPConfig, device: torch.device, rows: Rows, given: RoutingMap) -> None:
    """Raise InputError unless rows and their routing map, with a column per expert, fit the layer."""
    _check_rows(cfg, device, rows.data, None, rows.scale)
    shape = (rows.data.shape[0], cfg.num_experts)
    if shape[0] > cfg.max_tokens:
        check_num_tokens(cfg, shape[0])
    _check_tensor(device, "routing_map", given.routed, shape, (torch.bool,))
    if given.probs is not None:
        _check_tensor(device, "probs", given.probs, shape, (torch.float32,))


def check_scaled_layer(cfg: EPConfig, again: bool) -> None:
    """Raise unless a layer can send rows that come with scales; again: by the routing of an earlier dispatch.

    Raises:
        ConfigError: the layer quantises rows itself; or low latency, which cannot reuse a routing for such rows.
    """
    if cfg.payload is not None or (cfg.low_latency and again):
        raise ConfigError(
            f"rows with scales are for layers that quantise none, but this one has payload={cfg.payload!r}, "
            f"low_latency={cfg.low_latency} (refused with layout_desc). Make a layer without."
        )


def check_kind(cfg: EPConfig, before: bool | None, scaled: bool) -> None:
    """Raise if a low-latency layer changes its kind of rows.

    Its staging rows have two halves, by the parity of the epoch, and the start of the second half depends on the length
    of a row. With another length, rows of a dispatch would overwrite rows of the previous dispatch, which a slower rank
    still reads.

    before: whether the first dispatch sent one-byte rows with scales; None: no dispatch yet. scaled: this one does.

    Raises:
        InputError: the first dispatch had rows of the other kind.
    """
    if before not in (None, scaled):
        kinds = (f"rows of {cfg.token_dtype}", "one-byte rows with scales")
        raise InputError(
            f"a low-latency layer sends rows of one kind: this one began with {kinds[not scaled]}, now there are "
            f"{kinds[scaled]}. Make another layer for these, on all ranks."
        )


def check_compact_layer(cfg: EPConfig) -> None:
    """Raise ConfigError if the layer has no compact rows: with payload, or with a capacity, as low latency has."""
    for name, value in (("payload", cfg.payload), ("capacity", cfg.recv_capacity)):
        if value is not None:
            raise ConfigError(
                f"compact rows are for layers that send rows as they are and size their outputs, but this one has "
                f"{name}={value!r}. Make a layer without; for outputs of a fixed size pass num_rows."
            )


def check_num_rows(num_rows: object) -> int | None:
    """Return `num_rows` of `dispatch_compact` as an int, or None.

    Raises:
        InputError: neither None nor a number of rows.
    """
    if num_rows is None:
        return None
    number = _up_to(MOST_ROWS, num_rows)
    if number is None:
        raise InputError(f"num_rows is {num_rows!r}; it must be None (exact) or a number of rows up to {MOST_ROWS}.")
    return number


def _up_to(most: int, num_rows: object) -> int | None:
    """`num_rows` as an int; None if it is no integer from 0 to `most`."""
    try:
        number = as_integer("num_rows", num_rows, 0)
    except ConfigError:
        return None
    return number if number <= most else None


def check_compact_desc(call: str, layer_id: int, desc: EPAllToAllLayoutDesc) -> None:
    """Raise unless `desc` is the descriptor of a `dispatch_compact` of this layer.

    Raises:
        InputError: no descriptor, or a descriptor of expert-major rows.
        StaleHandleError: a descriptor of another layer.
    """
    _check_descriptor(call, layer_id, desc)
    if not desc.compact:
        raise InputError(
            f"{call} got a descriptor of dispatch, whose rows are expert-major. Pass one of dispatch_compact."
        )


@_refusing
def check_topk_values(cfg: EPConfig, device: torch.device, values: torch.Tensor, num_rows: int) -> None:
    """Raise InputError unless `values` has a float32 per (compact row, k)."""
    _check_tensor(device, "values", values, (num_rows, cfg.topk), (torch.float32,))


def check_overlap(cfg: EPConfig, return_recv_hook: bool, async_finish: bool, previous_event: object) -> None:
    """Raise InputError unless the layer can run these arguments of `dispatch` and `combine` together."""
    if return_recv_hook and cfg.shared_staging:
        raise InputError(
            "return_recv_hook=True was requested of a layer with shared_staging=True, where a call between the halves "
            "would overwrite the rows. Make the layer without shared_staging."
        )
    if return_recv_hook and async_finish:
        raise InputError(
            "return_recv_hook=True and async_finish=True were requested in one call. Choose one; for both halves on a "
            "stream of your own, make it current and use the hook."
        )
    if previous_event is not None and not async_finish:
        raise InputError(
            "previous_event is for async_finish=True. Without it call previous_event.current_stream_wait() first."
        )
    if previous_event is not None and not isinstance(previous_event, EPEvent):
        raise InputError(f"previous_event must be an EPEvent, got {type(previous_event).__name__}.")


def check_landing(cfg: EPConfig, landing: object) -> None:
    """Raise InputError unless the layer can receive rows in the format of `landing`."""
    if landing is None:
        return
    if not isinstance(landing, str) or landing not in LANDINGS:
        raise InputError(f"landing is {landing!r}; rows land as {', '.join(map(repr, LANDINGS))}, or None.")
    if cfg.payload is None or cfg.low_latency:
        raise InputError(
            f"landing={landing!r} was asked of a layer with payload={cfg.payload!r}, low_latency={cfg.low_latency}: "
            'only layers with payload="mxfp8" and without low latency convert rows. Pass None, or make such a layer.'
        )


def check_combine_buffer(cfg: EPConfig, num_rows: object, room: int) -> int:
    """Return `num_rows` of `EPAll2AllLayer.combine_buffer` as an int; the buffer has `room` rows.

    Raises:
        ConfigError: a layer whose combine stores sums.
        InputError: no number of rows, or too many.
    """
    if cfg.low_latency or cfg.enable_local_combine:
        option = "low_latency" if cfg.low_latency else "enable_local_combine"
        raise ConfigError(
            f"combine_buffer is for layers that publish every row, but with {option}=True combine sums the rows of a "
            "token before it stores them. Pass expert outputs to combine, or make the layer without."
        )
    number, most = _up_to(MOST_ROWS, num_rows), cfg.world_size * cfg.max_tokens
    if number is None or number > room:
        # An exact dispatch has made room for its rows, one with num_rows for all rows that can arrive.
        beyond = number is not None and number > most and cfg.recv_capacity is None and cfg.payload is None
        raise InputError(
            f"combine_buffer was asked for {num_rows!r} rows, the layer has {room}. Pass num_recv_rows of the "
            "descriptor that will be combined, and call it after that dispatch."
            + f" After dispatch_compact with num_rows above {most}, the most rows that can arrive, there is no such "
            f"buffer: pass num_rows={most}, or give combine a tensor of your own." * beyond
        )
    return number


@_refusing
def check_combine(
    cfg: EPConfig,
    device: torch.device,
    layer_id: int,
    y: torch.Tensor,
    desc: EPAllToAllLayoutDesc,
    weights: torch.Tensor | None,
    name: str = "input",
) -> None:
    """Raise unless the arguments of `EPAll2AllLayer.combine` fit the layer. name: of the rows, in errors.

    Raises:
        InputError: a tensor does not fit.
        StaleHandleError: the descriptor is not of this layer.
    """
    _check_descriptor("combine", layer_id, desc)
    _check_tensor(device, name, y, (desc.num_recv_rows, cfg.hidden), (cfg.token_dtype,))
    if weights is not None:
        of_tokens = cfg.low_latency and isinstance(weights, torch.Tensor) and weights.dim() == 2
        shape = (desc.num_dispatch_token_cur_rank, cfg.topk) if of_tokens else (desc.num_recv_rows,)
        _check_tensor(device, "weights", weights, shape, (torch.float32,))


def check_out(cfg: EPConfig, device: torch.device, out: torch.Tensor, desc: EPAllToAllLayoutDesc) -> None:
    """Raise InputError unless a combine can write its result [T, H] to this tensor."""
    _check_tensor(device, "out", out, (desc.num_dispatch_token_cur_rank, cfg.hidden), (cfg.token_dtype,))


def check_biases(
    cfg: EPConfig, device: torch.device, biases: tuple[torch.Tensor, ...], desc: EPAllToAllLayoutDesc
) -> None:
    """Raise InputError unless these biases [T, H] can be added to the sums of a combine."""
    if not biases:
        return
    if cfg.low_latency:
        raise InputError("bias is not for low-latency layers: add it to what combine returns.")
    if len(biases) > 2:
        raise InputError(f"bias must be one tensor or two, got {len(biases)}. Add some of them up first.")
    for each in biases:
        _check_tensor(device, "bias", each, (desc.num_dispatch_token_cur_rank, cfg.hidden), (cfg.token_dtype,))


@_refusing
def check_again(
    cfg: EPConfig,
    device: torch.device,
    layer_id: int,
    x: torch.Tensor,
    desc: EPAllToAllLayoutDesc,
    weights: torch.Tensor | None,
    scale: torch.Tensor | None = None,
) -> None:
    """Raise unless the arguments of `dispatch_again` fit the layer; scale: scales of one-byte rows.

    Raises:
        InputError: a tensor does not fit, or the order of the descriptor's rows is not kept.
        StaleHandleError: the descriptor is not of this layer.
    """
    _check_descriptor("dispatch_again", layer_id, desc)
    if desc.compact:
        raise InputError(
            "dispatch_again got a descriptor of dispatch_compact, whose rows are not expert-major. Call "
            "dispatch_compact_again."
        )
    if desc.full_scatter:
        raise InputError(
            "dispatch_again got a descriptor of a dispatch with full_scatter_indices, whose order of rows is not kept. "
            "Call dispatch with the same indices."
        )
    _check_dispatch(cfg, device, x, desc.topk_indices_tensor, weights, None, desc.num_dispatch_token_cur_rank, scale)


def _check_descriptor(call: str, layer_id: int, desc: object) -> None:
    if not isinstance(desc, EPAllToAllLayoutDesc):
        raise InputError(f"{call} needs the descriptor that dispatch returned, got {type(desc).__name__}.")
    if desc.layer_id != layer_id:
        raise StaleHandleError(
            f"{call} got a descriptor of another layer, or of one that was finalized. Pass the one that this "
            "layer's dispatch returned."
        )


def _check_mx(cfg: EPConfig, device: torch.device, x: MXTensor) -> None:
    """Raise InputError unless quantised rows fit a layer with payload="mxfp8"."""
    if cfg.payload is None:
        raise InputError('input is an MXTensor, but the layer sends rows as they are; make it with payload="mxfp8".')
    if x.elem_dtype != torch.float8_e4m3fn or x.block_size != 32:
        raise InputError(
            f"input must have e4m3 elements in blocks of 32, got {x.elem_dtype} in blocks of {x.block_size}."
        )
    _check_tensor(device, "input.qdata", x.qdata, (None, cfg.hidden), (torch.float8_e4m3fn,))
    _check_tensor(device, "input.scale", x.scale, (x.shape[0], cfg.hidden // 32), (torch.float8_e8m0fnu,))


def _check_scaled(cfg: EPConfig, device: torch.device, data: torch.Tensor, scale: object) -> None:
    """Raise InputError unless one-byte rows and their scales fit the layer's rows of H elements."""
    _check_tensor(device, "input", data, (None, cfg.hidden), ONE_BYTE)
    if not isinstance(scale, torch.Tensor):
        raise InputError(f"scale must be a tensor, got {type(scale).__name__}.")
    columns, rest = divmod(cfg.hidden, 32 * scale.dtype.itemsize)
    if rest:
        raise InputError(
            f"one-byte rows have {cfg.hidden} values, but a scale of {scale.dtype} is for "
            f"{32 * scale.dtype.itemsize}: a byte of scales per 32 values travels. Pad the rows, or pass bytes."
        )
    _check_tensor(device, "scale", scale, (data.shape[0], columns), (scale.dtype,))


def _check_tensor(
    device: torch.device, name: str, tensor: object, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    """Raise InputError unless `tensor` has `shape` (one or two extents, None = any), one of the dtypes, and the layer's
    device."""
    # Hot path: format no message unless a check fails.
    try:
        if (
            isinstance(tensor, torch.Tensor)
            and tensor.dtype in dtypes
            and len(extents := tensor.shape) == len(shape)
            and extents[-1] == shape[-1]
            and (shape[0] is None or extents[0] == shape[0])
            and tensor.device == device
            and (type(tensor) is torch.Tensor or not isinstance(tensor, MXTensor))
            and tensor.layout is torch.strided
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and (tensor.data_ptr() or not tensor.numel())
        ):
            return
    except RuntimeError:
        pass  # nested tensors have no shape; the error for them is below
    if isinstance(tensor, MXTensor):
        raise InputError(f"{name} must be a plain tensor, got an MXTensor; call .dequantize().")
    if not isinstance(tensor, torch.Tensor):
        raise InputError(f"{name} must be a tensor, got {type(tensor).__name__}.")
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise InputError(f"{name} must be a plain strided tensor, got one that is {kind}; convert it, .to_dense() say.")
    wanted = "[" + ", ".join("any" if extent is None else str(extent) for extent in shape) + "]"
    fits = tensor.dim() == len(shape) and all(
        extent is None or extent == actual for extent, actual in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        raise InputError(f"{name} must have shape {wanted}, got {list(tensor.shape)}.")
    if tensor.dtype not in dtypes:
        raise InputError(f"{name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}. Cast it.")
    if tensor.device != device:
        raise InputError(f"{name} must be on {device}, got {tensor.device}.")
    if not tensor.is_contiguous():
        raise InputError(f"{name} must be contiguous, got strides {tensor.stride()}; call .contiguous().")
    if tensor.is_neg():
        raise InputError(f"{name} is a lazily negated view; call .resolve_neg().")
    if not tensor.data_ptr() and tensor.numel():
        raise InputError(
            f"{name} has no memory: it is a {type(tensor).__name__} without storage (from a tracer, or zeros of "
            "autograd). Pass a tensor with storage; .clone() allocates one for such zeros."
        )
