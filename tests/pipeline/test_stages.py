"""Every stage of the pipeline, forward and backward, against a recomputation in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.combinations import combinations
from tests.ops.grouped import DEVICE, check
from tests.pipeline.plain import (
    Case,
    assert_bytes,
    assert_equal,
    device,
    expert_weights,
    make_world,
    output_gradient,
    put,
    quantized,
    taken,
    values_along,
)
from triton_ep import MXTensor, pipeline
from triton_ep.reference import grouped_gemm as oracle

pytestmark = pytest.mark.plain

CASES = (
    Case("uniform"),
    Case("skewed", routing="skewed", topk=4, experts=3, tokens=(20, 2, 7, 13)),
    Case("empty_rank", tokens=(6, 0, 9, 3)),
    Case("empty_experts", routing="one_expert", drop=0.0, topk=1, experts=3),
    Case("nothing", routing="all_dropped"),
    Case("aligned128_normal", alignment=128, normal=True, hidden=96, n=32),
)


def _all(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Gather the tensors of all ranks, on the CPU."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, tensor.detach().cpu())
    return found


def _check_stages(rank: int, nodes: int, ranks_per_node: int, case: Case) -> None:
    world = make_world(case, nodes * ranks_per_node)
    experts = slice(rank * case.experts, (rank + 1) * case.experts)
    w = expert_weights(case, world.size)[experts]
    weights = w.to(device()).requires_grad_()
    outputs, inputs = world.output_splits(rank), world.input_splits(rank)
    num_rows = sum(outputs)
    grads: dict[str, torch.Tensor] = {}

    def watch(name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor.register_hook(lambda grad: grads.__setitem__(name, grad))
        return tensor

    rows = world.rows(rank).to(device()).requires_grad_()
    dispatched = watch("dispatched", pipeline.a2a_dispatch(rows, outputs, inputs))
    sent = [quantized(world.rows(source)) for source in range(world.size)]
    arrived = tuple(world.arrived([part[i] for part in sent], rank) for i in range(2))
    assert dispatched.dtype == case.dtype
    assert_bytes(dispatched, arrived, "dispatched rows")

    counts = torch.tensor(world.expert_counts(rank), device=device())
    permuted = pipeline.permute_mxfp8_fwd_hp_bwd(dispatched, counts, world.size, case.experts, case.alignment)
    shape, expert_rows, indices, sizes, ends = permuted
    watch("permuted", expert_rows)
    places, expected_sizes = world.indices(rank)
    assert shape == torch.Size((num_rows + 1, case.hidden))
    assert_equal(indices, torch.tensor(places, dtype=torch.int32), "indices")
    assert_equal(sizes, torch.tensor(expected_sizes, dtype=torch.int32), "sizes")
    assert_equal(ends, torch.tensor(expected_sizes).cumsum(0).int(), "offsets")
    expected_rows = tuple(taken(part, places) for part in arrived)
    assert_bytes(expert_rows, expected_rows, "permuted rows")

    y = watch("y", pipeline.to_mxfp8_then_scaled_grouped_mm(expert_rows, weights.transpose(-2, -1), ends))
    a_k = expert_rows.detach().dequantize(torch.float32).cpu()
    w_k, ends_cpu = values_along(w, -1).transpose(1, 2), ends.cpu()
    exact, unit = oracle.grouped_gemm(a_k, w_k, ends_cpu), oracle.magnitude(a_k, w_k, ends_cpu)
    check(y.detach().cpu(), exact, unit, terms=case.hidden)

    back = watch("back", pipeline.unpermute(y, indices, torch.Size((shape[0], case.n))))
    assert_equal(back.detach(), put(y.detach().cpu(), places, num_rows), "unpermuted rows")

    out = pipeline.a2a_combine(back, inputs, outputs)
    assert_equal(out.detach(), world.returned(_all(back), rank), "combined rows")

    out.backward(output_gradient(world, rank).to(device()))
    sent = [quantized(output_gradient(world, source)) for source in range(world.size)]
    arrived = tuple(world.arrived([part[i] for part in sent], rank) for i in range(2))
    assert_bytes(grads["back"], arrived, "gradient of combine")
    assert_bytes(grads["y"], tuple(taken(part, places) for part in arrived), "gradient of unpermute")
    assert grads["y"].dtype == case.dtype

    dy = grads["y"].dequantize(torch.float32).cpu()
    w_n = values_along(w, -2).transpose(1, 2)
    exact, unit = oracle.dgrad(dy, w_n, ends_cpu), oracle.magnitude(dy, w_n.transpose(1, 2), ends_cpu)
    check(grads["permuted"].cpu(), exact, unit, terms=case.n)
    exact, unit = oracle.wgrad(dy, a_k, ends_cpu), oracle.wgrad(dy.abs(), a_k.abs(), ends_cpu)
    check(weights.grad.cpu(), exact, unit, terms=max(expected_sizes))

    assert_equal(grads["dispatched"], put(grads["permuted"].cpu(), places, num_rows), "gradient of permute")
    assert_equal(rows.grad, world.returned(_all(grads["dispatched"]), rank), "gradient of dispatch")


@pytest.mark.parametrize(
    "case, nodes, ranks_per_node",
    combinations(
        CASES,
        [(1, 2), (1, 4)],
        on_cpu=lambda case, nodes, ranks_per_node: ranks_per_node == 2 or case.name == "skewed",
    ),
)
def test_stages_are_the_plain_recomputation(run_ranks, case, nodes, ranks_per_node):
    """Rows, indices, offsets and moved gradients match bit for bit; products up to one rounding."""
    run_ranks(_check_stages, nodes, ranks_per_node, case)


# --- permute alone --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_indices_of_any_counts(seed: int) -> None:
    """Ordered by expert, rank, arrival; -1 for padding, in the groups and past them."""
    generator = torch.Generator().manual_seed(seed)
    ranks, experts, align = [(1, 1, 1), (2, 3, 4), (4, 2, 32), (8, 8, 16)][seed]
    counts = torch.randint(0, 9, (ranks, experts), generator=generator)
    counts[torch.rand(counts.shape, generator=generator) < 0.4] = 0
    counts[:, 0] = 0
    first = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts)
    want: list[int] = []
    ends = []
    for expert in range(experts):
        for rank in range(ranks):
            begin = int(first[rank, expert])
            want += range(begin, begin + int(counts[rank, expert]))
        short = -len(want) % align
        want += [-1] * (align if len(want) == (ends[-1] if ends else 0) else short)
        ends.append(len(want))
    spare = 5
    for dtype in (torch.int32, torch.int64):
        given = counts.flatten().to(dtype)
        got = pipeline.generate_permute_indices(given, experts, ranks, len(want) + spare, align)
        assert_equal(got.permuted_indices, torch.tensor(want + [-1] * spare, dtype=torch.int32), "indices")
        assert_equal(got.m_offsets, torch.tensor(ends, dtype=torch.int32), "offsets")
        assert_equal(got.m_sizes.cumsum(0).int(), got.m_offsets, "sizes")


def test_permute_takes_any_indices() -> None:
    """Rows that no index names have gradient zero; unpermute leaves zeros in rows without a source."""
    x = torch.arange(5 * 32.0).view(5, 32).bfloat16().requires_grad_()
    indices = torch.tensor([3, -1, 0, 5, 4])
    rows = pipeline.permute(x, indices, (6, 32))
    assert_equal(rows.detach(), taken(x.detach(), [3, -1, 0, -1, 4]), "rows")
    back = pipeline.unpermute(rows, indices, (6, 32))
    kept = torch.tensor([[1.0], [0.0], [0.0], [1.0], [1.0]]).bfloat16()
    assert_equal(back.detach(), x.detach() * kept, "rows put back")
    back.sum().backward()
    assert_equal(x.grad, kept.expand(5, 32).contiguous(), "gradient")


def test_permute_and_pad_of_plain_rows() -> None:
    """The same order for rows that are not quantised, with a plain gradient."""
    x = torch.randn(7, 40).bfloat16().requires_grad_()
    counts = torch.tensor([2, 0, 1, 4])
    shape, rows, indices, sizes, ends = pipeline.permute_and_pad(x, counts, 2, 2, 8)
    places = [0, 1, 2, *[-1] * 5, 3, 4, 5, 6, *[-1] * 4, *[-1] * 8]
    assert (shape, indices.tolist(), sizes.tolist(), ends.tolist()) == ((8, 40), places, [8, 8], [8, 16])
    assert_equal(rows.detach(), taken(x.detach(), places), "rows")
    grad = torch.randn(24, 40).bfloat16()
    rows.backward(grad)
    assert_equal(x.grad, put(grad, places, 7), "gradient")


@pytest.mark.gpu
def test_rows_beyond_int32() -> None:
    """Rows past 2^31 elements are gathered and scattered to the right places, quantised and in bf16."""
    num_rows, hidden = 2**16 + 64, 2**15
    data = torch.zeros(num_rows, hidden, dtype=torch.uint8, device=DEVICE)
    scale = torch.full((num_rows, hidden // 32), 127, dtype=torch.uint8, device=DEVICE)
    last = [num_rows - 1, num_rows - 40, 3]
    for value, row in enumerate(last):
        data[row] = torch.tensor(float(value + 1)).to(torch.float8_e4m3fn).view(torch.uint8).item()
    mx = MXTensor.from_qdata_and_scales(data.view(torch.float8_e4m3fn), scale, torch.bfloat16).requires_grad_()
    indices = torch.arange(num_rows - 1, -1, -1, dtype=torch.int32, device=DEVICE)
    rows = pipeline.permute(mx, indices, (num_rows + 1, hidden))
    back = pipeline.unpermute(rows.dequantize(), indices, (num_rows + 1, hidden))
    for got in (rows.detach().dequantize().flip(0), back.detach()):
        assert got[last].unique(dim=1).flatten().tolist() == [1.0, 2.0, 3.0]
        assert got.count_nonzero() == 3 * hidden
    (grad,) = torch.autograd.grad(rows, mx, back.detach().flip(0))
    assert torch.equal(grad, back.detach())
