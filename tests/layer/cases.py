"""Test cases of the layer, and the check that all of them run.

A case is a workload and a configuration. `check_case` builds the layer, runs dispatch, an expert per row and combine,
and compares every row, weight, count and offset with the plain-torch reference. Topologies are not part of a case:
every case runs on several.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tests.patience import LIMIT_S, limit_after, stopwatch
from triton_ep import EPAll2AllLayer, MXTensor
from triton_ep.distributed import current_heap
from triton_ep.reference import dispatch as dispatch_reference
from triton_ep.reference import mxfp8 as mxfp8_reference
from triton_ep.testing import Workload, apply_experts, make_workload


@dataclass(frozen=True)
class Case:
    """One configuration and workload. `tokens` is per rank, repeated cyclically over ranks; `experts` is per rank."""

    name: str
    tokens: tuple[int, ...] = (7, 12, 5, 9)
    hidden: int = 64
    topk: int = 2
    experts: int = 2
    dtype: torch.dtype = torch.bfloat16
    idx_dtype: torch.dtype = torch.int32
    routing: str = "uniform"
    drop: float = 0.15
    alignment: int = 1
    weights: bool = True
    scatter: bool = False
    local_combine: bool = False
    combine_weights: bool = False
    static: bool = False
    calls: int = 2
    num_sm: int = 20
    sm_budget: int | None = None
    shared_staging: bool = False
    payload: str | None = None
    quantised_input: bool = False
    low_latency: bool = False  # implies static and local_combine

    def __post_init__(self) -> None:
        if self.low_latency:
            object.__setattr__(self, "static", True)
            object.__setattr__(self, "local_combine", True)


CASES = (
    Case("plain"),
    Case("no_weights", weights=False),
    Case("topk1", topk=1),
    Case("topk3_fp32", topk=3, experts=4, dtype=torch.float32),
    Case("topk4_int64", topk=4, experts=4, idx_dtype=torch.int64),
    Case("topk5_fp16", topk=5, experts=8, dtype=torch.float16),
    Case("topk1_one_expert_per_rank", topk=1, experts=1, drop=0.0),
    Case("topk6", topk=6, experts=6, tokens=(5, 3), hidden=32, local_combine=True, calls=1),
    Case("topk7_weighted", topk=7, experts=7, tokens=(4, 6), hidden=32, combine_weights=True, calls=1),
    Case("topk10_static", topk=10, experts=10, tokens=(5, 2), hidden=32, static=True, calls=1),
    Case("topk32", topk=32, experts=32, tokens=(3, 4), hidden=32, calls=1),
    Case("topk8_64_experts", topk=8, experts=64, tokens=(20, 3, 11, 33)),
    Case("topk8_aligned16", topk=8, experts=8, alignment=16),
    Case("aligned128", alignment=128, experts=3),
    Case("hidden_off_tile", hidden=100, topk=3, experts=5),
    Case("hidden_odd", hidden=37, topk=2, experts=3),
    Case("hidden_wide", hidden=520, tokens=(17, 40, 1, 18)),
    Case("zero_tokens_on_a_rank", tokens=(6, 0, 9, 3)),
    Case("zero_tokens_everywhere", tokens=(0,)),
    Case("all_to_one_expert", routing="one_expert", drop=0.0, topk=1),
    Case("all_to_one_rank", routing="one_expert", drop=0.0, topk=4, experts=8),
    Case("all_dropped", routing="all_dropped"),
    Case("skewed", routing="skewed", topk=4, experts=8, tokens=(30, 2, 17, 24)),
    Case("same_expert_twice", routing="duplicates", topk=4, experts=8),
    Case("scatter_given", scatter=True, topk=4, experts=4),
    Case("scatter_given_int64", scatter=True, topk=2, experts=4, idx_dtype=torch.int64),
    Case("local_combine", local_combine=True, topk=4, experts=4),
    Case("local_combine_weighted", local_combine=True, topk=8, experts=8, combine_weights=True),
    Case("local_combine_duplicates", local_combine=True, routing="duplicates", topk=4, experts=4),
    Case("weighted_combine", combine_weights=True, topk=4, experts=4),
    Case("static", static=True, topk=4, experts=4),
    Case("static_aligned_local", static=True, topk=4, experts=4, alignment=16, local_combine=True),
    Case("one_program", num_sm=1, topk=4, experts=4),
    Case("budget", sm_budget=24, tokens=(40, 3, 0, 21), hidden=520, topk=6, experts=6, local_combine=True),
    Case("budget_skewed", sm_budget=24, routing="skewed", topk=4, experts=8, local_combine=True, combine_weights=True),
    Case("shared_staging", shared_staging=True, local_combine=True, topk=4, experts=4),
    Case("shared_staging_static", shared_staging=True, local_combine=True, static=True, payload="mxfp8", hidden=160),
    Case("mxfp8", payload="mxfp8", topk=4, experts=4),
    Case("mxfp8_odd_blocks", payload="mxfp8", hidden=96, alignment=16, topk=3, experts=3),
    Case("mxfp8_wide_local", payload="mxfp8", hidden=544, local_combine=True, topk=4, experts=4, weights=False),
    Case("mxfp8_quantised_input", payload="mxfp8", quantised_input=True, topk=4, experts=4, static=True),
    Case("mxfp8_quantised_fp32", payload="mxfp8", quantised_input=True, hidden=160, dtype=torch.float32),
    Case("many_tokens", tokens=(70, 33, 65, 50), topk=2, experts=4, hidden=32, calls=1),
)


def workloads(case: Case, world_size: int, call: int) -> list[Workload]:
    """Inputs of all ranks for one call; other calls of a case have other data and token counts."""
    return [
        make_workload(
            rank,
            world_size,
            case.tokens[(rank + call) % len(case.tokens)],
            hidden=case.hidden,
            topk=case.topk,
            num_experts=case.experts * world_size,
            dtype=case.dtype,
            seed=call * 131 + len(case.name),
            routing=case.routing,
            drop=case.drop,
        ).with_ids(case.idx_dtype)
        for rank in range(world_size)
    ]


def layer_limit_s() -> float:
    """`timeout_s` of a layer whose ranks all arrive. On GPUs, where a hang is costly, it is shorter, but one rank may
    have kernels to compile that the others, which wait for it, do not need."""
    return 120.0 if current_heap().device.type == "cuda" else LIMIT_S


def make_layer(case: Case, rank: int, nodes: int, ranks_per_node: int, group=None, **kwargs) -> EPAll2AllLayer:
    """Layer of a case; `kwargs` replace constructor arguments."""
    world_size = nodes * ranks_per_node
    total = sum(case.tokens[r % len(case.tokens)] for r in range(world_size)) + max(case.tokens)
    arguments = {
        "max_tokens": max(*case.tokens, 1),
        "dtype": case.dtype,
        "num_sm": case.num_sm,
        "sm_budget": case.sm_budget,
        "shared_staging": case.shared_staging,
        "enable_local_combine": case.local_combine,
        "alignment": case.alignment,
        "payload": case.payload,
        "capacity": total * case.topk + case.experts * case.alignment if case.static else None,
        "low_latency": case.low_latency,
        "timeout_s": layer_limit_s(),
        **kwargs,
    }
    return EPAll2AllLayer(
        group if group is not None else dist.group.WORLD,
        hidden=case.hidden,
        topk=case.topk,
        rank=rank,
        num_tot_experts=case.experts * world_size,
        local_world_size=ranks_per_node,
        world_size=world_size,
        **arguments,
    )


def full_scatter_indices(idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[T, K] position of each entry in a stable sort of this rank's entries by expert, dropped last."""
    key = torch.where((idx < 0) | (idx >= num_experts), num_experts, idx.long()).flatten()
    position = torch.empty_like(key)
    position[torch.argsort(key, stable=True)] = torch.arange(key.numel())
    return position.view(idx.shape).to(idx.dtype)


