"""Waiting kernels: they end at their timeout, yield the core, and can be ended by a hook."""

import json
import time
from collections.abc import Iterator

import pytest
import torch
import triton

from tests.patience import LIMIT_S
from tests.programs import environment_of_programs, run_program
from triton_ep.errors import PeerFailed
from triton_ep.runtime import interpreter

if not triton.knobs.runtime.interpret:
    pytest.skip("kernels are compiled in this process", allow_module_level=True)

from triton_ep.kernels.device import spin

from . import interpreter_kernels as kernels

MS = 1_000_000


@pytest.fixture(autouse=True)
def _no_hook_left() -> Iterator[None]:
    interpreter.install()
    yield
    interpreter.set_wait_hook(None)


def _wait(flag: torch.Tensor, timeout_ns: int) -> list[int]:
    """Value seen, polls, and nanoseconds of a wait for flag >= 1."""
    out = torch.zeros(3, dtype=torch.int64)
    kernels.wait_kernel[(1,)](flag, out, 1, timeout_ns)
    return out.tolist()


def test_a_wait_ends_on_its_bound() -> None:
    """Without a flag the kernel returns after the time that its caller allowed, not before."""
    flag = torch.zeros(1, dtype=torch.int64)
    seen, polls, waited_ns = _wait(flag, 100 * MS)
    assert seen == 0
    assert polls > 8
    assert waited_ns >= 100 * MS


def test_a_wait_that_has_its_flag_does_not_pause() -> None:
    """A flag that is already set costs no poll."""
    assert _wait(torch.ones(1, dtype=torch.int64), 100 * MS)[:2] == [1, 0]


def test_a_wait_ends_when_the_flag_comes() -> None:
    """A flag set from outside the kernel is seen long before the timeout."""
    flag = torch.zeros(1, dtype=torch.int64)

    def arrive() -> None:
        flag.fill_(5)

    interpreter.set_wait_hook(arrive)
    limit_ns = int(LIMIT_S) * 1000 * MS
    seen, polls, waited_ns = _wait(flag, limit_ns)
    assert seen == 5
    assert polls >= 1
    assert waited_ns < limit_ns / 2


def test_a_waiting_kernel_gives_its_core_away() -> None:
    """Half a second of waiting takes much less CPU time."""
    start, cpu_start = time.monotonic(), time.process_time()
    _wait(torch.zeros(1, dtype=torch.int64), 500 * MS)
    assert time.process_time() - cpu_start < 0.6 * (time.monotonic() - start)


def test_pauses_grow_to_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are yields first, then sleeps of 50 us that double up to 1 ms."""
    sleeps: list[float] = []
    monkeypatch.setattr(spin.time, "sleep", sleeps.append)
    for polls in range(200):
        spin.pause(polls)
    assert 0 < 200 - len(sleeps) <= 16
    assert sleeps[0] == 50e-6
    assert sleeps == sorted(sleeps)
    assert sleeps[-1] == 1e-3


def test_the_hook_is_called_about_every_20_ms() -> None:
    """The hook runs often enough to notice a dead peer, and seldom enough to cost little."""
    calls: list[float] = []
    interpreter.set_wait_hook(lambda: calls.append(time.monotonic()))
    start = time.monotonic()
    _wait(torch.zeros(1, dtype=torch.int64), 400 * MS)
    # From the start, not from call to call: on a busy machine a call may come late, and the next one in time.
    assert all(call - start >= 0.0199 * number for number, call in enumerate(calls))
    assert 2 <= len(calls) <= 21
    interpreter.set_wait_hook(None)
    before = len(calls)
    _wait(torch.zeros(1, dtype=torch.int64), 50 * MS)
    assert len(calls) == before


def test_what_the_hook_raises_reaches_the_caller() -> None:
    """The wait ends at once, and the exception itself is in the chain of causes."""
    failure = PeerFailed("rank 3 died")

    def fail() -> None:
        raise failure

    interpreter.set_wait_hook(fail)
    with pytest.raises(triton.runtime.errors.InterpreterError) as caught:
        _wait(torch.zeros(1, dtype=torch.int64), int(LIMIT_S) * 1000 * MS)
    causes: list[BaseException | None] = [caught.value]
    while causes[-1] is not None:
        causes.append(causes[-1].__cause__)
    assert failure in causes
    # The failed launch does not disturb the next one.
    interpreter.set_wait_hook(None)
    assert _wait(torch.ones(1, dtype=torch.int64), 10 * MS)[0] == 1


def test_the_clock_is_int64_and_goes_forward() -> None:
    """Differences of now_ns() can be compared with any int64, even in the first seconds after boot."""
    first, second = spin.now_ns(), spin.now_ns()
    assert first.dtype == triton.language.int64
    assert int(second.handle.data.item()) > int(first.handle.data.item())
    assert spin.INTERPRET.value is True


def test_the_same_source_compiles() -> None:
    """On sm_90 and sm_100 the clock is the global timer, and later pauses are a nanosleep."""
    script = (
        "import json, triton\n"
        "from triton.backends.compiler import GPUTarget\n"
        "from triton.compiler import ASTSource\n"
        "from tests.unit.interpreter_kernels import wait_kernel\n"
        "types = {'flag_ptr': '*i64', 'out_ptr': '*i64', 'expected': 'i64', 'timeout_ns': 'i64'}\n"
        "for arch in (90, 100):\n"
        "    done = triton.compile(ASTSource(wait_kernel, types), target=GPUTarget('cuda', arch, 32))\n"
        "    assert len(done.asm['cubin']) > 0\n"
        "    print(json.dumps(done.asm['ptx']))\n"
    )
    done = run_program(["-c", script], environment_of_programs() | {"TRITON_INTERPRET": "0"})
    assert done.returncode == 0, done.stderr
    for ptx in map(json.loads, done.stdout.splitlines()):
        assert ptx.count("globaltimer") >= 2
        assert "ld.volatile.global" in ptx
        assert ptx.count("nanosleep") == 1  # inside the loop, after a comparison with the number of polls
    assert len(done.stdout.splitlines()) == 2
