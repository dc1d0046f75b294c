"""Guarantees of a pool of ranks: results by rank, errors with their origin, no hangs, no leftover processes."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import _backend
from tests.patience import LIMIT_S, stopwatch
from tests.programs import Program, environment_of_programs, run_program
from triton_ep.distributed import most_gpu_ranks
from triton_ep.errors import ConfigError, InputError, PeerFailed
from triton_ep.testing import RankError, RankHang, RankPool
from triton_ep.testing import pool as pool_module


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Two host ranks, whatever backend the suite runs on: these guarantees concern processes."""
    with RankPool(2) as pool:
        yield pool


# --- what runs in the ranks ---------------------------------------------------------------------------------


def _sum_of_ranks(rank: int, nodes: int, ranks_per_node: int) -> tuple[int, ...]:
    total = torch.tensor([rank])
    torch.distributed.all_reduce(total)
    return rank, nodes, ranks_per_node, int(total)


def _pid(rank: int) -> int:
    return os.getpid()


def _settings(rank: int) -> tuple[Any, ...]:
    names = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "TRITON_INTERPRET")
    return torch.get_num_threads(), *(os.environ[name] for name in names)


def _fill(rank: int, x: torch.Tensor, *, value: float) -> torch.Tensor:
    return torch.full_like(x, value + rank)


def _reject_on_rank_1(rank: int) -> str:
    if rank == 1:
        raise InputError("token 3 goes to expert 99")
    return "fine"


class _Unpicklable(Exception):
    def __init__(self, code: int, *, lock: object) -> None:
        super().__init__(f"code {code}")
        self.lock = lock


def _raise_unpicklable(rank: int) -> None:
    raise _Unpicklable(7, lock=sys._getframe())


def _fail_while_peer_is_in_a_collective(rank: int) -> None:
    if rank == 1:
        raise KeyError("rank one")
    torch.distributed.all_reduce(torch.ones(1))


def _echo_first(rank: int) -> None:
    if rank == 0:
        raise PeerFailed("rank 1 has failed")
    time.sleep(0.3)
    raise ZeroDivisionError("the cause")


def _sleep_for_ever(rank: int) -> None:
    if rank == 1:
        time.sleep(100_000)


def _tell_and_sleep(rank: int, path: str) -> None:
    if rank == 1:
        Path(path).touch()
    _sleep_for_ever(rank)


def _stop_itself(rank: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)


def _read_address_8(rank: int) -> None:
    if rank == 1:
        ctypes.string_at(8)


def _end(rank: int, how: str) -> None:
    if rank == 0 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0 and how == "exit":
        os._exit(3)


def _fail_by_pytest(rank: int) -> None:
    with pytest.raises(ValueError, match="never"):
        rank += 1


def _record_chaos(rank: int) -> None:
    import triton_ep.runtime.interpreter as interpreter

    interpreter.seen_seeds = []
    interpreter.original_set_chaos, interpreter.set_chaos = (
        interpreter.set_chaos,
        interpreter.seen_seeds.append,
    )


def _chaos_seen(rank: int) -> list[int | None]:
    import triton_ep.runtime.interpreter as interpreter

    interpreter.set_chaos = interpreter.original_set_chaos
    return interpreter.seen_seeds


# --- results ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 1), (2, 2)])
def test_every_rank_runs_and_answers(run_ranks: Callable[..., list[Any]], nodes: int, ranks_per_node: int) -> None:
    """`run_ranks` returns results by rank, and its ranks form one job."""
    world_size = nodes * ranks_per_node
    total = world_size * (world_size - 1) // 2
    expected = [(rank, nodes, ranks_per_node, total) for rank in range(world_size)]
    assert run_ranks(_sum_of_ranks, nodes, ranks_per_node) == expected


def test_large_arguments_and_results_pass(pool: RankPool) -> None:
    """Tensors larger than any pipe's buffer pass both ways, and so do keyword arguments."""
    results = pool.run(_fill, torch.zeros(1 << 20), value=1.0)
    assert [result.unique().tolist() for result in results] == [[1.0], [2.0]]


def test_ranks_do_not_fight_for_cores(pool: RankPool) -> None:
    """Ranks have one thread each, use only loopback, and interpret kernels."""
    assert pool.run(_settings) == [(1, "1", "lo", "1")] * 2


def test_running_pool_is_reused(pool: RankPool) -> None:
    """Processes stay from case to case."""
    first = pool.run(_pid)
    assert all(pool.run(_pid) == first for _ in range(3))


def test_restart_makes_new_ranks(pool: RankPool) -> None:
    """A restarted pool has new ranks, forked from a process that has imported everything."""
    before = pool.run(_pid)
    pool.kill()
    pool.start()
    assert not set(before) & set(pool.run(_pid))


# --- failures -----------------------------------------------------------------------------------------------


def test_exception_keeps_its_type_and_tells_its_origin(pool: RankPool) -> None:
    """The caller catches the rank's exception, with notes that name the rank and the line."""
    with pytest.raises(InputError, match="expert 99") as caught:
        pool.run(_reject_on_rank_1)
    notes = "\n".join(caught.value.__notes__)
    assert "rank 1 of 2" in notes
    assert "in _reject_on_rank_1" in notes
    assert len(pool.run(_pid)) == 2