@dataclass
class Call:
    """One dispatch: the reference's results, and the layer's."""

    case: Case
    expected: Expected
    recv_x: torch.Tensor
    recv_weights: torch.Tensor | None
    desc: object


def dispatch_and_check(layer: EPAll2AllLayer, case: Case, call: int) -> Call:
    """Dispatch, and compare bit for bit with the reference, row order included."""
    works = workloads(case, layer.config.world_size, call)
    return check_dispatched(layer, case, call, *start_dispatch(layer, case, works))


def limit_of_calls(case: Case, rank: int, nodes: int, ranks_per_node: int) -> float:
    """Time limit for a layer on which a call must expire (tests/patience.py). Collective."""
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        for call in range(2):  # the first one may compile
            dist.barrier()
            with stopwatch() as took:
                combine_and_check(layer, dispatch_and_check(layer, case, call))
                layer.check()
                seconds = took()
    return limit_after(seconds)


def start_dispatch(layer: EPAll2AllLayer, case: Case, works: list[Workload], **options) -> tuple:
    """Call `layer.dispatch` with these options; return its results."""
    cfg, device = layer.config, current_heap().device
    mine = works[cfg.rank]
    x = mine.x.to(device)
    if case.quantised_input:
        x = MXTensor.to_mx(x)
    return layer.dispatch(
        x,
        mine.topk_idx.to(device),
        mine.topk_weights.to(device) if case.weights else None,
        full_scatter_indices(mine.topk_idx, cfg.num_experts).to(device) if case.scatter else None,
        **options,
    )


