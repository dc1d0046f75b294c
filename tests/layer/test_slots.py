"""The value of each received row goes back to the (token, k) of the row, bit for bit."""

from dataclasses import replace

import pytest
import torch

from tests.combinations import combinations
from tests.layer.cases import Case, dispatch_and_check, make_layer
from triton_ep.distributed import current_heap
from triton_ep.exchange import slots as slot_ops
from triton_ep.reference import combine as reference

CASES = (
    Case("plain", topk=4, experts=4),
    Case("static_aligned", topk=3, experts=3, static=True, alignment=16),
    Case("duplicates", topk=4, experts=4, routing="duplicates"),
    Case("all_dropped", topk=3, experts=4, routing="all_dropped"),
    Case("no_tokens_on_a_rank", topk=3, experts=4, tokens=(6, 0, 9, 3)),
    Case("in_two_parts", topk=5, experts=4, hidden=3, dtype=torch.float32),
    Case("many_tokens", topk=8, experts=8, tokens=(40, 21, 3, 30), hidden=32),
)


def _values(rank: int, num_rows: int) -> torch.Tensor:
    """[R]: any finite float32, of both signs."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(num_rows, generator=generator) * 2.0 ** torch.randint(-90, 90, (num_rows,), generator=generator)


def _check(rank: int, nodes: int, ranks_per_node: int, case: Case) -> None:
    device = current_heap().device
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        call = dispatch_and_check(layer, case, 0)
        results, desc = call.expected.results, call.desc
        slots = slot_ops.needed_slots(layer.context, desc)
        assert (slots is None) == case.local_combine, "with local combine the descriptor has the copies"
        values = [_values(r, result.recv_x.shape[0]) for r, result in enumerate(results)]
        given = torch.full((desc.num_recv_rows,), torch.nan)  # nothing is read past the last row
        given[: values[rank].shape[0]] = values[rank]
        for _ in range(2):
            back = slot_ops.to_slots(layer.context, given.to(device), slots, desc)
            assert torch.equal(back.cpu(), reference.slot_values(values, results, rank))
        layer.check()


IN_CHAOS = {"plain", "in_two_parts"}
"""Values travel like rows of a combine: whole, and a part of the columns at a time."""
ON_NODES = {
    *((2, 1, False, "static_aligned"), (2, 1, False, "in_two_parts"), (2, 1, True, "in_two_parts")),
    *((2, 1, True, "many_tokens"), (2, 2, False, "plain")),
}


def _on_cpu(nodes: int, ranks_per_node: int, local_combine: bool, case: Case) -> bool:
    return nodes == 1 or (nodes, ranks_per_node, local_combine, case.name) in ON_NODES


def _in_chaos(nodes: int, ranks_per_node: int, local_combine: bool, case: Case) -> bool:
    return nodes * ranks_per_node == 2 and not local_combine and case.name in IN_CHAOS


@pytest.mark.parametrize(
    "nodes, ranks_per_node, local_combine, case",
    combinations([(1, 2), (2, 1), (2, 2)], [False, True], CASES, on_cpu=_on_cpu, in_chaos=_in_chaos),
)
def test_a_value_of_a_row_goes_back_to_its_slot(run_ranks, nodes, ranks_per_node, local_combine, case):
    """With and without local combine, which sums the rows of a token on their rank; dropped entries get zero."""
    run_ranks(_check, nodes, ranks_per_node, replace(case, local_combine=local_combine))
