"""NVFP4Tensor: values, operations by value, two levels of scales, swizzled scales, files."""

import io
import pickle
from typing import Any

import pytest
import torch

from tests.mx.blocks import DEVICE
from triton_ep.errors import InputError
from triton_ep.mx.nvfp4 import NVFP4Tensor, nvfp4_quantize, per_tensor_amax_to_scale
from triton_ep.reference import nvfp4 as reference


def _x(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 8) -> torch.Tensor:
    """Values that differ from each other, whose blocks differ in scale."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.logspace(-1, 1, shape[-1])
    return x.to(dtype).to(DEVICE)


def _outer(x: torch.Tensor) -> torch.Tensor:
    return per_tensor_amax_to_scale(x.abs().max())


def _snr(want: torch.Tensor, got: torch.Tensor) -> float:
    want, got = want.double(), got.double()
    return float(20 * torch.log10(want.norm() / (want - got).norm()))


def _assert_is(result: Any, expected: torch.Tensor) -> None:
    assert isinstance(result, NVFP4Tensor)
    assert (result.shape, result.dtype, result.device) == (expected.shape, expected.dtype, expected.device)
    assert torch.equal(result.dequantize(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("levels", [1, 2])
def test_to_nvfp4_is_the_reference(levels: int, dtype: torch.dtype) -> None:
    """Bytes, values, scales; at least 8 dB of reconstruction, 30 dB of the blocks' largest values."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(2)).to(dtype).to(DEVICE)
    outer = None if levels == 1 else _outer(x)
    nv = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=outer)
    packed, scale = reference.quantize(x.cpu(), None if outer is None else outer.cpu())
    assert torch.equal(nv.qdata.cpu(), packed)
    assert torch.equal(nv.scale.view(torch.uint8).cpu(), scale)
    assert (nv.shape, nv.dtype, nv.block_size) == (x.shape, dtype, 16)
    assert (nv.qdata.shape, nv.scale.shape, nv.scale.dtype) == ((64, 64), (64, 8), torch.float8_e4m3fn)
    want = reference.dequantize(packed, scale, dtype, None if outer is None else outer.cpu())
    assert torch.equal(nv.dequantize().cpu(), want)
    assert nv.dequantize(torch.float32).dtype == torch.float32
    assert _snr(x, nv.dequantize()) >= 18  # the requirement is 8
    amax = x.float().unflatten(-1, (-1, 16)).abs().amax(-1)
    assert _snr(amax, nv.get_hp_scales() * 6) >= 30
    scales, data = nvfp4_quantize(x, 16, outer)
    assert torch.equal(data, nv.qdata) and torch.equal(scales.view(torch.uint8), nv.scale.view(torch.uint8))


@pytest.mark.parametrize(
    ("shape", "use_gelu"), [((128, 64, 256), True), ((157, 64, 256), False), ((200, 160, 256), True)]
)
def test_products_reach_16_db(shape: tuple[int, int, int], use_gelu: int) -> None:
    """Both operands with two levels of scales, with a bias, against the product of the unquantised operands."""
    m, k, n = shape
    generator = torch.Generator().manual_seed(2)
    a, w = (torch.randn(rows, k, generator=generator).bfloat16().to(DEVICE) for rows in (m, n))
    a = torch.nn.functional.gelu(a) if use_gelu else a
    bias = torch.randn(n, generator=generator).bfloat16().to(DEVICE)
    qa, qw = (NVFP4Tensor.to_nvfp4(x, per_tensor_scale=_outer(x), is_swizzled_scales=True) for x in (a, w))
    want = torch.nn.functional.linear(a, w, bias)
    got = torch.nn.functional.linear(qa, qw, bias)
    assert got.dtype == torch.bfloat16
    assert _snr(want, got) >= 16
    assert torch.equal(got, torch.nn.functional.linear(qa.dequantize(), qw.dequantize(), bias))
    assert torch.equal(qa @ qw.t(), qa.dequantize() @ qw.dequantize().t())
    assert torch.equal(torch.nn.functional.linear(a, qw), torch.nn.functional.linear(a, qw.dequantize()))


