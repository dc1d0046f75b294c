"""TransformerEngine's functions for expert parallelism (`transformer_engine.pytorch.ep`) over EPAll2AllLayer.

`ep_bootstrap` fixes the sizes of this process's group, once. An `EpBuffer` holds the state of one dispatch and its
combine, so each micro-batch in flight needs one. Buffers with equal options share a layer, whose symmetric memory
`ep_finalize` frees. Creating the first buffer with given options is collective.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from triton_ep import autograd
from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.distributed import check_group
from triton_ep.errors import CapacityError, ConfigError, EPError, InputError, PeerFailed, WaitTimeout
from triton_ep.integrations import arguments as check
from triton_ep.integrations.layer_pool import LayerPool, LayerSizes
from triton_ep.integrations.te.ep_outputs import GradientInto, Into, room, room_of_mxfp8
from triton_ep.integrations.te.recipe import MXFP8BlockScaling, Recipe
from triton_ep.integrations.te.storage import MXFP8TensorStorage
from triton_ep.integrations.te.symmetric import is_symm_backed, release_symm_mem_pool, symm_mem_alloc
from triton_ep.layer import EPAll2AllLayer
from triton_ep.mx.tensor import MXTensor

__all__ = [
    "EpBuffer",
    "EpStateError",
    "ep_bootstrap",
    "ep_combine",
    "ep_dispatch",
    "ep_finalize",
    "ep_prepare",
    "is_ep_bootstrapped",
    "is_symm_backed",
    "release_symm_mem_pool",
    "symm_mem_alloc",
]


class EpStateError(EPError, RuntimeError):
    """A call before `ep_bootstrap`, a second `ep_bootstrap`, or a combine without its dispatch."""


@dataclass(frozen=True)
class _Group:
    """Arguments of `ep_bootstrap`, and the layers created since."""

    pool: LayerPool
    num_experts: int
    max_tokens_per_rank: int
    hidden_dim: int
    num_topk: int | None
    recv_capacity_per_rank: int | None
    max_num_sms: int
    drop_on_overflow: bool
    dtype: torch.dtype

    def layer(self, top_k: int, payload: str | None, alignment: int, capacity: int | None) -> EPAll2AllLayer:
        """The layer that buffers with these options share."""
        sizes = LayerSizes(
            self.hidden_dim,
            top_k,
            self.num_experts,
            self.dtype,
            self.max_num_sms or None,
            alignment=alignment,
            capacity=capacity,
            max_tokens=self.max_tokens_per_rank,
            payload=payload,
            enable_local_combine=True,
        )
        return self.pool.get(sizes)


class _Registry:
    """The group of this process; None before `ep_bootstrap` and after `ep_finalize`."""

    group: _Group | None = None


def ep_bootstrap(
    ep_group: Any,
    num_experts: int,
    max_tokens_per_rank: int,
    hidden_dim: int,
    num_topk: int | None = None,
    recv_capacity_per_rank: int | None = None,
    max_num_sms: int = 0,
    zero_copy: bool = False,
    drop_on_overflow: bool = False,
    max_token_dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Fix the sizes of expert parallelism in this process; once, after `initialize_distributed`.

    Arguments:
        ep_group: process group; None: all ranks. num_experts: over all its ranks, a multiple of their number.
        max_tokens_per_rank: most tokens of one dispatch. hidden_dim: elements per token.
        num_topk: experts per token. None, for callers of TransformerEngine before 2.19: each buffer has its own.
        recv_capacity_per_rank: most rows that a rank receives. With a capacity, dispatch does not wait for the host and
            can be captured in CUDA graphs; None: all rows are received, and the host waits for their number.
        max_num_sms: CTAs of the communication kernels; 0: from the tuned tables.
        zero_copy: must be False: rows of other ranks are read only in the layer's own buffers.
        drop_on_overflow: drop rows beyond the capacity. False: `ep_dispatch` outside a CUDA graph capture reads the
            count, which waits for the device, and raises.
        max_token_dtype: dtype of tokens, torch.bfloat16.

    Raises:
        EpStateError: it was called before.
        ConfigError: sizes that cannot work, or zero_copy.
    """
    if _Registry.group is not None:
        raise EpStateError("ep_bootstrap was already called in this process")
    size = check_group(dist.group.WORLD if ep_group is None else ep_group)
    ep_group = dist.group.WORLD if ep_group is None else ep_group
    if size < 2:
        raise ConfigError(f"ep_bootstrap requires ep_group.size() >= 2 (got {size}).")
    num_experts = _integer("num_experts", num_experts, 1)
    max_tokens_per_rank = _integer("max_tokens_per_rank", max_tokens_per_rank, 1)
    hidden_dim = _integer("hidden_dim", hidden_dim, 1)
    if num_topk is not None:
        num_topk = _integer("num_topk", num_topk, 1)
    max_num_sms = _integer("max_num_sms", max_num_sms, 0)
    if recv_capacity_per_rank is not None:
        recv_capacity_per_rank = _integer("recv_capacity_per_rank", recv_capacity_per_rank, 1)
    if num_topk is not None and num_topk > num_experts:
        raise ConfigError(f"ep_bootstrap got num_topk={num_topk}, more than num_experts={num_experts}.")
    if num_experts % size:
        raise ConfigError(f"num_experts {num_experts} is not a multiple of the {size} ranks of ep_group.")
    if check.flag("zero_copy", zero_copy, ConfigError):
        raise ConfigError("ep_bootstrap: zero_copy=True is not supported; pass False.")
    if check.flag("drop_on_overflow", drop_on_overflow, ConfigError) and recv_capacity_per_rank is None:
        raise ConfigError("ep_bootstrap: drop_on_overflow requires recv_capacity_per_rank")
    _require_bf16("max_token_dtype", max_token_dtype)
    _Registry.group = _Group(
        LayerPool(ep_group),
        num_experts,
        max_tokens_per_rank,
        hidden_dim,
        num_topk,
        recv_capacity_per_rank,
        max_num_sms,
        drop_on_overflow,
        max_token_dtype,
    )


