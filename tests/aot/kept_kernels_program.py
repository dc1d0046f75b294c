"""Launches most kernels of a dispatch and a combine on a machine without a GPU, and prints what the driver got.

    TRITON_INTERPRET=0 TRITON_LIBCUDA_PATH=FOLDER python kept_kernels_program.py FOLDER [watch] [locks]

FOLDER has driver_stand_in.c, compiled, as libcuda.so.1. The last line is JSON. Addresses are made up, so that they are
the same in two processes. With "watch", the program counts what Triton's front end does, and after all launches a
profiler hooks into one more. With "locks", it counts the kernels that are loaded while a lock for compiling is held.
"""

import ctypes
import fcntl
import json
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from triton_ep.runtime import jit_cache, launch
from triton_ep.runtime.plans.layers import LayerCalls, layer_requests
from triton_ep.runtime.plans.request import KernelRequest
from triton_ep.runtime.plans.shape import Plan, Shape

GRID, STREAM, WORDS = 7, 77, 64
SHAPE = Shape(16, 256, 2, 8, 2, 2, num_sm=24, enable_local_combine=True)
CALLS = LayerCalls(ids=("i64",), weights=(False,), gradients=False)
SLOW = ("splits_kernel", "dispatch_expand_kernel")  # take half of the compiler's time and show nothing of their own
DTYPES = {name: dtype for dtype, name in launch._TYPES.items()}


class CDriver:
    """The stand-in, with the interface of `runtime.driver.Driver`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library, self.loaded = library, 0

    def load(self, cubin: bytes, what: str) -> int:
        """A handle. Checks that the cubin is an ELF file."""
        assert cubin.startswith(b"\x7fELF"), what
        self.loaded += 1
        return self.loaded

    def function(self, library: int, symbol: str, shared: int, side_by_side: bool) -> int:
        """A handle of the kernel."""
        return 32

    def registers(self, function: int) -> int:
        """As the stand-in says."""
        number = ctypes.c_int(-1)
        registers_of_a_thread = 4
        self._library.cuFuncGetAttribute(ctypes.byref(number), registers_of_a_thread, ctypes.c_void_p(function))
        return number.value

    def tensor_map(self, address: int, *about: Any) -> bytes:
        """A map that contains the address, to be recognised."""
        return struct.pack("Q", address) + bytes(120)

    def launcher(
        self, function: int, threads: int, shared: int, params: int, what: str, early: bool
    ) -> Callable[[int, int], None]:
        """A function that launches the kernel."""

        def run(grid: int, stream: int) -> None:
            config = struct.pack("7IQ", grid, 1, 1, threads, 1, 1, shared, stream) + bytes(32)
            self._library.cuLaunchKernelEx(config, ctypes.c_void_p(function), ctypes.c_void_p(params), None)

        return run


class Address(torch.Tensor):
    """A tensor at a made-up address."""

    def data_ptr(self) -> int:
        """The made-up address."""
        return self.made_up  # type: ignore[attr-defined, no-any-return]


def value_of(kind: str, number: int) -> Any:
    """An argument that differs from all others."""
    if kind.startswith("*"):
        made = torch.zeros(16, dtype=torch.uint8).view(DTYPES[kind[1:]]).as_subclass(Address)
        made.made_up = 2**40 + 4096 * number  # type: ignore[attr-defined]
        return made
    return 16 * (100 + number)


def _launcher_of(request: KernelRequest) -> tuple[launch.Launcher, dict[str, Any]]:
    """A launcher and its arguments."""
    plan = Plan(request.kernel, dict(request.constexprs), num_warps=request.num_warps, maxnreg=request.maxnreg)
    launcher = launch.Launcher(plan)
    kinds = {name: request.types.get(name, kind) for name, kind in launcher._types.items()}
    values = {name: value_of(kind, number) for number, (name, kind) in enumerate(kinds.items())}
    return launcher, values | dict.fromkeys(request.ones, 1)


def launch_of(stand_in: ctypes.CDLL, request: KernelRequest) -> dict[str, Any]:
    """The second launch as the driver saw it: programs, threads, stream, and the first bytes of all parameters."""
    launcher, values = _launcher_of(request)
    stand_in.expect_parameters(0, (ctypes.c_int * 0)())
    launcher.launch(GRID, **values)
    # In the order of the compiled kernel: 8 bytes for an address, 4 for an integer.
    given = [name for name in launcher._order if name not in request.ones]
    sizes = [8 if isinstance(values[name], torch.Tensor) else 4 for name in given]
    stand_in.expect_parameters(len(sizes), (ctypes.c_int * len(sizes))(*sizes))
    launcher.launch(GRID, **values)
    noted = []
    for number, size in enumerate(sizes):
        memory = ctypes.create_string_buffer(128)
        stand_in.noted_parameter(number, memory)
        noted.append(memory.raw[:size].hex())
    how = (ctypes.c_uint64 * 3)()
    stand_in.noted_launch(how)
    return {"kernel": request.kernel, "how": list(how), "parameters": noted, "program": list(launcher.program)}


def count_triton(counts: dict[str, int]) -> None:
    """Count compilations and sources of Triton's front end from now on."""
    import triton
    import triton.compiler

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    triton.compile = counted("compile", triton.compile)
    source = triton.compiler.ASTSource
    source.__init__ = counted("sources", source.__init__)


