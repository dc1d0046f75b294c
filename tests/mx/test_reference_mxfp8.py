"""The oracle of MXFP8 against the rules: a table worked out by hand, and a scalar model in fractions."""

import math

import pytest
import torch

from tests.mx.blocks import (
    BLOCK,
    DEVICE,
    DTYPES,
    ELEMENTS,
    MODES,
    every_exponent,
    every_tie,
    in_every_lane,
    model_block,
    random_bits,
    special_values,
)
from triton_ep.mx import arithmetic
from triton_ep.mx.formats import ScalingMode, elem_format
from triton_ep.ops import mxfp8 as ops
from triton_ep.reference import mxfp8 as reference

BIGGEST = (2 - 2**-23) * 2.0**127

# (format, mode, the only non-zero value of the block, its scale byte, its element)
TABLE = [
    ("e4m3", "rceil", 0.0, 0, 0x00),
    ("e4m3", "rceil", -0.0, 0, 0x80),
    ("e4m3", "rceil", 1.0, 119, 0x78),  # 1 / 448 is above 2**-9: 2**-8, 256
    ("e4m3", "rceil", 448.0, 127, 0x7E),
    ("e4m3", "rceil", 448.00003, 128, 0x76),  # one float32 above: the next scale, 224
    ("e4m3", "rceil", -450.0, 128, 0xF6),
    ("e4m3", "rceil", 2.0**-149, 0, 0x00),
    ("e4m3", "rceil", 2.0**-126, 0, 0x40),  # byte 0 is 2**-127: 2
    ("e4m3", "rceil", 1.75 * 2.0**-119, 0, 0x7E),
    ("e4m3", "rceil", 1.75 * 2.0**-118, 1, 0x7E),
    ("e4m3", "rceil", BIGGEST, 247, 0x78),
    ("e4m3", "rceil", math.inf, 255, 0x7F),
    ("e4m3", "rceil", -math.inf, 255, 0x7F),
    ("e4m3", "rceil", math.nan, 255, 0x7F),
    ("e4m3", "floor", 1.0, 119, 0x78),
    ("e4m3", "floor", 500.0, 127, 0x7E),  # saturates
    ("e4m3", "floor", 2.0**-126, 0, 0x40),
    ("e4m3", "floor", BIGGEST, 246, 0x7E),
    ("e4m3", "floor", math.inf, 255, 0x7F),
    ("e4m3", "ceil", 1.0, 119, 0x78),
    ("e4m3", "ceil", 1.5, 120, 0x74),
    ("e4m3", "ceil", BIGGEST, 247, 0x78),
    ("e4m3", "ceil", math.nan, 255, 0x7F),
    ("e4m3", "even", 1.9375, 120, 0x78),  # rounds up to 2; 248 is a tie of 240 and 256
    ("e4m3", "even", 1.9296875, 119, 0x7E),
    ("e4m3", "even", BIGGEST, 255, 0x7F),  # rounds up to infinity
    ("e5m2", "rceil", 1.0, 112, 0x78),
    ("e5m2", "rceil", -57344.0, 127, 0xFB),
    ("e5m2", "rceil", BIGGEST, 240, 0x78),
    ("e5m2", "floor", 65000.0, 127, 0x7B),
    ("e5m2", "floor", BIGGEST, 239, 0x7B),
    ("e5m2", "ceil", 3.0, 114, 0x76),
    ("e5m2", "even", 1.875, 113, 0x78),
    ("e5m2", "even", 1.8671875, 112, 0x7B),
    ("e5m2", "even", math.inf, 255, 0x7F),
]


def _by_reference(x: torch.Tensor, elem: str, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.quantize(x, ELEMENTS[elem], mode)


def _by_torch(x: torch.Tensor, elem: str, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    return arithmetic.quantize(x, elem_format(ELEMENTS[elem]), ScalingMode(mode), 32)


def _by_kernel(x: torch.Tensor, elem: str, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale = ops.quantize_rows(x.to(DEVICE), ELEMENTS[elem], mode)
    return codes.cpu(), scale.cpu()


@pytest.mark.parametrize("quantize", [_by_reference, _by_torch, _by_kernel])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("elem", ELEMENTS)
def test_values_worked_out_by_hand(quantize, elem: str, mode: str) -> None:
    """Scale and element of one value in any lane; the zeros around it stay zeros, or become NaN."""
    rows = [row[2:] for row in TABLE if row[:2] == (elem, mode)]
    codes, scales = quantize(torch.cat([in_every_lane(value) for value, _, _ in rows]), elem, mode)
    found = zip(rows, codes.view(torch.uint8).split(BLOCK), scales.split(BLOCK), strict=True)
    for (value, scale, element), got, got_scales in found:
        assert got_scales.flatten().tolist() == [scale] * BLOCK, value
        assert got.diagonal().tolist() == [element] * BLOCK, value
        others = got[~torch.eye(BLOCK, dtype=torch.bool)].unique().tolist()
        assert others == [element if value == 0 or scale == 255 else 0], value


# The oracle converts every dtype to float64 before anything else.
@pytest.mark.parametrize("elem", ELEMENTS)
@pytest.mark.parametrize(
    ("mode", "dtype"), [*((mode, "fp32") for mode in MODES), ("rceil", "bf16"), ("floor", "fp16"), ("even", "bf16")]
)
def test_reference_is_the_model_in_fractions(elem: str, mode: str, dtype: str) -> None:
    """Special values, ties, exponents and random bits, a few dozen blocks of each."""
    edges = every_exponent()
    wild = random_bits(1024, DTYPES[dtype], 3)
    x = torch.cat([special_values(), every_tie(elem)[::3], edges[:: len(edges) // 100], wild]).to(DTYPES[dtype])
    codes, scales = _by_reference(x, elem, mode)
    for block, got_codes, got_scale in zip(x, codes.view(torch.uint8).tolist(), scales.tolist(), strict=True):
        scale, bits = model_block(block, elem, mode)
        assert (got_scale, got_codes) == ([scale], bits), block


@pytest.mark.parametrize("elem", ELEMENTS)
def test_every_scale_and_element_is_read_back(elem: str) -> None:
    """All 256 scales times all 256 elements, against exact powers of two."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values = codes.view(ELEMENTS[elem]).double()
    qdata = codes.repeat(256, 1)
    scale = codes[:, None].expand(256, 8).contiguous()
    powers = torch.tensor([2.0 ** (s - 127) for s in range(255)] + [math.nan], dtype=torch.float64)
    expected = powers[:, None] * values[None, :]
    for dtype in DTYPES.values():
        out = reference.dequantize(qdata.view(ELEMENTS[elem]), scale, dtype)
        torch.testing.assert_close(out, expected.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_columns_are_rows_of_the_transpose() -> None:
    """Without groups, 64 rows form two blocks per column."""
    x = torch.randn(64, 40, generator=torch.Generator().manual_seed(1))
    codes, scale = reference.quantize_columns(x)
    rows, row_scale = reference.quantize(x.T.contiguous())
    assert torch.equal(codes.view(torch.uint8), rows.view(torch.uint8).T)
    assert torch.equal(scale, row_scale.T)


def test_an_unknown_mode_is_refused() -> None:
    """The oracle refuses it too."""
    with pytest.raises(ValueError, match="nearest"):
        reference.quantize(torch.zeros(1, 32), scaling_mode="nearest")
