"""Copies without kernels: on the CPU at once, on a GPU by the driver, with addresses and sizes beyond 32 bits."""

import ctypes
from pathlib import Path

import pytest
import torch

from tests.aot.stand_in import build_stand_in
from triton_ep.errors import LaunchError
from triton_ep.runtime import copies

pytestmark = pytest.mark.plain


def test_a_cpu_copies_at_once() -> None:
    """Exactly the bytes that are asked for."""
    source, dest = torch.arange(16, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)
    copies.copy_bytes(dest.data_ptr() + 2, source.data_ptr() + 4, 5, None)
    assert dest.tolist() == [0, 0, 4, 5, 6, 7, 8, *[0] * 9]


def test_a_gpu_copies_by_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's function has the arguments that cuda.h declares, and an error of it is raised."""
    driver = ctypes.CDLL(str(build_stand_in(tmp_path) / "libcuda.so.1"))
    copies._driver.cache_clear()
    monkeypatch.setattr(copies.ctypes, "CDLL", lambda name: {"libcuda.so.1": driver}[name])
    try:
        source, dest = torch.arange(16, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)
        stream = 2**40 + 7
        copies.copy_bytes(dest.data_ptr() + 2, source.data_ptr() + 4, 5, stream)
        assert dest.tolist() == [0, 0, 4, 5, 6, 7, 8, *[0] * 9]
        noted = (ctypes.c_uint64 * 3)()
        driver.noted_launch(noted)
        assert noted[2] == stream
        copies.copy_bytes(0, 0, 0, 13)  # nothing is asked of the driver
        with pytest.raises(LaunchError, match=r"copy of 5 bytes .* CUDA error 700"):
            copies.copy_bytes(dest.data_ptr(), source.data_ptr(), 5, 13)
    finally:
        copies._driver.cache_clear()
