"""How kernels watch arrival flags, two at a time (kernels/device/arrivals.py)."""

import pytest
import torch
import triton
import triton.language as tl

from triton_ep.kernels.device import codes
from triton_ep.runtime.launch import INTERPRETING

# isort: split
from triton_ep.kernels.device.arrivals import ALL_ROWS, Arrivals, Sources, described_rows, is_described, wait_arrivals
from triton_ep.kernels.device.job import Job

DEVICE = "cpu" if INTERPRETING else "cuda"
RANKS, SENDERS = 2, 128
COUNTS = (7, 9)
"""Rows that each rank sends."""


@triton.jit
def _watch(out_ptr, counts_ptr, flags_ptr, state_ptr, num_senders, steps, SENDERS: tl.constexpr):
    """Out: whether the next step came, steps, rows that arrived of each rank, items with stage_meta if it came now."""
    job = Job(state_ptr, state_ptr, 0, 2, 2, 1, 100)
    source = tl.arange(0, 2)
    sources = Sources(0, source * 50, tl.load(counts_ptr + source))
    arrivals = Arrivals(num_senders, 0, 2, SENDERS, 2, False)
    done = tl.zeros([2], tl.int32)
    first = is_described(0, steps)
    arrived, ready, seen = wait_arrivals(job, flags_ptr, sources, tl.cast(steps, tl.int64), done, arrivals, 1)
    tl.store(out_ptr, arrived.to(tl.int32))
    tl.store(out_ptr + 1, seen.to(tl.int32))
    tl.store(out_ptr + 2 + source, ready)
    described = described_rows(job, sources, 0, done, ready, 0, 1, 2)
    tl.store(out_ptr + 4, tl.where(first, described.end - described.first, 0))


def _flag(steps: int, rows: int) -> int:
    """Flag of the second dispatch after so many steps."""
    return (codes.STEPS + steps) << 32 | rows


def _run(flags: torch.Tensor, num_senders: int = 6, steps: int = 0) -> tuple[list[int], list[int]]:
    """Output of `_watch`, and the status record."""
    state = torch.zeros(codes.STATE_WORDS + RANKS, dtype=torch.int64, device=DEVICE)
    alarm = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    state[codes.EPOCH_DISPATCH], state[codes.TIMEOUT_US], state[codes.ALARM] = 2, 50_000, alarm.data_ptr()
    out = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    counts = torch.tensor(COUNTS, dtype=torch.int32, device=DEVICE)
    _watch[(1,)](out, counts, flags.to(DEVICE), state, num_senders, steps, SENDERS=SENDERS, num_warps=1)
    record = state[codes.STATUS :][: codes.STATUS_WORDS].tolist()
    assert (alarm.item() != 0) == (record[0] != 0)
    return out.tolist(), record


def _all_at(steps: int, rows: int) -> torch.Tensor:
    """Flags [W, SENDERS] of six programs of each rank; further ones are from an earlier call."""
    flags = torch.full((RANKS, SENDERS), _flag(0, 0) - (3 << 32), dtype=torch.int64)
    flags[:, :6] = _flag(steps, rows)
    return flags


@pytest.mark.parametrize("slow", [(0, 0), (0, 3), (1, 4), (1, 5)])
def test_a_source_is_as_far_as_its_slowest_program(slow: tuple[int, int]) -> None:
    """Whether its flag is the first or the second of a pair; flags that are not in use do not count."""
    flags = _all_at(2, 6)
    flags[slow] = _flag(1, 3)
    (arrived, steps, *ready, described), record = _run(flags)
    assert (arrived, steps, record[0]) == (1, 1, 0)
    assert ready == [3 if rank == slow[0] else 6 for rank in range(RANKS)]
    # With the first step stage_meta of all rows is there: as many items for each rank as the longest one has rows.
    assert described == RANKS * max(COUNTS)


@pytest.mark.parametrize("late", [(0, 0), (1, 1), (1, 5)])
def test_a_late_program_is_reported_with_its_pair(late: tuple[int, int]) -> None:
    """A wait that expires names the first flag of the pair that is late, and its lower value."""
    flags = _all_at(1, 3)
    flags[late] = _flag(0, 0)
    (arrived, *_), record = _run(flags)
    assert arrived == 0
    pair = late[0] * SENDERS + late[1] // 2 * 2
    assert record == [codes.WAIT_ARRIVALS, pair, (codes.STEPS + 1) << 32, _flag(0, 0)]


def test_the_last_step_brings_all_rows() -> None:
    """Then nothing is left to be described."""
    (arrived, steps, *ready, described), _ = _run(_all_at(codes.STEPS, ALL_ROWS.value), steps=7)
    assert (arrived, steps, ready, described) == (1, codes.STEPS, list(COUNTS), 0)
