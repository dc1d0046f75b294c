"""The MoE module equals a dense layer, forward and backward, and names arguments that do not fit."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.nn import dense
from triton_ep.distributed import current_heap
from triton_ep.errors import ConfigError, EPError, InputError, PeerFailed
from triton_ep.nn import MoE, TopKRouter, finalize_exchanges

pytestmark = pytest.mark.plain
HIDDEN, FFN, TOPK = 128, 128, 2
TOKENS = (40, 0, 27, 33)
FEW = (9, 0, 6, 5)  # so that no product is at the limit of the activation: `_check_edge`
SIZES: dict[str, Any] = {"topk": TOPK, "max_tokens": 40, "timeout_s": 60.0}
# Rounding a tensor to bf16 leaves 50 dB, to e4m3 31.5 dB; y and its gradients have up to eight such roundings.
LEAST_DB = {None: 38.0, "mxfp8": 21.0}


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _inputs(world: int, experts: int, tokens: tuple[int, ...] = TOKENS) -> tuple[list[torch.Tensor], ...]:
    """x, ids, weights and the gradient of y of every rank; one rank has no tokens, some assignments are dropped."""
    xs, ids, weights, grads = [], [], [], []
    for rank in range(world):
        g, num = _generator(rank), tokens[rank % len(tokens)]
        xs.append(torch.randn(num, HIDDEN, generator=g).bfloat16())
        chosen = torch.rand(num, experts, generator=g).topk(TOPK, 1).indices
        ids.append(torch.where(torch.rand(num, TOPK, generator=g) < 0.1, -1, chosen))
        weights.append(torch.rand(num, TOPK, generator=g) + 0.5)
        grads.append(torch.randn(num, HIDDEN, generator=g).bfloat16())
    return xs, ids, weights, grads


@contextlib.contextmanager
def _moe(world: int, **options: Any) -> Iterator[MoE]:
    """A module of two experts per rank, all ranks seeded alike; shared exchanges are finalized at its end."""
    torch.manual_seed(11)
    moe = MoE(HIDDEN, FFN, num_experts=2 * world, **{**SIZES, **options})
    try:
        yield moe
    except Exception as error:
        with contextlib.suppress(EPError):
            moe.exchange.context.failure = str(error)  # so that finalizing does not wait for the other ranks
        raise
    finally:
        finalize_exchanges()


@torch.no_grad()
def _draw(moe: MoE, rank: int) -> None:
    """Draw parameters from a generator of the CPU: the same on all devices and for all versions of torch, so that
    `_check_edge` and bounds of errors hold on all or none. Other experts on each rank."""
    generator = _generator(33 + rank)
    for name, parameter in moe.experts.named_parameters():
        value = torch.rand(parameter.shape, generator=generator) * 2 - 1
        columns = 1 if name.startswith("b") else parameter.shape[-1] / 3
        parameter.copy_(value / columns**0.5)


def _check_edge(
    xs: list[torch.Tensor], ids: list[torch.Tensor], w13: torch.Tensor, b13: torch.Tensor | None, limit: float | None
) -> None:
    """No product may be within bf16's rounding of the activation's limit.

    The gradient jumps to zero there, and the backward pass has products in bf16: one product of a few thousand on the
    wrong side leaves only 26 to 38 dB of a gradient, whatever the kernels do.
    """
    if limit is None or w13 is None:
        return
    for x, idx in zip(xs, ids, strict=True):
        for expert in range(w13.shape[0]):
            pre = x.detach()[(idx == expert).any(1)] @ w13.detach()[expert].T
            pre = pre if b13 is None else pre + b13.detach()[expert]
            assert ((pre.abs() - limit).abs() > limit * 2.0**-8).all(), "draw other parameters"


def _all_parameters(moe: MoE, name: str) -> torch.Tensor:
    """Parameters of all experts, float64, on every rank."""
    own = getattr(moe.experts, name).detach().float().cpu()
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return torch.cat(parts).double()


def _check(rank: int, nodes: int, ranks_per_node: int, options: dict[str, Any]) -> None:
    world, device = nodes * ranks_per_node, current_heap().device
    xs, ids, weights, grads = _inputs(world, 2 * world, FEW if options.get("limit") else TOKENS)
    with _moe(world, router=False, local_world_size=ranks_per_node, **options) as moe:
        assert moe.exchange.config.num_nodes == nodes
        names = [name for name, _ in moe.experts.named_parameters()]
        _draw(moe, rank)
        x = xs[rank].to(device).requires_grad_()
        weight = weights[rank].to(device).requires_grad_()
        y = moe(x, topk_idx=ids[rank].to(device), topk_weights=weight)
        y.backward(grads[rank].to(device))
        moe.check()

        leaves = {name: _all_parameters(moe, name).requires_grad_() for name in names}
        w13, b13 = leaves.get("w13"), leaves.get("b13")
        if moe.experts.separate:
            w13, b13 = (torch.cat([leaves[f"{letter}1"], leaves[f"{letter}3"]], 1) for letter in "wb")
        exact_xs = [x.detach().double().requires_grad_() for x in xs]
        exact_weights = [w.detach().double().requires_grad_() for w in weights]
        _check_edge(exact_xs, ids, w13, b13, moe.experts.activation.limit)
        ys = dense.moe(exact_xs, ids, exact_weights, w13, leaves["w2"], moe.experts.activation, b13, leaves.get("b2"))
        torch.autograd.backward(ys, [g.double() for g in grads])

        least = LEAST_DB[options.get("payload")]
        mine = slice(2 * rank, 2 * rank + 2)
        pairs = {
            "y": (y, ys[rank]),
            "dx": (x.grad, exact_xs[rank].grad),
            "dweights": (weight.grad, exact_weights[rank].grad),
        }
        pairs |= {f"d{name}": (getattr(moe.experts, name).grad, leaf.grad[mine]) for name, leaf in leaves.items()}
        for name, (seen, exact) in pairs.items():
            assert seen.shape == exact.shape, name
            if exact.numel() and exact.any():
                assert dense.decibel(seen, exact) > least, name
                if name in ("y", "dx"):
                    assert dense.worst_row(seen, exact) < 10 ** (-least / 20) * 4, name
        dropped = ids[rank] < 0
        assert not weight.grad.cpu()[dropped].any() and not y.detach().cpu()[dropped.all(1)].any()


STATIC = {"capacity": 2.0}
CASES = {
    "bf16": (1, 2, {}),
    "bf16-static-nodes": (2, 1, STATIC),
    "bf16-static-more-nodes": (2, 2, STATIC),
    "one-rank": (1, 1, {"separate": True, "bias": True}),
    "mxfp8": (1, 2, {"payload": "mxfp8"}),
    "mxfp8-static-nodes": (2, 2, {"payload": "mxfp8", **STATIC}),
    "mxfp8-exact": (1, 2, {"payload": "mxfp8", "precision": "exact", "prepared": "fprop"}),
    "mxfp8-fast": (1, 1, {"payload": "mxfp8", "precision": "fast", "prepared": "none"}),
    "gpt-oss": (1, 2, {"bias": True, "limit": 3.5, "alpha": 1.702, "up_offset": 1.0}),
    "relu2": (1, 1, {"activation": "relu2", "gated": False}),
    "gelu-mxfp8": (1, 1, {"activation": "gelu", "payload": "mxfp8"}),
}


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "options"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.on_gpus] if name == "bf16-static-more-nodes" else [])
        for name, case in CASES.items()
    ],
)
def test_module_is_the_dense_layer(run_ranks, nodes, ranks_per_node, options):
    """Output and all gradients, slot by slot and expert by expert, against float64."""
    run_ranks(_check, nodes, ranks_per_node, options)


def _router(rank: int, nodes: int, ranks_per_node: int) -> None:
    world, device = nodes * ranks_per_node, current_heap().device
    xs, _, _, grads = _inputs(world, 2 * world)
    torch.manual_seed(5)
    router = TopKRouter(HIDDEN, 2 * world, TOPK, score="sigmoid", correction_bias=True, aux_loss=True, device=device)
    with _moe(world, router=router) as moe:
        x = xs[rank].to(device)
        y = moe(x)
        assert moe.last_aux is not None
        torch.autograd.backward([y, moe.last_aux], [grads[rank].to(device), torch.tensor(0.5, device=device)])
        seen = moe.router.weight.grad.clone()
        found = [moe.router(x.to(device)) for x in xs]
        weight = moe.router.weight.detach().cpu().double().requires_grad_()
        scores = (xs[rank].double() @ weight.T).sigmoid()
        ids = found[rank][0].cpu().long()
        chosen = scores.gather(1, ids)
        leaf = chosen / chosen.sum(1, keepdim=True)
        all_ids, all_weights = [f[0].cpu() for f in found], [f[1].detach().cpu().double() for f in found]
        all_weights[rank] = leaf
        parameters = [_all_parameters(moe, name) for name in ("w13", "w2")]
        ys = dense.moe([x.double() for x in xs], all_ids, all_weights, *parameters)
        share = (scores / scores.sum(1, keepdim=True)).mean(0)
        copies = torch.bincount(ids.flatten(), minlength=2 * world) / max(ids.numel(), 1)
        loss = 0.5 * 2 * world * (copies * share).sum() if ids.numel() else 0 * weight.sum()
        torch.autograd.backward([ys[rank], loss], [grads[rank].double(), None])
        if ids.numel():
            assert dense.decibel(seen, weight.grad) > 35
        assert moe(x.unsqueeze(0)).shape == (1, *x.shape)


def test_gradients_of_the_router_and_its_loss(run_ranks):
    """The default router gets gradients through the weights that it chose and through the loss that it returned."""
    run_ranks(_router, 1, 2)


def _copied(rank: int, nodes: int, ranks_per_node: int) -> None:
    device = current_heap().device
    x = torch.randn(5, HIDDEN, generator=_generator(rank)).bfloat16().to(device)
    with _moe(2, router=TopKRouter(HIDDEN, 4, TOPK, aux_loss=True, device=device)) as moe:
        y = moe(x)
        other = copy.deepcopy(moe)
        assert other.last_aux is None and moe.last_aux is not None and moe.last_aux.requires_grad
        assert moe.over(moe.exchange).last_aux is None
        assert torch.equal(other(x), y) and other.last_aux is not None
        assert torch.equal(moe(x[0]), moe(x[:1])[0]), "one token without leading dimensions"


def test_a_copy_leaves_the_loss_behind(run_ranks):
    """A copy after a call with a balancing loss works and starts without a loss; a single token [H] has a loss too."""
    run_ranks(_copied, 1, 2)


class _Shared(torch.nn.Module):
    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result

    def forward(self, x: torch.Tensor) -> Any:
        return self.result(x)


def _shared_results(rank: int, nodes: int, ranks_per_node: int) -> None:
    x = torch.randn(5, HIDDEN, generator=_generator(rank)).bfloat16().to(current_heap().device)
    with _moe(1) as moe:
        alone = moe(x)
        for dtype in (torch.float32, torch.float16):
            moe.shared = _Shared(lambda x, dtype=dtype: x.to(dtype) / 3)
            y = moe(x)
            assert y.dtype == torch.bfloat16 and torch.equal(y, (alone + x.to(dtype) / 3).bfloat16())
            compiled = torch.compile(moe, backend="eager", fullgraph=True)
            assert torch.equal(compiled(x), y)
            torch._dynamo.reset()
        for result, seen in (
            (lambda x: None, "NoneType"),
            (lambda x: (x, x), "tuple of 2"),
            (lambda x: x.int(), r"\[5, 128\] torch.int32"),
        ):
            moe.shared = _Shared(result)
            with pytest.raises(InputError, match=rf"must return \[5, 128\], floating-point, got {seen}"):
                moe(x)
        moe.shared = None
        assert torch.equal(moe(x), alone)


def test_results_of_shared_experts_in_other_types(run_ranks):
    """y has the module's dtype whatever floating-point dtype they return; anything else is refused."""
    run_ranks(_shared_results, 1, 1)


