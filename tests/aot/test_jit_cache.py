"""Kernels kept by one process are launched by the next without Triton, and compiled again when necessary."""

import json
import os
import shutil
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import triton

from tests.aot.stand_in import build_stand_in, run_with_stand_in
from tests.aot.test_runtime import NotingDriver
from triton_ep.runtime import jit_cache, sources
from triton_ep.runtime.jit_cache import JitCache
from triton_ep.runtime.plans.request import KernelRequest

pytestmark = pytest.mark.plain
HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the driver that records launches."""
    return build_stand_in(tmp_path_factory.mktemp("driver"))


def _run(stand_in: Path, cache: Path, *modes: str) -> dict[str, Any]:
    """Run a process; return its launches and what they needed."""
    done = run_with_stand_in([HERE / "kept_kernels_program.py", stand_in, *modes], stand_in, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_later_process_launches_without_triton(stand_in: Path, tmp_path: Path) -> None:
    """Kernels of a dispatch and combine get the same bytes, and two processes that begin together compile each once;
    damaged files are compiled and written again, and no kernel is loaded while others wait for a lock."""
    with ThreadPoolExecutor() as pool:
        cold, beside = pool.map(lambda _: _run(stand_in, tmp_path, "watch"), range(2))
    count = len(cold["launches"])
    assert count >= 7
    assert {"routing_slots_kernel", "dispatch_push_kernel", "combine_pull_kernel"} <= {
        launch["kernel"] for launch in cold["launches"]
    }
    assert beside["launches"] == cold["launches"]
    assert Counter(cold["counts"]) + Counter(beside["counts"]) == {"compile": count, "sources": count}
    assert cold["loaded"] + beside["loaded"] == count

    warm = _run(stand_in, tmp_path)
    assert not warm["triton"]
    assert warm["loaded"] == count
    assert warm["launches"] == cold["launches"]

    (state,) = (tmp_path / "triton_ep").iterdir()
    kept = sorted(path for path in state.iterdir() if not path.name.startswith((".", "kernels")))
    assert len(kept) == count
    damaged = [*kept[:2], state / "kernels"]
    whole = {path: path.read_bytes() for path in damaged}
    kept[0].write_bytes(whole[kept[0]][:-100])
    kept[1].write_bytes(whole[kept[1]].replace(b'"threads": ', b'"threads": 1', 1))
    (state / "kernels").write_bytes(whole[state / "kernels"].replace(b"ptr", b"prt"))
    mended = _run(stand_in, tmp_path, "watch", "locks")
    assert mended["counts"] == {"compile": 2, "sources": 2}
    assert mended["locks"]["loads"] >= count
    assert mended["locks"]["locked"] == 0
    assert mended["loaded"] == count - 2
    assert mended["launches"] == cold["launches"]
    assert mended["told"] == [cold["launches"][0]["kernel"]]
    assert {path: path.read_bytes() for path in damaged} == whole


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of Triton's cache, in a process with a driver and without Triton settings."""
    for name in list(os.environ):
        if name.startswith(("TRITON_", "LLVM_", "MLIR_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    driver = NotingDriver()
    monkeypatch.setattr(jit_cache, "_driver", lambda: driver)
    return tmp_path


def _current(architecture: str = "sm_90") -> JitCache | None:
    for function in (sources.hash_of_all, jit_cache._compiler):
        function.cache_clear()
    return jit_cache.current(lambda: architecture)


def _folder(architecture: str = "sm_90") -> Path:
    found = _current(architecture)
    assert found is not None
    return found.folder


def test_what_decides_code_decides_the_folder(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of a kernel, Triton's files, the architecture, a compiler variable and the assembler it names."""
    before = _folder()
    assert before == _folder()
    assert before.parent == cache / "triton_ep"
    found = [before, _folder("sm_100")]

    with monkeypatch.context() as patch:
        changed = tmp_path / "changed"
        shutil.copytree(sources.kernels_folder(), changed)
        patch.setattr(sources, "kernels_folder", lambda: changed)
        assert _folder() == before  # the place of installation has no influence
        path = changed / "device" / "waits.py"
        path.write_text(path.read_text() + "\n# one line more\n")
        found.append(_folder())

    with monkeypatch.context() as patch:
        other = tmp_path / "site" / "triton"
        for name in ("__init__.py", "compiler/compiler.py", "backends/nvidia/bin/ptxas"):
            (other / name).parent.mkdir(parents=True, exist_ok=True)
            (other / name).write_text("1")
        specification = type("Specification", (), {"origin": str(other / "__init__.py")})
        patch.setattr(jit_cache.importlib.util, "find_spec", lambda name: specification)
        found.append(_folder())
        for name in ("__init__.py", "compiler/compiler.py", "backends/nvidia/bin/ptxas"):
            (other / name).write_text("22")
            found.append(_folder())

    assembler = tmp_path / "ptxas"
    for name, value in (("TRITON_PTXAS_PATH", str(assembler)), ("DISABLE_PTXAS_OPT", "1"), ("PTXAS_OPTIONS", "-O1")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            found.append(_folder())
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(assembler))
    assembler.write_text("an assembler")
    found.append(_folder())
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("name", ["TRITON_HOME", "TRITON_LIBCUDA_PATH", "TRITON_EP_HEAP_SIZE", "HOSTNAME"])
def test_the_rest_does_not(cache: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders, and variables of other programs, do not change the folder."""
    before = _folder()
    monkeypatch.setenv(name, "64M")
    assert _folder() == before


@pytest.mark.parametrize(
    "name",
    [
        "TRITON_DEBUG",
        "TRITON_ALWAYS_COMPILE",
        "TRITON_KERNEL_DUMP",
        "TRITON_KERNEL_OVERRIDE",
        "TRITON_INSTRUMENTATION_MODE",
        "MLIR_ENABLE_DUMP",
    ],
)
def test_compilations_that_are_watched_take_place(cache: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's variables, when switched on, disable the cache; so does ours."""
    monkeypatch.setenv(name, "0")
    assert _current() is not None
    monkeypatch.setenv(name, "1")
    assert _current() is None
    monkeypatch.delenv(name)
    monkeypatch.setenv("TRITON_EP_JIT_CACHE", "0")
    assert _current() is None


def test_a_program_can_watch_too(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's knobs disable the cache: debug, an inspection of stages, a load hook; a hook of ours does not."""
    runtime = triton.knobs.runtime
    monkeypatch.setattr(runtime.kernel_load_end_hook, "calls", [JitCache.info])
    assert _current() is not None
    for owner, name, value in (
        (runtime, "debug", True),
        (runtime, "add_stages_inspection_hook", print),
        (runtime.kernel_load_end_hook, "calls", [print]),
        (triton.knobs.compilation, "listener", print),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert _current() is None, name
    assert _current() is not None


def test_without_cuda_python_triton_compiles(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without cuda-python nothing could launch kept kernels."""
    monkeypatch.setattr(jit_cache, "_driver", lambda: None)
    assert _current() is None


def _cache_in(folder: Path) -> JitCache:
    return JitCache(folder, NotingDriver())  # type: ignore[arg-type]  # stands for the driver


def test_a_second_process_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another variant need not wait, and nobody waits longer than the limit or without a folder for locks."""
    kept = _cache_in(tmp_path / "state")
    wanted, other = KernelRequest("a_kernel", {"N": 1}), KernelRequest("a_kernel", {"N": 2})
    order: list[str] = []

    def compile_after_the_first() -> None:
        with kept.alone(wanted):
            order.append("second")

    with ThreadPoolExecutor() as pool:
        with kept.alone(wanted):
            second = pool.submit(compile_after_the_first)
            with kept.alone(other):
                time.sleep(0.2)
                order.append("first")
        second.result()
        assert order == ["first", "second"]
        monkeypatch.setattr(jit_cache, "MOST_WAIT_S", 0.05)
        with kept.alone(wanted):
            pool.submit(compile_after_the_first).result()
    assert order == ["first", "second", "second"]
    (tmp_path / "file").write_text("")
    with _cache_in(tmp_path / "file" / "state").alone(wanted):
        order.append("without a folder")
    assert order[3:] == ["without a folder"]


def test_foreign_files_are_not_loaded(tmp_path: Path) -> None:
    """A file of another variant, a file without an entry, a malformed entry: nothing is raised, nothing is loaded."""
    driver = NotingDriver()
    wanted, other = KernelRequest("a_kernel", {"N": 1}), KernelRequest("a_kernel", {"N": 2})
    told = {
        "request": other.as_dict(),
        "file": "a_kernel",
        "symbol": "a_kernel",
        "params": ["ptr", "ptr"],
        "threads": 128,
        "shared": 0,
    }
    kept = JitCache(tmp_path, driver)  # type: ignore[arg-type]
    path = kept._path(wanted)
    for values in (told, {}, {**told, "request": wanted.as_dict(), "params": None}):
        jit_cache._write(path, values, b"a cubin")
        assert kept.kernel(wanted, 0) is None
    assert driver.loaded == []
    jit_cache._write(path, {**told, "request": wanted.as_dict()}, b"a cubin")
    found = kept.kernel(wanted, 0)
    assert found is not None
    assert found.registers == driver.registers(None)
    assert kept.kernel(wanted, 0) is found
    assert len(driver.loaded) == 1
    assert kept.kernel(wanted, 1) is not found  # a kernel of another GPU
    path.write_bytes(b"")
    assert JitCache(tmp_path, driver).kernel(wanted, 0) is None  # type: ignore[arg-type]
