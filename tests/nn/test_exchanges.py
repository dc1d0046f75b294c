"""Modules share an exchange; concurrent passes on one exchange are refused or ordered."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from triton_ep.distributed import current_heap
from triton_ep.errors import ConfigError, FinalizedError, InputError, PeerFailed, WaitTimeout
from triton_ep.nn import MoE, clip_grad_norm_, exchanges, expert_block, finalize_exchanges, new_exchange

pytestmark = pytest.mark.plain
HIDDEN = 128
SIZES: dict[str, Any] = {"num_experts": 4, "topk": 2, "max_tokens": 4, "timeout_s": 60.0}


def _moe(**options: Any) -> MoE:
    torch.manual_seed(11)
    return MoE(HIDDEN, 128, **{**SIZES, **options})


def _x(rank: int) -> torch.Tensor:
    x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16()
    return x.to(current_heap().device).requires_grad_()


def _share(rank: int, nodes: int, ranks_per_node: int) -> None:
    free = current_heap().available()
    first, second, other = _moe(), _moe(separate=True), _moe(payload="mxfp8")
    assert first.exchange is second.exchange is not other.exchange
    own = new_exchange(HIDDEN, **SIZES)
    third = _moe(exchange=own)
    assert third.exchange is own
    third.load_state_dict(second.state_dict())  # a GPU draws other numbers for two halves than for both at once
    x = _x(rank)
    # Two layers of a model, forward and backward, over one shared exchange and over one exchange each.
    shared, apart = (torch.autograd.grad(b(a(x)).float().sum(), x)[0] for a, b in ((first, second), (first, third)))
    assert torch.equal(shared, apart) and shared.any()

    twin = copy.deepcopy(first)
    assert twin.exchange is first.exchange and twin.experts.w13 is not first.experts.w13
    with pytest.raises(ConfigError, match="state_dict"):
        pickle.dumps(first)
    kept = first.exchange
    first.finalize()
    first.finalize()
    with pytest.raises(FinalizedError, match=r"connect\(\)"):
        first(x)
    second.finalize()
    assert not kept.context.closed, "the copy holds it"
    assert torch.equal(twin(x), twin(x))
    twin.finalize()
    assert kept.context.closed
    first.connect()
    assert first.exchange is not kept
    first(x)
    first.connect(own)
    assert first.exchange is own
    finalize_exchanges()
    finalize_exchanges()
    assert not own.context.closed
    with pytest.raises(FinalizedError, match=r"connect\(\)"):
        other(x)
    own.finalize()
    assert current_heap().available() == free


def test_modules_of_the_same_sizes_share_an_exchange(run_ranks):
    """Copies share it too; the last holder frees its memory, and a module can connect again."""
    run_ranks(_share, 1, 2)


def _twins(rank: int, nodes: int, ranks_per_node: int) -> None:
    own = new_exchange(HIDDEN, **SIZES)
    model = torch.nn.ModuleList([_moe()])
    model.append(model[0].over(own))
    x = _x(rank)
    sum(moe(x).float().square().sum() for moe in model).backward()
    assert torch.equal(clip_grad_norm_(model, 1e9), clip_grad_norm_(model[0], 1e9))
    own.finalize()
    finalize_exchanges()


def _norms(rank: int, nodes: int, ranks_per_node: int) -> None:
    moe, x = _moe(), _x(rank)
    moe(x).float().square().sum().backward()
    norm, grads = clip_grad_norm_(moe, 1e9), [p.grad.float() for p in moe.experts.parameters()]
    for placeholder in (False, True):
        moe.zero_grad(set_to_none=True)
        for parameter in moe.experts.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
            if placeholder:
                parameter.grad_added_to_main_grad = False
        moe(x).float().square().sum().backward()
        torch.testing.assert_close(clip_grad_norm_(moe, norm.item() / 4), norm, rtol=1e-3, atol=0)
        for parameter, grad in zip(moe.experts.parameters(), grads, strict=True):
            torch.testing.assert_close(parameter.main_grad * 4, grad, rtol=2e-2, atol=1e-2 * float(grad.abs().max()))
    finalize_exchanges()


def test_gradients_added_to_main_grad_are_clipped(run_ranks):
    """They count like those in `grad`; what `grad` holds in their place does not."""
    run_ranks(_norms, 1, 2)


def test_gradients_of_one_module_over_two_exchanges_count_once(run_ranks):
    """The norm of a model with both of `MoE.over`'s modules in it."""
    run_ranks(_twins, 1, 2)


def _unfit(rank: int, nodes: int, ranks_per_node: int) -> None:
    own = new_exchange(HIDDEN, **SIZES, capacity=256)
    for options, words in (
        ({"payload": "mxfp8"}, "payload=None, the module needs 'mxfp8'"),
        ({"topk": 1}, "topk=2, the module needs 1"),
        ({"max_tokens": 5}, "max_tokens=4, the module needs 5"),
        ({"capacity": 128}, "capacity=256, the module needs 128"),
        ({"exchange": "own"}, "EPAll2AllLayer, as new_exchange makes it, got str"),
    ):
        with pytest.raises(ConfigError, match=words):
            _moe(**{"exchange": own, **options})
    assert _moe(exchange=own).exchange.config.recv_capacity == 256
    own.finalize()


