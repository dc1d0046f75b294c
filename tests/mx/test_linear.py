"""MXLinear, NVFP4Linear and quantize_: operands of the three products, thresholds, sizes, conversion of models."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.mx.blocks import DEVICE
from triton_ep.errors import InputError
from triton_ep.mx.convert import (
    MXDynamicActivationMXWeightConfig,
    MXWeightOnlyConfig,
    NVFP4DynamicActivationNVFP4WeightConfig,
    NVFP4WeightOnlyConfig,
    QuantizedLinear,
    is_linear,
    quantize_,
)
from triton_ep.mx.linear import MXLinear, MXLinearConfig, mx_linear
from triton_ep.mx.nvfp4 import NVFP4Tensor
from triton_ep.mx.nvfp4_linear import NVFP4Linear, NVFP4LinearConfig, nvfp4_linear
from triton_ep.mx.tensor import MXTensor
from triton_ep.reference import mxfp8 as reference

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ELEMENTS = [E4M3, E5M2, "fp6_e2m3", "fp6_e3m2", torch.float4_e2m1fn_x2]
MIXED = (E4M3, "fp6_e2m3", E5M2)


def _randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def _snr(want: torch.Tensor, got: torch.Tensor) -> float:
    want, got = want.detach().double(), got.detach().double()
    return float(20 * torch.log10(want.norm() / (want - got).norm()))


def _gradients(linear: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """y, dx and dW."""
    x = x.clone().requires_grad_()
    linear.zero_grad()
    y = linear(x)
    y.backward(dy)
    return y.detach(), x.grad, linear.weight.grad.clone()


def _thresholds(elem: Any) -> tuple[float, float, float]:
    """Least dB of y, dx and dW for the format."""
    return (18.0, 14.0, 18.0) if elem is E4M3 else (8.0, 8.0, 10.0)


@pytest.mark.parametrize(("shape", "bias"), [((64, 128), False), ((2, 24, 128), True), ((1, 3, 5, 128), True)], ids=str)
@pytest.mark.parametrize("elem", ELEMENTS, ids=str)
def test_gradients_reach_their_thresholds(elem: Any, bias: bool, shape: tuple[int, ...]) -> None:
    """Output and both gradients, against the layer in high precision; the bias's gradient is exact."""
    torch.manual_seed(1)
    linear = nn.Linear(128, 96, bias=bias, device=DEVICE, dtype=torch.bfloat16)
    quantized = MXLinear.from_float(copy.deepcopy(linear), MXLinearConfig(elem))
    x, dy = _randn(*shape), _randn(*shape[:-1], 96, seed=1)
    wanted, got = _gradients(linear, x, dy), _gradients(quantized, x, dy)
    for name, want, result, threshold in zip(("y", "dx", "dW"), wanted, got, _thresholds(elem), strict=True):
        assert (result.shape, result.dtype) == (want.shape, want.dtype)
        assert _snr(want, result) >= threshold, name
    if bias:
        torch.testing.assert_close(quantized.bias.grad, linear.bias.grad)


def _rounded(x: torch.Tensor, elem: Any, dim: int) -> torch.Tensor:
    """Float32 values after quantisation along a dimension, by the oracle; a short last block stays short."""
    rows = x.movedim(dim, -1).float()
    size = rows.shape[-1]
    filled = nn.functional.pad(rows, (0, -size % 32)).cpu()
    codes, scale = reference.quantize(filled, elem, "rceil")
    return reference.dequantize(codes, scale, torch.float32)[..., :size].movedim(-1, dim).to(x.device)


@pytest.mark.parametrize("sizes", [(64, 128, 96), (7, 40, 50), (33, 31, 1), (1, 64, 32)], ids=str)
@pytest.mark.parametrize("hp", [False, True])
def test_each_product_is_of_what_the_oracle_rounds(sizes: tuple[int, int, int], hp: bool) -> None:
    """Three formats, one per operand, each quantised along the product's sum; no size is a multiple of 32."""
    rows, k, n = sizes
    of_x, of_w, of_dy = E4M3, E5M2, E4M3
    linear = nn.Linear(k, n, bias=False, device=DEVICE)
    x, dy = _randn(rows, k, dtype=torch.float32), _randn(rows, n, seed=1, dtype=torch.float32)
    config = MXLinearConfig(of_x, of_w, of_dy, wgrad_with_hp=hp)
    y, dx, dw = _gradients(MXLinear.from_float(copy.deepcopy(linear), config), x, dy)
    w = linear.weight.detach()
    torch.testing.assert_close(y, _rounded(x, of_x, -1) @ _rounded(w, of_w, -1).t())
    torch.testing.assert_close(dx, _rounded(dy, of_dy, -1) @ _rounded(w, of_w, 0))
    if hp:
        torch.testing.assert_close(dw, dy.t() @ x)
    else:
        torch.testing.assert_close(dw, _rounded(dy, of_dy, 0).t() @ _rounded(x, of_x, 0))


