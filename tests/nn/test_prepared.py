"""Prepared weights: when copies are built, their values, and their fixed addresses."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks as hooks

from tests.ops.grouped import DEVICE
from triton_ep.errors import ConfigError, InputError
from triton_ep.mx.tensor import MXTensor
from triton_ep.nn import prepared as module
from triton_ep.nn.prepared import PreparedWeights
from triton_ep.ops.row_scales import RowScaled
from triton_ep.reference import experts as oracle


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The uses for which weights were prepared so far."""
    calls: list[str] = []
    stock = module.prepare_weights

    def counted(w: torch.Tensor, uses: str, **rest: Any) -> Any:
        calls.append(uses)
        return stock(w, uses, **rest)

    monkeypatch.setattr(module, "prepare_weights", counted)
    return calls


def _weight(n: int = 64, k: int = 32) -> torch.nn.Parameter:
    values = torch.randn(2, n, k, generator=torch.Generator().manual_seed(0)).bfloat16()
    return torch.nn.Parameter(values.to(DEVICE))


def _check(prepared: PreparedWeights, weight: torch.Tensor, use: str) -> RowScaled:
    """The copy equals the oracle's copy of the current weight."""
    got = prepared.get(weight, use)
    assert isinstance(got, RowScaled)
    values = weight.detach().cpu()
    elements, scale = oracle.rebase_rows(*oracle.mxfp8.quantize(values if use == "fprop" else values.transpose(1, 2)))
    assert torch.equal(got.qdata.cpu().view(torch.uint8), elements.view(torch.uint8))
    assert torch.equal(got.scale.cpu(), scale)
    return got


def test_copies_are_made_when_weights_have_changed(made: list[str]) -> None:
    """Copies are built once per version, both together if both are stale, and always at the same address."""
    weight, prepared = _weight(), PreparedWeights()
    first = {use: _check(prepared, weight, use) for use in ("fprop", "dgrad")}
    assert made == ["fprop", "dgrad"]
    assert all(_check(prepared, weight, use) is first[use] for use in first)
    assert made == ["fprop", "dgrad"]
    with torch.no_grad():
        weight.mul_(2).add_(0.01)
    for use, kept in first.items():
        assert _check(prepared, weight, use).qdata.data_ptr() == kept.qdata.data_ptr()
    assert made == ["fprop", "dgrad", "both"]
    other = _weight()
    _check(prepared, other, "fprop")  # another address
    assert len(made) == 4


@pytest.mark.skipif(DEVICE != "cpu", reason="memory of numpy is on the CPU")
def test_another_weight_at_the_same_address() -> None:
    """Memory that was freed is given to the next tensor: address and version are the same, but not the storage."""
    weight, prepared = _weight(), PreparedWeights()
    memory = weight.detach().view(torch.int16).numpy().copy()
    seen = set()
    for _ in range(3):
        weight.data = torch.from_numpy(memory).view(torch.bfloat16)
        seen.add((weight.data_ptr(), weight._version))
        _check(prepared, weight, "fprop")
        memory ^= -(2**15)  # the signs
    assert len(seen) == 1


def test_what_version_counters_do_not_show(made: list[str]) -> None:
    """A write to `.data` is seen after a step of any optimizer, or after `invalidate`."""
    weight, prepared = _weight(), PreparedWeights()
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for tell in (optimizer.step, prepared.invalidate):
        _check(prepared, weight, "fprop")
        weight.data.mul_(-1)
        tell()
        _check(prepared, weight, "fprop")
    assert len(made) == 3
    prepared.refresh(weight)  # nothing to do
    weight.data.mul_(-1)
    prepared.invalidate()
    prepared.refresh(weight)
    assert made[3:] == ["fprop"]


@pytest.mark.parametrize("precision", ["default", "exact"])
def test_copies_of_inference_mode_are_made_anew_outside_of_it(precision: str) -> None:
    """An evaluation under torch.inference_mode makes the copies, which training then updates."""
    weight, prepared = _weight(), PreparedWeights(precision=precision)
    with torch.inference_mode():
        for use in ("fprop", "dgrad"):
            prepared.get(weight, use)
    with torch.no_grad():
        weight.mul_(2)
    for use in ("fprop", "dgrad"):
        seen, wanted = prepared.get(weight, use), PreparedWeights("none", precision).get(weight, use)
        if isinstance(seen, RowScaled):
            assert torch.equal(seen.scale, wanted.scale)
            seen, wanted = seen.qdata.float(), wanted.qdata.float()
        assert torch.equal(seen, wanted)


