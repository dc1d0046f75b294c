"""The layer in one graph: opcheck, torch.compile(fullgraph=True), and CUDA graphs of forward and backward.

On GPUs the compiler is inductor and a captured graph is replayed. On the CPU the same code runs through aot_eager,
and a replay is the call itself, which tests the code before it runs on a GPU.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.combinations import combinations
from tests.layer.cases import Case, make_layer, workloads
from triton_ep import MXTensor, autograd
from triton_ep.autograd import operations
from triton_ep.distributed import current_heap
from triton_ep.mx.grouped_mm import _to_mxfp8_then_scaled_grouped_mm as grouped_mm
from triton_ep.runtime.launch import INTERPRETING

BACKEND = "aot_eager" if INTERPRETING else "inductor"


# --- torch.library --------------------------------------------------------------------------------------


def _check_ops(rank: int, nodes: int, ranks_per_node: int, case: Case) -> None:
    # No drops, and a capacity of exactly the received rows: opcheck compares all rows, so static mode must write all.
    capacity = {"capacity": case.tokens[0] * case.topk} if case.static else {}
    with make_layer(case, rank, nodes, ranks_per_node, **capacity) as layer:
        key = autograd.enter(layer)
        work, device = workloads(case, 1, 0)[0], current_heap().device
        x, weights = (t.clone().to(device).requires_grad_() for t in (work.x, work.topk_weights))
        topk_idx = work.topk_idx.to(device)
        ops = torch.ops.triton_ep
        args = (x, None, topk_idx, weights, True, key)
        if case.payload is None:
            torch.library.opcheck(ops.dispatch.default, args)
            torch.library.opcheck(ops.dispatch.default, (x, None, topk_idx, None, False, key))
        else:
            # The op itself has a gradient only for plain rows; autograd.DispatchMX has the gradient of quantised rows.
            given = (x.detach(), None, topk_idx, weights.detach(), True, key)
            torch.library.opcheck(ops.dispatch.default, given)
        slots = ops.dispatch(*(t.detach() if isinstance(t, torch.Tensor) else t for t in args))[3]
        recv_x, recv_weights, desc = autograd.dispatch(layer, x.detach(), topk_idx, weights.detach())
        plain = recv_x.dequantize() if isinstance(recv_x, MXTensor) else recv_x
        tensors = operations.tensors_of(desc)
        for each in (recv_weights, None) if case.payload is None else (recv_weights,):
            leaf = None if each is None else each.clone().requires_grad_()
            torch.library.opcheck(
                ops.combine.default, (plain.clone().requires_grad_(), leaf, tensors, plain.shape[0], key)
            )
        torch.library.opcheck(ops.dispatch_backward.default, (plain, recv_weights, slots, tensors, True, key))
        grad = torch.ones_like(x).detach()
        torch.library.opcheck(ops.combine_backward.default, (grad, *tensors[:2], plain.shape[0], key))


@pytest.mark.plain
@pytest.mark.parametrize(
    "static, local_combine, payload",
    [(False, True, None), (True, False, None), (False, False, "mxfp8")],
)
def test_opcheck_finds_nothing(run_ranks, static, local_combine, payload):
    """Schemas, fakes and gradients of the ops are what torch.compile expects."""
    case = Case("ops", tokens=(6,), hidden=32, drop=0.0, static=static, local_combine=local_combine, payload=payload)
    run_ranks(_check_ops, 1, 1, replace(case, dtype=torch.bfloat16 if payload else torch.float32))


# --- torch.compile --------------------------------------------------------------------------------------


def _own_experts(case: Case, rank: int, num_experts: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """w1 and w2 [e, H, H] of this rank's experts, bf16, and leaves."""
    generator = torch.Generator().manual_seed(17)
    shape = (2, num_experts, case.hidden, case.hidden)
    every = (torch.randn(shape, generator=generator) * case.hidden**-0.5).to(case.dtype)
    mine = every[:, rank * case.experts :][:, : case.experts]
    w1, w2 = (w.clone().to(device).requires_grad_() for w in mine)
    return w1, w2


def _noise_db(value: torch.Tensor, exact: torch.Tensor) -> float:
    exact = exact.detach().double()
    return float(10 * torch.log10(exact.square().sum() / (value.detach().double() - exact).square().sum()))