def test_formats_per_operand_reach_their_thresholds() -> None:
    """e4m3 inputs, fp6 weights, e5m2 gradients; high-precision wgrad is exact; a larger block; all modes."""
    linear = nn.Linear(128, 96, bias=False, device=DEVICE)
    x, dy = _randn(64, 128, dtype=torch.float32), _randn(64, 96, seed=1, dtype=torch.float32)
    want = _gradients(linear, x, dy)
    for config in (MXLinearConfig(*MIXED), MXLinearConfig(block_size=64), MXLinearConfig(*MIXED, wgrad_with_hp=True)):
        got = _gradients(MXLinear.from_float(copy.deepcopy(linear), config), x, dy)
        assert all(_snr(a, b) >= limit for a, b, limit in zip(want, got, (18, 14, 14), strict=True))
        assert (_snr(want[2], got[2]) > 40) == config.wgrad_with_hp
    results = [
        _gradients(MXLinear.from_float(copy.deepcopy(linear), MXLinearConfig(E5M2, scaling_mode=mode)), x, dy)[0]
        for mode in ("rceil", "floor", "ceil", "even")
    ]
    assert len({float(each.double().sum()) for each in results}) > 1


@pytest.mark.parametrize("make", [MXLinear.from_float, NVFP4Linear.from_float])
def test_autocast_checkpointing_and_hooks(make: Any) -> None:
    """autocast sets the dtype of products, not of gradients; recomputation gives the same results; hooks stay."""
    linear = nn.Linear(64, 64, device=DEVICE)
    seen: list[tuple[int, ...]] = []
    linear.register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    quantized = make(linear)
    x = _randn(8, 64, dtype=torch.float32).requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16):
        y = quantized(x)
    assert (y.dtype, seen) == (torch.bfloat16, [(8, 64)])
    y.sum().backward()
    assert x.grad.dtype == quantized.weight.grad.dtype == torch.float32
    gradients = []
    for recompute in (False, True):
        quantized.zero_grad()
        torch.manual_seed(3)
        y = checkpoint(quantized, x, use_reentrant=False) if recompute else quantized(x)
        y.square().sum().backward()
        gradients.append(quantized.weight.grad.clone())
    assert torch.equal(*gradients)


@pytest.mark.parametrize("levels", [True, False])
def test_nvfp4_training_reaches_its_thresholds(levels: bool) -> None:
    """Output and gradients of NVFP4 operands, with and without stochastic rounding and the transform."""
    linear = nn.Linear(128, 96, device=DEVICE, dtype=torch.bfloat16)
    x, dy = _randn(2, 40, 128), _randn(2, 40, 96, seed=1)
    want = _gradients(linear, x, dy)
    for config in (
        NVFP4LinearConfig(levels),
        NVFP4LinearConfig(levels, stochastic_rounding=False, hadamard_signs=None),
        NVFP4LinearConfig(levels, wgrad_with_hp=True),
    ):
        got = _gradients(NVFP4Linear.from_float(copy.deepcopy(linear), config), x, dy)
        assert all(_snr(a, b) >= limit for a, b, limit in zip(want, got, (14, 12, 12), strict=True))
        assert (_snr(want[2], got[2]) > 40) == config.wgrad_with_hp


