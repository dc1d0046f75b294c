"""The differentiable MXFP8 grouped product: quantisation of every operand, forward and backward."""

from __future__ import annotations

import inspect
from enum import StrEnum
from typing import Any

import pytest
import torch

from tests.ops.grouped import DEVICE, Case, check, operands
from triton_ep.errors import InputError
from triton_ep.mx.grouped_mm import _to_mxfp8_then_scaled_grouped_mm as grouped_mm
from triton_ep.mx.tensor import MXTensor
from triton_ep.reference import grouped_gemm as oracle
from triton_ep.reference import mxfp8

SIZES = (33, 0, 1, 62)
"""A short last block, an empty group, a group of one row, unaligned starts."""


def _along(x: torch.Tensor, dim: int, mode: str = "rceil") -> torch.Tensor:
    """Values after quantisation in blocks of 32 along a dimension, the last block padded with zeros."""
    moved = x.cpu().movedim(dim, -1)
    padded = torch.nn.functional.pad(moved, (0, -moved.shape[-1] % 32)).contiguous()
    values = mxfp8.dequantize(*mxfp8.quantize(padded, scaling_mode=mode), torch.float32)
    return values[..., : moved.shape[-1]].movedim(-1, dim).to(DEVICE)


def _along_rows(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x, dtype=torch.float32)
    for _, rows in oracle.groups(ends):
        if rows.stop > rows.start:
            out[rows] = _along(x[rows], 0)
    return out


def _mx(x: torch.Tensor) -> MXTensor:
    qdata, scale = mxfp8.quantize(x.cpu())
    return MXTensor.from_qdata_and_scales(qdata.to(DEVICE), scale.to(DEVICE), torch.bfloat16)


class _GradientAsMX(torch.autograd.Function):
    """Identity whose gradient arrives quantised, as the combine of the pipeline sends it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return _mx(grads[0].contiguous())


@pytest.mark.parametrize("k_major", [True, False])
@pytest.mark.parametrize("hp", [False, True])
@pytest.mark.parametrize("dy_is_mx", [False, True])
@pytest.mark.parametrize("a_is_mx", [False, True])
def test_every_product(a_is_mx: bool, dy_is_mx: bool, hp: bool, k_major: bool) -> None:
    """Result and both gradients equal the float64 products of the operands quantised as documented."""
    a, b_t, ends = operands(Case(SIZES, n=96, k=64, k_major=k_major, spare=3))
    dy, _, _ = operands(Case(SIZES, n=8, k=96, spare=3, seed=1))
    left = (_mx(a) if a_is_mx else a.clone()).requires_grad_()
    weights = b_t.detach().requires_grad_()
    out = grouped_mm(left, weights, ends, wgrad_with_hp=hp)
    (_GradientAsMX.apply(out) if dy_is_mx else out).backward(dy)

    a_k, w_k = _along(a, -1), _along(b_t, -2)
    check(out.detach(), oracle.grouped_gemm(a_k, w_k, ends), oracle.magnitude(a_k, w_k, ends), terms=64)

    dy_n, w_n = _along(dy, -1), _along(b_t, -1)
    assert type(left.grad) is torch.Tensor and left.grad.dtype == torch.bfloat16
    check(left.grad, oracle.dgrad(dy_n, w_n, ends), oracle.magnitude(dy_n, w_n.transpose(1, 2), ends), terms=96)
    assert not left.grad[ends[-1] :].any()

    seen_dy = dy_n if dy_is_mx else dy.float()
    if a_is_mx:
        x, y = seen_dy if hp else dy_n, a_k
    elif hp:
        x, y = seen_dy, a.float()
    else:
        x, y = _along_rows(seen_dy, ends), _along_rows(a, ends)
    assert weights.grad is not None and weights.grad.stride() == weights.stride()
    exact, unit = oracle.wgrad(x, y, ends), oracle.wgrad(x.abs(), y.abs(), ends)
    check(weights.grad.transpose(1, 2), exact, unit, terms=62)
    assert not weights.grad[1].any()


@pytest.mark.parametrize("mode", ["rceil", "floor", "ceil", "even"])
def test_scaling_modes(mode: str) -> None:
    """The mode reaches both operands."""
    a, b_t, ends = operands(Case((9, 4), n=32, k=64))
    a_k, w_k = _along(a, -1, mode), _along(b_t, -2, mode)
    out = grouped_mm(a, b_t, ends, scale_calculation_mode=mode)
    check(out, oracle.grouped_gemm(a_k, w_k, ends), oracle.magnitude(a_k, w_k, ends), terms=64)


def test_bias() -> None:
    """One bias for all rows, or one per group; differentiable; no group's bias for rows past the last group."""
    a, b_t, ends = operands(Case((2, 0, 3), n=32, k=32, spare=1))
    plain = grouped_mm(a, b_t, ends)
    bias = torch.randn(32, device=DEVICE).bfloat16().requires_grad_()
    out = grouped_mm(a, b_t, ends, bias)
    expected = torch.cat([plain[:5] + bias.detach(), torch.zeros_like(plain[5:])])
    assert torch.equal(out.detach(), expected)
    out.sum().backward()
    assert torch.equal(bias.grad, torch.full_like(bias, 5))
    per_group = torch.randn(3, 32, device=DEVICE).bfloat16()
    expected = torch.cat([plain[:2] + per_group[0], plain[2:5] + per_group[2], plain[5:]])
    assert torch.equal(grouped_mm(a, b_t, ends, per_group), expected)


