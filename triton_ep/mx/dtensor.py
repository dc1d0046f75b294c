"""MX and DTensor: an MXTensor whose elements and scales are DTensors, sharded like their source.

Every rank quantises and dequantises its own shard, without communication. The bytes equal those of quantising the whole
tensor, as long as no block lies on two ranks: sharding along a dimension without blocks is always valid, along the
block dimension only if shards are whole blocks. `redistribute` moves elements and scales, as bytes; fsdp.py has a
parameter that FSDP gathers in this form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from triton_ep.errors import InputError

if TYPE_CHECKING:
    from triton_ep.mx.tensor import MXTensor  # which imports this module to quantise


def _check_shards(
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


def _placed(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
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
    _check_shards(x.shape, mesh, placements, block_dim, block_size)
    parts = []
    for part, divisor in zip(quantize(x.to_local()), (per_byte, block_size), strict=True):
        shape = list(x.shape)
        shape[block_dim] //= divisor
        parts.append(_placed(part, mesh, placements, shape))
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
    return _placed(dequantize(qdata.to_local(), scale.to_local()), qdata.device_mesh, qdata.placements, shape)


def redistribute(mx: MXTensor, placements: Sequence[Placement]) -> MXTensor:
    """Change the placements on the mesh. Elements and scales travel: in e4m3, 33 bytes instead of 64 in bf16.

    Arguments:
        mx: an MXTensor made from a DTensor.
        placements: one per mesh dimension, Replicate or Shard; shards must be whole blocks.

    Raises:
        InputError: `mx` was not made from a DTensor, placements are partial, or shards cut blocks.
    """
    if not isinstance(mx.qdata, DTensor):
        raise InputError(f"redistribute takes an MXTensor that was made from a DTensor, not {mx!r}.")
    _check_shards(mx.shape, mx.qdata.device_mesh, placements, mx.block_dim, mx.block_size)
    parts: list[torch.Tensor] = []
    for part in (mx.qdata, mx.scale):
        assert isinstance(part, DTensor), "elements and scales are created together"
        # Send bytes: not every backend sends float8.
        mesh, dtype = part.device_mesh, part.dtype
        moved = _placed(part.to_local().view(torch.uint8), mesh, part.placements, part.shape).redistribute(
            placements=placements
        )
        parts.append(_placed(moved.to_local().view(dtype), mesh, moved.placements, part.shape))
    inner = dict(zip(("qdata", "scale"), parts, strict=True))
    return mx.__tensor_unflatten__(inner, mx.__tensor_flatten__()[1], mx.shape, mx.stride())
