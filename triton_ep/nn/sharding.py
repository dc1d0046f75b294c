"""Shard experts with FSDP2 and keep its hooks outside a compiled block.

    block = ...                                  # attention, norms, MoE
    fully_shard(block, mesh=everyone, shard_placement_fn=expert_placement(block, mesh["replicas"]))
    block.compile(fullgraph=True)

A separate call `fully_shard(block.moe.experts, mesh=mesh["replicas"])` puts hooks inside the block, which torch.compile
does not trace. Here the hooks of the block itself gather all parameters, outside the compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from triton_ep.errors import ConfigError
from triton_ep.nn.moe import MoE


def expert_placement(module: nn.Module, mesh: DeviceMesh) -> Callable[[nn.Parameter], Any]:
    """A `shard_placement_fn` for `fully_shard(module, mesh=...)` that shards the experts of MoE modules over another
    mesh; all other parameters use the mesh of the `fully_shard` call.

    Arguments:
        module: the module passed to `fully_shard`, not sharded yet.
        mesh: of one dimension, the replicas of the expert-parallel group: ranks with the same experts.

    Raises:
        ConfigError: a mesh of several dimensions, or torch before 2.12, which shards all parameters of a call alike.
    """
    if mesh.ndim != 1:
        raise ConfigError(
            f"mesh is {mesh}; experts are sharded over one dimension, the replicas of their group. Pass mesh[name]."
        )
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
        from torch.distributed.tensor import Shard
    except ImportError as error:
        raise ConfigError(
            "this torch takes one mesh per call of fully_shard; 2.12 added meshes per parameter. Shard the experts "
            "by a separate call, fully_shard(moe.experts, mesh=...), and compile without fullgraph."
        ) from error
    moes = [each for each in module.modules() if isinstance(each, MoE)]
    of_experts = {id(parameter) for moe in moes for parameter in moe.experts.parameters()}
    info = FSDPMeshInfo(mesh, shard_mesh_dim=0)  # one for all: torch groups parameters by it
    return lambda parameter: ShardPlacementResult(Shard(0), info) if id(parameter) in of_experts else None
