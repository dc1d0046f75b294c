"""A training step of the module without the host: replayed as a CUDA graph, repeated on the CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from triton_ep.distributed import current_heap
from triton_ep.errors import InputError
from triton_ep.nn import MoE, finalize_exchanges
from triton_ep.runtime.launch import INTERPRETING

pytestmark = pytest.mark.plain
RANKS = 1 if INTERPRETING else 2
"""Steps in a graph exchange tokens; on the CPU a step that is repeated has nothing to do with other ranks."""
SIZES: dict[str, Any] = {"num_experts": 4, "topk": 2, "max_tokens": 12, "capacity": 2.0, "timeout_s": 60.0}


class _Step:
    """Forward and backward pass of a module with its router, at fixed addresses."""

    def __init__(self, rank: int, options: dict[str, Any]) -> None:
        torch.manual_seed(2)
        self.rank, self.device = rank, current_heap().device
        self.moe = MoE(64, 96, **SIZES, **options)
        self.x, self.grad = (torch.empty(12, 64, dtype=torch.bfloat16, device=self.device) for _ in range(2))
        self.x.requires_grad_()

    def load(self, seed: int) -> None:
        """Write other inputs to the same addresses."""
        generator = torch.Generator().manual_seed(10 * seed + self.rank)
        with torch.no_grad():
            for tensor in (self.x, self.grad):
                tensor.copy_(torch.randn(12, 64, generator=generator))

    def __call__(self) -> None:
        y = self.moe(self.x)
        grads = torch.autograd.grad(y, [self.x, *self.moe.parameters()], self.grad)
        self.results = [y.detach(), *grads]

    def eager(self) -> list[torch.Tensor]:
        """Results of a step, copied so that the next step does not overwrite them."""
        self()
        return [each.clone() for each in self.results]


def _captured(step: _Step, stream: Any) -> Callable[[], None]:
    gc.collect()  # autograd graphs of earlier steps
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    return graph.replay


def _check(rank: int, nodes: int, ranks_per_node: int, options: dict[str, Any]) -> None:
    step = _Step(rank, options)
    on_gpu = step.device.type == "cuda"
    wanted = []
    for seed in range(3 if on_gpu else 2):
        step.load(seed)
        wanted.append(step.eager())
    assert not torch.equal(wanted[0][0], wanted[1][0])
    replay: Callable[[], None] = step
    if on_gpu:
        torch.cuda.set_sync_debug_mode("error")
        step()  # nothing waits for the device
        torch.cuda.set_sync_debug_mode("default")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        replay = _captured(step, stream)
        with pytest.raises(InputError, match="captured on another stream"):
            _captured(step, torch.cuda.Stream())
    for seed in (2, 0, 1) if on_gpu else (0, 1):
        step.load(seed)
        replay()
        assert all(map(torch.equal, step.results, wanted[seed]))
    captured = step.results

    # The weights change: after a refresh of the copies that the graph reads, a replay equals an eager step.
    with torch.no_grad():
        step.moe.experts.w13.mul_(0.5)
        step.moe.experts.w2.add_(0.1)
    if on_gpu and options.get("prepared") != "none" and options:
        with pytest.raises(InputError, match="out of date"):
            _captured(step, stream)
        step.moe.forget_captures()
    step.moe.refresh()
    step.results = captured
    replay()
    replayed = [each.clone() for each in step.results]
    assert all(map(torch.equal, replayed, step.eager()))
    assert not torch.equal(replayed[0], wanted[1][0])
    assert step.moe.overflow_total == 0
    step.moe.check()
    finalize_exchanges()


# On the CPU every step makes what is not kept, as in the test of whole steps below.
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="bf16"),
        pytest.param({"payload": "mxfp8"}, id="mxfp8"),
        pytest.param({"payload": "mxfp8", "prepared": "none"}, id="mxfp8-none", marks=pytest.mark.on_gpus),
    ],
)
def test_a_step_is_replayed_with_other_inputs_and_other_weights(run_ranks, options):
    """Bit-identical to eager steps; a capture with stale copies or on a second stream is refused (GPUs)."""
    run_ranks(_check, 1, RANKS, options)


class _Training(_Step):
    """Forward, backward and the optimizer's step."""

    def __init__(self, rank: int, options: dict[str, Any]) -> None:
        super().__init__(rank, options)
        self.optimizer = torch.optim.SGD(self.moe.parameters(), lr=0.5)
        self.initial = [parameter.detach().clone() for parameter in self.moe.parameters()]

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.moe(self.x).backward(self.grad)
        self.optimizer.step()

    def begin_again(self) -> None:
        """Restore the initial weights at the same addresses."""
        with torch.no_grad():
            for parameter, value in zip(self.moe.parameters(), self.initial, strict=True):
                parameter.copy_(value)


def _check_training(rank: int, nodes: int, ranks_per_node: int, payload: str | None) -> None:
    found = []
    for graph in (False, True):
        # Copies built inside the graph follow the weights that the graph changes.
        options = {"payload": payload} | ({"prepared": "none"} if graph and payload else {})
        training = _Training(rank, options)
        step: Callable[[], None] = training
        if graph and training.device.type == "cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                training.load(0)
                training()
            training.optimizer.zero_grad(set_to_none=True)
            step = _captured(training, stream)
            training.begin_again()
        for seed in range(3 if training.device.type == "cuda" else 2):
            training.load(seed)
            step()
        found.append([parameter.detach().clone() for parameter in training.moe.parameters()])
        assert not any(map(torch.equal, found[-1], training.initial))
        training.moe.check()
        training.moe.forget_captures()
    assert all(map(torch.equal, *found))
    finalize_exchanges()


# Without a graph there are no two ways in bf16, which keeps no copies.
@pytest.mark.parametrize("payload", [pytest.param(None, marks=pytest.mark.on_gpus), "mxfp8"])
def test_a_whole_step_with_its_optimizer_is_replayed(run_ranks, payload):
    """Training steps with and without a graph, on the CPU with and without kept copies: the same weights."""
    run_ranks(_check_training, 1, RANKS, payload)


def _check_callables(rank: int, nodes: int, ranks_per_node: int, payload: str | None) -> None:
    step = _Step(rank, {"payload": payload})
    wanted = []
    for seed in range(3):
        step.load(seed)
        wanted.append(step.eager())
    if step.device.type == "cuda":
        torch.cuda.make_graphed_callables(step.moe, (torch.randn_like(step.x).requires_grad_(),))
    for seed in (2, 0, 1):
        step.load(seed)
        assert all(map(torch.equal, step.eager(), wanted[seed]))
    step.moe.check()
    finalize_exchanges()


@pytest.mark.on_gpus
@pytest.mark.parametrize("payload", [None, "mxfp8"])
def test_torch_makes_graphed_callables_of_a_module(run_ranks, payload):
    """One graph for each direction, bit-identical to eager steps."""
    run_ranks(_check_callables, 1, RANKS, payload)
