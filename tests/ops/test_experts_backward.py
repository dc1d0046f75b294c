"""Backward pass of experts, kernel by kernel, against float64 results of the same operands."""

from __future__ import annotations

import pytest
import torch

from tests.ops.grouped import DEVICE, check
from triton_ep.errors import InputError
from triton_ep.ops.activation import Activation
from triton_ep.ops.experts_backward import bias_gradient, down_dgrad, weight_gradient
from triton_ep.ops.row_scales import RowScaled, quantize_to_rows
from triton_ep.ops.tiles import tile_table
from triton_ep.reference import experts as oracle

FP8_STEPS = 0.0 if DEVICE == "cpu" else 2.0**-9
"""Error of a product in units: on Hopper the sums inside a product keep about 14 bits."""

SEGMENTS = ((64, 0, 192, 0), (0, 0), (0, 128))
"""Rows of each segment: empty ones at every position, more than one step."""


def offs_of(sizes: tuple[int, ...]) -> torch.Tensor:
    """[E + 1] int32."""
    return torch.tensor([0, *sizes]).cumsum(0).to(torch.int32).to(DEVICE)


def rows(num_rows: int, width: int, seed: int) -> torch.Tensor:
    """[R, width] bf16."""
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.bfloat16)


# --- rows of the second product ---------------------------------------------------------------------------


