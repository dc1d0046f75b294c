"""Cost of the integrations: their calls against the layer's, with equal bits.

    python tests/bench/bench_doors.py --ranks 4 --csv docs/benchmarks/results/doors.csv
    python tests/bench/bench_doors.py --ranks 2 --tokens 16 --hidden 128 --experts 8 --iters 2     # CPU, to try it
    python tests/bench/bench_doors.py --ranks 4 --parts low-latency --limit 60

Providers: triton_ep, with expert-major rows (`mode` ...-expert-major), compact rows (...-compact), and expert-major
rows padded to 16 that are summed on their rank before combine sends them (...-permuted-summed; in stored rows also
...-permuted, without that sum); -fp8 means one byte per value, with scales; -torch- the heap of torch. deep_ep and
hybrid_ep, the integrations, the latter by a routing map or by ids (...-permuted-summed-ids). elastic, ElasticBuffer,
with rows by rank and by expert (...-permuted-summed). megatron, forward and backward of fused_dispatch and
fused_combine. vllm, prepare and finalize in the batched format. Low-latency calls (...-low-latency) have at most 128
tokens and are captured in CUDA graphs, so they have no host time; both sides quantise one-byte rows in the measured
time. There both sides send the weights of tokens, [T, K], within combine, as DeepEP does; with -early, as in vllm, both
send them with the rows.
Each integration is checked against the layer, bit for bit, before it is timed, and timed in turns with it. The last
lines compare the times in which kernels run, and the host times of calls that are not captured, which alternate with
those of the layer call by call. All are taken in turns; with --limit the turn in which it passes is the last one.
Columns and method: docs/benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if __name__ in ("__main__", "__mp_main__"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from tests.bench import doors_low_latency
from tests.bench.sizes import sizes_parser
from triton_ep import distributed as ep_distributed
from triton_ep.bench import rows as bench_rows
from triton_ep.bench import tables
from triton_ep.bench.origins import coded_rows
from triton_ep.bench.providers import meet_by_collective
from triton_ep.bench.routing import uniform_idx
from triton_ep.bench.settings import origin_of_kernels
from triton_ep.bench.timing import Timer, Timing, kernel_time, over_ranks, record_calls, slowest
from triton_ep.heap.registry import HEAPS
from triton_ep.integrations import megatron
from triton_ep.integrations.deep_ep import Buffer, ElasticBuffer, HybridEPBuffer, release
from triton_ep.layer import EPAll2AllLayer
from triton_ep.runtime.launch import INTERPRETING

TURNS = 3
PAD = 16  # multiple to which an expert's rows are padded, for HybridEP
RECORDED = 10
"""Calls whose kernels are recorded."""
BOUND = 1.03
"""An integration may take up to this ratio of the layer's time on the GPU."""
HOST_CALLS = 20
"""Calls per turn whose host time is taken."""
HOST_BOUND_US = 40.0
"""Microseconds of host time that a call of an integration may take more than the layer's."""
LAYER_CALLS = {"roundtrip": 2, "forward+backward": 4}
"""Calls of the layer in an op, if not one."""
PARTS = ("deep_ep", "hybrid_ep", "elastic", "low-latency")
"""What --parts may name; deep_ep includes Megatron's functions."""

Name = tuple[str, str, str]
"""(op, provider, kind of rows)"""
Calls = dict[Name, Callable[[], object]]
"""The timed calls."""
Hosts = dict[Name, tuple[float, float]]
"""Host microseconds of an integration's call, and of the layer's call in turn with it."""
Taken = dict[Name, tuple[list[float], list[float]]]
"""Each single one of them."""


class WrongResult(Exception):
    """An integration gives another result than the layer."""


