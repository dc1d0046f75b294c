"""Build a library: compile requested variants in parallel processes, and keep unchanged ones.

The bytes written depend only on the kernels' sources and the releases of Triton and NVSHMEM: not on time or paths.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from triton_ep.errors import ConfigError
from triton_ep.kernels.device.codes import NVSHMEM_SYMBOLS
from triton_ep.runtime.files import write_complete
from triton_ep.runtime.library import FORMAT, INDEX, check_entry
from triton_ep.runtime.parameters import declared
from triton_ep.runtime.plans.request import KernelRequest
from triton_ep.runtime.sources import kernels_folder, source_hash

FACTS = "facts.json"
_BUILDER = 3
"""Part of every key; raise it with every change of the files that a build writes."""
_ARCH = re.compile(r"sm_(\d{2,3})$")


@dataclass
class Summary:
    """Result of a build for one architecture.

    Attributes:
        built, kept: variants that were compiled, and that existed already.
        dropped: removed entries of older sources.
        errors: request and traceback of each variant that did not compile.
        folder: folder of the architecture.
        nbytes: bytes of all cubins.
    """

    arch: str
    folder: Path
    built: int = 0
    kept: int = 0
    dropped: int = 0
    nbytes: int = 0
    errors: list[tuple[KernelRequest, str]] = field(default_factory=list)


@dataclass
class _Job:
    request: KernelRequest
    arch: str
    key: str


def build(
    wanted: Sequence[KernelRequest],
    archs: Sequence[str],
    out: Path,
    *,
    jobs: int = 1,
    force: bool = False,
    only: bool = False,
    progress: Callable[[Iterable[Any], int], Iterable[Any]] = lambda steps, total: steps,
) -> list[Summary]:
    """Build these variants for these architectures ("sm_90") into `out`.

    Existing entries stay, unless their sources have changed.

    Arguments:
        jobs: processes.
        force: compile existing variants again.
        only: remove entries that are not among `wanted`.
        progress: wraps the iterator of compiled variants, one step each; also receives their number.

    Raises:
        ConfigError: unknown architecture or kernel, or a folder that cannot be written to.
        HeapError: a variant calls NVSHMEM, and its bitcode is not installed.
    """
    for arch in archs:
        if not _ARCH.match(arch):
            raise ConfigError(f"an architecture is written like sm_90, got {arch!r}.")
    try:  # before the compilation, which takes long
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise ConfigError(f"{out} cannot be written to: {error}. Name another folder: --out.") from None
    kernels = _kernels()
    if unknown := sorted({request.kernel for request in wanted} - set(kernels)):
        raise ConfigError(f"there are no kernels {unknown}; there are {', '.join(sorted(kernels))}.")
    versions = {"triton": importlib.metadata.version("triton")}
    bitcode, bitcode_hash = None, ""
    if any(request.calls_nvshmem for request in wanted):
        bitcode, bitcode_hash, versions["nvshmem"] = _bitcode()
    todo: list[_Job] = []
    states = []
    for arch in archs:
        state = _Folder(out / arch, arch, kernels, versions, bitcode_hash)
        todo += state.plan(wanted, force, only)
        states.append(state)
    by_arch = {state.arch: state for state in states}
    for job, result in progress(_run(todo, jobs, bitcode), len(todo)):
        by_arch[job.arch].add(job, result)
    return [state.write() for state in states]


def _run(todo: Sequence[_Job], jobs: int, bitcode: str | None) -> Iterable[tuple[_Job, dict[str, Any]]]:
    """Compile in worker processes; yield each result as it arrives."""
    if not todo:
        return
    # Workers compile even if this process interprets: Triton reads the variable at import.
    os.environ["TRITON_INTERPRET"] = "0"
    with ProcessPoolExecutor(min(jobs, len(todo)), get_context("spawn"), initializer=_start) as pool:
        # Longest compilations first: kernels that call NVSHMEM take longest.
        order = sorted(todo, key=lambda job: (not job.request.calls_nvshmem, job.request.kernel, job.request.text()))
        futures = {pool.submit(_compile, job.request.as_dict(), job.arch, bitcode): job for job in order}
        for future in as_completed(futures):
            try:
                result = future.result()
            except BrokenProcessPool:
                archs = ", ".join(sorted({job.arch for job in todo}))
                release = importlib.metadata.version("triton")
                raise ConfigError(
                    f"a compiler process died. Triton {release} may not know all of {archs} (see above), or {jobs} "
                    "processes take more memory than there is: build for one of them, or with fewer --jobs."
                ) from None
            yield futures[future], result


def _start() -> None:
    """Initialise a worker."""
    import atexit

    from triton_ep.aot import compile as compiler

    compiler.start()
    atexit.register(compiler.stop)


def _compile(request: dict[str, Any], arch: str, bitcode: str | None) -> dict[str, Any]:
    from triton_ep.aot import compile as compiler

    return compiler.compile_request(request, arch, bitcode)


def _kernels() -> dict[str, dict[str, Any]]:
    """Facts about each kernel that the run time needs, and the hash of its sources."""
    from triton_ep.kernels.spec import all_kernels

    found = {}
    for spec in all_kernels().values():
        file = Path(spec.kernel.fn.__code__.co_filename).resolve().relative_to(kernels_folder().resolve())
        place = {"file": file.as_posix(), "source": source_hash(file.as_posix())}
        found[spec.name] = {**declared(spec), **place}
    return found


def _bitcode() -> tuple[str, str, str]:
    """Path of NVSHMEM's device bitcode, its hash, and its release."""
    from triton_ep.heap.bitcode import pruned_bitcode

    path = pruned_bitcode(NVSHMEM_SYMBOLS)
    text = path.read_text(encoding="utf-8")
    found = re.search(r"@nvshmemi_device_lib_version_d = .*\{ i32 (\d+), i32 (\d+), i32 (\d+) \}", text)
    if found is None:
        raise ConfigError(f"{path} does not name its release of NVSHMEM.")
    return str(path), hashlib.sha256(text.encode()).hexdigest(), ".".join(found.groups())


