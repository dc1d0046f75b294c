"""Chunks of GPU heaps: places in the arenas of several ranks, and torch's symmetric memory on GPUs."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.layer.cases import Case, combine_and_check, dispatch_and_check, make_layer, workloads
from triton_ep.distributed import current_heap
from triton_ep.heap.gpu import CHUNK_STEP, Chunk

CASE = Case("heap", hidden=32)


def test_a_place_is_found_by_the_arena_of_its_rank() -> None:
    """A chunk may start at a different place in the arena of every member; other ranks have no part of it."""
    chunk = Chunk(torch.empty(64, dtype=torch.uint8), {0: (0, 1000), 2: (128, 5000)})
    assert [chunk.offset(0, offset) for offset in (0, 63, 64, 128)] == [0, 63, None, None]
    assert [chunk.offset(2, offset) for offset in (0, 127, 128, 191, 192)] == [None, None, 0, 63, None]
    assert chunk.offset(1, 0) is None


def _store_to_next(memory: Any, members: list[int], rank: int) -> None:
    """Every member writes its rank into the next member's memory, through its own address table."""
    heap = current_heap()
    from triton_ep.heap.nvshmem import _as_tensor

    place = members.index(rank)
    following = int(memory.addrs[(place + 1) % len(members)])
    _as_tensor(following, memory.nbytes, heap.device).fill_(rank + 1)
    torch.cuda.synchronize()


def _grow_apart(rank: int, nodes: int, ranks_per_node: int) -> None:
    heap = current_heap()
    pairs = [[first, first + 1] for first in range(0, nodes * ranks_per_node, 2)]
    groups = [dist.new_group(pair) for pair in pairs]
    mine, group = pairs[rank // 2], groups[rank // 2]
    nbytes = heap.available() + CHUNK_STEP
    if rank < 2:  # the ranks of the other groups skip this
        large = heap.alloc((nbytes,), torch.uint8, group)
        assert not large.local.any()
        heap.barrier(group)
        _store_to_next(large, mine, rank)
        heap.barrier(group)
        assert (large.local == mine[1 - rank % 2] + 1).all()
    assert heap.available() < nbytes  # the world cannot use that chunk
    everywhere = list(range(nodes * ranks_per_node))
    common = heap.alloc((heap.available() + 1,), torch.uint8)  # adds a chunk, at places that differ between arenas
    _store_to_next(common, everywhere, rank)
    heap.barrier()
    assert (common.local == (rank - 1) % len(everywhere) + 1).all()
    heap.free(common)
    if rank < 2:
        heap.free(large)
    with make_layer(CASE, rank % 2, 1, 2, group=group) as layer:
        combine_and_check(layer, dispatch_and_check(layer, CASE, 0))
    for each in groups:
        if group is each:
            dist.destroy_process_group(each)


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), (1, 4)])
def test_a_sub_group_grows_without_the_others(run_ranks, backend, nodes, ranks_per_node):
    """Later allocations of all ranks then have valid places on each rank."""
    if backend != "torch":
        pytest.skip("sub-groups grow in the memory of torch: --backend torch")
    run_ranks(_grow_apart, nodes, ranks_per_node)


def _beside_other_memory(rank: int, nodes: int, ranks_per_node: int) -> None:
    from torch.distributed import _symmetric_memory as symmetric

    heap = current_heap()
    works = workloads(CASE, nodes * ranks_per_node, 0)
    work, most = works[rank], max(work.x.shape[0] for work in works)  # torch requires equal sizes on all ranks
    rows = symmetric.empty((most, work.x.shape[1]), dtype=work.x.dtype, device=heap.device)
    handle = symmetric.rendezvous(rows, dist.group.WORLD)
    x = rows[: work.x.shape[0]]
    x.copy_(work.x)
    with make_layer(CASE, rank, nodes, ranks_per_node) as layer:
        idx, weights = work.topk_idx.to(heap.device), work.topk_weights.to(heap.device)
        first, second = (layer.dispatch(given, idx, weights)[0].clone() for given in (x, x.clone()))
        assert torch.equal(first, second)
        layer.check()
    assert torch.equal(x.cpu(), work.x)
    del handle


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_memory_that_the_program_took_from_torch_is_an_input_like_any_other(run_ranks, backend, nodes, ranks_per_node):
    """Both GPU heaps coexist with symmetric memory that the program takes from torch."""
    if backend == "host":
        pytest.skip("torch's symmetric memory is on GPUs")
    run_ranks(_beside_other_memory, nodes, ranks_per_node)
