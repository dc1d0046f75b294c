"""Block-scaled tensors in files: torch.save and safetensors, fresh processes, versions, state dicts of models."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.mx.blocks import DEVICE
from tests.patience import LIMIT_S
from triton_ep.errors import InputError
from triton_ep.mx import serialize
from triton_ep.mx.convert import (
    MXDynamicActivationMXWeightConfig,
    MXWeightOnlyConfig,
    NVFP4DynamicActivationNVFP4WeightConfig,
    NVFP4WeightOnlyConfig,
    quantize_,
)
from triton_ep.mx.nvfp4 import NVFP4Tensor
from triton_ep.mx.serialize import load_safetensors, save_safetensors
from triton_ep.mx.tensor import MXTensor

pytestmark = pytest.mark.plain
ROOT = Path(__file__).resolve().parents[2]


def _x(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def _state() -> dict[str, torch.Tensor]:
    """Every kind and format, transposed, sliced, swizzled, empty, and plain tensors of several dtypes."""
    x = _x(64, 128)
    outer = (x.abs().max() / 2688).float()
    return {
        "e4m3": MXTensor.to_mx(x),
        "e5m2.t": MXTensor.to_mx(x, torch.float8_e5m2, scaling_mode="floor").t(),
        "e2m3": MXTensor.to_mx(x.float(), "fp6_e2m3", 16)[5:9],
        "e3m2": MXTensor.to_mx(x.view(2, 32, 128), "fp6_e3m2"),
        "e2m1": MXTensor.to_mx(x, "fp4_e2m1", block_dim=0),
        "packed": MXTensor.to_mx(x, torch.float4_e2m1fn_x2, 64),
        "nothing": MXTensor.to_mx(x[:0]),
        "nvfp4": NVFP4Tensor.to_nvfp4(x),
        "nvfp4.two": NVFP4Tensor.to_nvfp4(x, per_tensor_scale=outer, is_swizzled_scales=True),
        "nvfp4.turned": NVFP4Tensor.to_nvfp4(x, per_tensor_scale=outer, hadamard_signs=99).t(),
        "plain": x,
        "step": torch.tensor(7),
        "flags": torch.tensor([True, False]),
        "plain.t": x.float().t(),
    }


def _assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert sorted(got) == sorted(want)
    for name, tensor in want.items():
        assert type(got[name]) is type(tensor), name
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape, name
        if type(tensor) is not torch.Tensor:
            assert got[name].__tensor_flatten__() == tensor.__tensor_flatten__(), name
            for part in tensor.__tensor_flatten__()[0]:
                one, other = (getattr(each, part).reshape(-1).view(torch.uint8).cpu() for each in (got[name], tensor))
                assert torch.equal(one, other), f"{part} of {name}"
        assert torch.equal(got[name].cpu(), tensor.cpu()), name


_LOAD = """
import os, sys, torch

def told(state):
    values = {k: v.dequantize() if hasattr(v, "block_dim") else v for k, v in state.items()}
    return {k: (type(state[k]).__name__, v.double().sum().item()) for k, v in values.items()}

