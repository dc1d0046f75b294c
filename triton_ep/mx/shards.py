"""Quantise and dequantise the shards of DTensors, each rank its own, without communication.

The bytes equal those of quantising the whole tensor, as long as no block lies on two ranks: sharding along a dimension
without blocks is always valid, along the block dimension only if shards are whole blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from triton_ep.errors import InputError


def check_shards(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], block_dim: int, block_size: int
) -> None:
    """Raise InputError if the values are partial sums, or a block lies on two ranks."""
    axis = block_dim % len(shape)
    size = shape[axis]
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Partial):
            raise InputError(
                f"a tensor that is {placement!r} on mesh dimension {mesh_dim} cannot be quantised; reduce it first: "
                "redistribute it as a plain DTensor."
            )
        if isinstance(placement, Shard) and placement.dim % len(shape) == axis:
            size = -(-size // mesh.size(mesh_dim))
            if size % block_size:
                raise InputError(
                    f"{list(shape)} is sharded along dimension {axis} into shards of {size}, which cut blocks of "
                    f"{block_size}. Shard another dimension, or into multiples of {block_size}."
                )


def placed(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """The DTensor of this shape with this shard."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    made: DTensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    return made


def quantize_shards(
    x: DTensor,
    block_dim: int,
    block_size: int,
    per_byte: int,
    quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[DTensor, DTensor]:
    """Elements and scales of `quantize(shard)`, with the placements of `x`.

    Arguments:
        block_dim: dimension along which blocks lie, counted from the end.
        per_byte: elements in a byte.

    Raises:
        InputError: partial values, or shards that cut blocks.
    """
    mesh, placements = x.device_mesh, x.placements
    check_shards(x.shape, mesh, placements, block_dim, block_size)
    parts = []
    for part, divisor in zip(quantize(x.to_local()), (per_byte, block_size), strict=True):
        shape = list(x.shape)
        shape[block_dim] //= divisor
        parts.append(placed(part, mesh, placements, shape))
    return parts[0], parts[1]


def dequantize_shards(
    qdata: DTensor,
    scale: DTensor,
    shape: Sequence[int],
    dequantize: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> DTensor:
    """`dequantize(elements, scales)` of the shards, with their placements and global shape `shape`.

    Raises:
        InputError: elements and scales have different placements.
    """
    if qdata.placements != scale.placements or qdata.device_mesh != scale.device_mesh:
        raise InputError(f"elements are {qdata.placements}, scales {scale.placements}; redistribute one of them.")
    return placed(dequantize(qdata.to_local(), scale.to_local()), qdata.device_mesh, qdata.placements, shape)
