"""Gradients of a weighted sum of rows: sums against float64, the rest bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.ops.grouped import DEVICE
from triton_ep.errors import InputError
from triton_ep.ops.mxfp8 import dequantize_rows, quantize_rows
from triton_ep.ops.weighted_rows import weighted_rows_backward
from triton_ep.reference import experts as oracle

DTYPES = (torch.bfloat16, torch.float32)


def _rows(num_rows: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows + hidden)
    dy, y = (torch.randn(num_rows, hidden, generator=generator).to(DEVICE, dtype) for _ in range(2))
    return dy, y, torch.rand(num_rows, generator=generator).to(DEVICE)


def _check(got: tuple[torch.Tensor, ...], dy: torch.Tensor, y: torch.Tensor, w: torch.Tensor, end: int) -> None:
    """Assert one float32 product, rounded to the dtype of `y`, and float32 sums in any order."""
    grad, grad_weights = oracle.weighted_rows_backward(dy, y, w, end)
    assert torch.equal(got[0], grad.float().to(y.dtype)) and got[1].dtype == torch.float32
    magnitude = (dy[:end].double() * y[:end].double()).abs().sum(1)
    assert ((got[1][:end].double() - grad_weights[:end]).abs() <= magnitude * y.shape[1] * 2.0**-24).all()
    assert not got[0][end:].any() and not got[1][end:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "hidden"), [(0, 8), (1, 1), (7, 1100), (33, 32)])
def test_rows(num_rows: int, hidden: int, dtype: torch.dtype) -> None:
    """Sizes off the tile, and no rows."""
    dy, y, weights = _rows(num_rows, hidden, dtype)
    _check(weighted_rows_backward(dy, y, weights), dy, y, weights, num_rows)


def test_quantised_rows() -> None:
    """MXFP8 rows give the gradients of their values."""
    dy, y, weights = _rows(9, 1120, torch.bfloat16)
    qdata, scale = quantize_rows(dy)
    got = weighted_rows_backward(qdata, y, weights, scale=scale)
    _check(got, dequantize_rows(qdata, scale, torch.float32), y, weights, 9)


@pytest.mark.parametrize("end", [0, 5, 12])
def test_rows_out_of_use(end: int) -> None:
    """Rows past the end have no effect, and their gradients are zero."""
    dy, y, weights = _rows(12, 64, torch.bfloat16)
    for each in (dy, y, weights):
        each[end:] = float("nan")
    offs = torch.tensor([0, min(2, end), end], dtype=torch.int32, device=DEVICE)
    _check(weighted_rows_backward(dy, y, weights, offs), dy, y, weights, end)
    qdata, scale = quantize_rows(dy)
    grad, grad_weights = weighted_rows_backward(qdata, y, weights, offs, scale=scale)
    assert not grad[end:].any() and not grad_weights[end:].any() and not grad_weights.isnan().any()


def test_errors() -> None:
    """Operands that do not fit each other are refused with both shapes."""
    dy, y, weights = _rows(4, 64, torch.bfloat16)
    with pytest.raises(InputError, match=r"\[4, 32\], y \[4, 64\]"):
        weighted_rows_backward(dy[:, :32], y, weights)
    with pytest.raises(InputError, match="float64"):
        weighted_rows_backward(dy, y, weights.double())
    with pytest.raises(InputError, match="scale missing"):
        weighted_rows_backward(dy.to(torch.float8_e4m3fn), y, weights)
    with pytest.raises(InputError, match=r"scale is \[4, 1\]"):
        weighted_rows_backward(dy.to(torch.float8_e4m3fn), y, weights, scale=torch.zeros(4, 1, dtype=torch.uint8))