def weights(*shape: int, seed: int = 7) -> torch.Tensor:
    """bf16 weights, scaled so that products keep the magnitude of the rows."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5
    return values.to(DEVICE, torch.bfloat16)


def _check_down(
    dy: torch.Tensor | RowScaled,
    w2: torch.Tensor | RowScaled,
    pre: torch.Tensor,
    offs: torch.Tensor,
    row_weights: torch.Tensor | None = None,
    activation: Activation | None = None,
    bias: torch.Tensor | None = None,
    **how: object,
) -> tuple[torch.Tensor, ...]:
    """Compare all results with float64 of the operands' values, except rows past the last segment."""
    activation = activation or Activation()
    got = down_dgrad(dy, w2, pre, offs, row_weights=row_weights, activation=activation, bias=bias, **how)
    rows = dy.dequantize(torch.float32) if isinstance(dy, RowScaled) else dy
    steps = FP8_STEPS if isinstance(dy, RowScaled) else 0.0
    matrices = w2.dequantize(torch.float32) if isinstance(w2, RowScaled) else w2.transpose(1, 2)
    used, hidden = int(offs[-1]), rows.shape[1]
    dact = oracle.product(rows, matrices, offs)[:used]
    unit = oracle.product(rows.abs(), matrices.abs(), offs)[:used]
    kind = oracle.Activation(*activation)
    weight = None if row_weights is None else row_weights[:used]
    exact = oracle.activation_backward(dact, pre[:used], weight, kind)
    # Errors of dact are in units of its terms' magnitudes; the activation and its slopes are float32 themselves.
    weighted = 1.0 if weight is None else weight.double().abs().unsqueeze(1)
    slope = oracle.activation_backward(unit, pre[:used], weight, kind).pre.abs()
    size = (1 + pre[:used].double().abs()).unflatten(1, (-1, dact.shape[1])).prod(1) * weighted
    errors = (size * dact.abs()).repeat(1, pre.shape[1] // dact.shape[1])
    check(got[0][:used], exact.pre, slope, hidden, steps, moved=1e-6 * errors)
    check(got[1][:used], exact.act, 0 * size, hidden, moved=1e-6 * size)
    if row_weights is None:
        assert got[2] is None
        return got
    value = oracle.activate(pre[:used].double(), kind)
    sums, magnitude = exact.weights, (unit * value.abs()).sum(1)
    if bias is not None:
        for expert, start, end in oracle.segments(offs):
            sums[start:end] += rows[start:end].double() @ bias[expert].double()
            magnitude[start:end] += rows[start:end].abs().double() @ bias[expert].abs().double()
    check(got[2][:used], sums, magnitude, hidden + value.shape[1], steps, moved=1e-6 * (unit * size).sum(1))
    return got


def _spoil(offs: torch.Tensor, *tensors: torch.Tensor) -> None:
    """Fill rows past the last segment with NaN."""
    for each in tensors:
        each[int(offs[-1]) :] = float("nan")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", [(3, 0, 130, 0), (0, 0), (200,)], ids=str)
def test_rows_of_the_second_product(sizes: tuple[int, ...], transposed: bool) -> None:
    """Partial tiles at every side; segments that begin anywhere; rows past the last segment are not touched."""
    offs = offs_of(sizes)
    dy, pre = rows(sum(sizes) + 5, 72, 0), rows(sum(sizes) + 5, 2 * 104, 1)
    row_weights = rows(dy.shape[0], 1, 2).float().squeeze(1)
    _spoil(offs, dy, pre, row_weights)
    w2 = weights(len(sizes), 104, 72).transpose(1, 2) if transposed else weights(len(sizes), 72, 104)
    got = _check_down(dy, w2, pre, offs, row_weights)
    again = down_dgrad(dy, w2, pre, offs, row_weights=row_weights, tiles=tile_table(offs, dy.shape[0]))
    used, place = int(offs[-1]), pre.clone()
    over = down_dgrad(dy, w2, place, offs, row_weights=row_weights, overwrite=True)
    assert over[0] is place and torch.equal(place[used:].view(torch.int16), pre[used:].view(torch.int16))
    for first, second, third in zip(got, again, over, strict=True):
        assert torch.equal(first[:used], second[:used]) and torch.equal(first[:used], third[:used])


@pytest.mark.parametrize(
    "activation",
    [Activation("silu", limit=1.0, alpha=1.702, up_offset=1.0), Activation("gelu"), Activation("relu2", gated=False)],
    ids=str,
)
def test_activations(activation: Activation) -> None:
    """With and without biases, with and without weights."""
    offs = offs_of((20, 30))
    dy, pre = rows(50, 64, 0), rows(50, 64 * (2 if activation.gated else 1), 1)
    w2, bias = weights(2, 64, 64), weights(2, 64, seed=8)
    _check_down(dy, w2, pre, offs, None, activation)
    _check_down(dy, w2, pre, offs, rows(50, 1, 2).float().squeeze(1), activation, bias.float())


@pytest.mark.parametrize("fast", [False, True])
def test_rows_of_the_second_product_in_fp8(fast: bool) -> None:
    """Matches float64 of the row-scaled values within a tight bound, including the bias in the weights' gradient."""
    offs = offs_of((3, 0, 130))
    dy, pre = rows(140, 160, 0), rows(140, 2 * 72, 1)
    row_weights = rows(140, 1, 2).float().squeeze(1)
    _spoil(offs, pre, row_weights)
    w2 = weights(3, 72, 160)
    scaled = quantize_to_rows(w2.flatten(0, 1))
    operand = RowScaled(scaled.qdata.view_as(w2), scaled.scale.view(3, 72))
    _check_down(quantize_to_rows(dy), operand, pre, offs, row_weights, bias=weights(3, 160, seed=8), fast=fast)


def test_row_weights_are_summed_in_order() -> None:
    """The shares of tiles and their sum have a fixed order for any number of programs: the same bits every time."""
    offs = offs_of((130,))
    dy, pre, w2 = rows(130, 64, 0), rows(130, 2 * 192, 1), weights(1, 64, 192)
    row_weights = torch.ones(130, device=DEVICE)
    first, second = (down_dgrad(dy, w2, pre, offs, row_weights=row_weights)[2] for _ in range(2))
    assert first is not None and torch.equal(first, second)


def test_no_rows() -> None:
    """Without rows, the results have the right shapes."""
    offs, w2 = offs_of((0, 0)), weights(2, 64, 32)
    dpre, act, grad = down_dgrad(rows(0, 64, 0), w2, rows(0, 64, 1), offs, row_weights=torch.empty(0, device=DEVICE))
    assert dpre.shape == (0, 64) and act.shape == (0, 32) and grad.shape == (0,)
    assert bias_gradient(rows(0, 64, 0), offs).shape == (2, 64)


def test_down_dgrad_errors() -> None:
    """Errors describe the given and the needed operands."""
    dy, pre, w2, offs = rows(8, 64, 0), rows(8, 48, 1), weights(1, 64, 24), offs_of((8,))
    with pytest.raises(InputError, match=r"w2 must be \[E, H, F\] and pre \[8, 48\]"):
        down_dgrad(dy, w2, pre[:, :24], offs)
    with pytest.raises(InputError, match="both RowScaled"):
        down_dgrad(quantize_to_rows(dy), w2, pre, offs)
    with pytest.raises(InputError, match="nearest above 60 is 64"):
        down_dgrad(dy[:, :60], w2[:, :60].contiguous(), pre, offs)
    with pytest.raises(InputError, match="offs has 3 entries"):
        down_dgrad(dy, w2, pre, offs_of((4, 4)))
    with pytest.raises(InputError, match=r"row_weights must be \[8\]"):
        down_dgrad(dy, w2, pre, offs, row_weights=torch.ones(7))
    with pytest.raises(InputError, match=r"tile_table returns; it is torch.int32 \[3, 3\]"):
        down_dgrad(dy, w2, pre, offs, tiles=tile_table(offs, 8)[:, :3])


# --- biases -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
def test_gradient_of_a_bias(weighted: bool) -> None:
    """Sums over segments, also of weighted rows; columns off the tile; zeros for an empty segment."""
    offs = offs_of((70, 0, 3))
    x = rows(80, 300, 0)
    row_weights = rows(80, 1, 2).float().squeeze(1) if weighted else None
    _spoil(offs, x, *([row_weights] if weighted else []))
    scaled = x.double() * (1 if row_weights is None else row_weights.double().unsqueeze(1))
    unit = oracle.bias_gradient(scaled.abs(), offs)
    check(bias_gradient(x, offs, row_weights), oracle.bias_gradient(scaled, offs), unit, terms=70)
    with pytest.raises(InputError, match="bfloat16"):
        bias_gradient(x.float(), offs)


# --- gradients of weights -------------------------------------------------------------------------------


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("sizes", SEGMENTS, ids=str)
def test_gradient_of_weights(sizes: tuple[int, ...], aligned: bool) -> None:
    """Partial tiles at both sides; empty segments give zeros; rows past the last segment have no effect."""
    offs, used = offs_of(sizes), sum(sizes)
    x, y = rows(used + 64, 72, 0), rows(used + 64, 136, 1)
    x[used:], y[used:] = float("nan"), float("nan")
    out = weight_gradient(x, y, offs, aligned=aligned)
    assert out.dtype == torch.bfloat16
    check(out, oracle.weight_gradient(x, y, offs), oracle.weight_gradient(x.abs(), y.abs(), offs), terms=max(sizes))
    assert torch.equal(out, weight_gradient(x, y, offs, aligned=aligned, out=torch.empty_like(out)))
    parts = torch.empty_like(out)
    for cut in (slice(0, 40), slice(40, None)):
        weight_gradient(x[:, cut].contiguous(), y, offs, aligned=aligned, out=parts[:, cut])
    assert torch.equal(parts, out)
    for cut in (slice(0, 72), slice(72, None)):
        weight_gradient(x, y[:, cut].contiguous(), offs, aligned=aligned, out=parts[:, :, cut].zero_())
    assert torch.equal(parts, out)


def test_padding_is_left_out_of_gradients_of_weights() -> None:
    """Skipping steps of padding gives the same bits; a segment of padding alone gives zeros, or adds nothing."""
    offs, filled = offs_of((128, 256, 128)), torch.tensor([60, 130, 0], dtype=torch.int32, device=DEVICE)
    x, y = rows(512, 72, 0), rows(512, 136, 1)
    for start, count, end in zip(offs.tolist(), filled.tolist(), offs.tolist()[1:], strict=False):
        x[start + count : end] = 0
    want = weight_gradient(x, y, offs, aligned=True)
    assert torch.equal(weight_gradient(x, y, offs, aligned=True, filled=filled), want)
    y[64:128] = float("nan")  # a step of padding alone is not read
    y[384:] = float("nan")
    assert torch.equal(weight_gradient(x, y, offs, aligned=True, filled=filled), want)
    main = torch.ones(3, 72, 136, device=DEVICE)
    weight_gradient(x, y, offs, aligned=True, filled=filled, out=main, accumulate=True)
    assert torch.equal(main[2], torch.ones_like(main[2])) and not torch.equal(main[0], torch.ones_like(main[0]))
    with pytest.raises(InputError, match="filled"):
        weight_gradient(x, y, offs, aligned=True, filled=filled[:2])


@pytest.mark.parametrize(("aligned", "beside"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("sizes", SEGMENTS, ids=str)
def test_weights_are_added_to(sizes: tuple[int, ...], aligned: bool, beside: bool) -> None:
    """Adds one float32 sum to the existing values; values of an empty segment keep their bits, also NaN."""
    offs, used = offs_of(sizes), sum(sizes)
    x, y = rows(used + 64, 72, 0), rows(used + 64, 136, 1)
    x[used:] = float("nan")
    main = torch.randn(len(sizes), 72, 136, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    empty = torch.tensor([not size for size in sizes])
    main[empty] = float("nan")
    out = main.clone()
    assert weight_gradient(x, y, offs, out=out, accumulate=True, aligned=aligned, beside=beside) is out
    assert out[empty].isnan().all()
    exact = main.double() + oracle.weight_gradient(x, y, offs)
    unit = main.abs().double() + oracle.weight_gradient(x.abs(), y.abs(), offs)
    check(out[~empty], exact[~empty], unit[~empty], terms=max(sizes))


def test_segments_of_any_size() -> None:
    """Without the promise of alignment; without rows; with operands that fit no box."""
    offs = offs_of((3, 0, 70))
    x, y = rows(80, 20, 0), rows(80, 9, 1)
    unit = oracle.weight_gradient(x.abs(), y.abs(), offs)
    check(weight_gradient(x, y, offs), oracle.weight_gradient(x, y, offs), unit, terms=70)
    main = torch.ones(3, 20, 9, device=DEVICE)
    weight_gradient(x, y, offs, out=main, accumulate=True)
    check(main, 1 + oracle.weight_gradient(x, y, offs), 1 + unit, terms=70)
    offs = offs_of((64, 64))
    x, y = rows(128, 20, 0), rows(128, 9, 1)  # rows of 40 and 18 bytes
    unit = oracle.weight_gradient(x.abs(), y.abs(), offs)
    check(weight_gradient(x, y, offs, aligned=True), oracle.weight_gradient(x, y, offs), unit, terms=64)
    nothing = weight_gradient(x[:0], y[:0], torch.zeros_like(offs), aligned=True)
    assert nothing.shape == (2, 20, 9) and not nothing.any()


def test_weight_gradient_errors() -> None:
    """Errors describe the given and the needed operands."""
    x, y, offs = rows(64, 16, 0), rows(64, 24, 1), offs_of((64,))
    for aligned in (False, True):
        with pytest.raises(InputError, match=r"x has 64 rows on \S+, y 32"):
            weight_gradient(x, y[:32], offs, aligned=aligned)
        with pytest.raises(InputError, match=r"out is torch.bfloat16 \[2, 16, 24\]"):
            weight_gradient(x, y, offs, out=x.new_empty(2, 16, 24), aligned=aligned)
        with pytest.raises(InputError, match="bfloat16"):
            weight_gradient(x.float(), y, offs, aligned=aligned)
    with pytest.raises(InputError, match="float32 out, which is missing"):
        weight_gradient(x, y, offs, accumulate=True)
    with pytest.raises(InputError, match="last dimension dense"):
        weight_gradient(x, y, offs, out=torch.zeros(1, 16, 24))
