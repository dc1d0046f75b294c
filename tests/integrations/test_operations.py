"""Limit the torch operations and the functions of this package that a call of an integration runs in addition to those
of the layer's call.

Each operation takes microseconds of the host, and a kernel also takes GPU time; a function takes about a microsecond
where caches are cold. So these tests find, on a machine without a GPU, any cast, copy, fill or wrapper added to an
integration. A comment next to each number of operations explains it.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.layer.test_host_calls import functions_of
from triton_ep import distributed as ep_distributed
from triton_ep.distributed import current_heap
from triton_ep.integrations import megatron
from triton_ep.integrations.deep_ep import Buffer, ElasticBuffer, HybridEPBuffer, release
from triton_ep.layer import EPAll2AllLayer
from triton_ep.runtime import launch

TOKENS, HIDDEN, TOPK, EXPERTS, PAD = 5, 256, 4, 8, 16
Calls = dict[str, Callable[[], object]]


class _Operations(TorchDispatchMode):
    """Counts torch operations by name, except those that the interpreter runs for kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._interpreting = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += not self._interpreting
        return func(*args, **(kwargs or {}))

    def interpret(self, *arguments: Any) -> None:
        """Replaces `runtime.launch._interpret`, through which all interpreted launches go."""
        self._interpreting = True
        try:
            _INTERPRET(*arguments)
        finally:
            self._interpreting = False


_INTERPRET = launch._interpret


def _operations(call: Callable[[], object]) -> Counter[str]:
    """Operations of the fourth call: the first three may create layers and lasting memory, and tables for the next."""
    for _ in range(3):
        call()
    with _Operations() as operations, mock.patch.object(launch, "_interpret", operations.interpret):
        call()
    return operations.counts


def _more(doors: Calls, layers: Calls, most: dict[str, tuple[str, int, int]]) -> None:
    """Check that each integration's call runs at most the given number of operations more than the layer's call, and on
    the CPU the given number of functions; on a GPU streams add some."""
    counts: list[tuple[int, Callable[[Callable[[], object]], Counter[str]]]] = [(0, _operations)]
    if launch.INTERPRETING:
        counts.append((1, functions_of))
    for which, count in counts:
        of_layers = {beside: count(layers[beside]) for beside in dict.fromkeys(each[0] for each in most.values())}
        for name, (beside, *extra) in most.items():
            door, layer = count(doors[name]), of_layers[beside]
            told = f"{name}: {dict(door - layer)} more than {beside}, which has {dict(layer)}"
            assert door.total() - layer.total() <= extra[which], told


