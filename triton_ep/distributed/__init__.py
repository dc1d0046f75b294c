"""Start a job: the rank of this process, its process group, and the symmetric heap.

initialize_distributed    called in every rank, started by torchrun, mpirun, srun or run_ranks, with a store, or
                          with an existing process group
run_ranks                 starts the ranks of a program that was started without a launcher
"""

from __future__ import annotations

import multiprocessing
import numbers
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

# Its functions bind the world group at the time of this import as a default argument. Imported later, for example by
# torch.compile, they would keep the group and its threads alive until the process exits, which then aborts.
import torch.distributed.nn

from triton_ep.distributed.rendezvous import Place, find_place, joining
from triton_ep.errors import ConfigError, EPError, PeerFailed
from triton_ep.heap.base import SymmetricHeap
from triton_ep.heap.registry import HEAPS, heap_of_gpus
from triton_ep.runtime.environment import MOST_BYTES, as_integer, read_environment
from triton_ep.runtime.launch import INTERPRETING

_TIMEOUTS_S = 1e-3, 1e6  # the resolution of torch's stores, and longer than any wait
_LEAVE_S = 10.0  # for a finished rank of run_ranks: time to flush its output and exit
_GRACE_S = 0.5  # after the first failure: time for reports of the other ranks, one of which may be the cause


@dataclass(frozen=True)
class _Job:
    """The job of this process, created by initialize_distributed; at most one at a time."""

    rank: int
    world_size: int
    local_world_size: int
    heap: SymmetricHeap
    heap_bytes: int
    owns_group: bool


_job: _Job | None = None
_spawned: tuple[int, int, int] | None = None  # (rank, world_size, port) in a process that run_ranks started


def initialize_distributed(
    backend: str = "auto",
    local_world_size: int | None = None,
    timeout_s: float = 60,
    *,
    heap: str = "auto",
    heap_bytes: int | None = None,
    store: dist.Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    exist_ok: bool = False,
) -> tuple[int, int]:
    """Join the job: choose the GPU, create the process group, start the symmetric heap. Collective.

    An existing process group is used, and outlives `finalize_distributed`. Otherwise rank and size come from the
    arguments, torchrun, mpirun, srun, or `run_ranks`; a process without any of these is a job of one rank.

    Args:
        backend: older name of `heap`: "nvshmem", "torch", "host" or "auto".
        local_world_size: ranks per node; None = ranks per host. A smaller number creates virtual nodes.
        timeout_s: bound on each step of joining, and on later host-side collectives, in seconds.
        heap: kind of symmetric heap: "nvshmem" (GPUs of any hosts), "torch" (GPUs of one host; needs no other package,
            and sub-groups can allocate without the other ranks), "host" (CPU ranks of one host). "auto": "host" if
            kernels are interpreted, else TRITON_EP_HEAP, else "nvshmem" if nvshmem4py is installed, else "torch".
        heap_bytes: symmetric memory per rank; None = `default_heap_bytes`.
        store, rank, world_size: a torch store that all ranks share, this process's rank, and the size of the job; all
            or none.
        exist_ok: if this process has joined a job before, return the same result and communicate nothing. Each of
            backend, heap, heap_bytes, local_world_size, rank and world_size must then fit that job, or be left out.

    Returns:
        (rank, world_size).

    Raises:
        ConfigError: arguments or environment that cannot work.
        HeapError: the heap could not be started.
        PeerFailed: not all ranks came within `timeout_s`.
    """
    global _job
    if _job is not None and not exist_ok:
        raise ConfigError(
            "initialize_distributed was called twice. Call finalize_distributed() in between to start anew, or pass "
            "exist_ok=True to keep what there is."
        )
    chosen = _choose_heap(backend, heap)
    environment = read_environment()
    timeout_s = _as_seconds(timeout_s)
    if local_world_size is not None:
        local_world_size = as_integer("local_world_size", local_world_size)
    if heap_bytes is not None and (heap_bytes := as_integer("heap_bytes", heap_bytes)) > MOST_BYTES:
        raise ConfigError(f"heap_bytes is {heap_bytes}; a symmetric heap has at most {MOST_BYTES} bytes (64T).")
    if _job is not None:
        return _as_joined(_job, (backend, heap), local_world_size, heap_bytes, (rank, world_size))
    heap_bytes = default_heap_bytes(chosen) if heap_bytes is None else heap_bytes
    owns_group = not dist.is_initialized()
    if owns_group:
        place = find_place(environment, _spawned, store, rank, world_size, timeout_s)
        if local_world_size is not None:
            _check_divides(local_world_size, place.world_size)
        _choose_gpu(chosen, place.local_rank)
        _make_group(chosen, place, timeout_s)
    elif (store, rank, world_size) != (None, None, None):
        raise ConfigError("a process group exists already, so store, rank and world_size must not be given.")
    try:
        with joining(dist.get_rank(), dist.get_world_size(), timeout_s):
            ranks_per_node = _ranks_per_node(local_world_size)
        made = HEAPS[chosen](heap_bytes)
    except BaseException:
        if owns_group:
            dist.destroy_process_group()
        raise
    _job = _Job(dist.get_rank(), dist.get_world_size(), ranks_per_node, made, heap_bytes, owns_group)
    return _job.rank, _job.world_size


