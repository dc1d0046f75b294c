"""MXFP8Tensor as a tensor: views, pieces, assignment to `data`, files; and infinities in modules."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import triton_ep.integrations.te as te
from tests.te import rule
from tests.te.rule import DEVICE
from triton_ep.errors import InputError
from triton_ep.ops import mxfp8

E4M3 = torch.float8_e4m3fn
pytestmark = [pytest.mark.plain, pytest.mark.filterwarnings("ignore:MXFP8 is emulated")]


def _randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def _quantised(x: torch.Tensor, swizzled: bool = False, **choices: bool) -> te.MXFP8Tensor:
    quantizer = te.MXFP8Quantizer(E4M3, **choices)
    quantizer.optimize_for_gemm = swizzled
    return quantizer(x)


def _same(seen: torch.Tensor, want: te.MXFP8Tensor) -> None:
    """Compare all parts of two tensors byte for byte."""
    assert isinstance(seen, te.MXFP8Tensor) and seen.shape == want.shape and seen.dtype == want.dtype
    ours, theirs = seen.get_metadata(), want.get_metadata()
    for name in ours.keys() - {"quantizer"}:
        same = torch.equal if isinstance(ours[name], torch.Tensor) else lambda a, b: a == b
        assert same(ours[name], theirs[name]), name


@pytest.mark.parametrize("shape", [(128, 96), (4, 32, 96), (2, -1, 96), (-1, 96)])
def test_views_share_bytes(shape: tuple[int, ...]) -> None:
    """Views share bytes if the last dimension stays, and pass gradients; another last dimension gives plain values."""
    tensor = _quantised(_randn(128, 96)).requires_grad_()
    for view in (tensor.view(shape), tensor.reshape(shape)):
        assert isinstance(view, te.MXFP8Tensor) and view.shape == torch.empty(128, 96).view(shape).shape
        assert view._rowwise_data.data_ptr() == tensor._rowwise_data.data_ptr()
        assert torch.equal(view.dequantize(), tensor.dequantize().view(shape))
    view.backward(_randn(*view.shape, seed=1))
    assert torch.equal(tensor.grad, _randn(*view.shape, seed=1).view(128, 96))
    other = tensor.detach().view(64, 192)
    assert type(other) is torch.Tensor and torch.equal(other, tensor.detach().dequantize().view(64, 192))
    with pytest.raises(InputError, match=r"shape is \[64, 192\]; of \[128, 96\] only the leading"):
        te.MXFP8Tensor.make_like(tensor, shape=(64, 192))
    assert te.MXFP8Tensor.make_like(tensor, dtype=torch.float32).dequantize().dtype == torch.float32


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("shape, chunks", [((128, 96), 2), ((96, 64), 3), ((4, 64, 32), 2), ((160, 32), 4)])
def test_pieces_along_the_first_dimension(shape: tuple[int, ...], chunks: int, swizzled: bool) -> None:
    """Pieces of whole blocks, a short last piece too, equal the quantised piece and own their memory."""
    x = _randn(*shape)
    tensor = _quantised(x, swizzled).requires_grad_()
    pieces = torch.chunk(tensor, chunks)
    if shape == (160, 32):
        assert len(pieces) == 4 and all(type(piece) is torch.Tensor for piece in pieces)  # 40 rows are not whole blocks
        pieces, chunks = tensor.split(64), 3
    assert len(pieces) == chunks
    for piece, values in zip(pieces, x.split(pieces[0].shape[0]), strict=True):
        _same(piece.detach(), _quantised(values.contiguous(), swizzled))
    before = tensor.detach().clone()
    pieces[0].detach().zero_()
    _same(tensor.detach(), before)
    sum(piece.dequantize().sum() for piece in tensor.split(pieces[0].shape[0])).backward()
    assert bool((tensor.grad == 1).all())
    for piece, values in zip(torch.chunk(tensor, 2, -1), tensor.detach().dequantize().chunk(2, -1), strict=True):
        assert type(piece) is torch.Tensor and torch.equal(piece, values)


def test_assigning_data() -> None:
    """Other values, shape and dtype are quantised as the tensor was; another MXFP8Tensor's bytes are kept."""
    parameter = torch.nn.Parameter(_quantised(_randn(32, 64), columnwise=False))
    values = _randn(64, 96, seed=1, dtype=torch.float16)
    parameter.data = values
    assert isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad
    _same(parameter.detach(), _quantised(values, columnwise=False))
    other = _quantised(_randn(32, 32, seed=2))
    parameter.data = other
    _same(parameter.detach(), other)
    assert parameter._columnwise_data is other._columnwise_data
    parameter.data.copy_(_randn(32, 32, seed=3))
    _same(parameter.detach(), _quantised(_randn(32, 32, seed=3)))
    with pytest.raises(InputError, match="divisible by 32"):
        parameter.data = _randn(33, 32)
    _same(parameter.detach(), _quantised(_randn(32, 32, seed=3)))


