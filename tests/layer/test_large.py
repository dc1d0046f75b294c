"""Model sizes, indices past 2**31, thousands of calls, and static mode without the host: tests that need fast GPUs.

With the host backend the same code runs at toy sizes, which tests it before it runs on a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.combinations import combinations
from tests.layer.cases import Case, combine_and_check, dispatch_and_check, layer_limit_s, make_layer
from tests.layer.origins import apply_experts_in_place, combine_excess, drawn_weights, row_experts
from triton_ep import EPAll2AllLayer, MXTensor
from triton_ep.bench.origins import arrivals, coded_rows, first_difference
from triton_ep.bench.routing import uniform_idx
from triton_ep.context.layout import Sizes, estimate_bytes
from triton_ep.distributed import current_heap
from triton_ep.reference import mxfp8
from triton_ep.testing import apply_expert

TOPOLOGIES = [(1, 2), (2, 1), (1, 4), (2, 2), (1, 8), (2, 4)]
TOPK = 8


def _two_ranks(nodes: int, ranks_per_node: int, *_: Any) -> bool:
    """Two CPU ranks, of one node and of two, stand for other numbers; other files test four."""
    return nodes * ranks_per_node == 2


def _layer(rank: int, nodes: int, ranks_per_node: int, tokens: int, hidden: int, experts: int, **kwargs):
    return EPAll2AllLayer(
        dist.group.WORLD,
        tokens,
        hidden,
        TOPK,
        rank,
        experts,
        ranks_per_node,
        nodes * ranks_per_node,
        timeout_s=layer_limit_s(),
        **kwargs,
    )


# --- model size ------------------------------------------------------------------------------------------------


def _model_size(rank, nodes, ranks_per_node, tokens, hidden, experts, local_combine, payload):
    world, device = nodes * ranks_per_node, current_heap().device
    options = {"num_sm": 32, "enable_local_combine": local_combine, "payload": payload}
    with _layer(rank, nodes, ranks_per_node, tokens, hidden, experts, **options) as layer:
        for call in range(2):
            # Another number of tokens on every rank and call.
            counts = [tokens - (3 * r + 5 * call) % 16 for r in range(world)]
            rows = [coded_rows(r, counts[r], hidden, call, device) for r in range(world)]
            idxs = [uniform_idx(r, counts[r], TOPK, experts, call, drop=0.05) for r in range(world)]
            weights = [drawn_weights(r, counts[r], TOPK, call) for r in range(world)]
            recv_x, recv_weights, desc = layer.dispatch(rows[rank], idxs[rank].to(device), weights[rank].to(device))
            want = arrivals(idxs, rank, experts // world, device)
            assert torch.equal(desc.expert_offsets, want.expert_offsets)
            assert recv_x.shape[0] == want.entry.numel()
            if payload is not None:
                recv_x, rows = _check_quantised(recv_x, rows, want.entry // TOPK)
            difference = first_difference(recv_x, torch.cat(rows), want.entry // TOPK)
            assert difference is None, difference
            assert torch.equal(recv_weights, torch.cat([w.flatten() for w in weights]).to(device)[want.entry])
            apply_experts_in_place(recv_x, row_experts(desc.expert_offsets, recv_x.shape[0], rank * experts // world))
            out = layer.combine(recv_x, desc)
            excess = combine_excess(out, rows[rank], idxs[rank], local_combine=local_combine)
            assert excess <= 0, f"combine is off by {excess} more than rounding explains"
        layer.check()


def _check_quantised(
    recv_x: MXTensor, rows: list[torch.Tensor], tokens: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Compare elements and scales with the oracle's; return received and sent rows as values in bf16."""
    parts = [mxfp8.quantize(each) for each in rows]
    data, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    for got, sent in ((recv_x.qdata, data), (recv_x.scale, scales)):
        difference = first_difference(got.view(torch.uint8), sent.view(torch.uint8), tokens)
        assert difference is None, difference
    return recv_x.dequantize(), [mxfp8.dequantize(*each, torch.bfloat16) for each in parts]


def _model_on_cpu(nodes: int, ranks_per_node: int, payload: str | None, local_combine: bool) -> bool:
    """Either payload once with local combine, and once without."""
    return _two_ranks(nodes, ranks_per_node) and (payload is None) == (local_combine is (nodes > 1))


