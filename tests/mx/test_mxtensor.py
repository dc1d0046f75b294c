"""MXTensor: torch operations on it, with the CPU's arithmetic and a GPU's kernels alike."""

import copy
import io
import operator
import pickle
from typing import Any

import pytest
import torch

import triton_ep
from tests.mx.blocks import DEVICE, DTYPES, ELEMENTS, EVERY, MODES, assert_same_bytes, structured
from triton_ep import MXTensor
from triton_ep.errors import InputError
from triton_ep.mx import tensor as mx_tensor
from triton_ep.mx.swizzle import to_blocked
from triton_ep.reference import mxfp8 as reference

E4M3 = torch.float8_e4m3fn


def _x(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Values that differ from each other, whose blocks differ in scale."""
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(shape, generator=generator) * torch.logspace(-3, 3, shape[-1])
    return x.to(dtype).to(DEVICE)


def _assert_is(result: Any, expected: torch.Tensor) -> None:
    """An MXTensor that represents exactly these values, with scales of the right shape."""
    assert isinstance(result, MXTensor)
    assert (result.shape, result.dtype, result.device) == (expected.shape, expected.dtype, expected.device)
    assert result.is_contiguous() == expected.is_contiguous() == result.qdata.is_contiguous()
    shape = list(result.shape)
    shape[result.block_dim] //= result.block_size
    assert list(result.scale.shape) == shape
    assert torch.equal(result.dequantize(), expected)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("elem", ELEMENTS)
def test_to_mx_is_the_reference(elem: str, mode: str, dtype: torch.dtype) -> None:
    """Bytes of elements and scales, and the dequantised values, for every structured block."""
    x = structured(elem, dtype)
    mx = MXTensor.to_mx(x.to(DEVICE), ELEMENTS[elem], scaling_mode=mode)
    codes, scale = reference.quantize(x, ELEMENTS[elem], mode)
    assert_same_bytes(mx.qdata, codes, "elements")
    assert_same_bytes(mx.scale.view(torch.uint8), scale, "scales")
    assert (mx.dtype, mx.shape, mx.elem_dtype, mx.block_size) == (dtype, x.shape, ELEMENTS[elem], 32)
    for wide in (None, torch.float32):
        expected = reference.dequantize(codes, scale, wide or dtype)
        torch.testing.assert_close(mx.dequantize(wide).cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_public_name() -> None:
    """triton_ep.MXTensor is this class."""
    assert triton_ep.MXTensor is MXTensor
    assert "torch.float8_e4m3fn in blocks of 32" in repr(MXTensor.to_mx(_x(2, 64)))


@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 64), (0, 64), (3, 0), (2, 0, 32)])
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    """Blocks lie along the last dimension."""
    mx = MXTensor.to_mx(_x(*shape))
    assert mx.scale.shape == (*shape[:-1], shape[-1] // 32)
    assert mx.dequantize().shape == shape


MOVES = {
    "detach": lambda x: x.detach(),
    "clone": lambda x: x.clone(),
    "t": lambda x: x[0].t(),
    "t_contiguous": lambda x: x[0].t().contiguous(),
    "twice_t": lambda x: x[0].t().t(),
    "transpose": lambda x: x.transpose(1, -1),
    "transpose_rows": lambda x: x.transpose(0, 1),
    "mT": lambda x: x.mT,
    "permute": lambda x: x.permute(2, 0, 1),
    "view": lambda x: x.view(-1, 128),
    "reshape": lambda x: x.reshape(2, 5, 2, 128),
    "reshape_of_transposed_rows": lambda x: x.transpose(0, 1).reshape(-1, 128),
    "flatten": lambda x: x.flatten(0, 1),
    "view_of_whole_blocks": lambda x: x.view(2, 20, 64),
    "flatten_blocks": lambda x: x.flatten(),
    "unflatten": lambda x: x.unflatten(1, (5, 2)),
    "unsqueeze_first": lambda x: x.unsqueeze(0),
    "unsqueeze_middle": lambda x: x[:, None],
    "unsqueeze_last": lambda x: x.unsqueeze(-1),
    "squeeze": lambda x: x[:1].squeeze(0),
    "select": lambda x: x[1],
    "select_row": lambda x: x[:, 3],
    "select_behind_blocks": lambda x: x.mT[..., 2],
    "slice": lambda x: x[:, 2:7],
    "slice_with_step": lambda x: x[:, ::3],
    "slice_of_whole_blocks": lambda x: x[..., 32:96],
    "slice_to_the_end": lambda x: x[..., 96:],
    "slice_of_t": lambda x: x[0].t()[64:],
    "narrow": lambda x: x.narrow(1, 2, 3),
    "index": lambda x: x[0][torch.tensor([3, 3, -1], device=x.device)],
    "index_dim_1": lambda x: x[:, torch.tensor([[3], [4]], device=x.device)],
    "mask": lambda x: x[0][torch.arange(10, device=x.device) % 3 == 0],
    "index_select": lambda x: x.index_select(1, torch.tensor([9, 0], device=x.device)),
    "split": lambda x: x.split(4, 1)[2],
    "split_sizes": lambda x: x.split([3, 0, 7], dim=1)[2],
    "chunk": lambda x: x.chunk(3, dim=1)[-1],
    "split_blocks": lambda x: x.split(64, -1)[1],
    "unbind": lambda x: x.unbind(0)[1],
    "cat": lambda x: torch.cat([x, x[:1]]),
    "cat_columns": lambda x: torch.cat([x, x[..., :32]], dim=-1),
    "cat_one": lambda x: torch.cat([x]),
}


@pytest.mark.parametrize("elem", EVERY)
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_moves_keep_the_format(move: Any, elem: str) -> None:
    """The result is an MXTensor with the same rows as the dequantised tensor's result, bit for bit."""
    mx = MXTensor.to_mx(_x(2, 10, 128), EVERY[elem])
    _assert_is(move(mx), move(mx.dequantize()))


VALUES = {
    "matmul": lambda x, w: x @ w,
    "matmul_from_the_left": lambda x, w: w.t() @ x.t(),
    "linear": lambda x, w: torch.nn.functional.linear(x, w.t()),
    "addmm": lambda x, w: torch.addmm(w.sum(0), x, w),
    "bmm": lambda x, w: torch.bmm(x[None], w[None]),
    "sum": lambda x, w: x.sum(),
    "sum_of_rows": lambda x, w: x.sum(0),
    "mean": lambda x, w: x.mean(-1, keepdim=True),
    "add": lambda x, w: x + x,
    "scale": lambda x, w: 2 * x,
    "equal": lambda x, w: x == x,
    "norm": lambda x, w: torch.linalg.vector_norm(x),
    "isnan": lambda x, w: x.isnan(),
}


@pytest.mark.parametrize("compute", VALUES.values(), ids=VALUES)
def test_sums_and_products_are_those_of_the_values(compute: Any) -> None:
    """The result is a plain tensor."""
    mx, w = MXTensor.to_mx(_x(10, 128)), _x(128, 6)
    result = compute(mx, w)
    assert type(result) is torch.Tensor
    assert torch.equal(result, compute(mx.dequantize(), w))


REFUSED = {
    "relu": torch.relu,
    "view_across_blocks": lambda x: x.view(80, 16),
    "column": operator.itemgetter((slice(None), 3)),
    "part_of_a_block": lambda x: x[:, 1:33],
    "every_other_column": lambda x: x[:, ::2],
    "columns": lambda x: x[:, [1, 2]],
    "row_of_t": lambda x: x.t()[3],
    "in_place": lambda x: x.add_(1),
    "fill": lambda x: x.zero_(),
    "cat_with_plain": lambda x: torch.cat([x, x.dequantize()]),
    "cat_of_two_formats": lambda x: torch.cat([x, MXTensor.to_mx(x.dequantize(), torch.float8_e5m2)]),
    "copy_of_plain": lambda x: x.copy_(x.dequantize()),
    "repeat": lambda x: x.repeat(2, 1),
}


@pytest.mark.parametrize("operation", REFUSED.values(), ids=REFUSED)
def test_anything_else_is_refused(operation: Any) -> None:
    """The error names the operation and the remedy."""
    mx = MXTensor.to_mx(_x(10, 128))
    before = mx.dequantize()
    with pytest.raises(InputError, match=r"aten\.\w+|copy_ into"):
        operation(mx)
    assert torch.equal(mx.dequantize(), before)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda x: MXTensor.to_mx(x[:, :40]), "multiple of block_size, 32"),
        (lambda x: MXTensor.to_mx(x, block_dim=0), r"dimension -2 must be a multiple of block_size, 32"),
        (lambda x: MXTensor.to_mx(x, block_dim=2), "block_dim is 2; x has 2 dimensions"),
        (lambda x: MXTensor.to_mx(x, torch.float4_e2m1fn_x2, 1), "an even number"),
        (lambda x: MXTensor.to_mx(x.double()), "float64"),
        (lambda x: MXTensor.to_mx(x, torch.uint8), "elem_dtype is torch.uint8"),
        (lambda x: MXTensor.to_mx(x, scaling_mode="nearest"), "nearest"),
        (lambda x: MXTensor.to_mx(MXTensor.to_mx(x)), "already"),
        (lambda x: MXTensor.to_mx(x).dequantize(torch.int32), "int32"),
        (lambda x: MXTensor.from_qdata_and_scales(x, x, x.dtype), "elem_dtype is torch.bfloat16"),
        (lambda x: MXTensor.from_qdata_and_scales(x.to(E4M3), x, x.dtype), "scale torch.bfloat16"),
        (lambda x: MXTensor.from_qdata_and_scales(x.to(E4M3), x[:, :4].to(torch.uint8), E4M3), "orig_dtype"),
        (
            lambda x: MXTensor.from_qdata_and_scales(x.to(E4M3), x[:, :3].to(torch.uint8), x.dtype),
            r"\[10, 3\].*must be \[10, 4\]",
        ),
        (lambda x: MXTensor(x.to(E4M3), x[:, :4].to(torch.float8_e8m0fnu), E4M3, 0, x.dtype), "block_size is 0"),
        (
            lambda x: MXTensor.from_qdata_and_scales(x[None].to(E4M3), x, x.dtype, is_swizzled_scales=True),
            "only a matrix",
        ),
    ],
)
def test_mistakes_are_named(make: Any, text: str) -> None:
    """Invalid shapes, dtypes and modes."""
    with pytest.raises(InputError, match=text):
        make(_x(10, 128))


