"""How the ranks of a job meet: who this process is, and a torch store that all of them share."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from triton_ep.environment import Environment
from triton_ep.errors import ConfigError, PeerFailed


@dataclass(frozen=True)
class Place:
    """Where this process stands in its job, and how it meets the others."""

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
    given = (store is not None, rank is not None, world_size is not None)
    if any(given):
        if store is None or rank is None or world_size is None:
            raise ConfigError("store, rank and world_size belong together: give all three or none.")
        return Place(rank, world_size, None, lambda: store)
    if spawned is not None:
        rank, world_size, port = spawned
        return Place(rank, world_size, rank, lambda: _tcp_store("127.0.0.1", port, False, timeout_s))
    if environment.rank is None or environment.world_size is None:
        return Place(0, 1, 0, dist.HashStore)
    rank, world_size = environment.rank, environment.world_size
    if not 0 <= rank < world_size:
        raise ConfigError(f"{environment.launcher} says this is rank {rank} of {world_size}.")
    return Place(rank, world_size, environment.local_rank, lambda: _launcher_store(environment, timeout_s))


def _launcher_store(environment: Environment, timeout_s: float) -> dist.Store:
    """The store through which the ranks of a launcher meet."""
    rank, world_size = environment.rank, environment.world_size
    if environment.master_addr and environment.master_port:
        # torchrun's agent listens there already; elsewhere rank 0 does.
        serve = rank == 0 and environment.launcher != "torchrun"
        return _tcp_store(environment.master_addr, environment.master_port, serve, timeout_s)
    if environment.local_size not in (None, world_size):
        raise ConfigError(
            f"{environment.launcher} started {world_size} ranks, {environment.local_size} of them on this host. Ranks of "
            "several hosts must be told where to meet: set MASTER_ADDR (a host name of rank 0) and MASTER_PORT on all."
        )
    return _meet_on_this_host(environment, timeout_s)


def _meet_on_this_host(environment: Environment, timeout_s: float) -> dist.Store:
    """Rank 0 listens on a free port and leaves its number in a file that bears the job's name."""
    name = hashlib.sha256(str(environment.job).encode()).hexdigest()[:16]
    note = Path(tempfile.gettempdir(), f"triton_ep-{os.getuid()}-{name}")
    if environment.rank == 0:
        store = _tcp_store("127.0.0.1", 0, True, timeout_s)
        draft = note.with_suffix(".draft")
        draft.write_text(f"{os.getpid()} {store.port}")
        draft.replace(note)
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
        # A note of a process that is gone was left behind by a job that was killed.
        with contextlib.suppress(FileNotFoundError):
            pid, port = note.read_text().split()
            if Path("/proc", pid).exists():
                return int(port)
        time.sleep(0.02)
    raise PeerFailed(
        f"rank {environment.rank} of {environment.world_size} waited {timeout_s:g} s for rank 0 to start. "
        "Look at rank 0, or raise timeout_s."
    )


def _await_all(store: dist.TCPStore, environment: Environment, timeout_s: float) -> None:
    """Return once all ranks are connected; the note is then of no more use."""
    if store.add("triton_ep/joined", 1) == environment.world_size:
        store.set("triton_ep/all", b"1")
    with joining(environment.rank, environment.world_size, timeout_s):
        store.wait(["triton_ep/all"], timedelta(seconds=timeout_s))


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
    """Turn what torch raises when a rank does not come into an error of ours."""
    try:
        yield
    except RuntimeError as error:
        raise PeerFailed(
            f"rank {rank} of {world_size} joined, but not all others did within {timeout_s:g} s: {error}"
        ) from error