def _as_joined(
    job: _Job,
    heaps: tuple[str, str],
    local_world_size: int | None,
    heap_bytes: int | None,
    place: tuple[int | None, int | None],
) -> tuple[int, int]:
    """(rank, world_size) of the job; ConfigError if a requested value (None, "auto": none) differs from the job's."""
    pairs = (
        *(("heap", None if asked == "auto" else asked, job.heap.backend) for asked in heaps),
        ("local_world_size", local_world_size, job.local_world_size),
        ("heap_bytes", heap_bytes, job.heap_bytes),
        ("rank", place[0], job.rank),
        ("world_size", place[1], job.world_size),
    )
    for name, asked, there in pairs:
        if asked is not None and asked != there:
            raise ConfigError(
                f"initialize_distributed was called before, with {name} {there}; now it is {asked}. Leave it out, or "
                "call finalize_distributed() in between to start anew."
            )
    return job.rank, job.world_size


def is_initialized() -> bool:
    """Whether this process has joined a job with `initialize_distributed` and has not left it."""
    return _job is not None


def join_group(group: Any = None) -> int:
    """Return the number of ranks of a layer's group, None = the world; start the symmetric heap if there is none yet.

    After a plain `torch.distributed.init_process_group` this call starts the heap, with the defaults of
    `initialize_distributed`. That is collective over the world, so only a group of all ranks may do so.

    Raises:
        ConfigError: no process group; this process is not in it; or it is smaller than the world, and there is no heap.
        HeapError, PeerFailed: as `initialize_distributed`.
    """
    size = check_group(dist.group.WORLD if group is None else group)
    if _job is None and size < dist.get_world_size():
        raise ConfigError(
            f"there is no symmetric heap yet, and a group of {size} of the {dist.get_world_size()} ranks cannot start "
            "it for all. Call triton_ep.initialize_distributed() on every rank before the first layer."
        )
    if _job is None:
        initialize_distributed()
    return size


def default_heap_bytes(backend: str = "auto") -> int:
    """Bytes of symmetric heap per rank that `initialize_distributed` allocates by default.

    TRITON_EP_HEAP_SIZE, else NVSHMEM_SYMMETRIC_SIZE, else the default of the backend.

    Raises:
        ConfigError: a variable holds no size, or the backend does not fit the mode of this process's kernels.
    """
    heap = HEAPS[_choose_heap(backend, "auto")]
    return read_environment().heap_bytes or heap.default_bytes


