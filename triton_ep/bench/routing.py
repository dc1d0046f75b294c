"""Routings of a benchmark: expert ids of every rank, which every rank draws alike, and the payload bytes between ranks
that follow from them alone; rows that stay on a rank do not count."""

from __future__ import annotations

import pickle
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

from triton_ep.bench.settings import Settings, Shape, check_routing
from triton_ep.config import Topology
from triton_ep.errors import InputError

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def uniform_idx(rank: int, num_tokens: int, topk: int, num_experts: int, seed: int, drop: float = 0.0) -> torch.Tensor:
    """[num_tokens, topk] int32 on the CPU: distinct experts, all equally likely; a fraction `drop` of -1."""
    generator = torch.Generator().manual_seed(seed * 4096 + rank)
    idx = torch.rand(num_tokens, num_experts, generator=generator).topk(topk, dim=1).indices.int()
    return torch.where(torch.rand(num_tokens, topk, generator=generator) < drop, -1, idx)


def zipf_idx(rank: int, num_tokens: int, topk: int, num_experts: int, seed: int, exponent: float) -> torch.Tensor:
    """[num_tokens, topk] int32 on the CPU: distinct experts; the i-th most popular one has weight 1 / i**exponent.

    The order of popularity is drawn from the seed, the same on all ranks.
    """
    place = torch.randperm(num_experts, generator=torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed * 4096 + rank)
    noise = torch.rand(num_tokens, num_experts, generator=generator).clamp(1e-30, 1 - 1e-7)
    # The largest values of log(p) + Gumbel noise are a draw without replacement by p.
    score = -exponent * torch.log(place.float() + 1) - torch.log(-torch.log(noise))
    return score.topk(topk, dim=1).indices.int()


def one_hot_idx(num_tokens: int, topk: int, num_experts: int, first: int) -> torch.Tensor:
    """[num_tokens, topk] int32: experts first, first + 1, .. (modulo `num_experts`) for every token."""
    return ((first + torch.arange(topk)) % num_experts).int().repeat(num_tokens, 1)