# --- what does not fit ----------------------------------------------------------------------------------


def _refused(rank: int, nodes: int, ranks_per_node: int, capacity: float | None) -> None:
    world, device = nodes * ranks_per_node, current_heap().device
    x = torch.randn(5, HIDDEN, generator=_generator(rank)).bfloat16().to(device)
    ids, weights = torch.zeros(5, TOPK, dtype=torch.int32, device=device), torch.ones(5, TOPK, device=device)
    routed = {"topk_idx": ids, "topk_weights": weights}
    bad: list[tuple[str, torch.Tensor, dict[str, Any]]] = [
        (r"x must be a tensor \[\.\.\., 128\], got \[5, 64\]", x[:, :64], routed),
        ("bfloat16, got torch.float32", x.float(), routed),
        ("must be on .*, got meta", x.to("meta"), routed),
        ("x must be a strided tensor", x.to_sparse(), routed),
        ("45 tokens on rank 1, the layer was made for max_tokens=40", x.repeat(9, 1), {}),
        ("go together", x, {"topk_idx": ids}),
        (r"topk_idx of the call must be a tensor \[5, 2\], got \[5, 1\]", x, {**routed, "topk_idx": ids[:, :1]}),
        ("topk_weights of the call must be floating-point", x, {**routed, "topk_weights": ids}),
        ("topk_idx must be .*, got torch.float32", x, {**routed, "topk_idx": weights}),
    ]
    with _moe(world, capacity=capacity) as moe:

        def call(**arguments: Any) -> torch.Tensor:
            y = moe(x, **arguments)
            moe.check()
            return y

        want = call(**routed)
        for words, wrong, arguments in bad:
            if rank == 1:
                with pytest.raises(InputError, match=words):
                    moe(wrong, **arguments)
            else:
                with pytest.raises(PeerFailed, match="rank 1 rejected its arguments"):
                    call(**routed)
        for transform in (torch.func.vmap(moe), torch.func.grad(lambda x: moe(x).float().sum())):
            with pytest.raises(InputError, match=r"inside a transform of torch\.func"):
                transform(x)
        assert torch.equal(call(**routed), want), "the module still works after all errors"
        kept = moe.experts.w2
        if rank == 1:
            moe.experts.w2 = torch.nn.Parameter(kept[:, :, 1:])
        with pytest.raises(
            (InputError, PeerFailed), match=r"w2 of the experts must be \[2, 128, 128\]|rank 1 rejected"
        ):
            call(**routed)
        moe.experts.w2 = kept
        router, moe.router = moe.router, torch.nn.Identity() if rank == 1 else moe.router
        with pytest.raises((InputError, PeerFailed), match=r"the router must return|rank 1 rejected"):
            call()
        moe.router = router
        call()


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
@pytest.mark.parametrize("capacity", [None, 2.0], ids=["exact", "static"])
def test_bad_input_is_named_where_it_is_and_told_the_others(run_ranks, nodes, ranks_per_node, capacity):
    """InputError on the rank that gave it, PeerFailed on the others (static: from check), and the next call works."""
    run_ranks(_refused, nodes, ranks_per_node, capacity)


