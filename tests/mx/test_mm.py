"""mx_mm: the product of the values of two MX matrices."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.mx.blocks import DEVICE, DTYPES, EVERY, PACKED
from triton_ep import MXTensor
from triton_ep.errors import InputError
from triton_ep.mx import mm, swizzle
from triton_ep.mx.mm import mx_grouped_mm, mx_mm
from triton_ep.reference import mxfp8 as reference

pytestmark = pytest.mark.plain

E4M3 = torch.float8_e4m3fn


def _x(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def signal_to_noise(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """Signal to noise in dB; infinite if the two are equal."""
    error = wanted.double() - got.double()
    return (20 * torch.log10(wanted.double().norm() / error.norm())).item()


@pytest.mark.parametrize("right", EVERY)
@pytest.mark.parametrize("left", EVERY)
def test_the_product_is_that_of_the_values(left: str, right: str) -> None:
    """Every pair of formats: at least 80 dB against the product of the dequantised matrices, in float64 and in bf16."""
    a, w = MXTensor.to_mx(_x(48, 128), EVERY[left]), MXTensor.to_mx(_x(40, 128, seed=1), EVERY[right])
    wide = mx_mm(a, w.t(), torch.float32)
    assert (wide.shape, wide.dtype) == ((48, 40), torch.float32)
    assert signal_to_noise(a.dequantize().double() @ w.dequantize().double().t(), wide) >= 80
    assert signal_to_noise(a.dequantize() @ w.dequantize().t(), mx_mm(a, w.t())) >= 80


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("block_size", [16, 64])
def test_dtypes_and_blocks(dtype: torch.dtype, block_size: int) -> None:
    """Operands of any dtype, block size and block dimension; the result in any dtype, rounded once; a bias."""
    a = MXTensor.to_mx(_x(64, 128, dtype=dtype), E4M3, block_size)
    b = MXTensor.to_mx(_x(128, 64, seed=1, dtype=dtype), "fp6_e3m2", 32, block_dim=-1)
    exact = a.dequantize(torch.float32).double() @ b.dequantize(torch.float32).double()
    assert mx_mm(a, b).dtype == dtype
    for out_dtype in DTYPES.values():
        out, unit = mx_mm(a, b, out_dtype), torch.finfo(out_dtype).eps
        torch.testing.assert_close(out.double(), exact, rtol=unit, atol=max(unit, 1e-6) * exact.abs().max().item())
    bias = _x(64, seed=2, dtype=dtype)
    assert torch.equal(mx_mm(a, b, bias=bias), mx_mm(a, b) + bias)
    plain = _x(128, 64, seed=1, dtype=dtype)
    assert signal_to_noise(a.dequantize(torch.float32) @ plain.float(), mx_mm(a, plain, torch.float32)) >= 80


def test_gradients_are_those_of_the_values() -> None:
    """Gradients pass straight through the quantisation of both operands."""
    x, w = _x(32, 64).requires_grad_(), _x(48, 64, seed=1).requires_grad_()
    mx_mm(MXTensor.to_mx(x, "fp6_e2m3"), MXTensor.to_mx(w, PACKED).t()).sum().backward()
    ones = torch.ones(32, 48, dtype=x.dtype, device=DEVICE)
    torch.testing.assert_close(x.grad, ones @ MXTensor.to_mx(w.detach(), PACKED).dequantize())
    torch.testing.assert_close(w.grad, ones.t() @ MXTensor.to_mx(x.detach(), "fp6_e2m3").dequantize())


def _scaled_mm(a: torch.Tensor, b: torch.Tensor, a_scale: Any, recipe_a: Any, b_scale: Any, recipe_b: Any, *rest: Any,
               output_dtype: torch.dtype) -> torch.Tensor:  # fmt: skip
    """torch's scaled_mm as documented: rows along K, swizzled scales, elements by their dtype."""
    assert recipe_a is recipe_b is F.ScalingType.BlockWise1x32
    assert rest == (F.SwizzleType.SWIZZLE_32_4_4,) * 2
    assert a.is_contiguous() and b.t().is_contiguous() and a_scale.dtype == b_scale.dtype == torch.float8_e8m0fnu
    values = []
    for rows, blocked in ((a, a_scale), (b.t(), b_scale)):
        width = rows.shape[1] * (2 if rows.dtype == PACKED else 1)
        scale = swizzle.from_blocked(blocked, rows.shape[0], width // 32)
        codes = rows.view(torch.uint8) if rows.dtype == PACKED else rows
        values.append(reference.dequantize(codes, scale.view(torch.uint8), torch.float32, rows.dtype))
    return (values[0] @ values[1].t()).to(output_dtype)


@pytest.mark.parametrize("elem_dtype", [E4M3, PACKED], ids=str)
def test_what_the_hardware_is_given(monkeypatch: pytest.MonkeyPatch, elem_dtype: torch.dtype) -> None:
    """The elements, scale tiles and recipes passed to torch's scaled_mm give the same product."""
    calls = []
    monkeypatch.setattr(mm, "hardware_obstacle", lambda a, b: None)
    monkeypatch.setattr(mm, "scaled_mm", lambda *args, **kwargs: calls.append(1) or _scaled_mm(*args, **kwargs))
    a, w = MXTensor.to_mx(_x(144, 160), elem_dtype), MXTensor.to_mx(_x(48, 160, seed=1), elem_dtype)
    columns = MXTensor.to_mx(_x(48, 160, seed=1).t().contiguous(), elem_dtype, block_dim=0)
    for path in ("hardware", "auto"):
        for b in (w.t(), columns):
            assert torch.equal(mx_mm(a, b, torch.float32, path=path), mx_mm(a, b, torch.float32))
    assert len(calls) == (4 if elem_dtype == E4M3 else 2)  # "auto" does not try what torch may not have been built for


def test_what_torch_was_not_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's refusal becomes an InputError that names the alternative."""

    def refuse(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError("only with another library")

    monkeypatch.setattr(mm, "hardware_obstacle", lambda a, b: None)
    monkeypatch.setattr(mm, "scaled_mm", refuse)
    a = MXTensor.to_mx(_x(32, 64), PACKED)
    with pytest.raises(InputError, match=r'does not multiply torch\.float4_e2m1fn_x2 here: only with.*Use "emulated"'):
        mx_mm(a, a.t(), path="hardware")


@pytest.mark.parametrize("elem", EVERY)
def test_torchs_grouped_product_and_modules(elem: str) -> None:
    """torch's own grouped_mm multiplies the values; a module keeps an MXTensor as its weight, and loads one."""
    a, w = MXTensor.to_mx(_x(16, 64), EVERY[elem]), MXTensor.to_mx(_x(2, 32, 64, seed=1), EVERY[elem])
    ends = torch.tensor([5, 16], dtype=torch.int32, device=DEVICE)
    got = F.grouped_mm(a, w.transpose(-2, -1), offs=ends)
    values = F.grouped_mm(a.dequantize(), w.dequantize().transpose(-2, -1), offs=ends)
    assert type(got) is torch.Tensor and torch.equal(got, values)

    module, other = (torch.nn.Linear(64, 32, bias=False, device="meta") for _ in range(2))
    module.weight = torch.nn.Parameter(w[0], requires_grad=False)
    other.weight = torch.nn.Parameter(MXTensor.to_mx(_x(32, 64), EVERY[elem]), requires_grad=False)
    other.load_state_dict(module.state_dict())
    assert isinstance(other.weight, MXTensor) and torch.equal(other.weight, w[0])
    assert torch.equal(other(a), F.linear(a.dequantize(), w[0].dequantize()))


@pytest.mark.gpu
@pytest.mark.parametrize("elem", EVERY)
def test_pinned_memory(elem: str) -> None:
    """Elements and scales are both pinned and can be copied to the GPU without waiting."""
    mx = MXTensor.to_mx(_x(16, 64).cpu(), EVERY[elem])
    pinned = mx.pin_memory()
    assert not mx.is_pinned() and pinned.is_pinned() and pinned.qdata.is_pinned()
    assert torch.equal(pinned.to("cuda", non_blocking=True).cpu(), mx)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda a, w: (a, w.t()), "it needs a GPU" if DEVICE == "cpu" else "compute capability"),
        (lambda a, w: (a.dequantize(), w.t()), "both operands must be MXTensors"),
        (lambda a, w: (a, MXTensor.to_mx(w.dequantize().t().contiguous()[:, :32])), "along dimension -1 of b"),
        (lambda a, w: (MXTensor.to_mx(a.dequantize(), block_size=16), w.t()), "they are 16 along dimension -1 of a"),
        (lambda a, w: (MXTensor.to_mx(a.dequantize(), "fp6_e2m3"), w.t()), "fp6_e2m3 and torch.float8_e4m3fn"),
        (lambda a, w: (a, w[:20].t()), "N of 16, not 64 and 20"),
    ],
)
def test_why_the_hardware_is_not_used(change: Any, text: str) -> None:
    """An explicit "hardware" raises an error with the reason; "auto" multiplies the values instead."""
    if text == "compute capability" and torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("this GPU multiplies MX blocks")
    a, b = change(MXTensor.to_mx(_x(48, 64)), MXTensor.to_mx(_x(32, 64, seed=1)))
    with pytest.raises(InputError, match=f'path "hardware" cannot be taken: .*{text}'):
        mx_mm(a, b, path="hardware")
    assert torch.equal(mx_mm(a, b, path="auto"), mx_mm(a, b))


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(128, 128, 128), (256, 512, 1024), (2048, 4096, 1024), (144, 48, 160)], ids=str)
def test_the_gpus_own_path(sizes: tuple[int, int, int]) -> None:
    """The path that "auto" takes on this GPU gives the product of the dequantised matrices, 80 dB."""
    m, n, k = sizes
    for elem_dtype in EVERY.values():
        a, w = MXTensor.to_mx(_x(m, k), elem_dtype), MXTensor.to_mx(_x(n, k, seed=1), elem_dtype)
        wanted = a.dequantize() @ w.dequantize().t()
        assert signal_to_noise(wanted, mx_mm(a, w.t(), path="auto")) >= 80


