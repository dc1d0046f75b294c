"""Gradients over the layer, compared with a dense computation in double precision; per slot for the weights."""

import gc
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.combinations import combinations
from tests.layer.cases import Case, make_layer, workloads
from triton_ep import MXTensor, autograd
from triton_ep.autograd import operations
from triton_ep.distributed import current_heap
from triton_ep.errors import FinalizedError, InputError, PeerFailed, StaleHandleError

TOPOLOGIES = ((1, 2), (2, 1), (1, 4), (2, 2))

CASES = (
    Case("weights_in_combine", combine_weights=True),
    Case("weights_before_combine", topk=4, experts=4, tokens=(9, 4, 7, 6)),
    Case("no_weights", weights=False),
    Case("aligned", alignment=16, topk=3, experts=4, combine_weights=True),
    Case("zero_tokens_on_a_rank", tokens=(6, 0, 9, 3), combine_weights=True),
    Case("zero_tokens_everywhere", tokens=(0,), combine_weights=True),
    Case("skewed", routing="skewed", topk=4, experts=4, tokens=(12, 2, 7, 9), combine_weights=True),
    Case("all_dropped", routing="all_dropped", combine_weights=True),
    Case("same_expert_twice", routing="duplicates", topk=4, experts=4, combine_weights=True),
    Case("local_combine", local_combine=True, topk=4, experts=4, combine_weights=True),
    Case("local_combine_before", local_combine=True, topk=4, experts=2),
    Case("static", static=True, topk=4, experts=4, combine_weights=True),
    Case("static_local", static=True, alignment=16, topk=3, experts=4, local_combine=True, combine_weights=True),
    Case("short_rows", hidden=3, topk=5, experts=8, combine_weights=True),
    Case("short_rows_local", hidden=3, topk=5, experts=8, local_combine=True),
)
FP32 = tuple(replace(case, dtype=torch.float32) for case in CASES)


