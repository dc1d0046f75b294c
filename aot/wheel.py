"""Pack a library as a wheel of its own, `triton-ep-cubins`; the package finds it by name once installed.

    triton_ep_cubins/__init__.py
    triton_ep_cubins/cubins/sm_90/   contents of the library: index, cubins, and the files that `verify` reads

The same library gives the same bytes, which contain no times and no paths.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import triton_ep
from triton_ep.aot.build import FACTS
from triton_ep.aot.verify import verify
from triton_ep.errors import AotCorrupted, AotMiss
from triton_ep.runtime.library import COMPANION, INDEX, Library, architectures

_EARLIEST = (1980, 1, 1, 0, 0, 0)  # a zip file cannot hold an earlier time
_TAG = "py3-none-any"


def write_wheel(library: Path, to: Path) -> Path:
    """Write a wheel with all architectures of a library; returns its path.

    library: folder written by `triton_ep.aot.build.build`.
    to: folder of the wheel; created if needed.

    The wheel requires exactly this version of triton-ep: cubins fit only the sources that they were built from.

    Raises:
        AotMiss: the folder has no library.
        AotCorrupted: the library has faults; names the first.
    """
    archs = architectures(library)
    if not archs:
        raise AotMiss(
            f"there is no ahead-of-time library in {library} to pack. Build it: python -m triton_ep.aot build."
        )
    faults, _ = verify(library)
    if faults:
        raise AotCorrupted(f"{library} is not packed, faults: {len(faults)}. The first: {faults[0]}")
    libraries = [Library(library, arch) for arch in archs]
    said = f'"""Kernels of triton_ep for {", ".join(archs)}, built ahead of time."""\n'
    files = {f"{COMPANION}/__init__.py": said.encode()}
    for path in _files(libraries):
        files[f"{COMPANION}/cubins/{path.relative_to(library).as_posix()}"] = path.read_bytes()
    info = f"{COMPANION}-{triton_ep.__version__}.dist-info"
    files[f"{info}/METADATA"] = _metadata(libraries).encode()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: triton_ep\nRoot-Is-Purelib: true\nTag: {_TAG}\n".encode()
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD").encode()
    to.mkdir(parents=True, exist_ok=True)
    wheel = to / f"{COMPANION}-{triton_ep.__version__}-{_TAG}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            member = zipfile.ZipInfo(name, _EARLIEST)
            member.external_attr = 0o100644 << 16
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, data)
    return wheel


def _files(libraries: Sequence[Library]) -> Iterator[Path]:
    """Files of the libraries, in order."""
    for library in libraries:
        folder = library.folder / library.arch
        yield from (folder / INDEX, folder / FACTS)
        for name in sorted({entry.file for entry in library.entries}):
            yield folder / name
            yield folder / "ptx" / f"{Path(name).stem}.ptx.gz"


def _metadata(libraries: Sequence[Library]) -> str:
    """METADATA of the wheel. Kernels that cross nodes contain device code of NVSHMEM, which has its own licence."""
    releases = sorted({entry.nvshmem for library in libraries for entry in library.entries if entry.nvshmem})
    contains = f" They contain device code of NVSHMEM {', '.join(releases)}." if releases else ""
    licence = "Apache-2.0 AND LicenseRef-NVSHMEM" if releases else "Apache-2.0"
    lines = {
        "Metadata-Version": "2.4",
        "Name": COMPANION.replace("_", "-"),
        "Version": triton_ep.__version__,
        "Summary": f"Kernels of triton_ep for {', '.join(library.arch for library in libraries)}, built ahead of time."
        + contains,
        "License-Expression": licence,
        "Requires-Dist": f"triton-ep=={triton_ep.__version__}",
    }
    return "".join(f"{key}: {value}\n" for key, value in lines.items())


def _record(files: dict[str, bytes], own: str) -> str:
    """RECORD of the wheel: name, hash and size of every file; for RECORD itself the name alone."""

    def digest(data: bytes) -> str:
        return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()

    lines = [f"{name},sha256={digest(data)},{len(data)}\n" for name, data in files.items()]
    return "".join([*lines, f"{own},,\n"])