child = os.fork()
if not child:
    import triton_ep
    triton_ep.MXTensor
    print(told(torch.load(sys.argv[1], weights_only=True)), flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
import triton_ep.mx
print(told(torch.load(sys.argv[1], weights_only=True)))
from triton_ep.mx.serialize import load_safetensors
print(told(load_safetensors(sys.argv[2])))
"""


def test_a_fresh_process_loads_it(tmp_path: Path) -> None:
    """A process that has imported only triton_ep.mx of this package, or only its public name MXTensor; torch.load with
    weights_only=True, and safetensors."""
    state = {name: tensor.cpu() for name, tensor in _state().items()}
    save_safetensors(state, tmp_path / "state.safetensors")
    command = [sys.executable, "-c", _LOAD, _saved(state, tmp_path), tmp_path / "state.safetensors"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    values = {name: x.dequantize() if hasattr(x, "block_dim") else x for name, x in state.items()}
    want = {name: (type(state[name]).__name__, x.double().sum().item()) for name, x in values.items()}
    assert [eval(line) for line in done.stdout.splitlines()[-3:]] == [want] * 3


def test_safetensors_keep_everything(tmp_path: Path) -> None:
    """Bytes and formats are kept, and the caller's text in the header; a failure leaves no file behind."""
    state = _state()
    save_safetensors(state, tmp_path / "s", {"model": "tiny"})
    _assert_same(load_safetensors(tmp_path / "s", DEVICE), state)
    _assert_same(torch.load(_saved(state, tmp_path), weights_only=True), state)
    with pytest.raises(InputError, match="complex64"):
        save_safetensors({"z": torch.zeros(2, dtype=torch.complex64)}, tmp_path / "bad")
    with pytest.raises(InputError, match=r"e4m3\.scale"):
        save_safetensors({"e4m3": state["e4m3"], "e4m3.scale": state["plain"]}, tmp_path / "bad")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s", "state.pt"]


def _saved(state: dict[str, torch.Tensor], folder: Path) -> Path:
    torch.save(state, folder / "state.pt")
    return folder / "state.pt"


def _header(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data, read as the format's description says."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert (8 + length) % 8 == 0
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def _write(path: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_the_file_is_what_the_format_says(tmp_path: Path) -> None:
    """Offsets without gaps from 0, dtypes and shapes of the parts, bytes in their places."""
    mx = MXTensor.to_mx(_x(4, 64))
    save_safetensors({"w": mx, "b": torch.arange(3.0)}, tmp_path / "s", {"model": "tiny"})
    header, data = _header(tmp_path / "s")
    about = header.pop("__metadata__")
    assert about["model"] == "tiny" and json.loads(about["triton_ep"])["version"] == serialize.FORMAT_VERSION
    assert header == {
        "w.qdata": {"dtype": "F8_E4M3", "shape": [4, 64], "data_offsets": [0, 256]},
        "w.scale": {"dtype": "U8", "shape": [4, 2], "data_offsets": [256, 264]},
        "b": {"dtype": "F32", "shape": [3], "data_offsets": [264, 276]},
    }
    assert data[:256] == mx.qdata.view(torch.uint8).cpu().numpy().tobytes()
    assert data[256:264] == mx.scale.view(torch.uint8).cpu().numpy().tobytes()
    assert len(data) == 276


def test_the_safetensors_package_agrees(tmp_path: Path) -> None:
    """It reads files written here, and its files are read here."""
    package = pytest.importorskip("safetensors.torch", reason="the safetensors package is not installed")
    state = _state()
    save_safetensors(state, tmp_path / "ours")
    plain, metadata = serialize.flatten_state_dict({name: tensor.cpu() for name, tensor in state.items()})
    loaded = package.load_file(tmp_path / "ours")
    assert sorted(loaded) == sorted(plain)
    for name, tensor in plain.items():
        one, other = (each.contiguous().view(-1).view(torch.uint8) for each in (loaded[name], tensor))
        assert torch.equal(one, other), name
    # The package refuses tensors that share memory, as do the two tensors with one per-tensor scale.
    plain = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in plain.items()}
    package.save_file(plain, tmp_path / "theirs", metadata)
    _assert_same(load_safetensors(tmp_path / "theirs", DEVICE), state)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    """A newer version, missing parts, a truncated file, another file type."""
    save_safetensors({"w": MXTensor.to_mx(_x(4, 64))}, tmp_path / "s")
    header, data = _header(tmp_path / "s")
    newer = json.loads(json.dumps(header).replace(r"\"version\": 1", r"\"version\": 2"))
    missing = {name: about for name, about in header.items() if name != "w.scale"}
    kind = json.loads(json.dumps(header).replace(r"\"mx\"", r"\"int8\""))
    for broken, bytes_, text in (
        (newer, data, "version 2"),
        (missing, data, r"lacks its parts \['scale'\]"),
        (kind, data, "int8"),
        (header, data[:100], "does not fit the file"),
    ):
        _write(tmp_path / "broken", broken, bytes_)
        with pytest.raises(InputError, match=text):
            load_safetensors(tmp_path / "broken")
    (tmp_path / "text").write_text("not a file of tensors")
    with pytest.raises(InputError, match="no safetensors file"):
        load_safetensors(tmp_path / "text")
    function, arguments = MXTensor.to_mx(_x(4, 64)).__reduce_ex__(2)
    assert arguments[0] == serialize.FORMAT_VERSION
    with pytest.raises(InputError, match="version 9"):
        function(9, *arguments[1:])


_ABOUT = {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ("[1, 2]", "list; it must be a JSON object"),
        ("{,", "cannot be read"),
        ('{"a":' * 100000, "cannot be read"),
        (json.dumps({"a": _ABOUT})[:-1] + ', "a": ' + json.dumps(_ABOUT) + "}", r"\['a'\] come twice"),
        ({"a": 3}, "a of .* is 3"),
        ({"a": {"dtype": "I32", "shape": [2]}}, "no shape and place"),
        ({"a": {**_ABOUT, "dtype": ["I32"]}}, "no dtype of torch"),
        ({"a": {**_ABOUT, "dtype": "I128"}}, "no dtype of torch"),
        ({"a": {**_ABOUT, "shape": 2}}, "no shape and place"),
        ({"a": {**_ABOUT, "shape": ["2"]}}, "no shape and place"),
        ({"a": {**_ABOUT, "shape": [-1, -2]}}, "no shape and place"),
        ({"a": {**_ABOUT, "shape": [True, 2]}}, "no shape and place"),
        ({"a": {**_ABOUT, "data_offsets": [0]}}, "no shape and place"),
        ({"a": {**_ABOUT, "data_offsets": [-8, 0]}}, "no shape and place"),
        ({"a": {**_ABOUT, "data_offsets": [8, 16]}}, "does not fit the file"),
        ({"a": {**_ABOUT, "shape": [0, 1 << 70], "data_offsets": [0, 0]}}, "has the shape"),
        ({"a": {**_ABOUT, "shape": [1], "data_offsets": [0, 4]}}, "its tensors end at 4"),
        ({"a": {**_ABOUT, "shape": [1], "data_offsets": [4, 8]}}, "begins at byte 4"),
        ({"a": _ABOUT, "b": {**_ABOUT, "shape": [1], "data_offsets": [4, 8]}}, "must not overlap"),
        ({"__metadata__": 3, "a": _ABOUT}, "__metadata__ of"),
        ({"__metadata__": {"triton_ep": 3}, "a": _ABOUT}, "description of tensors cannot be read"),
        ({"__metadata__": {"triton_ep": "{}"}, "a": _ABOUT}, "no version or no tensors"),
        ({"__metadata__": {"triton_ep": '{"version": 1, "tensors": {"a": 3}}'}, "a": _ABOUT}, "described as 3"),
        ({"__metadata__": {"triton_ep": '{"version": 1, "tensors": {"a": {"kind": "mx"}}}'}, "a": _ABOUT}, "described"),
        (
            {
                "__metadata__": {"triton_ep": '{"version": 1, "tensors": {"w": {"kind": "mx", "parts": ["qdata"]}}}'},
                "w.qdata": _ABOUT,
            },
            "described as",
        ),
    ],
)
def test_files_of_anybody_are_refused_by_name(header: Any, text: str, tmp_path: Path) -> None:
    """Whatever a header says, the error is an InputError; forbidden contents are not read as something else."""
    told = header if isinstance(header, str) else json.dumps(header)
    (tmp_path / "s").write_bytes(len(told.encode()).to_bytes(8, "little") + told.encode() + bytes(8))
    with pytest.raises(InputError, match=text):
        load_safetensors(tmp_path / "s")


def test_nothing_is_lost_without_a_word(tmp_path: Path) -> None:
    """A tensor with the header text's reserved name and metadata that is not text are refused; nothing is written."""
    for state, metadata, text in (
        ({"__metadata__": torch.ones(2)}, None, "header's own name"),
        ({"a": torch.ones(2)}, {"epoch": 3}, "text by text"),
    ):
        with pytest.raises(InputError, match=text):
            save_safetensors(state, tmp_path / "s", metadata)
    assert not list(tmp_path.iterdir())


def test_other_files_stay_loadable(tmp_path: Path) -> None:
    """A safetensors file of plain tensors, with or without other programs' metadata."""
    _write(tmp_path / "s", {"a": {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]}}, b"\1\0\0\0\2\0\0\0")
    assert load_safetensors(tmp_path / "s")["a"].tolist() == [1, 2]
    _write(tmp_path / "s", {"__metadata__": {"format": "pt"}}, b"")
    assert load_safetensors(tmp_path / "s") == {}


