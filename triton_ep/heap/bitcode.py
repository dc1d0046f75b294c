"""NVSHMEM's device functions for Triton kernels: the installed bitcode, pruned to the functions in use.

Triton links bitcode into every kernel that calls it, and parses all of the bitcode each time: 30 MB, seconds per
kernel. `pruned_bitcode` links it once, into a module that only names the wanted functions, and caches the result
as a few tens of kilobytes of textual LLVM IR. Kernels linked with the pruned file come out the same, because this
module optimises nothing.

The two constants by which NVSHMEM finds its state in a loaded module (`nvshmemi_device_state_d`,
`nvshmemi_device_lib_version_d`; nvshmemx_cumodule_init) are kept: the bitcode lists them in
`llvm.compiler.used`, which linking always includes.
"""

from __future__ import annotations

import hashlib
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from triton_ep.errors import HeapError
from triton_ep.runtime.files import write_complete

_FOLDER = Path("nvidia", "nvshmem", "lib")
_WHOLE = "libnvshmem_device.bc"
_OLDEST_ARCH = 90
"""Oldest architecture that kernels are compiled for."""
_TRIPLE = "nvptx64-nvidia-cuda"
_KEEP = "triton_ep_keep_"
_FORMAT = 1
"""Part of the cache key; raise it with every change of the written file."""


def find_bitcode() -> Path:
    """Find the device bitcode of the NVSHMEM installed for this Python; needs neither a GPU nor nvshmem4py.

    Later releases have one file per architecture instead of one for all. Code for an older architecture runs
    on a newer one, so the newest file up to sm_90 serves every target.

    Raises:
        HeapError: `sys.path` has no bitcode.
    """
    for entry in sys.path:
        folder = Path(entry or ".", _FOLDER)
        whole = folder / _WHOLE
        if whole.is_file():
            return whole
        by_arch = {}
        for path in folder.glob("libnvshmem_device_sm_*.bc"):
            if match := re.fullmatch(r"libnvshmem_device_sm_(\d+)\.bc", path.name):
                by_arch[int(match[1])] = path
        if fitting := [arch for arch in by_arch if arch <= _OLDEST_ARCH]:
            return by_arch[max(fitting)]
    raise HeapError(
        f"Kernels that cross nodes need NVSHMEM's device bitcode, and no entry of sys.path has {_FOLDER / _WHOLE}. "
        "Install it: pip install nvidia-nvshmem-cu13 (with a torch for CUDA 12: nvidia-nvshmem-cu12)."
    )


def pruned_bitcode(symbols: Sequence[str], cache_dir: Path | None = None) -> Path:
    """LLVM IR (.ll) with these NVSHMEM device functions and everything they call; for Triton's `extern_libs`.

    symbols: names of functions, e.g. `NVSHMEM_SYMBOLS` of kernels/device/transport.py.
    cache_dir: folder of the file; Triton's own cache by default (TRITON_CACHE_DIR).

    The file name depends on the bitcode's contents, Triton's version and the symbols; the file appears under its
    name only when complete. Ranks that start together on an empty cache each write a file; the last one stays.

    Raises:
        HeapError: no bitcode is installed, it cannot be read, or it lacks one of the symbols.
    """
    import triton

    source = find_bitcode()
    wanted = sorted(set(symbols))
    if not wanted:
        raise HeapError("pruned_bitcode needs the name of at least one NVSHMEM function.")
    with source.open("rb") as file:
        contents = hashlib.file_digest(file, "sha256").hexdigest()
    key = hashlib.sha256("\n".join([str(_FORMAT), contents, triton.__version__, *wanted]).encode()).hexdigest()
    folder = Path(cache_dir if cache_dir is not None else triton.knobs.cache.dir) / "triton_ep"
    target = folder / f"nvshmem-{key[:32]}.ll"
    if not target.is_file():
        write_complete(target, _prune(source, wanted).encode())
    return target


def _stub(symbols: Sequence[str]) -> str:
    """MLIR of a module that holds the address of every symbol, so that the linker fetches the symbol.

    The types of the functions do not matter: the definition replaces the declaration.
    """
    lines = [f'module attributes {{llvm.target_triple = "{_TRIPLE}"}} {{']
    for number, symbol in enumerate(symbols):
        lines += [
            f"  llvm.func @{symbol}()",
            f"  llvm.mlir.global external @{_KEEP}{number}() : !llvm.ptr {{",
            f"    %address = llvm.mlir.addressof @{symbol} : !llvm.ptr",
            "    llvm.return %address : !llvm.ptr",
            "  }",
        ]
    return "\n".join([*lines, "}"])


def _prune(source: Path, symbols: Sequence[str]) -> str:
    """Link the bitcode into the stub, with Triton's own LLVM, and return the module as text."""
    from triton._C.libtriton import ir, llvm

    with tempfile.TemporaryDirectory() as folder:
        stub = Path(folder, "stub.mlir")
        stub.write_text(_stub(symbols))
        mlir_context = ir.context()
        ir.load_dialects(mlir_context)
        mlir_module = ir.parse_mlir_module(str(stub), mlir_context)
    llvm.init_targets()
    context = llvm.context()
    module = llvm.to_module(mlir_module, context)
    # Linking gives the library the module's data layout, which is the same for every NVPTX processor.
    llvm.attach_datalayout(module, _TRIPLE, f"sm_{_OLDEST_ARCH}", "")
    try:
        llvm.link_extern_libs(module, [str(source)])
    except (RuntimeError, ValueError) as error:
        raise HeapError(
            f"Triton cannot read NVSHMEM's device bitcode {source}: {error} Install it again, or a release that this "
            "Triton's LLVM reads: pip install --force-reinstall nvidia-nvshmem-cu13"
        ) from error
    text = str(module)
    text = re.sub(rf"^@{_KEEP}\d+ = .*\n", "", text, flags=re.MULTILINE)
    for symbol in symbols:
        # Triton makes linked functions internal, but the next link finds only external ones.
        text, count = re.subn(rf"^define internal (.*@{symbol}\()", r"define \1", text, flags=re.MULTILINE)
        if count != 1:
            raise HeapError(
                f"NVSHMEM's device bitcode {source} has no function {symbol}. The tested release is 3.4.5: "
                "pip install nvidia-nvshmem-cu13==3.4.5"
            )
    return text