MOVES = {
    "detach": lambda x: x.detach(),
    "clone": lambda x: x.clone(),
    "t": lambda x: x[0].t(),
    "t_contiguous": lambda x: x[0].t().contiguous(),
    "mT": lambda x: x.mT,
    "permute": lambda x: x.permute(2, 0, 1),
    "view": lambda x: x.view(-1, 128),
    "unflatten": lambda x: x.unflatten(1, (5, 2)),
    "unsqueeze": lambda x: x[:, None],
    "unsqueeze_last": lambda x: x.unsqueeze(-1),
    "select": lambda x: x[1],
    "select_row": lambda x: x[:, 3],
    "select_behind_blocks": lambda x: x.mT[..., 2],
    "slice": lambda x: x[:, 2:7],
    "slice_with_step": lambda x: x[:, ::3],
    "slice_of_whole_blocks": lambda x: x[..., 16:96],
    "slice_of_t": lambda x: x[0].t()[48:],
    "index_select": lambda x: x.index_select(1, torch.tensor([9, 0], device=x.device)),
    "split": lambda x: x.split(4, 1)[2],
    "chunk": lambda x: x.chunk(4, dim=-1)[-1],
    "unbind": lambda x: x.unbind(0)[1],
    "squeeze": lambda x: x[:1].squeeze(),
    "expand": lambda x: x[:, :1].expand(-1, 4, -1),
    "index": lambda x: x[torch.tensor([1, 0], device=x.device), torch.tensor([9, 2], device=x.device)],
    "mask": lambda x: x[:, torch.arange(10, device=x.device) % 3 == 0],
    "cat": lambda x: torch.cat([x[:, 3:], x[:, :3]], 1),
    "cat_along_blocks": lambda x: torch.cat(x.split(32, -1)[::-1], -1),
    "stack": lambda x: torch.stack(x.unbind(0), 1),
}


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_moves_keep_the_format(move: Any, levels: int) -> None:
    """The result is an NVFP4Tensor with the values of the dequantised tensor's result, bit for bit."""
    x = _x(2, 10, 128)
    nv = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=None if levels == 1 else _outer(x))
    _assert_is(move(nv), move(nv.dequantize()))


def test_a_scale_per_matrix() -> None:
    """Matrices of very different magnitudes each use the full range of scales; moves keep each matrix's scale."""
    x = _x(3, 32, 64) * torch.tensor([1.0, 1e4, 1e-4], device=DEVICE)[:, None, None].bfloat16()
    outer = per_tensor_amax_to_scale(x.abs().amax((1, 2), keepdim=True))
    nv = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=outer)
    alone = torch.stack([NVFP4Tensor.to_nvfp4(each, per_tensor_scale=_outer(each)).dequantize() for each in x])
    _assert_is(nv, alone)
    assert all(_snr(each, got) > 18 for each, got in zip(x, nv.dequantize(), strict=True))
    for move in (lambda y: y[1], lambda y: y[1:], lambda y: y.mT, lambda y: y[:, 8:24], lambda y: y[2, 5:7]):
        _assert_is(move(nv), move(alone))
    assert nv[1].per_tensor_scale.shape == () and nv[1:].per_tensor_scale.shape == (2, 1, 1)
    for wrong in (lambda y: y.view(96, 64), lambda y: y.transpose(0, 1), lambda y: y[:, 3]):
        with pytest.raises(InputError, match="per-tensor scales"):
            wrong(nv)
    with pytest.raises(InputError, match="of one format"):  # the host does not know whether the scales are equal
        torch.cat([nv[0], nv[1]])


@pytest.mark.parametrize("leading", [(2, 2), (2, 3)], ids=["square", "other"])
def test_matrices_with_a_scale_each_change_places(leading: tuple[int, int]) -> None:
    """Each takes its scale along, also where the shape of the scales stays the same."""
    sizes = torch.arange(1, leading[0] * leading[1] + 1, device=DEVICE).view(*leading, 1, 1)
    x = (_x(*leading, 32, 64).float() * 10.0**sizes).bfloat16()
    nv = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().amax((2, 3), keepdim=True)))
    values = nv.dequantize()
    for move in (
        lambda y: y.transpose(0, 1),
        lambda y: y.movedim(1, 0).mT,
        lambda y: y.permute(1, 0, 3, 2),
        lambda y: y.mT.transpose(0, 1)[1],
    ):
        _assert_is(move(nv), move(values))


