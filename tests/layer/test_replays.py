"""Many replays of captured pairs of dispatch and combine, whose ranks get out of step at random."""

import random
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.combinations import combinations
from tests.layer.cases import Case, make_layer, workloads
from tests.layer.test_large import _capture
from triton_ep.distributed import current_heap

INPUTS = 4
REPLAYS_ON_CPU = 8
DECODE = Case("decode", tokens=(128,), hidden=7168, topk=8, low_latency=True)
TOTALS = 64
"""Counts that a program of a dispatch awaits, one for each rank and local expert: half as many as it has threads."""
TINY = Case("tiny", tokens=(3,), hidden=32, topk=2, experts=2, low_latency=True)
# Of so many tokens rows are laid out and summed while others are on their way.
PREFILL = Case(
    "prefill", tokens=(2048, 1500, 1, 2000), hidden=7168, topk=8, experts=16, static=True, local_combine=True
)
SHORT = Case("short", tokens=(20, 3), hidden=32, topk=2, experts=2, static=True, local_combine=True)


def _replay(rank, nodes, ranks_per_node, case, weighted, replays, delay_s):
    world, device = nodes * ranks_per_node, current_heap().device
    draw, late = random.Random(rank), 0.02 if device.type == "cuda" else 0.2
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        # A rank has the same number of tokens in all of them.
        calls = [each * len(case.tokens) for each in range(INPUTS)]
        works = [workloads(replace(case, drop=0.3 * each), world, call) for each, call in enumerate(calls)]
        mine = [of_all[rank] for of_all in works]
        xs = [work.x.to(device) for work in mine]
        idxs = [work.topk_idx.to(device) for work in mine]
        x, idx = xs[0].clone(), idxs[0].clone()
        all_weights = [work.topk_weights.to(device) for work in mine]
        weights = all_weights[0].clone() if weighted else None

        def feed(each):
            x.copy_(xs[each])
            idx.copy_(idxs[each])
            if weights is not None:
                weights.copy_(all_weights[each])

        # Sums have other signs than tokens, and a sum of this call equals no sum of the previous call in the same half.
        y = torch.empty(layer.config.recv_capacity, case.hidden, dtype=case.dtype, device=device)
        made = {}

        def pair():
            recv_x, _, desc = layer.dispatch(x, idx)
            rows = recv_x.dequantize() if case.payload else recv_x
            torch.mul(rows, -1.5, out=y)
            made.update(recv_x=rows, out=layer.combine(y, desc, weights), desc=desc)

        pair()  # compiles
        replay = _capture(pair, device)
        # Expected results of each input, from calls that are checked against the sum of its rows.
        want = []
        for each in range(INPUTS):
            feed(each)
            replay()
            layer.check()
            used = int(made["desc"].expert_offsets[-1])
            kept = ((idxs[each] >= 0) & (idxs[each] < layer.config.num_experts)).double()
            shares = kept if weights is None else kept * all_weights[each].double()
            exact = xs[each].double() * -1.5 * shares.sum(1, keepdim=True)
            bound = xs[each].double().abs() * 1.5 * shares.abs().sum(1, keepdim=True) * 2**-6
            assert case.payload or bool(((made["out"].double() - exact).abs() <= bound).all())
            want.append((used, made["recv_x"][:used].clone(), made["out"].clone()))
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        for number in range(replays):
            each = (number * 7 + number // INPUTS) % INPUTS  # the same on all ranks
            feed(each)
            if draw.random() < late:
                time.sleep(draw.random() * delay_s)
            replay()
            used, rows, out = want[each]
            wrong += (made["recv_x"][:used] != rows).any().long() + (made["out"] != out).any().long()
            if number % 1000 == 999:
                layer.check()
        layer.check()
        dist.barrier()
        return int(wrong)


@pytest.mark.plain
@pytest.mark.parametrize(
    "nodes, ranks_per_node, payload, weighted",
    combinations(
        [(1, 1), (1, 2), (1, 4)],
        [(None, False), ("mxfp8", False), (None, True)],
        on_cpu=lambda _, ranks, *__: ranks == 2,
    ),
)
def test_replays_have_the_same_bits(run_ranks, backend, pytestconfig, nodes, ranks_per_node, payload, weighted):
    """`--replays` replays on GPUs, a few calls on a CPU: rows and sums equal those of the checked calls."""
    if backend == "host":
        sizes = (replace(TINY, payload=payload), weighted, REPLAYS_ON_CPU, 0.01)
    else:
        case = replace(DECODE, payload=payload, experts=TOTALS // (nodes * ranks_per_node))
        sizes = (case, weighted, pytestconfig.getoption("--replays"), 0.002)
    assert sum(run_ranks(_replay, nodes, ranks_per_node, *sizes)) == 0


@pytest.mark.plain
@pytest.mark.parametrize(
    "nodes, ranks_per_node, payload, shared",
    combinations(
        [(1, 2), (1, 4), (2, 1), (2, 2)],
        [None, "mxfp8"],
        [False, True],
        # Either payload, staging and number of nodes twice.
        on_cpu=lambda nodes, ranks, payload, shared: (
            nodes * ranks == 2 and ((payload is None) == (nodes == 1)) != shared
        ),
    ),
)
def test_replays_of_many_tokens_have_the_same_bits(
    run_ranks, backend, pytestconfig, nodes, ranks_per_node, payload, shared
):
    """The same with kernels that overlap, in either order, and ranks of unequal numbers of tokens."""
    if backend == "host":
        sizes = (replace(SHORT, payload=payload, shared_staging=shared), False, REPLAYS_ON_CPU // 2, 0.01)
    else:
        case = replace(PREFILL, payload=payload, shared_staging=shared)
        sizes = (case, False, pytestconfig.getoption("--replays"), 0.005)
    assert sum(run_ranks(_replay, nodes, ranks_per_node, *sizes)) == 0
