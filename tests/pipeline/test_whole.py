"""The whole pipeline: noise against bf16, the example of its specification, aliases, groups, dtypes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.pipeline.plain import (
    Case,
    assert_equal,
    device,
    expert_weights,
    make_world,
    output_gradient,
    sqnr,
)
from triton_ep import MXTensor, pipeline
from triton_ep.pipeline import (
    _to_mxfp8_then_scaled_grouped_mm,
    a2a_combine,
    a2a_dispatch,
    permute,
    unpermute,
)

pytestmark = pytest.mark.plain


def _check_noise(rank: int, nodes: int, ranks_per_node: int) -> None:
    case = Case("noise", tokens=(40, 56, 33, 47), hidden=128, n=64, drop=0.0, normal=True)
    world = make_world(case, nodes * ranks_per_node)
    all_w = expert_weights(case, world.size)
    experts = range(rank * case.experts, (rank + 1) * case.experts)
    weights = all_w[experts.start : experts.stop].to(device()).requires_grad_()
    outputs, inputs = world.output_splits(rank), world.input_splits(rank)
    rows = world.rows(rank).to(device()).requires_grad_()
    grad = output_gradient(world, rank)

    dispatched = a2a_dispatch(rows, outputs, inputs)
    counts = torch.tensor(world.expert_counts(rank), device=device())
    shape, expert_rows, indices, _, ends = pipeline.permute_mxfp8_fwd_hp_bwd(
        dispatched, counts, world.size, case.experts
    )
    y = _to_mxfp8_then_scaled_grouped_mm(expert_rows, weights.transpose(-2, -1), ends)
    out = a2a_combine(unpermute(y, indices, shape), inputs, outputs)
    out.backward(grad.to(device()))

    # The same without quantisation, in float64: the expert of every row of all ranks.
    of_rows = [[e for e in range(len(all_w)) for _ in range(world.counts[r][e])] for r in range(world.size)]
    chosen = all_w.double()[of_rows[rank]]
    want_out = torch.einsum("rnk,rk->rn", chosen, world.rows(rank).double())
    want_dx = torch.einsum("rnk,rn->rk", chosen, grad.double())
    want_dw = torch.zeros(case.experts, case.n, case.hidden, dtype=torch.float64)
    for source in range(world.size):
        dy, x = output_gradient(world, source).double(), world.rows(source).double()
        for local, expert in enumerate(experts):
            mine = torch.tensor(of_rows[source]) == expert
            want_dw[local] += dy[mine].T @ x[mine]
    arrived = world.arrived([world.rows(source) for source in range(world.size)], rank)
    levels = {
        "dispatch": (sqnr(dispatched.detach().dequantize(), arrived), 30),
        "output": (sqnr(out.detach(), want_out), 28),
        "dx": (sqnr(rows.grad, want_dx), 26),
        "dw": (sqnr(weights.grad, want_dw), 25),
    }
    assert all(level >= least for level, least in levels.values()), levels
    # Checks that values are quantised: bf16 alone would be above 45 dB.
    assert all(level < 40 for level, _ in levels.values()), levels


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), (1, 4)])
def test_noise_against_bf16(run_ranks, nodes, ranks_per_node):
    """At least 30 dB for dispatch, 28 for the output, 26 for the gradient of rows, 25 for that of weights."""
    run_ranks(_check_noise, nodes, ranks_per_node)


def _check_example(rank: int, nodes: int, ranks_per_node: int) -> None:
    """The "Complete Example" of the specification, with splits that agree between ranks, swapped for the combine."""
    tokens, hidden, experts = 64, 128, 4
    generator = torch.Generator().manual_seed(rank)
    input_splits, output_splits = [[36, 28], [36, 28]][rank], [[36, 36], [28, 28]][rank]
    received = sum(output_splits)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    w = torch.randn(experts, hidden, hidden, generator=generator).bfloat16()
    permuted_indices = torch.randperm(received, generator=generator).to(device())
    padded_shape = torch.Size([received + 1, hidden])
    group_offsets = torch.tensor([16, 32, 48, received], dtype=torch.int32, device=device())
    group = dist.group.WORLD

    def run(dispatch, back, combine, mm, group) -> tuple[torch.Tensor, ...]:
        rows, weights = (each.to(device()).requires_grad_() for each in (x, w))
        columns = weights.transpose(-2, -1).contiguous().transpose(-2, -1)
        mx_dispatched = dispatch(rows, output_splits, input_splits, group)
        mx_permuted = permute(mx_dispatched, permuted_indices, padded_shape)
        assert isinstance(mx_dispatched, MXTensor) and isinstance(mx_permuted, MXTensor)
        gemm_output = mm(mx_permuted, columns, offs=group_offsets, block_size=32)
        unpermuted = back(gemm_output, permuted_indices, padded_shape)
        final_output = combine(unpermuted, input_splits, output_splits, group)
        assert final_output.dtype == torch.bfloat16 and final_output.shape == x.shape
        final_output.sum().backward()
        assert type(rows.grad) is torch.Tensor and rows.grad.dtype == weights.grad.dtype == torch.bfloat16
        return final_output.detach(), rows.grad, weights.grad

    short = run(a2a_dispatch, unpermute, a2a_combine, _to_mxfp8_then_scaled_grouped_mm, None)
    assert all(each.isfinite().all() and each.any() for each in short)
    long = run(
        pipeline.a2a_dispatch_mxfp8_fwd_hp_bwd,
        pipeline.unpermute_hp_fwd_mxfp8_bwd,
        pipeline.a2a_combine_hp_fwd_mxfp8_bwd,
        pipeline.to_mxfp8_then_scaled_grouped_mm,
        group.group_name,
    )
    by_group = run(a2a_dispatch, unpermute, a2a_combine, _to_mxfp8_then_scaled_grouped_mm, group)
    by_keyword = run(
        lambda *args: pipeline.a2a_dispatch_mxfp8_fwd_hp_bwd(*args[:-1], group=args[-1]),
        unpermute,
        lambda *args: pipeline.a2a_combine_hp_fwd_mxfp8_bwd(*args[:-1], group=args[-1]),
        _to_mxfp8_then_scaled_grouped_mm,
        group,
    )
    for each in (long, by_group, by_keyword):
        assert all(torch.equal(got, want) for got, want in zip(each, short, strict=True))


def test_example_of_the_specification(run_ranks):
    """Unchanged except for its splits; long names, and groups in any form, give the same bits."""
    run_ranks(_check_example, 1, 2)


def _check_subgroups(rank: int, nodes: int, ranks_per_node: int) -> None:
    groups = [dist.new_group([first, first + 2]) for first in range(2)]
    group = groups[rank % 2]
    rows = torch.full((3, 32), float(rank), device=device()).bfloat16()
    here = rank // 2
    splits = [1, 2]
    got = a2a_dispatch(rows, [splits[here]] * 2, splits, group.group_name)
    want = torch.tensor([rank % 2, rank % 2 + 2]).repeat_interleave(splits[here])
    assert got.dequantize()[:, 0].tolist() == want.tolist()
    back = a2a_combine(got.dequantize(), splits, [splits[here]] * 2, group)
    assert torch.equal(back, rows)


@pytest.mark.parametrize("ranks_per_node", [4])
def test_subgroups_work_side_by_side(run_ranks, ranks_per_node):
    """Splits count the ranks of the group; two groups exchange at the same time."""
    run_ranks(_check_subgroups, 1, ranks_per_node)


def _check_dtypes(rank: int, nodes: int, ranks_per_node: int, dtype: torch.dtype) -> None:
    case = Case("dtypes", dtype=dtype, n=64, normal=True)
    world = make_world(case, nodes * ranks_per_node)
    outputs, inputs = world.output_splits(rank), world.input_splits(rank)
    rows = world.rows(rank).to(device()).requires_grad_()
    grads = []
    dispatched = a2a_dispatch(rows, outputs, inputs, scaling_mode="floor")
    assert dispatched.dtype == dtype
    want = MXTensor.to_mx(world.rows(rank), scaling_mode="floor").dequantize()
    values = dispatched.dequantize()
    values.register_hook(grads.append)
    out = a2a_combine(values, inputs, outputs, mxfp8_bwd=False)
    assert_equal(out.detach(), want, "rows there and back")
    grad = output_gradient(world, rank)
    out.backward(grad.to(device()))
    assert type(grads[0]) is torch.Tensor
    assert_equal(rows.grad, grad, "gradient, as it is")

    # Rows and gradients that are already quantised are sent unchanged.
    again = a2a_dispatch(MXTensor.to_mx(rows.detach(), scaling_mode="floor"), outputs, inputs)
    assert torch.equal(again.qdata.view(torch.uint8), dispatched.qdata.view(torch.uint8))
    rows.grad = None
    values = a2a_dispatch(rows, outputs, inputs).dequantize()
    a2a_combine(values, inputs, outputs).backward(grad.to(device()))
    assert_equal(rows.grad, MXTensor.to_mx(grad).dequantize(), "gradient, quantised once")


@pytest.mark.parametrize("ranks_per_node", [2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dtypes_and_modes(run_ranks, ranks_per_node, dtype):
    """Dtypes other than bf16, another scaling mode, rows already quantised, gradients that must not be quantised."""
    run_ranks(_check_dtypes, 1, ranks_per_node, dtype)


def _check_compiled(rank: int, nodes: int, ranks_per_node: int) -> None:
    import torch._dynamo

    def layer(
        rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, outputs: list[int], inputs: list[int]
    ) -> torch.Tensor:
        name = dist.group.WORLD.group_name
        dispatched = a2a_dispatch(rows, outputs, inputs, name)
        shape, x, indices, _, ends = pipeline.permute_and_pad(dispatched, counts, len(inputs), len(weights), 32)
        y = _to_mxfp8_then_scaled_grouped_mm(x, weights.transpose(-2, -1), ends)
        return a2a_combine(unpermute(y, indices, shape), inputs, outputs, name)

    def step(run, case: Case) -> list[torch.Tensor]:
        world = make_world(case, nodes * ranks_per_node)
        weights = expert_weights(case, world.size)[rank * case.experts : (rank + 1) * case.experts]
        operands = [each.to(device()).requires_grad_() for each in (world.rows(rank), weights)]
        counts = torch.tensor(world.expert_counts(rank), device=device())
        out = run(*operands, counts, world.output_splits(rank), world.input_splits(rank))
        return [out.detach(), *torch.autograd.grad(out, operands, output_gradient(world, rank).to(device()))]

    first, second = Case("compiled", n=64), Case("other splits", n=64, tokens=(9, 4))
    # Code compiled for one batch must not serve another one; only Dynamo decides that.
    for backend, cases in (("aot_eager", [first]), ("eager", [first, second])):
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        for case in cases:
            for eager, graph in zip(step(layer, case), step(compiled, case), strict=True):
                assert torch.equal(eager, graph)


@pytest.mark.parametrize("ranks_per_node", [1])
def test_the_whole_compiles(run_ranks, ranks_per_node):
    """The pipeline compiles into one graph, forward and backward, for any splits, with the group given by name."""
    run_ranks(_check_compiled, 1, ranks_per_node)
