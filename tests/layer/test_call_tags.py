"""Ranks in different calls: every rank raises CallMismatch with the call of each rank, and reads and writes nothing.

Correct programs never see that error, whatever they mix: replays of graphs and plain calls, refused calls, split-phase
calls, buffers that grow, rows of every kind.
"""

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.layer.cases import Case, combine_and_check, dispatch_and_check, make_layer, workloads
from tests.layer.test_large import _capture
from triton_ep import CallMismatch, EPAll2AllLayer, EPError, InputError, autograd
from triton_ep.context.calls import combine_name
from triton_ep.distributed import current_heap
from triton_ep.errors import WaitTimeout
from triton_ep.kernels.device import codes

PLAIN, ON_GPUS = pytest.mark.plain, pytest.mark.on_gpus

SMALL = Case("tags", tokens=(6, 9), hidden=32, topk=2, experts=2)
MODES = {
    "exact": SMALL,
    "exact_local": replace(SMALL, local_combine=True),
    "static_local": replace(SMALL, static=True, local_combine=True),
    "low_latency": replace(SMALL, low_latency=True),
}


def _inputs(layer: EPAll2AllLayer, case: Case, call: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, ids and weights of this rank."""
    mine, device = workloads(case, layer.config.world_size, call)[layer.config.rank], current_heap().device
    return mine.x.to(device), mine.topk_idx.to(device), mine.topk_weights.to(device)


def _rows(layer: EPAll2AllLayer, desc: object) -> torch.Tensor:
    """A row of ones for each received row of a dispatch."""
    return torch.ones(
        desc.num_recv_rows, layer.config.hidden, dtype=layer.config.token_dtype, device=layer.context.device
    )


def _told(layer: EPAll2AllLayer, call: Callable[[], object]) -> str:
    """Error text of a call that meets another call on other ranks, or of `check` after it; the layer then fails."""

    def checked() -> None:
        call()
        layer.check()

    with pytest.raises(CallMismatch) as caught:
        checked()
    assert isinstance(caught.value, EPError)
    with pytest.raises(WaitTimeout, match="different calls"):
        layer.dispatch(*_inputs(layer, SMALL))
    return str(caught.value)


def _end(layer: EPAll2AllLayer) -> None:
    """Finalize. Ranks saw the error at different times: no rank frees its memory while another rank still uses it."""
    if layer.context.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    layer.finalize()
    dist.barrier()


def _in_different(
    rank: int, nodes: int, ranks_per_node: int, case: Case, others: tuple[int, ...], differ: Callable[..., object]
) -> str:
    """Error text on a rank if ranks `others` call differ(layer, case, True) and the rest differ(layer, case, False)."""
    layer = make_layer(case, rank, nodes, ranks_per_node)
    combine_and_check(layer, dispatch_and_check(layer, case, 0))
    text = _told(layer, differ(layer, case, rank in others))
    _end(layer)
    return text


# --- combine --------------------------------------------------------------------------------------------


def _other_order(layer: EPAll2AllLayer, case: Case, other: bool) -> Callable[[], object]:
    """Combine two dispatches, equal except for their numbers, in different order."""
    first, second = (layer.dispatch(*_inputs(layer, case))[2] for _ in range(2))
    order = (second, first) if other else (first, second)
    return lambda: [layer.combine(_rows(layer, desc), desc) for desc in order]


def _other_weights(layer: EPAll2AllLayer, case: Case, other: bool) -> Callable[[], object]:
    """Weights on some ranks only."""
    _, weights, desc = layer.dispatch(*_inputs(layer, case))
    return lambda: layer.combine(_rows(layer, desc), desc, weights if other else None)


def _other_pass(layer: EPAll2AllLayer, case: Case, other: bool) -> Callable[[], object]:
    """The backward pass of a dispatch, which is a combine, against a forward combine of the same dispatch."""
    desc = layer.dispatch(*_inputs(layer, case))[2]

    def call() -> None:
        with layer.context.backward_pass() if other else nullcontext():
            layer.combine(_rows(layer, desc), desc)

    return call


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
@pytest.mark.parametrize(
    "mode", ["exact", *(pytest.param(m, marks=PLAIN) for m in ("exact_local", "static_local")), "low_latency"]
)
def test_combines_in_another_order(run_ranks, nodes, ranks_per_node, mode):
    """Each rank's error names the dispatch that every rank was combining."""
    for text in run_ranks(_in_different, nodes, ranks_per_node, MODES[mode], (1,), _other_order):
        low = "low-latency " if mode == "low_latency" else ""
        assert f"rank 0 in {low}combine of dispatch number 2 without weights" in text, text
        assert f"rank 1 in {low}combine of dispatch number 3 without weights" in text, text
        assert "finalize it on all ranks" in text


@pytest.mark.plain  # the test above already covers the comparison of that word
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
@pytest.mark.parametrize("mode", ["exact", "static_local", "low_latency"])
def test_weights_in_combine_on_some_ranks_only(run_ranks, nodes, ranks_per_node, mode):
    """No row is multiplied by stale weights of an earlier call."""
    for text in run_ranks(_in_different, nodes, ranks_per_node, MODES[mode], (0,), _other_weights):
        assert "rank 0 in" in text and "number 2 with weights; rank 1 in" in text and "number 2 without" in text, text


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_a_backward_combine_meets_a_forward_one(run_ranks, nodes, ranks_per_node):
    """Both combine the same dispatch, but on one rank the rows are gradients."""
    for text in run_ranks(_in_different, nodes, ranks_per_node, MODES["exact"], (1,), _other_pass):
        assert "rank 1 in combine of dispatch number 2 without weights in a backward pass" in text, text


def test_every_bit_of_a_combine_has_a_name():
    """Ranks in combines that differ in one bit are told apart."""
    bits = ("WEIGHTS", "SLOTS", "BACKWARD", "TOKEN_WEIGHTS", "BESIDE")
    tags = [getattr(codes, f"COMBINE_{bit}") | 3 << codes.COMBINE_SHIFT for bit in bits]
    names = {combine_name(tag) for tag in [3 << codes.COMBINE_SHIFT, *tags]}
    assert len(names) == 1 + len(bits) and all("dispatch number 3" in name for name in names)


@pytest.mark.parametrize(
    "nodes, ranks_per_node, others, local_combine",
    [
        pytest.param(1, 4, (2,), True, marks=ON_GPUS),  # one node: the tests above
        pytest.param(2, 2, (3,), False, marks=PLAIN),
        pytest.param(2, 2, (3,), True, marks=ON_GPUS),
        pytest.param(2, 2, (0, 1), False, marks=PLAIN),
    ],
)
def test_every_rank_hears_of_a_combine_that_differs(run_ranks, nodes, ranks_per_node, others, local_combine):
    """Also ranks without tokens, and ranks that agree with their node and counterparts while those nodes disagree."""
    case = replace(SMALL, tokens=(0, 5, 3, 0), local_combine=local_combine, drop=0.0)
    texts = run_ranks(_in_different, nodes, ranks_per_node, case, others, _other_order)
    for rank, text in enumerate(texts):
        assert "ranks of one layer are in different calls" in text, text
        known = text.split(" All ranks")[0]
        assert re.search(rf"\branks?\b[^;]*\b{rank}\b[^;]* in ", known), text
        if others == (3,) and rank == 0:
            assert "rank 2 in combines that differ within its node" in known, text


# --- dispatch -------------------------------------------------------------------------------------------


def _again_by_others(rank: int, nodes: int, ranks_per_node: int, static: bool) -> str:
    """dispatch_again with a small dispatch on one rank, a large one on the others: too many rows would arrive."""
    case = replace(SMALL, tokens=(1,), static=static)
    capacity = {"capacity": 40} if static else {}
    layer = make_layer(case, rank, nodes, ranks_per_node, max_tokens=9, **capacity)
    large = replace(case, tokens=(9,), routing="one_expert", drop=0.0)
    small_x, *_ = _inputs(layer, case)
    large_x, *_ = _inputs(layer, large)
    small, big = (layer.dispatch(*_inputs(layer, each)[:2])[2] for each in (case, large))
    buffers = [layer.context.local(name) for name in ("stage_x", "stage_meta")]
    if layer.context.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    before = [buffer.clone() for buffer in buffers]
    dist.barrier()
    mine = (small_x, small) if rank == 0 else (large_x, big)
    text = _told(layer, lambda: layer.dispatch_again(*mine))
    dist.barrier()
    for buffer, kept in zip(buffers, before, strict=True):
        assert torch.equal(buffer, kept), "a rank in another call has written rows or their tables"
    _end(layer)
    return text


@pytest.mark.parametrize(
    "nodes, ranks_per_node, static",
    [(1, 2, False), pytest.param(1, 2, True, marks=PLAIN), pytest.param(2, 1, False, marks=PLAIN)],
)
def test_dispatch_again_by_descriptors_of_different_dispatches(run_ranks, nodes, ranks_per_node, static):
    """The mismatch is detected before any row is sent, so that no rank receives more rows than it has room for."""
    for text in run_ranks(_again_by_others, nodes, ranks_per_node, static):
        assert "rank 0 in dispatch_again by the routing of dispatch number 1 without weights" in text, text
        assert "rank 1 in dispatch_again by the routing of dispatch number 2 without weights" in text, text


def _backward_meets_forward(rank: int, nodes: int, ranks_per_node: int, static: bool) -> str:
    """One rank is in the backward pass of autograd's combine, the others in the forward pass of the next step."""
    case = replace(SMALL, static=static, drop=0.0)
    layer = make_layer(case, rank, nodes, ranks_per_node)
    x, idx, _ = _inputs(layer, case)
    x.requires_grad_()
    recv_x, _, desc = autograd.dispatch(layer, x, idx)
    out = autograd.combine(layer, recv_x * 2, desc)

    def call() -> None:
        if rank == 0:
            out.float().sum().backward()
        else:
            autograd.dispatch(layer, x.detach(), idx)

    text = _told(layer, call) if static else None
    if text is None:

        def checked() -> None:
            call()
            layer.check()  # rank 0 sends by a known routing: its host reads nothing, and a GPU reports later

        with pytest.raises(CallMismatch) as caught:
            checked()
        text = str(caught.value)
    _end(layer)
    return text


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
@pytest.mark.parametrize("static", [False, True])
def test_a_backward_pass_meets_a_forward_pass(run_ranks, nodes, ranks_per_node, static):
    """No rank takes a gradient for a row, or a row for a gradient."""
    for text in run_ranks(_backward_meets_forward, nodes, ranks_per_node, static):
        where = text.split("rank 0 in ")[1].split(";")[0]
        assert where.startswith("dispatch") and where.endswith("in a backward pass"), text
        assert "rank 1 in dispatch without weights." in text, text


def _before_rows(rank: int, nodes: int, ranks_per_node: int) -> list[str]:
    """If all hosts read the reports before rows are sent, the layer stays usable."""
    texts = []
    with make_layer(SMALL, rank, nodes, ranks_per_node) as layer:
        x, idx, _ = _inputs(layer, SMALL)

        def backward() -> None:
            with layer.context.backward_pass() if rank == 1 else nullcontext():
                layer.dispatch(x, idx)

        def compact() -> None:
            (layer.dispatch_compact if rank == 1 else layer.dispatch)(x, idx)

        for call in (backward, compact):
            with pytest.raises(CallMismatch) as caught:
                call()
            texts.append(str(caught.value))
            combine_and_check(layer, dispatch_and_check(layer, SMALL, 1))
        layer.check()
    return texts


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_what_hosts_see_before_rows_are_sent_leaves_the_layer_usable(run_ranks, nodes, ranks_per_node):
    """Exact dispatches of different kinds raise on all ranks, and the next call is correct."""
    for backward, compact in run_ranks(_before_rows, nodes, ranks_per_node):
        assert "rank 0 in dispatch without weights; rank 1 in dispatch without weights in a backward pass" in backward
        assert "rank 1 in dispatch_compact without weights" in compact and "No row was sent" in compact


def _weights_in_dispatch(rank: int, nodes: int, ranks_per_node: int, case: Case) -> str:
    layer = make_layer(case, rank, nodes, ranks_per_node)
    x, idx, weights = _inputs(layer, case)
    text = _told(layer, lambda: layer.dispatch(x, idx, weights if rank == 0 else None))
    _end(layer)
    return text


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
@pytest.mark.parametrize("mode", ["static_local", "low_latency"])
def test_weights_in_dispatch_on_some_ranks_only(run_ranks, nodes, ranks_per_node, mode):
    """Devices compare the calls if no host does before rows are sent. (Exact layers: tests/layer/test_errors.py.)"""
    for text in run_ranks(_weights_in_dispatch, nodes, ranks_per_node, MODES[mode]):
        assert "dispatch with weights; rank 1" in text and "dispatch without weights" in text, text


# --- no false alarm -------------------------------------------------------------------------------------


class _Step:
    """Dispatch and combine over fixed addresses, captured on one rank and called on another."""

    def __init__(self, layer: EPAll2AllLayer, case: Case) -> None:
        self.layer, self.inputs = layer, _inputs(layer, case)
        self.again = not layer.config.low_latency

    def __call__(self) -> None:
        self.recv_x, self.recv_weights, self.desc = self.layer.dispatch(*self.inputs)
        if self.again:
            self.layer.dispatch_again(self.inputs[0], self.desc)
        self.out = self.layer.combine(_rows(self.layer, self.desc), self.desc)


def _mixed(rank: int, nodes: int, ranks_per_node: int, case: Case) -> str:
    layer = make_layer(case, rank, nodes, ranks_per_node)
    step = _Step(layer, case)
    step()
    want, first = step.out.clone(), step.desc
    replay = _capture(step, layer.context.device)
    captured = step.desc
    on_cpu = layer.context.device.type == "cpu"
    for _ in range(1 if on_cpu else 3):
        replay()
    if on_cpu:
        layer.context.num_dispatches += 3 * rank  # as if one host had made calls that another host replayed
    layer.check()
    for _ in range(2):  # the same call, replayed on some ranks and plain on others
        (replay if rank % 2 else step)()
    # Both descriptors are of the same dispatch: each replay rewrites the tables of the captured one.
    desc = captured if rank % 2 and layer.context.device.type == "cuda" else step.desc
    layer.combine(_rows(layer, desc), desc)
    if rank == 0:
        with pytest.raises(InputError):
            layer.dispatch(step.inputs[0][:, :31].contiguous(), step.inputs[1])
    else:
        layer.dispatch(*step.inputs)
    combine_and_check(layer, dispatch_and_check(layer, case, 1))
    replay()
    out = layer.combine(_rows(layer, first), first)
    assert torch.equal(out, want)
    layer.check()
    # If calls do differ, a mismatch with a replayed call is detected as well.
    text = _told(layer, replay if rank == 0 else lambda: layer.dispatch(*step.inputs[:2]))
    _end(layer)
    return text


@pytest.mark.parametrize(
    "mode, nodes, ranks_per_node",
    [
        pytest.param("static", 2, 1, marks=PLAIN),
        pytest.param("static_local", 1, 2, marks=PLAIN),
        pytest.param("static_local", 2, 1, marks=ON_GPUS),
        ("low_latency", 1, 2),
    ],
)
def test_replays_and_plain_calls_meet(run_ranks, mode, nodes, ranks_per_node):
    """Graphs on some ranks, plain calls on others, refused calls in between: no error until calls differ."""
    case = replace(MODES["static_local"], local_combine=False) if mode == "static" else MODES[mode]
    for text in run_ranks(_mixed, nodes, ranks_per_node, case, timeout_s=120):
        assert "dispatch with weights" in text and "dispatch without weights" in text, text