def test_exceptions_can_be_returned(pool: RankPool) -> None:
    """With return_exceptions each rank's own outcome is returned."""
    fine, error = pool.run(_reject_on_rank_1, return_exceptions=True)
    assert fine == "fine"
    assert isinstance(error, InputError)
    assert "in _reject_on_rank_1" in error.__notes__[0]


def test_exception_that_does_not_pickle_is_described(pool: RankPool) -> None:
    """Its type and text survive in a RankError."""
    with pytest.raises(RankError, match="_Unpicklable: code 7"):
        pool.run(_raise_unpicklable)


def test_cause_is_raised_rather_than_its_echo(pool: RankPool) -> None:
    """A peer may report the failure of a rank before that rank reports it itself."""
    with pytest.raises(ZeroDivisionError, match="the cause"):
        pool.run(_echo_first)


def test_failure_frees_peers_in_a_collective(pool: RankPool) -> None:
    """A peer stuck in a collective is ended after the grace time, and the pool works again."""
    with pytest.raises(KeyError, match="rank one"):
        pool.run(_fail_while_peer_is_in_a_collective, timeout_s=LIMIT_S, grace_s=0.5)
    assert len(pool.run(_pid)) == 2


def test_outcome_of_pytest_in_a_rank_is_described(pool: RankPool) -> None:
    """`pytest.raises` works inside ranks; its outcomes are neither Exceptions nor picklable."""
    with pytest.raises(RankError, match="Failed: DID NOT RAISE"):
        pool.run(_fail_by_pytest)


def _limit(pool: RankPool) -> float:
    """Seconds within which a rank that does nothing surely answers."""
    with stopwatch() as took:
        pool.run(_pid)
        return max(0.5, 20 * took())


def test_hang_shows_the_stack_of_every_rank(pool: RankPool) -> None:
    """The message names late ranks and shows their stacks; all ranks are ended."""
    before = pool.run(_pid)
    with pytest.raises(RankHang, match=r"ranks \[1\] of 2 did not finish within .* s") as caught:
        pool.run(_sleep_for_ever, timeout_s=_limit(pool))
    assert "in _sleep_for_ever" in str(caught.value)
    assert "rank 0, pid" in str(caught.value)
    assert not any(_runs(pid) for pid in before)
    assert len(pool.run(_pid)) == 2