@pytest.mark.plain
@pytest.mark.parametrize(
    "nodes, ranks_per_node, payload, local_combine",
    combinations(TOPOLOGIES, [None, "mxfp8"], [False, True], on_cpu=_model_on_cpu),
)
def test_model_size_is_exact(run_ranks, backend, nodes, ranks_per_node, local_combine, payload):
    """4096 tokens of 7168 elements to the top 8 of 256 experts: rows and weights bit for bit, sums within rounding."""
    sizes = (4096, 7168, 256) if backend != "host" else (20, 64, 64)
    run_ranks(_model_size, nodes, ranks_per_node, *sizes, local_combine, payload)


# --- ranks that are done early ---------------------------------------------------------------------------------


def _done_early(rank, nodes, ranks_per_node, tokens, hidden, experts, calls):
    """Ranks with an odd number have no tokens, so they pull nothing while they still sum rows for the others."""
    world, device = nodes * ranks_per_node, current_heap().device
    options = {"num_sm": 20, "enable_local_combine": True, "shared_staging": True}
    with _layer(rank, nodes, ranks_per_node, tokens, hidden, experts * world, **options) as layer:
        for call in range(calls):
            count = 0 if rank % 2 else tokens - 3 * rank
            token = torch.arange(count, device=device).unsqueeze(1)
            # Other integers in each call, of which eight sum exactly.
            x = (1 + (7 * token + 3 * torch.arange(hidden, device=device) + 5 * call + rank) % 4).bfloat16()
            idx = uniform_idx(rank, count, TOPK, experts * world, call).to(device)
            recv_x, _, desc = layer.dispatch(x, idx)
            assert torch.equal(layer.combine(recv_x, desc), TOPK * x), f"call {call}"
        layer.check()


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", combinations(TOPOLOGIES, on_cpu=_two_ranks))
def test_ranks_without_tokens_sum_rows_for_the_others(run_ranks, backend, nodes, ranks_per_node):
    """On GPUs, sums are pulled while later ones are computed, on every rank at its own time."""
    sizes = (4096, 2048, 16, 6) if backend != "host" else (20, 64, 8, 3)
    run_ranks(_done_early, nodes, ranks_per_node, *sizes)


# --- more than 2**31 elements --------------------------------------------------------------------------------


def _past_int32(rank, nodes, ranks_per_node, hidden, elements):
    """Every rank sends all its tokens to the 8 experts of rank 0, whose `recv_x` then exceeds `elements`."""
    world, device = nodes * ranks_per_node, current_heap().device
    tokens = elements * 21 // 20 // (world * TOPK * hidden) + 1
    rows = torch.cat([coded_rows(r, tokens, hidden, 0, device) for r in range(world)])
    mine = rows[rank * tokens : (rank + 1) * tokens]
    # Rolled, so that the expert does not determine k.
    idx = ((torch.arange(TOPK) + torch.arange(tokens).unsqueeze(1)) % TOPK).int()
    with _layer(rank, nodes, ranks_per_node, tokens, hidden, TOPK * world, num_sm=32) as layer:
        recv_x, _, desc = layer.dispatch(mine, idx.to(device))
        arriving = world * tokens if rank == 0 else 0
        assert recv_x.shape == (arriving * TOPK, hidden)
        assert rank or recv_x.numel() > elements
        for expert in range(TOPK if rank == 0 else 0):
            # Every expert's segment has all tokens, sorted by source rank and token.
            segment = recv_x[expert * arriving : (expert + 1) * arriving]
            difference = first_difference(segment, rows, torch.arange(arriving, device=device))
            assert difference is None, f"expert {expert}: {difference}"
        if rank == 0:
            # Check again by flat position, without the arithmetic of segments.
            for element in (0, elements - 1, elements, recv_x.numel() - 1):
                row, column = divmod(element, hidden)
                assert recv_x.view(-1)[element] == rows[row % arriving, column], f"element {element}"
        apply_experts_in_place(recv_x, row_experts(desc.expert_offsets, recv_x.shape[0], rank * TOPK))
        excess = combine_excess(layer.combine(recv_x, desc), mine, idx)
        assert excess <= 0, f"combine is off by {excess} more than rounding explains"
        layer.check()
    return estimate_bytes(Sizes(layer.config, layer.context.sizes.arrival_rows, layer.context.sizes.output_rows))


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", combinations(TOPOLOGIES, on_cpu=_two_ranks))
def test_more_than_two_to_the_31_elements(run_ranks, backend, nodes, ranks_per_node):
    """Row offsets do not wrap: a receive buffer of 1.05 * 2**31 elements, with every row and the combine checked."""
    hidden, elements = (7168, 2**31) if backend != "host" else (40, 2**12)
    symmetric = run_ranks(_past_int32, nodes, ranks_per_node, hidden, elements)
    # Every rank had one symmetric buffer at least as large as the received rows.
    assert min(symmetric) > elements * torch.bfloat16.itemsize


