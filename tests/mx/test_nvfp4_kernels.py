"""NVFP4 kernels and torch arithmetic give the oracle's bytes; random results have the right mean."""

import pytest
import torch

from tests.mx.blocks import DEVICE, DTYPES, assert_same_bytes, every_exponent, from_bits, random_bits, special_values
from triton_ep.errors import InputError
from triton_ep.mx import nvfp4_arithmetic as arithmetic
from triton_ep.mx.hadamard import hadamard, inverse_hadamard, random_signs
from triton_ep.ops import nvfp4 as ops
from triton_ep.reference import nvfp4 as reference

BLOCK = 16


def _every_tie() -> torch.Tensor:
    """[n, 16] float32: every element, the midpoints, the neighbours of both, and a 6 in each block."""
    values = torch.tensor(reference.E2M1)
    points = torch.cat([values, (values[1:] + values[:-1]) / 2])
    points = torch.cat([points, points.nextafter(torch.tensor(9.0)), points.nextafter(torch.tensor(-9.0))])
    points = torch.cat([points, -points])
    points = points[points.abs() <= 6]
    points = torch.nn.functional.pad(points, (0, -len(points) % (BLOCK - 1))).view(-1, BLOCK - 1)
    ties = torch.cat([torch.full((len(points), 1), 6.0), points], dim=1)
    return torch.cat([ties * 2.0**power for power in (-6, -1, 0, 5, 8)])


def _every_scale() -> torch.Tensor:
    """[n, 16] float32: largest values that give every scale, the midpoints between scales, and their neighbours."""
    scales = torch.tensor(reference.E4M3)
    wanted = torch.cat([scales, (scales[1:] + scales[:-1]) / 2]) * 6
    wanted = torch.cat([wanted, *(wanted.nextafter(torch.tensor(end)) for end in (-1.0, 1e9)), wanted * 1.01])
    blocks = torch.linspace(-1, 1, BLOCK).repeat(len(wanted), 1) * wanted[:, None]
    blocks[torch.arange(len(wanted)), torch.arange(len(wanted)) % BLOCK] = wanted
    return blocks


def _structured() -> torch.Tensor:
    return torch.cat([_every_tie(), _every_scale(), *(x.view(-1, BLOCK) for x in (special_values(), every_exponent()))])


TENSOR_SCALES = (None, 1.0, 0.0, 3e-4, 2.0**-149, 1e30, 2.0**-126, torch.inf, torch.nan)
CASES = [(None, "bf16"), (3e-4, "bf16"), (None, "fp16"), *((outer, "fp32") for outer in TENSOR_SCALES)]


def _scale(value: float | None) -> torch.Tensor | None:
    return None if value is None else torch.tensor([value])


