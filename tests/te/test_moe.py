"""The MoE block under autocast, on ranks: numbers, bits that repeat, and replays of a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist

import triton_ep.integrations.te as te
from tests.te import rule
from triton_ep import EPAll2AllLayer, autograd
from triton_ep.distributed import current_heap
from triton_ep.mx.grouped_mm import _to_mxfp8_then_scaled_grouped_mm as grouped_mm

pytestmark = [pytest.mark.plain, pytest.mark.filterwarnings("ignore:MXFP8 is emulated")]


@dataclass(frozen=True)
class _Case:
    """Sizes; `tokens` is per rank, repeated round the ranks."""

    tokens: tuple[int, ...] = (11, 6, 0, 9)
    hidden: int = 64
    ffn: int = 32
    topk: int = 2
    experts: int = 2
    payload: str | None = "mxfp8"
    static: bool = False


ON_GPUS = {"tokens": (128, 96, 128, 77), "hidden": 512, "ffn": 256, "topk": 8, "experts": 8}


def _randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(current_heap().device, torch.bfloat16)


def _block(case: _Case, rank: int, nodes: int, ranks_per_node: int) -> te.EPMoE:
    """The block of a rank; experts of all ranks differ, whichever rank has them."""
    world_size = nodes * ranks_per_node
    # Any rank may get all copies of all tokens.
    worst = sum(case.tokens[r % len(case.tokens)] for r in range(world_size)) * case.topk
    layer = EPAll2AllLayer(
        dist.group.WORLD,
        max(case.tokens),
        case.hidden,
        case.topk,
        rank,
        case.experts * world_size,
        ranks_per_node,
        world_size,
        payload=case.payload,
        capacity=worst if case.static else None,
        timeout_s=60.0,
    )
    block = te.EPMoE(layer, case.ffn)
    with torch.no_grad():
        for e in range(case.experts):
            expert = rank * case.experts + e
            getattr(block.fc1, f"weight{e}").copy_(_expert(case, expert, 0))
            getattr(block.fc2, f"weight{e}").copy_(_expert(case, expert, 1))
    return block


def _expert(case: _Case, expert: int, which: int) -> torch.Tensor:
    shape = (case.hidden, case.ffn) if which else (2 * case.ffn, case.hidden)
    return _randn(*shape, seed=1000 + 2 * expert + which) * shape[1] ** -0.5


def _inputs(case: _Case, rank: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = case.tokens[rank % len(case.tokens)]
    x = _randn(tokens, case.hidden, seed=10000 + 100 * seed + rank).requires_grad_()
    return x, _randn(tokens, case.hidden, seed=20000 + 100 * seed + rank)


def _step(block: te.EPMoE, x: torch.Tensor, dy: torch.Tensor, recipe: te.Recipe | None = None) -> list[torch.Tensor]:
    """y and all gradients."""
    with te.autocast(recipe=recipe):
        y = block(x)
    return [y.detach(), *torch.autograd.grad(y, (x, *block.parameters()), dy)]


def _dense(case: _Case, world_size: int, block: te.EPMoE) -> tuple[list[torch.Tensor], ...]:
    """y and the gradient of x of every rank, then those of the router (by rank) and of every expert; float64."""
    router = [block.router.detach().double().cpu().requires_grad_() for _ in range(world_size)]
    experts = [
        tuple(_expert(case, e, which).double().cpu().requires_grad_() for which in (0, 1))
        for e in range(case.experts * world_size)
    ]
    xs, ys = [], []
    for rank in range(world_size):
        x, dy = _inputs(case, rank)
        _, chosen = block.route(x.detach())  # the choice is by the block's own arithmetic: a flip would be no rounding
        x = x.detach().double().cpu().requires_grad_()
        scores = (x @ router[rank].t()).softmax(-1).gather(1, chosen.long().cpu())
        weights = scores / scores.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        for e, (up, down) in enumerate(experts):
            share = torch.where(chosen.cpu() == e, weights, 0.0).sum(1, keepdim=True)
            gate, value = (x @ up.t()).chunk(2, -1)
            y = y + share * ((torch.nn.functional.silu(gate) * value) @ down.t())
        (y * dy.double().cpu()).sum().backward()
        xs.append(x.grad)
        ys.append(y.detach())
    return ys, xs, [r.grad for r in router], [w.grad for pair in experts for w in pair]


def _check_numbers(rank: int, nodes: int, ranks_per_node: int, case: _Case) -> None:
    block = _block(case, rank, nodes, ranks_per_node)
    x, dy = _inputs(case, rank)
    y, dx, drouter, *dw = _step(block, x, dy)
    ys, xs, routers, experts = _dense(case, nodes * ranks_per_node, block)
    if x.shape[0]:
        # 31.5 dB per rounding to e4m3, six of them behind y, one or two more behind gradients.
        found = [rule.snr(a, b) for a, b in ((ys[rank], y), (xs[rank], dx), (routers[rank], drouter))]
        # The router's gradient is one number per token and copy: few to average over.
        assert all(db >= least for db, least in zip(found, (20, 19, 15), strict=True)), found
    first = 2 * rank * case.experts
    mine = experts[first : first + 2 * case.experts]
    seen = [dw[which * case.experts + e] for e in range(case.experts) for which in (0, 1)]
    for exact, got in zip(mine, seen, strict=True):
        assert bool(got.any()) == bool(exact.any()) and (not exact.any() or rule.snr(exact, got) >= 18)
    # High precision outside of a region: closer by far, and not the same bits.
    exact_y = block(x.detach()).detach()
    if case.payload is None and x.shape[0]:
        assert rule.snr(ys[rank], exact_y) > 40 and not torch.equal(exact_y, y)
    block.layer.finalize()


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 4), (2, 2), (1, 8)])
@pytest.mark.parametrize("payload", [None, "mxfp8"])
def test_moe_block_against_a_dense_computation(run_ranks, backend, nodes, ranks_per_node, payload):
    """Forward and backward of router, experts and input, with unequal and no tokens on ranks."""
    if backend == "host" and (nodes, ranks_per_node, payload) != (1, 4, "mxfp8"):
        pytest.skip("needs --backend nvshmem; on the CPU one case stands for all")
    case = _Case(payload=payload)
    if backend != "host":
        case = replace(case, **ON_GPUS)
    run_ranks(_check_numbers, nodes, ranks_per_node, case)


def _check_parity(rank: int, nodes: int, ranks_per_node: int, case: _Case) -> None:
    block = _block(case, rank, nodes, ranks_per_node)
    x, dy = _inputs(case, rank)
    with te.autocast():
        y = block(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    # The same by the core's own functions.
    leaf = x.detach().clone().requires_grad_()
    weights, experts = block.route(leaf)
    rows, row_weights, desc = autograd.dispatch(block.layer, leaf, experts, weights)
    w1, w2 = (torch.stack(list(fc.parameters())).transpose(1, 2) for fc in (block.fc1, block.fc2))
    gate, up = grouped_mm(rows, w1, desc.expert_offsets).chunk(2, -1)
    out = grouped_mm(torch.nn.functional.silu(gate) * up, w2, desc.expert_offsets)
    z = autograd.combine(block.layer, out, desc, row_weights)
    (dz,) = torch.autograd.grad(z, leaf, dy)
    assert torch.equal(y, z) and torch.equal(dx, dz)
    block.layer.finalize()


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 4)])
def test_the_block_is_the_core(run_ranks, backend, nodes, ranks_per_node):
    """Result and gradient of the input have the bits that dispatch, grouped products and combine give."""
    case = _Case() if backend == "host" else replace(_Case(), **ON_GPUS)
    run_ranks(_check_parity, nodes, ranks_per_node, case)


class _Captured:
    """A step over inputs at fixed addresses."""

    def __init__(self, block: te.EPMoE, case: _Case, rank: int) -> None:
        self.block, self.case, self.rank = block, case, rank
        self.x, self.dy = _inputs(case, rank)
        self.recipe = te.MXFP8BlockScaling(fp8_format=te.Format.HYBRID)

    def load(self, seed: int) -> None:
        x, dy = _inputs(self.case, self.rank, seed)
        with torch.no_grad():
            self.x.copy_(x)
            self.dy.copy_(dy)

    def __call__(self) -> None:
        self.results = _step(self.block, self.x, self.dy, self.recipe)

    def copies(self) -> list[torch.Tensor]:
        return [each.clone() for each in self.results]


def _capture(step: _Captured) -> Callable[[], None]:
    """A replay of the step in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()  # compiles what is missing, which must not happen under capture
    gc.collect()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads (the watchdog of a process group) may call CUDA meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    return graph.replay


