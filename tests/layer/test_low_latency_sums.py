"""Low-latency combines in one launch, whose sums announce themselves (low_latency_combine_once.py): they mean what
those in two launches mean, whatever the bits of the rows are."""

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.layer.cases import (
    check_case,
    check_sum,
    combine_and_check,
    dispatch_and_check,
    limit_of_calls,
    make_layer,
    start_combine,
)
from tests.layer.test_low_latency import CASES, SMALL
from triton_ep.distributed import current_heap
from triton_ep.errors import CallMismatch, WaitTimeout

ANNOUNCED = {name: replace(case, announced=True) for name, case in CASES.items()}
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 4)])
@pytest.mark.parametrize("name", ["plain", "mxfp8"])
def test_sums_equal_the_reference(run_ranks, chaos_seed, nodes, ranks_per_node, name):
    """Three calls, so that halves are used again; in chaos mode stores get through in pieces."""
    run_ranks(check_case, nodes, ranks_per_node, replace(ANNOUNCED[name], calls=2 if chaos_seed is not None else 4))


@pytest.mark.plain
@pytest.mark.parametrize(
    "name, nodes, ranks_per_node",
    [("aligned_fp16", 1, 1), ("mx_given", 1, 2), ("wide", 1, 2), ("aligned_fp16", 1, 3), ("duplicates_fp32", 1, 4)]
    + [("one_expert_int64", 1, 4), ("nothing", 1, 4), *((name, 1, 8) for name in CASES)],
)
def test_other_sizes_and_numbers_of_ranks(run_ranks, backend, name, nodes, ranks_per_node):
    """One rank, odd rows, rows of several tiles, no token at all."""
    if backend == "host" and ranks_per_node == 8:
        pytest.skip("needs --backend nvshmem")
    run_ranks(check_case, nodes, ranks_per_node, ANNOUNCED[name])


def _odd_rows(rank, nodes, ranks_per_node, dtype, weighted):
    """Both combines of the same rows, whose bits are drawn from those that could be taken for something else."""
    case = replace(SMALL, name="odd", dtype=dtype, tokens=(6, 3), topk=3, experts=4, hidden=96)
    bits = 8 * dtype.itemsize
    lowest = -(2 ** (bits - 1))  # -0
    infinity = torch.tensor(torch.inf, dtype=dtype).view(BITS[dtype]).item()
    patterns = torch.tensor(
        [0, lowest, -1, 2 ** (bits - 1) - 1, infinity, infinity + 1, infinity + lowest, 1, lowest + 1],
        dtype=BITS[dtype],
    )
    sums = []
    for announced in (False, True):
        with make_layer(replace(case, announced=announced), rank, nodes, ranks_per_node) as layer:
            for call in range(4):
                done = dispatch_and_check(layer, case, call)
                draw = torch.Generator().manual_seed(call + 100 * rank)
                # Whole rows of one pattern, rows of all, and +0 beside -0.
                kind = torch.randint(0, len(patterns), done.recv_x.shape, generator=draw)
                kind[:: 3 + call] = torch.randint(0, len(patterns), (1,), generator=draw)
                y = patterns[kind].view(dtype).to(done.recv_x.device)
                weights = done.recv_weights if weighted else None
                sums.append(layer.combine(y, done.desc, weights).cpu().clone())
                layer.check()
            combine_and_check(layer, dispatch_and_check(layer, case, 4))
    for two, one in zip(sums[:4], sums[4:], strict=True):
        nan = two.isnan()
        assert torch.equal(nan, one.isnan())
        assert torch.equal(two.view(BITS[dtype])[~nan], one.view(BITS[dtype])[~nan])
    return sum(int(each.isnan().sum()) for each in sums)


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("weighted", [False, True])
def test_any_bits_are_right(run_ranks, nodes, ranks_per_node, dtype, weighted):
    """Rows of -0, of 0xFF bytes, of NaN, Inf and subnormals: the bits of a combine in two launches; nobody waits."""
    assert min(run_ranks(_odd_rows, nodes, ranks_per_node, dtype, weighted)) > 0


def _halves(rank, nodes, ranks_per_node):
    with make_layer(ANNOUNCED["plain"], rank, nodes, ranks_per_node) as layer:
        case = ANNOUNCED["plain"]
        for call in range(6):
            done = dispatch_and_check(layer, case, call)
            if call % 3 == rank % 3:  # ranks need not agree on where they take a call apart
                combine_and_check(layer, done)
            else:
                out, hook = start_combine(layer, done, return_recv_hook=True)
                time.sleep(0.002 * rank)
                hook()
                check_sum(layer, done, out)
        layer.check()


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), (1, 4)])
def test_calls_in_halves_among_whole_ones(run_ranks, nodes, ranks_per_node):
    """A hook launches the waiting programs apart; the count of programs that have ended is that of one launch."""
    run_ranks(_halves, nodes, ranks_per_node)


def _combine_checked(layer, done):
    layer.combine(done.recv_x, done.desc)
    layer.check()


def _late(rank, nodes, ranks_per_node):
    case = replace(SMALL, announced=True)
    limit_s = limit_of_calls(case, rank, nodes, ranks_per_node)
    layer = make_layer(case, rank, nodes, ranks_per_node, timeout_s=limit_s)
    done = [dispatch_and_check(layer, case, call) for call in range(3)][-1]
    combine_and_check(layer, done)
    if current_heap().device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    if rank != 1:
        with pytest.raises(WaitTimeout, match=r"low-latency combine.*missing rank 1; ll_combine_flag\[1\].*be 2, is 0"):
            _combine_checked(layer, done)
    dist.barrier()
    layer.context.failure = layer.context.failure or "the other ranks gave up"
    layer.finalize()


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_a_late_rank_is_named_within_the_time_limit(run_ranks, nodes, ranks_per_node):
    """The wait for sums, or that for the rank itself, expires and says for whom."""
    run_ranks(_late, nodes, ranks_per_node)


def _other_rows(rank, nodes, ranks_per_node):
    """Ranks combine different dispatches: sums that never come are not waited for."""
    case = replace(SMALL, announced=True)
    layer = make_layer(case, rank, nodes, ranks_per_node)
    done = [dispatch_and_check(layer, case, call) for call in range(2)]
    with pytest.raises(CallMismatch):
        _combine_checked(layer, done[rank])
    dist.barrier()
    layer.finalize()


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_ranks_in_different_combines_hear_of_it(run_ranks, nodes, ranks_per_node):
    """All of them raise, long before the time limit."""
    began = time.monotonic()
    run_ranks(_other_rows, nodes, ranks_per_node)
    assert time.monotonic() - began < 100
