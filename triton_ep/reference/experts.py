"""Oracle of the experts of a MoE layer: grouped products, the activation between them, and all gradients.

Rows are in segments, one per expert: `offs` [E + 1], first row of each expert's segment, then the end of the last.
All arithmetic is float64, one expert after the other; values are rounded only where the definition of an operand says:

    row scales  MXFP8 (RCEIL, blocks of 32 along the sum) whose elements are moved to the largest scale of their row. An
                element keeps its bits unless it becomes subnormal; then it is rounded to nearest even.
    activation  gated: act(g) * (u + up_offset) * weight; not gated: act(g) * weight; in float32.

Rows past the last segment are neither read nor written; results have zeros there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from triton_ep.reference import mxfp8


class Activation(NamedTuple):
    """The function between the two products.

    Attributes:
        kind: "silu", "gelu" (by the error function), "relu" or "relu2".
        gated: act(g) is multiplied by a second product u.
        limit: g is clamped from above, u from both sides; None: neither.
        alpha: act(g) is g * sigmoid(alpha * g) for "silu".
        up_offset: added to u.
    """

    kind: str = "silu"
    gated: bool = True
    limit: float | None = None
    alpha: float = 1.0
    up_offset: float = 0.0


def activate(pre: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Activation [R, F] of the first product [R, 2F], gate columns first (not gated: [R, F]); differentiable."""
    g, u = pre.chunk(2, -1) if activation.gated else (pre, None)
    if activation.limit is not None:
        g = g.clamp(max=activation.limit)
        u = None if u is None else u.clamp(-activation.limit, activation.limit)
    if activation.kind == "silu":
        value = g * torch.sigmoid(activation.alpha * g)
    elif activation.kind == "gelu":
        value = torch.nn.functional.gelu(g)
    elif activation.kind in ("relu", "relu2"):
        value = g.clamp(min=0) ** (2 if activation.kind == "relu2" else 1)
    else:
        raise ValueError(f"no such activation: {activation.kind!r}")
    return value if u is None else value * (u + activation.up_offset)


