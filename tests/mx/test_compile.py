"""torch.compile: one graph, bit-identical to eager mode; on a GPU one kernel, fused with its producers."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config

from tests.mx.blocks import DEVICE, MODES, random_bits, structured
from triton_ep.mx.formats import ALL_FORMATS
from triton_ep.mx.linear import MXLinear, MXLinearConfig
from triton_ep.mx.nvfp4 import NVFP4Tensor, per_tensor_amax_to_scale
from triton_ep.mx.nvfp4_linear import NVFP4Linear, NVFP4LinearConfig
from triton_ep.mx.tensor import MXTensor

pytestmark = pytest.mark.plain
ELEMENTS = [fmt.dtype for fmt in ALL_FORMATS]
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def _parts(x: torch.Tensor, elem: Any, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    mx = MXTensor.to_mx(x, elem, scaling_mode=mode)
    return mx.qdata, mx.scale


def _hard(dtype: torch.dtype) -> torch.Tensor:
    """[n, 64]: structured blocks, random bits, ordinary values."""
    blocks = [structured("e4m3", dtype), random_bits(1 << 18, dtype, seed=5)]
    flat = torch.cat(blocks).flatten()
    return flat[: flat.numel() // 64 * 64].view(-1, 64).to(DEVICE)


def _assert_equal_bits(got: Any, want: Any) -> None:
    for one, other in zip(got, want, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _kernels(function: Callable[..., Any], *args: Any) -> list[str]:
    """Names of the kernels that a call launches, after a first call that compiles them."""
    function(*args)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function(*args)
        torch.cuda.synchronize()
    on_device = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    # Leave out copies and the ranges by which torch marks compiled regions.
    return [name for name in on_device if not name.startswith(("Memcpy", "Memset", "Torch-Compiled", "##"))]


FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("elem", [torch.float8_e4m3fn, torch.float4_e2m1fn_x2], ids=str)
def test_to_mx_has_the_bits_of_eager(elem: Any) -> None:
    """to_mx compiles into one graph without breaks."""
    x = _hard(torch.bfloat16)[::16].contiguous()
    compiled = torch.compile(_parts, backend="aot_eager", fullgraph=True)
    _assert_equal_bits(compiled(x, elem, "rceil"), _parts(x, elem, "rceil"))


@pytest.mark.gpu
@pytest.mark.parametrize("elem", ELEMENTS, ids=str)
def test_to_mx_is_one_kernel_with_the_bits_of_eager(elem: Any) -> None:
    """Float8 in every mode, other formats in two, on structured and random blocks; fp32 too. Eager has one, too."""
    compiled = torch.compile(_parts, fullgraph=True)
    cases = [(torch.bfloat16, mode) for mode in (MODES if elem in FLOAT8 else ("rceil", "floor"))]
    for dtype, mode in [*cases, (torch.float32, "rceil")]:
        x = _hard(dtype)
        _assert_equal_bits(compiled(x, elem, mode), _parts(x, elem, mode))
        if elem in FLOAT8:
            assert len(_kernels(compiled, x, elem, mode)) == 1
            assert len(_kernels(_parts, x, elem, mode)) == 1


@pytest.mark.gpu
def test_quantising_is_part_of_what_makes_its_input() -> None:
    """SwiGLU and to_mx become one kernel, and so do dequantize and the following operations."""
    gate, up = (torch.randn(256, 4096, device="cuda", dtype=torch.float32) for _ in range(2))

    def forward(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _parts(gate * up, torch.float8_e4m3fn, "rceil")

    def backward(mx: MXTensor) -> torch.Tensor:
        return mx.dequantize(torch.float32) * 2

    compiled = torch.compile(forward, fullgraph=True)
    assert len(_kernels(compiled, gate, up)) == 1
    _assert_equal_bits(compiled(gate, up), forward(gate, up))
    mx = MXTensor.to_mx(gate)
    compiled = torch.compile(backward, fullgraph=True)
    assert len(_kernels(compiled, mx)) == 1
    assert torch.equal(compiled(mx), backward(mx))


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_pass_through_graphs(backend: str) -> None:
    """MXTensors are results and arguments of graphs, moved and multiplied inside."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)
    for make in (MXTensor.to_mx, NVFP4Tensor.to_nvfp4):

        def work(x: torch.Tensor, y: torch.Tensor, make: Any = make) -> tuple[torch.Tensor, ...]:
            made = make(x)
            return made, (y[:32].t().contiguous().t() @ made.t()), y.dequantize().sum(0)

        y = make(-x)
        got, want = torch.compile(work, backend=backend, fullgraph=True)(x, y), work(x, y)
        assert type(got[0]) is type(want[0])
        _assert_equal_bits([got[0].qdata, got[0].scale], [want[0].qdata, want[0].scale])
        # Sums may run in another order.
        torch.testing.assert_close(got[1], want[1], rtol=0.02, atol=0.05)
        torch.testing.assert_close(got[2], want[2], rtol=0.02, atol=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("levels", [1, 2])
def test_nvfp4_has_the_bits_of_eager(levels: int) -> None:
    """Every structured and random block, with both levels of scales."""
    x = _hard(torch.bfloat16).nan_to_num(1.0, posinf=1.0, neginf=-1.0)
    outer = per_tensor_amax_to_scale(x.abs().max()) if levels == 2 else None

    def parts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=outer)
        return made.qdata, made.scale, made.dequantize(torch.float32)

    _assert_equal_bits(torch.compile(parts, fullgraph=True)(x), parts(x))


