"""Weights prepared for FP8 products, bit for bit against the oracle."""

from __future__ import annotations

import pytest
import torch

from tests.ops.grouped import DEVICE
from triton_ep.errors import InputError
from triton_ep.mx.tensor import MXTensor
from triton_ep.ops.prepare import prepare_weights
from triton_ep.ops.row_scales import RowScaled
from triton_ep.reference import experts as oracle
from triton_ep.reference import mxfp8


def _weights(dtype: torch.dtype = torch.bfloat16, n: int = 160, k: int = 96) -> torch.Tensor:
    """[2, n, k] whose blocks of 32 differ in magnitude along both dimensions; with zeros, a NaN and an infinity."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(2, n, k, generator=generator)
    w = w * 2.0 ** torch.randint(-9, 9, (2, n // 32, k // 32), generator=generator).repeat_interleave(
        32, 1
    ).repeat_interleave(32, 2)
    w[0, 3], w[0, :, 5] = 0.0, 0.0
    w[1, 40, 50], w[1, 70, 80] = torch.nan, -torch.inf
    return w.to(dtype)


def _assert_same(got: RowScaled | None, values: torch.Tensor) -> None:
    """Assert that `got` is `values` prepared along the last dimension, bit for bit; all NaN scales count as equal."""
    assert got is not None
    elements, scale = oracle.prepared_rows(values)
    assert torch.equal(got.qdata.cpu().view(torch.uint8), elements.view(torch.uint8))
    torch.testing.assert_close(got.scale.cpu(), scale, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("uses", ["fprop", "dgrad", "both"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_forms_are_the_oracles(dtype: torch.dtype, uses: str) -> None:
    """Along K unchanged, along N transposed; forms not requested are not created; repeated calls reuse the memory."""
    w = _weights(dtype)
    made = prepare_weights(w.to(DEVICE), uses)
    assert [each is not None for each in made] == [uses != "dgrad", uses != "fprop"]
    for values in (w, w.flip(0) * 4, *_steps_of_training(w)):
        again = prepare_weights(values.to(DEVICE).contiguous(), uses, out=made)
        for one, two, along in zip(made, again, (values, values.transpose(1, 2)), strict=True):
            if one is not None and two is not None:
                assert one.qdata.data_ptr() == two.qdata.data_ptr() and one.scale.data_ptr() == two.scale.data_ptr()
                _assert_same(two, along.contiguous())


def _steps_of_training(w: torch.Tensor) -> list[torch.Tensor]:
    """Updates after which few rows and columns need other scales: larger, smaller, NaN, and finite again."""
    small = w.clone()
    small[0] = small[0].nan_to_num(0, 0, 0) * 1.001
    found = [small]
    for row, column, value in ((130, 90, 3e4), (130, 90, 0.25), (7, 2, torch.nan), (7, 2, 0.5)):
        found.append(found[-1].clone())
        found[-1][0, row, column] = value
    return found


def test_scales_that_were_never_any_change_nothing() -> None:
    """Memory for the result may hold any values: no bit of the result depends on them."""
    w = _weights(n=288, k=160)
    made = prepare_weights(w.to(DEVICE), "both")
    for value in (0.0, -3.7, torch.inf, torch.nan, 2.0**100, 2.0**-127):
        for each in made:
            each.scale.fill_(value)
            each.qdata.view(torch.uint8).fill_(7)
        for got, values in zip(prepare_weights(w.to(DEVICE), "both", out=made), (w, w.transpose(1, 2)), strict=True):
            _assert_same(got, values.contiguous())


def test_elements_are_those_of_mxfp8_but_for_subnormal_ones() -> None:
    """Only subnormal elements differ from MXFP8; they are nearer to the weight, within half a step."""
    w = _weights()[:1]
    once, twice = oracle.prepared_rows(w), oracle.rebase_rows(*mxfp8.quantize(w))
    assert torch.equal(once[1], twice[1])
    one, two = (rows[0].float() for rows in (once, twice))
    differ = one != two
    assert differ.any() and two[differ].abs().max() <= 2.0**-6
    scaled = w.float() / once[1].unsqueeze(-1)
    assert ((one - scaled).abs() <= (two - scaled).abs()).all()


def test_weights_that_are_mxfp8() -> None:
    """The form along K keeps their elements; the other form quantises their values again."""
    w = _weights()
    given = MXTensor.to_mx(w.to(DEVICE))
    fprop, dgrad = prepare_weights(given, "both")
    elements, scale = oracle.rebase_rows(*mxfp8.quantize(w))
    assert torch.equal(fprop.qdata.cpu().view(torch.uint8), elements.view(torch.uint8))
    torch.testing.assert_close(fprop.scale.cpu(), scale, rtol=0, atol=0, equal_nan=True)
    _assert_same(dgrad, given.dequantize(torch.bfloat16).cpu().transpose(1, 2).contiguous())
    same, none = prepare_weights(given, "fprop", out=(fprop, None))
    assert none is None and same is fprop


def test_errors() -> None:
    """Shapes that are not whole blocks are refused; the error names the nearest valid shape."""
    w = _weights().to(DEVICE)
    made = prepare_weights(w, "fprop")
    for call, match in (
        (lambda: prepare_weights(w, "wgrad"), "choose from fprop"),
        (lambda: prepare_weights(w[:, :, :40].contiguous(), "fprop"), "nearest above is 64"),
        (lambda: prepare_weights(w[:, :70].contiguous(), "dgrad"), "nearest above is 96"),
        (lambda: prepare_weights(w.transpose(1, 2), "fprop"), "contiguous"),
        (lambda: prepare_weights(w.half(), "fprop"), "float16"),
        (lambda: prepare_weights(w[:, :64].contiguous(), "fprop", out=made), r"out must be \[2, 64, 96\]"),
        (lambda: prepare_weights(MXTensor.to_mx(w, block_dim=1), "fprop"), "along K"),
    ):
        with pytest.raises(InputError, match=match):
            call()
    # A dimension that is not summed over needs no whole blocks.
    assert prepare_weights(w[:, :70].contiguous(), "fprop")[0] is not None
