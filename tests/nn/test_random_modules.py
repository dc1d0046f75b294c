"""Random MoE modules, trained in random ways, against float64.

A sequence has one to three modules that share an exchange, with any payload, precision, activation and kind of
parameters, and computes gradients one by one, several passes open at once, twice, under checkpoints, compiled, or added
up by autograd or in main_grad. All ranks draw the same numbers, so each knows all weights and rows. `--sequences N`
runs N.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.nn import dense
from triton_ep.distributed import current_heap
from triton_ep.nn import MoE, finalize_exchanges
from triton_ep.reference.experts import Activation
from triton_ep.runtime.launch import INTERPRETING

TOPOLOGIES = ((1, 1), (1, 2), (2, 1), (1, 4))


class Sizes(NamedTuple):
    """Sizes that are drawn from; those of a rank."""

    hidden: list[int]
    experts: list[int]
    tokens: list[int]
    modules: list[int]


SIZES = Sizes([32, 64, 256, 320], [1, 2, 4], [5, 17, 40], [1, 2, 3])
if INTERPRETING:  # an interpreted product takes its time by tiles
    SIZES = Sizes([32, 64, 160], [1, 2], [5, 17], [1, 2])
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""A result, and the gradients of its rows and of their weights."""


@dataclass
class Batch:
    """Of each rank: rows [T, H], ids and weights [L, T, K] for L modules, and the gradient of the result."""

    xs: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]
    grads: list[torch.Tensor]


class Model:
    """Random modules, of which each adds to its input, the weights of all their experts, and batches."""

    def __init__(self, rank: int, nodes: int, ranks_per_node: int, seed: int) -> None:
        draw, self.data = random.Random(seed), torch.Generator().manual_seed(seed)
        self.draw, self.rank, self.world, self.device = draw, rank, nodes * ranks_per_node, current_heap().device
        self.hidden, self.ffn = draw.choice(SIZES.hidden), draw.choice([32, 64, 96])
        self.experts, self.tokens = draw.choice(SIZES.experts) * self.world, draw.choice(SIZES.tokens)
        self.topk = min(draw.choice([1, 2, 3, 4]), self.experts)
        payload, gated = draw.choice([None, "mxfp8"]), draw.random() < 0.85
        self.activation = Activation(draw.choice(["silu", "silu", "gelu", "relu", "relu2"]), gated)
        self.bias, self.separate = draw.random() < 0.4, gated and draw.random() < 0.3
        options: dict[str, Any] = {"num_experts": self.experts, "topk": self.topk, "max_tokens": self.tokens}
        options |= {"payload": payload, "precision": draw.choice(["default", "exact"]) if payload else "default"}
        options |= {"capacity": draw.choice([None, 2.0 * self.world]), "router": False, "num_sm": 2, "timeout_s": 60.0}
        options |= {"bias": self.bias, "separate": self.separate, "activation": self.activation.kind, "gated": gated}
        count = draw.choice(SIZES.modules)
        self.moes = [MoE(self.hidden, self.ffn, **options, local_world_size=ranks_per_node) for _ in range(count)]
        self.full = [self._weights(moe) for moe in self.moes]
        self.batches = [self._batch() for _ in range(2)]
        # Signal to noise in dB. Every module adds noise of its rounding; relu's gradients jump, those of relu2 grow.
        self.least = (14.0 if payload else 24.0) - 3.0 * (count - 1) - 2.0 * (self.activation.kind != "silu")

    def _weights(self, moe: MoE) -> dict[str, torch.Tensor]:
        """Give a module random weights; returns those of all experts, float64."""
        full, experts = {}, self.experts
        wide = self.ffn * (2 if self.activation.gated else 1)
        shapes = {"w13": (wide, self.hidden), "w2": (self.hidden, self.ffn), "b13": (wide,), "b2": (self.hidden,)}
        for name, shape in shapes.items():
            if name[0] == "b" and not self.bias:
                continue
            scale = shape[-1] ** -0.5 if name[0] == "w" else 0.5
            drawn = (torch.randn(experts, *shape, generator=self.data) * scale).bfloat16()
            with torch.no_grad():
                for held, part in self.parts(name, drawn).items():
                    getattr(moe.experts, held).copy_(part)
            full[name] = drawn.double().requires_grad_()
        return full

    def parts(self, name: str, full: torch.Tensor) -> dict[str, torch.Tensor]:
        """This rank's part of a parameter of all experts, by the names of the parameters that hold it."""
        mine = full.chunk(self.world)[self.rank]
        if not (self.separate and "13" in name):
            return {name: mine}
        gate, up = mine.chunk(2, 1)
        return {name.replace("13", "1"): gate, name.replace("13", "3"): up}

    def _batch(self) -> Batch:
        tokens = [self.draw.choice([0, self.tokens - rank, self.tokens]) for rank in range(self.world)]
        batch = Batch([], [], [], [])
        for num in tokens:
            ids = torch.rand(len(self.moes), num, self.experts, generator=self.data).argsort(2)[..., : self.topk]
            batch.ids.append(torch.where(torch.rand(ids.shape, generator=self.data) < 0.15, -1, ids))
            batch.weights.append(torch.rand(ids.shape, generator=self.data) + 0.3)
            batch.xs.append(torch.randn(num, self.hidden, generator=self.data).bfloat16())
            batch.grads.append(torch.randn(num, self.hidden, generator=self.data).bfloat16())
        return batch

    def parameters(self) -> list[torch.Tensor]:
        """Of all modules."""
        return [parameter for moe in self.moes for parameter in moe.experts.parameters()]

    def leaves(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's rows and weights, on the device."""
        mine = batch.xs[self.rank], batch.weights[self.rank]
        x, weights = (each.to(self.device).clone().requires_grad_() for each in mine)
        return x, weights

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, again: bool = False) -> torch.Tensor:
        """again: every second module is under a checkpoint."""
        for number, moe in enumerate(self.moes):

            def call(x: torch.Tensor, moe: MoE = moe, number: int = number) -> torch.Tensor:
                y: torch.Tensor = moe(x, topk_idx=ids[number], topk_weights=weights[number])
                return y

            x = x + (checkpoint(call, x, use_reentrant=False) if again and number % 2 == 0 else call(x))
        return x

    def run(self, batch: Batch, leaves: Sequence[torch.Tensor], call: Callable[..., torch.Tensor]) -> torch.Tensor:
        """The result of a batch."""
        return call(leaves[0], batch.ids[self.rank].to(self.device), leaves[1])

    def grad(self, batch: Batch) -> torch.Tensor:
        """The gradient of this rank's result."""
        return batch.grads[self.rank].to(self.device)


