"""The experts of a rank as one function: values and gradients against float64 with the roundings of the operands."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.ops.grouped import DEVICE
from triton_ep import MXTensor
from triton_ep.errors import ConfigError, InputError
from triton_ep.nn import expert_block as module
from triton_ep.nn.expert_block import ExpertBlock, ExpertSettings, expert_block
from triton_ep.nn.moe_block import Needs
from triton_ep.nn.prepared import PreparedWeights
from triton_ep.ops.activation import Activation
from triton_ep.ops.row_scales import quantize_to_rows
from triton_ep.ops.tiles import tile_table
from triton_ep.reference import experts as oracle

HIDDEN, FFN = 64, 96
NAMES = ("x_rows", "row_weights", "w13", "w2", "b13", "b2")
SIZES = (20, 0, 133)
SWIGLU = Activation()
# Error of a bf16 result: its last rounding, 1.7e-3 of the norm, and earlier roundings that float32 sums change.
BF16, FLOAT32 = 2.5e-3, 3e-4
# The tensor cores' lower precision moves values over the border between two e4m3 values.
FP8 = 0.0 if DEVICE == "cpu" else 1.5e-2


@dataclass
class Case:
    """Operands of a block, [R, ...] with some rows past the last segment that hold no numbers."""

    precision: str | None = None
    sizes: tuple[int, ...] = SIZES
    activation: Activation = SWIGLU
    weighted: bool = True
    biased: bool = False
    aligned: bool = False
    spare: int = 3

    def __post_init__(self) -> None:
        self.offs = torch.tensor([0, *self.sizes]).cumsum(0).to(torch.int32).to(DEVICE)
        self.used, experts = sum(self.sizes), len(self.sizes)
        rows, width = self.used + self.spare, FFN * (2 if self.activation.gated else 1)
        generator = torch.Generator().manual_seed(rows)

        def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) * scale).to(DEVICE, dtype)

        self.x, self.dy = normal(rows, HIDDEN), normal(rows, HIDDEN)
        weights = torch.rand(rows, generator=generator).to(DEVICE) + 0.5
        self.x[self.used :], self.dy[self.used :], weights[self.used :] = (float("nan"),) * 3
        self.tensors: dict[str, Any] = {
            "x_rows": self.x if self.precision is None else MXTensor.to_mx(self.x),
            "row_weights": weights if self.weighted else None,
            "w13": normal(experts, width, HIDDEN, scale=HIDDEN**-0.5),
            "w2": normal(experts, HIDDEN, FFN, scale=FFN**-0.5),
            "b13": normal(experts, width, scale=0.3) if self.biased else None,
            "b2": normal(experts, HIDDEN, scale=0.3, dtype=torch.float32) if self.biased else None,
        }
        self.settings = ExpertSettings(self.activation, self.precision, self.aligned)

    def run(self, needed: tuple[str, ...] = NAMES, dy: torch.Tensor | None = None, **other: Any) -> dict[str, Any]:
        """The result as "y" and the needed gradients, by name."""
        leaves = {n: t.detach() if isinstance(t, torch.Tensor) else t for n, t in {**self.tensors, **other}.items()}
        for name in needed:
            if leaves[name] is not None:
                leaves[name].requires_grad_()
        y = self(leaves)
        y.backward(self.dy if dy is None else dy)
        found = {name: t.grad for name, t in leaves.items() if isinstance(t, torch.Tensor)}
        return {"y": y.detach(), **{name: grad for name, grad in found.items() if grad is not None}}

    def __call__(self, tensors: dict[str, Any]) -> torch.Tensor:
        prepared = None if self.precision is None else PreparedWeights("both", self.precision)
        return expert_block(*tensors.values(), prepared, self.offs, None, self.settings)


def _bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().double()


def _expected(case: Case) -> dict[str, torch.Tensor]:
    """Expected results of `Case.run` for rows in use: float64, with every operand rounded as defined."""
    precision, offs, used = case.precision, case.offs, case.used
    kind = oracle.Activation(*case.activation)
    mx = {None: _bf16, "exact": oracle.mx_values}.get(precision, oracle.row_values)  # along the last dimension
    prepared = {None: _bf16, "exact": oracle.mx_values}.get(precision, oracle.prepared_values)

    def columns(w: torch.Tensor) -> torch.Tensor:
        return prepared(w.transpose(1, 2))

    w13, w2 = case.tensors["w13"], case.tensors["w2"]
    weights = case.tensors["row_weights"]
    weights = torch.ones(used, device=DEVICE) if weights is None else weights[:used]
    # "exact" takes bf16 gradients as they are, as it takes bf16 rows.
    x, dy = mx(case.x[:used].float()), (_bf16 if precision == "exact" else mx)(case.dy[:used].float())
    b13, b2 = (0 if b is None else b.double().repeat_interleave(torch.tensor(case.sizes, device=DEVICE), 0)
               for b in (case.tensors["b13"], case.tensors["b2"]))  # fmt: skip
    pre = oracle.product(x, prepared(w13), offs) + b13
    act = oracle.activate(pre, kind) * weights.double()[:, None]
    scaled_b2 = b2 * weights.double()[:, None]
    y = oracle.product(mx(act.float()), prepared(w2), offs) + scaled_b2
    grads = oracle.activation_backward(oracle.product(dy, columns(w2), offs), _bf16(pre), weights, kind)
    dpre = _bf16(grads.pre)
    # The gradient of w2 uses the unquantised output gradient.
    came = case.dy[:used].double()
    return {
        "y": y,
        "x_rows": oracle.product(mx(dpre.float()), columns(w13), offs),
        "row_weights": grads.weights + (dy * b2).sum(1),
        "w13": oracle.weight_gradient(dpre, x, offs),
        "w2": oracle.weight_gradient(came, _bf16(grads.act), offs),
        "b13": oracle.bias_gradient(dpre, offs),
        "b2": oracle.bias_gradient(came * weights.double()[:, None], offs),
    }


def _close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], case: Case) -> None:
    for name, value in got.items():
        exact = expected[name]
        value = value[: case.used] if name in ("y", "x_rows", "row_weights") else value
        assert value.shape == exact.shape
        bound = (FLOAT32 if value.dtype == torch.float32 else BF16) + (FP8 if case.settings.fp8 else 0.0)
        error = (value.double() - exact).norm() / exact.norm()
        assert error <= bound, f"{name} is off by {error:.3g} of its norm"


CASES = (
    Case(),
    Case("default"),
    Case("fast", weighted=False),
    Case("exact"),
    Case(activation=Activation("silu", limit=1.0, alpha=1.702, up_offset=1.0), biased=True),
    Case("default", activation=Activation("gelu", gated=False), biased=True),
    Case(sizes=(0, 150, 0), weighted=False, biased=True, spare=0),
    Case(sizes=(128, 0, 256), aligned=True),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.precision}-{case.sizes}-{case.activation.kind}")
def test_values_and_gradients(case: Case) -> None:
    """All values and gradients, the same bits every time; rows past the last segment have no effect."""
    got = case.run()
    present = {name for name, t in case.tensors.items() if t is not None}
    assert set(got) == {"y", *present}
    _close(got, _expected(case), case)
    again = case.run()
    rows = ("y", "x_rows", "row_weights")
    assert all(torch.equal(*(r[n][: case.used] if n in rows else r[n] for r in (got, again))) for n in got)


@pytest.mark.parametrize("precision", [None, "default"])
@pytest.mark.parametrize(
    "needed", [("x_rows",), ("row_weights", "b2"), ("b2",), ("w2",), ("b13",), ("w13", "row_weights")]
)
def test_only_what_is_needed(monkeypatch: pytest.MonkeyPatch, needed: tuple[str, ...], precision: str | None) -> None:
    """Each gradient alone has the same bits as among all; frozen weights cost no product and keep no rows."""
    case = Case(precision, sizes=(9, 4), biased=True, spare=0)
    full, kept, products = case.run(), [], []
    real = module.weight_gradient

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        products.append(args)
        return real(*args, **kwargs)

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept.append(t)
        return t

    monkeypatch.setattr(module, "weight_gradient", counted)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        got = case.run(needed)
    assert set(got) == {"y", *needed} and all(torch.equal(got[name], full[name]) for name in got)
    assert len(products) == len({"w13", "w2"} & set(needed))
    rows = [t for t in kept if t.shape == (13, HIDDEN)]
    assert [t.dtype for t in rows] == (
        [torch.float8_e4m3fn if precision else torch.bfloat16] if "w13" in needed else []
    )


@pytest.mark.parametrize("precision", [None, "default", "exact"])
def test_without_a_graph(precision: str | None) -> None:
    """Without a requested gradient the values are the same and nothing is kept."""
    case = Case(precision, sizes=(5, 3), biased=True, spare=0)
    y = case(case.tensors)
    with torch.no_grad():
        assert torch.equal(case(case.tensors), y)
    assert not y.requires_grad and torch.equal(y, case.run()["y"])


def test_forms_of_rows() -> None:
    """Rows and gradients may come as they travelled or dequantised; rows without a gradient also with row scales."""
    case = Case("default", sizes=(9, 4), spare=0)
    dy = MXTensor.to_mx(case.dy)
    as_travelled = case.run(NAMES, dy)
    values = case.run(NAMES, dy.dequantize(), x_rows=case.tensors["x_rows"].dequantize())
    moved = case.run(NAMES[1:], dy, x_rows=quantize_to_rows(case.x))
    for got in (values, moved):
        assert all(torch.equal(got[name], as_travelled[name]) for name in got)


# A main_grad in bf16 is added to as a whole, after all strips: on CPUs `test_main_grad` alone shows it.
@pytest.mark.parametrize(
    "main_dtype", [None, torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.on_gpus)], ids=str
)
def test_rows_may_be_made_bf16_by_strips(monkeypatch: pytest.MonkeyPatch, main_dtype: torch.dtype | None) -> None:
    """The same sums as for all columns at once, however few columns are converted to bf16 at a time."""
    case = Case("default", sizes=(128, 0, 128), biased=True, aligned=True)
    dy = MXTensor.to_mx(case.dy)
    found = []
    for strip in (module._STRIP, 32):
        monkeypatch.setattr(module, "_STRIP", strip)
        w2 = case.tensors["w2"].clone()
        if main_dtype is not None:
            w2.main_grad = torch.ones_like(w2, dtype=main_dtype)
        w13, b2 = (case.tensors[name].clone().requires_grad_() for name in ("w13", "b2"))
        case({**case.tensors, "w2": w2.requires_grad_(), "w13": w13, "b2": b2}).backward(dy)
        found.append([w13.grad, b2.grad, w2.grad if main_dtype is None else w2.main_grad])
        assert (w2.grad is None) == (main_dtype is not None)
    assert len(module._strips(HIDDEN, True, 2)) == 2
    for got, want in zip(*found, strict=True):
        # A tiled BLAS may round float32 sums differently in another column of a tile.
        torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6 * want.abs().max().item())


@pytest.mark.parametrize("precision", [None, "default"])
def test_between_two_exchanges(precision: str | None) -> None:
    """Forward and backward called by hand, on rows and gradients as a dispatch delivers them: the same bits."""
    case = Case(precision, sizes=(9, 0, 4), biased=True)
    as_function = case.run(dy=case.dy if precision is None else quantize_to_rows(case.dy).dequantize())
    block = ExpertBlock(None if precision is None else PreparedWeights("both", precision), case.settings)
    params = [case.tensors[name].detach().requires_grad_() for name in NAMES[2:]]
    delivered = (lambda rows: rows) if precision is None else quantize_to_rows
    tiles = tile_table(case.offs, case.x.shape[0])
    for table in (tiles, None):
        desc: Any = SimpleNamespace(
            expert_offsets=case.offs,
            tiles=table,
            num_recv_rows=case.x.shape[0],
            num_recv_tokens_per_expert=torch.diff(case.offs),
        )
        y, saved = block.forward(delivered(case.x), case.tensors["row_weights"], params, desc, keep=True)
        needs = Needs(True, True, (True, True, True, False))
        got = block.backward(delivered(case.dy), saved, params, desc, needs)
        assert got.rows is not None
        x_rows, of_params = got.rows(), got.params()
        assert of_params[3] is None and not y.requires_grad
        found = {
            "y": y,
            "x_rows": x_rows,
            "row_weights": got.row_weights,
            **dict(zip(NAMES[2:5], of_params[:3], strict=True)),
        }
        for name, value in found.items():
            used = case.used if name in ("y", "x_rows", "row_weights") else None
            assert torch.equal(value[:used], as_function[name][:used]), name
    assert block.forward(delivered(case.x), case.tensors["row_weights"], params, desc, keep=False)[1] == {}


def test_no_rows() -> None:
    """Gradients of weights are zero, and all shapes are right."""
    for precision in (None, "default"):
        case = Case(precision, sizes=(0, 0), biased=True, spare=0)
        got = case.run()
        assert got["y"].shape == got["x_rows"].shape == (0, HIDDEN) and got["row_weights"].shape == (0,)
        assert not any(got[name].any() for name in ("w13", "w2", "b13", "b2"))


# --- main_grad ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("flagged", [True, False])
def test_main_grad(flagged: bool, dtype: torch.dtype) -> None:
    """Gradients are added to main_grad; a flag says so, and hooks see a gradient whose values are undefined."""
    case = Case(sizes=(9, 0, 4), spare=0)
    plain = case.run()
    weights = {name: case.tensors[name].detach().clone().requires_grad_() for name in ("w13", "w2")}
    before = {}
    for name, weight in weights.items():
        weight.main_grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE, dtype)
        before[name] = weight.main_grad.clone()
        if flagged:
            weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, name == "w2"
    y = case({**case.tensors, **weights})
    y.backward(case.dy)
    for name, weight in weights.items():
        added = (weight.main_grad.double() - before[name].double() - plain[name].double()).norm()
        assert added <= (2e-3 if dtype == torch.float32 else 2e-2) * plain[name].double().norm()
        assert torch.equal(weight.main_grad[1], before[name][1])  # no rows
        assert (weight.grad is not None) == flagged
        if flagged:
            assert weight.grad_added_to_main_grad and weight.grad.shape == weight.shape
            assert name != "w2" or not weight.grad.any()


# --- arguments ------------------------------------------------------------------------------------------------


def test_errors() -> None:
    """Precision, copies of weights and rows must fit each other."""
    case = Case("default", sizes=(3,), spare=0)
    with pytest.raises(ConfigError, match="'exakt'"):
        ExpertSettings(precision="exakt")
    tensors = case.tensors.values()
    with pytest.raises(InputError, match="precision='default', got NoneType"):
        expert_block(*tensors, None, case.offs, None, case.settings)
    with pytest.raises(InputError, match="the rows are MXTensor"):
        expert_block(*tensors, None, case.offs, None, ExpertSettings())
