"""Operands and error bounds of the grouped GEMM tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triton_ep.runtime.launch import INTERPRETING

DEVICE = "cpu" if INTERPRETING else "cuda"

CPU_GROUPS = ((1,), (0, 7, 0), (37, 1, 64), (3, 100))
"""Rows of each group: one row, empty groups at both ends, unaligned starts, more than one tile."""


@dataclass(frozen=True)
class Case:
    """Sizes of a product, with `spare` rows past the last group."""

    sizes: tuple[int, ...]
    n: int
    k: int
    k_major: bool = True
    spare: int = 0
    seed: int = 0


def ends_of(sizes: tuple[int, ...]) -> torch.Tensor:
    """[E] int32, the end of each group."""
    return torch.tensor(sizes).cumsum(0).to(torch.int32).to(DEVICE)


def operands(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a [R, K] bf16, b_t [E, K, N] bf16 in the layout of the case, ends [E]."""
    generator = torch.Generator(DEVICE).manual_seed(case.seed)
    rows = sum(case.sizes) + case.spare
    a = torch.randn(rows, case.k, generator=generator, device=DEVICE).bfloat16()
    shape = (len(case.sizes), *((case.n, case.k) if case.k_major else (case.k, case.n)))
    w = torch.randn(shape, generator=generator, device=DEVICE).bfloat16()
    return a, w.transpose(1, 2) if case.k_major else w, ends_of(case.sizes)


def check(
    out: torch.Tensor,
    exact: torch.Tensor,
    unit: torch.Tensor,
    terms: int,
    steps: float = 0.0,
    moved: torch.Tensor | float = 0.0,
) -> None:
    """Assert that `out` is `exact` up to accumulation in float32 and one rounding to the output's type.

    unit: sum of the magnitudes of the `terms` products of each value. Tensor cores add 16 products at a time to the
    accumulator and drop bits below its last one, so each such step may lose 2^-23 of the unit, counted twice because
    the products of a step are aligned to the largest; 64 more steps cover a CPU's order of additions.
    steps: further error of the accumulation, in units. moved: error of the result due to errors of the operands.
    """
    assert out.shape == exact.shape
    eps = torch.finfo(out.dtype).eps
    before = unit * ((terms / 8 + 64) * 2.0**-23 + steps) + moved
    bound = exact.abs() * eps / 2 + before * (1 + eps) + torch.finfo(out.dtype).smallest_normal
    error = (out.double() - exact).abs()
    assert bool((error <= bound).all()), f"off by up to {(error / bound).nan_to_num(nan=1e9).max().item():.3g} bounds"