@dataclass
class Expected:
    """The reference's results of one dispatch of all ranks. Cached for other topologies, so read-only."""

    works: list[Workload]
    results: list[dispatch_reference.DispatchResult]
    scales: list[torch.Tensor] | None  # scales of the rows of every rank, if rows travel with scales
    rows: list[torch.Tensor]  # rows of every rank, in the token dtype
    outputs: list[torch.Tensor]  # expert outputs of every rank


@functools.lru_cache(maxsize=64)
def _expected(case: Case, world_size: int, call: int) -> Expected:
    works = workloads(case, world_size, call)
    weights = [w.topk_weights for w in works] if case.weights else None
    idxs = [w.topk_idx for w in works]
    num_experts = case.experts * world_size

    def expect(rows: list[torch.Tensor]) -> list[dispatch_reference.DispatchResult]:
        return [
            dispatch_reference.dispatch(rows, idxs, weights, r, num_experts, case.alignment) for r in range(world_size)
        ]

    if case.payload == "mxfp8":
        xs, factors = map(list, zip(*(mxfp8_reference.quantize(w.x) for w in works), strict=True))
        results, scales = expect(xs), [result.recv_x for result in expect(factors)]
        rows = [
            mxfp8_reference.dequantize(result.recv_x, scale, case.dtype)
            for result, scale in zip(results, scales, strict=True)
        ]
    else:
        results, scales = expect([w.x for w in works]), None
        rows = [result.recv_x for result in results]
    outputs = [
        apply_experts(own, result.expert_offsets, r * case.experts)
        for r, (own, result) in enumerate(zip(rows, results, strict=True))
    ]
    return Expected(works, results, scales, rows, outputs)