def _on_device(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.to(DEVICE)


def _assert_all_agree(x: torch.Tensor, outer: torch.Tensor | None, seed: torch.Tensor | None = None) -> None:
    """Kernel, torch arithmetic and oracle agree in elements, scales and values."""
    random = None if seed is None else (arithmetic.random_words(seed, x.numel()) >> 8).view(x.shape)
    want = reference.quantize(x, outer, random)
    kernel = ops.quantize_nvfp4(x.to(DEVICE), _on_device(outer), _on_device(seed))
    for who, got in (("kernel", kernel), ("torch", arithmetic.quantize(x, outer, seed))):
        for part, one, other in zip(("elements", "scales"), got, want, strict=True):
            assert_same_bytes(one, other, f"{part} of the {who}, tensor scale {outer}")
    for dtype in (torch.bfloat16, torch.float32):
        values = reference.dequantize(*want, dtype, outer)
        by_kernel = ops.dequantize_nvfp4(want[0].to(DEVICE), want[1].to(DEVICE), _on_device(outer), dtype)
        by_torch = arithmetic.dequantize(*want, outer).to(dtype)
        torch.testing.assert_close(by_kernel.cpu(), values, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(by_torch, values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("outer", "dtype"), CASES)
def test_structured_blocks_are_the_references(outer: float | None, dtype: str) -> None:
    """Ties of elements and of scales, every exponent, zeros, subnormals, NaN, infinities; tensor scales of any kind."""
    x = _structured()
    if outer is not None:
        x = torch.cat([x[::9], _every_scale() * outer])  # where the tensor scale matters
    elif dtype != "fp32":
        x = x[::4]
    _assert_all_agree(x.to(DTYPES[dtype]), _scale(outer))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_million_random_values_are_the_references(dtype: torch.dtype) -> None:
    """Half of the values in each dtype; one and two levels of scales, rounded to nearest and stochastically."""
    x = random_bits(524_288, dtype, seed=3).view(-1, BLOCK)
    _assert_all_agree(x, _scale(1e-3) if dtype is torch.float32 else None)
    _assert_all_agree(x[::16], _scale(1e-3), torch.tensor([2**40 + 7]))
    _assert_all_agree(x[::16], None, torch.tensor([-5]))


def test_the_oracle_knows_the_format() -> None:
    """Values and codes written out by hand: ties to even, saturation, signs, the smallest scale, NaN."""
    row = [6.0, -0.0, 0.25, 0.75, 1.25, -1.75, 2.5, 3.5, 5.0, 0.26, 5.01, -6.0, 0.5, 1.0, 1.5, 2.0]
    packed, scale = reference.quantize(torch.tensor([row, [0.0] * 16, [1e-9] + [0.0] * 15, [torch.nan] + row[1:]]))
    assert scale.flatten().tolist() == [0x38, 0x08, 0x08, 0x7F]  # 1, 2**-6, 2**-6, NaN
    assert packed[0].tolist() == [0x87, 0x20, 0xC2, 0x64, 0x16, 0xF7, 0x21, 0x43]
    assert packed[1:].eq(0).all()
    decoded = reference.dequantize(packed, scale, torch.float32)
    assert decoded[0].tolist() == [6, 0, 0, 1, 1, -2, 2, 4, 4, 0.5, 6, -6, 0.5, 1, 1.5, 2]
    assert decoded[3].isnan().all()
    assert reference.E4M3[-1] == 448 and len(reference.E4M3) == 127
    # One level saturates at 448 * 6.
    packed, scale = reference.quantize(torch.tensor([[torch.inf, 3000.0, -torch.inf] + [0.0] * 13]))
    assert reference.dequantize(packed, scale, torch.float32)[0, :4].tolist() == [2688, 2688, -2688, 0]


def test_scales_of_many_matrices() -> None:
    """One scale per matrix of a batch; an empty batch; counts that do not divide."""
    sizes = torch.tensor([1.0, 1e3, 1e-3])[:, None, None]
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1)) * sizes
    outer = (x.abs().amax((1, 2), keepdim=True) / 2688).float()
    want = reference.quantize(x, outer)
    for got in (ops.quantize_nvfp4(x.to(DEVICE), outer.to(DEVICE)), arithmetic.quantize(x, outer)):
        for one, other in zip(got, want, strict=True):
            assert_same_bytes(one, other, "three matrices")
    values = reference.dequantize(*want, torch.float32, outer)
    on_device = (each.to(DEVICE) for each in got)
    assert torch.equal(ops.dequantize_nvfp4(*on_device, outer.to(DEVICE), torch.float32).cpu(), values)
    assert ops.quantize_nvfp4(x[:0].to(DEVICE))[0].shape == (0, 5, 32)
    with pytest.raises(InputError, match="divide the 20 blocks"):
        ops.quantize_nvfp4(x[0].to(DEVICE), outer.to(DEVICE))
    with pytest.raises(InputError, match="multiple of 16"):
        ops.quantize_nvfp4(x[0, :, :40].to(DEVICE))
    with pytest.raises(InputError, match="float64"):
        ops.quantize_nvfp4(x.double().to(DEVICE))


