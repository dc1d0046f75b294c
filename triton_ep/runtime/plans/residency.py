"""Which programs a GPU holds at the same time, by registers, warps and shared memory.

A program that waits keeps its place on a multiprocessor. If such programs filled the GPU, what they wait for would
never start. So grids of kernels that wait are computed here, for any way in which the hardware may place them. A budget
of multiprocessors is computed here as well: programs have no affinity to a multiprocessor, so a budget of n means
programs whose resources add up to those of n. Needs neither torch nor Triton.
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
"""Of a thread."""
_REGISTER_STEP = 8
"""Registers of a thread are handed out in multiples of it."""
_RESERVED_SHARED = 1024
"""Bytes of shared memory that CUDA takes of each program."""
UNCOMPILED_SHARED = 2**14
"""Bytes of shared memory that programs of the exchange have at most (tests/gate)."""


class Multiprocessor(NamedTuple):
    """What the programs on a multiprocessor share; defaults: compute capability 9.0 and 10.0."""

    registers: int = 2**16
    warps: int = 64
    shared_bytes: int = 228 * 1024
    programs: int = 32


_SM = Multiprocessor()


class Program(NamedTuple):
    """What a program takes.

    Attributes:
        warps: its number.
        registers: of a thread.
        shared_bytes: static and dynamic.
    """

    warps: int
    registers: int
    shared_bytes: int = UNCOMPILED_SHARED

    @classmethod
    def declared(cls, plan: Plan, warps: int, maxnreg: int | None = None) -> Program:
        """The most that a kernel can take which is not compiled yet; warps, maxnreg: where the plan does not choose."""
        warps = plan.num_warps or warps
        limit = plan.maxnreg or maxnreg or min(_SM.registers // (_WARP * warps), _MOST_REGISTERS)
        return cls(warps, limit)


def per_multiprocessor(program: Program, beside: Program | None = None, times: int = 0) -> int:
    """How many of these programs a multiprocessor holds, beside `times` others."""
    takes = _takes(program)
    taken = (0, 0, 0, 0) if beside is None else tuple(times * each for each in _takes(beside))
    return max(min((all_ - used) // each for all_, used, each in zip(_SM, taken, takes, strict=True)), 0)


def _takes(program: Program) -> tuple[int, int, int, int]:
    registers = -(-program.registers // _REGISTER_STEP) * _REGISTER_STEP
    return registers * _WARP * program.warps, program.warps, program.shared_bytes + _RESERVED_SHARED, 1


def share_of_one(program: Program) -> Fraction:
    """Of a multiprocessor, that a program takes."""
    return Fraction(1, max(per_multiprocessor(program), 1))


def in_budget(budget: int, program: Program, others: Iterable[Program] = (), num_others: int = 0) -> int:
    """Programs that fit on `budget` multiprocessors, beside `num_others` programs, of whichever of `others` is largest.

    Kernels among `others` run one after the other, so one of them is there at a time.
    """
    largest = max((share_of_one(other) for other in others), default=Fraction(0))
    return max(math.floor((budget - num_others * largest) / share_of_one(program)), 0)


@lru_cache(maxsize=256)
def most_waiting(multiprocessors: int, waiting: Program, needed: Program, num_needed: int) -> int:
    """The most programs that may wait for a kernel of `num_needed` programs, so that these fit at the same time.

    However the waiting ones are placed: worst is what leaves least room. With j of them on a multiprocessor there is
    room for r(j) others. With w of them on m multiprocessors there is room for m * h(w / m) others at least, where h is
    the lower convex hull of r.
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
    """Corners (j, r) of the lower convex hull of falling numbers r(j)."""
    hull: list[tuple[int, int]] = []
    for point in enumerate(room):
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _is_above(first: tuple[int, int], middle: tuple[int, int], last: tuple[int, int]) -> bool:
    """Whether `middle` is not below the line between the others."""
    rise = (last[1] - first[1]) * (middle[0] - first[0])
    return (middle[1] - first[1]) * (last[0] - first[0]) >= rise
