"""One-byte rows with scales equal the rows of the plain-torch reference bit for bit, whatever the bytes mean."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.layer.cases import layer_limit_s
from triton_ep import ConfigError, EPAll2AllLayer, InputError
from triton_ep.distributed import current_heap
from triton_ep.errors import PeerFailed
from triton_ep.reference import compact as compact_reference
from triton_ep.reference import dispatch as dispatch_reference
from triton_ep.testing import Workload, make_workload

TOPK, EXPERTS = 3, 3  # experts per rank
TOKENS = (7, 0, 18, 5)


@dataclass(frozen=True)
class Kind:
    """Rows and scales of a layer."""

    name: str
    data: torch.dtype
    scale: torch.dtype
    hidden: int
    options: dict[str, Any]


KINDS = (
    Kind("e4m3_by_128_padded", torch.float8_e4m3fn, torch.float32, 256, {"alignment": 8}),
    Kind("e5m2_by_32", torch.float8_e5m2, torch.float8_e8m0fnu, 160, {}),
    Kind("bytes_by_64_local", torch.uint8, torch.bfloat16, 64, {"enable_local_combine": True}),
    Kind("shorter_than_its_padding", torch.uint8, torch.uint8, 32, {}),
    Kind("e4m3_static", torch.float8_e4m3fn, torch.int32, 128, {"capacity": 160, "alignment": 4}),
)


def _works(kind: Kind, world_size: int) -> list[Workload]:
    sizes = {"hidden": kind.hidden, "topk": TOPK, "num_experts": EXPERTS * world_size}
    return [make_workload(rank, world_size, TOKENS[rank], **sizes) for rank in range(world_size)]


def _bytes(work: Workload, kind: Kind) -> torch.Tensor:
    """[T, H + H / 32] uint8 of every value, NaNs too; a row's bytes encode its origin."""
    return work.x.view(torch.uint8)[:, : kind.hidden + kind.hidden // 32]


def _pair(work: Workload, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
    data, scale = _bytes(work, kind).to(current_heap().device).split([kind.hidden, kind.hidden // 32], 1)
    return data.contiguous().view(kind.data), scale.contiguous().view(kind.scale)


def _layer(kind: Kind, rank: int, nodes: int, ranks_per_node: int, **options: Any) -> EPAll2AllLayer:
    world, options = nodes * ranks_per_node, {**kind.options, **options}
    sizes = (max(TOKENS), kind.hidden, TOPK, rank, EXPERTS * world, ranks_per_node, world)
    return EPAll2AllLayer(dist.group.WORLD, *sizes, timeout_s=layer_limit_s(), **options)


def _equal(data: torch.Tensor, scale: torch.Tensor | None, expected: torch.Tensor, kind: Kind) -> None:
    assert scale is not None
    assert (data.dtype, scale.dtype) == (kind.data, kind.scale)
    found = torch.cat([data.view(torch.uint8), scale.view(torch.uint8)], 1)[: len(expected)]
    assert torch.equal(found.cpu(), expected)


def _check(rank: int, nodes: int, ranks_per_node: int, kind: Kind) -> None:
    world, device = nodes * ranks_per_node, current_heap().device
    works = _works(kind, world)
    xs, idxs, all_weights = map(list, zip(*((w.x, w.topk_idx, w.topk_weights) for w in works), strict=True))
    sent = [_bytes(work, kind) for work in works]
    align, others = kind.options.get("alignment", 1), (idxs, all_weights, rank, EXPERTS * world)
    want, rows = (dispatch_reference.dispatch(each, *others, align) for each in (sent, xs))
    data, scale = _pair(works[rank], kind)
    x, idx, weights = xs[rank].to(device), idxs[rank].to(device), all_weights[rank].to(device)
    other = data.view(torch.uint8).flip(0).contiguous().view(kind.data)
    flipped = [each.clone() for each in sent]
    for each in flipped:
        each[:, : kind.hidden] = each[:, : kind.hidden].flip(0)
    with _layer(kind, rank, nodes, ranks_per_node) as layer:
        recv, recv_scale, recv_weights, desc = layer.dispatch_scaled(data, scale, idx, weights)
        _equal(recv, recv_scale, want.recv_x, kind)
        assert torch.equal(recv_weights.cpu()[: len(want.recv_weights)], want.recv_weights)
        assert layer.dispatch_scaled(data, scale, idx)[2] is None
        # The descriptor works for rows of both kinds, and combine for rows of the layer's dtype.
        plain, _, plain_desc = layer.dispatch(x, idx, weights)
        assert torch.equal(plain.cpu()[: len(rows.recv_x)], rows.recv_x)
        again, scale_again, _, _ = layer.dispatch_scaled(other, scale, None, layout_desc=desc)
        _equal(again, scale_again, dispatch_reference.dispatch(flipped, *others, align).recv_x, kind)
        assert torch.equal(layer.dispatch_again(x, desc)[0].cpu()[: len(rows.recv_x)], rows.recv_x)
        assert torch.equal(layer.combine(plain, desc, recv_weights), layer.combine(plain, plain_desc, recv_weights))
        if layer.config.recv_capacity is None:
            _check_compact(layer, kind, (data, scale, idx, weights), compact_reference.dispatch(sent, *others))
        layer.check()


def _check_compact(
    layer: EPAll2AllLayer, kind: Kind, given: tuple[torch.Tensor, ...], want: compact_reference.CompactResult
) -> None:
    data, scale, idx, weights = given
    for options in ({}, {"num_rows": len(want.recv_x) + 2}, {"async_finish": True}):
        rows = layer.dispatch_compact(data, idx, weights, scale=scale, **options)
        if rows.event is not None:
            rows.event.current_stream_wait()
        count = len(want.recv_x)
        _equal(rows.x, rows.scale, want.recv_x, kind)
        assert torch.equal(rows.topk_idx.cpu()[:count].long(), want.recv_topk_idx)
        assert torch.equal(rows.topk_weights.cpu()[:count], want.recv_topk_weights)
    again, scale_again, event = layer.dispatch_compact_again(data, rows.layout_desc, scale=scale)
    assert event is None
    _equal(again, scale_again, want.recv_x, kind)
    assert layer.dispatch_compact(torch.zeros(data.shape, dtype=torch.bfloat16, device=data.device), idx).scale is None


@pytest.mark.plain  # the kernels of dispatch
@pytest.mark.parametrize(
    "nodes, ranks_per_node, kind",
    [
        *((1, 2, kind) for kind in KINDS),
        (2, 1, KINDS[3]),
        (2, 1, KINDS[4]),
        (2, 1, KINDS[2]),
        *(pytest.param(2, 2, kind, marks=pytest.mark.on_gpus) for kind in (KINDS[0], KINDS[2])),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_bytes_arrive_as_they_were_sent(run_ranks, nodes, ranks_per_node, kind):
    """Expert-major with padding of zeros, and compact; by an earlier routing; mixed with rows of the layer's dtype."""
    run_ranks(_check, nodes, ranks_per_node, kind)


def _check_low_latency(rank: int, nodes: int, ranks_per_node: int) -> None:
    kind, world = KINDS[0], nodes * ranks_per_node
    works = _works(kind, world)
    others = [work.topk_idx for work in works], [work.topk_weights for work in works], rank, EXPERTS * world
    want = dispatch_reference.dispatch([_bytes(work, kind) for work in works], *others, 8)
    data, scale = _pair(works[rank], kind)
    x, idx, weights = (part.to(data.device) for part in (works[rank].x, works[rank].topk_idx, works[rank].topk_weights))
    options = {"low_latency": True, "capacity": 400}
    with _layer(kind, rank, nodes, ranks_per_node, **options) as layer:
        for _ in range(3):  # both halves of the staging rows, and the first again
            recv, recv_scale, recv_weights, desc, hook = layer.dispatch_scaled(
                data, scale, idx, weights, return_recv_hook=True
            )
            hook()
            _equal(recv, recv_scale, want.recv_x, kind)
            assert torch.equal(recv_weights.cpu()[: len(want.recv_x)], want.recv_weights)
            layer.combine(torch.zeros(recv.shape, dtype=torch.bfloat16, device=recv.device), desc)
        with pytest.raises(InputError, match="began with one-byte rows with scales, now there are rows of"):
            layer.dispatch(x, idx)
        with pytest.raises(ConfigError, match="refused with layout_desc"):
            layer.dispatch_scaled(data, scale, None, layout_desc=desc)
    with _layer(kind, rank, nodes, ranks_per_node, **options) as layer:
        layer.dispatch(x, idx)
        with pytest.raises(InputError, match=r"began with rows of torch\.bfloat16, now there are one-byte"):
            layer.dispatch_scaled(data, scale, idx)


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_low_latency_layers_send_rows_of_one_kind(run_ranks, nodes, ranks_per_node):
    """One-byte rows in both halves of the staging rows; rows of the other kind are refused."""
    run_ranks(_check_low_latency, nodes, ranks_per_node)


def _check_mistakes(rank: int, nodes: int, ranks_per_node: int) -> None:
    kind = KINDS[0]
    work = _works(kind, nodes * ranks_per_node)[0]
    data, scale = _pair(work, kind)
    x, idx, weights = (part.to(data.device) for part in (work.x, work.topk_idx, work.topk_weights))
    with _layer(kind, rank, nodes, ranks_per_node) as layer:
        for given, message in (
            ((x, scale), "input must be torch.uint8 or .*, got torch.bfloat16"),
            ((data, scale[:, :1].contiguous()), r"scale must have shape \[7, 2\], got \[7, 1\]"),
            ((data, scale[:5]), r"scale must have shape \[7, 2\], got \[5, 2\]"),
            ((data, scale.T.contiguous().T), "scale must be contiguous"),
            ((data, scale.double()), r"scale must have shape \[7, 1\], got \[7, 2\]"),
            ((data, None), "scale must be a tensor, got NoneType"),
            ((data[:, :128].contiguous(), scale), r"input must have shape \[any, 256\]"),
        ):
            with pytest.raises(InputError, match=message) if rank == 0 else pytest.raises(PeerFailed, match="rank 0"):
                layer.dispatch_scaled(*(given if rank == 0 else (data, scale)), idx, weights)
        for scaled, plain in (
            (partial(layer.dispatch_scaled, data, scale), partial(layer.dispatch, x)),
            (partial(layer.dispatch_compact, data, scale=scale), partial(layer.dispatch_compact, x)),
        ):
            with pytest.raises(InputError, match=r"ranks \[0\] of 2 dispatch one-byte rows"):
                (plain if rank else scaled)(exp_indices=idx)
        want, *_, desc = layer.dispatch_scaled(data, scale, idx)
        # With an earlier routing the others go on without its rows, and `check` reports it; then all are in step.
        if rank == 0:
            with pytest.raises(InputError, match=r"input must be torch\.uint8 or"):
                layer.dispatch_scaled(x, scale, None, layout_desc=desc)
            layer.check()
        else:
            layer.dispatch_scaled(data, scale, None, layout_desc=desc)
            with pytest.raises(PeerFailed, match="rank 0 rejected"):
                layer.check()
        compact = layer.dispatch_compact(x, idx).layout_desc
        with pytest.raises(InputError, match="not expert-major"):
            layer.dispatch_scaled(data, scale, None, layout_desc=compact)
        again, *_, hook = layer.dispatch_scaled(data, scale, idx, return_recv_hook=True)
        with pytest.raises(InputError, match="before the hook"):
            layer.dispatch_scaled(data, scale, idx)
        hook()
        assert torch.equal(again.view(torch.uint8), want.view(torch.uint8))
    with _layer(replace(kind, hidden=48), rank, nodes, ranks_per_node) as layer:
        wrong = (data[:, :48].contiguous(), torch.zeros(len(data), 1, dtype=torch.uint8, device=data.device), idx)
        if rank == 0:
            with pytest.raises(InputError, match="one-byte rows have 48 values"):
                layer.dispatch_scaled(*wrong)
        else:
            with pytest.raises(PeerFailed, match="rank 0 rejected"):
                layer.dispatch(x[:, :48].contiguous(), idx)
    refused = pytest.raises(ConfigError, match="quantise none, but this one has payload='mxfp8'")
    with _layer(kind, rank, nodes, ranks_per_node, payload="mxfp8") as layer, refused:
        layer.dispatch_scaled(data, scale, idx)


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), pytest.param(2, 1, marks=pytest.mark.on_gpus)])
def test_mistakes(run_ranks, nodes, ranks_per_node):
    """Every rank raises if one got a wrong argument, and the layer stays usable."""
    run_ranks(_check_mistakes, nodes, ranks_per_node)
