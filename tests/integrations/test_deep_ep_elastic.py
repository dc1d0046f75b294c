"""deep_ep.ElasticBuffer: rows, scales, counts, source tokens, sums against the plain-torch references; its errors."""

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from triton_ep.distributed import current_heap
from triton_ep.errors import ConfigError, FinalizedError, InputError, PeerFailed, StaleHandleError
from triton_ep.integrations import deep_ep as door
from triton_ep.integrations.deep_ep.layers import layers_of
from triton_ep.reference import compact as compact_reference
from triton_ep.reference import dispatch as dispatch_reference
from triton_ep.testing import make_workload

HIDDEN, TOPK, EXPERTS, MOST = 128, 3, 2, 12  # experts per rank
TOKENS = (7, 0, 5, 9)  # per rank


@dataclass
class _Routing:
    """Inputs of all ranks, and the rows that this rank receives."""

    rank: int
    xs: list[torch.Tensor]
    idxs: list[torch.Tensor]
    weights: list[torch.Tensor]
    compact: list[compact_reference.CompactResult]
    expanded: dict[int, list[dispatch_reference.DispatchResult]]

    @classmethod
    def of(cls, rank: int, world_size: int, tokens: tuple[int, ...], **options: Any) -> "_Routing":
        num_experts = EXPERTS * world_size
        sizes = {"hidden": HIDDEN, "topk": TOPK, "num_experts": num_experts}
        works = [make_workload(r, world_size, tokens[r], **sizes, **options) for r in range(world_size)]
        works = [work.with_ids(torch.int64) for work in works]
        xs, weights = [w.x for w in works], [w.topk_weights for w in works]
        # DeepEP knows -1 alone as the mark of a dropped entry.
        idxs = [torch.where(w.topk_idx == num_experts, -1, w.topk_idx) for w in works]
        ranks = range(world_size)
        compact = [compact_reference.dispatch(xs, idxs, weights, r, num_experts) for r in ranks]
        expanded = {
            align: [dispatch_reference.dispatch(xs, idxs, weights, r, num_experts, align) for r in ranks]
            for align in (1, 4)
        }
        return cls(rank, xs, idxs, weights, compact, expanded)

    def arguments(self, do_expand: bool) -> dict[str, Any]:
        """Arguments of a dispatch on this rank."""
        device = current_heap().device
        return {
            "x": self.xs[self.rank].to(device),
            "topk_idx": self.idxs[self.rank].to(device),
            "topk_weights": self.weights[self.rank].to(device),
            "num_experts": EXPERTS * len(self.xs),
            "do_expand": do_expand,
        }


def _equal(got: torch.Tensor | None, expected: torch.Tensor) -> None:
    """Assert the same bits, dtype and shape."""
    assert got is not None
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    plain = torch.uint8 if got.dtype == torch.float8_e4m3fn else got.dtype
    assert torch.equal(got.cpu().view(plain), expected.view(plain))


def _aligned(counts: torch.Tensor, align: int) -> torch.Tensor:
    return (counts + align - 1) // align * align


