"""MoE modules as one op: torch.compile(fullgraph=True), opcheck, selective activation checkpoints, main_grad.

On GPUs the compiler is inductor, on the CPU aot_eager.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.nn import dense
from triton_ep.distributed import current_heap
from triton_ep.errors import FinalizedError, InputError, PeerFailed, StaleHandleError
from triton_ep.mx.tensor import MXTensor
from triton_ep.nn import MoE, finalize_exchanges
from triton_ep.runtime.launch import INTERPRETING

pytestmark = pytest.mark.plain
BACKEND = "aot_eager" if INTERPRETING else "inductor"
RANKS = 1 if INTERPRETING else 2
"""The number of ranks affects neither the compiler, which takes seconds in each rank, nor checkpoints: 1 on the CPU."""
HIDDEN, FFN, TOKENS = 64, 96, 6
SIZES: dict[str, Any] = {"num_experts": 2, "topk": 2, "max_tokens": 8, "timeout_s": 60.0}


class _Model(torch.nn.Module):
    """A dense layer, then layers of experts, each with a residual connection."""

    def __init__(self, seed: int, *layers: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(HIDDEN, HIDDEN, device=current_heap().device, dtype=torch.bfloat16)
        self.layers = torch.nn.ModuleList(MoE(HIDDEN, FFN, **{**SIZES, **options}) for options in layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H]."""
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


def _x(rank: int, tokens: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(tokens - rank, HIDDEN, generator=generator).bfloat16().to(current_heap().device)


def _step(model: Any, parameters: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """The result, and the gradients of x and of all parameters."""
    leaf = x.clone().requires_grad_()
    if INTERPRETING:  # compile once for all numbers of tokens
        torch._dynamo.mark_dynamic(leaf, 0)
    out = model(leaf)
    return [out.detach(), *torch.autograd.grad(out.float().square().mean(), [leaf, *parameters])]


def _same(seen: list[torch.Tensor], exact: list[torch.Tensor]) -> None:
    size = max(each.float().norm() for each in exact)
    for at, (one, other) in enumerate(zip(seen, exact, strict=True)):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if BACKEND == "aot_eager":
            assert torch.equal(one, other)
        elif other.float().norm() < 1e-6 * size:
            # Zero but for rounding: the gradient of a router whose one weight per token is normalised to 1.
            assert one.float().norm() < 1e-6 * size
        else:
            # Fused operations round less often, so a value may be quantised to its neighbour.
            assert dense.decibel(one, other) > 20, (at, dense.decibel(one, other), float(other.float().norm()))


def _compiled(rank: int, nodes: int, ranks_per_node: int, layers: tuple[dict[str, Any], ...]) -> None:
    torch._dynamo.reset()
    model = _Model(1, *layers)
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch._inductor.config.patch(compile_threads=1):  # ranks start no processes of their own
        for step, tokens in enumerate((TOKENS, 4)):
            x = _x(rank, tokens, step)
            wanted = _step(model, model.parameters(), x)
            _same(_step(compiled, model.parameters(), x), wanted)
            for parameter, grad in zip(model.parameters(), wanted[2:], strict=True):
                parameter.grad = grad
            optimizer.step()  # quantised copies of the weights, built inside the op, must follow
    if not INTERPRETING:  # compiles once more; on the CPU a layer without gradients does so in test_fsdp.py
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x), rtol=0.02, atol=0.02)
    finalize_exchanges()
    with pytest.raises((FinalizedError, StaleHandleError)):
        compiled(x.clone().requires_grad_())  # in the graph of the last step


def test_a_model_compiles_into_one_graph(run_ranks):
    """fullgraph=True, static and exact: results and gradients of eager, with other weights and numbers of tokens."""
    static = {"capacity": 2.0, "bias": True, "params_dtype": torch.float32}
    of_one_expert = {"separate": True, "num_experts": RANKS, "topk": 1}  # gradients of its halves lie side by side
    run_ranks(_compiled, 1, RANKS, (static, {"payload": "mxfp8", "separate": True}, of_one_expert))