def test_made_of_its_parts() -> None:
    """Elements and scales are wrapped without a copy, scales as e8m0 or as bytes."""
    mx = MXTensor.to_mx(_x(10, 128))
    for scales in (mx.scale, mx.scale.view(torch.uint8)):
        again = MXTensor.from_qdata_and_scales(mx.qdata, scales, torch.float32)
        assert (again.dtype, again.scale.dtype) == (torch.float32, torch.float8_e8m0fnu)
        assert again.qdata.data_ptr() == mx.qdata.data_ptr()
        assert torch.equal(again.dequantize(), mx.dequantize(torch.float32))
    for part in (mx, mx.t()):
        tiles = to_blocked(mx.scale)
        form = {"block_dim": part.block_dim, "is_swizzled_scales": True}
        again = MXTensor.from_qdata_and_scales(part.qdata, tiles, part.dtype, **form)
        assert torch.equal(again.scale.view(torch.uint8), part.scale.view(torch.uint8))


def test_views_share_memory() -> None:
    """A write to a view of a row changes the tensor."""
    mx, other = MXTensor.to_mx(_x(10, 128)), MXTensor.to_mx(-_x(3, 128))
    mx[2:5].copy_(other)
    assert torch.equal(mx.dequantize()[2:5], other.dequantize())
    plain = torch.zeros(10, 128, device=DEVICE)
    assert torch.equal(plain.copy_(mx), mx.dequantize(torch.float32))


