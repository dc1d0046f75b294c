"""Launches kernels through the JIT on a machine without a GPU, and compares what the driver gets with the arguments.

    TRITON_INTERPRET=0 TRITON_LIBCUDA_PATH=FOLDER python jit_launch_program.py FOLDER KERNEL ...

FOLDER has driver_stand_in.c, compiled, as libcuda.so.1. Without KERNEL it launches all kernels, one variant of each
and one with boxes; that takes minutes. No two arguments are equal.
"""

import ctypes
import re
import struct
import sys
from typing import Any

import torch
import triton
from triton.backends.nvidia.driver import CudaDriver
from triton.compiler import CompiledKernel

from triton_ep.aot.manifest import default_manifest, read_manifest
from triton_ep.kernels.spec import KernelSpec, all_kernels
from triton_ep.runtime import launch
from triton_ep.runtime.parameters import parameters
from triton_ep.runtime.plans.request import KernelRequest
from triton_ep.runtime.plans.shape import Plan

GRID, STREAM = 7, 77
CODES = {"ptr": "Q", "i64": "q", "i32": "i", "i16": "h", "i1": "?", "tensormap": "Q120x"}
DTYPES = {name: dtype for dtype, name in launch._TYPES.items()}


def value_of(name: str, kind: str, number: int, request: KernelRequest) -> Any:
    """An argument that differs from all others."""
    if boxes := re.match(r"tensordesc<(\w+)\[([\d,]+)\]>", kind):
        block = [int(extent) for extent in boxes[2].split(",")]
        base = torch.zeros(4096, dtype=torch.uint8).view(DTYPES[boxes[1]])
        return launch.Boxes(base, [1000 + number, *[64] * (len(block) - 1)], [64] * (len(block) - 1) + [1], block)
    if kind.startswith("*"):
        return torch.zeros(64, dtype=torch.uint8).view(DTYPES[kind[1:]])
    if name in request.ones:
        return 1
    if name in request.aligned:
        return 16 * (100 + number)
    return 2 * (1000 + number) + 1 if kind == "i32" else 2**33 + 2 * number + 1


def expected(spec: KernelSpec, request: KernelRequest, values: dict[str, Any]) -> list[int]:
    """The parameters of a compiled kernel: arguments in its order, then Triton's two pointers to scratch memory."""
    words: list[int] = []
    for name in spec.runtime_order:
        value = values[name]
        if isinstance(value, launch.Boxes):
            words += [value.base.data_ptr(), *value.shape, *value.strides]
        elif isinstance(value, torch.Tensor):
            words.append(value.data_ptr())
        elif name not in request.ones:
            words.append(value)
    return [*words, 0, 0]


def check(driver: Any, loaded: list[Any], request: KernelRequest) -> None:
    """Launch twice: the first launch compiles the kernel, the second one is checked."""
    spec = all_kernels()[request.kernel]
    kinds = {name: request.types.get(name, kind) for name, kind in spec.arguments.items()}
    values = {name: value_of(name, kind, number, request) for number, (name, kind) in enumerate(kinds.items())}
    plan = Plan(request.kernel, dict(request.constexprs), num_warps=request.num_warps, maxnreg=request.maxnreg)
    boxes = any(isinstance(value, launch.Boxes) for value in values.values())
    # Like a layer: arguments that are the same in all of its launches are bound when the launcher is created.
    bound = {} if boxes else {name: values[name] for name in ("state_ptr", "tables_ptr", "rank") if name in values}
    launcher = launch.Launcher(plan, bound=bound, any_arguments=not bound)
    given = {name: value for name, value in values.items() if name not in bound}
    driver.expect_parameters(0, (ctypes.c_int * 0)())
    launcher.launch(GRID, **given)
    kinds_of_ptx = parameters(loaded[-1].asm["ptx"])
    sizes = [struct.calcsize(CODES[kind]) for kind in kinds_of_ptx]
    driver.expect_parameters(len(sizes), (ctypes.c_int * len(sizes))(*sizes))
    before = driver.launches_so_far()
    launcher.launch(GRID, **given)
    assert driver.launches_so_far() == before + 1
    got = []
    for number, kind in enumerate(kinds_of_ptx):
        noted = ctypes.create_string_buffer(128)
        driver.noted_parameter(number, noted)
        got += struct.unpack_from(CODES[kind], noted.raw)
    assert got == expected(spec, request, values), (request.kernel, got, expected(spec, request, values))
    how = (ctypes.c_uint64 * 3)()
    driver.noted_launch(how)
    assert list(how) == [GRID, 32 * (request.num_warps or spec.num_warps or 0), STREAM], (request.kernel, list(how))
    print(request.kernel, "with boxes" * boxes, flush=True)


def pretend_a_gpu() -> None:
    """Let torch report a current device and stream to Triton and to launches."""
    stand_ins = {
        (torch._C, "_cuda_getDevice"): lambda: 0,
        (torch._C, "_cuda_getCurrentRawStream"): lambda device: STREAM,
        (torch.cuda, "current_device"): lambda: 0,
        (torch.cuda, "get_device_capability"): lambda device=0: (9, 0),
        (launch, "_place"): lambda: -1,  # its tensors are on the CPU
    }
    for (module, name), function in stand_ins.items():
        setattr(module, name, function)


def main(folder: str, *names: str) -> None:
    """Check one variant of each kernel, and one with boxes."""
    pretend_a_gpu()
    driver = ctypes.CDLL(f"{folder}/libcuda.so.1")  # first: Triton looks for a driver of this name
    triton.runtime.driver.set_active(CudaDriver())
    loaded: list[Any] = []
    init_handles = CompiledKernel._init_handles
    CompiledKernel._init_handles = lambda self: (loaded.append(self), init_handles(self))[1]
    chosen: dict[tuple[str, bool], KernelRequest] = {}
    for request in read_manifest(default_manifest()):
        boxes = any(kind.startswith("tensordesc") for kind in request.types.values())
        if not request.calls_nvshmem and (not names or request.kernel in names):
            chosen.setdefault((request.kernel, boxes), request)
    for request in chosen.values():
        check(driver, loaded, request)
    print(f"{len(chosen)} kernels were launched as asked")


if __name__ == "__main__":
    main(*sys.argv[1:])
