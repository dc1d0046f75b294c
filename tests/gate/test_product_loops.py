"""The loops of matrix products keep their sums in registers: in machine code, loop by loop."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.aot.library import MULTIPLYING, Built, facts_of
from triton_ep.kernels.spec import all_kernels
from triton_ep.runtime.library import Entry, Library

ARCH = "sm_90"
_LABEL = re.compile(r"(\.L_\w+):")
_JUMP = re.compile(r"\bBRA\b.*`\((\.L_\w+)\)")
_LOCAL = re.compile(r"\b(LDL|STL)\b")
_PRODUCT = re.compile(r"\b[HQ]GMMA\b")


def product_loops(code: str) -> Iterator[list[str]]:
    """The innermost loops of a disassembled kernel that multiply matrices, as lines."""
    lines = code.splitlines()
    labels = {match[1]: number for number, line in enumerate(lines) if (match := _LABEL.match(line.strip()))}
    jumps = [(labels.get(match[1]), number) for number, line in enumerate(lines) if (match := _JUMP.search(line))]
    loops = [(begin, end) for begin, end in jumps if begin is not None and begin < end]
    loops = [(begin, end) for begin, end in loops if any(map(_PRODUCT.search, lines[begin:end]))]
    for begin, end in loops:
        if not any(begin <= inner and last <= end for inner, last in loops if (inner, last) != (begin, end)):
            yield lines[begin:end]


def test_a_spill_in_a_loop_is_seen() -> None:
    """Of nested loops the inner one counts; loops without products do not."""
    inner = ".L_x_1:", "  QGMMA R24 ;", "  STL [R1], R2 ;", "  @P0 BRA `(.L_x_1) ;"
    outer = ".L_x_0:", "  LDL R2, [R1] ;", *inner, "  LDL R3, [R1] ;", "  @P1 BRA `(.L_x_0) ;"
    other = ".L_x_2:", "  LDL R2, [R1] ;", "  @P0 BRA `(.L_x_2) ;"
    assert list(product_loops("\n".join([*outer, *other]))) == [list(inner[:-1])]


def _disassembler() -> Path:
    import triton.backends.nvidia

    return Path(triton.backends.nvidia.__file__).parent / "bin" / "nvdisasm"


def _looked_at(built: Built) -> Iterator[Entry]:
    """Products whose machine code uses local memory; and of each kernel the shortest code, whose loops must be found.

    Code without a byte of stack or local memory has nothing to load from there: disassembling it takes half a second.
    """
    local_bytes = {each["signature"]: each["local_bytes"] for each in facts_of(built.folder) if each["arch"] == 90}
    entries = [each for each in Library(built.folder, ARCH).entries if each.request.kernel.startswith(MULTIPLYING)]
    seen = set()
    for entry in sorted(entries, key=lambda entry: (built.folder / ARCH / entry.file).stat().st_size):
        if local_bytes[entry.request.signature()] or entry.request.kernel not in seen:
            seen.add(entry.request.kernel)
            yield entry


def test_no_sum_is_spilled_in_a_loop_over_products(built: Built) -> None:
    """No load from and no store to local memory between two steps of a sum, in any tile of any product."""
    looked_at, multiplying, spilled = set(), set(), []
    for entry in _looked_at(built):
        multiplying.add(entry.request.kernel)
        command = [str(_disassembler()), "-c", str(built.folder / ARCH / entry.file)]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for loop in product_loops(code):
            looked_at.add(entry.request.kernel)
            if count := sum(1 for line in loop if _LOCAL.search(line)):
                spilled.append(f"{entry.request.kernel} {entry.request.constexprs}: {count} in a loop")
    assert looked_at == multiplying == {name for name in all_kernels() if name.startswith(MULTIPLYING)}
    if spilled:
        pytest.fail("\n".join(spilled), pytrace=False)
