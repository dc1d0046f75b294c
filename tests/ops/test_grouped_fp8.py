"""Grouped GEMM on fp8 tensor cores: scales made equal along 128 of K, and scales per 32 on hardware that has them."""

from __future__ import annotations

import pytest
import torch

from tests.combinations import combinations
from tests.ops.grouped import CPU_GROUPS, DEVICE, check, ends_of
from triton_ep.errors import InputError
from triton_ep.ops.grouped_fp8 import EqualScales, equalize_scales, fp8_gemm, scaled_gemm
from triton_ep.ops.row_scales import RowScaled, rebase_rows
from triton_ep.reference import grouped_gemm as oracle
from triton_ep.reference import mxfp8

FP8_STEPS = 0.0 if DEVICE == "cpu" else 2.0**-9
"""Error of a product in units: on Hopper the sums inside a product keep about 14 bits."""


def _mx(*shape: int, spread: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements and scale bytes of random values whose 32-blocks differ by up to 2^(2 * spread)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape[:-1], shape[-1] // 32, 32, generator=generator)
    exponent = torch.randint(-spread, spread + 1, x.shape[:-1], generator=generator)
    qdata, scale = mxfp8.quantize((x * 2.0 ** exponent[..., None]).reshape(shape))
    return qdata.to(DEVICE), scale.to(DEVICE)


def _values(qdata: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return mxfp8.dequantize(qdata.cpu(), scale.cpu(), torch.float32).double().to(DEVICE)


def _equal_values(equal: EqualScales) -> torch.Tensor:
    """Float64 values, computed from the fields alone."""
    k = equal.qdata.shape[-1]
    scale = equal.scale.transpose(-2, -1).double().repeat_interleave(128, -1)[..., :k]
    return equal.qdata.double() * scale


@pytest.mark.parametrize("shape", [(5, 128), (40, 320), (3, 33, 96)], ids=str)
@pytest.mark.parametrize("spread", [0, 3, 12])
def test_equal_scales(shape: tuple[int, ...], spread: int) -> None:
    """Only values that become subnormal change, by at most half the smallest step of the new scale."""
    qdata, scale = _mx(*shape, spread=spread)
    equal = equalize_scales(qdata, scale)
    steps = -(-shape[-1] // 128)
    assert equal.scale.shape == (*shape[:-2], steps, shape[-2])
    padded = torch.nn.functional.pad(scale, (0, steps * 4 - scale.shape[-1]))
    largest = padded.unflatten(-1, (steps, 4)).amax(-1)
    assert torch.equal(equal.scale.transpose(-2, -1).double(), (largest.double() - 127).exp2())
    smallest = (largest.double() - 127 - 10).exp2().repeat_interleave(128, -1)[..., : shape[-1]]
    old, new = _values(qdata, scale), _equal_values(equal)
    assert bool(((new - old).abs() <= smallest).all())
    normal = old.abs() >= smallest * 16  # 2^-6 of the scale
    assert torch.equal(new[normal], old[normal])
    torch.testing.assert_close(equal.dequantize().double(), new, rtol=0, atol=0)


def test_equal_scales_stay_as_they_are() -> None:
    """Values with equal scales, also extreme ones, keep every bit; one NaN block makes its 128 values NaN."""
    qdata, _ = _mx(4, 256)
    for byte in (0, 1, 127, 254):
        equal = equalize_scales(qdata, torch.full((4, 8), byte, dtype=torch.uint8, device=DEVICE))
        assert torch.equal(equal.qdata.view(torch.uint8), qdata.view(torch.uint8))
        assert equal.scale.unique().tolist() == [2.0 ** (byte - 127)]
    scale = torch.full((4, 8), 120, dtype=torch.uint8, device=DEVICE)
    scale[1, 6] = 255
    equal = equalize_scales(qdata, scale)
    wanted = torch.full((2, 4), 2.0**-7, device=DEVICE)
    wanted[1, 1] = torch.nan
    torch.testing.assert_close(equal.scale, wanted, rtol=0, atol=0, equal_nan=True)
    values = equal.dequantize()
    assert values[1, 128:].isnan().all() and not values[:, :128].isnan().any()


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("sizes", CPU_GROUPS, ids=str)
def test_equal_scales_product(sizes: tuple[int, ...], tma: bool) -> None:
    """The float64 product of the equalised operands, up to accumulation and one rounding; rows past them are zero."""
    a = equalize_scales(*_mx(sum(sizes) + 3, 320))
    w = equalize_scales(*_mx(len(sizes), 72, 320, seed=1))
    ends = ends_of(sizes)
    left, right = _equal_values(a), _equal_values(w).transpose(1, 2)
    out = fp8_gemm(a, w, ends, tma=tma)
    unit = oracle.magnitude(left, right, ends)
    check(out, oracle.grouped_gemm(left, right, ends), unit, terms=320, steps=FP8_STEPS)
    assert not out[ends[-1] :].any()


def _row_values(x: RowScaled) -> torch.Tensor:
    return x.qdata.double() * x.scale.double().unsqueeze(-1)


@pytest.mark.parametrize(
    ("sizes", "tma", "dtype"),
    combinations(
        [(sizes,) for sizes in (*CPU_GROUPS[1:], (150, 0, 90))],
        [False, True],
        [torch.bfloat16, torch.float16, torch.float32],
        # The dtype concerns only how a tile leaves, by pointers or in a box.
        on_cpu=lambda sizes, tma, dtype: dtype == torch.bfloat16 or sizes == CPU_GROUPS[-1],
    ),
)
def test_row_scales_product(sizes: tuple[int, ...], tma: bool, dtype: torch.dtype) -> None:
    """The float64 product of operands with one scale per row; rows past the groups are zero, whatever their scales."""
    a, w = rebase_rows(*_mx(sum(sizes) + 3, 160)), rebase_rows(*_mx(len(sizes), 72, 160, seed=1))
    a.scale[-3:] = torch.nan
    ends = ends_of(sizes)
    left, right = _row_values(a), _row_values(w).transpose(1, 2)
    out = fp8_gemm(a, w, ends, out_dtype=dtype, tma=tma)
    assert out.dtype == dtype
    starts = torch.nn.functional.pad(ends, (1, 0))
    for given in (starts, starts.long(), ends.long()):
        assert torch.equal(fp8_gemm(a, w, given, out_dtype=dtype, tma=tma), out)
    used = int(ends[-1])
    unit = oracle.magnitude(left[:used], right, ends)
    check(out[:used], oracle.grouped_gemm(left[:used], right, ends), unit, terms=160, steps=FP8_STEPS)
    assert not out[used:].any()


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("sizes", CPU_GROUPS, ids=str)
def test_scaled_product(sizes: tuple[int, ...], tma: bool) -> None:
    """The float64 product of the operands; rows past the groups are zero."""
    if DEVICE == "cuda" and torch.cuda.get_device_capability()[0] < 10:
        pytest.skip("needs tensor cores that scale: sm_100")
    a, w = _mx(sum(sizes) + 3, 160), _mx(len(sizes), 72, 160, seed=1)
    ends = ends_of(sizes)
    left, right = _values(*a), _values(*w).transpose(1, 2)
    out = scaled_gemm(a, w, ends, tma=tma)
    check(out, oracle.grouped_gemm(left, right, ends), oracle.magnitude(left, right, ends), terms=160)
    assert not out[ends[-1] :].any()


def test_scales_far_apart() -> None:
    """The product of two scales may exceed float32 although the result does not; NaN stays in its row."""
    qdata, scale = _mx(6, 128, spread=0)
    w_qdata, w_scale = _mx(1, 8, 128, spread=0, seed=1)
    tiny, huge = scale - 100, w_scale + 100
    tiny[2, 1] = 255
    ends = ends_of((6,))
    out = fp8_gemm(equalize_scales(qdata, tiny), equalize_scales(w_qdata, huge), ends)
    assert out[2].isnan().all()
    a, w = equalize_scales(qdata, scale), equalize_scales(w_qdata, w_scale)
    kept = [0, 1, 3, 4, 5]
    assert torch.equal(out[kept], fp8_gemm(a, w, ends)[kept])


def test_errors() -> None:
    """Operands that do not fit each other are refused with both numbers."""
    a, w = _mx(4, 64), _mx(1, 8, 96)
    ends = ends_of((4,))
    with pytest.raises(InputError, match="K = 64, the weights K = 96"):
        fp8_gemm(equalize_scales(*a), equalize_scales(*w), ends)
    with pytest.raises(InputError, match="scales"):
        equalize_scales(a[0], w[1])
    with pytest.raises(InputError, match="3-D"):
        scaled_gemm(a, a, ends)
    with pytest.raises(InputError, match="weights"):
        fp8_gemm(equalize_scales(*a), equalize_scales(*a), ends)
    with pytest.raises(InputError, match="scales of one kind"):
        fp8_gemm(equalize_scales(*a), rebase_rows(*_mx(1, 8, 64)), ends)
    with pytest.raises(InputError, match="out_dtype"):
        scaled_gemm(a, _mx(1, 8, 64), ends, out_dtype=torch.float64)
