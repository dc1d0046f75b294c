"""Start and end of a job: which ranks meet, which arguments are refused, and which failure reaches the caller."""

import hashlib
import json
import multiprocessing
import os
import resource
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.patience import LIMIT_S
from tests.programs import Program, run_program
from triton_ep import EPAll2AllLayer, distributed
from triton_ep.distributed import (
    current_heap,
    default_heap_bytes,
    finalize_distributed,
    initialize_distributed,
    is_initialized,
    launched_by,
    local_world_size,
    run_ranks,
)
from triton_ep.errors import ConfigError, EPError, FinalizedError, HeapError, PeerFailed
from triton_ep.heap.gpu import check_sharing
from triton_ep.runtime.launch import INTERPRETING

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = ("OMPI_", "PMI", "SLURM_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "TORCHELASTIC_", "NVSHMEM_")
NOWHERE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}  # the discard service, where nothing listens
pytestmark = pytest.mark.skipif(not INTERPRETING, reason="starts CPU ranks")


@pytest.fixture(scope="module", autouse=True)
def _server_of_ranks() -> None:
    """Start the server of `run_ranks` with this module, and so pytest, which else every rank would import."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "triton_ep.layer", __name__])
    forkserver.ensure_running()


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)


def _sum_of_ranks() -> int:
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    return int(total)


# --- ranks of run_ranks: state is one per process, so each case runs in processes of its own ----------------


def _start_twice_and_again(folder: str) -> None:
    seen = []
    for local in (None, 1, 2):
        time.sleep(0.2 * launched_rank())  # the first rank must not find remains of the previous job
        rank, world_size = initialize_distributed(local_world_size=local, timeout_s=LIMIT_S, heap_bytes=1 << 20)
        with pytest.raises(ConfigError, match=r"called twice. Call finalize_distributed\(\)"):
            initialize_distributed()
        assert is_initialized()
        assert initialize_distributed(exist_ok=True) == (rank, world_size)
        assert initialize_distributed(local_world_size=local, heap_bytes=1 << 20, exist_ok=True) == (rank, world_size)
        with pytest.raises(ConfigError, match=r"with heap_bytes 1048576; now it is 2097152"):
            initialize_distributed(heap_bytes=2 << 20, exist_ok=True)
        heap = current_heap()
        assert (heap.backend, heap.world_size, heap.available()) == ("host", 2, 1 << 20)
        words = heap.alloc([1], torch.int64)
        words.local.fill_(rank)
        seen.append([rank, world_size, local_world_size(), _sum_of_ranks(), launched_by()])
        finalize_distributed()
        finalize_distributed()
        assert not is_initialized()
        with pytest.raises(EPError, match=r"no symmetric heap yet. Call triton_ep.initialize_distributed\(\)"):
            current_heap()
        with pytest.raises(FinalizedError):
            heap.free(words)
        assert not dist.is_initialized()
    initialize_distributed(timeout_s=LIMIT_S, heap_bytes=1000)  # less than a page
    finalize_distributed()
    Path(folder, f"{rank}").write_text(json.dumps(seen))


def test_a_job_ends_and_starts_again_in_the_same_processes(tmp_path: Path) -> None:
    """Three jobs over one store; ranks per node follow the host or the argument; ending twice equals ending once."""
    run_ranks(_start_twice_and_again, 2, str(tmp_path))
    for rank in range(2):
        expected = [[rank, 2, local, 1, "run_ranks"] for local in (2, 1, 2)]
        assert json.loads((tmp_path / f"{rank}").read_text()) == expected


def _join_existing_group(folder: str, port: int) -> None:
    rank = int(launched_rank())
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=dist.PrefixStore("mine", store), rank=rank, world_size=2)
    with pytest.raises(ConfigError, match="a process group exists already"):
        initialize_distributed(store=store, rank=rank, world_size=2)
    assert initialize_distributed() == (rank, 2)
    assert current_heap().pes().tolist() == [0, 1]
    finalize_distributed()
    assert _sum_of_ranks() == 1
    _use_a_layer_at_once(rank)
    dist.destroy_process_group()
    Path(folder, f"{rank}").touch()


def _use_a_layer_at_once(rank: int) -> None:
    """After a plain init_process_group, the layer takes sizes from the group and starts the heap for the world."""
    sizes = {"max_tokens": 4, "hidden": 32, "topk": 1, "num_tot_experts": 4}
    alone = [dist.new_group([member]) for member in range(2)][rank]
    with pytest.raises(ConfigError, match=r"a group of 1 of the 2 ranks.*initialize_distributed\(\) on every rank"):
        EPAll2AllLayer(alone, **sizes)
    with pytest.raises(ConfigError, match="num_tot_experts is missing"):
        EPAll2AllLayer(None, 4, 32, 1)
    assert not is_initialized()
    x = torch.full((3, 32), rank + 1.0, dtype=torch.bfloat16)
    with EPAll2AllLayer(dist.group.WORLD, **sizes) as layer:
        assert is_initialized() and initialize_distributed(exist_ok=True) == (rank, 2)
        assert (layer.config.rank, layer.config.world_size, layer.config.local_world_size) == (rank, 2, 2)
        rows, _, desc = layer.dispatch(x, torch.tensor([[0], [2], [3]], dtype=torch.int32))
        assert rows[:, 0].tolist() == [[1, 2], [1, 2, 1, 2]][rank]
        assert torch.equal(layer.combine(rows, desc), x)
    with EPAll2AllLayer(alone, **sizes) as layer:
        assert (layer.config.rank, layer.config.world_size, layer.config.local_world_size) == (0, 1, 1)
    with EPAll2AllLayer(None, **sizes, local_world_size=1) as layer:
        assert (layer.config.num_nodes, layer.config.rank) == (2, rank)
    finalize_distributed()


@pytest.mark.parametrize(
    ("gpus", "most", "local_ranks", "taken"),
    [(8, 1, (0, 5, 7), [0, 5, 7]), (1, 1, (0, 3), [0, 0]), (2, 4, (0, 1, 2, 7), [0, 1, 0, 1]), (1, 4, (0, 3), [0, 0])],
)
def test_ranks_take_the_gpus_in_turn(monkeypatch, gpus, most, local_ranks, taken) -> None:
    """A GPU per rank, or the only GPU that a launcher shows, or several ranks per GPU up to the limit."""
    monkeypatch.setenv("TRITON_EP_RANKS_PER_GPU", str(most))
    found: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    for local_rank in local_ranks:
        distributed._choose_gpu("nvshmem", local_rank)
    assert found == taken
    assert distributed._collectives("nvshmem") == ("cpu:gloo,cuda:nccl" if most == 1 else "gloo")
    if gpus * most > 1:
        with pytest.raises(ConfigError, match=f"rank {gpus * most} of its host, which shows {gpus} GPUs"):
            distributed._choose_gpu("nvshmem", gpus * most)


def test_ranks_that_share_a_gpu_are_named() -> None:
    """Ranks on the same GPU of the same host are named, if there are more than the limit."""
    places = [("a", "0"), ("a", "1"), ("b", "0"), ("a", "0")]
    check_sharing(places, 2)
    with pytest.raises(HeapError, match="ranks 0, 3 use the same GPU 0 of a, at most 1 may"):
        check_sharing(places, 1)


def launched_rank() -> int:
    """Rank of this process, from run_ranks."""
    from triton_ep import distributed

    assert distributed._spawned is not None
    return distributed._spawned[0]


def test_an_existing_process_group_is_used_and_outlives_us(tmp_path: Path) -> None:
    """The caller's group carries the job, and works after finalize_distributed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_ranks(_join_existing_group, 2, str(tmp_path), store.port)
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


