"""Copies between the memory of ranks that no kernel makes: by a copy engine of the GPU, or on the CPU at once."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from triton_ep.errors import LaunchError


@functools.cache
def _driver() -> Any:
    """cuMemcpyDtoDAsync of the CUDA driver, which torch has loaded."""
    copy = ctypes.CDLL("libcuda.so.1").cuMemcpyDtoDAsync_v2
    copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    return copy


def copy_bytes(dest: int, source: int, nbytes: int, stream: int | None) -> None:
    """Copy `nbytes` between addresses of this process, or of its GPU; may be captured in a CUDA graph.

    stream: handle of the stream in whose order a GPU copies; None: copy on the CPU, before the function returns.

    Raises:
        LaunchError: the driver refuses the copy.
    """
    if nbytes == 0:
        return
    if stream is None:
        ctypes.memmove(dest, source, nbytes)
        return
    status = _driver()(dest, source, nbytes, stream)
    if status != 0:
        raise LaunchError(
            f"a copy of {nbytes} bytes to the memory of another GPU failed: CUDA error {status}. Look for an earlier "
            "error on this GPU; a layer with copy_engines=False sends its rows by kernels."
        )
