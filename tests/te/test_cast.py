"""The cast to MXFP8 and back: scales, elements and layouts, bit for bit against tests/te/rule.py."""

from __future__ import annotations

import pytest
import torch

import triton_ep.integrations.te as te
from tests.te import rule
from tests.te.rule import DEVICE
from triton_ep import MXTensor
from triton_ep.errors import InputError

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
pytestmark = pytest.mark.filterwarnings("ignore:MXFP8 is emulated")


def _quantised(x: torch.Tensor, elem_dtype: torch.dtype = E4M3, **choices: bool) -> te.MXFP8Tensor:
    return te.MXFP8Quantizer(elem_dtype, **choices)(x.to(DEVICE))


def _ordinary(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Values whose blocks have different scales, in both directions."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-6, 7, (rows // 32, columns // 32), generator=generator)
    tiles = (2.0 ** exponents.float()).repeat_interleave(32, 0).repeat_interleave(32, 1)
    return (torch.randn(rows, columns, generator=generator) * tiles).bfloat16()


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("elem_dtype", [E4M3, E5M2])
def test_scale_of_every_bf16_amax(elem_dtype: torch.dtype, columnwise: bool) -> None:
    """All 32768 magnitudes of bf16 as a block's largest: zeros, subnormals, normals, infinity and NaN."""
    amax = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    signs = torch.where(torch.arange(2**15) % 3 == 0, -1.0, 1.0).bfloat16()
    x = torch.zeros(2**15, 32, dtype=torch.bfloat16)
    x[torch.arange(2**15), torch.arange(2**15) % 32] = amax * signs
    if columnwise:
        # 1024 columns of 32 blocks each.
        x = x.view(1024, 32, 32).permute(1, 2, 0).reshape(1024, 1024)
    quantised = _quantised(x, elem_dtype, rowwise=not columnwise, columnwise=columnwise)
    data, scale = (part.cpu() for part in quantised.compact(columnwise))
    if columnwise:
        scale = scale.t().reshape(-1)
        data = data.view(32, 32, 1024).permute(2, 0, 1).reshape(2**15, 32)
    expected = rule.scale_bytes(amax, elem_dtype)
    assert torch.equal(scale.flatten().long(), expected)

    # The element of the largest value, which does not depend on its neighbours.
    seen = data[torch.arange(2**15), torch.arange(2**15) % 32].view(elem_dtype).double()
    want = rule.elements((amax * signs).double() * 2.0 ** (127 - expected).double(), elem_dtype)
    assert seen[expected == 255].isnan().all()
    assert torch.equal(seen[expected < 255], want[expected < 255])


@pytest.mark.parametrize("elem_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_cast_mxfp8(dtype: torch.dtype, elem_dtype: torch.dtype) -> None:
    """Elements and scales of both directions equal the rule's, also in blocks of zeros, subnormals, Inf and NaN."""
    x = _ordinary(64, 96).to(dtype)
    x[0, :32] = 0.0
    x[1, :32] = -0.0
    x[2, 5] = torch.inf
    x[3, 40], x[3, 41] = -torch.inf, torch.finfo(dtype).max
    x[4, 70] = torch.nan
    x[5, 70], x[5, 71] = torch.nan, torch.inf
    x[6, :32] = torch.finfo(dtype).smallest_normal / 16
    x[7, 32:64] = torch.finfo(dtype).max
    quantised = _quantised(x, elem_dtype)
    for columnwise, values in ((False, x), (True, x.t())):
        data, scale = (part.cpu() for part in quantised.compact(columnwise))
        want_data, want_scale = rule.quantize(values, elem_dtype)
        assert torch.equal(scale.t() if columnwise else scale, want_scale)
        assert torch.equal(data.t() if columnwise else data, want_data)
    seen = quantised.dequantize(dtype=torch.float32).cpu()
    exact = rule.dequantize(*rule.quantize(x, elem_dtype), elem_dtype).float()
    assert torch.equal(seen.nan_to_num(nan=7.0), exact.nan_to_num(nan=7.0))


@pytest.mark.parametrize("shape", [(32, 32), (128, 128), (64, 160), (2, 96, 64), (256, 288)])
def test_layouts_of_scales(shape: tuple[int, ...]) -> None:
    """Compact scales are padded with zeros to 128 x 4 and 4 x 128; swizzled bytes are where the formula puts them."""
    rows, columns = torch.Size(shape[:-1]).numel(), shape[-1]
    x = _ordinary(rows, columns).view(shape)
    compact = _quantised(x)
    quantizer = te.MXFP8Quantizer(E4M3)
    quantizer.optimize_for_gemm = True
    swizzled = quantizer(x.to(DEVICE))
    assert not compact._with_gemm_swizzled_scales and swizzled._with_gemm_swizzled_scales
    flat = x.view(rows, columns)
    up = te.layouts.round_up
    for columnwise in (False, True):
        name = "columnwise" if columnwise else "rowwise"
        want = rule.quantize(flat.t() if columnwise else flat)[1]
        padded = torch.zeros(up(want.shape[0], 128), up(want.shape[1], 4), dtype=torch.uint8)
        padded[: want.shape[0], : want.shape[1]] = want
        scale = getattr(compact, f"_{name}_scale_inv").cpu()
        assert scale.dtype == torch.uint8 and scale.is_contiguous()
        assert torch.equal(scale, padded.t() if columnwise else padded)
        assert getattr(compact, f"_{name}_data").shape == shape
        in_order = getattr(swizzled, f"_{name}_scale_inv").cpu()
        assert in_order.shape == scale.shape
        i, j = torch.arange(padded.shape[0]).unsqueeze(1), torch.arange(padded.shape[1])
        assert torch.equal(in_order.flatten()[rule.swizzled_index(i, j, padded.shape[1])], padded)
        assert torch.equal(te.unswizzle(in_order, columnwise), scale)
    assert torch.equal(swizzled.dequantize(), compact.dequantize())


def test_requantisation_keeps_values() -> None:
    """Quantising again along rows keeps the values, although bytes may change; along columns they stay close."""
    x = _ordinary(128, 256, seed=3)
    once = _quantised(x).dequantize()
    again = _quantised(once)
    assert torch.equal(again.dequantize(), once)
    by_column = _quantised(once, rowwise=False)
    assert rule.snr(x, by_column.dequantize()) > 26


def test_one_scale_per_tile() -> None:
    """with_2d_quantization: both directions have the same elements, scaled by the largest of 32 x 32 values."""
    x = _ordinary(64, 96)
    x[40, 70] = torch.inf
    quantised = _quantised(x, with_2d_quantization=True)
    (rows, row_scale), (columns, column_scale) = quantised.compact(False), quantised.compact(True)
    assert torch.equal(rows, columns)
    tiles = x.view(2, 32, 3, 32).abs().amax((1, 3))
    want = rule.scale_bytes(tiles, E4M3).to(torch.uint8)
    assert torch.equal(row_scale.cpu(), want.repeat_interleave(32, 0))
    assert torch.equal(column_scale.cpu(), want.repeat_interleave(32, 1))


def test_extreme_scale_bytes_dequantise() -> None:
    """Byte 0 is 2^-127, byte 255 NaN, 254 the largest power, for any elements."""
    data = torch.full((32, 32), 0x38, dtype=torch.uint8)  # 1.0
    for byte, want in ((0, 2.0**-127), (1, 2.0**-126), (127, 1.0), (254, 2.0**127), (255, float("nan"))):
        scale = torch.zeros(128, 4, dtype=torch.uint8)
        scale[:32, 0] = byte
        tensor = te.MXFP8TensorStorage(data.to(DEVICE), scale.to(DEVICE), None, None, E4M3)
        exact = torch.full((32, 32), want)
        torch.testing.assert_close(tensor.dequantize().cpu(), exact, rtol=0, atol=0, equal_nan=True)


def test_update_usage_only_drops() -> None:
    """A direction can be dropped but not requested again; the last one stays."""
    tensor = _quantised(_ordinary(32, 64))
    values = _quantised(_ordinary(32, 64), rowwise=False).dequantize()
    tensor.update_usage()
    tensor.update_usage(rowwise_usage=True, columnwise_usage=True)
    tensor.update_usage(rowwise_usage=False)
    assert tensor._rowwise_data is None and tensor.get_usages() == {"rowwise": False, "columnwise": True}
    assert torch.equal(tensor.dequantize(), values)
    with pytest.raises(RuntimeError, match="Requested row-wise usage, but MXFP8Tensor is missing row-scaled FP8 data"):
        tensor.update_usage(rowwise_usage=True)
    with pytest.raises(RuntimeError, match="last direction"):
        tensor.update_usage(columnwise_usage=False)


def test_bridge_to_mxtensor_shares_memory() -> None:
    """Elements and compact scales share bytes with the MXTensor, in both directions, and back."""
    tensor = _quantised(_ordinary(128, 256))
    for columnwise in (False, True):
        name = "columnwise" if columnwise else "rowwise"
        mx = tensor.to_mxtensor(columnwise=columnwise)
        assert isinstance(mx, MXTensor) and mx.dtype == torch.bfloat16
        assert mx.qdata.data_ptr() == getattr(tensor, f"_{name}_data").data_ptr()
        assert mx.scale.data_ptr() == getattr(tensor, f"_{name}_scale_inv").data_ptr()
        only = te.MXFP8Quantizer(E4M3, rowwise=not columnwise, columnwise=columnwise)(_ordinary(128, 256).to(DEVICE))
        assert torch.equal(mx.dequantize(), only.dequantize())
    x = MXTensor.to_mx(_ordinary(128, 128).to(DEVICE))
    back = te.MXFP8Tensor.from_mxtensor(x)
    assert back._rowwise_data.data_ptr() == x.qdata.data_ptr()
    assert back._rowwise_scale_inv.data_ptr() == x.scale.data_ptr()
    assert torch.equal(back.dequantize(), x.dequantize())
    narrow = MXTensor.to_mx(_ordinary(32, 64).to(DEVICE))
    assert torch.equal(te.MXFP8Tensor.from_mxtensor(narrow).dequantize(), narrow.dequantize())


def test_quantiser_interface() -> None:
    """out, make_empty, update with a flag, internal, usages, straight-through gradients, and refusals."""
    quantizer = te.MXFP8Quantizer(te.DType.kFloat8E4M3)
    x = _ordinary(64, 64).to(DEVICE)
    out = quantizer.make_empty((64, 64), dtype=torch.bfloat16, device=DEVICE)
    assert quantizer(x, out=out) is out and torch.equal(out.dequantize(), quantizer(x).dequantize())
    quantizer.update_quantized(2 * x, out, noop_flag=torch.ones(1, device=DEVICE))
    assert torch.equal(out.dequantize(), quantizer(x).dequantize())
    quantizer.update_quantized(2 * x, out, noop_flag=torch.zeros(1, device=DEVICE))
    assert torch.equal(out.dequantize(), 2 * quantizer(x).dequantize())

    quantizer.set_usage(columnwise=False)
    quantizer.internal = True
    storage = quantizer.copy().quantize(x)
    assert not isinstance(storage, torch.Tensor) and storage._columnwise_data is None
    quantizer.internal = False

    leaf = x.clone().requires_grad_()
    grad = torch.randn_like(x)
    quantizer(leaf).dequantize().backward(grad)
    assert torch.equal(leaf.grad, grad)

    assert quantizer.is_quantizable(x) and not quantizer.is_quantizable(x[:33])
    with pytest.raises(AssertionError, match=r"Incorrect shape \(33, 64\) for MXFP8. Tensor dims must be divisible by"):
        quantizer(_ordinary(64, 64)[:33].to(DEVICE))
    with pytest.raises(InputError, match="already"):
        quantizer(out)
    with pytest.raises(InputError, match="int32"):
        quantizer(torch.zeros(32, 32, dtype=torch.int32, device=DEVICE))
    with pytest.raises(InputError, match="fp8_dtype"):
        te.MXFP8Quantizer(torch.float16)


def test_operations_act_on_values() -> None:
    """Operations use dequantised values; in-place results are quantised again; copies and moves keep bytes."""
    tensor = _quantised(_ordinary(64, 64))
    values = tensor.dequantize()
    assert torch.equal(tensor + 1, values + 1) and type(tensor + 1) is torch.Tensor
    assert torch.equal(tensor.detach().clone().dequantize(), values)
    for plain in (tensor.to(torch.float32), tensor.float(), tensor.to(torch.float64), tensor.half(), tensor.bfloat16()):
        assert type(plain) is torch.Tensor and torch.equal(plain, values.to(plain.dtype))
    other = tensor.clone()
    other.mul_(4)
    assert isinstance(other, te.MXFP8Tensor) and torch.equal(other.dequantize(), 4 * values)
    other.copy_(_ordinary(64, 64, seed=1).to(DEVICE))
    assert torch.equal(other.dequantize(), _quantised(_ordinary(64, 64, seed=1)).dequantize())
    other.copy_(tensor)
    assert torch.equal(other._columnwise_data, tensor._columnwise_data)
