"""The output of `triton-ep demo`: rows on each kind of link, the tables, the routing picture."""

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


def owners(topk_idx: torch.Tensor, num_experts: int, world_size: int) -> torch.Tensor:
    """Rank that owns each entry's expert, in the shape of `topk_idx`; -1 if the entry is dropped."""
    ids = topk_idx.long()
    return torch.where((ids >= 0) & (ids < num_experts), ids // (num_experts // world_size), -1)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Rows that dispatch moves for, and through, one rank.

    Attributes:
        local: rows of its own tokens that it stores to the other ranks of its node.
        network: rows of its own tokens that it sends to other nodes.
        forwarded: rows of other nodes' tokens that it forwards to the other ranks of its node.
        arrived: rows that it received, including rows of its own tokens.
    """

    local: int
    network: int
    forwarded: int
    arrived: int

    @property
    def sent(self) -> int:
        """Rows of its own tokens that leave the rank."""
        return self.local + self.network

    @property
    def nvlink(self) -> int:
        """Rows that the rank stores to other ranks of its node."""
        return self.local + self.forwarded


def expected_traffic(topk_idx: Sequence[torch.Tensor], num_experts: int, ranks_per_node: int) -> list[Traffic]:
    """Rows of one dispatch, computed from the routing; `PayloadResult.traffic` has the rows that the layer sent.

    Args:
        topk_idx: per rank [T, K] expert ids; -1 or num_experts = dropped.
        num_experts: over all ranks.
        ranks_per_node: consecutive ranks that share a node.

    Returns:
        One entry per rank. A token crosses the network once per destination node, to the rank there with the
        sender's local rank, and NVLink once per destination rank.
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
class PayloadResult:
    """Measurements and result of one rank with one payload; tensors are on the CPU.

    Attributes:
        row_bytes: bytes of a row on the wire.
        traffic: rows sent, by the tables in the layer's descriptor.
        signal, noise: sums of squares of the rows received in bf16, and of this payload's difference from them.
        combined: [T, H] bfloat16, the layer's result.
    """

    row_bytes: int
    traffic: Traffic
    signal: float
    noise: float
    combined: torch.Tensor


MODULE_PARTS = ("result", "gradient")
"""Compared parts of the module: its result, and the gradient of its tokens."""
_LEAST_DB = {"bf16": 36.0, "mxfp8": 20.0}  # one rounding gives 50 dB in bf16, 31.5 in e4m3; up to 8 factors are rounded


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Sums of squares: of exact values, and of the differences of other values from them."""

    signal: float
    noise: float


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """Measurements and results of one rank; tensors are on the CPU.

    Attributes:
        topk_idx: [T, K] int32, experts of its tokens.
        received: rows that its experts received, by `layout_desc.num_recv_tokens_per_expert`.
        bf16, mxfp8: results by payload.
        module: errors of the same layer as a torch module, by payload and part.
    """

    topk_idx: torch.Tensor
    received: int
    bf16: PayloadResult
    mxfp8: PayloadResult
    module: dict[str, dict[str, Noise]] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Distance of one rank's result from the dense computation.

    Attributes:
        max_abs: largest absolute difference.
        max_rel: largest difference relative to the sum over k of |weight * expert output| of that element.
        limit: largest `max_rel` that rounding to bfloat16 explains.
        signal, noise: sums of squares of the dense result of unquantised tokens, and of the difference from that.
    """

    max_abs: float
    max_rel: float
    limit: float
    signal: float = 0.0
    noise: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether rounding explains the difference; False for NaN."""
        return self.max_rel <= self.limit


_HEADER = ("rank", "node", "tokens", "copies", "sent", "saved", "received", "NVLink KiB", "network KiB")
_LEGEND = """
copies    (token, expert) pairs whose expert lives on another rank
sent      rows sent for these pairs: one per other rank of this node, one per other node
saved     rows that this rank did not send, thanks to de-duplication
received  rows that arrived at this rank's experts, including its own tokens
NVLink    bytes stored to ranks of this node, including rows forwarded from the network; dispatch only
rel err   against the sum over k of |weight * expert output|"""


def table(
    results: Sequence[RankResult], comparisons: Sequence[Comparison], num_experts: int, ranks_per_node: int
) -> str:
    """The table of the bf16 run: one line per rank, totals, meaning of the columns."""
    numbers: list[list[float]] = []
    for rank, result in enumerate(results):
        traffic, kib_per_row = result.bf16.traffic, result.bf16.row_bytes / 1024
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
    text = _aligned(rows)
    rule = "-" * len(text[0])
    return "\n".join([text[0], rule, *text[1:-1], rule, text[-1], _LEGEND])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


_PAYLOAD_HEADER = ("payload", "bytes per row", "NVLink KiB", "network KiB", "saved", "rows dB", "result dB")
_PAYLOAD_LEGEND = """
bytes     on the wire, where rows in MXFP8 are padded to multiples of 128
saved     part of the bytes of bf16
rows      signal-to-noise ratio of received rows, against received bf16 rows
result    signal-to-noise ratio of combined rows, against the dense layer of unquantised tokens"""


def payload_table(
    results: Sequence[RankResult], bf16_comparisons: Sequence[Comparison], mxfp8_comparisons: Sequence[Comparison]
) -> str:
    """Table that compares bf16 and MXFP8, over all ranks: bytes of the dispatch, and error."""
    bf16, mxfp8 = [result.bf16 for result in results], [result.mxfp8 for result in results]
    rows: list[Sequence[str]] = [_PAYLOAD_HEADER]
    for name, payload, comparisons in (("bf16", bf16, bf16_comparisons), ("mxfp8", mxfp8, mxfp8_comparisons)):
        nvlink = sum(p.traffic.nvlink * p.row_bytes for p in payload)
        network = sum(p.traffic.network * p.row_bytes for p in payload)
        saved = 1 - payload[0].row_bytes / bf16[0].row_bytes
        ratios = (decibels(payload), decibels(comparisons))
        cells = [f"{nvlink / 1024:.1f}", f"{network / 1024:.1f}", f"{saved:.1%}"]
        cells += ["exact" if math.isinf(ratio) else f"{ratio:.1f}" for ratio in ratios]
        rows.append([name, str(payload[0].row_bytes), *cells])
    text = _aligned(rows)
    return "\n".join([text[0], "-" * len(text[0]), *text[1:], _PAYLOAD_LEGEND])


def module_table(results: Sequence[RankResult]) -> str:
    """Table of the module's result and gradient in both payloads, over all ranks."""
    rows = [["payload", *(f"{part} dB" for part in MODULE_PARTS)]]
    for name in _LEAST_DB:
        rows.append([name, *(f"{_of_module(results, name, part):.1f}" for part in MODULE_PARTS)])
    text = _aligned(rows)
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])