def _ops(rank: int, nodes: int, ranks_per_node: int) -> None:
    device = current_heap().device
    for options in ({"capacity": 2.0, "payload": "mxfp8"}, {"capacity": 24, "bias": True}):
        model = MoE(HIDDEN, FFN, **SIZES, **options)
        x, (ids, weights) = _x(rank, TOKENS), model.router(_x(rank, TOKENS))
        with torch.no_grad():
            model(x)  # builds the quantised copies of the weights
        params = [parameter.detach().requires_grad_() for parameter in model.experts.local_parameters()]
        keys = (model.exchange.context.layer_id, model.experts.key)
        given = (x.requires_grad_(), ids, weights.detach().requires_grad_(), params)
        utils = ["test_faketensor", "test_autograd_registration"]
        if "payload" not in options:
            utils.append("test_schema")  # torch cannot compare tensors of e4m3
        torch.library.opcheck(
            torch.ops.triton_ep.moe.default, (*given, True, [True] * len(params), *keys), test_utils=utils
        )
        torch.library.opcheck(
            torch.ops.triton_ep.moe.default, (*given, False, [True] * len(params), *keys), test_utils=utils
        )
        with torch.no_grad():
            kept = torch.ops.triton_ep.moe(*given, True, [True] * len(params), *keys)[1:]
        needs = [True] * (2 + len(params))
        grad = torch.randn(x.shape, device=device).bfloat16()
        torch.library.opcheck(
            torch.ops.triton_ep.moe_backward.default, (grad, list(kept), params, needs, *keys), test_utils=utils
        )
    finalize_exchanges()


def test_opcheck_finds_nothing(run_ranks):
    """Schemas, fakes and gradients of the op are consistent with the op."""
    run_ranks(_ops, 1, 1)


def _selective(rank: int, nodes: int, ranks_per_node: int) -> None:
    block = torch.ops.triton_ep.moe.default
    model = _Model(2, {"payload": "mxfp8"})
    x, calls = _x(rank, TOKENS), []
    for layer in model.layers:
        for name in ("dispatch", "dispatch_ahead"):  # the latter without changed weights
            setattr(layer.exchange, name, _counting(getattr(layer.exchange, name), calls))

    def policy(saved: Any, _: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    wanted = _step(model, model.parameters(), x)
    assert len(calls) == 1
    for saved, dispatches in (((), 2), ((block,), 1)):
        calls.clear()
        contexts = partial(create_selective_checkpoint_contexts, partial(policy, saved))
        run = partial(checkpoint, model, use_reentrant=False, context_fn=contexts)
        assert all(map(torch.equal, _step(run, model.parameters(), x), wanted))
        assert len(calls) == dispatches, saved
    calls.clear()
    run = partial(checkpoint, model, use_reentrant=False)
    assert all(map(torch.equal, _step(run, model.parameters(), x), wanted)) and len(calls) == 2
    finalize_exchanges()


def _counting(call: Any, calls: list[int]) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return call(*args, **kwargs)

    return counted


def test_selective_checkpoints_save_or_repeat_the_block(run_ranks):
    """A policy that names the op avoids its recomputation; without it, or without a policy, dispatch runs twice."""
    run_ranks(_selective, 1, RANKS)


def _main_grad(rank: int, nodes: int, ranks_per_node: int) -> None:
    torch._dynamo.reset()
    model = _Model(3, {"payload": "mxfp8", "capacity": 2.0})
    x = _x(rank, TOKENS)
    wanted = _step(model, model.parameters(), x)[2:]
    names = [name for name, _ in model.named_parameters()]
    weights = [parameter for name, parameter in model.named_parameters() if ".experts." in name]
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend=BACKEND)
    for run in (model, compiled, partial(checkpoint, model, use_reentrant=False)):
        owner = compiled if run is compiled else model
        weights = {name: parameter for name, parameter in owner.named_parameters() if ".experts." in name}
        for weight in weights.values():
            weight.main_grad = torch.ones(weight.shape, device=weight.device)
        with torch._inductor.config.patch(compile_threads=1):
            run(x).float().square().mean().backward()
        for name, exact in zip(names, wanted, strict=True):
            if ".experts." in name:
                weight = weights[f"_orig_mod.{name}" if run is compiled else name]
                assert weight.grad is None
                torch.testing.assert_close(weight.main_grad - 1, exact.float(), rtol=0.02, atol=1e-3)
    finalize_exchanges()


