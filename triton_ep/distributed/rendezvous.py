"""Rendezvous of the ranks of a job: the rank of this process, and a torch store that all ranks share."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from triton_ep.errors import ConfigError, PeerFailed
from triton_ep.runtime.environment import Environment, as_integer


@dataclass(frozen=True)
class Place:
    """Rank of this process in its job, and the store that connects it to the other ranks."""

    rank: int
    world_size: int
    local_rank: int | None
    store: Callable[[], dist.Store]


def find_place(
    environment: Environment,
    spawned: tuple[int, int, int] | None,
    store: dist.Store | None,
    rank: int | None,
    world_size: int | None,
    timeout_s: float,
) -> Place:
    """Place of this process in its job: from the arguments, else from `run_ranks`, else from the launcher, else alone.

    Args:
        spawned: (rank, world_size, port of the store) in a process that `run_ranks` started.
        store, rank, world_size: arguments of `initialize_distributed`; all or none.

    Raises:
        ConfigError: some of the three are missing, a rank outside its world, or, from `Place.store`, several
            hosts without an address to meet at.
        PeerFailed: from `Place.store`, the other ranks do not come within `timeout_s`.
    """
    given = (store is not None, rank is not None, world_size is not None)
    if any(given):
        if store is None or rank is None or world_size is None:
            raise ConfigError("store, rank and world_size belong together: give all three or none.")
        if not isinstance(store, dist.Store):
            raise ConfigError(f"store must be a torch.distributed.Store, got {type(store).__name__}.")
        rank, world_size = as_integer("rank", rank, 0), as_integer("world_size", world_size)
        _check_rank("the caller", rank, world_size)
        return Place(rank, world_size, None, lambda: store)
    if spawned is not None:
        rank, world_size, port = spawned
        return Place(rank, world_size, rank, lambda: _tcp_store("127.0.0.1", port, False, timeout_s))
    if environment.rank is None or environment.world_size is None:
        return Place(0, 1, 0, dist.HashStore)
    rank, world_size = environment.rank, environment.world_size
    _check_rank(environment.launcher, rank, world_size)
    return Place(rank, world_size, environment.local_rank, lambda: _launcher_store_once(environment, timeout_s))


def _check_rank(who: str, rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ConfigError(f"{who} says this is rank {rank} of {world_size}; ranks are 0 to world_size - 1.")


# A process belongs to one job of one launcher. A second start reuses the same store: otherwise rank 0 might close the
# old server while a faster rank is still talking to it.
_met: dist.Store | None = None


def _launcher_store_once(environment: Environment, timeout_s: float) -> dist.Store:
    global _met
    if _met is None:
        _met = _launcher_store(environment, timeout_s)
    return _met


def _launcher_store(environment: Environment, timeout_s: float) -> dist.Store:
    """The store through which the ranks of a launcher meet."""
    rank, world_size = environment.rank, environment.world_size
    if environment.master_addr and environment.master_port:
        serve = rank == 0 and not environment.agent_listens
        return _tcp_store(environment.master_addr, environment.master_port, serve, timeout_s)
    if environment.local_size not in (None, world_size):
        raise ConfigError(
            f"{environment.launcher} started {world_size} ranks, {environment.local_size} of them on this host. Ranks "
            "of several hosts must be told where to meet: set MASTER_ADDR (a host name of rank 0) and MASTER_PORT on "
            "all of them."
        )
    return _meet_on_this_host(environment, timeout_s)


def _meet_on_this_host(environment: Environment, timeout_s: float) -> dist.Store:
    """Rank 0 listens on a free port and writes the port number to a file named after the job."""
    name = hashlib.sha256(str(environment.job).encode()).hexdigest()[:16]
    note = Path(tempfile.gettempdir(), f"triton_ep-{os.getuid()}-{name}")
    if environment.rank == 0:
        store = _tcp_store("127.0.0.1", 0, True, timeout_s)
        descriptor, draft = tempfile.mkstemp(prefix=note.name)
        with open(descriptor, "w") as file:
            file.write(f"{os.getpid()} {_start_ticks(os.getpid())} {store.port}")
        try:
            os.replace(draft, note)  # atomic: readers never see half a file
        except OSError as error:
            os.unlink(draft)
            raise ConfigError(
                f"the ranks of this host meet by the file {note}, which cannot be written: {error}. Remove what is "
                "there, or set TMPDIR to a folder of your own on all ranks."
            ) from error
        try:
            _await_all(store, environment, timeout_s)
        finally:
            note.unlink(missing_ok=True)
        return store
    port = _read_note(note, environment, timeout_s)
    store = _tcp_store("127.0.0.1", port, False, timeout_s)
    _await_all(store, environment, timeout_s)
    return store


def _read_note(note: Path, environment: Environment, timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        # Skip a foreign file or unexpected content: rank 0 replaces the file, or raises if it cannot.
        with contextlib.suppress(OSError, ValueError):
            facts = note.lstat()
            if facts.st_uid == os.getuid() and stat.S_ISREG(facts.st_mode):
                pid, ticks, port = map(int, note.read_text().split())
                # If that process is gone, the note is from a job that was killed.
                if ticks == _start_ticks(pid):
                    return port
        time.sleep(0.02)
    raise PeerFailed(
        f"rank {environment.rank} of {environment.world_size} waited {timeout_s:g} s for rank 0 to start. "
        "Look at rank 0, or raise timeout_s."
    )


def _start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; with the pid it identifies one process. None: it is gone."""
    try:
        return int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _await_all(store: dist.TCPStore, environment: Environment, timeout_s: float) -> None:
    """Return once all ranks are connected; the note is no longer needed then."""
    rank, world_size = environment.rank, environment.world_size
    with joining(rank, world_size, timeout_s):
        if store.add("triton_ep/joined", 1) == world_size:
            store.set("triton_ep/all", "1")
        try:
            store.wait(["triton_ep/all"], timedelta(seconds=timeout_s))
        except RuntimeError as error:
            joined = store.add("triton_ep/joined", 0)
            raise PeerFailed(
                f"rank {rank} waited {timeout_s:g} s for the other ranks: {joined} of {world_size} have come. "
                "Look at those that have not, or raise timeout_s."
            ) from error


def _tcp_store(address: str, port: int, serve: bool, timeout_s: float) -> dist.TCPStore:
    limit = timedelta(seconds=timeout_s)
    try:
        return dist.TCPStore(address, port, is_master=serve, timeout=limit, wait_for_workers=False)
    except RuntimeError as error:
        verb = "listen on" if serve else "reach rank 0 at"
        raise PeerFailed(
            f"cannot {verb} {address}:{port} within {timeout_s:g} s: {error}. Check MASTER_ADDR and MASTER_PORT, and "
            "that rank 0 runs."
        ) from error


@contextlib.contextmanager
def joining(rank: int | None, world_size: int | None, timeout_s: float) -> Iterator[None]:
    """Turn the error that torch raises when a rank does not come into PeerFailed."""
    try:
        yield
    except PeerFailed:
        raise
    except RuntimeError as error:
        raise PeerFailed(
            f"rank {rank} of {world_size} joined, but not all others did within {timeout_s:g} s: {error}"
        ) from error