def _small_capacity(rank: int, nodes: int, ranks_per_node: int) -> list[str]:
    world, device = nodes * ranks_per_node, current_heap().device
    x = torch.randn(8, HIDDEN, generator=_generator(rank)).bfloat16().to(device)
    ids = torch.tensor([[0, 1]] * 8, dtype=torch.int32, device=device)
    with _moe(world, capacity=10) as moe, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            moe(x, topk_idx=ids, topk_weights=torch.ones(8, TOPK, device=device))
            assert moe.overflow_total >= 0  # waits for the stream; the module itself only checks the latest copy
        # The capacity is rounded up to 128 rows, and the segment of each of rank 0's two experts takes 128.
        assert moe.overflow_total == (3 * 128 if rank == 0 else 0)
    return [str(w.message) for w in caught]


def test_rows_that_do_not_fit_are_counted_and_warned_of(run_ranks):
    """The module warns by itself, on the rank whose experts have too little room."""
    first, second = run_ranks(_small_capacity, 1, 2)
    assert second == [] and len(first) >= 1 and "did not fit capacity=128 of rank 0" in first[0]


def _config(rank: int, nodes: int, ranks_per_node: int) -> None:
    for options, words in (
        ({"precision": "fast"}, "payload=None sends bf16"),
        ({"payload": "fp4"}, "payload is 'fp4'"),
        ({"precision": "best", "payload": "mxfp8"}, "precision is 'best'"),
        ({"num_experts": 5}, "5 experts .* 2 ranks .* to 6"),
        ({"router": "softmax"}, "router must be callable"),
        ({"router": TopKRouter}, "no class"),
        ({"separate": True, "gated": False}, "there is no w3"),
        ({"capacity": -1.0}, "capacity=-1.0 must be above 0"),
        ({"topk": 40}, "topk 40 exceeds"),
        ({"dtype": torch.float16}, "dtype is torch.float16, but experts multiply bfloat16"),
        ({"activation": "tanh"}, "kind is 'tanh'"),
        ({"prepared": "fprop"}, "bf16 products read the weights themselves"),
        ({"num_experts": "4"}, "num_experts must be an integer of at least 1, got '4'"),
        ({"topk": None, "capacity": 1.5}, "topk must be an integer of at least 1, got None"),
        ({"max_tokens": "8", "capacity": 1.5}, "max_tokens must be an integer of at least 1, got '8'"),
        ({"activation": ["silu"]}, r"Activation.kind is \['silu'\], choose from silu"),
        ({"limit": "7"}, "limit must be a number or None, got '7'"),
        ({"alpha": None}, "alpha must be a number, got None"),
        ({"params_dtype": torch.float16}, "parameters of experts are torch.bfloat16 or torch.float32"),
        ({"up_offset": True}, "up_offset must be a number, got True"),
        ({"payload": "mxfp8", "hidden": 48}, "hidden is 48, .* the nearest is 32 or 64"),
        ({"payload": "mxfp8", "ffn": 100}, "ffn is 100, .* the nearest is 96 or 128"),
    ):
        with pytest.raises(ConfigError, match=words):
            MoE(**{"hidden": HIDDEN, "ffn": FFN, "num_experts": 4, **SIZES, **options})
    finalize_exchanges()


