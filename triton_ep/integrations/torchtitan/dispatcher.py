"""TokenDispatch: torchtitan's token dispatcher over EPAll2AllLayer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from triton_ep import autograd
from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.distributed import check_group
from triton_ep.errors import ConfigError, InputError
from triton_ep.integrations import arguments as check
from triton_ep.integrations.layer_pool import LayerSizes, free_shared, shared_pool
from triton_ep.layer import EPAll2AllLayer


@dataclass(frozen=True, kw_only=True)
class DispatchMetadata:
    """State of a `dispatch` that its `combine` needs.

    Attributes:
        scores: [R] float32, scores of the received rows; differentiable.
        layout_desc: descriptor of the dispatch; `layout_desc.overflow` counts rows that did not fit a capacity.
    """

    scores: torch.Tensor
    layout_desc: EPAllToAllLayoutDesc


class TokenDispatch:
    """A token dispatcher with torchtitan's methods. All calls are collective over the mesh, backward passes too.

    Letters: T tokens of this rank, K top_k, D hidden_dim, R received rows, e experts of this rank.

    Args:
        num_experts, top_k: experts over all ranks, and per token.
        hidden_dim: D.
        num_max_tokens_per_rank: largest T.
        dtype: dtype of rows.
        pad_multiple: every expert's rows start at a multiple of it; None = 1.
        non_blocking_capacity_factor: None: R is the number of rows received; the host waits for it. f: R is the
            fraction f of the most rows that can arrive, num_max_tokens_per_rank * ranks * min(top_k, e), rounded up
            to pad_multiple; the host does not wait, and rows that do not fit are dropped and counted, with their
            padding, in `overflow`.
        payload: None, or "mxfp8" for rows in MXFP8 on the wire, both ways; rows then arrive as an `MXTensor`.
        num_sm, local_world_size, timeout_s: as for `EPAll2AllLayer`; None: as tuned, and ranks per node of the job.
        enable_local_combine: combine, and the gradient of dispatch, sum the rows of a token on each rank first, round
            that sum, and send one row per (token, rank). False: they send all rows, and round once.
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
        enable_local_combine: bool = True,
    ) -> None:
        self.num_experts, self.top_k = num_experts, top_k
        self.hidden_dim, self.num_max_tokens_per_rank, self.dtype = hidden_dim, num_max_tokens_per_rank, dtype
        self.pad_multiple = pad_multiple
        self.non_blocking_capacity_factor = non_blocking_capacity_factor
        self.payload, self.num_sm, self.timeout_s = payload, num_sm, timeout_s
        self.local_world_size, self.enable_local_combine = local_world_size, enable_local_combine
        self.ep_mesh: Any = None
        self.layer: EPAll2AllLayer | None = None
        self.overflow: torch.Tensor | None = None

    def wire_meshes(self, *, ep_mesh: Any) -> None:
        """Set the mesh of the expert-parallel ranks, and create the layer. Collective.

        Raises:
            ConfigError: no mesh; this dispatcher needs expert parallelism.
        """
        if ep_mesh is None:
            raise ConfigError(
                "this token dispatcher needs expert parallelism, but ep_mesh is None (expert_parallel_degree=1). Use "
                "torchtitan's own dispatcher instead."
            )
        if not callable(getattr(ep_mesh, "get_group", None)):
            raise ConfigError(f"ep_mesh must be a DeviceMesh, got {check.shown(ep_mesh)}.")
        self.ep_mesh = ep_mesh
        self.init_buffer()

    def init_buffer(self) -> None:
        """Create the layer, or use the layer of an equal dispatcher. Collective.

        Raises:
            ConfigError: a size is missing, or the sizes cannot work.
            HeapError: not enough symmetric memory.
        """
        if self.ep_mesh is None:
            raise ConfigError("init_buffer was called before wire_meshes(ep_mesh=...), which calls it itself.")
        for name in ("hidden_dim", "num_max_tokens_per_rank"):
            if getattr(self, name) is None:
                raise ConfigError(
                    f"{name} is not set. torchtitan fills it from the model's and the training's configuration "
                    "(update_ep_token_dispatcher_config); without torchtitan, pass it."
                )
        names = ("num_max_tokens_per_rank", "hidden_dim", "top_k", "num_experts")
        max_tokens, hidden, top_k, num_experts = (
            check.integer(name, getattr(self, name), 1, ConfigError) for name in names
        )
        group = self.ep_mesh.get_group()
        ranks = check_group(group)
        align = check.optional_integer("pad_multiple", self.pad_multiple, 0, ConfigError) or 1
        per_node = check.optional_integer("local_world_size", self.local_world_size, 1, ConfigError)
        capacity = None
        factor = self.non_blocking_capacity_factor
        if factor is not None:
            if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < 1 << 31:
                raise ConfigError(f"non_blocking_capacity_factor must be above 0, got {check.shown(factor)}.")
            most = max_tokens * ranks * min(top_k, num_experts // ranks)
            capacity = max(-(-int(most * factor) // align), 1) * align
        self._check_options()
        sizes = LayerSizes(
            hidden,
            top_k,
            num_experts,
            self.dtype,
            self.num_sm,
            self.timeout_s,
            alignment=align,
            capacity=capacity,
            max_tokens=max_tokens,
            payload=self.payload,
            enable_local_combine=check.flag("enable_local_combine", self.enable_local_combine, ConfigError),
        )
        self.layer = shared_pool("torchtitan", group, per_node).get(sizes)
        autograd.enter(self.layer)  # so that torch.compile may trace the calls

    def _check_options(self) -> None:
        """Refuse options that could not be a key of the layer pool."""
        check.dtype("dtype", self.dtype)
        check.optional_integer("num_sm", self.num_sm, 1, ConfigError)
        check.seconds("timeout_s", self.timeout_s)
        if self.payload is not None and not isinstance(self.payload, str):
            raise ConfigError(f'payload must be None or "mxfp8", got {check.shown(self.payload)}.')

    @check.renamed(input="x_TD", exp_indices="topk_expert_ids_TK", weight="topk_scores_TK")
    def dispatch(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, DispatchMetadata]:
        """Send tokens to their experts. Differentiable in x_TD and the scores.

        Args:
            x_TD: [T, D]; T may differ between ranks.
            topk_scores_TK: [T, K]; applied by `combine`.
            topk_expert_ids_TK: [T, K] int32 or int64; -1 = dropped.
            num_local_tokens_per_expert_E: ignored.

        Returns:
            (rows [R, D] by expert, source rank, token; number of rows of each local expert [e] int64 on the device,
            padding included; metadata for `combine`). With a capacity, rows past the last expert's are undefined.

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

    @check.renamed(input="routed_output_RD", weights="topk_scores_TK")
    def combine(
        self, routed_output_RD: torch.Tensor, metadata: DispatchMetadata, x_TD: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Send expert outputs back; returns [T, D], the sum over k of scores times rows, in float32, rounded per
        rank and at the end; without `enable_local_combine` once.

        Raises:
            ConfigError: before `wire_meshes`. Others: as `EPAll2AllLayer.combine`.
        """
        rows = check.tensor("routed_output_RD", routed_output_RD, 2, (), self._made().context.device).contiguous()
        if not isinstance(metadata, DispatchMetadata):
            raise InputError(f"metadata must come from dispatch, got {check.shown(metadata)}.")
        return autograd.combine(self._made(), rows, metadata.layout_desc, metadata.scores)

    def _made(self) -> EPAll2AllLayer:
        if self.layer is None:
            raise ConfigError("this dispatcher has no mesh: call wire_meshes(ep_mesh=...) first, on all its ranks.")
        return self.layer


def close_layers() -> None:
    """Free the symmetric memory of all dispatchers. Collective, idempotent; call it at the end of training."""
    free_shared("torchtitan")
