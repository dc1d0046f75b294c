"""Kernels that run next to products fit on a multiprocessor that holds all products it can."""

import re
import subprocess

from tests.aot.library import Built
from triton_ep.runtime.library import Entry, Library
from triton_ep.runtime.plans.experts_backward import weight_gradient
from triton_ep.runtime.plans.residency import Program, per_multiprocessor

ARCH = "sm_90"
KERNELS = {
    "combine_enter_kernel",
    "combine_reduce_kernel",
    "combine_pull_kernel",
    "dequantize_rows_in_use_kernel",
    "expand_arrivals_kernel",
}


def _program(built: Built, entry: Entry) -> Program:
    """What a program takes, by the machine code."""
    import triton

    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(built.folder / ARCH / entry.file)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+)", told)
    assert found is not None, told
    return Program(entry.threads // 32, int(found[1]), entry.shared)


def test_a_program_fits_next_to_gradients_of_weights(built: Built) -> None:
    """Next to all programs of these that run on a multiprocessor, of those gradients that leave room."""
    entries = Library(built.folder, ARCH).entries
    beside = [each for each in entries if each.request.kernel in KERNELS and each.request.side_by_side]
    assert {each.request.kernel for each in beside} == KERNELS
    for added in (False, True):
        plan, tile, most = weight_gradient(1, added, beside=True, interpreted=False)
        like = {"ACCUMULATE": added, "BLOCK_R": tile.k, "STAGES": tile.stages}.items()
        of_weights = [each for each in entries if each.request.kernel == plan.kernel]
        products = [_program(built, each) for each in of_weights if like <= each.request.constexprs.items()]
        assert products
        for whole in products:
            assert per_multiprocessor(whole) >= most
            for entry in beside:
                program = _program(built, entry)
                assert per_multiprocessor(program, whole, most) >= 1, (entry.request.text(), program, whole)
