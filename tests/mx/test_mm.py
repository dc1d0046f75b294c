"""mx_mm: the product of what two MX matrices stand for."""

import pytest
import torch

from tests.mx.blocks import DEVICE, EVERY
from triton_ep import MXTensor
from triton_ep.mx.mm import mx_mm

pytestmark = pytest.mark.plain


def _x(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def signal_to_noise(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """dB; infinite where the two are equal."""
    error = wanted.double() - got.double()
    return (20 * torch.log10(wanted.double().norm() / error.norm())).item()


@pytest.mark.parametrize("right", EVERY)
@pytest.mark.parametrize("left", EVERY)
def test_the_product_is_that_of_the_values(left: str, right: str) -> None:
    """Every pair of formats: 80 dB and more from the product of the dequantised matrices, in float64 and in bf16."""
    a, w = MXTensor.to_mx(_x(48, 128), EVERY[left]), MXTensor.to_mx(_x(40, 128, seed=1), EVERY[right])
    wide = mx_mm(a, w.t(), torch.float32)
    assert (wide.shape, wide.dtype) == ((48, 40), torch.float32)
    assert signal_to_noise(a.dequantize().double() @ w.dequantize().double().t(), wide) >= 80
    assert signal_to_noise(a.dequantize() @ w.dequantize().t(), mx_mm(a, w.t())) >= 80
