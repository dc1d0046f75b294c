"""Which symmetric heaps there are. Another one is a class in a file of its own, and a line here."""

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
"""By name. "host" is for kernels that are interpreted, the others for compiled ones."""


def heap_of_gpus() -> str:
    """The heap of GPU ranks where nobody chose one: "nvshmem" if nvshmem4py is installed, else "torch"."""
    return "nvshmem" if importlib.util.find_spec("nvshmem") is not None else "torch"
