"""One variant for one architecture: cubin, PTX, launch parameters and facts. No GPU, driver or torch; imports Triton.

Runs in worker processes of aot/build.py, with TRITON_INTERPRET=0.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
import traceback
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from triton_ep.aot.ptx import carried_values, memory_bytes, narrow_accesses, shared_polls, without_places
from triton_ep.kernels.spec import KernelSpec, all_kernels
from triton_ep.runtime.compiler import options_of, source_of
from triton_ep.runtime.parameters import interface
from triton_ep.runtime.plans.request import KernelRequest

_LIBRARY = "libnvshmem_device"
_STATE = ("nvshmemi_device_state_d", "nvshmemi_device_lib_version_d")


def start() -> None:
    """Initialise a worker: bypass Triton's cache, for reading and writing."""
    triton.knobs.compilation.always_compile = True
    triton.knobs.cache.dir = tempfile.mkdtemp(prefix="triton-ep-aot-")


def stop() -> None:
    """Remove the folder that `start` created."""
    import shutil

    shutil.rmtree(triton.knobs.cache.dir, ignore_errors=True)


@contextlib.contextmanager
def _without_line_info(kept: dict[str, str]) -> Iterator[None]:
    """Assemble cubins without source locations, whose paths differ between machines; store the PTX in `kept`."""
    assemble = CUDABackend.make_cubin
    knobs = triton.knobs.compilation

    def make_cubin(self: Any, ptx: str, *rest: Any) -> bytes:
        kept["ptx"] = without_places(ptx)
        before = knobs.disable_line_info
        knobs.disable_line_info = True
        try:
            cubin: bytes = assemble(self, kept["ptx"], *rest)
            return cubin
        finally:
            knobs.disable_line_info = before

    CUDABackend.make_cubin = make_cubin
    try:
        yield
    finally:
        CUDABackend.make_cubin = assemble


def compile_request(text: dict[str, Any], arch: str, bitcode: str | None) -> dict[str, Any]:
    """Compile a request: "cubin", "ptx", "entry" and "facts"; or "error" alone.

    text: from `KernelRequest.as_dict`. arch: "sm_90". bitcode: for kernels that call NVSHMEM.
    """
    request = KernelRequest.from_dict(text)
    try:
        return _compile(request, int(arch.removeprefix("sm_")), bitcode)
    except Exception:
        return {"error": traceback.format_exc(limit=-3)}


def _compile(request: KernelRequest, arch: int, bitcode: str | None) -> dict[str, Any]:
    spec = all_kernels()[request.kernel]
    options = options_of(spec, request)
    if request.calls_nvshmem:
        options["extern_libs"] = {_LIBRARY: bitcode}
    kept: dict[str, str] = {}
    with _without_line_info(kept):
        compiled = triton.compile(source_of(spec, request), target=GPUTarget("cuda", arch, 32), options=options)
    entry, cubin = interface(spec, request, compiled), compiled.asm["cubin"]
    facts = _facts(spec, request, compiled.asm["ttgir"], compiled.asm["ptx"], cubin, 32 * options["num_warps"])
    facts["shared_bytes"] = entry["shared"]
    facts["carried"] = [carried_values(compiled.asm[form]) for form in ("ttir", "ttgir")]
    return {"cubin": cubin, "ptx": kept["ptx"], "entry": entry, "facts": facts}


def _facts(
    spec: KernelSpec, request: KernelRequest, ttgir: str, ptx: str, cubin: bytes, threads: int
) -> dict[str, Any]:
    """Facts that the compile gate and `verify` check; see aot/verify.py."""
    narrow, wide_stores = narrow_accesses(ttgir, ptx, threads)
    instructions = [set(name.split(".")) for name in re.findall(r"\b(?:atom|red|ld|st)\.[\w.:]+", ptx)]
    matrix = re.findall(r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync|cp\.async\.bulk\.tensor)\b", ptx)
    code = [line.split("//")[0].lower() for line in ptx.splitlines() if not line.strip().startswith(".file")]
    visible = [line for line in ptx.splitlines() if line.startswith(".visible .const")]
    local, static = _memory_bytes(cubin)
    return {
        "moves_rows": spec.moves_rows,
        "calls_nvshmem": request.calls_nvshmem,
        "narrow": narrow,
        "shared_polls": shared_polls(ttgir),
        "wide_stores": wide_stores,
        "orders": {
            order: [ttgir.count(f", {order}, sys,"), sum({order, "sys"} <= found for found in instructions)]
            for order in ("acquire", "release")
        },
        "local_bytes": local,
        "static_bytes": static,
        "matrix": {kind: matrix.count(kind) for kind in sorted(set(matrix))},
        "early": sorted(re.findall(r"\bgriddepcontrol\.(\w+)", ptx)),
        "nvshmem_lines": sum("nvshmem" in line for line in code),
        "visible": [name for name in _STATE if any(name in line for line in visible) and name.encode() in cubin],
    }


def _memory_bytes(cubin: bytes) -> tuple[int, int]:
    """Bytes of stack and local memory per thread, and of static shared memory per program."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, timeout=60)
    return memory_bytes(done.stdout)