LAYERS = {
    "e4m3": (MXLinear, MXLinearConfig()),
    "mixed": (MXLinear, MXLinearConfig("fp6_e3m2", torch.float4_e2m1fn_x2, torch.float8_e5m2)),
    "hp": (MXLinear, MXLinearConfig(wgrad_with_hp=True)),
    "nvfp4": (NVFP4Linear, NVFP4LinearConfig(stochastic_rounding=False)),
}


@pytest.mark.parametrize(
    ("kind", "config", "backend"),
    [
        pytest.param(*LAYERS["e4m3"], "aot_eager", id="e4m3"),
        *(pytest.param(*LAYERS[name], "inductor", marks=pytest.mark.gpu, id=f"{name}-gpu") for name in LAYERS),
    ],
)
def test_layers_train_compiled(kind: Any, config: Any, backend: str) -> None:
    """Output and gradients equal eager mode's up to the order of sums; without Inductor, bit for bit."""
    torch.manual_seed(0)
    layer = kind(128, 96, bias=False, device=DEVICE, dtype=torch.bfloat16, config=config)
    compiled = torch.compile(copy.deepcopy(layer), backend=backend, fullgraph=True)
    x, dy = torch.randn(4, 16, 128), torch.randn(4, 16, 96)
    results = []
    for each in (layer, compiled):
        into = x.bfloat16().to(DEVICE).requires_grad_()
        y = each(into)
        y.backward(dy.bfloat16().to(DEVICE))
        results.append((y.detach(), into.grad, each.weight.grad))
    for want, got in zip(*results, strict=True):
        assert (got - want).float().norm() <= 0.01 * want.float().norm()
        assert backend == "inductor" or torch.equal(got, want)


@pytest.mark.gpu
def test_models_train_compiled() -> None:
    """Two layers and the operations between them, forward and backward, in one graph.

    Inductor keeps intermediate values of fused operations in float32, where eager mode rounds them to bf16, so a later
    quantisation may round the other way. Configured to round as well, it agrees with eager mode. By default its
    gradients are as close to the unquantised gradients as eager mode's are.
    """
    torch.manual_seed(0)
    model = nn.Sequential(MXLinear(256, 512), nn.GELU(), MXLinear(512, 256)).to("cuda", torch.bfloat16)
    exact = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to("cuda", torch.float64)
    exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    compiled, rounding = (torch.compile(copy.deepcopy(model), fullgraph=True) for _ in range(2))
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    for each in (model, compiled):
        each(x).square().mean().backward()
    with inductor_config.patch(emulate_precision_casts=True):
        torch._dynamo.reset()
        rounding(x).square().mean().backward()
    exact(x.double()).square().mean().backward()
    trained = (model, compiled._orig_mod, rounding._orig_mod)
    for name, truth in exact.named_parameters():
        eager, fused, rounded = (each.get_parameter(name).grad for each in trained)
        assert _distance(rounded, eager) < 0.03, name
        assert _distance(fused, truth.grad) < 1.05 * _distance(eager, truth.grad), name


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Distance of `one` from `other`, relative to `other`."""
    return ((one.double() - other.double()).norm() / other.double().norm()).item()
