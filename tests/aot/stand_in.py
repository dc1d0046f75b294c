"""The stand-in for the CUDA driver (driver_stand_in.c), for programs that launch kernels on machines without a GPU."""

import shutil
import subprocess
from pathlib import Path

import pytest
import triton.backends.nvidia

from tests.patience import LIMIT_S
from tests.programs import environment_of_programs

HERE = Path(__file__).resolve().parent
INCLUDE = Path(triton.backends.nvidia.__file__).parent / "include"


def build_stand_in(folder: Path) -> Path:
    """Compile it as libcuda.so.1 into a folder, which is returned.

    With its own name: a process that has loaded it by its path then finds it as Triton looks for the driver.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler, which Triton needs to launch kernels")
    library = folder / "libcuda.so.1"
    options = ["-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-I", str(INCLUDE), "-o", str(library)]
    build = [compiler, *options, str(HERE / "driver_stand_in.c")]
    subprocess.run(build, check=True, capture_output=True, timeout=LIMIT_S)
    (folder / "libcuda.so").symlink_to(library.name)
    return folder


def environment_of_stand_in(folder: Path, cache: Path) -> dict[str, str]:
    """Environment of a program that compiles for it, with Triton's cache in a folder."""
    return {
        **environment_of_programs(),
        "TRITON_INTERPRET": "0",
        "TRITON_LIBCUDA_PATH": str(folder),
        "TRITON_CACHE_DIR": str(cache),
    }