def _refuse() -> None:
    with pytest.raises(ConfigError, match="local_world_size=2 does not divide the 3 ranks"):
        initialize_distributed(local_world_size=2)
    wrong: list[dict[str, Any]] = [
        *({"local_world_size": value} for value in (0, -1, "1", 1.0, True)),
        *(
            {"heap_bytes": value}
            for value in (0, "8G", 1.5, 2**63, True, torch.ones(1, dtype=torch.int, device="meta"))
        ),
        *({"timeout_s": value} for value in ("60", None, float("nan"), 1e30, 0, -1, True)),
        *({"store": dist.HashStore(), "world_size": 1, "rank": value} for value in ("0", 0.0, -1)),
        {"store": "x", "rank": 0, "world_size": 1},
    ]
    for arguments in wrong:
        named = "store" if arguments.get("store") == "x" else list(arguments)[-1]
        with pytest.raises(ConfigError, match=f"{named} (must be|is) .*"):
            initialize_distributed(**arguments)
    with pytest.raises(ConfigError, match=r"heap 'nvshmem' does not fit.*TRITON_INTERPRET"):
        initialize_distributed("nvshmem")
    with pytest.raises(ConfigError, match=r"heap 'torch' does not fit.*TRITON_INTERPRET"):
        initialize_distributed(heap="torch")
    with pytest.raises(ConfigError, match=r"backend='host' and heap='torch' are two names"):
        initialize_distributed("host", heap="torch")
    with pytest.raises(ConfigError, match=r"heap='mpi' is none of"):
        initialize_distributed(heap="mpi")
    with pytest.raises(ConfigError, match=r"backend='mpi' is none of"):
        initialize_distributed("mpi")
    with pytest.raises(ConfigError, match="give all three or none"):
        initialize_distributed(rank=0, world_size=1)
    with pytest.raises(ConfigError, match="rank 5 of 3"):
        initialize_distributed(store=dist.HashStore(), rank=5, world_size=3)
    assert not dist.is_initialized()
    assert initialize_distributed(timeout_s=LIMIT_S)[1] == 3  # failed attempts leave nothing behind
    finalize_distributed()


