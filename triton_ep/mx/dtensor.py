"""MX and DTensor: an MXTensor whose elements and scales are DTensors, sharded as what they were made from.

Every rank quantises and dequantises its own shard. That gives the bytes of the whole tensor's quantisation, as long as
no block lies on two ranks: sharding along a dimension without blocks is always right, along the one with blocks where
shards are whole blocks. Nothing is communicated. `redistribute` moves elements and scales as bytes; `MXShard` is a
parameter that FSDP gathers so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import DTensor, Partial, Shard

from triton_ep.errors import InputError


def _check_shards(x: DTensor, block_dim: int, block_size: int) -> None:
    """InputError if the values are not all there, or a block lies on two ranks."""
    axis = block_dim % x.dim()
    size = x.shape[axis]
    for mesh_dim, placement in enumerate(x.placements):
        if isinstance(placement, Partial):
            raise InputError(f"x has {placement} on mesh dimension {mesh_dim}; redistribute it before it is quantised.")
        if isinstance(placement, Shard) and placement.dim % x.dim() == axis:
            size = -(-size // x.device_mesh.size(mesh_dim))
            if size % block_size:
                raise InputError(
                    f"x {list(x.shape)} is sharded along dimension {axis} into shards of {size}, which cut blocks of "
                    f"{block_size}. Shard another dimension, or into multiples of {block_size}."
                )


def _like(local: torch.Tensor, whole: DTensor, shape: Sequence[int]) -> DTensor:
    """A DTensor of these local values, placed as `whole`."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    made: DTensor = DTensor.from_local(
        local, whole.device_mesh, whole.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    return made


def quantize_shards(
    x: DTensor,
    block_dim: int,
    block_size: int,
    per_byte: int,
    quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[DTensor, DTensor]:
    """Elements and scales of `quantize(shard)`, placed as `x`.

    Arguments:
        block_dim: dimension along which blocks lie, counted from the end.
        per_byte: elements in a byte.

    Raises:
        InputError: partial values, or shards that cut blocks.
    """
    _check_shards(x, block_dim, block_size)
    qdata, scale = quantize(x.to_local())
    shapes = []
    for divisor in (per_byte, block_size):
        shapes.append(list(x.shape))
        shapes[-1][block_dim] //= divisor
    return _like(qdata, x, shapes[0]), _like(scale, x, shapes[1])


def dequantize_shards(
    qdata: DTensor,
    scale: DTensor,
    shape: Sequence[int],
    dequantize: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> DTensor:
    """`dequantize(elements, scales)` of the shards, placed as they are, of global shape `shape`.

    Raises:
        InputError: elements and scales that are placed differently.
    """
    if qdata.placements != scale.placements or qdata.device_mesh != scale.device_mesh:
        raise InputError(f"elements are {qdata.placements}, scales {scale.placements}; redistribute one of them.")
    return _like(dequantize(qdata.to_local(), scale.to_local()), qdata, shape)