def _inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows [T, H], distinct ids [T, K] int64 in ascending order, weights."""
    chosen = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS - rank, HIDDEN, generator=chosen).bfloat16()
    idx = torch.rand(TOKENS - rank, EXPERTS, generator=chosen).argsort(1)[:, :TOPK].sort(1).values
    device = current_heap().device
    return x.to(device), idx.to(device), torch.rand(idx.shape, generator=chosen).to(device)


def _layer(**options: Any) -> EPAll2AllLayer:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    per_node = ep_distributed.local_world_size()
    return EPAll2AllLayer(dist.group.WORLD, TOKENS, HIDDEN, TOPK, rank, EXPERTS, per_node, ranks, **options)


def _scaled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.to(torch.float8_e4m3fn), torch.ones(len(x), HIDDEN // 128, device=x.device)


def _check_compact_rows(rank: int, nodes: int, ranks_per_node: int) -> None:
    group, (x, idx, weights), ranks = dist.group.WORLD, _inputs(rank), nodes * ranks_per_node
    buffer = Buffer(group, Buffer.get_dispatch_config(ranks).get_nvl_buffer_size_hint(2 * HIDDEN, ranks))
    elastic = ElasticBuffer(group, num_max_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOPK)
    layer = _layer(enable_local_combine=True)
    data, scale = _scaled(x)
    counts = buffer.get_dispatch_layout(idx, EXPERTS)[2]
    routing = {"topk_idx": idx, "topk_weights": weights, "num_tokens_per_expert": counts}
    to_elastic = {"topk_idx": idx, "topk_weights": weights, "num_experts": EXPERTS}
    rows = layer.dispatch_compact(x, idx, weights)
    recv_x, _, _, _, handle, _ = buffer.dispatch(x, **routing)
    elastic_x, _, _, elastic_handle, _ = elastic.dispatch(x, **to_elastic)
    leaf, probs = x.clone().requires_grad_(), weights.clone().requires_grad_()

    def layer_round() -> torch.Tensor:
        rows = layer.dispatch_compact(x, idx, weights)
        return layer.combine(rows.x, rows.layout_desc)

    def layer_both() -> object:
        rows = layer.dispatch_compact(x, idx, weights)
        layer.combine(rows.x, rows.layout_desc)
        grad, _ = layer.dispatch_compact_again(x, rows.layout_desc)
        layer.combine(grad, rows.layout_desc)
        assert rows.topk_weights is not None
        return layer.combine_topk(rows.topk_weights, rows.layout_desc)

    def fused() -> torch.Tensor:
        recv, _, _, _, made = megatron.fused_dispatch(leaf, idx, probs, EXPERTS, group, True, True)
        return megatron.fused_combine(recv, group, made, True, True)[0]

    def fused_both() -> None:
        leaf.grad = probs.grad = None
        fused().backward(x)

    doors: Calls = {
        "deep_ep layout": lambda: buffer.get_dispatch_layout(idx, EXPERTS),
        "deep_ep dispatch": lambda: buffer.dispatch(x, **routing),
        "deep_ep dispatch of one-byte rows": lambda: buffer.dispatch((data, scale), **routing),
        "deep_ep combine": lambda: buffer.combine(recv_x, handle),
        "deep_ep dispatch again": lambda: buffer.dispatch(x, handle=handle),
        "elastic dispatch": lambda: elastic.dispatch(x, **to_elastic),
        "elastic dispatch of one-byte rows": lambda: elastic.dispatch((data, scale), **to_elastic),
        "elastic combine": lambda: elastic.combine(elastic_x, elastic_handle),
        "elastic dispatch again": lambda: elastic.dispatch(x, handle=elastic_handle),
        "fused_a2a forward": fused,
        "fused_a2a forward and backward": fused_both,
    }
    layers: Calls = {
        "nothing": lambda: None,
        "dispatch": lambda: layer.dispatch_compact(x, idx, weights),
        "dispatch of one-byte rows": lambda: layer.dispatch_compact(data, idx, weights, scale=scale),
        "combine": lambda: layer.combine(rows.x, rows.layout_desc),
        "dispatch again": lambda: layer.dispatch_compact_again(x, rows.layout_desc),
        "round": layer_round,
        "forward and backward": layer_both,
    }
    _more(
        doors,
        layers,
        {
            "deep_ep layout": ("nothing", 2, 7),  # the bytes of [T, W]; memory and its views are made for many calls
            "deep_ep dispatch": ("dispatch", 0, -2),
            "deep_ep dispatch of one-byte rows": ("dispatch of one-byte rows", 0, 0),
            "deep_ep combine": ("combine", 0, 1),
            "deep_ep dispatch again": ("dispatch again", 0, 9),
            "elastic dispatch": ("dispatch", 0, 0),
            "elastic dispatch of one-byte rows": ("dispatch of one-byte rows", 0, 1),
            "elastic combine": ("combine", 0, 1),
            "elastic dispatch again": ("dispatch again", 2, 5),  # memory for ids, and the numbers of rows
            "fused_a2a forward": ("round", 0, 5),
            # Zeros for the unused probabilities, and what autograd keeps of two gradients.
            "fused_a2a forward and backward": ("forward and backward", 3, 34),
        },
    )


def _check_expert_major_rows(rank: int, nodes: int, ranks_per_node: int) -> None:
    group, (x, idx, weights), ranks = dist.group.WORLD, _inputs(rank), nodes * ranks_per_node
    hybrid = HybridEPBuffer(group, HIDDEN, TOKENS, EXPERTS // ranks, use_fp8=True, topk=TOPK)
    elastic = ElasticBuffer(group, num_max_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOPK)
    layer = _layer(alignment=PAD, enable_local_combine=True)
    data, scale = _scaled(x)
    device, shape = x.device, (len(x), EXPERTS)
    by_map = {
        "routing_map": torch.zeros(shape, dtype=torch.bool, device=device).scatter_(1, idx, True),
        "probs": torch.zeros(shape, device=device).scatter_(1, idx, weights),
        "pad_multiple": PAD,
    }
    by_ids = {"topk_idx": idx, "topk_weights": weights, "num_of_experts": EXPERTS, "pad_multiple": PAD}
    to_elastic = {"num_experts": EXPERTS, "do_expand": True, "expert_alignment": PAD}
    recv_x, _, desc = layer.dispatch(x, idx, weights)
    assert isinstance(recv_x, torch.Tensor)
    hybrid_x, _, _, _, handle = hybrid.dispatch_with_permute(hidden=x, **by_map)
    fp8 = {"hidden": data, "scaling_factor": scale}
    doors: Calls = {
        "hybrid_ep dispatch by map": lambda: hybrid.dispatch_with_permute(hidden=x, **by_map),
        "hybrid_ep dispatch by ids": lambda: hybrid.dispatch_with_permute(hidden=x, **by_ids),
        "hybrid_ep dispatch of one-byte rows": lambda: hybrid.dispatch_with_permute(**fp8, **by_ids),
        "hybrid_ep combine": lambda: hybrid.combine_with_unpermute(hidden=hybrid_x, handle=handle),
        "hybrid_ep dispatch again": lambda: hybrid.dispatch_with_permute(hidden=x, handle=handle),
        "elastic dispatch": lambda: elastic.dispatch(x, idx, weights, **to_elastic),
    }
    layers: Calls = {
        "dispatch": lambda: layer.dispatch(x, idx, weights),
        "dispatch of one-byte rows": lambda: layer.dispatch_scaled(data, scale, idx, weights),
        "combine": lambda: layer.combine(recv_x, desc),
        "dispatch again": lambda: layer.dispatch_again(x, desc),
    }
    _more(
        doors,
        layers,
        {
            "hybrid_ep dispatch by map": (
                "dispatch",
                4,
                3,
            ),  # rows of assignments, their lines in use, and the bytes of the map
            "hybrid_ep dispatch by ids": ("dispatch", 2, -1),  # rows of assignments, and their lines in use
            "hybrid_ep dispatch of one-byte rows": ("dispatch of one-byte rows", 2, 2),
            "hybrid_ep combine": ("combine", 0, 1),
            "hybrid_ep dispatch again": ("dispatch again", 0, 8),
            "elastic dispatch": ("dispatch", 0, 1),
        },
    )


def _check_low_latency(rank: int, nodes: int, ranks_per_node: int) -> None:
    group, (x, idx, weights), ranks = dist.group.WORLD, _inputs(rank), nodes * ranks_per_node
    size = Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, ranks, EXPERTS)
    buffer = Buffer(group, 0, size, low_latency_mode=True)
    capacity = ranks * TOKENS * min(TOPK, EXPERTS // ranks)
    layer = _layer(capacity=capacity, low_latency=True, enable_local_combine=True)
    one_byte = _layer(capacity=capacity, low_latency=True, enable_local_combine=True)
    data, scale = _scaled(x)
    recv_x, recv_weights, desc = layer.dispatch(x, idx, weights)
    assert isinstance(recv_x, torch.Tensor)
    slabs, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, TOKENS, EXPERTS, use_fp8=False)
    with_weights: dict[str, Any] = {"use_fp8": False, "topk_weights": weights}
    handle_of_weights = buffer.low_latency_dispatch(x, idx, TOKENS, EXPERTS, **with_weights)[2]
    doors: Calls = {
        "dispatch": lambda: buffer.low_latency_dispatch(x, idx, TOKENS, EXPERTS, use_fp8=False),
        "dispatch with weights": lambda: buffer.low_latency_dispatch(x, idx, TOKENS, EXPERTS, **with_weights),
        "dispatch of one-byte rows": lambda: buffer.low_latency_dispatch(x, idx, TOKENS, EXPERTS),
        "combine": lambda: buffer.low_latency_combine(slabs, idx, weights, handle),
        "combine by weights of dispatch": lambda: buffer.low_latency_combine(slabs, idx, weights, handle_of_weights),
    }
    layers: Calls = {
        "dispatch": lambda: layer.dispatch(x, idx),
        "dispatch with weights": lambda: layer.dispatch(x, idx, weights),
        "dispatch of one-byte rows": lambda: one_byte.dispatch_scaled(data, scale, idx),
        "combine": lambda: layer.combine(recv_x, desc, recv_weights),
    }
    _more(
        doors,
        layers,
        {
            # The number of an expert's rows.
            "dispatch": ("dispatch", 1, 24),
            "dispatch with weights": ("dispatch with weights", 1, 24),
            # The dispatch quantises rows itself.
            "dispatch of one-byte rows": ("dispatch of one-byte rows", 0, 28),
            # The dispatch that carries the weights, its rows and slabs; slabs as rows.
            "combine": ("dispatch with weights", 4, 4),
            # Slabs as rows; kept ids, which the checks read.
            "combine by weights of dispatch": ("combine", 2, 14),
        },
    )


def _released(rank: int, nodes: int, ranks_per_node: int, check: Callable[..., None]) -> None:
    check(rank, nodes, ranks_per_node)
    release(dist.group.WORLD)


@pytest.mark.plain
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 1), pytest.param(1, 2, marks=pytest.mark.on_gpus)])
@pytest.mark.parametrize("check", [_check_compact_rows, _check_expert_major_rows, _check_low_latency])
def test_doors_run_no_more_operations(
    check: Callable[..., None], nodes: int, ranks_per_node: int, run_ranks: Callable[..., list[Any]]
) -> None:
    """Rows by rank, rows by expert, low latency."""
    run_ranks(_released, nodes, ranks_per_node, check)