def test_what_cannot_work_is_refused_before_anybody_waits() -> None:
    """Each invalid call raises ConfigError with the reason; the same processes then start a job."""
    run_ranks(_refuse, 3)


def _use_after_the_end(folder: str) -> None:
    rank, world_size = initialize_distributed(timeout_s=60)
    layers = [
        EPAll2AllLayer(None, 4, 16, 1, rank, world_size, world_size, world_size, num_sm=1, capacity=capacity, **options)
        for capacity, options in ((None, {}), (8, {}), (8, {"low_latency": True}))
    ]
    x, idx = torch.ones(4, 16, dtype=torch.bfloat16), torch.full((4, 1), rank, dtype=torch.int32)
    made = [layer.dispatch(x, idx) for layer in layers]
    heap = current_heap()
    finalize_distributed()
    for layer, (recv_x, _, desc) in zip(layers, made, strict=True):
        uses = [
            lambda: layer.dispatch(x, idx),  # noqa: B023
            lambda: layer.dispatch(x, idx, return_recv_hook=True),  # noqa: B023
            lambda: layer.dispatch_again(x, desc),  # noqa: B023
            lambda: layer.dispatch_scaled(x.view(torch.uint8), torch.ones(4, 1), idx),  # noqa: B023
            lambda: layer.combine(recv_x, desc),  # noqa: B023
            lambda: layer.combine_buffer(1),  # noqa: B023
            layer.check,
            layer.ep_barrier_all,
            lambda: layer.context.local("splits"),  # noqa: B023
            lambda: layer.context.reallocate_dispatch_output_buf(100),  # noqa: B023
        ]
        if layer is layers[0]:  # static layers have no compact rows
            uses.append(lambda: layer.dispatch_compact(x, idx, torch.ones(4, 1)))  # noqa: B023
        for use in uses:
            with pytest.raises(FinalizedError, match=r"finalize_distributed\(\) was called, which ended this layer"):
                use()
        layer.finalize()  # nothing is left to free
        with pytest.raises(FinalizedError, match="This layer was finalized"):
            layer.check()
    for use in (heap.pes, heap.barrier, lambda: heap.require(1), lambda: heap.retire([], "x", [0], wait=True)):
        with pytest.raises(FinalizedError, match="symmetric heap was closed"):
            use()
    # Destroying the process group first is named as the error, and the job still ends.
    initialize_distributed(timeout_s=60)
    with EPAll2AllLayer(None, 4, 16, 1, rank, world_size, world_size, world_size, num_sm=1) as layer:
        layer.combine(*layer.dispatch(x, idx)[::2])
        dist.destroy_process_group()
        with pytest.raises(ConfigError, match="process group that was destroyed"):
            layer.context.reallocate_dispatch_output_buf(100)
    with pytest.raises(ConfigError, match=r"Call finalize_distributed\(\) before destroy_process_group\(\)"):
        finalize_distributed()
    finalize_distributed()
    initialize_distributed(timeout_s=60)
    assert _sum_of_ranks() == sum(range(world_size))
    finalize_distributed()
    Path(folder, f"{world_size}-{rank}").touch()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_nothing_is_used_after_the_end_of_the_job(num_ranks: int, tmp_path: Path) -> None:
    """Every call of every kind of layer, and of the heap, raises FinalizedError; the group must outlive the heap."""
    run_ranks(_use_after_the_end, num_ranks, str(tmp_path))
    assert len(list(tmp_path.iterdir())) == num_ranks


