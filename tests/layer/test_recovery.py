"""After a failure, whichever ranks saw it: memory in use stays reserved, and a new layer is correct from the start.

Delays are deterministic: a late rank waits for a file that another rank creates at a certain point.
"""

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.combinations import combinations
from tests.layer.cases import (
    Case,
    check_sum,
    combine_and_check,
    dispatch_and_check,
    make_layer,
    start_combine,
    workloads,
)
from triton_ep import EPAll2AllLayer
from triton_ep.distributed import current_heap
from triton_ep.errors import FinalizedError, HeapError, PeerFailed, WaitTimeout
from triton_ep.kernels.device import codes

pytestmark = pytest.mark.plain
EXACT = Case("recover", hidden=32)
CASES = [EXACT, Case("static", hidden=32, static=True), Case("low_latency", hidden=32, low_latency=True)]
LIMIT_S = 300
"""Seconds for a test whose kernels may have to be compiled first, beside other tests."""


def _await(file: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not file.exists():
        assert time.monotonic() < deadline, file
        time.sleep(0.005)


@contextlib.contextmanager
def _in_turn(rank: int, file: Path) -> Iterator[None]:
    """Run the block on rank 0 before it runs on the other ranks."""
    if rank:
        _await(file)
    yield
    if rank == 0:
        file.touch()


def _free_bytes() -> int:
    """Free bytes of the heap, after memory that layers of earlier tests held back has been returned."""
    heap = current_heap()
    heap.require(1)
    return heap.available()


def _bytes_of(layer: EPAll2AllLayer) -> torch.Tensor:
    return torch.cat([block.local for block in layer.context.memory._blocks.values()]).cpu()


def _dispatch(layer: EPAll2AllLayer, case: Case, call: int) -> None:
    work = workloads(case, layer.config.world_size, call)[layer.config.rank]
    device = layer.context.device
    weights = work.topk_weights.to(device) if case.weights else None
    layer.dispatch(work.x.to(device), work.topk_idx.to(device), weights)
    layer.check()


def _check_new(case: Case, rank: int, nodes: int, ranks_per_node: int) -> None:
    """Check that a new layer starts with zeroed memory although ranks create it at different times, and is correct."""
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        assert not _bytes_of(layer).any()
        dist.barrier()  # no rank stores before all ranks have checked
        for call in range(2):
            combine_and_check(layer, dispatch_and_check(layer, case, call))


def _late(rank: int, nodes: int, ranks_per_node: int, case: Case, folder: str) -> dict[str, list[str]]:
    """Expire the wait of rank 0; return each rank's errors by the call for which the others were late."""
    seen: dict[str, list[str]] = {}
    free = _free_bytes()
    for where in ("dispatch", "combine"):
        layer = make_layer(case, rank, nodes, ranks_per_node)
        done = dispatch_and_check(layer, case, 0)
        combine_and_check(layer, done)
        done = dispatch_and_check(layer, case, 1)
        layer.check()
        dist.barrier()  # so that no healthy call hits the short time limit
        layer.context.state[codes.TIMEOUT_US] = 300_000
        old = {block.offset for block in layer.context.memory._blocks.values()}
        with _in_turn(rank, Path(folder, where)):
            try:
                if where == "dispatch":
                    _dispatch(layer, case, 2)
                else:
                    layer.combine(done.recv_x, done.desc)
                    layer.check()
                seen[where] = []
            except WaitTimeout as error:
                seen[where] = [str(error)]
            if rank == 0:
                layer.finalize()  # the constructor follows, while the others still store to its old memory
        layer.finalize()
        with pytest.raises(FinalizedError):
            layer.check()
        _check_new(case, rank, nodes, ranks_per_node)
        assert current_heap().available() == free and old  # nothing is lost
    return seen


@pytest.mark.parametrize(
    "nodes, ranks_per_node, case",
    [
        # A case for each kind of dispatch; the exact one on two nodes, where memory is reserved in the same way.
        *combinations(
            [(1, 2), (2, 1), (2, 2)],
            CASES[:2],
            on_cpu=lambda *case: case in [(2, 1, EXACT), (1, 2, CASES[1])],
        ),
        pytest.param(1, 2, CASES[2], id="1-2-low_latency"),
    ],
)
def test_a_new_layer_is_right_after_a_rank_was_late(run_ranks, nodes, ranks_per_node, case, tmp_path):
    """Some or all ranks saw the failure; all finalize and create a new layer, to whose memory no late call stores."""
    seen = run_ranks(_late, nodes, ranks_per_node, case, str(tmp_path), timeout_s=LIMIT_S)
    assert all("missing rank" in seen[0][where][0] for where in ("dispatch", "combine"))
    if (nodes, ranks_per_node) == (1, 2):
        # In combine the late rank found all rows that it needed from rank 0, so only rank 0 failed.
        assert seen[1]["combine"] == []
        assert bool(seen[1]["dispatch"]) is not case.low_latency


def _leave_by_exception(rank: int, nodes: int, ranks_per_node: int, case: Case, folder: str) -> None:
    heap, free = current_heap(), _free_bytes()
    alone = dist.new_group([0], timeout=timedelta(seconds=2))
    try:
        with make_layer(case, rank, nodes, ranks_per_node) as layer:
            done = dispatch_and_check(layer, case, 0)
            held = _bytes_of(layer).numel()
            if rank:
                out, hook = start_combine(layer, done, return_recv_hook=True)
                layer.check()  # wait until the GPU has sent
                Path(folder, f"sent{rank}").touch()
                _await(Path(folder, "left"))
                hook()  # reads the rows that rank 0 has left in its memory
                check_sum(layer, done, out)
            else:
                for other in range(1, nodes * ranks_per_node):
                    _await(Path(folder, f"sent{other}"))
                combine_and_check(layer, done)
                raise KeyError("of the program")
    except KeyError:
        # Allocate on this rank alone: none of that memory may belong to the layer.
        mine = heap.alloc((held,), torch.uint8, alone)
        mine.local.fill_(255)
        if heap.device.type == "cuda":
            torch.cuda.synchronize()
        if heap.backend == "host":
            with pytest.raises(HeapError, match=r"no room .* \d+ bytes more come back when ranks? 1.* finalize"):
                heap.alloc((free - mine.nbytes,), torch.uint8, alone)
        Path(folder, "left").touch()
        heap.free(mine)
    _check_new(case, rank, nodes, ranks_per_node)
    assert heap.available() == free
    if rank == 0:
        dist.destroy_process_group(alone)


@pytest.mark.parametrize(
    "case, nodes, ranks_per_node", combinations(CASES, [(1, 2)], on_cpu=lambda case, *_: case.name != "static")
)
def test_what_others_still_read_stays(run_ranks, nodes, ranks_per_node, case, tmp_path):
    """A rank that leaves the layer's block by an exception neither frees nor reuses memory that others still read."""
    run_ranks(_leave_by_exception, nodes, ranks_per_node, case, str(tmp_path), timeout_s=LIMIT_S)


def _without_the_late_rank(rank: int, nodes: int, ranks_per_node: int, folder: str) -> None:
    """Rank 0 goes on alone, and the late call of rank 1 stores to no memory in use."""
    alone = dist.new_group([0])
    layer = make_layer(EXACT, rank, nodes, ranks_per_node)
    layer.context.state[codes.TIMEOUT_US] = 300_000
    if rank == 0:
        with pytest.raises(WaitTimeout):
            _dispatch(layer, EXACT, 0)
        layer.finalize()
        with make_layer(EXACT, 0, 1, 1, group=alone) as single:
            combine_and_check(single, dispatch_and_check(single, EXACT, 0))
            before = _bytes_of(single)
            Path(folder, "made").touch()
            _await(Path(folder, "stored"))
            assert torch.equal(_bytes_of(single), before)
            combine_and_check(single, dispatch_and_check(single, EXACT, 1))
    else:
        _await(Path(folder, "made"))
        with pytest.raises(WaitTimeout):
            _dispatch(layer, EXACT, 0)
        Path(folder, "stored").touch()
        layer.finalize()
    _check_new(EXACT, rank, nodes, ranks_per_node)
    if rank == 0:
        dist.destroy_process_group(alone)


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_a_group_without_the_late_rank_is_safe_from_it(run_ranks, nodes, ranks_per_node, tmp_path):
    """The group of the failed layer decides which memory is held back, not the group of the new layer."""
    run_ranks(_without_the_late_rank, nodes, ranks_per_node, str(tmp_path), timeout_s=LIMIT_S)


def _meetings(rank: int, nodes: int, ranks_per_node: int, folder: str) -> None:
    heap = current_heap()
    # One rank creates a layer, the other waits at a barrier; then one is in a collective of the program.
    with pytest.raises(PeerFailed, match="different calls: a barrier by rank 0; the constructor of a layer by rank 1"):
        heap.barrier() if rank == 0 else make_layer(EXACT, rank, nodes, ranks_per_node)
    if rank == 0:
        dist.all_gather_object([None, None], "of the program")
    else:
        with pytest.raises(PeerFailed, match="came to a barrier, but rank 0 to a collective of the program"):
            heap.barrier()
    two = [make_layer(EXACT, rank, nodes, ranks_per_node) for _ in range(2)]
    with pytest.raises(PeerFailed, match="a barrier of layer 1 by rank 0; a barrier of layer 2 by rank 1"):
        two[rank].context.reallocate_dispatch_output_buf(1)
    for layer in two:
        layer.finalize()  # one layer has failed on this rank, the other on the other rank
    # Rank 1 is still at a meeting of the layer that rank 0 has finalized after a failure; rank 0 is at the next one.
    layer = make_layer(EXACT, rank, nodes, ranks_per_node)
    if rank == 0:
        layer.context.state[codes.TIMEOUT_US] = 300_000
        with pytest.raises(WaitTimeout, match="missing rank 1;"):
            _dispatch(layer, EXACT, 0)
        layer.finalize()
        Path(folder, "gone").touch()
    else:
        _await(Path(folder, "gone"))
        with pytest.raises(PeerFailed, match="came to a barrier of a layer that rank 0 has finalized after a failure"):
            layer.context.reallocate_dispatch_output_buf(1)
        with pytest.raises(WaitTimeout, match="out of step"):
            layer.check()
        layer.finalize()
    _check_new(EXACT, rank, nodes, ranks_per_node)
    alone = dist.new_group([rank], use_local_synchronization=True)
    with make_layer(EXACT, 0, 1, 1, group=alone) as single:  # a group of one waits for no other rank
        combine_and_check(single, dispatch_and_check(single, EXACT, 0))
    dist.destroy_process_group(alone)


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_ranks_in_different_meetings_say_so(run_ranks, nodes, ranks_per_node, tmp_path):
    """PeerFailed names the call of each rank; a layer that failed on one rank does not make a new layer fail."""
    run_ranks(_meetings, nodes, ranks_per_node, str(tmp_path), timeout_s=LIMIT_S)


def _no_memory_here(*_args: Any) -> None:
    raise HeapError("of this rank alone")


def _constructor_fails(rank: int, nodes: int, ranks_per_node: int) -> None:
    heap, free = current_heap(), _free_bytes()
    if rank == 1:
        heap.require = _no_memory_here  # type: ignore[method-assign]
    with pytest.raises(HeapError if rank else PeerFailed, match="of this rank alone" if rank else "rank 1 has finaliz"):
        make_layer(EXACT, rank, nodes, ranks_per_node)
    if rank == 1:
        del heap.require
    _check_new(EXACT, rank, nodes, ranks_per_node)
    assert heap.available() == free


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_a_constructor_that_fails_on_one_rank_stops_the_others(run_ranks, nodes, ranks_per_node):
    """The others raise PeerFailed when they next meet that rank; afterwards a layer can be created."""
    run_ranks(_constructor_fails, nodes, ranks_per_node, timeout_s=LIMIT_S)
