"""Which programs a GPU holds at the same time, by registers, warps and shared memory.

A program that waits keeps its place on a multiprocessor. If waiting programs filled the GPU, the programs they wait for
would never start. This module therefore computes grids of kernels that wait so that they are safe for any placement by
the hardware. It also computes budgets of multiprocessors: programs have no affinity to a multiprocessor, so a budget of
n means programs whose resources add up to those of n multiprocessors. Needs neither torch nor Triton.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from triton_ep.runtime.plans.shape import Plan

_WARP = 32
_MOST_REGISTERS = 255
"""Per thread."""
_REGISTER_STEP = 8
"""Registers of a thread are allocated in multiples of it."""
_RESERVED_SHARED = 1024
"""Bytes of shared memory that CUDA reserves per program."""
UNCOMPILED_SHARED = 2**14
"""Most bytes of shared memory of a program of the exchange whose plan does not say (tests/gate)."""


LITTLE_SHARED = 2**15
"""A multiprocessor divides its memory between L1 cache and shared memory for the first program that starts on it, and
keeps the division until it is idle. Waiting programs of a combine with 128 bytes of shared memory, one on every
multiprocessor, kept all other programs from starting, even of one warp. With 32 KB each, or with 12 multiprocessors
without one, they did not (H200, CUDA 13)."""


class Multiprocessor(NamedTuple):
    """Resources shared by the programs on a multiprocessor; defaults: compute capability 9.0 and 10.0."""

    registers: int = 2**16
    warps: int = 64
    shared_bytes: int = 228 * 1024
    programs: int = 32


_SM = Multiprocessor()


class Program(NamedTuple):
    """Resources of a program.

    Attributes:
        warps: number of warps.
        registers: registers per thread.
        shared_bytes: static and dynamic shared memory.
    """

    warps: int
    registers: int
    shared_bytes: int = UNCOMPILED_SHARED

    @classmethod
    def declared(cls, plan: Plan, warps: int, maxnreg: int | None = None) -> Program:
        """Upper bound for a kernel that is not compiled yet; warps, maxnreg: used if the plan does not choose."""
        warps = plan.num_warps or warps
        limit = plan.maxnreg or maxnreg or min(_SM.registers // (_WARP * warps), _MOST_REGISTERS)
        return cls(warps, limit, max(plan.shared_bytes, UNCOMPILED_SHARED))


def per_multiprocessor(program: Program, beside: Program | None = None, times: int = 0) -> int:
    """Number of these programs that fit on a multiprocessor next to `times` programs `beside`."""
    takes = _takes(program)
    taken = (0, 0, 0, 0) if beside is None else tuple(times * each for each in _takes(beside))
    return max(min((all_ - used) // each for all_, used, each in zip(_SM, taken, takes, strict=True)), 0)


def _takes(program: Program) -> tuple[int, int, int, int]:
    registers = -(-program.registers // _REGISTER_STEP) * _REGISTER_STEP
    return registers * _WARP * program.warps, program.warps, program.shared_bytes + _RESERVED_SHARED, 1


def share_of_one(program: Program) -> Fraction:
    """Fraction of a multiprocessor that a program takes."""
    return Fraction(1, max(per_multiprocessor(program), 1))


def in_budget(budget: int, program: Program, others: Iterable[Program] = (), num_others: int = 0) -> int:
    """Programs that fit on `budget` multiprocessors next to `num_others` programs of the largest of `others`.

    The kernels of `others` run one after the other, so only one of them is resident at a time.
    """
    largest = max((share_of_one(other) for other in others), default=Fraction(0))
    return max(math.floor((budget - num_others * largest) / share_of_one(program)), 0)


@lru_cache(maxsize=256)
def most_waiting(multiprocessors: int, waiting: Program, needed: Program, num_needed: int) -> int:
    """The most programs that may wait for a kernel of `num_needed` programs, so that these fit at the same time.

    The result holds for any placement of the waiting programs; the worst leaves least room. j waiting programs on a
    multiprocessor leave room for r(j) needed ones. w waiting programs on m multiprocessors leave room for at least
    m * h(w / m) needed ones, where h is the lower convex hull of r.
    """
    room = [per_multiprocessor(needed, waiting, times) for times in range(per_multiprocessor(waiting) + 1)]
    hull = _lower_hull(room)
    if multiprocessors * room[0] < num_needed:
        return 0
    for (left, high), (right, low) in itertools.pairwise(hull):
        if multiprocessors * low < num_needed:
            # On this edge h falls from `high` to `low`.
            spare = Fraction(multiprocessors * high - num_needed, high - low)
            return math.floor(multiprocessors * left + spare * (right - left))
    return multiprocessors * hull[-1][0]


def _lower_hull(room: list[int]) -> list[tuple[int, int]]:
    """Corners (j, r(j)) of the lower convex hull of decreasing numbers r(j)."""
    hull: list[tuple[int, int]] = []
    for point in enumerate(room):
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _is_above(first: tuple[int, int], middle: tuple[int, int], last: tuple[int, int]) -> bool:
    """True if `middle` is on or above the line through `first` and `last`."""
    rise = (last[1] - first[1]) * (middle[0] - first[0])
    return (middle[1] - first[1]) * (last[0] - first[0]) >= rise