def _make_no_file() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if launched_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    with pytest.raises(HeapError, match=r"rank 1 cannot make 16777216 bytes .* File too large.*ulimit -f"):
        initialize_distributed(timeout_s=60, heap_bytes=1 << 24)
    assert not dist.is_initialized()
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    initialize_distributed(timeout_s=60, heap_bytes=1 << 24)
    finalize_distributed()


def test_a_rank_that_may_make_no_memory_is_named() -> None:
    """All ranks raise the error, and can then start again."""
    run_ranks(_make_no_file, 2)


def test_a_rank_that_goes_while_the_job_joins_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """PeerFailed wraps any error that torch reports while ranks join."""

    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "all_gather_object", fail)
    with pytest.raises(PeerFailed, match="rank 0 of 1 joined, but not all others did within 20 s: Connection closed"):
        initialize_distributed(store=dist.HashStore(), rank=0, world_size=1, timeout_s=20)
    assert not dist.is_initialized()


def _raise_on_rank_1() -> None:
    initialize_distributed()
    if launched_rank() == 1:
        raise ZeroDivisionError("token 7 of rank one")
    dist.all_reduce(torch.ones(1))  # the peers wait here, and see rank 1 fail


def _kill_rank_1() -> None:
    initialize_distributed()
    if launched_rank() == 1:
        os.kill(os.getpid(), 9)
    current_heap().barrier()


def _sleep_unless_rank_0() -> None:
    if launched_rank() == 0:
        raise KeyError("early")
    time.sleep(100_000)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_raise_on_rank_1, r"(?s)rank 1 of 3 failed:\nTraceback.*in _raise_on_rank_1.*token 7 of rank one"),
        (_kill_rank_1, r"rank 1 of 3 failed:\nits process was ended by SIGKILL"),
        (_sleep_unless_rank_0, r"(?s)rank 0 of 3 failed:\nTraceback.*KeyError: 'early'"),
    ],
)
def test_the_failure_of_a_rank_reaches_the_caller(function: Callable[[], None], message: str) -> None:
    """The caller sees the cause, not its echo in a peer, with traceback or signal; the other ranks end at once."""
    with pytest.raises(EPError, match=message):
        run_ranks(function, 3)


