"""Common features of MXTensor and NVFP4Tensor besides moves and values: inference mode, shared memory."""

from typing import Any

import pytest
import torch

from tests.mx.blocks import DEVICE
from triton_ep import MXTensor
from triton_ep.mx.nvfp4 import NVFP4Tensor

pytestmark = pytest.mark.plain


@pytest.mark.parametrize("quantize", [MXTensor.to_mx, NVFP4Tensor.to_nvfp4], ids=["mx", "nvfp4"])
def test_shared_memory(quantize: Any) -> None:
    """All parts are shared; sharing a module shares its parameters."""
    linear = torch.nn.Linear(64, 4, bias=False)
    linear.weight = torch.nn.Parameter(quantize(torch.randn(4, 64)), requires_grad=False)
    values, was_shared = linear.weight.dequantize(), linear.weight.is_shared()
    assert linear.share_memory() is linear and not was_shared
    assert linear.weight.is_shared() and linear.weight.qdata.is_shared() and linear.weight.scale.is_shared()
    assert torch.equal(linear.weight, values)


@pytest.mark.parametrize("quantize", [MXTensor.to_mx, NVFP4Tensor.to_nvfp4], ids=["mx", "nvfp4"])
def test_inference_mode(quantize: Any) -> None:
    """A view, created inside, of an outside tensor is not an inference tensor; inside tensors work outside too."""
    outside = quantize(torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(3)).to(DEVICE))
    views = {
        "t": lambda t: t.transpose(-1, -2),
        "slice": lambda t: t[1:3],
        "view": lambda t: t.view(32, 64),
        "split": lambda t: t.split(2)[1],
        "select": lambda t: t[2],
        "detach": lambda t: t.detach(),
    }
    for name, view in views.items():
        with torch.inference_mode():
            made = view(outside)
            assert not made.is_inference(), name
            assert torch.equal(made, view(outside.dequantize())), name
            inside = quantize(torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(3)).to(DEVICE))
            assert inside.is_inference() and view(inside).is_inference(), name
            assert torch.equal(inside.clone(), outside)
        assert torch.equal(made, view(outside)) and torch.equal(view(inside), made), name
    with torch.inference_mode():
        outside[0].copy_(outside[1])
    assert torch.equal(outside[0], outside[1])
