"""How rows arrive: where steps of a push end (kernels/device/tables.py), and how kernels watch arrival flags, in pairs
and in groups (kernels/device/arrivals.py)."""

from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl

from triton_ep.kernels.device import codes
from triton_ep.runtime.launch import INTERPRETING

# isort: split
from triton_ep.kernels.device.arrivals import (
    ALL_ROWS,
    Arrivals,
    Flags,
    Sources,
    described_rows,
    is_described,
    wait_arrivals,
)
from triton_ep.kernels.device.job import Job
from triton_ep.kernels.device.tables import most_steps, part_of_step

DEVICE = "cpu" if INTERPRETING else "cuda"
RANKS, SENDERS = 2, 128
COUNTS = (7, 9)
"""Rows that each rank sends."""
GROUPED = 2 if INTERPRETING else 64
"""Flags of a group."""
WATCHED = (0, GROUPED)


@triton.jit
def _watch(
    out_ptr,
    counts_ptr,
    flags_ptr,
    words_ptr,
    state_ptr,
    num_senders,
    steps,
    SENDERS: tl.constexpr,
    WATCHED: tl.constexpr,
):
    """Out: whether the next step came, steps, rows that arrived of each rank, items with stage_meta if it came now."""
    job = Job(state_ptr, state_ptr, 0, 2, 2, 1, 100)
    source = tl.arange(0, 2)
    sources = Sources(0, source * 50, tl.load(counts_ptr + source))
    arrivals = Arrivals(num_senders, 0, 2, SENDERS, WATCHED, 2, False)
    done = tl.zeros([2], tl.int32)
    first = is_described(0, steps)
    flags = Flags(flags_ptr, words_ptr)
    arrived, ready, seen = wait_arrivals(job, flags, sources, tl.cast(steps, tl.int64), done, arrivals, 1)
    tl.store(out_ptr, arrived.to(tl.int32))
    tl.store(out_ptr + 1, seen.to(tl.int32))
    tl.store(out_ptr + 2 + source, ready)
    described = described_rows(job, sources, 0, done, ready, 0, 1, 2)
    tl.store(out_ptr + 4, tl.where(first, described.end - described.first, 0))


def _flag(steps: int, rows: int) -> int:
    """Flag of the second dispatch after so many steps."""
    return (codes.STEPS + steps) << 32 | rows


def _run(
    flags: torch.Tensor, watched: int, num_senders: int = 6, steps: int = 0, words: torch.Tensor | None = None
) -> tuple[list[int], list[int]]:
    """Output of `_watch`, and the status record. words: of the groups, changed in place."""
    state = torch.zeros(codes.STATE_WORDS + RANKS, dtype=torch.int64, device=DEVICE)
    alarm = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    state[codes.EPOCH_DISPATCH], state[codes.TIMEOUT_US], state[codes.ALARM] = 2, 50_000, alarm.data_ptr()
    out = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    counts = torch.tensor(COUNTS, dtype=torch.int32, device=DEVICE)
    if words is None:
        words = _no_words()
    given = words.to(DEVICE)
    _watch[(1,)](
        out, counts, flags.to(DEVICE), given, state, num_senders, steps, SENDERS=SENDERS, WATCHED=watched, num_warps=1
    )
    words.copy_(given)
    record = state[codes.STATUS :][: codes.STATUS_WORDS].tolist()
    assert (alarm.item() != 0) == (record[0] != 0)
    return out.tolist(), record


