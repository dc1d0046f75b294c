"""Compiled kernels of a library: loaded at first use, launched with a parameter block that is kept between launches."""

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
    """A compiled kernel, ready to be launched, also from several threads.

    Args:
        entry: its entry in the library.
        function: the driver's handle of it.

    Attributes:
        run: launches it: run(grid, stream, values) takes the number of programs, the address of a stream, and the
            kernel's parameters without Triton's scratch.
    """

    def __init__(self, entry: Entry, function: Any, driver: Driver) -> None:
        self.entry = entry
        # A tensor map depends only on address and sizes, and a look-up takes less time than the driver.
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
        lock = threading.Lock()

        def runner(early: bool) -> Callable[[int, int, Sequence[Any]], None]:
            launch = driver.launcher(
                function, entry.threads, entry.shared, ctypes.addressof(addresses), entry.symbol, early
            )

            # A closure saves attribute look-ups at every launch.
            def run(grid: int, stream: int, values: Sequence[Any]) -> None:
                with lock:
                    pack(memory, start, *values, 0, 0)
                    launch(grid, stream)

            return run

        self.run, self._runner = runner(False), runner

    @functools.cached_property
    def run_early(self) -> Callable[[int, int, Sequence[Any]], None]:
        """As `run`, but the kernel is launched early (`Launcher`)."""
        return self._runner(True)

    def describe(self, number: int, boxes: Any) -> list[Any]:
        """Parameters of the kernel's tensor descriptor with this number."""
        told = self.entry.descriptors[number]
        shape, strides = tuple(boxes.shape), tuple(boxes.strides)
        address = boxes.base.data_ptr()
        if not told:  # a GPU without TMA: the kernel computes addresses itself
            return [address, *shape, *strides, *[0] * self.entry.params[:-2].count("i1"), *shape, *strides]
        box = tuple(told["block_size"])
        element = (told["elem_type"], told["elem_size"])
        return [self._tensor_map(address, *element, box, shape, strides, told["swizzle"]), *shape, *strides]


class CompiledLibrary:
    """The library of one architecture, with its kernels that are loaded into this process.

    Args:
        library: the index.
        driver: None: the driver of this process, opened at the first kernel.
    """

    def __init__(self, library: Library, driver: Driver | None = None) -> None:
        self.library = library
        self._driver = driver
        self._kernels: dict[str, Kernel] = {}
        # A module holds the state of one start of NVSHMEM, so modules are kept per heap, the owner of that start.
        self._of_owner: WeakKeyDictionary[Any, dict[str, Kernel]] = WeakKeyDictionary()
        self._loaded: list[Any] = []

    def kernel(self, request: KernelRequest, heap: Any = None) -> Kernel:
        """The kernel for this variant.

        heap: has `nvshmem_version` and `initialize_library`; for kernels that call NVSHMEM.

        Raises:
            AotMiss: the variant was not built.
            AotCorrupted: its cubin differs from the one that was built.
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
            function = self._driver.function(loaded, entry.symbol, entry.shared, bool(request.side_by_side))
            found = kernels[entry.file] = Kernel(entry, function, self._driver)
        return found


def check_nvshmem(device: str, heap: Any, library: Library) -> None:
    """Raise if device code of this NVSHMEM release cannot run with the host library of `heap`.

    NVSHMEM's own rule: the same major release, and a host library that is not older than the device code.

    Raises:
        AotNvshmemMismatch: with both releases.
    """
    host = getattr(heap, "nvshmem_version", None)
    if host is None:
        raise AotNvshmemMismatch(
            f"a kernel of {library.folder} contains device code of NVSHMEM {device}, but NVSHMEM does not run in this "
            "process: its ranks have another symmetric heap. Start them with TRITON_EP_HEAP=nvshmem, or build the "
            "library for it."
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
    """The library of a folder for an architecture; one object per process."""
    return CompiledLibrary(Library(folder, arch))


@dataclass(frozen=True)
class Aot:
    """Source of compiled kernels for launches.

    Attributes:
        compiled: the library; None: no usable library, which only `prefer` allows.
        prefer: the JIT compiles missing kernels, and logs them.
        heap: for kernels that call NVSHMEM.
    """

    compiled: CompiledLibrary | None
    prefer: bool = False
    heap: Any = None

    def check(self, shape: Shape) -> None:
        """Raise unless the library has some variant of every kernel that a layer of this shape needs.

        Runs before the layer is created. Checks nothing with `prefer`.

        Raises:
            AotMiss: the library lacks all variants of a kernel.
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
        """Launch facts of a kernel from the index; None: the JIT must compile it.

        Raises:
            AotMiss: the library has no variant of it, and the JIT is not allowed.
        """
        if self.compiled is None:
            return None
        found = self.compiled.library.kernels.get(kernel)
        if found is None:
            self._fall_back(AotMiss(self.compiled.library.missing(KernelRequest(kernel, {}))))
        return found

    def kernel(self, request: KernelRequest) -> Kernel | None:
        """The compiled kernel; None: the JIT must compile it. Raises as `CompiledLibrary.kernel`."""
        if self.compiled is None:
            return None
        try:
            return self.compiled.kernel(request, self.heap)
        except (AotMiss, AotNvshmemMismatch) as error:
            self._fall_back(error)
        return None

    def _fall_back(self, error: Exception) -> None:
        """Raise `error`, or log it if the JIT may take over."""
        if not self.prefer:
            raise error
        _log.warning("compiled by the JIT: %s", error)


def choose(mode: str, folder: Path | str | None, arch: Callable[[], str], heap: Any = None) -> Aot:
    """The library of a folder (None: the default one) for this GPU.

    mode: "require": raise if something is missing. "prefer": log it, and let the JIT compile it.

    Raises:
        AotMiss: there is no library.
        AotArchMismatch: the library is not for this GPU.
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