def most_gpu_ranks() -> int:
    """Most ranks on the GPUs of this host: one per GPU, or TRITON_EP_RANKS_PER_GPU."""
    return torch.cuda.device_count() * read_environment().ranks_per_gpu


def finalize_distributed() -> None:
    """Close the heap, and the process group if `initialize_distributed` created it. Collective, idempotent.

    Raises:
        PeerFailed: a rank did not come, or ended meanwhile.
        ConfigError: the process group was destroyed before.
        In both cases the job has ended on this rank.
    """
    global _job
    if _job is None:
        return
    job, _job = _job, None
    try:
        job.heap.close()
    finally:
        if job.owns_group and dist.is_initialized():
            dist.destroy_process_group()


def current_heap() -> SymmetricHeap:
    """The symmetric heap of this process.

    Raises:
        EPError: `initialize_distributed` has not been called.
    """
    return _current_job().heap


def local_world_size() -> int:
    """Ranks per node: the number given to `initialize_distributed`, or ranks per host.

    Raises:
        EPError: `initialize_distributed` has not been called.
    """
    return _current_job().local_world_size


def ranks_per_node(group: Any) -> int:
    """Ranks of a group, None = the world, on each node, by the nodes that `initialize_distributed` determined.

    Raises:
        ConfigError: nodes have different numbers of them, or the ranks of a node are not consecutive.
    """
    members = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    nodes = [rank // local_world_size() for rank in members]
    count = nodes.count(nodes[0])
    blocks = [nodes[start : start + count] for start in range(0, len(nodes), count)]
    if any(len(set(block)) != 1 or len(block) != count for block in blocks) or len(blocks) != len(set(nodes)):
        raise ConfigError(
            f"the ranks of the group are on nodes {nodes}: every node must have the same number of them, numbered in a "
            "row. Choose other groups, or pass the number of ranks per node."
        )
    return count


def check_group(group: Any) -> int:
    """Number of ranks of a process group that this process is a member of.

    Raises:
        ConfigError: `group` is no process group, or this process is not in it.
    """
    if not dist.is_initialized():
        raise ConfigError("there is no process group yet. Call triton_ep.initialize_distributed() first.")
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"group is {group!r}, which is no process group of this process. Pass the expert-parallel group, as "
            "torch.distributed.new_group returned it (of a DeviceMesh get_group()), on its members only."
        )
    return dist.get_world_size(group)


def gather(value: Any, group: Any, purpose: str) -> list[Any]:
    """The values of all ranks of a group, in rank order. Collective.

    purpose: named in errors; ranks that meet with different purposes raise instead of mixing values.

    Raises:
        ConfigError: this rank is not a member, or the group was destroyed.
        PeerFailed: a rank is gone, in another call, or did not come within the process group's own time limit.
        EPError: `initialize_distributed` has not been called.
    """
    return current_heap().gather(value, group, purpose)


def launched_by() -> str:
    """The launcher of this process: "torchrun", "mpirun", "srun", "run_ranks" or "none"."""
    return "run_ranks" if _spawned is not None else read_environment().launcher


def _current_job() -> _Job:
    if _job is None:
        raise EPError("there is no symmetric heap yet. Call triton_ep.initialize_distributed() first.")
    return _job


# --- joining --------------------------------------------------------------------------------------------------


def _choose_heap(backend: str, heap: str) -> str:
    """Name of the heap that these two arguments request."""
    for argument, asked in (("backend", backend), ("heap", heap)):
        if asked != "auto" and asked not in HEAPS:
            names = ", ".join(f'"{name}"' for name in ("auto", *HEAPS))
            raise ConfigError(f"{argument}={asked!r} is none of {names}.")
    names_given = {name for name in (backend, heap) if name != "auto"}
    if len(names_given) == 2:
        raise ConfigError(f"backend={backend!r} and heap={heap!r} are two names of one choice. Leave backend out.")
    chosen = names_given.pop() if names_given else "host" if INTERPRETING else read_environment().heap or heap_of_gpus()
    if (chosen == "host") != INTERPRETING:
        how = "interpreted, on CPU tensors" if INTERPRETING else "compiled, for GPU tensors"
        fitting = "'host'" if INTERPRETING else "'nvshmem' or 'torch'"
        raise ConfigError(
            f"heap {chosen!r} does not fit: kernels of this process are {how}, which takes {fitting}. "
            "TRITON_INTERPRET in the environment (1 or 0) decides which."
        )
    return chosen