def test_main_grad_takes_the_gradients(run_ranks):
    """Megatron-Core's float32 sums: in the block, in the compiled op of a copied model, under checkpoints."""
    run_ranks(_main_grad, 1, RANKS)


def _decode(rank: int, nodes: int, ranks_per_node: int) -> None:
    torch._dynamo.reset()
    moe = MoE(HIDDEN, FFN, low_latency=True, **SIZES)
    compiled, x = torch.compile(moe, fullgraph=True, backend=BACKEND), _x(rank, TOKENS)
    with torch.no_grad():
        assert torch.equal(compiled(x), moe(x))
    with pytest.raises(InputError, match=r"no gradient\. Call it under torch\.no_grad"):
        compiled(x)
    with torch.no_grad():
        compiled(x)
    finalize_exchanges()


def test_low_latency_has_no_gradient_when_compiled_either(run_ranks):
    """The call is refused, not its backward pass."""
    run_ranks(_decode, 1, 1)


def _counted(compiled: Any, model: _Model) -> Any:
    """Calls `compiled`; returns the result and how often the op of the model's layer ran on the host meanwhile."""
    experts, calls = model.layers[0].experts, []
    plain = experts.check_parameters
    experts.check_parameters = _counting(plain, calls)
    torch.compiler.cudagraph_mark_step_begin()
    try:
        with torch._inductor.config.patch(compile_threads=1):
            found = compiled()
    finally:
        experts.check_parameters = plain
    return found, len(calls)