def _of_module(results: Sequence[RankResult], payload: str, part: str) -> float:
    return decibels([result.module[payload][part] for result in results])


def decibels(parts: Sequence[PayloadResult] | Sequence[Comparison] | Sequence[Noise]) -> float:
    """Signal-to-noise ratio of all parts together; infinite without noise."""
    noise = sum(part.noise for part in parts)
    return 10 * math.log10(sum(part.signal for part in parts) / noise) if noise else math.inf


def failures(
    results: Sequence[RankResult],
    bf16_comparisons: Sequence[Comparison],
    mxfp8_comparisons: Sequence[Comparison],
    num_experts: int,
    ranks_per_node: int,
) -> list[str]:
    """Errors in the results, in words; empty = all correct."""
    wrong = []
    expected = expected_traffic([result.topk_idx for result in results], num_experts, ranks_per_node)
    for rank, result in enumerate(results):
        for name, payload, comparison in (
            ("bf16", result.bf16, bf16_comparisons[rank]),
            ("mxfp8", result.mxfp8, mxfp8_comparisons[rank]),
        ):
            if not comparison.passed:
                error, limit = comparison.max_rel, comparison.limit
                wrong.append(f"rank {rank}, {name}: relative error {error:.2e}, rounding explains {limit:.2e}")
            if payload.traffic != expected[rank]:
                wrong.append(f"rank {rank}, {name}: {payload.traffic}, but the routing requires {expected[rank]}")
    for name, least in _LEAST_DB.items() if all(result.module for result in results) else ():
        for part in MODULE_PARTS:
            seen = _of_module(results, name, part)
            if not seen >= least:
                wrong.append(f"module, {name}: its {part} has {seen:.1f} dB, rounding explains {least:.0f}")
    return wrong


def draw_routing(path: str, results: Sequence[RankResult], num_experts: int) -> str | None:
    """Draw the number of tokens from each rank to each expert, and the bytes that each rank sends, by payload.

    Returns:
        None if the picture was written to `path`, otherwise the reason why not.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return "none, matplotlib is not installed (pip install matplotlib)"
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    counts = torch.zeros(len(results), num_experts, dtype=torch.int64)
    for source, idx in enumerate(result.topk_idx for result in results):
        kept = idx[(idx >= 0) & (idx < num_experts)].long()
        counts[source] = torch.bincount(kept, minlength=num_experts)
    width = max(0.45 * num_experts, 4.5)
    figure = Figure(figsize=(5.5 + width, 1.5 + 0.5 * len(results)), layout="constrained")
    FigureCanvasAgg(figure)
    axes, bars = figure.subplots(1, 2, width_ratios=(width, 2.5))
    image = axes.imshow(counts.numpy(), cmap="Blues", vmin=0, aspect="auto")
    darkest = int(counts.max())
    for source, row in enumerate(counts.tolist()):
        for expert, count in enumerate(row):
            colour = "white" if 2 * count > darkest else "black"
            axes.text(expert, source, str(count), ha="center", va="center", color=colour)
    for boundary in range(1, len(results)):
        axes.axvline(boundary * num_experts // len(results) - 0.5, color="k", linewidth=0.8)
    axes.set(xlabel="expert (lines separate the ranks that own them)", ylabel="source rank")
    axes.set_xticks(range(num_experts))
    axes.set_yticks(range(len(results)))
    axes.set_title("Tokens from each rank to each expert")
    figure.colorbar(image, ax=axes, label="tokens")
    for offset, name, payloads in (
        (-0.2, "bf16", [result.bf16 for result in results]),
        (0.2, "mxfp8", [result.mxfp8 for result in results]),
    ):
        kib = [payload.traffic.sent * payload.row_bytes / 1024 for payload in payloads]
        bars.barh([rank + offset for rank in range(len(results))], kib, height=0.4, label=name)
    bars.set(xlabel="KiB sent (NVLink and network)", ylabel="rank", title="Bytes by payload")
    bars.set_yticks(range(len(results)))
    bars.invert_yaxis()  # same order of ranks as in the other panel
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=120)
    return None