def _choose_gpu(heap: str, local_rank: int | None) -> None:
    """Select the GPU with this rank's number on its host; keep the current GPU if no launcher gives a number."""
    if heap == "host" or local_rank is None:
        return
    count, places = torch.cuda.device_count(), most_gpu_ranks()
    # A launcher may show every rank a GPU of its own, as the only one.
    if local_rank >= places and places != 1:
        raise ConfigError(
            f"this is rank {local_rank} of its host, which shows {count} GPUs. Start at most one rank per GPU, or let "
            "TRITON_EP_RANKS_PER_GPU of them share one, in time slices."
        )
    torch.cuda.set_device(local_rank % count)


def _make_group(heap: str, place: Place, timeout_s: float) -> None:
    with joining(place.rank, place.world_size, timeout_s):
        store = place.store()
        # A store may outlive a job, and a second job must not read the entries of the first.
        start = store.add(f"triton_ep/starts/{place.rank}", 1)
        dist.init_process_group(
            _collectives(heap),
            store=dist.PrefixStore(f"triton_ep/{start}", store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=timeout_s),
        )


def _collectives(heap: str) -> str:
    """Backends of a process group for a heap of this kind. NCCL allows one rank per GPU; Gloo copies to the host."""
    shared = read_environment().ranks_per_gpu > 1
    return "cpu:gloo,cuda:nccl" if heap != "host" and not shared else "gloo"


def _ranks_per_node(given: int | None) -> int:
    """Ranks per node: the given number, or ranks per host. Collective.

    Raises:
        ConfigError: the number does not divide the world, a node would span hosts, or hosts have different numbers
            of ranks or interleaved ones.
    """
    world_size = dist.get_world_size()
    hosts: list[Any] = [None] * world_size
    dist.all_gather_object(hosts, socket.gethostname())
    per_host = hosts.count(hosts[0])
    if given is None:
        if any(hosts[rank] != hosts[rank - rank % per_host] for rank in range(world_size)) or world_size % per_host:
            raise ConfigError(
                f"hosts have different numbers of ranks, or ranks of one host are not numbered in a row: {hosts}. "
                "Start the same number on each host, or pass local_world_size."
            )
        return per_host
    _check_divides(given, world_size)
    for rank in range(world_size):
        if hosts[rank] != hosts[rank - rank % given]:
            raise ConfigError(
                f"with local_world_size={given} ranks {rank - rank % given} and {rank} are on one node, but they run "
                f"on {hosts[rank - rank % given]} and {hosts[rank]}. Pass at most the number of ranks per host."
            )
    return given


def _as_seconds(value: Any) -> float:
    shortest_s, longest_s = _TIMEOUTS_S
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not shortest_s <= float(value) <= longest_s:
        raise ConfigError(f"timeout_s must be a number of seconds, {shortest_s:g} to {longest_s:g}, got {value!r}.")
    return float(value)


def _check_divides(given: int, world_size: int) -> None:
    if world_size % given:
        raise ConfigError(f"local_world_size={given} does not divide the {world_size} ranks of the job.")


# --- starting ranks -------------------------------------------------------------------------------------------