@pytest.mark.parametrize("precision", ["default", "exact"])
def test_copies_of_inference_tensors(precision: str) -> None:
    """A model that was made under torch.inference_mode has weights without version counters."""
    with torch.inference_mode():
        weight, prepared = _weight().detach().clone(), PreparedWeights(precision=precision)
        assert weight.is_inference()
        prepared.get(weight, "fprop")
        weight.mul_(2)
    with torch.no_grad():
        prepared.invalidate()
        seen, wanted = (each.get(weight, "fprop") for each in (prepared, PreparedWeights("none", precision)))
    if isinstance(seen, RowScaled):
        seen, wanted = seen.scale, wanted.scale
    assert torch.equal(seen, wanted)


@pytest.mark.parametrize(("kind", "calls"), [("fprop", ["fprop", "dgrad", "dgrad"]), ("none", ["fprop", "dgrad"] * 2)])
def test_fewer_copies(made: list[str], kind: str, calls: list[str]) -> None:
    """Copies that are not kept are built at every use."""
    weight, prepared = _weight(), PreparedWeights(kind)
    for _ in range(2):
        for use in ("fprop", "dgrad"):
            _check(prepared, weight, use)
    assert made == calls


def test_weights_of_one_shape_have_names(made: list[str]) -> None:
    """Without names, two weights of one shape replace each other's copy; with names both copies stay."""
    one, two, prepared = _weight(), _weight(), PreparedWeights()
    for _ in range(2):
        prepared.get(one, "fprop", name="w13")
        prepared.get(two, "fprop", name="w2")
    assert len(made) == 2
    assert prepared.get(_weight(96), "fprop", name="w2").shape == (2, 96, 32)  # another model's


@pytest.mark.parametrize("use", ["fprop", "dgrad"])
def test_exact_values(use: str) -> None:
    """bf16 values of MXFP8 along the sum of the product, in the weight's layout and at a fixed address."""
    weight, prepared = _weight(), PreparedWeights(precision="exact")
    found = []
    for _ in range(2):
        values = prepared.get(weight, use)
        assert isinstance(values, torch.Tensor) and values.is_contiguous() and values.dtype == torch.bfloat16
        along = weight.detach().cpu() if use == "fprop" else weight.detach().cpu().transpose(1, 2)
        want = oracle.mx_values(along.contiguous())
        assert torch.equal(values.cpu().double(), want if use == "fprop" else want.transpose(1, 2))
        found.append(values.data_ptr())
        with torch.no_grad():
            weight.mul_(3)
    assert found[0] == found[1]
    mx = MXTensor.to_mx(_weight().detach())
    again = prepared.get(mx, use, name="mx")
    assert isinstance(again, torch.Tensor)
    if use == "fprop":
        assert torch.equal(again, mx.dequantize(torch.bfloat16))


def test_capture_takes_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured graphs read up-to-date copies; stale ones are refused, because a replay would not rebuild them."""
    weight, prepared = _weight(), PreparedWeights()
    kept = prepared.get(weight, "fprop")
    monkeypatch.setattr(module, "owns_memory", lambda _: True)
    assert prepared.get(weight, "fprop") is kept
    with pytest.raises(InputError, match="missing"):
        prepared.get(weight, "dgrad")
    prepared.invalidate()
    with pytest.raises(InputError, match="out of date"):
        prepared.get(weight, "fprop")
    assert isinstance(PreparedWeights("none").get(weight, "fprop"), RowScaled)


def test_copies_of_modules_keep_nothing() -> None:
    """Copied or pickled objects keep only the options; optimizers do not call deleted objects."""
    prepared = PreparedWeights("fprop", "fast")
    weight = _weight()
    prepared.get(weight, "fprop")
    for other in (copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        assert (other.prepared, other.precision, other._kept) == ("fprop", "fast", {})
    del prepared, other
    gc.collect()
    before = len(hooks)
    prepared = PreparedWeights()
    assert len(hooks) == before + 1
    del prepared
    gc.collect()
    assert len(hooks) == before


def test_errors() -> None:
    """Unknown options are refused."""
    with pytest.raises(ConfigError, match="'all'"):
        PreparedWeights("all")
    with pytest.raises(ConfigError, match="'exactly'"):
        PreparedWeights(precision="exactly")
    with pytest.raises(InputError, match="'wgrad'"):
        PreparedWeights().get(_weight(), "wgrad")
