"""The list of symmetric heaps. To add one, write a class in its own file and add a line here."""

from __future__ import annotations

import importlib.util

from triton_ep.heap.host import HostHeap
from triton_ep.heap.nvshmem import NvshmemHeap
from triton_ep.heap.torch_symmetric import TorchHeap

HEAPS: dict[str, type[HostHeap | NvshmemHeap | TorchHeap]] = {
    "host": HostHeap,
    "nvshmem": NvshmemHeap,
    "torch": TorchHeap,
}
"""Name -> class. "host" serves interpreted kernels, the others compiled kernels."""


def heap_of_gpus() -> str:
    """The default heap of GPU ranks: "nvshmem" if nvshmem4py is installed, else "torch"."""
    return "nvshmem" if importlib.util.find_spec("nvshmem") is not None else "torch"
