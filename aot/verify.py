"""Verify a library: files, hashes, parameters, and the accesses of its PTX. Needs no GPU and no torch."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from triton_ep.aot.build import FACTS
from triton_ep.errors import EPError
from triton_ep.runtime.library import Entry, Library, architectures
from triton_ep.runtime.parameters import parameters
from triton_ep.runtime.sources import source_hash

_WIDE_STORE = re.compile(r"\bst\.(?:\w+\.)*?global(?:\.[\w:]+)*?\.(?:v4\.[bsuf]32|v2\.[bsuf]64)\b")
_STATE = "nvshmemi_device_state_d"
_NOTED = {"ptx_sha256", "moves_rows", "wide_stores", "narrow"}
_MACHINE_CUDA = 190
_KPARAM_INFO, _KPARAM_INFO_V2 = 0x17, 0x45
_SVAL = 4


def verify(folder: Path) -> tuple[list[str], int]:
    """Faults of a library, as text, and the number of variants checked.

    Checks of each variant: the cubin has the hash of the index and is for the architecture. Its parameters match the
    launch interface: number and types in the PTX, number in the cubin's tables. Its PTX is what was assembled. A kernel
    that moves rows of tokens stores 16 bytes at a time, and no tile narrower. A kernel without NVSHMEM does not name
    it; one with NVSHMEM has the state by which NVSHMEM starts it. Its sources are those of this package.
    """
    faults: list[str] = []
    checked = 0
    for arch in architectures(folder):
        try:
            library = Library(folder, arch)
            facts = json.loads((folder / arch / FACTS).read_text(encoding="utf-8"))
        except EPError as error:
            faults.append(f"{arch}: {error}")
            continue
        except (OSError, ValueError, RecursionError) as error:
            faults.append(f"{arch}: {FACTS} cannot be read: {error}. Build the library again, which writes it.")
            continue
        named = {entry.file for entry in library.entries}
        there = {path.name for path in (folder / arch).glob("*.cubin")}
        faults += [f"{arch}: {name} is not in the index" for name in sorted(there - named)]
        for entry in library.entries:
            checked += 1
            what = f"{arch} {entry.file}"
            faults += [f"{what}: {fault}" for fault in _of_entry(library, entry, facts, arch)]
    return faults, checked


def _of_entry(library: Library, entry: Entry, facts: Mapping[str, Any], arch: str) -> Iterator[str]:
    kernel = library.kernels.get(entry.request.kernel)
    if kernel is None or source_hash(kernel["file"]) != kernel["source"]:
        yield "built from other sources than those of this package"
    told = facts.get(entry.request.signature()) if isinstance(facts, dict) else None
    if not isinstance(told, dict) or not set(told) >= _NOTED:
        yield "its facts are missing or incomplete"
        return
    try:
        cubin = library.read(entry)
    except EPError as error:
        yield str(error)
        return
    try:
        yield from _of_cubin(cubin, entry, arch)
    except (ValueError, struct.error, IndexError, OverflowError) as error:
        yield f"the cubin cannot be read: {error}"
    path = library.folder / library.arch / "ptx" / f"{Path(entry.file).stem}.ptx.gz"
    try:
        ptx = gzip.decompress(path.read_bytes()).decode()
    except (OSError, EOFError, ValueError, zlib.error) as error:
        yield f"{path.name} cannot be read: {error}"
        return
    if hashlib.sha256(ptx.encode()).hexdigest() != told["ptx_sha256"]:
        yield "its PTX is not what was assembled"
    yield from _of_ptx(ptx, entry, told, bool(kernel and kernel["specialised"]))


def _of_ptx(ptx: str, entry: Entry, told: Mapping[str, Any], specialised: bool) -> Iterator[str]:
    try:
        kinds = parameters(ptx)
    except ValueError as error:
        yield f"its PTX: {error}"
        return
    if tuple(kinds) != entry.params:
        yield f"the PTX takes {kinds}, the index says {list(entry.params)}"
    # Rows whose length is no multiple of 16 bytes can only be moved in smaller pieces.
    whole = told["moves_rows"] and (bool(entry.request.aligned) or not specialised) and not entry.request.unaligned
    # With short rows a thread may have less than 16 bytes: then the kernel has no wide store.
    if whole and told["wide_stores"] and not _WIDE_STORE.search(ptx):
        yield "it stored rows of tokens 16 bytes at a time when it was built, but its PTX has no such store"
    if whole and told["narrow"]:
        yield f"tiles are moved in pieces of less than 16 bytes: {'; '.join(told['narrow'])}"
    named = any("nvshmem" in line.split("//")[0].lower() for line in ptx.splitlines())
    if named and not entry.nvshmem:
        yield "its PTX names nvshmem, the index says that it does not call it"
    if entry.nvshmem and _STATE not in ptx:
        yield f"it calls NVSHMEM {entry.nvshmem}, but has no place for its state"


def _of_cubin(cubin: bytes, entry: Entry, arch: str) -> Iterator[str]:
    machine, flags = struct.unpack_from("<H", cubin, 18)[0], struct.unpack_from("<I", cubin, 48)[0]
    if cubin[:4] != b"\x7fELF" or machine != _MACHINE_CUDA:
        yield "the cubin is no program for a GPU"
        return
    number = int(arch.removeprefix("sm_"))
    if number not in (flags & 0xFF, flags >> 8 & 0xFF, flags >> 8 & 0xFFFF):
        yield f"the cubin is for another architecture than {arch} (flags {flags:#x})"
    count = _parameters_of(cubin, entry.symbol)
    if count != len(entry.params):
        yield f"the cubin takes {count} parameters, the index says {len(entry.params)}"


def _parameters_of(cubin: bytes, symbol: str) -> int:
    """Number of parameters in the kernel's section .nv.info, which the driver reads.

    Raises:
        ValueError: the section is missing.
    """
    data = _section(cubin, f".nv.info.{symbol}")
    count, at = 0, 0
    while at + 4 <= len(data):
        form, attribute, size = data[at], data[at + 1], struct.unpack_from("<H", data, at + 2)[0]
        count += form == _SVAL and attribute in (_KPARAM_INFO, _KPARAM_INFO_V2)
        at += 4 + (size if form == _SVAL else 0)
    return count


def _section(cubin: bytes, name: str) -> bytes:
    start, entry_size, count, names = (
        struct.unpack_from("<Q", cubin, 40)[0],
        *struct.unpack_from("<HHH", cubin, 58),
    )

    def header(number: int) -> tuple[int, int, int]:
        at = start + number * entry_size
        name_at = struct.unpack_from("<I", cubin, at)[0]
        offset, size = struct.unpack_from("<QQ", cubin, at + 24)
        return name_at, offset, size

    _, text, length = header(names)
    strings = cubin[text : text + length]
    for number in range(count):
        name_at, offset, size = header(number)
        if strings[name_at : strings.index(b"\0", name_at)] == name.encode():
            return cubin[offset : offset + size]
    raise ValueError(f"no section {name}")
