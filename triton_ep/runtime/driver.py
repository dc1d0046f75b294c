"""The CUDA driver through cuda-python: the calls that cubins need, with every status checked."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

from triton_ep.errors import AotArchMismatch, LaunchError

_NO_CONTEXT = "CUDA_ERROR_INVALID_CONTEXT"
_NOT_FOR_THIS_GPU = ("CUDA_ERROR_NO_BINARY_FOR_GPU", "CUDA_ERROR_INVALID_IMAGE", "CUDA_ERROR_UNSUPPORTED_PTX_VERSION")
_ELEMENTS_OF_HOST = {8: 10, 9: 8, 10: 9}
"""CUtensorMapDataType by the number that device code uses for it, where the two differ."""
_NEWEST_WITH_SMALL_FAULT = 13010
_PREFERRED_CARVEOUT = 9
"""CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent."""
_DEFAULT_SHARED = 48 * 1024
"""Bytes of dynamic shared memory that a kernel may use without a function attribute."""


def prefer_shared_memory(function: int) -> None:
    """Make multiprocessors use as much memory as they can as shared memory while they run a kernel (CUfunction)."""
    status = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(function), _PREFERRED_CARVEOUT, 100)
    if status != 0:
        raise LaunchError(f"setting the shared memory of a kernel failed: CUDA error {status}.")


class Driver:
    """cuda.bindings.driver of this process, on the current device.

    Raises:
        LaunchError: cuda-python is not installed.
    """

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise LaunchError(
                f"ahead-of-time kernels are launched through cuda-python, which cannot be loaded: {error}. "
                "Install triton_ep[cu13] (or [cu12])."
            ) from error
        self._cuda = driver
        self._success = driver.CUresult.CUDA_SUCCESS
        self._streams: dict[int, Any] = {}
        status, self._version = driver.cuDriverGetVersion()
        self._check(status, "getting the driver's version")

    def load(self, cubin: bytes, what: str) -> Any:
        """Load one cubin as a library (CUlibrary).

        Raises:
            AotArchMismatch: the cubin is not for this GPU.
            LaunchError: the driver refuses it.
        """
        self._make_current()
        status, library = self._cuda.cuLibraryLoadData(cubin, None, None, 0, None, None, 0)
        if status.name in _NOT_FOR_THIS_GPU:
            raise AotArchMismatch(
                f"the driver cannot run {what} on this GPU: {status.name}. Build kernels for its architecture: "
                "triton-ep aot build."
            )
        self._check(status, f"loading {what}")
        return library

    def function(self, library: Any, symbol: str, shared: int, side_by_side: bool) -> Any:
        """A kernel (CUfunction) of a library, allowed `shared` bytes of dynamic shared memory; side_by_side: as in
        `Plan`."""
        cuda = self._cuda
        status, kernel = cuda.cuLibraryGetKernel(library, symbol.encode())
        self._check(status, f"looking up {symbol}")
        status, function = cuda.cuKernelGetFunction(kernel)
        self._check(status, f"getting the function {symbol}")
        if shared > _DEFAULT_SHARED:
            limit = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (status,) = cuda.cuFuncSetAttribute(function, limit, shared)
            self._check(status, f"allowing {symbol} {shared} bytes of shared memory")
        if side_by_side:
            prefer_shared_memory(int(function))
        return function

    def registers(self, function: Any) -> int:
        """Registers per thread of a kernel (CUfunction)."""
        cuda = self._cuda
        status, number = cuda.cuFuncGetAttribute(cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, function)
        self._check(status, "asking for the registers of a kernel")
        return int(number)

    def launcher(
        self, function: Any, threads: int, shared: int, params: int, what: str, early: bool
    ) -> Callable[[int, int], None]:
        """A function that launches a kernel, given the number of programs and the address of a stream. One thread at a
        time may call it.

        params: address of an array of parameter addresses. early: as in `Launcher`.
        """
        launch = self._early_launch(threads, shared) if early else self._cuda.cuLaunchKernel
        success, streams = self._success, self._streams

        def run(grid: int, stream: int) -> None:
            handle = streams.get(stream)
            if handle is None:
                handle = streams[stream] = self._cuda.CUstream(stream)
            (status,) = launch(function, grid, 1, 1, threads, 1, 1, shared, handle, params, 0)
            if status is success or status == success:
                return
            if status.name == _NO_CONTEXT:
                # torch has not used this thread yet.
                self._make_current()
                (status,) = launch(function, grid, 1, 1, threads, 1, 1, shared, handle, params, 0)
            self._check(status, f"launching {grid} programs of {what}")

        return run

    def _early_launch(self, threads: int, shared: int) -> Callable[..., Any]:
        """`cuLaunchKernel` for early launches of a kernel. It takes the same arguments; sizes of programs are these."""
        cuda, launch = self._cuda, self._cuda.cuLaunchKernelEx
        attribute, value = cuda.CUlaunchAttribute(), cuda.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value = value
        config = cuda.CUlaunchConfig()
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.blockDimX, config.sharedMemBytes = threads, shared
        config.attrs, config.numAttrs = [attribute], 1

        def start(function: Any, grid: int, *given: Any) -> Any:
            *_, handle, params, extra = given
            config.gridDimX, config.hStream = grid, handle
            return launch(config, function, params, extra)

        return start

    def tensor_map(self, address: int, element: int, size: int, box: Sequence[int], shape: Sequence[int],
                   strides: Sequence[int], swizzle: int) -> bytes:  # fmt: skip
        """128 bytes that describe a tensor to TMA. Sizes are in elements; the consecutive dimension comes last."""
        cuda, rank = self._cuda, len(shape)
        inner = cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE
        promotion = cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B
        fill = cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
        status, found = cuda.cuTensorMapEncodeTiled(
            cuda.CUtensorMapDataType(_ELEMENTS_OF_HOST.get(element, element)),
            rank,
            address,
            [cuda.cuuint64_t(extent) for extent in reversed(shape)],
            [cuda.cuuint64_t(stride * size) for stride in reversed(strides[:-1])],
            [cuda.cuuint32_t(extent) for extent in reversed(box)],
            [cuda.cuuint32_t(1)] * rank,
            inner,
            cuda.CUtensorMapSwizzle(swizzle),
            promotion,
            fill,
        )
        self._check(status, f"describing a tensor {list(shape)} in boxes of {list(box)}")
        words = list(struct.unpack("16Q", ctypes.string_at(found.getPtr(), 128)))
        last = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)) * size
        if self._version <= _NEWEST_WITH_SMALL_FAULT and last + 1 < 128 * 1024:
            words[1] &= ~(1 << 21)  # these drivers encode small tensors wrongly; CUTLASS and Triton do the same
        return struct.pack("16Q", *words)

    def _make_current(self) -> None:
        """Give this thread the primary context of the current device, if it has none."""
        cuda = self._cuda
        status, context = cuda.cuCtxGetCurrent()
        self._check(status, "getting the current context")
        if int(context):
            return
        import torch

        status, device = cuda.cuDeviceGet(torch.cuda.current_device())
        self._check(status, "getting the current device")
        status, context = cuda.cuDevicePrimaryCtxRetain(device)
        self._check(status, "retaining the primary context")
        (status,) = cuda.cuCtxSetCurrent(context)
        self._check(status, "making the primary context current")

    def _check(self, status: Any, what: str) -> None:
        if status != self._success:
            raise LaunchError(f"{what} failed: {status.name}.")