# --- ways to compute gradients: results and gradients of batches, and the summed gradients of the parameters --------

Found = tuple[list[Gradients], list[torch.Tensor]]


def one_by_one(model: Model, call: Callable[..., torch.Tensor] | None = None) -> Found:
    """A backward pass after each forward pass."""
    found, sums = [], [torch.zeros(each.shape, device=model.device) for each in model.parameters()]
    for batch in model.batches:
        leaves = model.leaves(batch)
        y = model.run(batch, leaves, call or model)
        grads = torch.autograd.grad(y, [*leaves, *model.parameters()], model.grad(batch))
        found.append((y, grads[0], grads[1]))
        sums = [each + grad.float() for each, grad in zip(sums, grads[2:], strict=True)]
    return found, sums


def checkpointed(model: Model) -> Found:
    """Every second module computes its forward pass again."""
    return one_by_one(model, lambda *given: model(*given, again=True))


def compiled(model: Model) -> Found:
    """Under torch.compile, every graph whole."""
    torch._dynamo.reset()
    return one_by_one(model, torch.compile(model.__call__, backend="aot_eager"))


def open_at_once(model: Model) -> Found:
    """All forward passes, then the backward passes, from the last one or from the first."""
    leaves = [model.leaves(batch) for batch in model.batches]
    ys = [model.run(batch, each, model) for batch, each in zip(model.batches, leaves, strict=True)]
    found: dict[int, Gradients] = {}
    sums = [torch.zeros(each.shape, device=model.device) for each in model.parameters()]
    order = [*range(len(ys))]
    for number in model.draw.choice([order, order[::-1]]):
        wanted = [*leaves[number], *model.parameters()]
        grads = torch.autograd.grad(ys[number], wanted, model.grad(model.batches[number]))
        found[number] = ys[number], grads[0], grads[1]
        sums = [each + grad.float() for each, grad in zip(sums, grads[2:], strict=True)]
    return [found[number] for number in order], sums


def twice(model: Model) -> Found:
    """A second backward pass through the same graph gives the same bits."""
    model.batches = model.batches[:1]
    leaves = model.leaves(model.batches[0])
    y, grad = model.run(model.batches[0], leaves, model), model.grad(model.batches[0])
    wanted = [*leaves, *model.parameters()]
    first = torch.autograd.grad(y, wanted, grad, retain_graph=True)
    second = torch.autograd.grad(y, wanted, grad)
    assert all(map(torch.equal, first, second))
    return [(y, first[0], first[1])], list(first[2:])