def _integer(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except (TypeError, RuntimeError):  # also raised by tensors without data
        number = least - 1
    if not least <= number < 1 << 31 or isinstance(value, bool):
        raise ConfigError(f"ep_bootstrap requires an integer {name} >= {least} (got {check.shown(value)}).")
    return number


def is_ep_bootstrapped() -> bool:
    """Whether `ep_bootstrap` was called, and `ep_finalize` not since."""
    return _Registry.group is not None


def __getattr__(name: str) -> Any:
    """`_BOOTSTRAPPED`, which Megatron's main branch has read in place of `is_ep_bootstrapped`."""
    if name == "_BOOTSTRAPPED":
        return is_ep_bootstrapped()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def ep_prepare(buffer: EpBuffer, topk_idx: torch.Tensor) -> torch.Tensor:
    """Count the rows that this rank will receive. Collective; `ep_dispatch` does not need it.

    topk_idx: [..., K] int32 or int64, -1 = dropped.

    Sets `buffer.tokens_per_expert` and `buffer.total_recv_tokens` as a dispatch of these ids does, and returns the
    first: [num_local_experts] int64.

    Raises:
        EpStateError: before `ep_bootstrap`. InputError: topk_idx has another type, dtype or device.
    """
    _check_buffer("ep_prepare", buffer)
    group = _Registry.group
    if group is None:
        raise EpStateError("ep_prepare requires ep_bootstrap() to be called first.")
    ids = check.tensor("topk_idx", topk_idx, None, (torch.int32, torch.int64), buffer.device).flatten().long()
    # The extra bin counts dropped assignments.
    kept = torch.where((ids >= 0) & (ids < group.num_experts), ids, group.num_experts)
    counts = torch.zeros(group.num_experts + 1, dtype=torch.int64, device=buffer.device)
    counts.scatter_add_(0, kept, torch.ones_like(kept))
    dist.all_reduce(counts, group=group.pool.group)
    local, align = buffer.num_local_experts, max(buffer.alignment, 1)
    mine = counts[group.pool.rank * local :][:local]
    offsets = pad(((mine + (align - 1)) // align * align).cumsum(0), (1, 0))
    buffer.total_recv_tokens = offsets[-1:]
    if buffer.recv_capacity_per_rank is not None:
        offsets = offsets.clamp(max=buffer.recv_capacity_per_rank)
    buffer.tokens_per_expert = offsets.diff()
    return buffer.tokens_per_expert


def ep_finalize() -> None:
    """Free the symmetric memory of all buffers. Collective, idempotent."""
    group, _Registry.group = _Registry.group, None
    if group is not None:
        for layer in group.pool.layers.values():
            autograd.leave(layer)
        group.pool.close()


def _require_bf16(name: str, dtype: Any) -> None:
    if dtype is not torch.bfloat16:
        raise InputError(f"expert parallelism takes bfloat16 payloads; got {name}.dtype={check.shown(dtype)}.")


def _payload(recipe: Recipe | None, which: str) -> str | None:
    if recipe is not None and not isinstance(recipe, MXFP8BlockScaling):
        raise InputError(f"{which} supports MXFP8BlockScaling only; got {type(recipe).__name__}.")
    return None if recipe is None else "mxfp8"


def _room_for(recipe: Recipe | None) -> Callable[[str, torch.Tensor, Sequence[int], torch.dtype], torch.Tensor]:
    """Function that finds room for rows of a recipe in a tensor of the caller."""
    return room if recipe is None else room_of_mxfp8


class EpBuffer:
    """State of one dispatch, its combine, and both backward passes.

    A buffer may be reused at any time: each backward pass keeps its own state.

    Arguments:
        top_k, max_tokens_per_rank, hidden_dim, num_local_experts: those of `ep_bootstrap`.
        recv_capacity_per_rank: at most that of `ep_bootstrap`; None if that is None.
        alignment: every expert's rows start at a multiple of it; 0 and 1: no padding; else a power of two.
        payload_dtype: torch.bfloat16.
        device: accepted; the layer's device is used.
        dispatch_fwd_quant_recipe: MXFP8BlockScaling(): tokens travel and arrive in MXFP8; None: in their own dtype.
        combine_bwd_quant_recipe: the same for the gradient that combine sends back.

    Attributes, of the last `ep_dispatch`:
        tokens_per_expert: [num_local_experts] int64, rows of each expert with padding: `m_splits` of a GroupedLinear.
        total_recv_tokens: [1] int64, rows for this rank with padding, including rows beyond the capacity.

    Raises:
        EpStateError: before `ep_bootstrap`.
        InputError: an argument that does not fit `ep_bootstrap`.
    """

    def __init__(
        self,
        top_k: int,
        max_tokens_per_rank: int,
        hidden_dim: int,
        num_local_experts: int,
        recv_capacity_per_rank: int | None = None,
        alignment: int = 0,
        payload_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | None = None,
        dispatch_fwd_quant_recipe: Recipe | None = None,
        combine_bwd_quant_recipe: Recipe | None = None,
    ) -> None:
        group = _Registry.group
        if group is None:
            raise EpStateError("EpBuffer requires ep_bootstrap() to be called first.")
        alignment = check.integer("alignment", alignment, 0)
        if alignment & (alignment - 1):
            raise InputError(f"alignment must be 0, 1, or a power of two (got {alignment}).")
        self.eager = group.recv_capacity_per_rank is None
        if not self.eager and recv_capacity_per_rank is None:
            raise InputError(
                "EpBuffer requires recv_capacity_per_rank unless the EP group was bootstrapped in eager mode "
                "(recv_capacity_per_rank omitted)."
            )
        _require_bf16("payload", payload_dtype)
        local = group.num_experts // group.pool.world_size
        for name, given, fixed in (
            ("top_k", top_k, top_k if group.num_topk is None else group.num_topk),
            ("hidden_dim", hidden_dim, group.hidden_dim),
            ("num_local_experts", num_local_experts, local),
        ):
            if check.integer(name, given, 1) != fixed:
                raise InputError(f"EpBuffer got {name}={given}, ep_bootstrap fixed {fixed}.")
        limits: list[tuple[str, Any, int]] = [("max_tokens_per_rank", max_tokens_per_rank, group.max_tokens_per_rank)]
        if recv_capacity_per_rank is not None:
            limits.append(("recv_capacity_per_rank", recv_capacity_per_rank, group.recv_capacity_per_rank or 0))
        for name, asked, most in limits:
            if check.integer(name, asked, 1) > most:
                raise InputError(f"EpBuffer got {name}={asked}, more than the {most} of ep_bootstrap.")
        self.top_k, self.alignment, self.max_tokens_per_rank = top_k, alignment, max_tokens_per_rank
        self.recv_capacity_per_rank = recv_capacity_per_rank
        self.hidden_dim, self.num_local_experts, self.payload_dtype = hidden_dim, num_local_experts, payload_dtype
        self.zero_copy = False
        self.drop_on_overflow = group.drop_on_overflow
        self.dispatch_fwd_quant_recipe = dispatch_fwd_quant_recipe
        self.combine_bwd_quant_recipe = combine_bwd_quant_recipe
        there = _payload(dispatch_fwd_quant_recipe, "EP block-scaled dispatch")
        back = _payload(combine_bwd_quant_recipe, "EP combine backward")
        options = (max(alignment, 1), recv_capacity_per_rank)
        self._layer = group.layer(top_k, there, *options)
        # combine's gradient is dispatched, by a second layer if its format differs from the tokens' format.
        self._gradient_layer = group.layer(top_k, back, *options)
        self.device = self._layer.context.device
        self.tokens_per_expert = torch.zeros(num_local_experts, dtype=torch.int64, device=self.device)
        self.total_recv_tokens = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._desc: EPAllToAllLayoutDesc | None = None
        self._topk_idx: torch.Tensor | None = None


@check.renamed(input="tokens", exp_indices="topk_idx", weight="topk_weights")
def ep_dispatch(
    buffer: EpBuffer,
    tokens: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    recv_tokens: torch.Tensor | None = None,
    recv_topk_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Send tokens to their experts; differentiable. Collective, and so is its backward pass.

    Arguments:
        tokens: [..., H] bf16, T rows. topk_idx: [..., K] int32 or int64, -1 = dropped. topk_weights: [..., K] float32.
        recv_tokens, recv_topk_weights: tensors [at least P, H] bf16 and [at least P] float32 into which the outputs are
            copied; None: outputs are allocated. Rows in MXFP8 are copied into a contiguous recv_tokens of any shape and
            dtype with P * (H + H / 32) bytes or more: their elements, then their scales.

    Returns:
        recv_tokens [P, H], expert-major: bf16, or an MXTensor with `dispatch_fwd_quant_recipe`, which GroupedLinear
        takes; their weights [P] float32; and `buffer.tokens_per_expert`. P is the capacity, or the number of rows that
        arrived.

    Raises:
        InputError: another dtype, or output tensors that do not fit.
        CapacityError: rows beyond the capacity, without drop_on_overflow.
        Others: as `EPAll2AllLayer.dispatch`.
    """
    _check_buffer("ep_dispatch", buffer)
    given = tokens, topk_idx, topk_weights
    try:
        _check_dispatch(buffer, given, recv_tokens, recv_topk_weights)
    except InputError:
        if not torch.compiler.is_compiling():
            with contextlib.suppress(PeerFailed, WaitTimeout):  # the caller gets the cause
                buffer._layer.refuse(combines=False)
        raise
    if tokens.dim() > 2:
        tokens, topk_idx, topk_weights = (t.flatten(0, -2) for t in (tokens, topk_idx, topk_weights))
    rows, weights, desc = autograd.dispatch(buffer._layer, tokens, topk_idx, topk_weights)
    assert weights is not None, "weights were given"
    with torch.no_grad():
        offsets = desc.expert_offsets.to(torch.int64)
        buffer.tokens_per_expert = offsets.diff()
        buffer.total_recv_tokens = offsets[-1:] + desc.overflow
    buffer._desc, buffer._topk_idx = desc, topk_idx
    if not buffer.eager and not buffer.drop_on_overflow:
        _check_overflow(buffer, desc)
    if recv_tokens is not None:
        room_for = _room_for(buffer.dispatch_fwd_quant_recipe)
        rows = Into.apply(rows, room_for("recv_tokens", recv_tokens, rows.shape, rows.dtype))
    if recv_topk_weights is not None:
        weights = Into.apply(weights, room("recv_topk_weights", recv_topk_weights, weights.shape, weights.dtype))
    return rows, weights, buffer.tokens_per_expert


def _check_dispatch(buffer: EpBuffer, given: tuple[Any, Any, Any], recv_tokens: Any, recv_topk_weights: Any) -> None:
    """Raise InputError unless these are arguments of `ep_dispatch`; given: tokens, ids, weights."""
    tokens, topk_idx, topk_weights = given
    for name, each in zip(("tokens", "topk_idx", "topk_weights"), given, strict=True):
        if not isinstance(each, MXFP8TensorStorage):
            check.tensor(name, each)
    if topk_weights.dtype != torch.float32:
        raise InputError(
            f"topk_weights must be float32; got dtype={topk_weights.dtype}. "
            "Cast with topk_weights.float() before calling."
        )
    if isinstance(tokens, MXFP8TensorStorage | MXTensor):
        raise InputError(
            "ep_dispatch takes bfloat16 tokens and quantises them itself when the buffer's dispatch_fwd_quant_recipe "
            "is set; a tensor in MXFP8 is not accepted."
        )
    _require_bf16("tokens", tokens.dtype)
    if min(tokens.dim(), topk_idx.dim(), topk_weights.dim()) < 2:
        raise InputError(
            f"tokens are {list(tokens.shape)}, topk_idx {list(topk_idx.shape)}, topk_weights "
            f"{list(topk_weights.shape)}; they must be [..., H], [..., K] and [..., K]."
        )
    check.tensor("topk_idx", topk_idx, None, (torch.int32, torch.int64), buffer.device)
    check.tensor("tokens", tokens, device=buffer.device)
    check.tensor("topk_weights", topk_weights, device=buffer.device)
    least = buffer.recv_capacity_per_rank or 0
    if recv_tokens is not None:
        room_for = _room_for(buffer.dispatch_fwd_quant_recipe)
        room_for("recv_tokens", recv_tokens, (least, buffer.hidden_dim), buffer.payload_dtype)
    if recv_topk_weights is not None:
        room("recv_topk_weights", recv_topk_weights, (least,), torch.float32)


def _check_overflow(buffer: EpBuffer, desc: EPAllToAllLayoutDesc) -> None:
    if torch.compiler.is_compiling() or (buffer.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return
    lost = int(desc.overflow)
    if lost:
        padding = ", padding included," if buffer.alignment > 1 else ""
        raise CapacityError(
            f"ep_dispatch: {lost} rows{padding} exceed the {buffer.recv_capacity_per_rank} of recv_capacity_per_rank. "
            "Raise it, or pass drop_on_overflow=True to ep_bootstrap."
        )


@check.renamed(input="expert_out")
def ep_combine(
    buffer: EpBuffer,
    expert_out: torch.Tensor,
    *,
    num_local_tokens: int | None = None,
    grad_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum the experts' outputs of each token, without weights; differentiable. Collective, and so is its backward pass.
    Sums are in float32, rounded to bf16 on each rank, before they are sent, and at the end.

    Arguments:
        expert_out: [P, H] bf16, one row per row of `ep_dispatch`, weighted by the caller.
        num_local_tokens: rows of the result; None: `buffer.max_tokens_per_rank`. Rows past the dispatched tokens are
            zero.
        grad_out: tensor [at least P, H] bf16 into which the gradient of expert_out is copied; None: it is allocated. A
            gradient in MXFP8 is copied like rows into the recv_tokens of `ep_dispatch`.

    Returns [num_local_tokens, H] bf16.

    Raises:
        EpStateError: no dispatch with this buffer.
        InputError: another dtype, fewer rows than the dispatch had tokens, or a grad_out that does not fit.
    """
    _check_buffer("ep_combine", buffer)
    desc, topk_idx = buffer._desc, buffer._topk_idx
    if desc is None or topk_idx is None:
        raise EpStateError("ep_combine got a buffer without a dispatch. Call ep_dispatch with it first.")
    check.tensor("expert_out", expert_out, device=buffer.device)
    _require_bf16("expert_out", expert_out.dtype)
    if num_local_tokens is not None:
        num_local_tokens = check.integer("num_local_tokens", num_local_tokens, 0)
    if grad_out is not None:
        room_for = _room_for(buffer.combine_bwd_quant_recipe)
        expert_out = GradientInto.apply(expert_out, room_for("grad_out", grad_out, expert_out.shape, expert_out.dtype))
    tokens = desc.num_dispatch_token_cur_rank
    wanted = buffer.max_tokens_per_rank if num_local_tokens is None else num_local_tokens
    if wanted < tokens:
        raise InputError(f"num_local_tokens is {wanted}, but ep_dispatch got {tokens} tokens.")
    if buffer._gradient_layer is buffer._layer:
        out = autograd.combine(buffer._layer, expert_out, desc)
    else:
        out = _CombineBack.apply(expert_out, buffer, desc, topk_idx)
    return pad(out, (0, 0, 0, wanted - tokens)) if wanted > tokens else out


def _ep_dispatch_raw(
    buffer: EpBuffer,
    topk_idx: torch.Tensor,
    tokens: torch.Tensor,
    topk_weights: torch.Tensor,
    recv_tokens: torch.Tensor,
    recv_topk_weights: torch.Tensor,
) -> None:
    """`ep_dispatch` into the caller's tensors, without gradients: TransformerEngine's primitive of this name."""
    with torch.no_grad():
        ep_dispatch(
            buffer, tokens, topk_idx, topk_weights, recv_tokens=recv_tokens, recv_topk_weights=recv_topk_weights
        )


def _ep_combine_raw(buffer: EpBuffer, expert_out: torch.Tensor, result: torch.Tensor) -> None:
    """`ep_combine` into `result` [T, H], without gradients: TransformerEngine's primitive of this name."""
    check.tensor("result", result)
    shape = (result.shape[0] if result.dim() else 0, buffer.hidden_dim)
    into = room("result", result, shape, expert_out.dtype)
    with torch.no_grad():
        into.copy_(ep_combine(buffer, expert_out, num_local_tokens=shape[0]))


def _check_buffer(call: str, buffer: Any) -> None:
    if not isinstance(buffer, EpBuffer):
        raise InputError(f"buffer of {call} must be an EpBuffer, got {check.shown(buffer)}.")


class _CombineBack(torch.autograd.Function):
    """Combine with one layer; another layer dispatches the gradient with the same routing."""

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, buffer: EpBuffer, desc: EPAllToAllLayoutDesc, topk_idx: torch.Tensor
    ) -> torch.Tensor:
        ctx.layer, ctx.used = buffer._gradient_layer, desc.expert_offsets[-1]
        ctx.save_for_backward(topk_idx)
        return buffer._layer.combine(y.contiguous(), desc)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (topk_idx,) = ctx.saved_tensors
        # Equal expert ids give equal row order: slots do not depend on the order of atomics.
        with ctx.layer.context.backward_pass():
            rows, _, _ = ctx.layer.dispatch(grads[0].contiguous(), topk_idx)
        in_use = (torch.arange(rows.shape[0], device=rows.device) < ctx.used).unsqueeze(1)
        if not isinstance(rows, MXTensor):
            return torch.where(in_use, rows, 0.0), None, None, None
        # Zero elements are zero under any scale, so clearing the bytes of unused rows is enough.
        data, scale = (torch.where(in_use, part.view(torch.uint8), 0) for part in (rows.qdata, rows.scale))
        clean = MXTensor.from_qdata_and_scales(data.view(rows.qdata.dtype), scale, rows.dtype)
        return clean, None, None, None