def run_ranks(function: Callable[..., Any], num_ranks: int | None = None, *args: Any) -> None:
    """Run function(*args) in `num_ranks` processes of this host, in which `initialize_distributed` works.

    For programs that were started without a launcher. The child must be able to import the function: define it at the
    top level of a module, or of the script, which then needs `if __name__ == "__main__":`. With GPUs rank r gets GPU r.

    num_ranks: None = 4, or 2 or 1 on hosts with fewer GPUs.

    Raises:
        EPError: a rank raised or died; the message has its traceback. The other ranks are killed.
        ConfigError: more ranks than GPUs.
    """
    num_gpus = 0 if INTERPRETING else most_gpu_ranks()
    if num_ranks is None:
        num_ranks = 4 if INTERPRETING else max(n for n in (1, 2, 4) if n <= max(num_gpus, 1))
    if num_ranks < 1:
        raise ConfigError(f"num_ranks is {num_ranks}; at least 1 is needed.")
    if not INTERPRETING and num_ranks > num_gpus:
        raise ConfigError(f"{num_ranks} ranks need {num_ranks} GPUs, there are {num_gpus}.")
    # A process that has touched CUDA cannot be forked.
    context: Any = multiprocessing.get_context("forkserver" if INTERPRETING else "spawn")
    if INTERPRETING:
        context.set_forkserver_preload(["torch", "triton_ep.layer"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = []
    try:
        for rank in range(num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_rank,
                args=(theirs, os.getpid(), (rank, num_ranks, store.port), function, args),
                name=f"rank {rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            ranks.append((process, ours))
        _await_ranks(ranks)
        for rank, (process, _) in enumerate(ranks):
            process.join(_LEAVE_S)
            if process.exitcode != 0:
                raise EPError(f"rank {rank} of {num_ranks} was done, but then {_how_it_ended(process)}.")
    finally:
        for process, ours in ranks:
            process.kill()
            process.join()
            ours.close()


def _await_ranks(ranks: list[tuple[Any, Connection]]) -> None:
    """Return when every rank has succeeded.

    Raises:
        EPError: a rank failed. Of several failures it reports one: a rank that died before one that raised, and a rank
            that raised PeerFailed last.
    """
    left = {ours: rank for rank, (_, ours) in enumerate(ranks)}
    failures: list[tuple[int, int, str]] = []  # (0 = died, 1 = raised, 2 = raised PeerFailed; rank; what happened)
    while left and (ready := wait(list(left), _GRACE_S if failures else None)):
        for ours in ready:
            assert isinstance(ours, Connection)
            rank = left.pop(ours)
            try:
                kind, text = ours.recv()
            except (EOFError, ConnectionResetError):
                kind, text = 0, _how_it_ended(ranks[rank][0])
            if text:
                failures.append((kind, rank, text))
    if failures:
        _, rank, text = min(failures, key=lambda failure: failure[0])
        raise EPError(f"rank {rank} of {len(ranks)} failed:\n{text}")


def _how_it_ended(process: Any) -> str:
    process.join(_LEAVE_S)
    code = process.exitcode
    if code is None:
        return f"its process did not end within {_LEAVE_S:g} s"
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"its process {how}"


def _run_rank(
    channel: Connection,
    parent: int,
    place: tuple[int, int, int],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Main function of a rank: run `function`, report a traceback or an empty string."""
    global _spawned
    die_with(os.pidfd_open(parent))
    _spawned = place
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place[1]))
    try:
        function(*args)
    except BaseException as error:
        channel.send((2 if isinstance(error, PeerFailed) else 1, traceback.format_exc()))
        if _job is not None:
            _job.heap.abort(traceback.format_exc(limit=0).strip())
        sys.stdout.flush()
        os._exit(1)
    channel.send((1, ""))


def die_with(owner_fd: int) -> None:
    """Exit as soon as the process of `owner_fd` (a pidfd) has ended."""

    def watch() -> None:
        poll = select.poll()
        poll.register(owner_fd, select.POLLIN)
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, name="die-with-owner", daemon=True).start()