def _check_repeats(rank: int, nodes: int, ranks_per_node: int, case: _Case) -> None:
    block = _block(case, rank, nodes, ranks_per_node)
    step = _Captured(block, case, rank)
    repeats = []
    for _ in range(5):
        step()
        repeats.append(step.copies())
    assert all(torch.equal(a, b) for other in repeats[1:] for a, b in zip(repeats[0], other, strict=True))
    if case.static:
        eager = []
        for seed in range(3):
            step.load(seed)
            step()
            eager.append(step.copies())
        assert all(map(torch.equal, eager[0], repeats[0]))
        assert not any(torch.equal(a, b) for a, b in zip(eager[0], eager[1], strict=True) if a.numel())
        replay = _capture(step)
        for seed in (2, 0, 1, 1):
            step.load(seed)
            replay()
            assert all(map(torch.equal, step.copies(), eager[seed]))
        block.layer.check()
    block.layer.finalize()


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 4), (1, 8)])
@pytest.mark.parametrize("static", [False, True], ids=["exact", "static"])
def test_moe_block_repeats_bit_for_bit(run_ranks, backend, nodes, ranks_per_node, static):
    """Five times the same bits, forward and backward; static: replays of a CUDA graph give those of eager steps."""
    if backend == "host" and (static or ranks_per_node != 4):
        pytest.skip("needs --backend nvshmem; on the CPU one case stands for all")
    case = _Case(static=static, experts=1, tokens=(5, 3, 0, 4))
    if backend != "host":
        case = replace(case, **ON_GPUS)
    run_ranks(_check_repeats, nodes, ranks_per_node, case)


