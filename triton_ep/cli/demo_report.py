"""What `triton-ep demo` shows: rows on each kind of link, the table, the routing picture."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Rows that dispatch moves for, and through, one rank.

    Attributes:
        copies: (token, k) entries of this rank whose expert lives on another rank; each would cross a link
            if nothing were de-duplicated.
        sent: rows that leave this rank for its own tokens: one per other rank of its node and per other
            node.
        forwarded: rows of other nodes' tokens that this rank hands on inside its node.
        nvlink: rows this rank stores to ranks of its node, forwarded ones included.
        network: rows this rank sends to other nodes.
    """

    copies: int
    sent: int
    forwarded: int
    nvlink: int
    network: int


def count_traffic(topk_idx: Sequence[torch.Tensor], num_experts: int, ranks_per_node: int) -> list[Traffic]:
    """Count the rows of one dispatch from the routing alone.

    Args:
        topk_idx: per rank [T, K] expert ids; -1 or num_experts = dropped.
        num_experts: over all ranks.
        ranks_per_node: consecutive ranks that share a node.

    Returns:
        One entry per rank. A token crosses the network once per destination node, to the rank with the
        sender's local rank there, and NVLink once per destination rank.
    """
    world_size = len(topk_idx)
    experts_per_rank = num_experts // world_size
    copies, network = [0] * world_size, [0] * world_size
    local, forwarded = [0] * world_size, [0] * world_size
    for source, idx in enumerate(topk_idx):
        ids = idx.long()
        owner = torch.where((ids >= 0) & (ids < num_experts), ids // experts_per_rank, -1)
        copies[source] = int(((owner >= 0) & (owner != source)).sum())
        for node in range(world_size // ranks_per_node):
            first = node * ranks_per_node
            reached = torch.stack(
                [(owner == r).any(1) for r in range(first, first + ranks_per_node)]
            )  # [LW, T]
            if source // ranks_per_node == node:
                local[source] = int(reached.sum() - reached[source - first].sum())
            else:
                gateway = source % ranks_per_node
                network[source] += int(reached.any(0).sum())
                forwarded[first + gateway] += int(reached.sum() - reached[gateway].sum())
    return [
        Traffic(copies=c, sent=n + w, forwarded=f, nvlink=n + f, network=w)
        for c, n, f, w in zip(copies, local, forwarded, network, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """What one rank measured and made; tensors are on the CPU.

    Attributes:
        topk_idx: [T, K] int32, where its tokens went.
        received: rows its experts got, by `layout_desc.num_recv_tokens_per_expert`.
        combined: [T, H] bfloat16, the layer's result.
    """

    topk_idx: torch.Tensor
    received: int
    combined: torch.Tensor


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


def table(
    results: Sequence[RankResult],
    comparisons: Sequence[Comparison],
    traffic: Sequence[Traffic],
    ranks_per_node: int,
    row_bytes: int,
) -> str:
    """The table for people: one line per rank, totals, verdict."""
    header = ("rank", "node", "tokens", "copies", "sent", "saved", "received", "NVLink KiB", "network KiB")
    lines = []
    for rank, (result, count) in enumerate(zip(results, traffic, strict=True)):
        numbers: list[float] = [len(result.topk_idx), count.copies, count.sent, count.copies - count.sent]
        numbers += [result.received, count.nvlink * row_bytes / 1024, count.network * row_bytes / 1024]
        lines.append([rank, rank // ranks_per_node, *numbers])
    totals = ["all", "", *(sum(line[i] for line in lines) for i in range(2, len(header)))]
    errors = [(f"{c.max_abs:.2e}", f"{c.max_rel:.2e}") for c in comparisons]
    errors.append(
        (f"{max(c.max_abs for c in comparisons):.2e}", f"{max(c.max_rel for c in comparisons):.2e}")
    )
    cells = [[*header, "max abs err", "max rel err"]]
    for line, error in zip([*lines, totals], errors, strict=True):
        cells.append([f"{v:.1f}" if isinstance(v, float) else str(v) for v in line] + list(error))
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    rule = "-" * len(text[0])
    text = [text[0], rule, *text[1:-1], rule, text[-1]]
    verdict = "PASS" if all(c.passed for c in comparisons) else "FAIL"
    notes = [
        "",
        "copies    (token, expert) pairs whose expert lives on another rank",
        "sent      rows that leave for them: one per rank of the own node, one per other node",
        "saved     rows that de-duplicated away",
        "received  rows that arrived at this rank's experts, the own ones among them",
        "NVLink    bytes to ranks of the own node, rows handed on from the network included; dispatch only",
        "rel err   against the sum over k of |weight * expert output|",
        "",
        f"{verdict}: the largest relative error is {errors[-1][1]}, bfloat16 rounding explains "
        f"{comparisons[0].limit:.2e}",
    ]
    return "\n".join(text + notes)


def draw_routing(path: str, topk_idx: Sequence[torch.Tensor], num_experts: int) -> str | None:
    """Draw how many tokens each rank sends to each expert.

    Returns:
        None when the picture was written to `path`, otherwise why not.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is not installed (pip install matplotlib)"
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
