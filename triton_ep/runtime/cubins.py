"""Compiled kernels of a library: loaded when first asked for, launched with a kept block of parameters."""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from triton_ep.errors import AotArchMismatch, AotMiss, AotNvshmemMismatch
from triton_ep.runtime.driver import Driver
from triton_ep.runtime.library import Entry, Library, default_folder
from triton_ep.runtime.plans.layers import layer_requests
from triton_ep.runtime.plans.request import KernelRequest
from triton_ep.runtime.plans.shape import Shape

_log = logging.getLogger("triton_ep.aot")
_KINDS = {"ptr": ("Q", 8), "i32": ("i", 4), "i64": ("q", 8), "i1": ("b", 1), "tensormap": ("128s", 128)}
_ALIGN = {"tensormap": 64}


class Kernel:
    """A compiled kernel, ready to be launched; from several threads, too.

    Args:
        entry: of the library.
        function: what the driver calls it.

    Attributes:
        run: launches it: run(grid, stream, values) takes the number of programs, the address of a stream, and the
            kernel's parameters without Triton's scratch.
    """

    def __init__(self, entry: Entry, function: Any, driver: Driver) -> None:
        self.entry = entry
        # A map says where and how large: the same for the same tensor, and the driver takes longer than a look-up.
        self._tensor_map = functools.lru_cache(maxsize=64)(driver.tensor_map)
        layout, offsets, size = "<", [], 0
        for kind in entry.params:
            code, nbytes = _KINDS[kind]
            start = -(-size // _ALIGN.get(kind, nbytes)) * _ALIGN.get(kind, nbytes)
            layout += f"{start - size}x{code}"
            offsets.append(start)
            size = start + nbytes
        memory = ctypes.create_string_buffer(size + 64)
        base = -(-ctypes.addressof(memory) // 64) * 64
        addresses = (ctypes.c_void_p * len(offsets))(*[base + offset for offset in offsets])
        self._kept = memory, addresses
        pack, start = struct.Struct(layout).pack_into, base - ctypes.addressof(memory)
        launch = driver.launcher(function, entry.threads, entry.shared, ctypes.addressof(addresses), entry.symbol)
        lock = threading.Lock()

        # A closure, so that a launch looks none of this up in an object.
        def run(grid: int, stream: int, values: Sequence[Any]) -> None:
            with lock:
                pack(memory, start, *values, 0, 0)
                launch(grid, stream)

        self.run = run

    def describe(self, number: int, boxes: Any) -> list[Any]:
        """Parameters of a tensor descriptor, the `number`-th of the kernel's."""
        told = self.entry.descriptors[number]
        shape, strides = tuple(boxes.shape), tuple(boxes.strides)
        address = boxes.base.data_ptr()
        if not told:  # a GPU without a copy engine for tensors: the kernel computes addresses itself
            return [address, *shape, *strides, *[0] * self.entry.params[:-2].count("i1"), *shape, *strides]
        box = tuple(told["block_size"])
        element = (told["elem_type"], told["elem_size"])
        return [self._tensor_map(address, *element, box, shape, strides, told["swizzle"]), *shape, *strides]


class CompiledLibrary:
    """The library of one architecture with what of it is loaded into this process.

    Args:
        library: the index.
        driver: None: that of this process, asked for at the first kernel.
    """

    def __init__(self, library: Library, driver: Driver | None = None) -> None:
        self.library = library
        self._driver = driver
        self._kernels: dict[str, Kernel] = {}
        # NVSHMEM gives its state to the modules of one start of it; its owner is that start.
        self._of_owner: WeakKeyDictionary[Any, dict[str, Kernel]] = WeakKeyDictionary()
        self._loaded: list[Any] = []

    def kernel(self, request: KernelRequest, heap: Any = None) -> Kernel:
        """The kernel for this variant.

        heap: with `nvshmem_version` and `initialize_library`, for kernels that call NVSHMEM.

        Raises:
            AotMiss: it was not built.
            AotCorrupted: its cubin is not what was built.
            AotArchMismatch: the driver cannot run it on this GPU.
            AotNvshmemMismatch: its device code does not fit the NVSHMEM of this process.
        """
        entry = self.library.find(request)
        kernels = self._kernels
        if entry.nvshmem:
            check_nvshmem(entry.nvshmem, heap, self.library)
            kernels = self._of_owner.setdefault(heap, {})
        found = kernels.get(entry.file)
        if found is None:
            if self._driver is None:
                self._driver = Driver()
            what = f"{entry.file} of {self.library.folder / self.library.arch}"
            loaded = self._driver.load(self.library.read(entry), what)
            if entry.nvshmem:
                heap.initialize_library(int(loaded), entry.symbol)
            self._loaded.append(loaded)
            function = self._driver.function(loaded, entry.symbol, entry.shared)
            found = kernels[entry.file] = Kernel(entry, function, self._driver)
        return found


def check_nvshmem(device: str, heap: Any, library: Library) -> None:
    """Raise if device code of this release of NVSHMEM cannot be used with the host library of `heap`.

    NVSHMEM's own rule: the same major release, and the host library is not the older one.

    Raises:
        AotNvshmemMismatch: naming both.
    """
    host = getattr(heap, "nvshmem_version", None)
    if host is None:
        raise AotNvshmemMismatch(
            f"a kernel of {library.folder} contains device code of NVSHMEM {device}, but NVSHMEM does not run in this "
            "process: its ranks have another symmetric heap."
        )
    theirs, ours = _numbers(device), _numbers(host)
    if theirs[0] != ours[0] or theirs[:2] > ours[:2]:
        raise AotNvshmemMismatch(
            f"the kernels of {library.folder} were built with NVSHMEM {device}, this node has {host}: device code runs "
            "with a host library of the same major release that is not older. Build the library with "
            f"nvidia-nvshmem {host} installed ({library.command()} --force), or upgrade this node."
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3])


@functools.cache
def open_library(folder: Path, arch: str) -> CompiledLibrary:
    """The library of a folder for an architecture; the same object at every call of this process."""
    return CompiledLibrary(Library(folder, arch))


@dataclass(frozen=True)
class Aot:
    """Where launches take compiled kernels from.

    Attributes:
        compiled: the library; None: there is none to be used, which only `prefer` allows.
        prefer: what is missing is compiled by the JIT, and logged.
        heap: for kernels that call NVSHMEM.
    """

    compiled: CompiledLibrary | None
    prefer: bool = False
    heap: Any = None

    def check(self, shape: Shape) -> None:
        """Raise unless there is some variant of every kernel that a layer of this shape needs, before it is made.

        Nothing is checked with `prefer`.

        Raises:
            AotMiss: of a kernel there is none.
            AotNvshmemMismatch: kernels that call NVSHMEM do not fit this process.
        """
        if self.compiled is None or self.prefer:
            return
        library, wanted = self.compiled.library, layer_requests(shape)
        for kernel in dict.fromkeys(request.kernel for request in wanted):
            of_kernel = [request for request in wanted if request.kernel == kernel]
            there = [request for request in of_kernel if library.has(request)]
            if not there:
                raise AotMiss(library.missing(of_kernel[0]))
            if version := library.find(there[0]).nvshmem:
                check_nvshmem(version, self.heap, library)

    def info(self, kernel: str) -> Mapping[str, Any] | None:
        """Arguments of a kernel as the index has them; None: it is to be compiled by the JIT.

        Raises:
            AotMiss: there is no variant of it, and nothing else is allowed.
        """
        if self.compiled is None:
            return None
        found = self.compiled.library.kernels.get(kernel)
        if found is None:
            self._fall_back(AotMiss(self.compiled.library.missing(KernelRequest(kernel, {}))))
        return found

    def kernel(self, request: KernelRequest) -> Kernel | None:
        """The compiled kernel; None: it is to be compiled by the JIT. Raises as `CompiledLibrary.kernel`."""
        if self.compiled is None:
            return None
        try:
            return self.compiled.kernel(request, self.heap)
        except (AotMiss, AotNvshmemMismatch) as error:
            self._fall_back(error)
        return None

    def _fall_back(self, error: Exception) -> None:
        """Raise `error`, or log it where the JIT may take over."""
        if not self.prefer:
            raise error
        _log.warning("compiled by the JIT: %s", error)


def choose(mode: str, folder: Path | str | None, arch: Callable[[], str], heap: Any = None) -> Aot:
    """The library of a folder (None: the default one) for this GPU.

    mode: "require": raise where something is missing. "prefer": log it, and let the JIT compile.

    Raises:
        AotMiss: there is no library.
        AotArchMismatch: there is none for this GPU.
        AotCorrupted: its index cannot be read.
    """
    where = default_folder() if folder is None else Path(folder)
    try:
        return Aot(open_library(where, arch()), mode == "prefer", heap)
    except (AotMiss, AotArchMismatch) as error:
        if mode != "prefer":
            raise
        _log.warning("all kernels are compiled by the JIT: %s", error)
        return Aot(None, True, heap)
