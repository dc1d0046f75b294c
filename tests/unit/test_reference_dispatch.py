"""The dispatch oracle compared with a loop that appends rows to a list, and with cases worked out by hand."""

import pytest
import torch

from triton_ep.reference.dispatch import dispatch
from triton_ep.reference.routing import routing
from triton_ep.testing import Workload, make_workload


def _loop(works: list[Workload], rank: int, num_experts: int, alignment: int) -> tuple[list, list, list, list]:
    """(source or None per row, offsets, real rows per expert, weights) of the rows that `rank` receives."""
    experts_per_rank = num_experts // len(works)
    rows: list[tuple[int, int, int] | None] = []
    weights: list[float] = []
    offsets, real = [0], []
    for expert in range(rank * experts_per_rank, (rank + 1) * experts_per_rank):
        before = len(rows)
        for source, work in enumerate(works):
            for token, experts in enumerate(work.topk_idx.tolist()):
                for k, chosen in enumerate(experts):
                    if chosen == expert:
                        rows.append((source, token, k))
                        weights.append(float(work.topk_weights[token, k]))
        real.append(len(rows) - before)
        while len(rows) % alignment:
            rows.append(None)
            weights.append(0.0)
        offsets.append(len(rows))
    return rows, offsets, real, weights


@pytest.mark.parametrize("alignment", [1, 16, 128])
@pytest.mark.parametrize("kind", ["uniform", "skewed", "one_expert", "all_dropped", "duplicates"])
@pytest.mark.parametrize(
    ("tokens", "num_experts", "topk"),
    [([7], 4, 2), ([5, 0, 11, 3], 8, 3), ([0, 0], 2, 2), ([40, 1, 2, 17, 0, 3, 9, 8], 8, 4)],
    ids=["W1", "W4", "nothing", "W8"],
)
def test_equals_a_plain_loop(kind: str, alignment: int, tokens: list[int], num_experts: int, topk: int) -> None:
    """Data, weights, offsets, counts, sources and destinations agree on every rank, with unequal token counts."""
    world_size = len(tokens)
    sizes = {"hidden": 12, "topk": topk, "num_experts": num_experts, "routing": kind, "seed": 3}
    works = [make_workload(rank, world_size, n, **sizes) for rank, n in enumerate(tokens)]
    xs, idxs, weights = zip(*((w.x, w.topk_idx, w.topk_weights) for w in works), strict=True)
    for rank in range(world_size):
        got = dispatch(xs, idxs, weights, rank, num_experts, alignment)
        rows, offsets, real, row_weights = _loop(works, rank, num_experts, alignment)
        assert got.expert_offsets.tolist() == offsets
        assert got.num_recv_tokens_per_expert.tolist() == real
        assert got.expert_offsets.dtype == got.num_recv_tokens_per_expert.dtype == torch.int32
        assert got.src.tolist() == [list(row or (-1, -1, -1)) for row in rows]
        assert got.recv_weights.tolist() == row_weights
        assert got.recv_x.dtype == torch.bfloat16
        assert got.recv_x.shape == (len(rows), 12)
        for row, source in enumerate(rows):
            expected = torch.zeros(12, dtype=torch.bfloat16) if source is None else xs[source[0]][source[1]]
            assert torch.equal(got.recv_x[row], expected)
            if source is not None:
                assert got.dst_row[source[0]][source[1:]] == row
                assert got.dst_rank[source[0]][source[1:]] == rank
    for dst_rank, dst_row, idx in zip(got.dst_rank, got.dst_row, idxs, strict=True):
        dropped = (idx < 0) | (idx >= num_experts)
        assert torch.equal(dst_rank < 0, dropped)
        assert torch.equal(dst_row < 0, dropped)


def test_a_case_by_hand() -> None:
    """Two ranks, four experts: rows by expert, source rank, token and k; both marks of dropped ids."""
    xs = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]])]
    idxs = [torch.tensor([[1, 0], [1, -1]]), torch.tensor([[4, 1]])]
    got = dispatch(xs, idxs, None, 0, 4)
    assert got.recv_x.flatten().tolist() == [1, 1, 2, 3]
    assert got.src.tolist() == [[0, 0, 1], [0, 0, 0], [0, 1, 0], [1, 0, 1]]
    assert got.expert_offsets.tolist() == [0, 1, 4]
    assert got.recv_weights is None
    other = dispatch(xs, idxs, None, 1, 4)
    assert other.recv_x.shape == (0, 1)
    assert other.expert_offsets.tolist() == [0, 0, 0]


def test_padding_by_hand() -> None:
    """With alignment=4 segments start at multiples of 4, an empty expert has no rows, padding is zero."""
    xs, idxs = [torch.ones(3, 2)], [torch.tensor([[0], [2], [0]])]
    got = dispatch(xs, idxs, [torch.full((3, 1), 0.5)], 0, 3, alignment=4)
    assert got.expert_offsets.tolist() == [0, 4, 4, 8]
    assert got.num_recv_tokens_per_expert.tolist() == [2, 0, 1]
    assert got.recv_x[:, 0].tolist() == [1, 1, 0, 0, 1, 0, 0, 0]
    assert got.recv_weights.tolist() == [0.5, 0.5, 0, 0, 0.5, 0, 0, 0]


def test_same_expert_twice_in_a_token_is_two_rows() -> None:
    """Each assignment has a row and a weight of its own."""
    got = dispatch([torch.ones(1, 1)], [torch.tensor([[1, 1]])], [torch.tensor([[0.25, 0.75]])], 0, 2)
    assert got.recv_weights.tolist() == [0.25, 0.75]
    assert got.src.tolist() == [[0, 0, 0], [0, 0, 1]]


def test_given_scatter_indices_decide_the_order_inside_an_expert() -> None:
    """The computed indices change nothing; a permutation inside one expert permutes only that expert's rows."""
    xs = [torch.tensor([[1.0], [2.0], [3.0]])]
    idxs = [torch.tensor([[1], [0], [1]])]
    computed = routing(idxs[0], 2, 1, 1).full_scatter_indices
    assert dispatch(xs, idxs, None, 0, 2, 1, [computed]).recv_x.flatten().tolist() == [2, 1, 3]
    swapped = torch.tensor([[2], [0], [1]])
    assert dispatch(xs, idxs, None, 0, 2, 1, [swapped]).recv_x.flatten().tolist() == [2, 3, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu])
def test_any_payload_dtype(dtype: torch.dtype) -> None:
    """Quantised payloads and their scales are rows as well."""
    x = torch.arange(8, dtype=torch.uint8).view(4, 2)
    payload = x.view(dtype) if dtype.itemsize == 1 else x.to(dtype)
    got = dispatch([payload], [torch.tensor([[1], [0], [1], [0]])], None, 0, 2).recv_x
    assert got.dtype == dtype
    assert torch.equal(got.view(torch.uint8), payload[[1, 3, 0, 2]].view(torch.uint8))


@pytest.mark.parametrize(("num_experts", "alignment"), [(3, 1), (4, 0)])
def test_impossible_sizes_are_refused(num_experts: int, alignment: int) -> None:
    """Experts must divide evenly among ranks, and the alignment must be at least 1."""
    x, idx = torch.ones(1, 1), torch.zeros(1, 1)
    with pytest.raises(ValueError, match="alignment"):
        dispatch([x, x], [idx, idx], None, 0, num_experts, alignment)
