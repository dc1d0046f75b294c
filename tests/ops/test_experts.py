"""The experts' two products against the float64 oracle: bf16 and row scales, all epilogues and ways to find tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.grouped import DEVICE, check
from tests.ops.test_activation import ACTIVATIONS
from tests.ops.test_tiles import offsets
from triton_ep.errors import ConfigError, InputError
from triton_ep.mx.tensor import MXTensor
from triton_ep.ops.activation import Activation
from triton_ep.ops.experts import gate_up, launch_gate_up, launch_rows_product, rows_product
from triton_ep.ops.row_scales import RowScaled, quantize_to_rows, rebase_rows
from triton_ep.ops.tiles import tile_table
from triton_ep.reference import experts as oracle
from triton_ep.reference import grouped_gemm as product_oracle
from triton_ep.reference import mxfp8
from triton_ep.runtime.plans.experts import ProductTile

SIZES = (0, 70, 1, 0, 130)
"""Segments: empty ones at the front and in between, more than a tile of 64 and of 128 rows, a single row."""
SPARE = 5
FP8_STEPS = 0.0 if DEVICE == "cpu" else 2.0**-9
"""Error of an e4m3 product in units: on Hopper the sums inside a product keep about 14 bits."""
RELU = Activation("relu", gated=False)
TILES = {
    "table": ProductTile(64, 128, 128, 2, 4, promote=True),
    "halves": ProductTile(128, 128, 128, 2, 4, promote=True, split=True),
    "flat": ProductTile(128, 128, 128, 2, 8, flatten=True),
    "few": ProductTile(16, 64, 128, 2, 4, promote=True, swap=True, table=False),
}


def _normal(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).bfloat16().to(DEVICE)


def _row_scaled(x: torch.Tensor) -> RowScaled:
    """Rows or weights with row scales, from the oracle."""
    qdata, scale = oracle.rebase_rows(*mxfp8.quantize(x.cpu()))
    return RowScaled(qdata.to(DEVICE), scale.to(DEVICE))


def _values(x: torch.Tensor | RowScaled) -> torch.Tensor:
    """Float64 values of an operand."""
    return x.qdata.double() * x.scale.double().unsqueeze(-1) if isinstance(x, RowScaled) else x.double()


class Case:
    """Operands of both kinds for products of `k` terms and `n` columns, and the exact product."""

    def __init__(self, n: int, k: int, scaled: bool, sizes: tuple[int, ...] = SIZES) -> None:
        self.offs = offsets(sizes)
        self.rows = sum(sizes) + SPARE
        self.end = sum(sizes)
        x, w = _normal(self.rows, k, seed=1), _normal(len(sizes), n, k, seed=2, scale=k**-0.5)
        x[self.end :] = torch.nan  # must have no effect
        self.x = _row_scaled(x) if scaled else x
        self.w = _row_scaled(w) if scaled else w
        left, right = _values(self.x)[: self.end], _values(self.w)
        self.exact = oracle.product(left, right, self.offs)
        self.unit = product_oracle.magnitude(left, right.transpose(1, 2), self.offs[1:])
        self.terms = k
        self.steps = FP8_STEPS if scaled else 0.0
        self.weights = torch.rand(self.rows, generator=torch.Generator().manual_seed(3)).to(DEVICE) + 0.5
        self.weights[self.end :] = torch.nan

    def experts(self) -> torch.Tensor:
        """Expert of every row in use."""
        sizes = torch.diff(self.offs.long())
        return torch.arange(len(sizes), device=DEVICE).repeat_interleave(sizes)


def _check_act(act: torch.Tensor, case: Case, pre: torch.Tensor, activation: Activation) -> None:
    """Assert that `act` is the weighted activation of the product, up to errors of float32 sums and e4m3 products."""
    leaf = pre.clone().requires_grad_()
    value = oracle.activate(leaf, oracle.Activation(*activation)) * case.weights[: case.end, None].double()
    (slope,) = torch.autograd.grad(value.sum(), leaf)
    halves = 2 if activation.gated else 1
    off = case.unit * ((case.terms / 8 + 64) * 2.0**-23 + case.steps)
    moved = (slope.abs() * off).unflatten(1, (halves, -1)).sum(1)
    value = value.detach()
    bound = value.abs() * 2.0**-8 + 1.5 * moved + 1e-5
    error = (act[: case.end].double() - value).abs()
    assert bool((error <= bound).all()), f"off by {(error / bound).max().item():.3g} bounds"


# --- gate and up ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tile", "tma"), [(tile, tma) for tile in TILES for tma in (False, True) if tma or not TILES[tile].split]
)
@pytest.mark.parametrize("scaled", [False, True], ids=["bf16", "fp8"])
def test_gate_up(tile: str, scaled: bool, tma: bool) -> None:
    """Product and SwiGLU with row weights; columns and terms off the tile; rows past the segments have no effect."""
    case = Case(2 * 72, 160, scaled)
    act, _, pre = launch_gate_up(
        case.x, case.w, case.offs, None, case.weights, None, Activation(), True, "bf16", False,
        TILES[tile].halved(), tma,
    )  # fmt: skip
    check(pre[: case.end], case.exact, case.unit, terms=case.terms, steps=case.steps)
    _check_act(act, case, case.exact, Activation())


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations_and_bias(activation: Activation) -> None:
    """Every kind, gated or not, clamped or not, with a bias in bf16 or float32."""
    halves = 2 if activation.gated else 1
    case = Case(halves * 40, 96, scaled=False, sizes=(3, 20))
    bias = _normal(2, halves * 40, seed=5)
    pre_exact = case.exact + bias.double()[case.experts()]
    for given in (bias, bias.float()):
        act, pre = gate_up(
            case.x, case.w, case.offs, row_weights=case.weights, activation=activation, bias=given, keep_pre=True
        )
        assert pre is not None and isinstance(act, torch.Tensor)
        check(pre[: case.end], pre_exact, case.unit + bias.double()[case.experts()].abs(), terms=96)
        _check_act(act, case, pre_exact, activation)


@pytest.mark.parametrize("scaled", [False, True], ids=["bf16", "fp8"])
def test_activation_in_mxfp8(scaled: bool) -> None:
    """Near the activation in bf16; row scales change values by no more than half a step of the larger scale."""
    case = Case(2 * 64, 128, scaled)
    plain, none = gate_up(case.x, case.w, case.offs)
    assert none is None and isinstance(plain, torch.Tensor)
    rows, _ = gate_up(case.x, case.w, case.offs, act="mx")
    values, _ = gate_up(case.x, case.w, case.offs, act="mx_bf16", tiles=tile_table(case.offs, case.rows))
    assert isinstance(rows, RowScaled) and isinstance(values, torch.Tensor)
    exact, moved, near = plain[: case.end].double(), _values(rows)[: case.end], values[: case.end].double()
    assert bool(((moved - near).abs() <= rows.scale[: case.end, None].double() * 2.0**-10).all())
    # e4m3 has 3 bits: half a step is 2^-4 of a value; below the smallest normal value, 2^-17 of the block's largest.
    largest = exact.unflatten(1, (-1, 32)).abs().amax(-1).repeat_interleave(32, 1)
    assert bool(((near - exact).abs() <= exact.abs() * (2.0**-4 + 2.0**-7) + largest * 2.0**-17).all())


@pytest.mark.parametrize("scaled", [False, True], ids=["bf16", "fp8"])
def test_mxfp8_is_made_of_float32(scaled: bool) -> None:
    """MXFP8 of the unrounded float32 activation, bit for bit: with row scales, or converted to bf16."""
    rows, f = 128, 64
    x = torch.eye(rows, 32, device=DEVICE)[torch.arange(rows) % 32].bfloat16()
    w = _normal(1, f, 32, seed=1) * (2.0 ** torch.arange(-8, 8, device=DEVICE)).bfloat16().repeat_interleave(4)[:, None]
    given, weights = (_row_scaled(x), _row_scaled(w)) if scaled else (x, w)
    factors = torch.linspace(0.7, 1.9, rows, device=DEVICE)
    # A product of one term is exact, and so is relu; then follows one multiplication in float32.
    pre = _values(weights)[0].T[torch.arange(rows) % 32].float()
    wanted = MXTensor.to_mx(pre.clamp(min=0) * factors[:, None])
    rounded = MXTensor.to_mx((pre.clamp(min=0) * factors[:, None]).bfloat16())
    assert not torch.equal(wanted.qdata.view(torch.uint8), rounded.qdata.view(torch.uint8))
    found = {
        act: gate_up(given, weights, offsets((rows,)), row_weights=factors, activation=RELU, act=act)[0]
        for act in ("mx", "mx_bf16")
    }
    assert torch.equal(found["mx_bf16"], wanted.dequantize(torch.bfloat16))  # type: ignore[arg-type]
    moved, made = rebase_rows(wanted.qdata, wanted.scale), found["mx"]
    assert isinstance(made, RowScaled) and torch.equal(made.scale, moved.scale)
    assert torch.equal(made.qdata.view(torch.uint8), moved.qdata.view(torch.uint8))


# --- rows times weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tile", "kind", "tma"),
    [
        (tile, kind, tma)
        for tile in TILES
        for kind in ("bf16", "transposed", "fp8")
        for tma in (False, True)
        if tma or not TILES[tile].split
    ],
)
def test_rows_product(tile: str, kind: str, tma: bool) -> None:
    """The product, with weights as given or transposed; rows of the output past the segments are not written."""
    case = Case(136, 256 if kind == "transposed" else 192, kind == "fp8")
    w: Any = case.w
    if kind == "transposed":
        w = w.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.full((case.rows, 160), 7.0, dtype=torch.bfloat16, device=DEVICE)
    out = wide[:, :136]
    launch_rows_product(case.x, w, case.offs, out, None, None, None, False, False, TILES[tile], tma)
    check(out[: case.end], case.exact, case.unit, terms=case.terms, steps=case.steps)
    assert bool((wide[case.end :] == 7).all()) and bool((wide[:, 136:] == 7).all())


def test_aligned_segments_leave_in_boxes() -> None:
    """Whole tiles are written through a descriptor: the same bits; other rows and columns are not written."""
    case = Case(136, 64, False, sizes=(128, 0, 256))
    wide = torch.full((2, case.rows, 160), 7.0, dtype=torch.bfloat16, device=DEVICE)
    for out, aligned in zip(wide[:, :, :136], (False, True), strict=True):
        launch_rows_product(case.x, case.w, case.offs, out, None, None, None, False, aligned, TILES["flat"], True)
    check(wide[1, : case.end, :136], case.exact, case.unit, terms=case.terms)
    assert torch.equal(wide[0], wide[1]) and bool((wide[1, case.end :] == 7).all())


def test_bias_of_rows_product() -> None:
    """Row weights multiply only the bias; without them it is added unchanged. The caller may pass the output."""
    case = Case(40, 64, scaled=False, sizes=(3, 0, 20))
    bias = _normal(3, 40, seed=6)
    added = bias.double()[case.experts()]
    for weights, dtype in ((None, torch.bfloat16), (case.weights, torch.float32)):
        out = rows_product(case.x, case.w, case.offs, bias=bias.to(dtype), row_weights=weights)
        term = added if weights is None else added * weights[: case.end, None].double()
        check(out[: case.end], case.exact + term, case.unit + term.abs(), terms=64)
    mine = torch.zeros(case.rows, 40, dtype=torch.bfloat16, device=DEVICE)
    assert rows_product(case.x, case.w, case.offs, out=mine) is mine
    assert torch.equal(mine[: case.end], rows_product(case.x, case.w, case.offs)[: case.end])


def test_few_rows_take_the_segments_and_many_the_table() -> None:
    """Both ways to find tiles give the same sums, with the caller's table or without one."""
    few, many = Case(64, 128, True, sizes=(3, 0, 7)), Case(64, 128, True)
    for case in (few, many):
        out = rows_product(case.x, case.w, case.offs, tiles=tile_table(case.offs, case.rows))
        check(out[: case.end], case.exact, case.unit, terms=128, steps=case.steps)
        assert torch.equal(out[: case.end], rows_product(case.x, case.w, case.offs)[: case.end])


