"""Oracle of the grouped GEMM: one product per group of rows, in float64.

R rows in E consecutive groups; `ends` [E] int: the row after the last row of each group. Rows from `ends[-1]` on
belong to no group.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch


def groups(ends: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Index and rows of every group."""
    start = 0
    for expert, end in enumerate(ends.tolist()):
        yield expert, slice(start, end)
        start = end


def grouped_gemm(a: torch.Tensor, b_t: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """[R, N] float64: rows of group e times b_t[e]; zeros for rows of no group. a [R, K], b_t [E, K, N]."""
    out = a.new_zeros(a.shape[0], b_t.shape[2], dtype=torch.float64)
    for expert, rows in groups(ends):
        out[rows] = a[rows].double() @ b_t[expert].double()
    return out


def dgrad(dy: torch.Tensor, b_t: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """[R, K] float64: gradient of `a`. dy [R, N], b_t [E, K, N]."""
    return grouped_gemm(dy, b_t.transpose(-2, -1), ends)


def wgrad(dy: torch.Tensor, a: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """[E, N, K] float64: transpose of the gradient of `b_t`; zeros for an empty group. dy [R, N], a [R, K]."""
    out = a.new_zeros(len(ends), dy.shape[1], a.shape[1], dtype=torch.float64)
    for expert, rows in groups(ends):
        out[expert] = dy[rows].double().T @ a[rows].double()
    return out


def magnitude(a: torch.Tensor, b_t: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """[R, N] float64: sum of the magnitudes of each output's products, the unit of rounding errors."""
    return grouped_gemm(a.abs(), b_t.abs(), ends)
