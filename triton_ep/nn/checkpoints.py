"""State dicts of models with MoE modules whose experts are DTensors, for torch.distributed.checkpoint.

    torch.distributed.checkpoint.save(sharded_state_dict(model), checkpoint_id=folder)          # 4 ranks, say
    torch.distributed.checkpoint.load(sharded_state_dict(model), checkpoint_id=folder)          # later, on 2

`state_dict()` of a MoE module has this rank's experts, under the same names on every rank. A DTensor says which of all
experts a rank holds, so each rank reads what it needs, whatever the number of ranks that saved the checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from triton_ep.errors import ConfigError
from triton_ep.nn.moe import MoE

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_meshes: WeakKeyDictionary[Any, dict[tuple[int, ...], DeviceMesh]] = WeakKeyDictionary()


def sharded_state_dict(module: nn.Module) -> dict[str, Any]:
    """`module.state_dict()` with the experts of every MoE module in it as DTensors [E, ...] over all ranks. Collective.

    The tensors share memory with the parameters. torch.distributed.checkpoint loads into them in place without moving
    torch's version counters, so the next pass builds the quantised copies of the weights anew. A parameter that FSDP
    shards becomes a DTensor over the expert-parallel ranks first, then over FSDP's.

    Raises:
        ConfigError: FSDP shards the experts along another dimension than the expert dimension.
    """
    state = dict(module.state_dict(keep_vars=True))
    for prefix, moe in module.named_modules():
        if isinstance(moe, MoE):
            moe.invalidate()
            for name, parameter in moe.experts.named_parameters(recurse=False):
                key = ".".join(part for part in (prefix, "experts", name) if part)
                state[key] = _over_all_ranks(parameter, moe._connection.group, moe.experts.num_experts, key)
    return {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def _over_all_ranks(parameter: torch.Tensor, group: Any, num_experts: int, name: str) -> DTensor:
    """DTensor [E, ...] of a parameter that holds this rank's experts."""
    from torch.distributed.tensor import DTensor, Shard

    local = parameter.detach()
    ranks: list[int] = [dist.get_rank()]
    if isinstance(local, DTensor):
        mesh = local.device_mesh
        if mesh.ndim != 1 or local.placements != (Shard(0),):
            raise ConfigError(
                f"{name} is sharded as {local.placements} over {mesh}; experts in checkpoints are sharded along "
                "dimension 0 over one dimension of a mesh. Pass fully_shard a mesh of one dimension."
            )
        ranks = mesh.mesh.flatten().tolist()
        local = local.to_local()
    mesh = _mesh(group, tuple(ranks), local.device.type)
    shape = torch.Size((num_experts, *parameter.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)] * mesh.ndim, run_check=False, shape=shape, stride=stride)


def _mesh(group: Any, ranks: tuple[int, ...], device_type: str) -> DeviceMesh:
    """Mesh of the expert-parallel ranks; with several `ranks`, a second dimension for the ranks that share experts."""
    kept = _meshes.setdefault(group, {})
    if ranks not in kept:
        if len(ranks) == 1:
            kept[ranks] = DeviceMesh.from_group(group, device_type)
        else:
            table: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(table, ranks, group=group)
            kept[ranks] = DeviceMesh(device_type, torch.tensor(table))
    return kept[ranks]
