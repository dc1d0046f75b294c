"""The combine oracle compared with a loop over tokens, and the tolerance with sums in other orders."""

import itertools

import pytest
import torch

from triton_ep.reference.combine import combine, combine_tolerance
from triton_ep.reference.dispatch import DispatchResult, dispatch
from triton_ep.testing import apply_expert, apply_experts, make_workload


def _moe(
    tokens: list[int], num_experts: int, topk: int, kind: str, alignment: int
) -> tuple[list, list[DispatchResult], list[torch.Tensor]]:
    """Workloads, dispatches and expert outputs of all ranks."""
    world_size = len(tokens)
    sizes = {"hidden": 8, "topk": topk, "num_experts": num_experts, "routing": kind, "seed": 1}
    works = [make_workload(rank, world_size, n, **sizes) for rank, n in enumerate(tokens)]
    xs, idxs, weights = zip(*((w.x, w.topk_idx, w.topk_weights) for w in works), strict=True)
    results = [dispatch(xs, idxs, weights, rank, num_experts, alignment) for rank in range(world_size)]
    per_rank = num_experts // world_size
    ys = [apply_experts(r.recv_x, r.expert_offsets, rank * per_rank) for rank, r in enumerate(results)]
    return works, results, ys


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("kind", ["uniform", "one_expert", "all_dropped", "duplicates"])
@pytest.mark.parametrize(("tokens", "num_experts", "topk"), [([6], 4, 3), ([5, 0, 9, 2], 8, 4)])
def test_equals_the_moe_without_any_dispatch(
    tokens: list[int], num_experts: int, topk: int, kind: str, alignment: int, weighted: bool
) -> None:
    """Equals, token by token, local experts summed over k in float32 and rounded once."""
    works, results, ys = _moe(tokens, num_experts, topk, kind, alignment)
    row_weights = [result.recv_weights for result in results] if weighted else None
    for rank, work in enumerate(works):
        got = combine(ys, results, rank, torch.bfloat16, row_weights)
        assert got.dtype == torch.bfloat16
        assert got.shape == work.x.shape
        for token, experts in enumerate(work.topk_idx.tolist()):
            total = torch.zeros(8)
            for k, expert in enumerate(experts):
                if 0 <= expert < num_experts:
                    term = apply_expert(work.x[token], expert).float()
                    total += term * work.topk_weights[token, k] if weighted else term
            assert torch.equal(got[token], total.bfloat16())


def test_order_of_k_and_one_rounding() -> None:
    """2**24 + 1 + 1 loses both ones in the order of k, but not in another order."""
    x = torch.ones(1, 1)
    result = dispatch([x], [torch.tensor([[0, 1, 2]])], None, 0, 3)
    y = torch.tensor([[2.0**24], [1.0], [1.0]])
    assert combine([y], [result], 0, torch.float32).item() == 2.0**24
    assert combine([y.flip(0)], [result], 0, torch.float32).item() == 2.0**24 + 2
    # 257 is no bf16 number: rounding each partial sum would lose both ones.
    y = torch.tensor([[256.0], [1.0], [1.0]])
    assert combine([y], [result], 0, torch.bfloat16).item() == 258


def test_weights_multiply_in_float32() -> None:
    """A weight that bf16 cannot hold counts in full."""
    weight = 1 + 2.0**-10
    result = dispatch([torch.ones(1, 1)], [torch.tensor([[0]])], [torch.tensor([[weight]])], 0, 1)
    y = torch.tensor([[3.0]]).bfloat16()
    assert combine([y], [result], 0, torch.float32, [result.recv_weights]).item() == 3 * weight


def test_dropped_and_no_tokens() -> None:
    """A token without assignments is zero; no tokens give no rows."""
    result = dispatch([torch.ones(2, 3)], [torch.tensor([[-1, 2], [0, -1]])], None, 0, 2)
    got = combine([result.recv_x], [result], 0, torch.float32)
    assert got.tolist() == [[0, 0, 0], [1, 1, 1]]
    empty = dispatch([torch.ones(0, 3)], [torch.zeros(0, 2)], None, 0, 2)
    assert combine([empty.recv_x], [empty], 0, torch.bfloat16).shape == (0, 3)


def test_tolerance_covers_other_orders_and_is_not_slack() -> None:
    """Sums of bf16 partial sums in any order are within the tolerance; a lost row is not."""
    generator = torch.Generator().manual_seed(0)
    result = dispatch([torch.ones(1, 512)], [torch.tensor([[0, 1, 2, 3]])], None, 0, 4)
    y = torch.randn(4, 512, generator=generator).bfloat16()
    expected = combine([y], [result], 0, torch.bfloat16).float()
    exact_partials = combine_tolerance([y], [result], 0, torch.bfloat16)
    bf16_partials = combine_tolerance([y], [result], 0, torch.bfloat16, partial_dtype=torch.bfloat16)
    assert (exact_partials <= bf16_partials).all()
    for a, b, c, d in itertools.permutations(y.float()):
        other = ((a + b) + (c + d)).bfloat16()
        assert ((other.float() - expected).abs() <= exact_partials).all()
        other = ((a + b).bfloat16().float() + (c + d).bfloat16().float()).bfloat16()
        assert ((other.float() - expected).abs() <= bf16_partials).all()
        lost = (a + b + c).bfloat16()
        assert ((lost.float() - expected).abs() > bf16_partials).float().mean() > 0.9