VALUES = {
    "matmul_from_the_left": lambda x, w: w.t() @ x.t(),
    "addmm": lambda x, w: torch.addmm(w.sum(0), x, w),
    "bmm": lambda x, w: torch.bmm(x[None], w[None]),
    "sum_of_rows": lambda x, w: x.sum(0),
    "add": lambda x, w: x + x,
    "equal": lambda x, w: x == x,
    "isnan": lambda x, w: x.isnan(),
    "max": lambda x, w: x.max(),
}


@pytest.mark.parametrize("compute", VALUES.values(), ids=VALUES)
def test_sums_and_products_are_those_of_the_values(compute: Any) -> None:
    """The result is a plain tensor."""
    nv, w = NVFP4Tensor.to_nvfp4(_x(10, 128)), _x(128, 6)
    result = compute(nv, w)
    assert type(result) is torch.Tensor
    assert torch.equal(result, compute(nv.dequantize(), w))


def test_swizzled_scales() -> None:
    """The layout of block-scaled instructions and back; slices of whole tiles; other slices are refused."""
    x = _x(300, 256)
    nv = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=_outer(x))
    tiled = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=_outer(x), is_swizzled_scales=True)
    assert tiled.is_swizzled_scales and tiled.scale.shape == (96, 64 // 4 * 4)
    rows, columns = torch.meshgrid(torch.arange(300), torch.arange(16), indexing="ij")
    byte = (rows // 128 * 4 + columns // 4) * 512 + rows % 32 * 16 + rows % 128 // 32 * 4 + columns % 4
    assert torch.equal(tiled.scale.view(torch.uint8).flatten()[byte.to(DEVICE)], nv.scale.view(torch.uint8))
    assert torch.equal(tiled.get_hp_scales(), nv.get_hp_scales())
    for same in (tiled, tiled.unswizzled(), tiled.clone(), tiled.t().t(), nv.swizzled()):
        _assert_is(same, nv.dequantize())
    for move in (
        lambda y: y[128:256],
        lambda y: y[256:],
        lambda y: y[:, 64:192],
        lambda y: y[:, 192:],
        lambda y: y.t()[64:, :128],
        lambda y: y.chunk(2, -1)[1],
    ):
        moved = move(tiled)
        assert moved.is_swizzled_scales
        _assert_is(moved, move(nv.dequantize()))
    for cut in (lambda y: y[:100], lambda y: y[50:150], lambda y: y[:, :32], lambda y: y[:, 16:80], lambda y: y[5]):
        with pytest.raises(InputError, match="unswizzled"):
            cut(tiled)


MISTAKES = {
    "another block size": (lambda x: NVFP4Tensor.to_nvfp4(x, 32), "block_size 32"),
    "a part of a block": (lambda x: NVFP4Tensor.to_nvfp4(x[:, :40]), "blocks of 16"),
    "float64": (lambda x: NVFP4Tensor.to_nvfp4(x.double()), "float64"),
    "twice": (lambda x: NVFP4Tensor.to_nvfp4(NVFP4Tensor.to_nvfp4(x)), "already"),
    "a number as scale": (lambda x: NVFP4Tensor.to_nvfp4(x, per_tensor_scale=1.0), "float32 tensor"),
    "scale of bf16": (lambda x: NVFP4Tensor.to_nvfp4(x, per_tensor_scale=x.max()), "bfloat16"),
    "seed unused": (lambda x: NVFP4Tensor.to_nvfp4(x, seed=1), "stochastic_rounding"),
    "scales that are not one": (
        lambda x: NVFP4Tensor.to_nvfp4(x, per_tensor_scale=x[0].float()),
        r"\[128\] torch.float32",
    ),
    "seed of 65 bits": (lambda x: NVFP4Tensor.to_nvfp4(x, stochastic_rounding=True, seed=2**64), "must be an int64"),
    "signs": (lambda x: NVFP4Tensor.to_nvfp4(x, hadamard_signs=-1), "-1"),
    "scales of another shape": (
        lambda x: NVFP4Tensor(x[:, :64].to(torch.uint8), x[:, :5].to(torch.float8_e4m3fn), x.dtype),
        r"\[10, 5\].*must be \[10, 8\]",
    ),
    "relu": (lambda x: torch.relu(NVFP4Tensor.to_nvfp4(x)), "aten.relu"),
    "column": (lambda x: NVFP4Tensor.to_nvfp4(x)[:, 3], "cut or reorder"),
    "view across blocks": (lambda x: NVFP4Tensor.to_nvfp4(x).view(20, 64), "cut or reorder"),
    "in place": (lambda x: NVFP4Tensor.to_nvfp4(x).add_(1), "aten.add_"),
    "copy of plain": (lambda x: NVFP4Tensor.to_nvfp4(x).copy_(x), "copy_ into"),
}


@pytest.mark.parametrize(("make", "text"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_named(make: Any, text: str) -> None:
    """Invalid shapes, dtypes, arguments and operations."""
    with pytest.raises(InputError, match=text):
        make(_x(10, 128))


def test_gradients_pass_through() -> None:
    """Gradients pass straight through to_nvfp4, views, products and dequantize."""
    x, weight = _x(10, 128).requires_grad_(), _x(128, 4)
    NVFP4Tensor.to_nvfp4(x)[3:].t().dequantize(torch.float32).mul(3).sum().backward()
    expected = torch.full_like(x, 3)
    expected[:3] = 0
    assert torch.equal(x.grad, expected)
    x.grad = None
    (NVFP4Tensor.to_nvfp4(x, stochastic_rounding=True) @ weight).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(10, 4, dtype=x.dtype, device=DEVICE) @ weight.t())


def test_stochastic_and_transformed_tensors() -> None:
    """Seeds repeat; without a seed torch's generator is used; a transformed tensor represents its original values."""
    x = _x(32, 128)
    first, again, other = (NVFP4Tensor.to_nvfp4(x, stochastic_rounding=True, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.qdata, again.qdata) and not torch.equal(first.qdata, other.qdata)
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        drawn.append(NVFP4Tensor.to_nvfp4(x, stochastic_rounding=True).qdata)
    assert torch.equal(*drawn)
    turned = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=_outer(x), hadamard_signs=0x1234)
    assert _snr(x, turned.dequantize()) > 16
    _assert_is(turned[:, 16:64].t(), turned.dequantize()[:, 16:64].t())


@pytest.mark.parametrize("levels", [1, 2])
def test_files_keep_everything(levels: int) -> None:
    """pickle, torch.save with a weights_only load, copy_; transposed, swizzled, transformed."""
    x = _x(32, 128)
    outer = None if levels == 1 else _outer(x)
    for nv in (
        NVFP4Tensor.to_nvfp4(x, per_tensor_scale=outer).t(),
        NVFP4Tensor.to_nvfp4(x, per_tensor_scale=outer, is_swizzled_scales=True),
        NVFP4Tensor.to_nvfp4(x, per_tensor_scale=outer, hadamard_signs=77),
    ):
        buffer = io.BytesIO()
        torch.save(nv, buffer)
        buffer.seek(0)
        other = NVFP4Tensor.to_nvfp4(
            -2 * x,
            per_tensor_scale=outer,
            is_swizzled_scales=nv.is_swizzled_scales,
            hadamard_signs=nv.hadamard_signs,
        )
        copied = (other.t() if nv.block_dim == -2 else other).copy_(nv)
        for same in (pickle.loads(pickle.dumps(nv)), torch.load(buffer, weights_only=True), copied):
            _assert_is(same, nv.dequantize())
            assert same.is_swizzled_scales == nv.is_swizzled_scales


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("tiled", [False, True])
def test_a_model_on_meta_gets_memory_in_its_format(tiled: bool, levels: int) -> None:
    """`Module.to_empty` keeps a parameter in its format, and loads a state dict into it."""
    x = _x(128, 128)
    nv = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=None if levels == 1 else _outer(x), is_swizzled_scales=tiled)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(nv.to("meta"), requires_grad=False)
    module.to_empty(device=DEVICE)
    assert type(module.weight.data) is NVFP4Tensor
    module.load_state_dict({"weight": nv})
    _assert_is(module.weight.data, nv.dequantize())
