"""Random chains of operations on random MXTensors: the dequantised tensor's values, or a refusal by name.

The tests judge whether an operation keeps blocks whole by the origin of each value, not by the rules of MXTensor.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.mx.blocks import DEVICE, EVERY
from triton_ep import MXTensor
from triton_ep.errors import InputError

hypothesis = pytest.importorskip("hypothesis")  # may be missing in another torch environment
given, settings, st = hypothesis.given, hypothesis.settings, hypothesis.strategies

pytestmark = pytest.mark.plain

Operation = Callable[[torch.Tensor], Any]
FORMS = {"max_examples": 250, "deadline": None, "derandomize": True}


@st.composite
def tensors(draw: Any, min_dims: int = 1, block_dim: int | None = None) -> MXTensor:
    """Tensors of any format, shape and block dimension; also blocks of 16 and 32, which kernels support."""
    num_dims = draw(st.integers(min_dims, 4))
    block_size = draw(st.sampled_from((4, 16, 32)))
    shape = draw(st.lists(st.integers(1, 4), min_size=num_dims, max_size=num_dims))
    block_dim = draw(st.integers(-num_dims, -1)) if block_dim is None else block_dim
    shape[block_dim] = block_size * draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    x = torch.randn(shape, generator=generator) * torch.logspace(-2, 2, shape[-1])
    mode = draw(st.sampled_from(("rceil", "floor", "ceil", "even")))
    elem = draw(st.sampled_from(list(EVERY.values())))
    return MXTensor.to_mx(x.to(torch.bfloat16).to(DEVICE), elem, block_size, mode, block_dim=block_dim)


def _view(draw: Any, x: torch.Tensor) -> Operation:
    left, sizes = x.numel(), []
    while left > 1 and len(sizes) < 3:
        divisors = [n for n in range(1, left + 1) if left % n == 0]
        sizes.append(draw(st.sampled_from(divisors)))
        left //= sizes[-1]
    sizes.append(left)
    return draw(st.sampled_from((lambda t: t.view(sizes), lambda t: t.reshape(sizes))))


def _slice(draw: Any, x: torch.Tensor) -> Operation:
    dim = draw(st.integers(-x.dim(), x.dim() - 1))
    # Often at block boundaries.
    unit = draw(st.sampled_from((1, 2, 4, 16, 32)))
    first, last = (unit * draw(st.integers(0, x.shape[dim] // unit)) for _ in range(2))
    step = draw(st.sampled_from((1, 1, 1, 2)))
    at = (slice(None),) * (dim % x.dim()) + (slice(first, last, step),)
    return lambda t: t[at]


def _index(draw: Any, x: torch.Tensor) -> Operation:
    at: list[Any] = [slice(None)] * x.dim()
    for dim in draw(st.sets(st.integers(0, x.dim() - 1), min_size=1, max_size=2)):
        kind = draw(st.sampled_from(("list", "matrix", "mask", "number")))
        some = torch.tensor([0, x.shape[dim] - 1], device=x.device)
        if kind == "mask":
            at[dim] = torch.arange(x.shape[dim], device=x.device) % 2 == 0
        else:
            at[dim] = {"list": some, "matrix": some[:, None], "number": 0}[kind]
    return lambda t: t[tuple(at)]


def _select(draw: Any, x: torch.Tensor) -> Operation:
    dim = draw(st.integers(-x.dim(), x.dim() - 1))
    index = torch.tensor([x.shape[dim] - 1, 0], device=x.device)
    number = draw(st.integers(-x.shape[dim], x.shape[dim] - 1))
    return draw(
        st.sampled_from(
            (lambda t: t.select(dim, number), lambda t: t.index_select(dim, index), lambda t: t.unbind(dim)[number])
        )
    )


def _split(draw: Any, x: torch.Tensor) -> Operation:
    dim = draw(st.integers(-x.dim(), x.dim() - 1))
    unit = draw(st.sampled_from((1, 2, 4, 16, 32)))
    size = unit * draw(st.integers(1, max(1, x.shape[dim] // unit)))
    sizes = [min(size, x.shape[dim]), max(x.shape[dim] - size, 0)]
    return draw(
        st.sampled_from(
            (
                lambda t: t.split(size, dim)[-1],
                lambda t: t.split(sizes, dim)[0],
                lambda t: t.chunk(2, dim)[-1],
                lambda t: t.narrow(dim, 0, sizes[0]),
            )
        )
    )


def _move(draw: Any, x: torch.Tensor) -> Operation:
    order = draw(st.permutations(range(x.dim())))
    first, second = order[0], order[-1]
    start, end = sorted((first, second))
    # Signs of dimensions are part of the interface.
    new = draw(st.integers(-x.dim() - 1, x.dim()))
    choices: list[Operation] = [
        lambda t: t.permute(order),
        lambda t: t.transpose(first, second - t.dim()),
        lambda t: t.movedim(first, second),
        lambda t: t.flatten(start, end),
        lambda t: t.unsqueeze(new),
        lambda t: t.squeeze(),
        lambda t: t.squeeze(first),
        lambda t: t.contiguous(),
        lambda t: t.clone(),
        lambda t: t.detach(),
        lambda t: t.expand(2, *t.shape),
        lambda t: t.expand([-1 if n > 1 else 3 for n in t.shape]),
        lambda t: torch.stack([t, t], new),
        lambda t: torch.cat([t, t, t], first),
        lambda t: torch.cat([t[:0], t]),
    ]
    if x.dim() <= 2:
        choices.append(lambda t: t.t())
    return draw(st.sampled_from(choices))


def _blocks(origins: torch.Tensor, dim: int, block_size: int) -> set[tuple[int, ...]]:
    return {tuple(run) for run in origins.movedim(dim, -1).reshape(-1, block_size).tolist()}


def _blocks_stay(origins: torch.Tensor, block_size: int, blocks: set[tuple[int, ...]]) -> list[int]:
    """Dimensions along which a tensor of origins consists of whole `blocks`."""
    found = []
    for dim in range(-origins.dim(), 0):
        if origins.shape[dim] % block_size == 0:
            runs = origins.movedim(dim, -1).reshape(-1, block_size).tolist()
            found += [dim] if all(tuple(run) in blocks for run in runs) else []
    return found


@settings(**FORMS)
@given(data=st.data())
def test_views_and_copies(data: Any) -> None:
    """Operations that keep blocks whole give right values, shape, contiguity and scales; others raise InputError."""
    mx = data.draw(tensors())
    plain = mx.dequantize().contiguous()
    origins = torch.arange(plain.numel(), device=plain.device).view(plain.shape)
    blocks = _blocks(origins, mx.block_dim, mx.block_size)
    for _ in range(data.draw(st.integers(1, 3))):
        make = data.draw(st.sampled_from((_view, _slice, _index, _select, _split, _move, _move)))
        operation = make(data.draw, plain)
        try:
            wanted, origins = operation(plain), operation(origins)
        except (RuntimeError, IndexError):
            with pytest.raises((RuntimeError, IndexError, InputError)):
                operation(mx)
            return
        if not wanted.dim():
            with pytest.raises(InputError):
                operation(mx)
            return
        stay = _blocks_stay(origins, mx.block_size, blocks) if wanted.numel() else None
        try:
            got = operation(mx)
        except InputError as error:
            assert "dequantize()" in str(error)
            # Rows selected one by one along the blocks are refused even if they form whole blocks by chance.
            assert not stay or make in (_index, _select, _slice), (operation, stay)
            return
        assert stay is None or got.block_dim in stay
        scale = list(wanted.shape)
        scale[got.block_dim] //= got.block_size
        assert isinstance(got, MXTensor) and list(got.scale.shape) == scale
        assert (got.shape, got.dtype, got.elem_dtype) == (wanted.shape, wanted.dtype, mx.elem_dtype)
        if make is _index:  # torch decides the memory order of an index result
            got, wanted, origins = got.contiguous(), wanted.contiguous(), origins.contiguous()
        assert got.is_contiguous() == wanted.is_contiguous()
        assert torch.equal(got.dequantize(), wanted)
        if not wanted.numel():
            return
        mx, plain = got, wanted


def test_blocks_that_stay_are_found() -> None:
    """The judge above distinguishes halves of blocks, another order, and whole blocks."""
    start = torch.arange(32).view(4, 8)
    blocks = _blocks(start, -1, 4)
    assert _blocks_stay(start, 4, blocks) == [-1]
    assert _blocks_stay(start.t(), 4, blocks) == [-2]
    assert _blocks_stay(start.view(8, 4), 4, blocks) == [-1]
    assert _blocks_stay(start[:, 2:6], 4, blocks) == _blocks_stay(start.flip(1), 4, blocks) == []


PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mm": lambda a, b, c: torch.mm(a, b.t()),
    "matmul": lambda a, b, c: a @ b.t(),
    "matmul_of_many": lambda a, b, c: a.expand(3, *a.shape) @ b.t(),
    "bmm": lambda a, b, c: torch.bmm(a.unsqueeze(0), b.t().unsqueeze(0)),
    "addmm": lambda a, b, c: torch.addmm(c, a, b.t()),
    "linear": lambda a, b, c: torch.nn.functional.linear(a, b),
    "linear_with_bias": lambda a, b, c: torch.nn.functional.linear(a.unsqueeze(0), b, c),
    "vector": lambda a, b, c: a @ b[0],
    "equal": lambda a, b, c: torch.tensor(torch.equal(a, b[: len(a)])),
    "compare": lambda a, b, c: a == a.clone(),
    "close": lambda a, b, c: torch.tensor(torch.allclose(a, a.clone())),
    "difference": lambda a, b, c: (a[:1] - b[:1]).sum(),
}


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
@settings(**{**FORMS, "max_examples": 12})
@given(
    left=st.sampled_from([None, *EVERY.values()]), right=st.sampled_from(list(EVERY.values())), rows=st.integers(1, 5)
)
def test_products_and_comparisons(product: Any, left: Any, right: Any, rows: int) -> None:
    """Bit-identical to the dequantised tensors; any two formats, or one and a plain tensor."""
    generator = torch.Generator().manual_seed(rows)
    a, b = (torch.randn(n, 64, generator=generator).bfloat16().to(DEVICE) for n in (rows, 5))
    bias = torch.randn(5, generator=generator).bfloat16().to(DEVICE)
    left_mx = a if left is None else MXTensor.to_mx(a, left)
    right_mx = MXTensor.to_mx(b, right)
    got = product(left_mx, right_mx, bias)
    wanted = product(a if left is None else left_mx.dequantize(), right_mx.dequantize(), bias)
    assert type(got) is torch.Tensor
    # On a GPU two calls of one product may use different kernels and so differ.
    error = 0 if DEVICE == "cpu" or got.dtype == torch.bool else 2**-7
    torch.testing.assert_close(got, wanted, rtol=error, atol=error * 8)


@settings(**{**FORMS, "max_examples": 40})
@given(mx=tensors(min_dims=2), other=tensors(min_dims=2))
def test_copies_and_equality(mx: MXTensor, other: MXTensor) -> None:
    """copy_ works only within one format and shape; equality compares values, whatever the bytes."""
    alike = all(getattr(mx, n) == getattr(other, n) for n in ("elem_dtype", "block_size", "block_dim", "shape"))
    assert torch.equal(mx, mx.dequantize()) and torch.equal(mx, mx.clone())
    assert torch.equal(mx, other) == (mx.shape == other.shape and torch.equal(mx.dequantize(), other.dequantize()))
    target = mx.clone()
    if alike:
        target.copy_(other)
        assert torch.equal(target.dequantize(), other.dequantize())
    else:
        with pytest.raises(InputError, match="copy_ into"):
            target.copy_(other)
    wide = mx.to(torch.float32)
    assert wide.dtype == torch.float32 and torch.equal(wide.dequantize(), mx.dequantize(torch.float32))
    assert math.prod(mx.scale.shape) * mx.block_size == mx.numel()
