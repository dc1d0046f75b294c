"""What the JIT's launches pass to a driver, recorded by a stand-in on machines without one (driver_stand_in.c)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import triton.backends.nvidia

from tests.patience import LIMIT_S

HERE = Path(__file__).resolve().parent
INCLUDE = Path(triton.backends.nvidia.__file__).parent / "include"


@pytest.mark.plain
def test_the_driver_gets_what_a_launch_gives(tmp_path: Path) -> None:
    """Arguments come in the order of the compiled kernel: of a layer, of its groups, in boxes, omitted because 1."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler, which Triton needs to launch kernels")
    library = tmp_path / "libcuda.so.1"
    build = [compiler, "-shared", "-fPIC", "-I", str(INCLUDE), "-o", str(library), str(HERE / "driver_stand_in.c")]
    subprocess.run(build, check=True, capture_output=True, timeout=LIMIT_S)
    (tmp_path / "libcuda.so").symlink_to(library.name)
    settings = {
        "TRITON_INTERPRET": "0",
        "TRITON_LIBCUDA_PATH": str(tmp_path),
        "LD_LIBRARY_PATH": str(tmp_path),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "TRITON_EP_JIT_CACHE": "0",  # this test is about Triton's own launches
        "PYTHONPATH": str(HERE.parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, str(HERE / "jit_launch_program.py"), str(tmp_path)]
    kernels = ["combine_publish_kernel", "dispatch_push_kernel", "rows_product_kernel"]
    done = subprocess.run(
        [*words, *kernels], env={**os.environ, **settings}, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("4 kernels were launched as asked\n"), done.stdout
