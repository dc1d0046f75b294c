"""Every kernel compiles for every supported GPU, on a machine without one, and the machine code keeps its promises.

The tests read an ahead-of-time library of the manifest, built once per session (tests/aot/library.py): the facts that
the build recorded about every variant, from its intermediate code, its PTX and its cubin.
"""

import ast
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.aot.library import ARCHS, MULTIPLYING, ROOT, Built, facts_of
from tests.programs import run_program
from triton_ep.aot.ptx import accesses, carried_values, narrow_accesses, shared_polls
from triton_ep.kernels.device.codes import P2P, ring_bytes
from triton_ep.kernels.spec import all_kernels
from triton_ep.runtime.plans import Shape, exchange
from triton_ep.runtime.plans.layers import layer_requests
from triton_ep.runtime.plans.residency import UNCOMPILED_SHARED

NUMBERS = tuple(int(arch[3:]) for arch in ARCHS)
KERNELS = list(all_kernels())

NARROW = {
    "splits_kernel": "sums tables of counts; posts one row of them, whose length need not be a multiple of 16 bytes",
    "routing_slots_kernel": "writes a few words per token",
    "map_slots_kernel": "picks a few words per token out of a row of bytes",
}
"""Kernels that move no token rows and may use accesses narrower than 16 bytes."""

NARROW_LOADS = ("dequantize_rows_in_use_kernel", "DIRECT=True")
"""A kernel and its variant that loads 8 bytes for every 16 that it stores, so that it needs no shared memory."""

EARLY = {
    "splits_kernel": ["launch_dependents"],
    "routing_slots_kernel": ["wait"],
    "dispatch_push_kernel": ["launch_dependents"],
    "dispatch_expand_kernel": ["wait"],
    "compact_rows_kernel": ["wait"],
    "combine_reduce_kernel": ["launch_dependents"],
    "combine_pull_kernel": ["wait"],
    "low_latency_dispatch_kernel": ["launch_dependents", "wait"],
    "low_latency_combine_kernel": ["launch_dependents", "wait"],
}
"""What kernels have that are launched early, and those ahead of them (kernels/device/early.py)."""

SPILL_LIMIT = 64
"""Bytes per thread. ptxas trades a few registers for occupancy; a spilled tile takes more than this."""

SPILL_LIMIT_OF_SHORT_ROWS = 96
"""Limit for kernels of gradients of routing weights, whose rows are top-k long and whose tiles are 16 rows."""

SPILLS = {
    ("dispatch_push_kernel", "BLOCK_H=512"): 144,
    ("dispatch_expand_kernel", "BLOCK_H=512"): 112,
    ("dispatch_expand_kernel", "STAGES=3"): 80,
    ("dispatch_expand_kernel", "LANDING=3"): 80,
    ("dispatch_expand_kernel", "LANDING=1"): 144,
    ("internode_forward_kernel", "BLOCK_H=1024"): 224,
    ("gate_up_kernel", "OUT=1"): 224,
    ("combine_reduce_kernel", "ROWS=2"): 96,
    ("combine_reduce_kernel", "AT_ONCE=2"): 96,
    ("combine_pull_kernel", "LWP=8"): 128,
}
"""Kernels that spill with some tiles, and their limits: MXFP8 rows of 4096, MXFP8 rows that cross nodes, MXFP8 rows
that are copied with their scales by programs that watch the flags of 8 ranks, and rows of 4096 that a combine sums,
whose tiles were chosen for other rows (`triton-ep tune` may find better ones); on sm_100 after the loop over a sum, if
an activation is quantised; sums that watch the flags of 8 ranks, with Triton 3.7 but not 3.6; weighted sums within a
budget, which load two rows at a time in programs of four warps, and were slower otherwise."""

SHARED_LIMIT = 227 * 1024
"""Most bytes of shared memory of a program, on both architectures."""

RESERVED = 1024
"""Bytes of shared memory that CUDA takes of every program that has any."""

PRODUCTS = {
    90: "wgmma.mma_async",
    100: "tcgen05.mma",
}
"""The instruction with which an architecture computes matrix products at full rate."""


@pytest.fixture(scope="module")
def results(built: Built) -> list[dict[str, Any]]:
    """Facts about all variants in the library."""
    return facts_of(built.folder)


def _of(results: list[dict[str, Any]], kernel: str) -> list[dict[str, Any]]:
    """Facts about a kernel's variants."""
    return [facts for facts in results if facts["kernel"] == kernel]


