"""A pool of rank processes that run test cases, public as `triton_ep.testing.RankPool`.

The caller sends all ranks the same function and arguments, and waits for one answer from each: a result, an
exception, or the end of the channel if the process died. After a failure the ranks are in an unknown state
(somewhere in a collective, symmetric memory half written), so they are killed and replaced.
"""

import pickle
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, Self

import torch

from triton_ep.distributed import most_gpu_ranks
from triton_ep.errors import ConfigError, InputError, PeerFailed
from triton_ep.testing.process import CASE_TIMEOUT_S, START_TIMEOUT_S, RankError, RankHang, RankProcess

# After the first failure the other ranks get this long to notice (PeerFailed) before they are killed.
GRACE_S = 3.0
STACKS_S = 3.0


class RankPool:
    """`world_size` processes that form one job and run cases one after the other.

    Ranks start at the first `run` and stay alive; after a case in which any rank failed they are killed, and the
    next `run` starts fresh ones. They end with `close`, or when the process that created the pool dies in any
    way. State that a case leaves in a rank (imported modules, symmetric memory it did not free) persists for
    the next case.

    Arguments:
        world_size: number of ranks, at least 1.
        backend: "host": CPU processes under Triton's interpreter, symmetric memory in shared memory; any
            machine. "nvshmem", "torch": one GPU per rank, compiled kernels, that symmetric heap.
        chaos_seed: default of `run`'s argument.

    Raises:
        ConfigError: unknown backend, too few GPUs, or chaos mode requested with compiled kernels.
    """

    def __init__(self, world_size: int, backend: str = "host", chaos_seed: int | None = None) -> None:
        if backend not in CASE_TIMEOUT_S:
            raise ConfigError(f'backend is {backend!r}; a RankPool has "host", "nvshmem" and "torch"')
        if world_size < 1:
            raise ConfigError(f"world_size is {world_size}; a RankPool has at least 1 rank")
        if backend != "host" and world_size > most_gpu_ranks():
            raise ConfigError(
                f"a RankPool of {world_size} {backend} ranks needs as many GPUs, this machine has "
                f'{torch.cuda.device_count()}. Use fewer ranks, backend="host", or TRITON_EP_RANKS_PER_GPU.'
            )
        self.world_size = world_size
        self.backend = backend
        self.chaos_seed = chaos_seed
        self._fresh = backend != "host"  # a process that has touched CUDA cannot be forked
        self._ranks: list[RankProcess] = []
        self._store: torch.distributed.TCPStore | None = None

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float | None = None,
        chaos_seed: int | None = None,
        return_exceptions: bool = False,
        grace_s: float = GRACE_S,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `function(rank, *args, **kwargs)` in every rank and return the results by rank.

        When a rank raises, the waits of its peers raise PeerFailed. This method then raises the first exception
        that is not such an echo, in its own type, with the rank and the remote traceback as notes.

        Arguments:
            function: defined at the top level of an importable module (not of a script).
            args, kwargs: picklable.
            timeout_s: limit for the whole case, in seconds; default 60 for host ranks, 240 on GPUs.
            chaos_seed: seed of the interpreter's chaos mode, from which each rank derives its own; host only.
            return_exceptions: return the exception of each rank that raised instead of raising one.
            grace_s: seconds that the other ranks may still run once one has failed.

        Raises:
            RankHang: not all ranks finished in time; the message has the stack of every rank.
            RankError: a rank crashed (the message names the signal and its last stack), or its exception
                cannot be pickled.
            InputError: function or arguments cannot be sent to the ranks.
        """
        if chaos_seed is None:
            chaos_seed = self.chaos_seed
        if chaos_seed is not None and self.backend != "host":
            raise ConfigError("chaos_seed changes how kernels are interpreted; compiled kernels have no chaos mode")
        case = _pickle_case(function, args, kwargs, chaos_seed)
        try:
            self.start()
            for rank in self._ranks:
                rank.send(case)
            answers = self._gather(timeout_s or CASE_TIMEOUT_S[self.backend], _name(function), grace_s)
        except BaseException:
            self.kill()
            raise
        if any(isinstance(answer, _Failure) for answer in answers):
            self.kill()
        if not return_exceptions:
            _raise_first(answers, _name(function))
        return [a.error if isinstance(a, _Failure) else a for a in answers]

    def start(self) -> None:
        """Start the ranks unless they run; `run` calls it itself.

        Raises:
            RankHang, RankError, or the error of a rank that failed to join the job.
        """
        if self._ranks:
            return
        self._store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        try:
            for rank in range(self.world_size):
                job = {
                    "backend": self.backend,
                    "rank": rank,
                    "world_size": self.world_size,
                    "port": self._store.port,
                }
                self._ranks.append(RankProcess(job, fresh=self._fresh))
            _raise_first(self._gather(START_TIMEOUT_S[self.backend], "the start of the ranks"), "start")
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Kill all ranks; the next `run` starts fresh ones."""
        ranks, self._ranks, self._store = self._ranks, [], None
        for rank in ranks:
            rank.signal(signal.SIGKILL)
        for rank in ranks:
            rank.release()

    def close(self) -> None:
        """Let the ranks leave the job in order, and kill those still running after 10 s. Idempotent."""
        try:
            deadline = time.monotonic() + 10
            for rank in self._ranks:
                rank.send(b"close")
            for rank in self._ranks:
                rank.ended(max(0.0, deadline - time.monotonic()))
        finally:
            self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _gather(self, timeout_s: float, what: str, grace_s: float = GRACE_S) -> list[Any]:
        """One answer per rank: its result, or a `_Failure`."""
        answers: dict[int, Any] = {}
        pending = {rank.channel: rank for rank in self._ranks}
        deadline = time.monotonic() + timeout_s
        failed = False
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready and not failed:
                raise RankHang(self._describe_hang(list(pending.values()), timeout_s, what))
            if not ready:
                stacks = _stacks(list(pending.values()))
                for rank in pending.values():
                    text = f"rank {rank.rank} still ran {grace_s:g} s after a peer had failed; its stack:\n"
                    answers[rank.rank] = _Failure(RankError(text + stacks[rank.rank]), len(answers), echo=True)
                break
            for channel in ready:
                rank = pending.pop(channel)  # type: ignore[call-overload]
                answers[rank.rank] = answer = _answer(rank, len(answers))
                if isinstance(answer, _Failure) and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + grace_s)
        return [answers[rank] for rank in range(self.world_size)]

    def _describe_hang(self, pending: list[RankProcess], timeout_s: float, what: str) -> str:
        waiting = [rank.rank for rank in pending]
        lines = [f"{what}: ranks {waiting} of {self.world_size} did not finish within {timeout_s:g} s (timeout_s)."]
        stacks = _stacks(pending)
        for rank in self._ranks:
            lines.append(f"--- rank {rank.rank}, pid {rank.pid}: {stacks.get(rank.rank, 'finished')}")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Failure:
    """How one rank failed."""

    error: BaseException
    index: int  # in order of arrival
    echo: bool  # a consequence of another rank's failure


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _pickle_case(function: Callable[..., Any], args: Any, kwargs: Any, chaos_seed: int | None) -> bytes:
    """Pickle a case for `process._run_case`; catches errors here that would occur in every rank."""
    if getattr(function, "__module__", None) == "__main__":
        raise InputError(
            f"{function!r} is defined in a script, which ranks cannot import. Define it in a module; a "
            "script that is to run itself as several ranks uses triton_ep.distributed.run_ranks."
        )
    try:
        payload = pickle.dumps((function, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(
            f"{function!r} and its arguments cannot be sent to the ranks: {error}. The function must be "
            "defined at the top level of a module, and its arguments must be picklable."
        ) from error
    return pickle.dumps((sys.path, payload, chaos_seed))


def _answer(rank: RankProcess, index: int) -> Any:
    """Receive one rank's answer: its result or a `_Failure`."""
    try:
        kind, value, text = rank.channel.recv()
    except (EOFError, ConnectionResetError):
        error: BaseException = RankError(f"rank {rank.rank} (pid {rank.pid}) {rank.how_it_ended()}")
        return _Failure(error, index, echo=False)
    if kind == "ok":
        return pickle.loads(value)
    error = pickle.loads(value)
    error.add_note(f"raised by rank {rank.rank}, pid {rank.pid}:\n{text}")
    return _Failure(error, index, echo=isinstance(error, PeerFailed))


def _stacks(ranks: list[RankProcess]) -> dict[int, str]:
    """Current Python stacks of running ranks, by rank."""
    before = {rank.rank: rank.stack() for rank in ranks}
    for rank in ranks:
        rank.signal(signal.SIGUSR1)
    # The handlers write tens of lines each, slowly on a busy machine; a stopped process writes nothing.
    deadline = time.monotonic() + STACKS_S
    written, now = before, before
    while time.monotonic() < deadline and (now != written or any(now[r] == before[r] for r in now)):
        time.sleep(0.1)
        written, now = now, {rank.rank: rank.stack() for rank in ranks}
    return {rank: "\n" + text for rank, text in now.items()}


def _raise_first(answers: list[Any], what: str) -> None:
    """Raise the first failure, an echo only if all are echoes, with notes on the other ranks' errors."""
    failures = [(rank, a) for rank, a in enumerate(answers) if isinstance(a, _Failure)]
    if not failures:
        return
    rank, first = min(failures, key=lambda item: (item[1].echo, item[1].index))
    first.error.add_note(f"in {what}, rank {rank} of {len(answers)}")
    for other, failure in failures:
        if other != rank:
            first.error.add_note(f"then rank {other}: {type(failure.error).__name__}: {failure.error}")
    raise first.error
