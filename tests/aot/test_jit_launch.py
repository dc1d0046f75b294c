"""What the JIT's launches pass to a driver, recorded by a stand-in on machines without one (driver_stand_in.c)."""

from pathlib import Path

import pytest

from tests.aot.stand_in import build_stand_in, run_with_stand_in

HERE = Path(__file__).resolve().parent


@pytest.mark.plain
def test_the_driver_gets_what_a_launch_gives(tmp_path: Path) -> None:
    """Arguments come in the order of the compiled kernel: of a layer, of its groups, in boxes, omitted because 1."""
    build_stand_in(tmp_path)
    kernels = ["combine_publish_kernel", "dispatch_push_kernel", "rows_product_kernel"]
    words = [HERE / "jit_launch_program.py", tmp_path, *kernels]
    # The test is about Triton's own launches.
    done = run_with_stand_in(words, tmp_path, tmp_path / "cache", TRITON_EP_JIT_CACHE="0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("4 kernels were launched as asked\n"), done.stdout
