"""Activations and their derivatives on tiles, against the oracle and its autograd."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from triton_ep.errors import ConfigError
from triton_ep.ops.activation import Activation, check_activation
from triton_ep.reference import experts as oracle
from triton_ep.runtime.launch import INTERPRETING  # before the kernels: decides how they run
from triton_ep.runtime.plans.experts import activation_constexprs

# isort: split
from triton_ep.kernels.experts.activation import Activation as OnDevice
from triton_ep.kernels.experts.activation import activation_gradients, apply_activation

DEVICE = "cpu" if INTERPRETING else "cuda"
ACTIVATIONS = (
    Activation(),
    Activation("silu", limit=1.5, alpha=1.702, up_offset=1.0),
    Activation("gelu"),
    Activation("gelu", gated=False),
    Activation("relu", limit=1.25),
    Activation("relu2", gated=False, limit=1.0),
)


@triton.jit
def _activate(
    pre_ptr,
    out_ptr,
    N: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    CLAMP: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    UP_OFFSET: tl.constexpr,
):
    """out [4, N]: the value of apply_activation, then value and both derivatives of activation_gradients."""
    offs = tl.arange(0, N)
    g = tl.load(pre_ptr + offs)
    u = tl.load(pre_ptr + N + offs)
    group = OnDevice(KIND, GATED, CLAMP, LIMIT, ALPHA, UP_OFFSET)
    value, slope_g, slope_u = activation_gradients(g, u, group)
    tl.store(out_ptr + offs, apply_activation(g, u, group))
    tl.store(out_ptr + N + offs, value)
    tl.store(out_ptr + 2 * N + offs, slope_g)
    tl.store(out_ptr + 3 * N + offs, slope_u)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_values_and_derivatives(activation: Activation) -> None:
    """Float32 results match float64, also at the bounds of the clamp and at 0; a NaN stays NaN."""
    count = 512
    pre = 2 * torch.randn(2, count, generator=torch.Generator().manual_seed(0))
    bound = 1.0 if activation.limit is None else activation.limit
    pre[:, :4] = torch.tensor([0.0, bound, -bound, torch.nan])
    pre[:, 4:6] = torch.tensor([[90.0, -90.0], [1.0, 1.0]])
    out = torch.empty(4, count, device=DEVICE)
    _activate[(1,)](pre.to(DEVICE), out, N=count, **activation_constexprs(*activation))
    leaf = pre.double().requires_grad_()
    given = torch.cat([leaf[0, :, None], leaf[1, :, None]], 1) if activation.gated else leaf[0, :, None]
    value = oracle.activate(given, oracle.Activation(*activation)).squeeze(1)
    (slopes,) = torch.autograd.grad(value.sum(), leaf)
    if not activation.gated:
        slopes[1] = value.detach()
    wanted = torch.stack([value, value, slopes[0], slopes[1]]).detach()
    assert out[:2, 3].isnan().all()
    kept = torch.arange(count) != 3
    torch.testing.assert_close(out.cpu().double()[:, kept], wanted[:, kept], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("activation", "match"),
    [
        (Activation("tanh"), "kind is 'tanh'"),
        (Activation(limit=0.0), "limit is 0.0"),
        (Activation("gelu", alpha=1.7), "alpha is 1.7"),
        (Activation("relu", gated=False, up_offset=1.0), "up_offset is 1.0"),
    ],
    ids=str,
)
def test_what_no_kernel_computes(activation: Activation, match: str) -> None:
    """The error has the refused value."""
    check_activation(Activation())
    with pytest.raises(ConfigError, match=match):
        check_activation(activation)
