"""Expected results of every stage of the pipeline, computed for all ranks at once, with loops and slices.

Each process knows the data of all ranks, so nothing here communicates. Quantisation is the oracle's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triton_ep import MXTensor
from triton_ep.distributed import current_heap
from triton_ep.reference import mxfp8
from triton_ep.testing import make_workload

Bytes = tuple[torch.Tensor, torch.Tensor]
"""Elements and scale bytes."""


@dataclass(frozen=True)
class Case:
    """Sizes and routing. `tokens`: per rank, repeated cyclically; `experts`: per rank; `n`: N of the GEMM."""

    name: str
    tokens: tuple[int, ...] = (7, 12, 5, 9)
    hidden: int = 64
    n: int = 96
    topk: int = 2
    experts: int = 2
    routing: str = "uniform"
    drop: float = 0.15
    alignment: int = 32
    dtype: torch.dtype = torch.bfloat16
    normal: bool = False


@dataclass
class World:
    """Data of all ranks: tokens, their assignments in the order of sending, and counts per destination.

    Attributes:
        x, topk_idx: per rank [T, H] and [T, K].
        token: per rank [S], token of each row that is sent, in the order of experts, then (token, k).
        slot: per rank [S], place of each of these rows in the flattened [T, K].
        counts: [W][E] rows from each rank for each expert.
    """

    case: Case
    x: list[torch.Tensor]
    topk_idx: list[torch.Tensor]
    token: list[torch.Tensor]
    slot: list[torch.Tensor]
    counts: list[list[int]]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.x)

    def rows(self, rank: int) -> torch.Tensor:
        """[S, H]: rows that the rank sends, before quantisation."""
        return self.x[rank][self.token[rank]]

    def sent(self, source: int, owner: int) -> int:
        """Number of rows that go from one rank to another."""
        first = owner * self.case.experts
        return sum(self.counts[source][first : first + self.case.experts])

    def input_splits(self, rank: int) -> list[int]:
        """Number of rows from the rank to each rank."""
        return [self.sent(rank, owner) for owner in range(self.size)]

    def output_splits(self, rank: int) -> list[int]:
        """Number of rows from each rank to the rank."""
        return [self.sent(source, rank) for source in range(self.size)]

    def arrived(self, per_source: list[torch.Tensor], rank: int) -> torch.Tensor:
        """Rows that the rank receives when every rank sends its rows `per_source`."""
        parts = []
        for source, rows in enumerate(per_source):
            splits = self.input_splits(source)
            first = sum(splits[:rank])
            parts.append(rows[first : first + splits[rank]])
        return torch.cat(parts)

    def returned(self, per_owner: list[torch.Tensor], rank: int) -> torch.Tensor:
        """Rows that the rank gets back when every rank returns rows in the order in which it received them."""
        parts = []
        for owner, rows in enumerate(per_owner):
            splits = self.output_splits(owner)
            first = sum(splits[:rank])
            parts.append(rows[first : first + splits[rank]])
        return torch.cat(parts)

    def expert_counts(self, rank: int) -> list[int]:
        """[W * e]: number of rows from each rank for each local expert, rank-major."""
        first = rank * self.case.experts
        return [n for row in self.counts for n in row[first : first + self.case.experts]]

    def indices(self, rank: int) -> tuple[list[int], list[int]]:
        """Indices of the expert-major order, with all padding, and the number of rows of each expert."""
        experts, align = self.case.experts, self.case.alignment
        counts = self.expert_counts(rank)
        places: list[int] = []
        sizes = []
        for expert in range(experts):
            before = len(places)
            for source in range(self.size):
                group = source * experts + expert
                first = sum(counts[:group])
                places += range(first, first + counts[group])
            while len(places) % align or len(places) == before:
                places.append(-1)
            sizes.append(len(places) - before)
        bound = sum(counts) + experts * align
        places += [-1] * (-(-bound // align) * align - len(places))
        return places, sizes


def make_world(case: Case, size: int) -> World:
    """Create the data of all ranks, the same on every rank."""
    world = World(case, [], [], [], [], [])
    for rank in range(size):
        work = make_workload(
            rank,
            size,
            case.tokens[rank % len(case.tokens)],
            hidden=case.hidden,
            topk=case.topk,
            num_experts=case.experts * size,
            dtype=case.dtype,
            seed=len(case.name),
            routing=case.routing,
            drop=case.drop,
        )
        x = work.x
        if case.normal:
            x = torch.randn(x.shape, generator=torch.Generator().manual_seed(rank)).to(case.dtype)
        expert = work.topk_idx.flatten().tolist()
        slots = [slot for e in range(case.experts * size) for slot, owner in enumerate(expert) if owner == e]
        world.x.append(x)
        world.topk_idx.append(work.topk_idx)
        world.slot.append(torch.tensor(slots, dtype=torch.int64))
        world.token.append(world.slot[-1] // case.topk)
        world.counts.append([expert.count(e) for e in range(case.experts * size)])
    return world


def expert_weights(case: Case, size: int) -> torch.Tensor:
    """[E, N, H] bf16 of all experts."""
    generator = torch.Generator().manual_seed(11)
    return (torch.randn(case.experts * size, case.n, case.hidden, generator=generator) / case.hidden**0.5).bfloat16()


def output_gradient(world: World, rank: int) -> torch.Tensor:
    """[S, N] in the dtype of the case: gradient of the rows that the rank gets back."""
    generator = torch.Generator().manual_seed(70 + rank)
    return torch.randn(len(world.token[rank]), world.case.n, generator=generator).to(world.case.dtype)


def quantized(x: torch.Tensor) -> Bytes:
    """Elements and scales from the oracle, as uint8."""
    data, scale = mxfp8.quantize(x)
    return data.view(torch.uint8), scale


def taken(rows: torch.Tensor, places: list[int]) -> torch.Tensor:
    """Rows by index; zeros for negative indices."""
    out = rows.new_zeros(len(places), rows.shape[1])
    for position, place in enumerate(places):
        if place >= 0:
            out[position] = rows[place]
    return out


def put(rows: torch.Tensor, places: list[int], num_rows: int) -> torch.Tensor:
    """The inverse of `taken`."""
    out = rows.new_zeros(num_rows, rows.shape[1])
    for position, place in enumerate(places):
        if place >= 0:
            out[place] = rows[position]
    return out


def values_along(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Float32 values of `x` after quantisation along a dimension whose length is a multiple of 32."""
    data, scale = mxfp8.quantize(x.movedim(dim, -1).contiguous())
    return mxfp8.dequantize(data, scale, torch.float32).movedim(-1, dim)


def assert_bytes(mx: torch.Tensor, want: Bytes, what: str) -> None:
    """Assert that `mx` is an MXTensor with exactly these elements and scales."""
    assert isinstance(mx, MXTensor), f"{what} is {type(mx)}"
    for name, part, expected in zip(("elements", "scales"), (mx.qdata, mx.scale), want, strict=True):
        got = part.view(torch.uint8).cpu()
        assert got.shape == expected.shape, f"{name} of {what} are {list(got.shape)}, not {list(expected.shape)}"
        wrong = (got != expected).any(-1).nonzero().flatten().tolist()
        assert not wrong, f"{name} of {what} differ in rows {wrong[:8]}"


def assert_equal(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Assert the same shape, dtype and bits, on any device."""
    assert type(got) is torch.Tensor and (got.shape, got.dtype) == (want.shape, want.dtype), f"{what}: {got!r:.200}"
    assert torch.equal(got.cpu(), want), f"{what} differs"


def device() -> torch.device:
    """The device of this rank's tensors."""
    return current_heap().device


def sqnr(got: torch.Tensor, want: torch.Tensor) -> float:
    """Signal-to-noise ratio in dB."""
    want = want.double()
    return float(20 * torch.log10(want.norm() / (got.cpu().double() - want).norm()))