def test_nvfp4_gradients_are_unbiased() -> None:
    """The mean of dx over many draws is the product of the unrounded dy and the rounded weight; dW likewise."""
    x, dy = (_randn(16, 32, seed=seed, dtype=torch.float32) for seed in (0, 2))
    weight = _randn(32, 32, seed=1, dtype=torch.float32)
    x.requires_grad_()
    weight.requires_grad_()
    config = NVFP4LinearConfig()
    # The expected mean of the draws: everything else unchanged, but no randomness in dy.
    rounded_w = NVFP4Tensor.to_nvfp4(
        weight.detach().t().contiguous(), per_tensor_scale=(weight.detach().abs().max() / 2688)
    ).dequantize()
    draws = []
    for seed in range(40):
        torch.manual_seed(seed)
        y = nvfp4_linear(x, weight, config=config)
        draws.append([each.double() for each in torch.autograd.grad(y, (x, weight), dy)])
    dx, dw = (torch.stack(each) for each in zip(*draws, strict=True))
    want = dy.double() @ rounded_w.double().t()
    assert ((dx.mean(0) - want).abs() <= 5.5 * dx.std(0) / len(draws) ** 0.5 + 1e-5).all()
    assert dx.std(0).min() > 0
    # dW also uses x rounded to nearest, so it is unbiased only in dy, in which it is linear.
    zero = torch.autograd.grad(nvfp4_linear(x, weight, config=config), weight, torch.zeros_like(dy))[0]
    assert zero.eq(0).all()
    assert _snr(dy.double().t() @ x.detach().double(), dw.mean(0)) > 18


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64, bias=False))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.inner(x))


def _model() -> _Model:
    torch.manual_seed(4)
    return _Model().to(DEVICE, torch.bfloat16)


def _not_the_head(module: nn.Module, name: str) -> bool:
    return is_linear(module, name) and name != "head"


CONVERSIONS = [
    (MXLinearConfig(), MXLinear, 25),
    (NVFP4LinearConfig(), NVFP4Linear, 14),
    (MXWeightOnlyConfig(), nn.Linear, 25),
    (MXWeightOnlyConfig("fp6_e2m3"), nn.Linear, 25),
    (MXWeightOnlyConfig(torch.float4_e2m1fn_x2), nn.Linear, 13),
    (NVFP4WeightOnlyConfig(), nn.Linear, 18),
    (MXDynamicActivationMXWeightConfig(), QuantizedLinear, 25),
    (MXDynamicActivationMXWeightConfig(torch.float4_e2m1fn_x2, torch.float4_e2m1fn_x2), QuantizedLinear, 12),
    (MXDynamicActivationMXWeightConfig(E4M3, torch.float4_e2m1fn_x2), QuantizedLinear, 12),
    (NVFP4DynamicActivationNVFP4WeightConfig(), QuantizedLinear, 15),
    (NVFP4DynamicActivationNVFP4WeightConfig(False), QuantizedLinear, 15),
]


@pytest.mark.parametrize(("config", "kind", "decibels"), CONVERSIONS, ids=lambda each: str(each)[:60])
def test_models_are_converted_by_a_filter(config: Any, kind: type, decibels: float) -> None:
    """Only the chosen layers change; outputs agree up to the format; copies, state dicts and other dtypes work."""
    reference_model, model = _model(), _model()
    x = _randn(2, 9, 64)
    quantize_(model, config, _not_the_head)
    assert [type(layer) for layer in (model.inner[0], model.inner[2], model.head)] == [kind, kind, nn.Linear]
    assert type(model.head.weight.detach()) is torch.Tensor
    again = copy.deepcopy(model)
    with torch.no_grad():
        want, got = reference_model.inner[0](x), model.inner[0](x)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert _snr(want, got) >= decibels
    with torch.no_grad():
        assert torch.equal(again(x), model(x))
        with torch.inference_mode():
            assert torch.equal(again(x), model(x)) and torch.equal(model.inner[0](x), got)
        fresh = _model()
        quantize_(fresh, config, _not_the_head)
        for parameter in fresh.parameters():
            if type(parameter) is nn.Parameter:
                parameter.zero_()
        fresh.load_state_dict(model.state_dict())
        assert torch.equal(fresh(x), model(x))
        if kind is nn.Linear:
            first = model.inner[0]
            assert torch.equal(first(x), nn.functional.linear(x, first.weight.dequantize(), first.bias))
    trains = kind in (MXLinear, NVFP4Linear)
    assert model.inner[0].weight.requires_grad == trains and model.head.weight.requires_grad
    assert isinstance(model.inner[0].weight, MXTensor | NVFP4Tensor) != trains