def test_stopped_rank_is_a_hang_too(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process, which cannot write its stack, is named and ended."""
    monkeypatch.setattr(pool_module, "STACKS_S", 0.3)  # nothing will come
    with pytest.raises(RankHang, match="no Python stack"):
        pool.run(_stop_itself, timeout_s=_limit(pool))


def test_segmentation_fault_is_named_with_its_stack(pool: RankPool) -> None:
    """A wild read, as of a kernel, is reported with signal, rank and Python frame."""
    with pytest.raises(RankError, match=r"rank 1 \(pid \d+\) was ended by SIGSEGV") as caught:
        pool.run(_read_address_8)
    assert "in _read_address_8" in str(caught.value)
    assert len(pool.run(_pid)) == 2


@pytest.mark.parametrize(("how", "message"), [("kill", "ended by SIGKILL"), ("exit", "ended with exit code 3")])
def test_vanished_rank_is_named(pool: RankPool, how: str, message: str) -> None:
    """Ranks that end without an answer are named."""
    with pytest.raises(RankError, match=f"rank 0 .* {message}"):
        pool.run(_end, how)


def test_rank_that_died_between_cases_is_reported(pool: RankPool) -> None:
    """The next case reports the death, and the one after it runs."""
    os.kill(pool.run(_pid)[1], signal.SIGKILL)
    with pytest.raises(RankError, match=r"rank 1 .* SIGKILL"):
        pool.run(_pid)
    assert len(pool.run(_pid)) == 2


def test_interrupt_in_the_caller_ends_the_case(pool: RankPool, tmp_path: Path) -> None:
    """Ctrl-C, or a test timeout, leaves no rank in the middle of a case."""
    before = pool.run(_pid)

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGUSR2, interrupt)
    asleep = tmp_path / "asleep"
    killer = subprocess.Popen(["sh", "-c", f"until test -e {asleep}; do sleep 0.1; done; kill -USR2 {os.getpid()}"])
    try:
        with pytest.raises(KeyboardInterrupt):
            pool.run(_tell_and_sleep, str(asleep))
    finally:
        killer.wait()
        signal.signal(signal.SIGUSR2, previous)
    assert not any(_runs(pid) for pid in before)


# --- options of the suite -----------------------------------------------------------------------------------


def _pytest(*arguments: str) -> str:
    done = run_program(["-m", "pytest", "-p", "no:cacheprovider", "-q", "-rs", *arguments], imported=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_ranks_on_cpus_are_no_default_beside_gpus() -> None:
    """Where there are GPUs, tests with ranks fail until it is said where the ranks run."""
    assert (_backend(None, 0), _backend("host", 2), _backend("torch", 2)) == ("host", "host", "torch")
    with pytest.raises(pytest.fail.Exception, match="2 ranks on GPUs: pass --backend nvshmem"):
        _backend(None, 2)


def test_chaos_seeds_repeat_the_tests_with_ranks_only() -> None:
    """Tests with `run_ranks` run plain and under each seed, sorted by world size; others run once."""
    lines = _pytest("--collect-only", "--chaos-seeds", "1,2", "tests/unit/test_rank_pool.py").splitlines()
    repeated = [line.partition("answers")[2] for line in lines if "every_rank_runs_and_answers" in line]
    modes = ("plain", "chaos1", "chaos2")
    assert sorted(repeated) == sorted(f"[{mode}-{topology}]" for topology in ("1-1", "2-2") for mode in modes)
    assert sum("test_large_arguments" in line for line in lines) == 1
    assert lines.index(next(line for line in lines if "2-2" in line)) > lines.index(
        next(line for line in lines if "test_large_arguments" in line)
    )


@pytest.mark.skipif(most_gpu_ranks() >= 4, reason="there are enough GPUs for the case")
def test_gpu_ranks_that_the_machine_lacks_are_skipped_by_number() -> None:
    """With `--backend nvshmem` the reason says how many GPUs a case needs and how many exist."""
    out = _pytest("--backend", "nvshmem", "tests/unit/test_rank_pool.py", "-k", "every_rank and 2-2")
    assert f"needs 4 or more GPUs, there are {most_gpu_ranks()}" in out


# --- wrong use ----------------------------------------------------------------------------------------------


def test_function_that_ranks_cannot_import_is_refused(pool: RankPool) -> None:
    """Local functions, lambdas and functions of a script are refused before anything is sent."""
    with pytest.raises(InputError, match="top level of a module"):
        pool.run(lambda rank: rank)
    done = run_program(["-c", "from triton_ep.testing import RankPool as P\ndef f(r): ...\nP(1).run(f)"], imported=True)
    assert "is defined in a script" in done.stderr


def test_impossible_pools_are_refused() -> None:
    """Unknown backend, no rank, and more GPU ranks than GPUs are refused."""
    with pytest.raises(ConfigError, match="backend is 'mpi'"):
        RankPool(2, "mpi")
    with pytest.raises(ConfigError, match="at least 1"):
        RankPool(0)
    with pytest.raises(ConfigError, match="needs as many GPUs"):
        RankPool(most_gpu_ranks() + 1, "nvshmem")


def test_chaos_seed_holds_for_one_case(pool: RankPool) -> None:
    """Each rank gets a seed of its own, and none after the case."""
    pool.run(_record_chaos)
    pool.run(_pid, chaos_seed=5)
    pool.run(_pid)
    assert pool.run(_chaos_seen) == [[10, None], [11, None]]


def test_ranks_that_are_not_forked_keep_the_same_promises() -> None:
    """A fresh process, as GPU ranks are, keeps the guarantees with the host backend."""
    with RankPool(1) as pool:
        pool._fresh = True
        before = pool.run(_pid)
        assert pool.run(_settings) == [(1, "1", "lo", "1")]
        with pytest.raises(RankError, match=r"rank 0 .* ended by SIGKILL"):
            pool.run(_end, "kill")
    assert not any(_runs(pid) for pid in before)


# --- nothing is left behind ---------------------------------------------------------------------------------


def _runs(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _descendants(pid: int) -> list[int]:
    children = [int(c) for f in Path(f"/proc/{pid}/task").glob("*/children") for c in f.read_text().split()]
    return children + [grandchild for child in children for grandchild in _descendants(child)]


# Without pytest, for which a fork server would import more.
_CASES = """
import os, time

def pid(rank):
    return os.getpid()

def sleep(rank):
    time.sleep(100_000)
"""
_OWNER = """
import sys
from cases_of_owner import pid, sleep
from triton_ep.testing import RankPool

pool = RankPool(2)
print(*pool.run(pid), flush=True)
if sys.argv[1] == "killed":
    pool.run(sleep)
"""


@pytest.mark.parametrize("how", ["killed", "returns"])
def test_ranks_end_with_their_owner(how: str, tmp_path: Path) -> None:
    """No rank survives a kill -9 of the pool's owner while ranks are busy, nor the owner's normal end."""
    (tmp_path / "cases_of_owner.py").write_text(_CASES)
    environment = environment_of_programs()
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    owner = Program(["-c", _OWNER, how], environment, imported=True)
    ranks = [int(pid) for pid in owner.lines(1)[0].split()]
    assert len(ranks) == 2
    family = _descendants(owner.pid) if how == "killed" else ranks
    assert set(ranks) <= set(family)
    if how == "killed":
        assert len(family) == 3  # the fork server
        assert all(_runs(pid) for pid in family)
        os.kill(owner.pid, signal.SIGKILL)
    assert owner.wait().returncode == (-signal.SIGKILL if how == "killed" else 0)
    deadline = time.monotonic() + LIMIT_S
    while any(_runs(pid) for pid in family) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in family if _runs(pid)] == []