def check_dispatched(layer: EPAll2AllLayer, case: Case, call: int, recv_x, recv_weights, desc) -> Call:
    """Compare the results of a dispatch of `workloads(case, .., call)` bit for bit with the reference, in order."""
    cfg = layer.config
    expected = _expected(case, cfg.world_size, call)
    works, want = expected.works, expected.results[cfg.rank]
    rows = int(want.expert_offsets[-1])
    exact = {"rtol": 0, "atol": 0}
    torch.testing.assert_close(desc.expert_offsets.cpu(), want.expert_offsets, **exact)
    assert desc.host_expert_offsets == (None if case.static else tuple(want.expert_offsets.tolist()))
    torch.testing.assert_close(desc.num_recv_tokens_per_expert.cpu(), want.num_recv_tokens_per_expert, **exact)
    if not case.low_latency:
        torch.testing.assert_close(desc.token_dst_scatter_idx.cpu(), want.dst_row[cfg.rank].to(torch.int32), **exact)
    tokens = torch.tensor([w.x.shape[0] for w in works], dtype=torch.int32)
    torch.testing.assert_close(desc.num_input_tokens_per_rank.cpu(), tokens, **exact)
    assert int(desc.overflow) == 0 and desc.full_scatter == case.scatter
    assert recv_x.shape[0] == (cfg.recv_capacity if case.static else rows)
    if expected.scales is None:
        torch.testing.assert_close(recv_x[:rows].cpu(), want.recv_x, **exact)
    else:
        assert isinstance(recv_x, MXTensor) and recv_x.dtype == case.dtype
        assert torch.equal(recv_x.qdata[:rows].view(torch.uint8).cpu(), want.recv_x.view(torch.uint8))
        assert torch.equal(recv_x.scale[:rows].view(torch.uint8).cpu(), expected.scales[cfg.rank])
        recv_x = recv_x.dequantize()
    if case.weights:
        assert recv_weights is not None
        torch.testing.assert_close(recv_weights[:rows].cpu(), want.recv_weights, **exact)
    else:
        assert recv_weights is None
    return Call(case, expected, recv_x, recv_weights, desc)


def combine_and_check(layer: EPAll2AllLayer, done: Call) -> torch.Tensor:
    """Apply the experts to the received rows, combine, and compare with the exact sum."""
    out = start_combine(layer, done)
    check_sum(layer, done, out)
    return out


def expert_outputs(layer: EPAll2AllLayer, done: Call) -> torch.Tensor:
    """[R, H]: the experts applied to the received rows."""
    return apply_experts(done.recv_x, done.desc.expert_offsets, layer.config.rank * layer.config.num_experts_per_rank)


def start_combine(layer: EPAll2AllLayer, done: Call, **options):
    """Apply the experts to the received rows and call `layer.combine` with these options; return its results."""
    weights = done.recv_weights if done.case.combine_weights else None
    return layer.combine(expert_outputs(layer, done), done.desc, weights, **options)


def check_sum(layer: EPAll2AllLayer, done: Call, out: torch.Tensor) -> None:
    """Compare the result of `start_combine` with the exact sum."""
    check_combined(out.cpu(), done, layer.config)


def check_combined(out: torch.Tensor, done: Call, cfg) -> None:
    """|out - exact sum| is at most one rounding to the dtype (with local combine: one per partial sum too)."""
    case, results = done.case, done.expected.results
    mine = results[cfg.rank]
    owner, row = mine.dst_rank[cfg.rank], mine.dst_row[cfg.rank]
    total = torch.zeros(row.shape[0], case.hidden, dtype=torch.float64)
    size = torch.zeros_like(total)
    for r, y in enumerate(done.expected.outputs):
        token, k = torch.nonzero((owner == r) & (row >= 0), as_tuple=True)
        term = y[row[token, k]].double()
        if case.combine_weights:
            term = term * results[r].recv_weights[row[token, k]].double().unsqueeze(1)
        total.index_add_(0, token, term)
        size.index_add_(0, token, term.abs())
    half_ulp = torch.finfo(case.dtype).eps / 2
    # float32 accumulation of at most topk terms, then one rounding.
    bound = total.abs() * half_ulp * (1 + 1e-6) + size * case.topk * 2.0**-24 + 1e-30
    if case.local_combine:
        bound = bound + size * half_ulp * 2
    error = (out.double() - total).abs()
    worst = (error - bound).max().item() if error.numel() else 0.0
    assert worst <= 0, f"combine of {case.name} is off by {error.max().item()} (bound exceeded by {worst})"


def check_case(rank: int, nodes: int, ranks_per_node: int, case: Case) -> None:
    """Several calls of one layer; run in every rank."""
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        for call in range(case.calls):
            combine_and_check(layer, dispatch_and_check(layer, case, call))


__all__ = [
    "CASES",
    "Case",
    "check_case",
    "check_dispatched",
    "check_sum",
    "combine_and_check",
    "dispatch_and_check",
    "expert_outputs",
    "make_layer",
    "start_combine",
    "start_dispatch",
]
