"""Symmetric memory of CPU ranks: which bytes each address shows, and what remains after ranks end or die."""

import ctypes
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.patience import LIMIT_S
from tests.programs import Program, environment_of_programs
from triton_ep.distributed import current_heap, finalize_distributed
from triton_ep.errors import ConfigError, FinalizedError, HeapError, PeerFailed
from triton_ep.heap.base import SymmTensor
from triton_ep.heap.host import HostHeap
from triton_ep.runtime.environment import MOST_BYTES

Run = Callable[..., list[Any]]
pytestmark = pytest.mark.plain  # no kernel runs here


@pytest.fixture(autouse=True)
def _on_the_host(backend: str) -> None:
    if backend != "host":
        pytest.skip("about the heap of CPU ranks")


def _heap() -> HostHeap:
    heap = current_heap()
    assert isinstance(heap, HostHeap)
    return heap


def _words_at(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))


def _pattern(rank: int, count: int) -> list[int]:
    return [rank << 32 | word for word in range(count)]


def _check_seen_by_all(tensor: SymmTensor, members: list[int], group: Any) -> None:
    """Every member fills its memory, and reads all members' memory through its own addresses."""
    heap, count = _heap(), tensor.local.numel()
    assert tensor.local.count_nonzero() == 0
    assert tensor.local.data_ptr() == tensor.addrs[members.index(heap.rank)]
    assert torch.equal(tensor.net_addrs, tensor.addrs)
    assert all(address % 256 == 0 for address in tensor.addrs.tolist())
    heap.barrier(group)  # all ranks have checked for zeros
    tensor.local.copy_(torch.tensor(_pattern(heap.rank, count)).view_as(tensor.local))
    heap.barrier(group)
    for member, address in zip(members, tensor.addrs.tolist(), strict=True):
        assert _words_at(address, count) == _pattern(member, count)
    heap.barrier(group)
    # Stores arrive as well: each member writes one word into the next member's memory.
    place = members.index(heap.rank)
    ctypes.c_int64.from_address(int(tensor.addrs[(place + 1) % len(members)])).value = -heap.rank - 1
    heap.barrier(group)
    assert tensor.local.flatten()[0] == -members[place - 1] - 1


# --- addresses ----------------------------------------------------------------------------------------------


def _share(rank: int, nodes: int, ranks_per_node: int) -> None:
    heap, free = _heap(), _heap().available()
    first = heap.alloc([3, 5], torch.int64)
    second = heap.alloc([1], torch.int64)
    _check_seen_by_all(first, list(range(heap.world_size)), None)
    _check_seen_by_all(second, list(range(heap.world_size)), None)
    scalar, empty = heap.alloc([], torch.float64), heap.alloc([0, 7], torch.int16)
    assert (scalar.local.shape, empty.local.shape) == ((), (0, 7))
    heap.barrier()
    for tensor in (second, empty, first, scalar):
        heap.free(tensor)
    assert heap.available() == free


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 1), (1, 4)])
def test_every_rank_sees_every_copy(run_ranks: Run, nodes: int, ranks_per_node: int) -> None:
    """Peers read a rank's words at its address, and it reads theirs, for tensors of any rank and size."""
    run_ranks(_share, nodes, ranks_per_node)


def _share_in_groups(rank: int, nodes: int, ranks_per_node: int) -> list[int]:
    heap = _heap()
    halves = [[0, 1], [3, 2]]
    groups = [dist.new_group(members) for members in halves]
    mine = rank // 2
    # Not in step: one half allocates one small tensor, the other three large ones, and neither waits for the other.
    own = [heap.alloc([10 + 10_000 * mine], torch.int64, groups[mine]) for _ in range(1 + 2 * mine)]
    members = dist.get_process_group_ranks(groups[mine])
    assert heap.pes(groups[mine]).tolist() == members
    for tensor in own:
        _check_seen_by_all(tensor, members, groups[mine])
    shared = heap.alloc([6], torch.int64)
    _check_seen_by_all(shared, [0, 1, 2, 3], None)
    assert heap.pes().tolist() == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match=f"rank {rank} takes part in a group it is not a member of"):
        heap.alloc([1], torch.int64, groups[1 - mine])
    heap.barrier()
    for tensor in (*own, shared):
        heap.free(tensor)
    for group in groups:
        dist.destroy_process_group(group)
    return shared.offset


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 4)])
def test_disjoint_groups_allocate_at_the_same_time(run_ranks: Run, nodes: int, ranks_per_node: int) -> None:
    """Offsets then differ between ranks, and addresses still lead to the right memory."""
    offsets = run_ranks(_share_in_groups, nodes, ranks_per_node)
    assert offsets[0] == offsets[1] < offsets[2] == offsets[3]


# --- memory -------------------------------------------------------------------------------------------------