def test_scales_far_apart() -> None:
    """The product of two scales may exceed float32 although the result does not; a NaN scale stays in its row."""
    case = Case(64, 64, True, sizes=(6,))
    assert isinstance(case.x, RowScaled) and isinstance(case.w, RowScaled)
    tiny = case.x.scale * 2.0**-100
    tiny[2] = torch.nan
    out = rows_product(RowScaled(case.x.qdata, tiny), RowScaled(case.w.qdata, case.w.scale * 2.0**100), case.offs)
    kept = [0, 1, 3, 4, 5]
    assert out[2].isnan().all()
    assert torch.equal(out[kept], rows_product(case.x, case.w, case.offs)[kept])


def test_no_rows() -> None:
    """Without rows, or with only empty segments, nothing is computed and shapes are right."""
    w = _normal(2, 64, 32, seed=0)
    offs = offsets((0, 0))
    for rows in (0, 3):
        x = _normal(rows, 32, seed=1)
        act, pre = gate_up(x, w, offs, keep_pre=True)
        assert act.shape == (rows, 32) and pre is not None and pre.shape == (rows, 64)
        out = torch.ones(rows, 64, dtype=torch.bfloat16, device=DEVICE)
        assert bool((rows_product(x, w, offs, out=out) == 1).all())
    scaled, _ = gate_up(quantize_to_rows(_normal(0, 32, seed=1)), _row_scaled(w), offs, act="mx")
    assert isinstance(scaled, RowScaled) and scaled.shape == (0, 32)


