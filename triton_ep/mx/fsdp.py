"""FSDP's all-gather in MX: quantise a sharded weight before it is gathered.

    quantize_(model, MXLinearConfig())
    gather_in_mx_(model)
    fully_shard(model)

Each rank keeps its rows of the weight in high precision, for the optimizer. For a forward or backward pass it quantises
them along the row, in the format that the layer's first product uses anyway, and FSDP gathers elements and scales: 33
bytes instead of 64 in e4m3. The layer's first product is bit-identical to that of weights gathered in high precision.
dx uses the values of the gathered weight.

Source: torch.distributed.fsdp, the tensor extension points `fsdp_pre_all_gather` and `fsdp_post_all_gather`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from triton_ep.errors import InputError
from triton_ep.mx.formats import elem_format
from triton_ep.mx.linear import MXLinear, MXLinearConfig
from triton_ep.mx.tensor import SCALE_DTYPE, MXTensor

aten = torch.ops.aten

_STAYS = frozenset(
    getattr(getattr(aten, packet), overload)
    for packet, overload in (
        ("empty_like", "default"),
        ("new_zeros", "default"),
        ("slice", "Tensor"),
        ("split", "Tensor"),
        ("copy_", "default"),
        ("view", "default"),
        ("as_strided", "default"),
        ("_to_copy", "default"),
        ("_pin_memory", "default"),
        ("clone", "default"),
        ("detach", "default"),
        ("alias", "default"),
    )
)
"""Operations by which FSDP shards a parameter; their results are still gathered in MX."""


class MXShard(torch.Tensor):
    """A weight [N, K] in high precision, or some of its rows, that FSDP gathers as an MXTensor.

    Operations run on the plain tensor; those by which FSDP shards, moves and copies a parameter return an MXShard.

    Arguments:
        rows: [n, K] bf16, fp16 or fp32; not copied.
        config: configuration of the layer, for the weight's format.
        num_rows: N of the whole weight.
    """

    rows: torch.Tensor
    config: MXLinearConfig
    num_rows: int

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[MXShard], rows: torch.Tensor, config: MXLinearConfig, num_rows: int) -> MXShard:
        """Wrap the rows."""
        return torch.Tensor._make_wrapper_subclass(
            cls,
            rows.shape,
            strides=rows.stride(),
            storage_offset=rows.storage_offset(),
            dtype=rows.dtype,
            device=rows.device,
            requires_grad=rows.requires_grad,
        )

    def __init__(self, rows: torch.Tensor, config: MXLinearConfig, num_rows: int) -> None:
        self.rows = rows
        self.config = config
        self.num_rows = num_rows

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"MXShard({list(self.shape)} of {self.num_rows} rows, {self.dtype}, gathered as {self.config.weight_dtype})"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = next(each for each in _shards((args, kwargs or {})))
        plain_args, plain_kwargs = tree_map_only(cls, lambda shard: shard.rows, (args, kwargs or {}))
        out = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable and isinstance(args[0], MXShard):
            return args[0]  # modified in place
        if func not in _STAYS:
            return out
        return tree_map_only(torch.Tensor, lambda rows: MXShard(rows, first.config, first.num_rows), out)

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["rows"], {"config": self.config, "num_rows": self.num_rows}

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: dict[str, Any], outer_size: Any, outer_stride: Any
    ) -> MXShard:
        return MXShard(inner["rows"], **context)

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
        """Bytes to gather, with equal row counts on all ranks, and the metadata for `fsdp_post_all_gather`."""
        rows_per_rank = -(-self.num_rows // mesh.size())
        rows = nn.functional.pad(self.rows, (0, 0, 0, rows_per_rank - self.rows.shape[0]))
        config = self.config
        mx = MXTensor.to_mx(rows, config.weight_dtype, config.block_size, config.scaling_mode)
        return (mx.qdata.view(torch.uint8), mx.scale.view(torch.uint8)), (self.num_rows,)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: tuple[int, ...],
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """The whole weight as an MXTensor over the gathered bytes."""
        if out is not None:
            return None  # `out` is a view of the gathered bytes, which FSDP has rewritten
        (num_rows,) = metadata
        fmt = elem_format(self.config.weight_dtype)
        qdata, scale = (part[:num_rows] for part in all_gather_outputs)
        weight = MXTensor(
            qdata.view(fmt.storage), scale.view(SCALE_DTYPE), fmt.dtype, self.config.block_size, param_dtype
        )
        return weight, all_gather_outputs


def _shards(tree: Any) -> list[MXShard]:
    return [each for each in torch.utils._pytree.tree_leaves(tree) if isinstance(each, MXShard)]


def gather_in_mx_(model: nn.Module) -> None:
    """Make FSDP gather the weights of the model's MXLinear layers in MX; call it before `fully_shard`.

    Raises:
        InputError: the model has no MXLinear, one is sharded already, or rows are not whole blocks. The model is
            unchanged then.
    """
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, MXLinear)]
    if not layers:
        raise InputError("the model has no MXLinear; call quantize_(model, MXLinearConfig()) first.")
    for name, layer in layers:
        if type(layer.weight.data) is not torch.Tensor:
            kind = type(layer.weight.data).__name__
            raise InputError(f"the weight of {name or 'the model'} is a {kind}; call gather_in_mx_ before fully_shard.")
        if layer.in_features % layer.config.block_size:
            raise InputError(
                f"{name or 'the model'} has {layer.in_features} input features, blocks have {layer.config.block_size} "
                "values; rows of whole blocks are gathered."
            )
    for _, layer in layers:
        weight = layer.weight
        shard = MXShard(weight.detach(), layer.config, layer.out_features)
        layer.weight = nn.Parameter(shard, requires_grad=weight.requires_grad)
