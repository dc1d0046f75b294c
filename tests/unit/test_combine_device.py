"""How far a combine between nodes waits before it adds up sums (kernels/internode/combine.py)."""

import random

import pytest
import torch
import triton
import triton.language as tl

from triton_ep.context.layout import placement_parts
from triton_ep.kernels.device import codes
from triton_ep.runtime.launch import INTERPRETING

# isort: split
from triton_ep.kernels.device.job import Job
from triton_ep.kernels.internode.combine import _steps_needed

DEVICE = "cpu" if INTERPRETING else "cuda"
NODES, EXPERTS, CHUNK, TOKENS = 3, 2, 16, 100


@triton.jit
def _of_chunks(
    steps_ptr,
    placement_ptr,
    rows_ptr,
    state_ptr,
    node,
    num_tokens,
    num_ranks,
    ranks_per_node,
    max_tokens,
    TOPK: tl.constexpr,
    LWP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    job = Job(state_ptr, state_ptr, 0, num_ranks, ranks_per_node, 2, max_tokens)
    first = tl.program_id(0) * CHUNK
    rows_ptr += first * TOPK
    needed = _steps_needed(job, placement_ptr, node, rows_ptr, num_tokens - first, TOPK, LWP, CHUNK)
    tl.store(steps_ptr + tl.program_id(0), needed)


@pytest.mark.parametrize(("ranks_per_node", "topk"), [(1, 2), (2, 8), (3, 2), (4, 3)])
def test_a_chunk_waits_for_no_more_steps_than_its_sums_need(ranks_per_node: int, topk: int) -> None:
    """Random tokens of another node: the least number of steps after which all sums of a chunk are stored."""
    draw, node, num_tokens = random.Random(ranks_per_node), 2, TOKENS - 7
    ranks = range(ranks_per_node)
    goes_to = [draw.sample(ranks, draw.randint(1, min(topk, ranks_per_node))) for _ in range(num_tokens)]
    count = [sum(rank in chosen for chosen in goes_to) for rank in ranks]
    first, count_of = placement_parts(NODES * ranks_per_node, ranks_per_node, EXPERTS)["sums"]
    placement = torch.zeros(first + count_of, dtype=torch.int32)
    of_node = 123  # sums of the tokens of earlier nodes
    ends = [of_node + sum(count[: rank + 1]) for rank in range(-1, ranks_per_node)]
    placement[first + 2 * NODES * ranks_per_node + node * ranks_per_node - 1 :][: len(ends)] = torch.tensor(ends)

    table, seen = torch.full((num_tokens, topk), -1, dtype=torch.int32), [0] * ranks_per_node
    steps_of = []
    for token, chosen in enumerate(goes_to):
        latest = 0
        for k, rank in enumerate(chosen):
            table[token, k] = of_node + sum(count[:rank]) + seen[rank]
            stored = [
                count[rank] * codes.COMBINE_BOUNDS[2 * step] // codes.PARTS for step in range(codes.STEPS // 2 + 1)
            ]
            latest = max(latest, next(step for step, rows in enumerate(stored) if rows > seen[rank]))
            seen[rank] += 1
        steps_of.append(latest)
    want = [max(steps_of[start : start + CHUNK]) for start in range(0, num_tokens, CHUNK)]

    steps = torch.zeros(len(want), dtype=torch.int32, device=DEVICE)
    given = placement.to(DEVICE), table.to(DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    sizes = node, num_tokens, NODES * ranks_per_node, ranks_per_node, TOKENS
    padded = triton.next_power_of_2(ranks_per_node)
    _of_chunks[(len(want),)](steps, *given, *sizes, TOPK=topk, LWP=padded, CHUNK=CHUNK)
    assert steps.tolist() == want and want[0] < want[-1] == codes.STEPS // 2
