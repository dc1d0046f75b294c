"""Backward pass of experts, kernel by kernel, against float64 of the same operands."""

from __future__ import annotations

import pytest
import torch

from tests.ops.grouped import DEVICE, check
from triton_ep.errors import InputError
from triton_ep.ops.experts_backward import weight_gradient
from triton_ep.reference import experts as oracle

SEGMENTS = ((64, 0, 192, 0), (0, 0), (0, 128))
"""Rows of each segment: empty ones everywhere, more than one step."""


def offs_of(sizes: tuple[int, ...]) -> torch.Tensor:
    """[E + 1] int32."""
    return torch.tensor([0, *sizes]).cumsum(0).to(torch.int32).to(DEVICE)


def rows(num_rows: int, width: int, seed: int) -> torch.Tensor:
    """[R, width] bf16."""
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.bfloat16)


# --- gradients of weights -------------------------------------------------------------------------------


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("sizes", SEGMENTS, ids=str)
def test_gradient_of_weights(sizes: tuple[int, ...], aligned: bool) -> None:
    """Tiles cut at both sides; empty segments give zeros; rows behind the last segment count for nothing."""
    offs, used = offs_of(sizes), sum(sizes)
    x, y = rows(used + 64, 72, 0), rows(used + 64, 136, 1)
    x[used:], y[used:] = float("nan"), float("nan")
    out = weight_gradient(x, y, offs, aligned=aligned)
    assert out.dtype == torch.bfloat16
    check(out, oracle.weight_gradient(x, y, offs), oracle.weight_gradient(x.abs(), y.abs(), offs), terms=max(sizes))
    assert torch.equal(out, weight_gradient(x, y, offs, aligned=aligned, out=torch.empty_like(out)))


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("sizes", SEGMENTS, ids=str)
def test_weights_are_added_to(sizes: tuple[int, ...], aligned: bool) -> None:
    """One sum in float32 on top of what is there; what belongs to an empty segment keeps its bits, a NaN too."""
    offs, used = offs_of(sizes), sum(sizes)
    x, y = rows(used + 64, 72, 0), rows(used + 64, 136, 1)
    x[used:] = float("nan")
    main = torch.randn(len(sizes), 72, 136, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    empty = torch.tensor([not size for size in sizes])
    main[empty] = float("nan")
    out = main.clone()
    assert weight_gradient(x, y, offs, out=out, accumulate=True, aligned=aligned) is out
    assert out[empty].isnan().all()
    exact = main.double() + oracle.weight_gradient(x, y, offs)
    unit = main.abs().double() + oracle.weight_gradient(x.abs(), y.abs(), offs)
    check(out[~empty], exact[~empty], unit[~empty], terms=max(sizes))


def test_segments_of_any_size() -> None:
    """Without the promise; no rows at all; operands that fit no box."""
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
    """What is given and what is needed."""
    x, y, offs = rows(64, 16, 0), rows(64, 24, 1), offs_of((64,))
    for aligned in (False, True):
        with pytest.raises(InputError, match=r"x has 64 rows, y.* 32"):
            weight_gradient(x, y[:32], offs, aligned=aligned)
        with pytest.raises(InputError, match=r"out is \[2, 16, 24\]"):
            weight_gradient(x, y, offs, out=x.new_empty(2, 16, 24), aligned=aligned)
        with pytest.raises(InputError, match="bfloat16"):
            weight_gradient(x.float(), y, offs, aligned=aligned)
    with pytest.raises(InputError, match="float32 out; it is None"):
        weight_gradient(x, y, offs, accumulate=True)
    with pytest.raises(InputError, match="it must be bfloat16, or float32"):
        weight_gradient(x, y, offs, out=torch.zeros(1, 16, 24))
