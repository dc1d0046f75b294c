"""The stand-in for the CUDA driver (driver_stand_in.c), for programs that launch kernels on machines without a GPU."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import triton.backends.nvidia

from tests.patience import LIMIT_S
from tests.programs import environment_of_programs, run_program

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


def run_with_stand_in(
    words: Sequence[str | Path], folder: Path, cache: Path, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run a program that launches through the stand-in of a folder, with Triton's cache in another folder.

    A CUDA build of torch may load the real driver, and the first libcuda.so.1 of a process counts: there the program
    is a new Python.
    """
    environment = {
        **environment_of_programs(),
        "TRITON_INTERPRET": "0",
        "TRITON_LIBCUDA_PATH": str(folder),
        "TRITON_CACHE_DIR": str(cache),
        **settings,
    }
    if torch.version.cuda is None:
        return run_program(words, environment)
    environment["LD_LIBRARY_PATH"] = str(folder)
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