@pytest.mark.parametrize("elem", EVERY)
def test_groups_of_rows(elem: str) -> None:
    """Each group's rows times its own matrix; rows past the last group give zeros."""
    ends = torch.tensor([5, 5, 12], dtype=torch.int32, device=DEVICE)
    a, w = MXTensor.to_mx(_x(14, 64), EVERY[elem]), MXTensor.to_mx(_x(3, 32, 64, seed=1), EVERY[elem])
    out = mx_grouped_mm(a, w.transpose(-2, -1), ends, torch.float32)
    values = a.dequantize().float()
    wanted = torch.zeros(14, 32, device=DEVICE)
    for group, (first, last) in enumerate(((0, 5), (5, 5), (5, 12))):
        wanted[first:last] = values[first:last] @ w.dequantize()[group].float().t()
    assert signal_to_noise(wanted, out) >= 80
    assert not out[12:].any()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda a: mx_mm(a, a), r"\[32, 64\] and \[32, 64\]"),
        (lambda a: mx_mm(a.dequantize(), a.dequantize().t()), "neither a nor b is an MXTensor"),
        (lambda a: mx_mm(a, a.t(), path="fast"), "path is 'fast'"),
        (lambda a: mx_mm(a, a.t(), torch.int8), "out_dtype is torch.int8"),
        (lambda a: mx_grouped_mm(a, a, torch.zeros(1, dtype=torch.int32)), r"\[R, K\] and b_t \[E, K, N\]"),
    ],
)
def test_mistakes_are_named(call: Any, text: str) -> None:
    """Invalid shapes, dtypes and paths."""
    with pytest.raises(InputError, match=text):
        call(MXTensor.to_mx(_x(32, 64)))