def _reuse(rank: int, nodes: int, ranks_per_node: int) -> None:
    heap, megabyte = _heap(), 1 << 20
    before = os.fstat(heap._fd).st_blocks * 512
    for _ in range(2):
        tensor = heap.alloc([megabyte], torch.int64)
        assert tensor.local.count_nonzero() == 0
        assert os.fstat(heap._fd).st_blocks * 512 - before <= 8 * megabyte
        tensor.local.fill_(-1)
        assert os.fstat(heap._fd).st_blocks * 512 - before >= 8 * megabyte
        assert _words_at(int(tensor.addrs[1 - rank]) + 8 * (megabyte - 1), 1)[0] in (0, -1)
        heap.barrier()
        heap.free(tensor)
        assert os.fstat(heap._fd).st_blocks * 512 == before
        with pytest.raises(HeapError, match="freed twice"):
            heap.free(tensor)


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 2)])
def test_freed_memory_goes_back_and_comes_again_as_zeros(run_ranks: Run, nodes: int, ranks_per_node: int) -> None:
    """A free returns memory to the system although peers map it; freeing twice is an error."""
    run_ranks(_reuse, nodes, ranks_per_node)


def _exhaust(rank: int, nodes: int, ranks_per_node: int) -> list[str]:
    heap, free = _heap(), _heap().available()
    alone = dist.new_group([1])
    half = heap.alloc([free // 2], torch.uint8, alone) if rank == 1 else None
    messages = []
    for nbytes in (free // 4 * 3, free + 1):  # no room on rank 1; no room anywhere
        with pytest.raises(HeapError) as caught:
            heap.alloc([nbytes], torch.uint8)
        messages.append(str(caught.value))
    with pytest.raises(HeapError, match=r"takes 65537 GiB, and none has more than 65536\. .* smaller max_tokens"):
        heap.alloc([MOST_BYTES + 1], torch.uint8)
    with pytest.raises(HeapError) as caught:
        heap.alloc([64 + rank], torch.uint8)
    messages.append(str(caught.value))
    with pytest.raises(HeapError, match=r"shape \[4, -1\]"):
        heap.alloc([4, -1], torch.uint8)
    small = heap.alloc([5], torch.int64)
    _check_seen_by_all(small, [0, 1], None)
    heap.free(small)
    if half is not None:
        heap.free(half)
    fits = heap.alloc([free // 4 * 3], torch.uint8)  # failed allocations were rolled back
    heap.free(fits)
    dist.destroy_process_group(alone)
    return [*messages, str(free)]


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 2)])
def test_no_room_on_one_rank_is_an_error_on_all(run_ranks: Run, nodes: int, ranks_per_node: int) -> None:
    """Names rank, both sizes and remedy; different sizes on ranks are named, too; the heap works afterwards."""
    (partly, nowhere, uneven, free), other = run_ranks(_exhaust, nodes, ranks_per_node)
    assert other == [partly, nowhere, uneven, free]
    asked = int(free) // 4 * 3
    assert f"no room for {asked} bytes of symmetric memory on rank 1" in partly
    gib = -(-(int(free) // 2 + asked) // 2**30)
    assert f"TRITON_EP_HEAP_SIZE={gib}G" in partly
    assert f"no room for {int(free) + 1} bytes of symmetric memory on rank 0" in nowhere
    assert "different sizes of one symmetric tensor: [64, 65] bytes" in uneven


# --- failure and end ----------------------------------------------------------------------------------------


def _fail(rank: int, nodes: int, ranks_per_node: int) -> None:
    heap = _heap()
    assert heap.failed_peer() is None
    heap.check_peers()
    heap.barrier()
    if rank == 1:
        heap.abort("token 7 goes to expert 99: " + "é" * 2000)
        dist.barrier()  # the others see the failure while this process lives
        raise ValueError("the cause")
    deadline = time.monotonic() + LIMIT_S
    while heap.failed_peer() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert heap.failed_peer() == 1
    with pytest.raises(PeerFailed, match=r"rank 1 failed while rank 0 waited: token 7 goes to expert 99"):
        heap.check_peers()
    dist.barrier()
    finalize_distributed()  # does not wait for a rank that has failed


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 2)])
def test_a_rank_that_aborts_is_heard(run_ranks: Run, nodes: int, ranks_per_node: int) -> None:
    """Waiting peers raise PeerFailed with the rank's reason, and can close the heap."""
    result, error = run_ranks(_fail, nodes, ranks_per_node, return_exceptions=True)
    assert result is None
    assert isinstance(error, ValueError)


def _wait_as_a_kernel(heap: HostHeap) -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        heap.check_peers()
        time.sleep(0.02)


def _die(rank: int, nodes: int, ranks_per_node: int) -> float:
    heap, free = _heap(), _heap().available()
    quiet, failed = heap.alloc([1000], torch.int64, layer="quiet"), heap.alloc([1000], torch.int64, layer="failed")
    heap.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerFailed, match="rank 0 met the other ranks in the symmetric heap, but rank 1 is gone"):
        heap.alloc([1], torch.int64)
    assert heap.failed_peer() == 1
    started = time.monotonic()
    heap.check_peers()  # grace period: rank 1 may have sent the awaited data before it died
    with pytest.raises(PeerFailed, match="the process of rank 1 ended while rank 0 waited"):
        _wait_as_a_kernel(heap)
    waited = time.monotonic() - started
    with pytest.raises(PeerFailed, match="rank 0 ended a layer and waited for rank 1 to end it, too: rank 1 has ended"):
        heap.retire([quiet], "quiet", [0, 1], wait=True)
    heap.retire([failed], "failed", [0, 1], wait=False)
    assert heap.available() == free  # an ended process can no longer store
    return waited


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 2)])
def test_a_rank_that_dies_is_named(run_ranks: Run, nodes: int, ranks_per_node: int) -> None:
    """Host collectives name it at once, waiting kernels after a second; no rank waits for it to end a layer."""
    waited, _ = run_ranks(_die, nodes, ranks_per_node, return_exceptions=True)
    assert isinstance(waited, float), waited
    assert waited > 0.9


