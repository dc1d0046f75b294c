"""MX and DTensor: an MXTensor whose elements and scales are DTensors, sharded like their source.

shards.py quantises and dequantises them. `redistribute` moves elements and scales, as bytes; fsdp.py has a parameter
that FSDP gathers in this form.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Placement

from triton_ep.errors import InputError
from triton_ep.mx.shards import check_shards, placed
from triton_ep.mx.tensor import MXTensor


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
    check_shards(mx.shape, mx.qdata.device_mesh, placements, mx.block_dim, mx.block_size)
    parts: list[torch.Tensor] = []
    for part in (mx.qdata, mx.scale):
        assert isinstance(part, DTensor), "elements and scales are created together"
        # Send bytes: not every backend sends float8.
        mesh, dtype = part.device_mesh, part.dtype
        moved = placed(part.to_local().view(torch.uint8), mesh, part.placements, part.shape).redistribute(
            placements=placements
        )
        parts.append(placed(moved.to_local().view(dtype), mesh, moved.placements, part.shape))
    inner = dict(zip(("qdata", "scale"), parts, strict=True))
    return mx.__tensor_unflatten__(inner, mx.__tensor_flatten__()[1], mx.shape, mx.stride())
