"""Launching from a library, with a driver that only records calls: look-up, parameter blocks, every error."""

import ctypes
import json
import logging
import shutil
import struct
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.aot.library import Built
from triton_ep.errors import (
    AotArchMismatch,
    AotCorrupted,
    AotMiss,
    AotNvshmemMismatch,
    ConfigError,
    LaunchError,
)
from triton_ep.kernels.device.job import Job
from triton_ep.ops import grouped_bf16
from triton_ep.runtime import cubins as launch
from triton_ep.runtime import launch as runtime
from triton_ep.runtime.cubins import Aot, CompiledLibrary, choose
from triton_ep.runtime.driver import prefer_shared_memory
from triton_ep.runtime.library import Library
from triton_ep.runtime.plans import Plan, Shape, exchange

pytestmark = pytest.mark.plain
CODES = {"ptr": "Q", "i32": "i", "i64": "q", "tensormap": "128s"}
SHAPE = Shape(4096, 7168, 8, 256, 8, 8, num_sm=24, enable_local_combine=True)
NODES = Shape(4096, 7168, 8, 256, 16, 8, num_sm=24, enable_local_combine=True, payload="mxfp8", network=1)


class NotingDriver:
    """Records loads and launches; reads the parameters of a launch like a GPU."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.launches: list[tuple[Any, ...]] = []
        self.kinds: tuple[str, ...] = ()
        self.maps = 0
        self.side_by_side: list[bool] = []
        self.early: list[bool] = []

    def load(self, cubin: bytes, what: str) -> int:
        """A handle of the library."""
        self.loaded.append(what)
        return len(self.loaded)

    def function(self, library: int, symbol: str, shared: int, side_by_side: bool) -> str:
        """The name as handle."""
        self.side_by_side.append(side_by_side)
        return f"{library}:{symbol}"

    def registers(self, function: Any) -> int:
        """The same of all kernels."""
        return 32

    def tensor_map(self, address: int, *about: Any) -> bytes:
        """A map that contains the address, to be recognised."""
        self.maps += 1
        return struct.pack("Q", address) + bytes(120)

    def launcher(
        self, function: str, threads: int, shared: int, params: int, what: str, early: bool
    ) -> Callable[[int, int], None]:
        """A function that reads every parameter from its address in the block."""

        def run(grid: int, stream: int) -> None:
            addresses = (ctypes.c_void_p * len(self.kinds)).from_address(params)
            values = []
            for kind, address in zip(self.kinds, addresses, strict=True):
                size = struct.calcsize(CODES[kind])
                assert address % (64 if kind == "tensormap" else size) == 0
                values.append(struct.unpack(CODES[kind], ctypes.string_at(address, size))[0])
            self.launches.append((function, grid, threads, stream, values))
            self.early.append(early)

        return run


class NvshmemHeap:
    """The interface of a heap with NVSHMEM that the run time uses."""

    def __init__(self, version: str) -> None:
        self.nvshmem_version = version
        self.initialized: list[tuple[int, str]] = []

    def initialize_library(self, library: int, name: str) -> None:
        """Record the call."""
        self.initialized.append((library, name))


@pytest.fixture
def driver() -> NotingDriver:
    """One driver per test."""
    return NotingDriver()


@pytest.fixture
def aot(built: Built, driver: NotingDriver) -> Aot:
    """The library of this session with the recording driver."""
    return Aot(CompiledLibrary(Library(built.folder, "sm_90"), driver))  # type: ignore[arg-type]


@pytest.fixture
def compiled_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behave as on a GPU: device 0, stream 77; tensors may be on the CPU."""
    monkeypatch.setattr(runtime, "INTERPRETING", False)
    monkeypatch.setattr(runtime, "_place", lambda: -1)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)


_INTEGERS = {
    "num_tokens": 10,
    "row_words": 1792,
    "experts_per_rank": 32,
    "rank": 3,
    "num_ranks": 8,
    "ranks_per_node": 8,
    "max_tokens": 4096,
    "num_flags": 128,
    "sent": 0,
}
_PUSH = runtime.spec("dispatch_push_kernel")
_KINDS = (*["ptr" if _PUSH.arguments[name][0] == "*" else "i32" for name in _PUSH.runtime_order], "ptr", "ptr")


def _push_arguments() -> dict[str, Any]:
    dtypes = {
        "x_ptr": torch.int64,
        "scale_ptr": torch.uint8,
        "push_addrs_ptr": torch.int64,
        "placement_ptr": torch.int32,
        "state_ptr": torch.int64,
        "tables_ptr": torch.int64,
    }
    return {name: torch.zeros(64, dtype=dtype) for name, dtype in dtypes.items()} | _INTEGERS


