"""Activation between the two products of an expert, and its derivatives, on float32 tiles.

    gated       act(g) * (u + up_offset)
    not gated   act(g); u is ignored
    CLAMP       first clamps g from above at `limit`, and u from both sides

KIND: ACT_SILU g * sigmoid(alpha * g), ACT_GELU by the error function, ACT_RELU max(g, 0), ACT_RELU2 its square. At the
bound of a clamp, and at 0 of relu, the gradient passes, as for torch.clamp. A NaN stays a NaN.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device import codes
from ..device.spin import INTERPRET

ACT_SILU = tl.constexpr(codes.ACT_SILU)
ACT_GELU = tl.constexpr(codes.ACT_GELU)
ACT_RELU = tl.constexpr(codes.ACT_RELU)
ACT_RELU2 = tl.constexpr(codes.ACT_RELU2)

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_DENSITY_AT_0 = tl.constexpr(0.3989422804014327)  # of the normal distribution


class Activation(NamedTuple):
    """An activation, as the docstring of the module defines it. Numbers of KIND: device/codes.py."""

    KIND: tl.constexpr
    GATED: tl.constexpr
    CLAMP: tl.constexpr
    LIMIT: tl.constexpr
    ALPHA: tl.constexpr
    UP_OFFSET: tl.constexpr


if INTERPRET.value:

    @triton.jit
    def _sigmoid(x):
        return tl.sigmoid(x)

else:

    @triton.jit
    def _sigmoid(x):
        """1 / (1 + exp(-x)) of float32 in 4 instructions; `tl.sigmoid` takes 14.

        Its approximations have errors of 1 and 2 units in the last place, as in `tl.sigmoid`. An exponential that is
        flushed to zero would vanish when added to 1; a sigmoid below 2**-126 becomes 0.
        """
        return tl.inline_asm_elementwise(
            "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000; "
            "rcp.approx.ftz.f32 $0, e; }",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _at_most(x, limit):
    # Not tl.minimum: it would drop a NaN.
    return tl.where(x > limit, limit, x)


@triton.jit
def _kind_value(g, KIND: tl.constexpr, alpha):
    if KIND == ACT_SILU:
        return g * _sigmoid(alpha * g)
    elif KIND == ACT_GELU:
        return g * (0.5 + 0.5 * tl.erf(g * _SQRT_HALF))
    else:
        positive = tl.where(g < 0, 0.0, g)
        if KIND == ACT_RELU2:
            return positive * positive
        else:
            return positive


@triton.jit
def _kind_slope(g, KIND: tl.constexpr, alpha):
    if KIND == ACT_SILU:
        share = _sigmoid(alpha * g)
        return share * (1.0 + alpha * g * (1.0 - share))
    elif KIND == ACT_GELU:
        return 0.5 + 0.5 * tl.erf(g * _SQRT_HALF) + g * (_DENSITY_AT_0 * tl.exp(-0.5 * g * g))
    elif KIND == ACT_RELU2:
        return tl.where(g < 0, 0.0, 2.0 * g)
    else:
        return tl.where(g < 0, 0.0, 1.0)


@triton.jit
def _with_offset(u, UP_OFFSET: tl.constexpr):
    return u + UP_OFFSET if UP_OFFSET != 0 else u


@triton.jit
def apply_activation(g, u, activation):
    """Value for float32 `g` and `u` of one shape; without GATED `u` is ignored."""
    if activation.CLAMP:
        g = _at_most(g, activation.LIMIT)
    value = _kind_value(g, activation.KIND, activation.ALPHA)
    if activation.GATED:
        if activation.CLAMP:
            u = -_at_most(-_at_most(u, activation.LIMIT), activation.LIMIT)
        value = value * _with_offset(u, activation.UP_OFFSET)
    return value


@triton.jit
def activation_gradients(g, u, activation):
    """(value, d value / dg, d value / du), float32 in the shape of `g`; without GATED the last equals the first."""
    passes_g = g
    passes_u = u
    if activation.CLAMP:
        g = _at_most(g, activation.LIMIT)
    value = _kind_value(g, activation.KIND, activation.ALPHA)
    slope = _kind_slope(g, activation.KIND, activation.ALPHA)
    slope_u = value
    if activation.GATED:
        if activation.CLAMP:
            u = -_at_most(-_at_most(u, activation.LIMIT), activation.LIMIT)
            slope_u = tl.where((passes_u > activation.LIMIT) | (passes_u < -activation.LIMIT), 0.0, slope_u)
        slope = slope * _with_offset(u, activation.UP_OFFSET)
        value = value * _with_offset(u, activation.UP_OFFSET)
    if activation.CLAMP:
        slope = tl.where(passes_g > activation.LIMIT, 0.0, slope)
    return value, slope, slope_u
