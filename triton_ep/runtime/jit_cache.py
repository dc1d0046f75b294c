"""Kernels compiled by the JIT, kept on disk: later processes launch them without loading Triton.

    CACHE/triton_ep/STATE/kernels                       how every kernel is launched
    CACHE/triton_ep/STATE/<kernel>-<signature>          a compiled variant
    CACHE/triton_ep/STATE/.compiling-<number>           locked by the process that compiles; empty

CACHE is Triton's own (TRITON_CACHE_DIR). STATE is a hash of everything that decides code besides the `KernelRequest`
of a launch: the sources of all kernels, the files of Triton, the architecture, variables of Triton's compiler. A file
has three parts, with a newline between them: the sha256 of the rest, JSON, and the cubin. Other processes see it
complete or not at all. A file that is unreadable or damaged counts as missing: Triton compiles, and the file is written
anew. Nothing is ever removed; the folder triton_ep may be deleted at any time.

The ranks of a host ask for the same kernels at the same time. One of them compiles, and the others take its file.
Nobody loads a kernel while others wait for its lock: loading waits for kernels of this process that run, and those may
wait for the very ranks that wait for the lock.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import logging
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from triton_ep.errors import AotArchMismatch, LaunchError
from triton_ep.runtime.cubins import Kernel
from triton_ep.runtime.driver import Driver
from triton_ep.runtime.environment import read_compiler_settings, read_environment
from triton_ep.runtime.files import write_complete
from triton_ep.runtime.library import Entry, check_entry
from triton_ep.runtime.parameters import declared, interface
from triton_ep.runtime.plans.request import KernelRequest
from triton_ep.runtime.sources import hash_of_all

if TYPE_CHECKING:
    from triton_ep.kernels.spec import KernelSpec

FORMAT = 2
"""Part of STATE; raise it with every change of the file format."""
_KERNELS = "kernels"
_LOCKS = 64
MOST_WAIT_S = 120.0
"""Seconds to wait for another process that compiles; then both do."""
_OF_COMPILER = ("__init__.py", "_C/*.so", "compiler/*.py", "language/**/*.py", "runtime/*.py", "backends/nvidia/**/*")
"""Files of Triton that may change the generated code."""
_log = logging.getLogger("triton_ep.jit")


class Kept(NamedTuple):
    """A loaded compiled kernel, and the registers of a thread."""

    kernel: Kernel
    registers: int


class JitCache:
    """Compiled kernels of one folder, and those of them that are loaded into this process.

    Args:
        folder: CACHE/triton_ep/STATE; created at the first `store`.
    """

    def __init__(self, folder: Path, driver: Driver) -> None:
        self.folder = folder
        self._driver = driver
        self._loaded: dict[tuple[int, str], Kept] = {}
        self._libraries: list[Any] = []
        self._infos: Mapping[str, Mapping[str, Any]] | None = None

    def info(self, kernel: str) -> Mapping[str, Any] | None:
        """The result of `parameters.declared` for a kernel; None: not known without Triton."""
        if self._infos is None:
            found = _read(self.folder / _KERNELS)
            self._infos = {} if found is None else found[0]["kernels"]
        return self._infos.get(kernel)

    def store_infos(self) -> None:
        """Write the facts that `info` returns, unless the folder has them. Loads Triton."""
        if self._infos:
            return
        from triton_ep.kernels.spec import all_kernels

        ours = [spec for spec in all_kernels().values() if spec.kernel.__module__.startswith("triton_ep.kernels.")]
        self._infos = {spec.name: declared(spec) for spec in ours}
        try:
            _write(self.folder / _KERNELS, {"kernels": self._infos}, b"")
        except OSError as error:
            _log.info("nothing is kept: %s", error)

    def kernel(self, request: KernelRequest, device: int) -> Kept | None:
        """The kernel of this variant, loaded for the current device, whose number is `device`; None: no usable file."""
        key = device, request.signature()
        kept = self._loaded.get(key)
        if kept is None and (found := _read(self._path(request))) is not None:
            try:
                kept = self._load(request, *found)
            except (AotArchMismatch, LaunchError, KeyError, TypeError) as error:
                _log.info("%s cannot be used: %s", self._path(request), error)
                return None
            self._loaded[key] = kept
        return kept

    def _load(self, request: KernelRequest, told: Mapping[str, Any], cubin: bytes) -> Kept:
        check_entry(told)
        entry = Entry.from_dict(told)
        if entry.request.text() != request.text():
            raise KeyError("it is of another variant")
        library = self._driver.load(cubin, entry.file)
        self._libraries.append(library)
        function = self._driver.function(library, entry.symbol, entry.shared, bool(request.side_by_side))
        return Kept(Kernel(entry, function, self._driver), self._driver.registers(function))

    def holds(self, request: KernelRequest) -> bool:
        """Whether there is a whole file of this variant."""
        return _read(self._path(request)) is not None

    def store(self, spec: KernelSpec, request: KernelRequest, compiled: Any) -> None:
        """Keep a kernel that the JIT has compiled, if it can be launched without Triton."""
        if self.info(spec.name) is None:
            return  # STATE does not cover its sources
        path = self._path(request)
        try:
            told = {"request": request.as_dict(), "file": path.name, **interface(spec, request, compiled)}
            _write(path, told, compiled.asm["cubin"])
        except (ValueError, KeyError, OSError) as error:
            _log.info("%s is not kept: %s", spec.name, error)

    @contextlib.contextmanager
    def alone(self, request: KernelRequest) -> Iterator[None]:
        """While one process compiles a variant, others of the same host wait here, MOST_WAIT_S at most. Nothing that
        waits for a GPU may be done meanwhile.

        A process that ends gives its lock back. Where files cannot be locked, nobody waits.
        """
        with contextlib.ExitStack() as stack:
            try:
                import fcntl

                self.folder.mkdir(parents=True, exist_ok=True)
                number = zlib.crc32(request.signature().encode()) % _LOCKS
                file = stack.enter_context((self.folder / f".compiling-{number}").open("ab"))
                limit = time.monotonic() + MOST_WAIT_S
                while time.monotonic() < limit:
                    with contextlib.suppress(BlockingIOError):
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    time.sleep(0.01)
            except (ImportError, OSError) as error:
                _log.info("compiling without a lock: %s", error)
            yield

    def _path(self, request: KernelRequest) -> Path:
        return self.folder / f"{request.kernel}-{request.signature()}"


def root() -> Path:
    """CACHE/triton_ep."""
    return read_compiler_settings().cache / "triton_ep"


def current(architecture: Callable[[], str]) -> JitCache | None:
    """The cache for the present settings; None: Triton has to compile, or cuda-python is missing.

    architecture: returns the architecture of the current GPU ("sm_90").
    """
    settings = read_compiler_settings()
    if not read_environment().jit_cache or settings.watched or _is_watched():
        return None
    driver, compiler = _driver(), _compiler()
    if driver is None or compiler is None:
        return None
    state = [FORMAT, hash_of_all(), compiler, architecture(), settings.deciding]
    name = hashlib.sha256(json.dumps(state).encode()).hexdigest()[:32]
    return _opened(root() / name, driver)


_opened = functools.cache(JitCache)


@functools.cache
def _driver() -> Driver | None:
    try:
        return Driver()
    except (LaunchError, RuntimeError):  # cuda-python raises RuntimeError if it finds no driver
        return None


@functools.cache
def _compiler() -> str | None:
    """Hash of the installed Triton: its release, and sizes and times of its files; None: not installed.
    Contents are not hashed, because Triton's library has hundreds of megabytes."""
    try:
        found = importlib.util.find_spec("triton")
    except ValueError:
        return None
    if found is None or found.origin is None:
        return None
    root = Path(found.origin).parent
    digest = hashlib.sha256((root / "__init__.py").read_bytes())
    for path in sorted({path for pattern in _OF_COMPILER for path in root.glob(pattern)}):
        if path.is_file() and path.suffix != ".pyc":
            told = path.stat()
            digest.update(f"{path.relative_to(root)} {told.st_size} {told.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _is_watched() -> bool:
    """Whether this program has configured Triton to show compilations and loads, or to change their results."""
    knobs = sys.modules.get("triton.knobs")
    runtime = getattr(knobs, "runtime", None)
    if knobs is None or runtime is None:
        return False
    loads = [*runtime.kernel_load_start_hook.calls, *runtime.kernel_load_end_hook.calls]
    return (
        any(vars(knobs.compilation).values())
        or any(value for name, value in vars(runtime).items() if name != "interpret")
        or "manager_class" in vars(knobs.cache)
        or not all(str(getattr(call, "__module__", "")).startswith("triton_ep.") for call in loads)
    )


def _read(path: Path) -> tuple[dict[str, Any], bytes] | None:
    """Read a file of `_write`; None: it is missing or incomplete."""
    try:
        digest, rest = path.read_bytes().split(b"\n", 1)
        if digest.decode() != hashlib.sha256(rest).hexdigest():
            return None
        told, data = rest.split(b"\n", 1)
        return {**json.loads(told), "sha256": digest.decode()}, data
    except (OSError, ValueError, TypeError):
        return None


def _write(path: Path, told: Mapping[str, Any], data: bytes) -> None:
    rest = json.dumps(told).encode() + b"\n" + data
    write_complete(path, hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)