@pytest.mark.parametrize("swizzled", [False, True])
def test_files_keep_the_quantiser(swizzled: bool) -> None:
    """pickle, torch.save in both modes, deepcopy keep bytes, directions, tiles; each tensor has its own quantiser."""
    quantizer = te.MXFP8Quantizer(E4M3, columnwise=False, with_2d_quantization=True)
    quantizer.optimize_for_gemm = swizzled
    tensor = quantizer(_randn(64, 64))
    quantizer.set_usage(columnwise=True)  # for the next tensor
    file = io.BytesIO()
    torch.save(tensor, file)
    loaded = [pickle.loads(pickle.dumps(tensor)), copy.deepcopy(tensor)]
    loaded += [torch.load(io.BytesIO(file.getvalue()), weights_only=only) for only in (False, True)]
    for each in loaded:
        _same(each, tensor)
        made_by = each._get_quantizer()
        assert made_by.get_usages() == {"rowwise": True, "columnwise": False} and made_by.with_2d_quantization
        each.quantize_(_randn(64, 64, seed=1))
        quantizer.set_usage(columnwise=False)
        _same(each, quantizer(_randn(64, 64, seed=1)))
    bare = te.MXFP8TensorStorage(**{**tensor.get_metadata(), "quantizer": None})
    assert bare._get_quantizer().get_usages() == {"rowwise": True, "columnwise": False}
    assert [type(each) for each in quantizer.multi_quantize([_randn(32, 32)] * 2)] == [te.MXFP8Tensor] * 2


def test_parts_by_index_shared_memory_and_storage() -> None:
    """A partial assignment requantises the tensor; bytes move to shared memory; storage has views too."""
    tensor = _quantised(_randn(64, 64)).requires_grad_()
    values = tensor.detach().dequantize()
    tensor[3:5, ::2] = 7.0
    values[3:5, ::2] = 7.0
    _same(tensor.detach(), _quantised(values))
    if DEVICE == "cpu":
        assert tensor.share_memory_() is tensor
        parts = [part for part in tensor.get_metadata().values() if isinstance(part, torch.Tensor)]
        assert len(parts) == 4 and all(part.is_shared() for part in parts)
    storage = te.MXFP8TensorStorage(**tensor.get_metadata())
    for view in (storage.view(2, 32, 64), storage.view((2, -1, 64)), storage.view(torch.Size([2, 32, 64]))):
        assert view.size() == (2, 32, 64) and torch.equal(view.dequantize(), storage.dequantize().view(2, 32, 64))
    with pytest.raises(InputError, match=r"\[64, 64\] cannot be viewed as \[32, 128\]"):
        storage.view(32, 128)
    for wrong in (torch.tensor(1.0), [1.0], None):
        with pytest.raises(InputError):
            te.MXFP8Quantizer(E4M3)(wrong)