def _check_counts(handle: Any, routing: _Routing, scaleup: int, align: int, sync: bool) -> None:
    """Check prefix sums, lists, numbers, and the source of each token."""
    ranks, mine = len(routing.xs), routing.compact[routing.rank]
    counts, arrived = mine.num_recv_tokens_per_expert, mine.src.shape[0]
    from_rank = torch.bincount(mine.src[:, 0], minlength=ranks).view(-1, scaleup).sum(0)
    _equal(handle.psum_num_recv_tokens_per_scaleup_rank, from_rank.cumsum(0).int())
    ends = _aligned(counts, align).cumsum(0)
    if handle.do_expand:
        _equal(handle.num_unaligned_recv_tokens_per_expert, counts.int())
        _equal(handle.psum_num_recv_tokens_per_expert, (ends - _aligned(counts, align) + counts).int())
    else:
        assert handle.num_unaligned_recv_tokens_per_expert is None
        _equal(handle.psum_num_recv_tokens_per_expert, ends.int())
    most = ranks * MOST
    expanded = _aligned(torch.tensor(most * min(TOPK, EXPERTS) + (align - 1) * EXPERTS), align)
    assert handle.num_recv_tokens == (arrived if sync else most)
    assert handle.num_expanded_tokens == (ends[-1] if sync else expanded)
    assert handle.num_recv_tokens_per_expert_list == (_aligned(counts, align).tolist() if sync else [])
    metadata = handle.recv_src_metadata
    assert metadata.shape == (handle.num_recv_tokens, 2 + TOPK)
    place = torch.arange(arrived, dtype=torch.int32)
    source = (mine.src[:, 0] * MOST + mine.src[:, 1]).int()
    _equal(metadata[:arrived, :2], torch.stack([source, place], 1))
    assert (metadata[arrived:] == -1).all()
    rows = torch.where(mine.recv_topk_idx >= 0, place.unsqueeze(1), -1)
    if handle.do_expand:
        rows = torch.full((arrived, TOPK), -1, dtype=torch.int32)
        src = routing.expanded[align][routing.rank].src
        for row, (rank, token, k) in enumerate(src.tolist()):
            if rank >= 0:
                rows[(source == rank * MOST + token).nonzero().item(), k] = row
    _equal(metadata[:arrived, 2:], rows)
    assert handle.recv_src_metadata is metadata


def _check_arrived(
    recv_x: Any, weights: torch.Tensor | None, routing: _Routing, handle: Any, align: int, x: Any
) -> None:
    """Check rows and their weights; x: inputs of all ranks, tensors or pairs."""
    if handle.do_expand:
        mine = routing.expanded[align][routing.rank]
        src, row_weights = mine.src, mine.recv_weights
    else:
        compact = routing.compact[routing.rank]
        src, row_weights = compact.src, compact.recv_topk_weights
    rows = src.shape[0]
    got, sent = (recv_x, x) if isinstance(recv_x, tuple) else ((recv_x,), [(each,) for each in x])
    for part, received in enumerate(got):
        plain = torch.uint8 if received.dtype == torch.float8_e4m3fn else received.dtype
        parts = [each[part].view(plain) for each in sent]
        zero = parts[0].new_zeros(1, parts[0].shape[1])  # padding
        expected = torch.cat([*parts, zero])[_rows_of(src, [len(each) for each in parts])]
        _equal(received[:rows].view(plain), expected)
    if weights is not None:
        _equal(weights[:rows], row_weights)