def test_to_other_dtypes_and_devices() -> None:
    """The elements stay; the represented dtype changes."""
    mx = MXTensor.to_mx(_x(10, 128))
    wide = mx.float()
    assert wide.dtype == wide.orig_dtype == torch.float32
    assert_same_bytes(wide.qdata, mx.qdata, "elements")
    assert mx.to("meta").qdata.device.type == "meta"
    _assert_is(mx.cpu(), mx.dequantize().cpu())


def test_new_tensors_are_plain() -> None:
    """New tensors have the high-precision dtype, on the same device."""
    mx = MXTensor.to_mx(_x(10, 128))
    for made in (torch.zeros_like(mx), torch.empty_like(mx), torch.full_like(mx, 2), mx.new_zeros(10, 128)):
        assert type(made) is torch.Tensor
        assert (made.shape, made.dtype, made.device) == (mx.shape, mx.dtype, mx.device)
    assert torch.zeros_like(mx).eq(0).all()
    assert mx.new_empty(3, dtype=torch.int32).dtype == torch.int32


@pytest.mark.parametrize("elem", EVERY)
def test_a_model_on_meta_gets_memory_in_its_formats(elem: str) -> None:
    """`Module.to_empty` keeps parameters in their format, and loads a state dict into them."""
    mx = MXTensor.to_mx(_x(10, 128), EVERY[elem]).t()
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(mx.to("meta"), requires_grad=False)
    module.to_empty(device=DEVICE)
    made = module.weight.data
    assert type(made) is MXTensor and made.device == mx.device and made.qdata.stride() == mx.qdata.stride()
    assert made.__tensor_flatten__() == mx.__tensor_flatten__()
    module.load_state_dict({"weight": mx})
    _assert_is(module.weight.data, mx.dequantize())
    on_meta = mx.to("meta")
    assert type(torch.empty_like(on_meta)) is type(torch.empty_like(on_meta, dtype=torch.int8)) is torch.Tensor
    assert type(torch.empty_like(on_meta, dtype=torch.float64, device=DEVICE)) is torch.Tensor