def test_an_exchange_that_does_not_fit_is_refused(run_ranks):
    """The error names both values and how to create an exchange that fits."""
    run_ranks(_unfit, 1, 1)


def _broken(rank: int, nodes: int, ranks_per_node: int) -> None:
    first, second = _moe(capacity=2.0), _moe(capacity=2.0)
    x = _x(rank)
    want = first(x)
    first.exchange.context.failure = "a wait expired."
    for moe in (first, second):
        with pytest.raises(WaitTimeout, match=r"failed before .* a wait expired"):
            moe(x)
    finalize_exchanges()
    first.connect()
    second.connect()
    assert first.exchange is second.exchange
    assert torch.equal(second(x), want)

    finalize_exchanges()


def test_modules_work_again_after_a_failure(run_ranks):
    """A failure hits all modules that share the exchange; with new exchanges they give the same results as before."""
    run_ranks(_broken, 1, 2)


class _Over(Exception):
    """Ends ranks that have aborted, because other tests cannot use them."""


def _experts_fail(rank: int, nodes: int, ranks_per_node: int) -> None:
    moe, x = _moe(capacity=2.0), _x(rank)
    if rank == 1:
        expert_block.gate_up_directly = lambda *_, **__: 1 / 0
        with pytest.raises(ZeroDivisionError):
            moe(x)
    else:
        with pytest.raises(PeerFailed, match="the experts of a MoE layer broke off on rank 1 with ZeroDivisionError"):
            moe(x)
    dist.barrier()
    raise _Over


def test_a_failure_between_dispatch_and_combine(run_ranks, backend):
    """The other ranks fail at once, without waiting for the timeout."""
    if backend != "host":
        pytest.skip("GPUs are told by their time limit")
    with pytest.raises(_Over):
        run_ranks(_experts_fail, 1, 2)


class _Stream:
    """Stand-in with the methods of a stream that `Exchange.use` calls."""

    def __init__(self) -> None:
        self.waited_for: list[_Stream] = []

    def wait_stream(self, other: _Stream) -> None:
        self.waited_for.append(other)


def _turns(rank: int, nodes: int, ranks_per_node: int) -> None:
    moe, x = _moe(exchange=new_exchange(HIDDEN, **SIZES)), _x(rank)
    exchange = exchanges.Exchange(moe.exchange)
    with exchange.use("the first micro-batch"), pytest.raises(InputError, match="while the first micro-batch is open"):
        moe(x)
    want = moe(x)

    first, second, now = _Stream(), _Stream(), exchanges._stream_now
    exchange._turns.last = None
    try:
        for stream in (first, first, second, first):
            exchanges._stream_now = lambda _, stream=stream: (stream, False)
            assert torch.equal(moe(x), want)
        assert (first.waited_for, second.waited_for) == ([second], [first])
        for stream in (second, second):
            exchanges._stream_now = lambda _, stream=stream: (stream, True)
            moe(x)
        exchanges._stream_now = lambda _: (first, True)
        with pytest.raises(InputError, match=r"captured on another stream .* forget_captures\(\)"):
            moe(x)
        moe.forget_captures()
        moe(x)
        assert (first.waited_for, second.waited_for) == ([second], [first]), "a capture waits for nothing outside"
    finally:
        exchanges._stream_now = now
    moe.exchange.finalize()


def test_one_pass_at_a_time(run_ranks):
    """A second open pass is refused, passes on several streams are ordered, captures on several are refused."""
    run_ranks(_turns, 1, 1)


@pytest.mark.parametrize(
    ("capacity", "low_latency", "rows"),
    [
        (None, False, None),
        (300, False, 384),
        (1.5, False, 1536 + 8 * 127 + 8),  # mean load 64 * 16, padding, rounded up to a tile
        (100.0, False, 64 * 4 * 8 + 8 * 127 + 8),  # at most what can arrive: a token has at most 8 experts here
        (None, True, 64 * 4 * 8),  # no padding, and never more
        (9999, True, 64 * 4 * 8),
        (300, True, 384),
    ],
)
def test_rows_of_a_capacity(capacity, low_latency, rows):
    """As given, or a multiple of the mean load plus every expert's padding, up to what can arrive."""
    assert exchanges.capacity_rows(capacity, low_latency, 32, 16, 64, 4) == rows


def test_a_capacity_of_sizes_that_are_none() -> None:
    """A factor multiplies them, so they are checked first."""
    with pytest.raises(ConfigError, match="topk must be an integer of at least 1, got None"):
        exchanges.capacity_rows(1.5, False, 32, None, 64, 4)
