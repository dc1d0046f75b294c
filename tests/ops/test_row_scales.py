"""MXFP8 with one scale per row, bit for bit against the oracle."""

from __future__ import annotations

import pytest
import torch

from tests.ops.grouped import DEVICE
from triton_ep.errors import InputError
from triton_ep.ops.row_scales import (
    RowScaled,
    dequantize_rows_beside,
    dequantize_rows_in_use,
    quantize_to_rows,
    rebase_rows,
)
from triton_ep.reference import experts as oracle
from triton_ep.reference import mxfp8


def _spread(*shape: int, spread: int, seed: int = 0) -> torch.Tensor:
    """float32 values whose blocks of 32 differ in magnitude by up to 2^(2 * spread)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape[:-1], shape[-1] // 32, 32, generator=generator)
    exponent = torch.randint(-spread, spread + 1, x.shape[:-1], generator=generator)
    return (x * 2.0 ** exponent[..., None]).reshape(shape)


def _assert_same(got: RowScaled, want: tuple[torch.Tensor, torch.Tensor], rows: int | None = None) -> None:
    """Assert the same bits in the first `rows` rows; all NaN scales count as equal."""
    elements, scale = want
    assert torch.equal(got.qdata[:rows].cpu().view(torch.uint8), elements[:rows].view(torch.uint8))
    torch.testing.assert_close(got.scale[:rows].cpu(), scale[:rows], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(5, 64), (37, 1120), (2, 9, 96)], ids=str)
@pytest.mark.parametrize("spread", [0, 4, 40])
def test_rebased_rows_are_the_oracles(shape: tuple[int, ...], spread: int) -> None:
    """Elements and scales of rows and of weights; a NaN block makes its row NaN, extreme scales stay."""
    qdata, scale = mxfp8.quantize(_spread(*shape, spread=spread))
    flat = scale.view(-1, scale.shape[-1])
    flat[1, 0], flat[2], flat[3] = 255, 0, 254
    got = rebase_rows(qdata.to(DEVICE), scale.to(DEVICE))
    _assert_same(got, oracle.rebase_rows(qdata, scale))
    assert got.scale.flatten()[1].isnan() and got.scale.flatten()[2] == 2.0**-127


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_become_the_rows_of_their_mxfp8(dtype: torch.dtype) -> None:
    """One kernel gives the same bits as two, also for rows of zeros, NaN, infinities and subnormal values."""
    x = _spread(40, 1120, spread=6).to(dtype)
    x[1], x[2, 70], x[3, 5], x[4] = 0.0, torch.nan, torch.inf, 2.0**-130
    got = quantize_to_rows(x.to(DEVICE))
    _assert_same(got, oracle.rebase_rows(*mxfp8.quantize(x)))
    values = oracle.row_values(x[5:])
    assert torch.equal(got.dequantize(torch.float32)[5:].cpu().double(), values)


@pytest.mark.parametrize("end", [0, 1, 33, 40])
def test_rows_behind_the_last_segment_are_not_touched(end: int) -> None:
    """Rows in use are those before the last offset; NaN past them has no effect."""
    x = _spread(40, 64, spread=3).to(DEVICE)
    offs = torch.tensor([0, end // 2, end], dtype=torch.int32, device=DEVICE)
    qdata, scale = mxfp8.quantize(x.cpu())
    scale[end:] = 255
    want = oracle.rebase_rows(qdata, scale)
    got = rebase_rows(qdata.to(DEVICE), scale.to(DEVICE), offs)
    _assert_same(got, want, end)
    x[end:] = torch.nan
    _assert_same(quantize_to_rows(x, offs), want, end)
    values = dequantize_rows_in_use(got, offs, torch.float32)
    assert torch.equal(values[:end].cpu().double(), oracle.row_values(x[:end].cpu()))
    for columns in (slice(0, 32), slice(32, None)):
        part = dequantize_rows_in_use(got, offs, torch.float32, columns=columns)
        assert torch.equal(part[:end], values[:end, columns])
        beside = dequantize_rows_beside(got, offs, columns, None)
        assert torch.equal(beside[:end], values[:end, columns].bfloat16())


def test_what_is_not_in_use_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of the results past the last segment is not written."""
    stock = torch.Tensor.new_empty

    def filled(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        made = stock(self, *args, **kwargs)  # type: ignore[arg-type]
        made.view(torch.uint8).fill_(0x5A)
        return made

    x = torch.ones(9, 64, device=DEVICE)
    qdata, scale = (part.to(DEVICE) for part in mxfp8.quantize(x.cpu()))
    offs = torch.tensor([0, 4], dtype=torch.int32, device=DEVICE)
    monkeypatch.setattr(torch.Tensor, "new_empty", filled)
    for made in (rebase_rows(qdata, scale, offs), quantize_to_rows(x, offs)):
        parts = (made.qdata, made.scale, dequantize_rows_in_use(made, offs))
        assert all(bool((part[4:].contiguous().view(torch.uint8) == 0x5A).all()) for part in parts)
        assert not any(bool((part[:4].contiguous().view(torch.uint8) == 0x5A).all()) for part in parts)


def test_no_rows() -> None:
    """No rows give empty results."""
    x = torch.empty(0, 64, device=DEVICE)
    made = quantize_to_rows(x, torch.zeros(3, dtype=torch.int32, device=DEVICE))
    assert made.shape == (0, 64) and made.dequantize().shape == (0, 64)


def test_errors() -> None:
    """Shapes and dtypes that do not fit each other are refused; the error describes them."""
    qdata, scale = (part.to(DEVICE) for part in mxfp8.quantize(torch.ones(4, 64)))
    offs = torch.tensor([0, 4], dtype=torch.int32, device=DEVICE)
    for call, match in (
        (lambda: rebase_rows(qdata, scale[:, :1]), r"\[4, 2\] bytes"),
        (lambda: rebase_rows(qdata.float(), scale), "float8_e4m3fn"),
        (lambda: rebase_rows(qdata.view(1, 4, 64), scale.view(1, 4, 2), offs), "rows"),
        (lambda: quantize_to_rows(torch.ones(4, 40, device=DEVICE)), "multiple of 32"),
        (lambda: quantize_to_rows(torch.ones(4, 64, device=DEVICE), offs.long()), "int32"),
        (lambda: RowScaled(qdata, scale), "float32"),
        (lambda: RowScaled(qdata.t(), scale), "contiguous"),
        (lambda: dequantize_rows_in_use(rebase_rows(qdata, scale), offs, torch.float16), "float16"),
        (lambda: dequantize_rows_in_use(rebase_rows(qdata, scale), offs, columns=slice(0, 64, 2)), "step of 2"),
    ):
        with pytest.raises(InputError, match=match):
            call()
