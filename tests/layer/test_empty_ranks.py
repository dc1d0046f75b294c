"""Ranks that send or receive nothing, tensors of zero or one row with any strides, calls that break off on one rank."""

import pytest
import torch
import torch.distributed as dist

from tests.odd_strides import odd
from tests.patience import LIMIT_S
from triton_ep import EPAll2AllLayer, MXTensor, autograd
from triton_ep.distributed import current_heap
from triton_ep.errors import PeerFailed, WaitTimeout
from triton_ep.ops import combine as combine_ops
from triton_ep.ops import dispatch as dispatch_ops
from triton_ep.ops import routing as routing_ops
from triton_ep.testing import RankPool

HIDDEN, TOPK, EXPERTS = 128, 2, 2  # experts per rank
# Tokens by rank, and whether all go to rank 0: nobody sends, rank 0 sends nothing and both receive one row, rank 1
# receives nothing.
BATCHES = (((0, 0), False), ((0, 1), False), ((1, 3), True))
KINDS = {
    "exact": {},
    "local_combine": {"enable_local_combine": True},
    "static": {"capacity": 40},
    "mxfp8": {"payload": "mxfp8", "alignment": 16},
    "low_latency": {"capacity": 40, "low_latency": True},
}


def _layer(rank: int, nodes: int, ranks_per_node: int, **options) -> EPAll2AllLayer:
    world = nodes * ranks_per_node
    sizes = (8, HIDDEN, TOPK, rank, EXPERTS * world, ranks_per_node, world)
    limit_s = 60.0 if current_heap().device.type == "cuda" else LIMIT_S
    return EPAll2AllLayer(dist.group.WORLD, *sizes, timeout_s=limit_s, **options)


def _inputs(rank: int, tokens: tuple[int, ...], to_first: bool) -> tuple[torch.Tensor, ...]:
    """x, ids, weights: small integers and powers of two, so that nothing rounds, quantised or not."""
    device, count = current_heap().device, tokens[rank % len(tokens)]
    token = torch.arange(count, device=device)
    x = (1.0 + token % 3).bfloat16().unsqueeze(1).repeat(1, HIDDEN)
    idx = torch.stack([token % 2, 1 - token % 2] if to_first else [token % 4, (token + 2) % 4], 1).int()
    weights = torch.tensor([0.5, 0.25], device=device).repeat(count, 1)
    return odd(x), odd(idx), odd(weights)


def _plain(rows: torch.Tensor) -> torch.Tensor:
    return rows.dequantize() if isinstance(rows, MXTensor) else rows


def _check_calls(rank: int, nodes: int, ranks_per_node: int, kind: str) -> None:
    with _layer(rank, nodes, ranks_per_node, **KINDS[kind]) as layer:
        for tokens, to_first in BATCHES if kind == "exact" else BATCHES[1:]:
            x, idx, weights = _inputs(rank, tokens, to_first)
            recv_x, recv_weights, desc = layer.dispatch(x, idx, weights)
            rows = int(desc.expert_offsets[-1])
            if to_first and rank > 0:
                assert rows == 0
            y, row_weights = odd(_plain(recv_x).contiguous()), odd(recv_weights)
            assert torch.equal(layer.combine(y, desc), 2 * x)
            assert torch.equal(layer.combine(y, desc, row_weights), 0.75 * x)
            if kind == "low_latency":
                continue
            again, again_weights = layer.dispatch_again(x, desc, weights)
            assert torch.equal(_plain(again)[:rows], _plain(recv_x)[:rows])
            assert torch.equal(again_weights[:rows], recv_weights[:rows])
            if kind == "exact":
                _check_compact(layer, x, idx, weights)
            if layer.config.payload is None:
                _check_scaled(layer, x, idx, weights)
            else:
                quantised = MXTensor.to_mx(x)
                quantised = MXTensor.from_qdata_and_scales(odd(quantised.qdata), odd(quantised.scale), x.dtype)
                seen = layer.dispatch(quantised, idx, weights)[0]
                assert torch.equal(_plain(seen)[:rows], _plain(recv_x)[:rows])
        layer.check()