def test_errors() -> None:
    """Operands that do not fit each other are refused; the error describes them and the nearest shape that fits."""
    x, w, offs = _normal(4, 64, seed=0), _normal(2, 96, 64, seed=1), offsets((4, 0))
    for call, match in (
        (lambda: gate_up(_row_scaled(x), w, offs), "x alone has row scales"),
        (lambda: gate_up(x.float(), w, offs), "x must be bfloat16"),
        (lambda: gate_up(x[:, :32], w, offs), "rows of 32, w13 of 64"),
        (lambda: gate_up(x[:, :0], w[:, :, :0].contiguous(), offs), "nothing to sum over"),
        (lambda: gate_up(x, w.transpose(1, 2)[:, :64].transpose(1, 2)[:, ::2], offs), "contiguous"),
        (lambda: gate_up(x, w[:, :95].contiguous(), offs), "95 rows"),
        (lambda: gate_up(x, w, offs[:2]), "2 experts need 3"),
        (lambda: gate_up(x, w, offs, act="mx"), "48 columns; the nearest above is 64"),
        (lambda: gate_up(x, w, offs, act="fp8"), "choose from bf16, mx, mx_bf16"),
        (lambda: gate_up(x, w, offs, row_weights=torch.ones(3, device=DEVICE)), r"row_weights must be \[4\]"),
        (lambda: gate_up(x, w, offs, bias=torch.ones(2, 48, device=DEVICE)), r"bias must be \[2, 96\]"),
        (lambda: gate_up(x, w, offs, tiles=offs), "tile_table"),
        (lambda: gate_up(x, w, offs, activation=Activation("tanh")), "tanh"),
        (lambda: rows_product(x, w[:, ::2], offs), "strides"),
        (lambda: rows_product(x, w, offs, out=torch.empty(4, 96, device=DEVICE)), "out must be bf16"),
        (lambda: rows_product(RowScaled(torch.zeros(4, 40, device=DEVICE).to(torch.float8_e4m3fn),
                                        torch.ones(4, device=DEVICE)),
                              RowScaled(torch.zeros(2, 8, 40, device=DEVICE).to(torch.float8_e4m3fn),
                                        torch.ones(2, 8, device=DEVICE)), offs), "nearest above is 64"),
    ):  # fmt: skip
        with pytest.raises((InputError, ConfigError), match=match):
            call()
