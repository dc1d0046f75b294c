"""Finding and pruning NVSHMEM's device bitcode: kept functions, the cache, the message if it is missing.

Most tests use a stand-in of a few lines, which LLVM reads like the real file; tests with `real` need the real file.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.patience import LIMIT_S
from tests.programs import Program, environment_of_programs
from triton_ep.errors import HeapError
from triton_ep.heap import bitcode
from triton_ep.heap.bitcode import find_bitcode, pruned_bitcode
from triton_ep.kernels.device.codes import NVSHMEM_SYMBOLS
from triton_ep.runtime import files

ROOT = Path(__file__).resolve().parents[2]
STATE = ("nvshmemi_device_state_d", "nvshmemi_device_lib_version_d")

LIBRARY = """
target triple = "nvptx64-nvidia-cuda"
@nvshmemi_device_state_d = addrspace(4) externally_initialized global [4 x i32] zeroinitializer
@llvm.compiler.used = appending global [1 x ptr] [
  ptr addrspacecast (ptr addrspace(4) @nvshmemi_device_state_d to ptr)], section "llvm.metadata"
define i32 @put(i64 %a) alwaysinline { %r = call i32 @helper() ret i32 %r }
define i32 @put_other() { ret i32 2 }
define linkonce_odr i32 @helper() noinline { ret i32 1 }
"""


def _install(site: Path, *names: str, text: str = LIBRARY) -> Path:
    """Create files of these names in NVSHMEM's folder of a site-packages folder; returns that folder."""
    folder = site / "nvidia" / "nvshmem" / "lib"
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site-packages folder with the stand-in, second in sys.path after an empty one."""
    folder = tmp_path / "site"
    _install(folder, "libnvshmem_device.bc")
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "empty"), str(folder), *sys.path])
    return folder


@pytest.fixture(scope="module")
def real() -> Path:
    """The installed bitcode."""
    try:
        return find_bitcode()
    except HeapError as error:
        pytest.skip(str(error))


def test_the_first_entry_of_the_path_that_has_it_wins(site: Path, tmp_path: Path) -> None:
    """The first path entry wins, as for imports, so bitcode and host library are from one installation."""
    second = _install(tmp_path / "second", "libnvshmem_device.bc")
    assert find_bitcode() == site / "nvidia/nvshmem/lib/libnvshmem_device.bc"
    sys.path.insert(0, str(tmp_path / "second"))  # the fixture restores sys.path
    assert find_bitcode() == second / "libnvshmem_device.bc"


@pytest.mark.parametrize(("archs", "chosen"), [((75, 80, 90, 100), 90), ((75, 80, 100), 80), ((80, 89, 90), 90)])
def test_one_file_per_architecture(
    archs: tuple[int, ...], chosen: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later releases have a file per architecture: the newest one that every supported GPU runs is chosen."""
    folder = _install(tmp_path, *(f"libnvshmem_device_sm_{arch}.bc" for arch in archs))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert find_bitcode() == folder / f"libnvshmem_device_sm_{chosen}.bc"
    assert "define i32 @put(" in pruned_bitcode(["put"], tmp_path).read_text()


def test_missing_bitcode_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the install command if only files for newer GPUs are installed."""
    _install(tmp_path, "libnvshmem_device_sm_100.bc", "libnvshmem_host.so.3")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(HeapError, match="pip install nvidia-nvshmem-cu13"):
        pruned_bitcode(["put"], tmp_path)


def test_only_what_is_called_is_kept(site: Path, tmp_path: Path) -> None:
    """The function stays, external again, with its callees and the state, and nothing else of file or stub."""
    text = pruned_bitcode(["put"], tmp_path).read_text()
    assert "define i32 @put(i64" in text
    assert "define internal i32 @helper()" in text or "define linkonce_odr i32 @helper()" in text
    assert "@nvshmemi_device_state_d = " in text
    assert "put_other" not in text
    assert "keep" not in text
    assert 'target datalayout = "e-' in text and 'target triple = "nvptx64-nvidia-cuda"' in text


def test_a_missing_function_is_named(site: Path, tmp_path: Path) -> None:
    """A prefix of a function's name does not match it; nothing is cached."""
    with pytest.raises(HeapError, match="no function put_othe"):
        pruned_bitcode(["put", "put_othe"], tmp_path)
    assert list(tmp_path.rglob("*.ll")) == []
    with pytest.raises(HeapError, match="at least one"):
        pruned_bitcode([], tmp_path)


def test_unreadable_bitcode_is_named(site: Path, tmp_path: Path) -> None:
    """A damaged file, or one from a newer LLVM, is named."""
    folder = _install(site, "libnvshmem_device.bc", text="this is no bitcode")
    with pytest.raises(HeapError, match=f"cannot read .*{folder}"):
        pruned_bitcode(["put"], tmp_path)


