"""torchtitan's MoE over EPAll2AllLayer: a token dispatcher, and the grouped product of the experts.

    torchtitan                                 here
    ...TokenDispatcher.Config(num_experts,     TritonEPTokenDispatcher.Config; torchtitan fills hidden_dim and
      top_k, ...)                                num_max_tokens_per_rank, as for its HybridEP
    wire_meshes(ep_mesh=), init_buffer()       one EPAll2AllLayer per kind, shared by all MoE layers of the model
    dispatch(x, scores, ids, counts)           triton_ep.autograd.dispatch, `alignment` = pad_multiple
    num_tokens_per_local_expert_e              layout_desc.expert_offsets.diff(), padding included
    combine(rows, metadata, x)                 triton_ep.autograd.combine with the scores: product and sum in float32
    non_blocking_capacity_factor               `capacity`: no host synchronisation; overflow is counted, not silent
    GroupedExperts._grouped_mm                 triton_ep's grouped GEMM, in bf16 or MXFP8

`TritonEPTokenDispatcher`, `TritonEPGroupedExperts` and `use_triton_ep` are made of torchtitan's classes and need it
installed; the rest does not. Source: torchtitan/models/common/{token_dispatcher,moe}.py; docs/how-to/torchtitan.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from triton_ep import autograd
from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.distributed import check_group
from triton_ep.errors import ConfigError, InputError
from triton_ep.integrations import arguments as check
from triton_ep.integrations.hybrid_ep_layers import ranks_per_node
from triton_ep.layer import EPAll2AllLayer
from triton_ep.mx.grouped_mm import _to_mxfp8_then_scaled_grouped_mm
from triton_ep.ops.grouped_gemm import grouped_gemm, grouped_gemm_dgrad, grouped_gemm_wgrad

__all__ = ["DispatchMetadata", "TokenDispatch", "close_layers", "grouped_mm"]

_OF_TORCHTITAN = ("TritonEPGroupedExperts", "TritonEPTokenDispatcher", "use_triton_ep")
_layers: dict[tuple[Any, ...], EPAll2AllLayer] = {}


def __getattr__(name: str) -> Any:
    if name not in _OF_TORCHTITAN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from triton_ep.integrations import torchtitan_classes

    return getattr(torchtitan_classes, name)


@dataclass(frozen=True, kw_only=True)
class DispatchMetadata:
    """What a combine needs of its dispatch.

    Attributes:
        scores: [R] float32, of the received rows; differentiable.
        layout_desc: of the dispatch; `layout_desc.overflow` counts rows that did not fit a capacity.
    """

    scores: torch.Tensor
    layout_desc: EPAllToAllLayoutDesc


class TokenDispatch:
    """A token dispatcher with torchtitan's methods. All calls are collective over the mesh, backward passes too.

    Letters: T tokens of this rank, K top_k, D hidden_dim, R received rows, e experts of this rank.

    Args:
        num_experts, top_k: over all ranks, and per token.
        hidden_dim: D.
        num_max_tokens_per_rank: most T.
        dtype: of rows.
        pad_multiple: every expert's rows start at a multiple of it; None = 1.
        non_blocking_capacity_factor: None: R is what arrives, and the host waits for the number. f: R is a part f of
            the most that can arrive, num_max_tokens_per_rank * ranks * min(top_k, e), rounded up to pad_multiple, and
            nothing waits; rows that do not fit are left out, and counted in `overflow`.
        payload: None, or "mxfp8" for rows in MXFP8 on the wire, both ways; rows then arrive as an `MXTensor`.
        num_sm, local_world_size, timeout_s: as for `EPAll2AllLayer`; None: as tuned, ranks per node of the job.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        top_k: int,
        hidden_dim: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        pad_multiple: int | None = None,
        non_blocking_capacity_factor: float | None = None,
        payload: str | None = None,
        num_sm: int | None = None,
        local_world_size: int | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        self.num_experts, self.top_k = num_experts, top_k
        self.hidden_dim, self.num_max_tokens_per_rank, self.dtype = hidden_dim, num_max_tokens_per_rank, dtype
        self.pad_multiple = pad_multiple
        self.non_blocking_capacity_factor = non_blocking_capacity_factor
        self.options = {"payload": payload, "num_sm": num_sm, "timeout_s": timeout_s}
        self.local_world_size = local_world_size
        self.ep_mesh: Any = None
        self.layer: EPAll2AllLayer | None = None
        self.overflow: torch.Tensor | None = None

    def wire_meshes(self, *, ep_mesh: Any) -> None:
        """Take the mesh of the expert-parallel ranks, and make the layer. Collective.

        Raises:
            ConfigError: no mesh: without expert parallelism there is nothing to dispatch to.
        """
        if ep_mesh is None:
            raise ConfigError(
                "this token dispatcher is for expert parallelism, but ep_mesh is None (expert_parallel_degree=1). Use "
                "torchtitan's own dispatcher then."
            )
        if not callable(getattr(ep_mesh, "get_group", None)):
            raise ConfigError(f"ep_mesh must be a DeviceMesh, got {check.shown(ep_mesh)}.")
        self.ep_mesh = ep_mesh
        self.init_buffer()

    def init_buffer(self) -> None:
        """Make the layer, or take one that an equal dispatcher made. Collective.

        Raises:
            ConfigError: a size is missing, or the sizes cannot work.
            HeapError: not enough symmetric memory.
        """
        if self.ep_mesh is None:
            raise ConfigError("init_buffer was called before wire_meshes(ep_mesh=...), which does it by itself.")
        for name in ("hidden_dim", "num_max_tokens_per_rank"):
            if getattr(self, name) is None:
                raise ConfigError(
                    f"{name} is not set. torchtitan fills it from the model's and the training's configuration "
                    "(update_ep_token_dispatcher_config); elsewhere pass it."
                )
        names = ("num_max_tokens_per_rank", "hidden_dim", "top_k", "num_experts")
        max_tokens, hidden, top_k, num_experts = (
            check.integer(name, getattr(self, name), 1, ConfigError) for name in names
        )
        sizes = (max_tokens, hidden, top_k)
        group = self.ep_mesh.get_group()
        ranks = check_group(group)
        align = check.optional_integer("pad_multiple", self.pad_multiple, 0, ConfigError) or 1
        per_node = check.optional_integer("local_world_size", self.local_world_size, 1, ConfigError)
        per_node = ranks_per_node(group) if per_node is None else per_node
        capacity = None
        factor = self.non_blocking_capacity_factor
        if factor is not None:
            if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < 1 << 31:
                raise ConfigError(f"non_blocking_capacity_factor must be above 0, got {check.shown(factor)}.")
            most = max_tokens * ranks * min(top_k, num_experts // ranks)
            capacity = max(-(-int(most * factor) // align), 1) * align
        self._check_options()
        options: dict[str, Any] = {"alignment": align, "capacity": capacity, **self.options}
        members = tuple(dist.get_process_group_ranks(group))
        key = (members, *sizes, num_experts, per_node, self.dtype, *options.values())
        if key not in _layers:
            _layers[key] = EPAll2AllLayer(
                group, *sizes, dist.get_rank(group), num_experts, per_node, ranks, self.dtype, **options
            )
        self.layer = _layers[key]
        autograd.enter(self.layer)  # so that torch.compile may trace the calls

    def _check_options(self) -> None:
        """Refuse what would not even be found among the layers made before."""
        check.dtype("dtype", self.dtype)
        check.optional_integer("num_sm", self.options["num_sm"], 1, ConfigError)
        check.seconds("timeout_s", self.options["timeout_s"])
        if self.options["payload"] is not None and not isinstance(self.options["payload"], str):
            raise ConfigError(f'payload must be None or "mxfp8", got {check.shown(self.options["payload"])}.')

    def dispatch(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, DispatchMetadata]:
        """Send tokens to their experts. Differentiable in x and the scores.

        Args:
            x_TD: [T, D]; T may differ between ranks.
            topk_scores_TK: [T, K]; applied by `combine`.
            topk_expert_ids_TK: [T, K] int32 or int64; -1 = dropped.
            num_local_tokens_per_expert_E: not needed.

        Returns:
            (rows [R, D] by expert, source rank, token; rows of each local expert [e] int64 on the device, padding
            included; metadata for `combine`). Rows of a capacity behind the last expert's are undefined.

        Raises:
            ConfigError: before `wire_meshes`. Others: as `EPAll2AllLayer.dispatch`.
        """
        layer = self._made()
        device = layer.context.device
        check.tensor("x_TD", x_TD, 2, (), device)
        check.tensor("topk_scores_TK", topk_scores_TK, 2, (), device)
        check.tensor("topk_expert_ids_TK", topk_expert_ids_TK, 2, (torch.int32, torch.int64), device)
        if not topk_scores_TK.is_floating_point():
            raise InputError(f"topk_scores_TK must be of a floating-point dtype, got {topk_scores_TK.dtype}.")
        recv_x, scores, desc = autograd.dispatch(
            layer, x_TD.contiguous(), topk_expert_ids_TK.contiguous(), topk_scores_TK.float().contiguous()
        )
        assert scores is not None, "given on all ranks"
        self.overflow = desc.overflow
        return recv_x, desc.expert_offsets.diff().long(), DispatchMetadata(scores=scores, layout_desc=desc)

    def combine(
        self, routed_output_RD: torch.Tensor, metadata: DispatchMetadata, x_TD: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Bring expert outputs back: [T, D], the sum over k of scores times rows, in float32, rounded once.

        Raises:
            ConfigError: before `wire_meshes`. Others: as `EPAll2AllLayer.combine`.
        """
        rows = check.tensor("routed_output_RD", routed_output_RD, 2, (), self._made().context.device).contiguous()
        if not isinstance(metadata, DispatchMetadata):
            raise InputError(f"metadata must be what dispatch returned, got {check.shown(metadata)}.")
        return autograd.combine(self._made(), rows, metadata.layout_desc, metadata.scores)

    def _made(self) -> EPAll2AllLayer:
        if self.layer is None:
            raise ConfigError("no mesh was wired: call wire_meshes(ep_mesh=...) first, on all its ranks.")
        return self.layer


def close_layers() -> None:
    """Free the symmetric memory of all layers that dispatchers made. Collective, idempotent; at the end of training."""
    layers = list(_layers.values())
    _layers.clear()
    for layer in layers:
        layer.finalize()


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b_t, offs)
        return grouped_gemm(a, b_t, offs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (dy,) = grads
        a, b_t, offs = ctx.saved_tensors
        dy = dy.contiguous()
        da = grouped_gemm_dgrad(dy, b_t, offs) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return da, None, None
        # As the weights are stored, [E, N, K], so that an optimizer's update copies nothing.
        return da, grouped_gemm_wgrad(dy, a, offs, b_t.shape[0]).transpose(-2, -1), None


def grouped_mm(A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor, recipe: str = "bf16") -> torch.Tensor:
    """[R, N] bf16: rows of expert e times B_t[e]; differentiable. What `GroupedExperts._grouped_mm` computes.

    Args:
        A: [R, K] bf16; with recipe="mxfp8" an `MXTensor` as well.
        B_t: [e, K, N] bf16, a transposed view of [e, N, K].
        offs: [e] int32 on the device, the row after the last one of each expert.
        recipe: "bf16", or "mxfp8": all three products of a training step from operands quantised to MXFP8.

    Rows after the last expert's: zeros, also in the gradient of A.

    Raises:
        ConfigError: another recipe. InputError: shapes or dtypes that do not go together.
    """
    if not isinstance(recipe, str) or recipe not in ("bf16", "mxfp8"):
        raise ConfigError(f'recipe must be "bf16" or "mxfp8", got {check.shown(recipe)}.')
    for name, given, dim in (("A", A, 2), ("B_t", B_t, 3), ("offs", offs, 1)):
        check.tensor(name, given, dim)
    if recipe == "mxfp8":
        return _to_mxfp8_then_scaled_grouped_mm(A, B_t, offs)
    out: torch.Tensor = _GroupedMM.apply(A, B_t, offs)
    return out
