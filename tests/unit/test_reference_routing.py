"""The routing oracle compared with a loop that counts with dictionaries, and with cases worked out by hand."""

import pytest
import torch

from triton_ep.reference.routing import routing
from triton_ep.testing import make_workload


def _loop(idx: list[list[int]], num_experts: int, world_size: int, ranks_per_node: int) -> dict[str, list]:
    """The same result, computed from one (token, k) entry after the other."""
    experts_per_rank = num_experts // world_size
    counts = [0] * num_experts
    seen_rank: dict[int, int] = {}
    seen_node: dict[int, int] = {}
    result: dict[str, list] = {"slot": [], "rank_slot": [], "node_slot": []}
    for row in idx:
        ranks_of_token, nodes_of_token = set(), set()
        for name in result:
            result[name].append([])
        for expert in row:
            slot = rank_slot = node_slot = -1
            if expert not in (-1, num_experts):
                slot = counts[expert]
                counts[expert] += 1
                rank = expert // experts_per_rank
                node = rank // ranks_per_node
                if rank not in ranks_of_token:
                    rank_slot = seen_rank.get(rank, 0)
                    seen_rank[rank] = rank_slot + 1
                if node not in nodes_of_token:
                    node_slot = seen_node.get(node, 0)
                    seen_node[node] = node_slot + 1
                ranks_of_token.add(rank)
                nodes_of_token.add(node)
            result["slot"][-1].append(slot)
            result["rank_slot"][-1].append(rank_slot)
            result["node_slot"][-1].append(node_slot)
    copies = [expert if expert >= 0 else num_experts for row in idx for expert in row]
    order = sorted(range(len(copies)), key=lambda copy: (copies[copy], copy))
    place = [order.index(copy) for copy in range(len(copies))]
    topk = len(idx[0]) if idx else 0
    result["full_scatter_indices"] = [place[t * topk : (t + 1) * topk] for t in range(len(idx))]
    result["counts"] = counts
    return result


@pytest.mark.parametrize("kind", ["uniform", "skewed", "one_expert", "all_dropped", "duplicates"])
@pytest.mark.parametrize(
    ("world_size", "ranks_per_node", "num_experts", "topk", "num_tokens"),
    [(1, 1, 4, 2, 9), (4, 4, 8, 3, 13), (4, 2, 8, 8, 7), (8, 2, 16, 4, 40), (4, 1, 4, 2, 1)],
)
def test_equals_a_plain_loop(
    kind: str, world_size: int, ranks_per_node: int, num_experts: int, topk: int, num_tokens: int
) -> None:
    """Counts, slots and scatter positions agree, for every routing, several topologies, int32 and int64 ids."""
    sizes = {"hidden": 4, "topk": topk, "num_experts": num_experts, "routing": kind, "drop": 0.2}
    for rank, idx_dtype in enumerate((torch.int32, torch.int64)[:world_size]):
        work = make_workload(rank, world_size, num_tokens, **sizes).with_ids(idx_dtype)
        got = routing(work.topk_idx, num_experts, world_size, ranks_per_node)
        expected = _loop(work.topk_idx.tolist(), num_experts, world_size, ranks_per_node)
        for name, values in expected.items():
            tensor = getattr(got, name)
            assert tensor.dtype == torch.int32
            assert tensor.tolist() == values, name


def test_a_case_by_hand() -> None:
    """3 tokens with top-2, 4 ranks of 2 experts in 2 nodes: every number can be checked by eye."""
    idx = torch.tensor([[6, 7], [0, 6], [8, 2]])
    got = routing(idx, 8, 4, 2)
    assert got.counts.tolist() == [1, 0, 1, 0, 0, 0, 2, 1]
    assert got.slot.tolist() == [[0, 0], [0, 1], [-1, 0]]
    # Token 0 has two assignments for rank 3 and counts once there; token 1 is the second token for rank 3.
    assert got.rank_slot.tolist() == [[0, -1], [0, 1], [-1, 0]]
    assert got.node_slot.tolist() == [[0, -1], [0, 1], [-1, 1]]
    assert got.full_scatter_indices.tolist() == [[2, 4], [0, 3], [5, 1]]


def test_both_marks_of_a_dropped_copy_sort_last_in_order() -> None:
    """-1 and E sort as equals, after every expert."""
    got = routing(torch.tensor([[-1, 1], [2, -1], [0, 2]]), 2, 1, 1)
    assert got.full_scatter_indices.tolist() == [[2, 1], [3, 4], [0, 5]]
    assert got.counts.tolist() == [1, 1]


def test_same_expert_twice_in_a_token_has_two_slots() -> None:
    """Duplicates are separate assignments, in the order of k."""
    got = routing(torch.tensor([[1, 1, 1]]), 2, 2, 1)
    assert got.slot.tolist() == [[0, 1, 2]]
    assert got.rank_slot.tolist() == [[0, -1, -1]]


def test_no_tokens() -> None:
    """T = 0 gives empty tensors of the right shape and zero counts."""
    got = routing(torch.zeros(0, 3, dtype=torch.int32), 4, 2, 2)
    assert got.counts.tolist() == [0, 0, 0, 0]
    assert got.slot.shape == got.rank_slot.shape == got.full_scatter_indices.shape == (0, 3)


@pytest.mark.parametrize(("wrong", "where"), [(-2, r"idx\[1, 0\] is -2"), (5, r"idx\[1, 0\] is 5")])
def test_ids_out_of_range_are_refused(wrong: int, where: str) -> None:
    """An oracle that guessed here would agree with a kernel that writes out of bounds."""
    with pytest.raises(ValueError, match=where):
        routing(torch.tensor([[0], [wrong]]), 4, 2, 1)


@pytest.mark.parametrize(("num_experts", "world_size", "ranks_per_node"), [(5, 2, 1), (4, 4, 3)])
def test_uneven_division_is_refused(num_experts: int, world_size: int, ranks_per_node: int) -> None:
    """Experts must divide evenly among ranks, and ranks among nodes."""
    with pytest.raises(ValueError, match="not a multiple"):
        routing(torch.zeros(1, 1), num_experts, world_size, ranks_per_node)