def _in_order(arguments: dict[str, Any]) -> list[int]:
    """Parameters of the kernel, with Triton's two scratch pointers."""
    values = [arguments[name] for name in _PUSH.runtime_order]
    return [*[value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values], 0, 0]


def test_a_launch_hands_over_all_arguments(aot: Aot, driver: NotingDriver, compiled_mode: None) -> None:
    """Addresses, integers and Triton's two scratch pointers, in order; loaded once, launched at every call."""
    launcher = runtime.Launcher(exchange.push(SHAPE, 0, 1792), aot=aot)
    driver.kinds = _KINDS
    for count in (10, -1):
        arguments = _push_arguments() | {"num_tokens": count}
        launcher.launch(24, **arguments)
        function, grid, threads, stream, values = driver.launches[-1]
        assert (function, grid, threads, stream) == ("1:dispatch_push_kernel", 24, 32 * 16, 77)
        assert values == _in_order(arguments)
    assert len(driver.loaded) == 1 and driver.side_by_side == [True]
    launcher.launch(0, **arguments)
    assert len(driver.launches) == 2


def test_arguments_go_by_their_names(aot: Aot, driver: NotingDriver, compiled_mode: None) -> None:
    """Names may come in any order; bound arguments are not passed again; the error states a missing or unknown name."""
    arguments = _push_arguments()
    bound = {name: arguments.pop(name) for name in ("state_ptr", "rank", "num_ranks")}
    launcher = runtime.Launcher(exchange.push(SHAPE, 0, 1792), bound | {"call": 3}, aot=aot)
    driver.kinds = _KINDS
    launcher.launch(24, **dict(reversed(arguments.items())))
    assert driver.launches[-1][4] == _in_order(arguments | bound)
    with pytest.raises(TypeError, match=r"dispatch_push_kernel\(\) missing .* 'num_tokens'"):
        launcher.launch(24, **{name: value for name, value in arguments.items() if name != "num_tokens"})
    for unknown in ("tokens", "rank"):
        with pytest.raises(TypeError, match=rf"dispatch_push_kernel\(\) got an unexpected .* '{unknown}'"):
            launcher.launch(24, **arguments, **{unknown: 1})


def test_early_launches(aot: Aot, driver: NotingDriver, compiled_mode: None) -> None:
    """Launches of one compiled kernel may be early or not, as their launcher says."""
    driver.kinds = _KINDS
    for early in (False, True):
        launcher = runtime.Launcher(exchange.push(SHAPE, 0, 1792), aot=aot, early=early)
        launcher.launch(24, **_push_arguments())
    assert driver.early == [False, True] and len(driver.loaded) == 1


@pytest.mark.parametrize("early", [False, True])
def test_the_driver_is_told_of_early_launches(early: bool) -> None:
    """An early launch has the attribute that lets it start before the kernel ahead has ended; sizes are the same."""
    driver, launched = launch.Driver.__new__(launch.Driver), []
    names = ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ", "sharedMemBytes", "hStream")

    def launch_plainly(function: str, *given: Any) -> tuple[str]:
        *sizes, params, extra = given
        launched.append((function, sizes, params, extra))
        return ("success",)

    def launch_early(config: SimpleNamespace, function: str, params: int, extra: int) -> tuple[str]:
        ((attribute,), count) = config.attrs, config.numAttrs
        assert count == 1 and attribute.id == "early" and attribute.value.programmaticStreamSerializationAllowed == 1
        launched.append((function, [getattr(config, name) for name in names], params, extra))
        return ("success",)

    driver._cuda = SimpleNamespace(
        CUstream=lambda stream: f"stream {stream}",
        CUlaunchAttribute=SimpleNamespace,
        CUlaunchAttributeValue=SimpleNamespace,
        CUlaunchConfig=SimpleNamespace,
        CUlaunchAttributeID=SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="early"),
        **({"cuLaunchKernelEx": launch_early} if early else {"cuLaunchKernel": launch_plainly}),
    )
    driver._success, driver._streams = "success", {}
    start = driver.launcher("function", 128, 4096, 7, "a kernel", early)
    for grid, stream in ((24, 5), (25, 6)):
        start(grid, stream)
        assert launched[-1] == ("function", [grid, 1, 1, 128, 1, 1, 4096, f"stream {stream}"], 7, 0)


