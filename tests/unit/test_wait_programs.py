"""Programs that wait for lower ones of their grid (kernels/device/waits.py)."""

import pytest
import torch
import triton
import triton.language as tl

from triton_ep.kernels.device import codes
from triton_ep.runtime.launch import INTERPRETING  # before the kernels: decides how they run

# isort: split
from triton_ep.kernels.device.job import Job, state_at
from triton_ep.kernels.device.waits import WAIT_SPLITS, wait_programs

DEVICE = "cpu" if INTERPRETING else "cuda"
COUNTED = tl.constexpr(codes.PROGRAMS_COUNTED)


@triton.jit
def _wait(state_ptr, come_ptr, expected, rank):
    job = Job(state_ptr, state_ptr, rank, 4, 4, 1, 1)
    come = wait_programs(job, state_at(job, COUNTED), expected, WAIT_SPLITS)
    tl.store(come_ptr, come.to(tl.int32))


def _state(counted: int, status: int) -> torch.Tensor:
    state = torch.zeros(codes.STATE_WORDS + 4, dtype=torch.int64)
    state[codes.TIMEOUT_US], state[codes.PROGRAMS_COUNTED], state[codes.STATUS] = 20_000, counted, status
    return state


@pytest.mark.parametrize("status", [0, codes.WAIT_ARRIVALS])
def test_programs_that_have_come_are_not_waited_for(status: int) -> None:
    """After a failure, too, so that nobody reads what they have not written."""
    state, come = _state(3, status).to(DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    _wait[(1,)](state, come, 3, 2)
    assert come.item() == 1 and state[codes.STATUS].item() == status


@pytest.mark.parametrize("status", [0, codes.WAIT_ARRIVALS])
def test_the_wait_has_a_bound_and_its_record_names_this_rank(status: int) -> None:
    """The record of an earlier failure stays."""
    alarm = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    state, come = _state(2, status), torch.ones(1, dtype=torch.int32, device=DEVICE)
    state[codes.ALARM] = alarm.data_ptr()
    state = state.to(DEVICE)
    _wait[(1,)](state, come, 3, 2)
    record = state[codes.STATUS : codes.STATUS + codes.STATUS_WORDS].tolist()
    assert come.item() == 0
    assert record == ([codes.WAIT_SPLITS, 2, 3, 2] if not status else [status, 0, 0, 0])
    assert alarm.item() == (0 if status else codes.WAIT_SPLITS)