def _expert_weights(case: Case, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shape = (num_experts, case.hidden, case.hidden)
    return tuple(torch.randn(shape, generator=generator) / case.hidden for _ in range(2))


def _experts(x: torch.Tensor, offsets: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Each expert's rows through two matrices; rows past the last one are zero."""
    starts = offsets.tolist()
    parts = [torch.tanh(x[a:b] @ up[e]) @ down[e] for e, (a, b) in enumerate(pairwise(starts))]
    return torch.cat([*parts, x.new_zeros(x.shape[0] - starts[-1], x.shape[1])])


def _output_gradient(case: Case, rank: int, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(90 + rank)
    return torch.randn(tokens, case.hidden, generator=generator)


def _dense(case: Case, works, up: torch.Tensor, down: torch.Tensor):
    """Every rank's output and gradients of x and weights, and the gradients of all experts, in float64, no layer."""
    xs = [w.x.double().requires_grad_() for w in works]
    weights = [w.topk_weights.double().requires_grad_() for w in works]
    up, down = up.double().requires_grad_(), down.double().requires_grad_()
    outs = []
    for x, weight, work in zip(xs, weights, works, strict=True):
        out = torch.zeros_like(x)
        for e in range(up.shape[0]):
            share = torch.where(work.topk_idx == e, weight if case.weights else 1.0, 0.0).sum(1, keepdim=True)
            out = out + share * (torch.tanh(x @ up[e]) @ down[e])
        outs.append(out)
    loss = sum((o * _output_gradient(case, r, o.shape[0]).double()).sum() for r, o in enumerate(outs))
    loss.backward()
    return outs, [x.grad for x in xs], [w.grad for w in weights], up.grad, down.grad


def _check_gradients(rank: int, nodes: int, ranks_per_node: int, case: Case) -> None:
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        cfg, device = layer.config, current_heap().device
        works = workloads(case, cfg.world_size, 0)
        all_up, all_down = _expert_weights(case, cfg.num_experts)
        outs, grad_xs, grad_ws, grad_up, grad_down = _dense(case, works, all_up, all_down)
        mine = slice(rank * cfg.num_experts_per_rank, (rank + 1) * cfg.num_experts_per_rank)
        up, down = (w[mine].to(device).requires_grad_() for w in (all_up, all_down))
        x = works[rank].x.to(device).requires_grad_()
        weights = works[rank].topk_weights.to(device).requires_grad_() if case.weights else None

        # Fill uninitialised memory with NaN from here on: nobody may read memory that was not written.
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            recv_x, recv_weights, desc = autograd.dispatch(layer, x, works[rank].topk_idx.to(device), weights)
            y = _experts(recv_x, desc.expert_offsets, up, down)
            in_combine = recv_weights if case.combine_weights else None
            if case.weights and in_combine is None:
                y = y * recv_weights.unsqueeze(1)
            y.retain_grad()
            out = autograd.combine(layer, y, desc, in_combine)
            out.backward(_output_gradient(case, rank, x.shape[0]).to(device))
        finally:
            torch.use_deterministic_algorithms(False)

        close = {"rtol": 2e-4, "atol": 2e-4, "check_dtype": False}
        torch.testing.assert_close(out.cpu(), outs[rank], **close)
        torch.testing.assert_close(x.grad.cpu(), grad_xs[rank], **close)
        torch.testing.assert_close(up.grad.cpu(), grad_up[mine], **close)
        torch.testing.assert_close(down.grad.cpu(), grad_down[mine], **close)
        dropped = (works[rank].topk_idx < 0) | (works[rank].topk_idx >= cfg.num_experts)
        assert not x.grad.cpu()[dropped.all(1)].any()
        assert not y.grad[int(desc.expert_offsets[-1]) :].any()
        if case.weights:
            torch.testing.assert_close(weights.grad.cpu(), grad_ws[rank], **close)
            assert not weights.grad.cpu()[dropped].any()


OF_TWO_NODES = ("zero_tokens_on_a_rank", "static_local", "short_rows")


def _dense_on_cpu(case: Case, nodes: int, ranks_per_node: int) -> bool:
    """Two CPU ranks take every case, on one node or on two; four take one."""
    if nodes == ranks_per_node == 2:
        return case.name == "local_combine"
    if nodes == 2:
        return case.name in ("weights_in_combine", *OF_TWO_NODES)
    return ranks_per_node == 2 and case.name not in OF_TWO_NODES


@pytest.mark.plain  # the same kernels as in test_layer.py
@pytest.mark.parametrize("case, nodes, ranks_per_node", combinations(FP32, TOPOLOGIES, on_cpu=_dense_on_cpu))
def test_gradients_are_those_of_the_dense_computation(run_ranks, case, nodes, ranks_per_node):
    """Gradients of tokens, routing weights and experts; dropped entries get zero."""
    run_ranks(_check_gradients, nodes, ranks_per_node, case)


def _check_exact_slots(rank: int, nodes: int, ranks_per_node: int, case: Case) -> None:
    """Small integers and powers of two: no sum below rounds, so every bit is determined."""
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        cfg, device = layer.config, current_heap().device
        work = workloads(case, cfg.world_size, 0)[rank]
        tokens = work.x.shape[0]
        generator = torch.Generator().manual_seed(rank)
        x, grad = (torch.randint(-2, 3, (tokens, case.hidden), generator=generator).to(case.dtype) for _ in range(2))
        weights = work.topk_weights.to(device).requires_grad_()
        leaf = x.to(device).requires_grad_()
        recv_x, recv_weights, desc = autograd.dispatch(layer, leaf, work.topk_idx.to(device), weights)
        starts = desc.expert_offsets.tolist()
        scales = torch.ones(recv_x.shape[0], 1, device=device)
        for local, (a, b) in enumerate(pairwise(starts)):
            scales[a:b] = 2.0 ** ((rank * cfg.num_experts_per_rank + local) % 7 - 3)
        values = recv_x.dequantize() if isinstance(recv_x, MXTensor) else recv_x
        out = autograd.combine(layer, values * scales.to(case.dtype), desc, recv_weights)
        out.backward(grad.to(device))
        kept = (work.topk_idx >= 0) & (work.topk_idx < cfg.num_experts)
        expected = (x.double() * grad.double()).sum(1, keepdim=True) * 2.0 ** (work.topk_idx.double() % 7 - 3)
        expected = torch.where(kept, expected, 0.0).float()
        assert torch.equal(weights.grad.cpu(), expected)


def _slots_on_cpu(
    dtype: torch.dtype, payload: str | None, local_combine: bool, nodes: int, ranks_per_node: int
) -> bool:
    """On one node two CPU ranks take all; on two nodes sums per node and quantised rows once each."""
    if (nodes, ranks_per_node) == (2, 1):
        return payload == "mxfp8" and not local_combine
    if (nodes, ranks_per_node) == (2, 2):
        return (dtype, payload) == (torch.bfloat16, None) and local_combine
    return ranks_per_node == 2


@pytest.mark.plain  # as above
@pytest.mark.parametrize(
    "dtype, payload, local_combine, nodes, ranks_per_node",
    combinations(
        [(torch.bfloat16, None), (torch.float32, None), (torch.bfloat16, "mxfp8")],
        [False, True],
        TOPOLOGIES,
        on_cpu=_slots_on_cpu,
    ),
)
def test_gradients_of_weights_are_exact_per_slot(run_ranks, dtype, payload, local_combine, nodes, ranks_per_node):
    """Gradients are not averaged over a token's slots, nor rounded to the dtype or the payload of rows."""
    case = Case("slots", topk=4, experts=4, hidden=32, dtype=dtype, local_combine=local_combine, payload=payload)
    run_ranks(_check_exact_slots, nodes, ranks_per_node, case)


def _check_differences(rank: int, nodes: int, ranks_per_node: int, static: bool) -> None:
    """Central differences. All tokens change the weight of the same slot at once: no loss depends on another's."""
    case = Case(
        "moved", tokens=(3, 5, 4, 2), topk=3, experts=2, hidden=32, drop=0.3, dtype=torch.float32, static=static
    )
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        cfg, device = layer.config, current_heap().device
        works = workloads(case, cfg.world_size, 0)
        work = works[rank]
        x, topk_idx = work.x.to(device) / 8, work.topk_idx.to(device)
        up = _expert_weights(case, cfg.num_experts)[0][rank * cfg.num_experts_per_rank :].to(device)
        grad = _output_gradient(case, rank, x.shape[0]).to(device)

        def losses(weights: torch.Tensor) -> torch.Tensor:
            recv_x, recv_weights, desc = autograd.dispatch(layer, x, topk_idx, weights)
            starts = desc.expert_offsets.tolist()
            parts = [recv_x[a:b] @ up[e] * 8 for e, (a, b) in enumerate(pairwise(starts))]
            rest = recv_x.new_zeros(recv_x.shape[0] - starts[-1], case.hidden)
            # The weight is used twice, inside the expert and in the sum.
            y = torch.tanh(torch.cat([*parts, rest]) * recv_weights.unsqueeze(1))
            return (autograd.combine(layer, y, desc, recv_weights).double() * grad).sum(1)

        weights = work.topk_weights.clone().to(device).requires_grad_()
        losses(weights).sum().backward()
        step = 2.0**-7
        measured = torch.zeros(work.topk_idx.shape, dtype=torch.float64)
        for k in range(case.topk):
            sides = []
            for sign in (1, -1):
                moved = weights.detach().clone()
                moved[:, k] += sign * step
                sides.append(losses(moved).cpu())
            measured[:, k] = (sides[0] - sides[1]) / (2 * step)
        gradient = weights.grad.cpu()
        torch.testing.assert_close(gradient.double(), measured, rtol=2e-3, atol=2e-3)
        dropped = (work.topk_idx < 0) | (work.topk_idx >= cfg.num_experts)
        assert not gradient[dropped].any() and not measured[dropped].any()
        assert gradient[~dropped].all()


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node, static", [(1, 2, True), (2, 1, False)])
def test_gradients_of_weights_are_what_differences_measure(run_ranks, nodes, ranks_per_node, static):
    """Slot by slot; a dropped entry has no influence and a gradient of exactly zero."""
    run_ranks(_check_differences, nodes, ranks_per_node, static)


def _check_parts_of_the_graph(rank: int, nodes: int, ranks_per_node: int, payload: str | None) -> None:
    case = Case("parts", topk=3, experts=4, payload=payload)
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        work, device = workloads(case, layer.config.world_size, 0)[rank], current_heap().device
        topk_idx, kept = work.topk_idx.to(device), (work.topk_idx >= 0) & (work.topk_idx < layer.config.num_experts)

        def inputs(x_too: bool, weights_too: bool) -> tuple[torch.Tensor, torch.Tensor]:
            x, weights = work.x.clone().to(device), work.topk_weights.clone().to(device)
            return x.requires_grad_(x_too), weights.requires_grad_(weights_too)

        x, weights = inputs(True, True)
        _, recv_weights, _ = autograd.dispatch(layer, x, topk_idx, weights)
        (recv_weights * 3).sum().backward()
        assert torch.equal(weights.grad.cpu(), kept * 3.0)
        assert not x.grad.any()

        x, weights = inputs(True, False)
        recv_x, _, desc = autograd.dispatch(layer, x, topk_idx, weights)
        plain = recv_x.dequantize() if payload else recv_x
        autograd.combine(layer, plain, desc).backward(torch.ones_like(x))
        assert torch.equal(x.grad.cpu(), kept.sum(1, keepdim=True).expand(x.shape).to(x.dtype))

        x, weights = inputs(False, True)
        recv_x, recv_weights, desc = autograd.dispatch(layer, x, topk_idx, weights)
        autograd.combine(layer, torch.ones_like(x[:1]).expand(recv_x.shape), desc, recv_weights).sum().backward()
        assert torch.equal(weights.grad.cpu(), kept * float(case.hidden))

        x, weights = inputs(True, True)
        with torch.no_grad():
            recv_x, recv_weights, desc = autograd.dispatch(layer, x, topk_idx, weights)
        assert not recv_x.requires_grad and not recv_weights.requires_grad


@pytest.mark.plain
@pytest.mark.parametrize(
    "nodes, ranks_per_node, payload",
    [(1, 2, None), (1, 2, "mxfp8"), (2, 1, "mxfp8"), pytest.param(2, 2, "mxfp8", marks=pytest.mark.on_gpus)],
)
def test_what_is_not_asked_for_is_not_needed(run_ranks, nodes, ranks_per_node, payload):
    """Gradients of one input only, through one output only, and no gradients at all."""
    run_ranks(_check_parts_of_the_graph, nodes, ranks_per_node, payload)


def _check_microbatches(rank: int, nodes: int, ranks_per_node: int, static: bool) -> None:
    case = Case("batches", topk=4, experts=4, dtype=torch.float32, static=static, combine_weights=True)
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        cfg = layer.config
        device = current_heap().device
        all_up, all_down = _expert_weights(case, cfg.num_experts)
        mine = slice(rank * cfg.num_experts_per_rank, (rank + 1) * cfg.num_experts_per_rank)
        up, down = all_up[mine].to(device), all_down[mine].to(device)
        pending = {}

        def forward(batch: int) -> None:
            works = workloads(case, cfg.world_size, batch)
            x, weights = (t.clone().to(device).requires_grad_() for t in (works[rank].x, works[rank].topk_weights))
            recv_x, recv_weights, desc = autograd.dispatch(layer, x, works[rank].topk_idx.to(device), weights)
            out = autograd.combine(layer, _experts(recv_x, desc.expert_offsets, up, down), desc, recv_weights)
            pending[batch] = works, x, weights, out

        def backward(batch: int) -> None:
            works, x, weights, out = pending.pop(batch)
            out.backward(_output_gradient(case, rank, x.shape[0]).to(device))
            outs, grad_xs, grad_ws, _, _ = _dense(case, works, all_up, all_down)
            close = {"rtol": 2e-4, "atol": 2e-4, "check_dtype": False}
            torch.testing.assert_close(out.cpu(), outs[rank], **close)
            torch.testing.assert_close(x.grad.cpu(), grad_xs[rank], **close)
            torch.testing.assert_close(weights.grad.cpu(), grad_ws[rank], **close)

        for step, batch in (
            (forward, 0),
            (forward, 1),
            (backward, 0),
            (forward, 2),
            (backward, 1),
            (backward, 2),
        ):
            step(batch)


@pytest.mark.parametrize(
    "nodes, ranks_per_node, static",
    [
        (1, 2, False),
        pytest.param(2, 1, True, marks=pytest.mark.plain),
        pytest.param(2, 2, True, marks=pytest.mark.on_gpus),
    ],
)
def test_microbatches_in_flight_do_not_disturb_each_other(run_ranks, chaos_seed, nodes, ranks_per_node, static):
    """The pipeline schedule F0 F1 B0 F2 B1 B2."""
    run_ranks(_check_microbatches, nodes, ranks_per_node, static)


# --- what may go wrong ----------------------------------------------------------------------------------


def _check_rows_of_combine(rank: int, nodes: int, ranks_per_node: int, static: bool) -> None:
    case = Case("rows", static=static, dtype=torch.float32)
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        work, device = workloads(case, layer.config.world_size, 0)[rank], current_heap().device
        x = work.x.to(device).requires_grad_()
        recv_x, recv_weights, desc = autograd.dispatch(layer, x, work.topk_idx.to(device), work.topk_weights.to(device))
        more = torch.cat([recv_x, recv_x[:1]])
        for y, weights in ((recv_x[:-1], None), (recv_x[:0], None), (more, None), (recv_x, recv_weights[:-1])):
            with pytest.raises(InputError, match=rf"must have shape \[{desc.num_recv_rows}"):
                autograd.combine(layer, y, desc, weights)
        autograd.combine(layer, recv_x, desc).sum().backward()
        kept = ((work.topk_idx >= 0) & (work.topk_idx < layer.config.num_experts)).sum(1, keepdim=True)
        assert torch.equal(x.grad.cpu(), kept.expand(x.shape).float())


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node, static", [(1, 2, False), (1, 2, True)])
def test_combine_takes_as_many_rows_as_were_dispatched(run_ranks, nodes, ranks_per_node, static):
    """With fewer rows combine would read past their end. The layer stays usable."""
    run_ranks(_check_rows_of_combine, nodes, ranks_per_node, static)


def _check_backward_of_combine(rank: int, nodes: int, ranks_per_node: int, case: Case) -> None:
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        work, device = workloads(case, layer.config.world_size, 0)[rank], current_heap().device
        topk_idx = work.topk_idx.to(device)
        _, _, desc = layer.dispatch(work.x.to(device), topk_idx)
        rows = int(desc.expert_offsets[-1])
        grad = work.x.to(device).flip(0).contiguous()
        want, _, _ = layer.dispatch(grad, topk_idx)
        y = torch.zeros(desc.num_recv_rows, case.hidden, dtype=case.dtype, device=device).requires_grad_()
        out = autograd.combine(layer, y, desc)
        layer.context.read_back = None  # the host waits for no count
        if case.payload is None:
            out.backward(grad)
            seen = y.grad
        else:
            (seen,) = torch.autograd.grad(out, y, grad)
            want, seen = want.dequantize(), seen.dequantize()
        del layer.context.read_back
        assert torch.equal(seen[:rows], want[:rows]) and not seen[rows:].any()
        layer.check()


@pytest.mark.plain
@pytest.mark.parametrize(
    "nodes, ranks_per_node, options",
    [
        (1, 2, {}),
        (2, 1, {"static": True}),
        pytest.param(2, 2, {"static": True}, marks=pytest.mark.on_gpus),
        (1, 2, {"payload": "mxfp8", "alignment": 16}),
        (1, 2, {"local_combine": True}),
    ],
)
def test_the_backward_pass_of_combine_waits_for_no_count(run_ranks, nodes, ranks_per_node, options):
    """The gradient equals a dispatch of the output gradient bit for bit, and the host reads nothing back."""
    run_ranks(_check_backward_of_combine, nodes, ranks_per_node, Case("back", topk=4, experts=4, **options))


# --- the table of layers --------------------------------------------------------------------------------


def _check_leaving(rank: int, nodes: int, ranks_per_node: int) -> None:
    case = Case("leaving", dtype=torch.float32)
    work, device = workloads(case, 1, 0)[0], current_heap().device
    x, topk_idx = work.x.to(device), work.topk_idx.to(device)

    def forward(layer) -> torch.Tensor:
        recv_x, _, desc = autograd.dispatch(layer, x.clone().requires_grad_(), topk_idx)
        return autograd.combine(layer, recv_x, desc)

    with make_layer(case, rank, nodes, ranks_per_node) as layer, make_layer(case, rank, nodes, ranks_per_node) as other:
        _, _, desc = autograd.dispatch(other, x, topk_idx)
        with pytest.raises(StaleHandleError, match="another layer"):
            autograd.combine(layer, x, desc)
        scattered = replace(autograd.dispatch(layer, x, topk_idx)[2], full_scatter=True)
        own = replace(scattered, full_scatter=False)
        for wrong, weights, words in ((None, None, "y of combine"), (x, [1.0], "weights of combine")):
            with pytest.raises(InputError, match=f"{words} must be a tensor, got"):
                autograd.combine(layer, wrong, own, weights)
        with pytest.raises(InputError, match="full_scatter_indices"):
            autograd.combine(layer, x, scattered)
        out = forward(layer)
        autograd.leave(layer)
        autograd.leave(layer)
        with pytest.raises(StaleHandleError, match=r"autograd\.enter"):
            out.sum().backward()
        out = forward(layer)
    with pytest.raises(FinalizedError):
        out.sum().backward()
    key = autograd.enter(layer)
    del layer
    gc.collect()
    assert key not in operations.LAYERS


def _check_mistakes(rank: int, nodes: int, ranks_per_node: int) -> None:
    case = Case("mistakes", tokens=(3, 3), hidden=64, topk=2, experts=2)
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        device = layer.context.device
        work = workloads(case, layer.config.world_size, 0)[rank]
        x, idx, weights = work.x.to(device), work.topk_idx.to(device), work.topk_weights.to(device)
        for wrong in (
            (x.to("meta"), idx, weights),
            (x, idx.to("meta"), weights),
            (x, idx, weights.to("meta")),
            (x.to_sparse(), idx, weights),
        ):
            with pytest.raises(InputError if rank else PeerFailed, match=r"got meta|layout|sparse|rank 1 rejected"):
                autograd.dispatch(layer, *(wrong if rank else (x, idx, weights)))
        autograd.dispatch(layer, x, idx, weights)


@pytest.mark.plain
def test_mistakes_are_told_the_others(run_ranks):
    """Tensors that the op would not take are refused by the layer, which the other ranks hear of."""
    run_ranks(_check_mistakes, 1, 2)


@pytest.mark.plain
def test_layers_are_held_weakly_and_may_leave(run_ranks):
    """Backward raises if its layer left or was finalized; combine raises for another layer's descriptor."""
    run_ranks(_check_leaving, 1, 1)
