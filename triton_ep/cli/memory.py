"""Compute the symmetric memory of an exchange on every GPU, buffer by buffer, and the heap size that it needs.
Starts no ranks, needs no GPU and allocates nothing."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from triton_ep.bench.settings import MODELS
from triton_ep.errors import ConfigError
from triton_ep.runtime.environment import as_integer, parse_bytes

if TYPE_CHECKING:  # these modules need torch, and the command line must start without it
    from triton_ep.config import EPConfig
    from triton_ep.context.layout import Sizes

MOE_LAYERS = {"deepseek-v3": 58, "qwen3-235b": 94, "mixtral": 32, "gpt-oss": 36}
"""Number of MoE layers of each model."""
HEAP_STEP = 2**28
"""Suggested heap sizes are multiples of this many bytes, the step in which a GPU heap grows."""
_LOW_LATENCY_TOKENS = 128


@dataclass(frozen=True)
class Report:
    """Symmetric memory of one exchange on each rank, in bytes.

    Attributes:
        buffers: bytes of each buffer, largest first; without empty buffers and those that lie in other buffers' memory.
        total: bytes of all buffers at the start.
        most: bytes after all growth, when every token goes to this rank's experts; equal to `total` in static mode.
        heap_bytes: value to pass to `initialize_distributed` for one exchange.
        heap: bytes of the heap given by --heap.
        fit: number of exchanges of `total` bytes that fit into `heap`.
        layers: number of MoE layers of the model. They share one exchange.
    """

    buffers: dict[str, int]
    total: int
    most: int
    heap_bytes: int
    heap: int
    fit: int
    layers: int


EXAMPLES = (
    "triton-ep memory --model deepseek-v3 --ranks 64",
    "triton-ep memory --model mixtral --ranks 8 --capacity 1.5x --payload mxfp8 --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `triton-ep memory`."""
    parser.add_argument(
        "--model", choices=MODELS, default="deepseek-v3", help="sizes of the layer (default: %(default)s)"
    )
    parser.add_argument("--ranks", type=int, default=8, metavar="N", help="GPUs of the group (default: %(default)s)")
    parser.add_argument("--local-world-size", type=int, metavar="N", help="GPUs per node (default: 8, or all if fewer)")
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="max_tokens: most tokens per GPU and call (default: 4096)"
    )
    parser.add_argument(
        "--capacity", default="exact", metavar="ROWS", help="exact, worst, a number of rows, or 1.5x the mean load"
    )
    parser.add_argument("--payload", choices=("bf16", "mxfp8"), default="bf16", help="rows on the wire in dispatch")
    parser.add_argument("--alignment", type=int, default=128, metavar="N", help="in rows (default: %(default)s)")
    parser.add_argument("--enable-local-combine", action="store_true", help="sum rows on the experts' rank first")
    parser.add_argument(
        "--shared-staging", action="store_true", help="as in exchanges of triton_ep.nn; needs --enable-local-combine"
    )
    parser.add_argument("--copy-engines", action="store_true", help="copy engines send the rows; one node")
    parser.add_argument(
        "--low-latency", action="store_true", help="an exchange for decoding; --tokens is 128 by default"
    )
    parser.add_argument(
        "--heap", default="4G", metavar="SIZE", help="count the exchanges that fit this heap (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Compute and print the report."""
    config = config_of(arguments)
    report = report_of(config, MOE_LAYERS[arguments.model], parse_bytes("--heap", arguments.heap))
    print(json.dumps(asdict(report), indent=2) if arguments.json else page(arguments.model, config, report))
    return 0


def config_of(arguments: argparse.Namespace) -> EPConfig:
    """Configuration of the layer that the options describe.

    Raises:
        ConfigError: sizes that no layer can have.
    """
    from triton_ep.config import EPConfig

    model = MODELS[arguments.model]
    ranks = as_integer("--ranks", arguments.ranks)
    default = _LOW_LATENCY_TOKENS if arguments.low_latency else 4096
    tokens = default if arguments.tokens is None else as_integer("--tokens", arguments.tokens)
    per_node = min(ranks, 8) if arguments.local_world_size is None else arguments.local_world_size
    experts = model["experts"] // ranks
    most = ranks * tokens * min(model["topk"], max(experts, 1)) + experts * (arguments.alignment - 1)
    return EPConfig(
        max_tokens=tokens,
        hidden=model["hidden"],
        topk=model["topk"],
        num_experts=model["experts"],
        rank=0,
        world_size=ranks,
        local_world_size=as_integer("--local-world-size", per_node),
        alignment=arguments.alignment,
        recv_capacity=_capacity(arguments.capacity, tokens * model["topk"], most, arguments.low_latency),
        payload=None if arguments.payload == "bf16" else arguments.payload,
        enable_local_combine=arguments.enable_local_combine,
        shared_staging=arguments.shared_staging,
        copy_engines=arguments.copy_engines,
        low_latency=arguments.low_latency,
    )


def _capacity(text: str, mean: int, most: int, low_latency: bool) -> int | None:
    """Capacity in rows: None for "exact", the most that can arrive for "worst", 1.5 times the mean load for "1.5x"."""
    if text == "exact":
        return most if low_latency else None
    if text == "worst":
        return most
    try:
        return min(int(float(text[:-1]) * mean), most) if text.endswith("x") else int(text)
    except (ValueError, OverflowError):
        raise ConfigError(
            f"--capacity {text!r} is none of: exact, worst, a number of rows, a multiple such as 1.5x."
        ) from None


def report_of(config: EPConfig, layers: int, heap: int) -> Report:
    """Bytes of the buffers of one exchange of this configuration."""
    from triton_ep.context import layout

    sizes = layout.initial_sizes(config)
    total = layout.estimate_bytes(sizes)
    largest = [max(classes, key=partial(layout.class_bytes, sizes)) for classes in layout.blocks(config).values()]
    buffers = {buffer.name: buffer.nbytes(sizes) for grows in largest for buffer in layout.members(grows)}
    return Report(
        buffers=dict(sorted(((name, size) for name, size in buffers.items() if size), key=lambda item: -item[1])),
        total=total,
        most=layout.estimate_bytes(_grown(config, sizes)),
        heap_bytes=-(-total // HEAP_STEP) * HEAP_STEP,
        heap=heap,
        fit=heap // total,
        layers=layers,
    )


def _grown(config: EPConfig, sizes: Sizes) -> Sizes:
    """Sizes of an exact exchange after every token of every rank has gone to this rank's experts."""
    if config.recv_capacity is not None:
        return sizes
    from triton_ep.context.layout import sizes_of

    arrivals = config.world_size * config.max_tokens
    rows = arrivals * min(config.topk, config.num_experts_per_rank)
    rows += config.num_experts_per_rank * (config.alignment - 1)
    return sizes_of(config, arrivals, rows)


def page(model: str, config: EPConfig, report: Report) -> str:
    """The report as text."""
    mode = "exact" if config.recv_capacity is None else f"capacity {config.recv_capacity} rows"
    if config.low_latency:
        mode = "low latency"
    large = {name: size for name, size in report.buffers.items() if size >= report.total // 200}
    experts = f"top-{config.topk} of {config.num_experts} experts"
    lines = [
        f"{model}: {config.world_size} GPUs, {config.local_world_size} per node, {config.max_tokens} tokens per GPU, "
        f"hidden {config.hidden}, {experts}, {config.payload or 'bf16'}, {mode}",
        "",
        f"{'buffer':24}{'per GPU':>12}",
        *(f"{name:24}{human(size):>12}" for name, size in large.items()),
        f"{'flags and tables':24}{human(report.total - sum(large.values())):>12}",
        f"{'one exchange':24}{human(report.total):>12}",
        "",
    ]
    if report.most > report.total:
        lines.append(
            f"It grows as rows arrive, at most to {human(report.most)} (all tokens to the experts of one GPU)."
        )
    lines += [
        f"One exchange serves all {report.layers} MoE layers of the model; one per layer would take "
        f"{human(report.layers * report.total)}.",
        f"A heap of {human(report.heap)} holds {report.fit} such exchange{'s' * (report.fit != 1)}.",
        f"For one: initialize_distributed(heap_bytes={report.heap_bytes}), or "
        f"TRITON_EP_HEAP_SIZE={report.heap_bytes // 2**20}M.",
    ]
    return "\n".join(lines)


def human(nbytes: int) -> str:
    """Bytes with a unit, such as "1.31 GiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"