def test_kernels_and_products_in_a_graph() -> None:
    """The ops' fakes are right; quantisation, views and products compile into one graph, bit-identical."""
    x, elem = torch.randn(2, 32, 64, device=DEVICE), "e2m1_x2"
    checks = ["test_autograd_registration", "test_faketensor", "test_schema"]
    ops = torch.ops.triton_ep
    for dim in (-1, -2):
        torch.library.opcheck(ops.mx_quantize.default, (x, elem, "rceil", 32, dim), test_utils=checks)
        args = (*ops.mx_quantize(x, elem, "rceil", 32, dim), elem, 32, dim, torch.bfloat16)
        torch.library.opcheck(ops.mx_dequantize.default, args, test_utils=checks)

    def work(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left, right = MXTensor.to_mx(a, EVERY[elem]), MXTensor.to_mx(b, EVERY[elem], block_dim=0)
        return mx_mm(left, right), left[1:3].t().dequantize(), torch.stack([left, left]).view(-1, 32).dequantize()

    torch._dynamo.reset()
    compiled = torch.compile(work, fullgraph=True, backend="aot_eager")
    a, b = _x(8, 64), _x(64, 16, seed=1)
    for got, wanted in zip(compiled(a, b), work(a, b), strict=True):
        assert torch.equal(got, wanted)
