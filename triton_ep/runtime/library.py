"""The ahead-of-time library on disk: a folder per architecture with cubins and an index. Look-up and error messages.

    DIR/sm_90/index.json            kernels, entries, versions; relative paths only, so the folder may be moved
    DIR/sm_90/<kernel>-<hash>.cubin
    DIR/sm_90/facts.json, ptx/      read by `verify`; not needed at run time

Needs neither torch, Triton nor CUDA.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from triton_ep.errors import AotArchMismatch, AotCorrupted, AotMiss
from triton_ep.runtime.environment import read_environment
from triton_ep.runtime.plans.request import KernelRequest
from triton_ep.runtime.sources import source_hash

FORMAT = 3
"""Version of index.json; other versions are rejected."""
INDEX = "index.json"
COMPANION = "triton_ep_cubins"
"""Package of the wheel that contains a library."""
_COMMAND = "python -m triton_ep.aot build"
_ARCH = re.compile(r"sm_\d{2,3}")
_SOURCE = re.compile(r"(?:\w+/)*\w+\.py")  # below kernels/, nowhere else
_FIELDS = {"file": str, "sha256": str, "symbol": str, "threads": int, "shared": int}


def default_folder() -> Path:
    """Folder of the library, unless the caller names one: TRITON_EP_AOT_DIR, else what was built here, else the library
    of the wheel triton-ep-cubins; without any of them, the folder that a build fills."""
    own = build_folder()
    if read_environment().aot_dir or architectures(own):
        return own
    companion = importlib.util.find_spec(COMPANION)
    if companion is None or companion.origin is None:
        return own
    return Path(companion.origin).resolve().parent / "cubins"


def build_folder() -> Path:
    """Folder that a build fills, unless the caller names one: TRITON_EP_AOT_DIR, or `cubins` of triton_ep.aot."""
    folder = read_environment().aot_dir
    if folder:
        return Path(folder)
    spec = importlib.util.find_spec("triton_ep.aot")  # next to the package in a checkout, below it in a wheel
    assert spec is not None and spec.origin is not None, "triton_ep.aot is part of every installation"
    return Path(spec.origin).resolve().parent / "cubins"


def architectures(folder: Path) -> list[str]:
    """Architectures ("sm_90") that a library has."""
    names = (path.parent.name for path in folder.glob(f"sm_*/{INDEX}"))
    return sorted((name for name in names if _ARCH.fullmatch(name)), key=lambda name: int(name[3:]))


@dataclass(frozen=True)
class Entry:
    """One compiled kernel.

    Attributes:
        request: the variant that it serves.
        file: path of the cubin below the architecture's folder.
        sha256: hash of the cubin.
        symbol: name of the kernel in the cubin.
        params: kinds of its parameters in order: "ptr", "i32", "i64", "tensormap"; the last two are Triton's scratch.
        threads: threads of a program.
        shared: bytes of dynamic shared memory of a program.
        nvshmem: release of the NVSHMEM device code that the cubin contains; "" if none.
        descriptors: swizzle and element type of each tensor descriptor.
    """

    request: KernelRequest
    file: str
    sha256: str
    symbol: str
    params: tuple[str, ...]
    threads: int
    shared: int
    nvshmem: str = ""
    descriptors: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Entry:
        """The entry from its values in an index; see `check_entry`."""
        return cls(
            request=KernelRequest.from_dict(values["request"]),
            params=tuple(values["params"]),
            descriptors=tuple(values.get("descriptors", ())),
            **{name: values[name] for name in (*_FIELDS, "nvshmem") if name in values},
        )


class Library:
    """The kernels that were built for one architecture.

    Args:
        folder: folder of the library, with one subfolder per architecture.
        arch: "sm_90".

    Raises:
        AotMiss: the folder holds no library.
        AotArchMismatch: it holds one for other architectures.
        AotCorrupted: the index cannot be read, or is of another version.
    """

    def __init__(self, folder: Path, arch: str) -> None:
        self.folder, self.arch = folder, arch
        there = architectures(folder)
        if not there:
            raise AotMiss(
                f"there is no ahead-of-time library in {folder}. Build it: {_COMMAND} --arch {arch} --out "
                f"{shlex.quote(str(folder))}; or install triton-ep-cubins of this version; or name another folder "
                "(aot_dir, TRITON_EP_AOT_DIR)."
            )
        if arch not in there:
            raise AotArchMismatch(self._wrong_arch(", ".join(there)))
        path = folder / arch / INDEX
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
            if index["format"] != FORMAT:
                raise AotCorrupted(f"{path} has format {index['format']}, this version reads {FORMAT}. {self._again()}")
            self.kernels: dict[str, dict[str, Any]] = index["kernels"]
            self.versions: dict[str, str] = index["versions"]
            self._entries: dict[str, dict[str, Any]] = index["entries"]
            if index["arch"] != arch:
                raise AotArchMismatch(self._wrong_arch(index["arch"]))
            for entry in self._entries.values():
                check_entry(entry)
                kernel = self.kernels[entry["request"]["kernel"]]
                if (
                    not kernel["source"]
                    or not isinstance(kernel["source"], str)
                    or not _SOURCE.fullmatch(kernel["file"])
                ):
                    raise TypeError(f"kernel {entry['request']['kernel']} is {kernel!r}"[:200])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, AotCorrupted | AotArchMismatch):
                raise
            raise AotCorrupted(f"{path} is no index of a library: {error!r}. {self._again()}") from error

    def find(self, request: KernelRequest) -> Entry:
        """The entry of exactly this variant.

        Raises:
            AotMiss: with the request, the closest variant that exists, and the command that builds it; or the kernel's
                sources have changed since.
        """
        found = self._entries.get(request.signature())
        if found is None:
            raise AotMiss(self.missing(request))
        kernel = self.kernels[request.kernel]
        if source_hash(kernel["file"]) != kernel["source"]:
            raise AotMiss(
                f"{request.kernel} in {self.folder} ({self.arch}) was built from other sources than kernels/"
                f"{kernel['file']} and what it imports. Build it again: {self.command()} --variant "
                f"{shlex.quote(request.text())}"
            )
        return Entry.from_dict(found)

    def has(self, request: KernelRequest) -> bool:
        """True if there is an entry for this variant."""
        return request.signature() in self._entries

    @cached_property
    def entries(self) -> list[Entry]:
        """All entries."""
        return [Entry.from_dict(values) for _, values in sorted(self._entries.items())]

    def read(self, entry: Entry) -> bytes:
        """The cubin of an entry.

        Raises:
            AotCorrupted: it cannot be read, or its hash differs from the hash in the index.
        """
        path = self.folder / self.arch / entry.file
        try:
            cubin = path.read_bytes()
        except OSError as error:
            raise AotCorrupted(
                f"{path} of the ahead-of-time library cannot be read: {error}. {self._again()}"
            ) from error
        found = hashlib.sha256(cubin).hexdigest()
        if found != entry.sha256:
            raise AotCorrupted(
                f"{path} is not what was built: its sha256 is {found[:16]}.., the index says {entry.sha256[:16]}.. "
                f"({len(cubin)} bytes). {self._again()}"
            )
        return cubin

    def missing(self, request: KernelRequest) -> str:
        """Error message for a variant that the library lacks."""
        same = [
            KernelRequest.from_dict(entry["request"])
            for entry in self._entries.values()
            if _kernel(entry) == request.kernel
        ]
        text = f"{request.kernel} is not in the ahead-of-time library {self.folder} ({self.arch}) as {request.text()}. "
        if same:
            closest = min(same, key=lambda other: len(_differences(request, other)))
            text += (
                f"There are {len(same)} variants of it; the closest has {', '.join(_differences(request, closest))}. "
            )
        else:
            text += f"It has no variant of that kernel, only {len(self._entries)} of other kernels. "
        command = f"{self.command()} --variant {shlex.quote(request.text())}"
        return text + f'Build it: {command}; or let the JIT compile what is missing: aot="prefer".'

    def command(self) -> str:
        """The start of the command that adds to this library."""
        return f"{_COMMAND} --arch {self.arch} --out {shlex.quote(str(self.folder))}"

    def _again(self) -> str:
        return f"Build it again: {self.command()} --force"

    def _wrong_arch(self, there: str) -> str:
        return (
            f"the ahead-of-time library {self.folder} is for {there}, not for {self.arch}: cubins run only on the "
            f"architecture that they were built for. Build it: {self.command()}"
        )


def check_entry(entry: Any) -> None:
    """Raise KeyError or TypeError for an entry that no build writes into an index."""
    if not isinstance(entry, dict) or not all(isinstance(entry[name], kind) for name, kind in _FIELDS.items()):
        raise TypeError(f"an entry is {entry!r}"[:200])
    if Path(entry["file"]).name != entry["file"]:
        raise TypeError(f"the file {entry['file']!r:.80} is not in the folder of the index")
    if not isinstance(entry["params"], list) or not isinstance(entry["request"]["kernel"], str):
        raise TypeError(f"an entry of {entry['file']} lacks what it is for")
    KernelRequest.from_dict(entry["request"])


def _kernel(entry: Mapping[str, Any]) -> str:
    return str(entry["request"]["kernel"])


def _flat(request: KernelRequest) -> dict[str, Any]:
    values = request.as_dict()
    return {**values.pop("constexprs", {}), **values.pop("types", {}), **values}


def _differences(request: KernelRequest, other: KernelRequest) -> list[str]:
    """Differences of `other` from the request, as text: "KP=8 (requested: 4)"."""
    mine, theirs = _flat(request), _flat(other)
    names = sorted({*mine, *theirs})
    return [f"{n}={theirs.get(n)} (requested: {mine.get(n)})" for n in names if mine.get(n) != theirs.get(n)]