# --- many calls ------------------------------------------------------------------------------------------------


def _random_calls(rank, nodes, ranks_per_node, calls, case, most):
    draw = random.Random(calls)
    with make_layer(case, rank, nodes, ranks_per_node, max_tokens=most) as layer:
        live = []
        for call in range(calls):
            tokens = tuple(draw.randint(0, most) for _ in range(nodes * ranks_per_node))
            routing = draw.choice(("uniform", "uniform", "skewed", "one_expert", "all_dropped", "duplicates"))
            now = replace(case, tokens=tokens, routing=routing, weights=draw.random() < 0.5)
            live.append(dispatch_and_check(layer, now, call))
            while len(live) > 4 or (live and draw.random() < 0.5):
                combine_and_check(layer, live.pop(draw.randrange(len(live))))
        for call in live:
            combine_and_check(layer, call)
        layer.check()


def _random_on_cpu(nodes: int, ranks_per_node: int, local_combine: bool) -> bool:
    """A few calls of four ranks on two nodes; test_life.py has more calls of two."""
    return (nodes, ranks_per_node) == (2, 2) and not local_combine


@pytest.mark.plain
@pytest.mark.parametrize(
    "nodes, ranks_per_node, local_combine",
    combinations([pair for pair in TOPOLOGIES if pair[0] * pair[1] > 2], [False, True], on_cpu=_random_on_cpu),
)
def test_two_thousand_random_calls(run_ranks, backend, nodes, ranks_per_node, local_combine):
    """Random token counts, routings and weights, up to five live descriptors combined in random order."""
    calls, most = (1000, 64) if backend != "host" else (4, 20)
    case = Case("many", hidden=64, topk=4, experts=4, local_combine=local_combine)
    run_ranks(_random_calls, nodes, ranks_per_node, calls, case, most)


# --- static mode without the host ----------------------------------------------------------------------------