def test_philox_is_philox() -> None:
    """Random123's known answers, and Philox computed with Python's integers."""
    assert reference.philox(0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    for seed in (0, 1, 2**40 + 7, -5, 2**63 - 1):
        want = [word for counter in range(5) for word in reference.philox(seed % 2**64, counter)]
        assert arithmetic.random_words(torch.tensor([seed]), 19).tolist() == want[:19]


def test_stochastic_rounding_is_unbiased() -> None:
    """The mean of many draws is the value: within 5 standard errors for each, and for their sum."""
    draws = 4000
    x = torch.cat([torch.linspace(-6, 6, 62), torch.tensor([0.01, -0.01])]).view(4, BLOCK) * torch.tensor(
        [[0.37], [5.0], [60.0], [1e-3]]
    )
    many = x.repeat(draws, 1)
    packed, scale = ops.quantize_nvfp4(many.to(DEVICE), None, torch.tensor([11], device=DEVICE))
    values = ops.dequantize_nvfp4(packed, scale, None, torch.float32).cpu().view(draws, *x.shape).double()
    error = values.mean(0) - x.double()
    deviation = values.std(0)
    assert (error.abs() <= 5 * deviation / draws**0.5 + 1e-6 * x.abs()).all()
    assert error.sum().abs() <= 5 * deviation.square().sum().sqrt() / draws**0.5
    assert (deviation > 0).sum() > 50  # it is random
    # Rounding to nearest is biased, which this test would detect.
    nearest = ops.dequantize_nvfp4(*ops.quantize_nvfp4(x.to(DEVICE)), None, torch.float32).cpu().double()
    assert ((nearest - x).abs() > 5 * deviation / draws**0.5 + 1e-6 * x.abs()).any()


def test_seeds_are_streams() -> None:
    """The same seed gives the same bytes; another seed or another place gives other bytes."""
    x = torch.full((2, 512), 0.37)
    x[:, ::BLOCK] = 6.0
    first, again, other = (
        ops.quantize_nvfp4(x.to(DEVICE), None, torch.tensor([seed], device=DEVICE))[0] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("signs", [0, 0xFFFF, 0x5A3C])
def test_hadamard_is_the_references(signs: int) -> None:
    """Forward and inverse, in torch and inside the quantising kernel; sums of squares and products stay."""
    generator = torch.Generator().manual_seed(4)
    x, y = (torch.randn(40, 128, generator=generator) for _ in range(2))
    want = reference.hadamard(x, signs)
    got = hadamard(x, signs)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-6)
    torch.testing.assert_close(inverse_hadamard(got, signs), x, rtol=0, atol=2e-6)
    torch.testing.assert_close(got.square().sum(), x.square().sum())
    torch.testing.assert_close(got @ hadamard(y, signs).T, x @ y.T, rtol=1e-4, atol=1e-4)

    want = reference.quantize(got)
    outer = torch.tensor([1e-3])
    for made in (ops.quantize_nvfp4(x.to(DEVICE), None, None, signs), arithmetic.quantize(x, None, None, signs)):
        for one, other in zip(made, want, strict=True):
            assert_same_bytes(one, other, "transformed blocks")
    back = inverse_hadamard(reference.dequantize(*want, torch.float32), signs) * outer
    on_device = (part.to(DEVICE) for part in (*want, outer))
    assert torch.equal(ops.dequantize_nvfp4(*on_device, torch.float32, signs).cpu(), back)
    assert torch.equal(arithmetic.dequantize(*want, outer, signs), back)


def test_hadamard_with_random_signs_is_unbiased() -> None:
    """The mean over signs and stochastic draws is the value."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(1, BLOCK, generator=generator)
    x[0, 5] = 40.0
    draws, means = 60, []
    for seed in range(draws):
        signs = random_signs(generator)
        many = x.repeat(64, 1).to(DEVICE)
        quantized = ops.quantize_nvfp4(many, None, torch.tensor([seed], device=DEVICE), signs)
        means.append(ops.dequantize_nvfp4(*quantized, None, torch.float32, signs).cpu().double().mean(0))
    mean = torch.stack(means)
    assert ((mean.mean(0) - x).abs() <= 5 * mean.std(0) / draws**0.5 + 1e-6).all()


def test_hadamard_keeps_what_an_outlier_would_hide() -> None:
    """Next to an outlier small values become zero; transformed with random signs, most of their mean survives."""
    x = torch.linspace(0.2, 0.3, BLOCK).view(1, BLOCK)
    x[0, 5] = 12.0
    small = torch.arange(BLOCK) != 5

    def rounded(block: torch.Tensor) -> torch.Tensor:
        return reference.dequantize(*reference.quantize(block), torch.float32)

    assert rounded(x)[0, small].eq(0).all()
    generator = torch.Generator().manual_seed(6)
    masks = [random_signs(generator) for _ in range(300)]
    mean = torch.cat([inverse_hadamard(rounded(hadamard(x, signs)), signs) for signs in masks]).mean(0)
    assert ((mean - x).abs() < 0.7 * x)[0, small].all()


def test_random_signs_cover_all_lanes() -> None:
    """Each lane changes its sign in about half of the draws, and a generator repeats them."""
    generator = torch.Generator().manual_seed(0)
    masks = [random_signs(generator) for _ in range(400)]
    for lane in range(BLOCK):
        assert 140 < sum(mask >> lane & 1 for mask in masks) < 260
    assert masks[:3] == [random_signs(generator.manual_seed(0)), *(random_signs(generator) for _ in range(2))]
    with pytest.raises(InputError, match="65536"):
        hadamard(torch.zeros(16), 1 << 16)


def test_bits_of_edge_values() -> None:
    """The smallest and the largest float32, alone in a block, survive two levels of scales as well as possible."""
    for bits in (1, 0x00800000, 0x7F7FFFFF):
        x = torch.zeros(1, BLOCK)
        x[0, 3] = from_bits(torch.tensor(bits))
        outer = x.abs().max() / 2688
        values = arithmetic.dequantize(*arithmetic.quantize(x, outer), outer)
        assert values.isfinite().all()
        assert values[0, 0] == 0
        if bits == 0x7F7FFFFF:
            assert values[0, 3] > x[0, 3] * 0.99
