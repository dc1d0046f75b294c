"""Two plain ways to move bytes to peers: the link bound of an exchange (kernels/intranode/floor.py)."""

from __future__ import annotations

import ctypes

import torch

from triton_ep.errors import LaunchError
from triton_ep.runtime.launch import INTERPRETING, launch
from triton_ep.runtime.plans import Plan

ROW_BYTES = 14336
"""Bytes of a row of the push: 7168 bf16 values."""


def push(source: torch.Tensor, addrs: torch.Tensor, rank: int, num_programs: int) -> None:
    """Store the rows of `source` to the other ranks in turn, with `num_programs` programs of 32 warps.

    source: [R, 1792] int64, on the device.
    addrs: [W] int64 on the device, W >= 2: address of each rank's [R, 1792] int64.
    """
    num_rows, row_words = source.shape
    launch(
        Plan("floor_push_kernel", {"BLOCK": 2048}),
        num_programs,
        source_ptr=source,
        addrs_ptr=addrs,
        num_rows=num_rows,
        row_words=row_words,
        rank=rank,
        num_ranks=addrs.numel(),
    )


def copy(destination: int, source: torch.Tensor) -> None:
    """Copy a contiguous tensor to an address of a peer; on a GPU with the copy engine, on the current stream.

    Raises:
        LaunchError: the driver refused.
    """
    nbytes = source.numel() * source.itemsize
    if INTERPRETING:
        ctypes.memmove(destination, source.data_ptr(), nbytes)
        return
    from cuda.bindings import runtime

    stream = torch.cuda.current_stream(source.device).cuda_stream
    kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
    (status,) = runtime.cudaMemcpyAsync(destination, source.data_ptr(), nbytes, kind, stream)
    if status != runtime.cudaError_t.cudaSuccess:
        raise LaunchError(f"a copy of {nbytes} bytes to a peer failed: {status}.")