def test_the_jit_gets_groups(compiled_mode: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled once per kind of arguments: integers of a group stay run-time values, its pointers are aligned. Triton's
    launch function gets each group as a tuple, and the hooks of profilers if any."""
    compiled, launches, preferring = [], [], []

    class Compiled:
        function, packed_metadata = "function", "metadata"
        metadata, n_regs = SimpleNamespace(num_warps=8, shared=0), 64

        def __init__(self, source: Any, options: dict[str, Any]) -> None:
            compiled.append((source, options))

        @staticmethod
        def run(*args: Any) -> None:
            launches.append(args)

        @staticmethod
        def launch_metadata(grid: tuple[int, int, int], stream: int) -> str:
            return f"{grid} {stream}"

    monkeypatch.setattr("triton.compile", Compiled)
    monkeypatch.setattr(runtime, "prefer_shared_memory", preferring.append)
    arguments = _push_arguments()
    bound = {name: arguments.pop(name) for name in Job._fields}
    launcher = runtime.Launcher(exchange.push(SHAPE, 0, 1792), bound)
    for count in (10, 16):
        launcher.launch(24, **arguments | {"num_tokens": count})
    ((source, options),) = compiled
    assert options["num_warps"] == 16 and not options["launch_pdl"] and preferring == ["function"]
    index = [parameter.name for parameter in _PUSH.parameters].index("job")
    assert source.signature["job"] == Job("*i64", "*i64", *["i32"] * 5)
    assert {path for path in source.attrs if path[0] == index} == {(index, 0), (index, 1)}
    assert not any(path[0] == index for path in source.constants)
    assert launches[0][:9] == (24, 1, 1, 77, "function", "metadata", None, None, None)
    given = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in bound.values()]
    assert launches[0][9 + index] == tuple(given)
    monkeypatch.setattr(launcher, "_enter", type("Hooks", (), {"calls": ["a profiler's"]}))
    launcher.launch(24, **arguments)
    assert launches[2][6:9] == ("(24, 1, 1) 77", launcher._enter, launcher._exit)
    runtime.Launcher(exchange.push(SHAPE, 0, 1792), bound, early=True).launch(24, **arguments)
    assert compiled[-1][1]["launch_pdl"]


def test_a_refusal_of_the_driver_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that runs beside others prefers all shared memory: attribute 9 of CUfunction_attribute, in percent."""
    told = []

    def set_attribute(function: ctypes.c_void_p, attribute: int, value: int) -> int:
        told.append((function.value, attribute, value))
        return 0 if len(told) == 1 else 400

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuFuncSetAttribute=set_attribute))
    prefer_shared_memory(2**40)
    assert told == [(2**40, 9, 100)]
    with pytest.raises(LaunchError, match="CUDA error 400"):
        prefer_shared_memory(2**40)


