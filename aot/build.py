"""Building a library: what is asked for, compiled in parallel processes; what has not changed is kept.

The bytes written depend on the kernels' sources, Triton's release and NVSHMEM's, and on nothing else: no time, no path.
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
"""Part of every key; to be raised with every change of what a build writes."""
_ARCH = re.compile(r"sm_(\d{2,3})$")


@dataclass
class Summary:
    """What a build did, for one architecture.

    Attributes:
        built, kept: variants that were compiled, and that were there already.
        dropped: entries of older sources, which were removed.
        errors: kernel, variant and traceback of what did not compile.
        folder: of the architecture.
        nbytes: of all cubins.
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
    """Make `out` hold these variants for these architectures ("sm_90").

    Entries that are there already stay, unless they are of older sources.

    Arguments:
        jobs: processes.
        force: compile what is there, too.
        only: remove what is not among `wanted`.
        progress: wraps what is iterated over, one step per compiled variant, and gets their number.

    Raises:
        ConfigError: an architecture, or a kernel, that there is not; a folder that cannot be written to.
        HeapError: a variant calls NVSHMEM, and its bitcode is not installed.
    """
    for arch in archs:
        if not _ARCH.match(arch):
            raise ConfigError(f"an architecture is written like sm_90, got {arch!r}.")
    try:  # better now than after the compilation
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
    """Compile in processes of their own; each result as it comes."""
    if not todo:
        return
    # Compiled, not interpreted, whatever this process does: Triton decides when it is imported.
    os.environ["TRITON_INTERPRET"] = "0"
    with ProcessPoolExecutor(min(jobs, len(todo)), get_context("spawn"), initializer=_start) as pool:
        # Those that take longest first, as far as their kernels tell.
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
    """Of a worker."""
    import atexit

    from triton_ep.aot import compile as compiler

    compiler.start()
    atexit.register(compiler.stop)


def _compile(request: dict[str, Any], arch: str, bitcode: str | None) -> dict[str, Any]:
    from triton_ep.aot import compile as compiler

    return compiler.compile_request(request, arch, bitcode)


def _kernels() -> dict[str, dict[str, Any]]:
    """What the run time has to know of each kernel, and the hash of its sources."""
    from triton_ep.kernels.spec import all_kernels

    found = {}
    for spec in all_kernels().values():
        file = Path(spec.kernel.fn.__code__.co_filename).resolve().relative_to(kernels_folder().resolve())
        place = {"file": file.as_posix(), "source": source_hash(file.as_posix())}
        found[spec.name] = {**declared(spec), **place}
    return found


def _bitcode() -> tuple[str, str, str]:
    """Path of NVSHMEM's device functions, their hash, and the release that they are of."""
    from triton_ep.heap.bitcode import pruned_bitcode

    path = pruned_bitcode(NVSHMEM_SYMBOLS)
    text = path.read_text(encoding="utf-8")
    found = re.search(r"@nvshmemi_device_lib_version_d = .*\{ i32 (\d+), i32 (\d+), i32 (\d+) \}", text)
    if found is None:
        raise ConfigError(f"{path} does not say which release of NVSHMEM it is of.")
    return str(path), hashlib.sha256(text.encode()).hexdigest(), ".".join(found.groups())


class _Folder:
    """One architecture's folder while it is built."""

    def __init__(self, path: Path, arch: str, kernels: dict[str, Any], versions: dict[str, str], bitcode: str) -> None:
        self.path, self.arch, self._kernels, self._versions, self._bitcode = path, arch, kernels, versions, bitcode
        self.summary = Summary(arch, path)
        self._entries: dict[str, dict[str, Any]] = {}
        self._facts: dict[str, dict[str, Any]] = {}

    def plan(self, wanted: Sequence[KernelRequest], force: bool, only: bool) -> list[_Job]:
        """What has to be compiled."""
        index, facts = _json(self.path / INDEX), _json(self.path / FACTS)
        # Without bitcode at hand, what calls NVSHMEM is judged by what was used when it was built.
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
        """Write the index, and remove files that it does not name."""
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
            return self.summary  # nothing was built, and there is no library
        _write(self.path / FACTS, _text(self._facts))
        _write(self.path / INDEX, _text(index))
        for path in [*self.path.glob("*.cubin"), *self.path.glob("ptx/*.ptx.gz")]:
            if path.name.removesuffix(".ptx.gz").removesuffix(".cubin") + ".cubin" not in files:
                path.unlink()
        self.summary.nbytes = sum((self.path / name).stat().st_size for name in files)
        return self.summary

    def _key(self, request: KernelRequest) -> str:
        """Of all that decides the bytes of a variant."""
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
    """What a file of an earlier build holds; nothing, if there is none or it is broken: all is then built anew."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, data: bytes) -> None:
    """Write a file, unless it has these bytes already; others see it complete or not at all."""
    if path.is_file() and path.read_bytes() == data:
        return
    write_complete(path, data)
