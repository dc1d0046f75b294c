"""Grouped GEMM at the sizes of real models, on one GPU: every value of every group, against float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest
import torch

from tests.ops.grouped import check
from triton_ep.mx.tensor import MXTensor
from triton_ep.ops import grouped_gemm as ops
from triton_ep.reference import grouped_gemm as oracle

pytestmark = pytest.mark.gpu

SHAPES = {
    "deepseek-v3-up": (32, 4096, 7168),
    "deepseek-v3-down": (32, 7168, 2048),
    "qwen3-235b-up": (16, 3072, 4096),
    "qwen3-235b-down": (16, 4096, 1536),
}
"""Experts on one of 8 GPUs, outputs N, terms K."""

ROWS = ("8", "64", "128", "256", "1024", "ragged")
FP8_STEPS = 2.0**-9  # sums inside one product of Hopper's fp8 tensor cores keep about 14 bits
PRODUCT_ERROR = 1.8e-3
"""Relative to the norm, if only the result is rounded: rounding to bf16 makes 1.66e-3."""


def _sizes(rows: str, experts: int) -> list[int]:
    """Rows of each expert; "ragged" gives any sizes, with the first and one other zero."""
    if rows != "ragged":
        return [int(rows)] * experts
    shares = torch.rand(experts, generator=torch.Generator().manual_seed(1)) ** 2
    sizes = (shares / shares.sum() * 256 * experts).long()
    sizes[0] = sizes[experts // 2] = 0
    sizes[1] = 1
    return sizes.tolist()


@lru_cache(maxsize=1)
def _weights(shape: str) -> tuple[torch.Tensor, MXTensor]:
    experts, n, k = SHAPES[shape]
    w = torch.randn(experts, n, k, generator=torch.Generator("cuda").manual_seed(2), device="cuda").bfloat16()
    return w, MXTensor.to_mx(w)


def _rows(count: int, width: int, seed: int) -> tuple[torch.Tensor, MXTensor]:
    """Values in bf16 and quantised; rows differ in magnitude, and 5 rows of no group follow."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(count + 5, width, generator=generator, device="cuda")
    x = (x * torch.arange(count + 5, device="cuda").remainder(7).sub(3).exp2()[:, None]).bfloat16()
    return x, MXTensor.to_mx(x)


def _check_groups(
    out: torch.Tensor, ends: torch.Tensor, product: Callable[[int, slice], tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Compare group by group; `product` gives the operands of a group, [rows, terms] and [terms, columns]."""
    for expert, rows in oracle.groups(ends):
        if rows.start == rows.stop:
            continue
        left, right = (part.double() for part in product(expert, rows))
        exact = left @ right
        check(out[rows], exact, left.abs() @ right.abs(), terms=left.shape[1])
        assert (out[rows].double() - exact).norm() < PRODUCT_ERROR * exact.norm()
    assert not out[ends[-1] :].any()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_gradient_of_rows(shape: str, rows: str) -> None:
    """From bf16 and MXFP8 operands, with no more than one rounding."""
    experts, n, k = SHAPES[shape]
    sizes = _sizes(rows, experts)
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32).cuda()
    w, w_mx = _weights(shape)
    (a, a_mx), (dy, dy_mx) = _rows(sum(sizes), k, 3), _rows(sum(sizes), n, 4)
    for left, grad, weights in ((a, dy, w), (a_mx, dy_mx, w), (a_mx, dy_mx, w_mx)):
        values, grads, matrices = (
            x.dequantize(torch.float32) if isinstance(x, MXTensor) else x for x in (left, grad, weights)
        )
        out = ops.grouped_gemm(left, weights.transpose(-2, -1), ends)
        _check_groups(out, ends, lambda expert, group, v=values, m=matrices: (v[group], m[expert].T))
        if weights is w:  # the gradient of rows would need weights quantised along N
            da = ops.grouped_gemm_dgrad(grad, weights.transpose(-2, -1), ends)
            _check_groups(da, ends, lambda expert, group, v=grads, m=matrices: (v[group], m[expert]))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradient_of_weights(shape: str, rows: str) -> None:
    """Gradients of every expert; zeros for experts without rows."""
    experts, n, k = SHAPES[shape]
    sizes = _sizes(rows, experts)
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32).cuda()
    (a, a_mx), (dy, dy_mx) = _rows(sum(sizes), k, 3), _rows(sum(sizes), n, 4)
    for left, right in ((dy, a), (dy_mx, a_mx)):
        grads, values = (x.dequantize(torch.float32) if isinstance(x, MXTensor) else x for x in (left, right))
        dw = ops.grouped_gemm_wgrad(left, right, ends, experts)
        for expert, group in oracle.groups(ends):
            if group.start == group.stop:
                assert not dw[expert].any()
                continue
            x, y = grads[group].double().T, values[group].double()
            exact = x @ y
            check(dw[expert], exact, x.abs() @ y.abs(), terms=x.shape[1])
            assert (dw[expert].double() - exact).norm() < PRODUCT_ERROR * exact.norm()


@pytest.mark.parametrize("rows", ["8", "64", "128"])
@pytest.mark.parametrize("shape", SHAPES)
def test_few_rows_in_fp8(shape: str, rows: str) -> None:
    """The float64 product of operands with equal scales, up to the precision of sums in fp8 tensor cores."""
    experts, _, k = SHAPES[shape]
    ends = torch.tensor(_sizes(rows, experts)).cumsum(0).to(torch.int32).cuda()
    _, w_mx = _weights(shape)
    _, a_mx = _rows(int(ends[-1]), k, 3)
    left, right = ops.equal_scales(a_mx), ops.equal_scales(w_mx.transpose(-2, -1))
    assert ops._choose(a_mx[: int(ends[-1])], right) == "fp8"
    out = ops.grouped_gemm(left, right, ends, path="fp8")
    values, matrices = left.dequantize(), right.dequantize()
    for expert, group in oracle.groups(ends):
        x, y = values[group].double(), matrices[expert].double().T
        check(out[group], x @ y, x.abs() @ y.abs(), terms=k, steps=FP8_STEPS)
    assert not out[ends[-1] :].any()
