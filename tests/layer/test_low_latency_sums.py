"""Low-latency combines detect arriving sums by their bits (low_latency_combine.py), for any bits of the rows."""

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.layer.cases import (
    check_sum,
    combine_and_check,
    dispatch_and_check,
    make_layer,
    start_combine,
)
from tests.layer.test_low_latency import CASES, SMALL
from triton_ep.errors import CallMismatch

BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
IN_CHAOS = {(torch.bfloat16, False), (torch.float32, True)}  # words of two elements and of one


def _patterns(dtype):
    """Bit patterns that a receiver might misread: zeros, all ones, NaN, infinities, subnormals, [n] integers."""
    bits = 8 * dtype.itemsize
    lowest = -(2 ** (bits - 1))  # -0
    infinity = torch.tensor(torch.inf, dtype=dtype).view(BITS[dtype]).item()
    several = [0, lowest, -1, 2 ** (bits - 1) - 1, infinity, infinity + 1, infinity + lowest, 1, lowest + 1]
    return torch.tensor(several, dtype=BITS[dtype])


def _rows(rank, call, num_rows, hidden, dtype):
    """Outputs of a rank's experts: whole rows of one pattern, rows of all patterns, and +0 next to -0."""
    draw, patterns = torch.Generator().manual_seed(call + 100 * rank), _patterns(dtype)
    kind = torch.randint(0, len(patterns), (num_rows, hidden), generator=draw)
    kind[:: 3 + call] = torch.randint(0, len(patterns), (1,), generator=draw)
    return patterns[kind].view(dtype)


def _sums(done, rank, ys, weighted):
    """[T, H]: a token's rows on each rank summed in k order and rounded; these sums added in rank order and rounded."""
    results = done.expected.results
    owner, row = results[rank].dst_rank[rank], results[rank].dst_row[rank]
    total = torch.zeros(row.shape[0], done.case.hidden)
    for peer, y in enumerate(ys):
        partial = torch.zeros_like(total)
        for k in range(row.shape[1]):
            here = (owner[:, k] == peer) & (row[:, k] >= 0)
            term = y[row[here, k]].float()
            if weighted:
                term = term * results[peer].recv_weights[row[here, k]].unsqueeze(1)
            partial[here] += term
        total += partial.to(done.case.dtype).float()
    return total.to(done.case.dtype)


def _odd_rows(rank, nodes, ranks_per_node, dtype, weighted):
    case = replace(SMALL, name="odd", dtype=dtype, tokens=(6, 3), topk=3, experts=4, hidden=96)
    world, seen = nodes * ranks_per_node, 0
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        for call in range(4):
            done = dispatch_and_check(layer, case, call)
            ys = [_rows(peer, call, done.recv_x.shape[0], case.hidden, dtype) for peer in range(world)]
            weights = done.recv_weights if weighted else None
            out = layer.combine(ys[rank].to(done.recv_x.device), done.desc, weights).cpu()
            layer.check()
            want = _sums(done, rank, ys, weighted)
            nan = want.isnan()
            assert torch.equal(nan, out.isnan())
            assert torch.equal(want.view(BITS[dtype])[~nan], out.view(BITS[dtype])[~nan])
            seen += int(nan.sum()) and int((~nan).sum())
        combine_and_check(layer, dispatch_and_check(layer, case, 4))
    return seen


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
@pytest.mark.parametrize(
    "dtype, weighted",
    [
        pytest.param(dtype, weighted, marks=() if (dtype, weighted) in IN_CHAOS else pytest.mark.plain)
        for dtype in BITS
        for weighted in (False, True)
    ],
)
def test_any_bits_are_right(run_ranks, nodes, ranks_per_node, dtype, weighted):
    """Rows of -0, 0xFF bytes, NaN, Inf and subnormals: every bit of the sums is correct, and no wait hangs."""
    assert min(run_ranks(_odd_rows, nodes, ranks_per_node, dtype, weighted)) > 0


def _halves(rank, nodes, ranks_per_node):
    with make_layer(CASES["plain"], rank, nodes, ranks_per_node) as layer:
        case = CASES["plain"]
        for call in range(6):
            done = dispatch_and_check(layer, case, call)
            if call % 3 == rank % 3:  # ranks need not split the same calls
                combine_and_check(layer, done)
            else:
                out, hook = start_combine(layer, done, return_recv_hook=True)
                time.sleep(0.002 * rank)
                hook()
                check_sum(layer, done, out)
        layer.check()


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), pytest.param(1, 4, marks=pytest.mark.on_gpus)])
def test_calls_in_halves_among_whole_ones(run_ranks, nodes, ranks_per_node):
    """A hook launches the waiting programs separately; the count of finished programs is the same as for one launch."""
    run_ranks(_halves, nodes, ranks_per_node)


def _combine_checked(layer, done):
    layer.combine(done.recv_x, done.desc)
    layer.check()


def _other_rows(rank, nodes, ranks_per_node):
    """Ranks combine different dispatches: no rank waits for sums that never come."""
    layer = make_layer(SMALL, rank, nodes, ranks_per_node)
    done = [dispatch_and_check(layer, SMALL, call) for call in range(2)]
    with pytest.raises(CallMismatch):
        _combine_checked(layer, done[rank])
    dist.barrier()
    layer.finalize()


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_ranks_in_different_combines_hear_of_it(run_ranks, nodes, ranks_per_node):
    """All ranks raise, long before the time limit."""
    began = time.monotonic()
    run_ranks(_other_rows, nodes, ranks_per_node)
    assert time.monotonic() - began < 100