# --- infinities ---------------------------------------------------------------------------------------------


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b of float32 values, in which 448 * 2**127 is infinite."""
    return (a.float().double() @ b.float().double()).float()


def _agree(seen: torch.Tensor, exact: torch.Tensor) -> None:
    """The same infinities and NaNs, and finite values up to one rounding to bf16."""
    seen = seen.detach().float().cpu()
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(seen), kind(exact)), kind
    finite = exact.isfinite()
    torch.testing.assert_close(seen[finite], exact[finite], rtol=2**-8, atol=1e-4)


SPLITS = (33, 30, 7)


@pytest.mark.parametrize("where", ["x", "dy", "w"])
@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_an_infinity_spoils_what_it_touches_and_no_more(kind: str, where: str) -> None:
    """y, dx and dw are the products of the dequantised operands, infinities included; other groups are unaffected."""
    x, dy, splits = _randn(70, 64), _randn(70, 32, seed=1), (70,) if kind == "linear" else SPLITS
    make = te.Linear if kind == "linear" else lambda *sizes, **options: te.GroupedLinear(3, *sizes, **options)
    module = make(64, 32, bias=False, params_dtype=torch.bfloat16, device=DEVICE)
    weights = list(module.parameters())
    with torch.no_grad():
        for index, weight in enumerate(weights):
            weight.copy_(_randn(32, 64, seed=2 + index))
        {"x": x, "dy": dy, "w": weights[-2 % len(weights)]}[where][7 if where == "w" else 34, 5] = -torch.inf
    x.requires_grad_()
    with te.autocast():
        y = module(x) if kind == "linear" else module(x, list(splits))
    y.backward(dy)
    parts = list(zip(x.detach().split(splits), dy.split(splits), weights, strict=True))
    _agree(y, torch.cat([_product(rule.along_rows(a), rule.along_rows(w.detach()).t()) for a, _, w in parts]))
    _agree(x.grad, torch.cat([_product(rule.along_rows(d), rule.along_columns(w.detach())) for _, d, w in parts]))
    for a, d, w in parts:
        _agree(w.grad, _product(rule.along_columns(d).t(), rule.along_columns(a)))
    spoilt = [not bool(w.grad.isfinite().all()) for w in weights]
    assert spoilt == [where != "w" and (kind == "linear" or index == 1) for index in range(len(weights))]


@pytest.mark.parametrize("elem_dtype", [E4M3, torch.float8_e5m2])
def test_kernels_follow_the_rule(elem_dtype: torch.dtype) -> None:
    """Blocks with infinities, NaNs and both, in short blocks, in a group of one row, and past the last group."""
    x = torch.randn(103, 64, generator=torch.Generator().manual_seed(0)) * torch.exp2(
        torch.randint(-10, 10, (103, 64), generator=torch.Generator().manual_seed(1)).float()
    )
    ends = [33, 33, 34, 96]
    for row, column in ((3, 5), (32, 3), (33, 7), (41, 9), (51, 11), (95, 1), (100, 2)):
        x[row, column] = torch.inf if row % 2 else -torch.inf
    x[40, 9], x[60, 20], x[50, 11] = torch.nan, torch.nan, torch.finfo(torch.bfloat16).max
    x = x.to(DEVICE, torch.bfloat16)
    offsets = torch.tensor([0, *ends], dtype=torch.int32, device=DEVICE)
    both = mxfp8.quantize_both(x, offsets, elem_dtype, mxfp8.RCEIL_SATFINITE)
    alone = [
        *mxfp8.quantize_rows(x, elem_dtype, mxfp8.RCEIL_SATFINITE),
        *mxfp8.quantize_columns(x, offsets, elem_dtype, mxfp8.RCEIL_SATFINITE),
    ]
    for one, other in zip(both, alone, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    by_row, row_scale, data, scale = (part.view(torch.uint8).cpu() for part in both)
    for got, want in zip((by_row, row_scale), rule.quantize(x.cpu(), elem_dtype), strict=True):
        assert torch.equal(got, want)
    block = 0
    for first, end in zip([0, *ends], ends, strict=False):
        values = torch.nn.functional.pad(x[first:end].cpu(), (0, 0, 0, (first - end) % 32))
        want_data, want_scale = rule.quantize(values.t(), elem_dtype)
        assert torch.equal(data[first:end], want_data.t()[: end - first])
        assert torch.equal(scale[block : block + want_scale.shape[1]], want_scale.t())
        block += want_scale.shape[1]
    assert not data[96:].any() and not scale[block:].any() and bool((scale[:block] == 254).any())


# --- subclasses, and the dtype of storage ---------------------------------------------------------------------


class _Named(te.MXFP8Tensor):
    """A subclass as frameworks define: a name for their own tensors."""


def test_a_subclass_stays_one() -> None:
    """detach, clone, views, splits, copies and files keep the subclass; `torch.nn.Parameter` demands it of detach."""
    plain = _quantised(_randn(64, 64))
    tensor = _Named(plain.shape, plain.dtype, **plain.get_metadata())
    parameter = torch.nn.Parameter(tensor)
    made = [
        tensor.detach(),
        tensor.clone(),
        tensor.view(2, 32, 64),
        tensor.to(DEVICE),
        tensor.to("cpu"),
        *tensor.split(32),
    ]
    made += [parameter.detach(), parameter.data, copy.deepcopy(parameter), pickle.loads(pickle.dumps(tensor))]
    made += [_Named.make_like(tensor)]
    names, context = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}
    made += [_Named.__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())]
    assert [type(each) for each in made] == [_Named] * len(made)
    _same(made[0], plain)
    assert type(plain.detach()) is te.MXFP8Tensor


def test_a_tensor_of_given_bytes() -> None:
    """`create_tensor_from_data` wraps elements and scales, row by row, without a copy."""
    quantizer = te.MXFP8Quantizer(te.DType.kFloat8E4M3, columnwise=False)
    whole = quantizer(torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16))
    data, scale = whole._rowwise_data, whole._rowwise_scale_inv
    made = quantizer.create_tensor_from_data(data, scale, torch.bfloat16)
    assert isinstance(made, te.MXFP8Tensor) and made.dtype == torch.bfloat16
    assert made._rowwise_data.data_ptr() == data.data_ptr()
    assert torch.equal(made.dequantize(), whole.dequantize())


def test_storage_knows_what_it_stands_for() -> None:
    """`fake_dtype` is the dtype of `dequantize`; views keep it, and a quantiser of internal tensors sets it."""
    tensor = _quantised(_randn(64, 64))
    parts = tensor.get_metadata()
    assert te.MXFP8TensorStorage(**parts).dequantize().dtype == torch.float32
    half = te.MXFP8TensorStorage(**{**parts, "fake_dtype": torch.float16})
    assert te.MXFP8TensorStorage(**half.get_metadata())._dtype == torch.float16
    assert half.dequantize().dtype == half._dtype == half.to_mxtensor().dtype == torch.float16
    assert half.view(2, 32, 64).dequantize().dtype == torch.float16
    assert half.dequantize(dtype=torch.float32).dtype == torch.float32
    quantizer = te.MXFP8Quantizer(E4M3)
    quantizer.internal = True
    internal = quantizer(_randn(64, 64))
    assert type(internal) is te.MXFP8TensorStorage and internal._dtype == torch.bfloat16
    same = te.MXFP8Tensor(tensor.shape, torch.bfloat16, **{**parts, "fake_dtype": torch.bfloat16})
    assert torch.equal(same.dequantize(), tensor.dequantize())
    with pytest.raises(InputError, match="fake_dtype is 'bf16'"):
        te.MXFP8TensorStorage(**{**parts, "fake_dtype": "bf16"})
    with pytest.raises(InputError, match=r"fake_dtype is torch\.float16"):
        _Named(tensor.shape, torch.bfloat16, **{**parts, "fake_dtype": torch.float16})