def test_second_call_reads_the_cache(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of symbols does not matter; other symbols or other bitcode give another file."""
    path = pruned_bitcode(["put", "put_other"], tmp_path)
    with monkeypatch.context() as patch:
        patch.delattr(bitcode, "_prune")
        assert pruned_bitcode(["put_other", "put"], tmp_path) == path
    assert pruned_bitcode(["put"], tmp_path) != path
    _install(site, "libnvshmem_device.bc", text=LIBRARY + "; another release\n")
    assert pruned_bitcode(["put", "put_other"], tmp_path) != path


def test_the_cache_is_tritons_by_default(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRITON_CACHE_DIR moves the cache, as it moves Triton's."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert pruned_bitcode(["put"]).is_relative_to(tmp_path / "cache")


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_an_interrupted_write_is_not_used(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """No file and no part of one stays; the next call writes it."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(files.os, step, interrupt)
        with pytest.raises(KeyboardInterrupt):
            pruned_bitcode(["put"], tmp_path / "cache")
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []
    assert "@put(" in pruned_bitcode(["put"], tmp_path / "cache").read_text()


def test_writers_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    """Ranks that start together on an empty cache all read the same complete file."""
    _install(tmp_path / "site", "libnvshmem_device.bc")
    code = (
        "import sys, time; from pathlib import Path\n"
        f"sys.path[:0] = [{str(tmp_path / 'site')!r}]\n"
        "import triton\n"
        "from triton_ep.heap.bitcode import pruned_bitcode\n"
        "print('ready', flush=True)\n"
        f"while not Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.001)\n"
        f"path = pruned_bitcode(['put'], Path({str(tmp_path / 'cache')!r}))\n"
        "print(path, len(path.read_text()))\n"
    )
    writers = [Program(["-c", code], environment_of_programs(), imported=True) for _ in range(3)]
    for writer in writers:  # all imports are done, so that the writes start together
        assert writer.lines(1) == ["ready"]
    (tmp_path / "go").touch()
    done = [writer.wait() for writer in writers]
    assert [each.returncode for each in done] == [0] * 3, done
    lines = {each.stdout.removeprefix("ready\n") for each in done}
    (path,) = (path for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert lines == {f"{path} {len(path.read_text())}\n"}


@pytest.fixture(scope="module")
def pruned(real: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed bitcode, pruned to the functions that kernels call."""
    return pruned_bitcode(NVSHMEM_SYMBOLS, tmp_path_factory.mktemp("pruned"))


def _called(text: str, symbols: Iterable[str]) -> set[str]:
    """These functions of a module and all that they call, directly or indirectly."""
    bodies = dict(re.findall(r"^define [^@]*@([\w$.]+)(\(.*?^\})", text, re.MULTILINE | re.DOTALL))
    seen: set[str] = set()
    waiting = [*symbols]
    while waiting:
        name = waiting.pop()
        if name in bodies and name not in seen:
            seen.add(name)
            waiting += re.findall(r"@([\w$.]+)", bodies[name])
    return seen


def test_the_real_bitcode_becomes_small(real: Path, pruned: Path) -> None:
    """Keeps the functions that kernels call, their callees, and nothing else: 32 kB of 30 MB in NVSHMEM 3.4.5; 1.8 MB
    of 54 in 3.8, whose put holds code for three transports. NVSHMEM's constants stay, and stay in use."""
    text = pruned.read_text()
    defined = set(re.findall(r"^define [^@]*@([\w$.]+)\(", text, re.MULTILINE))
    assert set(NVSHMEM_SYMBOLS) <= defined == _called(text, NVSHMEM_SYMBOLS)
    assert len(text) < real.stat().st_size / 20
    (used,) = (line for line in text.splitlines() if line.startswith("@llvm.compiler.used"))
    for symbol in STATE:
        assert f"\n@{symbol} = " in text
        assert f"@{symbol} " in used


def test_the_search_for_what_is_called_sees_a_rest() -> None:
    """An unreachable function is not reported; one reached by a call is."""
    text = "define void @a() {\n call void @b()\n}\n\ndefine internal void @b() {\n}\n\ndefine void @rest() {\n}\n"
    assert _called(text, ["a"]) == {"a", "b"}


COMPILE = """
import json, sys
from triton_ep.aot import compile, manifest

wanted = manifest.read_manifest(manifest.default_manifest())
found = (one for one in wanted if one.kernel == "internode_send_kernel" and one.calls_nvshmem)
request = next(found).as_dict()
for path in sys.argv[1:]:
    compile.start()
    made = compile.compile_request(request, "sm_90", path)
    compile.stop()
    print(json.dumps({**made["facts"], "bytes": len(made["cubin"]), **made["entry"]}))
"""


def test_kernels_come_out_as_with_the_whole_bitcode(real: Path, pruned: Path) -> None:
    """A kernel has the same size and constants whether linked with the whole file or the pruned one."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(real), str(pruned)],
        cwd=ROOT,
        env=environment | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    whole, small = map(json.loads, done.stdout.splitlines()[-2:])
    assert small["visible"] == list(STATE)
    assert small == whole
