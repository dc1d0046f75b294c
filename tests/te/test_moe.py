"""The MoE block under autocast, on ranks: numerics, bit-exact repetition, and replays of a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import triton_ep.integrations.te as te
from tests.combinations import combinations
from tests.te import rule
from triton_ep import EPAll2AllLayer, autograd
from triton_ep.distributed import current_heap
from triton_ep.errors import InputError
from triton_ep.mx.grouped_mm import _to_mxfp8_then_scaled_grouped_mm as grouped_mm
from triton_ep.nn.expert_block import ExpertSettings, expert_block
from triton_ep.nn.prepared import PreparedWeights

pytestmark = [pytest.mark.plain, pytest.mark.filterwarnings("ignore:MXFP8 is emulated")]


@dataclass(frozen=True)
class _Case:
    """Sizes; `tokens` is per rank, repeated cyclically over the ranks."""

    tokens: tuple[int, ...] = (11, 6, 0, 9)
    hidden: int = 64
    ffn: int = 32
    topk: int = 2
    experts: int = 2
    payload: str | None = "mxfp8"
    static: bool = False
    fp8_format: te.Format = te.Format.HYBRID


ON_GPUS = {"tokens": (128, 96, 128, 77), "hidden": 512, "ffn": 256, "topk": 8, "experts": 8}


def _randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(current_heap().device, torch.bfloat16)


def _block(case: _Case, rank: int, nodes: int, ranks_per_node: int) -> te.EPMoE:
    """The block of a rank; every expert is different and does not depend on the rank that owns it."""
    world_size = nodes * ranks_per_node
    # Any rank may receive all assignments of all tokens.
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
    """y and the gradient of x of every rank, then gradients of the router (by rank) and of every expert; float64."""
    router = [block.router.detach().double().cpu().requires_grad_() for _ in range(world_size)]
    experts = [
        tuple(_expert(case, e, which).double().cpu().requires_grad_() for which in (0, 1))
        for e in range(case.experts * world_size)
    ]
    xs, ys = [], []
    for rank in range(world_size):
        x, dy = _inputs(case, rank)
        _, chosen = block.route(x.detach())  # the block's own choice: a flip is no rounding error
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
        # 31.5 dB per rounding to e4m3: six roundings in y, one or two more in gradients.
        found = [rule.snr(a, b) for a, b in ((ys[rank], y), (xs[rank], dx), (routers[rank], drouter))]
        # The router's gradient has one number per assignment: few to average over.
        assert all(db >= least for db, least in zip(found, (20, 19, 15), strict=True)), found
    first = 2 * rank * case.experts
    mine = experts[first : first + 2 * case.experts]
    seen = [dw[which * case.experts + e] for e in range(case.experts) for which in (0, 1)]
    for exact, got in zip(mine, seen, strict=True):
        assert bool(got.any()) == bool(exact.any()) and (not exact.any() or rule.snr(exact, got) >= 18)
    # Outside a region in high precision: far closer, and not the same bits.
    exact_y = block(x.detach()).detach()
    if case.payload is None and x.shape[0]:
        assert rule.snr(ys[rank], exact_y) > 40 and not torch.equal(exact_y, y)
    block.layer.finalize()


@pytest.mark.parametrize(
    "payload, nodes, ranks_per_node",
    combinations(
        [None, "mxfp8"],
        [(1, 2), (1, 4), (2, 2), (1, 8)],
        on_cpu=lambda *parameters: parameters == ("mxfp8", 1, 2),  # one case stands for all
    ),
)
def test_moe_block_against_a_dense_computation(run_ranks, backend, payload, nodes, ranks_per_node):
    """Forward and backward of router, experts and input, with unequal token counts and ranks without tokens."""
    case = replace(_Case(payload=payload), **(ON_GPUS if backend != "host" else {"tokens": (17, 0)}))
    run_ranks(_check_numbers, nodes, ranks_per_node, case)


def _by_linears(block: te.EPMoE) -> te.EPMoE:
    """The block with two grouped linear layers, as for recipes that the expert block does not run."""
    block._code_of_block = lambda rows: None  # type: ignore[method-assign]
    return block


def _products(block: te.EPMoE, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    w1, w2 = (torch.stack(list(fc.parameters())).transpose(1, 2) for fc in (block.fc1, block.fc2))
    gate, up = grouped_mm(rows, w1, offsets).chunk(2, -1)
    return grouped_mm(torch.nn.functional.silu(gate) * up, w2, offsets)


def _experts(block: te.EPMoE, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    w1, w2 = (torch.stack(list(fc.parameters())) for fc in (block.fc1, block.fc2))
    prepared, settings = PreparedWeights("none"), ExpertSettings(precision="default")
    return expert_block(rows, None, w1, w2, None, None, prepared, offsets, None, settings)


def _check_parity(rank: int, nodes: int, ranks_per_node: int, case: _Case) -> None:
    for by_linears, core in ((False, _experts), (True, _products)):
        block = _block(case, rank, nodes, ranks_per_node)
        x, dy = _inputs(case, rank)
        with te.autocast():
            y = (_by_linears(block) if by_linears else block)(x)
        (dx,) = torch.autograd.grad(y, x, dy)
        # The same by the core's own functions.
        leaf = x.detach().clone().requires_grad_()
        weights, experts = block.route(leaf)
        rows, row_weights, desc = autograd.dispatch(block.layer, leaf, experts, weights)
        z = autograd.combine(block.layer, core(block, rows, desc.expert_offsets), desc, row_weights)
        (dz,) = torch.autograd.grad(z, leaf, dy)
        assert torch.equal(y, z) and torch.equal(dx, dz)
        block.layer.finalize()


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), pytest.param(1, 4, marks=pytest.mark.on_gpus)])
def test_the_block_is_the_core(run_ranks, backend, nodes, ranks_per_node):
    """Result and gradient of the input are bit-identical to dispatch, experts and combine: with the expert block, and
    for other recipes with grouped products."""
    case = _Case() if backend == "host" else replace(_Case(), **ON_GPUS)
    run_ranks(_check_parity, nodes, ranks_per_node, case)


class _Captured:
    """A step over inputs at fixed addresses."""

    def __init__(self, block: te.EPMoE, case: _Case, rank: int) -> None:
        self.block, self.case, self.rank = block, case, rank
        self.x, self.dy = _inputs(case, rank)
        self.recipe = te.MXFP8BlockScaling(fp8_format=case.fp8_format)

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
            step()  # compiles missing kernels, which must not happen during capture
    gc.collect()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads (the watchdog of a process group) may call CUDA during the capture.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    return graph.replay


def _check_repeats(rank: int, nodes: int, ranks_per_node: int, case: _Case) -> None:
    block = _block(case, rank, nodes, ranks_per_node)
    step = _Captured(block, case, rank)
    repeats = []
    for _ in range(2 if current_heap().device.type == "cpu" else 5):
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
        with torch.no_grad():
            block.fc1.weight0.mul_(0.5)
        step.load(0)
        replay()  # quantises the current weights
        seen = step.copies()
        step()
        assert all(map(torch.equal, seen, step.copies())) and not torch.equal(seen[0], eager[0][0])
        block.layer.check()
    block.layer.finalize()


@pytest.mark.parametrize(
    "nodes, ranks_per_node", [(1, 2), *(pytest.param(1, n, marks=pytest.mark.on_gpus) for n in (4, 8))]
)
@pytest.mark.parametrize("static", [False, pytest.param(True, marks=pytest.mark.on_gpus)], ids=["exact", "static"])
@pytest.mark.parametrize("fp8_format", [te.Format.HYBRID, te.Format.E4M3], ids=["hybrid", "e4m3"])
def test_moe_block_repeats_bit_for_bit(run_ranks, backend, nodes, ranks_per_node, static, fp8_format):
    """The same bits every time, forward and backward; static mode: graph replays are bit-identical to eager steps."""
    case = _Case(static=static, experts=1, tokens=(5, 3, 0, 4), fp8_format=fp8_format)
    if backend != "host":
        case = replace(case, **ON_GPUS)
    run_ranks(_check_repeats, nodes, ranks_per_node, case)


def _check_compiled(rank: int, nodes: int, ranks_per_node: int, case: _Case) -> None:
    torch._dynamo.reset()
    block = _by_linears(_block(case, rank, nodes, ranks_per_node))  # as in a compiled graph
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


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 1), pytest.param(1, 4, marks=pytest.mark.on_gpus)])
@pytest.mark.parametrize("payload", [pytest.param(None, marks=pytest.mark.on_gpus), "mxfp8"])  # tracing takes seconds
def test_moe_block_compiles_into_one_graph(run_ranks, backend, nodes, ranks_per_node, payload):
    """fullgraph=True; the same graph serves inside and outside autocast."""
    case = _Case(payload=payload, static=True, tokens=(11, 6, 7, 9))
    if backend != "host":
        case = replace(case, **ON_GPUS)
    run_ranks(_check_compiled, nodes, ranks_per_node, case)


def _with_biases(rank: int, case: _Case, layer: EPAll2AllLayer, activation: str) -> te.EPMoE:
    block = te.EPMoE(layer, case.ffn, activation=activation, bias=True)
    for seed, bias in enumerate(b for fc in (block.fc1, block.fc2) for b in fc._biases):
        bias.data.copy_(_randn(*bias.shape, seed=50 * rank + seed))
    return block


def _check_experts(rank: int, nodes: int, ranks_per_node: int, case: _Case) -> None:
    layer = _block(case, rank, nodes, ranks_per_node).layer
    for activation in ("swiglu", "gelu") if case.payload is None else ("swiglu",):
        block = _with_biases(rank, case, layer, activation)
        x, dy = _inputs(case, rank)
        for enabled in (False, True):
            found = []
            for own in (True, False):
                if not own:
                    _by_linears(block)
                with te.autocast(enabled=enabled):
                    assert (block._code_of_block(x.detach()) is not None) == own
                    y = block(x)
                found.append([y.detach(), *torch.autograd.grad(y, (x, *block.parameters()), dy)])
            del block._code_of_block
            for mine, plain in zip(*found, strict=True):
                assert mine.shape == plain.shape and bool(mine.any()) == bool(plain.any())
                # Without quantising, both round to bf16 at the same places, except the activation's input.
                # In MXFP8, gradients of weights use other blocks, so one rounding of each operand differs.
                assert not plain.any() or rule.snr(plain.double().cpu(), mine) > (22 if enabled else 40)
    layer.finalize()


@pytest.mark.parametrize("payload", [None, "mxfp8"])
def test_experts_are_one_block(run_ranks, payload):
    """Equals two grouped linear layers with the activation between them, for the same parameters and biases."""
    run_ranks(_check_experts, 1, 2, _Case(tokens=(16, 9), payload=payload))


def _check_recipes(rank: int, nodes: int, ranks_per_node: int, case: _Case) -> None:
    block = _block(case, rank, nodes, ranks_per_node)
    rows = _inputs(case, rank)[0].detach()

    def is_block(**recipe: object) -> bool:
        with te.autocast(recipe=te.MXFP8BlockScaling(**recipe)):
            return block._code_of_block(rows) is not None

    assert is_block() and is_block(margin=1)
    assert not is_block(fp8_format=te.Format.HYBRID)
    assert not is_block(backward_override="dequantized") and not is_block(backward_override="high_precision")
    assert not is_block(enable_2d_quantization=True)
    with torch.autocast(rows.device.type, dtype=torch.bfloat16):
        assert not is_block()
    with te.quantized_model_init(recipe=te.MXFP8BlockScaling()):
        stored = te.EPMoE(block.layer, case.ffn)
    assert stored._code_of_block(rows) is None
    odd = te.EPMoE(block.layer, 20)
    assert odd._code_of_block(rows) is not None  # in bf16
    with te.autocast(), pytest.raises(InputError, match="multiples of 32"):
        odd(rows)
    block.layer.finalize()


def test_recipes_that_the_expert_block_does_not_run_have_grouped_linear_layers(run_ranks):
    """E5M2 gradients, overrides of the backward pass, tiles, torch.autocast, weights in MXFP8, sizes off 32."""
    run_ranks(_check_recipes, 1, 1, _Case())


def _check_checkpoint(rank: int, nodes: int, ranks_per_node: int, case: _Case) -> None:
    block = _block(case, rank, nodes, ranks_per_node)
    x, dy = _inputs(case, rank)
    found = []
    for call in (block, partial(te.checkpoint, block), partial(checkpoint, block, use_reentrant=False)):
        with te.autocast():
            y = call(x)
        # Recomputed outside the region.
        found.append([y.detach(), *torch.autograd.grad(y, (x, *block.parameters()), dy)])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    assert not torch.equal(block(x.detach()), found[0][0])
    block.layer.finalize()


def test_recomputation_takes_the_recipe_of_its_forward_pass(run_ranks):
    """Bit-identical with and without a checkpoint, TransformerEngine's or torch's."""
    run_ranks(_check_checkpoint, 1, 2, _Case(tokens=(8, 5)))


def _check_copies(rank: int, nodes: int, ranks_per_node: int, case: _Case) -> None:
    found = []
    for prepared in ("both", "none"):
        block = te.EPMoE(_block(case, rank, nodes, ranks_per_node).layer, case.ffn, prepared=prepared)
        for seed, weight in enumerate(w for fc in (block.fc1, block.fc2) for w in fc._weights):
            weight.data.copy_(_randn(*weight.shape, seed=60 * rank + seed) * weight.shape[1] ** -0.5)
        optimizer = torch.optim.SGD(block.parameters(), lr=0.5)
        x, dy = _inputs(case, rank)
        ys = []
        for step in range(3):
            with te.autocast():
                y = block(x)
            y.backward(dy)
            ys.append(y.detach())
            if step % 2:
                with torch.no_grad():
                    block.fc1.weight1.mul_(2.0)  # not the first one
            else:
                optimizer.step()
            optimizer.zero_grad()
        found.append(torch.stack(ys))
        block.layer.finalize()
    assert torch.equal(*found)
    assert all(not torch.equal(found[0][i], found[0][i + 1]) for i in range(2))

    # FSDP over one rank gathers into the same memory without moving version counters.
    mesh = init_device_mesh(current_heap().device.type, (nodes * ranks_per_node, 1), mesh_dim_names=("experts", "same"))
    loaded = []
    for prepared in ("both", "none"):
        torch.manual_seed(rank)
        block = te.EPMoE(_block(case, rank, nodes, ranks_per_node).layer, case.ffn, prepared=prepared)
        fully_shard(block, mesh=mesh["same"], ignored_params={block.router}, reshard_after_forward=True)
        x = _inputs(case, rank)[0].detach()
        with torch.no_grad(), te.autocast():
            before = block(x)
            block.load_state_dict({name: value * 2 for name, value in block.state_dict().items()})
            loaded.append(block(x))
        assert not torch.equal(before, loaded[-1])
        block.layer.finalize()
    assert torch.equal(*loaded)


def test_kept_copies_of_weights_follow_the_weights(run_ranks):
    """After optimizer steps, a manual change and a load under FSDP, kept copies equal copies built in every pass."""
    run_ranks(_check_copies, 1, 2, _Case(tokens=(16, 16)))
