"""Common features of MXTensor and NVFP4Tensor besides moves and values: inference mode, shared memory."""

from typing import Any

import pytest
import torch

from tests.mx.blocks import DEVICE
from triton_ep import MXTensor
from triton_ep.errors import InputError
from triton_ep.mx.nvfp4 import NVFP4Tensor, per_tensor_amax_to_scale

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


@pytest.mark.parametrize("kind", ["mx", "nvfp4"])
def test_an_assignment_to_data_replaces_the_values(kind: str) -> None:
    """Of the same class: all parts, and format, dtype and shape. Another class is refused."""
    quantise = MXTensor.to_mx if kind == "mx" else NVFP4Tensor.to_nvfp4
    first, second = (quantise(torch.randn(4, 64, device=DEVICE)) for _ in range(2))
    parameter = torch.nn.Parameter(first, requires_grad=False)
    parameter.data = second
    assert torch.equal(parameter, second) and torch.equal(parameter.data, second)
    assert isinstance(parameter, torch.nn.Parameter)
    smaller = quantise(torch.randn(2, 32, device=DEVICE).bfloat16())
    parameter.data = smaller
    assert (parameter.shape, parameter.dtype, parameter.orig_dtype) == (smaller.shape, torch.bfloat16, torch.bfloat16)
    assert torch.equal(parameter.dequantize(), smaller.dequantize())
    with pytest.raises(InputError, match=r"Tensor \[2, 32\] cannot be assigned to `data`"):
        parameter.data = torch.zeros(2, 32, device=DEVICE)


def test_a_number_minus_a_tensor() -> None:
    """By value, as the tensor minus a number."""
    mx = MXTensor.to_mx(torch.randn(2, 32, device=DEVICE))
    assert torch.equal(1 - mx, 1 - mx.dequantize())


def test_matmul_of_matrices_with_a_scale_each() -> None:
    """torch.matmul expands both operands to the shape that they have."""
    x = torch.randn(3, 4, 64, device=DEVICE)
    scale = per_tensor_amax_to_scale(x.abs().amax((1, 2), keepdim=True))
    quantised = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale)
    values = quantised.dequantize()
    assert torch.equal(quantised @ quantised.mT, values @ values.mT)
    assert torch.equal(x @ quantised.mT, x @ values.mT)