class _Folder:
    """One architecture's folder during a build."""

    def __init__(self, path: Path, arch: str, kernels: dict[str, Any], versions: dict[str, str], bitcode: str) -> None:
        self.path, self.arch, self._kernels, self._versions, self._bitcode = path, arch, kernels, versions, bitcode
        self.summary = Summary(arch, path)
        self._entries: dict[str, dict[str, Any]] = {}
        self._facts: dict[str, dict[str, Any]] = {}

    def plan(self, wanted: Sequence[KernelRequest], force: bool, only: bool) -> list[_Job]:
        """Keep fresh entries; return the variants to compile."""
        index, facts = _json(self.path / INDEX), _json(self.path / FACTS)
        # Without bitcode, compare entries that call NVSHMEM with the bitcode of the earlier build.
        self._bitcode = self._bitcode or index.get("bitcode", "")
        self._versions = {**index.get("versions", {}), **self._versions}
        before = index.get("entries", {}) if index.get("format") == FORMAT else {}
        names = {request.signature() for request in wanted}
        for signature, entry in before.items():
            fresh = signature in facts and self._is_fresh(entry)
            if not fresh or (only and signature not in names):
                self.summary.dropped += signature not in names
            elif not force or signature not in names:
                self._entries[signature], self._facts[signature] = entry, facts[signature]
        self.summary.kept = len(self._entries)
        todo = [request for request in wanted if request.signature() not in self._entries]
        return [_Job(request, self.arch, self._key(request)) for request in todo]

    def add(self, job: _Job, result: dict[str, Any]) -> None:
        """Write the files of a compiled variant."""
        if "error" in result:
            self.summary.errors.append((job.request, result["error"]))
            return
        signature = job.request.signature()
        name = f"{job.request.kernel}-{signature[:16]}"
        ptx = gzip.compress(result["ptx"].encode(), compresslevel=6, mtime=0)
        _write(self.path / f"{name}.cubin", result["cubin"])
        _write(self.path / "ptx" / f"{name}.ptx.gz", ptx)
        self._entries[signature] = {
            "request": job.request.as_dict(),
            "key": job.key,
            "file": f"{name}.cubin",
            "sha256": hashlib.sha256(result["cubin"]).hexdigest(),
            "nvshmem": self._versions["nvshmem"] if result["facts"]["nvshmem_lines"] else "",
            "triton": self._versions["triton"],
            **result["entry"],
        }
        self._facts[signature] = {
            "cubin_bytes": len(result["cubin"]),
            "ptx_sha256": hashlib.sha256(result["ptx"].encode()).hexdigest(),
            **result["facts"],
        }
        self.summary.built += 1

    def write(self) -> Summary:
        """Write the index and remove files that it does not name."""
        used = {entry["request"]["kernel"] for entry in self._entries.values()}
        index = {
            "format": FORMAT,
            "arch": self.arch,
            "versions": self._versions,
            "bitcode": self._bitcode,
            "kernels": {name: values for name, values in self._kernels.items() if name in used},
            "entries": self._entries,
        }
        files = {entry["file"] for entry in self._entries.values()}
        if not self._entries and not (self.path / INDEX).exists():
            return self.summary  # nothing was built, and no library exists
        _write(self.path / FACTS, _text(self._facts))
        _write(self.path / INDEX, _text(index))
        for path in [*self.path.glob("*.cubin"), *self.path.glob("ptx/*.ptx.gz")]:
            if path.name.removesuffix(".ptx.gz").removesuffix(".cubin") + ".cubin" not in files:
                path.unlink()
        self.summary.nbytes = sum((self.path / name).stat().st_size for name in files)
        return self.summary

    def _key(self, request: KernelRequest) -> str:
        """Hash of everything that decides the bytes of a variant."""
        kernel = self._kernels[request.kernel]
        parts = [_BUILDER, request.text(), self.arch, kernel["source"], kernel["options"], self._versions["triton"]]
        if request.calls_nvshmem:
            parts.append(self._bitcode)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    def _is_fresh(self, entry: Any) -> bool:
        try:
            check_entry(entry)
        except (KeyError, TypeError):
            return False
        request = KernelRequest.from_dict(entry["request"])
        path = self.path / entry["file"]
        if request.kernel not in self._kernels or entry.get("key") != self._key(request) or not path.is_file():
            return False
        ptx = self.path / "ptx" / f"{path.stem}.ptx.gz"
        return ptx.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == entry["sha256"]


def _text(value: Any) -> bytes:
    return (json.dumps(value, sort_keys=True, indent=0, separators=(",", ":")) + "\n").encode()


def _json(path: Path) -> dict[str, Any]:
    """Contents of a file of an earlier build; empty if it is missing or broken, so that everything is built again."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, data: bytes) -> None:
    """Write a file unless it has these bytes already. Atomic: readers see the complete file or none."""
    if path.is_file() and path.read_bytes() == data:
        return
    write_complete(path, data)