def test_output_of_ranks_is_complete(tmp_path: Path) -> None:
    """Text that ranks print at the very end appears without a flush."""
    script = tmp_path / "program.py"
    script.write_text(
        "import sys\n"
        "from triton_ep import distributed\n"
        "def say():\n"
        "    sys.stdout.write(f'said by {distributed._spawned[0]}\\n')\n"
        "if __name__ == '__main__':\n"
        "    distributed.run_ranks(say, 3)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment["PYTHONPATH"] = str(ROOT)
    done = run_program([script], environment, imported=True)
    assert sorted(done.stdout.splitlines()) == ["said by 0", "said by 1", "said by 2"]


def test_no_rank_is_refused() -> None:
    """run_ranks refuses fewer than one rank."""
    with pytest.raises(ConfigError, match="num_ranks is 0"):
        run_ranks(_refuse, 0)


def test_default_heap_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size comes from this package's variable, from NVSHMEM's, or is 8 GiB of address space."""
    monkeypatch.delenv("TRITON_EP_HEAP_SIZE", raising=False)
    assert default_heap_bytes() == default_heap_bytes("host") == 8 << 30
    monkeypatch.setenv("NVSHMEM_SYMMETRIC_SIZE", "3G")
    assert default_heap_bytes() == 3 << 30
    monkeypatch.setenv("TRITON_EP_HEAP_SIZE", "1G")
    assert default_heap_bytes() == 1 << 30
    with pytest.raises(ConfigError, match="does not fit"):
        default_heap_bytes("nvshmem")


# --- ranks of a launcher: fresh processes with its variables ------------------------------------------------

PROGRAM = """
import json, os, sys, tempfile
tempfile.tempdir = None  # imports may have asked for it before TMPDIR was set
import torch, torch.distributed as dist
from triton_ep import distributed
from triton_ep.errors import EPError
try:
    for _ in range(2):
        place = distributed.initialize_distributed(timeout_s=float(sys.argv[1]))
        pids = [None] * place[1]
        dist.all_gather_object(pids, os.getpid())
        distributed.finalize_distributed()
    print(json.dumps([*place, sorted(pids), distributed.launched_by()]))
except EPError as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""


def _process(variables: dict[str, str], temporary: Path, timeout_s: float = LIMIT_S) -> Program:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    environment = {**clean, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", **variables}
    return Program(["-c", PROGRAM, str(timeout_s)], environment, imported=True)


def _open_mpi(job: str, rank: int, world_size: int, local_size: int | None = None) -> dict[str, str]:
    return {
        "PMIX_NAMESPACE": job,
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(world_size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size or world_size),
    }


def _answers(*processes: Program) -> list[Any]:
    done = [process.wait() for process in processes]
    assert [each.returncode for each in done] == [0] * len(done), done
    return [json.loads(each.stdout.splitlines()[-1]) for each in done]


def _note(temporary: Path, job: str) -> Path:
    name = hashlib.sha256(job.encode()).hexdigest()[:16]
    return temporary / f"triton_ep-{os.getuid()}-{name}"


def test_jobs_on_one_host_meet_separately(tmp_path: Path) -> None:
    """Two mpirun jobs and a bare program run at the same time; notes of killed jobs do not mislead them."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    _note(tmp_path, "job-a").write_text(f"{dead.pid} 12345 1")
    _note(tmp_path, "job-b").write_text(f"{os.getpid()} 1 1")  # the pid of a running process, but not of that job's
    ranks = [(job, rank) for rank in (1, 0) for job in ("job-a", "job-b")]
    processes = [_process(_open_mpi(job, rank, 2), tmp_path) for job, rank in ranks]
    alone = _process({}, tmp_path)
    answers = _answers(*processes, alone)
    assert answers[-1] == [0, 1, [alone.pid], "none"]
    for (job, rank), answer in zip(ranks, answers[:-1], strict=True):
        pids = sorted(p.pid for p, (other, _) in zip(processes, ranks, strict=True) if other == job)
        assert answer == [rank, 2, pids, "mpirun"]
    assert list(tmp_path.iterdir()) == []


def test_ranks_meet_where_the_variables_say(tmp_path: Path) -> None:
    """With MASTER_ADDR and MASTER_PORT rank 0 listens, twice in a row, and no files are written."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    by_hand = [{"RANK": str(rank), "WORLD_SIZE": "2", **where} for rank in range(2)]
    processes = [_process(variables, tmp_path) for variables in by_hand]
    pids = sorted(process.pid for process in processes)
    assert _answers(*processes) == [[rank, 2, pids, "torchrun"] for rank in range(2)]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variables", "error", "message"),
    [
        (_open_mpi("a", 0, 3), PeerFailed, r"^rank 0 waited 1 s for the other ranks: 1 of 3 have come\."),
        (_open_mpi("b", 1, 2), PeerFailed, r"^rank 1 of 2 waited 1 s for rank 0 to start\."),
        (_open_mpi("c", 0, 4, local_size=2), ConfigError, "4 ranks, 2 of them on this host.* MASTER_ADDR"),
        ({**_open_mpi("d", 1, 2), **NOWHERE}, PeerFailed, "cannot reach rank 0 at 127.0.0.1:9 within 1 s"),
        (_open_mpi("e", 2, 2), ConfigError, "mpirun says this is rank 2 of 2"),
    ],
    ids=["others missing", "rank 0 missing", "several hosts", "nobody listens", "rank too large"],
)
def test_a_job_that_is_not_complete_is_told_in_time(
    variables: dict[str, str], error: type[EPError], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An incomplete job fails within timeout_s, with the numbers of ranks; nothing is left behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error, match=message):
        initialize_distributed(timeout_s=1)
    assert not dist.is_initialized()
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_does_not_come_to_a_store() -> None:
    """An explicit store fails in the same way."""
    with pytest.raises(PeerFailed, match="rank 0 of 2 joined, but not all others did within 1 s"):
        initialize_distributed(store=dist.HashStore(), rank=0, world_size=2, timeout_s=1)
    assert not dist.is_initialized()