def _name(facts: dict[str, Any]) -> str:
    return f"{facts['kernel']} sm_{facts['arch']} [{facts['variant']}]"


def _is(facts: dict[str, Any], named: tuple[str, str]) -> bool:
    """Whether it is this variant, named by its kernel and a value."""
    return facts["kernel"] == named[0] and named[1] in facts["variant"].split()


def _report(failures: Iterable[str]) -> None:
    text = "\n".join(failures)
    if text:
        pytest.fail(text, pytrace=False)


def kernels_in(folder: Path) -> list[str]:
    """Sorted names of the functions compiled by Triton that end in `_kernel`, declared or not."""
    found = []
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                decorators = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
                if any(ast.unparse(d) in ("triton.jit", "jit", "ep_kernel") for d in decorators):
                    found.append(node.name)
    return sorted(found)


def test_every_kernel_is_declared() -> None:
    """A kernel that is not declared would be launched although these tests never compiled it."""
    assert kernels_in(ROOT / "kernels") == sorted(KERNELS)


def test_a_kernel_that_is_not_declared_is_seen(tmp_path: Path) -> None:
    """Kernels decorated with or without options are found in files at any depth; helpers and host functions are not."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.py").write_text(
        "@triton.jit\ndef b_kernel(): ...\n@triton.jit(debug=True)\ndef a_kernel(): ...\n"
        "@triton.jit\ndef helper(): ...\ndef run_kernel(): ...\n@ep_kernel(x_ptr='*i32')\ndef c_kernel(): ...\n"
    )
    assert kernels_in(tmp_path) == ["a_kernel", "b_kernel", "c_kernel"]


def test_everything_compiles(built: Built) -> None:
    """The build of the manifest has no failures, for every architecture."""
    failed = [line for line in built.output.splitlines() if " failed; " in line]
    assert len(failed) == len(ARCHS), built.output
    assert all(" 0 failed; " in line for line in failed), built.output


@pytest.mark.parametrize("kernel", KERNELS)
def test_compiles(results: list[dict[str, Any]], built: Built, kernel: str) -> None:
    """The library has some variant of every kernel, for every architecture."""
    if not built.has_bitcode and not _of(results, kernel):
        pytest.skip("all of its variants call NVSHMEM: pip install nvidia-nvshmem-cu13==3.4.5")
    assert {facts["arch"] for facts in _of(results, kernel)} == set(NUMBERS)


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_move_sixteen_bytes_at_a_time(results: list[dict[str, Any]], kernel: str) -> None:
    """A thread that loads or stores 16 bytes of a tile or more does so 16 bytes at a time. Rows may be copied in bulk.

    Read from the PTX, at the location of each statement that moves a tile.
    """
    if kernel not in NARROW:
        whole = [facts for facts in _of(results, kernel) if facts["whole"] or not facts["moves_rows"]]
        _report(
            f"{_name(facts)}: {text}"
            for facts in whole
            for text in facts["narrow"]
            if not (_is(facts, NARROW_LOADS) and text.startswith("load"))
        )
    _report(
        f"{_name(facts)} takes rows of tokens but has no 16-byte store of a tile"
        for facts in _of(results, kernel)
        if facts["moves_rows"] and facts["whole"] and not facts["wide_stores"] and not _ring(facts)
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_loops_keep_the_values_that_they_carry(results: list[dict[str, Any]], kernel: str) -> None:
    """Triton 3.6 and 3.7 lose a value that a loop carries only as the bound of an inner loop, which then begins at the
    initial value in each iteration. The pipeliner may add values."""
    _report(
        f"{_name(facts)} carries {written} values in its loops, compiled {kept}"
        for facts in _of(results, kernel)
        for written, kept in [facts["carried"]]
        if kept < written
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_words_that_are_polled_belong_to_one_thread(results: list[dict[str, Any]], kernel: str) -> None:
    """A thread that polls words and then uses them has checked them itself."""
    _report(f"{_name(facts)} polls {text}" for facts in _of(results, kernel) for text in facts["shared_polls"])


@pytest.mark.parametrize("kernel", KERNELS)
def test_flags_keep_their_memory_order(results: list[dict[str, Any]], kernel: str) -> None:
    """Every acquire and release survives compilation; LLVM drops a scalar acquire whose result is unused."""
    _report(
        f"{_name(facts)} has {written} system-scope {order} atomics, its PTX only {kept}"
        for facts in _of(results, kernel)
        for order, (written, kept) in facts["orders"].items()
        if kept < written
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_that_are_launched_early_wait_before_they_end(results: list[dict[str, Any]], kernel: str) -> None:
    """Once; and the kernels ahead of them let them start. No other kernel does either."""
    _report(
        f"{_name(facts)} has {facts['early']} of griddepcontrol, not {_early(facts)}"
        for facts in _of(results, kernel)
        if facts["early"] != _early(facts)
    )


def _early(facts: dict[str, Any]) -> list[str]:
    """What of EARLY a variant has: programs that quantise rows let the next kernel start, too."""
    packs = facts["kernel"] == "splits_kernel" and "PACKED_BLOCKS=0" not in facts["variant"].split()
    return EARLY.get(facts["kernel"], []) * (2 if packs else 1)


@pytest.mark.parametrize("kernel", KERNELS)
def test_tiles_stay_in_registers(results: list[dict[str, Any]], kernel: str) -> None:
    """No tile is spilled to local memory."""
    for facts in _of(results, kernel):
        limit = SPILL_LIMIT if facts["whole"] else SPILL_LIMIT_OF_SHORT_ROWS
        known = [most for named, most in SPILLS.items() if _is(facts, named)]
        limit = max([limit, *known])
        assert facts["local_bytes"] <= limit, f"{_name(facts)} keeps {facts['local_bytes']} bytes, {limit} are allowed"


def _ring(facts: dict[str, Any]) -> int:
    """Bytes of shared memory that a variant declares for rows that it copies in bulk."""
    values = dict(word.split("=") for word in facts["variant"].split())
    slots = int(values.get("SLOTS", 0))
    return ring_bytes(slots, int(values["ROW_BYTES"])) if slots else 0


def _counted(facts: dict[str, Any]) -> int:
    """Bytes of shared memory that the plan of a variant counts for a program."""
    plan = facts["kernel"].removeprefix("combine_").removesuffix("_kernel")
    if _ring(facts):
        return exchange.SHARED_BESIDE_RING
    if facts["kernel"] in ("dispatch_expand_kernel", "compact_rows_kernel"):
        values = dict(word.split("=") for word in facts["variant"].split())
        tile = {name: int(values[name]) for name in ("STAGES", "TILES", "ROWS", "BLOCK_H")}
        return exchange.bytes_copied_ahead(tile) or UNCOMPILED_SHARED
    if plan not in ("reduce", "pull", "partial"):
        return UNCOMPILED_SHARED
    values = dict(word.split("=") for word in facts["variant"].split())
    tile = {name: int(values[name]) for name in ("AT_ONCE", "ROWS", "BLOCK_H", "STAGES", "TOPK")}
    token = values.get("y_ptr") or values.get("out_ptr") or values["like_x_ptr"]
    return exchange.bytes_ahead(tile, token.removeprefix("*")) or UNCOMPILED_SHARED


def test_programs_of_the_exchange_take_no_more_shared_memory_than_is_counted(results: list[dict[str, Any]]) -> None:
    """Grids of programs that wait assume this many bytes for kernels that are not compiled yet."""
    _report(
        f"{_name(facts)} takes {facts['shared_bytes']} bytes of shared memory, {_counted(facts)} are counted"
        for facts in results
        if facts["kernel"].startswith(("dispatch_", "combine_", "internode_", "compact_", "splits_", "low_latency_"))
        and facts["shared_bytes"] > _counted(facts)
    )


def test_kernels_that_copy_in_bulk_declare_one_ring(results: list[dict[str, Any]]) -> None:
    """The compiler has not doubled the declaration: programs take the shared memory that grids count, no more."""
    assert {facts["kernel"] for facts in results if _ring(facts)} == {
        "compact_rows_kernel",
        "dispatch_expand_kernel",
        "dispatch_push_kernel",
    }
    _report(
        f"{_name(facts)} declares {facts['static_bytes']} bytes of shared memory, {_ring(facts)} are counted"
        for facts in results
        if max(facts["static_bytes"] - RESERVED, 0) != _ring(facts)
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_tiles_fit_shared_memory(results: list[dict[str, Any]], kernel: str) -> None:
    """Tiles in flight fit shared memory; the compiler does not check this, and the launch would fail."""
    _report(
        f"{_name(facts)} wants {facts['shared_bytes']} bytes of shared memory, there are {SHARED_LIMIT}"
        for facts in _of(results, kernel)
        if facts["shared_bytes"] > SHARED_LIMIT
    )


@pytest.mark.parametrize("kernel", [name for name in KERNELS if name.startswith(MULTIPLYING)])
def test_products_run_at_full_rate(results: list[dict[str, Any]], kernel: str) -> None:
    """Every matrix product uses the architecture's own instruction, and TMA reads the descriptors."""
    of_kernel = _of(results, kernel)
    assert {facts["arch"] for facts in of_kernel} == set(NUMBERS)
    _report(
        f"{_name(facts)} has only {facts['matrix']}"
        for facts in of_kernel
        if not facts["matrix"].get(PRODUCTS[facts["arch"]])
        or "mma.sync" in facts["matrix"]
        or ("TMA=False" not in facts["variant"]) != ("cp.async.bulk.tensor" in facts["matrix"])
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_nvshmem_where_puts_are_stores(results: list[dict[str, Any]], kernel: str) -> None:
    """A kernel compiled for stores contains nothing of NVSHMEM, so it needs no module initialisation."""
    _report(
        f"{_name(facts)} names nvshmem in {facts['nvshmem_lines']} lines of its PTX"
        for facts in _of(results, kernel)
        if not facts["calls_nvshmem"] and facts["nvshmem_lines"]
    )


@pytest.mark.parametrize("kernel", [name for name, spec in all_kernels().items() if "NETWORK" in spec.constexprs])
def test_nvshmem_finds_its_state(results: list[dict[str, Any]], built: Built, kernel: str) -> None:
    """A kernel that calls NVSHMEM carries the two constants through which NVSHMEM initialises a module."""
    if not built.has_bitcode:
        pytest.skip("no NVSHMEM bitcode: pip install nvidia-nvshmem-cu13==3.4.5")
    facts_of_calls = [facts for facts in _of(results, kernel) if facts["nvshmem_lines"]]
    assert {facts["arch"] for facts in facts_of_calls} == set(NUMBERS), f"{kernel} calls no NVSHMEM function"
    _report(
        f"{_name(facts)} has of NVSHMEM's visible constants only {facts['visible']}"
        for facts in facts_of_calls
        if facts["visible"] != ["nvshmemi_device_state_d", "nvshmemi_device_lib_version_d"]
    )


def test_exceptions_name_kernels() -> None:
    """Exceptions name only existing kernels: a stale one would hide faults of a later kernel of that name."""
    assert set(NARROW) | {kernel for kernel, _ in [*SPILLS, NARROW_LOADS]} <= set(KERNELS)


class _DropHints(ast.NodeTransformer):
    """Replaces `tl.multiple_of(pointer, 16)` by `pointer`."""

    def __init__(self) -> None:
        self.dropped = 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if ast.unparse(node.func) != "tl.multiple_of":
            return node
        self.dropped += 1
        return node.args[0]


HINTS = (
    ("intranode/dispatch.py", "dispatch_push_kernel", "store"),
    ("device/buffers.py", "combine_pull_kernel", "load"),
    ("device/transport.py", "internode_send_kernel", "store"),
    ("internode/dispatch.py", "internode_send_kernel", "store"),
)
"""File, a kernel that needs its hints, and what is narrow without them."""

# One process per tree, forked from one that has imported Triton.
_COMPILE = """
import json, os, sys
import triton.backends.compiler, triton.compiler

for root, request in json.loads(sys.argv[1]):
    if os.fork() == 0:
        sys.path.insert(0, root)
        from triton_ep.aot import compile

        compile.start()
        made = compile.compile_request(request, "sm_90", None)
        compile.stop()
        assert "facts" in made, made["error"]
        print(json.dumps(made["facts"]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.fixture(scope="module")
def without_hints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By file of HINTS: facts about its kernel, in a copy of the sources without the hints of that file."""
    shape = Shape(4096, 7168, 8, 256, world_size=16, local_world_size=8, num_sm=20, network=P2P)
    requests = {one.kernel: one.as_dict() for one in reversed(layer_requests(shape))}
    jobs = []
    for file, kernel, _ in HINTS:
        root = tmp_path_factory.mktemp("without")
        for folder in ("triton_ep", "kernels", "aot"):
            shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__", "cubins"))
        path = root / "kernels" / file
        mutation = _DropHints()
        path.write_text(ast.unparse(mutation.visit(ast.parse(path.read_text()))))
        assert mutation.dropped > 0
        jobs.append((str(root), requests[kernel]))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = run_program(["-c", _COMPILE, json.dumps(jobs)], environment | {"TRITON_INTERPRET": "0"}, Path(jobs[0][0]))
    assert done.returncode == 0, done.stderr
    facts = map(json.loads, done.stdout.splitlines())
    return {file: one for (file, *_), one in zip(HINTS, facts, strict=True)}


@pytest.mark.parametrize(("file", "kernel", "what"), HINTS)
def test_a_missing_alignment_hint_is_seen(without_hints: dict[str, Any], file: str, kernel: str, what: str) -> None:
    """The kernels without the alignment hints of one file fail the width check."""
    facts = without_hints[file]
    assert any(text.startswith(what) for text in facts["narrow"]), (kernel, facts)


_TTGIR = """
#loc1 = loc("/k/a.py":7:4)
#loc2 = loc("tile"(#loc1))
#loc3 = loc("/k/a.py":9:1)
#loc4 = loc(callsite(#loc2 at #loc3))
  tt.store %p, %v, %m : tensor<1x1024x!tt.ptr<i64>, #blocked> loc(#loc4)
"""
_PTX = """
.visible .entry k(
	.file	1 "/k/a.py"
	.loc	1 7 4
	// begin inline asm
	.loc	1 7 4
	mov.u64 %rd1, 0x0;
	.loc	1 8 4
	@%p1 st.global.WIDTH [ %rd1 + 0 ], { %rd2, %rd3 };
	// end inline asm
"""


@pytest.mark.parametrize(
    ("ptx", "narrow", "wide_stores"),
    [
        (_PTX.replace("WIDTH", "v2.b64"), [], 1),
        (_PTX.replace("WIDTH", "L1::no_allocate.v4.b32"), [], 1),
        (_PTX.replace("WIDTH", "b64"), ["store of 1x1024xi64 at /k/a.py:7: [8] bytes wide"], 0),
        (
            _PTX.replace("st.global", "st.shared"),
            ["store of 1x1024xi64 at /k/a.py:7: not found in the PTX"],
            0,
        ),
    ],
)
def test_widths_are_read_from_the_ptx(ptx: str, narrow: list[str], wide_stores: int) -> None:
    """A statement is followed through calls to its instructions; one that cannot be found fails."""
    assert narrow_accesses(_TTGIR, ptx, 256) == (narrow, wide_stores)
    # With more threads each has less than 16 bytes, so no width is required.
    assert narrow_accesses(_TTGIR, ptx, 1024) == ([], 0)


_POLLS = """
#blocked = #ttg.blocked<{sizePerThread = [1, 1], threadsPerWarp = [2, 16], warpsPerCTA = [WARPS, 1], order = [1, 0]}>
#loc1 = loc("/k/a.py":7:4)
  %0 = tt.load %p {isVolatile = true} : tensor<4x8x!tt.ptr<i64>, #blocked> loc(#loc1)
  %1 = scf.while (%w = %0) : (tensor<4x16xi64, #blocked>) -> tensor<4x16xi64, #blocked> {
    scf.condition(%c) %w : tensor<4x16xi64, #blocked> loc(#loc1)
  } do {
    %2 = tt.load %q {isVolatile = true} : !tt.ptr<i64> loc(#loc1)
    %3 = tt.load %p {isVolatile = true} : tensor<4x16x!tt.ptr<i64>, #blocked> loc(#loc1)
    scf.yield %3 : tensor<4x16xi64, #blocked> loc(#loc1)
  } loc(#loc1)
  %4 = tt.load %p {isVolatile = true} : tensor<4x8x!tt.ptr<i64>, #blocked> loc(#loc1)
"""


@pytest.mark.parametrize(("warps", "shared"), [("2", []), ("4", ["4x16xi64 at /k/a.py:7"])])
def test_polled_words_of_several_threads_are_seen(warps: str, shared: list[str]) -> None:
    """Blocks with fewer words than threads, in loops with a condition."""
    assert shared_polls(_POLLS.replace("WARPS", warps)) == shared


def test_carried_values_are_counted() -> None:
    """Those of loops with a count and of loops with a condition."""
    loops = """
      %a:2 = scf.for %i = %c0 to %n step %c1 iter_args(%b = %x, %c = %y) -> (i32, i32)  : i32 {
        scf.for %j = %b to %n step %c1  : i32 {
        %d:2 = scf.while (%e = %x, %f = %y) : (i32, i32) -> (i32, i32) {
    """
    assert carried_values(loops) == 4


def test_functions_of_the_bitcode_have_no_place() -> None:
    """Instructions of a function without locations do not count for the statement before it."""
    ptx = _PTX.replace("WIDTH", "v2.b64") + ".func f(\n\tst.volatile.global.b32 [%rd1], %r1;\n"
    assert accesses(ptx) == {("st", ("/k/a.py", 7, 4)): {16}}