def _retire(rank: int, nodes: int, ranks_per_node: int, folder: str) -> None:
    heap, free = _heap(), _heap().available()
    first, second = heap.alloc([1000], torch.int64, layer="a"), heap.alloc([1000], torch.int64, layer="b")
    if rank == 0:
        heap.retire([first], "a", [0, 1], wait=False)
        assert heap.available() < free
        first.local.fill_(7)  # still valid on this rank, and read by the other
        Path(folder, "retired").touch()
    else:
        while not Path(folder, "retired").exists():
            time.sleep(0.005)
        assert _words_at(int(first.addrs[0]), 1000) == [7] * 1000
        heap.retire([first], "a", [0, 1], wait=True)  # returns at once: rank 0 has retired it long ago
    heap.retire([second], "b", [1, 0], wait=True)
    third = heap.alloc([2000], torch.int64, layer="c")  # and the tensor retired without waiting is free again
    assert third.offset == first.offset and third.local.count_nonzero() == 0
    heap.free(third)
    assert heap.available() == free and not heap._retired


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 2)])
def test_memory_of_a_layer_comes_back_when_all_have_ended_it(run_ranks: Run, nodes, ranks_per_node, tmp_path) -> None:
    """Not earlier, although ranks do not meet; the memory is then zeroed, and no pending retirement remains."""
    run_ranks(_retire, nodes, ranks_per_node, str(tmp_path))


def _close(rank: int, nodes: int, ranks_per_node: int) -> None:
    heap = _heap()
    tensor = heap.alloc([1000], torch.int64)
    tensor.local.fill_(5)
    heap.barrier()
    finalize_distributed()
    heap.close()  # idempotent
    assert tensor.local.count_nonzero() == 0  # its memory is freed, but the address stays mapped
    for use in (
        lambda: heap.alloc([1], torch.int8),
        lambda: heap.free(tensor),
        lambda: heap.barrier(),
        lambda: heap.abort("x"),
    ):
        with pytest.raises(FinalizedError, match="symmetric heap was closed"):
            use()
    assert heap.failed_peer() is None
    raise KeyError("so that the pool starts fresh ranks")


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 2)])
def test_a_closed_heap_refuses(run_ranks: Run, nodes: int, ranks_per_node: int) -> None:
    """Every use raises FinalizedError; closing again does nothing."""
    with pytest.raises(KeyError, match="fresh ranks"):
        run_ranks(_close, nodes, ranks_per_node)


def test_nothing_is_left_of_a_killed_job(tmp_path: Path) -> None:
    """After kill -9 of the program its ranks end; their memory has no name under which it could persist."""
    script = tmp_path / "job.py"
    script.write_text(
        "import os, time\n"
        "import torch\n"
        "from triton_ep.distributed import current_heap, initialize_distributed, run_ranks\n"
        "def main():\n"
        "    initialize_distributed()\n"
        "    current_heap().alloc([1 << 20], torch.int8).local.fill_(1)\n"
        "    print(f'{os.getpid()}\\n', end='', flush=True)\n"
        "    time.sleep(100_000)\n"
        "if __name__ == '__main__':\n"
        "    run_ranks(main, 2)\n"
    )
    owner = Program([script], environment_of_programs(), imported=True)
    pids = [int(line) for line in owner.lines(2)]
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in pids]
    os.kill(owner.pid, signal.SIGKILL)
    assert owner.wait().returncode == -signal.SIGKILL
    for text in maps:
        files = re.findall(r" rw-s .* (/\S+.*)$", text, re.MULTILINE)
        assert [name for name in files if "heap" in name] == ["/memfd:triton_ep-heap (deleted)"] * 2
        assert [name for name in files if not name.startswith("/memfd:")] == []
    deadline = time.monotonic() + LIMIT_S
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(_runs(pid) for pid in pids)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