class _StaticCall:
    """Inputs at fixed addresses, one dispatch + experts + combine over them, and the check of its results."""

    def __init__(
        self, rank: int, nodes: int, ranks_per_node: int, low_latency: bool, tokens: int, hidden: int, experts: int
    ) -> None:
        self.rank, self.world = rank, nodes * ranks_per_node
        self.tokens, self.hidden, self.experts = tokens, hidden, experts
        self.device = current_heap().device
        capacity = self.world * tokens * TOPK
        options = {"capacity": capacity, "alignment": 4, "low_latency": low_latency}
        self.layer = _layer(rank, nodes, ranks_per_node, tokens, hidden, experts, **options)
        self.x = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=self.device)
        self.idx = torch.empty(tokens, TOPK, dtype=torch.int32, device=self.device)
        self.weights = torch.empty(tokens, TOPK, device=self.device)

    def load(self, seed: int) -> None:
        """Other inputs at the same addresses."""
        self.seed = seed
        self.x.copy_(coded_rows(self.rank, self.tokens, self.hidden, seed, self.device))
        self.idx.copy_(uniform_idx(self.rank, self.tokens, TOPK, self.experts, seed, drop=0.1))
        self.weights.copy_(drawn_weights(self.rank, self.tokens, TOPK, seed))

    def __call__(self) -> None:
        self.recv_x, self.recv_weights, self.desc = self.layer.dispatch(self.x, self.idx, self.weights)
        first = self.rank * self.experts // self.world
        experts = row_experts(self.desc.expert_offsets, self.recv_x.shape[0], first)
        self.out = self.layer.combine(apply_expert(self.recv_x, experts), self.desc)

    def check(self) -> None:
        """Check that the results belong to the inputs that were loaded last."""
        self.layer.check()
        ranks = range(self.world)
        rows = [coded_rows(r, self.tokens, self.hidden, self.seed, self.device) for r in ranks]
        idxs = [uniform_idx(r, self.tokens, TOPK, self.experts, self.seed, drop=0.1) for r in ranks]
        weights = [drawn_weights(r, self.tokens, TOPK, self.seed) for r in ranks]
        want = arrivals(idxs, self.rank, self.experts // self.world, self.device)
        counts = want.expert_offsets.diff()
        assert torch.equal(self.desc.num_recv_tokens_per_expert, counts)
        assert int(self.desc.overflow) == 0
        # Segments start at multiples of 4: compute the position of each dense row.
        begins = self.desc.expert_offsets[:-1].long()
        assert bool((begins % 4 == 0).all())
        shift = (begins - want.expert_offsets[:-1]).repeat_interleave(counts)
        at = torch.arange(want.entry.numel(), device=self.device) + shift
        assert (difference := first_difference(self.recv_x[at], torch.cat(rows), want.entry // TOPK)) is None, (
            difference
        )
        joined = torch.cat([w.flatten() for w in weights]).to(self.device)
        assert torch.equal(self.recv_weights[at], joined[want.entry])
        local_combine = self.layer.config.low_latency
        excess = combine_excess(self.out, rows[self.rank], idxs[self.rank], local_combine=local_combine)
        assert excess <= 0, f"combine is off by {excess} more than rounding explains"


def _no_synchronisation(rank, nodes, ranks_per_node, *sizes):
    call = _StaticCall(rank, nodes, ranks_per_node, *sizes)
    with call.layer:
        for seed in range(3):
            call.load(seed)
            if seed == 0 or call.device.type == "cpu":
                call()  # the first call compiles
            else:
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
                try:
                    call()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            call.check()


def _capture(call: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """A replay of the call in a CUDA graph; on the CPU the call itself."""
    if device.type == "cpu":
        return call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # compile missing kernels, which is not allowed during capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads (the watchdog of a process group) may call CUDA meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        call()
    return graph.replay


def _replays(rank, nodes, ranks_per_node, *sizes):
    call = _StaticCall(rank, nodes, ranks_per_node, *sizes)
    with call.layer:
        call.load(0)
        replay = _capture(call, call.device)
        for seed in range(1, 4):
            call.load(seed)
            replay()
            call.check()
        # Epochs live on the device, so a call without the graph works after the replays, and a replay after that call.
        call.load(4)
        captured = (call.recv_x, call.recv_weights, call.desc, call.out)
        call()
        call.check()
        call.load(5)
        call.recv_x, call.recv_weights, call.desc, call.out = captured
        replay()
        call.check()


STATIC_SIZES = {True: (128, 7168, 64), False: (12, 40, 16)}  # on GPUs, on the CPU


STATIC_LAYERS = [(*pair, False) for pair in TOPOLOGIES] + [(*pair, True) for pair in TOPOLOGIES if pair[0] == 1]


@pytest.mark.on_gpus  # a CPU has no device to wait for; the next test checks the results there
@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node, low_latency", STATIC_LAYERS)
def test_static_mode_never_waits_for_the_device(run_ranks, backend, nodes, ranks_per_node, low_latency):
    """With a capacity, torch sees no synchronising call between input and combined output."""
    run_ranks(_no_synchronisation, nodes, ranks_per_node, low_latency, *STATIC_SIZES[backend != "host"])


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node, low_latency", combinations(STATIC_LAYERS, on_cpu=_two_ranks))
def test_graph_replays_with_other_inputs(run_ranks, backend, nodes, ranks_per_node, low_latency):
    """A captured dispatch + combine gives correct results for new inputs at each replay."""
    run_ranks(_replays, nodes, ranks_per_node, low_latency, *STATIC_SIZES[backend != "host"])
