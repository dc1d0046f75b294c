"""Tensors that are where no kernel runs are refused: a GPU that reads memory of the host serves its process no more."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from triton_ep.errors import InputError
from triton_ep.mx.tensor import MXTensor
from triton_ep.nn import SwiGLUExperts
from triton_ep.ops.channel_scales import quantize_channels
from triton_ep.ops.grouped_gemm import grouped_gemm
from triton_ep.ops.token_layout import LayoutMemory, token_layout
from triton_ep.ops.tuning import multiprocessors
from triton_ep.runtime import launch

pytestmark = pytest.mark.plain


def _experts(x: torch.Tensor, payload: str | None) -> torch.Tensor:
    made = SwiGLUExperts(128, 64, 2, payload=payload, device="cpu")
    return made(x, torch.tensor([0, 2, 4], dtype=torch.int32))


CALLS: dict[str, Callable[[torch.Tensor], object]] = {
    "quantise channels": lambda x: quantize_channels(x, False, False),
    "grouped GEMM": lambda x: grouped_gemm(x, torch.ones(2, 128, 64).bfloat16(), torch.tensor([2, 4]).int()),
    "experts": lambda x: _experts(x, None),
    "experts in MXFP8": lambda x: _experts(x, "mxfp8"),
    "layout of tokens": lambda x: token_layout(torch.zeros(4, 2).long(), 4, 2, 2, LayoutMemory()),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_tensors_of_the_host_are_refused_on_a_gpu(name):
    """Each is named with where it is, and kernels run afterwards. Quantising runs on the CPU, too, by the reference."""
    with pytest.raises(InputError, match=r"on cpu, .*run on (the current GPU, cuda:0|GPUs)"):
        CALLS[name](torch.ones(4, 128).bfloat16())
    quantised = MXTensor.to_mx(torch.full((4, 128), 2.0, device="cuda").bfloat16())
    assert (quantised.dequantize() == 2).all()


def test_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the host, tensors of another GPU, tensors of a GPU where kernels are interpreted."""
    here = torch.ones(4)
    there: Any = SimpleNamespace(device=torch.device("cuda:1"), is_cuda=True, get_device=lambda: 1)
    monkeypatch.setattr(launch, "INTERPRETING", True)
    launch.check_place("x", here)
    with pytest.raises(InputError, match=r"^x is on cuda:1, .* interpreted on the CPU\. Move it there, or .*INTERPRET"):
        launch.check_place("x", there)
    monkeypatch.setattr(launch, "INTERPRETING", False)
    monkeypatch.setattr(launch, "_place", lambda: 0)
    with pytest.raises(InputError, match=r"^x is on cpu, but kernels run on .* GPU, cuda:0\. Move it there\.$"):
        launch.check_place("x", here)
    with pytest.raises(InputError, match=r"^x is on cuda:1, .* cuda:0\. Move it there, or make its GPU current\.$"):
        launch.check_place("x", there)
    monkeypatch.setattr(launch, "_place", lambda: 1)
    launch.check_place("x", there)
    with pytest.raises(InputError, match=r"tensors are on cpu, .* run on GPUs"):
        multiprocessors(torch.device("cpu"))


def test_launches_outside_of_layers_check_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is launched, and the tensor has the name of the kernel's argument."""
    monkeypatch.setattr(launch, "_place", lambda: 0)
    with pytest.raises(InputError, match=r"^(a is|tensors are) on cpu"):
        CALLS["grouped GEMM"](torch.ones(4, 128).bfloat16())