def test_threads_do_not_mix_their_arguments(aot: Aot, driver: NotingDriver, compiled_mode: None) -> None:
    """A reused parameter block serves one launch at a time."""
    launcher = runtime.Launcher(exchange.push(SHAPE, 0, 1792), aot=aot)
    driver.kinds = _KINDS

    def run(number: int) -> None:
        arguments = _push_arguments() | dict.fromkeys(_INTEGERS, number) | {"row_words": 1792}
        for _ in range(200):
            launcher.launch(number, **arguments)

    threads = [threading.Thread(target=run, args=(number,)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.launches) == 600
    for _, grid, _, _, values in driver.launches:
        named = dict(zip(_PUSH.runtime_order, values, strict=False))
        assert {name: named[name] for name in _INTEGERS} == dict.fromkeys(_INTEGERS, grid) | {"row_words": 1792}


def test_products_pass_tensor_maps(
    aot: Aot, driver: NotingDriver, compiled_mode: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TMA: map, sizes and strides of each operand, encoded once; then the other arguments."""
    monkeypatch.setattr(runtime, "default_aot", lambda: aot)
    monkeypatch.setattr(grouped_bf16, "INTERPRETING", False)
    monkeypatch.setattr(grouped_bf16, "programs", lambda device: 132)
    runtime._launchers.clear()
    boxes = ("tensormap", "i32", "i32", "i64", "i64")
    driver.kinds = (*boxes, *boxes, "ptr", "ptr", *["i32"] * 8, "ptr", "ptr")
    a, w = torch.zeros(9000, 256, dtype=torch.bfloat16), torch.zeros(32, 512, 256, dtype=torch.bfloat16)
    ends = torch.arange(32, dtype=torch.int32)
    out = grouped_bf16.bf16_gemm(a, w.transpose(1, 2), ends, tma=True)
    _, grid, _, _, values = driver.launches[-1]
    assert grid == 132
    assert [struct.unpack_from("Q", values[i])[0] for i in (0, 5)] == [a.data_ptr(), w.data_ptr()]
    assert values[1:5] == [9000, 256, 256, 1]
    assert values[6:10] == [32 * 512, 256, 256, 1]
    assert values[10:] == [out.data_ptr(), ends.data_ptr(), 9000, 32, 512, 256, 256, 512 * 256, 256, 512, 0, 0]
    grouped_bf16.bf16_gemm(a, w.transpose(1, 2), ends, tma=True)
    assert driver.launches[-1][4][:10] == values[:10]
    assert driver.maps == 2  # the maps of the first launch
    grouped_bf16.bf16_gemm(a[:8999], w.transpose(1, 2), ends, tma=True)
    assert driver.launches[-1][4][1] == 8999
    assert driver.maps == 3
    runtime._launchers.clear()


def test_a_miss_says_what_to_do(aot: Aot, built: Built, compiled_mode: None) -> None:
    """The error has the request, the closest variant that exists, and a command that builds the missing one."""
    launcher = runtime.Launcher(exchange.push(replace(SHAPE, topk=3), 0, 1792), aot=aot)
    with pytest.raises(AotMiss, match=r"closest has TOPK=8 \(requested: 3\)") as raised:
        launcher.launch(24, **_push_arguments())
    assert f"--arch sm_90 --out {built.folder} --variant" in str(raised.value)
    splits = runtime.Launcher(exchange.splits(SHAPE, False), aot=aot)
    counts, tables = torch.zeros(64, dtype=torch.int32)[1:], torch.zeros(64, dtype=torch.int64)
    arguments = {name: tables if name in ("state_ptr", "tables_ptr") else counts for name in splits.names}
    integers = {name: 1 for name in splits.names if not name.endswith("_ptr")}
    with pytest.raises(AotMiss, match=r"\"unaligned\":\[\"bad_scatter_ptr\""):
        splits.launch(1, **arguments | integers)
    with pytest.raises(AotMiss, match="no variant of that kernel"):
        runtime.Launcher(Plan("no_such_kernel"), aot=aot)


def test_preferring_is_the_only_fall_back(
    aot: Aot, compiled_mode: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With "prefer" the JIT compiles missing kernels, and the log says so."""
    launcher = runtime.Launcher(exchange.push(replace(SHAPE, topk=3), 0, 1792), aot=replace(aot, prefer=True))

    def compile_it() -> None:
        raise KeyError("the JIT")

    monkeypatch.setattr(launcher, "_use_jit", compile_it)
    with caplog.at_level(logging.WARNING, "triton_ep.aot"), pytest.raises(KeyError, match="the JIT"):
        launcher.launch(24, **_push_arguments())
    assert "compiled by the JIT: dispatch_push_kernel is not in" in caplog.text


def test_no_library_and_other_architectures(built: Built, tmp_path: Path) -> None:
    """No library: AotMiss with the command; another GPU: AotArchMismatch with both; "prefer" uses the JIT."""
    with pytest.raises(AotMiss, match=r"no ahead-of-time library in .*build --arch sm_90 --out"):
        choose("require", tmp_path, lambda: "sm_90")
    with pytest.raises(AotArchMismatch, match="is for sm_90, sm_100, not for sm_89"):
        choose("require", built.folder, lambda: "sm_89")
    for folder, arch in ((tmp_path, "sm_90"), (built.folder, "sm_89")):
        assert choose("prefer", folder, lambda arch=arch: arch).compiled is None
    shutil.copytree(built.folder / "sm_90", tmp_path / "sm_100")
    with pytest.raises(AotArchMismatch, match="is for sm_90, not for sm_100"):
        Library(tmp_path, "sm_100")


def test_corrupted_files_are_not_loaded(built: Built, driver: NotingDriver, tmp_path: Path) -> None:
    """A flipped bit in a cubin, and a malformed index, also with "prefer"."""
    shutil.copytree(built.folder / "sm_90", tmp_path / "sm_90")
    library = Library(tmp_path, "sm_90")
    entry = library.entries[0]
    path = tmp_path / "sm_90" / entry.file
    data = bytearray(path.read_bytes())
    data[100] ^= 4
    path.write_bytes(data)
    compiled = CompiledLibrary(library, driver)  # type: ignore[arg-type]
    with pytest.raises(AotCorrupted, match=r"sha256 is .*Build it again"):
        Aot(compiled, prefer=True, heap=NvshmemHeap("3.4.5")).kernel(entry.request)
    assert driver.loaded == []
    index = json.loads((tmp_path / "sm_90" / "index.json").read_text())
    del index["entries"][entry.request.signature()]["sha256"]
    for text in (json.dumps(index), '{"format": 1', "[]"):
        (tmp_path / "sm_90" / "index.json").write_text(text)
        with pytest.raises(AotCorrupted, match="no index"):
            choose("prefer", tmp_path, lambda: "sm_90")


def test_older_sources_are_a_miss(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library built from other sources than this package's kernels is not launched."""
    library = Library(built.folder, "sm_90")
    request = library.entries[0].request
    library.find(request)
    monkeypatch.setattr("triton_ep.runtime.library.source_hash", lambda file: "another")
    with pytest.raises(AotMiss, match="built from other sources"):
        library.find(request)


@pytest.mark.parametrize(("host", "fits"), [("3.4.5", True), ("3.8.0", True), ("3.3.9", False), ("4.0.0", False)])
def test_nvshmem_of_the_node(built: Built, driver: NotingDriver, host: str, fits: bool) -> None:
    """Device code runs with a host library of the same major release that is not older, and is initialised once."""
    if not built.has_bitcode:
        pytest.skip("no NVSHMEM bitcode: pip install nvidia-nvshmem-cu13==3.4.5")
    heap = NvshmemHeap(host)
    aot = Aot(CompiledLibrary(Library(built.folder, "sm_90"), driver), heap=heap)  # type: ignore[arg-type]
    if fits:
        aot.check(NODES)
        launcher = runtime.Launcher(exchange.splits(NODES, False), aot=aot)
        wanted = dict(launcher.plan.constexprs)
        request = next(e.request for e in aot.compiled.library.entries if dict(e.request.constexprs) == wanted)
        assert aot.kernel(request) is aot.kernel(request)
        assert heap.initialized == [(1, "splits_kernel")]
        return
    with pytest.raises(AotNvshmemMismatch, match=rf"built with NVSHMEM 3\.4\.5, this node has {host}"):
        aot.check(NODES)
    assert driver.loaded == []


def test_a_layer_is_refused_before_it_is_made(aot: Aot) -> None:
    """A shape that lacks all variants of a kernel is refused; a covered shape passes."""
    aot.check(SHAPE)
    with pytest.raises(AotMiss, match="splits_kernel is not in"):
        aot.check(replace(SHAPE, topk=5))


def test_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU ranks have no cubins: "require" is an error, "prefer" uses the interpreter. Other modes are refused."""
    with pytest.raises(AotMiss, match="interpreted on CPU ranks"):
        runtime.aot_for(True, None)
    assert runtime.aot_for("prefer", None) is None
    assert runtime.aot_for(False, None) is None
    with pytest.raises(ConfigError, match="aot is 'always'"):
        runtime.aot_for("always", None)
    monkeypatch.setenv("TRITON_EP_AOT", "1")
    with pytest.raises(AotMiss):
        runtime.aot_for(None, None)
    monkeypatch.setenv("TRITON_EP_AOT", "perhaps")
    with pytest.raises(ConfigError, match="none of 1, 0, prefer"):
        runtime.aot_for(None, None)


def test_statuses_of_the_driver_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every status is checked: a refused image is AotArchMismatch, the error of a refused launch names the kernel."""
    driver = launch.Driver.__new__(launch.Driver)

    class Status:
        def __init__(self, name: str) -> None:
            self.name = name

    class Cuda:
        """A cuda.bindings.driver that refuses calls."""

        CUstream = int

        @staticmethod
        def cuCtxGetCurrent() -> tuple[Status, int]:
            return success, 1

        @staticmethod
        def cuLibraryLoadData(*_: Any) -> tuple[Status, int]:
            return Status("CUDA_ERROR_NO_BINARY_FOR_GPU"), 0

        @staticmethod
        def cuLaunchKernel(*_: Any) -> tuple[Status]:
            return (Status("CUDA_ERROR_INVALID_VALUE"),)

    success = Status("CUDA_SUCCESS")
    driver._cuda, driver._success, driver._streams = Cuda, success, {}
    with pytest.raises(AotArchMismatch, match="CUDA_ERROR_NO_BINARY_FOR_GPU"):
        driver.load(b"", "x.cubin")
    with pytest.raises(LaunchError, match="launching 3 programs of k failed: CUDA_ERROR_INVALID_VALUE"):
        driver.launcher("f", 32, 0, 0, "k", False)(3, 5)