def read_idx(path: str, shape: Shape, num_ranks: int) -> list[list[torch.Tensor]]:
    """Ids [W * T, K], [W, T, K] or n times that many (or a list of n), from a .pt or .npy file: n routings of W tensors
    [T, K].

    Raises:
        InputError: no such file, another file type, ids of another shape or out of range.
    """
    place = Path(path)
    if place.suffix not in (".pt", ".npy") or not place.is_file():
        raise InputError(f"--routing file:{path} names no .pt or .npy file. Pass the path of a file that exists.")
    try:
        if place.suffix == ".npy":
            import numpy

            # Mapped: a header that claims more data than the file has takes no memory.
            found = numpy.load(place, mmap_mode="r")
            kind = found.dtype.kind if isinstance(found, numpy.ndarray) else "?"
            if kind not in "iu":
                raise InputError(f"{path} holds {found.dtype if kind != '?' else 'several arrays'}; ids are integers.")
            if found.dtype == numpy.uint64:  # values beyond int64 are no ids
                found = numpy.minimum(found, numpy.uint64(2**31))
            ids = torch.from_numpy(found.astype(numpy.int64))
        else:
            ids = torch.load(place, map_location="cpu", weights_only=True)
            ids = torch.stack(list(ids)) if isinstance(ids, list | tuple) else ids
    except InputError:
        raise
    except (OSError, ValueError, TypeError, RuntimeError, EOFError, MemoryError, OverflowError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    except (pickle.UnpicklingError, KeyError, AttributeError, IndexError, RecursionError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    plain = isinstance(ids, torch.Tensor) and ids.layout == torch.strided and ids.device.type == "cpu"
    if not plain or ids.dtype not in _INTEGERS or ids.dim() < 2:
        got = f"{ids.dtype} of shape {list(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise InputError(f"{path} holds {got}; expert ids are integers [{num_ranks * shape.tokens}, {shape.topk}].")
    one = num_ranks * shape.tokens * shape.topk
    if ids.shape[-1] != shape.topk or ids.numel() == 0 or ids.numel() % one:
        raise InputError(
            f"{path} holds ids of shape {list(ids.shape)}; {num_ranks} ranks with {shape.tokens} tokens and top-"
            f"{shape.topk} need [{num_ranks * shape.tokens}, {shape.topk}]. Pass --tokens and --topk that fit it."
        )
    if int(ids.min()) < -1 or int(ids.max()) >= shape.experts:
        raise InputError(f"{path} holds ids {int(ids.min())} to {int(ids.max())}; there are {shape.experts} experts.")
    return [list(routing) for routing in ids.int().view(-1, num_ranks, shape.tokens, shape.topk)]


def draw(spec: str, shape: Shape, num_ranks: int, inputs: int, seed: int) -> list[list[torch.Tensor]]:
    """`inputs` routings, each the ids [T, K] of every rank; spec: "uniform", "zipf:S", "one-hot" or "file:PATH".

    One-hot ids start at the first expert of another rank each time. A file may hold fewer routings: they repeat.

    Raises:
        ConfigError: another spec, or a seed below 0. InputError: see `read_idx`.
    """
    check_routing(spec, seed)
    kind, _, argument = spec.partition(":")
    if kind == "file":
        found = read_idx(argument, shape, num_ranks)
        return [found[number % len(found)] for number in range(inputs)]
    sizes = (shape.tokens, shape.topk, shape.experts)
    routings = []
    for number in range(inputs):
        if kind == "one-hot":
            first = number % num_ranks * (shape.experts // num_ranks)
            routings.append([one_hot_idx(*sizes, first)] * num_ranks)
        elif kind == "zipf":
            routings.append([zipf_idx(r, *sizes, seed + number, float(argument)) for r in range(num_ranks)])
        else:
            routings.append([uniform_idx(r, *sizes, seed + number) for r in range(num_ranks)])
    return routings


def check_file(settings: Settings) -> None:
    """Raise InputError, as `read_idx`, if the routing of a run is a file that does not fit every shape."""
    kind, _, path = settings.routing.partition(":")
    if kind == "file" and settings.routed:
        for shape in settings.shapes:
            read_idx(path, shape, settings.ranks)


@dataclass(frozen=True)
class Routing:
    """The ranks that receive the tokens of all ranks.

    Attributes:
        copies: [W, T, W] int64: assignments of token t of rank s to experts of rank r.
        ranks_per_node: L; ranks of one node have consecutive numbers.
    """

    copies: torch.Tensor
    ranks_per_node: int

    @classmethod
    def of(cls, idxs: list[torch.Tensor], num_experts: int, ranks_per_node: int) -> Routing:
        """From the expert ids [T, K] of every rank, -1 = dropped; the same T on all ranks."""
        idx = torch.stack(idxs).long()
        owner = torch.where(idx >= 0, idx // (num_experts // len(idxs)), len(idxs))
        copies = torch.zeros(*idx.shape[:2], len(idxs) + 1, dtype=torch.int64)
        copies.scatter_add_(2, owner, torch.ones_like(owner))
        return cls(copies[:, :, :-1], ranks_per_node)

    @property
    def num_ranks(self) -> int:
        """W."""
        return self.copies.shape[0]

    def most_rows(self) -> int:
        """Most rows that a rank receives."""
        return int(self.copies.sum((0, 1)).max())

    def tokens(self) -> torch.Tensor:
        """[W, W] int64: tokens of one rank (row) with an expert on another (column)."""
        return (self.copies > 0).sum(1)

    def relays(self, source: int) -> list[tuple[int, list[int]]]:
        """Per node: the rank that receives the tokens of `source` there, and all ranks of the node."""
        here = Topology(source, self.num_ranks, self.ranks_per_node)
        nodes = range(here.num_nodes)
        first = [node * self.ranks_per_node for node in nodes]
        return [(here.counterpart(node), list(range(first[node], first[node] + self.ranks_per_node))) for node in nodes]


def out_of(between: torch.Tensor) -> list[int]:
    """Bytes that leave each rank; between: [W, W], from row to column."""
    return [int(value) for value in between.sum(1)]


def busiest(between: torch.Tensor) -> int:
    """Bytes of the busiest rank in its busier direction; between: [W, W], from row to column."""
    return int(torch.maximum(between.sum(0), between.sum(1)).max())


def dispatch_bytes(routing: Routing, row_bytes: int) -> torch.Tensor:
    """[W, W] bytes: a token goes once to each rank of its node, and once to each other node.

    The rank of the same local number on that node forwards it to the others there, once each.
    """
    rows = torch.zeros(routing.num_ranks, routing.num_ranks, dtype=torch.int64)
    for source in range(routing.num_ranks):
        for relay, members in routing.relays(source):
            wanted = routing.copies[source][:, members] > 0
            if relay != source:
                rows[source, relay] += wanted.any(1).sum()
            for place, rank in enumerate(members):
                if rank != relay:
                    rows[relay, rank] += wanted[:, place].sum()
    return rows * row_bytes


def combine_bytes(routing: Routing, row_bytes: int, partial_bytes: int, *, local_combine: bool) -> torch.Tensor:
    """[W, W] bytes: rows that ranks of a node read from each other, and partial sums sent to other nodes.

    Without local combine a row per assignment is read; with it, one row per (token, rank). `partial_bytes`: bytes of
    the row that carries a partial sum across the network, once per token and node.
    """
    out = torch.zeros(routing.num_ranks, routing.num_ranks, dtype=torch.int64)
    for source in range(routing.num_ranks):
        for relay, members in routing.relays(source):
            copies = routing.copies[source]
            rows = (copies > 0).long() if local_combine else copies
            for rank in members:
                if rank != relay:
                    out[rank, relay] += rows[:, rank].sum() * row_bytes
            if relay != source:
                out[relay, source] += (copies[:, members] > 0).any(1).sum() * partial_bytes
    return out


def plain_bytes(routing: Routing, row_bytes: int) -> torch.Tensor:
    """[W, W] bytes of dispatch with one row per assignment; the transpose has the bytes of combine."""
    between = routing.copies.sum(1)
    between.fill_diagonal_(0)
    return between * row_bytes