def _check_scaled(layer: EPAll2AllLayer, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> None:
    """One-byte rows with one float32 scale each: a single column, whose column stride may be any number."""
    data, scale = odd(x.to(torch.uint8)), odd(x[:, :1].float())
    recv, recv_scale, _, desc = layer.dispatch_scaled(data, scale, idx, weights)
    rows = int(desc.expert_offsets[-1])
    assert torch.equal(recv[:rows].float(), recv_scale[:rows].expand(rows, HIDDEN))
    again, scale_again, _, _ = layer.dispatch_scaled(data, scale, None, layout_desc=desc)
    assert torch.equal(again[:rows], recv[:rows]) and torch.equal(scale_again[:rows], recv_scale[:rows])


def _check_compact(layer: EPAll2AllLayer, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> None:
    rows = layer.dispatch_compact(x, idx, weights)
    here = (rows.topk_idx >= 0).any(1).sum().item()
    assert rows.x.shape[0] == here
    num_ranks = (idx // EXPERTS).sort(1).values
    distinct = 1 + (num_ranks[:, 1:] != num_ranks[:, :-1]).sum(1)
    assert torch.equal(layer.combine(odd(rows.x), rows.layout_desc), x * distinct.unsqueeze(1))
    sums, _ = layer.combine_topk(odd(rows.topk_weights), rows.layout_desc)
    assert torch.equal(sums, weights)
    assert torch.equal(layer.dispatch_compact_again(x, rows.layout_desc)[0], rows.x)
    data, scale = odd(x.to(torch.uint8)), odd(x[:, :1].float())
    scaled = layer.dispatch_compact(data, idx, weights, scale=scale)
    assert torch.equal(scaled.x.float(), scaled.scale.expand(here, HIDDEN))


@pytest.mark.plain
@pytest.mark.parametrize(
    "nodes, ranks_per_node, kind",
    [
        *((1, 2, kind) for kind in KINDS),
        (2, 1, "mxfp8"),
        pytest.param(2, 1, "exact", marks=pytest.mark.on_gpus),  # strides are read on the host, for any nodes alike
    ],
)
def test_calls_take_any_strides_of_no_or_one_row(run_ranks, nodes, ranks_per_node, kind):
    """All dispatches (plain, again, one-byte rows, compact), combine with and without weights, on idle ranks too."""
    run_ranks(_check_calls, nodes, ranks_per_node, kind)


def _check_gradients(rank: int, nodes: int, ranks_per_node: int, kind: str) -> None:
    with _layer(rank, nodes, ranks_per_node, **KINDS[kind]) as layer:
        for tokens, to_first in BATCHES[1:]:
            for in_combine in (False, True):
                x, idx, weights = _inputs(rank, tokens, to_first)
                x.requires_grad_(), weights.requires_grad_()
                rows, row_weights, desc = autograd.dispatch(layer, x, idx, weights)
                assert rows.shape[0] or not (to_first and rank == 0)
                y = _plain(rows) * 1.0 if in_combine else (_plain(rows) * row_weights.unsqueeze(1)).to(x.dtype)
                out = autograd.combine(layer, y, desc, row_weights if in_combine else None)
                assert torch.equal(out, 0.75 * x)
                out.sum().backward()  # of an expanded scalar
                assert torch.equal(x.grad, torch.full_like(x, 0.75))
                assert torch.equal(weights.grad, (HIDDEN * x[:, :1].float()).expand(weights.shape))
            # Sum of the received rows alone: their gradient is an expanded scalar, too.
            x, idx, _ = _inputs(rank, tokens, to_first)
            rows, _, _ = autograd.dispatch(layer, x.requires_grad_(), idx)
            _plain(rows).sum().backward()
            assert torch.equal(x.grad, torch.full_like(x, 2.0))
        layer.check()


@pytest.mark.plain
@pytest.mark.parametrize(
    "nodes, ranks_per_node, kind",
    [(1, 2, "exact"), (1, 2, "static"), (2, 1, "mxfp8"), (1, 2, "local_combine")],
)
def test_gradients_of_sums_reach_ranks_with_nothing_to_do(run_ranks, nodes, ranks_per_node, kind):
    """`.sum()` losses, forward and backward, with weights in combine or before it."""
    run_ranks(_check_gradients, nodes, ranks_per_node, kind)


# --- what breaks off in the middle of a call ------------------------------------------------------------


def _check_broken_off(rank: int, nodes: int, ranks_per_node: int, call: str) -> str:
    layer = _layer(rank, nodes, ranks_per_node)
    x, idx, weights = _inputs(rank, (3,), False)
    recv_x, _, desc = layer.dispatch(x, idx, weights)
    dist.barrier()  # no rank breaks off while another one is still in this dispatch
    module, step = (dispatch_ops, "push") if call == "dispatch" else (combine_ops, "_publish")
    original = getattr(module, step)

    def run() -> None:
        layer.dispatch(x, idx, weights) if call == "dispatch" else layer.combine(recv_x, desc)

    if rank == 0:
        with pytest.raises(PeerFailed) as raised:
            run()
        layer.finalize()
        return str(raised.value)
    setattr(module, step, _no_memory)
    try:
        with pytest.raises(RuntimeError, match="no memory left"):
            run()
    finally:
        setattr(module, step, original)
    with pytest.raises(WaitTimeout, match=rf"{call} broke off on rank 1 with RuntimeError: no memory left\. Finalize"):
        run()
    layer.finalize()
    return ""


def _no_memory(*_) -> None:
    raise RuntimeError("no memory left")


@pytest.mark.plain
@pytest.mark.parametrize("call", ["dispatch", "combine"])
def test_what_breaks_off_on_one_rank_is_told_to_those_that_wait(backend, call):
    """Waiting ranks get the cause at once, long before the time limit; the layer then raises it in every call."""
    if backend != "host":
        pytest.skip("on GPUs the waits of the other ranks expire instead")
    with RankPool(2) as pool:  # a pool of its own: an abort cannot be undone
        told = pool.run(_check_broken_off, 1, 2, call, timeout_s=LIMIT_S)
    assert "rank 1 failed while rank 0 waited" in told[0] and "no memory left" in told[0]


def _check_not_begun(rank: int, nodes: int, ranks_per_node: int) -> None:
    with _layer(rank, nodes, ranks_per_node) as layer:
        x, idx, weights = _inputs(rank, (3,), False)
        if rank == 1:
            original, routing_ops.prepare = routing_ops.prepare, _no_memory
            with pytest.raises(RuntimeError, match="no memory left"):
                layer.dispatch(x, idx, weights)
            routing_ops.prepare = original
        recv_x, _, desc = layer.dispatch(x, idx, weights)
        assert torch.equal(layer.combine(recv_x, desc), 2 * x)


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_what_breaks_off_before_anything_is_sent_may_be_tried_again(run_ranks, nodes, ranks_per_node):
    """The other ranks wait meanwhile, and the repeated call is correct."""
    run_ranks(_check_not_begun, nodes, ranks_per_node)