@pytest.mark.parametrize("per_group", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bias_of_another_dtype(out_dtype: torch.dtype, per_group: bool) -> None:
    """The result has `out_dtype`; the sum is rounded once, and the gradient of the bias keeps its own dtype."""
    a, b_t, ends = operands(Case((2, 3), n=32, k=32, spare=2))
    plain = grouped_mm(a, b_t, ends, out_dtype=out_dtype)
    bias = torch.randn(*([2] if per_group else []), 32, device=DEVICE).requires_grad_()
    out = grouped_mm(a, b_t, ends, bias, out_dtype=out_dtype)
    of_rows = bias.detach().expand(2, 32).repeat_interleave(torch.tensor([2, 3], device=DEVICE), 0)
    assert out.dtype == out_dtype
    assert torch.equal(out[:5].detach(), (plain[:5].float() + of_rows).to(out_dtype))
    assert not out[5:].any()
    out.sum().backward()
    counts = torch.tensor([[2.0], [3.0]], device=DEVICE) if per_group else torch.tensor(5.0, device=DEVICE)
    assert torch.equal(bias.grad, counts.expand(bias.shape))


def test_only_what_is_asked_for() -> None:
    """No gradient unless requested; starts instead of ends; float32 out; an expanded gradient with stride 0."""
    a, b_t, ends = operands(Case((5, 4), n=32, k=32))
    starts = torch.nn.functional.pad(ends, (1, 0))
    out = grouped_mm(a.requires_grad_(), b_t, starts, out_dtype=torch.float32, pad_token_groups_for_grouped_mm=True)
    assert out.dtype == torch.float32
    out.sum().backward()
    ones = torch.ones(9, 32, device=DEVICE)
    w_n = _along(b_t, -1)
    assert a.grad is not None and b_t.grad is None
    check(a.grad, oracle.dgrad(ones, w_n, ends), oracle.magnitude(ones, w_n.transpose(1, 2), ends), terms=32)
    weights = b_t.detach().requires_grad_()
    grouped_mm(a.detach(), weights, ends).sum().backward()
    assert weights.grad is not None


class _Preference(StrEnum):
    """Stand-in for torchao's KernelPreference, whose members are truthy."""

    EMULATED = "emulated"


def test_arguments_in_torchaos_order() -> None:
    """Positional calls work as in torchao, with its argument names; our own arguments come last."""
    names = ["A", "B_t", "offs", "bias", "out_dtype", "kernel_preference", "wgrad_with_hp", "scale_calculation_mode"]
    assert list(inspect.signature(grouped_mm).parameters)[:9] == [*names, "pad_token_groups_for_grouped_mm"]
    a, b_t, ends = operands(Case(SIZES, n=32, k=32))
    b_t.requires_grad_()

    def gradient(*rest: Any, **named: Any) -> torch.Tensor:
        b_t.grad = None
        grouped_mm(a, b_t, ends, *rest, **named).sum().backward()
        assert b_t.grad is not None
        return b_t.grad

    emulated = gradient(None, torch.float32, _Preference.EMULATED, False, "floor", True)
    assert torch.equal(emulated, gradient(out_dtype=torch.float32, scale_calculation_mode="floor"))
    assert not torch.equal(emulated, gradient(wgrad_with_hp=True, scale_calculation_mode="floor"))
    exact = gradient(None, torch.bfloat16, _Preference.EMULATED, True)
    assert torch.equal(exact, gradient(wgrad_with_hp=True))


def test_errors() -> None:
    """Operands that cannot be quantised are refused, with their sizes."""
    a, b_t, ends = operands(Case((5, 4), n=32, k=64))
    with pytest.raises(InputError, match="multiples of 32"):
        grouped_mm(a, b_t[:, :, :31], ends)
    with pytest.raises(InputError, match="block_size is 16"):
        grouped_mm(a, b_t, ends, block_size=16)
    with pytest.raises(InputError, match="bfloat16"):
        grouped_mm(a.float(), b_t, ends)
    for bias in (b_t[0, 0, :8], b_t[:1, 0], b_t[:, :1]):
        with pytest.raises(InputError, match=r"bias is .*must be \[32\], or \[2, 32\]"):
            grouped_mm(a, b_t, ends, bias)
    for change, text in (
        ({"offs": None}, "offs is None"),
        ({"bias": 3.0}, "bias must be a tensor or None, got float"),
        ({"kernel_preference": True}, "wgrad_with_hp the seventh"),
        ({"wgrad_with_hp": _Preference.EMULATED}, "must be True or False"),
        ({"out_dtype": torch.int8}, "out_dtype is torch.int8"),
        ({"B_t": None}, "B_t must be a tensor, got NoneType"),
        ({"block_size": "32"}, "block_size is '32'"),
    ):
        with pytest.raises(InputError, match=text):
            grouped_mm(**{"A": a, "B_t": b_t, "offs": ends, **change})
    with pytest.raises(InputError, match="offs is a list"):
        grouped_mm(a, b_t, [5, 9])
    if DEVICE == "cpu":  # on a GPU the host would have to wait for the values
        for bounds in ([9, 5], [5, 10], [-1, 9], [1, 5, 9]):
            with pytest.raises(InputError, match="groups must begin at row 0, follow one another, and end at 9"):
                grouped_mm(a, b_t, ends.new_tensor(bounds))
    with pytest.raises(InputError, match="A must be"):
        grouped_mm(a[:, :32], b_t, ends)
    with pytest.raises(InputError, match="along K"):
        grouped_mm(_mx(a.T.contiguous()[:, :0].new_zeros(64, 32)).transpose(0, 1), b_t, ends[:2])
    with pytest.raises(InputError):
        grouped_mm(a, b_t, ends, scale_calculation_mode="nearest")