def _no_words() -> torch.Tensor:
    """Words [W, groups] after the first dispatch."""
    return torch.full((RANKS, SENDERS // GROUPED), _flag(0, ALL_ROWS.value), dtype=torch.int64)


def _all_at(steps: int, rows: int) -> torch.Tensor:
    """Flags [W, SENDERS] of six programs of each rank; further ones are from an earlier call."""
    flags = torch.full((RANKS, SENDERS), _flag(0, 0) - (3 << 32), dtype=torch.int64)
    flags[:, :6] = _flag(steps, rows)
    return flags


@pytest.mark.parametrize("watched", WATCHED)
@pytest.mark.parametrize("slow", [(0, 0), (0, 3), (1, 4), (1, 5)])
def test_a_source_is_as_far_as_its_slowest_program(slow: tuple[int, int], watched: int) -> None:
    """Whether its flag is the first or the second of a pair; flags that are not in use do not count."""
    flags = _all_at(2, 6)
    flags[slow] = _flag(1, 3)
    (arrived, steps, *ready, described), record = _run(flags, watched)
    assert (arrived, steps, record[0]) == (1, 1, 0)
    assert ready == [3 if rank == slow[0] else 6 for rank in range(RANKS)]
    # With the first step stage_meta of all rows is there: as many items for each rank as the longest one has rows.
    assert described == RANKS * max(COUNTS)


@pytest.mark.parametrize("watched", WATCHED)
@pytest.mark.parametrize("late", [(0, 0), (1, 1), (1, 5)])
def test_a_late_program_is_reported_with_its_group(late: tuple[int, int], watched: int) -> None:
    """A wait that expires names the first flag of the pair or group that is late, and its lowest value."""
    flags = _all_at(1, 3)
    flags[late] = _flag(0, ALL_ROWS.value)
    (arrived, *_), record = _run(flags, watched)
    assert arrived == 0
    size = watched or 2
    first = late[0] * SENDERS + late[1] // size * size
    assert record == [codes.WAIT_ARRIVALS, first, (codes.STEPS + 1) << 32, _flag(0, ALL_ROWS.value)]


@pytest.mark.parametrize("watched", WATCHED)
def test_the_last_step_brings_all_rows(watched: int) -> None:
    """Then nothing is left to be described."""
    flags = _all_at(codes.STEPS, ALL_ROWS.value)
    (arrived, steps, *ready, described), _ = _run(flags, watched, steps=7)
    assert (arrived, steps, ready, described) == (1, codes.STEPS, list(COUNTS), 0)


def test_programs_tell_each_other_what_they_have_seen() -> None:
    """Each program raises the word of a group whose flags are further, lowers none, and believes those of others."""
    flags, words = _all_at(3, 5), _no_words()
    used = -(-6 // GROUPED)
    flags[1, :6] = _flag(0, 0)  # as if this program had not looked since
    words[1, :used] = _flag(1, 2)
    (arrived, steps, *ready, _), record = _run(flags, GROUPED, words=words)
    assert (arrived, steps, ready, record[0]) == (1, 1, [5, 2], 0)
    assert words[0, :used].tolist() == [_flag(3, 5)] * used
    assert words[1, :used].tolist() == [_flag(1, 2)] * used
    assert (words[:, used:] == _no_words()[:, used:]).all()


@triton.jit
def _ends(out_ptr, num_steps, sent):
    for step in range(num_steps + 1):
        tl.store(out_ptr + step, part_of_step(step, num_steps, sent))
    tl.store(out_ptr + num_steps + 1, most_steps(sent))


@pytest.mark.parametrize("num_steps", range(1, codes.STEPS + 1))
@pytest.mark.parametrize("sent", [codes.SENT_EVENLY, codes.SENT_TO_EXPERTS, codes.SENT_COMPACT])
def test_steps_divide_all_rows(sent: int, num_steps: int) -> None:
    """Each step has some parts, and the last of several fewer than most."""
    out = torch.full((codes.STEPS + 2,), -1, dtype=torch.int32, device=DEVICE)
    _ends[(1,)](out, num_steps, sent, num_warps=1)
    *ends, most = out[: num_steps + 2].tolist()
    assert most == (codes.STEPS_OF_COMPACT if sent == codes.SENT_COMPACT else codes.STEPS)
    assert (ends[0], ends[-1]) == (0, codes.PARTS)
    parts = [end - begin for begin, end in pairwise(ends)]
    assert min(parts) > 0 and (num_steps == 1 or parts[-1] < codes.PARTS / num_steps)
    if sent == codes.SENT_COMPACT and num_steps == most:
        assert parts == [24, 18, 12, 7, 3]