def test_options_that_cannot_work(run_ranks):
    """Unfit options are refused by name."""
    run_ranks(_config, 1, 2)


def _failed_constructors(rank: int, nodes: int, ranks_per_node: int) -> None:
    with _moe(2) as moe:
        exchange = moe.exchange
        for wrong in (
            {"separate": True, "gated": False},
            {"activation": "tanh"},
            {"router": 3},
            {"shared": 3},
            {"payload": None, "prepared": "fprop"},
            {"limit": -1.0},
            {"params_dtype": torch.int8},
            {"device": "no_such_device"},
        ):
            with pytest.raises((EPError, RuntimeError)):
                MoE(HIDDEN, FFN, num_experts=4, **{**SIZES, **wrong})
        moe.finalize()
        assert exchange.context.closed


def test_failed_constructors_hold_no_exchange(run_ranks):
    """The only module frees the exchange, whatever modules of the same sizes could not be made."""
    run_ranks(_failed_constructors, 1, 2)


def _decode(rank: int, nodes: int, ranks_per_node: int, payload: str | None) -> None:
    world, device = nodes * ranks_per_node, current_heap().device
    xs, ids, weights, _ = _inputs(world, 2 * world)
    with _moe(world, low_latency=True, router=False, payload=payload) as moe:
        routed = {"topk_idx": ids[rank].to(device), "topk_weights": weights[rank].to(device)}
        with pytest.raises(InputError, match=r"no gradient\. Call it under torch\.no_grad"):
            moe(xs[rank].to(device), **routed)
        with pytest.raises(InputError, match="router=False"), torch.no_grad():
            moe(xs[rank].to(device))
        with torch.no_grad():
            y = moe(xs[rank].to(device), **routed)
        parameters = [_all_parameters(moe, name) for name in ("w13", "w2")]
        exact = dense.moe([x.double() for x in xs], ids, [w.double() for w in weights], *parameters)[rank]
        assert not exact.numel() or dense.decibel(y, exact) > LEAST_DB[payload]


@pytest.mark.parametrize("payload", [None, "mxfp8"])
def test_low_latency_is_the_dense_layer(run_ranks, payload):
    """Two launches per dispatch, one per combine, no gradient; static without an explicit capacity."""
    run_ranks(_decode, 1, 2, payload)
