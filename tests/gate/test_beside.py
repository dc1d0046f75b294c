"""Kernels that run next to products fit on a multiprocessor that holds all products it can."""

import re
import subprocess

from tests.aot.library import Built
from triton_ep.runtime.library import Entry, Library
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
    """Next to as many programs of these as fit by themselves: two, or one that adds to float32."""
    entries = Library(built.folder, ARCH).entries
    products = [each for each in entries if each.request.kernel == "weight_gradient_kernel"]
    beside = [each for each in entries if each.request.kernel in KERNELS and each.request.side_by_side]
    assert {each.request.kernel for each in beside} == KERNELS
    assert {each.request.constexprs["ACCUMULATE"] for each in products} == {False, True}
    for product in products:
        whole = _program(built, product)
        most = per_multiprocessor(whole)
        assert most == (1 if product.request.constexprs["ACCUMULATE"] else 2)
        for entry in beside:
            program = _program(built, entry)
            assert per_multiprocessor(program, whole, most) >= 1, (entry.request.text(), program, whole)