def count_locked_loads(counts: dict[str, int]) -> None:
    """Count the kernels that are loaded, by the driver or by Triton, while any lock of jit_cache is held."""
    from triton.compiler import CompiledKernel

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            counts["loads"] += 1
            for path in jit_cache.root().glob("*/.compiling-*"):
                with path.open("ab") as file:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        counts["locked"] += 1
            return function(*args)

        return call

    for owner, name in ((CDriver, "load"), (CompiledKernel, "_init_handles")):
        setattr(owner, name, counted(getattr(owner, name)))


def told_to_a_profiler(launcher: launch.Launcher, values: dict[str, Any]) -> list[str]:
    """Names of the kernels that Triton reports to its hooks when this kernel is launched."""
    from triton import knobs

    names: list[str] = []
    knobs.runtime.launch_enter_hook.add(lambda told: names.append(told.get()["name"]))
    launcher.launch(GRID, **values)
    return names


def main(folder: str, *modes: str) -> None:
    """Launch all kernels and print the results."""
    stand_ins = {
        (torch._C, "_cuda_getDevice"): lambda: 0,
        (torch._C, "_cuda_getCurrentRawStream"): lambda device: STREAM,
        (torch.cuda, "is_available"): lambda: True,
        (torch.cuda, "current_device"): lambda: 0,
        (torch.cuda, "get_device_capability"): lambda device=0: (9, 0),
    }
    for (module, name), function in stand_ins.items():
        setattr(module, name, function)
    stand_in = ctypes.CDLL(f"{folder}/libcuda.so.1")  # first: Triton looks for a driver of this name
    driver = CDriver(stand_in)
    jit_cache._driver = lambda: driver
    counts = {"compile": 0, "sources": 0}
    locked = {"loads": 0, "locked": 0}
    if "watch" in modes:
        count_triton(counts)
    if "locks" in modes:
        count_locked_loads(locked)
    requests = [request for request in layer_requests(SHAPE, CALLS) if request.kernel not in SLOW]
    began = time.perf_counter()
    launches = [launch_of(stand_in, request) for request in requests]
    seconds = time.perf_counter() - began
    found = {
        "counts": dict(counts),
        "locks": locked,
        "loaded": driver.loaded,
        "triton": "triton" in sys.modules,
        "seconds": seconds,
    }
    if "watch" in modes:
        stand_in.expect_parameters(0, (ctypes.c_int * 0)())
        found["told"] = told_to_a_profiler(*_launcher_of(requests[0]))
    print(json.dumps({**found, "launches": launches}))


if __name__ == "__main__":
    main(*sys.argv[1:])
