"""Combine with biases: they join the float32 sum of a token, which is rounded once."""

from dataclasses import replace

import pytest
import torch

from tests.combinations import combinations
from tests.layer.cases import Case, dispatch_and_check, expert_outputs, make_layer
from triton_ep.distributed import current_heap
from triton_ep.errors import InputError
from triton_ep.reference import combine as reference

PLAIN = Case("bias", tokens=(9, 0, 14, 5), hidden=72, topk=3, experts=3)
CASES = (
    PLAIN,
    replace(PLAIN, name="bias_weighted_static", combine_weights=True, static=True, alignment=4),
    replace(PLAIN, name="bias_fp32", dtype=torch.float32, hidden=37),
    replace(PLAIN, name="bias_all_dropped", routing="all_dropped"),
)


def _biases(case: Case, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(tokens)
    first, second = (torch.randn(tokens, case.hidden, generator=draw).to(case.dtype) for _ in range(2))
    return first, second


def _check(rank: int, nodes: int, ranks_per_node: int, case: Case) -> None:
    device, exact = current_heap().device, nodes == 1
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        done = dispatch_and_check(layer, case, 0)
        results = done.expected.results
        ys = done.expected.outputs
        weights = [each.recv_weights for each in results] if case.combine_weights else None
        y = expert_outputs(layer, done)
        given = done.recv_weights if case.combine_weights else None
        plain = layer.combine(y, done.desc, given)
        first, second = _biases(case, plain.shape[0])
        for biases in ((first,), (first, second), ()):
            bias = tuple(each.to(device) for each in biases)
            want = reference.combine(ys, results, rank, case.dtype, weights, biases)
            out = layer.combine(y, done.desc, given, bias=bias[0] if len(bias) == 1 else bias)
            split, hook = layer.combine(y, done.desc, given, bias=bias, return_recv_hook=True)
            hook()
            if nodes == 1 and case.combine_weights and device.type == "cuda":
                _check_fused(out.cpu(), case, biases, ys, results, rank, weights)
            else:
                # With several nodes the same float32 additions run in another order.
                near = {"rtol": 0, "atol": 0} if exact else {"rtol": torch.finfo(case.dtype).eps, "atol": 2.0**-18}
                torch.testing.assert_close(out.cpu(), want, **near)
            torch.testing.assert_close(split, out, rtol=0, atol=0)
            if len(biases) == 2 and case is PLAIN and plain.numel():
                twice = (plain.cpu().float() + first.float() + second.float()).to(case.dtype)
                assert not torch.equal(twice, want)  # a second rounding would be seen


def _check_fused(out, case, biases, ys, results, rank, weights) -> None:
    """Check a sum with fused multiply-add: a GPU's float32 sum differs in its last bits, and is still rounded once.

    A second rounding, of up to half a step of the dtype, would be far above the error of such a sum.
    """
    total = reference.combine(ys, results, rank, torch.float32, weights, biases)
    off = reference.combine_tolerance(ys, results, rank, torch.float32, weights)
    for bias in biases:
        off = off + bias.float().abs() * (case.topk + 1) * 2.0**-23
    bound = off + (total.abs() + off) * torch.finfo(case.dtype).eps / 2
    assert bool(((out.float() - total).abs() <= bound).all())


def _on_cpu(case: Case, nodes: int, ranks_per_node: int) -> bool:
    """A token's own rank adds its biases, so two CPU ranks stand for four."""
    if nodes == 2:
        return ranks_per_node == 1 and case.name in ("bias", "bias_weighted_static")
    return True


@pytest.mark.plain
@pytest.mark.parametrize("case, nodes, ranks_per_node", combinations(CASES, [(1, 2), (2, 1), (2, 2)], on_cpu=_on_cpu))
def test_biases_join_the_sum_before_its_rounding(run_ranks, case, nodes, ranks_per_node):
    """Bits of the reference, with one bias, two and none, in a whole call and in a split-phase call."""
    run_ranks(_check, nodes, ranks_per_node, case)


def _check_mistakes(rank: int, nodes: int, ranks_per_node: int) -> None:
    device = current_heap().device
    case = replace(PLAIN, name="bias_mistakes", tokens=(3, 4))
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        done = dispatch_and_check(layer, case, 0)
        y = expert_outputs(layer, done)
        right = torch.zeros(case.tokens[rank], case.hidden, dtype=case.dtype, device=device)
        for wrong, message in (
            (right.float(), "bias.*float32"),
            (right[:-1], "bias must have shape"),
            ((right, right[:, :-1]), "bias"),
            ((right,) * 3, "one tensor or two, got 3"),
            ([right], "bias must be a tensor, got list"),
        ):
            with pytest.raises(InputError, match=message):
                layer.combine(y, done.desc, bias=wrong)
        torch.testing.assert_close(layer.combine(y, done.desc, bias=right), layer.combine(y, done.desc))
    fast = replace(case, name="bias_low_latency", low_latency=True)
    with make_layer(fast, rank, nodes, ranks_per_node) as layer:
        done = dispatch_and_check(layer, fast, 0)
        with pytest.raises(InputError, match="low-latency layers"):
            layer.combine(expert_outputs(layer, done), done.desc, bias=right)


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_biases_that_do_not_fit_are_refused(run_ranks, nodes, ranks_per_node):
    """Wrong dtypes, shapes and numbers of biases, and low-latency layers, which take none."""
    run_ranks(_check_mistakes, nodes, ranks_per_node)
