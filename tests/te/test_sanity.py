"""Creation, storage, loading, training and misuse of modules."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import triton_ep.integrations.te as te
from tests.te.rule import DEVICE
from triton_ep.errors import InputError

pytestmark = [pytest.mark.plain, pytest.mark.filterwarnings("ignore:MXFP8 is emulated")]


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.bfloat16)


def _make(kind: str, **options: object) -> torch.nn.Module:
    options = {"params_dtype": torch.bfloat16, "device": DEVICE, **options}
    return te.Linear(64, 32, **options) if kind == "linear" else te.GroupedLinear(3, 64, 32, **options)


def _run(module: torch.nn.Module, x: torch.Tensor, enabled: bool = True) -> torch.Tensor:
    with te.autocast(enabled=enabled):
        return module(x) if isinstance(module, te.Linear) else module(x, [32, 0, 32])


def test_names_and_defaults() -> None:
    """Parameters have TransformerEngine's names; initial weights are normal(0, 0.023), biases zero."""
    assert [name for name, _ in _make("linear").named_parameters()] == ["weight", "bias"]
    names = [name for name, _ in _make("grouped").named_parameters()]
    assert sorted(names) == ["bias0", "bias1", "bias2", "weight0", "weight1", "weight2"]
    assert [name for name, _ in _make("grouped", bias=False).named_parameters()] == ["weight0", "weight1", "weight2"]
    large = te.Linear(512, 512, device=DEVICE)
    assert large.weight.dtype == torch.get_default_dtype() and large.weight.device.type == torch.device(DEVICE).type
    assert abs(float(large.weight.detach().std()) - 0.023) < 1e-3 and not large.bias.any()
    filled = te.Linear(32, 32, init_method=lambda w: w.fill_(2.0), device=DEVICE)
    assert bool((filled.weight == 2).all())


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_state_dict_round_trip(kind: str, quantised: bool) -> None:
    """Saved and loaded, through a file with weights_only, into a module of either kind: the same results."""
    with te.quantized_model_init(enabled=quantised):
        module = _make(kind)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    x = _randn(64, 64)
    want = _run(module, x)
    for other_quantised in (False, True):
        with te.quantized_model_init(enabled=other_quantised):
            other = _make(kind)
        other.load_state_dict(state)
        assert torch.equal(_run(other, x), want)
    assert torch.equal(_run(copy.deepcopy(module), x), want)


@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_quantized_model_init(kind: str) -> None:
    """Weights are MXFP8Tensors in both directions and train; results equal the same values in high precision."""
    with te.quantized_model_init(preserve_high_precision_init_val=True):
        module = _make(kind)
    plain = _make(kind)
    x = _randn(64, 64)
    for (name, parameter), other in zip(module.named_parameters(), plain.parameters(), strict=True):
        if name.startswith("weight"):
            assert isinstance(parameter, te.MXFP8Tensor) and isinstance(parameter, torch.nn.Parameter)
            assert parameter.get_usages() == {"rowwise": True, "columnwise": True}
            initial = parameter.get_high_precision_init_val()
            assert initial is not None and initial.device.type == "cpu"
            again = te.MXFP8Quantizer(te.DType.kFloat8E4M3)(initial)
            assert torch.equal(again.dequantize(), parameter.detach().cpu().dequantize())
            other.data.copy_(initial)
            parameter.clear_high_precision_init_val()
            assert parameter.get_high_precision_init_val() is None
    y, z = _run(module, x), _run(plain, x)
    assert torch.equal(y, z)
    y.backward(_randn(64, 32, seed=1))
    z.backward(_randn(64, 32, seed=1))
    for parameter, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)
    assert _run(module, x, enabled=False).shape == (64, 32)

    before = [p.detach().clone() for p in module.parameters()]
    for optimizer in (torch.optim.SGD(module.parameters(), lr=4.0), torch.optim.AdamW(module.parameters(), lr=0.1)):
        optimizer.step()
    for old, (name, new) in zip(before, module.named_parameters(), strict=True):
        assert isinstance(new, te.MXFP8Tensor) == name.startswith("weight")
        changed = not torch.equal(old.dequantize() if isinstance(old, te.MXFP8Tensor) else old, new.detach() + 0)
        assert changed == bool(new.grad.any()) or "bias" in name


def test_recipe_mismatch_of_quantised_weights() -> None:
    """Weights in MXFP8 under a state of another recipe family, which autocast itself would refuse."""
    with te.quantized_model_init():
        module = _make("linear", name="proj")

    class Delayed(te.Recipe):
        pass

    state = te.FP8GlobalStateManager.get_autocast_state()
    try:
        te.FP8GlobalStateManager.set_autocast_state(te.AutocastState(True, False, Delayed()))
        with pytest.raises(RuntimeError, match=r"Recipe mismatch for 'proj\.weight'"):
            module(_randn(32, 64))
    finally:
        te.FP8GlobalStateManager.set_autocast_state(state)