def _rows_of(src: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Row of each (rank, token) in the rows of all ranks, -1 = padding."""
    starts = torch.tensor([0, *itertools.accumulate(tokens)])
    return torch.where(src[:, 0] >= 0, starts[src[:, 0]] + src[:, 1], -1)


def _check_sums(
    buffer: door.ElasticBuffer, routing: _Routing, handle: Any, recv_x: Any, weights: Any, biases: bool = True, **order
) -> None:
    """Check sums, biases and weights, with small integers, whose sums are exact in any order."""
    device, idx = current_heap().device, routing.idxs[routing.rank]
    rows = recv_x[0].shape[0] if isinstance(recv_x, tuple) else recv_x.shape[0]
    first = 1.0 + routing.rank
    y = torch.full((rows, HIDDEN), first, device=device, dtype=torch.bfloat16)
    if not handle.do_expand:  # the caller sums over the experts of a rank
        ids = routing.compact[routing.rank].recv_topk_idx.to(device)
        y[: len(ids)] *= (ids >= 0).sum(1, keepdim=True).bfloat16()
    owner = torch.where(idx >= 0, idx // EXPERTS + 1, 0)
    expected = owner.sum(1, keepdim=True).expand(-1, HIDDEN).bfloat16()
    bias = tuple(torch.full(expected.shape, 2.0 + n, dtype=torch.bfloat16, device=device) for n in range(2))
    for given, more in ((None, 0), (bias[0], 2), (bias, 5))[: 3 if biases else 1]:
        out, back, event = buffer.combine(y, handle, topk_weights=weights, bias=given, **order)
        event.current_stream_wait()
        _equal(out, expected + more)
        _equal(back, torch.where(idx >= 0, routing.weights[routing.rank], 0.0))
    assert buffer.combine(y, handle)[1] is None


# (rows are expanded, the host waits, alignment)
MODES = ((False, True, 1), (False, False, 4), (True, True, 4), (True, False, 4), (True, True, 1))
MODES_OF_NODES = ((False, True, 1), (True, False, 4))  # modes do not change how nodes work: each value once
MODES_OF_NOTHING = ((False, True, 1), (True, False, 4), (False, False, 4), (True, True, 4))


def _check_modes(rank: int, nodes: int, ranks_per_node: int) -> None:
    ranks, device = nodes * ranks_per_node, current_heap().device
    pool = layers_of(dist.group.WORLD)
    pool.ranks_per_node, before = ranks_per_node, pool.ranks_per_node  # virtual nodes
    buffer = door.ElasticBuffer(
        dist.group.WORLD, num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=TOPK, deterministic=True
    )
    assert (
        buffer.get_logical_domain_size() == door.get_physical_domain_size(dist.group.WORLD) == (nodes, ranks_per_node)
    )
    assert door.get_logical_domain_size(dist.group.WORLD, False) == (1, ranks)
    assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == divmod(rank, ranks_per_node)
    routing = _Routing.of(rank, ranks, TOKENS)
    for number, (do_expand, sync, align) in enumerate(MODES if nodes == 1 else MODES_OF_NODES):
        asynchronous = number % 2 == 1
        order = {"async_with_compute_stream": asynchronous, "allocate_on_comm_stream": asynchronous}
        arguments = routing.arguments(do_expand)
        stats = torch.ones(EXPERTS, dtype=torch.int32, device=device)
        given = {**arguments, **order, "do_cpu_sync": sync, "expert_alignment": align}
        recv_x, ids, weights, handle, event = buffer.dispatch(
            **given, cumulative_local_expert_recv_stats=stats, previous_event=buffer.capture()
        )
        event.current_stream_wait()
        _check_arrived(recv_x, weights, routing, handle, align, routing.xs)
        arrived = routing.compact[rank]
        _equal(stats, (1 + arrived.num_recv_tokens_per_expert).int())
        if do_expand:
            assert ids is None
        else:
            _equal(ids[: len(arrived.src)], arrived.recv_topk_idx)
            assert (ids[len(arrived.src) :] == -1).all()
            ids.fill_(99)  # in place, as vLLM does: the handle has its own copy
        _check_counts(handle, routing, ranks_per_node, align, sync)
        assert handle.topk_idx is not arguments["topk_idx"]
        _equal(handle.topk_idx, routing.idxs[rank])
        _check_sums(buffer, routing, handle, recv_x, weights, biases=nodes == 1 or do_expand, **order)
        # With the handle: the rows doubled, and for expanded rows other weights.
        cached = {"handle": handle, "do_expand": do_expand, "do_zero_padding": True, **order}
        if do_expand:
            cached["topk_weights"] = arguments["topk_weights"]
        again, again_ids, again_weights, same, event = buffer.dispatch(arguments["x"] * 2, **cached)
        event.current_stream_wait()
        assert same is handle
        _check_arrived(again, again_weights, routing, handle, align, [2 * x for x in routing.xs])
        if not do_expand:
            _equal(again_ids[: len(arrived.src)], arrived.recv_topk_idx)
        # The same input gives the same bits, and the same source tokens.
        twice, _, _, other, event = buffer.dispatch(**given)
        event.current_stream_wait()
        rows = routing.expanded[align][rank].src.shape[0] if do_expand else len(arrived.src)
        _equal(twice[:rows], recv_x[:rows].cpu())
        _equal(other.recv_src_metadata, handle.recv_src_metadata.cpu())
    if nodes == 1:  # that of several nodes is the layer's
        _check_scales(buffer, routing)
        _check_nothing(rank, buffer)
    buffer.destroy()
    with pytest.raises(FinalizedError):
        buffer.dispatch(**routing.arguments(False))
    door.release()
    pool.ranks_per_node = before


def _check_scales(buffer: door.ElasticBuffer, routing: _Routing) -> None:
    """Check e4m3 rows with one pack of scales per 128 values: float32, or four exponents."""
    device, rank = current_heap().device, routing.rank
    for dtype, do_expand in ((torch.float32, False), (torch.int32, True)):
        pairs = [
            (x.float().clamp(-400, 400).to(torch.float8_e4m3fn), (x[:, :1].float() * 64).to(dtype).contiguous())
            for x in routing.xs
        ]
        data, scales = (each.to(device) for each in pairs[rank])
        arguments = {**routing.arguments(do_expand), "x": (data, scales), "use_tma_aligned_col_major_sf": do_expand}
        recv_x, _, weights, handle, _ = buffer.dispatch(**arguments)
        _check_arrived(recv_x, weights, routing, handle, 1, pairs)
        if do_expand:
            assert recv_x[1].stride() == (1, -(-recv_x[1].shape[0] // 4) * 4)
        _check_sums(buffer, routing, handle, recv_x, weights, biases=False)
        again, *_ = buffer.dispatch((data, scales), handle=handle, do_expand=do_expand)
        _check_arrived(again, None, routing, handle, 1, pairs)


def _check_nothing(rank: int, buffer: door.ElasticBuffer) -> None:
    """Check a dispatch without tokens on any rank, and one with all entries dropped."""
    ranks = buffer.num_ranks
    for tokens, options in (((0,) * ranks, {}), (TOKENS, {"routing": "all_dropped"})):
        routing = _Routing.of(rank, ranks, tokens, **options)
        for do_expand, sync, align in MODES_OF_NOTHING if not any(tokens) else MODES_OF_NOTHING[:2]:
            recv_x, _, weights, handle, _ = buffer.dispatch(
                **routing.arguments(do_expand), do_cpu_sync=sync, expert_alignment=align
            )
            assert sync <= (recv_x.shape[0] == 0)
            _check_counts(handle, routing, buffer.num_scaleup_ranks, align, sync)
            _check_sums(buffer, routing, handle, recv_x, weights, biases=False)


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), (2, 2)])
def test_all_modes_equal_the_references(run_ranks, nodes, ranks_per_node):
    """Compact and expanded rows, with and without a host wait, with handles, with scales, and without any tokens."""
    run_ranks(_check_modes, nodes, ranks_per_node)


def _check_mistakes(rank: int, nodes: int, ranks_per_node: int) -> None:
    ranks = nodes * ranks_per_node
    size = door.ElasticBuffer.get_buffer_size_hint(dist.group.WORLD, MOST, HIDDEN, num_topk=TOPK)
    assert size % (2 << 20) == 0
    buffer = door.ElasticBuffer(
        dist.group.WORLD, num_max_tokens_per_rank=MOST, hidden=HIDDEN, allow_multiple_reduction=False
    )
    assert (buffer.num_bytes, buffer.get_theoretical_num_qps(8)) == (size, 0)
    chosen = buffer.get_theoretical_num_sms(EXPERTS * ranks, TOPK)
    routing = _Routing.of(rank, ranks, TOKENS)
    arguments = routing.arguments(True)
    recv_x, _, weights, handle, event = buffer.dispatch(**arguments)
    assert event.event is None
    *_, other, _ = buffer.dispatch(**arguments, num_sms=chosen)
    assert other.layer is handle.layer  # the default number, passed explicitly, needs no separate layer
    _check_sums(buffer, routing, handle, recv_x, weights)
    x, by_handle = arguments["x"], {"handle": handle, "do_expand": True}
    stats = torch.zeros(EXPERTS + 1, dtype=torch.int32, device=x.device)
    for wrong, message in (
        ({**arguments, "num_experts": None}, "num_experts"),
        ({"x": x, **by_handle, "topk_idx": arguments["topk_idx"]}, "handle and topk_idx"),
        ({"x": x, **by_handle, "do_cpu_sync": True}, "do_cpu_sync"),
        ({"x": x, **by_handle, "do_expand": False}, "do_expand is False.*True"),
        ({"x": x, **by_handle, "expert_alignment": 4}, "expert_alignment is 4.*1"),
        ({"x": x[:, :64].contiguous(), **by_handle}, "64 values.*rows of 128"),
        ({**arguments, "do_cpu_sync": "no"}, "do_cpu_sync must be True or False"),
        ({**arguments, "cumulative_local_expert_recv_stats": stats}, r"recv_stats must be \[2\] int32, got \[3\]"),
        ({**arguments, "cumulative_local_expert_recv_stats": stats[1:].float()}, "recv_stats.*int32, got.*float32"),
        ({"x": x, **by_handle, "cumulative_local_expert_recv_stats": stats}, r"recv_stats must be \[2\]"),
    ):
        with pytest.raises(InputError, match=message):
            buffer.dispatch(**wrong)
    with pytest.raises(InputError, match=r"topk_weights must be \[\d+\]"):
        buffer.combine(recv_x, handle, topk_weights=torch.ones(1 + len(recv_x), device=x.device))
    with pytest.raises(StaleHandleError, match="tuple"):
        buffer.combine(recv_x, ())
    with pytest.raises(AttributeError, match="engram_write is not supported"):
        buffer.engram_write(x)
    assert not hasattr(buffer, "agrs_new_session")
    with pytest.raises(ConfigError, match="num_cpu_bytes"):
        door.ElasticBuffer(dist.group.WORLD, num_cpu_bytes=1)
    buffer.barrier(with_cpu_sync=True)
    door.release()


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_mistakes_are_named(run_ranks, nodes, ranks_per_node):
    """Arguments that contradict each other or a handle; calls that move no expert rows."""
    run_ranks(_check_mistakes, nodes, ranks_per_node)


def _check_refusals(rank: int, nodes: int, ranks_per_node: int) -> None:
    ranks = nodes * ranks_per_node
    buffer = door.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=MOST, hidden=HIDDEN)
    routing = _Routing.of(rank, ranks, TOKENS)
    refused = f"rank {ranks - 1} rejected its arguments"
    for do_expand in (False, True):
        arguments = routing.arguments(do_expand)
        x, idx = arguments["x"], arguments["topk_idx"]
        many = {"x": x.new_zeros(MOST + 1, HIDDEN), "topk_idx": idx.new_zeros(MOST + 1, TOPK), "topk_weights": None}
        for wrong, message in (
            (many, f"{MOST + 1} tokens were given.*is {MOST}"),
            ({"topk_idx": idx.float()}, "topk_idx must be .* int64 or int32"),
            ({"cumulative_local_expert_recv_stats": idx}, "recv_stats"),
            ({"x": x.double()}, "x must be .*, got torch.float64"),
            ({"x": (x, x)}, "quantised rows must be float8_e4m3fn|a tuple x must hold"),
        ):
            for order in ({}, {"async_with_compute_stream": True}):
                last = rank == ranks - 1
                with pytest.raises(InputError if last else PeerFailed, match=message if last else refused):
                    buffer.dispatch(**{**arguments, **order, **(wrong if last else {})})
        for sync in (False, True):  # where no host waits, the others learn it from check, and the layer stays usable
            if not sync and rank == ranks - 1:
                with pytest.raises(InputError, match="topk_idx must be"):
                    buffer.dispatch(**{**arguments, "topk_idx": idx.float()}, do_cpu_sync=False)
            elif not sync:
                *_, handle, _ = buffer.dispatch(**arguments, do_cpu_sync=False)
                with pytest.raises(PeerFailed, match=refused):
                    handle.layer.check()
            recv_x, _, weights, handle, _ = buffer.dispatch(**arguments, do_cpu_sync=sync)
            _check_sums(buffer, routing, handle, recv_x, weights)
    door.release()


@pytest.mark.plain  # the layer's own tests repeat its refusals, on several nodes too
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), pytest.param(2, 1, marks=pytest.mark.on_gpus)])
def test_other_ranks_learn_of_a_refusal(run_ranks, nodes, ranks_per_node):
    """Arguments that the buffer refuses on one rank raise PeerFailed on the others; the buffer serves the next call."""
    run_ranks(_check_refusals, nodes, ranks_per_node)


def _check_main(rank: int, nodes: int, ranks_per_node: int) -> None:
    ranks = nodes * ranks_per_node
    sizes = {"num_max_tokens_per_rank": MOST, "hidden": HIDDEN, "num_topk": TOPK}
    of_version_2, buffer = (kind(dist.group.WORLD, **sizes) for kind in (door.ElasticBuffer, door.EPBuffer))
    routing, asynchronous = _Routing.of(rank, ranks, TOKENS), {"async_with_compute_stream": True}
    for do_expand in (False, True):
        arguments = routing.arguments(do_expand)
        *want, want_handle, _ = of_version_2.dispatch(**arguments)
        want_out = of_version_2.combine(want[0], want_handle, topk_weights=want[2])[:2]
        for defer in (False, True):
            order = {**asynchronous, "defer_epilogue": True} if defer else {}
            made = buffer.dispatch(**arguments, **order)
            if defer:
                made = (*made.current_stream_wait(), made)
            *got, handle, event = made
            assert isinstance(event, door.EventOverlap) and isinstance(handle, door.EPHandle)
            assert handle.topk_idx.data_ptr() == arguments["topk_idx"].data_ptr()  # no copy
            for one, other in zip(got, want, strict=True):
                assert (one is None) == (other is None) and (one is None or torch.equal(one, other))
            out = buffer.combine(got[0], handle, topk_weights=got[2], **order)
            out = out.current_stream_wait() if defer else out[:2]
            assert all(map(torch.equal, out, want_out))
        again = buffer.dispatch(arguments["x"], handle=handle, do_expand=do_expand)[0]
        assert torch.equal(again, got[0])
    with pytest.raises(InputError, match="do_handle_copy must be False"):
        buffer.dispatch(**arguments, do_handle_copy=True)
    with pytest.raises(InputError, match="defer_epilogue=True needs async_with_compute_stream=True"):
        buffer.dispatch(**arguments, defer_epilogue=True)
    with pytest.raises(InputError, match="defer_epilogue=True needs async_with_compute_stream=True"):
        buffer.combine(got[0], handle, defer_epilogue=True)
    with pytest.raises(ConfigError, match="lb_allocation_plan_or_num_bytes"):
        door.EPBuffer(dist.group.WORLD, lb_allocation_plan_or_num_bytes=4096)
    with pytest.raises(AttributeError, match="lb_prefetch_weights is not supported"):
        buffer.lb_prefetch_weights(arguments["x"])
    with pytest.raises(AttributeError, match="pp_send is not supported"):
        buffer.pp_send(arguments["x"])
    door.release()


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_the_buffer_of_the_main_branch(run_ranks, nodes, ranks_per_node):
    """EPBuffer gives what ElasticBuffer gives, also from a deferred call's event."""
    run_ranks(_check_main, nodes, ranks_per_node)