def _same(what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(got, expected):
        raise WrongResult(f"{what} of the integration differs from the layer's.")


def _calls(args: argparse.Namespace, layer: EPAll2AllLayer, device: torch.device) -> Calls:
    """Calls of Buffer, fused_a2a and the layer, checked against each other."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    x = coded_rows(rank, args.tokens, args.hidden, 0, device)
    idx = uniform_idx(rank, args.tokens, args.topk, args.experts, 0).to(device).long()
    weights = torch.rand(idx.shape, generator=torch.Generator().manual_seed(rank)).to(device)
    buffer = Buffer(group, Buffer.get_dispatch_config(ranks).get_nvl_buffer_size_hint(2 * args.hidden, ranks))
    per_expert = buffer.get_dispatch_layout(idx, args.experts)[2]

    def door_dispatch() -> tuple[torch.Tensor, ...]:
        per_rank, per_node, counts, in_rank, _ = buffer.get_dispatch_layout(idx, args.experts)
        return buffer.dispatch(
            x,
            topk_idx=idx,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=counts,
        )

    recv_x, recv_weights, desc = layer.dispatch(x, idx, weights)
    assert recv_weights is not None
    rows = layer.dispatch_compact(x, idx, weights)
    assert rows.topk_weights is not None
    door_x, door_idx, door_weights, door_counts, handle, _ = door_dispatch()
    _same("recv_x", door_x, rows.x)
    _same("recv_topk_idx", door_idx, rows.topk_idx)
    _same("recv_topk_weights", door_weights, rows.topk_weights)
    if door_counts != desc.num_recv_tokens_per_expert.tolist():
        raise WrongResult("rows per expert differ from the layer's.")
    combined, back, _ = buffer.combine(door_x, handle, topk_weights=door_weights)
    _same("combine", combined, layer.combine(rows.x, rows.layout_desc))
    _same("topk_weights of combine", back, weights)
    _same("dispatch with a handle", buffer.dispatch(x, handle=handle)[0], rows.x)
    data, scale = _quantised(x)
    routing = {"topk_idx": idx, "topk_weights": weights, "num_tokens_per_expert": per_expert}
    found = buffer.dispatch((data, scale), **routing)[0]
    one_byte = layer.dispatch_compact(data, idx, weights, scale=scale)
    assert one_byte.scale is not None
    _same("one-byte rows", found[0].view(torch.uint8), one_byte.x.view(torch.uint8))
    _same("scales", found[1], one_byte.scale)

    probs, leaf = weights.clone().requires_grad_(), x.clone().requires_grad_()

    def fused() -> torch.Tensor:
        rows, _, _, _, handle = megatron.fused_dispatch(leaf, idx, probs, args.experts, group, True, True)
        return megatron.fused_combine(rows, group, handle, True, True)[0]

    def fused_both() -> None:
        leaf.grad = probs.grad = None
        fused().backward(x)

    _same("fused_combine", fused().detach(), combined)
    return {
        ("dispatch", "triton_ep", "expert-major"): lambda: layer.dispatch(x, idx, weights),
        ("dispatch", "triton_ep", "compact"): lambda: layer.dispatch_compact(x, idx, weights),
        ("dispatch", "triton_ep", "compact-fp8"): lambda: layer.dispatch_compact(data, idx, weights, scale=scale),
        ("dispatch", "deep_ep", "compact"): lambda: buffer.dispatch(x, **routing),
        ("dispatch", "deep_ep", "compact-fp8"): lambda: buffer.dispatch((data, scale), **routing),
        ("layout+dispatch", "deep_ep", "compact"): door_dispatch,
        ("combine", "triton_ep", "expert-major"): lambda: layer.combine(recv_x, desc),
        ("combine", "triton_ep", "compact"): lambda: layer.combine(rows.x, rows.layout_desc),
        ("combine", "deep_ep", "compact"): lambda: buffer.combine(door_x, handle),
        ("dispatch-again", "triton_ep", "compact"): lambda: layer.dispatch_compact_again(x, rows.layout_desc),
        ("dispatch-again", "deep_ep", "compact"): lambda: buffer.dispatch(x, handle=handle),
        ("roundtrip", "triton_ep", "expert-major"): lambda: layer.combine(*layer.dispatch(x, idx, weights)[::2]),
        ("roundtrip", "triton_ep", "compact"): lambda: _round(layer, x, idx, weights),
        ("roundtrip", "deep_ep", "compact"): lambda: _door_round(buffer, door_dispatch),
        ("roundtrip", "megatron", "compact"): lambda: fused(),
        ("forward+backward", "megatron", "compact"): fused_both,
    }


def _hybrid_calls(args: argparse.Namespace, layer: EPAll2AllLayer, buffer: HybridEPBuffer) -> Calls:
    """Calls of HybridEPBuffer and of an equal layer, checked against each other."""
    rank, device = dist.get_rank(), layer.context.device
    x = coded_rows(rank, args.tokens, args.hidden, 0, device)
    # A routing map has no order: HybridEPBuffer takes a token's experts in ascending order.
    idx = uniform_idx(rank, args.tokens, args.topk, args.experts, 0).to(device).sort(1).values
    weights = torch.rand(idx.shape, generator=torch.Generator().manual_seed(rank)).to(device)
    routing_map = torch.zeros(args.tokens, args.experts, dtype=torch.bool, device=device).scatter_(1, idx.long(), True)
    probs = torch.zeros(args.tokens, args.experts, device=device).scatter_(1, idx.long(), weights)
    by_map = {"routing_map": routing_map, "probs": probs, "pad_multiple": PAD}
    by_ids = {"topk_idx": idx, "topk_weights": weights, "num_of_experts": args.experts, "pad_multiple": PAD}
    data, scale = _quantised(x)
    fp8 = {"hidden": data, "scaling_factor": scale}

    recv_x, recv_weights, desc = layer.dispatch(x, idx, weights)
    assert recv_weights is not None
    for routing in (by_map, by_ids):
        door_x, door_probs, _, counts, handle = buffer.dispatch_with_permute(hidden=x, **routing)
        _same("hidden", door_x, recv_x)
        _same("probs", door_probs, recv_weights)
        if counts.tolist() != desc.expert_offsets.diff().tolist():
            raise WrongResult("rows per expert differ from the layer's.")
    combined, back = buffer.combine_with_unpermute(hidden=door_x, probs=door_probs, handle=handle)
    _same("combine", combined, layer.combine(recv_x, desc))
    _same("probs of combine", back, probs)
    _same("dispatch with a handle", buffer.dispatch_with_permute(hidden=x, handle=handle)[0], recv_x)

    def door_round() -> torch.Tensor:
        rows, _, _, _, handle = buffer.dispatch_with_permute(hidden=x, **by_map)
        return buffer.combine_with_unpermute(hidden=rows, handle=handle)[0]

    calls: Calls = {
        ("dispatch", "triton_ep", "permuted-summed"): lambda: layer.dispatch(x, idx, weights),
        ("dispatch", "hybrid_ep", "permuted-summed"): lambda: buffer.dispatch_with_permute(hidden=x, **by_map),
        ("dispatch", "hybrid_ep", "permuted-summed-ids"): lambda: buffer.dispatch_with_permute(hidden=x, **by_ids),
        ("combine", "triton_ep", "permuted-summed"): lambda: layer.combine(recv_x, desc),
        ("combine", "hybrid_ep", "permuted-summed"): lambda: buffer.combine_with_unpermute(
            hidden=door_x, handle=handle
        ),
        ("dispatch-again", "triton_ep", "permuted-summed"): lambda: layer.dispatch_again(x, desc),
        ("dispatch-again", "hybrid_ep", "permuted-summed"): lambda: buffer.dispatch_with_permute(
            hidden=x, handle=handle
        ),
        ("roundtrip", "triton_ep", "permuted-summed"): lambda: layer.combine(*layer.dispatch(x, idx, weights)[::2]),
        ("roundtrip", "hybrid_ep", "permuted-summed"): door_round,
    }
    one_byte, _, scales, _, _ = buffer.dispatch_with_permute(**fp8, **by_map)
    want, want_scales, _, _ = layer.dispatch_scaled(data, scale, idx, weights)
    assert scales is not None
    _same("one-byte rows", one_byte.view(torch.uint8), want.view(torch.uint8))
    _same("scaling_factor", scales, want_scales)
    calls["dispatch", "triton_ep", "permuted-summed-fp8"] = lambda: layer.dispatch_scaled(data, scale, idx, weights)
    calls["dispatch", "hybrid_ep", "permuted-summed-fp8"] = lambda: buffer.dispatch_with_permute(**fp8, **by_map)
    return calls


def _elastic_calls(args: argparse.Namespace, layer: EPAll2AllLayer, padded: EPAll2AllLayer) -> Calls:
    """Calls of ElasticBuffer, checked against the layers: rows by rank, and by expert."""
    rank, device = dist.get_rank(), layer.context.device
    x = coded_rows(rank, args.tokens, args.hidden, 0, device)
    idx = uniform_idx(rank, args.tokens, args.topk, args.experts, 0).to(device).long()
    weights = torch.rand(idx.shape, generator=torch.Generator().manual_seed(rank)).to(device)
    buffer = ElasticBuffer(
        dist.group.WORLD,
        num_max_tokens_per_rank=args.tokens,
        hidden=args.hidden,
        num_topk=args.topk,
        num_gpu_timeout_secs=120.0,
    )
    routing = {"topk_idx": idx, "topk_weights": weights, "num_experts": args.experts, "num_sms": args.num_sm}
    by_expert = {**routing, "do_expand": True, "expert_alignment": PAD}
    data, scale = _quantised(x)

    rows, (expert_x, _, desc) = layer.dispatch_compact(x, idx, weights), padded.dispatch(x, idx, weights)
    found, _, _, handle, _ = buffer.dispatch(x, **routing)
    expanded, _, _, of_experts, _ = buffer.dispatch(x, **by_expert)
    _same("recv_x of ElasticBuffer", found, rows.x)
    _same("expanded recv_x", expanded, expert_x)
    _same("combine of ElasticBuffer", buffer.combine(found, handle)[0], layer.combine(rows.x, rows.layout_desc))
    _same("combine of expanded rows", buffer.combine(expanded, of_experts)[0], padded.combine(expert_x, desc))
    one_byte = buffer.dispatch((data, scale), **routing)[0][0]
    wanted = layer.dispatch_compact(data, idx, weights, scale=scale).x
    _same("one-byte rows of ElasticBuffer", one_byte.view(torch.uint8), wanted.view(torch.uint8))

    def round_of(routing: dict[str, Any]) -> torch.Tensor:
        recv_x, _, _, made, _ = buffer.dispatch(x, **routing)
        return buffer.combine(recv_x, made)[0]

    return {
        ("dispatch", "elastic", "compact"): lambda: buffer.dispatch(x, **routing),
        ("dispatch", "elastic", "compact-fp8"): lambda: buffer.dispatch((data, scale), **routing),
        ("combine", "elastic", "compact"): lambda: buffer.combine(found, handle),
        ("dispatch-again", "elastic", "compact"): lambda: buffer.dispatch(x, handle=handle),
        ("roundtrip", "elastic", "compact"): lambda: round_of(routing),
        ("dispatch", "elastic", "permuted-summed"): lambda: buffer.dispatch(x, **by_expert),
        ("combine", "elastic", "permuted-summed"): lambda: buffer.combine(expanded, of_experts),
        ("roundtrip", "elastic", "permuted-summed"): lambda: round_of(by_expert),
    }


def _quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [T, H] as bytes, and scales [T, H / 128] that identify their token."""
    scale = torch.arange(len(x), device=x.device).float().add(0.5).unsqueeze(1)
    return x.to(torch.float8_e4m3fn), scale.expand(len(x), x.shape[1] // 128).contiguous()


def _round(layer: EPAll2AllLayer, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    rows = layer.dispatch_compact(x, idx, weights)
    return layer.combine(rows.x, rows.layout_desc)


def _door_round(buffer: Buffer, dispatch: Callable[[], tuple[torch.Tensor, ...]]) -> torch.Tensor:
    recv_x, _, _, _, handle, _ = dispatch()
    return buffer.combine(recv_x, handle)[0]


def _joined(timings: list[Timing]) -> Timing:
    """Join the turns of one call: the median of each figure."""
    columns = [asdict(timing) for timing in timings]
    return replace(timings[0], **{name: statistics.median(c[name] for c in columns) for name in columns[0]})


def _layers_call(name: Name) -> Name:
    """The call of the layer that an integration's call is compared with."""
    op, _, kind = name
    return op.removeprefix("layout+"), "triton_ep", kind.removesuffix("-ids")


@dataclass(frozen=True)
class Doors:
    """Calls to time, of layers and integrations that are open.

    Attributes:
        calls: all of them. captured: those that replay a CUDA graph.
    """

    device: torch.device
    calls: Calls
    captured: Calls

    def meet(self) -> None:
        """Wait for all ranks."""
        meet_by_collective(self.device)

    def times(self, timer: Timer) -> dict[Name, Timing]:
        """Times of all calls in turn. Collective."""
        found = {}
        for name, call in self.calls.items():
            times = timer.times(lambda _, call=call: call(), self.meet)
            per_call = doors_low_latency.PER_REPLAY if name in self.captured else 1
            found[name] = over_ranks([us / per_call for us in times])
        return found

    def kernel_times(self, timer: Timer) -> dict[Name, float | None]:
        """Times in which kernels run. Collective."""
        found = {}
        for name, call in self.calls.items():
            if name not in self.captured:
                recorded = record_calls(lambda _, call=call: call(), self.meet, timer.flush, RECORDED, self.device)
                found[name] = kernel_time(recorded, RECORDED)
        return found

    def take_host_times(self, found: Taken) -> None:
        """Add a turn of host times of calls that are not captured; of none on the CPU. Collective.

        Each call of an integration alternates with the layer's, because the host's speed changes during a run.
        """
        single = Timer(self.device, 1, 0)
        names = [name for name in self.calls if name[1] != "triton_ep" and name not in self.captured]
        for name in names:
            if (core := _layers_call(name)) in self.calls:
                sides = found.setdefault(name, ([], []))
                for _ in range(HOST_CALLS):
                    for each, times in zip((name, core), sides, strict=True):
                        us = single.host_time(lambda _, call=self.calls[each]: call(), self.meet)
                        times.extend([] if us is None else [us])


def _hosts_of(found: Taken) -> Hosts:
    """Medians of the slowest rank. Collective."""
    hosts: Hosts = {}
    for name, sides in found.items():
        door, layer = (slowest(statistics.median(times) if times else None) for times in sides)
        if door is not None and layer is not None:
            hosts[name] = door, layer
    return hosts


def _host_of(name: Name, hosts: Hosts) -> float | None:
    """Host time of a call; of a layer's call the median over those in turn with it."""
    if name in hosts:
        return hosts[name][0]
    turns = [layer for door, (_, layer) in hosts.items() if _layers_call(door) == name]
    return statistics.median(turns) if turns else None


@contextlib.contextmanager
def open_doors(args: argparse.Namespace) -> Iterator[Doors]:
    """Layers and integrations, checked against each other, and their calls. Collective over the world."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device, per_node = ep_distributed.current_heap().device, ep_distributed.local_world_size()
    Buffer.num_sms = args.num_sm  # not set_num_sms, which sets a budget: the compared layer has none
    sizes = (dist.group.WORLD, args.tokens, args.hidden, args.topk, rank, args.experts, per_node, ranks)
    options = {"num_sm": args.num_sm, "timeout_s": 120.0}
    hybrid = HybridEPBuffer(
        dist.group.WORLD,
        args.hidden,
        args.tokens,
        args.experts // ranks,
        use_fp8=True,
        num_sms_dispatch_api=args.num_sm,
        topk=args.topk,
        timeout_s=120.0,
    )
    with (
        EPAll2AllLayer(*sizes, enable_local_combine=per_node == ranks, **options) as layer,
        EPAll2AllLayer(*sizes, alignment=PAD, enable_local_combine=True, **options) as padded,
    ):
        calls: Calls = {}
        if "deep_ep" in args.parts:
            calls |= _calls(args, layer, device)
        if "hybrid_ep" in args.parts:
            calls |= _hybrid_calls(args, padded, hybrid)
        if "elastic" in args.parts:
            calls |= _elastic_calls(args, layer, padded)
        few = None
        if per_node == ranks and "low-latency" in args.parts:
            few = doors_low_latency.LowLatencyDoor(
                min(args.tokens, doors_low_latency.TOKENS), (args.hidden, args.topk, args.experts), args.num_sm, _same
            )
        captured: Calls = {} if few is None else few.calls
        yield Doors(device, calls | captured, captured)
        if few is not None:
            few.finish()
        layer.check()
        padded.check()
    hybrid.close()
    release()


@contextlib.contextmanager
def measure_in_turns(args: argparse.Namespace) -> Iterator[Callable[[], list[bench_rows.Row]]]:
    """A function that times all calls once, for compare_commits.py. Collective over the world."""
    with open_doors(args) as doors:
        timer = Timer(doors.device, args.iters, args.warmup)

        def rows() -> list[bench_rows.Row]:
            timings, taken = doors.times(timer), Taken()
            doors.take_host_times(taken)
            return _rows(args, 1, timings, _hosts_of(taken), {})

        yield rows


def run(args: argparse.Namespace) -> None:
    """Run on each rank."""
    began = time.monotonic()
    rank, _ = ep_distributed.initialize_distributed(timeout_s=300, heap=args.heap)
    turns: list[dict[Name, Timing]] = []
    taken: Taken = {}
    kernels: dict[Name, float | None] = {}

    def tell(what: str) -> None:
        if rank == 0:
            print(f"{time.monotonic() - began:.0f} s: {what}", file=sys.stderr, flush=True)

    with open_doors(args) as doors:
        tell(f"{len(doors.calls)} calls give the layer's results")
        timer = Timer(doors.device, args.iters, args.warmup)
        while len(turns) < TURNS and (not turns or _goes_on(began, args.limit)):
            turns.append(doors.times(timer))
            doors.take_host_times(taken)
            if not kernels:
                kernels = doors.kernel_times(timer)
            tell(f"turn {len(turns)} of {TURNS}")
        timings = {name: _joined([turn[name] for turn in turns]) for name in doors.calls}
        hosts = _hosts_of(taken)
        rows = _rows(args, len(turns), timings, hosts, kernels)
    if rank == 0:
        print(tables.table(rows))
        _compare(timings, hosts, kernels)
        if args.csv is not None:
            bench_rows.append_rows(args.csv, rows)
    ep_distributed.finalize_distributed()


def _goes_on(began: float, limit: float | None) -> bool:
    """Whether less than the limit has passed on rank 0. Collective."""
    late = [limit is not None and time.monotonic() - began > limit]
    dist.broadcast_object_list(late, 0)
    return not late[0]


def _rows(
    args: argparse.Namespace,
    turns: int,
    timings: dict[Name, Timing],
    hosts: Hosts,
    kernels: dict[Name, float | None],
) -> list[bench_rows.Row]:
    """One row per call."""
    how, ranks = origin_of_kernels(INTERPRETING), dist.get_world_size()
    heap = "torch-" if isinstance(ep_distributed.current_heap(), HEAPS["torch"]) else ""
    environment = bench_rows.environment(args.commit, gpus=not INTERPRETING)
    found = []
    for name, timing in timings.items():
        op, provider, kind = name
        host, busy = _host_of(name, hosts), kernels.get(name)
        few = kind.startswith("low-latency")
        found.append(
            bench_rows.make_row(
                {
                    "op": op,
                    "provider": provider,
                    "mode": f"{how}-{'graph' if few else 'exact'}-{heap}sm{args.num_sm}-{kind}",
                    "payload": "fp8" if kind.endswith("fp8") else "bf16",
                    "nodes": ranks // ep_distributed.local_world_size(),
                    "ranks": ranks,
                    "tokens": min(args.tokens, doors_low_latency.TOKENS) if few else args.tokens,
                    "hidden": args.hidden,
                    "topk": args.topk,
                    "experts": args.experts,
                    "routing": "uniform:0",
                    "iters": args.iters * turns,
                    "host_us": "" if host is None else f"{host:.1f}",
                    "kernel_us": "" if busy is None else f"{busy:.1f}",
                    **{name: f"{value:.1f}" for name, value in asdict(timing).items()},
                    **environment,
                }
            )
        )
    return found


def _compare(timings: dict[Name, Timing], hosts: Hosts, kernels: dict[Name, float | None]) -> None:
    """Print the times of integrations against those of the layer."""
    for name, timing in timings.items():
        op, provider, kind = name
        core = _layers_call(name)
        if provider != "triton_ep" and core in timings:
            # On the CPU, and of a graph, only whole calls are timed.
            ours, other = kernels.get(name) or timing.median_us, kernels.get(core) or timings[core].median_us
            verdict = "within" if ours <= BOUND * other else "ABOVE"
            print(f"{op} of {provider}, {kind}: {ours / other:.3f} of the layer's {core[2]} one, {verdict} {BOUND}")
            if name in hosts:
                more = (hosts[name][0] - hosts[name][1]) / LAYER_CALLS.get(op, 1)
                verdict = "within" if more <= HOST_BOUND_US else "ABOVE"
                print(f"    host time: {more:+.1f} us per call, {verdict} {HOST_BOUND_US}")
    for op in ("dispatch", "combine", "roundtrip") if ("dispatch", "triton_ep", "expert-major") in timings else ():
        ratio = timings[op, "triton_ep", "compact"].median_us / timings[op, "triton_ep", "expert-major"].median_us
        print(f"{op} of compact rows: {ratio:.3f} of expert-major ones")


def doors_parser() -> argparse.ArgumentParser:
    """Options of this program, also those of `doors` in compare_commits.py."""
    parser = sizes_parser(__doc__)
    parser.add_argument("--num-sm", type=int, default=24)
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--commit", default=bench_rows.commit_of_checkout() or "unknown", help="commit of the rows")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        help="integrations (default: all); elastic is compared with calls of deep_ep and hybrid_ep",
    )
    return parser


def main() -> None:
    """Start the ranks, unless torchrun or another launcher has started them."""
    parser = doors_parser()
    parser.add_argument("--heap", choices=("auto", "nvshmem", "torch"), default="auto", help="symmetric heap")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--limit", type=float, help="seconds after which no further turn begins (default: none)")
    args = parser.parse_args()
    if ep_distributed.launched_by() == "none":
        ep_distributed.run_ranks(run, args.ranks, args)
    else:
        run(args)


if __name__ == "__main__":
    main()