def test_moving_a_module_keeps_its_kind() -> None:
    """.to() of dtype and device: plain weights stay in one storage, or work from separate ones."""
    module, x = _make("grouped", bias=False), _randn(64, 64)
    want = _run(module, x)
    assert torch.equal(_run(module.to(torch.float32).to(torch.bfloat16), x), want)
    with te.quantized_model_init():
        quantised = _make("linear")
    with torch.no_grad():  # an autograd graph would hold the weight, which then could not be moved
        want = _run(quantised, x)
    moved = quantised.to(DEVICE)
    assert isinstance(moved.weight, te.MXFP8Tensor) and torch.equal(_run(moved, x), want)


def test_return_bias() -> None:
    """The result without the bias, and the bias; for groups all biases."""
    module = _make("linear", return_bias=True)
    out, bias = _run(module, _randn(64, 64))
    assert bias is module.bias and out.shape == (64, 32)
    out, biases = _run(_make("grouped", return_bias=True), _randn(64, 64))
    assert len(biases) == 3 and out.shape == (64, 32)


def test_empty_inputs() -> None:
    """No tokens at all: empty results, zero gradients."""
    for module in (_make("linear"), _make("grouped")):
        x = _randn(0, 64).requires_grad_()
        with te.autocast():
            y = module(x) if isinstance(module, te.Linear) else module(x, [0, 0, 0])
        y.sum().backward()
        assert y.shape == (0, 32) and x.grad.shape == (0, 64)
        assert not any(p.grad.any() for p in module.parameters())


def test_torch_autocast_decides_the_dtype() -> None:
    """Under torch.autocast the result has its dtype."""
    module = te.Linear(64, 32, device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16), te.autocast():
        assert module(_randn(32, 64).float()).dtype == torch.bfloat16
    with te.autocast():
        assert module(_randn(32, 64).float()).dtype == torch.float32


def test_what_is_refused() -> None:
    """Each error names the numbers that do not fit."""
    with pytest.raises(InputError, match="tp_size"):
        te.Linear(32, 32, tp_size=2)
    with pytest.raises(InputError, match="params_dtype"):
        te.Linear(32, 32, params_dtype=torch.int8)
    with pytest.raises(InputError, match="at least 1"):
        te.GroupedLinear(0, 32, 32)
    odd = te.Linear(40, 32, params_dtype=torch.bfloat16, device=DEVICE)
    assert odd(_randn(4, 40)).shape == (4, 32)
    with te.autocast(), pytest.raises(InputError, match="multiples of 32"):
        odd(_randn(4, 40))
    with pytest.raises(InputError, match="in_features, 64"):
        _make("linear")(_randn(4, 32))
    grouped = _make("grouped")
    for splits in ([32, 32], [32, 0, 31], [65, -1, 0]):
        with pytest.raises(InputError, match="m_splits"):
            grouped(_randn(64, 64), splits)
    for splits in (torch.tensor([1.0, 2.0, 3.0]), [31.5, 0, 32.5], None):
        with pytest.raises(InputError, match="m_splits"):
            grouped(_randn(64, 64), splits)
    with pytest.raises(InputError, match=r"inp is \[64\]; it must be \[..., in_features\] with rows"):
        grouped(_randn(64), [1, 0, 0])


@pytest.mark.parametrize("quantised", [False, True], ids=["", "quantised"])
@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_deferred_init(kind: str, quantised: bool) -> None:
    """On "meta" nothing is filled; reset_parameters creates the parameters, keeps frozen ones frozen, and quantises."""
    for materialise in (lambda module: None, lambda module: module.to_empty(device=DEVICE)):
        with te.quantized_model_init(enabled=quantised, preserve_high_precision_init_val=True):
            module = _make(kind, device="meta", delay_wgrad_compute=True)
        assert all(parameter.is_meta for parameter in module.parameters())
        first = next(parameter for name, parameter in module.named_parameters() if name.startswith("weight"))
        first.requires_grad_(False)
        materialise(module)
        module.reset_parameters()
        weights = [parameter for name, parameter in module.named_parameters() if name.startswith("weight")]
        assert [w.requires_grad for w in weights] == [False] + [True] * (len(weights) - 1)
        for weight in weights:
            assert weight.device.type == torch.device(DEVICE).type and weight.skip_backward_post_hook
            assert abs(float(weight.detach().float().std()) - 0.023) < 3e-3
            assert isinstance(weight, te.MXFP8Tensor) == quantised
            assert not quantised or weight.get_high_precision_init_val() is not None
        assert _run(module, _randn(64, 64)).shape == (64, 32)


def test_sharded_weights_are_not_replaced() -> None:
    """A DTensor, which a framework keeps using, cannot be silently replaced by an MXFP8Tensor."""
    with te.quantized_model_init():
        module = _make("linear", device="meta")
    module.to_empty(device=DEVICE)
    module.weight.device_mesh = object()  # as a DTensor has
    with pytest.raises(InputError, match="before fully_shard"):
        module.reset_parameters()
