"""Device functions that only compute are evaluated once per launch for the same arguments, all others at every call."""

from typing import Any

import pytest
import torch
import triton

from triton_ep.runtime import interpreter

if not triton.knobs.runtime.interpret:
    pytest.skip("kernels are compiled in this process", allow_module_level=True)

interpreter.install()

import triton.language as tl  # noqa: E402

from triton_ep.kernels.device import job, spin, tables, waits  # noqa: E402
from triton_ep.runtime.interpreter import pure  # noqa: E402

_CONSTANT = tl.constexpr(3)


@triton.jit
def _plain(a, b):
    """Only computes."""
    c = a * _CONSTANT
    return tl.where(b > 0, c, a).to(tl.int64)


@triton.jit
def _of_plain(a, b, SHIFT: tl.constexpr):
    return _plain(a, b) + SHIFT


@triton.jit
def _reads(ptr, b):
    return tl.load(ptr) + b


@triton.jit
def _reads_inside(ptr, b):
    return _plain(_reads(ptr, b), b)


@triton.jit
def _branches(a, b):
    if b > 0:
        a += b
    return a


@triton.jit
def _of_the_program(a):
    return tl.program_id(0) + a


@triton.jit
def _with_option(ptr, mask):
    return tl.cast(mask, tl.int32, bitcast=False)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        *(
            (each, True)
            for each in (_plain, _of_plain, job.num_nodes, tables.sums_from_of, tables.tail_ptr, tables._bound)
        ),
        *((each, False) for each in (_reads, _reads_inside, _branches, _of_the_program, _with_option)),
        *((each, False) for each in (waits.wait_flags, spin.acquire_loads)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_which_functions_only_compute(function: Any, expected: bool) -> None:
    """Not those that read memory themselves or by others, that branch, or that depend on the program."""
    assert pure.is_pure(function.fn) == expected


@triton.jit
def _kernel(out_ptr, ptr, a, n):
    i = tl.program_id(0)
    for turn in range(n):
        first = _of_plain(a, i, 5)
        again = _of_plain(a, i, 5)
        tl.store(out_ptr + i * 4, first + again)
        tl.store(out_ptr + i * 4 + 1, _of_plain(a + turn, i, 5))
        tl.store(out_ptr + i * 4 + 2, _of_plain(a, i, 6))
        tl.store(ptr, _reads(ptr, 1))
        tl.store(out_ptr + i * 4 + 3, _reads(ptr, 0))


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Arguments with which the pure functions of this module are evaluated."""
    seen: list[tuple[Any, ...]] = []
    stock = _plain.rewrite()

    def noting(*args: Any) -> Any:
        seen.append(args)
        return stock(*args)

    monkeypatch.setattr(_plain, "rewrite", lambda: pure._once(noting))
    return seen


def test_the_same_arguments_give_the_kept_result(evaluated: list[tuple[Any, ...]]) -> None:
    """In a launch; values that other loads or turns of a loop give are computed, and nothing is kept for later."""
    for number in (10, 20):
        out, counter = torch.zeros(2, 4, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        evaluated.clear()
        _kernel[(2,)](out, counter, number, 3)
        for i, (twice, moved, shifted, read) in enumerate(out.tolist()):
            value = 3 * number if i else number
            assert twice == 2 * (value + 5)
            assert moved == (3 if i else 1) * (number + 2) + 5
            assert shifted == value + 6
            assert read == 3 * (i + 1)
        # Per program: once for the two alike, once per turn for the sums, and none for the other shift.
        assert len(evaluated) == 2 * (1 + 3)
        assert not pure._results


def test_few_results_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that makes new values in every turn does not fill the memory."""
    monkeypatch.setattr(pure, "_MOST", 8)
    double = pure._once(lambda value: value * 2)
    assert [double(1000 + each) for each in range(100)] == [2 * (1000 + each) for each in range(100)]
    assert len(pure._results) <= 8
    pure._results.clear()