def accumulated(model: Model, in_main_grad: bool = False) -> Found:
    """`backward`, which adds up in `grad`, or in `main_grad`."""
    for parameter in model.parameters() if in_main_grad else ():
        parameter.main_grad = torch.zeros(parameter.shape, device=model.device)
    found = []
    for batch in model.batches:
        x, weights = model.leaves(batch)
        y = model.run(batch, (x, weights), model)
        y.backward(model.grad(batch))
        assert x.grad is not None and weights.grad is not None
        found.append((y, x.grad, weights.grad))
    return found, [_summed(each) for each in model.parameters()]


def _summed(parameter: Any) -> torch.Tensor:
    main = getattr(parameter, "main_grad", None)
    parts = [each.float() for each in (main, parameter.grad) if each is not None]
    return torch.stack(parts).sum(0)


def in_main_grad(model: Model) -> Found:
    """Megatron's way."""
    return accumulated(model, True)


def after_steps(model: Model) -> Found:
    """Copies of weights for products follow an optimizer that has changed them, and changed them back."""
    before = [each.detach().clone() for each in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = model.batches[0]
    model.run(batch, model.leaves(batch), model).backward(model.grad(batch))
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model.run(batch, model.leaves(batch), model)
        for parameter, value in zip(model.parameters(), before, strict=True):
            parameter.copy_(value)
    return accumulated(model)


WAYS = (one_by_one, checkpointed, compiled, open_at_once, twice, accumulated, in_main_grad, after_steps)


def _reference(model: Model) -> Found:
    """In float64, all ranks on one."""
    total, leaves, mine = torch.zeros((), dtype=torch.float64), [], []
    for batch in model.batches:
        xs, weights = ([each.double().requires_grad_() for each in part] for part in (batch.xs, batch.weights))
        hs = list(xs)
        for number, full in enumerate(model.full):
            each = [ids[number] for ids in batch.ids], [weight[number] for weight in weights]
            ys = dense.moe(hs, *each, full["w13"], full["w2"], model.activation, full.get("b13"), full.get("b2"))
            hs = [h + y for h, y in zip(hs, ys, strict=True)]
        total = total + sum((h * grad.double()).sum() for h, grad in zip(hs, batch.grads, strict=True))
        leaves += [xs[model.rank], weights[model.rank]]
        mine.append(hs[model.rank])
    params = [(name, full[name]) for full in model.full for name in ("w13", "w2", "b13", "b2") if name in full]
    wanted = [*leaves, *(each for _, each in params)]
    grads = torch.autograd.grad(total, wanted, allow_unused=True)
    given = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(wanted, grads, strict=True)]
    rows = [(y, given[2 * number], given[2 * number + 1]) for number, y in enumerate(mine)]
    return rows, _as_parameters(model, given[len(leaves) :], [name for name, _ in params])


def _as_parameters(model: Model, grads: list[torch.Tensor], names: list[str]) -> list[torch.Tensor]:
    """This rank's parts of gradients of all experts, in the order of `Model.parameters`."""
    per_module, found = len(names) // len(model.moes), []
    for number, moe in enumerate(model.moes):
        of_module: dict[str, torch.Tensor] = {}
        here = slice(number * per_module, (number + 1) * per_module)
        for name, grad in zip(names[here], grads[here], strict=True):
            of_module |= model.parts(name, grad)
        found += [of_module[name] for name, _ in moe.experts.named_parameters()]
    return found


def _check(rank: int, nodes: int, ranks_per_node: int, seed: int) -> None:
    model = Model(rank, nodes, ranks_per_node, seed)
    way = WAYS[seed % len(WAYS)]
    rows, params = way(model)
    want_rows, want_params = _reference(model)
    seen = [each for row in rows for each in row] + params
    wanted = [each for row in want_rows for each in row] + want_params
    for number, (got, want) in enumerate(zip(seen, wanted, strict=True)):
        assert got.shape == want.shape and torch.isfinite(got).all()
        if not want.any():
            assert not got.any()
        else:
            reached = dense.decibel(got, want)
            assert reached >= model.least, f"{way.__name__}, tensor {number}: {reached:.1f} dB, not {model.least}"
    for moe in model.moes:
        moe.check()
    finalize_exchanges()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """As many sequences as `--sequences` says, and at least one of each way, over every topology in turn."""
    numbers = range(max(metafunc.config.getoption("sequences"), len(WAYS)))
    cases = [(*TOPOLOGIES[(number + number // len(WAYS)) % len(TOPOLOGIES)], number) for number in numbers]
    metafunc.parametrize(("nodes", "ranks_per_node", "seed"), cases)


@pytest.mark.plain
def test_random_modules(run_ranks, nodes: int, ranks_per_node: int, seed: int) -> None:
    """Results, and gradients of rows, routing weights and parameters."""
    run_ranks(_check, nodes, ranks_per_node, seed)