def _trained_with_graphs(rank: int, nodes: int, ranks_per_node: int, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    model = _Model(4, options)
    compiled = torch.compile(model, mode="reduce-overhead")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        x = _x(rank, TOKENS, step)
        found, calls = _counted(lambda x=x: [each.clone() for each in _step(compiled, model.parameters(), x)], model)
        assert calls == 1
        wanted = _step(model, model.parameters(), x)
        _same(found, wanted)
        for parameter, grad in zip(model.parameters(), wanted[2:], strict=True):
            parameter.grad = grad
        optimizer.step()  # a graph would go on with the quantised copies of the old weights
        with torch.no_grad():
            found, calls = _counted(lambda x=x: compiled(x).clone(), model)
            assert calls == 1
            _same([found], [model(x)])
    model.layers[0].check()
    finalize_exchanges()


@pytest.mark.on_gpus
@pytest.mark.parametrize(
    "options",
    [{}, {"capacity": 2.0}, {"payload": "mxfp8"}, {"payload": "mxfp8", "capacity": 2.0}],
    ids=("exact", "static", "mxfp8", "mxfp8-static"),
)
def test_modules_run_between_the_graphs_of_torch_compile(run_ranks, options):
    """mode="reduce-overhead" captures what lies around a module, training and without gradients, weights changing."""
    run_ranks(_trained_with_graphs, 1, RANKS, options)


def _decoded_in_graphs(rank: int, nodes: int, ranks_per_node: int, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    model = _Model(5, {"low_latency": True, **options})
    compiled = torch.compile(model, mode="reduce-overhead")
    with torch.no_grad():
        if "payload" in options:
            with pytest.raises(InputError, match=r"missing, and .* warmed up by torch.compile"):
                _counted(lambda: compiled(_x(rank, TOKENS)), model)
            model(_x(rank, TOKENS))
        for step in range(6):
            x = _x(rank, TOKENS, step)
            found, calls = _counted(lambda x=x: compiled(x).clone(), model)
            assert calls == (step < 2), "warmed up, captured, then replayed"
            _same([found], [model(x)])
    model.layers[0].check()
    finalize_exchanges()


@pytest.mark.on_gpus
@pytest.mark.parametrize(
    "options", [{}, {"separate": True}, {"payload": "mxfp8"}], ids=("bf16", "bf16-separate", "mxfp8")
)
def test_low_latency_runs_in_the_graphs_of_torch_compile(run_ranks, options):
    """No call on the host after the capture; quantised weights must be prepared before."""
    run_ranks(_decoded_in_graphs, 1, RANKS, options)


def _replaced(moe: MoE, name: str, value: torch.Tensor) -> None:
    setattr(moe.experts, name, torch.nn.Parameter(value, requires_grad=False))


@torch._dynamo.config.patch(recompile_limit=32)  # each mistake is a graph of its own
def _mistakes(rank: int, nodes: int, ranks_per_node: int, capacity: int | None, payload: str | None) -> None:
    torch._dynamo.reset()
    torch.manual_seed(1)
    moe = MoE(HIDDEN, FFN, router=False, capacity=capacity, payload=payload, **{**SIZES, "max_tokens": 6})
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    x = _x(0, TOKENS)
    ids, weights = torch.zeros(TOKENS, 2, dtype=torch.int32, device=x.device), torch.ones(TOKENS, 2, device=x.device)
    right = (x, ids, weights)
    wanted, names = moe(*right), ("w13", "w2")

    def call(*given: Any) -> None:
        compiled(*given)
        moe.check()

    kept = {name: getattr(moe.experts, name) for name in names}
    many = [torch.cat([each, each]) for each in right]
    mistakes: list[tuple[str, Any, dict[str, torch.Tensor]]] = [
        ("12 tokens on rank 1, the layer was made for max_tokens=6", many, {}),
        ("x must be torch.bfloat16, got torch.float32", (x.float(), ids, weights), {}),
        ("go together", (x, ids, None), {}),
        (r"topk_idx of the call must be a tensor \[6, 2\], got \[6, 1\]", (x, ids[:, :1], weights), {}),
        ("topk_weights of the call must be floating-point", (x, ids, ids), {}),
        (r"w2 of the experts must be \[1, 64, 96\]", right, {"w2": kept["w2"][:, :, :32].contiguous()}),
        (r"w13 of the experts must be \[1, 192, 64\]", right, {"w13": kept["w13"][:, :96].contiguous()}),
        ("w13 of the experts (must be|is)", right, {"w13": kept["w13"].half()}),
        ("are MXTensors", right, {name: MXTensor.to_mx(kept[name].detach()) for name in names}),
    ]
    for words, given, parameters in mistakes:
        if rank == 1:
            for name, value in parameters.items():
                _replaced(moe, name, value.detach())
            with pytest.raises(InputError, match=words):
                call(*given)
            for name in parameters:
                setattr(moe.experts, name, kept[name])
        else:
            with pytest.raises(PeerFailed, match="rank 1 rejected its arguments"):
                call(*right)
    assert torch.equal(compiled(*right), wanted)
    moe.check()
    finalize_exchanges()


@pytest.mark.parametrize(
    ("capacity", "payload"),
    [pytest.param(None, None, id="exact"), pytest.param(256, "mxfp8", id="static", marks=pytest.mark.on_gpus)],
)
def test_mistakes_are_told_the_others_when_compiled_too(run_ranks, capacity, payload):
    """Arguments and replaced parameters are checked when the graph runs, and where torch.compile traces, the error is
    part of the graph: one raised while tracing would leave the other ranks waiting."""
    run_ranks(_mistakes, 1, 2, capacity, payload)
