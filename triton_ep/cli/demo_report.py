"""What `triton-ep demo` shows: rows on each kind of link, the table, the routing picture."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import torch


def owners(topk_idx: torch.Tensor, num_experts: int, world_size: int) -> torch.Tensor:
    """Rank that owns each entry's expert, of the shape of `topk_idx`; -1 where the entry is dropped."""
    ids = topk_idx.long()
    return torch.where((ids >= 0) & (ids < num_experts), ids // (num_experts // world_size), -1)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Rows that dispatch moves for, and through, one rank.

    Attributes:
        local: rows of its own tokens that it stores to the other ranks of its node.
        network: rows of its own tokens that it sends to other nodes.
        forwarded: rows of other nodes' tokens that it hands on to the other ranks of its node.
        arrived: rows that came to it, those of its own tokens among them.
    """

    local: int
    network: int
    forwarded: int
    arrived: int

    @property
    def sent(self) -> int:
        """Rows that leave the rank for its own tokens."""
        return self.local + self.network

    @property
    def nvlink(self) -> int:
        """Rows the rank stores to other ranks of its node."""
        return self.local + self.forwarded


def expected_traffic(topk_idx: Sequence[torch.Tensor], num_experts: int, ranks_per_node: int) -> list[Traffic]:
    """The rows of one dispatch as they follow from the routing; `RankResult.traffic` has what the layer did.

    Args:
        topk_idx: per rank [T, K] expert ids; -1 or num_experts = dropped.
        num_experts: over all ranks.
        ranks_per_node: consecutive ranks that share a node.

    Returns:
        One entry per rank. A token crosses the network once per destination node, to the rank with the
        sender's local rank there, and NVLink once per destination rank.
    """
    world_size = len(topk_idx)
    local, network, forwarded, arrived = ([0] * world_size for _ in range(4))
    for source, idx in enumerate(topk_idx):
        owner = owners(idx, num_experts, world_size)
        reached = torch.stack([(owner == rank).any(1) for rank in range(world_size)])  # [W, T]
        for rank in range(world_size):
            arrived[rank] += int(reached[rank].sum())
        for first in range(0, world_size, ranks_per_node):
            in_node = reached[first : first + ranks_per_node]
            if first <= source < first + ranks_per_node:
                local[source] = int(in_node.sum() - reached[source].sum())
            else:
                gateway = first + source % ranks_per_node
                network[source] += int(in_node.any(0).sum())
                forwarded[gateway] += int(in_node.sum() - reached[gateway].sum())
    return [
        Traffic(local=local[r], network=network[r], forwarded=forwarded[r], arrived=arrived[r])
        for r in range(world_size)
    ]


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """What one rank measured and made; tensors are on the CPU.

    Attributes:
        topk_idx: [T, K] int32, where its tokens went.
        received: rows its experts got, by `layout_desc.num_recv_tokens_per_expert`.
        combined: [T, H] bfloat16, the layer's result.
        traffic: what the tables in the layer's descriptor say was sent.
    """

    topk_idx: torch.Tensor
    received: int
    combined: torch.Tensor
    traffic: Traffic


@dataclass(frozen=True)
class Comparison:
    """Distance of one rank's result from the dense computation.

    Attributes:
        max_abs: largest absolute difference.
        max_rel: largest difference relative to the sum over k of |weight * expert output| of that element.
        limit: largest `max_rel` that rounding to bfloat16 explains.
    """

    max_abs: float
    max_rel: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether the difference is rounding; a NaN is not."""
        return self.max_rel <= self.limit


_HEADER = ("rank", "node", "tokens", "copies", "sent", "saved", "received", "NVLink KiB", "network KiB")
_LEGEND = """
copies    (token, expert) pairs whose expert lives on another rank
sent      rows that left for them: one per other rank of the own node, one per other node
saved     rows that de-duplication spared this rank
received  rows that arrived at this rank's experts, the own ones among them
NVLink    bytes stored to ranks of the own node, rows handed on from the network included; dispatch only
rel err   against the sum over k of |weight * expert output|"""


def table(
    results: Sequence[RankResult], comparisons: Sequence[Comparison], num_experts: int, ranks_per_node: int
) -> str:
    """The table for people: one line per rank, totals, what the columns mean."""
    numbers: list[list[float]] = []
    for rank, result in enumerate(results):
        traffic, kib_per_row = result.traffic, result.combined[:1].nbytes / 1024
        owner = owners(result.topk_idx, num_experts, len(results))
        copies = int(((owner >= 0) & (owner != rank)).sum())
        counts = [len(result.topk_idx), copies, traffic.sent, copies - traffic.sent, result.received]
        numbers.append([*counts, traffic.nvlink * kib_per_row, traffic.network * kib_per_row])
    numbers.append([sum(column) for column in zip(*numbers, strict=True)])
    places = [(str(rank), str(rank // ranks_per_node)) for rank in range(len(results))] + [("all", "")]
    errors = [(c.max_abs, c.max_rel) for c in comparisons]
    errors.append((max(c.max_abs for c in comparisons), max(c.max_rel for c in comparisons)))

    rows = [[*_HEADER, "max abs err", "max rel err"]]
    for place, line, error in zip(places, numbers, errors, strict=True):
        cells = [f"{value:.1f}" if isinstance(value, float) else str(value) for value in line]
        rows.append([*place, *cells, *(f"{value:.2e}" for value in error)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    rule = "-" * len(text[0])
    return "\n".join([text[0], rule, *text[1:-1], rule, text[-1], _LEGEND])


def failures(
    results: Sequence[RankResult], comparisons: Sequence[Comparison], num_experts: int, ranks_per_node: int
) -> list[str]:
    """What is wrong with the results, in words; empty = they are right."""
    wrong = []
    expected = expected_traffic([result.topk_idx for result in results], num_experts, ranks_per_node)
    for rank, (result, comparison) in enumerate(zip(results, comparisons, strict=True)):
        if not comparison.passed:
            error, limit = comparison.max_rel, comparison.limit
            wrong.append(f"rank {rank}: relative error {error:.2e}, rounding explains {limit:.2e}")
        if result.traffic != expected[rank]:
            wrong.append(f"rank {rank}: {result.traffic}, but the routing asks for {expected[rank]}")
    return wrong


def draw_routing(path: str, topk_idx: Sequence[torch.Tensor], num_experts: int) -> str | None:
    """Draw how many tokens each rank sends to each expert.

    Returns:
        None when the picture was written to `path`, otherwise why not.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return "none, matplotlib is not installed (pip install matplotlib)"
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    counts = torch.zeros(len(topk_idx), num_experts, dtype=torch.int64)
    for source, idx in enumerate(topk_idx):
        kept = idx[(idx >= 0) & (idx < num_experts)].long()
        counts[source] = torch.bincount(kept, minlength=num_experts)
    figure = Figure(figsize=(1.5 + 0.45 * num_experts, 1.5 + 0.5 * len(topk_idx)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(counts.numpy(), cmap="Blues", vmin=0, aspect="auto")
    darkest = int(counts.max())
    for source, row in enumerate(counts.tolist()):
        for expert, count in enumerate(row):
            colour = "white" if 2 * count > darkest else "black"
            axes.text(expert, source, str(count), ha="center", va="center", color=colour)
    for boundary in range(1, len(topk_idx)):
        axes.axvline(boundary * num_experts // len(topk_idx) - 0.5, color="k", linewidth=0.8)
    axes.set(xlabel="expert (lines separate the ranks that own them)", ylabel="source rank")
    axes.set_xticks(range(num_experts))
    axes.set_yticks(range(len(topk_idx)))
    axes.set_title("Tokens from each rank to each expert")
    figure.colorbar(image, label="tokens")
    figure.savefig(path, dpi=120)
    return None
