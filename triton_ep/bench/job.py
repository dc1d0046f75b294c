"""One rank's part of a run: inputs of a shape, the layer of a case, and the measurement of an op."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist

from triton_ep.bench import origins, rows, timing
from triton_ep.bench import routing as routings
from triton_ep.bench.routing import Routing
from triton_ep.bench.settings import COMPACT, TUNED, Case, Settings, Shape
from triton_ep.bench.timing import Span
from triton_ep.distributed import initialize_distributed
from triton_ep.errors import ConfigError, EPError
from triton_ep.layer import EPAll2AllLayer
from triton_ep.runtime.environment import read_environment, set_defaults
from triton_ep.runtime.tuned.table import TunedEntry

_RECORDED_CALLS = 10  # at most, and no more than the timed calls


class WrongResult(EPError):
    """A result is wrong, so it is not timed."""


@dataclass(frozen=True)
class Measured:
    """Measurements of one op; None where one could not be taken.

    Attributes:
        host_us: host time of a call on the slowest host, median.
        kernel_us: time in which at least one kernel or copy of the call runs, slowest rank, median.
        moved_bytes: payload bytes that leave the busiest rank (`quantise`: bytes that each rank reads and writes).
        limit_bytes: bytes of the busiest rank in its busier direction, which set the floor; 0: no floor.
        calls: spans of the recorded calls on this rank.
        peak_bytes: peak memory of a call on the rank with the highest peak; None: not known.
        error_db: signal-to-noise ratio of the result, worst rank; None: not measured.
        floor_us: least time of a decoding layer, see `moe.measure_moe`; None: the floor follows from the links.
    """

    timing: timing.Timing
    host_us: float | None
    kernel_us: float | None
    moved_bytes: int = 0
    limit_bytes: int = 0
    calls: list[list[Span]] = field(default_factory=list)
    peak_bytes: int | None = None
    error_db: float | None = None
    floor_us: float | None = None


def join(settings: Settings) -> int:
    """Join the job to be measured; returns the rank of this process.

    Raises:
        ConfigError: ranks may share GPUs, so times would include the time slices of other ranks.
    """
    if not settings.interpreting:
        most = read_environment().ranks_per_gpu
        if most > 1:
            raise ConfigError(f"TRITON_EP_RANKS_PER_GPU={most} is for tests; unset it to measure, one GPU per rank.")
        # Multicast takes memory and is not part of the comparison.
        set_defaults({"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"})
    rank, _ = initialize_distributed(local_world_size=settings.local_world_size, timeout_s=300)
    return rank


@dataclass(frozen=True)
class Place:
    """This process in the job."""

    rank: int
    num_ranks: int
    ranks_per_node: int
    device: torch.device
    environment: rows.Row


class Job:
    """State that all cases of one shape share on this rank."""

    def __init__(self, settings: Settings, shape: Shape, place: Place) -> None:
        self.settings, self.shape, self.place = settings, shape, place
        self.rank, self.num_ranks, self.device = place.rank, place.num_ranks, place.device
        self.timer = timing.Timer(place.device, settings.iters, settings.warmup)

    @cached_property
    def idxs(self) -> list[list[torch.Tensor]]:
        """Expert ids [T, K] of every rank, per input; every rank draws the same."""
        s = self.settings
        return routings.draw(s.routing, self.shape, self.num_ranks, s.inputs, s.seed)

    @cached_property
    def routings(self) -> list[Routing]:
        """Where the tokens of each input go."""
        return [Routing.of(idxs, self.shape.experts, self.place.ranks_per_node) for idxs in self.idxs]

    @cached_property
    def inputs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """x [T, H] bf16 and idx [T, K] int32 of this rank, per input, on the device."""
        return [
            (self.rows_of(self.rank, number), idxs[self.rank].to(self.device)) for number, idxs in enumerate(self.idxs)
        ]

    def rows_of(self, rank: int, number: int) -> torch.Tensor:
        """[T, H] bf16: rows of a rank in an input."""
        seed = self.settings.seed + number
        return origins.coded_rows(rank, self.shape.tokens, self.shape.hidden, seed, self.device)

    def say(self, text: str) -> None:
        """Print progress on rank 0."""
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)

    def most_rows(self) -> int:
        """Most rows that a rank receives, over all inputs."""
        return max(routing.most_rows() for routing in self.routings)

    def capacity(self, case: Case) -> int | None:
        """Output rows in static mode: a quarter above the average, and room for these routings in any case."""
        if case.capacity == "exact":
            return None
        align = self.settings.alignment
        padding = self.shape.experts // self.num_ranks * (align - 1)
        wanted = max(self.shape.tokens * self.shape.topk * 5 // 4, self.most_rows()) + padding
        return -(-wanted // align) * align

    @contextlib.contextmanager
    def layer(self, case: Case, tuned: TunedEntry | None = None) -> Iterator[EPAll2AllLayer]:
        """The layer of a case, built from `tuned` if given; at the end raises errors that the device reported."""
        shape, s, compact = self.shape, self.settings, case.provider == COMPACT
        with EPAll2AllLayer(
            dist.group.WORLD,
            shape.tokens,
            shape.hidden,
            shape.topk,
            self.rank,
            shape.experts,
            self.place.ranks_per_node,
            self.num_ranks,
            num_sm=None if tuned is not None or case.num_sm == TUNED else max(case.num_sm, 1),
            sm_budget=s.sm_budget,
            copy_engines=s.copy_engines,
            tuned=tuned,
            enable_local_combine=s.local_combine,
            alignment=s.alignment,
            capacity=None if compact else self.capacity(case),
            payload="mxfp8" if case.payload == "mxfp8" and not compact else None,
            low_latency=s.low_latency,
            timeout_s=120.0,  # compilation may take longer on some ranks
        ) as layer:
            yield layer
            layer.check()

    def measure(self, call: timing.Call, meet: Callable[[], None], per_call: int = 1) -> Measured:
        """Time a call that repeats the measured op `per_call` times; collective."""
        times = [us / per_call for us in self.timer.times(call, meet)]
        host_us = timing.slowest(self.timer.host_time(call, meet))
        repeats = min(_RECORDED_CALLS, self.settings.iters)
        calls = timing.record_calls(call, meet, self.timer.flush, repeats, self.device)
        return Measured(
            timing=timing.over_ranks(times),
            host_us=None if host_us is None else host_us / per_call,
            kernel_us=timing.kernel_time(calls, repeats, per_call),
            calls=calls,
        )


def capture(calls: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Run the calls once, then capture them as a CUDA graph; collective."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        calls()
    torch.cuda.synchronize()
    # Other threads of this process, including NCCL's, may use CUDA during the capture.
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        calls()
    torch.cuda.synchronize()
    return graph