def test_state_of_quantised_weights_goes_into_a_plain_layer() -> None:
    """With assign=True a torch.nn.Linear takes the quantised weights, without it their values."""
    model = _model()
    quantize_(model, MXWeightOnlyConfig())
    state = model.state_dict()
    assert isinstance(state["head.weight"], MXTensor)
    plain, assigned = _model(), _model()
    plain.load_state_dict(state)
    assigned.load_state_dict(state, assign=True)
    x = _randn(3, 64)
    assert type(plain.head.weight) is nn.Parameter and isinstance(assigned.head.weight, MXTensor)
    with torch.no_grad():
        assert torch.equal(plain(x), model(x)) and torch.equal(assigned(x), model(x))
        assert assigned.float()(x.float()).dtype == torch.float32


def test_a_step_of_training() -> None:
    """Parameters stay the optimizer's objects; the loss falls as in high precision."""
    losses = []
    for config in (None, MXLinearConfig(), NVFP4LinearConfig()):
        model = _model().float()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        if config is not None:
            quantize_(model, config)
        x, target = _randn(32, 64, dtype=torch.float32), _randn(32, 10, seed=2, dtype=torch.float32)
        for _ in range(8):
            optimizer.zero_grad()
            loss = (model(x) - target).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] < 0.95
    assert all(abs(loss - losses[0]) < 0.12 for loss in losses[1:])


MISTAKES = {
    "no config": (lambda m: quantize_(m, "mxfp8"), "must be one of MXLinearConfig"),
    "not linear": (lambda m: quantize_(m, MXLinearConfig(), lambda module, name: name == "inner.1"), "inner.1, a GELU"),
    "twice": (lambda m: (quantize_(m, MXWeightOnlyConfig()), quantize_(m, MXWeightOnlyConfig(), _all)), "already"),
    "in_features": (lambda m: quantize_(nn.Linear(40, 8), MXWeightOnlyConfig()), "40 input features"),
    "element": (lambda m: quantize_(m, MXWeightOnlyConfig("fp5")), "fp5"),
    "element of inputs": (lambda m: quantize_(m, MXDynamicActivationMXWeightConfig("fp5")), "fp5"),
    "path at conversion": (
        lambda m: quantize_(m, MXDynamicActivationMXWeightConfig(path="cutlass")),
        "path is 'cutlass'",
    ),
    "no block": (lambda m: quantize_(m, MXWeightOnlyConfig(block_size=0)), "the weight of inner.0 .* block_size, 0"),
    "dtype of the last layer": (
        lambda m: (m.head.double(), quantize_(m, MXWeightOnlyConfig())),
        "the weight of head .*torch.float64",
    ),
    "dtype of the last layer, NVFP4": (
        lambda m: (m.head.double(), quantize_(m, NVFP4WeightOnlyConfig())),
        "the weight of head .*torch.float64",
    ),
    "path": (lambda m: MXLinearConfig(path="fast"), "fast"),
    "block": (lambda m: MXLinearConfig(torch.float4_e2m1fn_x2, block_size=7), "whole bytes"),
    "mode": (lambda m: MXLinearConfig(scaling_mode="nearest"), "nearest"),
    "shapes": (lambda m: mx_linear(torch.zeros(2, 8), torch.zeros(4, 9)), r"\[2, 8\] and \[4, 9\]"),
    "dtypes": (lambda m: mx_linear(torch.zeros(2, 8), torch.zeros(4, 8).half()), "torch.autocast"),
    "subclass": (lambda m: MXLinear.from_float(MXLinear(8, 8)), "not a MXLinear"),
    "nvfp4 subclass": (lambda m: NVFP4Linear.from_float(MXLinear(8, 8)), "not a MXLinear"),
    "signs": (lambda m: NVFP4LinearConfig(hadamard_signs=1 << 20), "1048576"),
}


def _all(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear)


@pytest.mark.parametrize(("mistake", "text"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_named(mistake: Any, text: str) -> None:
    """Errors leave the model unchanged."""
    model = _model()
    with pytest.raises(InputError, match=text):
        mistake(model)
    if text != "already":
        assert all(type(p) is nn.Parameter for p in model.parameters())


def test_a_bias_has_one_value_per_column() -> None:
    """Another shape is refused; another dtype does not change that of the result."""
    x, weight = (torch.randn(rows, 32, device=DEVICE).bfloat16() for rows in (2, 4))
    assert mx_linear(x, weight, torch.randn(4, device=DEVICE)).dtype == torch.bfloat16
    for shape in ((1,), (2, 1), (3, 2, 4), (5,)):
        with pytest.raises(InputError, match=r"bias must be \[4\], it is"):
            mx_linear(x, weight, torch.zeros(shape, device=DEVICE).bfloat16())