@pytest.mark.parametrize(
    "config",
    [
        MXWeightOnlyConfig("fp6_e3m2"),
        MXDynamicActivationMXWeightConfig(weight_dtype=torch.float4_e2m1fn_x2),
        NVFP4DynamicActivationNVFP4WeightConfig(),
    ],
    ids=lambda each: type(each).__name__,
)
def test_state_dicts_of_models_go_round(config: Any, tmp_path: Path) -> None:
    """Converted, saved, loaded into a model converted alike: the same outputs; different formats are refused."""
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).to(DEVICE, torch.bfloat16))
        quantize_(models[-1], config)
    saved, other = models
    x = _x(5, 64)
    assert not torch.equal(saved(x), other(x))
    save_safetensors(saved.state_dict(), tmp_path / "s")
    pickled = torch.load(_saved(saved.state_dict(), tmp_path), weights_only=True)
    for state in (load_safetensors(tmp_path / "s", DEVICE), pickled):
        other.load_state_dict(state)
        assert torch.equal(saved(x), other(x))
    plain = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).to(DEVICE, torch.bfloat16)
    quantize_(plain, MXWeightOnlyConfig(torch.float8_e5m2))
    with pytest.raises(RuntimeError, match="copy_ into"):
        plain.load_state_dict(state)