def _check_compiled(rank: int, nodes: int, ranks_per_node: int, case: _Case) -> None:
    torch._dynamo.reset()
    block = _block(case, rank, nodes, ranks_per_node)
    on_cpu = current_heap().device.type == "cpu"
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager" if on_cpu else "inductor")
    x, dy = _inputs(case, rank)
    with torch._inductor.config.patch(compile_threads=1):  # ranks start no processes of their own
        for enabled in (True, False):
            results = []
            for function in (block, compiled):
                with te.autocast(enabled=enabled):
                    y = function(x)
                results.append([y.detach(), *torch.autograd.grad(y, (x, *block.parameters()), dy)])
            for eager, traced in zip(*results, strict=True):
                if on_cpu:
                    assert torch.equal(eager, traced)
                elif eager.any():
                    assert rule.snr(eager, traced) > 20
    block.layer.finalize()


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 1), (1, 4)])
@pytest.mark.parametrize("payload", [None, "mxfp8"])
def test_moe_block_compiles_into_one_graph(run_ranks, backend, nodes, ranks_per_node, payload):
    """fullgraph=True; the same graph serves inside and outside of autocast."""
    if backend == "host" and (ranks_per_node != 1 or payload is None):
        pytest.skip("needs --backend nvshmem; on the CPU one case stands for all, as tracing takes seconds")
    case = _Case(payload=payload, static=True, tokens=(11, 6, 7, 9))
    if backend != "host":
        case = replace(case, **ON_GPUS)
    run_ranks(_check_compiled, nodes, ranks_per_node, case)


def _check_outside(rank: int, nodes: int, ranks_per_node: int, case: _Case) -> None:
    for activation in ("swiglu", "gelu"):
        block = _block(case, rank, nodes, ranks_per_node)
        other = te.EPMoE(block.layer, case.ffn, activation=activation, bias=True)
        for seed, bias in enumerate(b for fc in (other.fc1, other.fc2) for b in fc._biases):
            bias.data.copy_(_randn(*bias.shape, seed=50 * rank + seed))
        x, dy = _inputs(case, rank)
        found = []
        for by_block in (True, False):
            if not by_block:
                other._runs_as_block = lambda rows: False  # type: ignore[method-assign]
            assert other._runs_as_block(x.detach()) == by_block
            with te.autocast(enabled=False):
                y = other(x)
            found.append([y.detach(), *torch.autograd.grad(y, (x, *other.parameters()), dy)])
        for mine, plain in zip(*found, strict=True):
            assert mine.shape == plain.shape and bool(mine.any()) == bool(plain.any())
            # Both round to bf16 at the same places; the activation's input only in one of them.
            assert not plain.any() or rule.snr(plain.double().cpu(), mine) > 40
        del other._runs_as_block
        with te.autocast():
            assert not other._runs_as_block(x.detach())
        block.layer.finalize()


def test_outside_of_autocast_experts_are_one_block(run_ranks):
    """The same parameters and biases, and the numbers of two grouped linear layers with the activation between them."""
    run_ranks(_check_outside, 1, 2, _Case(tokens=(16, 9), payload=None))
