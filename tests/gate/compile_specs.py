"""Compiles variants of kernels/spec.py without a GPU and prints what came out, as JSON.

A program of its own, because the kernels of a test process are interpreted:

    TRITON_INTERPRET=0 python -m tests.gate.compile_specs --arch 90 --arch 100 [--kernel NAME] [--bitcode PATH]

`--no-bitcode` leaves out the variants that call NVSHMEM; without `--bitcode` they are linked with what
`pruned_bitcode` makes. Every result has the keys of `Facts`.
"""

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.gate.ptx import local_bytes, narrow_accesses
from triton_ep.heap.bitcode import pruned_bitcode
from triton_ep.kernels.spec import NVSHMEM_SYMBOLS, SPEC, SPECS, KernelSpec, Variant, uses_nvshmem


@dataclasses.dataclass
class Facts:
    """What one variant compiled to for one architecture; `error` is empty if it did."""

    kernel: str
    variant: str
    arch: int
    error: str = ""
    moves_rows: bool = False
    """Takes tokens or words of them."""
    calls_nvshmem: bool = False
    narrow: list[str] = dataclasses.field(default_factory=list)
    wide_stores: int = 0
    orders: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    """"acquire" and "release": how many system-scope atomics the kernel has, and how many the PTX still has."""
    local_bytes: int = 0
    shared_bytes: int = 0
    matrix: dict[str, int] = dataclasses.field(default_factory=dict)
    """Matrix and bulk-copy instructions of the PTX by kind, those that occur."""
    cubin_bytes: int = 0
    nvshmem_lines: int = 0
    """Lines of the PTX in which the word occurs, paths and comments apart."""
    visible: list[str] = dataclasses.field(default_factory=list)
    """Visible constants of the PTX whose names survive in the cubin."""


def describe(variant: Variant) -> str:
    """Short text that tells the variants of a kernel apart."""
    named = {**variant.types, **variant.constexprs}
    return " ".join(f"{name}={getattr(value, 'name', value)}" for name, value in named.items())


def source_of(spec: KernelSpec, variant: Variant) -> ASTSource:
    """The variant as Triton's compiler takes it.

    Raises:
        ValueError: the spec's arguments are not those of the kernel.
    """
    parameters = [parameter.name for parameter in spec.kernel.params]
    runtime = [name for name in parameters if name not in variant.constexprs]
    if runtime != list(spec.arguments) or not set(variant.constexprs) <= set(parameters):
        raise ValueError(f"the kernel takes {parameters}, the spec names {[*spec.arguments, *variant.constexprs]}")
    signature, constexprs, hints = {}, {}, {}
    for index, name in enumerate(parameters):
        if name in variant.constexprs:
            signature[name] = "constexpr"
            constexprs[(index,)] = variant.constexprs[name]
            continue
        signature[name] = spec.arguments[name].format(**variant.types)
        if signature[name].startswith("*") or name in variant.aligned:
            hints[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(spec.kernel, signature, constexprs=constexprs, attrs=hints)


def compile_variant(name: str, index: int, arch: int, bitcode: str | None) -> dict[str, Any]:
    """Facts about one variant for one architecture, as a dict; a failure is one of them."""
    spec = SPEC[name]
    variant = spec.variants[index]
    facts = Facts(name, describe(variant), arch)
    facts.moves_rows = "{WORD}" in spec.args or "{TOKEN}" in spec.args
    facts.calls_nvshmem = uses_nvshmem(variant.constexprs)
    num_warps = variant.num_warps or spec.num_warps
    options: dict[str, Any] = {"num_warps": num_warps}
    if spec.maxnreg:
        options["maxnreg"] = spec.maxnreg
    if facts.calls_nvshmem:
        options["extern_libs"] = {"libnvshmem_device": bitcode}
    try:
        compiled = triton.compile(source_of(spec, variant), target=GPUTarget("cuda", arch, 32), options=options)
        ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
        facts.narrow, facts.wide_stores = narrow_accesses(compiled.asm["ttgir"], ptx, 32 * num_warps)
        instructions = [set(name.split(".")) for name in re.findall(r"\b(?:atom|red|ld|st)\.[\w.:]+", ptx)]
        facts.orders = {
            order: [compiled.asm["ttgir"].count(f", {order}, sys,"), sum({order, "sys"} <= i for i in instructions)]
            for order in ("acquire", "release")
        }
        facts.cubin_bytes = len(cubin)
        facts.shared_bytes = compiled.metadata.shared
        found = re.findall(r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync|cp\.async\.bulk\.tensor)\b", ptx)
        facts.matrix = {kind: found.count(kind) for kind in sorted(set(found))}
        code = [line.split("//")[0].lower() for line in ptx.splitlines() if not line.strip().startswith(".file")]
        facts.nvshmem_lines = sum("nvshmem" in line for line in code)
        facts.visible = [
            symbol
            for symbol in ("nvshmemi_device_state_d", "nvshmemi_device_lib_version_d")
            if any(line.startswith(".visible .const") and symbol in line for line in ptx.splitlines())
            and symbol.encode() in cubin
        ]
        facts.local_bytes = _local_bytes(cubin)
    except Exception:
        facts.error = traceback.format_exc(limit=-3)
    return dataclasses.asdict(facts)


def _local_bytes(cubin: bytes) -> int:
    """Stack and local memory of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, timeout=60)
    return local_bytes(done.stdout)


def main(argv: list[str] | None = None) -> None:
    """Compile what the arguments name and print the facts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, action="append", required=True)
    parser.add_argument("--kernel", action="append", choices=sorted(SPEC), help="default: all")
    parser.add_argument("--bitcode", help="link this file instead of the pruned bitcode")
    parser.add_argument("--no-bitcode", action="store_true", help="leave out what calls NVSHMEM")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args(argv)
    bitcode = options.bitcode
    jobs = [
        (spec.name, index, arch)
        for spec in SPECS
        if not options.kernel or spec.name in options.kernel
        for index, variant in enumerate(spec.variants)
        if not (options.no_bitcode and uses_nvshmem(variant.constexprs))
        for arch in options.arch
    ]
    if bitcode is None and any(uses_nvshmem(SPEC[name].variants[index].constexprs) for name, index, _ in jobs):
        bitcode = str(pruned_bitcode(NVSHMEM_SYMBOLS))
    if options.jobs == 1:
        results = [compile_variant(*job, bitcode) for job in jobs]
    else:
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            results = list(pool.map(compile_variant, *zip(*jobs, strict=True), [bitcode] * len(jobs)))
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