def rebase_rows(qdata: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert e4m3 [..., K] with scale bytes [..., K / 32] to one scale per row: e4m3 [..., K] and float32 [...].

    A scale byte 255 makes the row's scale NaN.
    """
    largest = scale.amax(-1)
    shift = (scale.long() - largest.long().unsqueeze(-1)).double()
    values = qdata.float().double().unflatten(-1, (-1, 32)) * torch.exp2(shift).unsqueeze(-1)
    elements = mxfp8._codes(mxfp8._round_to_format(values.flatten(-2), torch.float8_e4m3fn), torch.float8_e4m3fn)
    row_scale = torch.where(largest == 255, torch.nan, torch.exp2(largest.double() - 127)).float()
    return elements.view(torch.float8_e4m3fn), row_scale


def prepared_rows(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [..., K] as FP8 products take them: e4m3 [..., K] and float32 [...].

    The scale is the largest MXFP8 block scale of the row; elements are rounded once under it. They equal the elements
    of `rebase_rows` of MXFP8, except subnormal ones, which are nearer to `w`.
    """
    largest = mxfp8.quantize(w)[1].amax(-1)
    finite = (largest != 255).unsqueeze(-1)
    values = torch.where(finite, w.double(), 0.0) * torch.exp2(127 - largest.double()).unsqueeze(-1)
    elements = mxfp8._codes(mxfp8._round_to_format(values, torch.float8_e4m3fn), torch.float8_e4m3fn)
    row_scale = torch.where(largest == 255, torch.nan, torch.exp2(largest.double() - 127)).float()
    return torch.where(finite, elements, 0x7F).view(torch.float8_e4m3fn), row_scale


def prepared_values(w: torch.Tensor) -> torch.Tensor:
    """Float64 values of `prepared_rows`."""
    qdata, scale = prepared_rows(w)
    return qdata.float().double() * scale.double().unsqueeze(-1)


def row_values(x: torch.Tensor) -> torch.Tensor:
    """Float64 values of `x` [..., K] in an FP8 product: MXFP8 along the last dimension, moved to row scales."""
    qdata, scale = rebase_rows(*mxfp8.quantize(x))
    return qdata.float().double() * scale.double().unsqueeze(-1)


def mx_values(x: torch.Tensor) -> torch.Tensor:
    """Float64 values of `x` [..., K] in MXFP8 along the last dimension."""
    qdata, scale = mxfp8.quantize(x)
    return mxfp8.dequantize(qdata, scale, torch.float32).double()


def tile_table(offs: torch.Tensor, rows_per_tile: int = 128) -> list[tuple[int, int, int]]:
    """(expert, first row, number of rows) of every tile, expert by expert; a tile holds rows of one expert."""
    return [
        (expert, first, min(rows_per_tile, end - first))
        for expert, start, end in segments(offs)
        for first in range(start, end, rows_per_tile)
    ]


def tile_bands(offs: torch.Tensor, most: int = 8) -> list[tuple[int, int]]:
    """(height of its band, place in the band) of every tile of `tile_table`. The tiles of a segment are cut into bands
    of equal height, except the last."""
    found = []
    for _, start, end in segments(offs):
        tiles = -(-(end - start) // 128)
        height = -(-tiles // max(-(-tiles // most), 1))
        found += [(min(height, tiles - tile // height * height), tile % height) for tile in range(tiles)]
    return found


def segments(offs: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """(expert, start, end) of every segment, empty ones included."""
    bounds = offs.tolist()
    for expert in range(len(bounds) - 1):
        yield expert, bounds[expert], bounds[expert + 1]


def product(a: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """[R, N] float64: rows of segment e of `a` [R, K] times w[e]^T, `w` [E, N, K]."""
    out = torch.zeros(a.shape[0], w.shape[1], dtype=torch.float64, device=a.device)
    for expert, start, end in segments(offs):
        out[start:end] = a[start:end].double() @ w[expert].double().T
    return out


def weight_gradient(x: torch.Tensor, y: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """[E, I, J] float64: x_e^T @ y_e over the rows of each segment."""
    return torch.stack([x[a:b].double().T @ y[a:b].double() for _, a, b in segments(offs)])


def bias_gradient(x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """[E, I] float64: sums of the rows of each segment."""
    return torch.stack([x[a:b].double().sum(0) for _, a, b in segments(offs)])


def expanded(
    arrived: torch.Tensor, copies: torch.Tensor, count: int, offs: torch.Tensor, num_rows: int
) -> torch.Tensor:
    """[offs[-1], H]: the first `count` rows of `arrived` [C, H] at their places `copies` [C, K] (-1 = none), else 0."""
    out = arrived.new_zeros(num_rows, arrived.shape[1])
    for row in range(count):
        kept = copies[row][copies[row] >= 0].long()
        out[kept] = arrived[row]
    return out[: int(offs[-1])]


def weighted_rows_backward(
    dy: torch.Tensor, y: torch.Tensor, weights: torch.Tensor, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of sum(weights[r] * y[r]) for y [R, H] and for the weights [R], float64; zeros from row `end` on."""
    grad, grad_weights = torch.zeros_like(y, dtype=torch.float64), torch.zeros_like(weights, dtype=torch.float64)
    grad[:end] = dy[:end].double() * weights[:end, None].double()
    grad_weights[:end] = (dy[:end].double() * y[:end].double()).sum(1)
    return grad, grad_weights


class Gradients(NamedTuple):
    """Results of `activation_backward`, all float64.

    Attributes:
        pre: [R, 2F], gradient of the first product's result.
        act: [R, F], the weighted activation itself, which the second matrix's gradient needs.
        weights: [R], gradient of the rows' weights.
    """

    pre: torch.Tensor
    act: torch.Tensor
    weights: torch.Tensor


def activation_backward(
    dact: torch.Tensor, pre: torch.Tensor, row_weights: torch.Tensor | None, activation: Activation
) -> Gradients:
    """Gradients of the first product and the row weights, from the gradient [R, F] of the weighted activation."""
    leaf = pre.double().detach().requires_grad_()
    value = activate(leaf, activation)
    weights = torch.ones(pre.shape[0], dtype=torch.float64) if row_weights is None else row_weights.double()
    weights = weights.to(pre.device).unsqueeze(-1)
    (dpre,) = torch.autograd.grad(value, leaf, dact.double() * weights)
    value = value.detach()
    return Gradients(dpre, value * weights, (dact.double() * value).sum(-1))


def experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    offs: torch.Tensor,
    row_weights: torch.Tensor | None = None,
    activation: Activation | None = None,
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
) -> torch.Tensor:
    """[R, H] of rows `x` [R, H], `w13` [E, 2F, H], gate rows first, `w2` [E, H, F]; differentiable, in the given dtype.

    row_weights: [R], multiplied with each row's result, biases included. b13: [E, 2F], b2: [E, H].
    """
    out = []
    for expert, start, end in segments(offs):
        pre = x[start:end] @ w13[expert].T
        pre = pre if b13 is None else pre + b13[expert]
        y = activate(pre, activation or Activation()) @ w2[expert].T
        y = y if b2 is None else y + b2[expert]
        out.append(y if row_weights is None else y * row_weights[start:end, None].to(y.dtype))
    behind = x.new_zeros(x.shape[0] - int(offs[-1]), w2.shape[1])
    return torch.cat([*out, behind])