@pytest.mark.parametrize("elem", EVERY)
def test_pickles_and_saves(elem: str) -> None:
    """pickle, deepcopy, torch.save and its weights_only load, transposed or not."""
    mx = MXTensor.to_mx(_x(10, 128), EVERY[elem]).t()
    buffer = io.BytesIO()
    torch.save({"weight": mx}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)["weight"]
    for again in (pickle.loads(pickle.dumps(mx)), copy.deepcopy(mx), loaded):
        _assert_is(again, mx.dequantize())
        assert_same_bytes(again.qdata, mx.qdata, "elements")


class _Times2(torch.autograd.Function):
    """Records the type of the incoming gradient."""

    seen: list[type] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        _Times2.seen.append(type(grad))
        return 2 * (grad.dequantize() if isinstance(grad, MXTensor) else grad)


class _QuantizedGrad(torch.autograd.Function):
    """Passes its gradient on as an MXTensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return MXTensor.to_mx(grad)


def test_is_a_gradient() -> None:
    """It passes unchanged from one function's backward to the next; two of them are added by value."""
    x, weight = _x(10, 128).requires_grad_(), _x(10, 128)
    quantized = MXTensor.to_mx(weight).dequantize()
    _Times2.seen.clear()
    (_QuantizedGrad.apply(_Times2.apply(x)) * weight).sum().backward()
    assert _Times2.seen == [MXTensor]
    assert torch.equal(x.grad, 2 * quantized)

    x.grad = None
    doubled = _Times2.apply(x)
    ((_QuantizedGrad.apply(doubled) + _QuantizedGrad.apply(doubled)) * weight).sum().backward()
    assert _Times2.seen == [MXTensor, torch.Tensor]
    assert torch.equal(x.grad, 2 * (quantized + quantized))