def test_requires_grad_is_kept() -> None:
    """requires_grad is kept as pickle keeps it for any tensor."""
    leaf = MXTensor.to_mx(_x(2, 32)).requires_grad_()
    assert pickle.loads(pickle.dumps(leaf)).requires_grad
    assert not pickle.loads(pickle.dumps(leaf.detach())).requires_grad


@pytest.mark.parametrize("config", [MXWeightOnlyConfig(), NVFP4WeightOnlyConfig()], ids=["mx", "nvfp4"])
def test_parameters_stay_parameters(config: MXWeightOnlyConfig | NVFP4WeightOnlyConfig, tmp_path: Path) -> None:
    """A pickled model has the parameters that it had; before, quantised ones came back as tensors, which no optimizer
    and no `to` finds."""
    layer = nn.Linear(64, 32).to(DEVICE, torch.bfloat16)
    quantize_(layer, config)
    layer.weight.requires_grad_(True)
    torch.save(layer, tmp_path / "layer")
    for again in (pickle.loads(pickle.dumps(layer)), torch.load(tmp_path / "layer", weights_only=False)):
        assert isinstance(again.weight, nn.Parameter) and type(again.weight) is type(layer.weight)
        assert again.weight.requires_grad
        assert torch.equal(again.weight.qdata.view(torch.uint8), layer.weight.qdata.view(torch.uint8))
    assert not isinstance(pickle.loads(pickle.dumps(layer.weight.detach())), nn.Parameter)


def test_files_of_older_programs_have_no_mark_of_parameters() -> None:
    """What was pickled before parameters were marked can be read."""
    rebuild, (*arguments, _) = MXTensor.to_mx(_x(2, 32)).__reduce_ex__(4)
    assert torch.equal(rebuild(*arguments).dequantize(), MXTensor.to_mx(_x(2, 32)).dequantize())