def _check_compiled(rank: int, nodes: int, ranks_per_node: int, cases: tuple[Case, ...]) -> None:
    torch._dynamo.reset()
    held, case = [make_layer(each, rank, nodes, ranks_per_node) for each in cases], cases[0]
    cfg, device = held[0].config, current_heap().device
    for layer in held:
        autograd.enter(layer)
    w1, w2 = _own_experts(case, rank, cfg.num_experts, device)
    generator = torch.Generator().manual_seed(3)
    # Logits of about 1: near 0 or 1 the gradient of a softmax is a difference of almost equal numbers.
    router = torch.randn(case.hidden, cfg.num_experts, generator=generator) * case.hidden**-0.5
    router = router.to(device, case.dtype).requires_grad_()

    def loop(rows: torch.Tensor, offsets: torch.Tensor, *ws: torch.Tensor) -> torch.Tensor:
        row = torch.arange(rows.shape[0], dtype=torch.int32, device=device)
        expert = (row.unsqueeze(1) >= offsets[1:]).sum(1)  # inductor of torch < 2.13 gets searchsorted of a slice wrong
        rows = torch.where((row < offsets[-1]).unsqueeze(1), rows, 0.0)
        ys = [functools.reduce(torch.matmul, (w[e] for w in ws), rows) for e in range(case.experts)]
        return sum(torch.where((expert == e).unsqueeze(1), y, 0.0) for e, y in enumerate(ys))

    def products(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        up = grouped_mm(rows, w1.transpose(1, 2), offsets)
        if INTERPRETING:  # one such product shows what a second one would, and takes seconds to trace
            return loop(torch.nn.functional.silu(up), offsets, w2)
        return grouped_mm(torch.nn.functional.silu(up), w2.transpose(1, 2), offsets)

    def experts(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return loop(rows, offsets, w1, w2) if case.payload is None else products(rows, offsets)

    def moe(x: torch.Tensor) -> torch.Tensor:
        for layer in held:
            # The choice of experts must not depend on fusion: a flipped expert is more than a rounding error.
            weights, topk_idx = (x.detach() @ router).float().softmax(-1).topk(case.topk)
            recv_x, recv_weights, desc = autograd.dispatch(layer, x, topk_idx, weights.contiguous())
            x = x + autograd.combine(layer, experts(recv_x, desc.expert_offsets), desc, recv_weights)
        return x

    compiled = torch.compile(moe, fullgraph=True, backend=BACKEND)
    with torch._inductor.config.patch(compile_threads=1):  # ranks must not start processes
        # MXFP8 products are long to trace, and the sizes of the other graphs change in the same way.
        counts = (7, 4, 12) if BACKEND == "inductor" else (7, 4) if case.payload is None else (7,)
        for tokens in counts:
            generator = torch.Generator().manual_seed(tokens + rank)
            results = []
            x = torch.randn(tokens - rank, case.hidden, generator=generator).to(device, case.dtype)
            for function in (moe, compiled):
                leaf = x.clone().requires_grad_()
                if INTERPRETING:  # trace once for all numbers of tokens
                    torch._dynamo.mark_dynamic(leaf, 0)
                out = function(leaf)
                grads = torch.autograd.grad(out.float().square().sum(), (leaf, router, w1, w2))
                results.append((out, *grads))
            for name, eager, traced in zip(("out", "dx", "drouter", "dw1", "dw2"), *results, strict=True):
                if BACKEND == "aot_eager":
                    torch.testing.assert_close(traced, eager, rtol=1e-5, atol=1e-5)
                else:
                    # Fused operations round less often, so a value may be quantised to a neighbouring number.
                    noise = _noise_db(traced, eager)
                    assert noise > (80 if case.payload is None else 20), f"{name}: {noise:.0f} dB"
    for layer in held:
        layer.finalize()


COMPILED = Case("compiled", tokens=(12, 11), topk=2, experts=2, hidden=32, dtype=torch.float32, drop=0.0)
COMPILED_MX = replace(COMPILED, dtype=torch.bfloat16, payload="mxfp8")


@pytest.mark.plain
@pytest.mark.parametrize(
    "nodes, ranks_per_node, cases",
    [
        (1, 1, (replace(COMPILED, static=True), COMPILED)),
        (1, 1, (COMPILED_MX,)),
        # Tracing takes seconds of a CPU on each rank, and a graph does not know how many there are.
        pytest.param(1, 1, (replace(COMPILED, static=True),) * 2, marks=pytest.mark.on_gpus),
        pytest.param(1, 1, (COMPILED,), marks=pytest.mark.on_gpus),
        pytest.param(1, 1, (replace(COMPILED_MX, static=True),), marks=pytest.mark.on_gpus),
        pytest.param(1, 2, (COMPILED,), marks=pytest.mark.on_gpus),
        pytest.param(1, 2, (COMPILED_MX,), marks=pytest.mark.on_gpus),
        pytest.param(2, 1, (replace(COMPILED, local_combine=True),) * 2, marks=pytest.mark.on_gpus),
        pytest.param(2, 1, (replace(COMPILED_MX, static=True, local_combine=True),), marks=pytest.mark.on_gpus),
    ],
)
def test_a_layer_compiles_into_one_graph(run_ranks, nodes, ranks_per_node, cases):
    """fullgraph=True, forward and backward, one layer after another; another number of tokens may reuse the graph or
    compile a new one."""
    run_ranks(_check_compiled, nodes, ranks_per_node, cases)


def _check_between_graphs(rank: int, nodes: int, ranks_per_node: int, case: Case) -> None:
    torch._dynamo.reset()
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        autograd.enter(layer)
        device = current_heap().device
        scale = torch.full((), 0.5, dtype=case.dtype, device=device, requires_grad=True)

        def step(x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            recv_x, recv_weights, desc = autograd.dispatch(layer, x * scale, topk_idx, weights)
            in_use = torch.arange(recv_x.shape[0], device=device) < desc.expert_offsets[-1]
            rows = torch.where(in_use.unsqueeze(1), recv_x, 0.0)
            return autograd.combine(layer, torch.nn.functional.silu(rows), desc, recv_weights) + x

        compiled = torch.compile(step, mode="reduce-overhead")
        for seed in range(5):
            work = workloads(case, layer.config.world_size, seed)[rank]
            x, topk_idx, weights = (t.to(device) for t in (work.x, work.topk_idx, work.topk_weights))
            results = []
            for function in (step, compiled):
                torch.compiler.cudagraph_mark_step_begin()
                leaves = x.clone().requires_grad_(), weights.clone().requires_grad_(), scale
                with torch._inductor.config.patch(compile_threads=1):
                    out = function(leaves[0], topk_idx, leaves[1])
                    grads = torch.autograd.grad(out.float().square().sum(), leaves)
                results.append([each.clone() for each in (out.detach(), *grads)])
            for name, eager, traced in zip(("out", "dx", "dweights", "dscale"), *results, strict=True):
                assert _noise_db(traced, eager) > 80, name
        layer.check()


@pytest.mark.plain
@pytest.mark.on_gpus
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("static, local_combine", [(False, False), (True, False), (True, True)])
def test_a_layer_runs_between_the_graphs_of_torch_compile(run_ranks, nodes, ranks_per_node, static, local_combine):
    """mode="reduce-overhead" captures what lies around dispatch and combine, forward and backward."""
    case = replace(COMPILED, static=static, local_combine=local_combine)
    run_ranks(_check_between_graphs, nodes, ranks_per_node, case)


# --- CUDA graphs ----------------------------------------------------------------------------------------


class _Step:
    """A static MoE layer's forward and backward pass over inputs at fixed addresses."""

    def __init__(self, rank: int, nodes: int, ranks_per_node: int, case: Case) -> None:
        self.rank, self.case, self.device = rank, case, current_heap().device
        self.layer = make_layer(case, rank, nodes, ranks_per_node)
        tokens, num_experts = case.tokens[0], self.layer.config.num_experts
        self.w1, self.w2 = _own_experts(case, rank, num_experts, self.device)
        self.x = torch.empty(tokens, case.hidden, dtype=case.dtype, device=self.device).requires_grad_()
        self.grad = torch.empty(tokens, case.hidden, dtype=case.dtype, device=self.device)
        self.topk_idx = torch.empty(tokens, case.topk, dtype=torch.int32, device=self.device)
        self.weights = torch.empty(tokens, case.topk, device=self.device).requires_grad_()

    def load(self, seed: int) -> None:
        """Other inputs at the same addresses."""
        work = workloads(self.case, self.layer.config.world_size, seed)[self.rank]
        generator = torch.Generator().manual_seed(1000 * seed + self.rank)
        with torch.no_grad():
            self.x.copy_(torch.randn(self.x.shape, generator=generator))
            self.grad.copy_(torch.randn(self.grad.shape, generator=generator))
            self.topk_idx.copy_(work.topk_idx)
            self.weights.copy_(work.topk_weights)

    def __call__(self) -> None:
        recv_x, recv_weights, desc = autograd.dispatch(self.layer, self.x, self.topk_idx, self.weights)
        up = grouped_mm(recv_x, self.w1.transpose(1, 2), desc.expert_offsets)
        y = grouped_mm(torch.nn.functional.silu(up), self.w2.transpose(1, 2), desc.expert_offsets)
        out = autograd.combine(self.layer, y, desc, recv_weights if self.case.combine_weights else None)
        leaves = (self.x, self.w1, self.w2, *((self.weights,) if self.case.combine_weights else ()))
        grads = torch.autograd.grad(out, leaves, self.grad)
        # Drop the autograd graph, whose nodes would tie a later capture to the stream of this step.
        self.results = (out.detach(), *grads)

    def copies(self) -> list[torch.Tensor]:
        """Copies of the results, which the next replay does not overwrite."""
        return [each.clone() for each in self.results]


def _capture(step: _Step) -> Callable[[], None]:
    """A replay of the step in a CUDA graph; on the CPU the step itself."""
    if step.device.type == "cpu":
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()  # compile missing kernels, which is not allowed during capture
    gc.collect()  # free autograd graphs of earlier steps that a reference cycle holds
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads (the watchdog of a process group) may call CUDA meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    return graph.replay


def _check_replays(rank: int, nodes: int, ranks_per_node: int, case: Case) -> None:
    step = _Step(rank, nodes, ranks_per_node, case)
    with step.layer:
        eager, seeds = [], 2 if step.device.type == "cpu" else 4
        for seed in range(seeds):
            step.load(seed)
            step()
            eager.append(step.copies())
        assert not any(torch.equal(a, b) for a, b in zip(eager[0], eager[1], strict=True))
        step.load(0)
        replay = _capture(step)
        captured = step.results
        for seed in reversed(range(seeds)):
            step.load(seed)
            replay()
            for each, want in zip(step.copies(), eager[seed], strict=True):
                assert torch.equal(each, want)
        step.layer.check()
        if step.device.type == "cpu":
            return
        # A step without the graph works after the replays, and a replay after that step.
        step()
        assert all(map(torch.equal, step.copies(), eager[0]))
        step.load(1)
        step.results = captured
        replay()
        assert all(map(torch.equal, step.copies(), eager[1]))
        step.layer.check()


def _check_no_synchronisation(rank: int, nodes: int, ranks_per_node: int, case: Case) -> None:
    step = _Step(rank, nodes, ranks_per_node, case)
    with step.layer:
        for seed in range(3):
            step.load(seed)
            if seed == 0 or step.device.type == "cpu":
                step()  # the first one compiles
                continue
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        step.layer.check()


STATIC = Case("replayed", tokens=(12,), topk=2, experts=2, hidden=32, static=True, alignment=4)
STATIC_CASES = {
    "bf16": replace(STATIC, combine_weights=True),
    "mxfp8": replace(STATIC, payload="mxfp8"),
    "mxfp8_weighted": replace(STATIC, payload="mxfp8", combine_weights=True, local_combine=True),
}
ON_GPUS = {"tokens": (128,), "topk": 8, "experts": 8, "hidden": 1024}


def _replayed_on_cpu(check: str, name: str, nodes: int, ranks_per_node: int) -> bool:
    """CPU ranks have no graphs: one case runs the step itself."""
    return (check, name, nodes, ranks_per_node) == ("replays", "mxfp8_weighted", 1, 1)


CHECKS = {"replays": _check_replays, "no_synchronisation": _check_no_synchronisation}


@pytest.mark.plain
@pytest.mark.parametrize(
    "check, name, nodes, ranks_per_node",
    combinations(CHECKS, STATIC_CASES, [(1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (1, 8)], on_cpu=_replayed_on_cpu),
)
def test_a_static_step_needs_no_host(run_ranks, backend, check, name, nodes, ranks_per_node):
    """Forward and backward, captured once and replayed with other inputs, equal the eager step bit for bit."""
    case = STATIC_CASES[name]
    run_ranks(CHECKS[check], nodes, ranks_per_node, replace(case, **ON_GPUS) if backend != "host" else case)