def test_gradients_pass_through_quantisation() -> None:
    """Gradients pass straight through to_mx, views, products and dequantize; hooks fire."""
    x, weight = _x(10, 128).requires_grad_(), _x(128, 4)
    hooked = []
    mx = MXTensor.to_mx(x)
    mx.register_hook(hooked.append)
    torch.cat([mx[:3], mx[5:]]).t().dequantize(torch.float32).mul(3).sum().backward()
    expected = torch.full_like(x, 3)
    expected[3:5] = 0
    assert x.grad.dtype == x.dtype
    assert torch.equal(x.grad, expected)
    assert len(hooked) == 1

    x.grad = None
    (MXTensor.to_mx(x) @ weight).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(10, 4, dtype=x.dtype, device=DEVICE) @ weight.t())


def test_products_have_gradients_of_their_values() -> None:
    """The other operand of a product gets the gradient of the dequantised tensor."""
    mx, weight = MXTensor.to_mx(_x(10, 128)), _x(128, 4).requires_grad_()
    (mx @ weight).sum().backward()
    torch.testing.assert_close(weight.grad, mx.dequantize().t() @ torch.ones(10, 4, dtype=mx.dtype, device=DEVICE))


def test_signal_to_noise() -> None:
    """Normally distributed values keep 30 dB in e4m3, on which the stages of a pipeline rely."""
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(9)).to(torch.bfloat16).to(DEVICE)
    error = MXTensor.to_mx(x).dequantize(torch.float32) - x.float()
    assert 20 * torch.log10(x.float().norm() / error.norm()) > 30


def test_other_block_sizes() -> None:
    """Other block sizes are for comparisons; the MXFP8 kernels have only 32."""
    x = _x(4, 128)
    mx = MXTensor.to_mx(x, block_size=16)
    assert mx.scale.shape == (4, 8)
    codes, scale = reference.quantize(x.cpu(), block_size=16)
    assert torch.equal(mx.dequantize().cpu(), reference.dequantize(codes, scale, x.dtype))
    _assert_is(mx[..., 16:48].t(), mx.dequantize()[..., 16:48].t())


_LAYOUTS = {
    "rows": (lambda: _x(3, 64, 64), -1),
    "columns": (lambda: _x(3, 64, 64), -2),
    "transposed": (lambda: _x(3, 64, 64).transpose(-2, -1), -2),
    "outermost": (lambda: _x(64, 6, 64), -3),
    "every other row": (lambda: _x(3, 128, 64)[:, ::2], -2),
}


@pytest.mark.parametrize("layout", _LAYOUTS)
@pytest.mark.parametrize("elem", EVERY)
def test_kernels_and_torch_give_the_same(monkeypatch: pytest.MonkeyPatch, elem: str, layout: str) -> None:
    """Bytes, values and layouts agree for every implementation; every kernel runs."""
    make, block_dim = _LAYOUTS[layout]
    x = make()
    made, ways = {}, []
    choose = mx_tensor._choose

    def noted(*arguments: Any) -> Any:
        ways.append(choose(*arguments))
        return ways[-1]

    monkeypatch.setattr(mx_tensor, "_choose", noted)
    for kernels in (False, True):
        monkeypatch.setattr(mx_tensor, "_has_kernel", lambda *_, kernels=kernels: kernels)
        mx = MXTensor.to_mx(x, EVERY[elem], block_dim=block_dim)
        made[kernels] = mx.qdata.view(torch.uint8), mx.scale.view(torch.uint8), mx.dequantize()
    rows = mx_tensor._Way.MXFP8_ROWS if elem in ELEMENTS else mx_tensor._Way.ROWS
    way = rows if layout in ("rows", "transposed") else mx_tensor._Way.COLUMNS
    assert ways == [mx_tensor._Way.TORCH] * 2 + [way] * 2
    for one, other in zip(made[False], made[True], strict=True):
        assert torch.equal(one, other)
    assert made[False][0].stride() == made[True][0].stride()
